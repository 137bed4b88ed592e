"""How far a job is from everything a predictor was trained on.

The distance is Euclidean, in the inputs of the network that describe a job as a whole (workload, hardware, software; of
order one each), to the nearest training run; another precision adds one to its square. Held-out errors grow with it,
whatever was held out: runs of the same sweep are at 0.3, a precision that was never seen at 2, another lab at 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnn_predictor.features import GraphArrays

_AT_ONCE = 512


@dataclass(frozen=True)
class TrainingPoints:
    """The training runs as points; ``precision`` counts through the names that the checkpoint's domain lists."""

    coordinates: Tensor  # [run, coordinate]
    precision: Tensor  # [run]

    @classmethod
    def of(cls, graphs: Sequence[GraphArrays], precisions: Sequence[str], names: Sequence[str]) -> TrainingPoints:
        """Points of these runs; equal ones stand once."""
        table = torch.cat([_codes(precisions, names).float().unsqueeze(1), _coordinates(graphs)], dim=1)
        table = torch.unique(table, dim=0)
        return cls(table[:, 1:].contiguous(), table[:, 0].long())

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> TrainingPoints:
        """The inverse of :meth:`tensors`; KeyError when one is missing."""
        return cls(tensors["coordinates"].float(), tensors["precision"].long())

    def tensors(self) -> dict[str, Tensor]:
        """Half precision: distances of 0.001 mean nothing."""
        return {"coordinates": self.coordinates.half(), "precision": self.precision.to(torch.int16)}

    def distances(
        self, graphs: Sequence[GraphArrays], precisions: Sequence[str], names: Sequence[str]
    ) -> NDArray[np.float64]:
        """Distance of every job to its nearest training run. [graph]"""
        codes, coordinates = _codes(precisions, names), _coordinates(graphs)
        nearest = []
        for start in range(0, len(graphs), _AT_ONCE):
            rows = slice(start, start + _AT_ONCE)
            squares = torch.cdist(coordinates[rows], self.coordinates) ** 2
            differs = (codes[rows].unsqueeze(1) != self.precision).float()
            nearest.append((squares + differs).min(dim=1).values.sqrt())
        return torch.cat(nearest).double().numpy()


def _coordinates(graphs: Sequence[GraphArrays]) -> Tensor:
    return torch.from_numpy(np.stack([np.concatenate([g.workload[0], g.hardware[0], g.software[0]]) for g in graphs]))


def _codes(precisions: Sequence[str], names: Sequence[str]) -> Tensor:
    """Index of every name; -1 for one that is none of them."""
    return torch.tensor([list(names).index(each) if each in names else -1 for each in precisions])
