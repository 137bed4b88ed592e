"""Ablations: what is hidden does not reach the network; an experiment adds its figures to a checkpoint and no more."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from dataset_builder.corpus.build import build_corpus
from dataset_builder.corpus.measurements import read_table, shipped_table
from dataset_builder.corpus.splits import Split
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.ablation import NAMES, Ablation
from gnn_predictor.batch import collate
from gnn_predictor.card import ablations, figures
from gnn_predictor.checkpoint import CheckpointError, load_checkpoint
from gnn_predictor.crossvalidation import Workshop
from gnn_predictor.dataset import OperatorExamples, RunExamples
from gnn_predictor.features import GraphArrays, featurize
from gnn_predictor.fitting import FitSettings
from gnn_predictor.graph_store import GraphStore
from gnn_predictor.network import NetworkConfig, Predictor
from gnn_predictor.train import CONFIGURATION, Settings, run_training

JobOf = Callable[..., TrainingJob]
SETTINGS = FitSettings(epochs=1, batch_size=8, operator_batch_size=32)


def _cluster(speed: float, **others: Any) -> dict[str, Any]:
    """One that is so many times as fast in every respect: a job's rooflines are shorter, their shares stay.

    But for arithmetic in single precision, which nothing waits for.
    """
    return {
        "gpu": {
            "peak_flops_per_s": {"fp32": 20e12 * speed**2, "bf16": 300e12 * speed, "fp16": 300e12 * speed},
            "hbm_bytes": 80e9 * speed,
            "hbm_bytes_per_s": 2e12 * speed,
            **others,
        },
        "num_nodes": 2,
        "gpus_per_node": 8,
        "intra_node": {"bytes_per_s_per_gpu": 200e9 * speed, "latency_s": 4e-6 / speed},
        "inter_node": {"bytes_per_s_per_gpu": 25e9 * speed, "latency_s": 8e-6 / speed},
    }


def _arrays(job: TrainingJob) -> GraphArrays:
    job = job.resolved()
    return featurize(job, build_graph(job), rank_layout(job))


def _without(
    name: str, graphs: tuple[GraphArrays, ...], operators: OperatorExamples, config: NetworkConfig
) -> Workshop:
    shop = Workshop(config, RunExamples(pd.DataFrame(index=range(len(graphs))), graphs), operators, Path(), 1)
    return Ablation.plan(name, [], shop, SETTINGS, members=1).shop


def _predicted(network: Predictor, graph: GraphArrays) -> float:
    with torch.inference_mode():
        return float(network(collate([graph], ()))[0])


@pytest.fixture
def network(config: NetworkConfig) -> Predictor:
    """All weights random, so that every input shows."""
    torch.manual_seed(0)
    network = Predictor(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return network.eval()


def test_a_hidden_specification_does_not_reach_the_network(
    job_of: JobOf, operators: OperatorExamples, config: NetworkConfig, network: Predictor
) -> None:
    others = {"l2_bytes": 9e7, "num_sms": 37, "clock_hz": 1e9, "compute_capability": 9.0, "vendor": "nvidia"}
    clusters = _cluster(1), _cluster(2, **others)
    slow, fast = (_arrays(job_of(cluster=each, precision="bf16_mixed", parallel={"tensor": 2})) for each in clusters)
    np.testing.assert_allclose(slow.log_roofline_s - fast.log_roofline_s, np.log(2), rtol=1e-4)
    alike = replace(fast, log_roofline_s=slow.log_roofline_s)
    assert _predicted(network, slow) != pytest.approx(_predicted(network, alike), rel=1e-3)
    hidden = _without("without_hardware", (slow, alike), operators, config)
    first, second = hidden.runs.graphs
    for name in ("node_features", "format_features", "hardware", "workload"):
        np.testing.assert_allclose(getattr(first, name), getattr(second, name), atol=1e-6, err_msg=name)
    assert _predicted(network, first) == pytest.approx(_predicted(network, second), rel=1e-5)
    assert not hidden.operators.hardware.any()
    assert first.node_features.any(axis=0).sum() > 0.4 * first.node_features.shape[1]


def test_hidden_properties_leave_a_format_its_name_and_its_roofline(
    job_of: JobOf, operators: OperatorExamples, config: NetworkConfig, network: Predictor
) -> None:
    """Of kernels that read and write pure 16 bits in the one job and 32 in the other."""
    narrow, wide = (_arrays(job_of(precision=name)) for name in ("bf16", "fp32"))
    alike = replace(wide, log_roofline_s=narrow.log_roofline_s, node_formats=narrow.node_formats)
    hidden = _without("without_format_properties", (narrow, alike, wide), operators, config)
    first, second, third = hidden.runs.graphs
    pure = (narrow.node_formats == narrow.node_formats[0, 1]).all(axis=1) & (narrow.node_features[:, 0] == 1)
    assert pure.any()
    assert not np.allclose(narrow.node_features[pure], wide.node_features[pure])
    np.testing.assert_allclose(first.node_features[pure], second.node_features[pure], atol=1e-6)
    assert not first.format_features.any()
    np.testing.assert_array_equal(third.node_formats, wide.node_formats)
    np.testing.assert_array_equal(third.log_roofline_s, wide.log_roofline_s)
    with torch.inference_mode():
        seconds = [
            network.node_times(collate([graph], ())).seconds[torch.from_numpy(pure)] for graph in (first, second)
        ]
    torch.testing.assert_close(*seconds)
    assert not hidden.operators.format_features.any()
    assert torch.equal(hidden.operators.node_formats, operators.node_formats)


def test_without_operators_their_latencies_teach_nothing(
    tmp_path: Path, config: NetworkConfig, runs: RunExamples, operators: OperatorExamples
) -> None:
    split = Split("P2-fp32", tuple(range(12)), tuple(range(12, 16)))
    seconds = []
    for number, others in enumerate((operators, replace(operators, log_seconds=operators.log_seconds + 1))):
        shop = Workshop(config, runs, others, tmp_path / str(number), num_workers=1)
        ablation = Ablation.plan("without_operators", [split], shop, SETTINGS, members=1)
        ablation.fit()
        seconds.append(ablation.held_out()["network_s"].tolist())
    assert seconds[0] == seconds[1]


def test_graphs_in_a_file_are_hidden_alike(
    tmp_path: Path, config: NetworkConfig, runs: RunExamples, operators: OperatorExamples
) -> None:
    shop = Workshop(config, runs, operators, tmp_path, num_workers=1)
    stored = replace(shop, runs=replace(runs, graphs=GraphStore.write(runs.graphs, tmp_path, 32)))
    held, read = (Ablation.plan("without_hardware", [], each, SETTINGS, 1).shop.runs.graphs for each in (shop, stored))
    assert isinstance(read, GraphStore)
    for one, other in zip(held, read, strict=True):
        np.testing.assert_array_equal(one.node_features, other.node_features)
        np.testing.assert_array_equal(one.hardware, other.hardware)


def _settings(folder: Path, *arguments: str) -> Settings:
    GlobalHydra.instance().clear()
    quick = ("max_operators=200", "workers=1", "fit.epochs=1", "tracking=disabled", "network.hidden=8",
             "network.context=8")  # fmt: skip
    paths = (f"corpus.path={folder / 'corpus'}", f"work={folder / 'work'}", f"output={folder / 'checkpoint'}")
    with initialize_config_dir(CONFIGURATION, version_base="1.3"):
        composed = compose("train", [*arguments, *quick, *paths])
    return Settings.model_validate(OmegaConf.to_container(composed, resolve=True))


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 40 runs in two precisions, and a checkpoint with P1 and P2 of it."""
    folder = tmp_path_factory.mktemp("ablation")
    runs = read_table(shipped_table("runs.parquet"))
    own, more = (runs[runs["source_id"] == source] for source in ("jax-toolbox", "nemo-docs"))
    more = more[more["precision"] == "fp8_mixed"].head(5)  # with them there are enough to fit on without bf16_mixed
    pd.concat([own, more]).to_csv(folder / "runs.csv", index=False)
    read_table(shipped_table("ops.parquet")).iloc[::2000].to_parquet(folder / "ops.parquet")
    build_corpus(folder / "corpus", folder / "runs.csv", folder / "ops.parquet")
    members = ("members=1", "protocols.members=1", "protocols.folds=2")
    refused = _settings(folder, "protocols.names=[P1]", "protocols.ablations=true", *members)
    with pytest.raises(CheckpointError, match="run experiment=p2 first"):
        run_training(refused)
    run_training(_settings(folder, "protocols.names=[P1,P2]", *members))
    return folder


def test_the_experiment_adds_its_table_and_leaves_the_rest(trained_folder: Path) -> None:
    checkpoint = trained_folder / "checkpoint"
    before = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    run_training(_settings(trained_folder, "experiment=ablation"))
    after = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {"metrics.json"}
    metrics = load_checkpoint(checkpoint).metrics
    added = metrics["P2"].pop("ablations")
    assert metrics == json.loads(before["metrics.json"])
    assert set(added) == set(NAMES)
    assert added["full"]["mape_percent"] == pytest.approx(metrics["P2"]["parts"]["network"]["mape_percent"])
    assert added["full"]["blended"]["mape_percent"] == pytest.approx(metrics["P2"]["mape_percent"])
    assert {own["count"] for own in added.values()} == {metrics["P2"]["count"]}
    assert len({own["mape_percent"] for own in added.values()}) == 4
    written = {file: file.stat().st_mtime_ns for file in (trained_folder / "work").rglob("*.weights")}
    run_training(_settings(trained_folder, "experiment=ablation"))
    assert written == {file: file.stat().st_mtime_ns for file in (trained_folder / "work").rglob("*.weights")}
    names = {file.name.rsplit(".", 3)[0] for file in written}
    precisions = ("bf16_mixed", "fp8_mixed")
    assert {f"{name}-P2-{precision}" for name in NAMES[1:] for precision in precisions} < names
    assert not any(name.startswith("full") for name in names)  # P2 fitted them
    *_, last = ablations({"P2": {"ablations": added}}).splitlines()
    assert last.count("%") == 4


def test_p3_has_its_b3(trained_folder: Path) -> None:
    run_training(_settings(trained_folder, "experiment=p3"))
    metrics = load_checkpoint(trained_folder / "checkpoint").metrics
    b3 = metrics["P3"]["baselines"]["b3"]["mape_percent"]
    assert b3 != pytest.approx(metrics["P3"]["parts"]["network"]["mape_percent"])
    assert [
        line for line in figures(metrics).splitlines() if line.startswith("| P3") and line.endswith(f" {b3:.1f}% |")
    ]


def test_weights_that_know_all_are_no_start(trained_folder: Path) -> None:
    settings = _settings(trained_folder, "experiment=ablation", f"finetune_from={trained_folder / 'checkpoint'}")
    with pytest.raises(CheckpointError, match="must not start from weights"):
        run_training(settings)
