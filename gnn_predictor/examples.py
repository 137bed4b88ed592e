"""A corpus as training examples: features of every run and operator, labels and groups, and the baselines' table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dataset_builder.corpus.build import Corpus
from dataset_builder.corpus.measurements import OpMeasurement, RunMeasurement
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.baselines import analytic_features, blind_job, job_key, layout_group, pair_group, reference_row
from gnn_predictor.dataset import OperatorExamples, RunExamples, operator_examples
from gnn_predictor.features import GraphArrays, featurize


@dataclass(frozen=True)
class Examples:
    """Everything a training needs of a corpus."""

    runs: RunExamples
    blind_runs: RunExamples | None  # the same runs traced as if all computed in 16 bits, for baseline B3
    measurements: tuple[RunMeasurement, ...]  # of the runs, in order
    operators: OperatorExamples
    reference: tuple[dict[str, float | str], ...]  # the baselines' features of the runs
    devices: tuple[str, ...]
    corpus_hash: str

    @property
    def trusted(self) -> tuple[int, ...]:
        """Row numbers of the runs that are learnt from."""
        return tuple(row for row, run in enumerate(self.measurements) if not run.doubt)

    @property
    def trusted_jobs(self) -> list[TrainingJob]:
        """Their jobs."""
        return [job for row in self.trusted if (job := self.measurements[row].job) is not None]


def load_examples(corpus: Corpus, max_runs: int | None, max_operators: int | None, blind: bool = False) -> Examples:
    """Features of a corpus; with a maximum, an even and reproducible choice of its rows."""
    usable = [run for run in corpus.runs if run.job is not None and run.is_timed]
    measurements = _spread_out(usable, max_runs)
    graphs, reference = [], []
    for run in measurements:
        job = run.job
        assert job is not None
        graph, layout = corpus.graph(run.run_id), rank_layout(job)
        graphs.append(featurize(job, graph, layout))
        keys = {"run_id": run.run_id, "source_id": run.source_id, "job_group": run.job_group, "job_key": job_key(job)}
        reference.append(reference_row(keys, analytic_features(job, graph, layout), run.iter_time_s))
    chosen = _evenly(corpus.operators, max_operators)
    devices = tuple(sorted({graph.device_name for graph in graphs} | {op.device.name for op in chosen}))
    operators = operator_examples(chosen, devices, num_workload=graphs[0].workload.shape[1])
    table = run_table(measurements)
    return Examples(
        RunExamples(table, tuple(graphs)),
        RunExamples(table, tuple(_blind(run.job) for run in measurements if run.job)) if blind else None,
        tuple(measurements),
        operators,
        tuple(reference),
        devices,
        corpus.content_hash,
    )


def _blind(job: TrainingJob) -> GraphArrays:
    job = blind_job(job)
    return featurize(job, build_graph(job), rank_layout(job))


def run_table(measurements: Sequence[RunMeasurement]) -> pd.DataFrame:
    """Labels and groups of runs, a row each."""
    columns = ("run_id", "source_id", "gpu", "precision", "architecture", "job_group", "iter_time_s", "peak_mem_gb",
               "doubt")  # fmt: skip
    table = pd.DataFrame({name: [getattr(run, name) for run in measurements] for name in columns})
    jobs = [run.job for run in measurements if run.job is not None]
    table["precision_label"] = [job.precision.label for job in jobs]
    table["pair_group"] = [pair_group(job) for job in jobs]
    table[["layout_group", "layout"]] = [layout_group(job) for job in jobs]
    return table


def _spread_out(runs: Sequence[RunMeasurement], most: int | None) -> list[RunMeasurement]:
    if most is None or most >= len(runs):
        return list(runs)
    return [runs[int(position)] for position in np.linspace(0, len(runs) - 1, most)]


def _evenly(operators: Sequence[OpMeasurement], most: int | None) -> list[OpMeasurement]:
    """At most this many, so that small kinds, sources and formats keep all their rows and large ones share the rest."""
    if most is None or most >= len(operators):
        return list(operators)
    keys = pd.Series([f"{op.source_id} {op.node.kind} {op.node.input_dtype}" for op in operators])
    order = pd.Series(np.random.default_rng(0).random(len(operators)))
    rank = order.groupby(keys).rank()  # within its key, in random order
    chosen = np.sort(rank.to_numpy().argsort(kind="stable")[:most])
    return [operators[int(position)] for position in chosen]
