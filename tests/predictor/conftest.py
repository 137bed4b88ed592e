"""A network that was never trained, as a checkpoint: enough to test everything around the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.checkpoint import Checkpoint, CheckpointConfig, save_checkpoint
from gnn_predictor.domain import domain_of
from gnn_predictor.features import featurize
from gnn_predictor.network import Ensemble, NetworkConfig, Predictor

JobOf = Callable[..., TrainingJob]

_SMALL: dict[str, Any] = {
    "name": "small",
    "model": {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 51200},
    "batch": {"seq_length": 1024, "micro_batch_size": 2, "global_batch_size": 64},
    "cluster": {"gpu": "A100-SXM4-80GB", "num_nodes": 1, "gpus_per_node": 8},
}


def small_job(**changes: Any) -> TrainingJob:
    """A job that fits anywhere; ``changes`` are merged one level deep."""
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in _SMALL.items()}
    for key, value in changes.items():
        data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
    return TrainingJob.parse(data)


@pytest.fixture(scope="session")
def job_of() -> JobOf:
    return small_job


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an untrained checkpoint."""
    job = small_job().resolved()
    graph = featurize(job, build_graph(job), rank_layout(job))
    torch.manual_seed(0)
    settings = NetworkConfig.fitting(graph, (graph.device_name,), hidden=16, context=12)
    network = Ensemble([Predictor(settings)])
    config = CheckpointConfig(corpus_hash="none", name="untrained", network=asdict(settings), domain=domain_of([job]))
    path = tmp_path_factory.mktemp("checkpoints") / "untrained"
    return save_checkpoint(path, Checkpoint(config, dict(network.state_dict())), "")
