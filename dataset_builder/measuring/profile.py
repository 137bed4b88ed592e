"""Seconds of every node of a job's traced graph: a few steps under torch's profiler, as rows of nodes.csv.

Seconds are those of the operator itself: of its kernels on a GPU, of its C++ part on a CPU, of the message from its
start to its end. What Python does between operators is in neither. A run has its rows all together, or none; only runs
that runs.csv vouches for are profiled.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from dataset_builder.measuring.kernels import RealKernels
from dataset_builder.measuring.machine import state, throttling
from dataset_builder.measuring.marks import MARK, MarkedOp
from dataset_builder.measuring.node_labels import WAITS, Label, Rest, TimedOp, node_labels
from dataset_builder.measuring.plan import StepPlan
from dataset_builder.measuring.steps import provenance, run_id
from dataset_builder.measuring.table import Cell, MeasurementTable
from dataset_builder.measuring.trainer import Trainer
from dataset_builder.measuring.world import World
from dataset_builder.tracing.graph import OpNode

_WARM_UPS = 2
_STEPS = 3


@dataclass(frozen=True)
class _Labelled:
    """One rank's labels; ``refusal``: why there are none."""

    stage: int
    labels: list[Label]
    rests: list[Rest]
    refusal: str


def label_nodes(
    plans: Sequence[StepPlan], world: World, runs: MeasurementTable | None, table: MeasurementTable | None
) -> None:
    """Profiles the plans whose run is measured and not yet labelled (the tables are on the first rank only)."""
    for plan in plans:
        name = f"{plan.name} {plan.row['precision']}"
        run = run_id(plan, world)
        if not world.agreed(float(runs is not None and run in runs.known)):
            world.say(f"{name}: its nodes are not labelled, for its run has no row")
        elif world.agreed(float(table is not None and run in table.known)):
            world.say(f"{name}: its nodes are already labelled")
        else:
            _label_run(plan, world, table, name)
            gc.collect()
            if world.machine.is_gpu:
                torch.cuda.empty_cache()


def _label_run(plan: StepPlan, world: World, table: MeasurementTable | None, name: str) -> None:
    kernels = RealKernels(world.machine.device, {})
    try:
        mine = _labelled(Trainer(plan, world), world, kernels)
    finally:
        kernels.close()
    facts = state(world.machine)
    ranks: list[_Labelled] = world.gathered(mine)
    refusals = [rank.refusal for rank in ranks if rank.refusal]
    throttled = throttling(facts)
    if throttled:
        refusals.append(f"the clock was throttled: {throttled}")
    if refusals:
        world.say(f"{name}: its nodes are not labelled, {refusals[0]}")
        return
    world.say(f"{name}: {summary(ranks)}")
    if table is not None:
        rows = [row for rank, own in enumerate(ranks) for row in _rows(plan, rank, own)]
        shared = {"framework": plan.row["framework"], "gpu": plan.row["gpu"], **provenance(plan, world, facts)}
        table.append_together([shared | row for row in rows])


def _labelled(trainer: Trainer, world: World, kernels: RealKernels) -> _Labelled:
    """This rank's labels, after the same number of steps on every rank."""
    kernels.groups = trainer.groups
    for _ in range(_WARM_UPS):
        world.wait()
        trainer.step(kernels)
    _profiled(trainer, world, kernels)  # the profiler warms up as well
    steps = []
    for _ in range(_STEPS):
        loss, profiler = _profiled(trainer, world, kernels)
        steps.append(_read(profiler, trainer.stage.marker.ops, loss, world.machine.is_gpu))
    if reason := unusable(steps):
        return _Labelled(trainer.stage.index, [], [], reason)
    seconds = zip(*(step.seconds for step in steps), strict=True)
    timed = [TimedOp(op, times) for op, times in zip(steps[0].ops, seconds, strict=True)]
    labels, rests = node_labels(trainer.plan, trainer.stage.index, timed)
    outside = statistics.median(step.outside_s for step in steps)
    if outside > 0:
        rests.append(Rest("", "", ("", "kernels of no marked operator", (), "", ""), outside, 1, "not dispatched"))
    return _Labelled(trainer.stage.index, labels, rests, "")


@dataclass(frozen=True)
class ProfiledStep:
    """What one step ran, the seconds of each operator, and those of kernels that none of them started."""

    ops: list[MarkedOp]
    seconds: list[float]
    outside_s: float
    loss: float


def _profiled(trainer: Trainer, world: World, kernels: RealKernels) -> tuple[float, torch.profiler.profile]:
    """The loss and the profile of one step; the marker keeps its operators until the next."""
    marker, is_gpu = trainer.stage.marker, world.machine.is_gpu
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    world.wait()
    marker.forget()
    # one thread for autograd, so that the backward operators run under the marker's mode
    with (
        torch.autograd.set_multithreading_enabled(False),
        torch.profiler.profile(activities=activities) as profiler,
        marker,
    ):
        sample = trainer.step(kernels)
        if is_gpu:
            torch.cuda.synchronize(world.machine.device)
    return sample.loss, profiler


def _read(profiler: torch.profiler.profile, ops: list[MarkedOp], loss: float, is_gpu: bool) -> ProfiledStep:
    events = list(profiler.events() or ())
    seconds = _device_seconds(events, ops) if is_gpu else _host_seconds(events, ops)
    return ProfiledStep(ops, seconds, max(0.0, _all_kernels_s(events) - sum(seconds)), loss)


def unusable(steps: Sequence[ProfiledStep]) -> str:
    """Why a rank's steps give no labels; empty when they do."""
    if not all(sum(step.seconds) > 0 for step in steps):
        return "the profiler gave no times"
    if not all(math.isfinite(step.loss) for step in steps):
        return "the loss is not finite"
    names = [[(op.name, op.module, op.phase) for op in step.ops] for step in steps]
    return "" if all(each == names[0] for each in names) else "its steps did not run the same operators"


def _marks(events: Sequence[FunctionEvent]) -> dict[int, FunctionEvent]:
    """The host's ranges by the number of the operator they are around."""
    ranges = (event for event in events if event.device_type == DeviceType.CPU and event.name.startswith(MARK))
    return {int(event.name.removeprefix(MARK)): event for event in ranges}


def _host_seconds(events: Sequence[FunctionEvent], ops: Sequence[MarkedOp]) -> list[float]:
    """Of every operator on a CPU; a message that goes on behind the call lasts until it has arrived."""
    marks = _marks(events)
    background = [event for event in events if event.is_async]
    seconds = [0.0] * len(ops)
    for index, mark in marks.items():
        messages: list[FunctionEvent] = []
        if ops[index].name.startswith("c10d::"):
            start, end = mark.time_range.start, mark.time_range.end
            messages = [event for event in background if start <= event.time_range.start <= end]
        parts = messages or mark.cpu_children
        seconds[index] = sum(part.time_range.elapsed_us() for part in parts) * 1e-6
    return seconds


def _device_seconds(events: Sequence[FunctionEvent], ops: Sequence[MarkedOp]) -> list[float]:
    """Of every operator on a GPU: of all kernels that were launched within its range."""
    seconds = [0.0] * len(ops)
    for index, mark in _marks(events).items():
        seconds[index] = _kernels_s(mark)
    return seconds


def _kernels_s(event: FunctionEvent) -> float:
    """A range's own image on the device, which has its name, is no kernel."""
    own_us = float(sum(kernel.duration for kernel in event.kernels if kernel.name != event.name))
    return own_us * 1e-6 + sum(_kernels_s(child) for child in event.cpu_children)


def _all_kernels_s(events: Sequence[FunctionEvent]) -> float:
    """Of everything that ran on a GPU; 0 on a CPU."""
    ranges = {event.name for event in events if event.device_type == DeviceType.CPU}
    on_device = (event for event in events if event.device_type != DeviceType.CPU and event.name not in ranges)
    return float(sum(event.time_range.elapsed_us() for event in on_device)) * 1e-6


def summary(ranks: Sequence[_Labelled]) -> str:
    """How many nodes and how much of the profiled time have a label, over all ranks."""
    labels = [label for rank in ranks for label in rank.labels]
    rests = [rest for rank in ranks for rest in rank.rests]
    labelled_s = sum(label.seconds * label.executions for label in labels)
    waiting_s = sum(rest.seconds * rest.executions for rest in rests if rest.reason == WAITS)
    total_s = labelled_s + sum(rest.seconds * rest.executions for rest in rests)
    found = sum(label.executions > 0 for label in labels)
    waiting = f", {waiting_s / total_s:.1%} waits for other stages" if waiting_s else ""
    return (
        f"{found} of {len(labels)} nodes labelled, {labelled_s / total_s:.1%} of the profiled {total_s:.4g} s{waiting}"
    )


def _rows(plan: StepPlan, rank: int, own: _Labelled) -> list[dict[str, Cell]]:
    """The rows of a rank: one a node in the order of their ids, then what belongs to none."""
    assert plan.graph is not None
    shared: dict[str, Cell] = {
        "rank": rank,
        "stage": own.stage,
        "fingerprint": plan.graph.fingerprint,
        "tracer_version": plan.graph.tracer_version,
        "steps": _STEPS,
    }
    nodes = zip(own.labels, plan.graph.stages[own.stage], strict=True)
    rows = [_node_row(label, node, repeats, plan.num_microbatches) for label, (node, repeats) in nodes]
    return [shared | row for row in (*rows, *map(_rest_row, own.rests))]


def _node_row(label: Label, node: OpNode, repeats: float, num_microbatches: int) -> dict[str, Cell]:
    row: dict[str, Cell] = {
        "node": label.node,
        "kind": node.kind,
        "op": node.op,
        "module": node.module,
        "phase": node.phase,
        "shape": _text(node.shape),
        "input_dtype": node.input_dtype,
        "output_dtype": node.output_dtype,
        "axis": node.axis,
        "group_size": node.group_size,
        "executions": label.executions,
        "expected_executions": round(repeats * (num_microbatches if node.per == "microbatch" else 1)),
        "match": label.match,
        "reason": label.reason,
    }
    return row | ({"time_s": label.seconds} if label.seconds > 0 else {})


def _rest_row(rest: Rest) -> dict[str, Cell]:
    kind, op, shape, input_dtype, output_dtype = rest.what
    row: dict[str, Cell] = {
        "kind": kind,
        "op": op,
        "module": rest.module,
        "phase": rest.phase,
        "shape": _text(shape),
        "input_dtype": input_dtype,
        "output_dtype": output_dtype,
        "executions": rest.executions,
        "reason": rest.reason,
    }
    return row | ({"time_s": rest.seconds} if rest.seconds > 0 else {})


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
