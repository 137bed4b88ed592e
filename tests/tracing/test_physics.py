"""What must hold of every job's physics, whatever a network learns: faster hardware makes no operator slower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from dataset_builder.tracing.work import roofline_s

_EXAMPLES = sorted((Path(__file__).parents[2] / "conf" / "job").glob("*.yaml"))


def _rooflines_s(path: Path, **changes: Any) -> list[float]:
    """Seconds of every node of a job, in the order of the graph."""
    job = TrainingJob.from_yaml(path, changes).resolved()
    groups = rank_layout(job).groups
    return [
        roofline_s(node, job.cluster.gpu, groups[node.axis] if node.axis else None) for node in build_graph(job).nodes
    ]


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
@settings(max_examples=3, deadline=None)
@given(factor=st.floats(1.01, 8.0))
def test_a_faster_memory_or_link_makes_nothing_slower(path: Path, factor: float) -> None:
    cluster = TrainingJob.from_yaml(path).resolved().cluster
    assert cluster.intra_node
    as_it_is = _rooflines_s(path)
    memory = {"cluster.gpu.hbm_bytes_per_s": cluster.gpu.hbm_bytes_per_s * factor}
    link = {"bytes_per_s_per_gpu": cluster.intra_node.bytes_per_s_per_gpu * factor, "latency_s": 4e-6}
    for faster in (memory, {"cluster.intra_node": link}):
        pairs = list(zip(_rooflines_s(path, **faster), as_it_is, strict=True))
        assert all(new <= old * (1 + 1e-9) for new, old in pairs)
