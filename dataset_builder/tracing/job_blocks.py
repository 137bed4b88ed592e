"""The blocks of a job: which structures its embedding, layers, norms, head and optimizer have, and how large they are.

In: a resolved job and its layout. Out: :class:`JobBlocks`; what is structural goes into the structures (the templates'
keys), every size into ``sizes`` under the names of :mod:`symbols`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from dataset_builder.job.formats import LinearFormat
from dataset_builder.job.model import ModelSpec
from dataset_builder.job.precision import PrecisionPolicy
from dataset_builder.job.schema import TrainingJob, attention_kernel, has_fused_kernels
from dataset_builder.tracing.layout import RankLayout, rank_layout
from dataset_builder.tracing.structure import BlockStructure

_ATTENTION_LINEARS = ("qkv", "q", "k", "v", "projection", "q_down", "q_up", "kv_down", "kv_up")
_CROSS_LINEARS = ("cross_q", "cross_kv", "cross_projection")
_FEED_FORWARD_LINEARS = ("fc1", "fc2", "gate", "up")
_EXPERT_LINEARS = ("expert_fc1", "expert_fc2", "shared_fc1", "shared_fc2", "shared_gate", "shared_up")

# Is it a decoder's, has it a dense feed-forward, does its attention have a window, and which linears are quantised.
_LayerKind = tuple[bool, bool, bool, tuple[tuple[str, LinearFormat], ...]]


@dataclass(frozen=True)
class JobBlocks:
    """The distinct blocks of a job with their sizes, and how often each stage runs each layer block."""

    embedding: BlockStructure
    encoder_norm: BlockStructure | None  # of an encoder that a decoder attends to
    mtp: BlockStructure | None  # what joins the stream with the next tokens' embeddings
    head: BlockStructure
    optimizer: BlockStructure | None
    layers: dict[tuple[BlockStructure, bool], Counter[int]]  # (structure, is_decoder) -> stage -> count
    sizes: dict[bool, dict[str, float]]  # by is_decoder; embedding and head use the last stack's


def job_structures(job: TrainingJob) -> list[BlockStructure]:
    """The structures whose templates a job needs."""
    job = job.resolved()
    blocks = job_blocks(job, rank_layout(job))
    found = [blocks.embedding, blocks.head, *(structure for structure, _ in blocks.layers)]
    found += [block for block in (blocks.encoder_norm, blocks.mtp, blocks.optimizer) if block]
    return list(dict.fromkeys([*found, *(as_gathered(structure, job) for structure in found)]))


def as_gathered(structure: BlockStructure, job: TrainingJob) -> BlockStructure:
    """The block whose saved activations a fully sharded job keeps.

    Shards that are gathered in 16 bits make a layer compute in 16 bits throughout, so nothing is saved in fp32 for
    autocast's sake, and the gathered weights are dropped after use: no cast copy of them is kept for the backward pass
    (torch.distributed.fsdp.MixedPrecisionPolicy).
    """
    is_sharded = job.parallel.sharding in ("zero3", "hsdp")
    if not is_sharded or not structure.autocast or job.precision.param_gather in (None, "fp32"):
        return structure
    return dataclasses.replace(structure, params=structure.compute, autocast=False, accumulate=True)


def job_blocks(job: TrainingJob, layout: RankLayout) -> JobBlocks:
    """Structures and sizes of a resolved job's blocks."""
    shared = _shared_structure(job, layout)
    model = job.model
    kinds, kind_of = _layer_kinds(model, job.precision)
    counts: dict[tuple[str, int], Counter[int]] = {}  # (recompute, kind) -> stage -> count
    limit = job.parallel.recompute.full_layers if job.parallel.recompute else None
    mode = job.parallel.recompute.mode if job.parallel.recompute else "none"
    for stage, indices in enumerate(layout.stage_layers):
        recomputed = len(indices) if limit is None else limit
        for recompute, part in (("full", indices[:recomputed]), ("none", indices[recomputed:])):
            # In the order of the layers; those of one kind need no walk.
            of_kind = {0: len(part)} if part and len(kinds) == 1 else Counter(map(kind_of.__getitem__, part))
            for kind, count in of_kind.items():
                counts.setdefault((recompute if mode == "full" else mode, kind), Counter())[stage] += count
    if model.mtp_layers:  # further layers of the last one's kind
        key = ("none" if mode == "full" and limit is not None else mode, kind_of[-1])
        counts.setdefault(key, Counter())[layout.head_stage] += model.mtp_layers
    layers: dict[tuple[BlockStructure, bool], Counter[int]] = {}
    for (recompute, kind), by_stage in counts.items():
        structure = _layer_structure(job, shared, recompute, kinds[kind])
        layers.setdefault((structure, kinds[kind][0]), Counter()).update(by_stage)
    return JobBlocks(
        embedding=_embedding_structure(job, shared),
        encoder_norm=(
            dataclasses.replace(shared, block="encoder_norm", dropout=False)
            if model.architecture == "encoder_decoder"
            else None
        ),
        mtp=_mtp_structure(job, shared) if model.mtp_layers else None,
        head=_head_structure(job, shared),
        optimizer=_optimizer_structure(job, shared),
        layers=layers,
        sizes={is_decoder: block_sizes(job, layout, is_decoder) for is_decoder in (False, True)},
    )


@functools.lru_cache(maxsize=64)
def _layer_kinds(model: ModelSpec, policy: PrecisionPolicy) -> tuple[tuple[_LayerKind, ...], tuple[int, ...]]:
    """The distinct kinds of layers, and the number of every layer's among them: all layouts of a job share them."""
    every, num_encoder_layers = model.full_attention_every, model.encoder_layers
    num_layers = num_encoder_layers + model.decoder_layers
    outer = (policy.high_precision_layers.first, num_layers - policy.high_precision_layers.last)
    linears: dict[int | bool, tuple[tuple[str, LinearFormat], ...]] = {}
    kinds: dict[_LayerKind, int] = {}
    kind_of: list[int] = []
    for index in range(num_layers):
        is_outer = not outer[0] <= index < outer[1]
        like = index if policy.overrides else is_outer  # overrides name single layers
        is_decoder = index >= num_encoder_layers
        in_stack = index - num_encoder_layers if is_decoder else index
        dense = model.moe is None or in_stack in model.moe.dense_layers
        windowed = model.window is not None and not (every and (in_stack + 1) % every == 0)
        if like not in linears:
            linears[like] = _linear_formats(policy, index, "same" if is_outer else policy.linear)
        kind_of.append(kinds.setdefault((is_decoder, dense, windowed, linears[like]), len(kinds)))
    return tuple(kinds), tuple(kind_of)


def _shared_structure(job: TrainingJob, layout: RankLayout) -> BlockStructure:
    """What all blocks of a job have in common."""
    model, policy = job.model, job.precision
    tensor = layout.tensor > 1
    compute, params = policy.compute, policy.params or "fp32"
    autocast = compute in ("fp16", "bf16") and params == "fp32"
    grad_accum = policy.grad_accum or params
    return BlockStructure(
        block="layer",
        normalization=model.normalization,
        norm_affine=model.norm_affine,
        norm_bias=model.bias if model.norm_bias is None else model.norm_bias,
        norm_after=model.architecture == "encoder",
        dropout=model.dropout > 0,
        tensor=tensor,
        sequence_parallel=tensor and bool(job.parallel.sequence_parallel),
        compute=compute,
        params=params,
        grad_accum=grad_accum,
        autocast=autocast,
        accumulate=layout.num_microbatches > 1 or (grad_accum != params and not autocast),
        fused=has_fused_kernels(job),
        frozen=model.lora is not None,
    )


def _linear_formats(policy: PrecisionPolicy, index: int, default: LinearFormat) -> tuple[tuple[str, LinearFormat], ...]:
    """The quantised linears of one layer: all in the default format but for the overrides."""
    if default == "same" and not policy.overrides:
        return ()
    formats: dict[str, LinearFormat] = {}
    groups = {"attention": _ATTENTION_LINEARS, "cross_attention": _CROSS_LINEARS, "mlp": _FEED_FORWARD_LINEARS}
    for module, names in {**groups, "mlp.": _EXPERT_LINEARS}.items():
        for name in names:
            fmt = default
            for override in policy.overrides:
                if fnmatchcase(f"layers.{index}.{module.rstrip('.')}.{name}", override.modules):
                    fmt = override.linear
            if fmt != "same":
                formats[name] = fmt
    return tuple(sorted(formats.items()))


def _layer_structure(job: TrainingJob, shared: BlockStructure, recompute: str, kind: _LayerKind) -> BlockStructure:
    is_decoder, dense, windowed, linears = kind
    model, plan, policy = job.model, job.parallel, job.precision
    attention: Literal["multi_head", "latent", "latent_compressed_queries"] = "multi_head"
    if model.mla:
        attention = "latent_compressed_queries" if model.mla.q_lora_rank else "latent"
    cross = is_decoder and model.architecture == "encoder_decoder"
    positions = model.position_embedding if model.position_embedding != "learned" else "none"
    names = {*_ATTENTION_LINEARS[:5]} if attention == "multi_head" else {*_ATTENTION_LINEARS[4:]}
    names |= {*_CROSS_LINEARS} if cross else set()
    has_shared = model.moe is not None and model.moe.shared_width > 0
    names |= {*_FEED_FORWARD_LINEARS} if dense else {n for n in _EXPERT_LINEARS if has_shared or "shared" not in n}
    kernel = attention_kernel(job)
    is_gated = model.is_gated
    names -= {"q", "k", "v", "gate", "up", "shared_gate", "shared_up"} if shared.fused else {"qkv"}
    if not shared.fused:
        names -= {"fc1", "shared_fc1"} if is_gated else {"gate", "up", "shared_gate", "shared_up"}
    adapted = _adapted_linears(job) & names
    return dataclasses.replace(
        shared,
        adapters=tuple(sorted(adapted)),
        activation=model.activation,
        bias=model.bias,
        qkv_bias=model.bias if model.qkv_bias is None else model.qkv_bias,
        position_embedding="none" if attention != "multi_head" else positions,
        causal=is_decoder and model.is_causal,
        windowed=windowed,
        qk_norm=model.qk_norm_over if model.qk_norm and attention == "multi_head" else "none",
        post_norm=model.post_norm,
        parallel_block=model.parallel_block,
        attention=attention,
        cross_attention=cross,
        feed_forward="dense" if dense else "experts",
        shared_experts=not dense and has_shared,
        context=plan.context > 1,
        expert=not dense and plan.expert > 1,
        expert_tensor=not dense and plan.expert_tensor > 1,
        attention_format=policy.attention or "fp32",
        linears=tuple((name, fmt) for name, fmt in linears if name in names),
        grouped_queries=kernel == "unfused" and attention == "multi_head" and _heads_per_group(job) > 1,
        kernel=kernel,
        recompute=recompute,  # type: ignore[arg-type]
    )


def _adapted_linears(job: TrainingJob) -> set[str]:
    """Names of the linears, fused or not, that have an adapter."""
    lora = job.model.lora
    if lora is None:
        return set()
    return {*_ATTENTION_LINEARS, *_CROSS_LINEARS, *(_FEED_FORWARD_LINEARS if lora.targets != "attention" else ())}


def _heads_per_group(job: TrainingJob) -> float:
    """Query heads per key-value head on a rank; below one group a rank the ranks keep copies of it."""
    groups = max(1.0, job.model.num_query_groups / job.parallel.tensor)
    return job.model.num_attention_heads / job.parallel.tensor / groups


def _embedding_structure(job: TrainingJob, shared: BlockStructure) -> BlockStructure:
    model = job.model
    positions = "learned" if model.position_embedding == "learned" else "none"
    return dataclasses.replace(
        shared,
        block="embedding",
        position_embedding=positions,
        token_types=model.num_token_types > 0,
        norm_affine=shared.norm_affine if shared.norm_after else True,
        norm_bias=shared.norm_bias if shared.norm_after else True,
        normalization=shared.normalization if shared.norm_after else "layernorm",
    )


def _mtp_structure(job: TrainingJob, shared: BlockStructure) -> BlockStructure:
    linear = job.precision.linear
    linears = (("mtp_projection", linear),) if linear != "same" else ()
    return dataclasses.replace(shared, block="mtp", dropout=False, bias=job.model.bias, linears=linears)


def _head_structure(job: TrainingJob, shared: BlockStructure) -> BlockStructure:
    model = job.model
    return dataclasses.replace(
        shared,
        block="head",
        dropout=False,
        head=model.head,
        masked_positions=model.masked_fraction < 1,
        lm_head="fp32" if model.head == "classification" else job.precision.lm_head or job.precision.compute,
    )


def _optimizer_structure(job: TrainingJob, shared: BlockStructure) -> BlockStructure | None:
    if job.optimizer.name == "none":
        return None
    policy = job.precision
    return BlockStructure(
        block="optimizer",
        optimizer=job.optimizer.name,
        params=shared.params,
        main_params=policy.main_params or "none",
        grad_accum=shared.grad_accum,
        optimizer_state=policy.optimizer_state,
        loss_scaling=policy.loss_scaling,
        accumulate=shared.accumulate,
    )


def block_sizes(job: TrainingJob, layout: RankLayout, is_decoder: bool) -> dict[str, float]:
    """A job's value of every name in :mod:`symbols`, on one rank of one stack (encoder or decoder)."""
    model, batch = job.model, job.batch
    tensor, context = layout.tensor, layout.context
    length = batch.seq_length
    if model.architecture == "encoder_decoder" and is_decoder:
        length = batch.target_seq_length or batch.seq_length
    positions = length / context
    is_scattered = tensor > 1 and bool(job.parallel.sequence_parallel)
    groups = max(1.0, model.num_query_groups / tensor)
    per_group = _heads_per_group(job)
    sizes = {
        "b": batch.micro_batch_size, "s": positions, "z": positions / tensor, "t": tensor, "c": context,
        "m": batch.seq_length / context, "o": batch.seq_length / context / tensor,
        "h": model.hidden_size, "g": groups, "r": per_group, "u": per_group + 2, "d": model.head_dim,
        "f": model.ffn_hidden_size / tensor, "v": -(-model.vocab_size // tensor),
        "p": model.max_position_embeddings or batch.seq_length, "y": max(1, model.num_token_types),
        "w": min(model.window or length, length),
        "M": batch.micro_batch_size * positions * model.masked_fraction / (tensor if is_scattered else 1),
        "C": model.num_labels, "R": model.lora.rank if model.lora else 1,
    }  # fmt: skip
    if model.moe:
        moe = model.moe
        local = moe.num_experts / layout.expert
        rows = batch.micro_batch_size * (positions / tensor if job.parallel.sequence_parallel else positions)
        arriving = rows * moe.top_k * (moe.capacity_factor or 1.0)
        sizes |= {
            "e": local, "x": layout.expert, "k": moe.top_k, "n": max(1.0, arriving / local),
            "a": moe.expert_ffn_hidden_size / layout.expert_tensor, "i": max(1.0, moe.shared_width / tensor),
        }  # fmt: skip
    if model.mla:
        mla = model.mla
        nope, rotary, value = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
        sizes |= {
            "g": model.num_attention_heads / tensor, "r": 1.0, "u": 3.0, "q": mla.q_lora_rank or 1,
            "l": mla.kv_lora_rank, "j": rotary / 2, "D": nope, "E": nope + rotary, "V": value / 2, "B": nope + value,
            "L": mla.kv_lora_rank + rotary,
        }  # fmt: skip
    return {name: float(value) for name, value in sizes.items()}
