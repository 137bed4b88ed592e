"""The machine that measures: its device, versions, state, and its specification as a job's ``cluster`` takes it.

Facts come from torch, the driver's own command line tool and ``/proc``; nothing is assumed. The peaks of a device that
the catalogue does not know are the best products it was seen to compute.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_CPU_L2_BYTES = 2 * 2**20  # where the system does not say
_THROTTLED = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown")


@dataclass(frozen=True)
class Machine:
    """One rank's device. ``cache_bytes``: the last cache level that is the device's own (L2)."""

    name: str
    device: torch.device
    memory_bytes: float
    cache_bytes: float
    num_units: int  # SMs of a GPU, threads a rank computes with on a CPU
    clock_hz: float
    capability: float
    versions: str

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats that it multiplies in hardware; fp16 on CPUs is left out, for few have it."""
        if not self.is_gpu:
            return ("fp32", "bf16")
        if torch.version.hip:
            return ("fp32", "fp16", "bf16")
        limits = (("fp32", 0.0), ("tf32", 8.0), ("fp16", 7.0), ("bf16", 8.0), ("fp8_e4m3", 8.9), ("mxfp8", 10.0))
        return tuple(fmt for fmt, least in limits if self.capability >= least)


def this_machine(local_rank: int) -> Machine:
    """The device of this rank: a GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        facts = torch.cuda.get_device_properties(device)
        return Machine(
            name=torch.cuda.get_device_name(device),
            device=device,
            memory_bytes=float(facts.total_memory),
            cache_bytes=float(getattr(facts, "L2_cache_size", 50e6)),
            num_units=facts.multi_processor_count,
            clock_hz=float(getattr(facts, "clock_rate", 0.0)) * 1e3,
            capability=facts.major + facts.minor / 10,
            versions=_versions(),
        )
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Machine(
        name=_cpu_name(),
        device=torch.device("cpu"),
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / ranks,
        cache_bytes=_cpu_l2_bytes(),
        num_units=torch.get_num_threads(),
        clock_hz=_cpu_mhz() * 1e6,
        capability=0.0,
        versions=_versions(),
    )


def _versions() -> str:
    """Library and driver versions as ``key=value`` notes."""
    parts = {"torch": torch.__version__, "python": platform.python_version(), "kernel": platform.release()}
    if torch.cuda.is_available():
        parts["cuda"] = str(torch.version.cuda or torch.version.hip)
        parts["cudnn"] = str(torch.backends.cudnn.version())
        parts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        parts["driver"] = _smi("driver_version").get("driver_version", "unknown")
    else:
        parts["mkldnn"] = str(int(torch.backends.mkldnn.is_available()))
        parts["threads"] = str(torch.get_num_threads())
    return "; ".join(f"{key}={value}" for key, value in parts.items())


def state(machine: Machine) -> dict[str, str]:
    """Clocks, temperature and reasons for throttling of a GPU, the load average of a CPU; empty where unknown."""
    if machine.is_gpu:
        throttled = [f"clocks_throttle_reasons.{reason}" for reason in _THROTTLED]
        return _smi("clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw", *throttled)
    try:
        return {"load": Path("/proc/loadavg").read_text(encoding="utf-8").split()[0]}
    except OSError:
        return {}


def throttling(facts: Mapping[str, str]) -> str:
    """Why the device ran slower than it can, in words of its driver; empty when it did not."""
    reasons = [key.rpartition(".")[2] for key, value in facts.items() if "throttle" in key and value == "Active"]
    return ", ".join(reasons)


def _smi(*fields: str) -> dict[str, str]:
    """What ``nvidia-smi`` says of the current device; empty where there is no such tool."""
    index = str(torch.cuda.current_device()) if torch.cuda.is_available() else "0"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[int(index)] if int(index) < len(visible) and visible[0] else index
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", f"--id={name}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (cell.strip() for cell in answer.strip().split(",")), strict=False))


def _cpu_facts(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _cpu_name() -> str:
    return _cpu_facts("model name") or platform.processor() or platform.machine()


def _cpu_mhz() -> float:
    try:
        return float(_cpu_facts("cpu MHz"))
    except ValueError:
        return 2000.0


def _cpu_l2_bytes() -> float:
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text(encoding="utf-8").strip()
        return float(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]]
    except (OSError, ValueError, KeyError):
        return float(_CPU_L2_BYTES)


def specification(machine: Machine, peaks: Mapping[str, float], bytes_per_s: float) -> dict[str, object]:
    """The device as ``cluster.gpu`` of a job: peaks in FLOP/s by format and memory bandwidth as they were measured."""
    return {
        "name": machine.name,
        "vendor": "nvidia" if machine.is_gpu and not torch.version.hip else "amd" if machine.is_gpu else "cpu",
        "architecture": "own" if machine.is_gpu else platform.machine(),
        "compute_capability": machine.capability,
        "peak_flops_per_s": {fmt: float(f"{peak:.4g}") for fmt, peak in peaks.items()},
        "hbm_bytes": machine.memory_bytes,
        "hbm_bytes_per_s": float(f"{bytes_per_s:.4g}"),
        "l2_bytes": machine.cache_bytes,
        "num_sms": machine.num_units,
        "clock_hz": machine.clock_hz or 1.5e9,
        "source": f"measured: {machine.versions}",
    }


def cell(value: object) -> str:
    """A device or link as a table's cell: its name, or its specification as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
