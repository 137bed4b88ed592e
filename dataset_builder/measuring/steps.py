"""Whole training steps as rows of the runs table: warmed up, plans interleaved, medians over rounds.

The steps of all plans of one job alternate (A B A B ...), so that a drift of the machine is the same for each. A row
is written only when it can be vouched for: the loss is finite, the median is known, no clock was throttled.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from dataset_builder.measuring.kernels import RealKernels
from dataset_builder.measuring.machine import state, throttling
from dataset_builder.measuring.plan import StepPlan
from dataset_builder.measuring.table import LICENSE, SOURCE_ID, Cell, MeasurementTable
from dataset_builder.measuring.timing import Timing, summary
from dataset_builder.measuring.trainer import StepSample, Trainer
from dataset_builder.measuring.world import World

_WARM_UPS = 2


@dataclass(frozen=True)
class StepSettings:
    """``rounds``: how often each plan's step is timed; more while a median is not known to ``most_uncertainty``.

    ``budget_s`` ends them, but never under five.
    """

    rounds: int
    budget_s: float
    most_uncertainty: float


LEAST_ROUNDS = 5


def measure_steps(plans: Sequence[StepPlan], world: World, table: MeasurementTable | None, limits: StepSettings) -> int:
    """Measures plans side by side and writes a row for each (``table`` on the first rank only); returns how many."""
    missing = [plan for plan in plans if not _is_known(plan, world, table)]
    if not missing:
        world.say(f"{plans[0].name}: already measured")
        return 0
    samples: list[_Measured] = []
    with contextlib.suppress(*([torch.OutOfMemoryError] if world.size == 1 else [])):  # other ranks would not know
        samples = _side_by_side(missing, world, limits)
    gc.collect()
    if world.machine.is_gpu:
        torch.cuda.empty_cache()
    if samples:
        return sum(_write(plan, own, world, table, limits) for plan, own in zip(missing, samples, strict=True))
    if len(missing) > 1:
        world.say(f"{missing[0].name}: the precisions do not fit in memory together and are measured one by one")
        return sum(measure_steps([plan], world, table, limits) for plan in missing)
    world.say(f"{missing[0].name} {missing[0].row['precision']}: left out, it does not fit in memory")
    return 0


def _side_by_side(plans: Sequence[StepPlan], world: World, limits: StepSettings) -> list[_Measured]:
    kernels = RealKernels(world.machine.device, {})
    try:
        return _rounds([Trainer(plan, world) for plan in plans], world, kernels, limits)
    finally:
        kernels.close()


def _is_known(plan: StepPlan, world: World, table: MeasurementTable | None) -> bool:
    known = table is not None and run_id(plan, world) in table.known
    return bool(world.agreed(float(known)))


def run_id(plan: StepPlan, world: World) -> str:
    """The same for the same job on the same machine and library versions."""
    text = json.dumps([plan.row, world.machine.name, world.machine.versions], sort_keys=True)
    return f"benchmark-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class _Measured:
    """The steps of one plan: of the slowest rank by step, and the largest memory of any rank."""

    steps: list[StepSample]
    stage_s: list[list[float]]  # of each rank: median forward, backward, optimizer seconds
    peak_bytes: float
    in_turn: int  # plans that were measured in turn, this one included


def _rounds(trainers: Sequence[Trainer], world: World, kernels: RealKernels, limits: StepSettings) -> list[_Measured]:
    def run(trainer: Trainer) -> StepSample:
        kernels.groups = trainer.groups
        world.wait()
        return trainer.step(kernels)

    peaks = []
    for trainer in trainers:
        if world.machine.is_gpu:
            torch.cuda.reset_peak_memory_stats(world.machine.device)
        for _ in range(_WARM_UPS):
            warm = run(trainer)
        peaks.append(float(torch.cuda.max_memory_allocated(world.machine.device)) if world.machine.is_gpu else 0.0)
    first = [run(trainer) for trainer in trainers]
    round_s = world.agreed(max(sum(sample.step_s for sample in first), warm.step_s))
    affordable = max(LEAST_ROUNDS, int(limits.budget_s / round_s))
    samples: list[list[StepSample]] = [[] for _ in trainers]
    while len(samples[0]) < affordable:
        for number, trainer in enumerate(trainers):
            samples[number].append(run(trainer))
        if len(samples[0]) >= limits.rounds and _are_known(samples, world, limits):
            break
    return [_collected(own, peak, len(trainers), world) for own, peak in zip(samples, peaks, strict=True)]


def _are_known(samples: Sequence[Sequence[StepSample]], world: World, limits: StepSettings) -> bool:
    """Whether the medians of all plans are; the same on every rank."""
    slowest = [world.slowest([sample.step_s for sample in own]) for own in samples]
    return all(_timing(steps_s).uncertainty <= limits.most_uncertainty for steps_s in slowest)


def _timing(steps_s: Sequence[float]) -> Timing:
    """Each step is a visit: the other plans' lie between."""
    return summary([[seconds] for seconds in steps_s], "median of steps, slowest rank")


def _collected(samples: list[StepSample], peak_bytes: float, in_turn: int, world: World) -> _Measured:
    slowest = world.slowest([sample.step_s for sample in samples])
    losses = world.slowest([sample.loss if math.isfinite(sample.loss) else math.inf for sample in samples])
    phases = [statistics.median(getattr(s, key) for s in samples) for key in ("forward_s", "backward_s", "optimizer_s")]
    each = [world.each(seconds) for seconds in phases]
    steps = [
        StepSample(step_s, sample.forward_s, sample.backward_s, sample.optimizer_s, loss)
        for step_s, sample, loss in zip(slowest, samples, losses, strict=True)
    ]
    return _Measured(steps, [list(rank) for rank in zip(*each, strict=True)], world.slowest([peak_bytes])[0], in_turn)


def refusal(timing: Timing, losses: Sequence[float], throttled: str, most_uncertainty: float) -> str:
    """Why a row is not written; empty when it can be vouched for."""
    if not all(math.isfinite(loss) for loss in losses):
        return "the loss is not finite"
    if timing.uncertainty > most_uncertainty:
        return f"the median step is known to {timing.uncertainty:.1%}, worse than {most_uncertainty:.0%}"
    return f"the clock was throttled: {throttled}" if throttled else ""


def _write(
    plan: StepPlan, measured: _Measured, world: World, table: MeasurementTable | None, limits: StepSettings
) -> int:
    timing = _timing([sample.step_s for sample in measured.steps])
    facts = state(world.machine)
    losses = [sample.loss for sample in measured.steps]
    reason = refusal(timing, losses, throttling(facts), limits.most_uncertainty)
    label = f"{plan.name} {plan.row['precision']}: {timing.median_s:.4g} s within {timing.uncertainty:.1%}"
    if reason:
        world.say(f"{label}: not written, {reason}")
        return 0
    world.say(label)
    if table is not None:
        table.append(_row(plan, measured, world, timing, facts))
    return 1


def provenance(plan: StepPlan, world: World, facts: dict[str, str]) -> dict[str, Cell]:
    """Where a row of this plan comes from; ``facts``: the machine's state."""
    notes = [str(plan.row["notes"]), f"device={world.machine.name}", world.machine.versions]
    notes += [f"{key.rpartition('.')[2]}={value}" for key, value in facts.items() if "throttle" not in key]
    return {
        "run_id": run_id(plan, world),
        "source_id": SOURCE_ID,
        "source": "dataset_builder.benchmark",
        "source_date": f"{datetime.now(UTC):%Y-%m-%d}",
        "license": LICENSE,
        "framework_version": torch.__version__,
        "notes": "; ".join(notes),
    }


def _row(plan: StepPlan, measured: _Measured, world: World, timing: Timing, facts: dict[str, str]) -> dict[str, Cell]:
    phases = zip(("forward_s", "backward_s", "optimizer_s"), zip(*measured.stage_s, strict=True), strict=True)
    label_info = [timing.scatter, f"steps={timing.count}"]
    label_info += [f"rank_{key}={'|'.join(f'{seconds:.5g}' for seconds in ranks)}" for key, ranks in phases]
    tokens_per_s = plan.tokens / timing.median_s / plan.num_ranks
    return {
        **plan.row,
        **provenance(plan, world, facts),
        "iter_time_s": timing.median_s,
        "tokens_per_s_per_gpu": tokens_per_s,
        "samples_per_s": plan.sequences / timing.median_s,
        "peak_mem_gb": measured.peak_bytes / 1e9 if measured.peak_bytes else None,
        "measured_field": "iter_time_s",
        "derivation": f"{timing.how}; {measured.in_turn} precisions in turn",
        "label_info": "; ".join(label_info),
    }
