"""A step's timeline: what it adds up to, that nothing overlaps, and the rules of Chrome's trace event format."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gnn_predictor.batch import pipeline_shape
from gnn_predictor.critical_path import StepDetail
from gnn_predictor.features import SLOTS
from gnn_predictor.infer import main
from gnn_predictor.prediction import predict_in_detail
from gnn_predictor.report.timeline import COMPUTE, Timeline, timeline
from gnn_predictor.schedule import pipeline_makespan

from .conftest import small_job

_LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "fsdp": {"sharding": "zero3", "recompute": "full"},
    "1f1b": {"tensor": 2, "pipeline": 4},
    "interleaved": {"pipeline": 4, "virtual_pipeline": 2},
    "gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "zero_bubble": {"pipeline": 4, "schedule": "zero_bubble"},
    "zero_bubble_2p": {"pipeline": 4, "schedule": "zero_bubble_2p"},
    "zero_bubble_v": {"pipeline": 4, "schedule": "zero_bubble_v"},
    "dualpipe": {"pipeline": 4, "schedule": "dualpipe"},
    "dualpipe_v": {"pipeline": 4, "schedule": "dualpipe_v"},
}
_PAIRED = ("dualpipe", "dualpipe_v")


@functools.cache
def _detail(layout: str, untrained: Path) -> StepDetail:
    return predict_in_detail(small_job(parallel=_LAYOUTS[layout]), str(untrained))[1]


def _with_times(detail: StepDetail, factors: list[float], num_microbatches: int) -> StepDetail:
    """The same step on stages of other speeds."""
    scale = np.resize(np.array(factors), len(detail.times.forward_s))
    arrays = dataclasses.replace(detail.arrays, num_microbatches=num_microbatches)
    forward, backward, stage_s = (
        seconds * scale for seconds in (detail.times.forward_s, detail.times.backward_s, detail.times.stage_s)
    )
    shape = pipeline_shape(arrays)
    hop_s = float(detail.times.slots[:, SLOTS.index("hop")].sum()) / max(1, shape.num_hops)
    path = pipeline_makespan(shape, stage_s, hop_s)
    times = dataclasses.replace(detail.times, forward_s=forward, backward_s=backward, stage_s=stage_s, path=path)
    return dataclasses.replace(detail, arrays=arrays, times=times)


def _tracks(step: Timeline) -> dict[tuple[int, str], list[tuple[float, float]]]:
    tracks = defaultdict(list)
    for each in step.slices:
        tracks[each.stage, each.stream].append((each.start_s, each.end_s))
    return tracks


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=st.sampled_from(sorted(_LAYOUTS)),
    factors=st.lists(st.floats(1.0, 5.0), min_size=1, max_size=4),
    num_microbatches=st.one_of(st.integers(1, 80), st.integers(81, 100_000)),
)
def test_nothing_overlaps_and_the_pipeline_ends_with_the_makespan(
    layout: str, factors: list[float], num_microbatches: int, untrained: Path
) -> None:
    if layout in _PAIRED:  # two microbatches a stage or more, and as many in each direction
        num_microbatches = 2 * (4 + num_microbatches // 2)
    detail = _with_times(_detail(layout, untrained), factors, num_microbatches)
    step = timeline(detail)
    for ends in _tracks(step).values():
        assert all(before[1] <= after[0] + 1e-12 for before, after in itertools.pairwise(ends))
    events = [each for each in step.slices if each.microbatch is not None and each.label != "send_recv"]
    makespan_s = detail.times.path.seconds
    assert max(each.end_s for each in events if each.is_exposed) == pytest.approx(makespan_s, rel=1e-9)
    assert max(each.end_s for each in step.slices) == pytest.approx(step.iteration_time_s, rel=1e-9)
    assert min(each.start_s for each in step.slices) == 0
    assert len(step.slices) < 40_000
    forwards = [each for each in events if (each.stage, each.kind, each.chunk) == (0, "forward", 0)]
    assert len(forwards) == num_microbatches - step.num_left_out
    drawn = {each.microbatch for each in events}
    assert {0, num_microbatches - 1} <= drawn <= set(range(num_microbatches))
    assert (step.num_left_out > 0) == (step.note != "") == any(each.kind == "left_out" for each in step.slices)


@pytest.mark.parametrize("layout", sorted({*_LAYOUTS} - {"dualpipe"}))  # whose ranks run two stages
def test_a_stage_is_as_busy_as_predicted(layout: str, untrained: Path) -> None:
    """Compute and exposed communication of every stage add up to its figures, event by event."""
    job = small_job(parallel=_LAYOUTS[layout])
    prediction, detail = predict_in_detail(job, str(untrained))
    step = timeline(detail)
    assert not step.num_left_out
    assert step.iteration_time_s == pytest.approx(prediction.iteration_time_s, rel=1e-5)
    for stage in prediction.stages:
        seconds: dict[str, float] = defaultdict(float)
        for each in step.slices:
            if each.stage == stage.stage and each.is_exposed and each.label != "send_recv":
                seconds[each.kind] += each.end_s - each.start_s
        count = prediction.num_microbatches
        assert seconds["forward"] == pytest.approx(count * stage.forward_s, rel=1e-5)
        assert seconds["backward"] + seconds["weight_gradient"] == pytest.approx(count * stage.backward_s, rel=1e-5)
        assert seconds["recompute"] == pytest.approx(count * stage.recompute_s, rel=1e-5)
        assert seconds["communication"] == pytest.approx(stage.communication_exposed_s, rel=1e-5)
        assert seconds["optimizer"] == pytest.approx(stage.optimizer_s, rel=1e-5)


def _check_trace_events(value: dict[str, Any]) -> None:
    """The rules of "Trace Event Format" (Google, 2016) for the JSON object format, metadata and complete events."""
    named: dict[str, set[Any]] = {"process_name": set(), "thread_name": set()}
    allowed = {"process_name": "name", "process_labels": "labels", "process_sort_index": "sort_index",
               "thread_name": "name", "thread_sort_index": "sort_index"}  # fmt: skip
    assert isinstance(value["traceEvents"], list)
    assert value["displayTimeUnit"] in ("ms", "ns")
    used = set()
    for event in value["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] == "M":
            argument = event["args"][allowed[event["name"]]]
            assert isinstance(argument, int if event["name"].endswith("sort_index") else str)
            if event["name"] in named:
                key = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
                assert key not in named[event["name"]]
                named[event["name"]].add(key)
        else:
            assert event["ph"] == "X"
            assert isinstance(event["cat"], str)
            assert isinstance(event["args"], dict)
            assert all(isinstance(event[key], int | float) and math.isfinite(event[key]) for key in ("ts", "dur"))
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            used.add((event["pid"], event["tid"]))
    assert used <= named["thread_name"]
    assert {process for process, _ in used} == named["process_name"]
    by_track = defaultdict(list)
    for event in value["traceEvents"]:
        if event["ph"] == "X":
            by_track[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    for slices in by_track.values():  # viewers nest slices, so they must not overlap in part
        for (start, duration), (following, _) in itertools.pairwise(sorted(slices)):
            assert start + duration <= following + 1e-3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((), {"compute", "data communication"}),
        (("parallel.tensor=2", "parallel.pipeline=4"), {"tensor communication", "pipeline communication"}),
        (("parallel.pipeline=8", "parallel.virtual_pipeline=1", "batch.global_batch_size=20000"), {"compute"}),
    ],
)
def test_the_command_writes_a_trace(
    settings: tuple[str, ...], words: set[str], tmp_path: Path, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, file = tmp_path / "job.yaml", tmp_path / "trace.json"
    job.write_text(json.dumps(small_job().model_dump(mode="json", exclude_unset=True)))
    changes = [word for setting in settings for word in ("--set", setting)]
    code = main([str(job), "--checkpoint", str(untrained), "--format", "json", "--trace", str(file), *changes])
    printed = capsys.readouterr()
    assert code == 0
    answer, value = json.loads(printed.out), json.loads(file.read_text())
    _check_trace_events(value)
    assert file.stat().st_size < 3_000_000
    assert value["otherData"]["provenance"] == answer["provenance"]
    assert value["otherData"]["job"] == answer["job"]
    processes = [e["args"]["name"] for e in value["traceEvents"] if e["name"] == "process_name"]
    assert len(processes) == len(answer["stages"])
    assert processes[0].startswith("stage 0: layer")
    assert words <= {e["args"]["name"] for e in value["traceEvents"] if e["name"] == "thread_name"}
    slices = [e for e in value["traceEvents"] if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in slices) / 1e6 == pytest.approx(answer["iteration_time_s"], rel=1e-5)
    assert any(e["name"] == "forward 0 bf16" and e["args"]["dtype"] == "bf16" for e in slices)
    assert ("microbatches are drawn" in printed.err) == bool(value["otherData"]["microbatches_left_out"])


@pytest.mark.parametrize("target", ["missing/trace.json", "."])
def test_a_trace_that_cannot_be_written_is_said_before_predicting(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: {}")
    assert main([str(job), "--trace", str(tmp_path / target)]) == 2
    assert "expected a file in a folder that exists" in capsys.readouterr().err
    assert main([str(job), str(job), "--trace", str(tmp_path / "trace.json")]) == 2
    assert "got several jobs; expected one" in capsys.readouterr().err


def test_compute_is_the_first_stream(untrained: Path) -> None:
    assert {each.stream for each in timeline(_detail("one", untrained)).slices} == {COMPUTE, "data"}
