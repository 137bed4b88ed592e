"""Figures of ranking layouts, by hand and by their properties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.job.schema import TrainingJob
from gnn_predictor.baselines import layout_group
from gnn_predictor.ranking import layout_ranking, ranking_figures

_SECONDS = st.lists(st.integers(1, 1000).map(float), min_size=4, max_size=12, unique=True)


def _rows(measured: list[float], predicted: list[float], **columns: Any) -> pd.DataFrame:
    number = len(measured)
    base = {
        "source_id": ["x"] * number,
        "layout_group": ["g"] * number,
        "layout": list(map(str, range(number))),
        "iter_time_s": measured,
        "predicted_iter_time_s": predicted,
    }
    return pd.DataFrame({**base, **columns})


def test_figures_by_hand() -> None:
    hit = _rows([1, 2, 3, 4], [1.5, 1.2, 3, 4])  # the fastest is predicted second
    miss = _rows([1, 2, 3, 4], [9, 2, 3, 4], source_id=["y"] * 4)  # the fastest is predicted last
    few = _rows([1, 2, 3], [3, 2, 1], layout_group=["three"] * 3)
    figures = ranking_figures(pd.concat([hit, miss, few]))
    assert (figures["groups"], figures["groups_for_top"]) == (3, 2)
    assert figures["top3_hit_percent"] == pytest.approx(50)
    assert figures["median_spearman"] == pytest.approx(-0.2)  # of 0.8, -0.2 and -1
    assert figures["mean_regret_percent"] == pytest.approx(100)  # both choose the one that takes 2 s
    assert figures["by_source"]["y"]["top3_hit_percent"] == 0
    assert figures["by_source"]["x"]["median_spearman"] == pytest.approx(-0.1)


@settings(max_examples=30, deadline=None)
@given(_SECONDS)
def test_predictions_in_the_measured_order_rank_perfectly(seconds: list[float]) -> None:
    figures = ranking_figures(_rows(seconds, [3 * value**0.5 for value in seconds]))
    assert figures["top3_hit_percent"] == 100
    assert figures["median_spearman"] == pytest.approx(1)
    assert figures["mean_regret_percent"] == pytest.approx(0, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(_SECONDS, st.integers(0, 1000))
def test_the_correlation_is_that_of_ranks(seconds: list[float], seed: int) -> None:
    predicted = np.random.default_rng(seed).permutation(np.arange(1, len(seconds) + 1)).astype(float).tolist()
    (line,) = layout_ranking(_rows(seconds, predicted)).to_dict("records")
    expected = pd.Series(seconds).corr(pd.Series(predicted), method="spearman")
    assert line["correlation"] == pytest.approx(expected)
    assert line["regret"] >= 1


def test_repeats_count_once_and_what_has_no_group_not_at_all() -> None:
    repeated = _rows([1, 4, 3, 2], [1, 4, 3, 2], layout=["a", "a", "b", "c"])
    (line,) = layout_ranking(repeated).to_dict("records")
    assert line["layouts"] == 3
    assert layout_ranking(_rows([1, 2, 3, 4], [1, 2, 3, 4], layout_group=[""] * 4)).empty
    assert ranking_figures(repeated.iloc[:0])["median_spearman"] is None


def test_equal_predictions_have_no_rank_correlation() -> None:
    figures = ranking_figures(_rows([1, 2, 3, 4], [1, 1, 1, 1]))
    assert figures["median_spearman"] is None


def _job(**parallel: Any) -> TrainingJob:
    micro = parallel.pop("micro_batch_size", 1)
    precision = parallel.pop("precision", "bf16_mixed")
    return TrainingJob.parse(
        {
            "model": {"preset": "llama3-8b"},
            "batch": {"seq_length": 2048, "micro_batch_size": micro, "global_batch_size": 64},
            "cluster": {"gpu": "H100-SXM5-80GB", "num_nodes": 2},
            "precision": precision,
            "parallel": {"sharding": "zero1", **parallel},
        }
    )


def test_layouts_of_a_job_share_their_group() -> None:
    group, layout = layout_group(_job(tensor=2))
    for other in (_job(tensor=4), _job(pipeline=2), _job(micro_batch_size=2), _job(recompute="full")):
        assert layout_group(other)[0] == group
        assert layout_group(other)[1] != layout
    assert layout_group(_job(tensor=2, precision="fp8_mixed"))[0] != group
    assert layout_group(_job(tensor=2)) == (group, layout)
