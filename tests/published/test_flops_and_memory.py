"""FLOPs and model states that public reports derive: exact arithmetic, whatever the weights of the predictor."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataset_builder.job.flops import model_flops_per_sequence
from dataset_builder.job.model import ModelSpec, num_parameters
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.memory import model_states, peak_memory


def _preset(name: str, **overrides: object) -> ModelSpec:
    return ModelSpec.model_validate({"preset": name, "overrides": overrides})


def test_c35_only_the_active_experts_compute() -> None:
    """AI-Hypercomputer/maxtext#678: counting every expert of Mixtral 8x7B gave 287.8 TFLOP instead of 80.0."""
    all_experts = _preset("mixtral-8x7b", moe={"top_k": 8})
    ratio = model_flops_per_sequence(all_experts, 4096) / model_flops_per_sequence(_preset("mixtral-8x7b"), 4096)
    assert ratio == pytest.approx(287.8 / 80.0, rel=0.05)


@pytest.mark.parametrize(("whole_causal", "gflops_per_token"), [(True, 37.58), (False, 27.9)])
def test_c35_flops_of_a_fine_grained_mixture(whole_causal: bool, gflops_per_token: float) -> None:
    """pytorch/torchtitan#4300: Qwen3-30B-A3B at 8192 tokens; a wrong path gave 192.9."""
    flops = model_flops_per_sequence(_preset("qwen3-30b-a3b"), 8192, whole_causal=whole_causal)
    assert flops / 8192 == pytest.approx(gflops_per_token * 1e9, rel=2e-3)


def test_c35_the_head_counts_once_and_the_embedding_never() -> None:
    """Tied or not, the head is 6 V h FLOPs a token and the input embedding none."""
    tied, untied = _preset("qwen3-0.6b"), _preset("qwen3-0.6b", tie_embeddings=False)
    assert model_flops_per_sequence(tied, 4096) == model_flops_per_sequence(untied, 4096)
    wider = _preset("qwen3-0.6b", vocab_size=tied.vocab_size + 1000)
    more = model_flops_per_sequence(wider, 4096) - model_flops_per_sequence(tied, 4096)
    assert more == pytest.approx(6 * 1000 * tied.hidden_size * 4096)


@pytest.mark.parametrize(
    ("sharding", "bytes_per_parameter", "gigabytes"), [("zero1", 7.0, 47.6), ("zero2", 5.5, 37.4), ("zero3", 4.0, 27.2)]
)
def test_c43_model_states_under_zero(sharding: str, bytes_per_parameter: float, gigabytes: float, jobs: Path) -> None:
    """Of 6.805 billion parameters on four GPUs, and of a whole job of nearly that size."""
    job = TrainingJob.from_yaml(jobs / "c43-llama2-7b-deepspeed.yaml", {"parallel.sharding": sharding}).resolved()
    assert sum(model_states(6.805e9, job, 4)) == pytest.approx(gigabytes * 1e9, rel=2e-3)
    layout = rank_layout(job)
    (stage,) = peak_memory(build_graph(job).stages, job, layout)
    assert stage.model_states == pytest.approx(num_parameters(job.model) * bytes_per_parameter, rel=1e-6)
