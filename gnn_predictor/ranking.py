"""How well layouts are ranked: runs that differ only in how a job is laid out, in measured and in predicted order.

A group holds the runs of one source with the same model, batch, cluster, precision, software and optimizer; layouts
are told apart by the parallel plan and the micro batch. Repeats of a layout count once, by their geometric mean.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

TOP = 3
# With as many layouts as are looked at, the fastest is among them whatever is predicted; two have no order to speak of.
LEAST_FOR_TOP = TOP + 1
LEAST_FOR_CORRELATION = 3


def layout_ranking(rows: pd.DataFrame, predicted: str = "predicted_iter_time_s") -> pd.DataFrame:
    """One line a group: its source, number of layouts, and how the column ``predicted`` ranks them.

    ``rows`` has ``source_id``, ``layout_group`` (equal for rows that differ only in layout, empty when unknown),
    ``layout``, ``iter_time_s`` and ``predicted``. ``hit``: the layout measured fastest is among the ``TOP`` predicted
    fastest. ``correlation``: Spearman's. ``regret``: measured time of the layout predicted fastest, over the fastest's.
    """
    usable = rows[(rows["layout_group"].astype(str) != "") & (rows["iter_time_s"] > 0) & (rows[predicted] > 0)]
    logs = usable.assign(y=np.log(usable["iter_time_s"].astype(float)), p=np.log(usable[predicted].astype(float)))
    means = logs.groupby(["source_id", "layout_group", "layout"], sort=True)[["y", "p"]].mean()
    lines = []
    for (source, _), group in means.groupby(level=["source_id", "layout_group"], sort=True):
        if len(group) < LEAST_FOR_CORRELATION:
            continue
        measured, guessed = group["y"].to_numpy(), group["p"].to_numpy()
        fastest, chosen = int(measured.argmin()), int(guessed.argmin())
        lines.append(
            {
                "source_id": source,
                "layouts": len(group),
                "hit": bool((guessed < guessed[fastest]).sum() < TOP),
                "correlation": _spearman(measured, guessed),
                "regret": math.exp(measured[chosen] - measured[fastest]),
            }
        )
    return pd.DataFrame(lines, columns=["source_id", "layouts", "hit", "correlation", "regret"])


def _spearman(first: Any, second: Any) -> float:
    """Correlation of the ranks; NaN where one of them has no order."""
    ranks = [pd.Series(values).rank().to_numpy() for values in (first, second)]
    if min(float(np.ptp(each)) for each in ranks) == 0:
        return math.nan
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def ranking_figures(rows: pd.DataFrame, predicted: str = "predicted_iter_time_s") -> dict[str, Any]:
    """Figures over all groups and by source; what is undefined (no group) is ``None``."""
    groups = layout_ranking(rows, predicted)
    by_source = {str(name): _figures(part) for name, part in groups.groupby("source_id", sort=True)}
    return {**_figures(groups), "by_source": by_source}


def _figures(groups: pd.DataFrame) -> dict[str, Any]:
    large = groups[groups["layouts"] >= LEAST_FOR_TOP]
    correlation = groups["correlation"].dropna()
    return {
        "groups": len(groups),
        "groups_for_top": len(large),
        f"top{TOP}_hit_percent": 100.0 * float(large["hit"].mean()) if len(large) else None,
        "median_spearman": float(correlation.median()) if len(correlation) else None,
        "mean_regret_percent": 100.0 * float(large["regret"].mean() - 1) if len(large) else None,
    }
