"""The tables a benchmark writes: rows of the shared schema, appended so that an interruption loses nothing.

A row is on disk before the next is measured; a half-written last line is cut off when a table is opened again, and
rows that are there already are not measured twice. Only the standard library: this runs where nothing else is.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

RUN_COLUMNS = (
    "run_id", "source_id", "source", "source_date", "license", "framework", "framework_version", "gpu", "num_gpus",
    "gpus_per_node", "intra_node", "inter_node", "model_name", "arch", "layers", "hidden", "ffn_hidden", "heads",
    "kv_heads", "head_dim", "vocab", "seq_len", "num_experts", "top_k", "gated_mlp", "tied_embeddings", "params_b",
    "tp", "pp", "dp", "cp", "ep", "vpp", "sequence_parallel", "sharding", "micro_batch", "global_batch", "grad_accum",
    "precision", "precision_detail", "act_ckpt", "attention", "compile", "optimizer", "iter_time_s",
    "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "hfu_pct", "samples_per_s", "peak_mem_gb", "measured_field",
    "derivation", "notes", "job_group", "label_info",
)  # fmt: skip
OP_COLUMNS = (
    "op_id", "source_id", "source", "license", "gpu", "op", "op_detail", "direction", "dtype", "dtype_out",
    "dtype_accum", "b", "m", "n", "k", "shape", "bytes", "num_gpus", "gpus_per_node", "intra_node", "inter_node",
    "latency_us", "stat", "tflops", "gbps", "notes",
)  # fmt: skip
NODE_COLUMNS = (
    "run_id", "source_id", "source", "source_date", "license", "framework", "framework_version", "gpu", "rank", "stage",
    "fingerprint", "tracer_version", "node", "kind", "op", "module", "phase", "shape", "input_dtype", "output_dtype",
    "axis", "group_size", "time_s", "executions", "expected_executions", "steps", "match", "reason", "notes",
)  # fmt: skip
SOURCE_ID = "benchmark"
LICENSE = "own measurement"

Cell = str | int | float | None


class TableError(ValueError):
    """A file that is not the table it should be; the message names it."""


class MeasurementTable:
    """One csv file that rows are appended to. ``known`` are the identities (first column) that it holds."""

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self.path, self.columns = path, columns
        self.known: set[str] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            self._open_again()
        else:
            self._append(columns)

    def _open_again(self) -> None:
        content = self.path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        rows = list(csv.reader(io.StringIO(complete.decode("utf-8", "replace"))))
        if not rows or tuple(rows[0]) != self.columns:
            raise TableError(f"{self.path}: is no table of this benchmark; choose another output")
        if len(complete) < len(content):
            with self.path.open("r+b") as file:
                file.truncate(len(complete))
        self.known = {row[0] for row in rows[1:] if row}

    def append(self, row: Mapping[str, Cell]) -> None:
        """Writes a row through to the disk; raises ValueError for a key that is no column or a time that is none."""
        self._append(self._cells(row))
        self.known.add(str(row[self.columns[0]]))

    def append_together(self, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Rows that say something only together: all of them are on the disk, or none. Raises as :meth:`append`."""
        lines = "".join(_line(self._cells(row)) for row in rows)
        partial = self.path.with_name(f"{self.path.name}.partial")
        with partial.open("wb") as file:
            file.write(self.path.read_bytes() + lines.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)
        self.known |= {str(row[self.columns[0]]) for row in rows}

    def _cells(self, row: Mapping[str, Cell]) -> tuple[str, ...]:
        if unknown := set(row) - set(self.columns):
            raise ValueError(f"{sorted(unknown)} are no columns")
        for key in ("iter_time_s", "latency_us", "time_s"):
            value = row.get(key)
            if key in row and not (isinstance(value, float) and 0 < value < math.inf):
                raise ValueError(f"{key}: {value} is not a time")
        return tuple(_text(row.get(column)) for column in self.columns)

    def _append(self, cells: tuple[str, ...]) -> None:
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(_line(cells))
            file.flush()
            os.fsync(file.fileno())


def _line(cells: tuple[str, ...]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _text(value: Cell) -> str:
    if value is None:
        return ""
    return f"{value:.7g}" if isinstance(value, float) else str(value)
