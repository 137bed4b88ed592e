"""Which measurements may be learnt from and which are kept for the test: always whole groups, never single rows.

P1 unseen jobs (folds by ``job_group``), P2 unseen precision, P3 the same with that format's operator rows left out,
P4 unseen GPU, P5 unseen source, P6 pairs of runs that differ only in precision. Runs in doubt are tested, never learnt
from.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Run(Protocol):
    """What a split looks at; a run measurement has it."""

    @property
    def run_id(self) -> str: ...
    @property
    def source_id(self) -> str: ...
    @property
    def gpu(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def job_group(self) -> str: ...
    @property
    def doubt(self) -> str: ...


@dataclass(frozen=True)
class Split:
    """Row numbers to learn from and to be tested on, and the operator formats that must not be learnt from."""

    name: str
    train: tuple[int, ...]
    test: tuple[int, ...]
    hidden_op_dtypes: tuple[str, ...] = ()


OP_DTYPES_OF_PRECISION: dict[str, tuple[str, ...]] = {
    "fp32": ("fp32",), "tf32": ("tf32",), "fp16": ("fp16",), "fp16_mixed": ("fp16",), "bf16": ("bf16",),
    "bf16_mixed": ("bf16",), "fp8_mixed": ("fp8_e4m3", "fp8_e5m2"), "mxfp8": ("mxfp8",), "nvfp4": ("nvfp4",),
}  # fmt: skip

_FEW_RUNS = 10


def fold_of(group: str, folds: int, seed: int = 0) -> int:
    """The fold a group is in: the same on every machine, uniform over groups."""
    digest = hashlib.sha256(f"{seed}:{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % folds


def unseen_jobs(runs: Sequence[Run], folds: int = 5, seed: int = 0) -> list[Split]:
    """P1: ``folds`` splits; a job's rows are all on one side."""
    fold = [fold_of(run.job_group, folds, seed) for run in runs]
    return [_split(f"P1-{number}", runs, [number == own for own in fold]) for number in range(folds)]


def _split(name: str, runs: Sequence[Run], is_test: Sequence[bool]) -> Split:
    train = tuple(i for i, run in enumerate(runs) if not is_test[i] and not run.doubt)
    return Split(name, train, tuple(i for i, tested in enumerate(is_test) if tested))


def unseen_precision(runs: Sequence[Run], hide_operators: bool = False) -> list[Split]:
    """P2, or P3 with ``hide_operators``: every run of one precision leaves the training set everywhere.

    Tested on those of its rows whose source was seen in another precision: the test is about precision, not about a
    new cluster.
    """
    name = "P3" if hide_operators else "P2"
    splits = []
    for precision in sorted({run.precision for run in runs}):
        train = tuple(i for i, run in enumerate(runs) if run.precision != precision and not run.doubt)
        seen = {runs[index].source_id for index in train}
        test = tuple(i for i, run in enumerate(runs) if run.precision == precision and run.source_id in seen)
        if test and train:
            hidden = OP_DTYPES_OF_PRECISION.get(precision, (precision,)) if hide_operators else ()
            splits.append(Split(f"{name}-{precision}", train, test, hidden))
    return splits


def unseen_gpu(runs: Sequence[Run]) -> list[Split]:
    """P4: every run on one GPU model is the test; models with fewer than ten runs leave together, if others stay."""
    count = Counter(run.gpu for run in runs)
    rare = {gpu for gpu, number in count.items() if number < _FEW_RUNS}
    together = rare if len(rare) < len(count) else set()
    return _leave_one_out("P4", runs, ["rare" if run.gpu in together else run.gpu for run in runs])


def unseen_source(runs: Sequence[Run]) -> list[Split]:
    """P5: every run of one source (another lab's stack and cluster) is the test."""
    return _leave_one_out("P5", runs, [run.source_id for run in runs])


def _leave_one_out(name: str, runs: Sequence[Run], keys: Sequence[str]) -> list[Split]:
    splits = [_split(f"{name}-{left_out}", runs, [key == left_out for key in keys]) for left_out in sorted(set(keys))]
    return [split for split in splits if split.train]


def precision_pairs(runs: Sequence[Run], key_of: Sequence[str]) -> list[tuple[int, int]]:
    """P6: pairs of row numbers that differ only in precision; the first has the precision that sorts first.

    ``key_of[i]`` identifies everything about run ``i`` but its precision. With several rows of one precision under a
    key, the first of each stands for it.
    """
    by_key: dict[str, dict[str, int]] = defaultdict(dict)
    for index, (run, key) in enumerate(zip(runs, key_of, strict=True)):
        by_key[key].setdefault(run.precision, index)
    pairs = []
    for rows in by_key.values():
        ordered = [rows[precision] for precision in sorted(rows)]
        pairs += [(first, second) for i, first in enumerate(ordered) for second in ordered[i + 1 :]]
    return pairs
