"""How wide an interval has to be at which distance from the training data, from held-out errors of every protocol.

In: a table of held-out rows (``protocol``, ``split``, ``run_id``, ``log_error``, ``spread``, ``distance``). Out: knots
(distance, half-width in spreads) between which is interpolated. Rows are cut into bins by distance; of each bin the
half-width is the conformal quantile of |log error| / spread (Vovk 2012, conditional validity, arXiv 1209.2673), and no
nearer bin is wider than one farther away. Splits weigh by the root of their size: one large source rules no bin.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression

from gnn_predictor.interval import Knots, half_width_in_spreads
from gnn_predictor.metrics import interval_figures

HELD_OUT_FILE = "held_out.parquet"
# Beside what the interval is calibrated on, both estimates and the measured time, which the blend is fitted to.
ESTIMATES = ("iter_time_s", "network_s", "runs_s", "runs_deviation")
COLUMNS = ("protocol", "split", "run_id", "log_error", "spread", "distance", *ESTIMATES)
_MOST_BINS = 12
_LEAST_ROWS_OF_BIN = 40

Floats = NDArray[np.float64]


def fit_widening(rows: pd.DataFrame, level: float) -> Knots:
    """Knots that cover a share ``level`` at every distance; none without rows."""
    if rows.empty:
        return ()
    rows = rows.sort_values("distance")
    weight = rows.groupby("split")["split"].transform("size").to_numpy(float) ** -0.5
    score = (rows["log_error"].abs() / rows["spread"]).to_numpy(float)
    distance = rows["distance"].to_numpy(float)
    bins = max(1, min(_MOST_BINS, len(rows) // _LEAST_ROWS_OF_BIN))
    share = (np.cumsum(weight) - weight / 2) / weight.sum()
    number = np.minimum((share * bins).astype(int), bins - 1)
    centres, factors, weights = [], [], []
    for each in np.unique(number):
        inside = number == each
        centres.append(float(np.average(distance[inside], weights=weight[inside])))
        factors.append(_quantile(score[inside], weight[inside], level))
        weights.append(float(weight[inside].sum()))
    rising = IsotonicRegression().fit_transform(centres, factors, sample_weight=weights)
    return tuple((centre, float(factor)) for centre, factor in zip(centres, rising, strict=True))


def _quantile(score: Floats, weight: Floats, level: float) -> float:
    """Weighted conformal quantile: the next score counts as one more, of average weight, beyond all."""
    order = score.argsort()
    reached = np.cumsum(weight[order]) / (weight.sum() + weight.mean())
    return float(score[order][min(int(np.searchsorted(reached, level)), len(score) - 1)])


def left_out_half_widths(rows: pd.DataFrame, protocol: str, level: float) -> pd.Series[float]:
    """Half-widths (logarithm) of a protocol's rows; the knots of a split saw none of its runs in any protocol."""
    parts: list[pd.Series[float]] = []
    for _, own in rows[rows["protocol"] == protocol].groupby("split"):
        others = rows[~rows["run_id"].isin(set(own["run_id"]))]
        knots = fit_widening(others if len(others) else own, level)
        factor = [half_width_in_spreads(knots, each) for each in own["distance"]]
        parts.append(own["spread"] * factor)
    half_widths: pd.Series[float] = pd.concat(parts).sort_index()
    return half_widths


def interval_metrics(known: pd.DataFrame, protocol: str, level: float) -> dict[str, Any]:
    """How the interval that the held-out rows of all protocols give covers this one's."""
    rows = known[known["protocol"] == protocol]
    half_width = left_out_half_widths(known, protocol, level)
    predicted = rows["iter_time_s"] * np.exp(-rows["log_error"])
    low, high = predicted * np.exp(-half_width), predicted * np.exp(half_width)
    return interval_figures(rows["iter_time_s"], low, high) | coverage_figures(rows, half_width)


def coverage_figures(rows: pd.DataFrame, half_width: pd.Series[float]) -> dict[str, Any]:
    """Shares inside in percent, over rows, averaged over splits, and by split; median of high over low."""
    inside = 100.0 * (rows["log_error"].abs() <= half_width)
    by_split = inside.groupby(rows["split"]).mean()
    return {
        "coverage_percent": float(inside.mean()),
        "macro_coverage_by_split_percent": float(by_split.mean()),
        "median_high_over_low": float(np.exp(2.0 * half_width.median())),
        "by_split": {str(name): float(value) for name, value in by_split.items()},
    }


def read_held_out(checkpoint: Path | None) -> pd.DataFrame:
    """The held-out rows that a checkpoint's interval was calibrated on; empty without one, or when it carries none."""
    file = checkpoint / HELD_OUT_FILE if checkpoint else None
    return pd.read_parquet(file) if file and file.exists() else pd.DataFrame(columns=list(COLUMNS))


def write_held_out(rows: pd.DataFrame, checkpoint: Path) -> None:
    """Writes them into a checkpoint's directory, in place of those that are there."""
    partial = checkpoint / f".{HELD_OUT_FILE}"
    rows[list(COLUMNS)].to_parquet(partial, index=False)
    partial.replace(checkpoint / HELD_OUT_FILE)


def joined(there: pd.DataFrame, new: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Rows by protocol, the new ones in place of those that were there."""
    fresh = pd.concat([each[list(COLUMNS)] for each in new], ignore_index=True) if new else there.iloc[:0]
    kept = there[~there["protocol"].isin(set(fresh["protocol"]))]
    return pd.concat([part for part in (kept, fresh) if len(part)] or [fresh], ignore_index=True)
