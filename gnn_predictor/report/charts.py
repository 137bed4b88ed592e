"""Where the marks of the report's two drawn charts stand: the timeline and the roofline.

Horizontal places are percent of the chart's width, so that it fits any screen while its text keeps its size; vertical
ones are pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dataset_builder.job.hardware import DeviceSpec
from gnn_predictor.report.operators import Operator
from gnn_predictor.report.table import seconds_text
from gnn_predictor.report.timeline import Slice, Timeline

_GAP_WIDTH = 4.0  # percent that a cut of the step is drawn as, however long it is
_MOST_MARKS = 5000  # slices up to which each is a mark of its own, with a tooltip
_PATH_WIDTH = 10_000  # units of the width in which the others are drawn
_DENSE_STAGES = 8  # beyond, rows are thin and only show the compute stream
_HIDDEN_HEIGHT = 5.0
_LABEL_WIDTH = 1.7  # percent from which on a slice shows its microbatch
_TICKS = 6


@dataclass(frozen=True, slots=True)
class Mark:
    """A rectangle of class ``kind``; ``title`` is its tooltip, ``label`` the text on it."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    title: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    x: float
    label: str


@dataclass(frozen=True)
class TimelineChart:
    """``paths`` has the outlines of all marks of a kind, ``path_width`` units wide; used in place of too many marks."""

    marks: tuple[Mark, ...]
    paths: tuple[tuple[str, str], ...]
    path_width: int
    ticks: tuple[Tick, ...]
    row_height: float
    height: float
    is_dense: bool
    kinds: tuple[str, ...]  # that occur, for the legend


def timeline_chart(step: Timeline) -> TimelineChart:
    """One row a stage: its compute stream with what it waits for, and a thin line of hidden communication below."""
    is_dense = step.shape.num_ranks > _DENSE_STAGES
    row, bar = (11.0, 9.0) if is_dense else (34.0, 22.0)
    axis = _TimeAxis.of(step)
    drawn = [each for each in step.slices if _is_drawn(each, is_dense)]
    are_marked = len(drawn) <= _MOST_MARKS
    marks = []
    for each in drawn:
        x, end = axis.percent(each.start_s), axis.percent(each.end_s)
        is_numbered = not is_dense and each.kind in ("forward", "backward") and end - x >= _LABEL_WIDTH
        marks.append(
            Mark(
                kind=each.kind if each.is_exposed else "hidden",
                x=x,
                y=each.stage * row + (0 if each.is_exposed else bar + 2),
                width=end - x,
                height=bar if each.is_exposed else _HIDDEN_HEIGHT,
                title=_title(each) if are_marked else "",
                label=str(each.microbatch) if is_numbered else "",
            )
        )
    return TimelineChart(
        marks=tuple(marks if are_marked else ()),
        paths=() if are_marked else _paths(marks),
        path_width=_PATH_WIDTH,
        ticks=tuple(axis.ticks()),
        row_height=row,
        height=row * step.shape.num_ranks,
        is_dense=is_dense,
        kinds=tuple(dict.fromkeys(mark.kind for mark in marks)),
    )


def _paths(marks: Iterable[Mark]) -> tuple[tuple[str, str], ...]:
    outlines: dict[str, list[str]] = {}
    for mark in marks:
        x, end = (round(percent * _PATH_WIDTH / 100) for percent in (mark.x, mark.x + mark.width))
        if end > x:
            outline = f"M{x} {mark.y:g}h{end - x}v{mark.height:g}h{x - end}z"
            outlines.setdefault(mark.kind, []).append(outline)
    return tuple((kind, "".join(parts)) for kind, parts in outlines.items())


def _is_drawn(each: Slice, is_dense: bool) -> bool:
    if each.label == "send_recv":  # hop times show as the gaps that they are
        return False
    return each.is_exposed or not is_dense


def _title(each: Slice) -> str:
    words = [f"Stage {each.stage}: {each.kind.replace('_', ' ')}"]
    if each.kind == "communication":
        words[0] = f"Stage {each.stage}: {each.stream} {'exposed' if each.is_exposed else 'hidden'} communication"
    words += [f"microbatch {each.microbatch}"] * (each.microbatch is not None)
    words += [f"chunk {each.chunk}"] * bool(each.chunk)
    words += [each.dtype] * bool(each.dtype)
    return ", ".join([*words, seconds_text(each.end_s - each.start_s)])


@dataclass(frozen=True)
class _TimeAxis:
    """Seconds to percent, with what is left out drawn as a short break."""

    end_s: float
    break_start_s: float
    break_end_s: float

    @classmethod
    def of(cls, step: Timeline) -> _TimeAxis:
        # The break is where no stage has anything to draw: from the last gap's start to the first gap's end.
        gaps = [each for each in step.slices if each.kind == "left_out"]
        start_s = max((each.start_s for each in gaps), default=0.0)
        end_s = min((each.end_s for each in gaps), default=0.0)
        return cls(step.iteration_time_s, start_s, max(start_s, end_s))

    @property
    def _gap_s(self) -> float:
        return self.break_end_s - self.break_start_s

    @property
    def _scale(self) -> float:
        """Percent per second outside the break."""
        return (100 - (_GAP_WIDTH if self._gap_s else 0)) / (self.end_s - self._gap_s)

    def percent(self, seconds: float) -> float:
        if seconds <= self.break_start_s or not self._gap_s:
            return seconds * self._scale
        if seconds >= self.break_end_s:
            return 100 - (self.end_s - seconds) * self._scale
        share = (seconds - self.break_start_s) / self._gap_s
        return self.break_start_s * self._scale + share * _GAP_WIDTH

    def ticks(self) -> Iterator[Tick]:
        step = _round_step((self.end_s - self._gap_s) / _TICKS)
        for index in range(math.floor(self.end_s / step) + 1):
            seconds = index * step
            if not self.break_start_s < seconds < self.break_end_s or not self._gap_s:
                yield Tick(self.percent(seconds), seconds_text(seconds))


def _round_step(about: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(about))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= about * 0.999))


@dataclass(frozen=True, slots=True)
class Point:
    """An operator on the roofline; ``number`` is its row in the table."""

    number: int
    x: float
    y: float
    radius: float
    bound: str
    title: str


@dataclass(frozen=True, slots=True)
class Roof:
    """The limits in one format: memory from (x0, y0) to the ridge (x1, y1), then compute up to the right edge."""

    x0: float
    y0: float
    x1: float
    y1: float
    label: str


@dataclass(frozen=True)
class RooflineChart:
    points: tuple[Point, ...]
    roofs: tuple[Roof, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[tuple[float, str], ...]
    height: float


_ROOFLINE_HEIGHT = 320.0
_LEAST_OF_RIDGE = 0.01
_ROOM = 1.6  # beyond the outermost values, as a factor


def roofline_chart(operators: Sequence[Operator], device: DeviceSpec) -> RooflineChart | None:
    """Achieved FLOP/s over FLOPs per byte of device memory; None when no operator computes anything."""
    numbered = [(number, each) for number, each in enumerate(operators, start=1) if _computes(each, device)]
    if not numbered:
        return None
    formats: dict[float, list[str]] = {}  # by peak
    for dtype in dict.fromkeys(each.dtype for _, each in numbered):
        formats.setdefault(device.peak(dtype), []).append(dtype)
    x = _LogAxis.around(
        [each.flops_per_byte for _, each in numbered] + [peak / device.hbm_bytes_per_s for peak in formats]
    )
    y = _LogAxis.around([each.flops_per_s for _, each in numbered] + list(formats))
    longest_s = max(each.waited_s for _, each in numbered)
    points = [
        Point(
            number=number,
            x=100 * x.share(each.flops_per_byte),
            y=_ROOFLINE_HEIGHT * (1 - y.share(each.flops_per_s)),
            radius=8 + 6 * math.sqrt(each.waited_s / longest_s),
            bound=each.bound,
            title=f"{number}. {each.module} {each.phase} {each.dtype}: {each.flops_per_s / 1e12:,.3g} TFLOP/s, "
            f"{each.flops_per_byte:,.3g} FLOP per byte, {each.bound}-bound",
        )
        for number, each in numbered
    ]
    return RooflineChart(
        points=tuple(sorted(points, key=lambda point: -point.radius)),
        roofs=tuple(
            _roof(f"{', '.join(names)}: {peak / 1e12:,.0f} TFLOP/s", peak, device, x, y)
            for peak, names in sorted(formats.items())
        ),
        x_ticks=tuple(Tick(100 * x.share(value), f"{value:,g}") for value in x.ticks()),
        y_ticks=tuple((_ROOFLINE_HEIGHT * (1 - y.share(value)), f"{value / 1e12:,g}") for value in y.ticks()),
        height=_ROOFLINE_HEIGHT,
    )


def _computes(each: Operator, device: DeviceSpec) -> bool:
    """Whether an operator is on the chart: not two decades left of where its format's compute limit begins."""
    return (
        each.bound != "network"
        and each.flops_per_byte > _LEAST_OF_RIDGE * device.peak(each.dtype) / device.hbm_bytes_per_s
    )


def _roof(label: str, peak: float, device: DeviceSpec, x: _LogAxis, y: _LogAxis) -> Roof:
    ridge = peak / device.hbm_bytes_per_s
    start = max(x.low, y.low / device.hbm_bytes_per_s)
    return Roof(
        x0=100 * x.share(start),
        y0=_ROOFLINE_HEIGHT * (1 - y.share(start * device.hbm_bytes_per_s)),
        x1=100 * x.share(ridge),
        y1=_ROOFLINE_HEIGHT * (1 - y.share(peak)),
        label=label,
    )


@dataclass(frozen=True, slots=True)
class _LogAxis:
    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float]) -> _LogAxis:
        """All values with a little room."""
        return cls(min(values) / _ROOM, max(values) * _ROOM)

    def share(self, value: float) -> float:
        return math.log10(max(value, self.low) / self.low) / math.log10(self.high / self.low)

    def ticks(self) -> Iterator[float]:
        """Powers of ten, and between them 2 and 5 times these where there are few."""
        factors = (1, 2, 5) if self.high / self.low < 300 else (1,)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = (factor * 10.0**power for power in powers for factor in factors)
        return (value for value in values if self.low <= value <= self.high)
