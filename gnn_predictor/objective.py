"""What training minimises: robust log errors of iteration times and operator latencies, so weighted that none rules.

All errors are natural logarithms of predicted over measured seconds, so 0.1 is about 10%.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

# Below this log error the loss is quadratic, above it linear: one mislabelled row cannot rule a batch.
_ROBUST_FROM = 0.1


def robust(log_error: Tensor, weight: Tensor, whole: Tensor) -> Tensor:
    """Weighted mean of the Huber loss of log errors, scaled so that large errors cost their size.

    ``whole`` is the weight of all rows of the batch; where ranks share it, each has the part of the mean that is its.
    """
    loss = torch.nn.functional.huber_loss(log_error, torch.zeros_like(log_error), reduction="none", delta=_ROBUST_FROM)
    return (loss / _ROBUST_FROM * weight).sum() / whole.clamp(min=1e-9)


def spread_loss(log_error: Tensor, log_spread: Tensor, weight: Tensor, whole: Tensor) -> Tensor:
    """Negative log-likelihood of a Laplace distribution: teaches the network how wrong it expects to be.

    The error itself is detached, so that the spread never distorts the estimate.
    """
    likelihood = log_error.detach().abs() / torch.exp(log_spread) + log_spread
    return (likelihood * weight).sum() / whole.clamp(min=1e-9)


def source_weights(sources: Sequence[str], power: float) -> Tensor:
    """A weight per row: ``(rows of its source) ** -power``, with mean 1. 0 counts rows, 1 counts sources."""
    count = Counter(sources)
    weights = torch.tensor([count[source] ** -power for source in sources], dtype=torch.float32)
    return weights / weights.mean()
