"""Timed operators and collectives as rows of the operator table, within a time budget and resumable."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dataset_builder.measuring.collectives import Message, message_times
from dataset_builder.measuring.machine import state, throttling
from dataset_builder.measuring.operators import Case
from dataset_builder.measuring.table import LICENSE, SOURCE_ID, Cell, MeasurementTable
from dataset_builder.measuring.timing import Stopwatch, Timing, summary
from dataset_builder.measuring.world import World


@dataclass(frozen=True)
class OpSettings:
    """Limits of one run, and how the table names the device and the link inside a node.

    ``sample_budget_s``: how long the samples of one case may take, or four times that while badly known.
    """

    budget_s: float
    sample_budget_s: float
    most_uncertainty: float
    gpu: str
    intra_node: str


# Cases are visited in turn, so many at a time: their samples lie seconds apart, and a kill loses no more than these.
_BLOCK = 24
_LEAST_VISITS, _MOST_VISITS = 4, 16


def measure_operators(cases: Iterable[Case], world: World, table: MeasurementTable | None, limits: OpSettings) -> int:
    """Times cases until the budget ends; the first rank writes a row for each that can be vouched for.

    All ranks run the same case at the same time, as in training: they may share memory, power and cores.
    """
    watch = Stopwatch(world.machine.device, world.machine.cache_bytes, limits.sample_budget_s / _LEAST_VISITS)
    deadline, written = time.perf_counter() + limits.budget_s, 0
    for block in _blocks(cases, world, table, limits):
        if world.agreed(deadline - time.perf_counter()) < 0:
            world.say(f"operators: the budget of {limits.budget_s:.0f} s is used up; run again to go on")
            break
        timed = _in_turn(block, world, watch, limits)
        throttled = throttling(state(world.machine)) if world.machine.is_gpu else ""
        for case, timing in timed:
            if reason := _refusal(timing, throttled, limits):
                world.say(f"{case.key}: not written, {reason}")
                continue
            written += 1
            if table is not None:
                table.append({"op_id": _identity(case.key, world, limits), **case_row(case, timing, world, limits)})
    world.say(f"operators: {written} rows written")
    return written


def _blocks(
    cases: Iterable[Case], world: World, table: MeasurementTable | None, limits: OpSettings
) -> Iterator[list[Case]]:
    """The cases that the first rank's table does not have, in blocks."""

    def is_missing(case: Case) -> bool:
        known = table is not None and _identity(case.key, world, limits) in table.known
        return not world.agreed(float(known))

    missing = filter(is_missing, cases)
    while block := list(itertools.islice(missing, _BLOCK)):
        yield block


def _in_turn(cases: Sequence[Case], world: World, watch: Stopwatch, limits: OpSettings) -> list[tuple[Case, Timing]]:
    """Visits every case until its median is known well enough; returns those that run here."""
    visits: dict[str, list[list[float]]] = {case.key: [] for case in cases}
    timings: dict[str, Timing] = {}
    open_cases = list(cases)
    for number in range(1, _MOST_VISITS + 1):
        for case in open_cases:
            world.wait()
            try:
                samples, how = watch.visit(case.make, case.moved_bytes)
            except (RuntimeError, NotImplementedError) as error:  # no such kernel here, or it does not fit
                world.say(f"{case.key}: left out, {str(error).splitlines()[0][:120]}")
                del visits[case.key]
                if world.machine.is_gpu:
                    torch.cuda.empty_cache()
                continue
            visits[case.key].append(samples)
            if number >= _LEAST_VISITS:
                timings[case.key] = summary(visits[case.key], how)
        open_cases = [case for case in open_cases if case.key in visits]
        if number >= _LEAST_VISITS:
            known = [timings[case.key].uncertainty <= limits.most_uncertainty for case in open_cases]
            open_cases = [case for case, is_known in zip(open_cases, known, strict=True) if not world.agreed(is_known)]
    return [(case, timings[case.key]) for case in cases if case.key in visits]


def case_row(case: Case, timing: Timing, world: World, limits: OpSettings) -> dict[str, Cell]:
    """The columns of a timed case, but for its identity."""
    return case.cells | {
        **_provenance(timing, world, limits),
        "op": case.op,
        "op_detail": case.detail,
        "direction": case.direction,
        "dtype": case.dtype,
        "dtype_out": case.dtype_out,
        "tflops": case.flops / timing.median_s / 1e12 if case.flops else None,
        "gbps": case.moved_bytes / timing.median_s / 1e9,
    }


def measure_collectives(
    messages: Iterable[Message], world: World, table: MeasurementTable | None, limits: OpSettings
) -> int:
    """Times messages over all ranks; the first writes the rows."""
    deadline, written = time.perf_counter() + limits.budget_s, 0
    for message in messages:
        identity = _identity(message.key, world, limits)
        if world.agreed(float(table is not None and identity in table.known)):
            continue
        if world.agreed(deadline - time.perf_counter()) < 0:
            world.say(f"collectives: the budget of {limits.budget_s:.0f} s is used up; run again to go on")
            break
        try:
            timing = message_times(message, world, limits.sample_budget_s)
        except RuntimeError as error:  # the backend has no such collective
            world.say(f"{message.key}: left out, {str(error).splitlines()[0][:120]}")
            continue
        reason = _refusal(timing, "", limits)
        if reason:
            world.say(f"{message.key}: not written, {reason}")
            continue
        written += 1
        if table is not None:
            row: dict[str, Cell] = {
                **_provenance(timing, world, limits),
                "op_id": identity,
                "op": message.kind,
                "op_detail": "NCCL" if world.machine.is_gpu else "gloo",
                "direction": "none",
                "dtype": message.dtype,
                "bytes": message.whole_bytes,
                "num_gpus": world.size,
                "gpus_per_node": world.ranks_per_node,
                "intra_node": limits.intra_node,
                "inter_node": "none" if world.size <= world.ranks_per_node else None,
                "gbps": message.whole_bytes / timing.median_s / 1e9,
            }
            table.append(row)
    world.say(f"collectives: {written} rows written")
    return written


def _identity(key: str, world: World, limits: OpSettings) -> str:
    text = f"{limits.gpu}|{world.machine.name}|{world.machine.versions}|{world.size}|{key}"
    return f"benchmark-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _refusal(timing: Timing, throttled: str, limits: OpSettings) -> str:
    if not math.isfinite(timing.median_s) or timing.median_s <= 0:
        return "no time"
    if timing.uncertainty > limits.most_uncertainty:
        return f"the median is known to {timing.uncertainty:.1%}, worse than {limits.most_uncertainty:.0%}"
    return f"the clock was throttled: {throttled}" if throttled else ""


def _provenance(timing: Timing, world: World, limits: OpSettings) -> dict[str, Cell]:
    machine = world.machine
    return {
        "source_id": SOURCE_ID,
        "source": "dataset_builder.benchmark",
        "license": LICENSE,
        "gpu": limits.gpu,
        "latency_us": timing.median_s * 1e6,
        "stat": f"median of {timing.count}",
        "notes": f"{timing.how}; cold caches; {timing.scatter}; device={machine.name}; {machine.versions}",
    }
