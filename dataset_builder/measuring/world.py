"""The ranks that measure together: started by torchrun, or one alone; NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from dataset_builder.measuring.machine import Machine, this_machine

_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """This rank among the others."""

    rank: int
    size: int
    ranks_per_node: int
    machine: Machine

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def say(self, message: str) -> None:
        """One line to stderr, from the first rank."""
        if self.is_first:
            print(message, file=sys.stderr, flush=True)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Elementwise maximum over the ranks: an iteration ends when the last rank's does."""
        values = torch.tensor(seconds, dtype=torch.float64, device=self.machine.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return [float(value) for value in values.tolist()]

    def agreed(self, value: float) -> float:
        """The first rank's value, on every rank."""
        values = torch.tensor([value], dtype=torch.float64, device=self.machine.device)
        dist.broadcast(values, src=0)
        return float(values.item())

    def each(self, value: float) -> list[float]:
        """Every rank's value, in the order of the ranks."""
        values = torch.zeros(self.size, dtype=torch.float64, device=self.machine.device)
        values[self.rank] = value
        dist.all_reduce(values)
        return [float(each) for each in values.tolist()]

    def gathered(self, value: object) -> list[Any]:
        """Every rank's object, in the order of the ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Until every rank is here and its device is idle."""
        if self.machine.is_gpu:
            torch.cuda.synchronize(self.machine.device)
        dist.barrier()
        if self.machine.is_gpu:
            torch.cuda.synchronize(self.machine.device)


def join() -> World:
    """Joins the ranks that torchrun started."""
    environment = os.environ
    size, rank = int(environment.get("WORLD_SIZE", "1")), int(environment.get("RANK", "0"))
    machine = this_machine(int(environment.get("LOCAL_RANK", "0")))
    backend = "nccl" if machine.is_gpu else "gloo"
    if size > 1:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return World(rank, size, int(environment.get("LOCAL_WORLD_SIZE", "1")), machine)


def leave() -> None:
    """Leaves the group of ranks, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
