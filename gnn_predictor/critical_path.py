"""The network's answer for one job: its stages' times, and where the seconds of the critical path go.

All times in seconds. The critical path runs stage s's forward ``path.forward_counts[s]`` times, its backward
``path.backward_counts[s]`` times, and ends with the optimizer of the stage whose step takes longest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dataset_builder.job.hardware import DeviceSpec
from dataset_builder.tracing.graph import COLLECTIVES, OpNode, TrainingGraph
from gnn_predictor.batch import GraphBatch, pipeline_shape
from gnn_predictor.event_order import PipelineShape, last_to_step
from gnn_predictor.features import AXES, NUM_SLOTS, SLOTS, GraphArrays
from gnn_predictor.network import NodeTimes, StageTable, stage_times
from gnn_predictor.schedule import TIMES, Makespan, pipeline_makespan

Floats = NDArray[np.float64]
_SLOT = {name: index for index, name in enumerate(SLOTS)}
_FORWARD = [_SLOT[name] for name in ("forward", "comm_forward")]
_BACKWARD = [_SLOT[name] for name in ("backward", "recompute", "comm_backward")]
_STEP = [_SLOT[name] for name in ("optimizer", "comm_iteration")]
_TIME = {name: index for index, name in enumerate(TIMES)}
GEMM_KINDS = ("gemm", "grouped_gemm")
# What the next kernel waits at least after a launch; a kernel whose roofline is shorter gains nothing from a format.
_LAUNCH_S = 5e-6


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the critical path's seconds go. ``host`` is time in which the device waits for the host.

    ``by_bound`` splits every kind of kernel by what its roofline is made of: ``compute``, ``memory`` or ``launch``.
    """

    by_kind: Mapping[str, float]
    by_dtype: Mapping[str, float]
    by_bound: Mapping[str, Mapping[str, float]]
    gemm_by_dtype: Mapping[str, float]
    exposed_communication: Mapping[str, float]
    exposed_communication_by_dtype: Mapping[str, float]
    overlapped_communication: Mapping[str, float]

    def scaled(self, factor: float) -> Breakdown:
        """Where the seconds go when all of them are ``factor`` times as many."""

        def times(seconds: Mapping[str, float]) -> dict[str, float]:
            return {name: each * factor for name, each in seconds.items()}

        return Breakdown(
            by_kind=times(self.by_kind),
            by_dtype=times(self.by_dtype),
            by_bound={kind: times(bounds) for kind, bounds in self.by_bound.items()},
            gemm_by_dtype=times(self.gemm_by_dtype),
            exposed_communication=times(self.exposed_communication),
            exposed_communication_by_dtype=times(self.exposed_communication_by_dtype),
            overlapped_communication=times(self.overlapped_communication),
        )


@dataclass(frozen=True)
class JobTimes:
    """The network's answer for one job as float64: n nodes, S pipeline stages."""

    seconds: Floats  # [n]
    exposed_s: Floats  # [n] what the critical path waits for
    overhead_s: float  # per iteration, beside the graph
    spread: float  # expected size of the log error
    measured_share: float  # of the estimate that measured runs like the job have, 0 to 1
    slots: Floats  # [S, NUM_SLOTS] device seconds per microbatch, or per iteration
    forward_s: Floats  # [S] per microbatch, with exposed communication, at least the host's time
    backward_s: Floats  # [S] the same with recompute
    stage_s: Floats  # [len(TIMES), S] these two and their parts that a schedule treats apart
    iteration_s: Floats  # [S] optimizer and exposed data-parallel communication
    path: Makespan

    @classmethod
    def of_batch(cls, batch: GraphBatch, times: NodeTimes, table: StageTable) -> list[JobTimes]:
        """Every job of a batch. Tensors become arrays once for all jobs: that costs more than what a job picks."""
        seconds, exposed_s, overhead_s = map(_numpy, (times.seconds, times.exposed_s, times.overhead_s))
        slots, iteration_s, spread = map(_numpy, (table.slots, table.iteration_s, times.log_spread.exp()))
        class_s = _numpy(stage_times(table, range(len(slots))))  # [len(TIMES), K]
        ends = np.bincount(batch.node_graph.numpy(), minlength=len(batch.shapes)).cumsum().tolist()
        each = []
        for index, (shape, stage_rows) in enumerate(zip(batch.shapes, batch.stage_rows, strict=True)):
            rows, nodes = list(stage_rows), slice(ends[index - 1] if index else 0, ends[index])
            stage_s = class_s[:, rows]
            hop_s = float(table.hop_s[rows].sum()) / max(1, shape.num_hops)
            job_times = cls(
                seconds=seconds[nodes],
                exposed_s=exposed_s[nodes],
                overhead_s=float(overhead_s[index]),
                spread=float(spread[index]),
                measured_share=0.0,
                slots=slots[rows],
                forward_s=stage_s[_TIME["forward"]],
                backward_s=stage_s[_TIME["backward"]],
                stage_s=stage_s,
                iteration_s=iteration_s[rows],
                path=_path(shape, stage_s, hop_s),
            )
            each.append(job_times)
        return each

    @property
    def total_s(self) -> float:
        """Of the iteration: the pipeline, then the slowest stage's step, and what every step costs."""
        return self.path.seconds + float(self.iteration_s.max()) + self.overhead_s

    def scaled(self, factor: float) -> JobTimes:
        """Every second times ``factor``; the critical path stays where it is."""
        names = ("seconds", "exposed_s", "overhead_s", "slots", "forward_s", "backward_s", "stage_s", "iteration_s")
        path = replace(self.path, seconds=self.path.seconds * factor)
        return replace(self, path=path, **{name: getattr(self, name) * factor for name in names})

    def corrected(self, log_factor: float, share: float, spread: float) -> JobTimes:
        """Drawn towards what measured runs like the job took, which have this share in the estimate."""
        return replace(self.scaled(math.exp(log_factor)), spread=spread, measured_share=share)


def _path(shape: PipelineShape, stage_s: Floats, hop_s: float) -> Makespan:
    """The pipeline's critical path; a single rank runs one pass after the other."""
    if shape.num_ranks > 1:
        return pipeline_makespan(shape, stage_s, hop_s)
    counts = np.zeros_like(stage_s)
    counts[[_TIME["forward"], _TIME["backward"]]] = shape.num_microbatches
    both_s = float(stage_s[_TIME["forward"], 0] + stage_s[_TIME["backward"], 0])
    return Makespan(both_s * shape.num_microbatches, counts, 0.0)


@dataclass(frozen=True)
class StepDetail:
    """What a prediction was added up from: the graph, its arrays, and the times of its n nodes and S stages."""

    graph: TrainingGraph
    arrays: GraphArrays
    times: JobTimes

    @property
    def node_executions(self) -> tuple[Floats, Floats]:
        """How often the critical path runs each node, and how often it waits for it. Two of [n]"""
        weight = self.arrays.entry_weight.astype(np.float64)
        node, count = self.arrays.entry_node, len(self.graph.nodes)
        runs, waits = (
            np.bincount(node, weights=weight * each, minlength=count).astype(np.float64)
            for each in _executions(self.arrays, self.times)
        )
        return runs, waits


def breakdown(detail: StepDetail, device: DeviceSpec) -> Breakdown:
    """Sums node times along the critical path."""
    graph, times = detail.graph, detail.times
    runs, waits = detail.node_executions
    exposed = waits * times.exposed_s
    hidden = runs * times.seconds - exposed
    kernels: dict[tuple[str, str, str], float] = defaultdict(float)  # by kind, input format and bound
    messages: dict[str, float] = defaultdict(float)  # by format
    exposed_axis, hidden_axis = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)
    for node, seconds, hidden_s in zip(graph.nodes, exposed.tolist(), hidden.tolist(), strict=True):
        if node.kind in COLLECTIVES:
            axis = node.axis or "data"
            exposed_axis[axis] += seconds
            hidden_axis[axis] += hidden_s
            messages[node.input_dtype] += seconds
        elif seconds:
            kernels[node.kind, node.input_dtype, kernel_bound(node, device)] += seconds
    host = {"host": _host_s(detail.arrays, times)}
    by_bound: dict[str, dict[str, float]] = {}
    for (kind, _, bound), seconds in kernels.items():
        bounds = by_bound.setdefault(kind, dict.fromkeys(("compute", "memory", "launch"), 0.0))
        bounds[bound] += seconds
    return Breakdown(
        by_kind=_largest_first(_summed((kind, seconds) for (kind, _, _), seconds in kernels.items()) | host),
        by_dtype=_largest_first(_summed((dtype, seconds) for (_, dtype, _), seconds in kernels.items()) | host),
        by_bound=by_bound,
        gemm_by_dtype=_largest_first(
            _summed((dtype, seconds) for (kind, dtype, _), seconds in kernels.items() if kind in GEMM_KINDS)
        ),
        exposed_communication=exposed_axis,
        exposed_communication_by_dtype=_largest_first(messages),
        overlapped_communication=hidden_axis,
    )


def kernel_bound(node: OpNode, device: DeviceSpec) -> str:
    """What a kernel's shortest time is made of on this device."""
    compute_s = node.flops / device.peak(node.input_dtype)
    memory_s = (node.bytes_read + node.bytes_written) / device.hbm_bytes_per_s
    if max(compute_s, memory_s) < node.launches * _LAUNCH_S:
        return "launch"
    return "compute" if compute_s >= memory_s else "memory"


def _summed(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in parts:
        sums[name] += seconds
    return dict(sums)


def _executions(arrays: GraphArrays, times: JobTimes) -> tuple[Floats, Floats]:
    """How often the critical path runs each entry (a node in a distinct stage), and how often it waits for it. [M]

    They differ for messages that are hidden beside a pass of the other direction.
    """
    path, shape, stage = times.path, pipeline_shape(arrays), arrays.stage_class
    num_hops, last = max(1, shape.num_hops), last_to_step(shape, times.iteration_s.tolist())
    classes = len(arrays.cell_launches) // NUM_SLOTS

    def of_class(counts: Floats) -> Floats:
        """Counts of every stage, added up over the stages that equal a distinct one. [S] -> [K]"""
        return np.bincount(stage, weights=counts, minlength=classes).astype(np.float64)

    runs = np.zeros((classes, NUM_SLOTS))
    runs[:, _FORWARD] = of_class(path.forward_counts)[:, None]
    runs[:, _BACKWARD] = of_class(path.backward_counts)[:, None]
    runs[:, _SLOT["hop"]] = of_class(np.full(len(stage), path.hop_counts / num_hops))  # a hop is the mean of all sends
    runs[:, _STEP] = np.bincount(stage[list(last)], minlength=classes)[:, None]
    cell, node = arrays.entry_cell, arrays.entry_node
    of_entry = runs.reshape(-1)[cell]
    if arrays.is_weight_gradient.any():
        apart = np.zeros_like(runs)
        apart[:, _SLOT["backward"]] = of_class(path.counts[_TIME["weight_gradient"]])
        of_entry = of_entry + arrays.is_weight_gradient[node] * apart.reshape(-1)[cell]
    if not arrays.is_hidden_in_pairs.any():
        return of_entry, of_entry
    hidden = np.zeros_like(runs)
    messages = _stage_slots(arrays, arrays.is_hidden_in_pairs * times.exposed_s)
    for direction in ("forward", "backward"):
        slot, row = _SLOT[f"comm_{direction}"], _TIME[f"hidden_{direction}"]
        share = np.divide(times.stage_s[row], messages[:, slot], out=np.zeros(len(stage)), where=messages[:, slot] > 0)
        hidden[:, slot] = of_class(path.counts[row] * share)
    return of_entry, of_entry + arrays.is_hidden_in_pairs[node] * hidden.reshape(-1)[cell]


def _stage_slots(arrays: GraphArrays, node_s: Floats) -> Floats:
    """Node seconds summed over every stage's slots. [S, NUM_SLOTS]"""
    seconds = arrays.entry_weight.astype(np.float64) * node_s[arrays.entry_node]
    cells = np.bincount(arrays.entry_cell, weights=seconds, minlength=len(arrays.cell_launches))
    return np.asarray(cells.reshape(-1, NUM_SLOTS)[arrays.stage_class])


def _host_s(arrays: GraphArrays, times: JobTimes) -> float:
    """Seconds of the critical path in which the device waits for the host: slow launches, and what every step costs."""
    path = times.path
    forward = times.forward_s - times.slots[:, _FORWARD].sum(axis=1)
    backward = times.backward_s - times.slots[:, _BACKWARD].sum(axis=1)
    last = list(last_to_step(pipeline_shape(arrays), times.iteration_s.tolist()))
    step = times.iteration_s[last].sum() - times.slots[np.ix_(last, _STEP)].sum()
    waiting = float(path.forward_counts @ forward + path.backward_counts @ backward + step)
    if arrays.is_weight_gradient.any():
        apart_s = _stage_slots(arrays, arrays.is_weight_gradient * times.exposed_s)[:, _SLOT["backward"]]
        apart = times.stage_s[_TIME["weight_gradient"]] - apart_s
        waiting += float(path.counts[_TIME["weight_gradient"]] @ apart)
    return max(0.0, waiting) + times.overhead_s


def _largest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _numpy(tensor: torch.Tensor) -> Floats:
    return tensor.double().numpy()
