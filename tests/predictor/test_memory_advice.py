"""What is said of a job that does not fit: the nearest change that would, in the order of what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import resolved_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.memory import COUNTED, MemoryFit, StageMemory, peak_memory
from gnn_predictor.memory_advice import CHANGES, doubts, nearest_fitting, shortages, verdict

JobOf = Callable[..., TrainingJob]


def _memory(job: TrainingJob) -> tuple[StageMemory, ...]:
    return peak_memory(build_graph(job).stages, job, resolved_layout(job))


def _on_device_of(job: TrainingJob, hbm_bytes: float) -> TrainingJob:
    gpu = job.cluster.gpu.model_copy(update={"name": "small", "hbm_bytes": hbm_bytes})
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"gpu": gpu})})


def _need(job: TrainingJob) -> float:
    return max(stage.total for stage in _memory(job.resolved()))


def test_the_cheapest_change_that_fits_is_named(job_of: JobOf) -> None:
    """Sharding the optimizer costs least time and is enough; for less memory activations go next."""
    base: dict[str, Any] = {"software": {"framework": "megatron-lm"}, "parallel": {"sharding": "none"}}
    job = job_of(**base).resolved()
    sharded = job_of(**{**base, "parallel": {"sharding": "zero1"}})
    found = nearest_fitting(_on_device_of(job, _need(sharded) * 1.01), COUNTED)
    assert found is not None
    assert found[0] == {"parallel.sharding": "zero1"}
    assert found[1].total == pytest.approx(_need(sharded))


def test_two_changes_are_tried_when_one_is_not_enough(job_of: JobOf) -> None:
    base: dict[str, Any] = {"software": {"framework": "megatron-lm"}, "parallel": {"sharding": "none"}}
    job = job_of(**base).resolved()
    both = job_of(**{**base, "parallel": {"sharding": "zero1"}, "batch": {"micro_batch_size": 1}})
    found = nearest_fitting(_on_device_of(job, _need(both) * 1.001), COUNTED)
    assert found is not None
    assert len(found[0]) <= 2
    assert found[1].total <= _need(both) * 1.001


def test_what_is_advised_fits_when_it_is_done(job_of: JobOf) -> None:
    """The settings of the message, given as a job file, need what the message says."""
    job = _on_device_of(job_of(parallel={"sharding": "none", "pipeline": 2}).resolved(), 2.5e9)
    *stages, missing, advice = shortages(_memory(job), job, COUNTED)
    assert len(stages) == 2
    assert "too much for small" in missing
    found = nearest_fitting(job, COUNTED)
    assert found is not None
    plan, batch = {"sharding": "none", "pipeline": 2}, {}
    for path, value in found[0].items():
        part, _, key = path.partition(".")
        assert f"--set {path}={value}" in advice
        {"parallel": plan, "batch": batch}[part][key] = value
    assert _need(job_of(parallel=plan, batch=batch)) == pytest.approx(found[1].total)
    assert found[1].total <= 2.5e9


def test_a_long_sequence_is_cut_over_more_ranks(job_of: JobOf) -> None:
    """Nothing else makes the activations of one sequence much smaller; a short one is not cut."""
    base: dict[str, Any] = {"batch": {"seq_length": 2**17, "micro_batch_size": 1}, "software": {"framework": "nemo"}}
    job = job_of(**base, parallel={"recompute": "full"})
    cut = job_of(**base, parallel={"recompute": "full", "context": 4})
    found = nearest_fitting(_on_device_of(job, _need(cut) * 1.01), COUNTED)
    assert found is not None
    assert found[0] == {"parallel.context": 4}
    assert found[1].total == pytest.approx(_need(cut))
    short = job_of(batch={"seq_length": 1024}).resolved()
    assert [settings for change in CHANGES if "parallel.context" in (settings := change(short) or {})] == []


def test_a_job_beyond_every_change_is_told_so(job_of: JobOf) -> None:
    job = _on_device_of(job_of().resolved(), 1e8)
    assert shortages(_memory(job), job, COUNTED)[-1].startswith("memory: no change")


def test_fits_may_not_fit_and_does_not_fit_follow_the_interval(job_of: JobOf) -> None:
    memory = _memory(job_of().resolved())
    needed = max(stage.total for stage in memory)
    fit = MemoryFit(low=-0.1, high=0.2)
    capacities = (needed * math.exp(0.21), needed * math.exp(0.19), needed * 0.95, needed * math.exp(-0.11))
    assert [verdict(memory, each, fit) for each in capacities] == ["fits", "may not fit", "may not fit", "does not fit"]


def test_a_close_fit_is_a_doubt_and_a_loose_one_is_none(job_of: JobOf) -> None:
    job = job_of().resolved()
    needed = _need(job)
    (doubt,) = doubts(_memory(job), _on_device_of(job, needed * 1.05), COUNTED)
    assert doubt.startswith("memory: may not fit")
    assert doubts(_memory(job), _on_device_of(job, needed * 2), COUNTED) == []
    assert doubts(_memory(job), _on_device_of(job, needed / 2), COUNTED) == []  # a shortage, said elsewhere


def test_what_is_advised_of_a_job_as_it_was_given_is_what_its_new_defaults_need(job_of: JobOf) -> None:
    """Fully sharded, weights are gathered in 16 bits unless the job says otherwise: the advice counts on it."""
    base: dict[str, Any] = {"parallel": {"sharding": "none"}, "software": {"framework": "pytorch"}}
    given = job_of(**base)
    fully = job_of(**{**base, "parallel": {"sharding": "zero3", "recompute": "full"}})
    found = nearest_fitting(_on_device_of(given, _need(fully) * 1.001), COUNTED)
    assert found is not None
    assert found[1].total <= _need(fully) * 1.001
