"""Every job is in one class, and classes follow the size they are named after."""

from __future__ import annotations

import pytest

from dataset_builder.job.schema import TrainingJob
from gnn_predictor.run_classes import GPU_COUNTS, MODEL_SIZES, gpu_count, model_size
from tests.predictor.conftest import small_job


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("gpt2-small", "under 1B"),
        ("gpt2-xl", "1B-3B"),
        ("llama3-8b", "3B-10B"),
        ("llama3-70b", "30B-100B"),
        ("deepseek-v3", "100B and more"),
    ],
)
def test_models_are_classed_by_all_their_parameters(preset: str, expected: str) -> None:
    batch = {"seq_length": 1024, "micro_batch_size": 1, "global_batch_size": 8}
    job = TrainingJob.parse({"model": {"preset": preset}, "batch": batch, "cluster": {"gpu": "H100-SXM5-80GB"}})
    assert model_size(job.resolved()) == expected
    assert expected in MODEL_SIZES


@pytest.mark.parametrize(("gpus", "expected"), [(1, "1"), (2, "2-8"), (8, "2-8"), (16, "9-64"), (1024, "513 and more")])
def test_jobs_are_classed_by_their_gpus(gpus: int, expected: str) -> None:
    per_node = min(gpus, 8)
    cluster = {"num_nodes": gpus // per_node, "gpus_per_node": per_node}
    job = small_job(cluster=cluster, batch={"global_batch_size": 2048})
    assert gpu_count(job.resolved()) == expected
    assert expected in GPU_COUNTS
