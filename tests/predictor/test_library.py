"""The package as a library: values that travel between processes, and predictions from many threads at once."""

from __future__ import annotations

import functools
import importlib.util
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from dataset_builder.tracing.templates import template
from gnn_predictor import (
    CannotRunError,
    CheckpointError,
    JobError,
    Prediction,
    TrainingJob,
    load_checkpoint,
    predict,
)

_ROOT = Path(__file__).parents[2]
# Mixes that no shipped template covers, so that every one is traced when it is first asked for.
_ODD_MIXES = (
    {"preset": "fp8_rowwise", "attention": "fp32", "lm_head": "fp32"},
    {"preset": "mxfp8", "attention": "fp16", "grad_accum": "bf16"},
)


@pytest.fixture
def jobs(job_of: Callable[..., TrainingJob]) -> list[TrainingJob]:
    return [job_of(precision=mix, cluster={"gpu": "B200-SXM6-180GB"}) for mix in _ODD_MIXES] * 3


@pytest.fixture
def _traced_anew() -> Iterator[None]:
    template.cache_clear()
    yield
    template.cache_clear()


def _same(value: object) -> object:
    return pickle.loads(pickle.dumps(value))


def test_jobs_and_predictions_survive_pickling(job_of: Callable[..., TrainingJob], untrained: Path) -> None:
    job = job_of(precision="fp16_mixed", training={"tokens": 1e9}, price={"usd_per_gpu_hour": 2.0})
    prediction = predict(job, checkpoint=untrained)
    again = _same(prediction)
    assert isinstance(again, Prediction)
    assert again == prediction
    assert again.to_dict() == prediction.to_dict()
    assert _same(job) == job
    assert _same(job.resolved()) == job.resolved()


def test_a_pickled_checkpoint_predicts_the_same(job_of: Callable[..., TrainingJob], untrained: Path) -> None:
    checkpoint = load_checkpoint(untrained)
    again = pickle.loads(pickle.dumps(checkpoint))
    assert again.config == checkpoint.config
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in checkpoint.tensors.items())
    assert predict(job_of(), again) == predict(job_of(), checkpoint)


@pytest.mark.parametrize("error", [JobError(["a: b"], "f"), CannotRunError(["c"]), CheckpointError("d")])
def test_errors_survive_the_way_back_from_a_process(error: ValueError) -> None:
    again = _same(error)
    assert type(again) is type(error)
    assert (str(again), again.exit_code) == (str(error), error.exit_code)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_traced_anew")
def test_threads_and_processes_agree_with_one_after_the_other(jobs: list[TrainingJob], untrained: Path) -> None:
    ask = functools.partial(predict, checkpoint=str(untrained))
    with ThreadPoolExecutor(8) as threads:
        in_threads = list(threads.map(ask, jobs))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as processes:
        in_processes = list(processes.map(ask, jobs[: len(_ODD_MIXES)]))
    template.cache_clear()
    one_by_one = [ask(job) for job in jobs]
    assert in_threads == one_by_one
    assert in_processes == one_by_one[: len(_ODD_MIXES)]


def test_a_batch_is_each_job_alone(jobs: list[TrainingJob], untrained: Path) -> None:
    for together, job in zip(predict(jobs, checkpoint=untrained), jobs, strict=True):
        assert together.iteration_time_s == pytest.approx(predict(job, checkpoint=untrained).iteration_time_s, rel=1e-4)


def test_the_packages_are_typed() -> None:
    """A user's own code is checked against the annotations."""
    assert all((_ROOT / package / "py.typed").is_file() for package in ("gnn_predictor", "dataset_builder"))


@pytest.mark.parametrize("given", ["job.yaml", Path("job.yaml"), {"model": {}}, [{"model": {}}], 42])
def test_what_is_no_job_is_told_how_to_become_one(given: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a job: TrainingJob.from_yaml\(path\)"):
        predict(given)


def test_the_queue_example_ranks_jobs_and_says_why_one_cannot_run() -> None:
    jobs = [str(_ROOT / "conf" / "job" / name) for name in ("llama3-70b-fp8.yaml", "llama3-8b-fsdp.yaml")]
    command = [sys.executable, "examples/schedule_a_queue.py", *jobs, "no.yaml", "--gpus", "8", "--format", "json"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ranked = json.loads(done.stdout)
    assert ranked["order"] == ["llama3-8b-fsdp"]
    assert "llama3-70b-fp8" in ranked["refused"]
    assert "64 GPUs" in ranked["refused"]["llama3-70b-fp8"]
    assert "cannot read the file" in ranked["refused"]["no.yaml"]


def test_no_moment_of_the_example_schedule_has_more_gpus_than_there_are(
    job_of: Callable[..., TrainingJob], untrained: Path
) -> None:
    spec = importlib.util.spec_from_file_location("schedule_a_queue", _ROOT / "examples" / "schedule_a_queue.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example  # its dataclasses look themselves up
    spec.loader.exec_module(example)
    lengths = (100, 900, 20, 400, 50, 700)
    queue = [
        (str(index), predict(job_of(training={"steps": steps}, cluster={"num_nodes": 1 + index % 2}), untrained))
        for index, steps in enumerate(lengths)
    ]
    plan = example.reserve(queue, num_gpus=24, steps=1)
    assert sorted(each.name for each in plan) == [name for name, _ in queue]
    for moment in (each.start_h for each in plan):
        assert sum(each.gpus for each in plan if each.start_h <= moment < each.reserved_end_h) <= 24
    assert plan[0].name == "2"  # the shortest
    assert all(each.start_h < each.expected_end_h <= each.reserved_end_h for each in plan)
