"""What a few measured runs of one cluster add to a trained predictor.

The errors of its runs, log(measured / predicted), say what those of its other jobs are: the errors on one cluster are a
Gaussian process whose covariance was learnt from public sources that training had not seen. Its posterior mean is the
logarithm of one factor on all times of a job, so stages, breakdown and total stay consistent. Measured kernels take the
place of the network's before. An adapter is a fact of one cluster: it holds on the GPUs and under the frameworks it was
measured with, and nowhere else. :mod:`gnn_predictor.calibration` fits it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.graph import COLLECTIVES, KINDS
from gnn_predictor.batch import GraphBatch
from gnn_predictor.blending import Corrections
from gnn_predictor.domain import Domain, outside
from gnn_predictor.features import FORMATS, KIND_COLUMNS, GraphArrays
from gnn_predictor.gaussian_process import GaussianProcess, Kernel, Names
from gnn_predictor.network import NodeTimes
from gnn_predictor.whole_job import WholeJobs

Floats = NDArray[np.float64]

_LIKE_POINTWISE = ("copy", "reduction")
_MOST_LOG_FACTOR = 2.5
# Before a run says anything, the uncalibrated width counts as so many runs.
_PRIOR_RUNS = 4.0
_Positive = Annotated[float, Field(gt=0)]
_NotNegative = Annotated[float, Field(ge=0)]


class ErrorCovariance(BaseModel):
    """How the errors of the jobs of one cluster go together; variances are of log(measured / predicted).

    ``shared`` is common to all jobs, ``alike`` to jobs at the same point and less with the distance (Matern-3/2) over
    ``columns`` of :mod:`gnn_predictor.whole_job`, in inverse length scales ``weights``, with a squared distance to
    another GPU and another precision; ``own`` is each run's. The defaults know no coordinates: ``train experiment=p5``
    puts in their place what the held-out errors of public sources make most likely.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    shared: _Positive = 0.04
    alike: _Positive = 0.1
    own: _Positive = 0.005
    columns: tuple[Annotated[int, Field(ge=0)], ...] = ()
    weights: tuple[_NotNegative, ...] = ()
    other_gpu: _NotNegative = 1.0
    other_precision: _NotNegative = 1.0

    @model_validator(mode="after")
    def _weighs_every_column(self) -> ErrorCovariance:
        if len(self.columns) != len(self.weights):
            raise ValueError(f"weights: {len(self.weights)} for {len(self.columns)} columns")
        return self

    def kernel(self) -> Kernel:
        """What all jobs share is a second kernel, to which every distance is none."""
        weights = torch.tensor([self.weights], dtype=torch.float64)
        names = torch.tensor([[self.other_gpu, self.other_precision]], dtype=torch.float64)
        return Kernel(
            columns=torch.tensor(self.columns, dtype=torch.long),
            weights=torch.cat([torch.zeros_like(weights), weights]),
            category_weights=torch.cat([torch.zeros_like(names), names]),
            variances=torch.tensor([self.shared, self.alike], dtype=torch.float64),
            noise=torch.tensor(self.own, dtype=torch.float64),
            mean=torch.zeros((), dtype=torch.float64),
        )


@dataclass(frozen=True, eq=False)
class PlacedJobs:
    """Jobs as the covariance of their errors sees them."""

    coordinates: torch.Tensor  # [n, coordinate] float64
    gpus: tuple[str, ...]
    precisions: tuple[str, ...]

    @classmethod
    def of(cls, graphs: Sequence[GraphArrays], precisions: Sequence[str]) -> PlacedJobs:
        """Jobs with these graphs and precision labels."""
        return cls(WholeJobs.of(graphs).coordinates, tuple(graph.device_name for graph in graphs), tuple(precisions))

    def select(self, rows: NDArray[Any]) -> PlacedJobs:
        """These jobs of them."""
        gpus, precisions = (tuple(names[row] for row in rows) for names in (self.gpus, self.precisions))
        return PlacedJobs(self.coordinates[torch.from_numpy(rows)], gpus, precisions)


@dataclass(frozen=True, eq=False)
class ErrorField:
    """What the errors of a cluster's runs say of its other jobs."""

    process: GaussianProcess
    names: Names

    @classmethod
    def of(cls, covariance: ErrorCovariance, runs: PlacedJobs, log_errors: Floats) -> ErrorField:
        """Given the errors of these runs."""
        names = Names(tuple(sorted(set(runs.gpus))), tuple(sorted(set(runs.precisions))))
        codes = names.codes(runs.gpus, runs.precisions)
        return cls(
            GaussianProcess.of(covariance.kernel(), _points(runs), codes, torch.from_numpy(log_errors).double()), names
        )

    def expected(self, jobs: PlacedJobs) -> Floats:
        """The error to be expected of each job. [n]"""
        mean, _ = self.process.posterior(_points(jobs), self.names.codes(jobs.gpus, jobs.precisions))
        errors: Floats = mean.clamp(-_MOST_LOG_FACTOR, _MOST_LOG_FACTOR).numpy()
        return errors

    @property
    def shared(self) -> float:
        """The part of it that all jobs have."""
        return float(self.process.kernel.variances[0] * self.process.pulls.sum())


def _points(jobs: PlacedJobs) -> WholeJobs:
    """Errors are of predictions, not of physical times: these are none."""
    return WholeJobs(jobs.coordinates, torch.zeros(len(jobs.coordinates), dtype=torch.float64))


class KnownRun(BaseModel):
    """A calibrating run: where it is among jobs, and log(measured / predicted)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gpu: str
    precision: str
    point: tuple[float, ...]
    log_error: float


class Adapter(BaseModel):
    """Calibrating runs, what they cover, and how well they did for those of them that were left out.

    ``share`` of what its runs say of a job is believed; nothing where left-out runs are predicted no better with the
    others. ``error_ratios``: of every run, its log error when it was left out over the half-width of its uncalibrated
    interval.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    base: str  # name of the checkpoint it was fitted on
    known: Annotated[tuple[KnownRun, ...], Field(min_length=1)]
    share: Annotated[float, Field(ge=0, le=1)]
    gpus: tuple[str, ...]
    frameworks: tuple[str, ...]
    domain: Domain
    kernels: dict[str, Annotated[float, Field(ge=-10, le=10)]] = {}  # log(time / roofline) by kernel_key, measured
    error_ratios: tuple[_NotNegative, ...]

    def error_field(self, covariance: ErrorCovariance) -> ErrorField:
        """What its runs say of other jobs."""
        runs = PlacedJobs(
            torch.tensor([run.point for run in self.known], dtype=torch.float64),
            tuple(run.gpu for run in self.known),
            tuple(run.precision for run in self.known),
        )
        return ErrorField.of(covariance, runs, np.array([run.log_error for run in self.known]))


def known_runs(runs: PlacedJobs, log_errors: Floats) -> tuple[KnownRun, ...]:
    """These runs as an adapter keeps them."""
    columns = (runs.gpus, runs.precisions, runs.coordinates.tolist(), log_errors.tolist())
    return tuple(
        KnownRun(gpu=gpu, precision=precision, point=tuple(round(each, 5) for each in point), log_error=error)
        for gpu, precision, point, error in zip(*columns, strict=True)
    )


@dataclass(frozen=True)
class Effect:
    """What an adapter does to one job beside the factor on its times: whether it holds, and the factor on its interval.

    ``kernels``: log(time / roofline) of the kernels that were measured, by :func:`kernel_key`.
    """

    applies: bool = False
    kernels: Mapping[str, float] = field(default_factory=dict)
    width_factor: float = 1.0
    warnings: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


def effect_of(adapter: Adapter | None, job: TrainingJob) -> Effect:
    """Nothing without an adapter, or for a job that is none of its cluster's; unknown software is the cluster's.

    The interval is narrower only amid what was measured.
    """
    if adapter is None:
        return Effect()
    about = {"base": adapter.base, "runs": len(adapter.known)}
    gpu, framework = job.cluster.gpu.name, job.software.framework
    reason = None
    if gpu not in adapter.gpus:
        reason = f"cluster.gpu: measured on {', '.join(adapter.gpus)}, the job runs on {gpu}"
    elif framework and adapter.frameworks and framework not in adapter.frameworks:
        reason = f"software.framework: measured with {', '.join(adapter.frameworks)}, the job runs {framework}"
    if reason:
        return Effect(warnings=(f"not calibrated: {reason}",), provenance={"calibration": {**about, "applied": False}})
    unlike = outside(job, adapter.domain)
    width = width_factor(adapter.error_ratios)
    return Effect(
        applies=True,
        kernels=adapter.kernels,
        width_factor=max(1.0, width) if unlike else width,
        warnings=tuple(f"outside the calibrating runs: {each}" for each in unlike),
        provenance={"calibration": {**about, "applied": bool(adapter.share or adapter.kernels)}},
    )


def width_factor(error_ratios: Sequence[float]) -> float:
    """Half-width of the 90% interval over the uncalibrated one, given left-out log errors over the uncalibrated one.

    Log errors are taken as Laplace distributed with an unknown scale that has a conjugate (inverse gamma) prior worth
    ``_PRIOR_RUNS`` runs; the next error then follows a Lomax distribution, whose 90% quantile this is. Without runs it
    is 1; many runs bring it to the 90% quantile of a Laplace distribution of their mean ratio.
    """
    prior = 1.0 / (10.0 ** (1.0 / _PRIOR_RUNS) - 1.0)  # the prior runs' sum of ratios that makes it 1 without runs
    return float((prior + sum(error_ratios)) * (10.0 ** (1.0 / (_PRIOR_RUNS + len(error_ratios))) - 1.0))


def kernel_key(kind: str, fmt: str) -> str:
    """How an adapter names kernels of a kind that read a format."""
    return f"{kind}/{fmt}"


def measured_times(batch: GraphBatch, times: NodeTimes, kernels: Sequence[Mapping[str, float]]) -> NodeTimes:
    """Node times with those of each graph's measured ``kernels`` in place of the network's. [B] mappings

    Copies and reductions that were not measured stream through memory as pointwise kernels do.
    """
    slowdowns = torch.full((len(kernels), len(KINDS), len(FORMATS)), math.nan)
    for row, measured in enumerate(kernels):
        for column, kind in enumerate(KINDS):
            for index, fmt in enumerate(FORMATS):
                known = measured.get(kernel_key(kind, fmt))
                if known is None and kind in _LIKE_POINTWISE:
                    known = measured.get(kernel_key("elementwise", fmt))
                if known is not None and kind not in COLLECTIVES:
                    slowdowns[row, column, index] = known
    kind_of_node = batch.node_features[:, KIND_COLUMNS].argmax(dim=1)
    measured_log_s = batch.log_roofline_s + slowdowns[batch.node_graph, kind_of_node, batch.node_formats[:, 0]]
    factor = torch.where(measured_log_s.isnan(), 1.0, torch.exp(measured_log_s) / times.seconds)
    return replace(times, seconds=times.seconds * factor, exposed_s=times.exposed_s * factor)


def corrected_times(batch: GraphBatch, times: NodeTimes, corrections: Corrections) -> NodeTimes:
    """Node and host times drawn towards what measured runs took."""
    factor = torch.tensor(corrections.log_factor, dtype=torch.float32).exp()
    node = factor[batch.node_graph]
    return replace(
        times,
        seconds=times.seconds * node,
        exposed_s=times.exposed_s * node,
        host_s_per_launch=times.host_s_per_launch * factor,
        overhead_s=times.overhead_s * factor,
    )
