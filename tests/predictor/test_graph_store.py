"""Graphs on disk: they come back as they went in, few at a time, and training learns from them as from memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataset_builder.corpus.build import Corpus
from gnn_predictor.crossvalidation import FitTask, Workshop, fit_all, trained
from gnn_predictor.dataset import OperatorExamples, RunExamples
from gnn_predictor.examples import ExampleLimits, load_examples
from gnn_predictor.features import GraphArrays
from gnn_predictor.fitting import FitSettings, fit
from gnn_predictor.graph_store import GROUP, GraphStore, in_parts
from gnn_predictor.network import NetworkConfig, Predictor

SETTINGS = FitSettings(epochs=4, batch_size=8, operator_batch_size=32, average_from=0.5)


@pytest.fixture(scope="module")
def many(runs: RunExamples) -> RunExamples:
    """Enough runs for several row groups."""
    return runs.select(np.tile(np.arange(len(runs)), 7))


@pytest.fixture(scope="module")
def stored(many: RunExamples, tmp_path_factory: pytest.TempPathFactory) -> RunExamples:
    store = GraphStore.write(iter(many.graphs), tmp_path_factory.mktemp("scratch"), held=GROUP)
    return RunExamples(many.table, store)


def same(first: GraphArrays, second: GraphArrays) -> bool:
    return all(
        np.array_equal(one, other) and getattr(one, "dtype", None) == getattr(other, "dtype", None)
        for one, other in (
            (getattr(first, field.name), getattr(second, field.name)) for field in dataclasses.fields(GraphArrays)
        )
    )


def test_graphs_come_back_as_they_went_in(many: RunExamples, stored: RunExamples) -> None:
    assert len(stored) == len(many)
    assert all(map(same, many.graphs, stored.graphs))
    chosen = np.array([5, 0, 90, 33])
    assert all(map(same, many.select(chosen).graphs, stored.select(chosen).graphs[:]))
    assert len(list(itertools.chain(*in_parts(stored.graphs)))) == len(many)


def test_nothing_of_the_scratch_file_is_left(many: RunExamples, tmp_path: Path) -> None:
    store = GraphStore.write(iter(many.graphs), tmp_path / "new", held=GROUP)
    assert list((tmp_path / "new").iterdir()) == []
    assert same(store[40], many.graphs[40])

    def broken() -> Iterator[GraphArrays]:
        yield many.graphs[0]
        raise ValueError("a run without a graph")

    with pytest.raises(ValueError, match="without a graph"):
        GraphStore.write(broken(), tmp_path / "new", held=GROUP)
    assert list((tmp_path / "new").iterdir()) == []


@given(held=st.integers(1, 5 * GROUP), seed=st.integers(0, 99), share=st.integers(1, 4))
def test_the_order_is_random_and_reads_every_group_once(stored: RunExamples, held: int, seed: int, share: int) -> None:
    graphs = stored.graphs
    assert isinstance(graphs, GraphStore)
    rows = np.arange(0, len(graphs), share)
    chosen = GraphStore(graphs._file, rows, held)
    order = list(chosen.shuffled_rows(torch.Generator().manual_seed(seed)))
    assert sorted(order) == list(range(len(rows)))
    groups = (rows[order] // GROUP).tolist()
    together = max(1, held // GROUP)
    first = {group: groups.index(group) for group in groups}
    last = {group: len(groups) - groups[::-1].index(group) for group in groups}
    assert all(sum(first[group] <= at < last[group] for group in first) <= together for at in range(len(groups)))


def weights(network: Predictor) -> torch.Tensor:
    return torch.cat([value.flatten().float() for value in network.state_dict().values()])


def test_training_from_disk_learns_as_from_memory(
    config: NetworkConfig, many: RunExamples, stored: RunExamples, operators: OperatorExamples
) -> None:
    histories: tuple[list[float], list[float]] = ([], [])
    networks = [
        fit(config, SETTINGS, each, operators, report=lambda _, metrics, to=history: to.append(metrics["run_loss"]))
        for each, history in zip((many, stored), histories, strict=True)
    ]
    for name in ("node_scale", "workload_scale"):
        torch.testing.assert_close(*(getattr(network, name) for network in networks), rtol=1e-4, atol=1e-5)
    assert histories[1][0] == pytest.approx(histories[0][0], rel=0.2)
    assert histories[1][-1] == pytest.approx(histories[0][-1], rel=0.3)
    assert histories[1][-1] < 0.5 * histories[1][0]


def test_a_killed_training_from_disk_ends_as_if_it_was_not(
    tmp_path: Path, config: NetworkConfig, stored: RunExamples, operators: OperatorExamples
) -> None:
    class Killed(Exception):
        pass

    def kill(epoch: int, metrics: dict[str, float]) -> None:
        if epoch == 2:
            raise Killed

    with pytest.raises(Killed):
        fit(config, SETTINGS, stored, operators, tmp_path / "state", kill)
    resumed = fit(config, SETTINGS, stored, operators, tmp_path / "state")
    assert torch.equal(weights(resumed), weights(fit(config, SETTINGS, stored, operators)))


def test_workers_share_the_file_and_fits_from_it_have_their_own_names(
    tmp_path: Path, config: NetworkConfig, many: RunExamples, stored: RunExamples, operators: OperatorExamples
) -> None:
    rows = tuple(range(len(stored)))
    short = replace(SETTINGS, epochs=1)
    tasks = [FitTask(name, replace(short, seed=i), rows, (0, 1, 2)) for i, name in enumerate(("a", "b"))]
    shops = [Workshop(config, stored, operators, tmp_path / str(workers), workers) for workers in (1, 2)]
    for shop in shops:
        fit_all(tasks, shop)
    one, two = (trained(tasks, shop).state_dict() for shop in shops)
    assert all(torch.equal(one[name], two[name]) for name in one)
    fit_all(tasks, replace(shops[0], runs=many))
    assert len(list((tmp_path / "1").glob("*.weights"))) == 4


@pytest.mark.parametrize("graphs_held", [GROUP, 1000])
def test_a_corpus_is_the_same_from_disk_and_from_memory(small_corpus: Corpus, tmp_path: Path, graphs_held: int) -> None:
    limits = ExampleLimits(max_operators=60)
    memory = load_examples(small_corpus, limits, tmp_path)
    bounded = load_examples(small_corpus, replace(limits, graphs_held=graphs_held), tmp_path)
    assert isinstance(bounded.runs.graphs, GraphStore if graphs_held < len(memory.runs) else tuple)
    assert all(map(same, memory.runs.graphs, bounded.runs.graphs))
    assert memory.runs.table.equals(bounded.runs.table)
    assert list(memory.measurements) == list(bounded.measurements)
    assert list(memory.trusted_jobs()) == list(bounded.trusted_jobs())
    assert (memory.reference, memory.devices) == (bounded.reference, bounded.devices)
    assert memory.operators.table.equals(bounded.operators.table)


def test_operators_are_read_where_they_are_asked_for(small_corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: dict[str, Any] = {"ops": 16}
    monkeypatch.setattr("dataset_builder.corpus.build.ROW_GROUPS", groups)
    rows = np.arange(3, len(small_corpus.operators), 7)
    assert small_corpus.operators_at(rows) == [small_corpus.operators[row] for row in rows]
    assert small_corpus.operators_at(rows[:0]) == []
