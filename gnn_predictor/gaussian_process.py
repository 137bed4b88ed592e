"""What measured runs say of a job like them: Gaussian-process regression over whole jobs.

log(measured / physical time) is a Gaussian process with a constant mean over the points of
:mod:`gnn_predictor.whole_job`. Its covariance is a sum of Matern-3/2 kernels; the distance in each has a weight for
every coordinate, and for another GPU and another precision (automatic relevance determination). The weights are those
of most marginal likelihood (Rasmussen and Williams 2006, section 5.4.1). The posterior's mean weighs all runs; its
deviation is worked out from the runs most like the job alone, which only ever makes it larger and keeps the cost of a
job small (Gramacy and Apley 2015, arXiv 1303.0383).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from gnn_predictor.whole_job import WholeJobs

LEAST_RUNS = 30  # fewer are not regressed over
_MOST_RUNS = 8192  # the square of their number has to fit in memory
_NEAREST = 64  # runs that the deviation is worked out from
_NUM_KERNELS = 2
_JITTER = 1e-5  # on the covariance's diagonal
_DEAF = 1e-3  # a squared inverse length scale, in deviations, below which a coordinate is left out

_SUBSET, _STEPS, _LEARNING_RATE = 1500, 60, 0.1
_SPARSITY = 2e-3  # of the loss, per inverse length scale: most coordinates say nothing
_LEAST_DEVIATION = 0.05  # of a coordinate that is regressed on: one that hardly varies must not blow up


@dataclass(frozen=True)
class Names:
    """What the codes of a job's GPU and precision count through."""

    gpus: tuple[str, ...]
    precisions: tuple[str, ...]

    def codes(self, gpus: Sequence[str], precisions: Sequence[str]) -> Tensor:
        """[job, 2]; -1 for a name that is none of these."""
        pairs = zip(gpus, precisions, strict=True)
        return torch.tensor([[_place(gpu, self.gpus), _place(name, self.precisions)] for gpu, name in pairs])


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else -1


@dataclass(frozen=True, eq=False)
class Scaled:
    """Points in inverse length scales, for each of c kernels, with their squared norms, and their codes."""

    coordinates: Tensor  # [c, ..., n, d]
    squares: Tensor  # [c, ..., n]
    codes: Tensor  # [..., n, 2]

    def nearest(self, rows: Tensor) -> Scaled:
        """Of the n points those of these rows. [job, k] -> [job] sets of k"""
        return Scaled(self.coordinates[:, rows], self.squares[:, rows], self.codes[rows])


@dataclass(frozen=True, eq=False)
class Kernel:
    """Hyperparameters: c Matern kernels over the d coordinates that are kept; all float64."""

    columns: Tensor  # [d] which coordinates of a point are kept
    weights: Tensor  # [c, d] inverse length scales
    category_weights: Tensor  # [c, 2] squared distance to another GPU, and to another precision
    variances: Tensor  # [c]
    noise: Tensor  # [] variance of a run's own error
    mean: Tensor  # []

    def scaled(self, points: Tensor, codes: Tensor) -> Scaled:
        """Points of kept coordinates [n, d] with their codes [n, 2], as the covariance takes them."""
        coordinates = points * self.weights[:, None]
        return Scaled(coordinates, (coordinates * coordinates).sum(-1), codes)

    def covariance(self, some: Scaled, others: Scaled) -> Tensor:
        """Of [..., a] and [..., b] points. [..., a, b]"""
        other_gpu, other_precision = (
            some.codes[..., :, None, column] != others.codes[..., None, :, column] for column in range(2)
        )
        total = torch.zeros(())
        for index, (category_weights, variance) in enumerate(zip(self.category_weights, self.variances, strict=True)):
            # By the binomial formula: a matrix product in place of a tensor of all differences. What follows is done in
            # place, for half of the time: a tensor of all runs is larger than a core's cache.
            squares = some.squares[index][..., :, None] + others.squares[index][..., None, :]
            squares.sub_(some.coordinates[index] @ others.coordinates[index].transpose(-1, -2), alpha=2).clamp_(min=0)
            squares.add_(other_gpu * category_weights[0] + other_precision * category_weights[1])
            distance = squares.mul_(3.0).add_(1e-8).sqrt_()
            total = total + (1 + distance).mul_(variance).mul_(torch.neg(distance).exp_())
        return total


def fit_kernel(coordinates: Tensor, codes: Tensor, targets: Tensor, weight: Tensor, seed: int) -> Kernel:
    """Hyperparameters by Adam on the marginal likelihood of random subsets, drawn by ``weight`` [n] of the n runs."""
    deviation = coordinates.std(0)
    scale = torch.where(deviation < 1e-4, torch.full_like(deviation, math.inf), deviation.clamp(min=_LEAST_DEVIATION))
    scaled, targets = (coordinates / scale).float(), targets.float()
    free = _Hyperparameters(scaled.shape[1], codes.shape[1])
    optimizer = torch.optim.Adam(free.parameters(), lr=_LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(_STEPS):
        rows = torch.multinomial(weight, min(_SUBSET, len(weight)), generator=generator)
        kernel = free.kernel()
        points = kernel.scaled(scaled[rows], codes[rows])
        covariance = kernel.covariance(points, points)
        factor = torch.linalg.cholesky(covariance + (kernel.noise + _JITTER) * torch.eye(len(rows)))
        white = torch.linalg.solve_triangular(factor, (targets[rows] - kernel.mean)[:, None], upper=False)
        surprise = 0.5 * white.square().sum() + factor.diagonal().log().sum()  # negative log likelihood
        loss = surprise / len(rows) + _SPARSITY * kernel.weights.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return _kept(free.kernel(), scale)


class _Hyperparameters(nn.Module):
    """Logarithms of what has to stay positive; the second kernel starts smoother than the first."""

    def __init__(self, coordinates: int, categories: int) -> None:
        super().__init__()
        smoother = torch.arange(_NUM_KERNELS, dtype=torch.float32)[:, None]
        self.squared_weights = nn.Parameter((-3.0 - 2.0 * smoother).repeat(1, coordinates))
        self.category_weights = nn.Parameter((-1.5 - smoother).repeat(1, categories))
        self.variances = nn.Parameter(torch.full((_NUM_KERNELS,), -1.0))
        self.noise = nn.Parameter(torch.tensor(-5.0))
        self.mean = nn.Parameter(torch.tensor(0.0))

    def kernel(self) -> Kernel:
        return Kernel(
            columns=torch.arange(self.squared_weights.shape[1]),
            weights=torch.exp(0.5 * self.squared_weights),
            category_weights=self.category_weights.exp(),
            variances=self.variances.exp(),
            noise=self.noise.exp(),
            mean=self.mean,
        )


def _kept(kernel: Kernel, scale: Tensor) -> Kernel:
    """The kernel over coordinates as they are, without those that hardly count."""
    counts = (kernel.weights.detach().square() >= _DEAF).any(0) & scale.isfinite()
    columns = torch.where(counts)[0]
    plain = {field.name: getattr(kernel, field.name).detach().double() for field in fields(Kernel)}
    return Kernel(**{**plain, "columns": columns, "weights": plain["weights"][:, columns] / scale[columns]})


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """n measured runs under a kernel."""

    kernel: Kernel
    points: Tensor  # [n, d] kept coordinates
    codes: Tensor  # [n, 2]
    targets: Tensor  # [n] log(measured / physical)
    pulls: Tensor  # [n] by which the posterior's mean weighs a job's covariance with each run

    @classmethod
    def of(cls, kernel: Kernel, jobs: WholeJobs, codes: Tensor, log_measured_s: Tensor) -> GaussianProcess:
        """These runs, or as many of them, evenly chosen, as memory is meant to hold."""
        return cls._solved(kernel, jobs.coordinates[:, kernel.columns], codes, log_measured_s - jobs.log_physical_s)

    def with_runs(self, jobs: WholeJobs, codes: Tensor, log_measured_s: Tensor) -> GaussianProcess:
        """The same kernel with more runs."""
        points = torch.cat([self.points, jobs.coordinates[:, self.kernel.columns]])
        targets = torch.cat([self.targets, log_measured_s - jobs.log_physical_s])
        return self._solved(self.kernel, points, torch.cat([self.codes, codes]), targets)

    @classmethod
    def _solved(cls, kernel: Kernel, points: Tensor, codes: Tensor, targets: Tensor) -> GaussianProcess:
        if len(points) > _MOST_RUNS:
            chosen = torch.linspace(0, len(points) - 1, _MOST_RUNS).long()
            points, codes, targets = points[chosen], codes[chosen], targets[chosen]
        scaled = kernel.scaled(points, codes)
        covariance = kernel.covariance(scaled, scaled)
        covariance.diagonal().add_(kernel.noise + _JITTER)
        pulls = torch.cholesky_solve((targets - kernel.mean)[:, None], torch.linalg.cholesky(covariance))
        return cls(kernel, points, codes, targets, pulls[:, 0])

    @functools.cached_property
    def _scaled(self) -> Scaled:
        return self.kernel.scaled(self.points, self.codes)

    def posterior(self, jobs: WholeJobs, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of the expected seconds, and the deviation of its error. Two of [job]"""
        asked = self.kernel.scaled(jobs.coordinates[:, self.kernel.columns], codes)
        shared = self.kernel.covariance(asked, self._scaled)
        return jobs.log_physical_s + self.kernel.mean + shared @ self.pulls, self._deviation(shared)

    def _deviation(self, shared: Tensor) -> Tensor:
        """Of the posterior given the nearest runs; ``shared`` is the covariance with all. [job, n] -> [job]"""
        shared, nearest = shared.topk(min(_NEAREST, len(self.points)), dim=1)
        runs = self._scaled.nearest(nearest)
        covariance = self.kernel.covariance(runs, runs)
        covariance.diagonal(dim1=-2, dim2=-1).add_(self.kernel.noise + _JITTER)
        white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), shared[..., None], upper=False)
        variance: Tensor = self.kernel.variances.sum() - white.square().sum((1, 2))
        return variance.clamp(min=0).sqrt()

    def tensors(self) -> dict[str, Tensor]:
        """Single precision."""
        own = {name: getattr(self, name) for name in ("points", "codes", "targets", "pulls")}
        return {name: _stored(each) for name, each in {**vars(self.kernel), **own}.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> GaussianProcess:
        """The inverse of :meth:`tensors`; KeyError when one is missing, ValueError when their shapes do not agree."""
        plain = {name: each.double() if each.is_floating_point() else each.long() for name, each in tensors.items()}
        kernel = Kernel(**{field.name: plain[field.name] for field in fields(Kernel)})
        points, codes, targets, pulls = (plain[name] for name in ("points", "codes", "targets", "pulls"))
        runs, coordinates, kernels = len(points), len(kernel.columns), len(kernel.variances)
        expected = {
            "points": (runs, coordinates), "codes": (runs, 2), "targets": (runs,), "pulls": (runs,),
            "weights": (kernels, coordinates), "category_weights": (kernels, 2), "noise": (), "mean": (),
        }  # fmt: skip
        wrong = [name for name, shape in expected.items() if tuple(plain[name].shape) != shape]
        if wrong or not runs or not kernels or bool((kernel.columns < 0).any()):
            raise ValueError(", ".join(wrong) or "points")
        return cls(kernel, points, codes, targets, pulls)


def _stored(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor.to(torch.int16)
