"""Every node of a stage's graph gets one label or a reason, and no second of a step is counted twice."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.job.schema import TrainingJob
from dataset_builder.measuring.job_plan import job_plan, planned_graph
from dataset_builder.measuring.kernels import RealKernels
from dataset_builder.measuring.node_labels import Label, Rest, TimedOp, node_labels
from dataset_builder.measuring.plan import StepPlan
from dataset_builder.measuring.profile import ProfiledStep, unusable
from dataset_builder.measuring.program import Stage, computing
from tests.measuring.conftest import JOB

_CPU = torch.device("cpu")
_ONE_RANK = {**JOB["cluster"], "gpus_per_node": 1}
_NO_TIMES = "the profiler gave no times"


@cache
def _executed(precision: str, recompute: str = "none") -> tuple[StepPlan, tuple[TimedOp, ...]]:
    """A forward and a backward pass of the small job, really run; each operator takes a second more than the last."""
    job = TrainingJob.parse({
        **JOB, "precision": precision, "cluster": _ONE_RANK, "parallel": {"recompute": recompute},
        "batch": {**JOB["batch"], "global_batch_size": JOB["batch"]["micro_batch_size"]},
    })  # fmt: skip
    plan = replace(job_plan(job), graph=planned_graph(job))
    stage = Stage(plan, 0, _CPU)
    kernels = RealKernels(_CPU, {})
    try:
        with torch.autograd.set_multithreading_enabled(False), stage.marker:
            with stage.marker.passing("forward"), computing(plan, _CPU):
                loss = stage(stage.batch.ids)
            with stage.marker.passing("backward"):
                loss.backward()
    finally:
        kernels.close()
    return plan, tuple(TimedOp(op, (1.0 + number,)) for number, op in enumerate(stage.marker.ops))


def _total_s(labels: list[Label], rests: list[Rest]) -> float:
    return sum(each.seconds * each.executions for each in (*labels, *rests))


@pytest.mark.parametrize(("precision", "recompute"), [("fp32", "none"), ("bf16", "none"), ("fp32", "full")])
def test_every_node_of_the_passes_is_found_as_often_as_it_runs(precision: str, recompute: str) -> None:
    plan, timed = _executed(precision, recompute)
    labels, rests = node_labels(plan, 0, timed)
    assert plan.graph is not None
    for label, (node, repeats) in zip(labels, plan.graph.stages[0], strict=True):
        expected = 0 if node.phase == "optimizer" else repeats
        assert label.executions == expected, (node.module, node.op, label.reason)
        assert bool(label.match) == bool(expected)
        assert bool(label.reason) != bool(expected)
    assert {label.match for label in labels} == {"operator", "module", ""}
    assert _total_s(labels, rests) == pytest.approx(sum(each.seconds[0] for each in timed))


def test_a_node_that_ran_in_another_format_says_so() -> None:
    plan, timed = _executed("bf16_mixed")
    labels, _ = node_labels(plan, 0, timed)
    assert plan.graph is not None
    losses = [label for label, (node, _) in zip(labels, plan.graph.stages[0], strict=True) if node.op == "_log_softmax"]
    assert [(label.executions, label.reason) for label in losses] == [(0, "ran as _log_softmax 64x256 fp32 to fp32")]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_whatever_ran_no_time_is_lost_or_counted_twice(data: st.DataObject) -> None:
    plan, every = _executed("fp32")
    timed = data.draw(st.lists(st.sampled_from(every), max_size=200))
    labels, rests = node_labels(plan, 0, timed)
    assert plan.graph is not None
    assert len(labels) == len(plan.graph.stages[0])
    assert _total_s(labels, rests) == pytest.approx(sum(each.seconds[0] for each in timed))


def test_steps_that_say_nothing_are_no_labels() -> None:
    ops = [each.op for each in _executed("fp32")[1]]
    step = ProfiledStep(ops, [1e-6] * len(ops), 0.0, 7.0)
    cases: dict[str, list[Any]] = {
        "": [step, step],
        _NO_TIMES: [step, replace(step, seconds=[0.0] * len(ops))],
        "the loss is not finite": [step, replace(step, loss=float("nan"))],
        "its steps did not run the same operators": [step, replace(step, ops=ops[1:])],
    }
    assert {reason: unusable(steps) for reason, steps in cases.items()} == {reason: reason for reason in cases}
