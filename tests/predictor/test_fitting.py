"""Training: reproducible, resumable without a trace, and it learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dataset_builder.corpus.splits import Split
from dataset_builder.job.errors import JobError
from dataset_builder.job.schema import TrainingJob
from gnn_predictor.crossvalidation import (
    Workshop,
    conformal_factor,
    fit_all,
    predict_graphs,
    split_tasks,
    trained,
)
from gnn_predictor.dataset import OperatorExamples, RunExamples
from gnn_predictor.fitting import FitSettings, fit
from gnn_predictor.network import NetworkConfig, Predictor

JobOf = Callable[..., TrainingJob]
SETTINGS = FitSettings(epochs=4, batch_size=4, operator_batch_size=16, average_from=0.5)


def weights(network: Predictor) -> torch.Tensor:
    return torch.cat([value.flatten().float() for value in network.state_dict().values()])


def test_equal_seeds_give_equal_weights(config: NetworkConfig, runs: RunExamples, operators: OperatorExamples) -> None:
    first, again = (weights(fit(config, SETTINGS, runs, operators)) for _ in range(2))
    other = weights(fit(config, replace(SETTINGS, seed=1), runs, operators))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("killed_after", "effects"), [(1, False), (3, False), (2, True)])
def test_a_killed_training_ends_as_if_it_was_not(
    tmp_path: Path,
    config: NetworkConfig,
    runs: RunExamples,
    operators: OperatorExamples,
    killed_after: int,
    effects: bool,
) -> None:
    settings = replace(SETTINGS, source_effects=effects)

    class Killed(Exception):
        pass

    def kill(epoch: int, metrics: dict[str, float]) -> None:
        if epoch == killed_after:  # this epoch ran, but its state was not saved
            raise Killed

    with pytest.raises(Killed):
        fit(config, settings, runs, operators, tmp_path / "state", kill)
    resumed = fit(config, settings, runs, operators, tmp_path / "state")
    assert torch.equal(weights(resumed), weights(fit(config, settings, runs, operators)))


def test_training_learns_times_it_did_not_see(
    tmp_path: Path, config: NetworkConfig, runs: RunExamples, operators: OperatorExamples
) -> None:
    split = Split("P1-0", tuple(i for i in range(16) if i % 4), tuple(range(0, 16, 4)))
    shop = Workshop(config, runs, operators, tmp_path, num_workers=1)
    settings = replace(SETTINGS, epochs=60)
    tasks = split_tasks(split, shop, settings, members=1)
    histories = fit_all(tasks, shop)
    test = runs.select(np.array(split.test))
    predicted = predict_graphs(trained(tasks, shop), test.graphs)["network_s"].to_numpy()
    error = np.abs(predicted / test.table["iter_time_s"].to_numpy() - 1)
    assert error.mean() < 0.15
    history = next(iter(histories.values()))
    assert history[-1]["operator_loss"] < 0.5 * history[0]["operator_loss"]


def test_finished_fits_are_not_repeated_and_other_settings_are(
    tmp_path: Path, config: NetworkConfig, runs: RunExamples, operators: OperatorExamples
) -> None:
    split = Split("P1-0", tuple(range(12)), tuple(range(12, 16)))
    shop = Workshop(config, runs, operators, tmp_path, num_workers=1)
    for settings in (SETTINGS, SETTINGS, replace(SETTINGS, learning_rate=1e-3)):
        fit_all(split_tasks(split, shop, settings, members=1), shop)
    assert len(list(tmp_path.glob("*.weights"))) == 2


def test_one_run_has_scales(config: NetworkConfig, runs: RunExamples, operators: OperatorExamples) -> None:
    """A column of one row varies by nothing, so what it says is mute, not NaN."""
    fitted = fit(config, SETTINGS, runs.select(np.array([0])), operators)
    assert torch.isfinite(weights(fitted)).all()


def test_a_loss_that_is_not_finite_stops_the_fit(
    tmp_path: Path, config: NetworkConfig, runs: RunExamples, operators: OperatorExamples
) -> None:
    wrong = replace(runs, table=runs.table.assign(iter_time_s=np.nan))
    shop = Workshop(config, wrong, operators, tmp_path, num_workers=2)
    tasks = split_tasks(Split("P1-0", tuple(range(12)), tuple(range(12, 16))), shop, SETTINGS, members=2)
    with pytest.raises(JobError, match=r"P1-0\.\d: epoch 1 of 4: run_loss is nan, .*fit.learning_rate below 0.003"):
        fit_all(tasks, shop)
    assert not list(tmp_path.glob("*.state"))


def test_conformal_factor_covers_its_level() -> None:
    generator = np.random.default_rng(0)
    spread = generator.uniform(0.02, 0.2, 4000)
    error = generator.laplace(0.0, spread)
    factor = conformal_factor(error[:2000], spread[:2000], 0.9)
    covered = np.abs(error[2000:]) <= factor * spread[2000:]
    assert 0.87 < covered.mean() < 0.93
