"""What is constant in a source's times is not learnt by a network that has source effects beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gnn_predictor.batch import collate
from gnn_predictor.crossvalidation import member_tasks
from gnn_predictor.dataset import OperatorExamples, RunExamples
from gnn_predictor.fitting import FitSettings, fit
from gnn_predictor.network import NetworkConfig
from gnn_predictor.source_effects import SourceEffects

SETTINGS = FitSettings(epochs=40, batch_size=4, operator_batch_size=16, average_from=0.5)
FACTOR = 2.0  # by which source b is slower


@pytest.fixture(scope="module")
def two_clusters(runs: RunExamples) -> RunExamples:
    """The same law on both; micro batches tell which runs are whose."""
    is_slow = (runs.table["source_id"] == "b").to_numpy()
    return replace(runs, table=runs.table.assign(iter_time_s=runs.table["iter_time_s"] * np.where(is_slow, FACTOR, 1)))


def slowness_of_b(
    config: NetworkConfig, settings: FitSettings, clusters: RunExamples, truth: RunExamples, operators: OperatorExamples
) -> float:
    """How much slower a trained network takes b to be than a, over what the law says."""
    network = fit(config, settings, clusters, operators)
    with torch.inference_mode():
        seconds = network(collate(truth.graphs, config.devices))[0].numpy()
    ratio = np.log(seconds / truth.table["iter_time_s"].to_numpy())
    is_b = (truth.table["source_id"] == "b").to_numpy()
    return float(np.exp(ratio[is_b].mean() - ratio[~is_b].mean()))


def test_a_network_with_source_effects_takes_no_source_for_its_jobs(
    config: NetworkConfig, runs: RunExamples, two_clusters: RunExamples, operators: OperatorExamples
) -> None:
    plain, population = (
        slowness_of_b(config, replace(SETTINGS, source_effects=effects), two_clusters, runs, operators)
        for effects in (False, True)
    )
    assert plain > 1.15
    assert population == pytest.approx(1.0, abs=0.07)


def test_factors_are_zero_on_the_average_of_what_the_loss_weighs() -> None:
    sources, weight = ["a", "b", "a", "c"], torch.tensor([1.0, 2.0, 0.5, 3.0])
    effects = SourceEffects(sources, weight)
    with torch.no_grad():
        effects.log_factors.copy_(torch.tensor([0.4, -0.1, 0.2]))
        factors = effects(torch.arange(4))
        one = SourceEffects(["a", "a"], torch.ones(2))
        one.log_factors.fill_(0.7)
        assert one(torch.tensor([0, 1])).tolist() == [0.0, 0.0]
    assert float(factors @ weight) == pytest.approx(0.0, abs=1e-6)
    assert factors[0] == factors[2]
    assert float(factors[0] - factors[1]) == pytest.approx(0.5)


def test_the_prior_draws_factors_to_nothing() -> None:
    effects = SourceEffects(["a", "b"], torch.ones(2))
    with torch.no_grad():
        effects.log_factors.copy_(torch.tensor([0.5, -0.5]))
    effects.penalty().backward()
    assert effects.log_factors.grad is not None
    assert torch.equal(effects.log_factors.grad.sign(), torch.tensor([1.0, -1.0]))


def test_every_second_member_has_source_effects() -> None:
    settings = replace(SETTINGS, source_effects=True)
    tasks = member_tasks("P1-0", (0, 1), (0,), settings, 4)
    assert [task.settings.source_effects for task in tasks] == [False, True, False, True]
    assert [task.settings.seed for task in tasks] == [0, 1, 2, 3]
    assert [task.name for task in tasks] == ["P1-0.0", "P1-0.1", "P1-0.2", "P1-0.3"]
    (alone,) = member_tasks("P1-0", (0, 1), (0,), settings, 1)
    assert not alone.settings.source_effects
    assert not any(task.settings.source_effects for task in member_tasks("P1-0", (0, 1), (0,), SETTINGS, 2))
