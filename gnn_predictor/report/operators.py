"""The operators that take most of a step, each beside its roofline: what it reaches and what bounds it.

A group is all executions on the critical path of one operator in one phase and format. The roofline is that of
:mod:`dataset_builder.tracing.work`: compute or memory, or latency plus traffic for a message.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataset_builder.job.hardware import DeviceSpec
from dataset_builder.tracing.graph import COLLECTIVES
from gnn_predictor.critical_path import StepDetail, kernel_bound


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the step. Work and seconds are of all its executions on the critical path.

    ``waited_s`` is what the critical path waits for, ``own_s`` what it takes (more where a message is hidden),
    ``shape`` is empty where executions differ in it. ``bound``: compute, memory, launch or network.
    """

    module: str
    op: str
    kind: str
    phase: str
    dtype: str
    shape: tuple[int, ...]
    bound: str
    executions: float
    waited_s: float
    own_s: float
    roofline_s: float
    flops: float
    moved_bytes: float

    @property
    def share_of_roofline(self) -> float:
        """Shortest possible time over predicted time (0 to 1)."""
        return min(1.0, self.roofline_s / self.own_s) if self.own_s else 0.0

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.own_s if self.own_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Of device memory; of a message, bytes of its tensor."""
        return self.moved_bytes / self.own_s if self.own_s else 0.0

    @property
    def flops_per_byte(self) -> float:
        return self.flops / self.moved_bytes if self.moved_bytes else 0.0


def longest_operators(detail: StepDetail, device: DeviceSpec, count: int) -> list[Operator]:
    """The ``count`` operators that the critical path waits for longest."""
    groups: dict[tuple[str, str, str, str], list[Operator]] = defaultdict(list)
    for each in _executed(detail, device):
        groups[each.module, each.op, each.phase, each.dtype].append(each)
    whole = [_together(members) for members in groups.values()]
    return sorted(whole, key=lambda each: -each.waited_s)[:count]


def _executed(detail: StepDetail, device: DeviceSpec) -> Iterator[Operator]:
    times, rooflines = detail.times, np.exp(detail.arrays.log_roofline_s.astype(np.float64))
    columns = (*detail.node_executions, times.exposed_s, times.seconds, rooflines)
    for node, runs, waits, exposed_s, seconds, roofline_s in zip(
        detail.graph.nodes, *(column.tolist() for column in columns), strict=True
    ):
        if runs:
            is_message = node.kind in COLLECTIVES
            moved = node.message_bytes if is_message else node.bytes_read + node.bytes_written
            yield Operator(
                module=node.module,
                op=node.op,
                kind=node.kind,
                phase=node.phase,
                dtype=node.input_dtype,
                shape=node.shape,
                bound="network" if is_message else kernel_bound(node, device),
                executions=runs,
                waited_s=waits * exposed_s,
                own_s=runs * seconds,
                roofline_s=runs * roofline_s,
                flops=runs * node.flops,
                moved_bytes=runs * moved,
            )


def _together(members: Sequence[Operator]) -> Operator:
    """The bound is that of the longest member."""
    longest = max(members, key=lambda each: each.own_s)
    shapes = {each.shape for each in members}
    return replace(
        longest,
        shape=longest.shape if len(shapes) == 1 else (),
        executions=math.fsum(each.executions for each in members),
        waited_s=math.fsum(each.waited_s for each in members),
        own_s=math.fsum(each.own_s for each in members),
        roofline_s=math.fsum(each.roofline_s for each in members),
        flops=math.fsum(each.flops for each in members),
        moved_bytes=math.fsum(each.moved_bytes for each in members),
    )
