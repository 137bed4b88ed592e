"""Peak memory of one rank of a pipeline stage, in bytes: what is counted, corrected by what measured peaks teach.

Model states follow ZeRO (arXiv 1910.02054, section 3.1 and 5): with fp16 weights and gradients and fp32 master weights
and Adam states, 16 bytes a parameter, of which ZeRO-1 shards the optimizer's 12, ZeRO-2 also the gradients' 2 and
ZeRO-3 all. Activations are what autograd saves for one microbatch times the microbatches a stage holds at its peak
(``event_order.in_flight_microbatches``). ``docs/guides/memory.md`` lists every part with its formula. Everything is
plain floats: this must cost nothing beside a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from dataset_builder.job.formats import BYTES_PER_ELEMENT
from gnn_predictor.event_order import PipelineShape, in_flight_microbatches, stages_of_rank

if TYPE_CHECKING:
    from dataset_builder.corpus.measurements import MemoryMeter
    from dataset_builder.job.schema import TrainingJob
    from dataset_builder.tracing.graph import StageFacts
    from dataset_builder.tracing.layout import RankLayout

# Values an optimizer keeps per parameter beside the master weight. Adafactor's factored moments are rows and columns.
STATES_PER_PARAMETER = {
    "adam": 2.0, "adamw": 2.0, "lamb": 2.0, "lion": 1.0, "sgd": 1.0, "muon": 1.0, "adafactor": 0.0, "none": 0.0,
}  # fmt: skip
# Layers whose full weights are on the device at once under ZeRO-3: the one that runs and the one gathered ahead.
GATHERED_LAYERS = 2
# Elements of the flat buffer in which DeepSpeed's ZeRO reduces gradients (reduce_bucket_size's default).
DEEPSPEED_BUCKET_ELEMENTS = 5e8


class MemoryFit(BaseModel):
    """What measured peaks teach of the rest: factors on what is counted, and what cannot be counted.

    The defaults are the plain count. ``low`` and ``high`` bound log(measured / predicted) of a share ``level`` of jobs
    whose group was not learnt from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    activations: Annotated[float, Field(gt=0)] = 1.0
    expert_activations: Annotated[float, Field(gt=0)] = 1.0  # of stages that hold experts
    logits: Annotated[float, Field(ge=0)] = 1.0
    split_logits: Annotated[float, Field(ge=0)] = 1.0  # where tensor ranks share the vocabulary
    workspace_bytes: Annotated[float, Field(ge=0)] = 64.0 * 2**20  # cuBLAS's and the allocator's rounding
    runtime_bytes: Annotated[float, Field(ge=0)] = 1.0e9  # CUDA's context, its kernels, buffers of the communicators
    # Blocks that the allocator keeps for later, as a share of its peak: nvidia-smi shows them, no job needs them.
    cached_share: Annotated[float, Field(ge=0)] = 0.0
    level: Annotated[float, Field(gt=0, lt=1)] = 0.9
    low: Annotated[float, Field(le=0)] = -0.25
    high: Annotated[float, Field(ge=0)] = 0.25


COUNTED = MemoryFit()
"""Nothing learnt: every part as it is counted."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one rank of a stage at its peak. ``runtime`` is on the device but outside the framework's allocator."""

    params: float
    grads: float
    optimizer: float
    activations: float
    buffers: float
    runtime: float
    cached: float

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
        """What the job needs of the device."""
        return self.allocated + self.runtime

    @property
    def shown(self) -> float:
        """What nvidia-smi shows: also blocks that the allocator would give back before it ran out of memory."""
        return self.total + self.cached


@dataclass(frozen=True, slots=True)
class StageTerms:
    """What is counted of one rank of a stage, before anything learnt: bytes at the peak."""

    params: float
    grads: float
    optimizer: float
    activations: float
    logits: float
    buffers: float  # gathered weights, fp8 copies, buckets
    has_experts: bool
    splits_vocabulary: bool

    def memory(self, fit: MemoryFit) -> StageMemory:
        """The same with what was learnt."""
        activations = self.activations * (fit.expert_activations if self.has_experts else fit.activations)
        logits = self.logits * (fit.split_logits if self.splits_vocabulary else fit.logits)
        buffers = self.buffers + logits + fit.workspace_bytes
        allocated = self.params + self.grads + self.optimizer + activations + buffers
        return StageMemory(
            self.params, self.grads, self.optimizer, activations, buffers, fit.runtime_bytes,
            allocated * fit.cached_share,
        )  # fmt: skip


def peak_memory(
    stages: Sequence[StageFacts], job: TrainingJob, layout: RankLayout, fit: MemoryFit = COUNTED
) -> tuple[StageMemory, ...]:
    """Peak memory of one rank of every pipeline position; ``job`` is a resolved job."""
    return tuple(terms.memory(fit) for terms in peak_terms(stages, job, layout))


def metered_bytes(memory: Sequence[StageMemory], meter: MemoryMeter) -> float:
    """What a meter shows of a job: the allocator on the fullest or the last rank, or the fullest device."""
    if meter == "last_rank":
        return memory[-1].allocated
    return max(stage.shown if meter == "device" else stage.allocated for stage in memory)


def peak_terms(stages: Sequence[StageFacts], job: TrainingJob, layout: RankLayout) -> tuple[StageTerms, ...]:
    """What is counted of one rank of every pipeline position; ``job`` is a resolved job."""
    last = next((index for index, stage in enumerate(stages) if stage.has_head), len(stages) - 1)
    head = _head_activation_bytes(stages, last)
    shape = PipelineShape(
        job.parallel.schedule or "1f1b", len(stages), job.parallel.virtual_pipeline, layout.num_microbatches
    )
    terms = []
    for rank, held in enumerate(held_microbatches(shape)):
        of_rank = stages_of_rank(shape, rank)
        parts = []
        for index in of_rank:
            stage = stages[index]
            head_bytes = head if index == last else 0.0
            # The head's backward runs right after its forward, so no rank holds two heads (but under GPipe).
            heads = held if shape.schedule == "gpipe" else min(held, 1.0)
            body = stage.saved_activation_bytes - head_bytes
            saved = held / len(of_rank) * body + heads * head_bytes + stage.recompute_peak_bytes
            parts.append(_stage_terms(stage, saved, job, layout))
        terms.append(parts[0] if len(parts) == 1 else _sum(parts))
    return tuple(terms)


def held_microbatches(shape: PipelineShape) -> tuple[float, ...]:
    """Of every rank, the microbatches it holds at its peak.

    Megatron-LM used to run all forward passes first when an interleaved schedule has as many microbatches as stages;
    measured peaks (its CI since 2025) show the usual warm-up there too.
    """
    if shape.schedule != "interleaved" or shape.num_microbatches != shape.num_ranks:
        return in_flight_microbatches(shape)
    usual = in_flight_microbatches(replace(shape, num_microbatches=shape.num_microbatches + 1))
    return tuple(min(held, float(shape.num_microbatches)) for held in usual)


def _sum(parts: Sequence[StageTerms]) -> StageTerms:
    names = ("params", "grads", "optimizer", "activations", "logits", "buffers")
    added = {name: sum(getattr(part, name) for part in parts) for name in names}
    return StageTerms(
        **added,
        has_experts=any(part.has_experts for part in parts),
        splits_vocabulary=parts[0].splits_vocabulary,
    )


def _stage_terms(stage: StageFacts, saved_bytes: float, job: TrainingJob, layout: RankLayout) -> StageTerms:
    dense = float(stage.num_parameters - stage.num_expert_parameters)
    experts = float(stage.num_expert_parameters)
    copies = layout.expert_data_group.size
    expert_ranks = min(layout.shard_size, copies) if job.parallel.sharding == "hsdp" else copies
    trained_experts = float(stage.num_trained_expert_parameters)
    trained = stage.num_trained_parameters - trained_experts
    of_dense = model_states(dense, job, layout.shard_size, trained)
    of_experts = model_states(experts, job, expert_ranks, trained_experts)
    params, grads, optimizer = (a + b for a, b in zip(of_dense, of_experts, strict=True))
    buffers = _gathered_bytes(stage, job, layout) + _bucket_bytes(stage, job, layout, grads)
    if quantised := _quantised_parameters(stage, job, layout):
        buffers += quantised * _copy_bytes_per_parameter(stage, job)
        if _has_quantised_weights(job):
            params -= quantised * (_bytes(job.precision.params) - _quantised_bytes(job))
    return StageTerms(
        params, grads, optimizer, saved_bytes, stage.logits_bytes, buffers, experts > 0, layout.tensor > 1
    )


def _head_activation_bytes(stages: Sequence[StageFacts], head: int) -> float:
    """What the head's stage saves beyond its layers, by those of the stage beside it; zero for a single stage."""
    if len(stages) < 2:
        return 0.0
    beside, own = stages[head - 1 if head else 1], stages[head]
    if not beside.layers:
        return 0.0
    layer = beside.saved_activation_bytes / len(beside.layers)
    return max(0.0, own.saved_activation_bytes - layer * len(own.layers))


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


def _gathered_bytes(stage: StageFacts, job: TrainingJob, layout: RankLayout) -> float:
    """What ZeRO-3 has unsharded at the peak, the start of the backward pass.

    The weights of the layer at work and of the one gathered ahead, the 16-bit gradients of one with the copy that is
    reduced, and the outermost unit (embedding and head), which stays gathered through the step and whose head already
    has its gradient (torch.distributed.fsdp.fully_shard, reshard_after_forward).
    """
    if not _is_fully_sharded(job) or layout.shard_size <= 1:
        return 0.0
    layers = max(1, len(stage.layers))
    gather, reduce = _bytes(job.precision.param_gather), _bytes(job.precision.grad_reduce)
    outermost = _vocabulary_parameters(stage, job, layout)
    layer = (stage.num_parameters - outermost) / layers
    trained = stage.num_trained_parameters / max(1, stage.num_parameters)
    head = outermost / 2 if stage.has_embedding and stage.has_head else outermost * stage.has_head
    gathered = outermost + min(GATHERED_LAYERS, layers) * layer
    return gathered * gather + head * trained * gather + layer * trained * (gather + reduce)


def _vocabulary_parameters(stage: StageFacts, job: TrainingJob, layout: RankLayout) -> float:
    """Parameters of the tables over the vocabulary that a stage holds; none of them is ever quantised."""
    table = job.model.vocab_size * job.model.hidden_size / layout.tensor
    tables = stage.has_embedding + (stage.has_head and not (stage.has_embedding and job.model.tie_embeddings))
    return min(table * tables, float(stage.num_parameters))


def _quantised_parameters(stage: StageFacts, job: TrainingJob, layout: RankLayout) -> float:
    """Parameters whose GEMMs run in a format narrower than 16 bits, but for layers kept at either end."""
    if job.precision.linear == "same" or not stage.layers:
        return 0.0
    return stage.num_parameters - _vocabulary_parameters(stage, job, layout)


def _has_quantised_weights(job: TrainingJob) -> bool:
    """Whether the weights themselves are stored quantised, not copies of them (Transformer Engine: primary weights)."""
    return job.precision.param_gather == "fp8" and job.precision.params != "fp32" and not _is_fully_sharded(job)


def _quantised_bytes(job: TrainingJob) -> float:
    return BYTES_PER_ELEMENT.get(job.precision.linear, BYTES_PER_ELEMENT["fp8_e4m3"])


def _copy_bytes_per_parameter(stage: StageFacts, job: TrainingJob) -> float:
    """The quantised weight and its transpose, of every parameter that has them.

    Beside 16-bit weights they are kept for all microbatches of an iteration (Transformer Engine's weight cache); of
    weights that are stored quantised the transpose only. Fp32 weights under autocast are quantised anew for every use,
    and gathered shards are dropped after it: there only the layers at work hold copies. From Blackwell on, GEMMs with
    one scale a tensor read the weight either way, and need no transpose.
    """
    is_block_scaled = job.precision.linear in ("mxfp8", "nvfp4", "fp8_blockwise")
    has_transpose = is_block_scaled or job.cluster.gpu.compute_capability < 10
    copies = (not _has_quantised_weights(job)) + has_transpose
    is_kept = job.precision.params != "fp32" and not _is_fully_sharded(job)
    share = 1.0 if is_kept else min(1.0, GATHERED_LAYERS / max(1, len(stage.layers)))
    return copies * share * _quantised_bytes(job)


def _is_fully_sharded(job: TrainingJob) -> bool:
    return job.parallel.sharding in ("zero3", "hsdp")


def _bucket_bytes(stage: StageFacts, job: TrainingJob, layout: RankLayout, grad_bytes: float) -> float:
    """Copies of gradients that a framework keeps beside those it accumulates.

    DeepSpeed: the bucket it reduces in; the fp32 copy of the partition of 16-bit gradients that its optimizer steps on
    (ZeRO-1 and -2), or the 16-bit gradients beside their fp32 sums (BF16_Optimizer). PyTorch's DistributedDataParallel
    keeps gradients and buckets unless ``gradient_as_bucket_view`` is set.
    """
    framework, sharding = (job.software.framework or "").lower(), job.parallel.sharding or "none"
    policy, trained = job.precision, float(stage.num_trained_parameters)
    if "deepspeed" in framework and policy.main_params == "fp32" and sharding in ("zero1", "zero2"):
        bucket = min(trained, DEEPSPEED_BUCKET_ELEMENTS) * _bytes(policy.grad_reduce)
        if policy.grad_accum == "fp32":
            return bucket + trained * _bytes(policy.params) + trained * 4.0 / layout.shard_size
        return bucket + trained * 4.0 / layout.shard_size
    if framework in ("", "pytorch", "huggingface") and sharding == "none" and layout.data > 1:
        return grad_bytes
    return 0.0


def _bytes(name: str | None) -> float:
    return BYTES_PER_ELEMENT["fp8_e4m3" if name == "fp8" else name or "fp32"]
