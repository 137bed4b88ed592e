"""``python -m gnn_predictor.memory_fit CHECKPOINT [--runs RUNS.csv]``: what measured peaks teach of peak memory.

In: runs with a measured peak. Out: a :class:`MemoryFit` of seven numbers that stand beside what is counted, with the
interval of runs whose job group was not learnt from, and the held-out figures. Two regressions of least absolute
relative error, shrunk to the plain count: the factors on the allocator's peaks, then what a device holds beyond them on
the peaks that were read from it. Memory does not depend on the network's weights, so a checkpoint is refitted in
seconds: its ``config.json``, ``metrics.json`` and card are written anew.
"""

from __future__ import annotations

import sys

from dataset_builder.command_line import CommandParser


def _parser() -> CommandParser:
    parser = CommandParser(
        "gnn_predictor.memory_fit",
        "Fits what measured peaks teach of memory anew and writes it into a checkpoint: its config.json, "
        "metrics.json and README.md are replaced.",
        ["build/released", "my-checkpoint --runs runs.csv"],
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its directory, which is changed")
    parser.add_argument("--runs", metavar="RUNS.csv", help="default: the shipped table")
    return parser


if __name__ == "__main__" and {"-h", "--help", "--version"} & set(sys.argv[1:]):
    _parser().parse_args()  # answers and ends, before what takes seconds to import

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dataset_builder.corpus.measurements import MemoryMeter, RunMeasurement, read_runs, shipped_table
from dataset_builder.corpus.splits import fold_of
from dataset_builder.corpus.trust import peak_doubts
from dataset_builder.job.errors import JobError
from dataset_builder.tracing.layout import resolved_layout
from dataset_builder.tracing.trace import GraphBuilder
from gnn_predictor.card import model_card
from gnn_predictor.checkpoint import CheckpointError, load_checkpoint, rewrite_description
from gnn_predictor.memory import COUNTED, MemoryFit, StageTerms, metered_bytes, peak_terms
from gnn_predictor.metrics import error_figures

Floats = NDArray[np.float64]

FOLDS = 5
LARGE_JOB_BYTES = 20e9
# The interval is that of jobs above this: of a smaller one nobody asks whether it fits, and what its software does
# weighs far more.
INTERVAL_FROM_BYTES = 4e9
_LEAST_FOR_INTERVAL = 40
# Strength of the shrinkage: as much as so many runs in which the part is the whole peak.
_PRIOR_RUNS = 1.0
# Relative errors below this count as squares, larger ones as they are (Huber): a mislabelled run pulls no harder.
_HUBER = 0.02
_ROUNDS = 50
_LEAST_RUNS = 5  # of a meter, to learn from it


@dataclass(frozen=True)
class MemoryExample:
    """One measured peak with what is counted of its job."""

    terms: tuple[StageTerms, ...]
    meter: MemoryMeter
    measured_bytes: float
    source_id: str
    job_group: str
    doubt: str = ""  # why it is not learnt from

    @property
    def counted(self) -> StageTerms:
        """The rank that the meter speaks of."""
        if self.meter == "last_rank":
            return self.terms[-1]
        return max(self.terms, key=lambda terms: terms.memory(COUNTED).total)

    def predicted_bytes(self, fit: MemoryFit) -> float:
        """What the meter would show."""
        return metered_bytes([terms.memory(fit) for terms in self.terms], self.meter)


def memory_examples(runs: Sequence[RunMeasurement]) -> list[MemoryExample]:
    """The runs that have a job and a measured peak."""
    examples = []
    measured = [run for run in runs if run.job is not None and run.peak_mem_gb]
    for run, doubt in zip(measured, peak_doubts([_but_for_micro_batch(run) for run in measured]), strict=True):
        assert run.job is not None
        assert run.peak_mem_gb is not None
        job = run.job.resolved()
        try:
            layout = resolved_layout(job)
        except JobError:
            continue
        terms = peak_terms(GraphBuilder.of(job, layout).facts, job, layout)
        peak = run.peak_mem_gb * 1e9
        examples.append(MemoryExample(terms, run.memory_meter, peak, run.source_id, run.job_group, doubt))
    return examples


def _but_for_micro_batch(run: RunMeasurement) -> tuple[tuple[str, MemoryMeter, str], int, float]:
    """Source, meter and job of a run without its micro batch; this, and the measured GB."""
    assert run.job is not None
    assert run.peak_mem_gb is not None
    batch = run.job.batch.model_copy(update={"micro_batch_size": 1})
    job = run.job.model_copy(update={"name": None, "batch": batch})
    key = (run.source_id, run.memory_meter, job.model_dump_json())
    return key, run.job.batch.micro_batch_size, run.peak_mem_gb


def fit_memory(examples: Sequence[MemoryExample]) -> MemoryFit:
    """The fit of those that nobody doubts, without an interval; a meter with too few runs keeps the plain count."""
    trusted = [example for example in examples if not example.doubt]
    inside = [example for example in trusted if example.meter != "device"]
    outside = [example for example in trusted if example.meter == "device"]
    fit = COUNTED
    if len(inside) >= _LEAST_RUNS:
        fit = _allocator_fit(inside)
    if len(outside) >= _LEAST_RUNS:
        fit = _device_fit(outside, fit)
    return fit


def _allocator_fit(examples: Sequence[MemoryExample]) -> MemoryFit:
    counted = [example.counted for example in examples]
    fixed = np.array([t.params + t.grads + t.optimizer + t.buffers for t in counted])
    parts = np.array(
        [
            (
                0.0 if terms.has_experts else terms.activations,
                terms.activations if terms.has_experts else 0.0,
                0.0 if terms.splits_vocabulary else terms.logits,
                terms.logits if terms.splits_vocabulary else 0.0,
                _WORKSPACE,
            )
            for terms in counted
        ]
    )
    factors = _shrunk_factors(parts, fixed, np.array([example.measured_bytes for example in examples]))
    dense, expert, logits, split_logits, workspace = factors.tolist()
    return MemoryFit(
        activations=dense,
        expert_activations=expert,
        logits=logits,
        split_logits=split_logits,
        workspace_bytes=workspace * _WORKSPACE,
    )


def _device_fit(examples: Sequence[MemoryExample], fit: MemoryFit) -> MemoryFit:
    allocated = np.array([example.counted.memory(fit).allocated for example in examples])
    parts = np.stack([allocated, np.full_like(allocated, COUNTED.runtime_bytes)], axis=1)
    measured = np.array([example.measured_bytes for example in examples])
    share, runtime = _shrunk_factors(parts, allocated, measured, prior=(0.0, 1.0)).tolist()
    return fit.model_copy(update={"cached_share": share, "runtime_bytes": runtime * COUNTED.runtime_bytes})


_WORKSPACE = COUNTED.workspace_bytes


def _shrunk_factors(parts: Floats, fixed: Floats, measured: Floats, prior: Sequence[float] | None = None) -> Floats:
    """Non-negative ``f`` [part] that make ``fixed + parts @ f`` [run] equal to ``measured``, relative to it.

    Huber's loss by iterated reweighting, and a squared distance from the prior (default: ones) in units of runs.
    """
    start = np.ones(parts.shape[1]) if prior is None else np.array(prior, dtype=float)
    relative = parts / measured[:, None]
    missing = 1 - fixed / measured - relative @ start
    weights = np.ones(len(measured))
    change = np.zeros_like(start)
    for _ in range(_ROUNDS):
        normal = relative.T @ (relative * weights[:, None]) + _PRIOR_RUNS * np.eye(len(start))
        change = np.linalg.solve(normal, relative.T @ (weights * missing))
        weights = np.minimum(1.0, _HUBER / np.maximum(np.abs(missing - relative @ change), 1e-9))
    factors: Floats = np.maximum(start + change, 0.0)
    return factors


def held_out_peaks(examples: Sequence[MemoryExample], folds: int = FOLDS) -> pd.DataFrame:
    """Every example as predicted by the fit of the other folds (P1's): bytes, source and log(measured / predicted)."""
    fold = np.array([fold_of(example.job_group, folds) for example in examples])
    predicted = np.zeros(len(examples))
    for number in range(folds):
        fit = fit_memory([example for example, held in zip(examples, fold, strict=True) if held != number])
        for index in np.flatnonzero(fold == number).tolist():
            predicted[index] = examples[index].predicted_bytes(fit)
    table = pd.DataFrame(
        {
            "source_id": [example.source_id for example in examples],
            "doubt": [example.doubt for example in examples],
            "fold": fold,
            "measured": [example.measured_bytes for example in examples],
            "predicted": predicted,
            "counted": [example.predicted_bytes(COUNTED) for example in examples],
        }
    )
    return table.assign(log_error=np.log(table["measured"] / table["predicted"]))


def interval_bounds(log_errors: Floats, level: float) -> tuple[float, float]:
    """Bounds of log(measured / predicted) that a share ``level`` of new runs keeps (split conformal, arXiv 1604.04173).

    Each side leaves out half of the rest.
    """
    ordered = np.sort(log_errors)
    last = len(ordered) - 1
    out = max(1, math.floor((len(ordered) + 1) * (1 - level) / 2))
    return min(0.0, float(ordered[min(last, out - 1)])), max(0.0, float(ordered[max(0, last - out + 1)]))


def learn_memory(runs: Sequence[RunMeasurement]) -> tuple[MemoryFit, dict[str, Any]]:
    """The fit of all runs with the interval of unseen jobs, and the held-out figures; nothing learnt without runs."""
    examples = memory_examples(runs)
    if len({fold_of(example.job_group, FOLDS) for example in examples}) < 2:
        return COUNTED, {}
    held_out = held_out_peaks(examples)
    low, high = interval_bounds(_in_question(held_out)["log_error"].to_numpy(float), COUNTED.level)
    return fit_memory(examples).model_copy(update={"low": low, "high": high}), memory_figures(held_out)


def _in_question(held_out: pd.DataFrame) -> pd.DataFrame:
    """The peaks that an interval is calibrated on: those that are large, where there are enough of them."""
    held_out = held_out[held_out["doubt"] == ""]
    large = held_out[held_out["predicted"] > INTERVAL_FROM_BYTES]
    return large if len(large) >= _LEAST_FOR_INTERVAL else held_out


def memory_figures(held_out: pd.DataFrame) -> dict[str, Any]:
    """Errors of held-out peaks, of the plain count on the same rows, and how low the worst large job comes out.

    Peaks in doubt have a line of their own.
    """
    doubted, held_out = held_out[held_out["doubt"] != ""], held_out[held_out["doubt"] == ""]
    large = held_out[held_out["measured"] > LARGE_JOB_BYTES]
    return {
        **error_figures(held_out["measured"], held_out["predicted"]),
        "interval_coverage": _coverage(held_out),
        "large_jobs": {
            **error_figures(large["measured"], large["predicted"]),
            "lowest_percent": float((large["predicted"] / large["measured"] - 1).min() * 100) if len(large) else None,
            "more_than_15_percent_low": int((large["predicted"] / large["measured"] < 0.85).sum()),
        },
        "by_source": {
            str(source): error_figures(rows["measured"], rows["predicted"])
            for source, rows in held_out.groupby("source_id")
        },
        "counted": error_figures(held_out["measured"], held_out["counted"]),
        "doubted": error_figures(doubted["measured"], doubted["predicted"]),
    }


def _coverage(held_out: pd.DataFrame) -> float:
    """Share of each fold's peaks inside the interval of the other folds."""
    held_out = _in_question(held_out)
    inside = 0
    for fold in held_out["fold"].unique():
        own = (held_out["fold"] == fold).to_numpy()
        others = held_out.loc[~own if (~own).any() else own, "log_error"]
        low, high = interval_bounds(others.to_numpy(float), COUNTED.level)
        inside += int(held_out.loc[own, "log_error"].between(low, high).sum())
    return inside / len(held_out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Refits a checkpoint; exit code 2 for runs that cannot be read, 3 for a checkpoint that cannot be used."""
    options = _parser().read(arguments)
    try:
        checkpoint = load_checkpoint(options.checkpoint)
        fit, figures = learn_memory(read_runs(options.runs or shipped_table("runs.parquet")))
        config = checkpoint.config.model_copy(update={"memory": fit})
        refitted = replace(checkpoint, config=config, metrics={**checkpoint.metrics, "memory": figures})
        rewrite_description(Path(options.checkpoint), refitted, model_card(refitted))
    except (JobError, CheckpointError) as error:
        print(f"memory_fit: {error}", file=sys.stderr)
        return error.exit_code
    print(fit.model_dump_json(indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
