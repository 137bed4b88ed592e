"""The order in which every rank of a pipeline runs its passes, schedule by schedule, and what it holds meanwhile.

Sources: GPipe (Huang et al. 2019, arXiv 1811.06965); 1F1B and interleaved 1F1B (Narayanan et al. 2021, arXiv
2104.04473, section 2.2); the zero-bubble schedules ZB-H1, ZB-2P (in the order of ZB-H2) and ZB-V (Qi et al. 2023, arXiv
2401.10241, sections 2 and 6); DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) and DualPipeV, its half folded to
a V. Those from ZB-H1 on split a backward pass into the gradient of its input, which the stage before waits for, and the
gradients of its weights, which nobody waits for and which fill bubbles.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataset_builder.job.parallel import FOLDED_SCHEDULES

IntArray = NDArray[np.int64]

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(4)
# Schedules that run a forward and a backward pass as one event, side by side.
PAIRED = ("dualpipe", "dualpipe_v")
_NO_TASK = (-1, -1, -1)
# Schedules that run weight gradients apart from the rest of a backward pass.
SPLIT = ("zero_bubble", "zero_bubble_2p", "zero_bubble_v", *PAIRED)


class Task(NamedTuple):
    """One pass of one microbatch through one of the model's ``num_ranks * num_chunks`` consecutive pieces."""

    kind: int
    piece: int
    microbatch: int


Event = tuple[Task, ...]  # a rank runs the tasks of an event as one: all inputs before, all outputs after


@dataclass(frozen=True)
class PipelineShape:
    """What decides the order of events: schedule name, ranks, model chunks per rank and microbatches."""

    schedule: str
    num_ranks: int
    num_chunks: int
    num_microbatches: int

    @property
    def num_hops(self) -> int:
        """Hand-overs of one microbatch between ranks: forward and backward, between all pieces (but at a V's tip)."""
        return 2 * (self.num_ranks * self.num_chunks - 1 - (self.schedule in FOLDED_SCHEDULES))

    def stage_of(self, piece: int) -> int:
        """The pipeline stage that a piece belongs to."""
        if self.schedule in FOLDED_SCHEDULES:
            return min(piece, 2 * self.num_ranks - 1 - piece)
        return piece % self.num_ranks


def stages_of_rank(shape: PipelineShape, rank: int) -> tuple[int, ...]:
    """The pipeline stages whose weights a rank holds: DualPipe's ranks also hold those of the opposite one."""
    opposite = shape.num_ranks - 1 - rank
    return (rank, opposite) if shape.schedule == "dualpipe" and opposite != rank else (rank,)


def last_to_step(shape: PipelineShape, step_s: Sequence[float]) -> tuple[int, ...]:
    """The stages of the rank whose optimizer steps take longest; ``step_s`` [num_stages]."""
    ranks = [stages_of_rank(shape, rank) for rank in range(shape.num_ranks)]
    return max(ranks, key=lambda stages: sum(step_s[stage] for stage in stages))


def in_flight_microbatches(shape: PipelineShape) -> tuple[float, ...]:
    """Of every rank, the microbatches whose activations it holds at its peak, each through all layers of a stage.

    A microbatch is held until its weight gradients are computed. 1F1B: ``p - rank``. GPipe: all. Interleaved:
    Megatron-LM's warm-up of ``2 (p - rank - 1) + (v - 1) p`` chunks and the one that runs, each a v-th of a stage.
    ZB-H1 and ZB-V: p, as 1F1B's first rank; ZB-2P: 2p - 1 (arXiv 2401.10241, table 2 and section 6). DualPipe: p + 1
    (arXiv 2412.19437, table 2), of both directions together; DualPipeV: 2p + 1 halves of a stage.
    """
    p, v, m = shape.num_ranks, shape.num_chunks, shape.num_microbatches
    if shape.schedule == "gpipe" or p == 1:
        return (float(m if shape.schedule == "gpipe" else 1),) * p
    if shape.schedule == "interleaved" and m > p:
        return tuple(min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1) / v for rank in range(p))
    if shape.schedule == "interleaved" and m == p:
        return (float(m),) * p
    if shape.schedule == "zero_bubble_v":
        return tuple(min(m, p, (m + rank + 1) / 2) for rank in range(p))
    held = {"zero_bubble": p, "zero_bubble_2p": 2 * p - 1, "dualpipe": p + 1, "dualpipe_v": p + 0.5}
    if shape.schedule in held:
        return (float(min(m, held[shape.schedule])),) * p
    return tuple(float(min(m, p - rank)) for rank in range(p))


def rank_order(shape: PipelineShape, rank: int) -> list[Event]:
    """The events of one step in the order in which a rank runs them."""
    events = order_table(shape, rank).tolist()
    return [tuple(Task(*task) for task in event if task[0] >= 0) for event in events]


def order_table(shape: PipelineShape, rank: int) -> IntArray:
    """:func:`rank_order` as an array [events, tasks, 3]: kind, piece and microbatch, all -1 where there is no task."""
    p, m = shape.num_ranks, shape.num_microbatches
    match shape.schedule:
        case "gpipe":
            return _alone(np.concatenate([_tasks(kind, rank, np.arange(m)) for kind in (FORWARD, BACKWARD)]))
        case "zero_bubble":
            return _alone(_zero_bubble(rank, m, warmup=p - rank - 1, lag=rank))
        case "zero_bubble_2p":
            return _alone(_zero_bubble(rank, m, warmup=2 * (p - rank - 1), lag=2 * rank))
        case "zero_bubble_v":
            return _alone(np.array(_zero_bubble_v(rank, p, m)))
        case "dualpipe":
            return _in_pairs(_dualpipe(rank, p, m))
        case "dualpipe_v":
            pieces = (rank, 2 * p - 1 - rank)
            return _in_pairs([[(kind, pieces[chunk], i) for kind, chunk, i in event] for event in _paired(rank, p, m)])
        case _:
            return _alone(_one_forward_one_backward(shape, rank))


def _alone(tasks: IntArray) -> IntArray:
    """An event for each of the tasks [tasks, 3]."""
    return tasks.reshape(-1, 1, 3)


def _in_pairs(events: Sequence[Sequence[tuple[int, int, int]]]) -> IntArray:
    """Events of two tasks that run side by side, or of one, which stands last."""
    return np.array([[_NO_TASK, *event] if len(event) == 1 else event for event in events])


def _tasks(kind: int, piece: int | IntArray, microbatch: IntArray) -> IntArray:
    """One task for each microbatch; [tasks, 3]."""
    tasks = np.empty((len(microbatch), 3), dtype=np.int64)
    tasks[:, 0], tasks[:, 1], tasks[:, 2] = kind, piece, microbatch
    return tasks


def _one_forward_one_backward(shape: PipelineShape, rank: int) -> IntArray:
    """1F1B, interleaved or not, with Megatron-LM's warm-up: groups of p microbatches, chunk by chunk. [tasks, 3]"""
    p, v, m = shape.num_ranks, shape.num_chunks, shape.num_microbatches
    total = m * v
    if v == 1:
        warmup = min(p - rank - 1, m)
    else:
        warmup = total if m == p else min((p - rank - 1) * 2 + (v - 1) * p, total)
    group, within = np.divmod(np.arange(total), p * v)
    chunk, offset = np.divmod(within, p)
    forward = _tasks(FORWARD, chunk * p + rank, group * p + offset)
    backward = _tasks(BACKWARD, (v - 1 - chunk) * p + rank, group * p + offset)
    steady = np.stack([forward[warmup:], backward[: total - warmup]], axis=1)
    return np.concatenate([forward[:warmup], steady.reshape(-1, 3), backward[total - warmup :]])


def _zero_bubble(rank: int, m: int, warmup: int, lag: int) -> IntArray:
    """1F1B whose weight gradients come ``lag`` microbatches late, so that every rank holds equally many. [tasks, 3]"""
    i = np.arange(m)
    kinds = ((FORWARD, i + warmup), (INPUT_GRADIENT, i), (WEIGHT_GRADIENT, i - lag))
    rounds = np.stack([_tasks(kind, rank, microbatch) for kind, microbatch in kinds], axis=1).reshape(-1, 3)
    first, last = _tasks(FORWARD, rank, np.arange(warmup)), _tasks(WEIGHT_GRADIENT, rank, np.arange(m - lag, m))
    tasks = np.concatenate([first, rounds, last])
    return tasks[(tasks[:, 2] >= 0) & (tasks[:, 2] < m)]


def _zero_bubble_v(rank: int, p: int, m: int) -> list[tuple[int, int, int]]:
    """ZB-V; of fewer microbatches than fill the pipeline (2p - 1), those that there are."""
    filled = max(m, 2 * p - 1)
    pieces = (rank, 2 * p - 1 - rank)
    tasks: list[tuple[int, int, int]] = []
    done: Counter[tuple[int, int]] = Counter()

    def run(kind: int, chunk: int) -> None:
        tasks.append((kind, pieces[chunk], done[kind, chunk]))
        done[kind, chunk] += 1

    def backward(chunk: int) -> None:
        run(INPUT_GRADIENT, chunk)
        run(WEIGHT_GRADIENT, chunk)

    for _ in range(2 * (p - rank) - 1):
        run(FORWARD, 0)
    for _ in range(rank):
        run(FORWARD, 1)
        run(FORWARD, 0)
    for _ in range(p - rank):
        run(FORWARD, 1)
        backward(1)
    while done[FORWARD, 1] < filled:
        if done[FORWARD, 0] < filled:
            run(FORWARD, 0)
        backward(0)
        run(FORWARD, 1)
        backward(1)
    for _ in range(rank):
        run(INPUT_GRADIENT, 0)
        run(INPUT_GRADIENT, 1)
    for _ in range(p - rank):
        backward(0)
    for chunk in (1, 0):
        while done[WEIGHT_GRADIENT, chunk] < filled:
            run(WEIGHT_GRADIENT, chunk)
    return [task for task in tasks if task[2] < m]


def _dualpipe(rank: int, p: int, m: int) -> list[list[tuple[int, int, int]]]:
    """Half of the microbatches go through the ranks upwards, half (numbered from m / 2) downwards."""
    is_upper = rank >= p // 2
    events = []
    for event in _paired(min(rank, p - 1 - rank), p // 2, m // 2):
        tasks = []
        for kind, chunk, i in event:
            is_reverse = chunk != is_upper
            tasks.append((kind, p - 1 - rank if is_reverse else rank, i + (m // 2 if is_reverse else 0)))
        events.append(tasks)
    return events


def _paired(position: int, depth: int, count: int) -> list[tuple[tuple[int, int, int], ...]]:
    """DualPipe's eight steps at ``position`` of ``depth`` from the end that feeds chunk 0: (kind, chunk, number).

    In its main part the forward pass of one chunk and the backward pass of the other run side by side.
    """
    done: Counter[tuple[bool, int]] = Counter()
    late: deque[tuple[int, int, int]] = deque()
    events: list[tuple[tuple[int, int, int], ...]] = []

    def next_task(kind: int, chunk: int) -> tuple[int, int, int]:
        number = done[kind == FORWARD, chunk]
        done[kind == FORWARD, chunk] += 1
        if kind == INPUT_GRADIENT:
            late.append((WEIGHT_GRADIENT, chunk, number))
        return kind, chunk, number

    def run(*tasks: tuple[int, int]) -> None:
        events.append(tuple(next_task(kind, chunk) for kind, chunk in tasks))

    def catch_up() -> None:
        if late:
            events.append((late.popleft(),))

    for _ in range(2 * (depth - position - 1)):
        run((FORWARD, 0))
    for _ in range(position + 1):
        run((FORWARD, 0))
        run((FORWARD, 1))
    for _ in range(depth - position - 1):
        run((INPUT_GRADIENT, 1))
        catch_up()
        run((FORWARD, 1))
    for i in range(count - 2 * depth + position + 1):
        if i == 0 and position == depth - 1:  # apart, so that its neighbour waits for the forward pass alone
            run((FORWARD, 0))
            run((BACKWARD, 1))
        else:
            run((FORWARD, 0), (BACKWARD, 1))
        run((FORWARD, 1), (BACKWARD, 0))
    for _ in range(depth - position - 1):
        run((BACKWARD, 1))
        run((FORWARD, 1), (BACKWARD, 0))
    for i in range(2 * (position + 1)):  # in the second half of these, weight gradients wait
        run((BACKWARD if i <= position else INPUT_GRADIENT, 1 - i % 2))
    for _ in range(depth - position - 1):
        catch_up()
        run((INPUT_GRADIENT, 0))
    while late:
        catch_up()
    return events


def paired_passes(shape: PipelineShape) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of every stage, how many of its microbatches' forward and how many backward passes run in pairs."""
    forward, backward = [0.0] * shape.num_ranks, [0.0] * shape.num_ranks
    if shape.schedule not in PAIRED:
        return tuple(forward), tuple(backward)
    fewest = 2 * shape.num_ranks  # beyond, every further microbatch runs in pairs only
    for rank in range(shape.num_ranks):
        for event in rank_order(replace(shape, num_microbatches=fewest), rank):
            for kind, piece, _ in event if len(event) > 1 else ():
                (forward if kind == FORWARD else backward)[shape.stage_of(piece)] += 1.0 / shape.num_chunks
    further = shape.num_microbatches - fewest
    return tuple(count + further for count in forward), tuple(count + further for count in backward)
