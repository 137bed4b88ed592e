"""Takes public measurement tables into the package: the one-off step behind ``tables/``.

In: ``runs.csv`` and ``ops.parquet`` of the shared measurement schema. Out, in a directory: ``runs.parquet`` and
``ops.parquet`` in the project's schema (columns below, source, licence and derivation on every row), a card and
Croissant metadata. Figures computed from the measured time (TFLOP/s, MFU, tokens/s) are left behind; of the remarks on
it only the flags are kept.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dataset_builder.corpus.card import croissant, tables_card
from dataset_builder.corpus.measurements import read_table
from dataset_builder.corpus.trust import label_flags
from dataset_builder.job.errors import JobError

RUN_COLUMNS = (
    "run_id", "source_id", "source", "source_date", "license", "framework", "framework_version", "gpu", "num_gpus",
    "gpus_per_node", "intra_node", "inter_node", "model_name", "arch", "layers", "hidden", "ffn_hidden", "heads",
    "kv_heads", "head_dim", "vocab", "seq_len", "num_experts", "top_k", "gated_mlp", "tied_embeddings", "tp", "pp",
    "dp", "cp", "ep", "vpp", "sequence_parallel", "sharding", "micro_batch", "global_batch", "grad_accum",
    "precision", "precision_detail", "act_ckpt", "attention", "compile", "optimizer", "iter_time_s", "peak_mem_gb",
    "measured_field", "derivation", "notes", "job_group", "label_flags",
)  # fmt: skip
OP_COLUMNS = (
    "op_id", "source_id", "source", "license", "gpu", "op", "op_detail", "direction", "dtype", "dtype_out", "b", "m",
    "n", "k", "shape", "bytes", "num_gpus", "gpus_per_node", "intra_node", "inter_node", "latency_us", "stat",
    "derivation", "notes",
)  # fmt: skip
_REAL = ("iter_time_s", "peak_mem_gb", "latency_us", "bytes")
_UNIQUE_TEXT = ("run_id", "op_id")


def import_tables(runs: str | Path, ops: str | Path, output: str | Path) -> None:
    """Writes both tables, their card and metadata into ``output``; raises JobError for missing columns."""
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    tables = {"runs": read_table(runs), "ops": read_table(ops)}
    if "derivation" not in tables["ops"].columns:
        tables["ops"]["derivation"] = _derivation(tables["ops"])
    if "label_info" in tables["runs"].columns:
        tables["runs"]["label_flags"] = tables["runs"]["label_info"].fillna("").astype(str).map(label_flags)
    for (name, table), columns in zip(tables.items(), (RUN_COLUMNS, OP_COLUMNS), strict=True):
        missing = [column for column in columns if column not in table.columns]
        if missing:
            raise JobError([f"column {column!r} is missing" for column in missing], source=f"{name} table")
        ordered = table[list(columns)].sort_values(columns[0], kind="stable").reset_index(drop=True)
        scratch = output / f".{name}.parquet"
        pq.write_table(_compact(ordered), scratch, compression="zstd", compression_level=15)
        scratch.replace(output / f"{name}.parquet")
        tables[name] = ordered
    (output / "README.md").write_text(tables_card(tables["runs"], tables["ops"]), encoding="utf-8")
    (output / "croissant.json").write_text(json.dumps(croissant(output, "tables"), indent=2) + "\n", encoding="utf-8")


def _derivation(ops: pd.DataFrame) -> pd.Series[str]:
    """How ``latency_us`` follows from what the source reports."""
    notes, stat = ops["notes"].fillna(""), ops["stat"].fillna("value")
    derived = notes.str.contains("latency derived", regex=False)
    return ("reported time, " + stat.astype(str)).mask(derived, "operation count or bytes / reported rate")


def _compact(table: pd.DataFrame) -> pa.Table:
    """Whole numbers as integers, repeated text as dictionaries."""
    arrays = []
    for name in table.columns:
        values = table[name]
        if values.dtype.kind in "fib":
            whole = name not in _REAL and (values.dropna() == values.dropna().round()).all()
            arrays.append(pa.array(values.astype("Int64" if whole else "float64"), from_pandas=True))
        elif name in _UNIQUE_TEXT:
            arrays.append(pa.array(values.astype(str)))
        else:
            text = [None if blank else str(value) for value, blank in zip(values, values.isna(), strict=True)]
            arrays.append(pa.array(text, type=pa.string()).dictionary_encode())
    return pa.Table.from_arrays(arrays, names=list(table.columns))
