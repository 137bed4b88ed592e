"""One training step as slices of time on every pipeline stage: what the prediction adds up, laid out in order.

The pipeline's events are those of :mod:`gnn_predictor.schedule`, so the last one ends with the predicted makespan; the
exposed data-parallel messages, the optimizer and the step's overhead follow, up to the predicted iteration time. All
times in seconds from the start of the step.

Within an event the order is drawn, not predicted: recompute comes first, exposed communication last, and hidden
communication runs beside the compute from its start; in truth each layer has its share of all of them. Hidden
communication that outlasts what hides it is drawn shortened; ``Slice.seconds`` is its own time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gnn_predictor.batch import pipeline_shape
from gnn_predictor.critical_path import JobTimes, StepDetail
from gnn_predictor.event_order import FORWARD, WEIGHT_GRADIENT, PipelineShape, last_to_step, stages_of_rank
from gnn_predictor.features import SLOTS
from gnn_predictor.report.stage_parts import Message, StageParts, stage_parts
from gnn_predictor.schedule import TimedEvent, timed_events

Kind = Literal[
    "forward", "backward", "weight_gradient", "recompute", "optimizer", "overhead", "communication", "left_out"
]
COMPUTE = "compute"
# A step of more events than this is cut in its middle, where every microbatch looks like the one before.
_MOST_EVENTS = 2000
_LEAST_ROUNDS = 2  # of the pipeline's depth: warm-up, steady state and cool-down all show
_SAME = 1e-9  # relative: two ways of adding up the same seconds


@dataclass(frozen=True, slots=True)
class Slice:
    """Something one stage does from ``start_s`` to ``end_s``, on its compute stream or on that of a parallel axis.

    ``seconds`` is its own time; ``is_exposed``: the stage waits for it (always so on the compute stream).
    """

    stage: int
    stream: str
    kind: Kind
    start_s: float
    end_s: float
    seconds: float
    label: str = ""
    dtype: str = ""
    microbatch: int | None = None
    chunk: int | None = None
    is_exposed: bool = True


@dataclass(frozen=True)
class Timeline:
    """A step's slices by stage and start; those of one stream of one stage never overlap.

    When the step is too long to draw, ``num_left_out`` microbatches of its middle are gaps of ``left_out_s`` together.
    """

    slices: tuple[Slice, ...]
    shape: PipelineShape
    makespan_s: float
    iteration_time_s: float
    num_left_out: int
    left_out_s: float

    @property
    def note(self) -> str:
        """What was cut, in a sentence; empty when nothing was."""
        if not self.num_left_out:
            return ""
        count = self.shape.num_microbatches
        return (
            f"{count - self.num_left_out:,} of {count:,} microbatches are drawn: warm-up, steady state at either side "
            "of the gap, and cool-down; those left out look like the ones beside them"
        )


def timeline(detail: StepDetail) -> Timeline:
    """Lays out the step of a prediction."""
    shape, times = pipeline_shape(detail.arrays), detail.times
    hop_s = float(times.slots[:, SLOTS.index("hop")].sum()) / max(1, shape.num_hops)
    drawn = _drawn(shape, times, hop_s)
    stages = [stage_parts(detail, stage) for stage in range(shape.num_ranks)]
    slices = [each for event in drawn.events for each in _event_slices(event, stages[event.stage], shape.num_chunks)]
    slices += _sends(drawn.events, stages, hop_s)
    makespan_s = times.path.seconds
    step_s = float(times.iteration_s[list(last_to_step(shape, times.iteration_s.tolist()))].sum())
    for stage, parts in enumerate(stages):
        own = [(event, moved) for event, moved in zip(drawn.events, drawn.moved_s, strict=True) if event.rank == stage]
        slices += _gaps(own)
        slices += _hidden_step_messages(stage, parts, [event for event, _ in own])
        start_s = makespan_s
        for held in stages_of_rank(shape, stage):
            slices += _step_slices(stage, stages[held], start_s)
            start_s += float(times.iteration_s[held])
        slices.append(_compute(stage, "overhead", makespan_s + step_s, times.overhead_s))
    return Timeline(
        slices=_on_lanes(each for each in slices if each.end_s > each.start_s),
        shape=shape,
        makespan_s=makespan_s,
        iteration_time_s=makespan_s + step_s + times.overhead_s,
        num_left_out=drawn.num_left_out,
        left_out_s=drawn.left_out_s,
    )


@dataclass(frozen=True)
class _Drawn:
    """The events to draw at their times in the whole step; how far each was moved behind what is left out."""

    events: tuple[TimedEvent, ...]
    moved_s: tuple[float, ...]
    num_left_out: int = 0
    left_out_s: float = 0.0


def _drawn(shape: PipelineShape, times: JobTimes, hop_s: float) -> _Drawn:
    makespan_s, count = times.path.seconds, _most_drawn(shape)
    if count == shape.num_microbatches:
        events = timed_events(shape, times.stage_s, hop_s)
        if math.isclose(_end_s(events), makespan_s, rel_tol=_SAME):
            return _Drawn(events, (0.0,) * len(events))
        # Long steps are predicted by extrapolating shorter ones, which is not always how the events fall.
        count = _whole_rounds(count - 1, shape)
    short = dataclasses.replace(shape, num_microbatches=count)
    events = timed_events(short, times.stage_s, hop_s)
    end_s = _end_s(events)
    num_left_out, left_out_s = shape.num_microbatches - count, makespan_s - end_s
    forward_share = float(times.forward_s.max() / (times.forward_s.max() + times.backward_s.max()))
    behind = [_share_before(event, short, forward_share, end_s / 2) for event in events]
    moved = tuple(
        dataclasses.replace(
            event,
            microbatch=_number(event, short, num_left_out, is_later),
            start_s=event.start_s + share * left_out_s,
            end_s=event.end_s + share * left_out_s,
        )
        for event, (share, is_later) in zip(events, behind, strict=True)
    )
    return _Drawn(moved, tuple(share * left_out_s for share, _ in behind), num_left_out, left_out_s)


def _number(event: TimedEvent, drawn: PipelineShape, num_left_out: int, is_later: bool) -> int:
    """The microbatch's number in the whole step; DualPipe numbers those of its second direction from the middle."""
    if drawn.schedule != "dualpipe":
        return event.microbatch + num_left_out * is_later
    is_reverse = event.microbatch >= drawn.num_microbatches // 2
    return event.microbatch + num_left_out // 2 * (is_later + is_reverse)


def _share_before(event: TimedEvent, shape: PipelineShape, forward_share: float, middle_s: float) -> tuple[float, bool]:
    """How much of the left-out time lies before an event, and whether it is of a microbatch behind those left out.

    Mostly the middle of the step is left out. GPipe runs all forwards before all backwards: both lose their middle.
    """
    if shape.schedule != "gpipe":
        return float(event.start_s >= middle_s), event.start_s >= middle_s
    is_later = event.microbatch >= shape.num_microbatches // 2
    if event.kind == FORWARD:
        return forward_share * is_later, is_later
    return (1.0 if is_later else forward_share), is_later


def _end_s(events: Iterable[TimedEvent]) -> float:
    return max(event.end_s for event in events)


def _most_drawn(shape: PipelineShape) -> int:
    """Microbatches whose events are few enough to draw; whole rounds where interleaving asks for them."""
    p, m = shape.num_ranks, shape.num_microbatches
    most = max(_MOST_EVENTS // (2 * p * shape.num_chunks), _LEAST_ROUNDS * p)
    if m <= most and (shape.num_chunks == 1 or m % p == 0 or m < p):
        return m
    return _whole_rounds(min(most, m), shape)


def _whole_rounds(count: int, shape: PipelineShape) -> int:
    """At most ``count`` microbatches, in multiples of the pipeline's depth where there are as many."""
    return count - count % shape.num_ranks if count >= shape.num_ranks else count


def _gaps(own: Sequence[tuple[TimedEvent, float]]) -> Iterator[Slice]:
    """Where one stage runs microbatches that are not drawn."""
    by_start = sorted(own, key=lambda item: item[0].start_s)
    for (before, before_s), (after, after_s) in itertools.pairwise(by_start):
        if after_s > before_s:
            yield _compute(before.rank, "left_out", before.end_s, after.start_s - before.end_s)


def _event_slices(event: TimedEvent, parts: StageParts, num_chunks: int) -> Iterator[Slice]:
    """One event: its compute, the communication hidden beside it, and at its end what the stage waits for."""
    if event.kind == WEIGHT_GRADIENT:
        yield _of_event(event, "weight_gradient", event.start_s, event.end_s, parts.backward_dtype)
        return
    is_forward = event.kind == FORWARD
    messages = parts.forward_messages if is_forward else parts.backward_messages
    messages = tuple(_beside(message, event.hidden_s * num_chunks) for message in messages)
    exposed_s = sum(message.exposed_s for message in messages) / num_chunks
    waiting_s = max(event.start_s, event.end_s - exposed_s)
    recompute_end_s = event.start_s
    if not is_forward:
        recompute_end_s = min(event.start_s + parts.recompute_s / num_chunks, waiting_s)
        yield _of_event(event, "recompute", event.start_s, recompute_end_s, parts.forward_dtype)
    kind: Kind = "forward" if is_forward else "backward"
    dtype = parts.forward_dtype if is_forward else parts.backward_dtype
    yield _of_event(event, kind, recompute_end_s, waiting_s, dtype)
    for message in messages:
        hidden = _message(event.rank, message, event.start_s, message.hidden_s / num_chunks, is_exposed=False)
        yield _with_place(dataclasses.replace(hidden, end_s=min(hidden.end_s, waiting_s)), event)
    for message in messages:
        exposed = _message(event.rank, message, waiting_s, message.exposed_s / num_chunks, is_exposed=True)
        yield _with_place(dataclasses.replace(exposed, end_s=min(exposed.end_s, event.end_s)), event)
        waiting_s = exposed.end_s


def _beside(message: Message, hidden_s: float) -> Message:
    """The experts' message of a pass that runs beside another: so much of it is hidden."""
    if message.axis != "expert":
        return message
    hidden_s = min(hidden_s, message.exposed_s)
    return dataclasses.replace(message, exposed_s=message.exposed_s - hidden_s, hidden_s=message.hidden_s + hidden_s)


def _of_event(event: TimedEvent, kind: Kind, start_s: float, end_s: float, dtype: str) -> Slice:
    return _with_place(_compute(event.rank, kind, start_s, end_s - start_s, dtype), event)


def _with_place(each: Slice, event: TimedEvent) -> Slice:
    return dataclasses.replace(each, microbatch=event.microbatch, chunk=event.chunk)


def _compute(stage: int, kind: Kind, start_s: float, seconds: float, dtype: str = "") -> Slice:
    return Slice(stage, COMPUTE, kind, start_s, start_s + seconds, seconds, dtype=dtype)


def _message(stage: int, message: Message, start_s: float, seconds: float, is_exposed: bool) -> Slice:
    return Slice(
        stage, message.axis, "communication", start_s, start_s + seconds, seconds,
        label=message.kinds, dtype=message.dtypes, is_exposed=is_exposed,
    )  # fmt: skip


def _sends(events: Sequence[TimedEvent], stages: Sequence[StageParts], hop_s: float) -> Iterator[Slice]:
    """Activations and gradients on their way to another stage, on the pipeline stream of the one that sends them."""
    for event in events:
        if event.is_fed_by_other_rank:
            source = events[event.fed_by]
            parts = stages[source.stage]
            send = parts.send_activations if event.kind == FORWARD else parts.send_gradients
            if send is not None:
                yield _with_place(_message(source.rank, send, source.end_s, hop_s, is_exposed=True), source)


def _hidden_step_messages(stage: int, parts: StageParts, own: Sequence[TimedEvent]) -> Iterator[Slice]:
    """Data-parallel messages beside the pipeline: parameters from its start on, gradients up to its end."""
    first_s, last_s = min(event.start_s for event in own), _end_s(own)
    start_s = first_s
    for message in parts.gathers:
        gather = _message(stage, message, start_s, message.hidden_s, is_exposed=False)
        start_s = min(gather.end_s, last_s)
        yield dataclasses.replace(gather, end_s=start_s)
    end_s = last_s
    for message in reversed(parts.reductions):
        start_s = max(end_s - message.hidden_s, first_s)
        yield dataclasses.replace(_message(stage, message, start_s, message.hidden_s, is_exposed=False), end_s=end_s)
        end_s = start_s


def _step_slices(stage: int, parts: StageParts, start_s: float) -> Iterator[Slice]:
    """What follows the pipeline: waiting for gradients, the optimizer, waiting for parameters."""
    for message in parts.reductions:
        yield _message(stage, message, start_s, message.exposed_s, is_exposed=True)
        start_s += message.exposed_s
    yield _compute(stage, "optimizer", start_s, parts.optimizer_s, parts.optimizer_dtype)
    start_s += parts.optimizer_s
    for message in parts.gathers:
        yield _message(stage, message, start_s, message.exposed_s, is_exposed=True)
        start_s += message.exposed_s


def _on_lanes(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Sorted; a slice that would overlap another of its stream moves to a further lane of it ("tensor 2")."""
    placed = []
    free_s: dict[tuple[int, str], list[float]] = {}
    for each in sorted(slices, key=lambda each: (each.stage, each.start_s)):
        lanes = free_s.setdefault((each.stage, each.stream), [])
        lane = next((i for i, end_s in enumerate(lanes) if end_s <= each.start_s), len(lanes))
        lanes[lane : lane + 1] = [each.end_s]
        placed.append(dataclasses.replace(each, stream=f"{each.stream} {lane + 1}") if lane else each)
    return tuple(placed)
