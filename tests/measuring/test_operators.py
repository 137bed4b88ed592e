"""Every operator case really runs, and its row is the operator of the graph that it should be."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter

import pytest
import torch

from dataset_builder.corpus.operators import OperatorRow, operator_node
from dataset_builder.measuring.machine import this_machine
from dataset_builder.measuring.op_rows import OpSettings, case_row, measure_operators
from dataset_builder.measuring.operators import Case, cases
from dataset_builder.measuring.timing import Stopwatch, Timing, summary
from dataset_builder.measuring.world import World, join, leave
from dataset_builder.tracing.graph import KINDS, OpNode

_TIMING = Timing(1.0, 0.9, 0.02, 0.01, 9, "host clock, includes launch")
_LIMITS = OpSettings(1.0, 0.0, 0.1, "H100-SXM5-80GB", "nvlink4")


def _cases(formats: tuple[str, ...] = ("fp32", "bf16", "fp8_e4m3")) -> list[Case]:
    return list(cases(this_machine(0), formats, ((64, 128),)))


def _node(case: Case) -> OpNode:
    world = World(0, 1, 1, this_machine(0))
    row = OperatorRow(
        {key: value for key, value in case_row(case, _TIMING, world, _LIMITS).items() if value is not None}
    )
    return operator_node(row)[0]


def test_rows_are_read_as_the_operators_they_are() -> None:
    kinds = Counter(_node(case).kind for case in _cases())
    expected = {"gemm", "grouped_gemm", "attention", "norm", "softmax", "elementwise", "embedding", "cross_entropy",
                "cast", "quantize", "optimizer"}  # fmt: skip
    assert {*kinds} == expected
    assert expected <= {*KINDS}


@pytest.mark.parametrize("case", [case for case in _cases() if case.flops], ids=lambda case: case.key)
def test_flops_of_a_case_are_those_of_its_node(case: Case) -> None:
    assert _node(case).flops == pytest.approx(case.flops, rel=0.05)  # causal: half of the square, or with the diagonal


def test_gradients_of_a_linear_do_the_work_of_its_forward_product() -> None:
    flops = [case.flops for case in _cases(("fp32",)) if case.op == "gemm"]
    assert flops[0::3] == flops[1::3] == flops[2::3]


def test_every_case_runs() -> None:
    watch = Stopwatch(torch.device("cpu"), 0.0, 0.0)
    for case in _cases(("fp32", "bf16")):
        samples, _ = watch.visit(case.make, case.moved_bytes)
        assert min(samples) > 0, case.key
        assert len(samples) >= 3


def test_operands_are_cold_when_the_cache_is_larger_than_they_are() -> None:
    case = next(iter(_cases(("fp32",))))
    made = []
    work = dataclasses.replace(case, make=lambda: made.append(1) or case.make())
    Stopwatch(torch.device("cpu"), 10 * case.moved_bytes, 0.0).visit(work.make, work.moved_bytes)
    assert len(made) * case.moved_bytes > 2 * 10 * case.moved_bytes


def test_spread_is_relative_and_of_the_middle_half() -> None:
    assert summary([[1.0, 1.0, 1.0], [1.0], [9.0]], "").spread <= 4.0
    assert summary([[2.0] * 3] * 3, "") == Timing(2.0, 2.0, 0.0, 0.0, 9, "")


def test_a_median_is_known_as_well_as_its_visits_agree() -> None:
    generator = random.Random(0)
    covered = 0
    for _ in range(400):
        moods = [generator.gauss(1.0, 0.05) for _ in range(9)]
        timing = summary([[generator.gauss(mood, 0.001) for _ in range(20)] for mood in moods], "")
        covered += abs(timing.median_s - 1.0) <= timing.uncertainty * timing.median_s
    assert 0.85 <= covered / 400 <= 0.95
    steady = summary([[generator.gauss(1.0, 0.05) for _ in range(20)] for _ in range(9)], "")
    assert steady.uncertainty < 0.02 < steady.spread


@pytest.mark.parametrize(("most_uncertainty", "visits"), [(math.inf, 4), (-1.0, 16)])
def test_cases_are_visited_in_turn_until_they_are_known(most_uncertainty: float, visits: int) -> None:
    order: list[str] = []

    def recorded(case: Case) -> Case:
        return dataclasses.replace(case, make=lambda: order.append(case.key) or case.make())

    few = [recorded(case) for case in _cases(("fp32",))[:3]]
    world = join()
    try:
        measure_operators(few, world, None, dataclasses.replace(_LIMITS, most_uncertainty=most_uncertainty))
    finally:
        leave()
    in_turn = [key for key, _ in itertools.groupby(order)]  # a visit makes its operands anew, some copies of them
    assert in_turn == [case.key for case in few] * visits
