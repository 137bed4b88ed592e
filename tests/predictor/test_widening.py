"""Intervals widen with the distance from the training data as held-out errors do, and cover what they say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnn_predictor.checkpoint import load_checkpoint, save_checkpoint
from gnn_predictor.distance import TrainingPoints
from gnn_predictor.interval import Interval, half_width_in_spreads
from gnn_predictor.prediction import predict
from gnn_predictor.widening import (
    ESTIMATES,
    coverage_figures,
    fit_widening,
    interval_metrics,
    joined,
    left_out_half_widths,
    read_held_out,
    write_held_out,
)


def _rows(seed: int, growth: float = 2.0, count: int = 3000) -> pd.DataFrame:
    """Held-out rows of three protocols whose errors are Laplace with a scale that grows with the distance."""
    generator = np.random.default_rng(seed)
    distance = generator.gamma(2.0, 0.8, count)
    spread = generator.uniform(0.02, 0.1, count)
    table = pd.DataFrame(
        {
            "protocol": generator.choice(["P1", "P2", "P5"], count),
            "run_id": [f"r{index % (count // 2)}" for index in range(count)],
            "log_error": generator.laplace(0.0, spread * (1.0 + growth * distance)),
            "spread": spread,
            "distance": distance,
            **{name: np.ones(count) for name in ESTIMATES},
        }
    )
    return table.assign(split=table["protocol"] + "-" + pd.Series(generator.integers(0, 5, count)).astype(str))


def test_every_distance_is_covered() -> None:
    knots, fresh = fit_widening(_rows(0), 0.9), _rows(1)
    half_width = fresh["spread"] * [half_width_in_spreads(knots, each) for each in fresh["distance"]]
    inside = fresh["log_error"].abs() <= half_width
    for _, part in inside.groupby(pd.qcut(fresh["distance"], 4)):
        assert 0.86 < part.mean() < 0.94
    flat = half_width_in_spreads(fit_widening(_rows(0, growth=0.0), 0.9), 1.0)
    assert flat == pytest.approx(math.log(10), rel=0.1)  # the 90% quantile of a Laplace distribution of scale 1


def test_a_split_is_judged_by_knots_that_saw_none_of_its_runs() -> None:
    rows = _rows(2)
    # A split whose errors are a hundredfold: its own rows must not widen its interval.
    own = (rows["split"] == "P5-0").to_numpy()
    wild = rows.assign(log_error=rows["log_error"] * np.where(own, 100.0, 1.0))
    without = wild[~wild["run_id"].isin(set(wild.loc[own, "run_id"]))]
    half_width = left_out_half_widths(wild, "P5", 0.9)
    assert list(half_width.index) == list(wild.index[wild["protocol"] == "P5"])
    knots = fit_widening(without, 0.9)
    for index in wild.index[own][:20]:
        expected = wild.at[index, "spread"] * half_width_in_spreads(knots, wild.at[index, "distance"])
        assert half_width[index] == pytest.approx(expected)
    figures = coverage_figures(wild[wild["protocol"] == "P5"], half_width)
    assert figures["by_split"]["P5-0"] < 10 < 85 < figures["by_split"]["P5-1"]


@given(
    steps=st.lists(st.tuples(st.floats(0.01, 2), st.floats(0, 3)), min_size=1, max_size=8),
    near=st.floats(0, 20),
    further=st.floats(0, 20),
)
def test_farther_is_never_narrower(steps: list[tuple[float, float]], near: float, further: float) -> None:
    distances, widths = np.cumsum([step for step, _ in steps]), 1.0 + np.cumsum([rise for _, rise in steps])
    knots = tuple(zip(distances.tolist(), widths.tolist(), strict=True))
    assert half_width_in_spreads(knots, near) <= half_width_in_spreads(knots, near + further) * (1 + 1e-12)
    assert half_width_in_spreads(knots, distances[-1]) == pytest.approx(widths[-1])


def test_a_protocols_interval_is_judged_with_the_rows_of_all() -> None:
    rows = _rows(5)
    figures = interval_metrics(rows, "P1", 0.9)
    half_width = left_out_half_widths(rows, "P1", 0.9)
    own = rows[rows["protocol"] == "P1"]
    assert figures["count"] == len(own)
    assert figures["coverage_percent"] == pytest.approx(100 * (own["log_error"].abs() <= half_width).mean())
    assert figures["median_high_over_low"] == pytest.approx(math.exp(2 * half_width.median()))
    assert set(figures["by_split"]) == set(own["split"])


def test_new_rows_take_the_place_of_their_protocols(tmp_path: Path) -> None:
    assert read_held_out(tmp_path).empty
    there = _rows(3)
    write_held_out(there, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held_out.parquet"]
    new = _rows(4)[lambda rows: rows["protocol"] == "P5"]
    both = joined(read_held_out(tmp_path), [new])
    assert len(both) == (there["protocol"] != "P5").sum() + len(new)
    assert both[both["protocol"] == "P5"]["log_error"].tolist() == new["log_error"].tolist()


def _log_width(prediction: Any) -> float:
    return math.log(prediction.iteration_time_high_s / prediction.iteration_time_low_s)


def test_a_checkpoint_that_knows_its_training_runs_widens_with_distance(
    job_of: Any, untrained: Path, tmp_path: Path
) -> None:
    plain = load_checkpoint(untrained)
    here = job_of().resolved()
    points = TrainingPoints.of([_arrays(here)], [here.precision.label], plain.config.domain.precisions)
    interval = Interval(by_distance=((0.0, 2.0), (1.0, 4.0), (2.0, 8.0)))
    knowing = replace(plain, points=points, config=plain.config.model_copy(update={"interval": interval}))
    knowing = load_checkpoint(save_checkpoint(tmp_path / "knowing", knowing, ""))
    near, far = (predict(job_of(**changes), checkpoint=knowing) for changes in ({}, {"precision": "fp16_mixed"}))
    spread = _log_width(predict(job_of(), checkpoint=plain)) / 6.0
    assert _log_width(near) == pytest.approx(4.0 * spread, rel=0.02)
    assert _log_width(far) > 1.9 * _log_width(near)  # another precision is at least 1 away
    assert knowing.points is not None
    assert knowing.points.distances([_arrays(here)], ["fp16_mixed"], ("bf16_mixed",))[0] == pytest.approx(1.0, abs=0.05)


def _arrays(job: Any) -> Any:
    from dataset_builder.tracing.layout import rank_layout
    from dataset_builder.tracing.trace import build_graph
    from gnn_predictor.features import featurize

    return featurize(job, build_graph(job), rank_layout(job))


def test_broken_points_are_named(untrained: Path, tmp_path: Path) -> None:
    points = TrainingPoints(torch.zeros(2, 3), torch.zeros(2))
    path = save_checkpoint(tmp_path / "broken", replace(load_checkpoint(untrained), points=points), "")
    (path / "training_points.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="training_points"):
        load_checkpoint(path)
