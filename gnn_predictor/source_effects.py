"""What a source's runs take beyond what their graphs explain, kept apart from a network while it is trained.

Every cluster is measured in a way of its own: its clocks, its driver, its data loader, what an iteration includes. A
network that has to explain such constant differences reads them out of whatever tells the sources apart, such as a
model's size, and takes them along to a cluster that it has not seen. Here each source has a log factor of its own, a
random intercept that is learnt with the weights and forgotten with the training: the network is the population's part
of a mixed model (Pinheiro and Bates 2000, chapter 2). The factors' mean over all runs, weighed as the loss weighs
them, is zero, so that a new source is taken to be an average one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

LEARNING_RATE_FACTOR = 5.0  # over the network's: a constant difference is to be the factor's before it is anything else
# Of the normal prior, over that of a batch's mean error: a source of few runs counts as average.
_PRIOR_PRECISION = 1e-3


class SourceEffects(nn.Module):
    """The log factor of every source; ``weight`` is the weight of each of its runs in the loss. [run]"""

    source: Tensor
    share: Tensor

    def __init__(self, sources: Sequence[str], weight: Tensor) -> None:
        super().__init__()
        number = {name: index for index, name in enumerate(sorted(set(sources)))}
        self.log_factors = nn.Parameter(torch.zeros(len(number)))
        self.register_buffer("source", torch.tensor([number[name] for name in sources]))
        share = torch.zeros(len(number)).index_add_(0, self.source, weight)
        self.register_buffer("share", share / share.sum())

    def forward(self, rows: Tensor) -> Tensor:
        """Log factors of the sources that these runs are of. [B] -> [B]"""
        return (self.log_factors - self.share @ self.log_factors)[self.source[rows]]

    def penalty(self) -> Tensor:
        """What the prior adds to the loss. []"""
        return _PRIOR_PRECISION * self.log_factors.square().sum()
