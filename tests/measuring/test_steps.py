"""Training steps of two gloo ranks, really run: data, tensor, sequence and pipeline parallel, FSDP2."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from dataset_builder.corpus.measurements import read_runs
from dataset_builder.measuring.steps import refusal
from dataset_builder.measuring.timing import Timing
from tests.measuring.conftest import run_benchmark

_OPTIONS = ("--only", "steps", "--rounds", "5", "--most-uncertainty", "100")


def test_every_layout_is_measured_in_every_precision(measured: Path, write_job: Callable[..., Path]) -> None:
    layouts = {"ddp": {}, "tensor": {"tensor": 2}, "sequence": {"tensor": 2, "sequence_parallel": True},
               "pipeline": {"pipeline": 2}, "fsdp": {"sharding": "zero3"}}  # fmt: skip
    jobs = [str(write_job(name, parallel=parallel)) for name, parallel in layouts.items()]
    command = [*jobs, "--output", str(measured), *_OPTIONS]
    done = run_benchmark(2, command)
    assert done.returncode == 0, done.stderr
    runs = read_runs(measured / "runs.csv")
    assert [run.precision for run in runs] == ["fp32", "bf16_mixed", "bf16"] * len(layouts)
    for run in runs:
        assert run.job is not None, run.reason
        assert run.is_timed
        assert run.gpu == "two-rank cpu"
    groups = [run.job_group for run in runs]
    assert len({*groups}) == len(layouts)
    assert [groups.count(group) for group in groups] == [3] * len(runs)
    with (measured / "runs.csv").open(encoding="utf-8", newline="") as file:
        row = next(csv.DictReader(file))
    phases = dict(part.split("=") for part in row["label_info"].split("; "))
    slowest = [max(map(float, phases[f"rank_{phase}_s"].split("|"))) for phase in ("forward", "backward", "optimizer")]
    assert all(seconds > 0 for seconds in slowest)
    assert "torch=" in row["notes"]
    before = (measured / "runs.csv").read_bytes()
    again = run_benchmark(2, command)
    assert again.returncode == 0, again.stderr
    assert "already measured" in again.stderr
    assert (measured / "runs.csv").read_bytes() == before


def test_a_job_of_other_ranks_is_refused(measured: Path, write_job: Callable[..., Path]) -> None:
    done = run_benchmark(1, [str(write_job()), "--output", str(measured), *_OPTIONS])
    assert done.returncode == 4
    assert "1 run, the job has 2" in done.stderr


@pytest.mark.parametrize(
    ("uncertainty", "loss", "throttled", "word"),
    [
        (0.05, 7.0, "", ""),
        (0.2, 7.0, "", "known"),
        (0.05, math.nan, "", "finite"),
        (0.05, 7.0, "thermal", "clock"),
    ],
)
def test_rows_are_vouched_for_or_not_written(uncertainty: float, loss: float, throttled: str, word: str) -> None:
    reason = refusal(Timing(1.0, 0.9, 0.3, uncertainty, 9, ""), [7.0, loss], throttled, most_uncertainty=0.1)
    assert (word in reason) if word else not reason
