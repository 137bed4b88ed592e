"""The interval around a prediction: how many of the spreads that the network expects, at which distance from training.

Spread and half-width are of log(measured / predicted). :mod:`gnn_predictor.widening` calibrates the knots.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_Number = Annotated[float, Field(ge=0)]
Knots = tuple[tuple[_Number, _Number], ...]
"""(distance, half-width in spreads), by rising distance."""

# e^5 is a factor of 148: beyond it an interval says nothing, and must not overflow.
_WIDEST = 5.0


class Interval(BaseModel):
    """Conformal bounds of log(measured / predicted), in multiples of the spread the network expects of the job.

    A share ``level`` of runs lies inside. With ``by_distance`` the half-width follows the job's distance from the
    training data. Without, it is ``low`` and ``high`` spreads, and outside the training domain ``out_of_domain_factor``
    times as far away: errors on a precision or a source that was left out of training are about three times those on
    unseen jobs of seen ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    level: Annotated[float, Field(gt=0, lt=1)] = 0.9
    low: _Number = 3.0
    high: _Number = 3.0
    out_of_domain_factor: Annotated[float, Field(ge=1)] = 3.0
    by_distance: Knots = ()

    def bounds(self, seconds: float, spread: float, in_domain: bool, distance: float | None) -> tuple[float, float]:
        """Low and high seconds; ``distance`` is ``None`` where it is not known."""
        if self.by_distance and distance is not None:
            low = high = half_width_in_spreads(self.by_distance, distance)
        else:
            factor = 1.0 if in_domain else self.out_of_domain_factor
            low, high = self.low * factor, self.high * factor
        return seconds * math.exp(-min(low * spread, _WIDEST)), seconds * math.exp(min(high * spread, _WIDEST))


def half_width_in_spreads(knots: Knots, distance: float) -> float:
    """Linear between knots, level before the first, and in proportion to the distance beyond the last."""
    (first, width), (last, widest) = knots[0], knots[-1]
    if distance <= first:
        return width
    if distance >= last:
        return widest * distance / last if last > 0 else widest
    for (left, below), (right, above) in itertools.pairwise(knots):
        if distance <= right:
            return below + (above - below) * (distance - left) / max(right - left, 1e-12)
    raise AssertionError("knots rise")
