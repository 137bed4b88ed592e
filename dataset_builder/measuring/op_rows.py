"""Timed operators and collectives as rows of the operator table, within a time budget and resumable."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dataset_builder.measuring.collectives import Message, message_times
from dataset_builder.measuring.machine import state, throttling
from dataset_builder.measuring.operators import Case
from dataset_builder.measuring.table import LICENSE, SOURCE_ID, Cell, MeasurementTable
from dataset_builder.measuring.timing import Stopwatch, Timing
from dataset_builder.measuring.world import World


@dataclass(frozen=True)
class OpSettings:
    """Limits of one run, and how the table names the device and the link inside a node."""

    budget_s: float
    sample_budget_s: float
    most_spread: float
    gpu: str
    intra_node: str


def measure_operators(cases: Iterable[Case], world: World, table: MeasurementTable | None, limits: OpSettings) -> int:
    """Times cases until the budget ends; the first rank writes a row for each that can be vouched for.

    All ranks run the same case at the same time, as in training: they may share memory, power and cores.
    """
    machine = world.machine
    watch = Stopwatch(machine.device, machine.cache_bytes, limits.sample_budget_s)
    deadline, written = time.perf_counter() + limits.budget_s, 0
    for case in cases:
        identity = _identity(case.key, world, limits)
        if world.agreed(float(table is not None and identity in table.known)):
            continue
        if world.agreed(deadline - time.perf_counter()) < 0:
            world.say(f"operators: the budget of {limits.budget_s:.0f} s is used up; run again to go on")
            break
        world.wait()
        try:
            timing = watch.measure(case.make, case.moved_bytes)
        except (RuntimeError, NotImplementedError) as error:  # no such kernel here, or it does not fit
            world.say(f"{case.key}: left out, {str(error).splitlines()[0][:120]}")
            if machine.is_gpu:
                torch.cuda.empty_cache()
            continue
        reason = _refusal(timing, throttling(state(machine)) if machine.is_gpu else "", limits)
        if reason:
            world.say(f"{case.key}: not written, {reason}")
            continue
        written += 1
        if table is not None:
            table.append({"op_id": identity, **case_row(case, timing, world, limits)})
    world.say(f"operators: {written} rows written")
    return written


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
    if timing.spread > limits.most_spread:
        return f"samples scatter by {timing.spread:.1%} (interquartile range), more than {limits.most_spread:.0%}"
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
        "notes": f"{timing.how}; cold caches; spread={timing.spread:.4f}; device={machine.name}; {machine.versions}",
    }
