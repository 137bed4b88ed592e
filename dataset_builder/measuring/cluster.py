"""The specification of the cluster at hand as a job's ``cluster``: peaks and bandwidths as they were measured.

For devices that the catalogue does not know. Peaks are the fastest products of a few sizes, all ranks at work at once;
memory bandwidth is that of a copy, the link's that of an all-reduce by the ring formula, its latency a tiny one's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from dataset_builder.job.errors import JobError
from dataset_builder.measuring.collectives import Message, message_times
from dataset_builder.measuring.machine import specification
from dataset_builder.measuring.operators import product
from dataset_builder.measuring.timing import Stopwatch, Work
from dataset_builder.measuring.world import World

_PRODUCT_SIZES = ((512, 1024, 1024), (1024, 2048, 2048), (4096, 8192, 8192))
_SMALL_SIZES = 2  # of them, on a CPU
_COPIED_BYTES = {"cuda": 256 * 2**20, "cpu": 8 * 2**20}  # activations of CPU jobs stay in the shared cache
_MESSAGE_BYTES, _TINY_BYTES = 16 * 2**20, 1024


def measured_cluster(world: World, visit_s: float) -> dict[str, object]:
    """``gpu``, ``num_nodes``, ``gpus_per_node`` and ``intra_node`` of a job's ``cluster``."""
    machine = world.machine
    watch = Stopwatch(machine.device, machine.cache_bytes, visit_s)
    sizes = _PRODUCT_SIZES if machine.is_gpu else _PRODUCT_SIZES[:_SMALL_SIZES]
    peaks: dict[str, float] = {}
    for fmt in machine.formats:
        for m, n, k in sizes:
            case = product(machine.device, fmt, m, n, k)
            world.wait()
            seconds = min(world.each(min(watch.visit(case.make, case.moved_bytes)[0])))
            peaks[fmt] = max(peaks.get(fmt, 0.0), case.flops / seconds)
        world.say(f"cluster: {fmt} {peaks[fmt] / 1e12:.4g} TFLOP/s")
    if "fp8_e4m3" in peaks:
        peaks["fp8_e5m2"] = peaks["fp8_e4m3"]
    world.wait()
    copied_bytes = _COPIED_BYTES[machine.device.type]
    copied = min(world.each(min(watch.visit(_copy(machine.device, copied_bytes), copied_bytes)[0])))
    cluster: dict[str, object] = {
        "gpu": specification(machine, peaks, copied_bytes / copied),
        "num_nodes": world.size // world.ranks_per_node,
        "gpus_per_node": world.ranks_per_node,
    }
    if world.size > 1:
        cluster["intra_node"] = _link(world, visit_s)
    return cluster


def _copy(device: torch.device, moved_bytes: int) -> Callable[[], Work]:
    def make() -> Work:
        source = torch.ones(moved_bytes // 8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return make


def _link(world: World, visit_s: float) -> dict[str, object]:
    share = 2 * (world.size - 1) / world.size
    large = message_times(Message("all_reduce", "fp32", _MESSAGE_BYTES // 4), world, visit_s).least_s
    tiny = message_times(Message("all_reduce", "fp32", _TINY_BYTES // 4), world, visit_s).median_s
    return {
        "name": "nccl" if world.machine.is_gpu else "gloo",
        "bytes_per_s_per_gpu": float(f"{share * _MESSAGE_BYTES / large:.4g}"),
        "latency_s": float(f"{tiny / (2 * (world.size - 1)):.3g}"),
        "source": "measured: all-reduce of 16 MiB and of 1 KiB",
    }


def write_cluster(cluster: dict[str, object], path: Path) -> None:
    """Writes the file, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(cluster, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def read_cluster(path: Path) -> dict[str, object]:
    """What :func:`write_cluster` wrote; raises JobError."""
    try:
        cluster: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
        if "gpu" not in cluster:
            raise ValueError("no gpu")
    except (OSError, ValueError, TypeError) as error:
        raise JobError([f"no measured cluster ({error})"], str(path)) from None
    return cluster
