"""The memory model against published arithmetic and the order that physics imposes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset_builder.job.parallel import ParallelPlan
from dataset_builder.job.precision import PrecisionPolicy, resolve_precision
from dataset_builder.job.schema import OptimizerSpec, SoftwareStack, TrainingJob
from dataset_builder.tracing.graph import StageFacts
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.event_order import PipelineShape
from gnn_predictor.memory import (
    COUNTED,
    MemoryFit,
    StageMemory,
    held_microbatches,
    metered_bytes,
    model_states,
    peak_memory,
)

JobOf = Callable[..., TrainingJob]


def _job(sharding: str = "none", precision: str = "fp16_mixed", optimizer: str = "adam", **plan: Any) -> Any:
    """The parts of a job that model states and schedules depend on."""
    return SimpleNamespace(
        precision=resolve_precision(PrecisionPolicy.model_validate(precision), sixteen_bit_params=True),
        parallel=ParallelPlan.model_validate({"sharding": sharding, **plan}),
        optimizer=OptimizerSpec.model_validate({"name": optimizer}),
        software=SoftwareStack(framework="megatron-lm"),
    )


@pytest.mark.parametrize(
    ("sharding", "gigabytes"), [("none", 108.9), ("zero1", 47.6), ("zero2", 37.4), ("zero3", 27.2)]
)
def test_model_states_of_6_8_billion_parameters_on_four_gpus(sharding: str, gigabytes: float) -> None:
    """ZeRO (arXiv 1910.02054): 16 bytes a parameter; 4 + 12/4, 2 + 14/4 and 16/4 when sharded over four."""
    assert sum(model_states(6.805e9, _job(sharding), 4)) == pytest.approx(gigabytes * 1e9, rel=2e-3)


def test_bf16_weights_with_fp32_gradients_take_18_bytes() -> None:
    """Megatron-LM's distributed optimizer: 18 bytes a parameter, or 6 + 12/d."""
    assert sum(model_states(1.0, _job(precision="bf16_mixed"), 1)) == pytest.approx(18.0)
    assert sum(model_states(1.0, _job("zero1", "bf16_mixed"), 8)) == pytest.approx(6 + 12 / 8)


@pytest.mark.parametrize(("optimizer", "expected"), [("adamw", 16.0), ("lion", 12.0), ("sgd", 12.0), ("none", 8.0)])
def test_fp32_training_keeps_weights_gradients_and_states(optimizer: str, expected: float) -> None:
    assert sum(model_states(1.0, _job(precision="fp32", optimizer=optimizer), 1)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (PipelineShape("1f1b", 1, 1, 8), [1.0]),
        (PipelineShape("1f1b", 4, 1, 8), [4.0, 3.0, 2.0, 1.0]),
        (PipelineShape("1f1b", 4, 1, 2), [2.0, 2.0, 2.0, 1.0]),
        (PipelineShape("gpipe", 4, 1, 8), [8.0] * 4),
        # Megatron's warm-up of 2 (p - s - 1) + (v - 1) p chunks, plus the one that runs, in v-ths of a stage,
        (PipelineShape("interleaved", 4, 2, 8), [5.5, 4.5, 3.5, 2.5]),
        (PipelineShape("interleaved", 4, 2, 4), [4.0, 4.0, 3.5, 2.5]),  # also with as many microbatches as stages
    ],
)
def test_microbatches_in_flight_follow_the_schedule(shape: PipelineShape, expected: list[float]) -> None:
    assert list(held_microbatches(shape)) == expected


def _stage(index: int, layers: int, saved: float, **facts: float) -> StageFacts:
    held = {"num_parameters": 0, "num_expert_parameters": 0, "recompute_peak_bytes": 0.0, "logits_bytes": 0.0, **facts}
    held = {"num_trained_parameters": held["num_parameters"], **held}
    return StageFacts(index, tuple(range(layers)), index == 0, False, saved_activation_bytes=saved, **held)  # type: ignore[arg-type]


def _layout(microbatches: int, shard_size: int = 1, expert_copies: int = 1) -> Any:
    copies = SimpleNamespace(size=expert_copies)
    return SimpleNamespace(num_microbatches=microbatches, shard_size=shard_size, expert_data_group=copies, tensor=1)


def test_an_interleaved_last_stage_holds_one_head() -> None:
    """10 bytes a layer and 7 for the head: 2.5 microbatches of the layers in flight, one of the head."""
    job = _job(pipeline=4, virtual_pipeline=2, schedule="interleaved")
    stages = [_stage(index, 2, 20.0 if index < 3 else 27.0) for index in range(4)]
    memory = peak_memory(stages, job, _layout(microbatches=8))
    assert [each.activations for each in memory] == [5.5 * 20, 4.5 * 20, 3.5 * 20, 2.5 * 20 + 7]


def test_the_parts_add_up_and_experts_are_sharded_over_their_own_copies() -> None:
    stage = _stage(0, 2, 1e9, num_parameters=3_000, num_expert_parameters=2_000, logits_bytes=5e6)
    (memory,) = peak_memory([stage], _job("zero1"), _layout(4, shard_size=8, expert_copies=2))
    assert memory.optimizer == pytest.approx(12 * (1_000 / 8 + 2_000 / 2))
    assert memory.total == memory.model_states + memory.activations + memory.other
    assert memory.total - memory.allocated == memory.runtime


@given(
    parameters=st.floats(1e3, 1e13),
    ranks=st.integers(1, 4096),
    precision=st.sampled_from(["fp32", "bf16", "fp16_mixed", "bf16_mixed", "fp8_mixed"]),
)
def test_sharding_more_never_needs_more(parameters: float, ranks: int, precision: str) -> None:
    steps = [sum(model_states(parameters, _job(s, precision), ranks)) for s in ("none", "zero1", "zero2", "zero3")]
    assert all(more >= less for more, less in itertools.pairwise(steps))


@given(
    pipeline=st.integers(1, 16), chunks=st.integers(1, 4), microbatches=st.integers(1, 256), schedule=st.sampled_from(
        ["gpipe", "1f1b", "interleaved", "zero_bubble", "dualpipe"]
    )
)  # fmt: skip
def test_no_stage_holds_more_than_all_microbatches(
    pipeline: int, chunks: int, microbatches: int, schedule: str
) -> None:
    held = held_microbatches(PipelineShape(schedule, pipeline, chunks, microbatches))
    assert all(0 < each <= microbatches for each in held)
    assert list(held) == sorted(held, reverse=True)


def test_frozen_parameters_are_weights_only() -> None:
    stage = _stage(0, 2, 0.0, num_parameters=1_000, num_trained_parameters=10)
    (memory,) = peak_memory([stage], _job(precision="bf16_mixed"), _layout(1))
    assert (memory.params, memory.grads, memory.optimizer) == (2_000, 40, 120)


def test_c42_fp8_keeps_the_weights_and_adds_copies_of_them(job_of: JobOf) -> None:
    """NVIDIA/TransformerEngine#1429: beside 16-bit weights stand an fp8 copy and its transpose, 2 bytes a parameter."""
    megatron = {"framework": "megatron-lm"}
    wide, narrow = (
        _single_stage(job_of(precision=name, software=megatron, parallel={"sharding": "none"}))
        for name in ("bf16_mixed", "fp8_mixed")
    )
    in_tables = 51200 * 1024  # the tied embedding and head are never quantised
    parameters = wide.params / 2 - in_tables
    assert narrow.params == wide.params
    assert narrow.buffers - wide.buffers == pytest.approx(2 * parameters, rel=0.01)


def test_c42_quantised_weights_replace_the_wide_ones_where_they_are_gathered_so(job_of: JobOf) -> None:
    """Transformer Engine's primary weights: an fp8 weight and its transpose are as large as one in 16 bits.

    On Blackwell a weight with one scale needs no transpose; block scales follow the direction they are read in.
    """

    def held(linear: str, gpu: str) -> float:
        precision = {"preset": "fp8_mixed", "linear": linear, "param_gather": "fp8"}
        plan = {"sharding": "zero1"}
        job = job_of(precision=precision, software={"framework": "megatron-lm"}, cluster={"gpu": gpu}, parallel=plan)
        memory = _single_stage(job)
        return memory.params + memory.buffers

    job = job_of(software={"framework": "megatron-lm"}, cluster={"gpu": "H100-SXM5-80GB"})
    wide = _single_stage(job)
    in_layers = wide.params / 2 - 51200 * 1024
    assert held("fp8_delayed", "H100-SXM5-80GB") == pytest.approx(wide.params + wide.buffers, rel=1e-3)
    assert held("fp8_delayed", "B200-SXM6-180GB") == pytest.approx(wide.params + wide.buffers - in_layers, rel=1e-3)
    assert held("mxfp8", "B200-SXM6-180GB") == pytest.approx(wide.params + wide.buffers + in_layers / 16, rel=1e-3)


def test_gathered_shards_hold_quantised_copies_of_the_layers_at_work_only(job_of: JobOf) -> None:
    wide, narrow = (
        _single_stage(job_of(precision=name, parallel={"sharding": "zero3"})) for name in ("bf16_mixed", "fp8_mixed")
    )
    all_copies = 2 * 8 * wide.params / 4  # eight shards of fp32 weights
    assert narrow.buffers - wide.buffers < 0.5 * all_copies


def _single_stage(job: TrainingJob) -> StageMemory:
    job = job.resolved()
    (stage,) = peak_memory(build_graph(job).stages, job, rank_layout(job))
    return stage


def test_what_was_learnt_stands_beside_what_is_counted() -> None:
    stage = _stage(0, 2, 1e9, num_parameters=3_000, logits_bytes=5e6)
    fit = MemoryFit(activations=0.9, logits=2.0, workspace_bytes=0.0, cached_share=0.5, runtime_bytes=7.0)
    (counted,), (learnt,) = (peak_memory([stage], _job(), _layout(4), each) for each in (COUNTED, fit))
    assert learnt.model_states == counted.model_states
    assert learnt.activations == pytest.approx(0.9 * counted.activations)
    assert learnt.buffers == pytest.approx(2 * 5e6)
    assert learnt.total == pytest.approx(learnt.allocated + 7)
    assert learnt.shown == pytest.approx(1.5 * learnt.allocated + 7)


def test_a_meter_shows_the_allocator_or_the_device_on_the_rank_it_reads() -> None:
    job = _job(pipeline=2)
    memory = peak_memory([_stage(0, 1, 30.0), _stage(1, 1, 20.0)], job, _layout(8))
    assert metered_bytes(memory, "allocator") == memory[0].allocated
    assert metered_bytes(memory, "last_rank") == memory[1].allocated
    assert metered_bytes(memory, "device") == memory[0].shown


def test_a_dualpipe_rank_holds_two_stages() -> None:
    """arXiv 2412.19437, table 2: twice the parameters and the activations of p + 1 microbatches."""
    stages = [_stage(index, 2, 8.0, num_parameters=1_000 * (index + 1)) for index in range(4)]
    memory = peak_memory(stages, _job(pipeline=4, schedule="dualpipe", precision="fp32"), _layout(16))
    assert [each.params for each in memory] == [4 * 5_000.0] * 4
    assert [each.activations for each in memory] == [5 * 8.0] * 4


@pytest.mark.parametrize(("precision", "bytes_per_parameter"), [("fp16_mixed", 4 + 16 / 8), ("bf16_mixed", 8 + 16 / 8)])
def test_deepspeed_keeps_a_second_copy_of_gradients(precision: str, bytes_per_parameter: float) -> None:
    """Its optimizer steps on fp32 copies of its partition; BF16_Optimizer adds 16-bit gradients to fp32 sums."""
    job = _job("zero1", precision)
    job.software = SoftwareStack(framework="megatron-deepspeed")
    parameters = 1e10
    (memory,) = peak_memory([_stage(0, 2, 0.0, num_parameters=int(parameters))], job, _layout(4, shard_size=8))
    bucket = 5e8 * (2 if precision == "fp16_mixed" else 4)
    held = memory.allocated - COUNTED.workspace_bytes - bucket
    assert held == pytest.approx(parameters * bytes_per_parameter, rel=1e-9)


def test_gathered_weights_leave_no_fp32_activations(job_of: JobOf) -> None:
    """Of a fully sharded job only 16-bit activations are saved, as without autocast; under DDP its copies are too."""
    kept, gathered = (
        build_graph(job_of(parallel={"sharding": sharding}).resolved()).stages[0].saved_activation_bytes
        for sharding in ("none", "zero3")
    )
    megatron = job_of(software={"framework": "megatron-lm"}, parallel={"sharding": "none"}).resolved()
    assert gathered == build_graph(megatron).stages[0].saved_activation_bytes < kept
