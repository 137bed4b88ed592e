"""Splits keep groups whole and leave out what their protocol says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from dataset_builder.corpus.splits import (
    fold_of,
    precision_pairs,
    unseen_gpu,
    unseen_jobs,
    unseen_precision,
    unseen_source,
)


@dataclass(frozen=True)
class Row:
    run_id: str
    source_id: str
    gpu: str
    precision: str
    job_group: str
    doubt: str = ""


rows = st.lists(
    st.builds(
        Row, run_id=st.just(""), source_id=st.sampled_from("ab"), gpu=st.sampled_from("xyz"),
        precision=st.sampled_from(["bf16_mixed", "fp8_mixed", "fp32"]), job_group=st.sampled_from("123456789"),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


def test_folds_are_the_same_everywhere() -> None:
    assert [fold_of(group, 5, 0) for group in ("a", "b", "c", "ee59adb960")] == [4, 2, 3, 1]


def test_folds_are_about_equal() -> None:
    counts = [0] * 5
    for number in range(5000):
        counts[fold_of(f"group {number}", 5, 7)] += 1
    assert min(counts) > 850


@given(rows)
def test_unseen_jobs_cover_every_row_once_and_split_no_group(runs: list[Row]) -> None:
    splits = unseen_jobs(runs)
    assert sorted(index for split in splits for index in split.test) == list(range(len(runs)))
    for split in splits:
        assert not {runs[i].job_group for i in split.train} & {runs[i].job_group for i in split.test}
        assert len(split.train) + len(split.test) == len(runs)


@given(rows, st.sets(st.integers(0, 39)))
def test_a_time_in_doubt_is_tested_but_never_learnt_from(runs: list[Row], doubtful: set[int]) -> None:
    runs = [replace(run, doubt="noisy") if index in doubtful else run for index, run in enumerate(runs)]
    for split in (*unseen_jobs(runs), *unseen_precision(runs), *unseen_gpu(runs), *unseen_source(runs)):
        assert not any(runs[index].doubt for index in split.train)
    assert sorted(index for split in unseen_jobs(runs) for index in split.test) == list(range(len(runs)))


@given(rows)
def test_unseen_precision_is_seen_nowhere_in_training(runs: list[Row]) -> None:
    for split in unseen_precision(runs, hide_operators=True):
        tested = {runs[i].precision for i in split.test}
        assert len(tested) == 1
        assert not tested & {runs[i].precision for i in split.train}
        assert {runs[i].source_id for i in split.test} <= {runs[i].source_id for i in split.train}
        assert split.hidden_op_dtypes


@given(rows)
def test_unseen_gpu_and_source(runs: list[Row]) -> None:
    for split in unseen_gpu(runs):
        assert not {runs[i].gpu for i in split.train} & {runs[i].gpu for i in split.test}
    for split in unseen_source(runs):
        assert not {runs[i].source_id for i in split.train} & {runs[i].source_id for i in split.test}


@given(rows)
def test_pairs_differ_only_in_precision(runs: list[Row]) -> None:
    keys = [run.job_group for run in runs]
    for first, second in precision_pairs(runs, keys):
        assert keys[first] == keys[second]
        assert runs[first].precision < runs[second].precision
