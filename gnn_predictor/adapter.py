"""What a few measured runs of one cluster add to a trained predictor.

A log offset, a log factor per kind of work, and what is left of each measured run's error, which jobs like it share. An
adapter scales node times (and host times) before stages and schedule are computed, so stages, breakdown and total stay
consistent. It is a fact of one cluster: it holds on the GPUs and under the frameworks it was measured with, and
nowhere else. :mod:`gnn_predictor.calibration` fits it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.graph import COLLECTIVES, KINDS
from gnn_predictor.batch import GraphBatch
from gnn_predictor.blending import Corrections
from gnn_predictor.domain import Domain, outside
from gnn_predictor.features import AXES, AXIS_COLUMNS, FORMATS, KIND_COLUMNS
from gnn_predictor.network import NodeTimes

Mode = Literal["factors", "offset", "none"]

GROUPS = ("gemm", "attention", "memory", "tensor_comm", "data_comm", "other_comm", "host")
"""Kinds of work with a factor of their own. ``host``: launches from the host, and what every step costs beside."""
_GROUP_OF_KIND = {"gemm": "gemm", "grouped_gemm": "gemm", "attention": "attention"}  # the other kernels: memory
_GROUP_OF_AXIS = {"tensor": "tensor_comm", "context": "tensor_comm", "data": "data_comm"}  # the others: other_comm
_LIKE_POINTWISE = ("copy", "reduction")
_HOST = GROUPS.index("host")
# Before a run says anything, the uncalibrated width counts as so many runs.
_PRIOR_RUNS = 4.0


class Shrinkage(BaseModel):
    """How strongly an adapter is drawn to zero, in units of the variance of a run's own error.

    ``offset`` and ``factors`` are that variance over the one expected of the offset and of each factor; ``local`` is
    the variance that like jobs share over that of a single run's own. The defaults are what public sources, each unseen
    in turn, chose with small networks; ``train experiment=p5`` puts a checkpoint's own in their place.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    offset: Annotated[float, Field(gt=0)] = 1.0
    factors: Annotated[float, Field(gt=0)] = 1.0
    local: Annotated[float, Field(ge=0)] = 4.0


class JobPoint(BaseModel):
    """Where a job stands among others: what must be equal, what had better be, and logarithms of its sizes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gpu: str
    precision: str
    architecture: str
    sizes: tuple[float, ...]


# How many doublings of a size are one unit of distance.
_DOUBLINGS = {
    "hidden": 1.5, "layers": 2.0, "seq_length": 2.0, "micro_batch": 2.0, "batch_per_gpu": 3.5, "gpus": 3.0,
    "tensor": 2.0, "pipeline": 2.0,
}  # fmt: skip
_OTHER_NAME = 2.0  # squared distance of another precision or architecture


def job_point(job: TrainingJob) -> JobPoint:
    """The point of a resolved job."""
    model, batch, plan, gpus = job.model, job.batch, job.parallel, job.cluster.num_gpus
    sizes = (
        model.hidden_size, model.num_layers, batch.seq_length, batch.micro_batch_size, batch.global_batch_size / gpus,
        gpus, plan.tensor, plan.pipeline,
    )  # fmt: skip
    scaled = (math.log2(size) / unit for size, unit in zip(sizes, _DOUBLINGS.values(), strict=True))
    return JobPoint(
        gpu=job.cluster.gpu.name,
        precision=job.precision.label,
        architecture=job.model.architecture,
        sizes=tuple(scaled),
    )


def likeness(some: Sequence[JobPoint], others: Sequence[JobPoint]) -> NDArray[np.float64]:
    """How much of what is left of one job's error another shares: 1 for equal jobs, 0 on another GPU. [some, others]"""
    shared = np.zeros((len(some), len(others)))
    for row, one in enumerate(some):
        for column, other in enumerate(others):
            if one.gpu == other.gpu:
                differing = (one.precision != other.precision) + (one.architecture != other.architecture)
                squares = sum((a - b) ** 2 for a, b in zip(one.sizes, other.sizes, strict=True))
                shared[row, column] = math.exp(-0.5 * (squares + _OTHER_NAME * differing))
    return shared


class Adapter(BaseModel):
    """Fitted factors, what they were fitted on, and how well they did on runs that were left out.

    ``error_ratios``: of every run, its log error when it was left out over the half-width of its uncalibrated interval.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    base: str  # name of the checkpoint it was fitted on
    num_runs: Annotated[int, Field(ge=1)]
    mode: Mode
    log_offset: Annotated[float, Field(ge=-5, le=5)]
    log_factors: dict[str, Annotated[float, Field(ge=-5, le=5)]]
    points: tuple[JobPoint, ...]
    local: tuple[Annotated[float, Field(ge=-5, le=5)], ...]  # what each point adds to the log offset of jobs like it
    gpus: tuple[str, ...]
    frameworks: tuple[str, ...]
    domain: Domain
    kernels: dict[str, Annotated[float, Field(ge=-10, le=10)]] = {}  # log(time / roofline) by kernel_key, measured
    error_ratios: tuple[Annotated[float, Field(ge=0)], ...]


@dataclass(frozen=True)
class Effect:
    """What an adapter does to one job: log factor of every group, offset included, and the factor on its interval.

    ``kernels``: log(time / roofline) of the kernels that were measured, by :func:`kernel_key`.
    """

    kernels: Mapping[str, float] = field(default_factory=dict)
    log_scales: tuple[float, ...] = (0.0,) * len(GROUPS)
    width_factor: float = 1.0
    warnings: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


def effect_of(adapter: Adapter | None, job: TrainingJob) -> Effect:
    """Nothing without an adapter, or for a job that is none of its cluster's; unknown software is the cluster's.

    The interval is narrower only amid what was measured.
    """
    if adapter is None:
        return Effect()
    about = {"base": adapter.base, "runs": adapter.num_runs, "mode": adapter.mode}
    gpu, framework = job.cluster.gpu.name, job.software.framework
    reason = None
    if gpu not in adapter.gpus:
        reason = f"cluster.gpu: measured on {', '.join(adapter.gpus)}, the job runs on {gpu}"
    elif framework and adapter.frameworks and framework not in adapter.frameworks:
        reason = f"software.framework: measured with {', '.join(adapter.frameworks)}, the job runs {framework}"
    if reason:
        return Effect(warnings=(f"not calibrated: {reason}",), provenance={"calibration": {**about, "applied": False}})
    offset = adapter.log_offset + float((likeness([job_point(job)], adapter.points) @ adapter.local).item())
    unlike = outside(job, adapter.domain)
    width = width_factor(adapter.error_ratios)
    return Effect(
        kernels=adapter.kernels,
        log_scales=tuple(offset + adapter.log_factors[group] for group in GROUPS),
        width_factor=max(1.0, width) if unlike else width,
        warnings=tuple(f"outside the calibrating runs: {each}" for each in unlike),
        provenance={"calibration": {**about, "applied": True}},
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


def scaled_times(batch: GraphBatch, times: NodeTimes, log_scales: Tensor) -> NodeTimes:
    """Node and host times under ``log_scales`` [B, group]."""
    node = torch.exp(log_scales[batch.node_graph, _node_groups(batch)])
    host = torch.exp(log_scales[:, _HOST])
    return replace(
        times,
        seconds=times.seconds * node,
        exposed_s=times.exposed_s * node,
        host_s_per_launch=times.host_s_per_launch * host,
        overhead_s=times.overhead_s * host,
    )


def corrected_times(batch: GraphBatch, times: NodeTimes, corrections: Corrections) -> NodeTimes:
    """Node and host times drawn towards what measured runs took."""
    log_factor = torch.tensor(corrections.log_factor, dtype=torch.float32)
    return scaled_times(batch, times, log_factor[:, None].expand(-1, len(GROUPS)))


def _node_groups(batch: GraphBatch) -> Tensor:
    """Index into :data:`GROUPS` of every node. [N]"""
    kind = batch.node_features[:, KIND_COLUMNS].argmax(dim=1)
    has_axis, axis = batch.node_features[:, AXIS_COLUMNS].max(dim=1)
    axis = torch.where(has_axis > 0, axis, torch.full_like(axis, AXES.index("data")))
    of_kind = torch.tensor([GROUPS.index(_GROUP_OF_KIND.get(name, "memory")) for name in KINDS])
    of_axis = torch.tensor([GROUPS.index(_GROUP_OF_AXIS.get(name, "other_comm")) for name in AXES])
    is_message = torch.tensor([name in COLLECTIVES for name in KINDS])
    return torch.where(is_message[kind], of_axis[axis], of_kind[kind])
