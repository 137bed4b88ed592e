"""Multi-token prediction: its size as published, the same counted and traced, and where it stands."""

from __future__ import annotations

from typing import Any

import pytest

from dataset_builder.job.errors import JobError
from dataset_builder.job.flops import model_flops_per_sequence
from dataset_builder.job.importers.huggingface import sizes_of_config
from dataset_builder.job.model import active_parameters, num_parameters
from dataset_builder.job.presets import preset
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.graph import TrainingGraph
from dataset_builder.tracing.trace import build_graph

VOCABULARY = 129280 * 7168  # one table of DeepSeek-V3


def job(depths: int, **parallel: Any) -> TrainingJob:
    return TrainingJob.parse(
        {
            "model": {"preset": "deepseek-v3", "overrides": {"mtp_layers": depths}},
            "batch": {"seq_length": 4096, "micro_batch_size": 1, "global_batch_size": 64},
            "cluster": {"gpu": "H100-SXM5-80GB", "num_nodes": 8, "gpus_per_node": 8},
            "precision": "fp8_mixed",
            "parallel": parallel,
            "software": {"framework": "megatron-core"},
        }
    )


def products_flops(graph: TrainingGraph, stage: int) -> float:
    kinds = ("gemm", "grouped_gemm", "attention")
    counts = graph.repeats[stage].tolist()
    return sum(node.flops * count for node, count in zip(graph.nodes, counts, strict=True) if node.kind in kinds)


def test_the_module_has_the_published_size() -> None:
    """671B of the main model, 14B of the module with its copies of both tables, 685B in all (Hugging Face, README)."""
    main, module = num_parameters(job(0).model), num_parameters(job(1).model) - num_parameters(job(0).model)
    assert main == pytest.approx(671e9, rel=1e-3)
    assert module + 2 * VOCABULARY == pytest.approx(14e9, abs=0.6e9)
    assert main + module + 2 * VOCABULARY == pytest.approx(685e9, rel=1e-3)
    assert active_parameters(job(1).model) - active_parameters(job(0).model) == pytest.approx(0.69e9, rel=0.02)


@pytest.mark.parametrize("depths", [1, 3])
def test_what_is_traced_is_what_is_counted(depths: int) -> None:
    plain, given = job(0), job(depths)
    traced, counted = build_graph(given), model_flops_per_sequence(given.model, 4096)
    assert traced.stages[0].num_parameters == num_parameters(given.model)
    more = products_flops(traced, 0) - products_flops(build_graph(plain), 0)
    assert more == pytest.approx(counted - model_flops_per_sequence(plain.model, 4096), rel=0.02)  # flash: scores again


def test_it_stands_on_the_last_stage_with_an_embedding_of_its_own() -> None:
    split = {"pipeline": 4, "layers_per_stage": [16, 15, 15, 15], "expert": 16}
    plain, given = build_graph(job(0, **split)), build_graph(job(1, **split))
    for stage in range(3):
        assert given.stages[stage] == plain.stages[stage]
        assert products_flops(given, stage) == products_flops(plain, stage)
    assert given.stages[3].layers == plain.stages[3].layers
    share = given.stages[3].num_parameters - plain.stages[3].num_parameters
    module = num_parameters(job(1).model) - num_parameters(job(0).model)
    experts = 256 * 3 * 7168 * 2048
    assert share == module - experts * 15 // 16 + VOCABULARY
    assert products_flops(given, 3) > products_flops(plain, 3)
    assert any(node.module == "embedding.tied" for node in given.nodes)  # both tables' gradients are added up
    folded = build_graph(job(1, pipeline=2, schedule="zero_bubble_v", expert=16, layers_per_stage=[16, 15, 15, 15]))
    assert not any(node.module == "embedding.tied" for node in folded.nodes)


def test_a_hugging_face_config_says_it() -> None:
    sizes = preset("deepseek-v3")
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
        "num_attention_heads": 128, "vocab_size": 129280, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "tie_word_embeddings": False, "num_nextn_predict_layers": 1, **sizes["mla"],
    }  # fmt: skip
    assert sizes_of_config(config)["mtp_layers"] == 1


def test_only_a_decoder_predicts_further_tokens() -> None:
    data = job(0).model_dump(mode="json", exclude_defaults=True)
    data |= {"model": {"preset": "bert-large", "overrides": {"mtp_layers": 1}}}
    with pytest.raises(JobError, match="mtp_layers: got 1; expected 0 but for a decoder"):
        TrainingJob.parse(data)
