"""Every schedule's order of events is one that can run, and holds as many microbatches as its paper says."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dataset_builder.job.parallel import FOLDED_SCHEDULES
from gnn_predictor.event_order import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    PAIRED,
    WEIGHT_GRADIENT,
    PipelineShape,
    in_flight_microbatches,
    rank_order,
    stages_of_rank,
)

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_2p", "zero_bubble_v", "dualpipe", "dualpipe_v")


@st.composite
def shapes(draw: st.DrawFn) -> PipelineShape:
    schedule = draw(st.sampled_from(SCHEDULES))
    ranks, count = draw(st.integers(2, 8)), draw(st.integers(1, 24))
    chunks = 2 if schedule in FOLDED_SCHEDULES else draw(st.integers(2, 4)) if schedule == "interleaved" else 1
    if schedule == "interleaved":
        count *= ranks
    if schedule == "dualpipe":
        ranks, count = ranks + ranks % 2, 2 * count
    assume(schedule not in PAIRED or count >= 2 * ranks)
    return PipelineShape(schedule, ranks, chunks, count)


@given(shapes())
def test_every_microbatch_passes_every_piece_once_in_each_direction(shape: PipelineShape) -> None:
    tasks = [task for rank in range(shape.num_ranks) for event in rank_order(shape, rank) for task in event]
    pieces = shape.num_ranks * shape.num_chunks
    every = {(piece, i) for piece in range(pieces) for i in range(shape.num_microbatches)}
    assert len(tasks) == len(set(tasks))
    assert {task[1:] for task in tasks if task.kind == FORWARD} == every
    assert {task[1:] for task in tasks if task.kind in (BACKWARD, INPUT_GRADIENT)} == every
    assert {task[1:] for task in tasks if task.kind in (BACKWARD, WEIGHT_GRADIENT)} == every


@given(shapes())
def test_microbatches_in_flight_are_those_of_the_order(shape: PipelineShape) -> None:
    """Held from the forward pass to the weight gradients."""
    for rank, expected in enumerate(in_flight_microbatches(shape)):
        held = peak = 0
        for event in rank_order(shape, rank):
            held += sum(task.kind == FORWARD for task in event)
            peak = max(peak, held)
            held -= sum(task.kind in (BACKWARD, WEIGHT_GRADIENT) for task in event)
        assert peak / shape.num_chunks == expected
        assert held == 0


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [
        ("gpipe", 1, (64.0,) * 8),
        ("1f1b", 1, (8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)),
        ("interleaved", 2, (11.5, 10.5, 9.5, 8.5, 7.5, 6.5, 5.5, 4.5)),
        ("zero_bubble", 1, (8.0,) * 8),  # p M_B, Qi et al. 2023, table 2
        ("zero_bubble_2p", 1, (15.0,) * 8),  # (2p - 1) M_B, table 2
        ("zero_bubble_v", 2, (8.0,) * 8),  # that of 1F1B on every rank, section 6
        ("dualpipe", 1, (9.0,) * 8),  # PP + 1, DeepSeek-V3, table 2
        ("dualpipe_v", 2, (8.5,) * 8),
    ],
)
def test_published_microbatches_in_flight(schedule: str, chunks: int, expected: tuple[float, ...]) -> None:
    assert in_flight_microbatches(PipelineShape(schedule, 8, chunks, 64)) == expected


def test_dualpipe_holds_the_weights_of_two_stages() -> None:
    """2x parameters: DeepSeek-V3, table 2."""
    assert [stages_of_rank(PipelineShape("dualpipe", 4, 1, 8), rank) for rank in range(4)] == [
        (0, 3), (1, 2), (2, 1), (3, 0),
    ]  # fmt: skip
    assert stages_of_rank(PipelineShape("1f1b", 4, 1, 8), 2) == (2,)
