"""Jobs under every schedule and overlap switch: what is split off, where layers sit, what is hidden."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataset_builder.job.errors import CannotRunError
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.checkpoint import Checkpoint
from gnn_predictor.features import featurize
from gnn_predictor.prediction import Prediction, predict


def job(model: dict[str, Any], parallel: dict[str, Any], **changes: Any) -> TrainingJob:
    data: dict[str, Any] = {
        "model": model,
        "batch": {"seq_length": 2048, "micro_batch_size": 1, "global_batch_size": 64},
        "cluster": {"gpu": "H100-SXM5-80GB", "num_nodes": 2, "gpus_per_node": 8},
        "precision": "bf16_mixed",
        "software": {"framework": "megatron-lm"},
        "parallel": parallel,
    }
    return TrainingJob.parse(data | changes)


@pytest.mark.parametrize("software", [{"framework": "megatron-lm"}, {"attention": "unfused", "fused_kernels": False}])
@pytest.mark.parametrize("precision", ["bf16_mixed", "fp8_mixed", "fp32"])
@pytest.mark.parametrize("preset", ["llama3-8b", "mixtral-8x7b"])
def test_weight_gradients_are_as_many_flops_as_the_forward_products(
    preset: str, precision: str, software: dict[str, Any]
) -> None:
    """Of every linear, forward, input gradient and weight gradient are one product each of equal size."""
    plan = {"tensor": 2, "pipeline": 2, "schedule": "zero_bubble"}
    given = job({"preset": preset}, plan, precision=precision, software=software).resolved()
    graph = build_graph(given)
    arrays = featurize(given, graph, rank_layout(given))
    flops = np.array([node.flops if "gemm" in node.kind else 0.0 for node in graph.nodes])
    in_attention = np.array([node.op in ("bmm", "baddbmm") for node in graph.nodes])
    forward = np.array([node.phase == "forward" for node in graph.nodes]) & ~in_attention
    for stage in graph.repeats:
        assert stage @ (flops * arrays.is_weight_gradient) == pytest.approx(stage @ (flops * forward))
    assert not featurize(
        job({"preset": preset}, {**plan, "schedule": "1f1b"}).resolved(), graph, rank_layout(given)
    ).is_weight_gradient.any()


def test_a_folded_pipeline_has_embedding_and_head_on_its_first_stage() -> None:
    given = job({"preset": "llama3-8b"}, {"pipeline": 4, "schedule": "zero_bubble_v"})
    layout = rank_layout(given)
    assert layout.virtual_pipeline == 2
    assert layout.chunk_layers[0] == ((0, 1, 2, 3), (28, 29, 30, 31))
    assert layout.chunk_layers[3] == ((12, 13, 14, 15), (16, 17, 18, 19))
    facts = build_graph(given).stages
    assert [stage.has_head for stage in facts] == [True, False, False, False]
    assert [stage.has_embedding for stage in facts] == [True, False, False, False]
    whole = build_graph(job({"preset": "llama3-8b"}, {})).stages[0].num_parameters
    assert sum(stage.num_parameters for stage in facts) == whole
    uneven = rank_layout(
        job({"preset": "llama3-8b"}, {**given.parallel.model_dump(), "layers_per_stage": [6, 8, 8, 10]})
    )
    assert [len(layers) for layers in uneven.stage_layers] == [6, 8, 8, 10]


def test_a_stage_may_hold_the_embedding_or_the_head_alone() -> None:
    plan = {"pipeline": 4, "layers_per_stage": [0, 16, 16, 0]}
    first, *_, last = build_graph(job({"preset": "llama3-8b"}, plan)).stages
    vocabulary = 128256 * 4096
    assert (first.num_parameters, last.num_parameters) == (vocabulary, vocabulary + 4096)


@pytest.mark.parametrize(
    ("parallel", "batch", "expected"),
    [
        ({"schedule": "zero_bubble", "virtual_pipeline": 2}, 64, "zero_bubble runs 1 model chunk a rank"),
        ({"schedule": "zero_bubble_v", "virtual_pipeline": 4}, 64, "zero_bubble_v runs 2 model chunks a rank"),
        ({"schedule": "dualpipe"}, 12, "3 microbatches; dualpipe needs an even number of 8 = 2 x PP4 or more"),
        ({"schedule": "dualpipe_v"}, 24, "6 microbatches; dualpipe_v needs 8 = 2 x PP4 or more"),
    ],
)
def test_what_a_schedule_cannot_run_is_said(parallel: dict[str, Any], batch: int, expected: str) -> None:
    batches = {"seq_length": 2048, "micro_batch_size": 1, "global_batch_size": batch}
    with pytest.raises(CannotRunError) as caught:
        rank_layout(job({"preset": "llama3-8b"}, {"pipeline": 4, **parallel}, batch=batches))
    assert any(expected in reason for reason in caught.value.reasons)


# A job and a switch whose messages matter to it, and the axis on which they show.
SWITCHES = {
    "grad_reduce": ({"sharding": "zero1"}, "data"),
    "param_gather": ({"sharding": "zero3"}, "data"),
    "tensor": ({"tensor": 8}, "tensor"),
    "pipeline": ({"pipeline": 8}, "pipeline"),
}


@pytest.mark.parametrize("switch", sorted(SWITCHES))
def test_an_overlap_switch_hides_its_messages(switch: str, released: Checkpoint) -> None:
    plan, axis = SWITCHES[switch]
    cluster = {"gpu": "A100-SXM4-80GB", "num_nodes": 4, "gpus_per_node": 8}

    def answer(is_on: bool) -> Prediction:
        given = job({"preset": "llama2-7b"}, {**plan, "overlap": {switch: is_on}}, cluster=cluster)
        return predict(given, checkpoint=released, force=True)

    beside, alone = answer(True), answer(False)
    assert beside.iteration_time_s < alone.iteration_time_s
    exposed = [each.breakdown.exposed_communication[axis] for each in (beside, alone)]
    hidden = [each.breakdown.overlapped_communication[axis] for each in (beside, alone)]
    assert exposed[0] < exposed[1]
    assert hidden[0] > hidden[1]
    unused = job({"preset": "llama2-7b"}, {"overlap": {"tensor": True}}, cluster=cluster)  # one tensor rank
    assert predict(unused, checkpoint=released, force=True).iteration_time_s == pytest.approx(
        predict(job({"preset": "llama2-7b"}, {}, cluster=cluster), checkpoint=released, force=True).iteration_time_s
    )


def test_dualpipe_hides_the_experts_messages(released: Checkpoint) -> None:
    """Communication of one direction runs beside the compute of the other: DeepSeek-V3, section 3.2.1."""

    def answer(**plan: Any) -> Prediction:
        given = job({"preset": "mixtral-8x7b"}, {"pipeline": 4, "expert": 4, **plan})
        return predict(given, checkpoint=released, force=True)

    plain, paired = answer(schedule="1f1b"), answer(schedule="dualpipe_v")
    apart = answer(schedule="dualpipe_v", overlap={"pipeline": False})
    exposed = [each.breakdown.exposed_communication["expert"] for each in (plain, paired, apart)]
    assert exposed[1] < 0.7 * exposed[0]
    assert exposed[1] < 0.7 * exposed[2]
    assert paired.breakdown.overlapped_communication["expert"] > apart.breakdown.overlapped_communication["expert"]
    assert paired.iteration_time_s < apart.iteration_time_s
    parts = paired.breakdown
    assert sum(parts.by_kind.values()) + sum(parts.exposed_communication.values()) == pytest.approx(
        paired.iteration_time_s
    )
    for stage in paired.stages:
        assert stage.total_s + stage.bubble_s == pytest.approx(paired.iteration_time_s, rel=1e-4)


# The authors give the first and the last stage a layer less, for embedding and head (arXiv 2401.10241, section 5.1); a
# V has both on its first rank. Interleaved in single layers, the model has the 32 layers that divide.
_BALANCED = [3, 4, 4, 4, 4, 4, 4, 3]
_C27: dict[str, dict[str, Any]] = {
    "1f1b": {"layers_per_stage": _BALANCED},
    "zero_bubble_2p": {"layers_per_stage": _BALANCED},
    "zero_bubble_v": {"layers_per_stage": [2, *[4] * 7]},
    "interleaved": {"virtual_pipeline": 4},
}


def c27_seconds(released: Checkpoint, schedule: str, num_microbatches: int, **plan: Any) -> float:
    """An iteration of the 6.2B model on 8 H800 of sail-sg/zero-bubble-pipeline-parallelism#21."""
    plan = {"pipeline": 8, "schedule": schedule, **(plan or _C27[schedule])}
    sizes = {"num_layers": sum(plan.get("layers_per_stage", [32])), "hidden_size": 4096, "num_attention_heads": 32,
             "vocab_size": 50304, "activation": "gelu"}  # fmt: skip
    given = job(
        sizes,
        plan,
        batch={"seq_length": 1024, "micro_batch_size": 6, "global_batch_size": 6 * num_microbatches},
        cluster={"gpu": "H800-SXM5-80GB", "num_nodes": 1, "gpus_per_node": 8},
    )
    return predict(given, checkpoint=released, force=True).iteration_time_s


def c27_gains(released: Checkpoint, count: int) -> dict[str, float]:
    """Over 1F1B on the same stages, of so many microbatches."""
    balanced = {name: c27_seconds(released, name, count) for name in ("1f1b", "zero_bubble_2p", "zero_bubble_v")}
    uniform = c27_seconds(released, "1f1b", count, virtual_pipeline=1)
    found = {name: balanced["1f1b"] / seconds for name, seconds in balanced.items()}
    return {**found, "interleaved": uniform / c27_seconds(released, "interleaved", count)}


def test_c27_schedules_gain_what_was_measured_and_converge(released: Checkpoint) -> None:
    """1F1B 55, ZB-V 64, interleaved 66, ZB-2P 67 samples/s; the count of microbatches (24 here) is not stated."""
    few, many = (c27_gains(released, count) for count in (24, 512))
    assert min(few, key=few.__getitem__) == "1f1b"
    assert few["interleaved"] == pytest.approx(66 / 55, rel=0.10)
    assert few["zero_bubble_2p"] == pytest.approx(67 / 55, rel=0.10)
    assert few["zero_bubble_v"] == pytest.approx(64 / 55, rel=0.10)
    assert all(gain == pytest.approx(1.0, abs=0.05) for gain in many.values())


@pytest.mark.xfail(strict=True, reason="ZB-V is predicted 4% ahead: the head is taken to cost more than a layer")
def test_c27_zb_2p_gains_most(released: Checkpoint) -> None:
    few = c27_gains(released, 24)
    assert max(few, key=few.__getitem__) == "zero_bubble_2p"


def test_resharding_trades_memory_for_messages_and_prefetch_never_costs(released: Checkpoint) -> None:
    """Weights kept through the step (ZeRO-2), gathered anew from a node (HSDP), and from all ranks (ZeRO-3)."""
    plans = ({"sharding": "zero2"}, {"sharding": "hsdp", "shard_size": 8}, {"sharding": "zero3"})
    kept, of_a_node, spread = (
        predict(job({"preset": "llama3-8b"}, plan), checkpoint=released, force=True) for plan in plans
    )
    peaks = [each.stages[0].peak_memory_bytes for each in (kept, of_a_node, spread)]
    assert peaks == sorted(peaks, reverse=True)
    data = [each.breakdown.exposed_communication["data"] for each in (kept, of_a_node, spread)]
    assert data[0] < min(data[1:])
    without = predict(
        job({"preset": "llama3-8b"}, {**plans[2], "overlap": {"param_gather": False}}), checkpoint=released, force=True
    )
    assert spread.iteration_time_s <= without.iteration_time_s
    assert without.stages[0].peak_memory_bytes == peaks[2]


@pytest.mark.parametrize("axis", ["tensor", "data", "pipeline", "expert"])
def test_a_slower_tier_is_never_faster(axis: str, released: Checkpoint) -> None:
    plans = {
        "tensor": {"tensor": 8},
        "data": {"sharding": "zero3"},
        "pipeline": {"pipeline": 16},
        "expert": {"expert": 8},
    }
    preset = "mixtral-8x7b" if axis == "expert" else "llama3-8b"

    def seconds(slower: float) -> float:
        def tier(gigabytes: float) -> dict[str, float]:
            return {"bytes_per_s_per_gpu": gigabytes * 1e9 / slower, "latency_s": 5e-6}

        cluster = {"gpu": "H100-SXM5-80GB", "num_nodes": 2, "gpus_per_node": 8, "intra_node": tier(450),
                   "inter_node": tier(50)}  # fmt: skip
        given = job({"preset": preset}, plans[axis], cluster=cluster)
        return predict(given, checkpoint=released, force=True).iteration_time_s

    fast, slow, slowest = (seconds(slower) for slower in (1.0, 4.0, 16.0))
    assert fast <= slow <= slowest
