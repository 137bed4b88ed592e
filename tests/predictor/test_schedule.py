"""The schedule recurrence against published bubble formulas, brute force and finite differences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnn_predictor.event_order import PipelineShape
from gnn_predictor.schedule import DifferentiableMakespan, pipeline_makespan, timed_events

seconds = st.floats(0.1, 3.0)


def equal_stages(schedule: str, ranks: int, chunks: int, microbatches: int) -> float:
    shape = PipelineShape(schedule, ranks, chunks, microbatches)
    return pipeline_makespan(shape, [1.0] * ranks, [2.0] * ranks, 0.0).seconds


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (8, 64), (8, 512), (16, 3)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_bubble_of_equal_stages(schedule: str, ranks: int, microbatches: int) -> None:
    """(p - 1) microbatches of bubble: Narayanan et al. 2021, section 2.2.1."""
    assert equal_stages(schedule, ranks, 1, microbatches) == pytest.approx(3.0 * (microbatches + ranks - 1))


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(4, 2, 8), (8, 5, 64), (4, 3, 400), (2, 2, 2)])
def test_bubble_of_interleaving(ranks: int, chunks: int, microbatches: int) -> None:
    """(p - 1) / v microbatches of bubble: Narayanan et al. 2021, section 2.2.2."""
    expected = 3.0 * (microbatches + (ranks - 1) / chunks)
    assert equal_stages("interleaved", ranks, chunks, microbatches) == pytest.approx(expected)


def test_one_microbatch_through_two_stages_is_half_idle() -> None:
    assert equal_stages("1f1b", 2, 1, 1) == pytest.approx(2 * 3.0)


def brute_force_1f1b(forward: list[float], backward: list[float], microbatches: int, hop: float) -> float:
    """Simulates every rank as a worker that always takes its next event, one event at a time."""
    ranks = len(forward)
    todo = []
    for rank in range(ranks):
        warm = min(ranks - 1 - rank, microbatches)
        order = ["F"] * warm + ["F", "B"] * (microbatches - warm) + ["B"] * warm
        todo.append(order)
    done: dict[tuple[str, int, int], float] = {}
    free, count = [0.0] * ranks, [{"F": 0, "B": 0} for _ in range(ranks)]
    while any(todo):
        for rank in range(ranks):
            if not todo[rank]:
                continue
            kind = todo[rank][0]
            microbatch = count[rank][kind]
            if kind == "F":
                ready = 0.0 if rank == 0 else done.get(("F", rank - 1, microbatch), -1.0)
                remote = rank > 0
            elif rank == ranks - 1:
                ready, remote = done.get(("F", rank, microbatch), -1.0), False
            else:
                ready, remote = done.get(("B", rank + 1, microbatch), -1.0), True
            if ready < 0:
                continue
            start = max(free[rank], ready + (hop if remote else 0.0))
            free[rank] = start + (forward if kind == "F" else backward)[rank]
            done[kind, rank, microbatch] = free[rank]
            count[rank][kind] += 1
            todo[rank].pop(0)
    return max(free)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 5), st.integers(1, 24), st.floats(0.0, 0.5))
def test_unequal_stages_match_brute_force(data: st.DataObject, ranks: int, microbatches: int, hop: float) -> None:
    forward = data.draw(st.lists(seconds, min_size=ranks, max_size=ranks))
    backward = data.draw(st.lists(seconds, min_size=ranks, max_size=ranks))
    shape = PipelineShape("1f1b", ranks, 1, microbatches)
    expected = brute_force_1f1b(forward, backward, microbatches, hop)
    assert pipeline_makespan(shape, forward, backward, hop).seconds == pytest.approx(expected)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(2, 4), st.integers(60, 90), st.floats(0.0, 0.1))
def test_long_steps_are_extrapolated_closely(data: st.DataObject, ranks: int, microbatches: int, hop: float) -> None:
    forward = data.draw(st.lists(seconds, min_size=ranks, max_size=ranks))
    backward = data.draw(st.lists(seconds, min_size=ranks, max_size=ranks))
    shape = PipelineShape("1f1b", ranks, 1, microbatches)
    expected = brute_force_1f1b(forward, backward, microbatches, hop)
    assert pipeline_makespan(shape, forward, backward, hop).seconds == pytest.approx(expected, rel=0.01)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([("1f1b", 1), ("interleaved", 2), ("gpipe", 1)]), st.integers(1, 6))
def test_a_slower_stage_is_never_faster(data: st.DataObject, kind: tuple[str, int], rounds: int) -> None:
    ranks = 4
    forward = data.draw(st.lists(seconds, min_size=ranks, max_size=ranks))
    backward = data.draw(st.lists(seconds, min_size=ranks, max_size=ranks))
    shape = PipelineShape(kind[0], ranks, kind[1], rounds * ranks)
    slower = [*forward[:-1], forward[-1] * 1.5]
    before = pipeline_makespan(shape, forward, backward, 0.01).seconds
    assert pipeline_makespan(shape, slower, backward, 0.01).seconds >= before - 1e-9
    assert before >= max(rounds * ranks * (f + b) for f, b in zip(forward, backward, strict=True)) - 1e-9


@pytest.mark.parametrize(
    ("schedule", "chunks", "microbatches"), [("1f1b", 1, 7), ("interleaved", 2, 8), ("1f1b", 1, 90)]
)
def test_gradient_equals_finite_differences(schedule: str, chunks: int, microbatches: int) -> None:
    shape = PipelineShape(schedule, 4, chunks, microbatches)
    forward = torch.tensor([1.0, 1.13, 0.9, 1.31], dtype=torch.float64, requires_grad=True)
    backward = torch.tensor([2.0, 2.17, 1.9, 2.41], dtype=torch.float64, requires_grad=True)
    hop = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda f, b, h: DifferentiableMakespan.apply(f, b, h, shape), (forward, backward, hop), eps=1e-5
    )


def test_a_remainder_of_interleaving_lies_between_its_neighbours() -> None:
    four, six, eight = (equal_stages("interleaved", 4, 2, count) for count in (4, 6, 8))
    assert four < six < eight


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([("1f1b", 1), ("interleaved", 3), ("gpipe", 1)]), st.integers(1, 5), st.floats(0, 1))
def test_timed_events_end_with_the_makespan_and_wait_for_what_feeds_them(
    data: st.DataObject, kind: tuple[str, int], rounds: int, hop: float
) -> None:
    ranks = data.draw(st.integers(1, 4))
    forward = data.draw(st.lists(seconds, min_size=ranks, max_size=ranks))
    backward = data.draw(st.lists(seconds, min_size=ranks, max_size=ranks))
    shape = PipelineShape(kind[0], ranks, kind[1], rounds * ranks)
    events = timed_events(shape, forward, backward, hop)
    assert len(events) == 2 * ranks * kind[1] * shape.num_microbatches
    assert max(each.end_s for each in events) == pytest.approx(pipeline_makespan(shape, forward, backward, hop).seconds)
    free = [0.0] * ranks
    for each in events:  # in the order of their rank
        assert each.start_s >= free[each.rank]
        free[each.rank] = each.end_s
        if each.fed_by >= 0:
            assert each.start_s >= events[each.fed_by].end_s + hop * each.is_fed_by_other_rank - 1e-9
