"""A step's timeline in Chrome's trace event format, as Perfetto (ui.perfetto.dev) and chrome://tracing open it.

One process per pipeline stage, one thread per stream, complete events ("X") with ``ts`` and ``dur`` in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gnn_predictor.event_order import PipelineShape, stages_of_rank
from gnn_predictor.prediction import Prediction
from gnn_predictor.report.timeline import COMPUTE, Slice, Timeline

_NANOSECONDS = 3  # digits of a microsecond


def chrome_trace(prediction: Prediction, step: Timeline) -> dict[str, Any]:
    """The value of the JSON file; ``otherData`` has the job and where the figures come from."""
    streams = {stage: _streams(step, stage) for stage in range(step.shape.num_ranks)}
    events = [event for stage, names in streams.items() for event in _names(prediction, step.shape, stage, names)]
    events += [_event(each, streams[each.stage].index(each.stream)) for each in step.slices]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "job": prediction.job.model_dump(mode="json"),
            "iteration_time_s": prediction.iteration_time_s,
            "pipeline_makespan_s": step.makespan_s,
            "microbatches": step.shape.num_microbatches,
            "microbatches_left_out": step.num_left_out,
            "note": step.note,
            "provenance": dict(prediction.provenance),
        },
    }


def _streams(step: Timeline, stage: int) -> list[str]:
    """Compute first."""
    names = {each.stream for each in step.slices if each.stage == stage}
    return [COMPUTE, *sorted(names - {COMPUTE})]


def _names(prediction: Prediction, shape: PipelineShape, stage: int, streams: list[str]) -> Iterator[dict[str, Any]]:
    """Metadata events: what processes and threads are called, and their order."""
    held = stages_of_rank(shape, stage)
    layers = layers_text([layer for each in held for layer in prediction.stages[each].layers])
    alike = prediction.job.cluster.num_gpus // len(prediction.stages)
    labels = f"{prediction.job.cluster.gpu.name}, one of {alike} GPUs that do the same"
    for name, arguments in (
        ("process_name", {"name": f"stage {stage}: {layers}"}),
        ("process_labels", {"labels": labels}),
        ("process_sort_index", {"sort_index": stage}),
    ):
        yield {"ph": "M", "name": name, "pid": stage, "tid": 0, "args": arguments}
    for thread, stream in enumerate(streams):
        name = stream if stream == COMPUTE else f"{stream} communication"
        yield {"ph": "M", "name": "thread_name", "pid": stage, "tid": thread, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": stage, "tid": thread, "args": {"sort_index": thread}}


def layers_text(layers: Sequence[int]) -> str:
    """Runs of neighbours: ``layers 0-1, 16-17``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    names = ["-".join(map(str, run)) for run in runs]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(names)}" if names else "no layers"


def _event(each: Slice, thread: int) -> dict[str, Any]:
    # Both ends are rounded, not the duration: neighbours stay apart.
    start, end = (round(seconds * 1e6, _NANOSECONDS) for seconds in (each.start_s, each.end_s))
    return {
        "ph": "X",
        "name": _name(each),
        "cat": each.kind if each.kind != "communication" else f"communication,{_exposure(each)}",
        "ts": start,
        "dur": round(end - start, _NANOSECONDS),
        "pid": each.stage,
        "tid": thread,
        "args": _arguments(each),
    }


def _name(each: Slice) -> str:
    if each.kind == "left_out":
        return "microbatches left out"
    words = [each.label or each.kind]
    if each.microbatch is not None and not each.label:
        words.append(str(each.microbatch))
    words += [each.dtype] * bool(each.dtype)
    words += [f"({_exposure(each)})"] * (each.kind == "communication")
    return " ".join(words)


def _exposure(each: Slice) -> str:
    return "exposed" if each.is_exposed else "hidden"


def _arguments(each: Slice) -> dict[str, Any]:
    """``duration_us``: of a message that is drawn shorter than it takes."""
    is_shortened = each.seconds > (each.end_s - each.start_s) * (1 + 1e-6)
    given = {
        "dtype": each.dtype or None,
        "microbatch": each.microbatch,
        "chunk": each.chunk,
        "duration_us": round(each.seconds * 1e6, _NANOSECONDS) if is_shortened else None,
    }
    return {key: value for key, value in given.items() if value is not None}
