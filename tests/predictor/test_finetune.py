"""Training that goes on from a checkpoint: it starts there, and nowhere it should not."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from gnn_predictor.adapter import Adapter
from gnn_predictor.batch import collate
from gnn_predictor.checkpoint import Checkpoint, CheckpointConfig, CheckpointError
from gnn_predictor.crossvalidation import FitTask, Workshop, fit_all, trained
from gnn_predictor.dataset import OperatorExamples, RunExamples
from gnn_predictor.finetune import known_devices, known_libraries, start_from
from gnn_predictor.fitting import FitSettings, fit
from gnn_predictor.network import Ensemble, NetworkConfig, Predictor

SETTINGS = FitSettings(epochs=3, batch_size=8, operator_batch_size=32)


@pytest.fixture
def checkpoint(config: NetworkConfig) -> Checkpoint:
    torch.manual_seed(7)
    members = [Predictor(config) for _ in range(2)]
    for member in members:
        member.set_scales(torch.rand_like(member.node_scale) + 1, torch.rand_like(member.workload_scale) + 1)
    description = CheckpointConfig(corpus_hash="none", name="start", network=asdict(config))
    return Checkpoint(description, dict(Ensemble(members).state_dict()), path=Path("start"))


def test_fits_start_from_the_members_in_turn(
    tmp_path: Path, checkpoint: Checkpoint, config: NetworkConfig, runs: RunExamples, operators: OperatorExamples
) -> None:
    start = start_from(checkpoint, config)
    rows = tuple(range(len(runs)))
    tasks = [FitTask(f"f.{seed}", replace(SETTINGS, epochs=0, seed=seed), rows, (0, 1)) for seed in range(3)]
    shop = Workshop(config, runs, operators, tmp_path, num_workers=1, start=start)
    networks = [fit(start.of(task.settings.seed), task.settings, runs, operators) for task in tasks]
    for seed, network in enumerate(networks):
        prefix = f"members.{seed % 2}."
        for name, value in network.state_dict().items():
            assert torch.equal(value, checkpoint.tensors[prefix + name]), name
    fits = [replace(task, settings=replace(task.settings, epochs=1)) for task in tasks[:1]]
    fit_all(fits, shop)
    fit_all(fits, replace(shop, start=None))
    assert len(list(tmp_path.glob("*.weights"))) == 2  # the start is part of a fit's name
    went_on = trained(fits, shop).state_dict()
    assert torch.equal(went_on["members.0.node_scale"], checkpoint.tensors["members.0.node_scale"])


def test_it_starts_better_than_from_random_weights_and_leaves_the_start_alone(
    config: NetworkConfig, runs: RunExamples, operators: OperatorExamples
) -> None:
    def losses(start: NetworkConfig | Predictor) -> list[float]:
        found: list[float] = []
        fit(start, SETTINGS, runs, operators, report=lambda _, metrics: found.append(metrics["run_loss"]))
        return found

    learnt = fit(config, replace(SETTINGS, epochs=20), runs, operators)
    before = {name: value.clone() for name, value in learnt.state_dict().items()}
    assert losses(learnt)[0] < 0.5 * losses(config)[0]
    assert all(torch.equal(value, before[name]) for name, value in learnt.state_dict().items())


def test_a_new_device_is_added_as_one_that_is_unknown(
    checkpoint: Checkpoint, config: NetworkConfig, runs: RunExamples
) -> None:
    devices = (*known_devices(checkpoint), "measured cpu")
    grown = start_from(checkpoint, replace(config, devices=devices)).of(0).eval()
    old = start_from(checkpoint, config).of(0).eval()
    graphs = [runs.graphs[0], replace(runs.graphs[1], device_name="measured cpu")]
    with torch.inference_mode():
        torch.testing.assert_close(grown(collate(graphs, devices))[0], old(collate(graphs, config.devices))[0])
    assert not grown.device.weight[-1].any()


def test_a_new_library_is_added_as_one_that_is_unknown(
    checkpoint: Checkpoint, config: NetworkConfig, operators: OperatorExamples
) -> None:
    grown = (
        start_from(checkpoint, replace(config, libraries=(*known_libraries(checkpoint), "of my cluster"))).of(0).eval()
    )
    old = start_from(checkpoint, config).of(0).eval()
    new_to_it = int(operators.library.max()) + 1
    rows = torch.arange(len(operators))
    measured = replace(operators, library=torch.where(operators.library == 0, new_to_it, operators.library))
    with torch.inference_mode():
        seconds, expected = (
            one.node_times(each.batch(rows)).seconds for one, each in ((grown, measured), (old, operators))
        )
    torch.testing.assert_close(seconds, expected)
    assert not grown.library.weight[-1].any()


def test_a_wrong_checkpoint_is_refused(checkpoint: Checkpoint, config: NetworkConfig) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint start: has network\.hidden=16, this training 24"):
        start_from(checkpoint, replace(config, hidden=24))
    with pytest.raises(CheckpointError, match="no baseline B3"):
        start_from(checkpoint, config, blind=True)
    adapted = checkpoint.config.model_copy(update={"adapter": Adapter.model_construct()})
    with pytest.raises(CheckpointError, match="is a calibration"):
        start_from(replace(checkpoint, config=adapted), config)
    start_from(checkpoint, replace(config, device_dropout=0.0))  # how it is trained may be another
