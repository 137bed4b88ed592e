"""The baselines: what they read off a graph, that they recover constants, that they never see held-out groups."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor import baselines

SMALL = {
    "model": {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 32000},
    "batch": {"seq_length": 1024, "micro_batch_size": 1, "global_batch_size": 32},
    "cluster": {"gpu": "A100-SXM4-80GB", "num_nodes": 1, "gpus_per_node": 8},
    "parallel": {"tensor": 2, "pipeline": 2},
}


def _features(**changes: Any) -> dict[str, float | str]:
    job = TrainingJob.parse({**SMALL, **changes}).resolved()
    return baselines.analytic_features(job, build_graph(job), rank_layout(job))


@functools.cache
def _table(rows: int, seed: int = 0) -> pd.DataFrame:
    """A synthetic reference table: every feature of a real job, with roofline times and sizes drawn at random."""
    rng = np.random.default_rng(seed)
    base = _features()
    lines = []
    for index in range(rows):
        roofline = float(np.exp(rng.normal()))
        drawn = {
            "roofline_s": roofline,
            "b0_compute_s": 0.7 * roofline,
            "b0_communication_s": 0.2 * roofline,
            "gemm_s": 0.5 * roofline,
            "hidden_size": float(rng.integers(256, 8192)),
        }
        group = f"group{index // 4}"
        keys = {"run_id": f"run{seed}-{index}", "source_id": "s", "job_group": group, "job_key": f"key{index // 2}"}
        lines.append(baselines.reference_row(keys, {**base, **drawn}, 3.0 * roofline))
    return pd.DataFrame(lines)


def test_parts_make_up_the_roofline() -> None:
    features = _features()
    total = sum(float(features[f"{part}_s"]) for part in baselines.PARTS)
    assert features["roofline_s"] == pytest.approx(total)
    assert float(features["gemm_s"]) > 0
    assert float(features["tensor_s"]) > 0
    assert float(features["data_s"]) > 0
    assert features["gpu"] == "A100-SXM4-80GB"
    assert features["precision"] == "bf16_mixed"


def test_roofline_knows_the_precision() -> None:
    fp32 = _features(precision="fp32")
    assert float(fp32["gemm_s"]) > 3 * float(_features()["gemm_s"])


def test_more_microbatches_cost_more_and_shrink_the_bubble() -> None:
    few = _features()
    many = _features(batch={**SMALL["batch"], "global_batch_size": 64})
    assert float(many["gemm_s"]) == pytest.approx(float(few["gemm_s"]) * (32 + 1) / (16 + 1))
    assert float(many["bubble"]) < float(few["bubble"])


@settings(max_examples=20)
@given(st.floats(0.05, 20.0))
def test_b1_recovers_a_constant_factor(factor: float) -> None:
    table = _table(40)
    roofline = table["roofline_s"].to_numpy(float)
    assert baselines.fit_b1(table, factor * roofline)(table) == pytest.approx(factor * roofline)


@settings(max_examples=20)
@given(st.floats(0.05, 1.0))
def test_b0_recovers_the_efficiency_and_leaves_communication_alone(efficiency: float) -> None:
    table = _table(40)
    times = table["b0_compute_s"].to_numpy(float) / efficiency + table["b0_communication_s"].to_numpy(float)
    assert baselines.fit_b0(table, times)(table) == pytest.approx(times, rel=0.01)


def test_b2_is_deterministic_and_answers_unseen_categories() -> None:
    table = _table(40)
    times = table["iter_time_s"].to_numpy(float)
    new = table.head(3).assign(gpu="a device nobody has seen")
    first, second = (baselines.fit_b2(table, times)(new) for _ in range(2))
    assert first == pytest.approx(second, rel=0)
    assert first == pytest.approx(times[:3], rel=0.05)


def test_baselines_never_see_the_groups_they_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def spy(train: pd.DataFrame, times_s: baselines.Floats) -> baselines.Model:
        seen.append(set(train["job_group"]) | set(train["job_key"]) | set(train["run_id"]))

        def predict(rows: pd.DataFrame) -> baselines.Floats:
            identities = set(rows["job_group"]) | set(rows["job_key"]) | set(rows["run_id"])
            assert not identities & seen[-1]
            return np.ones(len(rows))

        return predict

    monkeypatch.setitem(baselines.BASELINES, "spy", spy)
    table = _table(80)
    foreign = _table(20, seed=1).assign(job_group="elsewhere", job_key="unknown")
    relabelled = _table(10, seed=2).assign(job_group="another name of a known job")  # job_key gives it away
    rows = pd.concat([table, foreign, relabelled], ignore_index=True)
    predicted = baselines.held_out_predictions(table, rows, names=["spy"])
    assert predicted["spy"].eq(1.0).all()
    assert max(len(groups) for groups in seen) > min(len(groups) for groups in seen)  # foreign rows: the whole table


def test_too_few_reference_rows_give_no_baseline() -> None:
    table = _table(10)
    assert baselines.held_out_predictions(table, table, names=["b1"])["b1"].isna().all()


def test_reference_table_survives_the_disk(tmp_path: Path) -> None:
    table = _table(40)
    baselines.write_reference(table.to_dict("records"), tmp_path)
    read = baselines.read_reference(tmp_path)
    assert read is not None
    assert list(read.columns) == list(table.columns)
    assert read["iter_time_s"].to_numpy() == pytest.approx(table["iter_time_s"].to_numpy(), rel=1e-6)
    assert baselines.read_reference(tmp_path / "elsewhere") is None


def test_pair_group_and_job_key_ignore_only_what_they_say() -> None:
    def job(**changes: Any) -> TrainingJob:
        return TrainingJob.parse({**SMALL, **changes})

    assert baselines.pair_group(job()) == baselines.pair_group(job(precision="fp16_mixed", name="renamed"))
    assert baselines.pair_group(job()) != baselines.pair_group(job(software={"compile": True}))
    assert baselines.job_key(job()) == baselines.job_key(job(software={"compile": True}))
    assert baselines.job_key(job()) != baselines.job_key(job(parallel={"tensor": 4, "pipeline": 2}))
