"""Measured operators as graph nodes: sizes, work, and the rows no operator explains."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset_builder.corpus.measurements import read_ops, read_table, shipped_table
from dataset_builder.corpus.operators import OperatorError, OperatorRow, operator_node, visible_pairs
from dataset_builder.tracing.graph import COLLECTIVES, KINDS, OpNode


def row(**values: Any) -> OperatorRow:
    return OperatorRow(
        {"op_id": "x-1", "source_id": "x", "gpu": "H100-SXM5-80GB", "direction": "fwd", "dtype": "bf16",
         "latency_us": 1e6, **values}
    )  # fmt: skip


def node(**values: Any) -> OpNode:
    return operator_node(row(**values))[0]


def test_matrix_product() -> None:
    product = node(op="gemm", b=1.0, m=512.0, n=1024.0, k=256.0)
    assert (product.kind, product.op, product.shape) == ("gemm", "gemm", (1, 512, 1024, 256))
    assert product.flops == 2 * 512 * 1024 * 256
    assert product.bytes_read == 2 * (512 * 256 + 256 * 1024)
    assert product.bytes_written == 2 * 512 * 1024


def test_backward_product_is_both_gradients() -> None:
    forward = node(op="linear", m=512.0, n=1024.0, k=256.0)
    backward = node(op="linear", direction="bwd", m=512.0, n=1024.0, k=256.0)
    assert (backward.op, backward.phase) == ("linear_backward", "backward")
    assert backward.flops == 2 * forward.flops
    assert backward.shape == forward.shape


@pytest.mark.parametrize(
    ("notes", "op"),
    [
        ("fp8 per-tensor dynamic (activation quantisation included)", "gemm+quantize.fp8_tensorwise"),
        ("fp8 static per-tensor", "gemm.fp8_delayed"),
    ],
)
def test_products_that_quantise_their_input_are_named_so(notes: str, op: str) -> None:
    product = node(op="gemm", dtype="fp8_e4m3", m=512.0, n=1024.0, k=256.0, notes=notes)
    assert product.op == op
    assert product.output_dtype == "bf16"


def test_attention_counts_the_pairs_a_causal_mask_leaves() -> None:
    full = node(op="attention", shape="batch=2,heads=8,kv_heads=2,q=1024,kv=1024,d=64,causal=0")
    causal = node(op="attention", shape="batch=2,heads=8,kv_heads=2,q=1024,kv=1024,d=64,causal=1,window=0")
    backward = node(op="attention", direction="bwd",
                    shape="batch=2,heads=8,kv_heads=2,q=1024,kv=1024,d=64,causal=1,window=0")  # fmt: skip
    assert full.flops == 4 * 2 * 8 * 1024 * 1024 * 64
    assert causal.flops == pytest.approx(full.flops / 2, rel=2e-3)
    assert backward.flops == 2.5 * causal.flops
    assert causal.shape == (2, 8, 2, 1024, 1024, 64, 1024)


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 80))
def test_visible_pairs_equals_counting_them(queries: int, extra: int, window: int) -> None:
    keys = queries + extra
    window = min(window, keys)
    counted = sum(min(extra + query + 1, window) for query in range(queries))
    assert visible_pairs(queries, keys, window) == counted


def test_experts_share_the_tokens() -> None:
    experts = node(op="moe_mlp", shape="tokens=1024,hidden=4096,inter=1024,topk=8,experts=128,moe_tp=2,moe_ep=4")
    assert experts.kind == "grouped_gemm"
    assert experts.shape == (32, 64, 512, 4096)
    assert experts.flops == 2 * (1024 * 8 / 4) * 4096 * 512 * 3


def test_all_gather_message_is_the_whole_tensor() -> None:
    place = {"num_gpus": 4.0, "gpus_per_node": 4.0, "intra_node": "nvlink4", "bytes": 1e6}
    total = node(op="all_gather", **place, notes="bytes = nccl-tests size (all_gather: total output)")
    shard = node(op="all_gather", **place, notes="bytes = per-rank input tensor")
    assert (total.message_bytes, shard.message_bytes) == (1e6, 4e6)


def test_a_network_is_shared_by_the_gpus_of_a_node() -> None:
    values = {"op": "all_reduce", "bytes": 1e9, "inter_node": "ib-ndr-8x400", "intra_node": "nvlink4"}
    _, _, group = operator_node(row(**values, num_gpus=16.0, gpus_per_node=8.0))
    assert group is not None
    assert (group.size, group.nodes, group.link.bytes_per_s_per_gpu) == (16, 2, 50e9)


def test_same_shape_same_group() -> None:
    forward = row(op="linear", m=512.0, n=1024.0, k=256.0)
    backward = row(op="linear", direction="bwd", dtype="fp16", m=512.0, n=1024.0, k=256.0)
    other = row(op="linear", m=512.0, n=1024.0, k=512.0)
    assert forward.group == backward.group != other.group


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"op": "broadcast"}, "broadcast"),
        ({"op": "gemm", "m": 1.0, "n": 1.0}, "missing"),
        ({"op": "gemm", "m": 8.0, "n": 8.0, "k": 8.0, "gpu": "abacus"}, "abacus"),
        ({"op": "gemm", "m": 8.0, "n": 8.0, "k": 8.0, "dtype": None}, "dtype"),
        ({"op": "gemm", "m": 8192.0, "n": 8192.0, "k": 8192.0, "latency_us": 1.0}, "peak"),
        (
            {"op": "gemm", "m": 8192.0, "n": 8192.0, "k": 8192.0, "dtype": "fp8_e5m2", "latency_us": 419.6},
            "fp8_e5m2 peak",
        ),
        ({"op": "grouped_gemm", "shape": "m=8192,n=8192,k=8192,groups=8", "latency_us": 900.0}, "bf16 peak"),
        ({"op": "gemm", "m": 64.0, "n": 64.0, "k": 64.0, "latency_us": float("inf")}, "not a time"),
        ({"op": "rmsnorm", "direction": "fwd_bwd", "shape": "tokens=8,hidden=8"}, "together"),
        ({"op": "gelu", "shape": "rows=65536,cols=65536", "latency_us": 1.0}, "memory"),
        ({"op": "all_reduce", "bytes": 1e6}, "number of GPUs"),
        ({"op": "rmsnorm", "shape": "tokens=8,hidden=8", "latency_us": 0.0}, "not a time"),
    ],
)
def test_rows_left_out_say_why(values: dict[str, Any], words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        operator_node(row(**values))


def test_shipped_operators_are_kept_and_sound(tmp_path: Any) -> None:
    table = read_table(shipped_table("ops.parquet"))
    sample = pd.concat(
        [rows.iloc[:: max(1, len(rows) // 12)] for _, rows in table.groupby(["source_id", "op", "direction"])]
    )
    sample.to_parquet(tmp_path / "ops.parquet")
    operators, reasons = read_ops(tmp_path / "ops.parquet")
    assert len(operators) + len(reasons) == len(sample)
    assert len(operators) > 0.7 * len(sample)
    for operator in operators:
        kind = operator.node.kind
        assert kind in KINDS
        assert (operator.group is not None) == (kind in COLLECTIVES)
        assert operator.latency_s > 0
        assert operator.node.bytes_read + operator.node.bytes_written > 0
    details = sample.set_index("op_id")["op_detail"].fillna("")
    for operator in operators:  # the same words of two sources, or for two kinds, are two libraries
        assert operator.library == "|".join((operator.source_id, operator.node.kind, details[operator.op_id]))
    assert any(details[operator.op_id] for operator in operators)


def test_a_little_above_the_specified_clock_is_believed() -> None:
    fastest_us = 2 * 8192**3 / 989e12 * 1e6
    assert node(op="gemm", m=8192.0, n=8192.0, k=8192.0, latency_us=fastest_us / 1.04)
    with pytest.raises(OperatorError, match="bf16 peak"):
        node(op="gemm", m=8192.0, n=8192.0, k=8192.0, latency_us=fastest_us / 1.06)
