"""Collectives over all ranks by kind, size and format: how long the slowest rank takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dataset_builder.measuring.timing import Timing, summary
from dataset_builder.measuring.world import World

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
_DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LEAST_SAMPLES, _MOST_SAMPLES, _WARM_UPS = 7, 100, 3


@dataclass(frozen=True)
class Message:
    """``elements`` of the whole tensor: before an all-reduce, reduce-scatter or all-to-all, after an all-gather."""

    kind: str
    dtype: str
    elements: int

    @property
    def whole_bytes(self) -> int:
        return self.elements * _DTYPE[self.dtype].itemsize

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.dtype}/elements={self.elements}"


def messages(formats: tuple[str, ...], sizes: tuple[int, ...], num_ranks: int) -> Iterator[Message]:
    """Every collective in every format; sizes in elements are rounded down to whole shares of the ranks."""
    for elements in sizes:
        for dtype in (fmt for fmt in _DTYPE if fmt in formats):
            for kind in KINDS:
                yield Message(kind, dtype, max(1, elements // num_ranks) * num_ranks)


def message_times(message: Message, world: World, budget_s: float) -> Timing:
    """Seconds of one message, each a visit; raises RuntimeError when the backend has no such collective."""
    run = _runner(message, world)
    for _ in range(_WARM_UPS):
        run()
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < _LEAST_SAMPLES:
        samples.append(_once(run, world))
    spent = world.agreed(time.perf_counter() - started)
    further = int((budget_s - spent) / (spent / len(samples)))
    samples += [_once(run, world) for _ in range(max(0, min(_MOST_SAMPLES, further)))]
    return summary([[seconds] for seconds in world.slowest(samples)], "host clock around the call, slowest rank")


def _once(run: Callable[[], object], world: World) -> float:
    world.wait()
    if not world.machine.is_gpu:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) * 1e-3


def _runner(message: Message, world: World) -> Callable[[], object]:
    dtype, device, size = _DTYPE[message.dtype], world.machine.device, world.size
    whole = torch.randn(message.elements, device=device).to(dtype)
    share = torch.randn(message.elements // size, device=device).to(dtype)
    peer = world.rank ^ 1

    def swap() -> None:
        """Even ranks send to the next, which receives: one message one way."""
        if peer < size:
            (dist.send if world.rank % 2 == 0 else dist.recv)(whole, peer)

    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, share),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(share, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "send_recv": swap,
    }
    return runs[message.kind]
