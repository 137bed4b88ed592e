"""What the network's kinds of knowledge are worth: fitted again without one of them each, on protocol P2's splits.

``full`` lacks nothing; with one member a split, as here, it is the first member of P2's own ensembles.
``without_operators`` learns from runs alone: measured operators have no weight, only the scales of the inputs are still
taken over both. To ``without_format_properties`` a floating-point format is a name: its bits, exponent, mantissa, block
size and relative peak are hidden, and a kernel's work is that of 16 bits. ``without_hardware`` reads nothing that
follows from the specification of a device or its links, so a known device is only its learned vector.

What is hidden is hidden in fitting and in predicting. The roofline that an estimate is a multiple of, of each kernel in
its own formats on its own device, stays in all of them: it is physics and not learnt. So do the shares of a job's
roofline time, which tell its kind of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from dataset_builder.corpus.splits import Split
from gnn_predictor.crossvalidation import FitTask, Workshop, fit_all, predict_graphs, split_tasks, trained
from gnn_predictor.dataset import OperatorExamples, RunExamples
from gnn_predictor.features import SPECIFICATION_COLUMNS, WORK_COLUMNS, FloatArray, GraphArrays
from gnn_predictor.fitting import FitSettings
from gnn_predictor.graph_store import GraphStore
from gnn_predictor.metrics import BREAKDOWNS, macro_mape, time_figures
from gnn_predictor.protocols import LEFT_OUT, blended, network_errors

NAMES = ("full", "without_operators", "without_format_properties", "without_hardware")
PROTOCOL = "P2"  # its rows are predicted by networks that never saw their precision
_FACTS = ["run_id", *BREAKDOWNS, "pair_group", "layout_group", "layout"]
_FIGURES = ("count", "mape_percent", "median_ape_percent", "signed_mean_percent", "macro_mape_by_source_percent",
            "by_precision", "precision_speedup")  # fmt: skip


@dataclass(frozen=True)
class Ablation:
    """The network without one kind of knowledge, and its fits by split; ``shop`` does not have what is hidden."""

    name: str
    splits: tuple[Split, ...]
    shop: Workshop
    tasks: dict[str, list[FitTask]]

    @classmethod
    def plan(cls, name: str, each: Sequence[Split], shop: Workshop, settings: FitSettings, members: int) -> Ablation:
        """The fits of all splits, not yet run."""
        if name == "without_operators":
            settings = replace(settings, operator_weight=0.0)
        elif name != "full":
            shop = replace(shop, runs=_hidden_runs(name, shop), operators=_hidden_operators(name, shop.operators))
        tasks = {split.name: split_tasks(split, shop, settings, members) for split in each}
        if name != "full":  # whose fits are those of P2
            tasks = {split: [replace(one, name=f"{name}-{one.name}") for one in own] for split, own in tasks.items()}
        return cls(name, tuple(each), shop, tasks)

    def fit(self) -> dict[str, list[dict[str, float]]]:
        """Trains what has no result yet; returns every fit's losses by epoch."""
        return fit_all([task for tasks in self.tasks.values() for task in tasks], self.shop)

    def held_out(self) -> pd.DataFrame:
        """``run_id``, ``network_s`` and ``network_spread`` of every test row."""
        return pd.concat([self._split(split) for split in self.splits])

    def _split(self, split: Split) -> pd.DataFrame:
        test = self.shop.runs.select(np.array(split.test, dtype=np.int64))
        predicted = predict_graphs(trained(self.tasks[split.name], self.shop), test.graphs)
        return predicted.assign(run_id=test.table["run_id"])


def ablation_figures(ablations: Sequence[Ablation], known: pd.DataFrame, runs: RunExamples) -> dict[str, Any]:
    """Errors of every ablation on the same rows: alone, and ``blended`` with measured runs.

    ``known`` are held-out rows of P2, for what measured runs say of them, and of P1, for the error that networks are
    weighed by.
    """
    rows, jobs = (known[known["protocol"] == name] for name in (PROTOCOL, "P1"))
    errors = network_errors(jobs, {str(split): set(own["run_id"]) for split, own in rows.groupby("split")})
    rows = rows.merge(runs.table[_FACTS], on="run_id", validate="one_to_one")
    figures = {}
    for ablation in ablations:
        own = rows.drop(columns="network_s").merge(ablation.held_out(), on="run_id", validate="one_to_one")
        figures[ablation.name] = _figures(blended(own, errors))
    return figures


def _figures(rows: pd.DataFrame) -> dict[str, Any]:
    return {**_errors(rows, "network_s"), "blended": _errors(rows, "predicted_s")}


def _errors(rows: pd.DataFrame, predicted: str) -> dict[str, Any]:
    figures = time_figures(rows, predicted)
    left_out = rows[LEFT_OUT[PROTOCOL]].tolist()
    return {name: figures[name] for name in _FIGURES} | {
        "macro_mape_over_left_out_percent": macro_mape(rows["iter_time_s"], rows[predicted], left_out)
    }


def _hidden_runs(name: str, shop: Workshop) -> RunExamples:
    graphs = shop.runs.graphs
    hidden = (replace(graph, **_hidden(name, graph)) for graph in graphs)
    if isinstance(graphs, GraphStore):
        return replace(shop.runs, graphs=GraphStore.write(hidden, shop.directory, graphs.held))
    return replace(shop.runs, graphs=tuple(hidden))


def _hidden_operators(name: str, operators: OperatorExamples) -> OperatorExamples:
    hidden: dict[str, Any] = {field: torch.from_numpy(values) for field, values in _hidden(name, operators).items()}
    return replace(operators, **hidden)


def _hidden(name: str, inputs: GraphArrays | OperatorExamples) -> dict[str, Any]:
    """What the network reads of a graph or of operators where this is hidden from it."""
    arrays: dict[str, FloatArray] = {field: np.array(getattr(inputs, field)) for field in SPECIFICATION_COLUMNS}
    if name == "without_hardware":
        for field, columns in SPECIFICATION_COLUMNS.items():
            arrays[field][:, columns] = 0.0
    else:
        in_16_bits, in_its_formats = WORK_COLUMNS
        arrays["node_features"][:, in_its_formats] = arrays["node_features"][:, in_16_bits]
        arrays["format_features"][:] = 0.0
    return arrays
