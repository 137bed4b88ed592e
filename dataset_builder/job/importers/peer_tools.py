"""Model files of two other predictors, SimuMax and llm-analysis: sizes only. What they leave open is asked for."""

from __future__ import annotations

from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.reading import Draft, Reading

NAME, KNOWN_BY = "SimuMax or llm-analysis model JSON", "layer_num, head_num; or n_head, hidden_dim, ffn_embed_dim"
_SIMUMAX = ("layer_num", "head_num", "kv_head_num", "head_size", "use_swiglu", "expert_num", "model_name")
_LLM_ANALYSIS = ("num_layers", "n_head", "hidden_dim", "ffn_embed_dim", "max_seq_len", "name", "vocab_size")


def likeness(file: ConfigFile) -> int:
    counts = [sum(mark in file.values for mark in marks) for marks in (_SIMUMAX, _LLM_ANALYSIS)]
    return max(counts) if max(counts) >= 4 else 0


def read(file: ConfigFile) -> Reading:
    return _read_simumax(file) if "layer_num" in file.values else _read_llm_analysis(file)


def _read_simumax(file: ConfigFile) -> Reading:
    draft = Draft(file, "SimuMax")
    draft.take("model.name", "model_name", as_type=str)
    for path, key in (
        ("num_layers", "layer_num"), ("hidden_size", "hidden_size"), ("num_attention_heads", "head_num"),
        ("num_query_groups", "kv_head_num"), ("head_dim", "head_size"), ("ffn_hidden_size", "intermediate_size"),
        ("vocab_size", "vocab_size"),
    ):  # fmt: skip
        draft.take(f"model.{path}", key)
    if (gated := draft.flag("use_swiglu")) is not None:
        draft.state("model.activation", "swiglu" if gated else "gelu", "use_swiglu")
    else:
        draft.ask("model.activation", "the file has no use_swiglu")
    for path, value in (("normalization", "rmsnorm"), ("position_embedding", "rope"), ("bias", False)):
        draft.default(f"model.{path}", value)
    draft.ask("model.tie_embeddings", "the file does not say whether embedding and head share their weights")
    if (experts := draft.count("expert_num")) and experts > 1:
        draft.state("model.moe.num_experts", experts, "expert_num")
        draft.take("model.moe.top_k", "topk")
        draft.take("model.moe.expert_ffn_hidden_size", "moe_ffn_hidden_size")
        if dense := draft.count("dense_layers"):
            draft.state("model.moe.dense_layers", list(range(min(dense, 10_000))), "dense_layers")
    draft.understood("model_type", "make_vocab_size_divisible_by", "padded_vocab_size", "topk", "moe_*", "all_param")
    return draft.reading()


def _read_llm_analysis(file: ConfigFile) -> Reading:
    draft = Draft(file, "llm-analysis")
    draft.take("model.name", "name", as_type=str)
    for path, key in (
        ("num_layers", "num_layers"), ("hidden_size", "hidden_dim"), ("num_attention_heads", "n_head"),
        ("num_query_groups", "num_key_value_heads"), ("ffn_hidden_size", "ffn_embed_dim"), ("vocab_size", "vocab_size"),
        ("max_position_embeddings", "max_seq_len"),
    ):  # fmt: skip
        draft.take(f"model.{path}", key)
    kind = (draft.text("model_type") or "").lower()
    is_classic = "gpt" in kind or "opt" in kind or "bloom" in kind
    if draft.get("model.num_query_groups") is None:
        heads = draft.get("model.num_attention_heads")
        draft.ask("model.num_query_groups", f"the file has no key-value heads ({heads}: one for each of its heads; 1: "
                  "multi-query)")  # fmt: skip
    if (gated := draft.flag("mlp_gated_linear_units")) is not None:
        draft.state("model.activation", "swiglu" if gated else "gelu", "mlp_gated_linear_units")
    of_type = (
        ("activation", "gelu" if is_classic else "swiglu"), ("normalization", "layernorm" if is_classic else "rmsnorm"),
        ("position_embedding", "learned" if is_classic else "rope"), ("bias", is_classic),
        ("tie_embeddings", is_classic),
    )  # fmt: skip
    for path, value in of_type:
        if kind:
            draft.imply(f"model.{path}", value, f"what a model of type {kind[:40]} has")
        else:
            draft.ask(f"model.{path}", "the file has no model_type")
    if (experts := draft.count("moe_num_experts")) and experts > 1:
        draft.state("model.moe.num_experts", experts, "moe_num_experts")
        draft.take("model.moe.top_k", "moe_top_k")
        draft.default("model.moe.expert_ffn_hidden_size", draft.get("model.ffn_hidden_size"), "ffn_embed_dim")
    draft.understood("model_type", "moe_*", "expansion_ratio", "num_key_value_groups", "mlp_*")
    return draft.reading()
