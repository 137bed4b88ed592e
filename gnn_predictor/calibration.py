"""Fits an adapter to a few measured runs of one cluster.

With theta = (offset, a factor per group of work), all logarithms and all zero without evidence, and
error = log measured - log predicted(theta) of the runs,

    error' W error + offset_strength theta_0^2 + factor_strength sum theta_k^2,      W = (1 + local K)^-1

is made least by Gauss-Newton steps; the gradient of log predicted is the share of every group in the critical path, by
autograd through the schedule. K is the likeness of the runs: errors of like jobs are alike, so what theta leaves of
them (local W error) is passed on to jobs like them (Gaussian process regression with theta as its mean; Rasmussen and
Williams 2006, section 2.7). How much is fitted (all factors, the offset only, nothing) is what predicts left-out runs
best, so a calibration that does not help is not made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnn_predictor.adapter import GROUPS, JobPoint, Mode, Shrinkage, corrected_times, likeness, scaled_times
from gnn_predictor.batch import GraphBatch, collate
from gnn_predictor.blending import MeasuredRuns
from gnn_predictor.features import GraphArrays
from gnn_predictor.network import Ensemble, NodeTimes, iteration_times, stage_table

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

MODES: tuple[Mode, ...] = ("none", "offset", "factors")  # from the simplest
_NUM_PARAMETERS = 1 + len(GROUPS)
_MOST_STEPS = 12
_LONGEST_STEP = 0.7  # of any log factor in one Gauss-Newton step: the shares of the path change with the factors
_MOST_LOG_FACTOR = 2.5
_SETTLED = 1e-3
# Leaving out is by job up to so many jobs; beyond, by as many folds of jobs.
_MOST_FOLDS = 10
_MOST_FOLDS_OF_MODE = 5
# A mode with more to fit has to be clearly better on left-out runs than a simpler one.
_CLEARLY_BETTER, _NOTICEABLE = 0.97, 1e-3


@dataclass(frozen=True)
class Fit:
    """An adapter's numbers: what was fitted, theta [1 + group], and what each point adds for jobs like it [point]."""

    mode: Mode
    theta: Floats
    points: tuple[JobPoint, ...]
    local: Floats


@dataclass(frozen=True)
class TimedRuns:
    """Measured runs with their node times as the uncalibrated predictor gives them; n runs."""

    batch: GraphBatch
    times: NodeTimes
    log_measured: Floats  # [n]
    points: tuple[JobPoint, ...]  # [n]
    jobs: NDArray[np.str_]  # [n] runs of one job are left out together

    @classmethod
    def of(
        cls,
        network: Ensemble,
        graphs: Sequence[GraphArrays],
        measured_s: Sequence[float],
        points: Sequence[JobPoint],
        jobs: Sequence[str],
        known: MeasuredRuns | None,
    ) -> TimedRuns:
        """Runs through the network once, and what ``known`` runs make of that; all else works on these node times."""
        batch = collate(graphs, network.config.devices)
        with torch.no_grad():
            seconds, times, _ = network(batch)
        if known is not None:
            labels, spread = [point.precision for point in points], times.log_spread.exp()
            corrections = known.corrections(graphs, labels, seconds.tolist(), spread.tolist())
            times = corrected_times(batch, times, corrections)
        return cls(batch, times, np.log(np.asarray(measured_s, dtype=float)), tuple(points), np.asarray(jobs))

    def __len__(self) -> int:
        return len(self.log_measured)

    def log_errors(self, theta: Floats) -> Floats:
        """log(measured / predicted) of every run. [n]"""
        with torch.no_grad():
            predicted = self._log_seconds(torch.tensor(theta, dtype=torch.float32).expand(len(self), -1))
        errors: Floats = self.log_measured - predicted.double().numpy()
        return errors

    def errors_under(self, fitted: Fit) -> Floats:
        """As :meth:`log_errors`, with what the fit's points pass on."""
        errors: Floats = self.log_errors(fitted.theta) - likeness(self.points, fitted.points) @ fitted.local
        return errors

    def errors_and_gradient(self, theta: Floats) -> tuple[Floats, Floats]:
        """log(measured / predicted) [n] and the gradient of log predicted [n, 1 + group]."""
        each = torch.tensor(theta, dtype=torch.float32).repeat(len(self), 1).requires_grad_()
        predicted = self._log_seconds(each)
        (gradient,) = torch.autograd.grad(predicted.sum(), each)
        return self.log_measured - predicted.detach().double().numpy(), gradient.double().numpy()

    def _log_seconds(self, theta: Tensor) -> Tensor:
        """[n, 1 + group] -> [n]"""
        times = scaled_times(self.batch, self.times, theta[:, :1] + theta[:, 1:])
        return iteration_times(self.batch, stage_table(self.batch, times), times.overhead_s).log()


def fit(runs: TimedRuns, shrinkage: Shrinkage) -> Fit:
    """The adapter of these runs, of the mode that predicts left-out ones best."""
    return _fit(runs, np.ones(len(runs), dtype=bool), shrinkage)


def left_out_errors(runs: TimedRuns, shrinkage: Shrinkage) -> Floats | None:
    """log(measured / predicted) of every run by an adapter (mode included) of the others; ``None`` for a single job."""
    folds = _folds(runs.jobs, np.ones(len(runs), dtype=bool), _MOST_FOLDS)
    if len(folds) < 2:
        return None
    errors = np.empty(len(runs))
    for fold in folds:
        errors[fold] = runs.errors_under(_fit(runs, ~fold, shrinkage))[fold]
    return errors


def fit_mode(runs: TimedRuns, rows: Mask, shrinkage: Shrinkage, mode: Mode) -> Fit:
    """The minimum over these rows with so much free."""
    theta = np.zeros(_NUM_PARAMETERS)
    points = tuple(point for point, chosen in zip(runs.points, rows, strict=True) if chosen)
    if mode == "none":
        return Fit(mode, theta, points, np.zeros(len(points)))
    weight = np.linalg.inv(np.eye(len(points)) + shrinkage.local * likeness(points, points))
    free = slice(0, _NUM_PARAMETERS) if mode == "factors" else slice(0, 1)
    strength = np.array([shrinkage.offset] + [shrinkage.factors] * len(GROUPS))[free]
    for _ in range(_MOST_STEPS):
        error, gradient = runs.errors_and_gradient(theta)
        error, gradient = error[rows], gradient[rows][:, free]
        curvature = gradient.T @ weight @ gradient + np.diag(strength)
        step = np.linalg.solve(curvature, gradient.T @ weight @ error - strength * theta[free])
        longest = float(np.abs(step).max())
        theta[free] += step * min(1.0, _LONGEST_STEP / max(longest, 1e-12))
        theta = theta.clip(-_MOST_LOG_FACTOR, _MOST_LOG_FACTOR)
        if longest < _SETTLED:
            break
    return Fit(mode, theta, points, shrinkage.local * weight @ runs.log_errors(theta)[rows])


def _fit(runs: TimedRuns, rows: Mask, shrinkage: Shrinkage) -> Fit:
    return fit_mode(runs, rows, shrinkage, _best_mode(runs, rows, shrinkage))


def _best_mode(runs: TimedRuns, rows: Mask, shrinkage: Shrinkage) -> Mode:
    """Runs of one job cannot tell the modes apart: the shrinkage alone decides how far they reach."""
    folds = _folds(runs.jobs, rows, _MOST_FOLDS_OF_MODE)
    if len(folds) < 2:
        return "factors"
    best, least = MODES[0], math.inf
    for mode in MODES:
        left_out = np.zeros(len(runs))
        for fold in folds:
            left_out[fold] = runs.errors_under(fit_mode(runs, rows & ~fold, shrinkage, mode))[fold]
        error = float(np.abs(left_out[rows]).mean())
        if error < _CLEARLY_BETTER * least - _NOTICEABLE:
            best, least = mode, error
    return best


def _folds(jobs: NDArray[np.str_], rows: Mask, most: int) -> list[Mask]:
    """A mask per job that has some of these rows, or per fold of jobs when there are more than ``most``."""
    names = sorted(set(jobs[rows].tolist()))
    fold_of = {name: index % most for index, name in enumerate(names)}
    number = np.array([fold_of.get(name, -1) for name in jobs.tolist()])
    return [rows & (number == fold) for fold in range(min(len(names), most))]
