"""What tests of training and of all around the weights share: a checkpoint never trained, and examples to learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from dataset_builder.corpus.build import Corpus, build_corpus
from dataset_builder.corpus.measurements import OpMeasurement, read_table, shipped_table
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from dataset_builder.tracing.work import roofline_s
from gnn_predictor.checkpoint import Checkpoint, CheckpointConfig, save_checkpoint
from gnn_predictor.dataset import OperatorExamples, RunExamples, operator_examples
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


_LIBRARIES = ("vidur|gemm|one", "vidur|gemm|other", "too few to have a vector")


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


@pytest.fixture(scope="session")
def runs(job_of: JobOf) -> RunExamples:
    """Sixteen sizes of one job, each measured at 2.5 times its roofline."""
    graphs, times = [], []
    for hidden in (512, 768, 1024, 1536):
        for micro in (1, 2, 4, 8):
            sizes = {"hidden_size": hidden, "num_attention_heads": 8}
            job = job_of(model=sizes, batch={"micro_batch_size": micro}).resolved()
            graph, layout = build_graph(job), rank_layout(job)
            seconds = [roofline_s(n, job.cluster.gpu, layout.group_of(n)) for n in graph.nodes]
            often = [1 if n.per == "iteration" else layout.num_microbatches for n in graph.nodes]
            graphs.append(featurize(job, graph, layout))
            times.append(2.5 * float(graph.repeats[0] @ (np.array(seconds) * often)))
    count = len(graphs)
    table = pd.DataFrame(
        {"run_id": range(count), "source_id": ["a", "b"] * (count // 2), "iter_time_s": times, "peak_mem_gb": np.nan}
    )
    return RunExamples(table, tuple(graphs))


@pytest.fixture(scope="session")
def operators(job_of: JobOf, runs: RunExamples) -> OperatorExamples:
    job = job_of().resolved()
    device = job.cluster.gpu
    nodes = [node for node in build_graph(job).nodes if node.axis is None]
    measured = [
        OpMeasurement(
            op_id=str(i), source_id="vidur", gpu=device.name, node=node, device=device, group=None,
            latency_s=2.0 * roofline_s(node, device, None) + 4e-6, op_group=str(i), includes_launch=False,
            library=_LIBRARIES[i % 3],
        )
        for i, node in enumerate(nodes)
    ]  # fmt: skip
    return operator_examples(measured, (device.name,), _LIBRARIES[:2], runs.graphs[0].workload.shape[1])


@pytest.fixture(scope="session")
def config(runs: RunExamples) -> NetworkConfig:
    return NetworkConfig.fitting(runs.graphs[0], (runs.graphs[0].device_name,), _LIBRARIES[:2], hidden=16, context=12)


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Forty runs of one source and a few operators of every kind; its tables lie beside it."""
    folder = tmp_path_factory.mktemp("small")
    runs = read_table(shipped_table("runs.parquet"))
    runs[runs["source_id"] == "llm-foundry"].head(40).to_csv(folder / "runs.csv", index=False)
    read_table(shipped_table("ops.parquet")).iloc[::2000].to_parquet(folder / "ops.parquet")
    return build_corpus(folder / "corpus", folder / "runs.csv", folder / "ops.parquet")
