"""What the network sees: which inputs a floating-point format may change."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from dataset_builder.corpus.operators import OperatorRow, operator_node
from dataset_builder.job.hardware import device
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.graph import KINDS
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.features import JOB_FEATURES, KERNEL_FEATURES, TILE_COLUMNS, GraphArrays, featurize, node_features

JobOf = Callable[..., TrainingJob]


def arrays(job: TrainingJob) -> GraphArrays:
    job = job.resolved()
    return featurize(job, build_graph(job), rank_layout(job))


# These also read or write what keeps its own format: token ids, softmax statistics, a loss in single precision.
_WITH_SIDE_INPUTS = ("embedding", "attention", "cross_entropy")


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_a_format_changes_nothing_of_what_the_job_stream_sees(job_of: JobOf, precision: str) -> None:
    """Of jobs that run the same kernels, only the kernel's own columns differ."""
    reference, other = (arrays(job_of(precision=name, parallel={"tensor": 2})) for name in ("bf16", precision))
    is_pure = ~reference.node_features[:, [KINDS.index(kind) for kind in _WITH_SIDE_INPUTS]].any(axis=1)
    assert is_pure.sum() > 0.8 * len(is_pure)
    leading, theirs = (graph.node_features[:, :JOB_FEATURES] for graph in (reference, other))
    np.testing.assert_array_equal(leading[is_pure], theirs[is_pure])
    np.testing.assert_allclose(reference.workload, other.workload, atol=0.03)
    assert not np.array_equal(reference.format_features, other.format_features)


def test_a_wider_format_shows_in_the_kernels_own_columns(job_of: JobOf) -> None:
    own = [column for column in KERNEL_FEATURES if column >= JOB_FEATURES]
    narrow, wide = (arrays(job_of(precision=name)).node_features[:, own] for name in ("bf16", "fp32"))
    assert not np.array_equal(narrow, wide)


def test_every_column_is_read_by_a_stream(job_of: JobOf) -> None:
    columns = arrays(job_of()).node_features.shape[1]
    assert set(range(JOB_FEATURES)) | set(KERNEL_FEATURES) == set(range(columns))


def test_links_that_differ_in_latency_alone_are_told_apart(job_of: JobOf) -> None:
    """What is known of a message is kept for later jobs: not for those on a link that is merely called the same."""
    near, far = (
        arrays(
            job_of(
                parallel={"tensor": 2},
                cluster={
                    "gpu": "A100-SXM4-80GB", "gpus_per_node": 8,
                    "intra_node": {"name": "own", "bytes_per_s_per_gpu": 300e9, "latency_s": latency_s},
                },
            )
        )
        for latency_s in (5e-6, 5e-5)
    )  # fmt: skip
    is_message = near.is_overlappable == 1
    assert (near.log_roofline_s < far.log_roofline_s)[is_message].all()
    np.testing.assert_array_equal(near.log_roofline_s[~is_message], far.log_roofline_s[~is_message])


def filling(head_dim: int, queries: int = 4096, heads: int = 16, direction: str = "fwd") -> list[float]:
    """What is said of how attention fills an H100 of 132 SMs; it has 8 key heads, and keys for half as many more."""
    shape = f"batch=1,heads={heads},kv_heads=8,q={queries},kv={queries * 3 // 2},d={head_dim},causal=1"
    node, *_ = operator_node(
        OperatorRow({"op_id": "x", "source_id": "x", "gpu": "H100-SXM5-80GB", "dtype": "bf16", "latency_us": 1e6,
                     "op": "attention", "direction": direction, "shape": shape})
    )  # fmt: skip
    return node_features(node, node, device("H100-SXM5-80GB"), None, 1e-3)[TILE_COLUMNS]


def test_attention_fills_a_device_in_waves_of_128_queries_of_a_head() -> None:
    log_waves, fill, *_ = filling(128)
    tiles = 16 * 4096 / 128
    assert fill == pytest.approx(tiles / 132 / math.ceil(tiles / 132))
    assert filling(128, direction="bwd")[0] > log_waves, "128 keys each"
    assert filling(128, queries=4095)[:2] == [log_waves, fill], "the last tile is not full"


def test_attention_pays_for_heads_between_the_sizes_that_kernels_have() -> None:
    padding = {head_dim: filling(head_dim)[3] for head_dim in (64, 80, 96, 128, 192, 256, 512)}
    assert [head_dim for head_dim, paid in padding.items() if paid] == [80, 96]
    assert padding[80] == pytest.approx(math.log2(128 / 80))


def test_query_heads_that_share_a_key_head_are_told() -> None:
    assert filling(128, heads=8)[4] == 0
    assert filling(128, heads=32)[4] > filling(128, heads=16)[4] > 0
