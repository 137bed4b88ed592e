"""Variants side by side as text for people: one row each, why a narrower format does not pay, what was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich import box
from rich.table import Table
from rich.text import Text

from gnn_predictor.compare import LEAST_SHARE_OF_PEAK_GAIN, Comparison, Variant, parts, peak_memory_bytes, value_text
from gnn_predictor.prediction import Prediction
from gnn_predictor.report.table import ReportConsole, seconds_text

_PLAIN_WIDTH = 1000  # the table is as wide as its content; lines of text are never broken when piped
_MOST_NAMES = 4  # of variants before a line that is about them
_ANSWER = ("time", "interval", "speed-up", "tokens/s", "memory", "MFU")
_WHERE = ("GEMM", "attention", "cast, quantise", "communication", "optimizer", "other", "host")
_CAPTION = "communication: exposed, by format; memory: of the fullest stage"


def print_comparison(comparison: Comparison, stream: TextIO) -> None:
    """Writes the comparison to ``stream``: one table, or several where a terminal is too narrow for it."""
    console = ReportConsole(stream, _PLAIN_WIDTH)
    job = comparison.variants[0].job
    console.print(Text(f"{job.name or job.model.name or 'job'}: {len(comparison.variants)} variants", "bold"))
    console.print_columns(lambda columns: _table(comparison, columns), _ANSWER, _WHERE)
    console.print(Text(_CAPTION, "dim italic"))
    for explanation in comparison.explanations:
        console.print(Text(explanation.text))
    if comparison.explanations:
        share = f"{LEAST_SHARE_OF_PEAK_GAIN:.0%}"
        console.print(Text(f"explained: speed-ups below {share} of the gain that the GEMM peak suggests", "dim italic"))
    for line in _warnings(comparison):
        console.print(Text(f"! {line}", "yellow"), soft_wrap=not console.is_terminal)


def _table(comparison: Comparison, columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for key in comparison.variants[0].settings:
        table.add_column(Text(key))
    for name in columns:
        table.add_column(name, justify="right")
    for variant in comparison.variants:
        values = [Text(value_text(value)) for value in variant.settings.values()]
        prediction = variant.prediction
        cells = _cells(comparison, prediction) if prediction else {columns[0]: "cannot run"}
        table.add_row(*values, *(cells.get(name, "") for name in columns))
    return table


def _cells(comparison: Comparison, prediction: Prediction) -> dict[str, str]:
    seconds = {part: seconds_text(value) for part, value in parts(prediction.breakdown).items()}
    messages = prediction.breakdown.exposed_communication_by_dtype.items()
    low, high = prediction.iteration_time_low_s, prediction.iteration_time_high_s
    return {
        "time": seconds_text(prediction.iteration_time_s),
        "interval": f"{seconds_text(low)} - {seconds_text(high)}",
        "speed-up": f"{comparison.speedup(prediction):.2f}x",
        "tokens/s": f"{prediction.tokens_per_s:,.0f}",
        "memory": f"{peak_memory_bytes(prediction) / 1e9:.1f} GB" + ("" if prediction.fits_memory else " !"),
        "MFU": f"{prediction.mfu:.1%}",
        "GEMM": seconds["gemm"],
        "attention": seconds["attention"],
        "cast, quantise": seconds["cast_and_quantize"],
        "communication": "\n".join(f"{dtype} {seconds_text(value)}" for dtype, value in messages if value > 0) or "0",
        "optimizer": seconds["optimizer"],
        "other": seconds["other"],
        "host": seconds["host"],
    }


def _warnings(comparison: Comparison) -> Iterator[str]:
    """Each line once, after the variants that it is about; what holds for all that run comes last, without a name."""
    running = [variant.prediction.warnings for variant in comparison.variants if variant.prediction]
    common = [line for line in running[0] if all(line in lines for lines in running)] if len(running) > 1 else []
    about: dict[str, list[str]] = {}
    for variant in comparison.variants:
        for line in variant.prediction.warnings if variant.prediction else [variant.reason]:
            if line not in common:
                about.setdefault(line, []).append(_settings_text(variant))
    for line, names in about.items():
        more = f"; and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield f"{'; '.join(names[:_MOST_NAMES])}{more}: {line}"
    yield from common


def _settings_text(variant: Variant) -> str:
    return ", ".join(f"{key}={value_text(value)}" for key, value in variant.settings.items())
