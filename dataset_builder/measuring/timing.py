"""How long a piece of work takes on the device at hand: warmed up, with cold caches, as a median with its spread.

On CUDA devices the work is captured into a graph, so that the time is the kernels' alone, or put between two events
where it cannot be captured. On a CPU it is the host's clock around each call. Caches are cold because every repetition
has operands of its own, together larger than twice the last cache level that belongs to the device.

Machines drift: samples taken one after the other share the machine's mood, so their number says little of how well
their median is known. A piece of work is therefore visited several times, and what is known of the median is told from
the medians of the visits (batch means: Alexopoulos and Seila 1998, "Output data analysis").
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Work = Callable[[], object]

_MOST_COPIES = 64
_LEAST_SAMPLES, _MOST_SAMPLES = 3, 100  # of a visit
_WARM_UPS = 3


@dataclass(frozen=True)
class Timing:
    """Seconds of one execution: median and least of ``count`` samples.

    ``spread``: interquartile range over median; ``uncertainty``: half-width of the median's 90% interval over median.
    """

    median_s: float
    least_s: float
    spread: float
    uncertainty: float
    count: int
    how: str

    @property
    def scatter(self) -> str:
        """As rows note it."""
        return f"spread={self.spread:.4f}; uncertainty={self.uncertainty:.4f}"


# Of n normal values the median's 90% interval is so many interquartile ranges over the root of n wide, to each side:
# 1.645 standard errors of sqrt(pi / 2 n) deviations, of which an interquartile range has 1.349.
_INTERVAL = 1.645 * math.sqrt(math.pi / 2) / 1.349


def summary(visits_s: Sequence[Sequence[float]], how: str) -> Timing:
    """What at least three visits say of one piece of work; a visit has one sample or more."""
    samples = [seconds for visit in visits_s for seconds in visit]
    low, middle, high = statistics.quantiles(samples, n=4)
    first, _, third = statistics.quantiles([statistics.median(visit) for visit in visits_s], n=4)
    uncertainty = _INTERVAL * (third - first) / math.sqrt(len(visits_s)) / middle
    return Timing(middle, min(samples), (high - low) / middle, uncertainty, len(samples), how)


@dataclass(frozen=True)
class Stopwatch:
    """Times work on one device; ``visit_s`` is how long the samples of one visit may take."""

    device: torch.device
    cache_bytes: float
    visit_s: float

    def visit(self, make: Callable[[], Work], moved_bytes: float) -> tuple[list[float], str]:
        """Seconds of every sample, and how they were taken.

        ``make`` returns the work with new random operands; ``moved_bytes`` is what one execution touches.
        """
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

    def _host(self, works: Sequence[Work]) -> tuple[list[float], str]:
        samples: list[float] = []
        deadline = time.perf_counter() + self.visit_s
        while len(samples) < _MOST_SAMPLES and (len(samples) < _LEAST_SAMPLES or time.perf_counter() < deadline):
            work = works[len(samples) % len(works)]
            started = time.perf_counter()
            work()
            samples.append(time.perf_counter() - started)
        return samples, "host clock, includes launch"

    def _events(self, run: Work, copies: int, how: str) -> tuple[list[float], str]:
        run()
        samples: list[float] = []
        deadline = time.perf_counter() + self.visit_s
        while len(samples) < _MOST_SAMPLES and (len(samples) < _LEAST_SAMPLES or time.perf_counter() < deadline):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            run()
            last.record()
            last.synchronize()
            samples.append(first.elapsed_time(last) * 1e-3 / copies)
        return samples, how
