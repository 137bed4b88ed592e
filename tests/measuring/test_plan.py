"""A job's plan: what the row says is the job that is measured, and what cannot be run or said is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dataset_builder.corpus.measurements import build_job
from dataset_builder.job.errors import CannotRunError, JobError
from dataset_builder.job.schema import TrainingJob
from dataset_builder.measuring.job_plan import graph_of_file, job_plan, plan_of_file
from dataset_builder.measuring.plan import quick_plans, read_plans, write_plans
from dataset_builder.measuring.program import Stage
from dataset_builder.tracing.trace import build_graph
from tests.measuring.conftest import BARE, JOB, run_benchmark

_PRECISIONS = ("fp32", "tf32", "bf16_mixed", "bf16", "fp16_mixed", "fp8_tensorwise", "fp8_rowwise")
_LAYOUTS: tuple[dict[str, Any], ...] = (
    {}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}, {"sharding": "fsdp"},
    {"recompute": "full"},
)  # fmt: skip


def _is_run(precision: str, layout: dict[str, Any]) -> bool:
    return not (precision.startswith("fp8") and "tensor" in layout)


@pytest.mark.parametrize("layout", _LAYOUTS, ids=str)
@pytest.mark.parametrize("precision", _PRECISIONS)
def test_the_row_read_back_is_the_job(precision: str, layout: dict[str, Any]) -> None:
    if not _is_run(precision, layout):
        pytest.skip("not run by the reference program")
    gpu = {**JOB["cluster"], "gpu": "H100-SXM5-80GB"} if precision != "bf16" else JOB["cluster"]
    job = TrainingJob.parse({**JOB, "precision": precision, "parallel": layout, "cluster": gpu})
    plan = job_plan(job)
    written = {key: None if value is None else str(value) for key, value in plan.row.items()}
    read, reason, _ = build_job({**written, "source_id": "benchmark"})
    assert read is not None, reason
    graph = build_graph(read)
    num_parameters = [
        sum(p.numel() for p in {id(p): p for p in Stage(plan, stage, torch.device("meta")).parameters()}.values())
        for stage in range(plan.pipeline)
    ]
    assert num_parameters == [facts.num_parameters for facts in graph.stages]
    assert graph.num_microbatches == plan.num_microbatches
    assert plan.tokens == job.batch.global_batch_size * job.batch.seq_length


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ({"parallel": {"context": 2}}, "parallel.context"),
        ({"parallel": {"sharding": "zero1"}}, "parallel.sharding"),
        ({"optimizer": "lion"}, "optimizer"),
        ({"precision": "nvfp4"}, "precision.linear"),
        ({"precision": {"preset": "bf16", "main_params": "fp32"}}, "main_params"),
        ({"model": {**JOB["model"], "activation": "squared_relu"}}, "activation"),
        ({"model": {**JOB["model"], "qk_norm": True}}, "qk_norm"),
        ({"parallel": {"overlap": {"grad_reduce": False}}}, "overlap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_run_or_said_is_refused_by_name(parts: dict[str, Any], word: str) -> None:
    with pytest.raises(CannotRunError, match=word):
        job_plan(TrainingJob.parse({**JOB, **parts}))


def test_plans_survive_their_file(tmp_path: Path, write_job: Callable[..., Path]) -> None:
    job = write_job(parallel={"pipeline": 2})
    plans = [plan_of_file(job, {"precision": name}) for name in ("fp32", "fp8_rowwise")]
    plans.append(dataclasses.replace(plans[0], graph=graph_of_file(job, {"precision": "fp32"})))
    write_plans(plans, tmp_path / "plans.json")
    assert read_plans(tmp_path / "plans.json") == plans
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(JobError, match="plan"):
        read_plans(tmp_path / "other.json")


def test_a_bare_machine_measures_plans_and_says_what_a_job_needs(
    measured: Path, write_job: Callable[..., Path]
) -> None:
    job = write_job(cluster={**JOB["cluster"], "gpus_per_node": 1}, batch={**JOB["batch"], "global_batch_size": 2})
    plans = measured / "plans.json"
    assert run_benchmark(1, [str(job), "--plan", str(plans), "--precision", "fp32,bf16"]).returncode == 0
    options = ["--output", str(measured), "--only", "steps", "--rounds", "5", "--most-uncertainty", "100"]
    done = run_benchmark(1, [str(plans), *options], BARE)
    assert done.returncode == 0, done.stderr
    assert len((measured / "runs.csv").read_text(encoding="utf-8").splitlines()) == 3
    refused = run_benchmark(1, [str(job), *options], BARE)
    assert refused.returncode == 2
    assert "--plan" in refused.stderr


def test_the_quick_check_is_that_of_its_job_file() -> None:
    job = Path(__file__).parents[2] / "conf" / "job" / "benchmark-quick.yaml"
    precisions = ("fp32", "tf32", "fp16_mixed", "bf16_mixed", "bf16", "fp8_tensorwise")
    formats = ("fp32", "tf32", "fp16", "bf16", "fp8_e4m3")
    plans = quick_plans("H100-SXM5-80GB", formats)
    assert plans == [plan_of_file(job, {"precision": name}) for name in precisions]
    assert [plan.row["precision"] for plan in quick_plans("V100", ("fp32", "fp16"))] == ["fp32", "fp16_mixed"]
