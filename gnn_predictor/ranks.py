"""The processes that train one network together: as many as torchrun started, speaking gloo, or this one alone.

Every rank draws the same batches from the same generator and computes its share of each; gradients are averaged by
DistributedDataParallel. The leader, rank 0, is the only one that writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@contextmanager
def joined() -> Iterator[None]:
    """Joins the other ranks if torchrun started this process beside others, and leaves them at the end."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def count() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's number among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_leader() -> bool:
    """Whether this is the process that writes."""
    return rank() == 0


def share(length: int) -> list[int]:
    """Positions of this rank's part of a batch.

    Of a batch smaller than the number of ranks every rank gets a part all the same: its rows stand several times, all
    equally often, which leaves its mean as it is.
    """
    times = -(-count() // length)
    return [position % length for position in range(rank(), length * times, count())]


def total(value: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, the same on each; no gradient passes."""
    if count() == 1:
        return value
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def gathered(value: Tensor) -> Tensor:
    """Every rank's tensor, all of one shape, stacked by rank."""
    if count() == 1:
        return value.unsqueeze(0)
    parts = [torch.empty_like(value) for _ in range(count())]
    dist.all_gather(parts, value)
    return torch.stack(parts)


def from_leader(make: Callable[[], T]) -> T:
    """What the leader makes (and reads, from disks that others need not see), on every rank; all wait for it."""
    if count() == 1:
        return make()
    made: list[T | None] = [make() if is_leader() else None]
    dist.broadcast_object_list(made)
    return made[0]  # type: ignore[return-value]
