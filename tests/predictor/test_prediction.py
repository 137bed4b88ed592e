"""A prediction's parts agree with each other and with its published schema, whatever the weights are."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from dataset_builder.job.errors import CannotRunError
from gnn_predictor.checkpoint import load_checkpoint
from gnn_predictor.prediction import Prediction, predict

_SCHEMA = json.loads(resources.files("gnn_predictor.report").joinpath("prediction.schema.json").read_text())
_LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"parallel": {"tensor": 4, "sequence_parallel": True}},
    "pipeline": {"parallel": {"pipeline": 4, "tensor": 2, "schedule": "1f1b"}},
    "interleaved": {"parallel": {"pipeline": 4, "virtual_pipeline": 2, "schedule": "interleaved"}},
    "zero3": {"parallel": {"sharding": "zero3", "recompute": "full"}},
    "fp16": {"precision": "fp16_mixed"},
    "priced": {"training": {"tokens": 1e9}, "price": {"usd_per_gpu_hour": 2.0}},
}


@pytest.mark.parametrize(
    ("architecture", "counted"),
    [("decoder", "causal attention,"), ("encoder", "whole attention,"),
     ("encoder_decoder", "causal attention in the decoder, whole in the encoder,")],
)  # fmt: skip
def test_the_convention_of_mfu_is_that_of_the_architecture(
    architecture: str, counted: str, job_of: Any, untrained: Path
) -> None:
    model = {"architecture": architecture, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1024}
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 2} if "_" in architecture else {"num_layers": 2}
    prediction = predict(job_of(model={**model, **layers}), checkpoint=untrained)
    assert prediction.mfu_convention.startswith(counted)


@pytest.mark.parametrize("name", _LAYOUTS)
def test_json_follows_the_schema_and_its_parts_add_up(name: str, job_of: Any, untrained: Path) -> None:
    prediction = predict(job_of(**_LAYOUTS[name]), checkpoint=untrained)
    value = json.loads(json.dumps(prediction.to_dict(), allow_nan=False))
    jsonschema.validate(value, _SCHEMA)
    iteration_s = value["iteration_time_s"]
    assert value["iteration_time_low_s"] <= iteration_s <= value["iteration_time_high_s"]
    breakdown = value["breakdown"]
    parts = [*breakdown["by_kind"].values(), *breakdown["exposed_communication"].values()]
    assert math.fsum(parts) == pytest.approx(iteration_s)
    assert math.fsum(breakdown["by_dtype"].values()) == pytest.approx(math.fsum(breakdown["by_kind"].values()))
    messages = breakdown["exposed_communication_by_dtype"].values()
    assert math.fsum(messages) == pytest.approx(math.fsum(breakdown["exposed_communication"].values()))
    for kind, bounds in breakdown["by_bound"].items():
        assert math.fsum(bounds.values()) == pytest.approx(breakdown["by_kind"][kind])
    assert math.fsum(breakdown["gemm_by_dtype"].values()) == pytest.approx(breakdown["by_kind"]["gemm"])
    for stage in value["stages"]:
        per_microbatch = stage["forward_s"] + stage["backward_s"] + stage["recompute_s"]
        rest = stage["communication_exposed_s"] + stage["optimizer_s"] + stage["overhead_s"]
        assert value["num_microbatches"] * per_microbatch + rest == pytest.approx(stage["total_s"])
        assert stage["total_s"] + stage["bubble_s"] == pytest.approx(iteration_s, rel=1e-4)
        assert sum(stage["memory"].values()) == pytest.approx(stage["peak_memory_bytes"])
    assert value["in_domain"] == (name != "fp16")


def test_a_batch_gives_what_each_job_gives_alone(job_of: Any, untrained: Path) -> None:
    jobs = [job_of(**changes) for changes in _LAYOUTS.values()]
    together = predict(jobs, checkpoint=untrained)
    alone = [predict(job, checkpoint=untrained) for job in jobs]
    assert [p.iteration_time_s for p in together] == pytest.approx([p.iteration_time_s for p in alone], rel=1e-4)
    assert predict([], checkpoint=untrained) == []


def test_the_head_makes_the_last_stage_the_longest(job_of: Any, untrained: Path) -> None:
    job = job_of(parallel={"pipeline": 4, "schedule": "1f1b"}, model={"vocab_size": 131072})
    stages = predict(job, checkpoint=untrained).stages
    assert stages[-1].total_s > stages[1].total_s
    assert stages[1].total_s == pytest.approx(stages[2].total_s)
    assert stages[0].memory.activations > stages[1].memory.activations > stages[2].memory.activations


def test_a_job_that_does_not_fit_is_refused_with_the_arithmetic(job_of: Any, untrained: Path) -> None:
    huge = job_of(model={"num_layers": 200, "hidden_size": 8192, "num_attention_heads": 64})
    with pytest.raises(CannotRunError, match=r"memory: stage 0 needs [\d.]+ GB per GPU \(params .* has") as error:
        predict(huge, checkpoint=untrained)
    assert error.value.exit_code == 4
    forced = predict(huge, checkpoint=untrained, force=True)
    assert not forced.fits_memory
    assert any(warning.startswith("memory:") for warning in forced.warnings)


def test_a_job_just_above_its_memory_is_refused_with_every_stage_and_a_hint(job_of: Any, untrained: Path) -> None:
    plan = {"pipeline": 4, "schedule": "1f1b"}
    need = max(stage.peak_memory_bytes for stage in predict(job_of(parallel=plan), checkpoint=untrained).stages)
    device = job_of().cluster.gpu.model_dump() | {"name": "edge", "hbm_bytes": need * 0.99}
    edge = job_of(cluster={"gpu": device}, parallel=plan)
    with pytest.raises(CannotRunError) as error:
        predict(edge, checkpoint=untrained)
    *stages, verdict, nearest, advice = error.value.reasons
    assert [reason.split(" needs")[0] for reason in stages] == [f"memory: stage {index}" for index in range(4)]
    assert [reason.endswith("does not fit") for reason in stages] == [False, False, False, True]  # the head's
    assert "(1.0%) too much" in verdict
    assert "within the error of this estimate (90% of such jobs need" in verdict
    assert nearest.startswith("memory: --set ")
    assert advice == "--force predicts anyway"
    forced = predict(edge, checkpoint=untrained, force=True)
    assert not forced.fits_memory
    assert forced.memory_verdict == "may not fit"


def test_a_format_without_hardware_is_refused(job_of: Any, untrained: Path) -> None:
    with pytest.raises(CannotRunError, match="fp8"):
        predict(job_of(precision="fp8_mixed"), checkpoint=untrained)
    assert predict(job_of(precision="fp8_mixed"), checkpoint=untrained, force=True).iteration_time_s > 0


def test_time_and_cost_of_a_whole_training(job_of: Any, untrained: Path) -> None:
    def total(**training: float) -> Any:
        prediction = predict(job_of(training=training, price={"usd_per_gpu_hour": 2.0}), checkpoint=untrained)
        return prediction, prediction.total

    prediction, by_tokens = total(tokens=64 * 1024 * 100.5)
    assert by_tokens.steps == 101
    assert by_tokens.gpu_hours == pytest.approx(101 * prediction.iteration_time_s * 8 / 3600)
    assert by_tokens.usd == pytest.approx(2 * by_tokens.gpu_hours)
    assert total(steps=10)[1].steps == 10
    assert total(samples=640)[1].steps == 10


def test_what_is_outside_the_training_data_is_said_and_widens_the_interval(job_of: Any, untrained: Path) -> None:
    inside: Prediction = predict(job_of(), checkpoint=untrained)
    outside: Prediction = predict(job_of(cluster={"gpu": "H100-SXM5-80GB"}), checkpoint=untrained)
    assert inside.in_domain
    assert not outside.in_domain
    assert any("no run on H100-SXM5-80GB" in warning for warning in outside.warnings)

    def width(prediction: Prediction) -> float:
        return math.log(prediction.iteration_time_high_s / prediction.iteration_time_low_s)

    assert width(outside) > 1.5 * width(inside)


def test_nothing_is_predicted_below_the_physical_floor(job_of: Any, untrained: Path) -> None:
    plain = load_checkpoint(untrained)
    # A network that makes every kernel e^-4 of its roofline, every message hidden and every launch free.
    fast = {name: _fastest(name, tensor) for name, tensor in plain.tensors.items()}
    job = job_of(parallel={"pipeline": 4, "schedule": "1f1b"}, batch={"micro_batch_size": 8})
    prediction = predict(job, checkpoint=replace(plain, tensors=fast))
    assert prediction.iteration_time_s == pytest.approx(prediction.floor.seconds, rel=1e-6)
    assert prediction.iteration_time_low_s == pytest.approx(prediction.floor.seconds, rel=1e-6)
    assert any("physical floor" in warning for warning in prediction.warnings)
    assert f"from {prediction.iteration_time_s / prediction.raised_by:.4g} s" in " ".join(prediction.warnings)
    parts = [*prediction.breakdown.by_kind.values(), *prediction.breakdown.exposed_communication.values()]
    assert math.fsum(parts) == pytest.approx(prediction.iteration_time_s)
    for stage in prediction.stages:
        assert stage.total_s + stage.bubble_s == pytest.approx(prediction.iteration_time_s, rel=1e-4)
    usual = predict(job, checkpoint=untrained)
    assert usual.raised_by == 1
    assert not any("floor" in warning for warning in usual.warnings)


def _fastest(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name.endswith(("readout.3.bias", "kernel.outputs.bias", "graph_readout.bias")):
        return torch.full_like(tensor, -50.0)
    return tensor


def test_assumed_defaults_are_said(job_of: Any, untrained: Path) -> None:
    assert any("assumed (not given)" in warning for warning in predict(job_of(), checkpoint=untrained).warnings)


@pytest.mark.parametrize(
    ("gpu", "precision", "ratio"),
    [("A100-SXM4-80GB", "fp32", "8x"), ("A100-SXM4-80GB", "tf32", None), ("V100-SXM2-32GB", "fp32", None)],
)
def test_fp32_beside_idle_tensor_cores_hints_at_tf32(
    gpu: str, precision: str, ratio: str | None, job_of: Any, untrained: Path
) -> None:
    prediction = predict(job_of(cluster={"gpu": gpu}, precision=precision), checkpoint=untrained)
    hints = [line for line in prediction.to_dict()["warnings"] if "tf32 would be" in line]
    assert len(hints) == (ratio is not None)
    assert all(f"outside the tensor cores of {gpu}" in line and f"{ratio} faster at peak" in line for line in hints)


@pytest.mark.parametrize(
    ("gpu", "gpus_per_node", "tensor", "told"),
    [
        ("A100-SXM4-80GB", 8, 16, "16 ranks span 2 nodes (cluster.gpus_per_node is 8), so the messages of every layer "
         "cross ib-hdr-8x200 at 25 GB/s per GPU; nvlink3 inside a node has 300"),
        ("A100-SXM4-80GB", 8, 8, None),
        ("GB200-186GB", 4, 16, None),  # one NVLink fabric joins a rack's nodes
    ],
)  # fmt: skip
def test_tensor_parallelism_beyond_a_node_is_said(
    gpu: str, gpus_per_node: int, tensor: int, told: str | None, job_of: Any, untrained: Path
) -> None:
    cluster = {"gpu": gpu, "num_nodes": 16 // gpus_per_node, "gpus_per_node": gpus_per_node}
    prediction = predict(job_of(cluster=cluster, parallel={"tensor": tensor}), checkpoint=untrained)
    said = [line for line in prediction.warnings if line.startswith("parallel.tensor")]
    assert said == ([f"parallel.tensor: {told}"] if told else [])


@pytest.mark.parametrize("schedule", ["zero_bubble", "zero_bubble_2p", "zero_bubble_v", "dualpipe", "dualpipe_v"])
def test_a_schedule_with_less_bubble_is_faster_and_adds_up(schedule: str, job_of: Any, untrained: Path) -> None:
    plan = {"pipeline": 4, "tensor": 2}
    batch = {"micro_batch_size": 4, "seq_length": 4096}  # large enough not to wait for the host
    plain = predict(job_of(parallel={**plan, "schedule": "1f1b"}, batch=batch), checkpoint=untrained)
    prediction = predict(job_of(parallel={**plan, "schedule": schedule}, batch=batch), checkpoint=untrained)
    assert prediction.iteration_time_s < plain.iteration_time_s
    assert not any("timed as" in warning for warning in prediction.warnings)
    parts = prediction.breakdown
    total_s = sum(parts.by_kind.values()) + sum(parts.exposed_communication.values())
    assert total_s == pytest.approx(prediction.iteration_time_s)
    assert min(parts.by_kind.values()) >= 0
    for stage in prediction.stages:
        assert 0 <= stage.bubble_s < prediction.iteration_time_s
        assert stage.total_s + stage.bubble_s == pytest.approx(prediction.iteration_time_s, rel=1e-4)
