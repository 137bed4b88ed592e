"""Adapters: what a cluster does differently is found, nothing is invented, and what is not its own stays as it was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.adapter import Adapter, ErrorCovariance, PlacedJobs, known_runs, width_factor
from gnn_predictor.calibration import ClusterErrors, best_share, left_out_errors
from gnn_predictor.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from gnn_predictor.domain import domain_of
from gnn_predictor.features import featurize
from gnn_predictor.prediction import predict

JobOf = Callable[..., TrainingJob]
# Of two coordinates the first counts.
COVARIANCE = ErrorCovariance(shared=0.04, alike=0.09, own=0.001, columns=(0,), weights=(1.0,))


def _placed(places: Any, gpu: str = "A", precision: str = "bf16") -> PlacedJobs:
    """Jobs at these places of the first coordinate, and anywhere in the second."""
    first = torch.tensor(list(places), dtype=torch.float64)
    coordinates = torch.stack([first, 7.0 * first.sin()], dim=1)
    return PlacedJobs(coordinates, (gpu,) * len(first), (precision,) * len(first))


def _cluster(places: Any, log_errors: Any) -> ClusterErrors:
    placed = _placed(places)
    names = np.array([str(index) for index in range(len(placed.gpus))])
    return ClusterErrors(placed, np.asarray(log_errors, dtype=float), names)


def test_one_run_speaks_for_the_same_job_more_than_for_others() -> None:
    field = _cluster([0.0], [0.5]).field(COVARIANCE)
    expected = field.expected(_placed([0.0, 0.5, 50.0]))
    assert expected == pytest.approx([0.5 * 0.13 / 0.131, expected[1], 0.5 * 0.04 / 0.131], rel=1e-3)
    assert expected[0] > expected[1] > expected[2]
    assert field.shared == pytest.approx(expected[2], rel=1e-3)
    elsewhere = [
        field.expected(_placed([0.0], gpu, fmt))[0] for gpu, fmt in (("A", "fp8"), ("B", "bf16"), ("B", "fp8"))
    ]
    assert elsewhere[0] == pytest.approx(elsewhere[1])
    assert expected[0] > elsewhere[0] > elsewhere[2] > expected[2]


def test_what_all_runs_have_is_what_all_jobs_have() -> None:
    far_apart = [30.0 * index for index in range(40)]
    field = _cluster(far_apart, [0.3] * 40).field(COVARIANCE)
    assert field.expected(_placed([-100.0]))[0] == pytest.approx(0.3, rel=0.06)


def test_an_absurd_time_moves_others_by_a_bounded_factor() -> None:
    assert _cluster([0.0], [20.0]).field(COVARIANCE).expected(_placed([0.0]))[0] == 2.5


def test_left_out_jobs_of_a_slower_cluster_are_predicted_better() -> None:
    cluster = _cluster(range(9), 0.25 + 0.02 * np.cos(np.arange(9)))
    left_out = left_out_errors(cluster, COVARIANCE)
    assert left_out is not None
    assert np.abs(left_out).mean() < 0.35 * np.abs(cluster.log_errors).mean()
    share, kept = best_share(cluster, left_out)
    assert share == 1.0
    assert (kept == left_out).all()


def test_runs_of_one_job_are_left_out_together() -> None:
    cluster = replace(_cluster([0.0, 0.0, 9.0], [0.4, 0.4, 0.0]), jobs=np.array(["a", "a", "b"]))
    left_out = left_out_errors(cluster, COVARIANCE)
    alone = _cluster([9.0], [0.0]).field(COVARIANCE).expected(_placed([0.0]))[0]
    assert left_out == pytest.approx([0.4 - alone, 0.4 - alone, left_out[2]])  # type: ignore[index]
    assert left_out_errors(replace(cluster, jobs=np.array(["a"] * 3)), COVARIANCE) is None


def test_errors_that_say_nothing_of_each_other_are_not_used() -> None:
    cluster = _cluster(range(6), 0.2 * (-1.0) ** np.arange(6))
    share, kept = best_share(cluster, left_out_errors(cluster, COVARIANCE))
    assert share == 0.0
    assert (kept == cluster.log_errors).all()


def test_of_what_says_too_much_a_share_is_believed() -> None:
    cluster = _cluster([0.0, 50.0], [0.1, 0.1])
    share, kept = best_share(cluster, np.array([-0.09, -0.11]))
    assert share == 0.5
    assert kept == pytest.approx([0.005, -0.005])
    assert best_share(cluster, None) == (1.0, None)


def test_many_jobs_are_left_out_in_folds() -> None:
    left_out = left_out_errors(_cluster(range(50), [0.3] * 50), COVARIANCE)
    assert left_out is not None
    assert np.abs(left_out).max() < 0.1


@pytest.mark.parametrize(
    "wrong",
    [{"shared": 0.0}, {"own": math.nan}, {"columns": (1,), "weights": ()}, {"columns": (-1,), "weights": (1.0,)}],
)
def test_a_covariance_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ErrorCovariance(**wrong)


@pytest.fixture(scope="module")
def base(untrained: Path) -> Checkpoint:
    return load_checkpoint(untrained)


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
    """Calibrated by one run of this job, twice as long as predicted."""
    resolved = job.resolved()
    graph = featurize(resolved, build_graph(resolved), rank_layout(resolved))
    known = known_runs(PlacedJobs.of([graph], [resolved.precision.label]), np.array([math.log(2.0)]))
    fields: dict[str, Any] = {
        "base": base.config.name, "known": known, "share": 1.0, "gpus": (job.cluster.gpu.name,), "frameworks": (),
        "domain": domain_of([resolved]), "error_ratios": (0.1, 0.1, 0.1),
    }  # fmt: skip
    config = base.config.model_copy(update={"name": "adapted", "adapter": Adapter(**(fields | changes))})
    return load_checkpoint(save_checkpoint(path, replace(base, config=config), ""))


def test_an_adapter_keeps_a_prediction_whole(job_of: JobOf, base: Checkpoint, tmp_path: Path) -> None:
    job = job_of(parallel={"pipeline": 4, "schedule": "1f1b"})
    plain, adapted = predict(job, checkpoint=base), predict(job, checkpoint=_adapted(base, tmp_path / "a", job))
    factor = adapted.iteration_time_s / plain.iteration_time_s
    prior = base.config.error_covariance
    share = (prior.shared + prior.alike) / (prior.shared + prior.alike + prior.own)
    assert math.log(factor) == pytest.approx(share * math.log(2.0), rel=1e-3)
    before, after = plain.breakdown.by_kind, adapted.breakdown.by_kind
    assert all(after[kind] == pytest.approx(factor * seconds, rel=1e-6) for kind, seconds in before.items())
    parts = [*after.values(), *adapted.breakdown.exposed_communication.values()]
    assert math.fsum(parts) == pytest.approx(adapted.iteration_time_s)
    for stage in adapted.stages:
        assert stage.total_s + stage.bubble_s == pytest.approx(adapted.iteration_time_s, rel=1e-4)
    assert adapted.to_dict()["provenance"]["calibration"] == {"base": "untrained", "runs": 1, "applied": True}


def test_an_adapter_that_is_not_believed_changes_nothing(job_of: JobOf, base: Checkpoint, tmp_path: Path) -> None:
    adapted = predict(job_of(), checkpoint=_adapted(base, tmp_path / "a", job_of(), share=0.0))
    assert adapted.iteration_time_s == predict(job_of(), checkpoint=base).iteration_time_s
    assert adapted.provenance["calibration"]["applied"] is False


def test_a_covariance_or_a_point_of_other_features_is_refused(job_of: JobOf, base: Checkpoint, tmp_path: Path) -> None:
    short = tuple(run.model_copy(update={"point": (0.0,)}) for run in _known(base, tmp_path, job_of()))
    with pytest.raises(CheckpointError, match=r"adapter\.known"):
        _adapted(base, tmp_path / "b", job_of(), known=short)
    beyond = ErrorCovariance(columns=(base.config.num_coordinates,), weights=(1.0,))
    config = base.config.model_copy(update={"error_covariance": beyond})
    with pytest.raises(CheckpointError, match=r"error_covariance\.columns"):
        load_checkpoint(save_checkpoint(tmp_path / "c", replace(base, config=config), ""))


def _known(base: Checkpoint, path: Path, job: TrainingJob) -> Any:
    adapter = _adapted(base, path / "known", job).config.adapter
    assert adapter is not None
    return adapter.known


def test_an_adapter_of_an_earlier_version_says_what_to_do(job_of: JobOf, base: Checkpoint, tmp_path: Path) -> None:
    folder = _adapted(base, tmp_path / "a", job_of()).path
    assert folder is not None
    config = json.loads((folder / "config.json").read_text())
    config["shrinkage"] = {"offset": 3.0, "factors": 1.0, "local": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_checkpoint(folder).config.adapter is not None
    config["adapter"] = {"base": "released", "mode": "offset", "log_factors": {}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="calibrate its runs again"):
        load_checkpoint(folder)


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
