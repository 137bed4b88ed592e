"""Where the ranks of a job sit: the groups of every parallel axis, the link each group crosses, the layers of a stage.

Ranks are numbered as Megatron-LM does: tensor fastest, then context, data, and pipeline slowest; among the ranks of one
pipeline stage, expert-tensor is fastest, then expert, then the data-parallel copies of an expert. A group of ``size``
ranks ``stride`` apart, starting at rank r, spans floor(((r mod g) + (size - 1) stride) / g) + 1 nodes of g GPUs.

Links come in tiers: a node's or a rack's fabric, the network that joins those, its spine. A tier joins islands, which
are what the tier below reaches without it; the ranks of one island share their adapters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dataset_builder.job.errors import CannotRunError
from dataset_builder.job.hardware import LinkSpec, link
from dataset_builder.job.parallel import FOLDED_SCHEDULES
from dataset_builder.job.schema import ClusterSpec, TrainingJob
from dataset_builder.tracing.graph import Axis, OpNode


@dataclass(frozen=True, slots=True)
class Tier:
    """A link that a group crosses. ``ranks``: the group's ranks in each of the islands that it joins, on average."""

    link: LinkSpec
    ranks: float = 1.0


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """One communication group: its ranks, the nodes it spans at worst, and the link tiers it crosses, fastest first.

    ``copies``: how many experts a token goes to, where an all-to-all sends tokens; each island needs a token once.
    """

    size: int
    nodes: int
    tiers: tuple[Tier, ...]
    copies: int = 1

    @property
    def link(self) -> LinkSpec:
        """The slowest tier."""
        return self.tiers[-1].link

    @property
    def ring_bytes_per_s(self) -> float:
        """Bytes/s a rank of a ring moves: rings enter and leave an island through the adapters of all its ranks."""
        return min(tier.link.bytes_per_s_per_gpu * tier.ranks for tier in self.tiers)

    @property
    def exchange_bytes_per_s(self) -> float:
        """Bytes/s of a rank's tensor that an all-to-all exchanges: through a tier goes what other islands need.

        With c copies of a token for ranks drawn evenly, I islands get I (1 - (1 - 1/I)^c) of them if each gets it once,
        as dispatchers of experts do that send a token over the network once a node (DeepSeek-AI, DeepEP).
        """
        return 1 / max(self._crossing_share(tier) / tier.link.bytes_per_s_per_gpu for tier in self.tiers)

    def _crossing_share(self, tier: Tier) -> float:
        islands = max(self.size / tier.ranks, 1 + 1e-9)
        needed = islands * (1 - (1 - 1 / islands) ** self.copies) / self.copies
        return needed * (1 - 1 / islands)


@dataclass(frozen=True)
class RankLayout:
    """Sizes and groups of the parallel axes of a job.

    ``groups["data"]`` reduces dense gradients: data x context ranks, as Megatron does. ``shard_group`` holds one copy
    of the sharded states (``shard_size`` ranks), ``replica_group`` the copies of one shard (hsdp; size 1 otherwise),
    ``expert_data_group`` the copies of one expert. ``stage_layers[s]``: layer indices of stage s in the order it runs
    them, encoder layers before decoder layers; ``chunk_layers[s][c]``: those of its model chunk c. The embedding is on
    stage 0, the head on ``head_stage``: the last, or where the chunks are folded to a V, stage 0 again.
    """

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    data: int
    virtual_pipeline: int
    shard_size: int
    num_microbatches: int
    groups: dict[Axis, AxisGroup]
    shard_group: AxisGroup
    replica_group: AxisGroup
    expert_data_group: AxisGroup
    stage_layers: tuple[tuple[int, ...], ...]
    chunk_layers: tuple[tuple[tuple[int, ...], ...], ...]
    head_stage: int

    def group_of(self, node: OpNode) -> AxisGroup | None:
        """The ranks that a node's message is between; ``None`` where it sends none."""
        if node.axis != "data":
            return self.groups.get(node.axis) if node.axis else None
        if self.replica_group.size > 1:
            return self.replica_group if node.kind == "all_reduce" else self.shard_group
        return self.expert_data_group if node.group_size == self.expert_data_group.size else self.groups["data"]


def rank_layout(job: TrainingJob) -> RankLayout:
    """The layout of a job; raises CannotRunError with the arithmetic of everything that does not divide."""
    return resolved_layout(job.resolved())


def resolved_layout(job: TrainingJob) -> RankLayout:
    """:func:`rank_layout` of a job that is resolved."""
    reasons = [*_rank_problems(job), *_batch_problems(job), *_shape_problems(job), *_schedule_problems(job)]
    chunks, chunk_reasons = _chunks(job)
    reasons += chunk_reasons
    if reasons:
        raise CannotRunError(reasons, job.name or "job")
    plan, cluster, moe = job.parallel, job.cluster, job.model.moe
    data = _resolved_data(job)
    ranks = data * plan.context  # ranks that hold the same dense weights of one tensor and pipeline position
    shard = {"none": 1, "hsdp": plan.shard_size or 1}.get(plan.sharding or "none", ranks)
    expert_data = plan.tensor * ranks // (plan.expert_tensor * plan.expert)
    stage = plan.tensor * ranks
    groups: dict[Axis, AxisGroup] = {
        "tensor": _group(cluster, plan.tensor, 1),
        "context": _group(cluster, plan.context, plan.tensor),
        "data": _group(cluster, ranks, plan.tensor),
        "expert": replace(_group(cluster, plan.expert, plan.expert_tensor), copies=moe.top_k if moe else 1),
        "pipeline": _hop(cluster, plan.pipeline, stage),
    }
    return RankLayout(
        tensor=plan.tensor,
        pipeline=plan.pipeline,
        context=plan.context,
        expert=plan.expert,
        expert_tensor=plan.expert_tensor,
        data=data,
        virtual_pipeline=plan.virtual_pipeline,
        shard_size=shard,
        num_microbatches=job.batch.global_batch_size // (data * job.batch.micro_batch_size),
        groups=groups,
        shard_group=_group(cluster, shard, plan.tensor),
        replica_group=_group(cluster, ranks // shard if plan.sharding == "hsdp" else 1, plan.tensor * shard),
        expert_data_group=_group(cluster, expert_data, plan.expert_tensor * plan.expert),
        stage_layers=tuple(tuple(layer for chunk in chunks_of_stage for layer in chunk) for chunks_of_stage in chunks),
        chunk_layers=chunks,
        head_stage=0 if plan.schedule in FOLDED_SCHEDULES else plan.pipeline - 1,
    )


def unsupported_formats(job: TrainingJob) -> list[str]:
    """A sentence per format that the job computes in and its device has no hardware for; it begins with the format."""
    gpu, policy = job.cluster.gpu, job.precision
    fp8 = "fp8_e4m3"
    linears = [policy.linear, *(override.linear for override in policy.overrides)]
    used = [policy.compute, policy.lm_head, policy.attention, *linears]
    formats = [{"fp8": fp8}.get(name, fp8 if name.startswith("fp8_") else name) for name in used if name]
    sentences = []
    for name in dict.fromkeys(formats):
        if name not in ("same", "fp32") and not gpu.supports(name):
            has = ", ".join(gpu.peak_flops_per_s)
            sentences.append(
                f"{name}: {gpu.name} has no hardware for it (it has {has}); emulated, it runs at "
                f"{gpu.peak(name) / 1e12:g} TFLOP/s at best"
            )
    return sentences


def _resolved_data(job: TrainingJob) -> int:
    if job.parallel.data is None:
        raise AssertionError("a resolved job has its data-parallel size")
    return job.parallel.data


def _rank_problems(job: TrainingJob) -> list[str]:
    plan, given, reasons = job.parallel, job.cluster.num_gpus, []
    data = _resolved_data(job)
    axes = [("TP", plan.tensor), ("PP", plan.pipeline), ("CP", plan.context), ("DP", data)]
    product = " x ".join(f"{name}{size}" for name, size in axes if size > 1 or name != "CP")
    needed = plan.model_parallel_size * data
    if needed != given:
        nodes, per_node = job.cluster.num_nodes, job.cluster.gpus_per_node
        reasons.append(
            f"parallel: {given} GPUs given, {needed} = {product} needed "
            f"(cluster: {nodes} nodes x {per_node} GPUs; data parallel is derived when it is left out)"
        )
    ranks, expert_ranks = plan.tensor * plan.context * data, plan.expert * plan.expert_tensor
    if job.model.moe is None and expert_ranks > 1:
        reasons.append(f"parallel.expert: got EP{plan.expert} x ETP{plan.expert_tensor}; the model has no experts")
    elif ranks % expert_ranks:
        reasons.append(
            f"parallel.expert: EP{plan.expert} x ETP{plan.expert_tensor} = {expert_ranks} does not divide the "
            f"{ranks} = TP{plan.tensor} x CP{plan.context} x DP{data} ranks of a pipeline stage"
        )
    copies = data * plan.context
    if plan.sharding == "hsdp" and plan.shard_size and copies % plan.shard_size:
        reasons.append(f"parallel.shard_size: {plan.shard_size} does not divide {copies} = DP{data} x CP{plan.context}")
    return reasons


def _batch_problems(job: TrainingJob) -> list[str]:
    plan, batch, reasons = job.parallel, job.batch, []
    data = _resolved_data(job)
    step = data * batch.micro_batch_size
    if batch.global_batch_size % step:
        reasons.append(
            f"batch.global_batch_size: {batch.global_batch_size} is not a multiple of "
            f"{step} = DP{data} x micro_batch_size {batch.micro_batch_size}"
        )
    lengths = {"seq_length": batch.seq_length}
    if job.model.architecture == "encoder_decoder" and batch.target_seq_length:
        lengths["target_seq_length"] = batch.target_seq_length
    for name, length in lengths.items():
        if plan.context > 1 and length % (2 * plan.context):
            reasons.append(
                f"batch.{name}: {length} is not a multiple of {2 * plan.context} = 2 x CP{plan.context} "
                "(a causal sequence is cut into two pieces a rank)"
            )
        elif plan.sequence_parallel and (length // plan.context) % plan.tensor:
            reasons.append(
                f"batch.{name}: {length} / CP{plan.context} is not a multiple of TP{plan.tensor} (sequence parallel)"
            )
    return reasons


def _shape_problems(job: TrainingJob) -> list[str]:
    plan, model, reasons = job.parallel, job.model, []
    tensor = plan.tensor
    if model.num_attention_heads % tensor:
        reasons.append(f"parallel.tensor: TP{tensor} does not divide num_attention_heads {model.num_attention_heads}")
    elif model.num_query_groups % tensor and tensor % model.num_query_groups:
        reasons.append(
            f"parallel.tensor: TP{tensor} and num_query_groups {model.num_query_groups}: neither divides the other"
        )
    if model.ffn_hidden_size % tensor:
        reasons.append(f"parallel.tensor: TP{tensor} does not divide ffn_hidden_size {model.ffn_hidden_size}")
    if model.moe:
        if model.moe.num_experts % plan.expert:
            reasons.append(f"parallel.expert: EP{plan.expert} does not divide num_experts {model.moe.num_experts}")
        if model.moe.expert_ffn_hidden_size % plan.expert_tensor:
            reasons.append(
                f"parallel.expert_tensor: ETP{plan.expert_tensor} does not divide expert_ffn_hidden_size "
                f"{model.moe.expert_ffn_hidden_size}"
            )
    if plan.virtual_pipeline > 1 and plan.pipeline == 1:
        reasons.append(f"parallel.virtual_pipeline: {plan.virtual_pipeline} model chunks need pipeline of 2 or more")
    return reasons


def _schedule_problems(job: TrainingJob) -> list[str]:
    """What a schedule asks of chunks, stages and microbatches."""
    plan, batch, reasons = job.parallel, job.batch, []
    stages, schedule = plan.pipeline, plan.schedule
    if stages == 1 or schedule in (None, "1f1b", "interleaved"):
        return []
    chunks = 2 if schedule in FOLDED_SCHEDULES else 1
    if plan.virtual_pipeline != chunks:
        reasons.append(
            f"parallel.virtual_pipeline: got {plan.virtual_pipeline}; {schedule} runs {chunks} model "
            f"chunk{'s' if chunks > 1 else ''} a rank"
        )
    if schedule == "dualpipe" and stages % 2:
        reasons.append(f"parallel.pipeline: got {stages}; dualpipe needs an even number of stages")
    microbatches = batch.global_batch_size // (_resolved_data(job) * batch.micro_batch_size)
    is_odd = schedule == "dualpipe" and microbatches % 2
    if schedule in ("dualpipe", "dualpipe_v") and (microbatches < 2 * stages or is_odd):
        needed = f"{'an even number of ' if schedule == 'dualpipe' else ''}{2 * stages} = 2 x PP{stages} or more"
        reasons.append(f"batch.global_batch_size: {microbatches} microbatches; {schedule} needs {needed}")
    return reasons


def _chunks(job: TrainingJob) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], list[str]]:
    """Layers of every model chunk of every stage: chunk c of stage s comes (c x stages + s)-th in the model.

    Folded to a V, the second chunks go back from the last stage to the first.
    """
    plan = job.parallel
    layers = job.model.encoder_layers + job.model.decoder_layers
    stages, virtual = plan.pipeline, plan.virtual_pipeline
    slots = stages * virtual
    given = plan.layers_per_stage
    is_folded = plan.schedule in FOLDED_SCHEDULES
    stage_of = [min(slot, slots - 1 - slot) if is_folded else slot % stages for slot in range(slots)]
    if slots > max(layers, len(given or ())):
        return (), [f"parallel.pipeline: {layers} layers are fewer than the {slots} model chunks of PP{stages}"]
    if given is None:
        if layers % slots:
            cut = [layers // stages + (stage < layers % stages) for stage in range(stages)]
            hint = f"parallel.layers_per_stage: {cut}" if virtual == 1 else "parallel.layers_per_stage, one per chunk"
            chunks = f" x virtual_pipeline {virtual}" if virtual > 1 else ""
            return (), [
                f"parallel.pipeline: {layers} layers do not divide into {slots} = PP{stages}{chunks}; "
                f"an uneven split is given as {hint}"
            ]
        counts = [layers // slots] * slots
    elif sum(given) != layers:
        return (), [f"parallel.layers_per_stage: {' + '.join(map(str, given))} = {sum(given)}, the model has {layers}"]
    elif len(given) == slots:
        counts = list(given)
    elif len(given) == stages and all(count % virtual == 0 for count in given):
        counts = [given[stage_of[slot]] // virtual for slot in range(slots)]
    else:
        return (), [
            f"parallel.layers_per_stage: got {len(given)} numbers; expected {stages} = PP{stages}"
            + (f", each a multiple of virtual_pipeline {virtual}, or {slots}, one per chunk" if virtual > 1 else "")
        ]
    starts = [sum(counts[:slot]) for slot in range(slots)]
    by_slot = [tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    return tuple(tuple(by_slot[s] for s in range(slots) if stage_of[s] == stage) for stage in range(stages)), []


def _group(cluster: ClusterSpec, size: int, stride: int) -> AxisGroup:
    """A group of ``size`` ranks ``stride`` apart, as the least fortunate of its kind sits in the cluster."""
    if cluster.intra_node is None or cluster.inter_node is None:
        raise AssertionError("a resolved cluster has its links")
    intra, inter, per_node = cluster.intra_node, cluster.inter_node, cluster.gpus_per_node
    world = cluster.num_gpus
    tiers = [(intra, _used_of_domain(intra.domain_size, world) or per_node)]
    if intra.domain_size and intra.domain_size < per_node:
        tiers.append((_beyond(intra, per_node), per_node))
    tiers.append((inter, inter.domain_size or world))
    tiers.append((_beyond(inter, per_node), world))
    crossed, islands = [], size
    for tier, domain in tiers:
        joined = _domains(size, stride, domain, world)
        if joined < islands:
            crossed.append(Tier(tier, size / islands))
            islands = joined
    return AxisGroup(size, _domains(size, stride, per_node, world), tuple(crossed) or (Tier(intra),))


def _used_of_domain(domain: int | None, world: int) -> int | None:
    """GPUs of a rack that one job uses: jobs of several racks take a power of two of each (64 of an NVL72's 72)."""
    return 1 << (domain.bit_length() - 1) if domain and domain < world else domain


def _hop(cluster: ClusterSpec, stages: int, stride: int) -> AxisGroup:
    """The pipeline's group; a message goes to the next stage only, so the tiers are those of the worst single hop."""
    hop = _group(cluster, min(stages, 2), stride)
    return replace(hop, size=stages, nodes=_group(cluster, stages, stride).nodes)


def _beyond(tier: LinkSpec, gpus_per_node: int) -> LinkSpec:
    return link(tier.beyond_domain, gpus_per_node) if tier.beyond_domain else tier


def _domains(size: int, stride: int, domain: int, world: int) -> int:
    """The most domains of ``domain`` consecutive ranks that any such group spans."""
    if size == 1 or domain >= world:
        return 1
    if stride >= domain:
        return size
    block = size * stride  # ranks from one group of neighbours to the next
    blocks = min(max(1, world // block), domain // math.gcd(domain, block))
    spanned = 1
    for index in range(blocks):
        start = min(index * block % domain + stride - 1, domain - 1)  # the neighbour nearest to the domain's end
        spanned = max(spanned, (start + (size - 1) * stride) // domain + 1)
    return spanned
