"""Gaussian processes of a corpus's runs: one for every split, fitted on the rows that it may learn from.

Fits are independent and run in worker processes, one thread each.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from gnn_predictor.blending import Blend, MeasuredRuns
from gnn_predictor.dataset import RunExamples
from gnn_predictor.gaussian_process import LEAST_RUNS, GaussianProcess, fit_kernel
from gnn_predictor.objective import source_weights
from gnn_predictor.whole_job import WholeJobs


@dataclass(frozen=True, eq=False)
class RunRegression:
    """All runs of a corpus as points. ``start``: the runs of a checkpoint, which the corpus's add to."""

    jobs: WholeJobs
    codes: Tensor  # [n, 2]
    log_measured_s: Tensor  # [n]
    sources: tuple[str, ...]
    blend: Blend
    source_power: float
    seed: int
    start: GaussianProcess | None = None

    @classmethod
    def of(cls, runs: RunExamples, source_power: float, seed: int, start: MeasuredRuns | None = None) -> RunRegression:
        """Points of these runs; the names that ``start`` knows keep their codes."""
        there = start.blend if start else Blend()
        gpus, precisions = [graph.device_name for graph in runs.graphs], runs.table["precision_label"].tolist()
        blend = there.model_copy(
            update={"gpus": _added(there.gpus, gpus), "precisions": _added(there.precisions, precisions)}
        )
        return cls(
            WholeJobs.of(runs.graphs),
            blend.names.codes(gpus, precisions),
            torch.tensor(runs.table["iter_time_s"].to_numpy(float)).log(),
            tuple(runs.table["source_id"]),
            blend,
            source_power,
            seed,
            start.process if start else None,
        )

    def fit(self, rows: Sequence[int]) -> GaussianProcess | None:
        """The process of these rows; ``None`` where they are too few to say anything."""
        if len(rows) < LEAST_RUNS and self.start is None:
            return None
        chosen = torch.tensor(rows)
        jobs, codes, log_measured_s = self.jobs.select(chosen), self.codes[chosen], self.log_measured_s[chosen]
        if self.start is not None:
            return self.start.with_runs(jobs, codes, log_measured_s)
        weight = source_weights([self.sources[row] for row in rows], self.source_power)
        kernel = fit_kernel(jobs.coordinates, codes, log_measured_s - jobs.log_physical_s, weight, self.seed)
        return GaussianProcess.of(kernel, jobs, codes, log_measured_s)

    def fit_each(self, each: Sequence[Sequence[int]], num_workers: int) -> list[GaussianProcess | None]:
        """As :meth:`fit` of several choices of rows."""
        if num_workers == 1 or len(each) < 2:
            return [self.fit(rows) for rows in each]
        context = multiprocessing.get_context("fork")  # the points are inherited, not sent
        with ProcessPoolExecutor(num_workers, context, initializer=_hold, initargs=(self,)) as pool:
            return list(pool.map(_fit_held, each))


def _added(known: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    return (*known, *sorted(set(names) - set(known)))


_held: list[RunRegression] = []


def _hold(regression: RunRegression) -> None:
    torch.set_num_threads(1)
    _held[:] = [regression]


def _fit_held(rows: Sequence[int]) -> GaussianProcess | None:
    return _held[0].fit(rows)
