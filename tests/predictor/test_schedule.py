"""The schedule recurrence against published bubble formulas, brute force and finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gnn_predictor.event_order import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    PAIRED,
    WEIGHT_GRADIENT,
    PipelineShape,
    rank_order,
)
from gnn_predictor.schedule import (
    DifferentiableMakespan,
    Floats,
    Makespan,
    pipeline_makespan,
    stage_seconds,
    timed_events,
)

seconds = st.floats(0.1, 3.0)
ROLLING = ("zero_bubble_2p", "zero_bubble_v")
# schedule, ranks, chunks, microbatches: small cases of each
SMALL = (
    ("gpipe", 4, 1, 6), ("1f1b", 4, 1, 7), ("interleaved", 3, 2, 9), ("interleaved", 4, 3, 8), ("zero_bubble", 4, 1, 9),
    ("zero_bubble", 3, 1, 2), ("zero_bubble_2p", 3, 1, 8), ("zero_bubble_2p", 4, 1, 5), ("zero_bubble_v", 3, 2, 7),
    ("zero_bubble_v", 2, 2, 2), ("dualpipe", 4, 1, 10), ("dualpipe", 2, 1, 6), ("dualpipe_v", 3, 2, 7),
    ("dualpipe_v", 2, 2, 5),
)  # fmt: skip


def times(forward: list[float], input_gradient: list[float], weight_gradient: list[float]) -> Floats:
    backward = [a + b for a, b in zip(input_gradient, weight_gradient, strict=True)]
    return stage_seconds(forward, backward, weight_gradient=weight_gradient)


def equal_stages(
    shape: PipelineShape, forward: float = 1.0, input_gradient: float = 1.0, weight: float = 1.0, hidden: float = 0.0
) -> Makespan:
    def every(value: float) -> list[float]:
        return [value] * shape.num_ranks

    parts = {
        "weight_gradient": every(weight),
        "hidden_forward": every(hidden / 2),
        "hidden_backward": every(hidden / 2),
    }
    return pipeline_makespan(shape, stage_seconds(every(forward), every(input_gradient + weight), **parts), 0.0)


def bubble(shape: PipelineShape, forward: float, input_gradient: float, weight: float, hidden: float = 0.0) -> float:
    """Seconds in which a rank is idle, of one step; of paired passes, the rank where the directions meet."""
    busy = shape.num_microbatches * (forward + input_gradient + weight)
    middle = shape.num_ranks - 1 if shape.schedule == "dualpipe_v" else shape.num_ranks // 2
    busy -= hidden * sum(len(event) > 1 for event in rank_order(shape, middle)) / shape.num_chunks
    return equal_stages(shape, forward, input_gradient, weight, hidden).seconds - busy


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (8, 64), (8, 512), (16, 3)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_bubble_of_equal_stages(schedule: str, ranks: int, microbatches: int) -> None:
    """(p - 1) microbatches of bubble: Narayanan et al. 2021, section 2.2.1."""
    shape = PipelineShape(schedule, ranks, 1, microbatches)
    assert bubble(shape, 1.0, 1.2, 0.9) == pytest.approx((ranks - 1) * 3.1)


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(4, 2, 8), (8, 5, 64), (4, 3, 400), (2, 2, 2)])
def test_bubble_of_interleaving(ranks: int, chunks: int, microbatches: int) -> None:
    """(p - 1) / v microbatches of bubble: Narayanan et al. 2021, section 2.2.2."""
    shape = PipelineShape("interleaved", ranks, chunks, microbatches)
    assert bubble(shape, 1.0, 1.2, 0.9) == pytest.approx((ranks - 1) * 3.1 / chunks)


# Forward, input gradient and weight gradient: the published formulas are of orders in which W <= F and W <= B.
PASSES = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.5, 0.5), (1.4, 1.0, 1.0)]


@pytest.mark.parametrize(("forward", "input_gradient", "weight"), PASSES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 9), (8, 32), (8, 515)])
def test_bubble_of_zero_bubble(
    forward: float, input_gradient: float, weight: float, ranks: int, microbatches: int
) -> None:
    """ZB-H1 (p - 1)(F + B - W) and ZB-H2 (p - 1)(F + B - 2W): Qi et al. 2023, table 2; B is the input's gradient."""
    h1 = PipelineShape("zero_bubble", ranks, 1, microbatches)
    h2 = PipelineShape("zero_bubble_2p", ranks, 1, microbatches)
    assert bubble(h1, forward, input_gradient, weight) == pytest.approx(
        (ranks - 1) * (forward + input_gradient - weight)
    )
    assert bubble(h2, forward, input_gradient, weight) == pytest.approx(
        (ranks - 1) * (forward + input_gradient - 2 * weight), abs=1e-9
    )


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 7), (4, 8), (8, 15), (8, 32), (8, 515)])
def test_a_v_of_equal_passes_has_no_bubble(ranks: int, microbatches: int) -> None:
    """ZB-V: Qi et al. 2023, section 6."""
    assert bubble(PipelineShape("zero_bubble_v", ranks, 2, microbatches), 1.0, 1.0, 1.0) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("hidden", [0.0, 0.4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 20), (8, 20), (8, 516)])
def test_bubble_of_dualpipe(ranks: int, microbatches: int, hidden: float) -> None:
    """(PP/2 - 1)(F&B + B - 3W): DeepSeek-V3, table 2, where B is the whole backward pass; DualPipeV has 2 PP halves."""
    paired, backward, weight = 3.0 - hidden, 2.0, 1.0
    shape = PipelineShape("dualpipe", ranks, 1, microbatches)
    expected = (ranks / 2 - 1) * (paired + backward - 3 * weight)
    assert bubble(shape, 1.0, 1.0, 1.0, hidden) == pytest.approx(expected, abs=1e-9)
    folded = PipelineShape("dualpipe_v", ranks, 2, microbatches)
    expected = (ranks - 1) * (paired + backward - 3 * weight) / 2
    assert bubble(folded, 1.0, 1.0, 1.0, hidden) == pytest.approx(expected, abs=1e-9)


def test_one_microbatch_through_two_stages_is_half_idle() -> None:
    assert equal_stages(PipelineShape("1f1b", 2, 1, 1)).seconds == pytest.approx(2 * 3.0)


def test_schedules_rank_as_measured_and_converge_with_many_microbatches() -> None:
    """6.2B model, PP8: 1F1B 55, ZB-V 64, interleaved 66, ZB-2P 67 samples/s (sail-sg/zero-bubble#21)."""

    def relative(microbatches: int) -> dict[str, float]:
        chunks = {"1f1b": 1, "interleaved": 4, "zero_bubble_v": 2, "zero_bubble_2p": 1}
        shapes = {name: PipelineShape(name, 8, count, microbatches) for name, count in chunks.items()}
        # Weight gradients have no attention: somewhat cheaper than input gradients.
        made = {name: equal_stages(shape, 1.0, 1.1, 0.9).seconds for name, shape in shapes.items()}
        return {name: made["1f1b"] / value for name, value in made.items()}

    few = relative(24)
    assert few["1f1b"] < few["zero_bubble_v"]
    assert few["1f1b"] < few["interleaved"] < few["zero_bubble_2p"]
    assert few["interleaved"] == pytest.approx(66 / 55, rel=0.05)
    assert few["zero_bubble_2p"] == pytest.approx(67 / 55, rel=0.05)
    assert few["zero_bubble_v"] == pytest.approx(64 / 55, rel=0.1)
    assert all(ratio == pytest.approx(1.0, abs=0.015) for ratio in relative(512).values())


def simulate(shape: PipelineShape, stage_s: Floats, hop: float, steps: int = 1) -> list[float]:
    """When every rank is done: each is a worker that takes its next event once all that feeds it has ended."""
    forward, backward, weight, hidden_forward, hidden_backward = (stage_s / shape.num_chunks).tolist()
    length = {
        FORWARD: forward,
        BACKWARD: backward,
        INPUT_GRADIENT: [a - b for a, b in zip(backward, weight, strict=True)],
        WEIGHT_GRADIENT: weight,
    }
    pieces = shape.num_ranks * shape.num_chunks
    # (activations or gradients, piece, microbatch, step) -> when and on which rank
    done: dict[tuple[bool, int, int, int], tuple[float, int]] = {}
    free = [0.0] * shape.num_ranks
    todo = [[(step, event) for step in range(steps) for event in rank_order(shape, r)] for r in range(shape.num_ranks)]
    while any(todo):
        for rank in range(shape.num_ranks):
            if not todo[rank]:
                continue
            step, event = todo[rank][0]
            start, seconds_ = free[rank], 0.0
            for kind, piece, i in event:
                stage = shape.stage_of(piece)
                seconds_ += length[kind][stage]
                if len(event) == 2:
                    seconds_ -= (hidden_forward if kind == FORWARD else hidden_backward)[stage]
                needs = (True, piece - 1, i, step) if kind == FORWARD else (False, piece + 1, i, step)
                if kind != FORWARD and piece == pieces - 1:
                    needs = (True, piece, i, step)
                if kind == WEIGHT_GRADIENT or needs[1] < 0:
                    continue
                ready, by = done.get(needs, (float("inf"), rank))
                start = max(start, ready + (hop if by != rank else 0.0))
            if start == float("inf"):
                continue
            free[rank] = start + seconds_
            for kind, piece, i in event:
                if kind != WEIGHT_GRADIENT:
                    done[kind == FORWARD, piece, i, step] = (free[rank], rank)
            todo[rank].pop(0)
    return free


def draw_times(data: st.DataObject, ranks: int) -> Floats:
    forward, input_gradient, weight = (data.draw(st.lists(seconds, min_size=ranks, max_size=ranks)) for _ in range(3))
    table = times(forward, input_gradient, weight)
    table[3], table[4] = 0.3 * table[0], 0.2 * (table[1] - table[2])
    return table


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(SMALL), st.floats(0.0, 0.5))
def test_unequal_stages_match_brute_force(data: st.DataObject, case: tuple[str, int, int, int], hop: float) -> None:
    shape, stage_s = PipelineShape(*case), draw_times(data, case[1])
    made = pipeline_makespan(shape, stage_s, hop)
    if shape.schedule in ROLLING:
        later, earlier = (max(simulate(shape, stage_s, hop, steps)) for steps in (36, 24))
        assert made.seconds == pytest.approx((later - earlier) / 12, rel=1e-3)
    else:
        assert made.seconds == pytest.approx(max(simulate(shape, stage_s, hop)))
    assert made.seconds == pytest.approx((made.counts * stage_s).sum() + made.hop_counts * hop)


def test_1f1b_by_hand() -> None:
    """Two stages, two microbatches: F0 F1 on rank 0 while rank 1 runs F0 B0 F1 B1; the path ends with rank 0's B1."""
    made = pipeline_makespan(PipelineShape("1f1b", 2, 1, 2), stage_seconds([1.0, 2.0], [3.0, 4.0]), 0.5)
    assert made.seconds == 1.0 + 0.5 + 2.0 + 4.0 + 2.0 + 4.0 + 0.5 + 3.0
    assert made.forward_counts.tolist() == [1.0, 2.0]
    assert made.backward_counts.tolist() == [1.0, 2.0]
    assert made.hop_counts == 2.0


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from(["1f1b", "gpipe", "zero_bubble", "dualpipe", "dualpipe_v"]),
    st.integers(2, 4),
    st.integers(60, 90),
    st.floats(0, 0.1),
)
def test_long_steps_are_extrapolated_closely(
    data: st.DataObject, schedule: str, ranks: int, microbatches: int, hop: float
) -> None:
    assume(schedule != "dualpipe" or (ranks % 2 == 0 and microbatches % 2 == 0))
    shape = PipelineShape(schedule, ranks, 2 if schedule == "dualpipe_v" else 1, microbatches)
    stage_s = draw_times(data, ranks)
    made = pipeline_makespan(shape, stage_s, hop).seconds
    assert made == pytest.approx(max(simulate(shape, stage_s, hop)), rel=0.01)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(SMALL), st.floats(0.0, 0.3))
def test_a_slower_pass_is_never_faster(data: st.DataObject, case: tuple[str, int, int, int], hop: float) -> None:
    shape, ranks = PipelineShape(*case), case[1]
    passes = [data.draw(st.lists(seconds, min_size=ranks, max_size=ranks)) for _ in range(3)]
    before = pipeline_makespan(shape, times(*passes), hop).seconds
    row, stage = data.draw(st.integers(0, 2)), data.draw(st.integers(0, ranks - 1))
    passes[row][stage] *= 1.5
    assert pipeline_makespan(shape, times(*passes), hop).seconds >= before * (1 - 1e-9)
    assert pipeline_makespan(shape, times(*passes), hop + 0.1).seconds >= before * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(SMALL))
def test_no_step_is_shorter_than_the_work_of_its_busiest_rank(
    data: st.DataObject, case: tuple[str, int, int, int]
) -> None:
    shape, ranks = PipelineShape(*case), case[1]
    table = times(*(data.draw(st.lists(seconds, min_size=ranks, max_size=ranks)) for _ in range(3)))
    work = shape.num_microbatches * (table[0] + table[1])
    if shape.schedule == "dualpipe":  # half of the microbatches go through the opposite stage
        work = (work + work[::-1]) / 2
    assert pipeline_makespan(shape, table, 0.0).seconds >= work.max() * (1 - 1e-9)


@pytest.mark.parametrize("case", [*SMALL, ("1f1b", 4, 1, 90), ("zero_bubble_2p", 4, 1, 90), ("dualpipe", 4, 1, 90)])
def test_gradient_equals_finite_differences(case: tuple[str, int, int, int]) -> None:
    shape = PipelineShape(*case)
    table = torch.tensor(
        [[1.0, 1.13, 0.9, 1.31], [2.0, 2.17, 1.9, 2.41], [0.81, 1.02, 0.87, 1.23], [0.11, 0.17, 0.13, 0.19],
         [0.23, 0.29, 0.21, 0.27]], dtype=torch.float64,
    )[:, : case[1]].clone().requires_grad_()  # fmt: skip
    hop = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t, h: DifferentiableMakespan.apply(t, h, shape), (table, hop), eps=1e-5)


def test_a_remainder_of_interleaving_lies_between_its_neighbours() -> None:
    four, six, eight = (equal_stages(PipelineShape("interleaved", 4, 2, count)).seconds for count in (4, 6, 8))
    assert four < six < eight


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(SMALL), st.floats(0, 1))
def test_timed_events_end_with_the_makespan_and_wait_for_what_feeds_them(
    data: st.DataObject, case: tuple[str, int, int, int], hop: float
) -> None:
    shape, stage_s = PipelineShape(*case), draw_times(data, case[1])
    events = timed_events(shape, stage_s, hop)
    passes = {(each.kind == FORWARD, each.stage, each.chunk, each.microbatch) for each in events}
    assert len(passes) == 2 * shape.num_ranks * shape.num_chunks * shape.num_microbatches
    made = pipeline_makespan(shape, stage_s, hop).seconds
    assert max(each.end_s for each in events) == pytest.approx(made, rel=1e-6)
    free = np.zeros(shape.num_ranks)
    for each in events:  # in the order of their rank
        assert each.start_s >= free[each.rank] - 1e-9
        free[each.rank] = each.end_s
        if each.fed_by >= 0 and shape.schedule not in ROLLING:  # there, every rank's clock starts with its own step
            assert each.start_s >= events[each.fed_by].end_s + hop * each.is_fed_by_other_rank - 1e-9
    assert (shape.schedule in PAIRED) or len(events) == sum(
        len(rank_order(shape, rank)) for rank in range(shape.num_ranks)
    )
