"""Measured seconds of nodes beside the network's: the right nodes are compared, and another graph's are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dataset_builder.corpus.measurements import read_runs
from dataset_builder.job.errors import JobError
from dataset_builder.measuring.table import NODE_COLUMNS
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.checkpoint import load_checkpoint
from gnn_predictor.evaluate import main
from gnn_predictor.features import featurize
from gnn_predictor.node_errors import node_errors
from gnn_predictor.prediction import job_times
from tests.predictor.test_evaluate import ROW

_FACTOR = 1.25  # predicted over measured seconds


def _written(path: Path, untrained: Path) -> tuple[Path, Path]:
    """A run and its labels on two ranks: the first waits for messages, both are the network's seconds over _FACTOR."""
    runs, nodes = path / "runs.csv", path / "nodes.csv"
    pd.DataFrame([ROW]).to_csv(runs, index=False)
    job = read_runs(runs)[0].job
    assert job is not None
    job = job.resolved()
    graph = build_graph(job)
    times = job_times([job], [featurize(job, graph, rank_layout(job))], load_checkpoint(untrained))[0].seconds
    rows: list[dict[str, Any]] = [
        {
            "run_id": ROW["run_id"], "rank": rank, "stage": 0, "node": number, "kind": node.kind, "op": node.op,
            "module": node.module, "shape": "x".join(map(str, node.shape)), "executions": 2,
            "time_s": seconds / _FACTOR * (1 + (1 - rank) * (node.kind == "all_reduce")),
        }
        for rank in range(2)
        for number, (node, seconds) in enumerate(zip(graph.nodes, times, strict=True))
    ]  # fmt: skip
    rows[3] |= {"time_s": None}
    rows.append({"run_id": ROW["run_id"], "rank": 0, "stage": 0, "node": None, "op": "clone", "time_s": 1.0})
    pd.DataFrame(rows, columns=NODE_COLUMNS).to_csv(nodes, index=False)
    return runs, nodes


def test_the_same_nodes_are_compared(tmp_path: Path, untrained: Path) -> None:
    runs, nodes = _written(tmp_path, untrained)
    table = node_errors(nodes, read_runs(runs), load_checkpoint(untrained))
    assert {"gemm", "attention", "all_reduce", "optimizer"} <= {*table["kind"]}
    assert (table["median_ape_percent"] - 100 * (_FACTOR - 1)).abs().max() < 1e-6
    assert (table["predicted_s"] / table["measured_s"] - _FACTOR).abs().max() < 1e-6


def test_labels_of_another_graph_or_of_nothing_are_refused(tmp_path: Path, untrained: Path) -> None:
    runs, nodes = _written(tmp_path, untrained)
    checkpoint = load_checkpoint(untrained)
    table = pd.read_csv(nodes)
    table.assign(node=table["node"] + 1).to_csv(tmp_path / "moved.csv", index=False)
    table.assign(run_id="other").to_csv(tmp_path / "other.csv", index=False)
    for name, word in (("moved.csv", "another in today"), ("other.csv", "one of the runs"), ("runs.csv", "no labels")):
        with pytest.raises(JobError, match=word):
            node_errors(tmp_path / name, read_runs(runs), checkpoint)


def test_evaluate_writes_them(tmp_path: Path, untrained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, nodes = _written(tmp_path, untrained)
    options = [f"runs={runs}", f"nodes={nodes}", f"output={tmp_path / 'out'}", f"checkpoint={untrained}"]
    assert main([*options, "baselines=false"]) == 0
    assert "all_reduce" in capsys.readouterr().out
    assert len(pd.read_csv(tmp_path / "out" / "node_errors.csv")) > 5
    assert main([*options[:1], f"nodes={runs}", *options[2:], "baselines=false"]) == 2
