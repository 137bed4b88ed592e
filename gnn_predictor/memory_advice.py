"""What to say of a job's memory: whether it fits, the arithmetic of every stage, and the nearest change that would.

In: a job with the memory of its stages, best as it was given, so that what defaults to other values follows a change.
Out: sentences. The change is looked for in a fixed order of what it usually costs in time (:data:`CHANGES`): first
alone, then two, then three together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from dataset_builder.job.errors import JobError
from dataset_builder.job.hardware import DeviceSpec
from dataset_builder.job.parallel import LEAST_POSITIONS, Recompute
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import resolved_layout
from dataset_builder.tracing.trace import GraphBuilder
from gnn_predictor.memory import MemoryFit, StageMemory, peak_memory

Verdict = Literal["fits", "may not fit", "does not fit"]
_MOST_CHANGES = 3
Change = Callable[[TrainingJob], Mapping[str, Any] | None]
"""The settings (key path and value) of one change of a resolved job; ``None`` where it changes nothing."""


def verdict(memory: Sequence[StageMemory], capacity_bytes: float, fit: MemoryFit) -> Verdict:
    """Whether a job fits, by the interval of its fullest stage."""
    needed = _needed(memory)
    if needed * math.exp(fit.high) <= capacity_bytes:
        return "fits"
    return "may not fit" if needed * math.exp(fit.low) <= capacity_bytes else "does not fit"


def shortages(memory: Sequence[StageMemory], job: TrainingJob, fit: MemoryFit) -> list[str]:
    """Nothing when every stage fits; else the arithmetic of every stage, the verdict and what would fit."""
    gpu, needed = job.cluster.gpu, _needed(memory)
    missing = needed - gpu.hbm_bytes
    if missing <= 0:
        return []
    sentence = f"memory: {_gigabytes(missing)} ({missing / gpu.hbm_bytes:.1%}) too much for {gpu.name}"
    if verdict(memory, gpu.hbm_bytes, fit) == "may not fit":
        sentence += f", within the error of this estimate ({_range(needed, fit)}): the job may run"
    arithmetic = [stage_arithmetic(index, stage, gpu) for index, stage in enumerate(memory)]
    return [*arithmetic, sentence, _advice(job, fit)]


def doubts(memory: Sequence[StageMemory], job: TrainingJob, fit: MemoryFit) -> list[str]:
    """A warning where a job that should fit may yet run out of memory."""
    gpu, needed = job.cluster.gpu, _needed(memory)
    if needed > gpu.hbm_bytes or verdict(memory, gpu.hbm_bytes, fit) == "fits":
        return []
    return [
        f"memory: may not fit: {_gigabytes(needed)} on the fullest stage ({_range(needed, fit)}), "
        f"{gpu.name} has {_gigabytes(gpu.hbm_bytes)}"
    ]


def stage_arithmetic(index: int, stage: StageMemory, gpu: DeviceSpec) -> str:
    """What one stage needs, part by part, and what the device has."""
    fits = "fits" if stage.total <= gpu.hbm_bytes else "does not fit"
    return (
        f"memory: stage {index} needs {_gigabytes(stage.total)} per GPU ({_parts(stage)}), "
        f"{gpu.name} has {_gigabytes(gpu.hbm_bytes)}: {fits}"
    )


def nearest_fitting(job: TrainingJob, fit: MemoryFit) -> tuple[dict[str, Any], StageMemory] | None:
    """The settings of the fewest changes with which a job fits, the cheapest first, and its fullest stage then."""
    for settings in _settings(job):
        memory = _memory_with(job, settings, fit)
        if memory is not None and memory.total <= job.cluster.gpu.hbm_bytes:
            return settings, memory
    return None


def _advice(job: TrainingJob, fit: MemoryFit) -> str:
    found = nearest_fitting(job, fit)
    if found is None:
        return (
            "memory: no change of sharding, recompute, micro batch, tensor, pipeline, context or nodes fits, "
            "nor three of them"
        )
    settings, stage = found
    derived = {} if job.parallel.data is None else {"parallel.data": "null"}
    options = " ".join(f"--set {key}={value}" for key, value in (settings | derived).items())
    return f"memory: {options} would fit: {_gigabytes(stage.total)} on the fullest stage ({_parts(stage)})"


def _settings(job: TrainingJob) -> Iterator[dict[str, Any]]:
    """What to try, in order: every change, then every two and every three of them that change different things."""
    resolved = job.resolved()
    changes = [dict(settings) for change in CHANGES if (settings := change(resolved)) is not None]
    for count in range(1, _MOST_CHANGES + 1):
        for chosen in itertools.combinations(changes, count):
            together = {key: value for settings in chosen for key, value in settings.items()}
            if len(together) == count:
                yield together


def _memory_with(job: TrainingJob, settings: Mapping[str, Any], fit: MemoryFit) -> StageMemory | None:
    """The fullest stage of a job with other settings; ``None`` where its layout does not divide."""
    changed = _changed(job, settings).resolved()
    try:
        layout = resolved_layout(changed)
    except JobError:
        return None
    return max(peak_memory(GraphBuilder.of(changed, layout).facts, changed, layout, fit), key=lambda s: s.total)


def _changed(job: TrainingJob, settings: Mapping[str, Any]) -> TrainingJob:
    """A job with some of its fields set anew; the data-parallel size follows from the rest."""
    parts: dict[str, dict[str, Any]] = {"parallel": {"data": None}}
    for path, value in settings.items():
        part, field = path.split(".")
        parts.setdefault(part, {})[field] = Recompute.model_validate(value) if field == "recompute" else value
    if "pipeline" in parts["parallel"]:
        parts["parallel"]["layers_per_stage"] = None
    return job.model_copy(update={part: getattr(job, part).model_copy(update=fields) for part, fields in parts.items()})


def _sharded(stage: str) -> Change:
    order = ("none", "zero1", "zero2", "zero3")

    def change(job: TrainingJob) -> Mapping[str, Any] | None:
        now = job.parallel.sharding or "none"
        if now not in order or order.index(now) >= order.index(stage) or (job.parallel.data or 1) == 1:
            return None
        return {"parallel.sharding": stage}

    return change


def _recomputed(mode: str) -> Change:
    order = ("none", "selective", "full")

    def change(job: TrainingJob) -> Mapping[str, Any] | None:
        now = job.parallel.recompute
        if now is None or (order.index(now.mode) >= order.index(mode) and now.full_layers is None):
            return None
        return {"parallel.recompute": mode}

    return change


def _doubled(axis: str) -> Change:
    return lambda job: {f"parallel.{axis}": 2 * getattr(job.parallel, axis)}


def _context(times: int) -> Change:
    def change(job: TrainingJob) -> Mapping[str, Any] | None:
        size = times * job.parallel.context
        return {"parallel.context": size} if job.batch.seq_length >= LEAST_POSITIONS * size else None

    return change


def _half_micro_batch(job: TrainingJob) -> Mapping[str, Any] | None:
    size = job.batch.micro_batch_size
    return {"batch.micro_batch_size": size // 2} if size > 1 and size % 2 == 0 else None


def _more_nodes(times: int) -> Change:
    return lambda job: {"cluster.num_nodes": times * job.cluster.num_nodes}


CHANGES: tuple[Change, ...] = (
    _sharded("zero1"), _recomputed("selective"), _half_micro_batch, _sharded("zero2"), _recomputed("full"),
    _doubled("tensor"), _doubled("pipeline"), *(_context(2**k) for k in range(1, 6)), _sharded("zero3"),
    _more_nodes(2), _more_nodes(4), _more_nodes(8),
)  # fmt: skip
"""What may be changed, from what usually costs least time to what costs most."""


def _needed(memory: Sequence[StageMemory]) -> float:
    return max(stage.total for stage in memory)


def _range(needed: float, fit: MemoryFit) -> str:
    low, high = needed * math.exp(fit.low), needed * math.exp(fit.high)
    return f"{fit.level:.0%} of such jobs need {_gigabytes(low)} to {_gigabytes(high)}"


def _parts(stage: StageMemory) -> str:
    parts = ("params", "grads", "optimizer", "activations", "other")
    return " + ".join(f"{part} {getattr(stage, part) / 1e9:.1f}" for part in parts)


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
