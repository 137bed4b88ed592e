"""How long a piece of work takes on the device at hand: warmed up, with cold caches, as a median with its spread.

On CUDA devices the work is captured into a graph, so that the time is the kernels' alone, or put between two events
where it cannot be captured. On a CPU it is the host's clock around each call. Caches are cold because every repetition
has operands of its own, together larger than twice the last cache level that belongs to the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Work = Callable[[], object]

_MOST_COPIES = 64
_LEAST_SAMPLES, _MOST_SAMPLES = 7, 400
_WARM_UPS = 3


@dataclass(frozen=True)
class Timing:
    """Seconds of one execution: median and least of ``count`` samples; ``spread``: interquartile range over median."""

    median_s: float
    least_s: float
    spread: float
    count: int
    how: str


def summary(samples_s: Sequence[float], how: str) -> Timing:
    """Median and relative interquartile range of at least three samples."""
    low, middle, high = statistics.quantiles(samples_s, n=4)
    return Timing(middle, min(samples_s), (high - low) / middle, len(samples_s), how)


@dataclass(frozen=True)
class Stopwatch:
    """Times work on one device; ``sample_budget_s`` is how long the samples of one piece of work may take."""

    device: torch.device
    cache_bytes: float
    sample_budget_s: float

    def measure(self, make: Callable[[], Work], moved_bytes: float) -> Timing:
        """``make`` returns the work with new random operands; ``moved_bytes`` is what one execution touches."""
        copies = max(1, min(_MOST_COPIES, round(2 * self.cache_bytes / max(moved_bytes, 1.0)) + 1))
        works = [make() for _ in range(copies)]
        for index in range(max(_WARM_UPS, copies)):
            works[index % copies]()
        if self.device.type != "cuda":
            return self._host(works)
        torch.cuda.synchronize(self.device)
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for work in works:
                    work()
        except RuntimeError:  # the work synchronises with the host, or allocates in a way that cannot be captured
            torch.cuda.synchronize(self.device)
            return self._events(lambda: [work() for work in works], copies, "CUDA events, includes launch")
        return self._events(graph.replay, copies, "CUDA graph")

    def _host(self, works: Sequence[Work]) -> Timing:
        samples: list[float] = []
        deadline = time.perf_counter() + self.sample_budget_s
        while len(samples) < _MOST_SAMPLES and (len(samples) < _LEAST_SAMPLES or time.perf_counter() < deadline):
            work = works[len(samples) % len(works)]
            started = time.perf_counter()
            work()
            samples.append(time.perf_counter() - started)
        return summary(samples, "host clock, includes launch")

    def _events(self, run: Work, copies: int, how: str) -> Timing:
        run()
        samples: list[float] = []
        deadline = time.perf_counter() + self.sample_budget_s
        while len(samples) < _MOST_SAMPLES and (len(samples) < _LEAST_SAMPLES or time.perf_counter() < deadline):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            run()
            last.record()
            last.synchronize()
            samples.append(first.elapsed_time(last) * 1e-3 / copies)
        return summary(samples, how)
