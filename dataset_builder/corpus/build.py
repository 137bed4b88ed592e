"""The training corpus: measurement tables joined with the graphs of their jobs, written as one directory and read back.

Directory: ``runs.parquet`` (a measured run a row, its resolved job as JSON and the number of its graph),
``graphs.parquet nodes.parquet edges.parquet repeats.parquet stages.parquet`` (the graphs, each distinct one once),
``ops.parquet`` (a measured operator a row, as a graph node), ``splits.json`` (protocols P1 to P6),
``skipped.csv`` (every row that was left out, with its reason; runs first), ``corpus.json`` (content hash, counts,
versions), ``README.md`` (card) and ``croissant.json``. Equal tables and an equal tracer give an equal content hash.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataset_builder.corpus import splits, storage
from dataset_builder.corpus.card import corpus_card, croissant
from dataset_builder.corpus.measurements import OpMeasurement, RunMeasurement, read_ops, read_runs, shipped_table
from dataset_builder.job.errors import JobError
from dataset_builder.job.hardware import DeviceSpec, cell_device
from dataset_builder.job.schema import attention_kernel, has_fused_kernels
from dataset_builder.tracing.graph import TrainingGraph
from dataset_builder.tracing.trace import build_graph

FORMAT_VERSION = 3
# Of each table: what is read at a time by those who do not read it whole.
ROW_GROUPS = {"runs": 1024, "graphs": 2**14, "nodes": 2**14, "edges": 2**15, "repeats": 2**15, "stages": 2**12,
               "ops": 2**15}  # fmt: skip
TABLES = ("runs", "graphs", "nodes", "edges", "repeats", "stages", "ops")


@dataclass(frozen=True)
class Corpus:
    """A corpus directory, read lazily."""

    path: Path
    facts: Mapping[str, Any]  # corpus.json

    @property
    def content_hash(self) -> str:
        """SHA-256 over everything that training sees, as hexadecimal digits."""
        return str(self.facts["content_hash"])

    @cached_property
    def runs(self) -> list[RunMeasurement]:
        """The runs, each with its resolved job: 30 kB each, see :meth:`stored_runs`."""
        return list(self.stored_runs())

    def stored_runs(self) -> storage.StoredRuns:
        """The runs, each read when it is asked for."""
        return storage.StoredRuns(self._table("runs"))

    @cached_property
    def operators(self) -> list[OpMeasurement]:
        """The measured operators: 1 kB each, see :meth:`operators_at`."""
        return self.operators_at(np.arange(self.facts["num_operators"]))

    def operators_at(self, rows: NDArray[np.int64]) -> list[OpMeasurement]:
        """The operators at these rows, which ascend; no others are built."""
        chosen: list[OpMeasurement] = []
        devices: dict[str, DeviceSpec] = {}
        start = 0
        for batch in pq.ParquetFile(self.path / "ops.parquet").iter_batches(ROW_GROUPS["ops"]):
            first, last = np.searchsorted(rows, [start, start + batch.num_rows])
            table = pa.Table.from_batches([batch]).take(rows[first:last] - start)
            names = set(table["gpu"].unique().to_pylist()) - set(devices)
            devices |= {name: cell_device(name) for name in names}
            chosen += storage.stored_operators(table, devices)
            start += batch.num_rows
        return chosen

    def operator_columns(self, names: Sequence[str]) -> pd.DataFrame:
        """These columns of all operators."""
        return pd.read_parquet(self.path / "ops.parquet", columns=list(names))

    def graph(self, run_id: str) -> TrainingGraph:
        """The graph of a run; raises KeyError when there is no such run."""
        return self._graphs[self._graph_of[run_id]]

    @cached_property
    def _graphs(self) -> storage.StoredGraphs:
        return storage.StoredGraphs(self.path)

    @cached_property
    def _graph_of(self) -> dict[str, int]:
        table = pq.read_table(self.path / "runs.parquet", columns=["run_id", "graph"])
        return dict(zip(table["run_id"].to_pylist(), table["graph"].to_pylist(), strict=True))

    def _table(self, name: str) -> pa.Table:
        return pq.read_table(self.path / f"{name}.parquet")


def load_corpus(path: str | Path) -> Corpus:
    """Opens a corpus directory; raises JobError when it is none, or one of another format."""
    path = Path(path)
    try:
        facts = json.loads((path / "corpus.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError([f"not a corpus ({error}); python -m dataset_builder.build writes one"], str(path)) from None
    if facts.get("format_version") != FORMAT_VERSION:
        raise JobError([f"corpus format {facts.get('format_version')}, this version reads {FORMAT_VERSION}"], str(path))
    return Corpus(path, facts)


def build_corpus(
    output: str | Path, runs: str | Path | None = None, ops: str | Path | None = None, folds: int = 5, seed: int = 0
) -> Corpus:
    """Builds the corpus of two tables (the shipped ones by default) into ``output``, replacing what is there.

    The directory appears complete or not at all. Progress goes to stderr.
    """
    output = Path(output)
    _check_replaceable(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    runs, ops = runs or shipped_table("runs.parquet"), ops or shipped_table("ops.parquet")
    hashes = {"runs": _file_hash(runs), "ops": _file_hash(ops)}
    measured = read_runs(runs)
    skipped = [("runs", run.run_id, run.reason) for run in measured if run.job is None]
    skipped += [
        ("runs", run.run_id, "iter_time_s: no time to learn") for run in measured if run.job and not run.is_timed
    ]
    kept, graph_of, graphs = _trace([run for run in measured if run.job and run.is_timed], skipped)
    _say(f"{len(kept)} of {len(measured)} runs have a graph ({len(graphs)} distinct), {_since(started)}")
    operators, reasons = read_ops(ops)
    skipped += [("ops", *reason.split(": ", 1)) for reason in reasons]  # type: ignore[misc]
    _say(f"{len(operators)} of {len(operators) + len(reasons)} operators, {_since(started)}")
    tables = {
        "runs": storage.run_table(kept, graph_of),
        **storage.graph_tables(graphs),
        "ops": storage.op_table(operators),
    }
    digest = content_hash(tables)
    facts = {
        "format_version": FORMAT_VERSION,
        "content_hash": digest,
        "tables": hashes,
        "tracer_version": graphs[0].tracer_version if graphs else "",
        "num_runs": len(kept),
        "num_rows": len(measured),
        "num_graphs": len(graphs),
        "num_operators": len(operators),
        "num_operator_rows": len(operators) + len(reasons),
        "skipped": dict(sorted(Counter(_kind(reason) for _, _, reason in skipped).items())),
    }
    _write(output, tables, facts, skipped, split_definitions(kept, folds, seed))
    left_out = Counter(table for table, _, _ in skipped)
    _say(f"left out, with reasons: {left_out['runs']} runs, then {left_out['ops']} operators, in {output}/skipped.csv")
    _say(f"{output}: content {digest[:12]}, {_since(started)}")
    return load_corpus(output)


def open_corpus(path: str | Path, runs: str | Path | None = None, ops: str | Path | None = None) -> Corpus:
    """The corpus at ``path``, built there first when there is none, or one of other tables than those given."""
    if (Path(path) / "corpus.json").exists():
        corpus = load_corpus(path)
        given = {name: _file_hash(table) for name, table in (("runs", runs), ("ops", ops)) if table is not None}
        if corpus.facts.get("tables", {}) | given == corpus.facts.get("tables", {}):
            return corpus
    return build_corpus(path, runs, ops)


def _file_hash(table: str | Path) -> str:
    """SHA-256 of a table's file, as hexadecimal digits; JobError when there is none."""
    try:
        with open(table, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise JobError([f"cannot be read as a table: {error.strerror}"], source=str(table)) from None


def _trace(
    runs: Sequence[RunMeasurement], skipped: list[tuple[str, str, str]]
) -> tuple[list[RunMeasurement], list[int], list[TrainingGraph]]:
    """The runs whose job has a graph, the number of each one's graph, and the distinct graphs."""
    kept, graph_of = [], []
    graphs: list[TrainingGraph] = []
    number_of: dict[str, int] = {}
    for index, run in enumerate(runs):
        assert run.job is not None
        key = run.job.model_dump_json(exclude={"name", "software"})  # of the software, only the kernels are traced
        key += str((attention_kernel(run.job), has_fused_kernels(run.job)))
        if key not in number_of:
            try:
                graphs.append(build_graph(run.job))
            except JobError as error:
                skipped.append(("runs", run.run_id, "; ".join(error.reasons)))
                continue
            number_of[key] = len(graphs) - 1
        kept.append(run)
        graph_of.append(number_of[key])
        if (index + 1) % 500 == 0:
            _say(f"{index + 1} of {len(runs)} runs traced")
    return kept, graph_of, graphs


def content_hash(tables: Mapping[str, pa.Table]) -> str:
    """SHA-256 over the values of the tables: the same whatever the file format's version or compression."""
    digest = hashlib.sha256()
    for name in sorted(tables):
        for column in tables[name].column_names:
            values = tables[name][column].combine_chunks()
            if pa.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            digest.update(f"{name}.{column}:{len(values)};".encode())
            digest.update(pd.util.hash_array(_hashable(values)).tobytes())
    return digest.hexdigest()


def _hashable(values: Any) -> Any:
    if pa.types.is_floating(values.type) or pa.types.is_integer(values.type):
        return values.to_numpy(zero_copy_only=False)
    return pd.Series([str(value) for value in values.to_pylist()], dtype=object).to_numpy()


def split_definitions(runs: Sequence[RunMeasurement], folds: int, seed: int) -> dict[str, Any]:
    """Protocols P1 to P6 over the rows of ``runs.parquet``, by row number; ``P1`` also as the fold of each row."""
    each = [
        *splits.unseen_jobs(runs, folds, seed), *splits.unseen_precision(runs),
        *splits.unseen_precision(runs, hide_operators=True), *splits.unseen_gpu(runs), *splits.unseen_source(runs),
    ]  # fmt: skip
    return {
        "fold": [splits.fold_of(run.job_group, folds, seed) for run in runs],
        "splits": [{"name": s.name, "test": s.test, "hidden_op_dtypes": s.hidden_op_dtypes} | _training(s, len(runs))
                   for s in each],
        "P6": splits.precision_pairs(runs, [pair_key(run) for run in runs]),
    }  # fmt: skip


def _training(split: splits.Split, count: int) -> dict[str, Any]:
    """Which rows are learnt from: all that are not tested, but for those named."""
    rest = set(range(count)) - set(split.test) - set(split.train)
    return {"neither": sorted(rest)}


def pair_key(run: RunMeasurement) -> str:
    """Everything about a run but its precision: equal for the two rows of a precision pair."""
    assert run.job is not None
    job = run.job.model_dump_json(exclude={"precision", "name"})
    return hashlib.sha256(f"{run.source_id}:{job}".encode()).hexdigest()


def _check_replaceable(output: Path) -> None:
    if output.exists() and any(output.iterdir()) and not (output / "corpus.json").exists():
        raise JobError(["exists and is no corpus; choose another output"], str(output))


def _write(
    output: Path,
    tables: Mapping[str, pa.Table],
    facts: Mapping[str, Any],
    skipped: Sequence[tuple[str, str, str]],
    definitions: Mapping[str, Any],
) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        for name, table in tables.items():
            pq.write_table(table, scratch / f"{name}.parquet", ROW_GROUPS[name], compression="zstd")
        pd.DataFrame(skipped, columns=["table", "id", "reason"]).to_csv(scratch / "skipped.csv", index=False)
        (scratch / "splits.json").write_text(json.dumps(definitions), encoding="utf-8")
        (scratch / "README.md").write_text(corpus_card(tables, facts), encoding="utf-8")
        (scratch / "corpus.json").write_text(json.dumps(dict(facts), indent=2), encoding="utf-8")
        (scratch / "croissant.json").write_text(json.dumps(croissant(scratch, "corpus"), indent=2), encoding="utf-8")
        scratch.chmod(0o755)
        if output.exists():
            shutil.rmtree(output)
        scratch.rename(output)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _kind(reason: str) -> str:
    """A reason without the numbers of its row, for counting."""
    return "".join("#" if character.isdigit() else character for character in reason)[:120]


def _since(started: float) -> str:
    return f"{time.monotonic() - started:.0f} s"


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
