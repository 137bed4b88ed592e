"""The physical floor: published arithmetic, and what must hold of any lower bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.floor import PhysicalFloor, impossible, physical_floor
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from dataset_builder.tracing.work import roofline_s

_EXAMPLES = sorted((Path(__file__).parents[2] / "conf" / "job").glob("*.yaml"))
_QWEN3_32B_ON_8_H20: dict[str, Any] = {
    "model": {
        "num_layers": 64, "hidden_size": 5120, "ffn_hidden_size": 25600, "num_attention_heads": 64,
        "num_query_groups": 8, "head_dim": 128, "vocab_size": 151936, "activation": "swiglu",
        "normalization": "rmsnorm", "tie_embeddings": False,
    },
    "batch": {"seq_length": 16384, "micro_batch_size": 2, "global_batch_size": 16},
    "cluster": {"gpu": "H20-96GB", "num_nodes": 1},
    "parallel": {"tensor": 8},
    "precision": "bf16_mixed",
}  # fmt: skip


def _floor(job: TrainingJob) -> PhysicalFloor:
    job = job.resolved()
    return physical_floor(job, build_graph(job), rank_layout(job))


def test_c37_a_reported_time_below_the_floor() -> None:
    """NVIDIA/Megatron-LM#2662: 43 s for 63.8 PFLOP on 8 H20 of 148 TFLOP/s each, which need 53.9 s at least."""
    floor = _floor(TrainingJob.parse(_QWEN3_32B_ON_8_H20))
    assert floor.bound == "compute"
    assert floor.seconds == pytest.approx(53.9, rel=2e-3)
    reason = impossible(43.0, floor)
    assert reason is not None
    assert reason.startswith("43 s is impossible: needs at least 53.9 s = 7.98 PFLOP / 148 TFLOP/s bf16")
    assert impossible(60.0, floor) is None


def test_recomputation_does_not_raise_the_floor() -> None:
    floors = [
        _floor(TrainingJob.parse({**_QWEN3_32B_ON_8_H20, "parallel": {"tensor": 8, "recompute": mode}})).seconds
        for mode in ("none", "selective", "full")
    ]
    assert floors == pytest.approx([floors[0]] * 3, rel=1e-9)


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_every_bound_is_below_the_roofline_of_its_work(path: Path) -> None:
    job = TrainingJob.from_yaml(path).resolved()
    graph, layout = build_graph(job), rank_layout(job)
    floor = physical_floor(job, graph, layout)
    times = np.array([1 if node.per == "iteration" else graph.num_microbatches for node in graph.nodes])
    seconds = np.array([roofline_s(n, job.cluster.gpu, layout.group_of(n)) for n in graph.nodes])
    one_after_another = float((graph.repeats @ (times * seconds)).max())
    assert 0 < floor.seconds <= one_after_another
    assert all(each <= one_after_another for each in floor.seconds_by_bound.values())


@settings(max_examples=6, deadline=None)
@given(factor=st.floats(1.1, 8.0))
def test_the_floor_scales_with_the_device_that_bounds_it(factor: float) -> None:
    job = TrainingJob.parse(_QWEN3_32B_ON_8_H20).resolved()
    peaks = {name: peak * factor for name, peak in job.cluster.gpu.peak_flops_per_s.items()}
    device = job.cluster.gpu.model_dump() | {"name": "faster", "peak_flops_per_s": peaks}
    faster = TrainingJob.parse({**_QWEN3_32B_ON_8_H20, "cluster": {"gpu": device, "num_nodes": 1}})
    ours, theirs = _floor(job).seconds_by_bound, _floor(faster).seconds_by_bound
    assert theirs["compute"] == pytest.approx(ours["compute"] / factor)
    assert theirs["memory"] == pytest.approx(ours["memory"])


def test_the_network_bounds_a_job_of_slow_links() -> None:
    slow = {"bytes_per_s_per_gpu": 1e8, "latency_s": 1e-5}
    job = TrainingJob.parse(
        {
            "model": {"preset": "gpt2-small"},
            "batch": {"seq_length": 1024, "micro_batch_size": 4, "global_batch_size": 64},
            "cluster": {"gpu": "A100-SXM4-80GB", "num_nodes": 2, "gpus_per_node": 8, "inter_node": slow},
            "precision": "bf16_mixed",
        }
    )
    floor = _floor(job)
    assert floor.bound == "network"
    # Each node receives the other's gradients once, through the adapters of its eight GPUs.
    grads = job.resolved().precision.grad_reduce
    bytes_per_parameter = 4 if grads == "fp32" else 2
    assert floor.seconds == pytest.approx(124.4e6 * bytes_per_parameter / 16 / 1e8, rel=0.03)
    reason = impossible(floor.seconds / 2, floor)
    assert reason is not None
    assert "inter_node" in reason
