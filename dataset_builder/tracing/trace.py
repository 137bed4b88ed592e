"""The training graph of a job: which blocks its layers are, their templates bound to its sizes, what each stage runs.

``build_graph(job)``: every distinct block once (embedding, each kind of layer, head, optimizer, communication), numbers
of one execution on one rank, and ``repeats[stage, node]``. Cost does not grow with layers, microbatches or ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Literal

import numpy as np

from dataset_builder.job.precision import LinearFormat
from dataset_builder.job.schema import TrainingJob, attention_kernel, has_fused_kernels
from dataset_builder.tracing.graph import Axis, Edge, EdgeKind, OpNode, Phase, StageFacts, TrainingGraph
from dataset_builder.tracing.layout import RankLayout, rank_layout
from dataset_builder.tracing.structure import TRACER_VERSION, BlockStructure, element_bytes
from dataset_builder.tracing.templates import StoredTemplate, template
from dataset_builder.tracing.work import visible_fraction

_ATTENTION_LINEARS = ("qkv", "q", "k", "v", "projection", "q_down", "q_up", "kv_down", "kv_up")
_CROSS_LINEARS = ("cross_q", "cross_kv", "cross_projection")
_FEED_FORWARD_LINEARS = ("fc1", "fc2", "gate", "up")
_EXPERT_LINEARS = ("expert_fc1", "expert_fc2", "shared_fc1", "shared_fc2", "shared_gate", "shared_up")


@dataclass(frozen=True)
class LayerPlace:
    """One layer of the model: its index, stack, and position within the stage (for partial recomputation)."""

    index: int
    is_decoder: bool
    is_recomputed: bool


@dataclass(frozen=True)
class JobBlocks:
    """The distinct blocks of a job with their sizes, and how often each stage runs each layer block."""

    embedding: BlockStructure
    head: BlockStructure
    optimizer: BlockStructure | None
    layers: dict[tuple[BlockStructure, bool], Counter[int]]  # (structure, is_decoder) -> stage -> count
    sizes: dict[bool, dict[str, float]]  # by is_decoder; embedding and head use the last stack's


def build_graph(job: TrainingJob) -> TrainingGraph:
    """The graph of any valid job; raises CannotRunError when the layout does not divide."""
    job = job.resolved()
    layout = rank_layout(job)
    return _GraphBuilder(job, layout, job_blocks(job, layout)).build()


def job_structures(job: TrainingJob) -> list[BlockStructure]:
    """The structures whose templates a job needs."""
    job = job.resolved()
    blocks = job_blocks(job, rank_layout(job))
    found = [blocks.embedding, blocks.head, *(structure for structure, _ in blocks.layers)]
    return [*found, blocks.optimizer] if blocks.optimizer else found


def job_blocks(job: TrainingJob, layout: RankLayout) -> JobBlocks:
    """Structures and sizes of a resolved job's blocks."""
    shared = _shared_structure(job, layout)
    model = job.model
    layers: dict[tuple[BlockStructure, bool], Counter[int]] = {}
    kinds: dict[tuple[object, ...], BlockStructure] = {}
    limit = job.parallel.recompute.full_layers if job.parallel.recompute else None
    mode = job.parallel.recompute.mode if job.parallel.recompute else "none"
    for stage, indices in enumerate(layout.stage_layers):
        for position, index in enumerate(indices):
            is_decoder = index >= model.encoder_layers
            in_stack = index - model.encoder_layers if is_decoder else index
            is_full = mode == "full" and (limit is None or position < limit)
            recompute = "full" if is_full else "none" if mode == "full" else mode
            dense = model.moe is None or in_stack in model.moe.dense_layers
            every = model.full_attention_every
            windowed = model.window is not None and not (every and (in_stack + 1) % every == 0)
            linears = _linear_formats(job, index)
            kind = (is_decoder, recompute, dense, windowed, linears)
            if kind not in kinds:
                kinds[kind] = _layer_structure(job, shared, kind)
            layers.setdefault((kinds[kind], is_decoder), Counter())[stage] += 1
    return JobBlocks(
        embedding=_embedding_structure(job, shared),
        head=_head_structure(job, shared),
        optimizer=_optimizer_structure(job, shared),
        layers=layers,
        sizes={is_decoder: block_sizes(job, layout, is_decoder) for is_decoder in (False, True)},
    )


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
    )


def _linear_formats(job: TrainingJob, index: int) -> tuple[tuple[str, LinearFormat], ...]:
    """The quantised linears of one layer: the policy's format, the outer layers' exception, then the overrides."""
    policy, model = job.precision, job.model
    if policy.linear == "same" and not policy.overrides:
        return ()
    last = model.encoder_layers + model.decoder_layers - policy.high_precision_layers.last
    is_outer = index < policy.high_precision_layers.first or index >= last
    default: LinearFormat = "same" if is_outer else policy.linear
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


def _layer_structure(job: TrainingJob, shared: BlockStructure, kind: tuple[object, ...]) -> BlockStructure:
    is_decoder, recompute, dense, windowed, linears = kind
    model, plan, policy = job.model, job.parallel, job.precision
    attention: Literal["multi_head", "latent", "latent_compressed_queries"] = "multi_head"
    if model.mla:
        attention = "latent_compressed_queries" if model.mla.q_lora_rank else "latent"
    cross = bool(is_decoder) and model.architecture == "encoder_decoder"
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
    return dataclasses.replace(
        shared,
        activation=model.activation,
        bias=model.bias,
        qkv_bias=model.bias if model.qkv_bias is None else model.qkv_bias,
        position_embedding="none" if attention != "multi_head" else positions,
        causal=bool(is_decoder) and model.is_causal,
        windowed=bool(windowed),
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
        linears=tuple((name, fmt) for name, fmt in linears if name in names),  # type: ignore[attr-defined]
        grouped_queries=kernel == "unfused" and attention == "multi_head" and _heads_per_group(job) > 1,
        kernel=kernel,
        recompute=recompute,  # type: ignore[arg-type]
    )


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


def _head_structure(job: TrainingJob, shared: BlockStructure) -> BlockStructure:
    return dataclasses.replace(
        shared,
        block="head",
        dropout=False,
        mlm_head=job.model.mlm_head,
        lm_head=job.precision.lm_head or job.precision.compute,
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
    groups = max(1.0, model.num_query_groups / tensor)
    per_group = _heads_per_group(job)
    sizes = {
        "b": batch.micro_batch_size, "s": positions, "z": positions / tensor, "t": tensor, "c": context,
        "m": batch.seq_length / context, "o": batch.seq_length / context / tensor,
        "h": model.hidden_size, "g": groups, "r": per_group, "u": per_group + 2, "d": model.head_dim,
        "f": model.ffn_hidden_size / tensor, "v": -(-model.vocab_size // tensor),
        "p": model.max_position_embeddings or batch.seq_length, "y": max(1, model.num_token_types),
        "w": min(model.window or length, length),
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


@dataclass(frozen=True)
class BoundBlock:
    """A template with a job's numbers: nodes, edges and ports with indices of its own, and totals."""

    nodes: list[OpNode]
    edges: tuple[tuple[int, int, str], ...]
    ports: Mapping[str, tuple[int, ...]]
    totals: dict[str, float]
    output_dtype: str


def bind(stored: StoredTemplate, sizes: Mapping[str, float], prefix: str, groups: Mapping[str, int]) -> BoundBlock:
    """Puts sizes into a template; ``groups``: size of the group of every axis."""
    values = stored.values(sizes)
    nodes = []
    for kernel in stored.kernels:
        shape = tuple(max(1, round(values[p])) for p in kernel["shape"])
        flops, read, written, message = (float(values[p]) for p in kernel["work"])
        if kernel["kind"] == "attention":
            flops *= visible_fraction(shape[3], shape[4], shape[6], kernel["causal"])
        axis = kernel["axis"]
        node = OpNode(
            kernel["kind"], kernel["op"], f"{prefix}.{kernel['module']}", kernel["phase"], shape, kernel["in"],
            kernel["out"], kernel["acc"], axis, groups[axis] if axis else 1, kernel["per"], flops, read, written,
            message, kernel["launches"],
        )  # fmt: skip
        nodes.append(node)
    totals = {name: float(values[p]) for name, p in stored.totals.items()}
    return BoundBlock(nodes, stored.edges, stored.ports, totals, stored.output_dtype)


@dataclass(frozen=True, slots=True)
class _Message:
    """What a message is, apart from its size and who sends it."""

    kind: str
    module: str
    phase: Phase
    fmt: str
    axis: Axis
    group_size: int
    per: Literal["microbatch", "iteration"] = "iteration"


@dataclass
class _GraphBuilder:
    """Puts the bound blocks of one job together; used once."""

    job: TrainingJob
    layout: RankLayout
    blocks: JobBlocks
    nodes: list[OpNode] = field(default_factory=list)
    edges: dict[tuple[int, int], EdgeKind] = field(default_factory=dict)
    repeats: list[list[float]] = field(default_factory=list)  # [node][stage]

    def build(self) -> TrainingGraph:
        stages = range(len(self.layout.stage_layers))
        groups: dict[str, int] = {axis: group.size for axis, group in self.layout.groups.items()}
        last = len(stages) - 1
        is_two_stacks = self.job.model.architecture == "encoder_decoder"
        final = self.job.model.encoder_layers == 0 or is_two_stacks
        first_sizes = self.blocks.sizes[final and not is_two_stacks]
        embedding = bind(template(self.blocks.embedding), first_sizes, "embedding", groups)
        head = bind(template(self.blocks.head), self.blocks.sizes[final], "head", groups)
        layers = [
            (bind(template(structure), self.blocks.sizes[is_decoder], _prefix(is_decoder, number), groups), counts)
            for number, ((structure, is_decoder), counts) in enumerate(self.blocks.layers.items())
        ]
        chain = [(embedding, self._add(embedding, [float(stage == 0) for stage in stages]))]
        for block, counts in layers:
            chain.append((block, self._add(block, [float(counts[stage]) for stage in stages])))
        chain.append((head, self._add(head, [float(stage == last) for stage in stages])))
        self._connect(chain)
        facts = self._facts(embedding, head, layers)
        self._pipeline_messages(head.output_dtype if not layers else layers[0][0].output_dtype, chain)
        self._data_parallel(facts, chain, layers)
        repeats = np.array(self.repeats, dtype=np.float64).T.copy()
        edges = tuple(Edge(source, target, kind) for (source, target), kind in sorted(self.edges.items()))
        return TrainingGraph(
            tuple(self.nodes), edges, repeats, facts, self.layout.num_microbatches, self._fingerprint(), TRACER_VERSION
        )

    def _fingerprint(self) -> str:
        text = self.job.model_dump_json(exclude={"name", "training", "price"})
        return hashlib.sha256(f"{TRACER_VERSION} {text}".encode()).hexdigest()[:16]

    def _add(self, block: BoundBlock, repeats: list[float]) -> int:
        """Adds a block's nodes and edges; returns the index of its first node."""
        start = len(self.nodes)
        self.nodes += block.nodes
        self.repeats += [repeats] * len(block.nodes)
        self.edges |= {(start + a, start + b): kind for a, b, kind in block.edges}  # type: ignore[misc]
        return start

    def _connect(self, chain: list[tuple[BoundBlock, int]]) -> None:
        """Activations to the next block, gradients to the one before."""
        for (block, start), (after, after_start) in pairwise(chain):
            self._link(block, start, "output", after, after_start, "input")
            self._link(after, after_start, "input_gradient", block, start, "output_gradient")

    def _link(self, first: BoundBlock, start: int, out: str, second: BoundBlock, second_start: int, into: str) -> None:
        for source in first.ports[out]:
            for target in second.ports[into]:
                self.edges[start + source, second_start + target] = "data"

    def _send(self, message: _Message, elements: float, repeats: list[float]) -> int:
        """Adds a message of so many elements; returns its index."""
        fmt, size = message.fmt, elements * element_bytes(message.fmt)
        node = OpNode(
            message.kind, message.kind, message.module, message.phase, (max(1, round(elements)),), fmt, fmt, fmt,
            message.axis, message.group_size, message.per, 0.0, size, size, size, 1.0,
        )  # fmt: skip
        self.nodes.append(node)
        self.repeats.append(repeats)
        return len(self.nodes) - 1

    # ---- what a stage holds

    def _facts(
        self, embedding: BoundBlock, head: BoundBlock, layers: list[tuple[BoundBlock, Counter[int]]]
    ) -> tuple[StageFacts, ...]:
        model, last = self.job.model, len(self.layout.stage_layers) - 1
        facts = []
        for stage, indices in enumerate(self.layout.stage_layers):
            held = [(block.totals, counts[stage]) for block, counts in layers if counts[stage]]
            if stage == 0:
                held.append((embedding.totals, 1))
            dense = sum(t["dense_parameters"] * n for t, n in held)
            expert = sum(t["expert_parameters"] * n for t, n in held)
            saved = sum(t["saved"] * n for t, n in held)
            vocabulary = embedding.totals["vocabulary_parameters"] if stage == 0 else 0.0
            if stage == last:
                dense += head.totals["dense_parameters"]
                saved += head.totals["saved"]
                if last > 0 or not model.tie_embeddings:  # another stage keeps its own copy of the tied table
                    vocabulary += head.totals["vocabulary_parameters"]
            dense += self._parameters_outside_blocks(stage)
            tokens = self.blocks.sizes[model.architecture != "encoder"]["s"] * self.job.batch.micro_batch_size
            logits = tokens * self.blocks.sizes[True]["v"] * 4.0
            facts.append(
                StageFacts(
                    stage=stage,
                    layers=indices,
                    has_embedding=stage == 0,
                    has_head=stage == last,
                    num_parameters=round(dense + expert + vocabulary),
                    num_expert_parameters=round(expert),
                    saved_activation_bytes=saved,
                    recompute_peak_bytes=max((t["recompute"] for t, _ in held), default=0.0),
                    logits_bytes=logits if stage == last else 0.0,
                )
            )
        return tuple(facts)

    def _parameters_outside_blocks(self, stage: int) -> float:
        """The position tables of relative attention, and the encoder's final norm in an encoder-decoder."""
        model = self.job.model
        outside = 0.0
        if stage == 0 and model.position_embedding == "relative":
            stacks = (model.encoder_layers > 0) + (model.decoder_layers > 0)
            outside += stacks * model.relative_buckets * model.num_attention_heads / self.layout.tensor
        if stage == 0 and model.architecture == "encoder_decoder" and model.norm_affine:
            has_bias = model.bias if model.norm_bias is None else model.norm_bias
            outside += model.hidden_size * (2 if model.normalization == "layernorm" and has_bias else 1)
        return outside

    # ---- messages between blocks

    def _pipeline_messages(self, fmt: str, chain: list[tuple[BoundBlock, int]]) -> None:
        """Activations to the next stage and gradients back, per microbatch; every model chunk has its own."""
        stages, chunks = self.layout.pipeline, self.layout.virtual_pipeline
        if stages == 1:
            return
        sizes = self.blocks.sizes[self.job.model.architecture != "encoder"]
        is_scattered = self.blocks.head.tensor and self.blocks.head.sequence_parallel
        elements = sizes["b"] * sizes["h"] * (sizes["z"] if is_scattered else sizes["s"])
        sends = [float(chunks if stage < stages - 1 else chunks - 1) for stage in range(stages)]
        returns = [float(chunks if stage > 0 else chunks - 1) for stage in range(stages)]
        activations = _Message("send_recv", "pipeline.activations", "forward", fmt, "pipeline", stages, "microbatch")
        gradients = _Message("send_recv", "pipeline.gradients", "backward", fmt, "pipeline", stages, "microbatch")
        forward = self._send(activations, elements, sends)
        backward = self._send(gradients, elements, returns)
        for block, start in chain[1:-1]:
            self.edges |= {(start + i, forward): "communication" for i in block.ports["output"]}
            self.edges |= {(start + i, backward): "communication" for i in block.ports["input_gradient"]}

    def _data_parallel(
        self,
        facts: tuple[StageFacts, ...],
        chain: list[tuple[BoundBlock, int]],
        layers: list[tuple[BoundBlock, Counter[int]]],
    ) -> None:
        """Gradient and parameter messages and the optimizer, with the elements of every stage."""
        gradients = [start + i for block, start in chain for i in block.ports["weight_gradient"]]
        sharding = self.job.parallel.sharding or "none"
        is_fully_sharded = sharding in ("zero3", "hsdp")
        if is_fully_sharded:
            self._gather_blocks(chain)
        by_elements: dict[tuple[float, float], list[int]] = {}
        for stage in facts:
            dense = float(stage.num_parameters - stage.num_expert_parameters)
            by_elements.setdefault((dense, float(stage.num_expert_parameters)), []).append(stage.stage)
        num_stages = len(facts)
        for (dense, expert), stages in by_elements.items():
            repeats = [float(stage in stages) for stage in range(num_stages)]
            reduced = self._reduce_gradients(dense, expert, repeats, gradients)
            first, last = self._optimizer_step(dense, expert, repeats)
            for source in reduced or gradients:
                if first is not None:
                    self.edges[source, first] = "communication" if reduced else "data"
            if sharding in ("zero1", "zero2") and last is not None:
                self._gather_parameters(dense, expert, repeats, last)
        self._tied_embedding(chain, num_stages)

    def _gather_blocks(self, chain: list[tuple[BoundBlock, int]]) -> None:
        """Fully sharded weights: gathered before forward and backward of every block, gradients scattered after."""
        policy, group = self.job.precision, self.layout.shard_group.size
        if group <= 1:
            return
        for block, start in chain:
            repeats = self.repeats[start]
            totals = block.totals
            elements = totals["dense_parameters"] + totals["expert_parameters"] + totals["vocabulary_parameters"]
            if elements < 1 or not block.nodes:
                continue
            name = block.nodes[0].module.partition(".")[0]
            gather, reduce = _stored(policy.param_gather or "bf16"), policy.grad_reduce or "fp32"
            messages = (
                _Message("all_gather", f"{name}.parameters", "forward", gather, "data", group, "microbatch"),
                _Message("all_gather", f"{name}.parameters", "backward", gather, "data", group, "microbatch"),
                _Message("reduce_scatter", f"{name}.gradients", "backward", reduce, "data", group, "microbatch"),
            )
            forward, backward, scatter = (self._send(message, elements, repeats) for message in messages)
            for i in block.ports["input"] or (0,):
                self.edges[forward, start + i] = "communication"
            for i in block.ports["output_gradient"]:
                self.edges[backward, start + i] = "communication"
            for i in block.ports["weight_gradient"]:
                self.edges[start + i, scatter] = "communication"

    def _reduce_gradients(self, dense: float, expert: float, repeats: list[float], gradients: list[int]) -> list[int]:
        """The data-parallel reduction of a stage's gradients: once per iteration, with ZeRO-2 once per microbatch."""
        sharding, fmt = self.job.parallel.sharding or "none", self.job.precision.grad_reduce or "fp32"
        parts: list[tuple[str, float, int, str]] = []
        if sharding in ("zero3", "hsdp"):
            replicas = self.layout.replica_group.size
            if replicas > 1:
                parts = [("gradients", (dense + expert) / self.layout.shard_size, replicas, "all_reduce")]
        else:
            kind = "all_reduce" if sharding == "none" else "reduce_scatter"
            parts = [("gradients", dense, self.layout.groups["data"].size, kind)]
            parts.append(("expert_gradients", expert, self.layout.expert_data_group.size, kind))
        per: Literal["microbatch", "iteration"] = "microbatch" if sharding == "zero2" else "iteration"
        added = []
        for name, elements, group, kind in parts:
            if elements >= 1 and group > 1:
                message = _Message(kind, f"data.{name}", "backward", fmt, "data", group, per)
                node = self._send(message, elements, repeats)
                self.edges |= {(source, node): "communication" for source in gradients}
                added.append(node)
        return added

    def _gather_parameters(self, dense: float, expert: float, repeats: list[float], source: int) -> None:
        fmt = _stored(self.job.precision.param_gather or "bf16")
        groups = (self.layout.groups["data"].size, self.layout.expert_data_group.size)
        for name, elements, group in zip(("parameters", "expert_parameters"), (dense, expert), groups, strict=True):
            if elements >= 1 and group > 1:
                message = _Message("all_gather", f"data.{name}", "optimizer", fmt, "data", group)
                node = self._send(message, elements, repeats)
                self.edges[source, node] = "communication"

    def _optimizer_step(self, dense: float, expert: float, repeats: list[float]) -> tuple[int | None, int | None]:
        """The optimizer's nodes for stages with these parameters; indices of the first and the last."""
        if self.blocks.optimizer is None:
            return None, None
        elements = dense + expert
        sharding = self.job.parallel.sharding or "none"
        if sharding != "none":
            ranks = self.layout.shard_size
            expert_ranks = min(ranks, self.layout.expert_data_group.size)
            elements = dense / max(1, ranks) + expert / max(1, expert_ranks)
        hidden = float(self.job.model.hidden_size)
        if self.blocks.optimizer.optimizer == "muon":
            elements /= hidden * hidden
        block = bind(template(self.blocks.optimizer), {"N": elements, "h": hidden}, "", {})
        start = len(self.nodes)
        for node in block.nodes:
            self.nodes.append(dataclasses.replace(node, module=node.module.lstrip("."), per="iteration"))
            self.repeats.append(repeats)
        self.edges |= {(start + a, start + b): kind for a, b, kind in block.edges}  # type: ignore[misc]
        return start, len(self.nodes) - 1

    def _tied_embedding(self, chain: list[tuple[BoundBlock, int]], stages: int) -> None:
        """The first and the last stage add up the gradients of the table they share."""
        if stages == 1 or not self.job.model.tie_embeddings:
            return
        embedding, head = chain[0], chain[-1]
        elements = embedding[0].totals["vocabulary_parameters"]
        repeats = [float(stage in (0, stages - 1)) for stage in range(stages)]
        fmt = self.job.precision.grad_reduce or "fp32"
        message = _Message("all_reduce", "embedding.tied", "backward", fmt, "pipeline", 2)
        node = self._send(message, elements, repeats)
        for block, start in (embedding, head):
            self.edges |= {(start + i, node): "communication" for i in block.ports["weight_gradient"]}


def _stored(fmt: str) -> str:
    """The format of gathered weights; ``fp8`` is their forward format."""
    return "fp8_e4m3" if fmt == "fp8" else fmt


def _prefix(is_decoder: bool, number: int) -> str:
    return f"{'decoder' if is_decoder else 'encoder'}_layer{number}"
