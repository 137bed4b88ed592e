"""A Hugging Face ``config.json`` as one of several files: its sizes with their keys, and next to nothing of a run.

``max_position_embeddings`` is the longest sequence a model was made for and ``torch_dtype`` the format of the weights
on disk; neither is what a training run uses, so neither is taken. Two switches of neuronx-distributed are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.huggingface import sizes_of_config
from dataset_builder.job.importers.huggingface_families import DROPOUT, FAMILIES
from dataset_builder.job.importers.reading import Draft, Reading

NAME, KNOWN_BY = "Hugging Face config.json", "model_type, hidden_size, num_hidden_layers"
_MARKS = (
    "model_type", "architectures", "transformers_version", "torch_dtype", "num_hidden_layers", "n_layer", "n_embd",
    "num_attention_heads", "d_model", "vocab_size", "text_config", "rms_norm_eps", "tie_word_embeddings", "d_kv",
)  # fmt: skip
_KEYS: dict[str, tuple[str, ...]] = {
    "num_layers": ("block_configs", "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_encoder_layers": ("num_layers",),
    "num_decoder_layers": ("num_decoder_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "ffn_hidden_size": ("block_configs", "intermediate_size", "n_inner", "d_ff", "ffn_dim", "mlp_hidden_size",
                        "ffn_hidden_size", "expansion_ratio"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_query_groups": ("block_configs", "num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_head_kv",
                         "multi_query", "attn_config.kv_n_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "activation": ("hidden_act", "hidden_activation", "activation_function", "feed_forward_proj"),
    "tie_embeddings": ("tie_word_embeddings",),
    "bias": ("mlp_bias", "bias", "no_bias"),
    "qkv_bias": ("attention_bias",),
    "window": ("sliding_window",),
    "mtp_layers": ("num_nextn_predict_layers",),
    "attention": ("sliding_window", "layer_types"),
    "full_attention_every": ("layer_types", "sliding_window_pattern"),
    "dropout": DROPOUT,
    "relative_buckets": ("relative_attention_num_buckets",),
    "parallel_block": ("parallel_attn",),
    "head": ("architectures",),
    "num_labels": ("id2label",),
    "num_token_types": ("type_vocab_size",),
    "moe.num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "moe.top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "moe.expert_ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
    "moe.num_shared_experts": ("n_shared_experts", "shared_expert_intermediate_size"),
    "moe.shared_expert_ffn_hidden_size": ("shared_expert_intermediate_size",),
    "moe.dense_layers": ("first_k_dense_replace", "mlp_only_layers", "decoder_sparse_step", "moe_layer_freq"),
}  # fmt: skip
_IRRELEVANT = (
    "*_token_id", "*dropout*", "*pdrop", "initializer_*", "init_*", "*_eps", "*epsilon*", "rope_*", "rotary_*",
    "partial_rotary_factor", "summary_*", "*task_specific*", "*transformers_version", "use_cache", "pretraining_tp",
    "*dtype", "max_window_layers", "use_sliding_window", "norm_topk_prob", "output_*", "router_*", "auto_map*",
    "architectures", "model_type", "_name_or_path", "is_*", "*label*", "gradient_checkpointing", "*aux_loss*",
    "seq_aux", "n_group", "topk_*", "scoring_func", "routed_scaling_factor", "ep_size", "quantization_config*",
    "reorder_and_upcast_attn", "scale_attn*", "classifier_dropout", "position_embedding_type",
    "final_logit_softcapping",
    "attn_logit_softcapping", "query_pre_attn_scalar", "cache_implementation", "decoder_start*", "layer_types",
    "sliding_window*", "vision_config*", "audio_config*", "*image*", "*video*", "*vision*", "mlp_only_layers",
    "name_or_path", "torch_dtype", "max_length",
    "block_configs*", "embd_layer_norm*", "attn_config*", "new_decoder_architecture", "alibi", "bias", "prefix",
    "max_sequence_length", "hidden_activation", "relative_attention_*", "feed_forward_proj",
    "max_position_embeddings", "tie_word_embeddings", "tokenizer_class", "chunk_size_feed_forward", "pad_*",
    "attention_type", "attn_implementation",
)  # fmt: skip


def likeness(file: ConfigFile) -> int:
    keys = file.values
    if not ("model_type" in keys or "architectures" in keys) or "MODEL_ARGS" in keys:
        return 0
    return sum(mark in keys for mark in _MARKS)


def read(file: ConfigFile) -> Reading:
    """The model's sizes; a multimodal config gives those of its text model."""
    draft = Draft(file, NAME)
    prefix, config = "", file.values
    while isinstance(config.get("text_config"), Mapping):
        prefix, config = f"{prefix}text_config.", config["text_config"]
    read_sizes(draft, file.values, prefix)
    if stored := draft.text("torch_dtype", "dtype", f"{prefix}torch_dtype", f"{prefix}dtype"):
        draft.ask("precision.preset", f"{stored[:20]} is the format of the weights on disk")
    _read_neuronx(draft)
    draft.understood(*_IRRELEVANT)
    if prefix:
        draft.understood(*(f"{prefix}{pattern}" for pattern in _IRRELEVANT), "*_config.*")
    return draft.reading()


def _read_neuronx(draft: Draft) -> None:
    """neuronx-distributed keeps two switches of a run beside the sizes; a file of the run itself knows better."""
    if (sequence := draft.flag("sequence_parallel_enabled")) is not None:
        draft.imply("parallel.sequence_parallel", sequence, "sequence_parallel_enabled")
    if draft.flag("selective_checkpoint_enabled"):
        draft.imply("parallel.recompute.mode", "selective", "selective_checkpoint_enabled")


def read_sizes(draft: Draft, config: Mapping[str, Any], prefix: str) -> None:
    """States the sizes of a config that stands in the file under ``prefix``."""
    try:
        sizes = sizes_of_config(config)
    except ValueError as error:
        for line in str(error).splitlines():
            draft.refuse(line.removeprefix("config: "))
        return
    for note in sizes.pop("assumed", ()):
        draft.warn(note.removeprefix("model.config: "))
    model_type = str(config.get("model_type"))[:40]
    is_known = model_type.lower().removesuffix("_text") in FAMILIES
    why = f"what a model of type {model_type} has" if is_known else f"assumed, as type {model_type} is not known"
    for path, value in _flat(sizes):
        keys = [f"{prefix}{key}" for key in _KEYS.get(path, (path.rsplit(".", 1)[-1],))]
        present = [key for key in keys if draft.has(key)]
        if present:
            draft.state(f"model.{path}", value, *(present if path == "moe.dense_layers" else present[:1]))
            draft.raw(*keys)
        else:
            draft.imply(f"model.{path}", value, why)


def _flat(sizes: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in sizes.items():
        if isinstance(value, Mapping):
            flat += _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat.append((f"{prefix}{key}", value))
    return flat
