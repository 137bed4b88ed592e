"""Training by several processes: the loss of one, written by one; killed at any moment, nothing is lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnn_predictor import ranks
from gnn_predictor.crossvalidation import FitTask, Workshop, fit_all, trained
from gnn_predictor.dataset import OperatorExamples, RunExamples
from gnn_predictor.fitting import FitSettings, fit
from gnn_predictor.network import NetworkConfig

SETTINGS = FitSettings(epochs=6, batch_size=5, operator_batch_size=33, average_from=0.5)  # batches of 5, 5, 5 and 1
_FORK = multiprocessing.get_context("fork")  # what was imported once serves all ranks


def _as_rank(rank: int, count: int, port: int, work: Callable[..., None], arguments: Sequence[Any]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with ranks.joined():
        work(*arguments)


def _start(count: int, work: Callable[..., None], *arguments: Any) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [_FORK.Process(target=_as_rank, args=(rank, count, port, work, arguments)) for rank in range(count)]
    for process in started:
        process.start()
    return started


def _run(count: int, work: Callable[..., None], *arguments: Any) -> None:
    for process in _start(count, work, *arguments):
        process.join(120)
        assert process.exitcode == 0


def _record(
    file: Path, settings: FitSettings, config: NetworkConfig, runs: RunExamples, operators: OperatorExamples
) -> None:
    """Trains and leaves the losses of all epochs, and the weights, as the leader has them."""
    history: list[dict[str, float]] = []
    network = fit(config, settings, runs, operators, report=lambda _, metrics: history.append(metrics))
    file.with_suffix(f".{ranks.rank()}").write_text(json.dumps(history))
    torch.save(network.state_dict(), file.with_suffix(f".{ranks.rank()}.pt"))


def _weights(file: Path) -> torch.Tensor:
    return torch.cat([value.flatten().float() for value in torch.load(file, weights_only=True).values()])


@given(count=st.integers(1, 9), length=st.integers(1, 40))
def test_ranks_share_a_batch_equally_often(count: int, length: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "count", lambda: count)
        shares = []
        for rank in range(count):
            patch.setattr(ranks, "rank", lambda rank=rank: rank)
            shares.append(ranks.share(length))
    assert all(shares)
    often = np.bincount(np.concatenate(shares), minlength=length)
    assert often.min() == often.max()
    assert len(shares[0]) - len(shares[-1]) in (0, 1)


@pytest.mark.parametrize(("count", "effects"), [(2, False), (3, True)])
def test_the_loss_of_several_ranks_is_that_of_one(
    tmp_path: Path, config: NetworkConfig, runs: RunExamples, operators: OperatorExamples, count: int, effects: bool
) -> None:
    """Without what is dropped at random, which each rank draws for its own rows, only rounding differs."""
    config = replace(
        config, device_dropout=0, software_dropout=0, format_dropout=0, workload_dropout=0, feature_dropout=0
    )
    settings = replace(SETTINGS, source_effects=effects)
    _run(1, _record, tmp_path / "one", settings, config, runs, operators)
    _run(count, _record, tmp_path / "several", settings, config, runs, operators)
    one, several = (json.loads((tmp_path / name).with_suffix(".0").read_text()) for name in ("one", "several"))
    for name in ("run_loss", "operator_loss", "run_abs_log_error"):
        assert [epoch[name] for epoch in several] == pytest.approx([epoch[name] for epoch in one], rel=2e-3), name
    leader, follower = (_weights(tmp_path / f"several.{rank}.pt") for rank in (0, count - 1))
    assert torch.equal(leader, follower)
    assert json.loads((tmp_path / "several.1").read_text()) == []  # the leader alone reports


def test_with_what_is_dropped_at_random_the_loss_falls_as_that_of_one(
    tmp_path: Path, config: NetworkConfig, runs: RunExamples, operators: OperatorExamples
) -> None:
    _run(1, _record, tmp_path / "one", SETTINGS, config, runs, operators)
    _run(2, _record, tmp_path / "two", SETTINGS, config, runs, operators)
    one, two = (json.loads((tmp_path / name).with_suffix(".0").read_text()) for name in ("one", "two"))
    assert two[0]["run_loss"] == pytest.approx(one[0]["run_loss"], rel=0.1)
    assert two[-1]["run_loss"] == pytest.approx(one[-1]["run_loss"], rel=0.2)
    assert two[-1]["run_loss"] < 0.8 * two[0]["run_loss"]


def _fit_tasks(directory: Path, config: NetworkConfig, runs: RunExamples, operators: OperatorExamples) -> None:
    """Two fits; a follower's directory is another one, as on a machine that shares no disk with the leader's."""
    directory = directory if ranks.is_leader() else directory / "follower"
    fit_all(_tasks(operators), Workshop(config, runs, operators, directory, num_workers=1))


def _tasks(operators: OperatorExamples) -> list[FitTask]:
    rows, all_operators = tuple(range(12)), tuple(range(len(operators)))
    return [
        FitTask(name, replace(SETTINGS, seed=seed, source_effects=name == "b"), rows, all_operators)
        for seed, name in enumerate(("a", "b"))
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_killed_at_any_moment_it_ends_as_if_it_was_not(
    tmp_path: Path, config: NetworkConfig, runs: RunExamples, operators: OperatorExamples, count: int
) -> None:
    """SIGKILL to one rank at random moments, the others after it as under torchrun, until nothing is left to do."""
    examples = (config, runs, operators)
    _run(count, _fit_tasks, tmp_path / "whole", *examples)
    moments, exit_codes = random.Random(count), []
    for latest_s in (0.3, 1.0, 1.0, 1.0):
        processes = _start(count, _fit_tasks, tmp_path / "killed", *examples)
        processes[0].join(moments.uniform(0.1, latest_s))
        moments.shuffle(processes)
        for process in processes:
            process.kill()
            process.join()
        exit_codes.append(processes[0].exitcode)
    assert -signal.SIGKILL in exit_codes
    _run(count, _fit_tasks, tmp_path / "killed", *examples)
    tasks = _tasks(operators)
    whole, resumed = (
        trained(tasks, Workshop(config, runs, operators, tmp_path / name, num_workers=1)).state_dict()
        for name in ("whole", "killed")
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    histories = [
        [[epoch["run_loss"] for epoch in json.loads(file.read_text())] for file in sorted(folder.glob("*.history"))]
        for folder in (tmp_path / "whole", tmp_path / "killed")
    ]
    assert histories[0] == histories[1]
    assert [len(history) for history in histories[1]] == [SETTINGS.epochs] * 2
    assert not list((tmp_path / "killed" / "follower").glob("*"))


def test_ranks_go_on_where_one_was_killed(
    tmp_path: Path, config: NetworkConfig, runs: RunExamples, operators: OperatorExamples
) -> None:
    """The states serve any number of ranks."""
    short = replace(SETTINGS, epochs=3)
    state = tmp_path / "state"

    def begin() -> None:
        class Killed(Exception):
            pass

        def kill(epoch: int, _: dict[str, float]) -> None:
            if epoch == 2:
                raise Killed

        with pytest.raises(Killed):
            fit(config, short, runs, operators, state, kill)

    def go_on() -> None:
        epochs: list[int] = []
        fit(config, short, runs, operators, state, lambda epoch, _: epochs.append(epoch))
        assert epochs == ([2] if ranks.is_leader() else [])

    _run(1, begin)
    _run(2, go_on)
    assert torch.load(state, weights_only=True)["epoch"] == 3
