"""Device and link facts: the catalogue in ``hardware.yaml`` (each entry with its source), or a job's own specification.

Peaks are dense (never the 2:4 sparse column), in FLOP/s; memory in bytes; bandwidth in bytes/s and per direction.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from dataset_builder.job.values import Count, Frozen

Positive = Annotated[float, Field(gt=0)]


class DeviceSpec(Frozen):
    """One accelerator as a training process sees it."""

    name: str
    vendor: Literal["nvidia", "amd", "intel", "cpu", "other"] = "other"
    architecture: str = "unknown"
    compute_capability: float = 0.0
    peak_flops_per_s: dict[str, Positive]
    hbm_bytes: Positive
    hbm_bytes_per_s: Positive
    l2_bytes: Positive = 40e6
    num_sms: Count = 100
    clock_hz: Positive = 1.5e9
    power_w: Positive = 400.0
    intra_node: str | None = None
    source: str = "job file"

    def supports(self, fmt: str) -> bool:
        """Whether the device has hardware for this format (tf32 is fp32 on devices without it, so not supported)."""
        return fmt in self.peak_flops_per_s

    def peak(self, fmt: str) -> float:
        """Dense matrix peak in FLOP/s of ``fmt``; a format without hardware falls back to what would emulate it."""
        for candidate in (fmt, *_FALLBACK.get(fmt, ()), "fp32"):
            if candidate in self.peak_flops_per_s:
                return self.peak_flops_per_s[candidate]
        return max(self.peak_flops_per_s.values())


class LinkSpec(Frozen):
    """A link tier: unidirectional bytes/s available to each GPU, and the latency of one message."""

    name: str = "link"
    bytes_per_s_per_gpu: Positive
    latency_s: Annotated[float, Field(ge=0)] = 5e-6
    domain_size: Count | None = None
    source: str = "job file"


_FALLBACK: dict[str, tuple[str, ...]] = {
    "fp8_e5m2": ("fp8_e4m3", "bf16", "fp16"),
    "fp8_e4m3": ("bf16", "fp16"),
    "mxfp8": ("fp8_e4m3", "bf16", "fp16"),
    "nvfp4": ("fp8_e4m3", "bf16", "fp16"),
    "bf16": ("fp16",) if False else (),
    "tf32": (),
}


@functools.cache
def _catalogue() -> dict[str, Any]:
    text = resources.files("dataset_builder.job").joinpath("hardware.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return data


def device_names() -> tuple[str, ...]:
    """The catalogue's devices."""
    return tuple(_catalogue()["devices"])


def link_names() -> tuple[str, ...]:
    """The catalogue's links."""
    return tuple(_catalogue()["links"])


def device(name: str) -> DeviceSpec:
    """A device of the catalogue; raises KeyError when there is none of that name."""
    return DeviceSpec(name=name, **_catalogue()["devices"][name])


def link(name: str) -> LinkSpec:
    """A link of the catalogue; raises KeyError when there is none of that name."""
    return LinkSpec(name=name, **_catalogue()["links"][name])
