"""The fastest plans of a search space: every layout that divides and fits in memory is predicted, none is guessed.

Nothing is pruned by an estimate of time, so the ranking is that of an exhaustive search: what does not divide is
dropped by arithmetic, what does not fit by the memory of its stages, which is known before its graph is built. The
rest goes through the network in batches, on all cores; only the best are predicted in full. All times in seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from dataset_builder.job.errors import CannotRunError, JobError
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import RankLayout, resolved_layout, unsupported_formats
from dataset_builder.tracing.trace import GraphBuilder
from gnn_predictor.checkpoint import Checkpoint
from gnn_predictor.features import GraphArrays, featurize
from gnn_predictor.memory import MemoryFit, peak_memory
from gnn_predictor.prediction import Prediction, job_times, predict, predict_each
from gnn_predictor.search_space import Layout, SearchSpace

SCHEMA_VERSION = 1
NO_MEMORY = "does not fit in memory"
_GRAPHS_AT_ONCE = 16
_LAYOUTS_A_TASK = 256
# A pool of processes costs about as much as this many layouts.
_LEAST_FOR_A_POOL = 1024
# Relative, of the time that layouts are ranked by: the network adds up in single precision, in batches of any size.
_ROUNDING = 1e-4

Progress = Callable[[int, int], None]  # called with the number of layouts done, and of all


@dataclass(frozen=True, slots=True)
class Nearest:
    """A layout that divides but does not fit, and the bytes its fullest stage needs."""

    space: int
    layout: int
    memory_bytes: float


@dataclass(frozen=True)
class Outcome:
    """What became of a part of the layouts: ``timed`` holds (seconds, space, layout) of those that run."""

    timed: list[tuple[float, int, int]] = field(default_factory=list)
    pruned: Counter[str] = field(default_factory=Counter)
    nearest: Nearest | None = None

    def __add__(self, other: Outcome) -> Outcome:
        nearest = min(filter(None, (self.nearest, other.nearest)), key=lambda each: each.memory_bytes, default=None)
        return Outcome(self.timed + other.timed, self.pruned + other.pruned, nearest)


@dataclass(frozen=True)
class Plan:
    """One layout of the ranking: what to set in the job file, and its prediction."""

    settings: Mapping[str, Any]
    prediction: Prediction

    @property
    def peak_memory_bytes(self) -> float:
        """Of the fullest stage."""
        return max(stage.peak_memory_bytes for stage in self.prediction.stages)

    @property
    def gpu_hours_per_billion_tokens(self) -> float:
        return self.prediction.job.cluster.num_gpus * 1e9 / self.prediction.tokens_per_s / 3600

    @property
    def usd_per_billion_tokens(self) -> float | None:
        price = self.prediction.job.price
        return None if price is None else self.gpu_hours_per_billion_tokens * price.usd_per_gpu_hour

    @cached_property
    def limits(self) -> dict[str, float]:
        """Shares of the iteration that add up to 1, the largest first: what would have to change for a faster one.

        ``bubble``: the busiest stage waits for others; what else it does is shared as on the critical path, kernels by
        what their roofline is made of, messages by axis as far as they are exposed.
        """
        parts, seconds = self.prediction.breakdown, self.prediction.iteration_time_s
        bubble = min(stage.bubble_s for stage in self.prediction.stages) / seconds
        busy: Counter[str] = Counter({"host": parts.by_kind.get("host", 0.0)})
        for bounds in parts.by_bound.values():
            busy.update(bounds)
        busy.update({f"{axis} communication": value for axis, value in parts.exposed_communication.items()})
        scale = (1 - bubble) / sum(busy.values())
        shares = {"bubble": bubble} | {name: value * scale for name, value in busy.items()}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """One of ``plans`` in ``plan --format json``."""
        prediction = self.prediction
        return {
            "set": dict(self.settings),
            "data_parallel": prediction.data_parallel,
            "num_microbatches": prediction.num_microbatches,
            "iteration_time_s": prediction.iteration_time_s,
            "iteration_time_low_s": prediction.iteration_time_low_s,
            "iteration_time_high_s": prediction.iteration_time_high_s,
            "tokens_per_s": prediction.tokens_per_s,
            "mfu": prediction.mfu,
            "peak_memory_bytes": self.peak_memory_bytes,
            "gpu_hours_per_billion_tokens": self.gpu_hours_per_billion_tokens,
            "usd_per_billion_tokens": self.usd_per_billion_tokens,
            "total": prediction.to_dict()["total"],
            "limits": self.limits,
            "in_domain": prediction.in_domain,
            "warnings": list(prediction.warnings),
        }


@dataclass(frozen=True)
class Plans:
    """The fastest plans of a job, the fastest first, and what became of all the others."""

    spaces: tuple[SearchSpace, ...]
    pruned: Mapping[str, int]
    num_evaluated: int
    plans: tuple[Plan, ...]
    given: Prediction | CannotRunError  # the job as its file has it

    @property
    def num_possible(self) -> int:
        return self.num_evaluated + sum(self.pruned.values())

    def to_dict(self) -> dict[str, Any]:
        """The value that ``plan --format json`` prints (see ``report/plan.schema.json``)."""
        best = self.plans[0].prediction
        return {
            "schema_version": SCHEMA_VERSION,
            "job": self.spaces[0].job.resolved().model_dump(mode="json"),
            "searched": {"possible": self.num_possible, "evaluated": self.num_evaluated, "pruned": dict(self.pruned)},
            "interval": best.interval,
            "given": {"iteration_time_s": None, "reasons": list(self.given.reasons)}
            if isinstance(self.given, CannotRunError)
            else {"iteration_time_s": self.given.iteration_time_s, "reasons": []},
            "plans": [plan.to_dict() for plan in self.plans],
            "provenance": dict(best.provenance),
        }


def search(
    spaces: Sequence[SearchSpace],
    checkpoint: Checkpoint,
    top: int,
    num_workers: int | None = None,
    progress: Progress = lambda done, total: None,
    part: tuple[int, int] = (0, 1),
) -> Plans:
    """The ``top`` fastest plans of all spaces together; raises CannotRunError when there is none.

    ``num_workers``: processes, by default one a core (and none beside this one where the search is short). ``part``
    (i, n): only every n-th layout, from the i-th on; the best of all parts are the best of all layouts.
    """
    layouts = [list(space)[part[0] :: part[1]] for space in spaces]
    searcher = _Searcher(tuple(spaces), layouts, checkpoint)
    outcome = Outcome()
    done = 0
    for judged, number in searcher.run(num_workers or len(os.sched_getaffinity(0))):
        outcome += judged
        done += number
        progress(done, sum(map(len, layouts)))
    if not outcome.timed:
        raise CannotRunError(_reasons(outcome, spaces, layouts), source=spaces[0].job.name or "job")
    plans = _best(sorted(outcome.timed), top, searcher)
    (given,) = predict_each([spaces[0].job], checkpoint)
    pruned = dict(sorted(outcome.pruned.items(), key=lambda item: -item[1]))
    return Plans(tuple(spaces), pruned, len(outcome.timed), tuple(plans), given)


def merge(spaces: Sequence[SearchSpace], parts: Sequence[Mapping[str, Any]], checkpoint: Checkpoint, top: int) -> Plans:
    """The best of what the parts of a search found, each as :meth:`Plans.to_dict`, predicted again."""
    found = sorted(
        (plan["iteration_time_s"], index, place)
        for index, part in enumerate(parts)
        for place, plan in enumerate(part["plans"])
    )
    if not found:
        reasons = [reason for part in parts for reason in part.get("reasons", ())]
        raise CannotRunError(list(dict.fromkeys(reasons)), source=spaces[0].job.name or "job")
    settings = [parts[index]["plans"][place]["set"] for _, index, place in found[:top]]
    by_settings = {
        json.dumps(space.settings(layout), sort_keys=True): space.applied(layout)
        for space in spaces
        for layout in space
    }
    texts = [json.dumps(each, sort_keys=True) for each in settings]
    if not set(texts) <= set(by_settings):
        raise JobError(["plans of another job, or of other --set or --free than given"], spaces[0].job.name or "job")
    jobs = [by_settings[text] for text in texts]
    plans = tuple(
        Plan(each, found_again) for each, found_again in zip(settings, predict(jobs, checkpoint), strict=True)
    )
    pruned: Counter[str] = Counter()
    for part in parts:
        pruned.update(part.get("searched", {}).get("pruned", {}))
    evaluated = sum(part.get("searched", {}).get("evaluated", 0) for part in parts)
    (given,) = predict_each([spaces[0].job], checkpoint)
    return Plans(tuple(spaces), dict(pruned.most_common()), evaluated, plans, given)


def _best(timed: Sequence[tuple[float, int, int]], top: int, searcher: _Searcher) -> list[Plan]:
    """The best of layouts in the order of their times, predicted in full.

    A prediction may be longer than the time it is ranked by, where it is raised to its physical floor, but not
    shorter: so the best are known once they beat the time of the next.
    """
    plans: list[Plan] = []
    for start in range(0, len(timed), max(top, _GRAPHS_AT_ONCE)):
        part = timed[start : start + max(top, _GRAPHS_AT_ONCE)]
        if len(plans) >= top and plans[top - 1].prediction.iteration_time_s < part[0][0] * (1 - _ROUNDING):
            break
        chosen = [(searcher.spaces[space], searcher.layouts[space][layout]) for _, space, layout in part]
        predictions = predict([space.applied(layout) for space, layout in chosen], searcher.checkpoint)
        plans += [Plan(space.settings(layout), each) for (space, layout), each in zip(chosen, predictions, strict=True)]
        plans.sort(key=lambda plan: plan.prediction.iteration_time_s)
    return plans[:top]


def _reasons(outcome: Outcome, spaces: Sequence[SearchSpace], layouts: Sequence[Sequence[Layout]]) -> list[str]:
    """Why there is no plan: what became of the layouts, and which one needs the least memory."""
    possible = sum(outcome.pruned.values())
    reasons = [f"plan: none of {possible:,} layouts can run"]
    reasons += [f"{count:,}: {reason}" for reason, count in outcome.pruned.most_common()]
    nearest = outcome.nearest
    if nearest is not None:
        space = spaces[nearest.space]
        gpu = space.job.cluster.gpu
        over = nearest.memory_bytes - gpu.hbm_bytes
        settings = " ".join(
            f"{key}={value}" for key, value in space.settings(layouts[nearest.space][nearest.layout]).items()
        )
        reasons.append(
            f"nearest: {settings} needs {nearest.memory_bytes / 1e9:.1f} GB per GPU, {over / 1e9:.1f} GB "
            f"({over / gpu.hbm_bytes:.1%}) more than {gpu.name} has"
        )
    return reasons


@dataclass(frozen=True)
class _Searcher:
    """All that a worker process needs; a task is a space and the indices of some of its layouts."""

    spaces: tuple[SearchSpace, ...]
    layouts: Sequence[Sequence[Layout]]
    checkpoint: Checkpoint

    def run(self, num_workers: int) -> Iterator[tuple[Outcome, int]]:
        """Outcomes of tasks as they end, with the number of layouts in each."""
        tasks = [
            (space, range(start, min(start + _LAYOUTS_A_TASK, len(layouts))))
            for space, layouts in enumerate(self.layouts)
            for start in range(0, len(layouts), _LAYOUTS_A_TASK)
        ]
        if num_workers == 1 or sum(map(len, self.layouts)) < _LEAST_FOR_A_POOL:
            yield from ((self.evaluate(*task), len(task[1])) for task in tasks)
            return
        # Forked workers share what is loaded; elsewhere forking is unsafe once threads run.
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        with ProcessPoolExecutor(num_workers, context, _start_worker, (self,)) as pool:
            futures = {pool.submit(_evaluate_in_worker, task): len(task[1]) for task in tasks}
            for future in as_completed(futures):
                yield future.result(), futures[future]

    def evaluate(self, space_index: int, indices: Sequence[int]) -> Outcome:
        """Judges these layouts and times those that run."""
        space = self.spaces[space_index]
        timed: list[tuple[float, int, int]] = []
        pruned: Counter[str] = Counter()
        ready: list[tuple[int, _Ready]] = []
        nearest: Nearest | None = None
        for index in indices:
            judged = _judged(space, self.layouts[space_index][index], self.checkpoint.config.memory)
            if isinstance(judged, str):
                pruned[judged] += 1
            elif isinstance(judged, float):
                pruned[NO_MEMORY] += 1
                if nearest is None or judged < nearest.memory_bytes:
                    nearest = Nearest(space_index, index, judged)
            else:
                ready.append((index, judged))
        for start in range(0, len(ready), _GRAPHS_AT_ONCE):
            part = ready[start : start + _GRAPHS_AT_ONCE]
            times = job_times([each.job for _, each in part], [each.arrays for _, each in part], self.checkpoint)
            timed += [(each.total_s, space_index, index) for each, (index, _) in zip(times, part, strict=True)]
        return Outcome(timed, pruned, nearest)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A layout that can run, as the network's input."""

    job: TrainingJob
    arrays: GraphArrays


def _judged(space: SearchSpace, layout: Layout, fit: MemoryFit) -> _Ready | float | str:
    """A layout that can run; the bytes it needs where they are too many; or why it does not divide."""
    problem = space.problem(layout)
    if problem is not None:
        return problem
    job = space.applied(layout).resolved()
    missing = unsupported_formats(job)
    if missing:
        return missing[0]
    try:
        ranks: RankLayout = resolved_layout(job)
    except CannotRunError as error:
        return f"{error.reasons[0].partition(':')[0]} does not divide"
    builder = GraphBuilder.of(job, ranks)
    needed = max(stage.total for stage in peak_memory(builder.facts, job, ranks, fit))
    if needed > job.cluster.gpu.hbm_bytes:
        return needed
    return _Ready(job, featurize(job, builder.build(), ranks))


_worker: dict[str, _Searcher] = {}


def _start_worker(searcher: _Searcher) -> None:
    torch.set_num_threads(1)
    _worker["searcher"] = searcher


def _evaluate_in_worker(task: tuple[int, Sequence[int]]) -> Outcome:
    return _worker["searcher"].evaluate(*task)
