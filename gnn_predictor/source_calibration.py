"""What a few runs of an unseen source are worth: P5 networks, which never saw the source, calibrated with some of it.

For every held-out source and several seeded draws of a few of its runs, an adapter is fitted to the drawn runs and
judged, as ``infer`` would apply it, on rows of other jobs. The strength of the shrinkage is the one of least mean error
over sources; a source's own figures are with the strength that the *other* sources choose, so nothing that is reported
was tuned on itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataset_builder.job.schema import TrainingJob
from gnn_predictor.adapter import GROUPS, Shrinkage, job_point, width_factor
from gnn_predictor.blending import MeasuredRuns
from gnn_predictor.calibration import Fit, Floats, Mask, TimedRuns, fit, fit_mode, left_out_errors
from gnn_predictor.dataset import RunExamples
from gnn_predictor.domain import domain_of, outside
from gnn_predictor.network import Ensemble

NUM_RUNS = 5
NUM_DRAWS = 5
LEAST_ROWS = 10
_MOST_JUDGED = 100  # rows of a draw
GRID = tuple(
    Shrinkage(offset=offset, factors=factors, local=local)
    for offset, factors, local in itertools.product((1.0, 3.0), (0.1, 0.3, 1.0, 10.0), (0.0, 1.0, 4.0))
)


@dataclass(frozen=True)
class HeldOutSource:
    """A source, the predictor that never saw it, and of every row the half-width (logarithm) of its interval."""

    name: str
    network: Ensemble
    known: MeasuredRuns | None
    runs: RunExamples
    jobs: tuple[TrainingJob, ...]
    half_width: Floats


@dataclass(frozen=True)
class Draw:
    """Runs to calibrate with and rows of other jobs to judge by."""

    calibrating: TimedRuns
    judged: TimedRuns
    calibrating_half_width: Floats
    judged_half_width: Floats
    applies: Mask  # of the judged rows: on a GPU that was drawn
    amid: Mask  # of the judged rows: within what was drawn

    @property
    def before(self) -> Floats:
        """Log errors of the judged rows without calibration."""
        return self.judged.log_errors(np.zeros(1 + len(GROUPS)))

    def after(self, fitted: Fit) -> Floats:
        """Log errors of the judged rows."""
        return np.where(self.applies, self.judged.errors_under(fitted), self.before)

    def half_widths(self, left_out: Floats | None) -> Floats:
        """Half-widths of the judged rows' intervals, given the errors of left-out drawn runs."""
        ratios = [] if left_out is None else (np.abs(left_out) / self.calibrating_half_width).tolist()
        factor = width_factor(ratios)
        factors = np.where(self.amid, factor, max(1.0, factor))
        return self.judged_half_width * np.where(self.applies, factors, 1.0)


def draws_of(source: HeldOutSource) -> list[Draw]:
    """Several seeded draws, of as many jobs as there are; none where no job would be left to judge by."""
    groups = source.runs.table["job_group"].to_numpy(str)
    draws = []
    for seed in range(NUM_DRAWS):
        order = np.random.default_rng(seed).permutation(len(groups))
        _, first_of_group = np.unique(groups[order], return_index=True)
        one_a_group = order[np.sort(first_of_group)]
        chosen = np.array(list(dict.fromkeys([*one_a_group.tolist(), *order.tolist()]))[:NUM_RUNS])
        others = order[~np.isin(groups[order], groups[chosen])][:_MOST_JUDGED]
        if len(others):
            draws.append(_draw(source, chosen, others))
    return draws


def _draw(source: HeldOutSource, chosen: Any, others: Any) -> Draw:
    gpus = {source.jobs[row].cluster.gpu.name for row in chosen}
    domain = domain_of(source.jobs[row] for row in chosen)
    return Draw(
        calibrating=_timed(source, chosen),
        judged=_timed(source, others),
        calibrating_half_width=source.half_width[chosen],
        judged_half_width=source.half_width[others],
        applies=np.array([source.jobs[row].cluster.gpu.name in gpus for row in others]),
        amid=np.array([not outside(source.jobs[row], domain) for row in others]),
    )


def _timed(source: HeldOutSource, rows: Any) -> TimedRuns:
    runs = source.runs.select(rows)
    seconds, groups = runs.table["iter_time_s"].tolist(), runs.table["job_group"].tolist()
    points = [job_point(source.jobs[row]) for row in rows]
    return TimedRuns.of(source.network, runs.graphs, seconds, points, groups, source.known)


def calibrated_figures(sources: Sequence[HeldOutSource]) -> tuple[dict[str, Any], Shrinkage]:
    """Errors in percent before and after, macro over sources, and the strength that all of them choose."""
    draws = {source.name: draws_of(source) for source in sources if len(source.runs) >= LEAST_ROWS}
    draws = {name: each for name, each in draws.items() if each}
    errors = {name: np.array([_mape_by_strength(draw) for draw in each]).mean(0) for name, each in draws.items()}
    by_source = {}
    for name, each in draws.items():
        others = [error for other, error in errors.items() if other != name] or [errors[name]]
        by_source[name] = _figures(each, GRID[int(np.mean(others, axis=0).argmin())])
    chosen = GRID[int(np.mean(list(errors.values()), axis=0).argmin())] if errors else Shrinkage()
    return {
        "calibration_runs": NUM_RUNS,
        "draws": NUM_DRAWS,
        "shrinkage": chosen.model_dump(),
        **{f"macro_{key}": _mean(by_source, key) for key in _AVERAGED},
        "by_source": by_source,
    }, chosen


_AVERAGED = ("before_mape_percent", "mape_percent", "coverage_percent", "median_high_over_low")


def _mean(by_source: Mapping[str, Mapping[str, Any]], key: str) -> float | None:
    return float(np.mean([figures[key] for figures in by_source.values()])) if by_source else None


def _mape_by_strength(draw: Draw) -> Floats:
    """[strength]"""
    every = np.ones(len(draw.calibrating), dtype=bool)
    errors = [draw.after(fit_mode(draw.calibrating, every, strength, "factors")) for strength in GRID]
    return np.array([_mape(each) for each in errors])


def _figures(draws: Sequence[Draw], strength: Shrinkage) -> dict[str, Any]:
    """Means over draws with the whole procedure, choice of mode included."""
    rows = []
    for draw in draws:
        errors = draw.after(fit(draw.calibrating, strength))
        half_width = draw.half_widths(left_out_errors(draw.calibrating, strength))
        inside = 100.0 * float((np.abs(errors) <= half_width).mean())
        rows.append((_mape(draw.before), _mape(errors), inside, float(np.exp(2 * np.median(half_width)))))
    means = np.mean(rows, axis=0).tolist()
    return {"judged": sum(len(draw.judged) for draw in draws), **dict(zip(_AVERAGED, means, strict=True))}


def _mape(log_errors: Floats) -> float:
    """Of log(measured / predicted), in percent of the measured value."""
    return 100.0 * float(np.abs(np.expm1(-log_errors)).mean())
