"""What a person should know before using the measurements: cards (Markdown) and Croissant 1.0 metadata (JSON-LD)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

_RUN_COLUMNS = """
| column | unit | meaning |
|---|---|---|
| run_id, source_id, source, source_date, license | | identity, where and when published, licence |
| framework, framework_version | | as the source names them |
| gpu, num_gpus, gpus_per_node, intra_node, inter_node | | hardware; inter_node mostly inferred |
| model_name, arch | | the source's name; gpt, llama, mpt, moe, bert, electra, t5, bart, ... |
| layers, hidden, ffn_hidden, heads, kv_heads, head_dim, vocab | | sizes; blank where the source does not say |
| seq_len | tokens | sequence length |
| num_experts, top_k, gated_mlp, tied_embeddings | | mixture of experts; 1 or 0 |
| tp, pp, dp, cp, ep, vpp, sequence_parallel, sharding | | sizes of the parallel axes |
| micro_batch, global_batch, grad_accum | sequences | batch |
| precision, precision_detail | | fp32, tf32, fp16_mixed, bf16, bf16_mixed, fp8_mixed, mxfp8, nvfp4; in words |
| act_ckpt, attention, compile, optimizer | | software choices; blank if unknown |
| **iter_time_s** | s | the label: one optimizer step |
| peak_mem_gb | 1e9 bytes | peak memory of one rank where reported |
| measured_field, derivation | | what the source reported and how iter_time_s follows from it; never a feature |
| notes | | free text and key=value pairs: assumptions, kernel and overlap flags |
| job_group | | rows of one job share it: never split a group between training and test |
| label_flags | | remarks on the measured time itself: why it may not be learnt from; never a feature |
"""
_OP_COLUMNS = """
| column | unit | meaning |
|---|---|---|
| op_id, source_id, source, license | | identity, where published, licence |
| gpu, num_gpus, gpus_per_node, intra_node, inter_node | | hardware; the last four for collectives |
| op, op_detail, direction | | operator, the source's own name for it (backend, kernel), fwd, bwd, fwd_bwd or none |
| dtype, dtype_out | | input and output format |
| b, m, n, k | | sizes of a matrix product [b, m, k] x [b, k, n]; a backward row has the forward's |
| shape | | other sizes, key=value |
| bytes | bytes | message of a collective; each source's convention is in notes |
| **latency_us** | us | the label |
| stat, derivation | | mean, median, best; how latency_us follows from what was reported |
| notes | | versions, conventions, cautions |
"""
_CAUTIONS = """
- vtrain: precision, vocabulary and recompute are assumed; small models on the single-node part.
- nvidia-dle: the batch often differs between precisions; sequence-binned BERT rows of 512 positions are
  built with half of them, as Wikipedia's samples have (arXiv 2107.02027); pre-training rows count accumulation in the
  global batch.
- megatron-golden: mostly launch-bound tiny models in deterministic mode; the attention kernel is often unknown; repeats
  spread 6% between software stacks, 1% within one; single-node reruns of multi-stage tests have an inferred world size.
- mlperf: layout or precision is ambiguous in part (see notes); Llama2-70B LoRA has frozen base weights. BERT runs
  NVIDIA's code: unpadded samples of about half the sequence length, two of them packed into one and fp8 linears in
  CUDA graphs on Hopper and later (its configurations: PACKING_FACTOR=2, --use_transformer_engine2), which the table
  calls fp16. The jobs are built so.
- megatron-bridge, nemo-docs, megatron-moe-zoo: vendor tables, some rates rounded; rows whose time was derived from
  TFLOP/s depend on a FLOP convention; long-context rows of nemo-docs are uncertain.
- lambda-bench: several machines per GPU; licence not stated by the source (figures are facts, cited with attribution).
- bigscience, internevo: 4 x 100 Gb/s networks.
- megatron-lm, nemo-launcher: TFLOP/s of 2020-22 are hardware FLOPs including recompute.
- neusight: fp32 forward and backward, no optimizer step. jax-toolbox: rematerialisation policy not given.
- Noise: the same job repeated differs by 1.4% median when not launch-bound, 6% across software stacks and clusters.
- aiconfigurator: CUDA graphs, L2-cold weights; fp8 and nvfp4 rows include quantising the activation unless static.
- estimate-train-time: kernel time from a profiler; rope, RMS norm, masking and cross-entropy are eager chains of
  kernels; optimizer rows time the host's call.
- cudnn-frontend, published-tables: vendor figures, an upper envelope. deepbench, neusight: launch included.
- No bf16 or fp8 product backward on Hopper or later; few collectives across nodes; nothing overlapped.
"""


def tables_card(runs: pd.DataFrame, ops: pd.DataFrame) -> str:
    """The card of the shipped tables."""
    return f"""# Measured training runs and operators

{len(runs):,} measured training runs (`runs.parquet`) and {len(ops):,} measured operators and collectives
(`ops.parquet`), collected from public sources. Every row names its source and licence, and how its time was derived.
Only figures were taken, no text or code.

## runs.parquet
{_RUN_COLUMNS}
{_sources(runs)}

## ops.parquet
{_OP_COLUMNS}
{_sources(ops)}

## Cautions
{_CAUTIONS}
## Use

`python -m dataset_builder.build` joins the runs with their training graphs. The tables were written by
`python -m dataset_builder.build import_runs=RUNS.csv import_ops=OPS.parquet`.
"""


def _sources(table: pd.DataFrame) -> str:
    lines = ["| source | rows | licence | first reference |", "|---|---:|---|---|"]
    for source, rows in table.groupby("source_id"):
        licences = ", ".join(sorted(str(licence) for licence in rows["license"].dropna().unique()))
        reference = str(rows["source"].iloc[0]).replace("|", "/")
        lines.append(f"| {source} | {len(rows):,} | {licences} | {reference[:110]} |")
    return "\n".join(lines)


def corpus_card(tables: Mapping[str, pa.Table], facts: Mapping[str, Any]) -> str:
    """The card of a built corpus."""
    runs = tables["runs"].select(["source_id", "precision"]).to_pandas()
    counts = pd.crosstab(runs["source_id"].astype(str), runs["precision"].astype(str))
    header = ["| source | " + " | ".join(counts.columns) + " |", "|---|" + "---:|" * len(counts.columns)]
    lines = [f"| {source} | " + " | ".join(map(str, row)) + " |" for source, row in zip(counts.index, counts.values,
                                                                                       strict=True)]  # fmt: skip
    skipped = [f"| {count:,} | {reason.replace('|', '/')} |" for reason, count in facts["skipped"].items()]
    return "\n".join(
        [
            "# Training corpus",
            "",
            f"{facts['num_runs']:,} of {facts['num_rows']:,} measured runs with their training graphs "
            f"({facts['num_graphs']:,} distinct, {tables['nodes'].num_rows:,} nodes) and {facts['num_operators']:,} of "
            f"{facts['num_operator_rows']:,} measured operators. Content `{facts['content_hash']}`.",
            "",
            "Labels: `iter_time_s` (seconds per optimizer step), `latency_s` (seconds per operator), `peak_mem_gb` "
            "(1e9 bytes). Splits (`splits.json`) keep every `job_group` and `op_group` whole.",
            "",
            "## Runs by source and precision",
            "",
            *header,
            *lines,
            "",
            "## Left out",
            "",
            "Every row is in `skipped.csv` with its own reason; counts by kind:",
            "",
            "| rows | reason |",
            "|---:|---|",
            *skipped,
            "",
        ]
    )


_CROISSANT_CONTEXT: dict[str, Any] = {
    "@language": "en", "@vocab": "https://schema.org/", "citeAs": "cr:citeAs", "column": "cr:column",
    "conformsTo": "dct:conformsTo", "cr": "http://mlcommons.org/croissant/", "rai": "http://mlcommons.org/croissant/RAI/",
    "equivalentProperty": "cr:equivalentProperty", "samplingRate": "cr:samplingRate",
    "data": {"@id": "cr:data", "@type": "@json"}, "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/", "examples": {"@id": "cr:examples", "@type": "@json"}, "extract": "cr:extract",
    "field": "cr:field", "fileProperty": "cr:fileProperty", "fileObject": "cr:fileObject", "fileSet": "cr:fileSet",
    "format": "cr:format", "includes": "cr:includes", "isLiveDataset": "cr:isLiveDataset", "jsonPath": "cr:jsonPath",
    "key": "cr:key", "md5": "cr:md5", "parentField": "cr:parentField", "path": "cr:path", "recordSet": "cr:recordSet",
    "references": "cr:references", "regex": "cr:regex", "repeated": "cr:repeated", "replace": "cr:replace",
    "sc": "https://schema.org/", "separator": "cr:separator", "source": "cr:source", "subField": "cr:subField",
    "transform": "cr:transform",
}  # fmt: skip


def croissant(directory: Path, name: str) -> dict[str, Any]:
    """Croissant 1.0 metadata of the parquet files in ``directory``: one record set a file, one field a column."""
    files = sorted(path for path in directory.glob("*.parquet") if not path.name.startswith("."))
    return {
        "@context": _CROISSANT_CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": f"training-time-{name}",
        "description": "Measured training iteration times and operator latencies with the jobs that produced them.",
        "license": "https://spdx.org/licenses/Apache-2.0",
        "version": "1.0.0",
        "datePublished": "2026-01-01",
        "citeAs": "Every row names its source and licence in the columns source and license.",
        "distribution": [_file_object(path) for path in files],
        "recordSet": [_record_set(path) for path in files],
    }


def _file_object(path: Path) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": path.name,
        "name": path.name,
        "contentUrl": path.name,
        "encodingFormat": "application/x-parquet",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def _record_set(path: Path) -> dict[str, Any]:
    schema = pq.read_schema(path)
    fields = []
    for column in schema:
        field = {
            "@type": "cr:Field",
            "@id": f"{path.stem}/{column.name}",
            "name": column.name,
            "dataType": _data_type(column.type),
            "source": {"fileObject": {"@id": path.name}, "extract": {"column": column.name}},
        }
        if pa.types.is_list(column.type):
            field["repeated"] = True
        fields.append(field)
    return {"@type": "cr:RecordSet", "@id": path.stem, "name": path.stem, "field": fields}


def _data_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        kind = kind.value_type
    if pa.types.is_boolean(kind):
        return "sc:Boolean"
    if pa.types.is_integer(kind):
        return "sc:Integer"
    return "sc:Float" if pa.types.is_floating(kind) else "sc:Text"
