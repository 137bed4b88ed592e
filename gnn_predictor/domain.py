"""The range of jobs a predictor was trained on, and what of a job lies outside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict

from dataset_builder.job.errors import suggestion
from dataset_builder.job.schema import TrainingJob

# Sizes just past the largest one measured are still interpolation in the logarithms that the network sees.
_MARGIN = 1.25


class Domain(BaseModel):
    """What the training runs covered: names seen, alone and together, and the (lowest, highest) value of each size.

    ``pairs`` holds, by the two keys' names, every two values that one run had: each may be known and the two of them
    together not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gpus: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    pairs: dict[str, tuple[str, ...]] = {}
    ranges: dict[str, tuple[float, float]] = {}


def domain_of(jobs: Iterable[TrainingJob]) -> Domain:
    """The smallest domain that holds all of these jobs."""
    gpus: set[str] = set()
    precisions: set[str] = set()
    pairs: dict[str, set[str]] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for job in jobs:
        for name, together in _pairs(job).items():
            pairs.setdefault(name, set()).add(together)
        gpus.add(job.cluster.gpu.name)
        precisions.add(job.precision.label)
        for name, value in _sizes(job).items():
            low, high = ranges.get(name, (value, value))
            ranges[name] = (min(low, value), max(high, value))
    return Domain(
        gpus=tuple(sorted(gpus)),
        precisions=tuple(sorted(precisions)),
        pairs={name: tuple(sorted(seen)) for name, seen in pairs.items()},
        ranges=ranges,
    )


def outside(job: TrainingJob, domain: Domain) -> tuple[str, ...]:
    """One sentence for each way in which ``job`` (a resolved one) is unlike everything the predictor was trained on."""
    reasons = []
    if job.cluster.gpu.name not in domain.gpus:
        reasons.append(f"cluster.gpu: no run on {job.cluster.gpu.name} was in the training data")
    if job.precision.label not in domain.precisions:
        reasons.append(f"precision: no run in {job.precision.label} was in the training data")
    unknown_framework = _unknown_framework(job.software.framework, domain)
    if not reasons:  # what is unknown alone is not told again in pairs
        reasons += [
            f"{name}: no run with {together} was in the training data"
            for name, together in _pairs(job).items()
            if name in domain.pairs and together not in domain.pairs[name]
            if not (unknown_framework and name.startswith("software.framework"))
        ]
    reasons += unknown_framework
    for name, value in _sizes(job).items():
        low, high = domain.ranges.get(name, (value, value))
        if not low / _MARGIN <= value <= high * _MARGIN:
            reasons.append(f"{name}: {value:g} is outside the training data's {low:g} to {high:g}")
    return tuple(reasons)


def _unknown_framework(framework: str | None, domain: Domain) -> list[str]:
    """A sentence when no run had this framework, with the names near it: a misspelt one is taken for another."""
    seen = {together.partition(" and ")[0] for together in domain.pairs.get("software.framework and cluster.gpu", ())}
    if framework is None or not seen or framework in seen:
        return []
    near = suggestion(framework, sorted(seen))
    return [f"software.framework: no run with {framework} was in the training data{near}"]


def _pairs(job: TrainingJob) -> Mapping[str, str]:
    """Values that meet in a job, by their keys; without those that involve unknown software."""
    software, gpu = job.software, job.cluster.gpu.name
    together: dict[tuple[str, str], tuple[object, object]] = {
        ("precision", "cluster.gpu"): (job.precision.label, gpu),
        ("software.framework", "model.architecture"): (software.framework, job.model.architecture),
        # Sources say when they compile, and seldom that they do not.
        ("software.framework", "software.compile"): (software.framework, software.compile or None),
        ("software.framework", "cluster.gpu"): (software.framework, gpu),
    }
    return {
        " and ".join(keys): f"{values[0]} and {values[1]}" for keys, values in together.items() if None not in values
    }


def _sizes(job: TrainingJob) -> Mapping[str, float]:
    return {
        "model.hidden_size": float(job.model.hidden_size),
        "model.num_layers": float(job.model.num_layers),
        "batch.seq_length": float(job.batch.seq_length),
        "batch.global_batch_size": float(job.batch.global_batch_size),
        "number of GPUs": float(job.cluster.num_gpus),
    }
