"""The network's node times beside the measured ones: ``nodes.csv`` of ``dataset_builder.benchmark``, by kind.

In: the labels, the measured runs they belong to, and a checkpoint. Out: a table with one line a kind: how many nodes,
their seconds in one step (measured and predicted) and the median absolute error of one execution in percent. A message
counts as long as on the rank that waited least for the others, another node as the median of its stage's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from dataset_builder.corpus.measurements import RunMeasurement
from dataset_builder.job.errors import JobError
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.graph import COLLECTIVES
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.checkpoint import Checkpoint
from gnn_predictor.features import featurize
from gnn_predictor.prediction import job_times

_READ = ["run_id", "rank", "stage", "node", "kind", "op", "module", "shape", "time_s", "executions"]


def node_errors(nodes: Path, runs: Sequence[RunMeasurement], checkpoint: Checkpoint) -> pd.DataFrame:
    """The table; raises JobError for a file that holds no labels of these runs, or labels of another graph."""
    labels = _labels(nodes)
    jobs = {run.run_id: run.job.resolved() for run in runs if run.job}
    known = labels[labels["run_id"].isin(jobs.keys())]
    if known.empty:
        raise JobError(["no node that is labelled belongs to one of the runs"], str(nodes))
    parts = [
        _with_predictions(own, jobs[str(run)], checkpoint, nodes) for run, own in known.groupby("run_id", sort=False)
    ]
    return _by_kind(pd.concat(parts))


def _labels(nodes: Path) -> pd.DataFrame:
    """One line a run, stage and node that has a label."""
    try:
        table = pd.read_csv(nodes, dtype={"shape": str})[_READ]
    except (OSError, ValueError, KeyError) as error:
        raise JobError([f"no labels of nodes ({error})"], str(nodes)) from None
    table = table[table["node"].notna() & table["time_s"].notna()]
    keys = ["run_id", "stage", "node", "kind", "op", "module", "shape"]
    ranks = table.groupby(keys, sort=False, dropna=False)
    each = ranks.agg(least_s=("time_s", "min"), median_s=("time_s", "median"), executions=("executions", "median"))
    each = each.reset_index()
    return each.assign(time_s=each["least_s"].where(each["kind"].isin(COLLECTIVES), each["median_s"]))


def _with_predictions(own: pd.DataFrame, job: TrainingJob, checkpoint: Checkpoint, path: Path) -> pd.DataFrame:
    """The labels of one run and, as ``predicted_s``, the network's seconds of the same nodes."""
    graph = build_graph(job)
    seconds = job_times([job], [featurize(job, graph, rank_layout(job))], checkpoint)[0].seconds
    indices = [repeats.nonzero()[0] for repeats in graph.repeats]
    predicted = []
    for label in own.to_dict("records"):
        stage, number = int(label["stage"]), int(label["node"])
        is_there = stage < len(indices) and number < len(indices[stage])
        node = graph.nodes[indices[stage][number]] if is_there else None
        labelled = (label["op"], label["module"], label["shape"])
        if node is None or labelled != (node.op, node.module, "x".join(map(str, node.shape))):
            reason = f"run {label['run_id']}: node {number} of stage {stage} is another in today's graph; measure again"
            raise JobError([reason], str(path))
        predicted.append(float(seconds[indices[stage][number]]))
    return own.assign(predicted_s=predicted)


def _by_kind(labels: pd.DataFrame) -> pd.DataFrame:
    labels = labels.assign(
        ape_percent=100 * np.abs(labels["predicted_s"] / labels["time_s"] - 1),
        measured=labels["time_s"] * labels["executions"],
        predicted=labels["predicted_s"] * labels["executions"],
    )
    figures = labels.groupby("kind").agg(
        nodes=("node", "size"),
        measured_s=("measured", "sum"),
        predicted_s=("predicted", "sum"),
        median_ape_percent=("ape_percent", "median"),
    )
    return figures.sort_values("measured_s", ascending=False).reset_index()
