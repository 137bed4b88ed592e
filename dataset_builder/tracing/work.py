"""Work of a node in physical terms: how much of attention is visible, collective traffic, and roofline seconds.

FLOPs count a multiply-add as two. Collective traffic is that of the ring algorithm (bytes each rank sends).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataset_builder.tracing.graph import COLLECTIVES, OpNode
from dataset_builder.tracing.structure import element_bytes

if TYPE_CHECKING:  # they need pydantic, and what measures has only torch
    from dataset_builder.job.hardware import DeviceSpec
    from dataset_builder.tracing.layout import AxisGroup

# A backward attention kernel recomputes the scores and runs four more products: 5 against 2 (FlashAttention-2, 3.2).
ATTENTION_BACKWARD_FACTOR = 2.5


def visible_fraction(query_length: float, key_length: float, window: float, causal: bool) -> float:
    """Share of the query x key rectangle an attention computes.

    Causal: position ``i`` of ``n`` sees ``min(i + 1, window)`` keys. Under context parallelism the shards are balanced,
    so a rank's queries see the same share as the whole sequence's. Non-causal windows reach ``window`` keys.
    """
    window = max(1.0, min(window, key_length))
    if not causal:
        return window / key_length
    if query_length > key_length:
        return 1.0
    if window >= key_length:
        # Kernels compute whole tiles; the half that flash kernels are credited with is the usual convention.
        return 0.5
    full = key_length * window - window * window / 2.0
    return full / (key_length * key_length)


def collective_traffic(kind: str, group_size: int) -> float:
    """Bytes a rank sends per byte of the tensor (``message_bytes``), by the ring algorithm."""
    if group_size <= 1:
        return 0.0
    share = (group_size - 1) / group_size
    return {"all_reduce": 2.0 * share, "send_recv": 1.0}.get(kind, share)


def collective_steps(kind: str, group_size: int) -> int:
    """Messages on the critical path of a ring collective; all-to-all sends to every peer at once."""
    if group_size <= 1:
        return 0
    return {"all_reduce": 2 * (group_size - 1), "send_recv": 1, "all_to_all": 1}.get(kind, group_size - 1)


def roofline_s(node: OpNode, device: DeviceSpec, group: AxisGroup | None) -> float:
    """The shortest time physics allows a node: compute or memory, or latency plus traffic for a collective.

    Latency is counted per step up to 16 steps: beyond it libraries change to tree algorithms (logarithmic depth).
    """
    if node.kind in COLLECTIVES:
        if group is None or node.group_size <= 1:
            return node.message_bytes / device.hbm_bytes_per_s
        steps = min(collective_steps(node.kind, node.group_size), 16)
        if node.kind == "all_to_all":
            traffic_s = node.message_bytes / group.exchange_bytes_per_s
        else:
            rate = group.link.bytes_per_s_per_gpu if node.kind == "send_recv" else group.ring_bytes_per_s
            traffic_s = node.message_bytes * collective_traffic(node.kind, node.group_size) / rate
        return steps * group.link.latency_s + traffic_s
    memory_s = (node.bytes_read + node.bytes_written) / device.hbm_bytes_per_s
    return max(node.flops / device.peak(node.input_dtype), memory_s)


def tensor_bytes(elements: float, fmt: str) -> float:
    """Bytes of a tensor, scales of block formats included."""
    return elements * element_bytes(fmt)
