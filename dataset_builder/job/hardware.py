"""Device and link facts: the catalogue in ``hardware.yaml`` (each entry with its source), or a job's own specification.

Peaks are dense (never the 2:4 sparse column), in FLOP/s; memory in bytes; bandwidth in bytes/s and per direction.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from dataset_builder.job.values import Count, Frozen, in_unit

Positive = Annotated[float, Field(gt=0)]
# Far below the slowest CPU core and the slowest network: less is a figure in GB, TFLOP/s or microseconds.
FlopsPerS = Annotated[float, Field(gt=0), in_unit("FLOP/s", "989e12", least=1e9)]
MemoryBytes = Annotated[float, Field(gt=0), in_unit("bytes", "80e9", least=1e8)]
MemoryBytesPerS = Annotated[float, Field(gt=0), in_unit("bytes/s", "3.35e12", least=1e8)]
CacheBytes = Annotated[float, Field(gt=0), in_unit("bytes", "50e6", least=1e3)]
Hertz = Annotated[float, Field(gt=0), in_unit("Hz", "1.5e9", least=1e6)]
LinkBytesPerS = Annotated[float, Field(gt=0), in_unit("bytes/s in one direction", "50e9", least=1e6)]
Latency = Annotated[float, Field(ge=0), in_unit("seconds", "4e-6", most=1.0)]
PeakFormat = Literal[
    "fp64", "fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4", "int8"
]  # fmt: skip


class DeviceSpec(Frozen):
    """One accelerator as a training process sees it.

    ``peak_flops_per_s`` lists the formats the device has hardware for; ``fp32`` is the full-precision rate (CUDA cores,
    or AMD's fp32 matrix cores), never TF32. ``l2_bytes`` is the last cache level before HBM. ``intra_node`` and
    ``inter_node`` name the links such a device usually has.
    """

    name: str = "own device"
    vendor: Literal["nvidia", "amd", "intel", "cpu", "other"] = "other"
    architecture: str = "unknown"
    compute_capability: float = 0.0
    peak_flops_per_s: dict[PeakFormat, FlopsPerS]
    hbm_bytes: MemoryBytes
    hbm_bytes_per_s: MemoryBytesPerS
    l2_bytes: CacheBytes = 40e6
    num_sms: Count = 100
    clock_hz: Hertz = 1.5e9
    power_w: Positive = 400.0
    intra_node: str | None = None
    inter_node: str | None = None
    source: str = "job file"

    @model_validator(mode="after")
    def _has_fp32(self) -> DeviceSpec:
        if "fp32" not in self.peak_flops_per_s:
            raise ValueError("peak_flops_per_s.fp32: missing; expected a dense peak in FLOP/s, e.g. 67e12")
        return self

    def __hash__(self) -> int:
        return hash((self.name, self.hbm_bytes, self.hbm_bytes_per_s))  # a mapping among the fields has none

    @field_validator("intra_node", "inter_node")
    @classmethod
    def _links_are_known(cls, value: str | None) -> str | None:
        return _known_link(value)

    def supports(self, fmt: str) -> bool:
        """Whether the device has hardware for this format (tf32 is fp32 on devices without it, so not supported)."""
        return fmt in self.peak_flops_per_s

    def peak(self, fmt: str) -> float:
        """Dense matrix peak in FLOP/s of ``fmt``; a format without hardware falls back to what would emulate it."""
        peaks: Mapping[str, float] = self.peak_flops_per_s  # type: ignore[assignment]
        own = peaks.get(fmt)
        if own is not None:  # asked of every node of a graph
            return own
        return next((peaks[name] for name in _EMULATED_BY.get(fmt, ()) if name in peaks), peaks["fp32"])


class LinkSpec(Frozen):
    """A link tier: unidirectional bytes/s available to each GPU, and the latency of one message.

    ``domain_size``: GPUs that one such fabric joins (72 for NVL72, 2 for a bridge); ``beyond_domain`` names the link
    that joins more. ``None``: as many as the tier has.
    """

    name: str = "link"
    bytes_per_s_per_gpu: LinkBytesPerS
    latency_s: Latency = 5e-6
    domain_size: Count | None = None
    beyond_domain: str | None = None
    source: str = "job file"

    def __hash__(self) -> int:
        return hash((self.name, self.bytes_per_s_per_gpu))  # nearly all links differ in these

    @field_validator("beyond_domain")
    @classmethod
    def _link_is_known(cls, value: str | None) -> str | None:
        return _known_link(value)


def _known_link(name: str | None) -> str | None:
    """The catalogue's spelling; raises ValueError with the nearest names when there is none."""
    try:
        return name and canonical_link(name)
    except KeyError as error:
        hint = f" (did you mean {error.args[0]}?)" if error.args[0] else ", e.g. nvlink4 or ib-ndr-8x400"
        raise ValueError(f"expected a link of the catalogue{hint}") from None


# A format without hardware is computed in the next wider format that the device has; fp32 is always there.
_EMULATED_BY: dict[str, tuple[str, ...]] = {
    "nvfp4": ("bf16", "fp16"),
    "mxfp8": ("bf16", "fp16"),
    "fp8_e4m3": ("bf16", "fp16"),
    "fp8_e5m2": ("bf16", "fp16"),
}


# What tables say of measured runs; nobody who describes a cluster means it.
_ONLY_IN_TABLES = ("none", "unknown", "nvlink5 (NVL72 domain)", "nvl72")


@functools.cache
def _catalogue() -> dict[str, dict[str, Any]]:
    text = resources.files("dataset_builder.job").joinpath("hardware.yaml").read_text(encoding="utf-8")
    data: dict[str, dict[str, Any]] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return data


def device_names() -> tuple[str, ...]:
    """The catalogue's devices."""
    return tuple(_catalogue()["devices"])


def link_names() -> tuple[str, ...]:
    """The catalogue's links."""
    return tuple(_catalogue()["links"])


def canonical_device(name: str) -> str:
    """The catalogue's spelling of a device; KeyError carries the nearest names when there is none."""
    return _canonical(name, "devices", "device_aliases")


def canonical_link(name: str) -> str:
    """The catalogue's spelling of a link; KeyError carries the nearest names when there is none."""
    return _canonical(name, "links", "link_aliases")


@functools.cache
def device(name: str) -> DeviceSpec:
    """A device of the catalogue, by its name in any case or an alias; raises KeyError when there is none."""
    name = canonical_device(name)
    return DeviceSpec(name=name, **_catalogue()["devices"][name])


@functools.cache
def link(name: str, gpus_per_node: int = 8) -> LinkSpec:
    """A link of the catalogue; a node's network cards are shared by its ``gpus_per_node`` GPUs. KeyError: none such."""
    name = canonical_link(name)
    facts = dict(_catalogue()["links"][name])
    per_node = facts.pop("bytes_per_s_per_node", None)
    if per_node is not None:
        facts["bytes_per_s_per_gpu"] = per_node / gpus_per_node
    return LinkSpec(name=name, **facts)


@functools.lru_cache(maxsize=256)
def cell_device(text: str) -> DeviceSpec:
    """The device a table's cell names, or specifies as JSON (as ``cluster.gpu`` of a job may); KeyError: neither."""
    if not text.lstrip().startswith("{"):
        return device(text)
    try:
        return DeviceSpec.model_validate_json(text)
    except ValidationError as error:
        raise KeyError(_first_problem(error)) from None


@functools.lru_cache(maxsize=256)
def cell_link(text: str, gpus_per_node: int = 8) -> LinkSpec:
    """The link a table's cell names, or specifies as JSON; KeyError: neither."""
    if not text.lstrip().startswith("{"):
        return link(text, gpus_per_node)
    try:
        return LinkSpec.model_validate_json(text)
    except ValidationError as error:
        raise KeyError(_first_problem(error)) from None


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'specification'}: {first['msg']}"


def _canonical(name: str, section: str, alias_section: str) -> str:
    names = _catalogue()[section]
    if name in names:
        return name
    key = _folded(name)
    folded = {_folded(known): known for known in names}
    folded |= {_folded(alias): known for alias, known in _catalogue()[alias_section].items()}
    if key in folded:
        return folded[key]
    near = difflib.get_close_matches(key, folded, n=5, cutoff=0.5)
    named = dict.fromkeys(folded[match] for match in near)
    raise KeyError(", ".join(each for each in named if each not in _ONLY_IN_TABLES))


def _folded(name: str) -> str:
    """Lower case without the vendor that drivers put before a name and the marks that tables put behind a guess."""
    plain = re.sub(r"(\?|\(assumed\))$", "", name.strip().lower()).strip()
    return re.sub(r"^((nvidia|amd|intel|tesla|quadro|geforce|instinct)-)+", "", re.sub(r"[\s_-]+", "-", plain))
