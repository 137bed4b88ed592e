"""Work in physical terms: visible attention, collective traffic, roofline, and FLOPs as torch counts them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from dataset_builder.job.hardware import DeviceSpec, LinkSpec
from dataset_builder.tracing.block import fake_training, record_block
from dataset_builder.tracing.graph import OpNode
from dataset_builder.tracing.kernels import reduce_recording
from dataset_builder.tracing.layout import AxisGroup, Tier
from dataset_builder.tracing.linear import BlockContext
from dataset_builder.tracing.model import Layer
from dataset_builder.tracing.precision import cuda_autocast_on_cpu
from dataset_builder.tracing.recorder import Recorder
from dataset_builder.tracing.structure import BlockStructure
from dataset_builder.tracing.symbols import constant
from dataset_builder.tracing.work import collective_traffic, roofline_s, visible_fraction

DEVICE = DeviceSpec(name="d", peak_flops_per_s={"fp32": 1e12, "bf16": 1e13}, hbm_bytes=1e9, hbm_bytes_per_s=1e11)
LINK = AxisGroup(size=8, nodes=1, tiers=(Tier(LinkSpec(bytes_per_s_per_gpu=1e10, latency_s=1e-5)),))


def node(kind, flops=0.0, size=0.0, group=1, dtype="bf16"):
    return OpNode(
        kind, kind, "m", "forward", (1,), dtype, dtype, "fp32", "tensor" if group > 1 else None, group, "microbatch",
        flops, size, 0.0, size, 1.0,
    )  # fmt: skip


@given(st.integers(2, 300), st.integers(1, 300))
def test_a_causal_window_sees_what_counting_says(length, window):
    seen = sum(min(i + 1, window) for i in range(length)) / length**2
    assert visible_fraction(length, length, window, True) == pytest.approx(seen, abs=1.0 / length)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 2000), st.booleans())
def test_the_visible_share_is_a_share(queries, keys, window, causal):
    assert 0.0 < visible_fraction(queries, keys, window, causal) <= 1.0


@given(st.integers(2, 4096))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks):
    parts = collective_traffic("reduce_scatter", ranks) + collective_traffic("all_gather", ranks)
    assert collective_traffic("all_reduce", ranks) == pytest.approx(parts)
    assert collective_traffic("all_reduce", 1) == 0.0


def test_roofline_takes_the_slower_of_compute_and_memory():
    assert roofline_s(node("gemm", flops=1e13), DEVICE, None) == pytest.approx(1.0)
    assert roofline_s(node("gemm", flops=1e13, dtype="fp32"), DEVICE, None) == pytest.approx(10.0)
    assert roofline_s(node("gemm", flops=1.0, size=1e11), DEVICE, None) == pytest.approx(1.0)


def test_a_message_takes_latency_and_traffic():
    seconds = roofline_s(node("all_reduce", size=1e10, group=8), DEVICE, LINK)
    assert seconds == pytest.approx(2 * 7 / 8 + 14 * 1e-5)
    assert roofline_s(node("send_recv", size=0.0, group=8), DEVICE, LINK) == pytest.approx(1e-5)


SIZES = {
    "b": 2, "s": 64, "z": 64, "t": 1, "c": 1, "m": 64, "o": 64, "h": 128, "g": 2, "r": 1, "u": 3, "d": 32, "f": 256,
    "w": 64, "v": 512,
}  # fmt: skip


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_flops_are_those_of_torchs_counter(activation):
    structure = BlockStructure("layer", activation=activation, kernel="unfused", accumulate=False)
    template = reduce_recording(record_block(structure, SIZES), lambda d: constant(float(d)))
    ours = sum(k.flops.value({}) for k in template.kernels if k.kind in ("gemm", "attention"))
    with fake_training(), cuda_autocast_on_cpu() as rules:
        layer = Layer(BlockContext(structure, SIZES, rules, Recorder()))
        x = torch.empty(64, 2, 128, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            layer(x, (), None).sum().backward()
    assert ours == counter.get_total_flops()


def test_attention_flops_are_those_of_torchs_formula():
    structure = BlockStructure("layer", causal=False)
    template = reduce_recording(record_block(structure, SIZES), lambda d: constant(float(d)))
    forward, backward = (k.flops.value({}) for k in template.kernels if k.kind == "attention")
    shape = (2, 2, 64, 32)
    assert forward == sdpa_flop_count(shape, shape, shape)
    assert backward == sdpa_backward_flop_count(shape, shape, shape, shape)
    assert math.isclose(backward / forward, 2.5)


@pytest.mark.parametrize(("recompute", "per_token"), [("none", 34 + 5 * 64 * 2048 / 6144), ("selective", 34)])
def test_saved_activations_are_the_published_formula(recompute, per_token):
    """Korthikanti et al. (arXiv 2205.05198), equation 1: s b h (34 + 5 a s / h) bytes a layer, GPT in 16 bit."""
    fp16 = {"compute": "fp16", "params": "fp16", "grad_accum": "fp16", "attention_format": "fp16"}
    structure = BlockStructure("layer", dropout=True, kernel="unfused", recompute=recompute, accumulate=True, **fp16)
    sizes = {**SIZES, "b": 1, "s": 2048, "z": 2048, "h": 6144, "g": 64, "d": 96, "f": 4 * 6144}
    template = reduce_recording(record_block(structure, sizes), lambda d: constant(float(d)))
    assert template.saved_bytes.value({}) / (2048 * 6144) == pytest.approx(per_token, rel=1e-3)
