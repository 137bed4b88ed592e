"""What a few measured runs of one cluster are worth for its other jobs.

The errors of its runs go together as :class:`gnn_predictor.adapter.ErrorCovariance` says, so nothing is left to fit.
Whether they are used at all is what predicts left-out runs better: a calibration that does not help is not made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnn_predictor.adapter import ErrorCovariance, ErrorField, Floats, PlacedJobs

# Leaving out is by job up to so many jobs; beyond, by as many folds of jobs.
_MOST_FOLDS = 10


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


def helps(before: Floats, left_out: Floats | None) -> bool:
    """Whether left-out runs are predicted no worse; of one job's runs the covariance alone says how far they reach."""
    return left_out is None or float(np.abs(left_out).mean()) <= float(np.abs(before).mean())
