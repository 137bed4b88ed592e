"""Plans as text for people: what was searched, the ranking, how to repeat the best, what was assumed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.table import Table
from rich.text import Text

from dataset_builder.job.errors import CannotRunError
from gnn_predictor.report.table import ReportConsole, seconds_text
from gnn_predictor.search import Plan, Plans

_PLAIN_WIDTH = 1000  # the table is as wide as its content when piped
_LEAST_SHARE = 0.03  # of the iteration, to be named among what limits a plan
_HEADINGS = {
    "parallel.tensor": "tensor", "parallel.pipeline": "pipeline", "parallel.virtual_pipeline": "chunks",
    "parallel.context": "context", "parallel.expert": "expert", "parallel.sharding": "sharding",
    "batch.micro_batch_size": "micro batch", "parallel.recompute": "recompute",
}  # fmt: skip
_ALWAYS = ("parallel.tensor", "parallel.pipeline", "batch.micro_batch_size")
_LAYERS = "parallel.layers_per_stage"
_CAPTION = (
    "memory: of the fullest stage; chunks: virtual_pipeline; *: uneven layers_per_stage; limits: share of the time"
)


def print_plans(plans: Plans, source: str, stream: TextIO) -> None:
    """Writes the ranking to ``stream``; ``source`` is the job file, to be named in a command."""
    console = ReportConsole(stream, _PLAIN_WIDTH)
    job = plans.spaces[0].job
    console.print(Text(f"{job.name or job.model.name or 'job'}: plans for {job.cluster.num_gpus:,} GPUs", "bold"))
    console.print(Text(f"{plans.num_possible:,} layouts, {plans.num_evaluated:,} of them run and were predicted"))
    for reason, count in plans.pruned.items():
        console.print(Text(f"  {count:>9,}  {reason}", "dim"))
    console.print_columns(lambda columns: _table(plans, columns), *_groups(plans.plans))
    console.print(Text(_as_given(plans)))
    console.print(Text(_CAPTION, "dim italic"))
    settings = " ".join(f"--set {key}={_argument(value)}" for key, value in plans.plans[0].settings.items())
    console.print(Text(f"the first in full: python -m gnn_predictor.infer {source} {settings}"), soft_wrap=True)
    for line in _warnings(plans.plans):
        console.print(Text(f"! {line}", "yellow"), soft_wrap=not console.is_terminal)


def _groups(plans: tuple[Plan, ...]) -> tuple[Sequence[str], ...]:
    """What the layout is, what it gives, and what holds it back."""
    return (
        [*_columns(plans), "data"],
        ["time", "interval", "memory", "tokens/s", "MFU", _cost_heading(plans[0])],
        ["limits"],
    )


def _table(plans: Plans, columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="right")
    for name in columns:
        table.add_column(_HEADINGS.get(name, name), justify="left" if name == "limits" else "right")
    for rank, plan in enumerate(plans.plans, start=1):
        prediction = plan.prediction
        low, high = prediction.iteration_time_low_s, prediction.iteration_time_high_s
        cells = {key: _cell(key, plan) for key in columns if key in plan.settings} | {
            "data": str(prediction.data_parallel),
            "time": seconds_text(prediction.iteration_time_s),
            "interval": f"{seconds_text(low)} - {seconds_text(high)}",
            "memory": f"{plan.peak_memory_bytes / 1e9:.1f} GB",
            "tokens/s": f"{prediction.tokens_per_s:,.0f}",
            "MFU": f"{prediction.mfu:.1%}",
            _cost_heading(plan): _cost(plan),
            "limits": ", ".join(f"{name} {share:.0%}" for name, share in plan.limits.items() if share >= _LEAST_SHARE),
        }
        table.add_row(str(rank), *(cells[name] for name in columns))
    return table


def _as_given(plans: Plans) -> str:
    given, best = plans.given, plans.plans[0].prediction
    if isinstance(given, CannotRunError):
        return f"the job as it is given cannot run: {given.reasons[0]}"
    ratio = given.iteration_time_s / best.iteration_time_s
    return f"the job as it is given: {seconds_text(given.iteration_time_s)}, {ratio:.2f}x the first"


def _columns(plans: tuple[Plan, ...]) -> list[str]:
    """Layout keys that tell something: the usual ones, and those that are not 1 (or none) everywhere."""
    keys = dict.fromkeys(key for plan in plans for key in plan.settings if key not in (_LAYERS, "parallel.data"))
    return [key for key in keys if key in _ALWAYS or any(plan.settings.get(key) not in (1, None) for plan in plans)]


def _cell(key: str, plan: Plan) -> str:
    mark = "*" if key == "parallel.pipeline" and plan.prediction.job.parallel.layers_per_stage else ""
    value = plan.settings[key]
    return (value if isinstance(value, str) else json.dumps(value)) + mark


def _cost_heading(plan: Plan) -> str:
    if plan.prediction.total is not None:
        return "training GPU h" if plan.prediction.total.usd is None else "training $"
    return "GPU h/B tokens" if plan.usd_per_billion_tokens is None else "$/B tokens"


def _cost(plan: Plan) -> str:
    total = plan.prediction.total
    if total is not None:
        return f"{total.gpu_hours if total.usd is None else total.usd:,.0f}"
    usd = plan.usd_per_billion_tokens
    return f"{plan.gpu_hours_per_billion_tokens if usd is None else usd:,.1f}"


def _argument(value: Any) -> str:
    """A value as a shell takes it."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return f"'{text}'" if isinstance(value, Mapping | list) else text


def _warnings(plans: tuple[Plan, ...]) -> Iterator[str]:
    """What holds for all plans once, anything else after the ranks that it is about."""
    about: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans, start=1):
        for line in plan.prediction.warnings:
            about.setdefault(line, []).append(rank)
    for line, ranks in about.items():
        yield line if len(ranks) == len(plans) else f"plan {', '.join(map(str, ranks))}: {line}"
