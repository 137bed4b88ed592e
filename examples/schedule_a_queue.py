"""Ranks a queue of training jobs on a cluster: the shortest first, later ones where there is room beside them.

A job's place is reserved for the upper end of its predicted interval, so that nine times in ten nobody waits for it.

    python examples/schedule_a_queue.py JOB.yaml ... --gpus 64 [--steps 1000] [--format table|json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass

from gnn_predictor import CannotRunError, JobError, Prediction, TrainingJob, predict


@dataclass(frozen=True)
class Reservation:
    """When a job has its GPUs, in hours from now."""

    name: str
    gpus: int
    start_h: float
    expected_end_h: float
    reserved_end_h: float


def main() -> None:
    """Reads the jobs, predicts each and prints the schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", metavar="JOB.yaml")
    parser.add_argument("--gpus", type=int, required=True, help="in the cluster")
    parser.add_argument("--steps", type=int, default=1000, help="of a job that does not say how long it trains")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args()
    running, refused = [], {}
    for file in options.jobs:
        try:
            job = TrainingJob.from_yaml(file)
        except JobError as error:
            refused[file] = "; ".join(error.reasons)
            continue
        name = job.name or file
        if job.cluster.num_gpus > options.gpus:
            refused[name] = f"wants {job.cluster.num_gpus} GPUs, the cluster has {options.gpus}"
            continue
        try:
            running.append((name, predict(job)))
        except CannotRunError as error:
            refused[name] = "; ".join(error.reasons)
    schedule = reserve(running, options.gpus, options.steps)
    if options.format == "json":
        plan = {each.name: [each.start_h, each.expected_end_h] for each in schedule}
        print(json.dumps({"order": [each.name for each in schedule], "hours": plan, "refused": refused}, indent=1))
        return
    for each in schedule:
        print(f"{each.start_h:8.1f} h to {each.expected_end_h:8.1f} h  {each.gpus:6} GPUs  {each.name}")
    for name, reason in refused.items():
        print(f"refused: {name}: {reason}")


def reserve(predictions: Sequence[tuple[str, Prediction]], num_gpus: int, steps: int) -> list[Reservation]:
    """Each job in the order of its predicted duration, at the earliest hour at which it has its GPUs to the end."""
    plan: list[Reservation] = []
    for name, prediction in sorted(predictions, key=lambda each: hours(each[1], steps)):
        gpus = prediction.job.cluster.num_gpus
        expected_h = hours(prediction, steps)
        reserved_h = expected_h * prediction.iteration_time_high_s / prediction.iteration_time_s
        starts = [0.0, *sorted(each.reserved_end_h for each in plan)]
        start = next(hour for hour in starts if _most_taken(plan, hour, hour + reserved_h) + gpus <= num_gpus)
        plan.append(Reservation(name, gpus, start, start + expected_h, start + reserved_h))
    return sorted(plan, key=lambda each: each.start_h)


def hours(prediction: Prediction, steps: int) -> float:
    """Of the whole training, or of so many steps where the job does not say how long it trains."""
    return prediction.total.hours if prediction.total else steps * prediction.iteration_time_s / 3600


def _most_taken(plan: Sequence[Reservation], start_h: float, end_h: float) -> int:
    """GPUs reserved at the busiest moment of a span; they only become more when a reservation starts."""
    moments = [start_h, *(each.start_h for each in plan if start_h < each.start_h < end_h)]
    return max(sum(each.gpus for each in plan if each.start_h <= at < each.reserved_end_h) for at in moments)


if __name__ == "__main__":
    main()
