"""The regression over measured runs: exact where it can be checked, humble far away, deaf to what says nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern

from gnn_predictor import gaussian_process
from gnn_predictor.gaussian_process import GaussianProcess, Kernel, Names, fit_kernel
from gnn_predictor.whole_job import WholeJobs

NOISE = 0.01


def _kernel(coordinates: int = 2, scale: float = 2.0) -> Kernel:
    """One that matters, and one that hardly does."""
    return Kernel(
        columns=torch.arange(coordinates),
        weights=torch.full((2, coordinates), scale, dtype=torch.float64),
        category_weights=torch.tensor([[1.0, 0.5], [1.0, 1.0]], dtype=torch.float64),
        variances=torch.tensor([0.5, 1e-12], dtype=torch.float64),
        noise=torch.tensor(NOISE, dtype=torch.float64),
        mean=torch.tensor(0.3, dtype=torch.float64),
    )


def _jobs(count: int, seed: int = 0, coordinates: int = 2) -> tuple[WholeJobs, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(count, coordinates, generator=generator, dtype=torch.float64) * 4
    return WholeJobs(points, points[:, 0] - 3.0), torch.zeros(count, 2, dtype=torch.long)


def _measured(jobs: WholeJobs) -> torch.Tensor:
    return jobs.log_physical_s + torch.sin(jobs.coordinates[:, 0]) + 0.3


def _process(count: int = 40) -> tuple[GaussianProcess, WholeJobs, torch.Tensor]:
    jobs, codes = _jobs(count)
    return GaussianProcess.of(_kernel(), jobs, codes, _measured(jobs)), jobs, codes


def test_the_posterior_is_that_of_a_well_kept_library() -> None:
    process, jobs, _ = _process()
    asked, asked_codes = _jobs(15, seed=1)
    log_seconds, deviation = process.posterior(asked, asked_codes)
    oracle = GaussianProcessRegressor(0.5 * Matern(length_scale=0.5, nu=1.5), alpha=NOISE + 1e-5, optimizer=None)
    oracle.fit(jobs.coordinates.numpy(), (_measured(jobs) - jobs.log_physical_s - 0.3).numpy())
    mean, expected_deviation = oracle.predict(asked.coordinates.numpy(), return_std=True)
    assert (log_seconds - asked.log_physical_s - 0.3).numpy() == pytest.approx(mean, abs=1e-3)
    assert deviation.numpy() == pytest.approx(expected_deviation, abs=1e-3)


def test_of_many_runs_the_nearest_alone_make_the_deviation_no_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    process, _, _ = _process(200)
    asked, codes = _jobs(30, seed=1)
    monkeypatch.setattr(gaussian_process, "_NEAREST", 200)
    exact_mean, exact = process.posterior(asked, codes)
    monkeypatch.setattr(gaussian_process, "_NEAREST", 20)
    mean, nearest = process.posterior(asked, codes)
    assert torch.equal(mean, exact_mean)
    assert (nearest >= exact - 1e-9).all()
    assert (nearest < exact + 0.1).all()


def test_beside_a_run_it_is_sure_and_far_away_it_knows_nothing() -> None:
    process, jobs, codes = _process()
    log_seconds, deviation = process.posterior(jobs, codes)
    assert (log_seconds - _measured(jobs)).abs().max() < 0.15
    assert deviation.max() < NOISE**0.5
    far = WholeJobs(jobs.coordinates + 100.0, jobs.log_physical_s)
    log_seconds, deviation = process.posterior(far, codes)
    assert log_seconds.numpy() == pytest.approx((far.log_physical_s + 0.3).numpy(), abs=1e-6)
    assert deviation.numpy() == pytest.approx(np.full(len(codes), 0.5**0.5), abs=1e-6)


def test_another_gpu_or_precision_is_farther_away() -> None:
    process, jobs, codes = _process()
    sure = [process.posterior(jobs, codes + torch.tensor(other))[1].mean().item() for other in ([0, 0], [0, 1], [1, 1])]
    assert sure == sorted(sure)
    assert sure[0] < sure[1] < sure[2]


def test_more_runs_are_as_if_all_had_been_there() -> None:
    whole, jobs, codes = _process(60)
    first, later = torch.arange(40), torch.arange(40, 60)
    part = GaussianProcess.of(_kernel(), jobs.select(first), codes[first], _measured(jobs)[first])
    grown = part.with_runs(jobs.select(later), codes[later], _measured(jobs)[later])
    asked, asked_codes = _jobs(10, seed=1)
    for some, others in zip(grown.posterior(asked, asked_codes), whole.posterior(asked, asked_codes), strict=True):
        assert torch.allclose(some, others)


def test_more_runs_than_memory_is_meant_for_are_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaussian_process, "_MOST_RUNS", 25)
    process, _, _ = _process(60)
    assert len(process.points) == len(process.pulls) == 25


def test_what_says_nothing_is_left_out() -> None:
    jobs, codes = _jobs(300, coordinates=12)
    kernel = fit_kernel(jobs.coordinates, codes, _measured(jobs) - jobs.log_physical_s, torch.ones(300), seed=0)
    heard = kernel.weights.abs().max(0).values
    assert 0 in kernel.columns.tolist()
    assert kernel.columns[heard.argmax()] == 0
    process = GaussianProcess.of(kernel, jobs, codes, _measured(jobs))
    asked, asked_codes = _jobs(100, seed=1, coordinates=12)
    log_seconds, _ = process.posterior(asked, asked_codes)
    assert (log_seconds - _measured(asked)).abs().mean() < 0.05
    again = fit_kernel(jobs.coordinates, codes, _measured(jobs) - jobs.log_physical_s, torch.ones(300), seed=0)
    assert torch.equal(kernel.weights, again.weights)


def test_it_comes_back_from_its_tensors() -> None:
    process, _, _ = _process()
    asked, codes = _jobs(10, seed=1)
    back = GaussianProcess.from_tensors(process.tensors())
    for some, others in zip(back.posterior(asked, codes), process.posterior(asked, codes), strict=True):
        assert torch.allclose(some, others, atol=1e-4)
    incomplete = {name: each for name, each in process.tensors().items() if name != "pulls"}
    with pytest.raises(KeyError, match="pulls"):
        GaussianProcess.from_tensors(incomplete)


def test_a_name_that_is_not_known_is_none_of_the_others() -> None:
    names = Names(("A100", "H100"), ("bf16",))
    assert names.codes(["H100", "TPU"], ["bf16", "fp8"]).tolist() == [[1, 0], [-1, -1]]
    process, jobs, codes = _process()
    unknown = replace(process, codes=codes + 5).posterior(jobs, codes - 1)
    assert unknown[1].min() > 0.3
