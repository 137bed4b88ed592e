"""The physical floor of a job: no iteration can be shorter, whatever the software and however well work overlaps.

In: a resolved job, its graph and its layout. Out: seconds, and the arithmetic behind them. Three resources are bounds,
each alone (all their work may overlap), on the pipeline stage that needs most of it:

    compute   FLOPs of matrix products and attention / dense peak of their formats
    memory    (bytes of matrix products and of the optimizer - what the last cache can hold) / memory bandwidth
    network   bytes that a rank must receive over a tier of links / bandwidth of the tier

Only what the mathematics needs is counted: nothing that is computed again (recomputation, the scores that a flash
attention's backward repeats), no vector work, no latency, and collectives as if the network reduced and multicast.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dataset_builder.job.hardware import DeviceSpec, LinkSpec
from dataset_builder.job.schema import ClusterSpec, TrainingJob
from dataset_builder.tracing.graph import COLLECTIVES, OpNode, TrainingGraph
from dataset_builder.tracing.layout import AxisGroup, RankLayout
from dataset_builder.tracing.work import ATTENTION_BACKWARD_FACTOR

Bound = Literal["compute", "memory", "network"]

_MATRIX_KINDS = ("gemm", "grouped_gemm", "attention")
# The backward of attention needs four products against two in forward; flash kernels count a fifth, the scores again.
_NEEDED_OF_ATTENTION_BACKWARD = 2.0 / ATTENTION_BACKWARD_FACTOR


@dataclass(frozen=True)
class PhysicalFloor:
    """The least seconds of one iteration by resource, and for each the arithmetic in words."""

    seconds_by_bound: Mapping[Bound, float]
    arithmetic_by_bound: Mapping[Bound, str]

    @property
    def bound(self) -> Bound:
        """The resource that takes longest."""
        return max(self.seconds_by_bound, key=self.seconds_by_bound.__getitem__)

    @property
    def seconds(self) -> float:
        """No iteration is shorter."""
        return self.seconds_by_bound[self.bound]

    @property
    def arithmetic(self) -> str:
        """How :attr:`seconds` comes about."""
        return self.arithmetic_by_bound[self.bound]


def physical_floor(job: TrainingJob, graph: TrainingGraph, layout: RankLayout) -> PhysicalFloor:
    """The floor of a resolved job."""
    device = job.cluster.gpu
    times = np.array([1.0 if node.per == "iteration" else graph.num_microbatches for node in graph.nodes])
    executions: NDArray[np.float64] = graph.repeats * times  # [num_stages, num_nodes]
    if job.parallel.schedule == "dualpipe":  # a rank runs half of the microbatches through the opposite stage
        executions = (executions + executions[::-1]) / 2
    bounds = {
        "compute": _compute(graph, executions, device),
        "memory": _memory(graph, executions, device),
        "network": _network(graph, executions, layout, job.cluster),
    }
    return PhysicalFloor(
        {name: seconds for name, (seconds, _) in bounds.items()},  # type: ignore[misc]
        {name: arithmetic for name, (_, arithmetic) in bounds.items()},  # type: ignore[misc]
    )


def impossible(iter_time_s: float, floor: PhysicalFloor) -> str | None:
    """Why a measured time cannot be; ``None`` when it can."""
    if iter_time_s >= floor.seconds:
        return None
    suspects = "precision, batch or sequence length (packed?)"
    other = "intra_node or inter_node link" if floor.bound == "network" else suspects
    return (
        f"{iter_time_s:.4g} s is impossible: needs at least {floor.seconds:.4g} s = {floor.arithmetic}; "
        f"expected another {other} than stated"
    )


def _compute(graph: TrainingGraph, executions: NDArray[np.float64], device: DeviceSpec) -> tuple[float, str]:
    flops = np.array([_needed_flops(node) for node in graph.nodes])
    peaks = np.array([device.peak(node.input_dtype) for node in graph.nodes])
    stage = int((executions @ (flops / peaks)).argmax())
    by_format: dict[str, float] = defaultdict(float)
    for node, count in zip(graph.nodes, (executions[stage] * flops).tolist(), strict=True):
        if count:
            by_format[node.input_dtype] += count
    parts = [
        f"{_scaled(count, 'FLOP')} / {_scaled(device.peak(name), 'FLOP/s')} {name}"
        for name, count in sorted(by_format.items(), key=lambda item: -item[1])
    ]
    words = f"{' + '.join(parts)} of matrix products and attention on each {device.name}{_of_stage(graph, stage)}"
    return float(executions[stage] @ (flops / peaks)), words


def _needed_flops(node: OpNode) -> float:
    if node.kind not in _MATRIX_KINDS or node.phase == "recompute":
        return 0.0
    return node.flops * (_NEEDED_OF_ATTENTION_BACKWARD if node.kind == "attention" and node.phase == "backward" else 1)


def _memory(graph: TrainingGraph, executions: NDArray[np.float64], device: DeviceSpec) -> tuple[float, str]:
    """A node finds at most a cacheful of its input in the last cache, and may leave one of its output there."""
    moved = np.array(
        [
            max(0.0, node.bytes_read + node.bytes_written - 2 * device.l2_bytes)
            if node.kind in ("gemm", "grouped_gemm", "optimizer") and node.phase != "recompute"
            else 0.0
            for node in graph.nodes
        ]
    )
    by_stage = executions @ moved
    stage = int(by_stage.argmax())
    needed = float(by_stage[stage])
    words = (
        f"{_scaled(needed, 'B')} / {_scaled(device.hbm_bytes_per_s, 'B/s')} of matrix products and optimizer "
        f"through the memory of each {device.name}{_of_stage(graph, stage)}"
    )
    return needed / device.hbm_bytes_per_s, words


def _network(
    graph: TrainingGraph, executions: NDArray[np.float64], layout: RankLayout, cluster: ClusterSpec
) -> tuple[float, str]:
    received: dict[LinkSpec, NDArray[np.float64]] = defaultdict(lambda: np.zeros(len(executions)))  # by tier and stage
    for index, node in enumerate(graph.nodes):
        group = layout.group_of(node)
        if node.kind not in COLLECTIVES or node.phase == "recompute" or group is None or node.group_size <= 1:
            continue
        needed = node.message_bytes * _received_share(node, group, cluster)
        received[group.link] += executions[:, index] * needed
    if not received:
        return 0.0, "no messages"
    link = max(received, key=lambda tier: float(received[tier].max()) / tier.bytes_per_s_per_gpu)
    stage = int(received[link].argmax())
    needed = float(received[link][stage])
    words = (
        f"{_scaled(needed, 'B')} / {_scaled(link.bytes_per_s_per_gpu, 'B/s')} that each GPU must receive "
        f"over {link.name}{_of_stage(graph, stage)}"
    )
    return needed / link.bytes_per_s_per_gpu, words


def _received_share(node: OpNode, group: AxisGroup, cluster: ClusterSpec) -> float:
    """Bytes a rank must receive over the group's slowest tier, per byte of the tensor.

    An all-gather brings what the others hold, a reduction what they computed. Beyond the fast fabric (a node, or a rack
    of them) each fabric needs it once and its ranks share their adapters. A send reaches one peer. An all-to-all counts
    nothing: a library may send a token once for several experts.
    """
    if node.kind == "send_recv":
        return 1.0
    if node.kind == "all_to_all":
        return 0.0
    if group.nodes <= 1 or cluster.intra_node is None:
        return (node.group_size - 1) / node.group_size
    if group.size != node.group_size:  # a part of the axis: where its ranks sit is not told here
        return 0.0
    rack = cluster.intra_node.domain_size or 0
    fabrics = max(2, math.ceil(group.size / rack)) if rack > cluster.gpus_per_node else group.nodes
    return (fabrics - 1) / group.size


def _of_stage(graph: TrainingGraph, stage: int) -> str:
    return f" of pipeline stage {stage}" if len(graph.stages) > 1 else ""


def _scaled(value: float, unit: str) -> str:
    """A quantity with a decimal prefix: ``7.98 PFLOP``."""
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
