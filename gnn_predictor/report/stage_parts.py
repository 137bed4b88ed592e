"""What one pipeline stage's times are made of: its messages by axis, hidden and exposed, and its formats.

Seconds per microbatch through all the stage's model chunks, or per iteration for ``reductions`` and ``gathers``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dataset_builder.tracing.graph import COLLECTIVES, OpNode
from gnn_predictor.critical_path import GEMM_KINDS, StepDetail
from gnn_predictor.features import NUM_SLOTS, SLOTS


@dataclass(frozen=True, slots=True)
class Message:
    """All messages of one axis in one part of the step; names joined by ``+``, the longest first."""

    axis: str
    kinds: str
    dtypes: str
    exposed_s: float
    hidden_s: float


@dataclass(frozen=True)
class StageParts:
    """One stage. ``reductions`` come before its optimizer, ``gathers`` after it."""

    recompute_s: float
    optimizer_s: float
    forward_dtype: str
    backward_dtype: str
    optimizer_dtype: str
    forward_messages: tuple[Message, ...]
    backward_messages: tuple[Message, ...]
    reductions: tuple[Message, ...]
    gathers: tuple[Message, ...]
    send_activations: Message | None
    send_gradients: Message | None


@dataclass(frozen=True, slots=True)
class _Entry:
    """A node in one slot of the stage."""

    node: OpNode
    slot: str
    exposed_s: float
    hidden_s: float


def stage_parts(detail: StepDetail, stage: int) -> StageParts:
    """The parts of pipeline stage ``stage``."""
    entries = _entries(detail, stage)
    slots = dict(zip(SLOTS, detail.times.slots[stage].tolist(), strict=True))

    def messages(slot: str, belongs: Callable[[OpNode], bool] = lambda node: True) -> tuple[Message, ...]:
        return _messages(each for each in entries if each.slot == slot and belongs(each.node))

    def is_gather(node: OpNode) -> bool:
        return node.phase == "optimizer"

    return StageParts(
        recompute_s=slots["recompute"],
        optimizer_s=float(detail.times.iteration_s[stage]) - slots["comm_iteration"],
        forward_dtype=_dtype(entries, "forward"),
        backward_dtype=_dtype(entries, "backward"),
        optimizer_dtype=_dtype(entries, "optimizer"),
        forward_messages=messages("comm_forward"),
        backward_messages=messages("comm_backward"),
        reductions=messages("comm_iteration", lambda node: not is_gather(node)),
        gathers=messages("comm_iteration", is_gather),
        send_activations=next(iter(messages("hop", lambda node: node.phase == "forward")), None),
        send_gradients=next(iter(messages("hop", lambda node: node.phase == "backward")), None),
    )


def _entries(detail: StepDetail, stage: int) -> list[_Entry]:
    arrays, times = detail.arrays, detail.times
    row = int(arrays.stage_class[stage])
    found = []
    for node, cell, weight in zip(
        arrays.entry_node.tolist(), arrays.entry_cell.tolist(), arrays.entry_weight.tolist(), strict=True
    ):
        if cell // NUM_SLOTS == row:
            exposed_s = weight * float(times.exposed_s[node])
            hidden_s = max(0.0, weight * float(times.seconds[node]) - exposed_s)
            found.append(_Entry(detail.graph.nodes[node], SLOTS[cell % NUM_SLOTS], exposed_s, hidden_s))
    return found


def _messages(entries: Iterable[_Entry]) -> tuple[Message, ...]:
    by_axis: dict[str, list[_Entry]] = defaultdict(list)
    for each in entries:
        if each.node.kind in COLLECTIVES:
            by_axis[each.node.axis or "data"].append(each)
    return tuple(
        Message(
            axis=axis,
            kinds=_joined((each.node.kind, each.exposed_s + each.hidden_s) for each in members),
            dtypes=_joined((each.node.input_dtype, each.exposed_s + each.hidden_s) for each in members),
            exposed_s=sum(each.exposed_s for each in members),
            hidden_s=sum(each.hidden_s for each in members),
        )
        for axis, members in by_axis.items()
    )


def _dtype(entries: Iterable[_Entry], slot: str) -> str:
    """The format of most of a slot's matrix products, or of most of what it has when it has none."""
    own = [each for each in entries if each.slot == slot]
    products = [each for each in own if each.node.kind in GEMM_KINDS]
    seconds = _summed((each.node.input_dtype, each.exposed_s) for each in products or own)
    return max(seconds, key=seconds.__getitem__, default="")


def _joined(names: Iterable[tuple[str, float]]) -> str:
    seconds = _summed(names)
    return "+".join(sorted(seconds, key=lambda name: -seconds[name]))


def _summed(names: Iterable[tuple[str, float]]) -> Mapping[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in names:
        sums[name] += seconds
    return sums
