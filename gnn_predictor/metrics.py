"""How good predictions are: error figures on arrays of seconds, and the structure of ``metrics.json``.

In: measured and predicted values (seconds, or bytes for memory) or the table of predictions that ``evaluate`` writes.
Out: plain numbers; every error is in percent of the measured value. A figure that is undefined (no rows, no intervals)
is ``None``, never NaN, so that the result is valid JSON.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from gnn_predictor.ranking import ranking_figures

SCHEMA_VERSION = 1
BREAKDOWNS = ("precision", "gpu", "source_id", "architecture", "model_size", "gpu_count")
BASELINE_PREFIX = "baseline_"  # columns ``baseline_<name>_s`` of the predictions table hold baselines' seconds
_OF_THE_RUN = ("run_id", "job_group", "job_key", "iter_time_s")  # of a reference row; what is left tells the job
SPEEDUP_TIE = 0.02  # measured speed-ups within 2% of 1 have no direction to get right: that is repeat noise

Floats = NDArray[np.float64]


def signed_percentage_errors(measured: ArrayLike, predicted: ArrayLike) -> Floats:
    """``100 (predicted / measured - 1)`` of the rows where both are finite and the measurement is positive."""
    truth, guess = np.asarray(measured, dtype=float), np.asarray(predicted, dtype=float)
    usable = np.isfinite(truth) & np.isfinite(guess) & (truth > 0)
    errors: Floats = 100.0 * (guess[usable] / truth[usable] - 1.0)
    return errors


def mape(measured: ArrayLike, predicted: ArrayLike) -> float | None:
    """Mean absolute percentage error."""
    return _number(np.mean, np.abs(signed_percentage_errors(measured, predicted)))


def median_ape(measured: ArrayLike, predicted: ArrayLike) -> float | None:
    """Median absolute percentage error."""
    return _number(np.median, np.abs(signed_percentage_errors(measured, predicted)))


def signed_mean(measured: ArrayLike, predicted: ArrayLike) -> float | None:
    """Mean signed percentage error; positive when predictions are too long."""
    return _number(np.mean, signed_percentage_errors(measured, predicted))


def macro_mape(measured: ArrayLike, predicted: ArrayLike, group: Sequence[str]) -> float | None:
    """The MAPE of each group, averaged over groups: one large source can't hide the others."""
    table = pd.DataFrame({"y": np.asarray(measured, float), "p": np.asarray(predicted, float), "g": list(group)})
    figures = [mape(rows["y"], rows["p"]) for _, rows in table.groupby("g")]
    return _number(np.mean, np.array([figure for figure in figures if figure is not None]))


def interval_figures(measured: ArrayLike, low: ArrayLike, high: ArrayLike) -> dict[str, Any]:
    """Share of measurements inside [low, high], in percent, and the median of ``high / low``."""
    truth, lower, upper = (np.asarray(values, dtype=float) for values in (measured, low, high))
    usable = np.isfinite(truth) & np.isfinite(lower) & np.isfinite(upper) & (lower > 0)
    truth, lower, upper = truth[usable], lower[usable], upper[usable]
    return {
        "count": int(usable.sum()),
        "coverage_percent": _number(np.mean, 100.0 * ((lower <= truth) & (truth <= upper))),
        "median_high_over_low": _number(np.median, upper / lower),
    }


def precision_pairs(rows: pd.DataFrame, predicted: str = "predicted_iter_time_s") -> pd.DataFrame:
    """Pairs of measured rows that differ only in precision.

    ``rows`` has ``pair_group`` (equal for rows that differ only in precision, empty when unknown), ``precision``,
    ``iter_time_s`` and the column ``predicted``. Repeats of one precision count once, by their geometric mean.
    Returns one line a pair: the two precisions and the measured and predicted speed-up of the second over the first.
    """
    usable = rows[(rows["pair_group"].astype(str) != "") & (rows["iter_time_s"] > 0) & (rows[predicted] > 0)]
    logs = usable.assign(y=np.log(usable["iter_time_s"].astype(float)), p=np.log(usable[predicted].astype(float)))
    means = logs.groupby(["pair_group", "precision"], sort=True)[["y", "p"]].mean()
    pairs = []
    for group, part in means.groupby(level="pair_group", sort=True):
        named = [(str(key[1]), float(line["y"]), float(line["p"])) for key, line in part.iterrows()]  # type: ignore[index]
        for (first, y_first, p_first), (second, y_second, p_second) in itertools.combinations(named, 2):
            pairs.append((group, first, second, math.exp(y_first - y_second), math.exp(p_first - p_second)))
    return pd.DataFrame(pairs, columns=["pair_group", "precision_a", "precision_b", "measured", "predicted"])


def speedup_figures(pairs: pd.DataFrame) -> dict[str, Any]:
    """Error of the predicted precision speed-up, over all pairs and by pair of precisions."""
    clear = pairs[(pairs["measured"] - 1.0).abs() > SPEEDUP_TIE]
    right = (clear["measured"] > 1.0) == (clear["predicted"] > 1.0)
    names = pairs["precision_a"].astype(str) + "->" + pairs["precision_b"].astype(str)
    return {
        "count": len(pairs),
        "mape_percent": mape(pairs["measured"], pairs["predicted"]),
        "median_ape_percent": median_ape(pairs["measured"], pairs["predicted"]),
        "signed_mean_percent": signed_mean(pairs["measured"], pairs["predicted"]),
        "right_direction_percent": _number(np.mean, 100.0 * right.to_numpy(dtype=float)),
        "by_pair": {
            str(name): {"count": len(part), "mape_percent": mape(part["measured"], part["predicted"])}
            for name, part in pairs.groupby(names)
        },
    }


def time_figures(rows: pd.DataFrame, predicted: str = "predicted_iter_time_s") -> dict[str, Any]:
    """Error figures of one column of predicted seconds, over all rows and by each of ``BREAKDOWNS``."""
    figures: dict[str, Any] = _errors(rows, predicted)
    figures["macro_mape_by_source_percent"] = macro_mape(
        rows["iter_time_s"], rows[predicted], rows["source_id"].astype(str).tolist()
    )
    for column in BREAKDOWNS:
        key = "by_source" if column == "source_id" else f"by_{column}"
        figures[key] = {str(name): _errors(part, predicted) for name, part in rows.groupby(column, sort=True)}
    figures["precision_speedup"] = speedup_figures(precision_pairs(rows, predicted))
    figures["layout_ranking"] = ranking_figures(rows, predicted)
    return figures


def evaluation_metrics(predictions: pd.DataFrame) -> dict[str, Any]:
    """The content of ``metrics.json`` for a table of predictions.

    ``predictions`` has the columns of ``predictions.csv`` and the facts of each row: ``BREAKDOWNS``, ``pair_group``,
    ``layout_group`` and ``layout``; columns ``baseline_<name>_s`` hold baselines, which are judged on the rows that the
    predictor answered. Memory is in GB of 1e9 bytes.
    """
    answered = predictions[predictions["status"] == "ok"]
    measured = answered[answered["iter_time_s"] > 0]
    domain = measured["in_domain"].astype(bool)
    metrics: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "count": len(answered),
        "skipped": int((predictions["status"] == "skipped").sum()),
        "answered_percent": _number(np.mean, 100.0 * (predictions["status"] == "ok").to_numpy(dtype=float)),
        "measured": len(measured),
        **{key: value for key, value in time_figures(measured).items() if key != "count"},
        "in_domain": _errors(measured[domain], "predicted_iter_time_s"),
        "out_of_domain": _errors(measured[~domain], "predicted_iter_time_s"),
        "interval": interval_figures(
            measured["iter_time_s"], measured["predicted_low_s"], measured["predicted_high_s"]
        ),
        "memory": _memory_figures(answered),
        "baselines": {},
    }
    for column in predictions.columns:
        if column.startswith(BASELINE_PREFIX):
            name = column.removeprefix(BASELINE_PREFIX).removesuffix("_s")
            metrics["baselines"][name] = time_figures(measured, column)
    return metrics


def operator_figures(operators: pd.DataFrame) -> dict[str, Any]:
    """Errors on operators (``latency_s``, ``predicted_s``): all, by kind, format, source, GPU, and format of a kind."""
    figures: dict[str, Any] = error_figures(operators["latency_s"], operators["predicted_s"])
    for column, key in (("kind", "kind"), ("dtype", "dtype"), ("source_id", "source"), ("gpu", "gpu")):
        figures[f"by_{key}"] = _operators_by(operators, column)
    for kind, part in operators.groupby("kind"):
        figures["by_kind"][str(kind)]["by_dtype"] = _operators_by(part, "dtype")
    return figures


def _operators_by(operators: pd.DataFrame, column: str) -> dict[str, dict[str, Any]]:
    return {
        str(name): error_figures(part["latency_s"], part["predicted_s"]) for name, part in operators.groupby(column)
    }


def repeat_deviations(reference: pd.DataFrame) -> pd.Series[float]:
    """How far each run that was measured again is from the median of its job, in percent of that median.

    ``reference`` is a table of :mod:`gnn_predictor.baselines`: rows with the same features are the same job, as far as
    sources tell. No predictor can be better than these runs are among themselves.
    """
    jobs = reference.groupby([name for name in reference.columns if name not in _OF_THE_RUN])["iter_time_s"]
    again = jobs.transform("size") > 1
    return 100.0 * (reference["iter_time_s"] / jobs.transform("median") - 1.0).abs()[again]


def noise_figures(reference: pd.DataFrame) -> dict[str, Any]:
    """The noise floor: count, median, 90th percentile and mean of :func:`repeat_deviations`."""
    deviations = repeat_deviations(reference).to_numpy(float)
    return {
        "count": len(deviations),
        "median_percent": _number(np.median, deviations),
        "p90_percent": _number(lambda values: np.quantile(values, 0.9), deviations),
        "mean_percent": _number(np.mean, deviations),
    }


def error_figures(measured: ArrayLike, predicted: ArrayLike) -> dict[str, Any]:
    """Count, MAPE, median APE and signed mean of the rows that have both values."""
    return {
        "count": int(signed_percentage_errors(measured, predicted).size),
        "mape_percent": mape(measured, predicted),
        "median_ape_percent": median_ape(measured, predicted),
        "signed_mean_percent": signed_mean(measured, predicted),
    }


def _errors(rows: pd.DataFrame, predicted: str) -> dict[str, Any]:
    return error_figures(rows["iter_time_s"], rows[predicted])


def _memory_figures(rows: pd.DataFrame) -> dict[str, Any]:
    known = rows[(rows["peak_mem_gb"] > 0) & (rows["predicted_peak_mem_gb"] > 0)]
    return error_figures(known["peak_mem_gb"], known["predicted_peak_mem_gb"])


def _number(statistic: Any, values: NDArray[Any]) -> float | None:
    """The statistic as a float; ``None`` without values or when it is not finite."""
    if values.size == 0:
        return None
    result = float(statistic(values))
    return result if math.isfinite(result) else None
