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
    IntArray,
    PipelineShape,
    Task,
    order_table,
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
    """All events of a step in an order in which every predecessor comes first.

    The first ``num_ranks`` places stand for the ranks as they begin the step; event i is at place ``num_ranks + i``.
    An event waits for one other beside the one before it on its rank; one that waits for two others comes after an
    event that does nothing but wait for the first.
    """

    rank: list[int]
    number: list[int]  # in its rank's order; -1 where an event only waits
    previous: list[int]  # place of the event before it on its rank
    feeder: list[int]  # place of the event that it waits for, or ``previous`` again
    is_remote: list[bool]  # whether another rank runs the feeder
    work: list[int]  # row of ``coefficients``
    coefficients: Floats  # [distinct works, len(TIMES) * num_stages]: an event's seconds as a sum of stage times
    last: list[int]  # place of every rank's last event
    num_ranks: int


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
    few, more = _of_count(shape, low), _of_count(shape, low + window)
    if low == m:
        return _one_step(few, stage_s, hop_s)[0]
    second, end = _one_step(more, stage_s, hop_s)
    first, _ = _one_step(few, stage_s, hop_s, end[: _num_shared(few, more)])
    return _on_line(first, second, (m - low) / window)


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


def _one_step(
    shape: PipelineShape, stage_s: Floats, hop_s: float, begun: Sequence[float] = ()
) -> tuple[Makespan, list[float]]:
    """A step, and when what stands at every place ends; ``begun``: those that are known of the first places."""
    if shape.schedule in _ROLLING:
        return _period(shape, stage_s, hop_s)[0], []
    events = _events(shape)
    end = _ends(events, stage_s, hop_s, begun or [0.0] * shape.num_ranks)
    latest = max(events.last, key=end.__getitem__)
    seconds = end[latest]
    _, counts, hops = _path_to(latest, events, end, hop_s)
    return Makespan(seconds, _by_stage(counts, events), float(hops)), end


@functools.lru_cache(maxsize=512)
def _num_shared(few: PipelineShape, more: PipelineShape) -> int:
    """First places at which two steps have the same events, so that these end at the same time."""
    if few.schedule in _ROLLING:
        return 0
    rows = (zip(e.previous, e.feeder, e.is_remote, e.work, strict=True) for e in (_events(few), _events(more)))
    differ = (number for number, (one, other) in enumerate(zip(*rows, strict=False)) if one != other)
    return few.num_ranks + next(differ, len(_events(few).work))


def _ends(events: _Events, stage_s: Floats, hop_s: float, begun: Sequence[float]) -> list[float]:
    """When what stands at every place ends if all events run as early as they can.

    ``begun``: that of the first places, at least when every rank is free to begin.
    """
    seconds = (events.coefficients @ stage_s.ravel()).tolist()
    end, skip = list(begun), len(begun) - events.num_ranks
    columns = (events.previous, events.feeder, events.is_remote, events.work)
    for previous, feeder, is_remote, work in zip(*(column[skip:] for column in columns), strict=True):
        start, ready = end[previous], end[feeder]
        if is_remote:
            ready += hop_s
        end.append((ready if ready > start else start) + seconds[work])
    return end


def _path_to(place: int, events: _Events, end: Sequence[float], hop_s: float) -> tuple[int, Floats, int]:
    """Back along the longest path: the rank it starts on, how often it runs each work, and its hops."""
    previous, feeder, is_remote, work = events.previous, events.feeder, events.is_remote, events.work
    works, hops = [], 0
    while place >= events.num_ranks:
        event = place - events.num_ranks
        works.append(work[event])
        ready = end[feeder[event]] + (hop_s if is_remote[event] else 0.0)
        waits = ready > end[previous[event]]  # as in _start, whose call would cost more than all of this
        hops += waits and is_remote[event]
        place = feeder[event] if waits else previous[event]
    return place, np.bincount(works, minlength=len(events.coefficients)).astype(np.float64), hops


def _start(place: int, events: _Events, end: Sequence[float], hop_s: float) -> tuple[float, bool]:
    """When an event starts, and whether it waits until then for what another event puts out."""
    event = place - events.num_ranks
    free, ready = end[events.previous[event]], end[events.feeder[event]]
    ready += hop_s if events.is_remote[event] else 0.0
    return max(free, ready), ready > free


def _by_stage(work_counts: Floats, events: _Events) -> Floats:
    return np.asarray((work_counts @ events.coefficients).reshape(len(TIMES), -1))


def _period(shape: PipelineShape, stage_s: Floats, hop_s: float) -> tuple[Makespan, list[float]]:
    """The period of steps in which every rank goes on to the next as soon as it is done, and when ranks start one.

    Steps are run until no rank falls further behind than the best cycle found among their longest paths.
    """
    events = _events(shape)
    last_of = dict(enumerate(events.last))
    arrival_s = stage_s[_FORWARD] / shape.num_chunks
    free = (np.cumsum(arrival_s) - arrival_s).tolist()  # as the first microbatch arrives
    best = Makespan(0.0, np.zeros_like(stage_s), 0.0)
    for _ in range(_MOST_STEPS):
        end = _ends(events, stage_s, hop_s, free)
        paths = {rank: _path_to(place, events, end, hop_s) for rank, place in last_of.items()}
        for ranks in _cycles({rank: start for rank, (start, _, _) in paths.items()}):
            counts = _by_stage(np.sum([paths[rank][1] for rank in ranks], axis=0) / len(ranks), events)
            hops = sum(paths[rank][2] for rank in ranks) / len(ranks)
            seconds = float((counts * stage_s).sum()) + hops * hop_s
            best = max(best, Makespan(seconds, counts, hops), key=lambda each: each.seconds)
        done = [end[last_of[rank]] for rank in range(len(free))]
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
    p = shape.num_ranks
    events = _events(shape)
    free = _period(shape, stage_s, hop_s)[1] if shape.schedule in _ROLLING else [0.0] * p
    ends = _ends(events, stage_s, hop_s, free)
    orders = [rank_order(shape, rank) for rank in range(p)]
    index: dict[tuple[int, int, int], int] = {}
    timed: list[TimedEvent] = []
    for place, (rank, number) in enumerate(zip(events.rank, events.number, strict=True), start=p):
        if number < 0:
            continue
        start, end = _start(place, events, ends, hop_s)[0] - free[rank], ends[place] - free[rank]
        tasks = orders[rank][number]
        for task in tasks:
            alone = float(_coefficients(((task.kind, task.piece),), shape) @ stage_s.ravel())
            stage, hidden = shape.stage_of(task.piece), 0.0
            if len(tasks) > 1:
                row = _HIDDEN_FORWARD if task.kind == FORWARD else _HIDDEN_BACKWARD
                hidden = float(stage_s[row, stage]) / shape.num_chunks
            until = end if task is tasks[-1] else start + alone - hidden
            feeder = index.get(_feeder(task, p * shape.num_chunks - 1), -1)
            is_remote = feeder >= 0 and timed[feeder].rank != rank
            where = (rank, task.kind, stage, task.piece // p, task.microbatch)
            timed.append(TimedEvent(*where, start, until, feeder, is_remote, hidden))
            index[_output(task)] = len(timed) - 1
            start = until
    return tuple(timed)


def _output(task: Task) -> tuple[int, int, int]:
    """What a task puts out: activations, gradients of its input (BACKWARD), or gradients of weights."""
    kind, piece, microbatch = task
    return BACKWARD if kind == INPUT_GRADIENT else kind, piece, microbatch


def _feeder(task: Task, last_piece: int) -> tuple[int, int, int]:
    """The output that a task needs, but for those of its own rank that always come before (then none that there is)."""
    kind, piece, microbatch = task
    if kind == FORWARD:
        return FORWARD, piece - 1, microbatch
    if kind == WEIGHT_GRADIENT:
        return -1, piece, microbatch
    return (FORWARD, piece, microbatch) if piece == last_piece else (BACKWARD, piece + 1, microbatch)


@functools.lru_cache(maxsize=512)
def _events(shape: PipelineShape) -> _Events:
    """All events of one step, sorted so that predecessors come first."""
    p = shape.num_ranks
    orders = [order_table(shape, rank) for rank in range(p)]
    tasks = np.concatenate(orders)  # [events, tasks of an event, 3]
    needed, made, nothing = _messages(tasks, shape)
    # An event is where its last task is; where another one is, an event that waits for what that task needs.
    is_whole = np.arange(tasks.shape[1]) == tasks.shape[1] - 1
    event, column = np.nonzero(is_whole | (tasks[:, :, 0] >= 0))
    is_whole = is_whole[column]
    needed, made = needed[event, column], np.where(is_whole[:, None], made[event], nothing)
    rank = np.repeat(np.arange(p), [len(order) for order in orders])[event]
    number = np.concatenate([np.arange(len(order)) for order in orders])[event]
    # So far by rank; from here on, places are those of an order in which they can run.
    first = np.searchsorted(rank, np.arange(p + 1))
    order = _runnable_order(first.tolist(), needed.tolist(), made.tolist(), nothing)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = p + np.arange(len(order))
    previous = np.concatenate([[0], place[:-1]])
    previous[first[:-1]] = np.arange(p)
    maker = np.zeros(nothing + 1, dtype=np.int64)
    maker[made] = place[:, None]
    is_fed = needed != nothing
    feeder = np.where(is_fed, maker[needed], previous)
    work, works = _works(tasks, event, is_whole, order)
    return _Events(
        rank=rank[order].tolist(),
        number=np.where(is_whole, number, -1)[order].tolist(),
        previous=previous[order].tolist(),
        feeder=feeder[order].tolist(),
        is_remote=(is_fed & (np.concatenate([np.arange(p), rank[order]])[feeder] != rank))[order].tolist(),
        work=work,
        coefficients=np.stack([_coefficients(each, shape) for each in works]),
        last=place[first[1:] - 1].tolist(),
        num_ranks=p,
    )


def _messages(tasks: IntArray, shape: PipelineShape) -> tuple[IntArray, IntArray, int]:
    """Numbers of what every task [..., 3] needs and of what it puts out; the third stands for nothing, in both.

    Of what its own rank always runs before it, a task needs nothing.
    """
    m, last = shape.num_microbatches, shape.num_ranks * shape.num_chunks - 1
    gradients = (last + 1) * m  # activations have the numbers below
    kind, piece, microbatch = tasks[..., 0], tasks[..., 1], tasks[..., 2]
    own = piece * m + microbatch
    before = np.where(piece == last, own, gradients + own + m)
    has_none = (kind < 0) | (kind == WEIGHT_GRADIENT)
    needed = np.where(kind == FORWARD, own - m, before)
    made = np.where(kind == FORWARD, own, gradients + own)
    nothing = 2 * gradients
    return (
        np.where(has_none | ((kind == FORWARD) & (piece == 0)), nothing, needed),
        np.where(has_none, nothing, made),
        nothing,
    )


def _runnable_order(
    first: Sequence[int], needed: Sequence[int], made: Sequence[Sequence[int]], nothing: int
) -> list[int]:
    """An order of events in which what each needs is there; rank r's are those from ``first[r]`` on, in this order."""
    is_made = bytearray(nothing + 1)
    is_made[nothing] = True
    order: list[int] = []
    begin = list(first)
    while len(order) < len(needed):
        done = len(order)
        for rank, stop in enumerate(first[1:]):
            i = begin[rank]
            while i < stop and is_made[needed[i]]:
                for message in made[i]:
                    is_made[message] = True
                i += 1
            order.extend(range(begin[rank], i))
            begin[rank] = i
        assert len(order) > done, "the order of this schedule deadlocks"
    return order


def _works(
    tasks: IntArray, event: IntArray, is_whole: NDArray[np.bool_], order: Sequence[int]
) -> tuple[list[int], list[tuple[tuple[int, int], ...]]]:
    """What runnable events consist of: the row of each, and the kinds and pieces of every row's tasks."""
    kind, piece = tasks[:, :, 0], tasks[:, :, 1]
    base = int(piece.max()) + 1
    of_event = np.where(kind < 0, 0, 1 + kind * base + piece) @ (4 * base + 1) ** np.arange(tasks.shape[1])
    codes = np.where(is_whole, of_event[event], 0)[order]
    row = {code: number for number, code in enumerate(dict.fromkeys(codes.tolist()))}
    known, where = np.unique(of_event, return_index=True)
    example = dict(zip(known.tolist(), tasks[where].tolist(), strict=True))
    works = [tuple((kind, piece) for kind, piece, _ in example.get(code, []) if kind >= 0) for code in row]
    return [row[code] for code in codes.tolist()], works


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
