"""Pipeline schedules as one event recurrence: stage times in, makespan out, with its exact gradient.

A schedule is the order in which every pipeline rank runs its passes (:mod:`gnn_predictor.event_order`). An event starts
when the previous event on its rank and the events that feed it have ended; the makespan is the longest path through
these events. How often each stage's passes lie on that path is the exact gradient of the makespan with respect to their
times, wherever it is differentiable. All times in seconds.

Where the optimizer step is no barrier between ranks (ZB-2P and ZB-V, which validate it afterwards: Qi et al. 2023,
arXiv 2401.10241, section 4), steps follow each other as soon as each rank is done, and what counts is their period: the
largest mean length of a cycle through the ranks' first events, the eigenvalue of the step in max-plus algebra.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gnn_predictor.event_order import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Event,
    PipelineShape,
    Task,
    rank_order,
)

# Rows of a table of stage times. ``weight_gradient`` is the part of ``backward`` that a split schedule runs apart;
# ``hidden_forward`` and ``hidden_backward`` the parts of ``forward`` and ``backward``, communication that the critical
# path waits for, that cost nothing where a forward and a backward pass run side by side.
TIMES = ("forward", "backward", "weight_gradient", "hidden_forward", "hidden_backward")
_FORWARD, _BACKWARD, _WEIGHT_GRADIENT, _HIDDEN_FORWARD, _HIDDEN_BACKWARD = range(len(TIMES))
_ROLLING = ("zero_bubble_2p", "zero_bubble_v")
# In multiples of the pipeline depth: microbatches after which a step is in its steady state, and how many more are
# run to measure its rate there.
_STEADY_ROUNDS = 6
_WINDOW_ROUNDS = 4
_MOST_STEPS = 24  # of a rolling schedule, until its period is known
_RELATIVE_ROUNDING = 1e-10

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Makespan:
    """The longest path: its length, and how often every stage's times and each hop lie on it.

    ``seconds = (counts * stage_s).sum() + hop_counts * hop_s``; a part that is left out counts negatively.
    """

    seconds: float
    counts: Floats  # [len(TIMES), num_stages]
    hop_counts: float

    @property
    def forward_counts(self) -> Floats:
        return np.asarray(self.counts[_FORWARD])

    @property
    def backward_counts(self) -> Floats:
        return np.asarray(self.counts[_BACKWARD])


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """One pass of one microbatch through one chunk, as a rank runs it; ``stage`` and ``chunk`` name the layers.

    ``kind`` as in :mod:`gnn_predictor.event_order`. ``fed_by``: index of the event it waits for, -1: none.
    ``hidden_s``: the part of its messages that runs beside the pass it is paired with.
    """

    rank: int
    kind: int
    stage: int
    chunk: int
    microbatch: int
    start_s: float
    end_s: float
    fed_by: int
    is_fed_by_other_rank: bool
    hidden_s: float


@dataclass(frozen=True)
class _Events:
    """Events in an order in which every predecessor comes first; -1 stands for no predecessor."""

    rank: tuple[int, ...]
    tasks: tuple[Event, ...]
    previous_on_rank: tuple[int, ...]
    feeding: tuple[tuple[tuple[int, bool], ...], ...]  # event, and whether another rank runs it
    work: tuple[int, ...]  # row of ``coefficients``
    coefficients: Floats  # [distinct works, len(TIMES) * num_stages]: an event's seconds as a sum of stage times


@dataclass(frozen=True)
class _Run:
    """When events start and end, and the predecessor that decided each start (-1: none)."""

    start: list[float]
    end: list[float]
    came_from: list[int]


def stage_seconds(forward_s: Sequence[float], backward_s: Sequence[float], **parts: Sequence[float]) -> Floats:
    """A table of stage times [len(TIMES), num_stages]; parts that are not named are zero."""
    given = {"forward": forward_s, "backward": backward_s, **parts}
    return np.array([given.get(name, [0.0] * len(forward_s)) for name in TIMES], dtype=np.float64)


def pipeline_makespan(shape: PipelineShape, stage_s: Floats, hop_s: float) -> Makespan:
    """Seconds from the first forward to the last backward of one step (the period of steps that roll over).

    ``stage_s`` [len(TIMES), num_stages]: a stage's times for one microbatch through all its chunks (so a chunk takes
    their share); ``hop_s`` the time of handing one microbatch to the next rank. A long step is extrapolated along its
    steady state, so the cost of this function does not grow with the number of microbatches. Interleaving is defined
    for multiples of ``num_ranks`` microbatches: other counts are interpolated between their neighbours, and fewer
    microbatches than ranks run as without interleaving.
    """
    shape = _as_run(shape)
    m = shape.num_microbatches
    stride = shape.num_ranks if shape.schedule == "interleaved" else 2 if shape.schedule == "dualpipe" else 1
    below = m - m % stride
    if below == m:
        return _whole_rounds(shape, m, stage_s, hop_s)
    low, high = (_whole_rounds(shape, count, stage_s, hop_s) for count in (below, below + stride))
    return _on_line(low, high, (m - below) / stride)


def _whole_rounds(shape: PipelineShape, m: int, stage_s: Floats, hop_s: float) -> Makespan:
    """Of ``m`` microbatches; many are as a few of the same remainder and so many steady windows more."""
    steady, window = _STEADY_ROUNDS * shape.num_ranks, _WINDOW_ROUNDS * shape.num_ranks
    low = m if m < steady else steady + (m - steady) % window
    first = _one_step(_of_count(shape, low), stage_s, hop_s)
    if low == m:
        return first
    return _on_line(first, _one_step(_of_count(shape, low + window), stage_s, hop_s), (m - low) / window)


def _of_count(shape: PipelineShape, num_microbatches: int) -> PipelineShape:
    return PipelineShape(shape.schedule, shape.num_ranks, shape.num_chunks, num_microbatches)


def _on_line(first: Makespan, second: Makespan, share: float) -> Makespan:
    return Makespan(
        seconds=first.seconds + (second.seconds - first.seconds) * share,
        counts=first.counts + (second.counts - first.counts) * share,
        hop_counts=first.hop_counts + (second.hop_counts - first.hop_counts) * share,
    )


def _as_run(shape: PipelineShape) -> PipelineShape:
    """Fewer microbatches than ranks run without interleaving."""
    if shape.schedule == "interleaved" and shape.num_microbatches < shape.num_ranks:
        return PipelineShape("1f1b", shape.num_ranks, 1, shape.num_microbatches)
    return shape


def _one_step(shape: PipelineShape, stage_s: Floats, hop_s: float) -> Makespan:
    if shape.schedule in _ROLLING:
        return _period(shape, stage_s, hop_s)[0]
    events = _events(shape)
    run = _run(events, stage_s, hop_s, [0.0] * shape.num_ranks)
    last = max(range(len(run.end)), key=run.end.__getitem__)
    _, counts, hops = _path_to(last, events, run)
    return Makespan(run.end[last], _by_stage(counts, events), float(hops))


def _run(events: _Events, stage_s: Floats, hop_s: float, free: Sequence[float]) -> _Run:
    """Runs every event as early as it can; rank r is free from ``free[r]``."""
    seconds = (events.coefficients @ stage_s.ravel()).tolist()
    begin, end = [0.0] * len(events.rank), [0.0] * len(events.rank)
    came_from = [-1] * len(end)
    for i, (rank, previous, feeding, work) in enumerate(
        zip(events.rank, events.previous_on_rank, events.feeding, events.work, strict=True)
    ):
        start, source = (end[previous], previous) if previous >= 0 else (free[rank], -1)
        for feeder, is_remote in feeding:
            ready = end[feeder] + (hop_s if is_remote else 0.0)
            if ready > start:
                start, source = ready, feeder
        begin[i], end[i] = start, start + seconds[work]
        came_from[i] = source
    return _Run(begin, end, came_from)


def _path_to(event: int, events: _Events, run: _Run) -> tuple[int, Floats, int]:
    """Back along the longest path: the rank it starts on, how often it runs each work, and its hops."""
    counts = np.zeros(len(events.coefficients))
    hops, first = 0, event
    while event >= 0:
        counts[events.work[event]] += 1.0
        source = run.came_from[event]
        hops += source != events.previous_on_rank[event] and events.rank[source] != events.rank[event]
        first, event = event, source
    return events.rank[first], counts, hops


def _by_stage(work_counts: Floats, events: _Events) -> Floats:
    return np.asarray((work_counts @ events.coefficients).reshape(len(TIMES), -1))


def _period(shape: PipelineShape, stage_s: Floats, hop_s: float) -> tuple[Makespan, list[float]]:
    """The period of steps in which every rank goes on to the next as soon as it is done, and when ranks start one.

    Steps are run until no rank falls further behind than the best cycle found among their longest paths.
    """
    events = _events(shape)
    last_of = {rank: event for event, rank in enumerate(events.rank)}
    arrival_s = stage_s[_FORWARD] / shape.num_chunks
    free = (np.cumsum(arrival_s) - arrival_s).tolist()  # as the first microbatch arrives
    best = Makespan(0.0, np.zeros_like(stage_s), 0.0)
    for _ in range(_MOST_STEPS):
        run = _run(events, stage_s, hop_s, free)
        paths = {rank: _path_to(event, events, run) for rank, event in last_of.items()}
        for ranks in _cycles({rank: start for rank, (start, _, _) in paths.items()}):
            counts = _by_stage(np.sum([paths[rank][1] for rank in ranks], axis=0) / len(ranks), events)
            hops = sum(paths[rank][2] for rank in ranks) / len(ranks)
            seconds = float((counts * stage_s).sum()) + hops * hop_s
            best = max(best, Makespan(seconds, counts, hops), key=lambda each: each.seconds)
        done = [run.end[last_of[rank]] for rank in range(len(free))]
        slowest = max(later - earlier for later, earlier in zip(done, free, strict=True))
        first = min(done)
        free = [seconds - first for seconds in done]
        if slowest <= best.seconds * (1 + _RELATIVE_ROUNDING):
            break
    return best, free


def _cycles(before: dict[int, int]) -> Iterator[list[int]]:
    """The cycles of a map from every rank to one rank."""
    unseen = set(before)
    while unseen:
        path: list[int] = []
        rank = min(unseen)
        while rank in unseen:
            unseen.discard(rank)
            path.append(rank)
            rank = before[rank]
        if rank in path:
            yield path[path.index(rank) :]


def timed_events(shape: PipelineShape, stage_s: Floats, hop_s: float) -> tuple[TimedEvent, ...]:
    """When every event of the step runs; arguments as in :func:`pipeline_makespan`, but nothing is extrapolated.

    The last end is the makespan of a step that is not extrapolated. Interleaving needs multiples of ``num_ranks``
    microbatches (or fewer than ranks). Two passes that run side by side are shown one after the other. Where steps roll
    over, every rank's clock starts with its own step, in their steady state.
    """
    shape = _as_run(shape)
    events = _events(shape)
    free = _period(shape, stage_s, hop_s)[1] if shape.schedule in _ROLLING else [0.0] * shape.num_ranks
    run = _run(events, stage_s, hop_s, free)
    last_piece = shape.num_ranks * shape.num_chunks - 1
    index: dict[tuple[int, int, int], int] = {}
    timed: list[TimedEvent] = []
    for tasks, rank, start, end in zip(events.tasks, events.rank, run.start, run.end, strict=True):
        start, end = start - free[rank], end - free[rank]
        for task in tasks:
            alone = float(_coefficients(((task.kind, task.piece),), shape) @ stage_s.ravel())
            stage, hidden = shape.stage_of(task.piece), 0.0
            if len(tasks) > 1:
                row = _HIDDEN_FORWARD if task.kind == FORWARD else _HIDDEN_BACKWARD
                hidden = float(stage_s[row, stage]) / shape.num_chunks
            until = end if task is tasks[-1] else start + alone - hidden
            feeder = index.get(_feeder(task, last_piece) or (-1, -1, -1), -1)
            is_remote = feeder >= 0 and timed[feeder].rank != rank
            place = (rank, task.kind, stage, task.piece // shape.num_ranks, task.microbatch)
            timed.append(TimedEvent(*place, start, until, feeder, is_remote, hidden))
            index[_output(task)] = len(timed) - 1
            start = until
    return tuple(timed)


@functools.lru_cache(maxsize=512)
def _events(shape: PipelineShape) -> _Events:
    """All events of one step, sorted so that predecessors come first."""
    orders = [rank_order(shape, rank) for rank in range(shape.num_ranks)]
    index: dict[tuple[int, int, int], int] = {}  # what a task puts out -> event
    works: dict[tuple[tuple[int, int], ...], int] = {}  # kinds and pieces of an event's tasks -> row
    rank_of: list[int] = []
    tasks_of: list[Event] = []
    previous_of: list[int] = []
    feeding_of: list[tuple[tuple[int, bool], ...]] = []
    work_of: list[int] = []
    position, previous = [0] * shape.num_ranks, [-1] * shape.num_ranks
    last_piece = shape.num_ranks * shape.num_chunks - 1
    remaining = sum(map(len, orders))
    while remaining:
        progressed = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                tasks = order[position[rank]]
                feeders = [feeder for task in tasks if (feeder := _feeder(task, last_piece)) is not None]
                if any(feeder not in index for feeder in feeders):
                    break
                event = len(rank_of)
                index |= {_output(task): event for task in tasks}
                rank_of.append(rank)
                tasks_of.append(tasks)
                previous_of.append(previous[rank])
                feeding_of.append(tuple((index[feeder], rank_of[index[feeder]] != rank) for feeder in feeders))
                work_of.append(works.setdefault(tuple((kind, piece) for kind, piece, _ in tasks), len(works)))
                previous[rank] = event
                position[rank] += 1
                remaining -= 1
                progressed = True
        assert progressed, f"the order of {shape} deadlocks"
    return _Events(
        rank=tuple(rank_of),
        tasks=tuple(tasks_of),
        previous_on_rank=tuple(previous_of),
        feeding=tuple(feeding_of),
        work=tuple(work_of),
        coefficients=np.stack([_coefficients(work, shape) for work in works]),
    )


def _output(task: Task) -> tuple[int, int, int]:
    """What a task puts out: activations, gradients of its input (BACKWARD), or gradients of weights."""
    kind, piece, microbatch = task
    return BACKWARD if kind == INPUT_GRADIENT else kind, piece, microbatch


def _feeder(task: Task, last_piece: int) -> tuple[int, int, int] | None:
    """The output that a task needs, but for those of its own rank that always come before."""
    kind, piece, microbatch = task
    if kind == FORWARD:
        return (FORWARD, piece - 1, microbatch) if piece else None
    if kind == WEIGHT_GRADIENT:
        return None
    return (FORWARD, piece, microbatch) if piece == last_piece else (BACKWARD, piece + 1, microbatch)


def _coefficients(work: Sequence[tuple[int, int]], shape: PipelineShape) -> Floats:
    """The seconds of an event with tasks of these kinds and pieces, as a sum of stage times.

    [len(TIMES) * num_stages]
    """
    total = np.zeros((len(TIMES), shape.num_ranks))
    for kind, piece in work:
        stage = shape.stage_of(piece)
        if kind == FORWARD:
            total[_FORWARD, stage] += 1.0
        if kind in (BACKWARD, INPUT_GRADIENT):
            total[_BACKWARD, stage] += 1.0
        if kind in (INPUT_GRADIENT, WEIGHT_GRADIENT):
            total[_WEIGHT_GRADIENT, stage] += 1.0 if kind == WEIGHT_GRADIENT else -1.0
        if len(work) > 1:
            total[_HIDDEN_FORWARD if kind == FORWARD else _HIDDEN_BACKWARD, stage] -= 1.0
    return total.ravel() / shape.num_chunks


class DifferentiableMakespan(torch.autograd.Function):
    """:func:`pipeline_makespan` as an autograd function; the gradient is the critical path's counts."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        stage_s: torch.Tensor,  # [len(TIMES), num_stages]
        hop_s: torch.Tensor,  # []
        shape: PipelineShape,
    ) -> torch.Tensor:
        path = pipeline_makespan(shape, stage_s.detach().double().numpy(), float(hop_s))
        ctx.counts = (path.counts, path.hop_counts)  # type: ignore[attr-defined]
        return stage_s.new_tensor(path.seconds)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        counts, hops = ctx.counts  # type: ignore[attr-defined]
        return grad * grad.new_tensor(counts), grad * hops, None
