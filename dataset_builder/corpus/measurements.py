"""Measurement tables as records: training runs with their jobs, operators with their graph nodes.

In: a runs table or an operator table (``.csv`` or ``.parquet``; columns in ``tables/README.md``). Out: frozen records
in seconds, bytes and FLOPs; whatever cannot be used comes back with its reason. Columns computed from the measured
time (``table_columns.LABEL_COLUMNS``) are removed before a row is read, so no job can depend on them.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow.parquet as pq

from dataset_builder.corpus.job_row import JOB_COLUMNS, RowError
from dataset_builder.corpus.operators import OperatorError, OperatorRow, operator_node
from dataset_builder.corpus.run_jobs import job_mapping
from dataset_builder.corpus.spellings import cell_text, precision_name
from dataset_builder.corpus.table_columns import LABEL_COLUMNS, LAYOUT_COLUMNS, missing_columns
from dataset_builder.corpus.trust import doubt
from dataset_builder.job.errors import JobError
from dataset_builder.job.hardware import DeviceSpec
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.graph import OpNode
from dataset_builder.tracing.layout import AxisGroup, rank_layout

MemoryMeter = Literal["allocator", "last_rank", "device"]
"""What a source's peak memory is: the allocator's peak (``torch.cuda.max_memory_allocated``) on the fullest rank or on
the last, or all that is taken on the fullest device (``nvidia-smi``)."""
_MEMORY_METERS: dict[str, MemoryMeter] = {"megatron-golden": "last_rank", "bigscience": "device"}
_UNMISTAKABLE = 3  # other separators in a header without a comma


@dataclass(frozen=True)
class RunMeasurement:
    """One measured training run. ``job`` is ``None`` when the row describes none, and ``reason`` says why.

    ``iter_time_s`` is NaN where the table has no time: such a row can be predicted, not learnt from (``is_timed``).
    """

    run_id: str
    source_id: str
    gpu: str
    precision: str
    architecture: str
    job_group: str
    iter_time_s: float
    peak_mem_gb: float | None
    job: TrainingJob | None
    reason: str
    assumed: tuple[str, ...]
    doubt: str = ""  # why its time is not learnt from (see trust)
    # What is said of a table to whoever wrote it; a corpus does not keep it.
    stated_time: str = field(default="", compare=False)  # the time's cell as it stands in the table
    blank: tuple[str, ...] = field(default=(), compare=False)  # columns of LAYOUT_COLUMNS that say nothing

    @property
    def is_timed(self) -> bool:
        """Whether the row has a label."""
        return math.isfinite(self.iter_time_s) and self.iter_time_s > 0

    @property
    def memory_meter(self) -> MemoryMeter:
        """What ``peak_mem_gb`` is, by its source; frameworks' logs give the allocator's peak."""
        return _MEMORY_METERS.get(self.source_id, "allocator")


@dataclass(frozen=True, slots=True)
class OpMeasurement:
    """One measured operator or collective: the node a graph would hold for it, and the seconds it took.

    ``includes_launch``: the time holds the host's launch; otherwise it is the kernel's alone (profiler, CUDA graph).
    ``library``: whose kernel it is, in its source's words and apart for every source and kind of node.
    """

    op_id: str
    source_id: str
    gpu: str
    node: OpNode
    device: DeviceSpec
    group: AxisGroup | None
    latency_s: float
    op_group: str
    includes_launch: bool = False
    library: str = ""


def shipped_table(name: str) -> Path:
    """The path of a table that comes with the package, ``runs.parquet`` or ``ops.parquet``."""
    return Path(str(resources.files("dataset_builder.corpus").joinpath("tables", name)))


def read_table(path: str | Path) -> pd.DataFrame:
    """A table by its suffix; raises JobError when it cannot be read."""
    path = Path(path)
    with _told_as_job_error(path):
        return pd.read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)


def runs_columns(path: str | Path) -> list[str]:
    """The columns of a runs table, without reading its rows; raises JobError when one is missing."""
    path = Path(path)
    with _told_as_job_error(path):
        names = pq.read_schema(path).names if path.suffix == ".parquet" else _read_csv(path, rows=0).columns
    return _checked_columns(names, path)


def header_exit_code(path: str | Path) -> int:
    """For commands that take seconds to import: prints what is wrong with a runs table's header; the exit code."""
    try:
        runs_columns(path)
    except JobError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


@contextlib.contextmanager
def _told_as_job_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise JobError([f"cannot be read as a table: {error}"], source=str(path)) from None


def _checked_columns(names: Iterable[Any], path: str | Path) -> list[str]:
    columns = [str(name) for name in names]
    if missing := missing_columns(columns):
        raise JobError(missing, source=str(path))
    return columns


def _read_csv(path: Path, rows: int | None = None) -> pd.DataFrame:
    """Commas, or what a spreadsheet writes in their place: tabs, or semicolons where the decimal mark is a comma."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = file.readline(1 << 20)
    marks = {mark: header.count(mark) for mark in (";", "\t")}
    separator = max(marks, key=marks.__getitem__)
    if "," in header or marks[separator] < _UNMISTAKABLE:
        separator = ","
    return pd.read_csv(
        path,
        sep=separator,
        decimal="," if separator == ";" else ".",
        encoding="utf-8-sig",
        nrows=rows,
        low_memory=False,
        dtype={"run_id": str, "job_group": str, "op_id": str},
    )


def read_runs(path: str | Path) -> list[RunMeasurement]:
    """Every row of a runs table, in order; raises JobError when columns that every job needs are missing."""
    table = read_table(path)
    columns = _checked_columns(table.columns, path)
    rows = (dict(zip(columns, row, strict=True)) for row in table.itertuples(index=False, name=None))
    return [_run(_without_label_columns(row), number, doubt(row)) for number, row in enumerate(rows)]


def _without_label_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    return {column: value for column, value in row.items() if column not in LABEL_COLUMNS}


def _run(row: Mapping[str, Any], number: int, doubtful: str) -> RunMeasurement:
    inputs = {column: row.get(column) for column in JOB_COLUMNS}
    job, reason, assumed = build_job(inputs)
    text = {key: _text(row.get(key)) for key in ("run_id", "source_id", "gpu", "precision", "arch", "job_group")}
    stated = precision_name(text["precision"]) or text["precision"] or "not stated"
    iter_time_s = _number(row.get("iter_time_s"))
    return RunMeasurement(
        run_id=text["run_id"] or f"row-{number}",
        source_id=text["source_id"] or "unknown",
        gpu=job.cluster.gpu.name if job else text["gpu"],
        precision=job.precision.label if job else stated,
        architecture=text["arch"] or "unknown",
        job_group=text["job_group"] or job_group(inputs),
        iter_time_s=iter_time_s if iter_time_s is not None else float("nan"),
        peak_mem_gb=_number(row.get("peak_mem_gb")),
        job=job,
        reason=reason,
        assumed=assumed,
        doubt=doubtful,
        stated_time=_text(row.get("iter_time_s")),
        blank=tuple(column for column in LAYOUT_COLUMNS if cell_text(row.get(column), column) is None),
    )


def build_job(inputs: Mapping[str, Any]) -> tuple[TrainingJob | None, str, tuple[str, ...]]:
    """The resolved job of a row's job columns, or the reason why there is none, and what was assumed."""
    try:
        mapping, assumed = job_mapping(inputs)
        job = TrainingJob.parse(mapping, source="row").resolved()
        rank_layout(job)
    except RowError as error:
        return None, str(error), ()
    except JobError as error:
        return None, "; ".join(error.reasons), ()
    assumed = (*assumed, *job.assumed)
    return job.model_copy(update={"assumed": assumed}), "", assumed


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Half a million small records make the garbage collector scan them again and again: twice the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def job_group(inputs: Mapping[str, Any]) -> str:
    """Rows of one model, batch and layout share this hash: for tables that bring no ``job_group`` of their own."""
    keys = ("model_name", "layers", "hidden", "heads", "seq_len", "num_gpus", "tp", "pp", "micro_batch", "global_batch")
    return hashlib.sha256(json.dumps([str(inputs.get(key)) for key in keys]).encode()).hexdigest()[:10]


def read_ops(path: str | Path, sources: Iterable[str] | None = None) -> tuple[list[OpMeasurement], list[str]]:
    """The operators of a table (of ``sources``, if given) and, as ``op_id: reason``, the rows left out."""
    table = read_table(path)
    if sources is not None:
        table = table[table["source_id"].isin(list(sources))]
    measured: list[OpMeasurement] = []
    reasons: list[str] = []
    columns = list(table.columns)
    with collector_paused():
        for values in table.itertuples(index=False, name=None):
            row = OperatorRow(dict(zip(columns, values, strict=True)))
            try:
                node, device, group = operator_node(row)
            except OperatorError as error:
                reasons.append(f"{row.text('op_id')}: {error}")
                continue
            measured.append(
                OpMeasurement(
                    op_id=row.text("op_id"),
                    source_id=row.text("source_id"),
                    gpu=row.text("gpu"),
                    node=node,
                    device=device,
                    group=group,
                    latency_s=row.latency_s,
                    op_group=row.group,
                    includes_launch=row.includes_launch,
                    library="|".join((row.text("source_id"), node.kind, row.text("op_detail"))),
                )
            )
    return measured, reasons


def _text(value: Any) -> str:
    return "" if value is None or value != value or str(value) in ("None", "nan") else str(value).strip()


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if number == number and abs(number) != float("inf") else None
