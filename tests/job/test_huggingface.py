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
