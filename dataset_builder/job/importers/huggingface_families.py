"""What the reference code of each Hugging Face model type builds from its config, as sizes of a :class:`ModelSpec`.

One function a family; :data:`FAMILIES` names the model types of each, :func:`missing_keys` what a config must have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_VOCAB = ("vocab_size",)
_FFN = ("intermediate_size", "mlp_hidden_size", "ffn_dim")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len")
DROPOUT = ("hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "residual_dropout", "dropout_rate", "dropout")
_DECODER_KEYS = (_LAYERS, _HIDDEN, _HEADS, _VOCAB, _FFN)
_SELF_SIZED_KEYS = (_LAYERS, _HIDDEN, _HEADS, _VOCAB)
_GATED = {"silu": "swiglu", "swish": "swiglu", "swiglu": "swiglu"}


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that every family has; ``num_key_value_heads`` null means as many as heads."""
    return {
        "num_layers": first(config, *_LAYERS),
        "hidden_size": first(config, *_HIDDEN),
        "ffn_hidden_size": first(config, *_FFN),
        "num_attention_heads": first(config, *_HEADS),
        "num_query_groups": first(config, "num_key_value_heads", "n_kv_heads"),
        "head_dim": config.get("head_dim"),
        "vocab_size": config.get("vocab_size"),
        "dropout": first(config, *DROPOUT),
    }


def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
    activation = str(first(config, "hidden_act", "hidden_activation", "activation_function") or "silu")
    return {
        **_sizes(config),
        "activation": _GATED.get(activation, "geglu" if "gelu" in activation else "swiglu"),
        "normalization": "rmsnorm",
        "bias": bool(config.get("mlp_bias")),
        "qkv_bias": bool(config.get("attention_bias")),
        "position_embedding": "rope",
        "tie_embeddings": bool(config.get("tie_word_embeddings")),
        **_sliding(config),
        **({"moe": _experts(config)} if first(config, *_NUM_EXPERTS) else {}),
    }


_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _sliding(config: Mapping[str, Any]) -> dict[str, Any]:
    """A window holds unless the config switches it off; a pattern lets every n-th layer see everything."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return {}
    layer_types = config.get("layer_types")
    every = config.get("sliding_window_pattern")
    if isinstance(layer_types, list) and "full_attention" in layer_types:
        every = layer_types.index("full_attention") + 1
        if every == 1 and set(layer_types) == {"full_attention"}:
            return {}
    return {"attention": "sliding", "window": window, "full_attention_every": every}


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = int(first(config, *_LAYERS))
    step = int(first(config, "decoder_sparse_step", "moe_layer_freq") or 1)
    first_dense = int(config.get("first_k_dense_replace") or 0)
    listed = set(config.get("mlp_only_layers") or ())
    dense = [
        layer
        for layer in range(min(layers, 10_000))
        if layer in listed or layer < first_dense or (step > 1 and _is_between_experts(config, layer, step))
    ]
    width = first(config, "moe_intermediate_size", "intermediate_size")
    shared = config.get("n_shared_experts") or (1 if config.get("shared_expert_intermediate_size") else 0)
    return {
        "num_experts": first(config, *_NUM_EXPERTS),
        "top_k": first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk"),
        "expert_ffn_hidden_size": width,
        "num_shared_experts": shared,
        "shared_expert_ffn_hidden_size": config.get("shared_expert_intermediate_size") or None,
        "dense_layers": dense,
    }


def _is_between_experts(config: Mapping[str, Any], layer: int, step: int) -> bool:
    """Qwen counts layers from one (``decoder_sparse_step``), DeepSeek from zero (``moe_layer_freq``)."""
    return bool((layer + 1) % step if config.get("decoder_sparse_step") else layer % step)


def _qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    window_off = config.get("use_sliding_window") is not True
    return {**_llama({**config, "sliding_window": None} if window_off else config), "qkv_bias": True}


def _qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    window_off = config.get("use_sliding_window") is not True
    return {**_llama({**config, "sliding_window": None} if window_off else config), "qk_norm": True}


def _deepseek(config: Mapping[str, Any]) -> dict[str, Any]:
    mla = {
        key: config.get(key)
        for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    }
    head_dim = int(mla["qk_nope_head_dim"] or 0) + int(mla["qk_rope_head_dim"] or 0)
    return {**_llama(config), "num_query_groups": None, "head_dim": head_dim or None, "mla": mla}


def _gemma(config: Mapping[str, Any]) -> dict[str, Any]:
    tied = config.get("tie_word_embeddings")
    model_type = str(config.get("model_type"))
    newer = model_type.startswith(("gemma2", "gemma3"))
    pattern = 6 if model_type.startswith("gemma3") else 2
    sizes = _llama({"sliding_window_pattern": pattern, **config} if newer else config)
    return {
        **sizes,
        "activation": "geglu",
        "tie_embeddings": True if tied is None else bool(tied),
        "post_norm": newer,
        "qk_norm": model_type.startswith("gemma3"),
    }


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    tied = config.get("tie_word_embeddings")
    return {
        **_sizes(config),
        "ffn_hidden_size": config.get("n_inner"),
        "max_position_embeddings": first(config, *_POSITIONS),
        "activation": "relu" if config.get("activation_function") == "relu" else "gelu",
        "tie_embeddings": True if tied is None else bool(tied),
    }


def _multi_query(config: Mapping[str, Any]) -> dict[str, Any]:
    """GPT-BigCode (SantaCoder, StarCoder): a GPT-2 with one key-value head, unless that is switched off."""
    return {**_gpt2(config), "num_query_groups": 1 if config.get("multi_query", True) else None}


def _neox(config: Mapping[str, Any]) -> dict[str, Any]:
    """GPT-NeoX, Pythia, Phi, GPT-J: rotary positions, and attention beside the feed-forward unless switched off."""
    return {
        **_sizes(config),
        "ffn_hidden_size": first(config, *_FFN, "n_inner"),
        "position_embedding": "rope",
        "activation": "relu" if first(config, "hidden_act", "activation_function") == "relu" else "gelu",
        "parallel_block": config.get("use_parallel_residual", True) is not False,
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _starcoder2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_neox(config), "parallel_block": False, "bias": config.get("use_bias", True) is not False,
        "tie_embeddings": config.get("tie_word_embeddings", True) is not False, **_sliding(config),
    }  # fmt: skip


def _bloom(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden = first(config, *_HIDDEN, "n_embed")
    return {**_sizes(config), "hidden_size": hidden, "ffn_hidden_size": None, "position_embedding": "alibi"}


def _opt(config: Mapping[str, Any]) -> dict[str, Any]:
    tied = config.get("tie_word_embeddings", True) is not False
    return {
        **_gpt2(config), "ffn_hidden_size": config.get("ffn_dim"), "tie_embeddings": tied,
        "activation": "relu" if config.get("activation_function", "relu") == "relu" else "gelu",
    }  # fmt: skip


def _bart(config: Mapping[str, Any]) -> dict[str, Any]:
    """An encoder-decoder with layer norms, biases and learned positions."""
    return {
        "architecture": "encoder_decoder",
        "num_encoder_layers": config.get("encoder_layers"),
        "num_decoder_layers": config.get("decoder_layers"),
        "hidden_size": config.get("d_model"),
        "ffn_hidden_size": config.get("encoder_ffn_dim"),
        "num_attention_heads": config.get("encoder_attention_heads"),
        "vocab_size": config.get("vocab_size"),
        "max_position_embeddings": first(config, *_POSITIONS),
        "dropout": config.get("dropout"),
    }


def _cohere(config: Mapping[str, Any]) -> dict[str, Any]:
    tied = config.get("tie_word_embeddings", True) is not False
    qk_norm = bool(config.get("use_qk_norm"))
    return {
        **_llama(config), "normalization": "layernorm", "parallel_block": True, "tie_embeddings": tied,
        "qk_norm": qk_norm,
    }  # fmt: skip


def _olmoe(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama(config), "qk_norm": True, "qk_norm_over": "projection"}


def _gpt_oss(config: Mapping[str, Any]) -> dict[str, Any]:
    """Biased projections, every other layer with a window; its experts are clipped SwiGLUs of ``intermediate_size``."""
    return {**_llama({"sliding_window_pattern": 2, **config}), "bias": True, "qkv_bias": True}


def _glm_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama(config), "qk_norm": bool(config.get("use_qk_norm"))}


def _llama4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every ``interleave_moe_layer_step``-th layer has experts of ``intermediate_size`` beside one shared expert."""
    layers, step = int(first(config, *_LAYERS)), int(config.get("interleave_moe_layer_step") or 1)
    sizes = _llama(config)
    width = config.get("intermediate_size")
    if "moe" in sizes:
        dense = [layer for layer in range(min(layers, 10_000)) if (layer + 1) % step]
        sizes["moe"] |= {"num_shared_experts": 1, "dense_layers": dense, "expert_ffn_hidden_size": width}
    return {**sizes, "ffn_hidden_size": config.get("intermediate_size_mlp") or width,
            "qk_norm": bool(config.get("use_qk_norm"))}  # fmt: skip


def _dbrx(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of attention and experts stand in ``attn_config`` and ``ffn_config``."""
    attention, experts = config.get("attn_config") or {}, config.get("ffn_config") or {}
    width = experts.get("ffn_hidden_size")
    moe = {"num_experts": experts.get("moe_num_experts"), "top_k": experts.get("moe_top_k"),
           "expert_ffn_hidden_size": width}  # fmt: skip
    return {
        **_sizes(config), "num_query_groups": attention.get("kv_n_heads"), "ffn_hidden_size": width,
        "activation": "swiglu", "normalization": "layernorm", "bias": False, "position_embedding": "rope",
        "tie_embeddings": False, "moe": moe,
    }  # fmt: skip


def _classic(config: Mapping[str, Any]) -> dict[str, Any]:
    """A decoder of unknown type without RMS norms: layer norms, biases and no gate, unless its activation is one."""
    if str(first(config, "hidden_act", "activation_function") or "silu") in _GATED:
        return _llama(config)
    rotary = first(config, "rope_theta", "rotary_emb_base", "rotary_pct", "rotary_dim", "rope_parameters") is not None
    return {
        **_sizes(config),
        "max_position_embeddings": first(config, *_POSITIONS),
        "position_embedding": "rope" if rotary else "learned",
        "activation": "relu" if config.get("hidden_act") == "relu" else "gelu",
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _bert(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_sizes(config),
        "architecture": "encoder",
        "max_position_embeddings": first(config, *_POSITIONS),
        "num_token_types": config.get("type_vocab_size", 2),
        **_bert_head(config),
    }


def _bert_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """The head of the class a config was saved by; masked-language modelling where none is named."""
    names = " ".join(config.get("architectures") or ())
    if "QuestionAnswering" in names:
        return {"head": "classification"}  # start and end of the answer
    if "Classification" in names:
        return {"head": "classification", "num_labels": len(config.get("id2label") or {}) or 2}
    return {"head": "mlm"}


def _t5(config: Mapping[str, Any]) -> dict[str, Any]:
    gated = str(config.get("feed_forward_proj") or "relu").startswith("gated")
    tied = config.get("tie_word_embeddings")
    return {
        "architecture": "encoder_decoder",
        "num_encoder_layers": config.get("num_layers"),
        "num_decoder_layers": first(config, "num_decoder_layers", "num_layers"),
        "hidden_size": config.get("d_model"),
        "ffn_hidden_size": config.get("d_ff"),
        "num_attention_heads": config.get("num_heads"),
        "head_dim": config.get("d_kv"),
        "vocab_size": config.get("vocab_size"),
        "activation": "geglu" if gated else "relu",
        "normalization": "rmsnorm",
        "bias": False,
        "position_embedding": "relative",
        "relative_buckets": config.get("relative_attention_num_buckets"),
        "tie_embeddings": True if tied is None else bool(tied),
        "dropout": config.get("dropout_rate"),
    }


def _falcon(config: Mapping[str, Any]) -> dict[str, Any]:
    grouped = first(config, "num_kv_heads", "n_head_kv")
    groups = 1 if config.get("multi_query", True) else None
    return {
        **_sizes(config),
        "num_query_groups": grouped if config.get("new_decoder_architecture") else groups,
        "ffn_hidden_size": first(config, "ffn_hidden_size"),
        "bias": bool(config.get("bias")),
        "norm_bias": True,
        "position_embedding": "alibi" if config.get("alibi") else "rope",
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
        "parallel_block": bool(config.get("parallel_attn", True)),
    }


def _mpt(config: Mapping[str, Any]) -> dict[str, Any]:
    attention = config.get("attn_config") or {}
    hidden, ratio = config.get("d_model"), config.get("expansion_ratio") or 4
    return {
        **_sizes(config),
        "ffn_hidden_size": int(hidden * ratio) if isinstance(hidden, int) else None,
        "num_query_groups": attention.get("kv_n_heads"),
        "max_position_embeddings": config.get("max_seq_len"),
        "bias": not config.get("no_bias", True),
        "position_embedding": "alibi" if attention.get("alibi") else "learned",
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _olmo(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama(config), "normalization": "layernorm", "norm_affine": False}


def _olmo2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama(config), "qk_norm": True, "qk_norm_over": "projection"}


Family = Callable[[Mapping[str, Any]], dict[str, Any]]
FAMILIES: dict[str, Family] = {
    "llama": _llama, "mistral": _llama, "mixtral": _llama, "phi3": _llama, "granite": _llama, "granitemoe": _llama,
    "nemotron-nas": _llama, "ministral": _llama, "mistral3": _llama, "internlm2": _llama, "yi": _llama,
    "gpt2": _gpt2, "gpt_bigcode": _multi_query, "gpt_neox": _neox, "gptj": _neox, "phi": _neox,
    "starcoder2": _starcoder2, "bloom": _bloom, "opt": _opt, "bert": _bert, "roberta": _bert, "t5": _t5, "mt5": _t5,
    "bart": _bart, "falcon": _falcon, "mpt": _mpt, "dbrx": _dbrx, "cohere": _cohere, "cohere2": _cohere, "olmo": _olmo,
    "olmo2": _olmo2, "olmo3": _olmo2, "olmoe": _olmoe, "qwen2": _qwen2, "qwen2_moe": _qwen2, "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2, "qwen3": _qwen3, "qwen3_moe": _qwen3, "qwen3_vl": _qwen3, "qwen3_vl_moe": _qwen3,
    "gemma": _gemma, "gemma2": _gemma, "gemma3": _gemma, "deepseek_v2": _deepseek, "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek, "glm4_moe": _glm_moe, "gpt_oss": _gpt_oss, "llama4": _llama4,
}  # fmt: skip
# Layers that are no attention: there is nothing to take them for.
REFUSED = ("mamba", "mamba2", "falcon_mamba", "jamba", "zamba", "zamba2", "rwkv", "recurrent_gemma", "qwen3_next",
           "nemotron_h", "bamba", "falcon_h1", "granitemoehybrid", "lfm2")  # fmt: skip
_MLA_KEYS = (("kv_lora_rank",), ("qk_nope_head_dim",), ("qk_rope_head_dim",), ("v_head_dim",))
_WANTED: dict[Family, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys((_gpt2, _multi_query, _falcon, _mpt, _dbrx), _SELF_SIZED_KEYS),
    _neox: (_LAYERS, _HIDDEN, _HEADS, _VOCAB),
    _bloom: (_LAYERS, (*_HIDDEN, "n_embed"), _HEADS, _VOCAB),
    _deepseek: (*_DECODER_KEYS, *_MLA_KEYS),
    _t5: (("num_layers",), ("d_model",), ("d_ff",), ("num_heads",), ("d_kv",), _VOCAB),
    _bart: (("encoder_layers",), ("decoder_layers",), ("d_model",), ("encoder_ffn_dim",), ("encoder_attention_heads",),
            _VOCAB),
}  # fmt: skip


def family_of(model_type: str, config: Mapping[str, Any]) -> Family:
    """The family of a model type; an unknown one is read as a Llama, or as a GPT when it has no RMS norms."""
    return FAMILIES.get(model_type, _llama if "rms_norm_eps" in config else _classic)


def missing_keys(family: Family, config: Mapping[str, Any]) -> list[str]:
    """The keys without which a config of this family has no sizes, by the first of their spellings."""
    return [names[0] for names in _WANTED.get(family, _DECODER_KEYS) if first(config, *names) is None]
