"""The error figures against numbers worked out by hand, and the properties any error figure must have."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnn_predictor import metrics

seconds = st.floats(1e-4, 1e4)
pairs = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=20)


def _rows(**columns: object) -> pd.DataFrame:
    """Four answered rows of two sources; any column can be replaced."""
    base: dict[str, object] = {
        "run_id": ["a", "b", "c", "d"],
        "iter_time_s": [1.0, 2.0, 4.0, 1.0],
        "predicted_iter_time_s": [1.1, 1.8, 4.0, 2.0],
        "predicted_low_s": [0.9, 1.7, 3.0, 1.5],
        "predicted_high_s": [1.3, 1.9, 5.0, 2.5],
        "peak_mem_gb": [10.0, np.nan, 20.0, np.nan],
        "predicted_peak_mem_gb": [11.0, 5.0, 18.0, 5.0],
        "in_domain": [True, True, True, False],
        "status": ["ok"] * 4,
        "source_id": ["x", "x", "x", "y"],
        "gpu": ["A", "A", "B", "B"],
        "precision": ["bf16_mixed", "fp8_mixed", "bf16_mixed", "fp16"],
        "architecture": ["decoder"] * 4,
        "model_size": ["under 1B", "under 1B", "1B-3B", "1B-3B"],
        "gpu_count": ["1"] * 4,
        "pair_group": ["p", "p", "", ""],
        "layout_group": [""] * 4,
        "layout": [""] * 4,
    }
    return pd.DataFrame({**base, **columns})


def test_errors_by_hand() -> None:
    measured, predicted = [1.0, 2.0, 4.0, 1.0], [1.1, 1.8, 4.0, 2.0]  # +10%, -10%, 0%, +100%
    assert metrics.mape(measured, predicted) == pytest.approx(30.0)
    assert metrics.median_ape(measured, predicted) == pytest.approx(10.0)
    assert metrics.signed_mean(measured, predicted) == pytest.approx(25.0)
    assert metrics.macro_mape(measured, predicted, ["x", "x", "x", "y"]) == pytest.approx((20.0 / 3 + 100.0) / 2)


def test_interval_by_hand() -> None:
    figures = metrics.interval_figures([1.0, 2.0, 4.0], [0.9, 2.1, 2.0], [1.8, 2.5, 8.0])
    assert figures["coverage_percent"] == pytest.approx(200 / 3)
    assert figures["median_high_over_low"] == pytest.approx(2.0)


def test_evaluation_metrics_by_hand() -> None:
    result = metrics.evaluation_metrics(_rows(baseline_b1_s=[2.0, 4.0, 8.0, 2.0]))
    assert (result["count"], result["skipped"], result["measured"]) == (4, 0, 4)
    assert result["mape_percent"] == pytest.approx(30.0)
    assert result["in_domain"]["mape_percent"] == pytest.approx(20 / 3)
    assert result["out_of_domain"]["mape_percent"] == pytest.approx(100.0)
    assert result["by_source"]["y"]["count"] == 1
    assert result["by_gpu"]["B"]["mape_percent"] == pytest.approx(50.0)
    assert result["by_precision"]["fp8_mixed"]["signed_mean_percent"] == pytest.approx(-10.0)
    assert result["memory"] == pytest.approx(
        {"count": 2, "mape_percent": 10.0, "median_ape_percent": 10.0, "signed_mean_percent": 0.0}
    )
    assert result["interval"]["coverage_percent"] == pytest.approx(50.0)
    assert result["baselines"]["b1"]["mape_percent"] == pytest.approx(100.0)
    # bf16 over fp8: measured 1/2, predicted 1.1/1.8
    speedup = result["precision_speedup"]
    assert speedup["count"] == 1
    assert speedup["mape_percent"] == pytest.approx(100 * (1.1 / 1.8 / 0.5 - 1))
    assert speedup["right_direction_percent"] == 100.0


def test_repeats_of_one_precision_make_one_pair() -> None:
    rows = _rows(pair_group=["p"] * 4, precision=["bf16_mixed", "bf16_mixed", "fp8_mixed", "fp8_mixed"])
    found = metrics.precision_pairs(rows)
    assert len(found) == 1
    assert found["measured"][0] == pytest.approx(np.sqrt(1 * 2) / np.sqrt(4 * 1))
    assert found["predicted"][0] == pytest.approx(np.sqrt(1.1 * 1.8) / np.sqrt(4 * 2))


def test_skipped_and_unmeasured_rows_count_but_do_not_err() -> None:
    rows = _rows(
        status=["ok", "ok", "skipped", "ok"],
        iter_time_s=[1.0, 2.0, 4.0, np.nan],
        predicted_iter_time_s=[1.1, 1.8, np.nan, 2.0],
    )
    result = metrics.evaluation_metrics(rows)
    assert (result["count"], result["skipped"], result["measured"]) == (3, 1, 2)
    assert result["answered_percent"] == pytest.approx(75.0)
    assert result["mape_percent"] == pytest.approx(10.0)


def test_operator_figures_by_hand() -> None:
    operators = pd.DataFrame(
        {
            "latency_s": [1e-5, 1e-5, 2e-5],
            "predicted_s": [1.1e-5, 0.8e-5, 2e-5],
            "kind": ["gemm", "gemm", "all_reduce"],
            "dtype": ["bf16", "fp8_e4m3", "bf16"],
            "source_id": ["a", "a", "b"],
            "gpu": ["H100", "H100", "A100"],
        }
    )
    figures = metrics.operator_figures(operators)
    assert figures["mape_percent"] == pytest.approx(10.0)
    assert figures["by_kind"]["gemm"]["mape_percent"] == pytest.approx(15.0)
    assert sum(each["count"] for each in figures["by_kind"]["gemm"]["by_dtype"].values()) == 2
    assert figures["by_dtype"]["fp8_e4m3"]["signed_mean_percent"] == pytest.approx(-20.0)
    assert figures["by_source"]["b"]["count"] == 1


@pytest.mark.parametrize("rows", [_rows(status=["skipped"] * 4), _rows().iloc[:0]])
def test_undefined_figures_are_null_not_nan(rows: pd.DataFrame) -> None:
    text = json.dumps(metrics.evaluation_metrics(rows), allow_nan=False)
    assert json.loads(text)["mape_percent"] is None


@given(pairs, st.floats(1e-3, 1e3))
def test_error_does_not_depend_on_the_unit_of_time(rows: list[tuple[float, float]], scale: float) -> None:
    measured, predicted = np.array(rows).T
    for figure in (metrics.mape, metrics.median_ape, metrics.signed_mean):
        assert figure(measured * scale, predicted * scale) == pytest.approx(figure(measured, predicted), abs=1e-6)


@given(pairs)
def test_error_is_zero_exactly_for_perfect_predictions_and_bounds_the_bias(rows: list[tuple[float, float]]) -> None:
    measured, predicted = np.array(rows).T
    assert metrics.mape(measured, measured) == 0.0
    error, bias = metrics.mape(measured, predicted), metrics.signed_mean(measured, predicted)
    assert error is not None
    assert bias is not None
    assert abs(bias) <= error + 1e-9


@given(pairs)
def test_one_source_makes_the_macro_average_the_plain_one(rows: list[tuple[float, float]]) -> None:
    measured, predicted = np.array(rows).T
    macro = metrics.macro_mape(measured, predicted, ["only"] * len(rows))
    assert macro == pytest.approx(metrics.mape(measured, predicted))


def test_runs_are_broken_down_by_size_and_number_of_gpus() -> None:
    result = metrics.evaluation_metrics(_rows())
    assert result["by_model_size"]["under 1B"]["mape_percent"] == pytest.approx(10.0)
    assert result["by_model_size"]["1B-3B"]["mape_percent"] == pytest.approx(50.0)
    assert result["by_gpu_count"]["1"]["count"] == 4


def test_the_noise_floor_is_how_far_repeats_of_a_job_are_from_their_median() -> None:
    reference = pd.DataFrame(
        {
            "run_id": list("abcdef"), "source_id": ["x"] * 5 + ["y"], "job_group": list("pqrstu"), "job_key": ["k"] * 6,
            "num_layers": [4.0, 4.0, 4.0, 8.0, 8.0, 8.0], "iter_time_s": [1.0, 1.1, 0.8, 2.0, 3.0, 9.0],
        }
    )  # fmt: skip
    deviations = metrics.repeat_deviations(reference)
    assert deviations.round(6).tolist() == [0.0, 10.0, 20.0, 20.0, 20.0]  # the source's lone run is no repeat
    assert metrics.noise_figures(reference)["median_percent"] == pytest.approx(20.0)
    assert metrics.noise_figures(reference.iloc[[0, 3]])["median_percent"] is None
