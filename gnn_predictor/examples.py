"""A corpus as training examples: features of every run and operator, labels and groups, and the baselines' table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dataset_builder.corpus.build import Corpus
from dataset_builder.corpus.measurements import OpMeasurement, RunMeasurement
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.baselines import analytic_features, blind_job, job_key, layout_group, pair_group, reference_row
from gnn_predictor.dataset import OperatorExamples, RunExamples, operator_examples
from gnn_predictor.features import GraphArrays, featurize
from gnn_predictor.graph_store import GraphStore
from gnn_predictor.run_classes import gpu_count, model_size

# A library of fewer operators has no vector of its own.
_LEAST_OPERATORS = 60


@dataclass(frozen=True)
class Examples:
    """Everything a training needs of a corpus."""

    runs: RunExamples
    blind_runs: RunExamples | None  # the same runs traced as if all computed in 16 bits, for baseline B3
    measurements: Sequence[RunMeasurement]  # of the runs, in order
    operators: OperatorExamples
    reference: tuple[dict[str, float | str], ...]  # the baselines' features of the runs
    devices: tuple[str, ...]
    libraries: tuple[str, ...]
    corpus_hash: str

    @property
    def trusted(self) -> tuple[int, ...]:
        """Row numbers of the runs that are learnt from."""
        return tuple(np.flatnonzero(self.runs.table["doubt"] == "").tolist())

    def trusted_jobs(self) -> Iterator[TrainingJob]:
        """Their jobs."""
        return (job for row in self.trusted if (job := self.measurements[row].job) is not None)


@dataclass(frozen=True)
class ExampleLimits:
    """How much of a corpus is used, an even and reproducible choice, and how much of that is in memory."""

    max_runs: int | None = None
    max_operators: int | None = None
    graphs_held: int | None = None  # with so many graphs or fewer, all are


def load_examples(
    corpus: Corpus,
    limits: ExampleLimits,
    scratch: Path,
    blind: bool = False,
    known_devices: tuple[str, ...] = (),
    known_libraries: tuple[str, ...] = (),
) -> Examples:
    """Features of a corpus; graphs that are not held go to a file in ``scratch`` that goes with this process.

    ``known_devices`` and ``known_libraries`` come first among theirs, whether or not the corpus has them.
    """
    stored = corpus.stored_runs().select(_spread_out(corpus.facts["num_runs"], limits.max_runs))
    held = limits.graphs_held if limits.graphs_held is not None and limits.graphs_held < len(stored) else None
    measurements = list(stored) if held is None else stored

    def kept(graphs: Iterator[GraphArrays]) -> Sequence[GraphArrays]:
        return tuple(graphs) if held is None else GraphStore.write(graphs, scratch, held)

    rows: list[dict[str, Any]] = []
    reference: list[dict[str, float | str]] = []
    graphs = kept(_featurized(corpus, measurements, rows, reference))
    table = pd.DataFrame(rows)
    operators = corpus.operators_at(_evenly(corpus, limits.max_operators))
    found = set(table.pop("device")) | {op.device.name for op in operators}
    devices = (*known_devices, *sorted(found - set(known_devices)))
    libraries = (*known_libraries, *sorted(_libraries(operators) - set(known_libraries)))
    return Examples(
        RunExamples(table, graphs),
        RunExamples(table, kept(_blind(run.job) for run in measurements if run.job)) if blind else None,
        measurements,
        operator_examples(operators, devices, libraries, num_workload=graphs[0].workload.shape[1]),
        tuple(reference),
        devices,
        libraries,
        corpus.content_hash,
    )


def _featurized(
    corpus: Corpus,
    measurements: Sequence[RunMeasurement],
    rows: list[dict[str, Any]],
    reference: list[dict[str, float | str]],
) -> Iterator[GraphArrays]:
    """The graph of every run, in one pass that adds a row each to the run table and to the baselines' features."""
    for run in measurements:
        job = run.job
        assert job is not None
        graph, layout = corpus.graph(run.run_id), rank_layout(job)
        arrays = featurize(job, graph, layout)
        keys = {"run_id": run.run_id, "source_id": run.source_id, "job_group": run.job_group, "job_key": job_key(job)}
        reference.append(reference_row(keys, analytic_features(job, graph, layout), run.iter_time_s))
        rows.append({**_labels(run, job), "device": arrays.device_name})
        yield arrays


def _libraries(operators: Sequence[OpMeasurement]) -> set[str]:
    counts = Counter(operator.library for operator in operators if operator.library)
    return {name for name, count in counts.items() if count >= _LEAST_OPERATORS}


def _blind(job: TrainingJob) -> GraphArrays:
    job = blind_job(job)
    return featurize(job, build_graph(job), rank_layout(job))


def _labels(run: RunMeasurement, job: TrainingJob) -> dict[str, Any]:
    """Labels and groups of a run: its row of the run table."""
    names = ("run_id", "source_id", "gpu", "precision", "architecture", "job_group", "iter_time_s", "peak_mem_gb",
             "doubt")  # fmt: skip
    group, layout = layout_group(job)
    return {
        **{name: getattr(run, name) for name in names},
        "precision_label": job.precision.label,
        "model_size": model_size(job),
        "gpu_count": gpu_count(job),
        "pair_group": pair_group(job),
        "layout_group": group,
        "layout": layout,
    }


def _spread_out(count: int, most: int | None) -> NDArray[np.int64]:
    """At most so many of ``count`` rows, evenly."""
    return np.arange(count) if most is None or most >= count else np.linspace(0, count - 1, most).astype(np.int64)


def _evenly(corpus: Corpus, most: int | None) -> NDArray[np.int64]:
    """At most this many, so that small kinds, sources and formats keep all their rows and large ones share the rest."""
    count = corpus.facts["num_operators"]
    if most is None or most >= count:
        return np.arange(count)
    order = pd.Series(np.random.default_rng(0).random(count))
    keys = corpus.operator_columns(("source_id", "kind", "input_dtype"))
    rank = order.groupby([keys[name] for name in keys], observed=True).rank()  # within its key, in random order
    return np.sort(rank.to_numpy().argsort(kind="stable")[:most])
