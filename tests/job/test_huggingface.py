"""Hugging Face configs: what each family's keys mean, and clear refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from dataset_builder.job.errors import JobError
from dataset_builder.job.importers.huggingface import sizes_of_config
from dataset_builder.job.model import ModelSpec, active_parameters, num_parameters
from dataset_builder.job.schema import TrainingJob

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 1280, "n_head": 20, "n_layer": 36, "n_positions": 1024, "vocab_size": 50257}
QWEN3_MOE = {
    **LLAMA, "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128, "num_key_value_heads": 4,
    "num_hidden_layers": 48, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
    "sliding_window": 4096, "use_sliding_window": False,
}  # fmt: skip
DEEPSEEK_LITE = {
    **LLAMA, "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}  # fmt: skip
GEMMA2 = {
    **LLAMA, "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000,
    "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": None,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3", "vision_config": {},
    "text_config": {**GEMMA2, "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                    "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208,
                    "sliding_window": 1024},
}  # fmt: skip
FALCON = {
    "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "vocab_size": 65024, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False,
}  # fmt: skip
MPT = {
    "model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "vocab_size": 50432,
    "max_seq_len": 2048, "no_bias": True, "attn_config": {"alibi": True},
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 1024, "d_ff": 16384, "d_kv": 128, "num_heads": 32, "num_layers": 24,
    "vocab_size": 32128, "relative_attention_num_buckets": 32,
}  # fmt: skip
BERT = {
    "model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip


def spec(config: dict[str, Any]) -> ModelSpec:
    return ModelSpec.model_validate(sizes_of_config(config))


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (LLAMA, "llama3-8b"), (GPT2, "gpt2-large"), (QWEN3_MOE, "qwen3-30b-a3b"), (DEEPSEEK_LITE, "deepseek-v2-lite"),
        (GEMMA2, "gemma2-9b"), (GEMMA3, "gemma3-4b"), (FALCON, "falcon-7b"), (MPT, "mpt-7b"), (T5, "t5-3b"),
        (BERT, "bert-base"),
        ({**LLAMA, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
         "mixtral-8x7b"),
        ({**LLAMA, "model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}, "mistral-7b"),
        ({**LLAMA, "model_type": "olmo2", "intermediate_size": 11008, "num_key_value_heads": None,
          "vocab_size": 100352}, "olmo2-7b"),
        ({**LLAMA, "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
          "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
         "qwen2.5-0.5b"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_config_reads_as_the_preset_of_that_model(config: dict[str, Any], preset: str) -> None:
    read, shipped = spec(config), ModelSpec.model_validate({"preset": preset})
    assert num_parameters(read) == num_parameters(shipped)
    assert active_parameters(read) == active_parameters(shipped)
    assert (read.attention, read.window, read.full_attention_every) == (
        shipped.attention, shipped.window, shipped.full_attention_every,
    )  # fmt: skip
    assert (read.activation, read.position_embedding) == (shipped.activation, shipped.position_embedding)


def test_null_key_value_heads_mean_as_many_as_heads() -> None:
    assert spec({**LLAMA, "num_key_value_heads": None}).num_query_groups == 32


def test_an_unknown_type_with_the_usual_keys_is_read_as_a_llama_or_a_gpt() -> None:
    assert num_parameters(spec({**LLAMA, "model_type": "new"})) == num_parameters(spec(LLAMA))
    neox = {**LLAMA, "model_type": "gpt_neox", "hidden_act": "gelu", "rotary_pct": 0.25, "num_key_value_heads": None}
    del neox["rms_norm_eps"]
    assert (spec(neox).activation, spec(neox).normalization, spec(neox).bias) == ("gelu", "layernorm", True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama", "hidden_size": 8}, "num_hidden_layers is missing"),
        ({**LLAMA, "intermediate_size": None}, "intermediate_size is missing"),
        ({**LLAMA, "intermediate_size": None, "block_configs": [{}]}, "block_configs"),
        ({**DEEPSEEK_LITE, "kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({**QWEN3_MOE, "num_hidden_layers": [1]}, "no number"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        sizes_of_config(config)


def test_a_config_path_starts_from_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "config.json").write_text(json.dumps(LLAMA))
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {config: models/config.json, overrides: {num_layers: 2}}\n"
        "batch: {seq_length: 8, micro_batch_size: 1, global_batch_size: 8}\ncluster: {gpu: H100}\n"
    )
    model = TrainingJob.from_yaml(path).model
    assert (model.num_layers, model.hidden_size, model.name) == (2, 4096, "llama")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("none.json", None, "is no file"), ("a.json", "model_type: llama", "is not JSON"),
        ("b.json", "[1]", "no JSON object"), ("c.json", " " * (2**20 + 1), "more than 1048576 bytes"),
        ("d.json", "[" * 100_000, "is not JSON"),
    ],
)  # fmt: skip
def test_files_that_are_refused(tmp_path: Path, name: str, content: str | None, expected: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    data = {
        "model": {"config": name},
        "batch": {"seq_length": 8, "micro_batch_size": 1, "global_batch_size": 8},
        "cluster": {"gpu": "H100"},
    }
    with pytest.raises(JobError, match=expected) as caught:
        TrainingJob.parse(data, folder=tmp_path)
    assert caught.value.reasons[0].startswith("model.config: ")


@pytest.mark.parametrize(
    ("saved_as", "expected"),
    [
        ("BertForMaskedLM", ("mlm", 2)),
        ("BertForQuestionAnswering", ("classification", 2)),
        ("BertForTokenClassification", ("classification", 5)),
    ],
)
def test_the_class_a_bert_was_saved_by_says_its_head(saved_as: str, expected: tuple[str, int]) -> None:
    config = {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12,
              "intermediate_size": 3072,
              "vocab_size": 30522, "architectures": [saved_as],
              "id2label": dict.fromkeys("01234", "B")}  # fmt: skip
    read = spec(config)
    assert (read.head, read.num_labels) == expected


def _rotary(layers: int, hidden: int, heads: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": ffn,
            "vocab_size": vocab, "tie_word_embeddings": False, **more}  # fmt: skip


# Parameters in billions as the models' cards give them.
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "gpt_bigcode": (15.5, {"n_layer": 40, "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_positions": 8192,
                           "vocab_size": 49152, "multi_query": True}),
    "gpt_neox": (6.86, _rotary(32, 4096, 32, 16384, 50432, hidden_act="gelu", use_parallel_residual=True)),
    "gptj": (6.05, {"n_layer": 28, "n_embd": 4096, "n_head": 16, "n_inner": None, "rotary_dim": 64,
                    "vocab_size": 50400}),
    "starcoder2": (7.17, _rotary(32, 4608, 36, 18432, 49152, num_key_value_heads=4, use_bias=True,
                                 tie_word_embeddings=True)),
    "opt": (6.66, {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_dim": 16384,
                   "vocab_size": 50272, "max_position_embeddings": 2048}),
    "bloom": (7.07, {"n_layer": 30, "hidden_size": 4096, "n_head": 32, "vocab_size": 250880}),
    "bart": (0.406, {"encoder_layers": 12, "decoder_layers": 12, "d_model": 1024, "encoder_ffn_dim": 4096,
                     "encoder_attention_heads": 16, "vocab_size": 50265, "max_position_embeddings": 1024}),
    "gpt_oss": (20.9, _rotary(24, 2880, 64, 2880, 201088, num_key_value_heads=8, head_dim=64, num_local_experts=32,
                              num_experts_per_tok=4, rms_norm_eps=1e-5, hidden_act="silu")),
    "llama4_text": (107.8, _rotary(48, 5120, 40, 8192, 202048, num_key_value_heads=8, head_dim=128,
                                   num_local_experts=16, num_experts_per_tok=1, intermediate_size_mlp=16384,
                                   interleave_moe_layer_step=1, rms_norm_eps=1e-5)),
    "dbrx": (131.6, {"d_model": 6144, "n_layers": 40, "n_heads": 48, "vocab_size": 100352,
                     "attn_config": {"kv_n_heads": 8},
                     "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}}),
    "olmoe": (6.92, _rotary(16, 2048, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8, rms_norm_eps=1e-5)),
    "cohere": (34.98, _rotary(40, 8192, 64, 22528, 256000, num_key_value_heads=64, tie_word_embeddings=True)),
    "glm4_moe": (106.9, _rotary(46, 4096, 96, 10944, 151552, num_key_value_heads=8, head_dim=128, n_routed_experts=128,
                                num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=1408,
                                first_k_dense_replace=1, attention_bias=True, rms_norm_eps=1e-5)),
    # Qwen1.5-72B: three matrices in a gated feed-forward, not two (56.2)
    "qwen2": (72.3, _rotary(80, 8192, 64, 24576, 152064, num_key_value_heads=64, rms_norm_eps=1e-6)),
    "deepseek_v3": (671.0, {**DEEPSEEK_LITE, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
                            "num_attention_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536,
                            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
                            "moe_intermediate_size": 2048, "first_k_dense_replace": 3}),
}  # fmt: skip


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_every_family_has_its_published_parameters(model_type: str) -> None:
    published, config = PUBLISHED[model_type]
    model = spec({**config, "model_type": model_type})
    assert num_parameters(model) / 1e9 == pytest.approx(published, rel=0.01)


def test_an_unknown_type_is_told_and_layers_without_attention_are_refused() -> None:
    (told,) = spec({**LLAMA, "model_type": "brand_new"}).assumed
    assert "not known; read as a Llama: activation swiglu, normalization rmsnorm, position_embedding rope" in told
    silent = {key: value for key, value in LLAMA.items() if key not in ("rms_norm_eps", "hidden_act")}
    assert "read as a Llama" in spec({**silent, "model_type": "brand_new"}).assumed[0]  # what its sizes are
    classic = {**silent, "model_type": "brand_new", "hidden_act": "gelu"}
    assert "read as a GPT: activation gelu, normalization layernorm" in spec(classic).assumed[0]
    assert spec(LLAMA).assumed == ()
    with pytest.raises(ValueError, match="layers without attention"):
        sizes_of_config({**LLAMA, "model_type": "jamba"})


def test_one_key_value_head_of_a_multi_query_model_is_read() -> None:
    assert spec({**PUBLISHED["gpt_bigcode"][1], "model_type": "gpt_bigcode"}).num_query_groups == 1
    assert spec(FALCON).num_query_groups == 1


@pytest.mark.parametrize("change", [{"attention": {"replace_with_linear": True}}, {"ffn": 3}, {"ffn": {}}])
def test_unequal_layers_are_averaged_and_other_parts_refused(change: dict[str, Any]) -> None:
    block = {"attention": {"n_heads_in_group": 4, "no_op": False}, "ffn": {"ffn_mult": 2.0, "no_op": False}}
    config = {**LLAMA, "num_key_value_heads": None, "intermediate_size": None}
    equal = spec({**config, "block_configs": [block] * 4})
    assert (equal.num_layers, equal.num_query_groups, equal.ffn_hidden_size) == (4, 8, 5632)
    assert "4 unequal layers" in equal.assumed[0]
    with pytest.raises(ValueError, match="block_configs"):
        sizes_of_config({**config, "block_configs": [block, {**block, **change}]})
