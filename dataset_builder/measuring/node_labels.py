"""Ties what a real step executed to the nodes of the job's traced graph, one to one.

In: the nodes of one pipeline stage and the operators of one rank's steps with their seconds. Out: for every node one
:class:`Label`, and what belongs to no node. The blocks that run are those that are traced, so an operator is found by
where it stands (layer, module, phase, pass), what it is (kind, operator, shape, formats) and, among equals, its turn.
The messages between ranks and the optimizer stand in no block: they are found by their elements, whole or in pieces.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dataset_builder.measuring.kernels import ATTEND
from dataset_builder.measuring.marks import MarkedOp
from dataset_builder.measuring.plan import StepPlan
from dataset_builder.tracing.graph import COLLECTIVES, OpNode, Phase
from dataset_builder.tracing.kernels import Kernel, kernel_of
from dataset_builder.tracing.structure import BlockStructure

_MESSAGES = {
    "allreduce_": "all_reduce", "_allgather_base_": "all_gather", "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter", "alltoall_base_": "all_to_all",
    "send": "send_recv", "recv_": "send_recv", "all_reduce": "all_reduce",
}  # fmt: skip
WAITS = "a send or receive lasts until the other stage is there: its time is not the message's"
_NO_WORK = ("", "views, allocations, scalars", (), "", "")
_LAYER = re.compile(r"layer(\d+)(\..*)?$")
_Place = tuple[str, Phase]  # module and phase
_What = tuple[str, str, tuple[int, ...], str, str]  # kind, operator, shape, input and output format


@dataclass(frozen=True)
class TimedOp:
    """One operator of a step and its seconds in each profiled step."""

    op: MarkedOp
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Label:
    """What was measured of one node: seconds of one execution, by the median of the steps.

    ``executions``: of one step, 0 when nothing was found; ``reason`` then says why, else ``match`` says how.
    """

    node: int
    seconds: float
    executions: int
    match: str
    reason: str


@dataclass(frozen=True)
class Rest:
    """Operators of one kind in one place that are no node: seconds of one execution."""

    module: str
    phase: str
    what: _What
    seconds: float
    executions: int
    reason: str


@dataclass(frozen=True)
class _Found:
    """An operator in the graph's terms; ``layer``: which of the stage's."""

    timed: TimedOp
    module: str
    layer: int
    what: _What
    elements: int


@dataclass
class _Tally:
    """The executions of one node: for each, the operators it is made of."""

    match: str = ""
    executions: list[list[_Found]] = field(default_factory=list)


def node_labels(plan: StepPlan, stage: int, timed: Sequence[TimedOp]) -> tuple[list[Label], list[Rest]]:
    """The labels of a stage's nodes in the order of their ids, and what is left."""
    assert plan.graph is not None
    nodes = [node for node, _ in plan.graph.stages[stage]]
    every = _in_graph_terms(plan, stage, nodes, timed)
    tallies = _in_blocks(nodes, every) | _outside_blocks(nodes, every)
    used = {id(found) for tally in tallies.values() for parts in tally.executions for found in parts}
    left = [found for found in every if id(found) not in used]
    labels = [_label(index, node, tallies.get(index, _Tally()), left) for index, node in enumerate(nodes)]
    return labels, _rests(left)


def _in_graph_terms(plan: StepPlan, stage: int, nodes: Sequence[OpNode], timed: Sequence[TimedOp]) -> list[_Found]:
    """Operators under the modules' names in the graph, whose layers stand once for each kind."""
    prefixes = list(dict.fromkeys(m[0] for node in nodes if (m := re.match(r"(?:en|de)coder_layer\d+", node.module))))
    counts = [count for _, count in plan.stages[stage]]
    prefix_of = [prefix for prefix, count in zip(prefixes, counts, strict=True) for _ in range(count)]
    kernels: dict[tuple[object, ...], Kernel | None] = {}
    every = []
    for each in timed:
        layer, module = -1, each.op.module
        if in_layer := _LAYER.match(module):
            layer = int(in_layer[1])
            module = prefix_of[layer] + (in_layer[2] or "")
        what = _what(each.op, plan.head, kernels)
        every.append(_Found(each, module, layer, what, each.op.listed or (what[2][0] if len(what[2]) == 1 else 0)))
    return every


def _what(op: MarkedOp, structure: BlockStructure, kernels: dict[tuple[object, ...], Kernel | None]) -> _What:
    """As the tracer would say it of these tensors."""
    name = op.name.partition("::")[2]
    if op.work is None:
        return _NO_WORK
    if _is_message(op):
        largest = max(op.work.inputs, key=lambda ref: math.prod(ref.shape))
        return _MESSAGES.get(name, ""), name, (op.listed or math.prod(largest.shape),), largest.fmt, largest.fmt
    refs = [(ref.shape, ref.fmt) for ref in (*op.work.inputs, *op.work.outputs)]
    key = (op.name, op.phase, op.module.endswith("lm_head"), *refs, *sorted(op.work.attributes.items()))
    if key not in kernels:
        kernels[key] = kernel_of(op.work, structure)
    kernel = kernels[key]
    if kernel is None:
        return _NO_WORK
    shape = tuple(max(1, round(size.value({}))) for size in kernel.shape)
    return kernel.kind, kernel.op, shape, kernel.input_dtype, kernel.output_dtype


def _is_message(op: MarkedOp) -> bool:
    """One that torch sends (DDP, FSDP2, the pipeline, the clipping), as opposed to those of the blocks."""
    return op.name.startswith(("c10d::", "_c10d_functional::"))


def _is_in_block(node: OpNode) -> bool:
    return not node.module.startswith(("optimizer.", "data.", "pipeline.", "embedding.tied")) and not (
        node.kind in COLLECTIVES and node.module.endswith((".parameters", ".gradients"))
    )


def _in_blocks(nodes: Sequence[OpNode], every: Sequence[_Found]) -> dict[int, _Tally]:
    waiting: dict[tuple[_Place, _What], list[int]] = defaultdict(list)
    attention: dict[_Place, int] = {}
    for index, node in enumerate(nodes):
        if node.kind == "attention":
            attention[node.module, node.phase] = index
        elif _is_in_block(node):
            what = (node.kind, node.op, node.shape, node.input_dtype, node.output_dtype)
            waiting[(node.module, node.phase), what].append(index)
    tallies: dict[int, _Tally] = defaultdict(_Tally)
    turns: dict[tuple[int, int, _Place, _What], int] = defaultdict(int)
    cores: dict[tuple[int, int, _Place], list[_Found]] = defaultdict(list)
    for found in every:
        op = found.timed.op
        place = (found.module, op.phase)
        if op.region == ATTEND and place in attention:
            cores[found.layer, op.turn, place].append(found)
        elif candidates := waiting.get((place, found.what)):
            turn = (found.layer, op.turn, place, found.what)
            if turns[turn] < len(candidates):
                tally = tallies[candidates[turns[turn]]]
                tally.match = "operator"
                tally.executions.append([found])
                turns[turn] += 1
    for (_, _, place), parts in cores.items():
        tally = tallies[attention[place]]
        tally.match = "module"
        tally.executions.append(parts)
    return dict(tallies)


def _outside_blocks(nodes: Sequence[OpNode], every: Sequence[_Found]) -> dict[int, _Tally]:
    """Messages that no block sends, and the optimizer: by their elements, as one operator or all pieces together."""
    tallies = {}
    free = [f for f in every if _is_message(f.timed.op) or f.timed.op.phase == "optimizer"]
    for index, node in enumerate(nodes):
        if _is_in_block(node) or node.kind == "send_recv":
            continue
        alike = [found for found in free if _is_alike(found, node)]
        whole = [[found] for found in alike if found.elements == node.shape[0]]
        pieces = [alike] if not whole and sum(found.elements for found in alike) == node.shape[0] else []
        if whole or pieces:
            tallies[index] = _Tally("elements" if whole else "pieces", whole or pieces)
            taken = {id(found) for parts in whole or pieces for found in parts}
            free = [found for found in free if id(found) not in taken]
    return tallies


def _is_alike(found: _Found, node: OpNode) -> bool:
    """An operator that can be this node or a piece of it: the gradients of norms go over another axis, ``tensor``."""
    is_here = found.module == node.module if node.phase == "optimizer" else found.module != "tensor"
    what = (found.what[0], found.what[3], found.timed.op.phase)
    return is_here and what == (node.kind, node.input_dtype, node.phase)


def _label(index: int, node: OpNode, tally: _Tally, left: Sequence[_Found]) -> Label:
    if not tally.executions:
        return Label(index, 0.0, 0, "", _why_not(node, left))
    seconds = _seconds([found for parts in tally.executions for found in parts]) / len(tally.executions)
    if seconds <= 0:
        return Label(index, 0.0, 0, "", "it ran, and the profiler gave it no time")
    return Label(index, seconds, len(tally.executions), tally.match, "")


def _why_not(node: OpNode, left: Sequence[_Found]) -> str:
    if node.kind == "send_recv":
        return WAITS
    near = [f for f in left if f.what[0] == node.kind and f.timed.op.phase == node.phase]
    near = [f for f in near if f.module == node.module or not _is_in_block(node)]
    if not near:
        return "no such operator ran"
    ran = dict.fromkeys(f"{op} {'x'.join(map(str, shape))} {read} to {written}" for _, op, shape, read, written in
                        (f.what for f in near))  # fmt: skip
    return f"ran as {', '.join(ran)}"


def _seconds(parts: Sequence[_Found]) -> float:
    """Of all these together in one step: the median of the steps."""
    return statistics.median(map(sum, zip(*(found.timed.seconds for found in parts), strict=True)))


def _rests(left: Sequence[_Found]) -> list[Rest]:
    groups: dict[tuple[_Place, _What], list[_Found]] = defaultdict(list)
    for found in left:  # what does no work is not worth a line for each module
        module = found.module if found.what != _NO_WORK else ""
        groups[(module, found.timed.op.phase), found.what].append(found)
    return [
        Rest(module, phase, what, _seconds(group) / len(group), len(group), _why_left(group[0]))
        for ((module, phase), what), group in groups.items()
    ]


def _why_left(found: _Found) -> str:
    if found.what[0] == "send_recv":
        return WAITS
    if found.what == _NO_WORK:
        return "no node: its data is not touched, or is a few numbers"
    return "no node has this operator, shape and formats here"
