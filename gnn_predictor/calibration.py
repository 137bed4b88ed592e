"""What a few measured runs of one cluster are worth for its other jobs.

The errors of its runs go together as :class:`gnn_predictor.adapter.ErrorCovariance` says, so nothing is left to fit.
How much of what they say is believed is what predicts left-out runs best, from all of it to nothing: a calibration that
does not help is not made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnn_predictor.adapter import ErrorCovariance, ErrorField, Floats, PlacedJobs

# Leaving out is by job up to so many jobs; beyond, by as many folds of jobs.
_MOST_FOLDS = 10
_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # the first of equally good ones is taken


@dataclass(frozen=True, eq=False)
class ClusterErrors:
    """Runs of one cluster, n of them, and what an uncalibrated predictor gets wrong of each."""

    placed: PlacedJobs
    log_errors: Floats  # [n] of measured over predicted
    jobs: NDArray[np.str_]  # [n] runs of one job are left out together

    def __len__(self) -> int:
        return len(self.log_errors)

    def select(self, rows: NDArray[Any]) -> ClusterErrors:
        """These runs of them."""
        return ClusterErrors(self.placed.select(rows), self.log_errors[rows], self.jobs[rows])

    def field(self, covariance: ErrorCovariance) -> ErrorField:
        """What they say of other jobs."""
        return ErrorField.of(covariance, self.placed, self.log_errors)


def left_out_errors(runs: ClusterErrors, covariance: ErrorCovariance) -> Floats | None:
    """The error of every run that is left when those of the other jobs are known; ``None`` for a single job."""
    names, number = np.unique(runs.jobs, return_inverse=True)
    if len(names) < 2:
        return None
    left = runs.log_errors.copy()
    for fold in range(min(len(names), _MOST_FOLDS)):
        out = number % _MOST_FOLDS == fold
        others = runs.select(np.flatnonzero(~out))
        left[out] -= others.field(covariance).expected(runs.placed.select(np.flatnonzero(out)))
    return left


def best_share(runs: ClusterErrors, left_out: Floats | None) -> tuple[float, Floats | None]:
    """How much of what runs say of others is to be believed, and the errors of left-out runs that remain with so much.

    Of one job's runs nothing can be left out: the covariance alone says how far they reach.
    """
    if left_out is None:
        return 1.0, None
    shares = {share: runs.log_errors - share * (runs.log_errors - left_out) for share in _SHARES}
    best = min(shares, key=lambda share: float(np.abs(shares[share]).mean()))
    return best, shares[best]
