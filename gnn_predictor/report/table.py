"""A prediction as text for people: headline, stages, where the time goes, what was assumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dataset_builder.job.model import num_parameters
from dataset_builder.job.precision import PrecisionPolicy
from dataset_builder.job.schema import TrainingJob
from gnn_predictor.prediction import Prediction
from gnn_predictor.report.stage_reasons import in_brief

# Wide enough for the stage table when there is no terminal whose width could be asked for.
_PLAIN_WIDTH = 120
_PER_MICROBATCH = ("forward", "backward", "recompute")
_PER_ITERATION = ("exposed comm", "optimizer", "total", "bubble", "memory")


def print_table(prediction: Prediction, stream: TextIO) -> None:
    """Writes the prediction to ``stream``, in colour if that is a terminal."""
    console = ReportConsole(stream, _PLAIN_WIDTH)
    for line in _headline(prediction):
        console.print(line)
    for table in _stage_tables(prediction, console):
        console.print(table)
    console.print(_breakdown_table(prediction))
    for warning in in_brief(prediction.warnings):
        console.print(Text(f"! {warning}", style="yellow"))
    provenance = prediction.provenance
    console.print(Text(f"checkpoint {provenance['checkpoint']}, corpus {provenance['corpus'][:12]}", style="dim"))


class ReportConsole(Console):
    """Writes reports to a stream; rich's own console ends the process when the reader goes away."""

    def __init__(self, stream: TextIO, plain_width: int) -> None:
        width = None if stream.isatty() else plain_width
        super().__init__(file=stream, width=width, highlight=False, soft_wrap=False)
        self._plain_width = plain_width

    def fits(self, table: Table) -> bool:
        """Whether nothing of a table would be cut."""
        unlimited = self.options.update(max_width=self._plain_width)
        return self.measure(table, options=unlimited).maximum <= self.width

    def print_columns(self, table_of: Callable[[Sequence[str]], Table], *groups: Sequence[str]) -> None:
        """All columns in one table; where a terminal is too narrow, each group in as many as it takes to cut none."""
        whole = [name for group in groups for name in group]
        tables = (
            [whole]
            if self.fits(table_of(whole))
            else [part for group in groups for part in self._parts(table_of, group)]
        )
        for columns in tables:
            self.print(table_of(columns))

    def _parts(self, table_of: Callable[[Sequence[str]], Table], columns: Sequence[str]) -> Iterator[Sequence[str]]:
        taken: list[str] = []
        for name in columns:
            if taken and not self.fits(table_of([*taken, name])):
                yield taken
                taken = []
            taken = [*taken, name]
        yield taken

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that rich is handling


def seconds_text(seconds: float) -> str:
    """Three significant digits in the unit that suits them."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            value = seconds / scale
            return f"{_three_digits(value) if value >= 100 else f'{value:#.3g}'} {unit}"
    return "0" if seconds <= 0 else f"{seconds * 1e9:.3g} ns"


def quantity_text(value: float) -> str:
    """A count with its decimal prefix: 70.6 B."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{_three_digits(value / scale)} {unit}"
    return f"{value:g}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def precision_text(policy: PrecisionPolicy) -> str:
    """The preset and what of its GEMM formats the job changed: ``fp8_mixed with linear fp8_current``."""
    if policy.preset is None:
        return f"{policy.label} (compute {policy.compute}, linear {policy.linear})"
    preset = PrecisionPolicy.model_validate(policy.preset)
    changed = [key for key in ("compute", "linear") if getattr(policy, key) != getattr(preset, key)]
    words = [f"{key} {getattr(policy, key)}" for key in changed]
    words += [f"{len(policy.overrides)} module override{'s' if len(policy.overrides) > 1 else ''}"] * bool(
        policy.overrides
    )
    return f"{policy.preset} with {', '.join(words)}" if words else policy.preset


def layout_text(prediction: Prediction) -> str:
    """How the job is spread: ``TP4 PP8 DP2 CP1 EP1, interleaved of 128 microbatches, sharding zero1``."""
    plan, count = prediction.job.parallel, prediction.num_microbatches
    return (
        f"TP{plan.tensor} PP{plan.pipeline} DP{prediction.data_parallel} CP{plan.context} EP{plan.expert}, "
        f"{plan.schedule or '1f1b'} of {count:,} microbatch{'es' if count != 1 else ''}, "
        f"sharding {plan.sharding or 'none'}"
    )


def lengths_text(job: TrainingJob) -> str:
    """Tokens of one sequence: ``8,192``, or ``512 + 128`` of an encoder-decoder."""
    target = f" + {job.batch.target_seq_length:,}" if job.model.architecture == "encoder_decoder" else ""
    return f"{job.batch.seq_length:,}{target}"


def _headline(prediction: Prediction) -> list[Text]:
    job, gpus = prediction.job, prediction.job.cluster.num_gpus
    name = job.name or job.model.name or "job"
    lines = [
        Text(f"{name}: {seconds_text(prediction.iteration_time_s)} per iteration", "bold"),
        Text(
            f"{prediction.interval:.0%} interval {seconds_text(prediction.iteration_time_low_s)} to "
            f"{seconds_text(prediction.iteration_time_high_s)}"
        ),
        Text(
            f"{quantity_text(num_parameters(job.model))} parameters, {gpus} x {job.cluster.gpu.name}, "
            f"precision {precision_text(job.precision)}"
        ),
        Text(layout_text(prediction)),
        Text(
            f"{prediction.tokens_per_iteration:,} tokens per step ({job.batch.global_batch_size:,} sequences of "
            f"{lengths_text(job)}), {prediction.tokens_per_s:,.0f} tokens/s, "
            f"{prediction.tokens_per_s / gpus:,.0f} per GPU"
        ),
        Text(
            f"{prediction.model_flops_per_s_per_gpu / 1e12:,.1f} TFLOP/s per GPU, MFU {prediction.mfu:.1%} "
            f"({prediction.mfu_convention})"
        ),
    ]
    total = prediction.total
    if total:
        cost = f", {total.usd:,.0f} USD" if total.usd is not None else ""
        lines.append(Text(f"{total.steps:,} steps: {total.hours:,.1f} h, {total.gpu_hours:,.0f} GPU hours{cost}"))
    return lines


def _stage_tables(prediction: Prediction, console: ReportConsole) -> list[Table]:
    """One table, or one for each span of time where a terminal is too narrow for it."""
    whole = _stage_table(prediction, ("layers", *_PER_MICROBATCH, *_PER_ITERATION))
    whole.caption = "forward, backward and recompute per microbatch; the rest per iteration"
    if console.fits(whole):
        return [whole]
    halves = _stage_table(prediction, _PER_ITERATION), _stage_table(prediction, ("layers", *_PER_MICROBATCH))
    halves[0].caption, halves[1].caption = "per iteration", "per microbatch"
    return list(halves)


def _stage_table(prediction: Prediction, columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Pipeline stages", title_justify="left", pad_edge=False)
    table.caption_justify = "left"
    for name in ("stage", *columns):
        table.add_column(name, justify="right")
    for stage in prediction.stages:
        cells = {
            "layers": str(len(stage.layers)),
            "forward": seconds_text(stage.forward_s),
            "backward": seconds_text(stage.backward_s),
            "recompute": seconds_text(stage.recompute_s),
            "exposed comm": seconds_text(stage.communication_exposed_s),
            "optimizer": seconds_text(stage.optimizer_s),
            "total": seconds_text(stage.total_s),
            "bubble": seconds_text(stage.bubble_s),
            "memory": f"{stage.peak_memory_bytes / 1e9:.1f} GB",
        }
        table.add_row(str(stage.stage), *(cells[name] for name in columns))
    return table


def _breakdown_table(prediction: Prediction) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Critical path", title_justify="left", pad_edge=False)
    table.add_column("part")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    whole = prediction.iteration_time_s
    parts = dict(prediction.breakdown.by_kind)
    exposed = prediction.breakdown.exposed_communication
    parts |= {f"{axis} communication (exposed)": seconds for axis, seconds in exposed.items()}
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        if seconds > 0:
            table.add_row(name, seconds_text(seconds), f"{seconds / whole:.1%}")
    return table
