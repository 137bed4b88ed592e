"""The network's estimate of a whole job, drawn towards what measured runs like it took.

Both are estimates of log seconds with errors of their own: the network's, about the same for every job, and the
Gaussian process's, small beside measured runs and large far from them. The estimate of least variance weighs each by
the inverse of its variance (Cochran 1937). Everything that the network says of the job's parts is scaled alike.

The network's own members are weighed the same way. Those that explain every source by its jobs are right beside its
runs and carry its peculiarities along far from them; those of the population (:mod:`gnn_predictor.source_effects`) err
by a source's factor, however far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from gnn_predictor.features import GraphArrays
from gnn_predictor.gaussian_process import GaussianProcess, Names
from gnn_predictor.whole_job import WholeJobs

Floats = NDArray[np.float64]

# Errors the network may be taken to have: from 2% to 64% in steps of a quarter.
NETWORK_ERRORS = tuple(0.02 * 1.25**step for step in range(17))
# Of the factor by which a source differs from an average one: the root mean square of what P5's sources differ by.
SOURCE_DEVIATION = 0.25
_ABSOLUTE = math.sqrt(2 / math.pi)  # expected absolute value of a normal variable of deviation 1


class Blend(BaseModel):
    """What a checkpoint knows beside its Gaussian process's tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    network_error: Annotated[float, Field(gt=0)] = 0.16  # deviation of the network's log error
    gpus: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()

    @property
    def names(self) -> Names:
        """What the codes of the process count through."""
        return Names(self.gpus, self.precisions)


@dataclass(frozen=True)
class RunsEstimate:
    """Of every job: log seconds that measured runs like it took, and the deviation of that. Two of [job]"""

    log_seconds: Floats
    deviation: Floats

    @property
    def population_share(self) -> Floats:
        """Of the network's answer, what is left to its members of the population, 0 to 1. [job]"""
        variance = self.deviation**2
        share: Floats = variance / (variance + SOURCE_DEVIATION**2)
        return share


@dataclass(frozen=True)
class Corrections:
    """Of every job: the logarithm of what its times are scaled by, the share that measured runs have in the estimate
    (0 to 1), and the expected absolute log error. Three of [job]"""

    log_factor: Floats
    share: Floats
    spread: Floats

    def each(self) -> Iterator[tuple[float, float, float]]:
        """The three of every job."""
        return zip(self.log_factor.tolist(), self.share.tolist(), self.spread.tolist(), strict=True)


def weighed(
    log_network: Floats, spread: Floats, log_runs: Floats, deviation: Floats, network_error: float | Floats
) -> Corrections:
    """The estimate of least variance, of log seconds; ``spread`` is what the network expects of its own error. [job]"""
    share = 1 / (1 + (deviation / network_error) ** 2)
    return Corrections(
        log_factor=share * (log_runs - log_network),
        share=share,
        spread=(1 - share) * spread + share * _ABSOLUTE * deviation,
    )


@dataclass(frozen=True, eq=False)
class MeasuredRuns:
    """A checkpoint's measured runs, as :func:`weighed` uses them."""

    process: GaussianProcess
    blend: Blend

    @torch.inference_mode()
    def estimate(self, graphs: Sequence[GraphArrays], precisions: Sequence[str]) -> RunsEstimate:
        """What they say of jobs with these precision labels."""
        codes = self.blend.names.codes([graph.device_name for graph in graphs], precisions)
        log_seconds, deviation = self.process.posterior(WholeJobs.of(graphs), codes)
        return RunsEstimate(log_seconds.numpy(), deviation.numpy())

    def corrections(self, known: RunsEstimate, network_s: Sequence[float], spread: Sequence[float]) -> Corrections:
        """Of jobs that they say this of, and for which the network alone says ``network_s`` seconds."""
        log_network = np.log(np.asarray(network_s, dtype=float))
        spread_of = np.asarray(spread, dtype=float)
        return weighed(log_network, spread_of, known.log_seconds, known.deviation, self.blend.network_error)


def best_network_error(log_network: Floats, log_runs: Floats, deviation: Floats, log_measured: Floats) -> float:
    """The error of the network under which held-out jobs are estimated best, in mean absolute log error. [job]"""

    def error(network_error: float) -> float:
        nothing = np.zeros_like(log_network)
        factor = weighed(log_network, nothing, log_runs, deviation, network_error).log_factor
        return float(np.abs(log_measured - log_network - factor).mean())

    return min(NETWORK_ERRORS, key=error)
