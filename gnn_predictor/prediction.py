"""A job in, its predicted iteration time out: per pipeline stage, by kind of work, with an interval and warnings.

All times in seconds. The critical path through all stages is the sum of ``by_kind`` and ``exposed_communication``; what
a stage's times add up to stands in :mod:`gnn_predictor.stage_prediction`.
(The file is not named ``predict``: that name in the package is the function.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import Any, overload

import torch

from dataset_builder.job.errors import CannotRunError
from dataset_builder.job.flops import model_flops_per_sequence
from dataset_builder.job.hardware import DeviceSpec
from dataset_builder.job.precision import PrecisionPolicy
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.floor import PhysicalFloor, physical_floor
from dataset_builder.tracing.graph import TrainingGraph
from dataset_builder.tracing.layout import RankLayout, resolved_layout, unsupported_formats
from dataset_builder.tracing.trace import GraphBuilder
from gnn_predictor import __version__
from gnn_predictor.adapter import PlacedJobs, corrected_times, effect_of, measured_times
from gnn_predictor.batch import collate
from gnn_predictor.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from gnn_predictor.critical_path import Breakdown, JobTimes, StepDetail, breakdown
from gnn_predictor.domain import outside
from gnn_predictor.features import GraphArrays, featurize
from gnn_predictor.memory import MemoryFit, StageMemory, peak_memory
from gnn_predictor.memory_advice import Verdict, doubts, shortages, verdict
from gnn_predictor.network import Ensemble, NetworkConfig, stage_table
from gnn_predictor.stage_prediction import StagePrediction, stage_predictions

SCHEMA_VERSION = 1
_JOBS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Total:
    """A whole training run."""

    steps: int
    hours: float
    gpu_hours: float
    usd: float | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What ``infer`` answers. ``job`` is the resolved job, its defaults filled in.

    ``raised_by``: how many times the estimate every second of it is, where that was below the physical floor.
    """

    job: TrainingJob
    num_microbatches: int
    data_parallel: int
    iteration_time_s: float
    iteration_time_low_s: float
    iteration_time_high_s: float
    interval: float
    stages: tuple[StagePrediction, ...]
    breakdown: Breakdown
    fits_memory: bool
    memory_verdict: Verdict
    in_domain: bool
    warnings: tuple[str, ...]
    provenance: Mapping[str, Any]
    floor: PhysicalFloor
    raised_by: float = 1.0

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens that one optimizer step sees; source and target of an encoder-decoder."""
        batch = self.job.batch
        target = (batch.target_seq_length or 0) if self.job.model.architecture == "encoder_decoder" else 0
        return batch.global_batch_size * (batch.seq_length + target)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_iteration / self.iteration_time_s

    @property
    def model_flops_per_iteration(self) -> float:
        batch = self.job.batch
        return batch.global_batch_size * model_flops_per_sequence(
            self.job.model, batch.seq_length, batch.target_seq_length
        )

    @property
    def model_flops_per_s_per_gpu(self) -> float:
        return self.model_flops_per_iteration / self.iteration_time_s / self.job.cluster.num_gpus

    @property
    def mfu(self) -> float:
        """Share of the device's dense peak in the format of the linear layers' GEMMs (0 to 1)."""
        return self.model_flops_per_s_per_gpu / self.gemm_peak_flops_per_s

    @property
    def mfu_convention(self) -> str:
        """Which FLOPs are counted, over which peak: of causal attention the half that is not masked."""
        model = self.job.model
        counted = "causal attention" if model.is_causal else "whole attention"
        if model.architecture == "encoder_decoder":
            counted += " in the decoder, whole in the encoder"
        return f"{counted}, no recompute, dense peak of the GEMM format"

    @property
    def gemm_peak_flops_per_s(self) -> float:
        """The device's dense peak in the format of the linear layers' GEMMs."""
        return _gemm_peak(self.job.cluster.gpu, self.job.precision)

    @property
    def total(self) -> Total | None:
        """Time and cost of the whole training; ``None`` when the job does not say how long it trains."""
        training, batch = self.job.training, self.job.batch
        if training is None:
            return None
        if training.steps is not None:
            steps = training.steps
        elif training.samples is not None:
            steps = training.samples / batch.global_batch_size
        elif training.tokens is not None:
            steps = training.tokens / self.tokens_per_iteration
        else:
            return None
        whole_steps = math.ceil(steps)
        hours = whole_steps * self.iteration_time_s / 3600
        gpu_hours = hours * self.job.cluster.num_gpus
        price = self.job.price
        return Total(whole_steps, hours, gpu_hours, gpu_hours * price.usd_per_gpu_hour if price else None)

    def to_dict(self) -> dict[str, Any]:
        """The value that ``infer --format json`` prints (see ``report/prediction.schema.json``)."""
        gpus = self.job.cluster.num_gpus
        return {
            "schema_version": SCHEMA_VERSION,
            "job": self.job.model_dump(mode="json"),
            "iteration_time_s": self.iteration_time_s,
            "iteration_time_low_s": self.iteration_time_low_s,
            "iteration_time_high_s": self.iteration_time_high_s,
            "interval": self.interval,
            "num_microbatches": self.num_microbatches,
            "tokens_per_iteration": self.tokens_per_iteration,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s / gpus,
            "model_flops_per_iteration": self.model_flops_per_iteration,
            "model_tflops_per_s_per_gpu": self.model_flops_per_s_per_gpu / 1e12,
            "mfu": self.mfu,
            "mfu_convention": self.mfu_convention,
            "stages": [stage.to_dict() for stage in self.stages],
            "breakdown": {key: dict(value) for key, value in _fields(self.breakdown).items()},
            "fits_memory": self.fits_memory,
            "memory_verdict": self.memory_verdict,
            "in_domain": self.in_domain,
            "warnings": list(self.warnings),
            "total": asdict(self.total) if self.total else None,
            "provenance": dict(self.provenance),
        }


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


@overload
def predict(
    job: TrainingJob, checkpoint: str | PathLike[str] | Checkpoint | None = None, force: bool = False
) -> Prediction: ...
@overload
def predict(
    job: Sequence[TrainingJob], checkpoint: str | PathLike[str] | Checkpoint | None = None, force: bool = False
) -> list[Prediction]: ...
def predict(
    job: TrainingJob | Sequence[TrainingJob],
    checkpoint: str | PathLike[str] | Checkpoint | None = None,
    force: bool = False,
) -> Prediction | list[Prediction]:
    """Predicts one job, or several at once; ``checkpoint`` is a directory or a loaded one (default: the released one).

    Raises CannotRunError (exit code 4) when a layout does not divide or, without ``force``, when the device lacks a
    format or the memory; CheckpointError (exit code 3) when the checkpoint cannot be used.
    """
    jobs = _jobs(job)
    loaded = _loaded(checkpoint)
    predictions = _predict_traced([_trace(each, loaded.config.memory, force) for each in jobs], loaded)
    return predictions[0] if isinstance(job, TrainingJob) else predictions


def _jobs(job: TrainingJob | Sequence[TrainingJob]) -> list[TrainingJob]:
    """The jobs of a call; a path or plain values are no job yet."""
    jobs = list(job) if isinstance(job, Sequence) and not isinstance(job, str) else [job]
    for each in jobs:
        if not isinstance(each, TrainingJob):
            raise TypeError(f"got {each!r:.80}; expected a job: TrainingJob.from_yaml(path) or .parse(values)")
    return jobs


def predict_in_detail(
    job: TrainingJob, checkpoint: str | PathLike[str] | Checkpoint | None = None, force: bool = False
) -> tuple[Prediction, StepDetail]:
    """As :func:`predict` of one job, with what the prediction was added up from."""
    loaded = _loaded(checkpoint)
    traced = _trace(job, loaded.config.memory, force)
    (estimate,), (distance,) = _estimates([traced], loaded), _distances([traced], loaded)
    return _prediction(traced, estimate, distance, loaded), estimate.detail


def predict_each(
    jobs: Sequence[TrainingJob], checkpoint: str | PathLike[str] | Checkpoint | None = None, force: bool = False
) -> list[Prediction | CannotRunError]:
    """As :func:`predict` of several jobs, with the reason in place of each job that cannot run."""
    loaded = _loaded(checkpoint)
    traced: list[_TracedJob | CannotRunError] = []
    for job in jobs:
        try:
            traced.append(_trace(job, loaded.config.memory, force))
        except CannotRunError as error:
            traced.append(error)
    predictions = iter(_predict_traced([each for each in traced if isinstance(each, _TracedJob)], loaded))
    return [next(predictions) if isinstance(each, _TracedJob) else each for each in traced]


def _loaded(checkpoint: str | PathLike[str] | Checkpoint | None) -> Checkpoint:
    return checkpoint if isinstance(checkpoint, Checkpoint) else load_checkpoint(checkpoint)


def _predict_traced(traced: Sequence[_TracedJob], checkpoint: Checkpoint) -> list[Prediction]:
    predictions: list[Prediction] = []
    for start in range(0, len(traced), _JOBS_AT_ONCE):
        together = traced[start : start + _JOBS_AT_ONCE]
        estimates, distances = _estimates(together, checkpoint), _distances(together, checkpoint)
        for each, estimate, distance in zip(together, estimates, distances, strict=True):
            predictions.append(_prediction(each, estimate, distance, checkpoint))
    return predictions


@dataclass(frozen=True)
class _TracedJob:
    """All that is known of a job before the network sees it."""

    job: TrainingJob
    layout: RankLayout
    graph: TrainingGraph
    memory: tuple[StageMemory, ...]
    arrays: GraphArrays
    warnings: tuple[str, ...]
    floor: PhysicalFloor

    @property
    def fits_memory(self) -> bool:
        return max(stage.total for stage in self.memory) <= self.job.cluster.gpu.hbm_bytes


def _trace(job: TrainingJob, fit: MemoryFit, force: bool) -> _TracedJob:
    given, job = job, job.resolved()
    layout = resolved_layout(job)
    graph = GraphBuilder.of(job, layout).build()
    memory = peak_memory(graph.stages, job, layout, fit)
    formats, short = unsupported_formats(job), shortages(memory, given, fit)
    if (formats or short) and not force:
        raise CannotRunError([*formats, *short, "--force predicts anyway"], source=job.name or "job")
    warnings = (*formats, *short, *doubts(memory, job, fit), *_hints(job), *_far_tensors(layout, job), *job.assumed)
    floor = physical_floor(job, graph, layout)
    return _TracedJob(job, layout, graph, memory, featurize(job, graph, layout), warnings, floor)


def _hints(job: TrainingJob) -> list[str]:
    """fp32 is never taken as TF32, which is what many frameworks' "fp32" runs as; so say what it leaves unused."""
    gpu, policy = job.cluster.gpu, job.precision
    ratio = gpu.peak("tf32") / gpu.peak("fp32")
    if policy.compute != "fp32" or policy.linear != "same" or not gpu.supports("tf32") or ratio <= 1:
        return []
    where = "outside the tensor cores of" if gpu.vendor == "nvidia" else "at the full-precision rate of"
    return [
        f"precision: the fp32 GEMMs run {where} {gpu.name}, at {gpu.peak('fp32') / 1e12:g} TFLOP/s at best; "
        f"tf32 would be {ratio:.3g}x faster at peak"
    ]


def _far_tensors(layout: RankLayout, job: TrainingJob) -> list[str]:
    """Tensor parallelism sends messages in every layer; beyond the link inside a node they usually cost most."""
    group, inside = layout.groups["tensor"], job.cluster.intra_node
    if group.nodes == 1 or inside is None or group.link == inside:  # one rack's fabric may join nodes
        return []
    return [
        f"parallel.tensor: {group.size} ranks span {group.nodes} nodes (cluster.gpus_per_node is "
        f"{job.cluster.gpus_per_node}), so the messages of every layer cross {group.link.name} at "
        f"{group.link.bytes_per_s_per_gpu / 1e9:g} GB/s per GPU; {inside.name} inside a node has "
        f"{inside.bytes_per_s_per_gpu / 1e9:g}"
    ]


@functools.lru_cache(maxsize=4)
def network_of(checkpoint: Checkpoint) -> tuple[Ensemble, NetworkConfig]:
    """The network of a checkpoint and its configuration; CheckpointError when its weights do not fit it."""
    chosen = checkpoint.config.network.items()
    settings: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in chosen}
    try:
        config = NetworkConfig(**settings)
        return Ensemble.from_tensors(config, checkpoint.tensors), config
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        where = f"checkpoint {checkpoint.path}"
        raise CheckpointError(f"{where}: its weights do not fit its config.json ({reason})") from None


@dataclass(frozen=True)
class _Estimate:
    """A job's times as the network gives them, or raised to the physical floor where they are below it."""

    detail: StepDetail
    parts: Breakdown
    warnings: tuple[str, ...] = ()
    raised_by: float = 1.0

    @property
    def iteration_time_s(self) -> float:
        return sum(self.parts.by_kind.values()) + sum(self.parts.exposed_communication.values())

    @classmethod
    def of(cls, traced: _TracedJob, times: JobTimes) -> _Estimate:
        detail = StepDetail(traced.graph, traced.arrays, times)
        return cls(detail, breakdown(detail, traced.job.cluster.gpu))

    def raised(self, traced: _TracedJob) -> _Estimate:
        floor, seconds = traced.floor, self.iteration_time_s
        if seconds >= floor.seconds:
            return self
        factor = floor.seconds / seconds
        detail = replace(self.detail, times=self.detail.times.scaled(factor))
        warning = f"raised to the physical floor from {seconds:.4g} s: {floor.arithmetic}"
        return _Estimate(detail, self.parts.scaled(factor), (warning,), factor)


def _estimates(traced: Sequence[_TracedJob], checkpoint: Checkpoint) -> list[_Estimate]:
    answers = job_times([each.job for each in traced], [each.arrays for each in traced], checkpoint)
    return [_Estimate.of(each, answer).raised(each) for each, answer in zip(traced, answers, strict=True)]


@torch.inference_mode()
def job_times(jobs: Sequence[TrainingJob], graphs: Sequence[GraphArrays], checkpoint: Checkpoint) -> list[JobTimes]:
    """The checkpoint's times of resolved jobs and their graphs, as they are before any is raised to its floor."""
    network, config = network_of(checkpoint)
    batch = collate(graphs, config.devices)
    labels = [job.precision.label for job in jobs]
    runs, adapter = checkpoint.measured_runs, checkpoint.config.adapter
    known = runs.estimate(graphs, labels) if runs is not None else None
    times = network.node_times(batch, torch.from_numpy(known.population_share) if known is not None else None)
    answers = JobTimes.of_batch(batch, times, stage_table(batch, times))
    if runs is not None and known is not None:
        seconds, spreads = [each.total_s for each in answers], [each.spread for each in answers]
        corrections = runs.corrections(known, seconds, spreads)
        answers = [each.corrected(*one) for each, one in zip(answers, corrections.each(), strict=True)]
        times = corrected_times(batch, times, corrections)
    if adapter is None:
        return answers
    effects = [effect_of(adapter, job) for job in jobs]
    if adapter.kernels:
        times = measured_times(batch, times, [effect.kernels for effect in effects])
        informed = JobTimes.of_batch(batch, times, stage_table(batch, times))
        answers = [
            replace(each, spread=before.spread, measured_share=before.measured_share)
            for each, before in zip(informed, answers, strict=True)
        ]
    placed = PlacedJobs.of(graphs, labels)
    errors = adapter.share * adapter.error_field(checkpoint.config.error_covariance).expected(placed)
    return [
        each.scaled(math.exp(error)) if effect.applies else each
        for each, error, effect in zip(answers, errors.tolist(), effects, strict=True)
    ]


def _prediction(traced: _TracedJob, estimate: _Estimate, distance: float | None, checkpoint: Checkpoint) -> Prediction:
    times, iteration_s = estimate.detail.times, estimate.iteration_time_s
    outside_reasons = outside(traced.job, checkpoint.config.domain)
    calibration = effect_of(checkpoint.config.adapter, traced.job)
    spread = times.spread * calibration.width_factor
    low, high = checkpoint.config.interval.bounds(iteration_s, spread, not outside_reasons, distance)
    if not all(map(math.isfinite, (iteration_s, low, high))):
        where = f"checkpoint {checkpoint.path or checkpoint.config.name}"
        raise CheckpointError(f"{where}: its answer for {traced.job.name or 'this job'} is no finite time")
    return Prediction(
        job=traced.job,
        num_microbatches=traced.layout.num_microbatches,
        data_parallel=traced.layout.data,
        iteration_time_s=iteration_s,
        iteration_time_low_s=min(max(low, traced.floor.seconds), iteration_s),
        iteration_time_high_s=high,
        interval=checkpoint.config.interval.level,
        stages=stage_predictions(estimate.detail, traced.memory, iteration_s),
        breakdown=estimate.parts,
        fits_memory=traced.fits_memory,
        memory_verdict=verdict(traced.memory, traced.job.cluster.gpu.hbm_bytes, checkpoint.config.memory),
        in_domain=not outside_reasons,
        warnings=(
            *traced.warnings,
            *estimate.warnings,
            *(f"outside the training data: {reason}" for reason in outside_reasons),
            *calibration.warnings,
        ),
        provenance={
            "checkpoint": checkpoint.config.name,
            "format_version": checkpoint.config.format_version,
            "corpus": checkpoint.config.corpus_hash,
            "version": __version__,
            **({"measured_runs_share": round(times.measured_share, 4)} if checkpoint.process else {}),
            **calibration.provenance,
        },
        floor=traced.floor,
        raised_by=estimate.raised_by,
    )


def _distances(traced: Sequence[_TracedJob], checkpoint: Checkpoint) -> list[float] | list[None]:
    """How far the jobs are from what the checkpoint was trained on, where it knows that."""
    if checkpoint.points is None:
        return [None] * len(traced)
    labels, names = [each.job.precision.label for each in traced], checkpoint.config.domain.precisions
    found: list[float] = checkpoint.points.distances([each.arrays for each in traced], labels, names).tolist()
    return found


def _gemm_peak(device: DeviceSpec, policy: PrecisionPolicy) -> float:
    if policy.linear == "same":
        return device.peak(policy.compute)
    return device.peak(policy.linear if policy.linear in ("mxfp8", "nvfp4") else "fp8_e4m3")
