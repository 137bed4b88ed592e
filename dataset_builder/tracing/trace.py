"""The training graph of a job: which blocks its layers are, their templates bound to its sizes, what each stage runs.

``build_graph(job)``: every distinct block once (embedding, each kind of layer, head, optimizer, communication), numbers
of one execution on one rank, and ``repeats[stage, node]``. Cost does not grow with layers, microbatches or ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.binding import BoundBlock, bind
from dataset_builder.tracing.graph import Axis, Edge, EdgeKind, OpNode, Phase, StageFacts, TrainingGraph
from dataset_builder.tracing.job_blocks import JobBlocks, as_gathered, job_blocks
from dataset_builder.tracing.layout import RankLayout, resolved_layout
from dataset_builder.tracing.structure import TRACER_VERSION, BlockStructure, element_bytes
from dataset_builder.tracing.templates import template


def build_graph(job: TrainingJob) -> TrainingGraph:
    """The graph of any valid job; raises CannotRunError when the layout does not divide."""
    job = job.resolved()
    return GraphBuilder.of(job, resolved_layout(job)).build()


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
class GraphBuilder:
    """Puts the bound blocks of one job together, once. ``facts`` are known before, for a fraction of the cost."""

    job: TrainingJob
    layout: RankLayout
    blocks: JobBlocks
    nodes: list[OpNode] = field(default_factory=list)
    edges: dict[tuple[int, int], EdgeKind] = field(default_factory=dict)
    repeats: list[list[float]] = field(default_factory=list)  # [row][stage]
    rows: list[int] = field(default_factory=list)  # [node] its row of repeats: the nodes of a block share one

    @classmethod
    def of(cls, job: TrainingJob, layout: RankLayout) -> GraphBuilder:
        """The builder of a resolved job with this layout."""
        return cls(job, layout, job_blocks(job, layout))

    def build(self) -> TrainingGraph:
        stages = range(len(self.layout.stage_layers))
        last = self.layout.head_stage
        embedding, layers, head = self._bound_blocks
        again = self.job.model.mtp_layers  # further passes of embedding and head, beside the head
        passes = [float((stage == 0) + again * (stage == last)) for stage in stages]
        chain = [(embedding, self._add(embedding, passes))]
        for block, counts in layers:
            chain.append((block, self._add(block, [float(counts[stage]) for stage in stages])))
        chain.append((head, self._add(head, [float((1 + again) * (stage == last)) for stage in stages])))
        self._connect(chain)
        self._pipeline_messages(head.output_dtype if not layers else layers[0][0].output_dtype, chain)
        self._data_parallel(self.facts, chain, layers)
        repeats = np.array(self.repeats, dtype=np.float64)[self.rows].T.copy()
        edges = tuple(Edge(*ends, self.edges[ends]) for ends in sorted(self.edges))
        return TrainingGraph(
            tuple(self.nodes),
            edges,
            repeats,
            self.facts,
            self.layout.num_microbatches,
            self._fingerprint(),
            TRACER_VERSION,
        )

    @functools.cached_property
    def _bound_blocks(self) -> tuple[BoundBlock, list[tuple[BoundBlock, Counter[int]]], BoundBlock]:
        """The embedding, every kind of layer with its count on each stage, and the head.

        Behind the layers stands what multi-token prediction has beside a layer, an embedding and a head of its own.
        """
        groups: dict[str, int] = {axis: group.size for axis, group in self.layout.groups.items()}
        is_two_stacks = self.job.model.architecture == "encoder_decoder"
        final = self.job.model.encoder_layers == 0 or is_two_stacks
        first_sizes = self.blocks.sizes[final and not is_two_stacks]
        embedding = self._bound(self.blocks.embedding, first_sizes, "embedding", groups)
        head = self._bound(self.blocks.head, self.blocks.sizes[final], "head", groups)
        layers = [
            (self._bound(structure, self.blocks.sizes[is_decoder], _prefix(is_decoder, number), groups), counts)
            for number, ((structure, is_decoder), counts) in enumerate(self.blocks.layers.items())
        ]
        if self.blocks.encoder_norm is not None:
            norm = bind(template(self.blocks.encoder_norm), self.blocks.sizes[False], "encoder", groups)
            of_encoder = sum(not is_decoder for _, is_decoder in self.blocks.layers)
            layers.insert(of_encoder, (norm, Counter({self._stage_of_encoder_norm(): 1})))
        if self.blocks.mtp is not None:
            mtp = self._bound(self.blocks.mtp, self.blocks.sizes[final], "mtp", groups)
            layers.append((mtp, Counter({self.layout.head_stage: self.job.model.mtp_layers})))
        return embedding, layers, head

    def _bound(
        self, structure: BlockStructure, sizes: Mapping[str, float], prefix: str, groups: Mapping[str, int]
    ) -> BoundBlock:
        """A block with this job's numbers; what it saves is what the block saves with its weights as gathered."""
        block = bind(template(structure), sizes, prefix, groups)
        gathered = as_gathered(structure, self.job)
        if gathered is structure:
            return block
        totals = bind(template(gathered), sizes, prefix, groups).totals
        saved = {name: totals[name] for name in ("saved", "recompute")}
        return dataclasses.replace(block, totals=block.totals | saved)

    def _stage_of_encoder_norm(self) -> int:
        """The stage of the encoder's last layer."""
        last = self.job.model.encoder_layers - 1
        return next((stage for stage, held in enumerate(self.layout.stage_layers) if last in held), 0)

    def _fingerprint(self) -> str:
        text = self.job.model_dump_json(exclude={"name", "training", "price"})
        return hashlib.sha256(f"{TRACER_VERSION} {text}".encode()).hexdigest()[:16]

    def _add(self, block: BoundBlock, repeats: list[float]) -> int:
        """Adds a block's nodes and edges; returns the index of its first node."""
        start = len(self.nodes)
        self._add_nodes(block.nodes, repeats)
        self.edges |= {(start + a, start + b): kind for a, b, kind in block.edges}  # type: ignore[misc]
        return start

    def _add_nodes(self, nodes: Sequence[OpNode], repeats: list[float]) -> None:
        self.nodes += nodes
        self.rows += [len(self.repeats)] * len(nodes)
        self.repeats.append(repeats)

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
        self._add_nodes((node,), repeats)
        return len(self.nodes) - 1

    # ---- what a stage holds

    @functools.cached_property
    def facts(self) -> tuple[StageFacts, ...]:
        """What every stage holds: what its memory is made of."""
        embedding, layers, head = self._bound_blocks
        model, last = self.job.model, self.layout.head_stage
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
                depths = model.mtp_layers
                dense += head.totals["dense_parameters"] * (1 + depths)
                saved += head.totals["saved"] * (1 + depths) + embedding.totals["saved"] * depths
                if last > 0 or not model.tie_embeddings:  # another stage keeps its own copy of the tied table
                    vocabulary += head.totals["vocabulary_parameters"]
                if last > 0 and depths and not model.tie_embeddings:
                    vocabulary += embedding.totals["vocabulary_parameters"]
            dense += self._parameters_outside_blocks(stage)
            trained = dense + expert + vocabulary
            if model.lora:  # adapters are in layers only
                trained = sum(t["trained_parameters"] * n for t, n in held)
            facts.append(
                StageFacts(
                    stage=stage,
                    layers=indices,
                    has_embedding=stage == 0,
                    has_head=stage == last,
                    num_parameters=round(dense + expert + vocabulary),
                    num_expert_parameters=round(expert),
                    num_trained_parameters=round(trained),
                    saved_activation_bytes=saved,
                    recompute_peak_bytes=max((t["recompute"] for t, _ in held), default=0.0),
                    logits_bytes=self._logits_bytes() if stage == last else 0.0,
                )
            )
        return tuple(facts)

    def _logits_bytes(self) -> float:
        """The fp32 logits of one microbatch on one rank."""
        model = self.job.model
        sizes = self.blocks.sizes[model.architecture != "encoder"]
        columns = sizes["C"] if model.head == "classification" else sizes["v"]
        return sizes["b"] * sizes["s"] * model.masked_fraction * columns * 4.0

    def _parameters_outside_blocks(self, stage: int) -> float:
        """The position tables of relative attention."""
        model = self.job.model
        if stage > 0 or model.position_embedding != "relative":
            return 0.0
        stacks = (model.encoder_layers > 0) + (model.decoder_layers > 0)
        return stacks * model.relative_buckets * model.num_attention_heads / self.layout.tensor

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
        if self.layout.head_stage == 0:  # folded to a V: one chunk up, one down
            sends = returns = [float((stage > 0) + (stage < stages - 1)) for stage in range(stages)]
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
            expert = float(stage.num_trained_expert_parameters)
            if stage.num_trained_parameters:
                by_elements.setdefault((stage.num_trained_parameters - expert, expert), []).append(stage.stage)
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
            repeats = self.repeats[self.rows[start]]
            totals = block.totals
            elements = totals["dense_parameters"] + totals["expert_parameters"] + totals["vocabulary_parameters"]
            if elements < 1 or not block.nodes:
                continue
            name = block.nodes[0].module.partition(".")[0]
            if name == "encoder":  # its final norm alone: a few thousand elements of the outermost unit
                continue
            gather, reduce = _stored(policy.param_gather or "bf16"), policy.grad_reduce or "fp32"
            messages = (
                _Message("all_gather", f"{name}.parameters", "forward", gather, "data", group, "microbatch"),
                _Message("all_gather", f"{name}.parameters", "backward", gather, "data", group, "microbatch"),
            )
            forward, backward = (self._send(message, elements, repeats) for message in messages)
            for i in block.ports["input"] or (0,):
                self.edges[forward, start + i] = "communication"
            for i in block.ports["output_gradient"]:
                self.edges[backward, start + i] = "communication"
            if totals["trained_parameters"] >= 1:
                message = _Message(
                    "reduce_scatter", f"{name}.gradients", "backward", reduce, "data", group, "microbatch"
                )
                scatter = self._send(message, totals["trained_parameters"], repeats)
                self.edges |= {(start + i, scatter): "communication" for i in block.ports["weight_gradient"]}

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
        elements = held = dense + expert
        sharding = self.job.parallel.sharding or "none"
        if sharding != "none":
            ranks = self.layout.shard_size
            expert_ranks = min(ranks, self.layout.expert_data_group.size)
            elements = dense / max(1, ranks) + expert / max(1, expert_ranks)
        if sharding not in ("none", "zero1"):  # these keep the gradients of every parameter
            held = elements
        hidden = float(self.job.model.hidden_size)
        if self.blocks.optimizer.optimizer == "muon":
            elements, held = elements / hidden**2, held / hidden**2
        block = bind(template(self.blocks.optimizer), {"N": elements, "G": held, "h": hidden}, "optimizer", {})
        start = len(self.nodes)
        self._add_nodes(block.nodes, repeats)
        self.edges |= {(start + a, start + b): kind for a, b, kind in block.edges}  # type: ignore[misc]
        return start, len(self.nodes) - 1

    def _tied_embedding(self, chain: list[tuple[BoundBlock, int]], stages: int) -> None:
        """The first and the last stage add up the gradients of a table that both hold: tied, or to predict on."""
        model = self.job.model
        last, is_shared = self.layout.head_stage, model.tie_embeddings or model.mtp_layers > 0
        if last == 0 or not is_shared or model.head == "classification" or model.lora:
            return
        embedding, head = chain[0], chain[-1]
        elements = embedding[0].totals["vocabulary_parameters"]
        repeats = [float(stage in (0, last)) for stage in range(stages)]
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
