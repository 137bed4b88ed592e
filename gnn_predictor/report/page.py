"""A prediction as one self-contained HTML page: no network, no script; a table stands behind every chart.

Every figure that the JSON has is taken from it by its path (``Figures``), so page and JSON cannot differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import jinja2
import yaml
from markupsafe import Markup

from dataset_builder.job.model import num_parameters
from dataset_builder.tracing.graph import StageFacts
from gnn_predictor.compare import Comparison, value_text
from gnn_predictor.critical_path import StepDetail
from gnn_predictor.event_order import stages_of_rank
from gnn_predictor.prediction import Prediction
from gnn_predictor.report.charts import roofline_chart, timeline_chart
from gnn_predictor.report.chrome_trace import layers_text
from gnn_predictor.report.operators import longest_operators
from gnn_predictor.report.table import layout_text, lengths_text, precision_text, quantity_text, seconds_text
from gnn_predictor.report.timeline import timeline
from gnn_predictor.stage_prediction import StagePrediction

_MOST_OPERATORS = 15
_MEMORY_PARTS = ("params", "grads", "optimizer", "activations", "other")
_BILLION_TOKENS = 1e9
_SMALL = 0.005  # shares of the iteration below this are folded away
# How the figures of the JSON are written, by the unit that the template names.
_UNITS: dict[str, Callable[[float], str]] = {
    "seconds": lambda value: seconds_text(value).replace(" us", " µs"),
    "bytes": lambda value: f"{value / 1e9:.1f} GB",
    "percent": lambda value: f"{value:.1%}",
    "count": lambda value: f"{value:,.0f}",
    "tflops": lambda value: f"{value:,.1f} TFLOP/s",
    "quantity": lambda value: f"{value:,.0f}" if value < 1e6 else quantity_text(value),
    "hours": lambda value: f"{value:,.0f} h" if value >= 100 else f"{value:.1f} h",
    "usd": lambda value: f"{value:,.0f} USD" if value < 1e6 else f"{quantity_text(value)} USD",
    "times": lambda value: f"{value:.2f}×",
}


def html_page(prediction: Prediction, detail: StepDetail, comparison: Comparison, compared: str) -> str:
    """The page of a prediction, beside variants of its job; ``compared`` says in a few words which."""
    device, step = prediction.job.cluster.gpu, timeline(detail)
    operators = longest_operators(detail, device, _MOST_OPERATORS)
    answer = prediction.to_dict()
    figures = Figures({**answer, "compare": comparison.to_dict()})
    return _template().render(
        answer=answer,
        figure=figures,
        prediction=prediction,
        ranks_hold=len(stages_of_rank(step.shape, 0)),
        name=prediction.job.name or prediction.job.model.name or "job",
        about=_about(prediction),
        fullest=max(range(len(prediction.stages)), key=lambda stage: prediction.stages[stage].peak_memory_bytes),
        cost_per_billion=_cost_per_billion(prediction),
        insight=_insight(prediction),
        step=step,
        timeline=timeline_chart(step),
        stages=[
            _stage(prediction, stage, facts, stages_of_rank(step.shape, stage.stage))
            for stage, facts in zip(prediction.stages, detail.graph.stages, strict=True)
        ],
        capacity=_capacity(prediction),
        kinds=_parts(figures, prediction, ("by_kind", "exposed_communication")),
        dtypes=_parts(figures, prediction, ("by_dtype", "exposed_communication_by_dtype")),
        axes=_axes(figures, answer),
        comparison=comparison,
        compared=compared,
        variants=_variants(figures, comparison),
        operators=operators,
        roofline=roofline_chart(operators, device),
        cautions=_cautions(prediction),
        job_text=yaml.safe_dump(answer["job"], sort_keys=False, allow_unicode=True),
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gnn_predictor", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": _UNITS["seconds"],
        "shape": lambda shape: " × ".join(f"{size:,}" for size in shape),
    }
    return environment.get_template("page.html.jinja")


class Figures:
    """Figures of the JSON by their path (``stages.0.forward_s``) as text, with the value itself for machines."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self._answer = answer

    def value(self, path: str) -> Any:
        return functools.reduce(
            lambda part, key: part[int(key) if isinstance(part, list) else key], path.split("."), self._answer
        )

    def __call__(self, path: str, unit: str) -> Markup:
        value = self.value(path)
        return Markup('<data value="{}" data-path="{}">{}</data>').format(repr(value), path, _UNITS[unit](value))


def _about(prediction: Prediction) -> list[str]:
    """What the job is, for the page's head."""
    job = prediction.job
    return [
        f"{quantity_text(num_parameters(job.model))} parameters on {job.cluster.num_gpus:,} × {job.cluster.gpu.name}, "
        f"{precision_text(job.precision)}",
        layout_text(prediction),
        f"{job.batch.global_batch_size:,} sequences of {lengths_text(job)} tokens per step",
    ]


def _cautions(prediction: Prediction) -> list[str]:
    """Warnings without what the page lists elsewhere: assumptions, and the arithmetic of every stage's memory."""
    elsewhere = set(prediction.job.assumed)
    return [line for line in prediction.warnings if line not in elsewhere and not line.startswith("memory: stage")]


def _cost_per_billion(prediction: Prediction) -> str:
    """What a billion tokens cost, in GPU hours and, when the job has a price, in money."""
    hours = _BILLION_TOKENS / prediction.tokens_per_s / 3600 * prediction.job.cluster.num_gpus
    price = prediction.job.price
    cost = f", {hours * price.usd_per_gpu_hour:,.2f} USD" if price else ""
    written = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
    return f"{written} GPU hours{cost} per billion tokens"


def _insight(prediction: Prediction) -> str:
    """The largest parts of the critical path in a sentence, and how long the stages wait for each other."""
    whole = prediction.iteration_time_s
    seconds = dict(prediction.breakdown.by_kind)
    for axis, exposed_s in prediction.breakdown.exposed_communication.items():
        seconds[f"exposed {axis} communication"] = exposed_s
    (first, first_s), *others = sorted(seconds.items(), key=lambda item: -item[1])[:3]
    rest = "".join(f", {_spoken(name)} {value / whole:.0%}" for name, value in others)
    name = _spoken(first)
    sentence = f"{name[0].upper()}{name[1:]} take {first_s / whole:.0%} of the critical path{rest}."
    idle = max(stage.bubble_s for stage in prediction.stages) / whole
    if len(prediction.stages) > 1:
        sentence += f" The stage that waits longest for the others is idle {idle:.0%} of the time."
    return sentence


def _spoken(kind: str) -> str:
    spoken = {"gemm": "GEMMs", "grouped_gemm": "grouped GEMMs", "elementwise": "elementwise kernels"}
    return spoken.get(kind, kind.replace("_", " "))


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar; ``width`` in percent."""

    kind: str
    width: float


@dataclass(frozen=True)
class StageRow:
    name: str
    layers: str
    times: tuple[Segment, ...]
    memory: tuple[Segment, ...]


def _stage(prediction: Prediction, stage: StagePrediction, facts: StageFacts, held: Sequence[int]) -> StageRow:
    ends = ["embedding"] * facts.has_embedding, ["head"] * facts.has_head
    scale = _memory_scale(prediction)
    return StageRow(
        name=str(stage.stage),
        layers=", ".join([*ends[0], layers_text(stage.layers), *ends[1]]),
        times=_segments(_rank_seconds(prediction, held).items(), prediction.iteration_time_s),
        memory=_segments(((part, getattr(stage.memory, part)) for part in _MEMORY_PARTS), scale),
    )


def _rank_seconds(prediction: Prediction, held: Sequence[int]) -> dict[str, float]:
    """How a rank spends the iteration. If it holds several stages, its microbatches are divided among them."""
    stages, count = [prediction.stages[stage] for stage in held], prediction.num_microbatches
    seconds = {
        "forward": count * fmean(stage.forward_s for stage in stages),
        "recompute": count * fmean(stage.recompute_s for stage in stages),
        "backward": count * fmean(stage.backward_s for stage in stages),
        "communication": fmean(stage.communication_exposed_s for stage in stages),
        "optimizer": sum(stage.optimizer_s for stage in stages),
        "overhead": stages[0].overhead_s,
    }
    return seconds | {"bubble": max(0.0, prediction.iteration_time_s - sum(seconds.values()))}


def _segments(parts: Iterable[tuple[str, float]], whole: float) -> tuple[Segment, ...]:
    return tuple(Segment(name, 100 * value / whole) for name, value in parts if value > 0)


def _memory_scale(prediction: Prediction) -> float:
    """Bytes at the right end of the memory bars: the capacity, or more when a stage needs more."""
    return max(prediction.job.cluster.gpu.hbm_bytes, *(stage.peak_memory_bytes for stage in prediction.stages))


def _capacity(prediction: Prediction) -> float:
    """Where the device's memory ends on the memory bars, in percent."""
    return 100 * prediction.job.cluster.gpu.hbm_bytes / _memory_scale(prediction)


@dataclass(frozen=True, slots=True)
class Part:
    """A share of the critical path: its figure, and its bar's width in percent of the longest."""

    name: str
    is_communication: bool
    figure: Markup
    share: str
    width: float
    is_small: bool


def _parts(figures: Figures, prediction: Prediction, tables: Sequence[str]) -> list[Part]:
    found = []
    for table in tables:
        is_communication = table.startswith("exposed_communication")
        for name, seconds in figures.value(f"breakdown.{table}").items():
            if seconds > 0:
                label = f"{name} communication" if is_communication else name
                if table == "by_kind":
                    label = label.replace("_", " ")
                found.append((label, is_communication, seconds, figures(f"breakdown.{table}.{name}", "seconds")))
    found.sort(key=lambda item: -item[2])
    whole, longest = prediction.iteration_time_s, found[0][2]
    return [
        Part(
            name=name,
            is_communication=is_communication,
            figure=figure,
            share=f"{seconds / whole:.1%}",
            width=100 * seconds / longest,
            is_small=seconds < _SMALL * whole,
        )
        for name, is_communication, seconds, figure in found
    ]


@dataclass(frozen=True, slots=True)
class AxisRow:
    """Communication of one parallel axis: what the step waits for and what runs beside compute."""

    name: str
    exposed: Markup
    hidden: Markup
    segments: tuple[Segment, ...]


def _axes(figures: Figures, answer: Mapping[str, Any]) -> list[AxisRow]:
    exposed, hidden = (answer["breakdown"][name] for name in ("exposed_communication", "overlapped_communication"))
    used = [axis for axis in exposed if exposed[axis] + hidden[axis] > 0]
    longest = max((exposed[axis] + hidden[axis] for axis in used), default=0.0)
    return [
        AxisRow(
            name=axis,
            exposed=figures(f"breakdown.exposed_communication.{axis}", "seconds"),
            hidden=figures(f"breakdown.overlapped_communication.{axis}", "seconds"),
            segments=_segments([("communication", exposed[axis]), ("hidden", hidden[axis])], longest),
        )
        for axis in used
    ]


@dataclass(frozen=True, slots=True)
class VariantRow:
    """One variant: its figures and its bar with interval (percent), or why it cannot run."""

    name: str
    index: int
    reason: str
    width: float = 0.0
    low: float = 0.0
    high: float = 0.0


def _variants(figures: Figures, comparison: Comparison) -> list[VariantRow]:
    running = [variant.prediction for variant in comparison.variants if variant.prediction]
    longest = max((each.iteration_time_high_s for each in running), default=1.0)
    rows = []
    for index, variant in enumerate(comparison.variants):
        name = ", ".join(
            value_text(value) if key == "precision" else f"{key}={value_text(value)}"
            for key, value in variant.settings.items()
        )
        prediction = variant.prediction
        if prediction is None:
            rows.append(VariantRow(name, index, variant.reason))
            continue
        times = (prediction.iteration_time_s, prediction.iteration_time_low_s, prediction.iteration_time_high_s)
        rows.append(VariantRow(name, index, "", *(100 * seconds / longest for seconds in times)))
    return rows
