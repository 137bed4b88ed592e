"""What a few runs of an unseen source are worth: found where there is an offset, and never judged on its own jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor import source_calibration
from gnn_predictor.adapter import Shrinkage
from gnn_predictor.checkpoint import load_checkpoint
from gnn_predictor.dataset import RunExamples
from gnn_predictor.features import featurize
from gnn_predictor.prediction import network_of, predict
from gnn_predictor.source_calibration import HeldOutSource, calibrated_figures, draws_of


@pytest.fixture(scope="module")
def source_of(job_of: Callable[..., TrainingJob], untrained: Path) -> Callable[..., HeldOutSource]:
    """A source of twelve runs in six job groups whose times are a factor on the prediction."""
    checkpoint = load_checkpoint(untrained)

    def build(name: str, factor: float) -> HeldOutSource:
        sizes = [(hidden, micro) for hidden in (512, 768, 1024, 1536, 2048, 3072) for micro in (1, 2)]
        jobs = [
            job_of(
                model={"hidden_size": hidden, "num_attention_heads": 8}, batch={"micro_batch_size": micro}
            ).resolved()
            for hidden, micro in sizes
        ]
        predicted = [each.iteration_time_s for each in predict(jobs, checkpoint=checkpoint)]
        noise = np.random.default_rng(0).normal(0.0, 0.02, len(jobs))
        table = pd.DataFrame(
            {"iter_time_s": np.array(predicted) * factor * np.exp(noise), "job_group": [f"g{h}" for h, _ in sizes]}
        )
        graphs = tuple(featurize(job, build_graph(job), rank_layout(job)) for job in jobs)
        half_width = np.full(len(jobs), 0.6)
        network, runs = network_of(checkpoint)[0], RunExamples(table, graphs)
        return HeldOutSource(name, network, None, runs, tuple(jobs), half_width)

    return build


def test_no_row_is_judged_by_a_run_of_its_own_job(source_of: Any) -> None:
    source = source_of("slower", 1.5)
    draws = draws_of(source)
    assert len(draws) == source_calibration.NUM_DRAWS
    for draw in draws:
        assert len(draw.calibrating) == source_calibration.NUM_RUNS
        assert not set(draw.calibrating.jobs) & set(draw.judged.jobs)
    again = draws_of(source)
    assert all((a.judged.log_measured == b.judged.log_measured).all() for a, b in zip(draws, again, strict=True))


def test_an_offset_of_a_source_is_found_with_a_strength_of_the_others(
    source_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = (Shrinkage(offset=0.1, factors=10.0, local=0.0), Shrinkage(offset=100.0, factors=100.0, local=0.0))
    monkeypatch.setattr(source_calibration, "GRID", grid)
    monkeypatch.setattr(source_calibration, "NUM_DRAWS", 2)
    figures, chosen = calibrated_figures([source_of("slower", 1.5), source_of("faster", 0.7)])
    assert chosen == grid[0]
    for name in ("slower", "faster"):
        assert figures["by_source"][name]["mape_percent"] < 0.3 * figures["by_source"][name]["before_mape_percent"]
        assert figures["by_source"][name]["coverage_percent"] > 90
    assert figures["macro_median_high_over_low"] < np.exp(2 * 0.6)


def test_a_source_of_few_rows_or_one_job_is_not_judged(source_of: Any) -> None:
    source = source_of("slower", 1.5)
    few = replace(source, runs=source.runs.select(np.arange(4)), jobs=source.jobs[:4], half_width=source.half_width[:4])
    alone = RunExamples(source.runs.table.assign(job_group="g"), source.runs.graphs)
    one = replace(source, runs=alone)
    figures, chosen = calibrated_figures([few, one])
    assert figures["by_source"] == {}
    assert figures["macro_mape_percent"] is None
    assert chosen == Shrinkage()
