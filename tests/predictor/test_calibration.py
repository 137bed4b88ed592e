"""Adapters: what a cluster does differently is found, nothing is invented, and what is not its own stays as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.adapter import GROUPS, Adapter, Shrinkage, job_point, likeness, width_factor
from gnn_predictor.calibration import TimedRuns, fit, fit_mode, left_out_errors
from gnn_predictor.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from gnn_predictor.domain import domain_of
from gnn_predictor.features import featurize
from gnn_predictor.prediction import network_of, predict

JobOf = Callable[..., TrainingJob]
WEAK, USUAL = Shrinkage(offset=1e-6, factors=1e-6, local=0.0), Shrinkage()
EVERY_ROW = np.ones(9, dtype=bool)


def _jobs(job_of: JobOf) -> list[TrainingJob]:
    """Nine jobs whose time goes to different kinds of work."""
    changes: list[dict[str, Any]] = [
        {},
        {"model": {"hidden_size": 2048}},
        {"model": {"hidden_size": 512, "num_attention_heads": 8}, "batch": {"micro_batch_size": 1}},
        {"batch": {"seq_length": 4096, "micro_batch_size": 1}},
        {"parallel": {"tensor": 4, "sequence_parallel": True}},
        {"parallel": {"tensor": 8}},
        {"parallel": {"sharding": "zero3"}, "batch": {"global_batch_size": 16}},
        {"parallel": {"pipeline": 4, "schedule": "1f1b"}},
        {"model": {"vocab_size": 262144}, "batch": {"global_batch_size": 128}},
    ]
    return [job_of(**each).resolved() for each in changes]


@pytest.fixture(scope="module")
def base(untrained: Path) -> Checkpoint:
    return load_checkpoint(untrained)


@pytest.fixture(scope="module")
def runs(job_of: JobOf, base: Checkpoint) -> TimedRuns:
    """The nine jobs, measured as predicted."""
    jobs = _jobs(job_of)
    graphs = [featurize(job, build_graph(job), rank_layout(job)) for job in jobs]
    names = [str(index) for index in range(len(jobs))]
    timed = TimedRuns.of(network_of(base)[0], graphs, [1.0] * len(jobs), [job_point(job) for job in jobs], names, None)
    return replace(timed, log_measured=-timed.log_errors(_theta()))


def _theta(offset: float = 0.0, **factors: float) -> Any:
    return np.array([offset, *(factors.get(group, 0.0) for group in GROUPS)])


def _measured(runs: TimedRuns, theta: Any) -> TimedRuns:
    """These runs on a cluster whose work takes these factors longer."""
    return replace(runs, log_measured=runs.log_measured - runs.log_errors(theta))


def test_an_offset_is_what_it_says(runs: TimedRuns) -> None:
    assert runs.log_errors(_theta()) == pytest.approx(np.zeros(len(runs)), abs=1e-5)
    assert runs.log_errors(_theta(offset=0.3)) == pytest.approx(np.full(len(runs), -0.3), abs=1e-4)


@settings(max_examples=5, deadline=None)
@given(offset=st.floats(-0.3, 0.5), gemm=st.floats(-0.3, 0.7), host=st.floats(0.0, 1.0), tensor=st.floats(-0.5, 0.8))
def test_a_synthetic_cluster_is_recovered(
    runs: TimedRuns, offset: float, gemm: float, host: float, tensor: float
) -> None:
    cluster = _measured(runs, _theta(offset, gemm=gemm, host=host, tensor_comm=tensor))
    theta = fit_mode(cluster, EVERY_ROW, WEAK, "factors").theta
    assert np.abs(cluster.log_errors(theta)).max() < 0.01


def test_left_out_jobs_of_a_slower_cluster_are_predicted_better(runs: TimedRuns) -> None:
    cluster = _measured(runs, _theta(0.25, gemm=0.2))
    left_out = left_out_errors(cluster, USUAL)
    assert left_out is not None
    assert np.abs(left_out).mean() < 0.35 * np.abs(cluster.log_errors(_theta())).mean()


def test_stronger_shrinkage_moves_less(runs: TimedRuns) -> None:
    cluster = _measured(runs, _theta(0.3, gemm=0.3, host=0.5))
    size = [
        float(np.linalg.norm(fit_mode(cluster, EVERY_ROW, shrinkage, "factors").theta))
        for strength in (1e-3, 0.1, 1.0, 10.0, 1e3)
        if (shrinkage := Shrinkage(offset=strength, factors=strength))
    ]
    assert size == sorted(size, reverse=True)
    assert size[-1] < 0.01


def test_a_run_informs_jobs_like_it_and_no_others(runs: TimedRuns) -> None:
    odd = replace(runs, log_measured=runs.log_measured + 0.3 * (np.arange(len(runs)) == 1))
    fitted = fit_mode(odd, EVERY_ROW, Shrinkage(offset=1e3, factors=1e3, local=9.0), "factors")
    errors = odd.errors_under(fitted)
    assert abs(errors[1]) < 0.1
    assert np.abs(errors[[2, 3, 5, 6]]).max() < 0.1


def test_likeness_is_one_for_equal_jobs_and_none_on_another_gpu(job_of: JobOf) -> None:
    jobs = [
        job_of(),
        job_of(batch={"micro_batch_size": 4}),
        job_of(batch={"micro_batch_size": 4}, precision="fp16_mixed"),
        job_of(cluster={"gpu": "H100-SXM5-80GB"}),
    ]
    points = [job_point(job.resolved()) for job in jobs]
    alike = likeness(points[:1], points)[0]
    assert alike[0] == 1.0
    assert 1.0 > alike[1] > alike[2] > alike[3] == 0.0


def test_a_cluster_as_predicted_is_left_alone(runs: TimedRuns) -> None:
    assert fit(runs, USUAL).mode == "none"


def test_chance_costs_little(runs: TimedRuns) -> None:
    """Where runs scatter and nothing is to be found, left-out runs are hardly predicted worse."""
    before, after = [], []
    for seed in range(3):
        noise = np.random.default_rng(seed).normal(0.0, 0.1, len(runs))
        scattered = replace(runs, log_measured=runs.log_measured + noise)
        left_out = left_out_errors(scattered, USUAL)
        assert left_out is not None
        before.append(np.abs(noise).mean())
        after.append(np.abs(left_out).mean())
    assert np.mean(after) < 1.2 * np.mean(before)


def test_one_job_cannot_be_left_out(runs: TimedRuns) -> None:
    repeated = replace(_measured(runs, _theta(0.4)), jobs=np.array(["same"] * len(runs)))
    assert left_out_errors(repeated, USUAL) is None
    assert fit(repeated, USUAL).mode == "factors"


@given(ratios=st.lists(st.floats(0, 3), max_size=12), more=st.floats(0, 3))
def test_the_interval_follows_the_left_out_errors(ratios: list[float], more: float) -> None:
    worse = [ratio + more for ratio in ratios]
    assert 0 < width_factor(ratios) <= width_factor(worse)
    assert width_factor([]) == pytest.approx(1.0)


def test_few_good_runs_narrow_the_interval_less_than_many() -> None:
    widths = [width_factor([0.1] * count) for count in (0, 1, 3, 10, 100)]
    assert widths == sorted(widths, reverse=True)
    assert widths[1] > 0.7
    # 90% of a Laplace distribution lie within ln 10 times its mean size.
    assert width_factor([0.1] * 100_000) == pytest.approx(0.1 * math.log(10), rel=1e-3)


def _adapted(base: Checkpoint, path: Path, job: TrainingJob, **changes: Any) -> Checkpoint:
    fields: dict[str, Any] = {
        "base": base.config.name, "num_runs": 3, "mode": "factors", "log_offset": 0.2,
        "log_factors": dict.fromkeys(GROUPS, 0.0) | {"gemm": 0.5}, "gpus": (job.cluster.gpu.name,), "frameworks": (),
        "domain": domain_of([job.resolved()]), "points": (), "local": (), "error_ratios": (0.1, 0.1, 0.1),
    }  # fmt: skip
    config = base.config.model_copy(update={"name": "adapted", "adapter": Adapter(**(fields | changes))})
    return load_checkpoint(save_checkpoint(path, replace(base, config=config), ""))


def test_an_adapter_keeps_a_prediction_whole(job_of: JobOf, base: Checkpoint, tmp_path: Path) -> None:
    job = job_of(parallel={"pipeline": 4, "schedule": "1f1b"})
    plain, adapted = predict(job, checkpoint=base), predict(job, checkpoint=_adapted(base, tmp_path / "a", job))
    before, after = plain.breakdown.by_kind, adapted.breakdown.by_kind
    assert after["gemm"] / before["gemm"] == pytest.approx(math.exp(0.7), rel=1e-3)
    assert after["attention"] / before["attention"] == pytest.approx(math.exp(0.2), rel=1e-3)
    parts = [*after.values(), *adapted.breakdown.exposed_communication.values()]
    assert math.fsum(parts) == pytest.approx(adapted.iteration_time_s)
    for stage in adapted.stages:
        assert stage.total_s + stage.bubble_s == pytest.approx(adapted.iteration_time_s, rel=1e-4)
    assert adapted.to_dict()["provenance"]["calibration"] == {
        "base": "untrained", "runs": 3, "mode": "factors", "applied": True,
    }  # fmt: skip


def _log_width(prediction: Any) -> float:
    return math.log(prediction.iteration_time_high_s / prediction.iteration_time_low_s)


def test_the_interval_is_narrower_amid_the_calibrating_runs_only(
    job_of: JobOf, base: Checkpoint, tmp_path: Path
) -> None:
    adapted = _adapted(base, tmp_path / "a", job_of())
    inside, outside = job_of(), job_of(model={"hidden_size": 4096, "num_attention_heads": 32})
    assert _log_width(predict(inside, checkpoint=adapted)) < 0.9 * _log_width(predict(inside, checkpoint=base))
    far = predict(outside, checkpoint=adapted)
    assert _log_width(far) == pytest.approx(_log_width(predict(outside, checkpoint=base)))
    assert any(warning.startswith("outside the calibrating runs: model.hidden_size") for warning in far.warnings)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cluster": {"gpu": "H100-SXM5-80GB"}}, "cluster.gpu: measured on A100-SXM4-80GB"),
        ({"software": {"framework": "jax"}}, "software.framework: measured with pytorch, the job runs jax"),
    ],
)
def test_another_gpu_or_framework_is_predicted_as_without(
    changes: dict[str, Any], named: str, job_of: JobOf, base: Checkpoint, tmp_path: Path
) -> None:
    adapted = _adapted(base, tmp_path / "a", job_of(), frameworks=("pytorch",))
    job = job_of(**changes)
    plain, other = predict(job, checkpoint=base).to_dict(), predict(job, checkpoint=adapted).to_dict()
    assert not other["provenance"].pop("calibration")["applied"]
    assert any(named in warning for warning in other["warnings"])
    different = ("warnings", "provenance")
    assert {key: value for key, value in plain.items() if key not in different} == {
        key: value for key, value in other.items() if key not in different
    }
    stated = job_of(software={"framework": "pytorch"})
    assert predict(stated, checkpoint=adapted).provenance["calibration"]["applied"]
    assert predict(job_of(), checkpoint=adapted).provenance["calibration"]["applied"]
