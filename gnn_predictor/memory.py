"""Peak memory of one rank of a pipeline stage, in bytes: model states, activations and what the runtime keeps.

Model states follow ZeRO (arXiv 1910.02054, section 3.1 and 5): with fp16 weights and gradients and fp32 master weights
and Adam states, 16 bytes a parameter, of which ZeRO-1 shards the optimizer's 12, ZeRO-2 also the gradients' 2 and
ZeRO-3 all. Activations are what autograd saves for one microbatch times the microbatches a stage holds at its peak
(Megatron-LM's schedules, arXiv 2104.04473). Everything is plain floats: this must cost nothing beside a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dataset_builder.job.precision import BYTES_PER_ELEMENT

if TYPE_CHECKING:
    from dataset_builder.job.schema import TrainingJob
    from dataset_builder.tracing.graph import StageFacts
    from dataset_builder.tracing.layout import RankLayout

# Values an optimizer keeps per parameter beside the master weight. Adafactor's factored moments are rows and columns.
STATES_PER_PARAMETER = {
    "adam": 2.0, "adamw": 2.0, "lamb": 2.0, "lion": 1.0, "sgd": 1.0, "muon": 1.0, "adafactor": 0.0, "none": 0.0,
}  # fmt: skip
# CUDA context with its loaded kernels (about 0.5 GB) and the buffers of a few NCCL communicators: on the device, but
# in no allocator's own figures.
RUNTIME_BYTES = 1.0e9
# cuBLAS workspace of Hopper (32 MiB) and the smaller ones of earlier devices, and the allocator's rounding.
WORKSPACE_BYTES = 64.0 * 2**20
# How far measured peaks of public runs lie from this model (one standard deviation is 15%): a job that needs more than
# the device has by less than this is refused like any other, but told that it may well run.
RELATIVE_ERROR = 0.15
# Layers whose full weights are on the device at once under ZeRO-3: the one that runs and the one gathered ahead.
GATHERED_LAYERS = 2


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one rank of a stage at its peak. ``runtime`` is on the device but outside the framework's allocator."""

    params: float
    grads: float
    optimizer: float
    activations: float
    buffers: float
    runtime: float = RUNTIME_BYTES

    @property
    def other(self) -> float:
        """Logits, gathered weights, fp8 copies, workspaces, and the runtime itself."""
        return self.buffers + self.runtime

    @property
    def model_states(self) -> float:
        return self.params + self.grads + self.optimizer

    @property
    def allocated(self) -> float:
        """What the framework's allocator reports at its peak (torch.cuda.max_memory_allocated)."""
        return self.model_states + self.activations + self.buffers

    @property
    def total(self) -> float:
        return self.allocated + self.runtime


def peak_memory(stages: Sequence[StageFacts], job: TrainingJob, layout: RankLayout) -> tuple[StageMemory, ...]:
    """Peak memory of one rank of every stage; ``job`` is a resolved job."""
    head = _head_activation_bytes(stages)
    return tuple(_stage_memory(stage, head if stage is stages[-1] else 0.0, job, layout) for stage in stages)


def _stage_memory(stage: StageFacts, head_bytes: float, job: TrainingJob, layout: RankLayout) -> StageMemory:
    dense = float(stage.num_parameters - stage.num_expert_parameters)
    experts = float(stage.num_expert_parameters)
    copies = layout.expert_data_group.size
    expert_ranks = min(layout.shard_size, copies) if job.parallel.sharding == "hsdp" else copies
    trained_experts = float(stage.num_trained_expert_parameters)
    trained = stage.num_trained_parameters - trained_experts
    shares = zip(
        model_states(dense, job, layout.shard_size, trained),
        model_states(experts, job, expert_ranks, trained_experts),
        strict=True,
    )
    params, grads, optimizer = (of_dense + of_experts for of_dense, of_experts in shares)
    held = microbatches_in_flight(stage.stage, job, layout.num_microbatches)
    # The last stage runs a microbatch's backward right after its head, so it never holds two heads (but for GPipe).
    heads = held if job.parallel.schedule == "gpipe" else min(held, 1.0)
    activations = held * (stage.saved_activation_bytes - head_bytes) + heads * head_bytes + stage.recompute_peak_bytes
    buffers = (
        WORKSPACE_BYTES
        + stage.logits_bytes
        + _gathered_bytes(stage, job, layout.shard_size)
        + _fp8_copy_bytes(stage, job)
    )
    return StageMemory(params, grads, optimizer, activations, buffers)


def _head_activation_bytes(stages: Sequence[StageFacts]) -> float:
    """What the last stage saves beyond its layers, by the layers of the stage before it; zero for a single stage."""
    if len(stages) < 2 or not stages[-2].layers:
        return 0.0
    before, last = stages[-2], stages[-1]
    layer = before.saved_activation_bytes / len(before.layers)
    return max(0.0, last.saved_activation_bytes - layer * len(last.layers))


def model_states(
    num_parameters: float, job: TrainingJob, shard_size: int, num_trained: float | None = None
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer (master weights and states) of one rank of ``shard_size``.

    ``num_trained``: how many have gradients and optimizer states, all if ``None``; the frozen ones are weights only.
    """
    num_trained = num_parameters if num_trained is None else num_trained
    policy, sharding = job.precision, job.parallel.sharding or "none"
    params = num_parameters * _bytes(policy.params)
    grads = num_trained * _bytes(policy.grad_accum)
    master = 0.0 if policy.main_params in (None, "none") else _bytes(policy.main_params)
    state = STATES_PER_PARAMETER[job.optimizer.name] * _bytes(policy.optimizer_state)
    optimizer = num_trained * ((master if job.optimizer.name != "none" else 0.0) + state)
    if sharding != "none":
        optimizer /= shard_size
    if sharding in ("zero2", "zero3", "hsdp"):
        grads /= shard_size
    if sharding in ("zero3", "hsdp"):
        params /= shard_size
    return params, grads, optimizer


def microbatches_in_flight(stage: int, job: TrainingJob, num_microbatches: int) -> float:
    """Microbatches (of the whole stage) whose activations a stage holds at its peak.

    1F1B: the stages after it and itself. Interleaved: Megatron's warm-up of ``2 (p - s - 1) + (v - 1) p`` chunks and
    the one that runs, each a v-th of the stage. GPipe: all. Zero-bubble ZB-H1 holds as much as 1F1B (arXiv
    2401.10241); DualPipe one more than there are stages (arXiv 2412.19437, table 2).
    """
    pipeline, chunks = job.parallel.pipeline, job.parallel.virtual_pipeline
    schedule = job.parallel.schedule or "1f1b"
    if schedule == "gpipe":
        return float(num_microbatches)
    if schedule == "dualpipe":
        return float(min(num_microbatches, pipeline + 1))
    if chunks > 1 and pipeline > 1:
        warm_up = 2 * (pipeline - stage - 1) + (chunks - 1) * pipeline
        return min(num_microbatches * chunks, warm_up + 1) / chunks
    return float(min(num_microbatches, pipeline - stage))


def _gathered_bytes(stage: StageFacts, job: TrainingJob, shard_size: int) -> float:
    """Full weights of the layers at work and the gradients of one before they are scattered, under ZeRO-3."""
    if job.parallel.sharding not in ("zero3", "hsdp") or shard_size <= 1:
        return 0.0
    layers = max(1, len(stage.layers))
    gather, reduce = _bytes(job.precision.param_gather), _bytes(job.precision.grad_reduce)
    gathered = min(GATHERED_LAYERS, layers) * gather * stage.num_parameters
    return (gathered + reduce * stage.num_trained_parameters) / layers


def _fp8_copy_bytes(stage: StageFacts, job: TrainingJob) -> float:
    """The quantised weight and its transpose.

    Beside 16-bit weights they are kept for all microbatches of an iteration (Transformer Engine's weight cache). Fp32
    weights under autocast are quantised anew for every use, and gathered shards are dropped after it: there only the
    layers at work hold copies.
    """
    policy = job.precision
    if policy.linear == "same" or not stage.layers:
        return 0.0
    per_element = BYTES_PER_ELEMENT.get(policy.linear, BYTES_PER_ELEMENT["fp8_e4m3"])
    is_kept = policy.params != "fp32" and job.parallel.sharding not in ("zero3", "hsdp")
    share = 1.0 if is_kept else min(1.0, GATHERED_LAYERS / len(stage.layers))
    return 2.0 * per_element * stage.num_parameters * share


def _bytes(name: str | None) -> float:
    return BYTES_PER_ELEMENT["fp8_e4m3" if name == "fp8" else name or "fp32"]
