"""The catalogue: every entry validates, names its source, and gives dense peaks."""

from typing import Any

import pytest
from pydantic import ValidationError

from dataset_builder.job.hardware import DeviceSpec, device, device_names, link, link_names
from dataset_builder.job.reasons import reasons_of
from dataset_builder.job.schema import ClusterSpec

ISSUE_DEVICES = [
    "V100-SXM2-16GB", "V100-SXM2-32GB", "V100-SXM3-32GB", "V100-PCIe-16GB", "V100-PCIe-32GB", "T4-16GB", "A10-24GB",
    "A30-24GB", "A40-48GB", "A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIe-40GB", "A100-PCIe-80GB", "A800-SXM4-80GB",
    "L4-24GB", "L40S-48GB", "RTX3090-24GB", "RTX4090-24GB", "RTX6000Ada-48GB", "RTX8000-48GB", "H100-SXM5-80GB",
    "H100-PCIe-80GB", "H100-NVL-94GB", "H100-96GB-HBM2e-500W", "H800-SXM5-80GB", "H20-96GB", "H200-SXM5-141GB",
    "H200-NVL-141GB", "GH200-96GB", "B200-SXM6-180GB", "B300-SXM6-288GB", "GB200-186GB", "GB300-288GB",
    "MI250X-64GB(gcd)", "MI250-64GB(gcd)", "MI300X-192GB", "MI325X-256GB", "MI355X-288GB", "MI100-32GB", "MI210-64GB",
    "P100-PCIe-16GB", "MI350X-288GB", "RTXPRO6000-SE-96GB",
]  # fmt: skip
ISSUE_LINKS = [
    "nvlink1", "nvlink2", "nvlink2-nvswitch", "nvlink3", "nvlink4", "nvlink5", "nvlink5-nvl72", "nvl72",
    "nvl72 (assumed)", "pcie", "pcie3", "pcie4", "pcie5", "infinity-fabric", "xgmi", "ib-edr-4x100", "ib-edr-8x100",
    "ib-hdr-4x200", "ib-hdr-8x200", "ib-ndr-1x400", "ib-ndr-8x400", "ib-ndr-8x400?", "ib-xdr-8x800", "opa-4x100",
    "roce-4x100", "roce-8x400", "roce-8x400?", "roce-1600Gbps-per-node", "roce-pollara-8x400", "slingshot11-4x200",
    "efa-4x100", "efa-32x100", "gcp-a3mega-tcpxo-8x200", "nvlink3-pair+pcie4", "nvlink-pair+pcie5", "nvlink4-h800",
    "nvlink5 (NVL72 domain)", "none", "unknown",
]  # fmt: skip


@pytest.mark.parametrize("name", device_names())
def test_every_device_is_valid_and_has_a_source(name: str) -> None:
    spec = device(name)
    assert len(spec.source) > 10
    assert spec.intra_node in link_names()
    assert spec.inter_node in link_names()
    peaks = spec.peak_flops_per_s
    assert peaks["fp32"] == min(peaks.values()), "no format is slower than full precision"
    assert 5 < spec.hbm_bytes / 2**30 < 300
    assert 1e11 < spec.hbm_bytes_per_s < 1e13
    ladder = [peaks[fmt] for fmt in ("tf32", "fp16", "fp8_e4m3", "nvfp4") if fmt in peaks]
    assert ladder == sorted(ladder), "a narrower format is at least as fast"


@pytest.mark.parametrize("name", link_names())
def test_every_link_is_valid_and_has_a_source(name: str) -> None:
    spec = link(name)
    assert len(spec.source) > 10
    assert 1e9 < spec.bytes_per_s_per_gpu <= 1e12
    assert spec.beyond_domain is None or spec.beyond_domain in link_names()


@pytest.mark.parametrize("name", ISSUE_DEVICES)
def test_known_devices_are_there(name: str) -> None:
    assert device(name).name == name


@pytest.mark.parametrize("name", ISSUE_LINKS)
def test_known_links_are_there(name: str) -> None:
    assert link(name).bytes_per_s_per_gpu > 0


@pytest.mark.parametrize(
    ("name", "fmt", "peak"),
    [
        ("V100-SXM2-32GB", "fp16", 125e12), ("V100-SXM2-32GB", "fp32", 15.7e12), ("A100-SXM4-80GB", "bf16", 312e12),
        ("A100-SXM4-80GB", "tf32", 156e12), ("A100-SXM4-80GB", "fp32", 19.5e12), ("H100-SXM5-80GB", "bf16", 989e12),
        ("H100-SXM5-80GB", "fp8_e4m3", 1979e12), ("H200-SXM5-141GB", "bf16", 989e12), ("H20-96GB", "bf16", 148e12),
        ("B200-SXM6-180GB", "bf16", 2250e12), ("B200-SXM6-180GB", "nvfp4", 9000e12), ("GB200-186GB", "bf16", 2500e12),
        ("L40S-48GB", "bf16", 362e12), ("RTX4090-24GB", "bf16", 165e12), ("MI300X-192GB", "bf16", 1307e12),
        ("MI355X-288GB", "fp8_e4m3", 5033e12), ("H100-PCIe-80GB", "bf16", 756e12), ("H100-NVL-94GB", "bf16", 835e12),
        ("H20-96GB", "fp8_e4m3", 296e12), ("L4-24GB", "bf16", 121e12), ("A30-24GB", "bf16", 165e12),
        ("A10G-24GB", "bf16", 70e12), ("MI325X-256GB", "fp8_e4m3", 2615e12), ("B300-SXM6-288GB", "fp8_e4m3", 4500e12),
        ("B300-SXM6-288GB", "nvfp4", 13500e12), ("GB300-288GB", "fp8_e4m3", 5000e12),
        ("GB300-288GB", "nvfp4", 15000e12),
    ],
)  # fmt: skip
def test_peaks_are_the_dense_column(name: str, fmt: str, peak: float) -> None:
    assert device(name).peak(fmt) == pytest.approx(peak, rel=2e-3)


def test_missing_hardware_is_emulated_in_the_next_wider_format() -> None:
    v100, a100, p4 = device("V100-SXM2-32GB"), device("A100-SXM4-80GB"), device("P4-8GB")
    assert not v100.supports("bf16")
    assert not v100.supports("tf32")
    assert v100.peak("bf16") == v100.peak("tf32") == v100.peak("fp32") == 15.7e12
    assert v100.peak("fp8_e4m3") == v100.peak("fp16")
    assert a100.peak("mxfp8") == a100.peak("nvfp4") == a100.peak("bf16")
    assert p4.peak("fp16") == p4.peak("fp32")


def test_network_cards_are_shared_by_the_gpus_of_a_node() -> None:
    assert link("ib-ndr-8x400", 8).bytes_per_s_per_gpu == 50e9
    assert link("opa-4x100", 8).bytes_per_s_per_gpu == 6.25e9
    assert link("ib-edr-8x100", 16).bytes_per_s_per_gpu == 6.25e9
    assert link("nvlink4", 4).bytes_per_s_per_gpu == 450e9
    assert link("nvl72").domain_size == 72
    assert link("efa-4x100", 8).bytes_per_s_per_gpu == 6.25e9


def test_links_are_in_one_direction() -> None:
    known = {"nvlink3": 300e9, "nvlink4": 450e9, "nvlink5": 900e9, "xgmi": 448e9, "pcie4": 31.5e9}
    assert {name: link(name).bytes_per_s_per_gpu for name in known} == known


@pytest.mark.parametrize(
    ("spoken", "name"),
    [("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"), ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"), ("Tesla T4", "T4-16GB"),
     ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"), ("AMD Instinct MI300X", "MI300X-192GB"),
     ("NVIDIA A10G", "A10G-24GB")],
)  # fmt: skip
def test_names_that_drivers_give(spoken: str, name: str) -> None:
    assert device(spoken).name == name


def test_unknown_names_carry_the_nearest() -> None:
    with pytest.raises(KeyError, match="H100-SXM5-80GB"):
        device("H100-SXM6")
    assert device("h100") == device("H100-SXM5-80GB")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hbm_bytes", 80, "got 80; expected bytes, e.g. 80e9"),
        ("hbm_bytes", "80GB", "got '80GB'; expected bytes, e.g. 80e9"),
        ("hbm_bytes", 80e3, "expected bytes"),
        ("hbm_bytes", 10**400, "expected a"),
        ("hbm_bytes_per_s", 3.35, "got 3.35; expected bytes/s, e.g. 3.35e12"),
        ("hbm_bytes_per_s", "3.35 TB/s", "got '3.35 TB/s'; expected bytes/s, e.g. 3.35e12"),
        ("peak_flops_per_s.bf16", 800, "got 800; expected FLOP/s, e.g. 989e12"),
        ("peak_flops_per_s.bf16", "800 TFLOPS", "got '800 TFLOPS'; expected FLOP/s, e.g. 989e12"),
        ("l2_bytes", "50", "got '50'; expected bytes, e.g. 50e6"),
        ("clock_hz", 1.7, "got 1.7; expected Hz, e.g. 1.5e9"),
        ("intra_node.bytes_per_s_per_gpu", 450, "got 450; expected bytes/s in one direction, e.g. 50e9"),
        ("intra_node.latency_s", 4, "got 4; expected seconds, e.g. 4e-6"),
        ("intra_node.latency_s", "4us", "got '4us'; expected seconds, e.g. 4e-6"),
    ],
)
def test_figures_in_another_unit_are_told_the_fields_own(key: str, value: Any, expected: str) -> None:
    gpu: dict[str, Any] = {
        "peak_flops_per_s": {"fp32": 4e9}, "hbm_bytes": "1e8", "hbm_bytes_per_s": 1e9, "l2_bytes": 2**20,
    }  # fmt: skip
    link_of_node: dict[str, Any] = {"bytes_per_s_per_gpu": 1e6, "latency_s": 0.0}
    ClusterSpec.model_validate({"gpu": gpu, "intra_node": link_of_node})  # a small device is one
    *parents, field = key.split(".")
    owner = link_of_node if parents == ["intra_node"] else gpu["peak_flops_per_s"] if parents else gpu
    owner[field] = value
    with pytest.raises(ValidationError) as caught:
        ClusterSpec.model_validate({"gpu": gpu, "intra_node": link_of_node})
    (reason,) = reasons_of(caught.value, ClusterSpec)
    assert reason.startswith(key if parents == ["intra_node"] else f"gpu.{key}")
    assert expected in reason


def test_a_specification_needs_its_full_precision_peak() -> None:
    with pytest.raises(ValueError, match=r"peak_flops_per_s\.fp32"):
        DeviceSpec(name="x", peak_flops_per_s={"bf16": 1e12}, hbm_bytes=1e9, hbm_bytes_per_s=1e12)
