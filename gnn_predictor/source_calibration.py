"""What a few runs of an unseen source are worth: P5's held-out errors, calibrated with some of the source's own.

The covariance of the errors on one source is learnt here, from all sources, for the checkpoint that is released. For
every held-out source and several seeded draws of a few of its runs, an adapter is made of the drawn runs and judged, as
``infer`` would apply it, on rows of other jobs, under a covariance that is learnt from the *other* sources alone: what
is reported of a source was not learnt from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dataset_builder.job.schema import TrainingJob
from gnn_predictor.adapter import ErrorCovariance, Floats, width_factor
from gnn_predictor.calibration import ClusterErrors, best_share, left_out_errors
from gnn_predictor.domain import domain_of, outside
from gnn_predictor.gaussian_process import Kernel, Names

NUM_RUNS = 5
OTHER_NUMBERS = (1, 3, 10)  # of calibrating runs, of which the mean error is reported too
NUM_DRAWS = 5
LEAST_ROWS = 10
_MOST_JUDGED = 100  # rows of a draw

_SUBSET, _STEPS, _LEARNING_RATE = 30, 80, 0.1
_SPARSITY = 1e-3  # of the loss, per inverse length scale: most coordinates say nothing
_LEAST_DEVIATION, _CONSTANT = 0.05, 1e-4  # of a coordinate: it must not blow up; it says nothing
_DEAF = 1e-3  # a squared inverse length scale, in deviations, below which a coordinate is left out
_JITTER = 1e-5


@dataclass(frozen=True, eq=False)
class HeldOutSource:
    """A source, the errors of a predictor that never saw it, and of every row the half-width (logarithm) of its
    interval."""

    name: str
    errors: ClusterErrors
    jobs: tuple[TrainingJob, ...]
    half_width: Floats


@dataclass(frozen=True, eq=False)
class Draw:
    """Runs to calibrate with and rows of other jobs to judge by."""

    calibrating: ClusterErrors
    judged: ClusterErrors
    calibrating_half_width: Floats
    judged_half_width: Floats
    applies: NDArray[np.bool_]  # of the judged rows: on a GPU that was drawn
    amid: NDArray[np.bool_]  # of the judged rows: within what was drawn

    def after(self, covariance: ErrorCovariance) -> tuple[Floats, Floats]:
        """Of the judged rows the log errors that are left, and the half-widths of their intervals."""
        share, left_out = best_share(self.calibrating, left_out_errors(self.calibrating, covariance))
        expected = self.calibrating.field(covariance).expected(self.judged.placed)
        errors = self.judged.log_errors - share * np.where(self.applies, expected, 0.0)
        ratios = [] if left_out is None else (np.abs(left_out) / self.calibrating_half_width).tolist()
        factor = width_factor(ratios)
        factors = np.where(self.amid, factor, max(1.0, factor))
        return errors, self.judged_half_width * np.where(self.applies, factors, 1.0)


def draws_of(source: HeldOutSource, num_runs: int) -> list[Draw]:
    """Several seeded draws, of as many jobs as there are; none where no job would be left to judge by."""
    groups = source.errors.jobs
    draws = []
    for seed in range(NUM_DRAWS):
        order = np.random.default_rng(seed).permutation(len(groups))
        one_a_group = _one_a_group(groups, order)
        chosen = np.array(list(dict.fromkeys([*one_a_group.tolist(), *order.tolist()]))[:num_runs])
        others = order[~np.isin(groups[order], groups[chosen])][:_MOST_JUDGED]
        if len(others):
            draws.append(_draw(source, chosen, others))
    return draws


def _one_a_group(groups: NDArray[np.str_], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first row of every group, in this order."""
    _, first = np.unique(groups[order], return_index=True)
    return order[np.sort(first)]


def _draw(source: HeldOutSource, chosen: NDArray[Any], others: NDArray[Any]) -> Draw:
    domain = domain_of(source.jobs[row] for row in chosen)
    return Draw(
        calibrating=source.errors.select(chosen),
        judged=source.errors.select(others),
        calibrating_half_width=source.half_width[chosen],
        judged_half_width=source.half_width[others],
        applies=np.array([source.jobs[row].cluster.gpu.name in domain.gpus for row in others]),
        amid=np.array([not outside(source.jobs[row], domain) for row in others]),
    )


def calibrated_figures(sources: Sequence[HeldOutSource]) -> dict[str, Any]:
    """Errors in percent before and after, macro over sources, each under what the other sources say."""
    by_source: dict[str, Any] = {}
    by_number: dict[int, list[float]] = {number: [] for number in OTHER_NUMBERS}
    for source in sources:
        others = [other.errors for other in sources if other is not source]
        draws = draws_of(source, NUM_RUNS) if len(source.errors) >= LEAST_ROWS else []
        if not draws or not others:
            continue
        covariance = learn_covariance(others)
        by_source[source.name] = _figures(draws, covariance)
        for number, errors in by_number.items():
            if more := draws_of(source, number):
                errors.append(_figures(more, covariance)["mape_percent"])
    return {
        "calibration_runs": NUM_RUNS,
        "draws": NUM_DRAWS,
        **{f"macro_{key}": _mean(by_source, key) for key in _AVERAGED},
        "macro_mape_percent_by_runs": {
            str(number): float(np.mean(errors)) for number, errors in by_number.items() if errors
        },
        "by_source": by_source,
    }


_AVERAGED = ("before_mape_percent", "mape_percent", "coverage_percent", "median_high_over_low")


def _mean(by_source: Mapping[str, Mapping[str, Any]], key: str) -> float | None:
    return float(np.mean([figures[key] for figures in by_source.values()])) if by_source else None


def _figures(draws: Sequence[Draw], covariance: ErrorCovariance) -> dict[str, Any]:
    """Means over draws with the whole procedure, the choice of the share included."""
    rows = []
    for draw in draws:
        errors, half_width = draw.after(covariance)
        inside = 100.0 * float((np.abs(errors) <= half_width).mean())
        rows.append((_mape(draw.judged.log_errors), _mape(errors), inside, float(np.exp(2 * np.median(half_width)))))
    means = np.mean(rows, axis=0).tolist()
    return {"judged": sum(len(draw.judged) for draw in draws), **dict(zip(_AVERAGED, means, strict=True))}


def _mape(log_errors: Floats) -> float:
    """Of log(measured / predicted), in percent of the measured value."""
    return 100.0 * float(np.abs(np.expm1(-log_errors)).mean())


def learn_covariance(sources: Sequence[ClusterErrors]) -> ErrorCovariance:
    """The covariance of most marginal likelihood: sources are independent, the errors on one of them are not.

    Adam on subsets of every source, a run a job, for a user's few runs are of different jobs too. A source's
    likelihood counts by the root of its runs, so that no large one rules.
    """
    every = torch.cat([source.placed.coordinates for source in sources])
    deviation = every.std(0)
    scale = torch.where(deviation < _CONSTANT, torch.inf, deviation.clamp(min=_LEAST_DEVIATION))
    points, codes = (every / scale).float(), _codes(sources)
    targets = torch.from_numpy(np.concatenate([source.log_errors for source in sources])).float()
    starts = np.cumsum([0, *(len(source) for source in sources)])
    free, random = _FreeCovariance(points.shape[1]), np.random.default_rng(0)
    optimizer = torch.optim.Adam(free.parameters(), lr=_LEARNING_RATE)
    for _ in range(_STEPS):
        chosen = [
            start + _one_a_group(source.jobs, random.permutation(len(source)))[:_SUBSET]
            for start, source in zip(starts, sources, strict=False)
        ]
        kernel = free.kernel()
        loss = _surprise(kernel, points, codes, targets, chosen) + _SPARSITY * kernel.weights.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return free.learnt(scale)


def _codes(sources: Sequence[ClusterErrors]) -> Tensor:
    """Of the runs of all sources. [n, 2]"""
    gpus = [name for source in sources for name in source.placed.gpus]
    precisions = [name for source in sources for name in source.placed.precisions]
    return Names(tuple(sorted(set(gpus))), tuple(sorted(set(precisions)))).codes(gpus, precisions)


def _surprise(
    kernel: Kernel, points: Tensor, codes: Tensor, targets: Tensor, chosen: Sequence[NDArray[np.int64]]
) -> Tensor:
    """Mean over sources of the negative log likelihood of these rows of theirs over the root of their number.

    All sources at once: a row that is missing to the longest has an error of none, of variance 1, on its own.
    """
    size = torch.tensor([len(rows) for rows in chosen])
    there = torch.arange(int(size.max())) < size[:, None]  # [source, k]
    rows = torch.zeros(there.shape, dtype=torch.long)
    rows[there] = torch.from_numpy(np.concatenate(chosen))
    some = kernel.scaled(points, codes).nearest(rows)
    covariance = kernel.covariance(some, some) * (there[:, :, None] & there[:, None, :])
    diagonal = torch.where(there, kernel.noise + _JITTER, torch.ones(()))
    factor = torch.linalg.cholesky(covariance + torch.diag_embed(diagonal))
    white = torch.linalg.solve_triangular(factor, (targets[rows] * there)[..., None], upper=False)
    surprise: Tensor = 0.5 * white.square().sum((1, 2)) + factor.diagonal(dim1=1, dim2=2).log().sum(1)
    return torch.mean(surprise / size.sqrt())


class _FreeCovariance(nn.Module):
    """Logarithms of what has to stay positive."""

    def __init__(self, coordinates: int) -> None:
        super().__init__()
        self.squared_weights = nn.Parameter(torch.full((coordinates,), -4.0))
        self.category_weights = nn.Parameter(torch.full((2,), -1.5))
        self.variances = nn.Parameter(torch.full((2,), -4.0))  # of what all share, and of what like jobs share
        self.noise = nn.Parameter(torch.tensor(-5.0))

    def kernel(self) -> Kernel:
        weights, categories = torch.exp(0.5 * self.squared_weights), self.category_weights.exp()
        return Kernel(
            columns=torch.arange(len(weights)),
            weights=torch.stack([torch.zeros_like(weights), weights]),
            category_weights=torch.stack([torch.zeros_like(categories), categories]),
            variances=self.variances.exp(),
            noise=self.noise.exp(),
            mean=torch.zeros(()),
        )

    def learnt(self, scale: Tensor) -> ErrorCovariance:
        """Over coordinates as they are, without those that hardly count."""
        weights = torch.exp(0.5 * self.squared_weights.detach())
        columns = torch.where((weights.square() >= _DEAF) & scale.isfinite())[0]
        shared, alike = self.variances.exp().tolist()
        other_gpu, other_precision = self.category_weights.exp().tolist()
        return ErrorCovariance(
            shared=shared,
            alike=alike,
            own=self.noise.exp().item(),
            columns=tuple(columns.tolist()),
            weights=tuple((weights / scale)[columns].tolist()),
            other_gpu=other_gpu,
            other_precision=other_precision,
        )
