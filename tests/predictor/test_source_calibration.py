"""What a few runs of an unseen source are worth: found where there is an offset, and never judged on its own jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dataset_builder.job.schema import TrainingJob
from gnn_predictor import source_calibration
from gnn_predictor.adapter import PlacedJobs
from gnn_predictor.calibration import ClusterErrors
from gnn_predictor.source_calibration import HeldOutSource, calibrated_figures, draws_of, learn_covariance


def _errors(seed: int, offset: float, local: float = 0.0, jobs: int = 12) -> ClusterErrors:
    """Two runs a job; errors of an offset, of what jobs near in the first of three coordinates share, and of noise."""
    random = np.random.default_rng(seed)
    coordinates = random.normal(size=(jobs, 3)).repeat(2, axis=0)
    shared = local * np.sin(2.0 * coordinates[:, 0] + random.uniform(0, 6))
    log_errors = offset + shared + random.normal(0.0, 0.02, 2 * jobs)
    placed = PlacedJobs(torch.from_numpy(coordinates), ("A100-SXM4-80GB",) * 2 * jobs, ("bf16_mixed",) * 2 * jobs)
    return ClusterErrors(placed, log_errors, np.array([f"g{index // 2}" for index in range(2 * jobs)]))


@pytest.fixture(scope="module")
def source_of(job_of: Callable[..., TrainingJob]) -> Callable[..., HeldOutSource]:
    def build(name: str, errors: ClusterErrors) -> HeldOutSource:
        return HeldOutSource(name, errors, (job_of().resolved(),) * len(errors), np.full(len(errors), 0.6))

    return build


def test_no_row_is_judged_by_a_run_of_its_own_job(source_of: Any) -> None:
    source = source_of("slower", _errors(0, 0.4))
    draws = draws_of(source, 5)
    assert len(draws) == source_calibration.NUM_DRAWS
    for draw in draws:
        assert len(draw.calibrating) == 5
        assert not set(draw.calibrating.jobs) & set(draw.judged.jobs)
    again = draws_of(source, 5)
    assert all((a.judged.log_errors == b.judged.log_errors).all() for a, b in zip(draws, again, strict=True))


def test_what_errors_have_in_common_is_learnt() -> None:
    sources = [_errors(seed, offset, 0.2) for seed, offset in enumerate((0.4, -0.3, 0.1, -0.5, 0.3, 0.0))]
    covariance = learn_covariance(sources)
    assert 0.1 < covariance.shared**0.5 < 0.8
    weight = dict(zip(covariance.columns, covariance.weights, strict=True))
    assert weight[0] > 3 * max(weight.get(1, 0.0), weight.get(2, 0.0))
    assert learn_covariance(sources) == covariance


def test_an_offset_of_a_source_is_found_with_what_the_others_say(
    source_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_calibration, "NUM_DRAWS", 2)
    learnt_from: list[tuple[int, ...]] = []

    def recorded(sources: Any) -> Any:
        learnt_from.append(tuple(id(source) for source in sources))
        return learn_covariance(sources)

    monkeypatch.setattr(source_calibration, "learn_covariance", recorded)
    sources = [source_of(str(seed), _errors(seed, offset)) for seed, offset in enumerate((0.4, -0.3, 0.5))]
    figures = calibrated_figures(sources)
    for source, own in zip(sources, learnt_from, strict=True):
        assert id(source.errors) not in own
        assert len(own) == 2
        judged = figures["by_source"][source.name]
        assert judged["mape_percent"] < 0.3 * judged["before_mape_percent"]
        assert judged["coverage_percent"] > 90
    assert figures["macro_median_high_over_low"] < np.exp(2 * 0.6)
    assert list(figures["macro_mape_percent_by_runs"]) == ["1", "3", "10"]


def test_jobs_on_a_gpu_that_was_not_drawn_stay_as_they_are(source_of: Any, job_of: Any) -> None:
    source = source_of("slower", _errors(0, 0.4))
    other = job_of(cluster={"gpu": "H100-SXM5-80GB"}).resolved()
    draw = draws_of(replace(source, jobs=(*source.jobs[:-6], *[other] * 6)), 1)[0]
    after, half_width = draw.after(learn_covariance([source.errors]))
    assert 0 < draw.applies.sum() < len(draw.applies)
    assert (after[~draw.applies] == draw.judged.log_errors[~draw.applies]).all()
    assert (half_width[~draw.applies] == 0.6).all()
    assert (np.abs(after[draw.applies]) < np.abs(draw.judged.log_errors[draw.applies])).all()


def test_a_source_of_few_rows_or_one_job_is_not_judged(source_of: Any) -> None:
    few, one = source_of("few", _errors(0, 0.4, jobs=2)), _errors(1, 0.4)
    alone = source_of("one", replace(one, jobs=np.full(len(one), "g")))
    figures = calibrated_figures([few, alone])
    assert figures["by_source"] == {}
    assert figures["macro_mape_percent"] is None
