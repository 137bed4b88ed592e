"""What a user should hear of a table of runs beside its answers: sentences, the gravest facts named with their rows.

In: the rows as they were read, and what is predicted of them. Out: lines of text for standard error; nothing here
changes how a row is read or answered.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataset_builder.corpus.measurements import RunMeasurement
from dataset_builder.corpus.table_columns import LAYOUT_COLUMNS

_MOST_LINES = 12
_MOST_NAMES = 10
_FAR = math.log(10.0)  # kernels and networks do less: the cell has another unit, or the row is another job
_ANOTHER_UNIT = math.log(30.0)  # of most rows at once: no cluster is that much slower or faster than those known


@dataclass(frozen=True)
class PredictedRun:
    """A measured row beside what is predicted of it."""

    run: RunMeasurement
    seconds: float
    peak_bytes: float

    @property
    def log_error(self) -> float:
        """Of measured over predicted."""
        return math.log(self.run.iter_time_s / self.seconds)


def assumptions(runs: Iterable[RunMeasurement]) -> list[str]:
    """What was assumed of how many rows, the most frequent first; empty when every row says all."""
    answered = [run for run in runs if run.job is not None]
    rows: Counter[str] = Counter()
    sentences: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for run in answered:
        for sentence in run.assumed:
            sentences[_subject(sentence)][sentence] += 1
        rows.update(dict.fromkeys(map(_subject, run.assumed), 1))
    if not rows:
        return []
    shown = rows.most_common(_MOST_LINES - 1 if len(rows) > _MOST_LINES - 1 else None)
    lines = [f"  {count:{len(str(len(answered)))}} {_example(sentences[subject])}" for subject, count in shown]
    if len(rows) > len(shown):
        lines.append(f"  and {len(rows) - len(shown)} more of fewer rows")
    return [f"assumed where the {len(answered)} rows say nothing (rows, what):", *lines]


def too_large(predicted: Iterable[PredictedRun]) -> list[str]:
    """A warning where measured runs would not fit in their device as they are read: they did run."""
    excess = [(each.peak_bytes / each.run.job.cluster.gpu.hbm_bytes, each) for each in predicted if each.run.job]
    excess = [(ratio, each) for ratio, each in excess if ratio > 1 and each.run.is_timed]
    if not excess:
        return []
    _, worst = max(excess, key=lambda pair: pair[0])
    assert worst.run.job is not None
    gpu = worst.run.job.cluster.gpu
    blank = {column for _, each in excess for column in each.run.blank}
    advice = (
        f"fill {', '.join(column for column in LAYOUT_COLUMNS if column in blank)}"
        if blank
        else "check tp, pp, sharding, act_ckpt and attention"
    )
    return [
        f"warning: {len(excess)} measured rows need more memory than their GPU has as they are read (run "
        f"{worst.run.run_id}: {worst.peak_bytes / 1e9:.0f} GB on {gpu.name} of {gpu.hbm_bytes / 1e9:.0f} GB), and they "
        f"did run: their layout or kernels are not those taken here; {advice}"
    ]


def another_unit(predicted: Sequence[PredictedRun]) -> str:
    """What gives away that a table's times are not in seconds; empty when they are of the predictions' size."""
    timed = sorted((each for each in predicted if each.run.is_timed), key=lambda each: each.log_error)
    usual = statistics.median(each.log_error for each in timed) if timed else 0.0
    if abs(usual) <= _ANOTHER_UNIT:
        return ""
    example = timed[len(timed) // 2]
    return (
        f"iter_time_s: the runs' median is {_times(usual)} as predicted, for example {example.run.iter_time_s:g} "
        f"in run {example.run.run_id} against {example.seconds:.4g} s; expected seconds of one iteration "
        "(not milliseconds, and not of many iterations)"
    )


def far_off(predicted: Sequence[PredictedRun]) -> list[str]:
    """A warning for each row whose time is far from what it and the table's other rows lead to expect."""
    timed = [each for each in predicted if each.run.is_timed]
    # Two rows that disagree say nothing of which of them is wrong; the prediction has to.
    usual = statistics.median(each.log_error for each in timed) if len(timed) > 2 else 0.0
    far = [each for each in timed if abs(each.log_error - usual) > _FAR]
    lines = [
        f"warning: run {each.run.run_id}: iter_time_s {each.run.iter_time_s:g} against {each.seconds:.4g} s predicted, "
        f"{_times(each.log_error)}{_beside(usual)}: are these the seconds of one iteration of this job?"
        for each in far[:_MOST_NAMES]
    ]
    return [*lines, *([f"warning: {len(far) - _MOST_NAMES} more rows as far off"] if len(far) > _MOST_NAMES else [])]


def untimed(answered: Sequence[RunMeasurement]) -> list[str]:
    """Over how many of the answered rows errors are, and what the others have in place of a time."""
    without = [run for run in answered if not run.is_timed]
    if not without:
        return []
    named = [f"{run.run_id} ({stated_time(run)})" for run in without[:_MOST_NAMES]]
    if len(without) > _MOST_NAMES:
        named.append(f"{len(without) - _MOST_NAMES} more")
    return [
        f"errors over {len(answered) - len(without)} of {len(answered)} answered rows; "
        f"no time in iter_time_s of {', '.join(named)}"
    ]


def stated_time(run: RunMeasurement) -> str:
    """A row's time as it was written, or that it is blank."""
    return repr(run.stated_time) if run.stated_time else "blank"


def _subject(sentence: str) -> str:
    return sentence.partition(":")[0]


def _example(sentences: Counter[str]) -> str:
    (sentence, _), *others = sentences.most_common()
    return f"{sentence} (other rows otherwise)" if others else sentence


def _times(log_ratio: float) -> str:
    factor = math.exp(abs(log_ratio))
    return f"{factor:{'.3g' if factor < 100 else ',.0f'}} times as {'long' if log_ratio > 0 else 'short'}"


def _beside(usual: float) -> str:
    return f" (the table's median row: {_times(usual)})" if usual else ""
