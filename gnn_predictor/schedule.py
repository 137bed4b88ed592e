"""Pipeline schedules as one event recurrence: stage times in, makespan out, with its exact gradient.

A schedule is the order in which every pipeline rank runs its forward and backward chunks. An event starts when the
previous event on its rank and the event that feeds it have ended; the makespan is the longest path through these
events. How often each rank's forward and backward lie on that path is the exact gradient of the makespan with respect
to their times, wherever it is differentiable. All times in seconds.

Orders follow Megatron-LM: 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1) and interleaved 1F1B (2.2.2).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gnn_predictor.event_order import PipelineShape

FORWARD, BACKWARD = 0, 1
# In multiples of the pipeline depth: microbatches after which a step is in its steady state, and how many more are
# run to measure its rate there.
_STEADY_ROUNDS = 6
_WINDOW_ROUNDS = 4


@dataclass(frozen=True)
class Makespan:
    """The longest path: its length, and how often each rank's forward, backward and each hop lie on it."""

    seconds: float
    forward_counts: NDArray[np.float64]  # [num_ranks]
    backward_counts: NDArray[np.float64]  # [num_ranks]
    hop_counts: float


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """One chunk of one microbatch as a rank runs it. ``fed_by``: index of the event it waits for, -1: none."""

    rank: int
    direction: int
    chunk: int
    microbatch: int
    start_s: float
    end_s: float
    fed_by: int
    is_fed_by_other_rank: bool


@dataclass(frozen=True)
class _Events:
    """Events in an order in which every predecessor comes first; -1 stands for no predecessor."""

    rank: tuple[int, ...]
    direction: tuple[int, ...]
    chunk: tuple[int, ...]
    microbatch: tuple[int, ...]
    previous_on_rank: tuple[int, ...]
    feeding: tuple[int, ...]
    feeding_is_remote: tuple[bool, ...]


def pipeline_makespan(
    shape: PipelineShape, forward_s: Sequence[float], backward_s: Sequence[float], hop_s: float
) -> Makespan:
    """Seconds from the first forward to the last backward of one step.

    ``forward_s[r]`` and ``backward_s[r]`` are rank r's times for one microbatch through all its chunks (so a chunk
    takes their share), ``hop_s`` the time of handing one microbatch to the next rank. A long step is extrapolated
    along its steady state, so the cost of this function does not grow with the number of microbatches. Interleaving
    is defined for multiples of ``num_ranks`` microbatches: other counts are interpolated between their neighbours,
    and fewer microbatches than ranks run as without interleaving.
    """
    p, m = shape.num_ranks, shape.num_microbatches
    shape = _as_run(shape)
    stride = p if shape.num_chunks > 1 else 1
    window = _WINDOW_ROUNDS * p
    steady = _STEADY_ROUNDS * p
    if m <= steady + window:
        low, high = m - m % stride, m - m % stride + stride
        if low == m:
            return _longest_path(shape, forward_s, backward_s, hop_s)
    else:
        low, high = steady, steady + window
    first, second = (
        _longest_path(PipelineShape(shape.schedule, p, shape.num_chunks, n), forward_s, backward_s, hop_s)
        for n in (low, high)
    )
    share = (m - low) / (high - low)
    return Makespan(
        seconds=first.seconds + (second.seconds - first.seconds) * share,
        forward_counts=first.forward_counts + (second.forward_counts - first.forward_counts) * share,
        backward_counts=first.backward_counts + (second.backward_counts - first.backward_counts) * share,
        hop_counts=first.hop_counts + (second.hop_counts - first.hop_counts) * share,
    )


def timed_events(
    shape: PipelineShape, forward_s: Sequence[float], backward_s: Sequence[float], hop_s: float
) -> tuple[TimedEvent, ...]:
    """When every event of the step runs; arguments as in :func:`pipeline_makespan`, but nothing is extrapolated.

    The last end is the makespan of a step that is not extrapolated. Interleaving needs multiples of ``num_ranks``
    microbatches (or fewer than ranks).
    """
    shape = _as_run(shape)
    events = _events(shape)
    start, end, _ = _run(shape, forward_s, backward_s, hop_s)
    columns = (events.rank, events.direction, events.chunk, events.microbatch, start, end, events.feeding,
               events.feeding_is_remote)  # fmt: skip
    return tuple(TimedEvent(*row) for row in zip(*columns, strict=True))


def _as_run(shape: PipelineShape) -> PipelineShape:
    """Fewer microbatches than ranks run without interleaving."""
    if shape.num_chunks > 1 and shape.num_microbatches < shape.num_ranks:
        return PipelineShape("1f1b", shape.num_ranks, 1, shape.num_microbatches)
    return shape


def _longest_path(
    shape: PipelineShape, forward_s: Sequence[float], backward_s: Sequence[float], hop_s: float
) -> Makespan:
    _, end, came_from = _run(shape, forward_s, backward_s, hop_s)
    return _trace_back(shape, _events(shape), end, came_from)


def _run(
    shape: PipelineShape, forward_s: Sequence[float], backward_s: Sequence[float], hop_s: float
) -> tuple[list[float], list[float], list[int]]:
    """Start, end and the predecessor that decided the start (-1: none) of every event."""
    events = _events(shape)
    chunk_s = (
        [seconds / shape.num_chunks for seconds in forward_s],
        [seconds / shape.num_chunks for seconds in backward_s],
    )
    begin, end = [0.0] * len(events.rank), [0.0] * len(events.rank)
    came_from = [-1] * len(end)
    for i, (rank, direction, previous, feeding, remote) in enumerate(
        zip(
            events.rank,
            events.direction,
            events.previous_on_rank,
            events.feeding,
            events.feeding_is_remote,
            strict=True,
        )
    ):
        start, source = (end[previous], previous) if previous >= 0 else (0.0, -1)
        if feeding >= 0:
            ready = end[feeding] + (hop_s if remote else 0.0)
            if ready > start:
                start, source = ready, feeding
        begin[i], end[i] = start, start + chunk_s[direction][rank]
        came_from[i] = source
    return begin, end, came_from


def _trace_back(shape: PipelineShape, events: _Events, end: list[float], came_from: list[int]) -> Makespan:
    counts = np.zeros((2, shape.num_ranks))
    hops = 0
    last = i = max(range(len(end)), key=end.__getitem__)
    while i >= 0:
        counts[events.direction[i], events.rank[i]] += 1.0 / shape.num_chunks
        source = came_from[i]
        hops += source >= 0 and source == events.feeding[i] and events.feeding_is_remote[i]
        i = source
    return Makespan(end[last], counts[FORWARD], counts[BACKWARD], float(hops))


@functools.lru_cache(maxsize=512)
def _events(shape: PipelineShape) -> _Events:
    """All events of one step, sorted so that predecessors come first."""
    orders = [_rank_order(shape, rank) for rank in range(shape.num_ranks)]
    last_chunk = shape.num_ranks * shape.num_chunks - 1
    index: dict[tuple[int, int, int], int] = {}  # (direction, virtual stage, microbatch) -> event
    rank_of: list[int] = []
    direction_of: list[int] = []
    chunk_of: list[int] = []
    microbatch_of: list[int] = []
    previous_of: list[int] = []
    feeding_of: list[int] = []
    remote_of: list[bool] = []
    position, previous = [0] * shape.num_ranks, [-1] * shape.num_ranks
    remaining = sum(map(len, orders))
    while remaining:
        progressed = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                direction, chunk, microbatch = order[position[rank]]
                stage = chunk * shape.num_ranks + rank
                feeder = _feeder(direction, stage, microbatch, last_chunk)
                if feeder is not None and feeder not in index:
                    break
                event = len(rank_of)
                index[direction, stage, microbatch] = event
                rank_of.append(rank)
                direction_of.append(direction)
                chunk_of.append(chunk)
                microbatch_of.append(microbatch)
                previous_of.append(previous[rank])
                feeding_of.append(-1 if feeder is None else index[feeder])
                remote_of.append(feeder is not None and feeder[1] % shape.num_ranks != rank)
                previous[rank] = event
                position[rank] += 1
                remaining -= 1
                progressed = True
        assert progressed, f"the order of {shape} deadlocks"
    return _Events(
        rank=tuple(rank_of),
        direction=tuple(direction_of),
        chunk=tuple(chunk_of),
        microbatch=tuple(microbatch_of),
        previous_on_rank=tuple(previous_of),
        feeding=tuple(feeding_of),
        feeding_is_remote=tuple(remote_of),
    )


def _feeder(direction: int, stage: int, microbatch: int, last_stage: int) -> tuple[int, int, int] | None:
    """The event whose output this one needs."""
    if direction == FORWARD:
        return (FORWARD, stage - 1, microbatch) if stage else None
    return (FORWARD, stage, microbatch) if stage == last_stage else (BACKWARD, stage + 1, microbatch)


def _rank_order(shape: PipelineShape, rank: int) -> list[tuple[int, int, int]]:
    """(direction, chunk, microbatch) in the order in which a rank runs them."""
    if shape.schedule == "gpipe":
        forward = [(FORWARD, 0, i) for i in range(shape.num_microbatches)]
        return forward + [(BACKWARD, 0, i) for _, _, i in forward]
    p, v, m = shape.num_ranks, shape.num_chunks, shape.num_microbatches
    total = m * v
    if v == 1:
        warmup = min(p - rank - 1, m)
    else:
        warmup = total if m == p else min((p - rank - 1) * 2 + (v - 1) * p, total)
    forward = [_chunk_of(i, p, v, FORWARD) for i in range(total)]
    backward = [_chunk_of(i, p, v, BACKWARD) for i in range(total)]
    steady = [event for pair in zip(forward[warmup:], backward, strict=False) for event in pair]
    return forward[:warmup] + steady + backward[total - warmup :]


def _chunk_of(step: int, p: int, v: int, direction: int) -> tuple[int, int, int]:
    """The chunk and microbatch of a rank's ``step``-th forward or backward: groups of p microbatches chunk by chunk."""
    group, within = divmod(step, p * v)
    chunk, offset = divmod(within, p)
    return direction, (chunk if direction == FORWARD else v - 1 - chunk), group * p + offset


class DifferentiableMakespan(torch.autograd.Function):
    """:func:`pipeline_makespan` as an autograd function; the gradient is the critical path's counts."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        forward_s: torch.Tensor,  # [num_ranks]
        backward_s: torch.Tensor,  # [num_ranks]
        hop_s: torch.Tensor,  # []
        shape: PipelineShape,
    ) -> torch.Tensor:
        path = pipeline_makespan(shape, forward_s.tolist(), backward_s.tolist(), float(hop_s))
        ctx.counts = (path.forward_counts, path.backward_counts, path.hop_counts)  # type: ignore[attr-defined]
        return forward_s.new_tensor(path.seconds)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        forward, backward, hops = ctx.counts  # type: ignore[attr-defined]
        return grad * grad.new_tensor(forward), grad * grad.new_tensor(backward), grad * hops, None
