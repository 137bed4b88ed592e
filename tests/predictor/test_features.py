"""What the network sees: which inputs a floating-point format may change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.graph import KINDS
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.features import JOB_FEATURES, KERNEL_FEATURES, GraphArrays, featurize

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
