"""What counts as known: names, values that met in one run, and sizes."""

from __future__ import annotations

from collections.abc import Callable

from dataset_builder.job.schema import TrainingJob
from gnn_predictor.domain import domain_of, outside

JobOf = Callable[..., TrainingJob]


def test_a_job_of_the_training_data_is_inside(job_of: JobOf) -> None:
    job = job_of(software={"framework": "pytorch", "compile": False}).resolved()
    assert outside(job, domain_of([job])) == ()


def test_values_known_apart_but_never_together_are_said(job_of: JobOf) -> None:
    seen = [
        job_of(software={"framework": "pytorch", "compile": False}).resolved(),
        job_of(software={"framework": "jax", "compile": True}).resolved(),
    ]
    (reason,) = outside(job_of(software={"framework": "pytorch", "compile": True}).resolved(), domain_of(seen))
    assert reason.startswith("software.framework and software.compile: no run with pytorch and True")


def test_not_compiling_is_what_runs_that_say_nothing_do(job_of: JobOf) -> None:
    seen = job_of(software={"framework": "megatron-bridge"}).resolved()
    stated = job_of(software={"framework": "megatron-bridge", "compile": False}).resolved()
    assert outside(stated, domain_of([seen])) == ()


def test_unknown_software_is_not_held_against_a_job(job_of: JobOf) -> None:
    seen = job_of(software={"framework": "pytorch", "compile": False}).resolved()
    assert outside(job_of().resolved(), domain_of([seen])) == ()


def test_an_unknown_gpu_is_told_once(job_of: JobOf) -> None:
    seen = job_of(software={"framework": "pytorch"}).resolved()
    other = job_of(software={"framework": "pytorch"}, cluster={"gpu": "H100-SXM5-80GB"}).resolved()
    assert outside(other, domain_of([seen])) == ("cluster.gpu: no run on H100-SXM5-80GB was in the training data",)


def test_an_unknown_framework_is_told_once_with_the_names_near_it(job_of: JobOf) -> None:
    seen = job_of(software={"framework": "megatron-lm"}).resolved()
    other = job_of(software={"framework": "megatronlm", "compile": True}).resolved()
    (reason,) = outside(other, domain_of([seen]))
    assert reason.endswith("no run with megatronlm was in the training data (did you mean megatron-lm?)")


def test_sizes_far_beyond_are_said_and_those_just_beyond_are_not(job_of: JobOf) -> None:
    domain = domain_of([job_of().resolved()])
    assert outside(job_of(batch={"global_batch_size": 80, "micro_batch_size": 1}).resolved(), domain) == ()
    (reason,) = outside(job_of(batch={"global_batch_size": 640}).resolved(), domain)
    assert reason == "batch.global_batch_size: 640 is outside the training data's 64 to 64"
