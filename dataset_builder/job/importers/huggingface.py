"""Reads a Hugging Face ``config.json`` into the sizes of a :class:`ModelSpec`.

Known model types are mapped by what their reference code builds; an unknown type with the usual keys is read as a
Llama, or as a GPT when it has no RMS norms. Sizes only: ``max_position_embeddings`` is not the training sequence, and
a vision tower is left out.
Raises ValueError naming what is missing, which the job's validation places under ``model.config``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 2**20


def read_config(path: Any, folder: Path) -> dict[str, Any]:
    """Sizes from a file; a relative ``path`` starts from ``folder``, the job file's."""
    if not isinstance(path, str | Path):
        raise ValueError(f"config: got {path!r}; expected the path of a Hugging Face config.json")
    file = folder / Path(path).expanduser()
    try:
        if not file.is_file():
            raise ValueError(f"config: {file} is no file; expected a Hugging Face config.json")
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"config: cannot read {file}: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise ValueError(f"config: {file} has more than {MAX_BYTES} bytes; expected a Hugging Face config.json")
    try:
        config = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config: {file} is not JSON ({str(error)[:80]}); expected a config.json") from None
    if not isinstance(config, dict):
        raise ValueError(f"config: {file} holds no JSON object; expected a Hugging Face config.json")
    return sizes_of_config(config)


def sizes_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes in a parsed config; a multimodal one is read from its ``text_config``."""
    outer = config
    while isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if config is not outer and "tie_word_embeddings" not in config:
        config = {**config, "tie_word_embeddings": outer.get("tie_word_embeddings")}
    model_type = str(config.get("model_type") or "").lower()
    notes: tuple[str, ...] = ()
    if config.get("block_configs"):
        config, notes = _equal_blocks(config, model_type)
    family = _FAMILIES.get(model_type.removesuffix("_text"), _llama if "rms_norm_eps" in config else _classic)
    wanted = _WANTED.get(family, _DECODER_KEYS)
    missing = [names[0] for names in wanted if _first(config, *names) is None]
    if missing:
        raise ValueError(
            "\n".join(f"config: {name} is missing in a config of type {model_type or 'unknown'}" for name in missing)
        )
    try:
        sizes = {key: value for key, value in family(config).items() if value is not None}
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"config: a size of this {model_type or 'unknown'} model is no number ({error})") from None
    if "text_config" in outer:
        notes = (*notes, f"model.config: the text model of {outer.get('model_type')} only, towers are left out")
    if notes:
        sizes["assumed"] = notes
    name = outer.get("_name_or_path") or model_type
    return {"name": str(name), **sizes} if name else sizes


def _equal_blocks(config: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A model whose layers differ (``block_configs``) as one of equal layers with the same work and parameters.

    Layers without attention give their feed-forward to the others; widths follow DeciLM: ``2/3 ffn_mult h``, rounded up
    to 256. ValueError where a block has other parts, or attentions differ.
    """
    blocks, hidden, heads = config["block_configs"], config.get("hidden_size"), config.get("num_attention_heads")
    refusal = (
        f"config: {model_type or 'model'} gives every layer sizes of its own (block_configs) with parts that are not "
        "modelled; expected attention and feed-forward, or none, in each"
    )
    try:
        attentions = [block["attention"] for block in blocks]
        kept = [each for each in attentions if not each.get("no_op")]
        widths = [
            0
            if ffn.get("no_op")
            else ffn.get("intermediate_size") or -(-int(2 * ffn["ffn_mult"] * hidden / 3) // 256) * 256
            for ffn in (block["ffn"] for block in blocks)
        ]
        groups = {each.get("num_key_value_heads") or heads // each["n_heads_in_group"] for each in kept}
        odd = any(part.get("replace_with_linear") for block in blocks for part in (block["attention"], block["ffn"]))
        if odd or len(groups) != 1 or not kept:
            raise ValueError(refusal)
        width = round(sum(widths) / len(kept) / 256) * 256
    except (AttributeError, KeyError, TypeError, ZeroDivisionError, OverflowError):
        raise ValueError(refusal) from None
    note = (
        f"model.config: {len(blocks)} unequal layers, {len(kept)} of them with attention, are taken as {len(kept)} "
        f"equal ones with the mean feed-forward of {width}: the same parameters and work"
    )
    equal = {"num_hidden_layers": len(kept), "intermediate_size": width, "num_key_value_heads": groups.pop()}
    return {**config, **equal}, (note,)


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_VOCAB = ("vocab_size",)
_FFN = ("intermediate_size", "mlp_hidden_size", "ffn_dim")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len")
_DECODER_KEYS = (_LAYERS, _HIDDEN, _HEADS, _VOCAB, _FFN)
_SELF_SIZED_KEYS = (_LAYERS, _HIDDEN, _HEADS, _VOCAB)
_GATED = {"silu": "swiglu", "swish": "swiglu", "swiglu": "swiglu"}


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that every family has; ``num_key_value_heads`` null means as many as heads."""
    return {
        "num_layers": _first(config, *_LAYERS),
        "hidden_size": _first(config, *_HIDDEN),
        "ffn_hidden_size": _first(config, *_FFN),
        "num_attention_heads": _first(config, *_HEADS),
        "num_query_groups": _first(config, "num_key_value_heads", "n_kv_heads"),
        "head_dim": config.get("head_dim"),
        "vocab_size": config.get("vocab_size"),
    }


def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
    activation = str(_first(config, "hidden_act", "hidden_activation", "activation_function") or "silu")
    return {
        **_sizes(config),
        "activation": _GATED.get(activation, "geglu" if "gelu" in activation else "swiglu"),
        "normalization": "rmsnorm",
        "bias": bool(config.get("mlp_bias")),
        "qkv_bias": bool(config.get("attention_bias")),
        "position_embedding": "rope",
        "tie_embeddings": bool(config.get("tie_word_embeddings")),
        **_sliding(config),
        **({"moe": _experts(config)} if _first(config, *_NUM_EXPERTS) else {}),
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
    layers = int(_first(config, *_LAYERS))
    step = int(_first(config, "decoder_sparse_step", "moe_layer_freq") or 1)
    first_dense = int(config.get("first_k_dense_replace") or 0)
    listed = set(config.get("mlp_only_layers") or ())
    dense = [
        layer
        for layer in range(min(layers, 10_000))
        if layer in listed or layer < first_dense or (step > 1 and _is_between_experts(config, layer, step))
    ]
    width = _first(config, "moe_intermediate_size", "intermediate_size")
    shared = config.get("n_shared_experts") or (1 if config.get("shared_expert_intermediate_size") else 0)
    return {
        "num_experts": _first(config, *_NUM_EXPERTS),
        "top_k": _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk"),
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
        "max_position_embeddings": _first(config, *_POSITIONS),
        "activation": "relu" if config.get("activation_function") == "relu" else "gelu",
        "tie_embeddings": True if tied is None else bool(tied),
    }


def _classic(config: Mapping[str, Any]) -> dict[str, Any]:
    """A decoder of unknown type without RMS norms: layer norms, biases and no gate, unless its activation is one."""
    if str(_first(config, "hidden_act", "activation_function") or "silu") in _GATED:
        return _llama(config)
    rotary = _first(config, "rope_theta", "rotary_emb_base", "rotary_pct", "rotary_dim", "rope_parameters") is not None
    return {
        **_sizes(config),
        "max_position_embeddings": _first(config, *_POSITIONS),
        "position_embedding": "rope" if rotary else "learned",
        "activation": "relu" if config.get("hidden_act") == "relu" else "gelu",
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _bert(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_sizes(config),
        "architecture": "encoder",
        "max_position_embeddings": _first(config, *_POSITIONS),
        "num_token_types": config.get("type_vocab_size", 2),
        "dropout": config.get("hidden_dropout_prob"),
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
        "num_decoder_layers": _first(config, "num_decoder_layers", "num_layers"),
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
    grouped = _first(config, "num_kv_heads", "n_head_kv")
    groups = 1 if config.get("multi_query", True) else None
    return {
        **_sizes(config),
        "num_query_groups": grouped if config.get("new_decoder_architecture") else groups,
        "ffn_hidden_size": _first(config, "ffn_hidden_size"),
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


_Family = Callable[[Mapping[str, Any]], dict[str, Any]]
_FAMILIES: dict[str, _Family] = {
    "llama": _llama, "mistral": _llama, "mixtral": _llama, "gpt2": _gpt2, "bert": _bert, "roberta": _bert, "t5": _t5,
    "mt5": _t5, "falcon": _falcon, "mpt": _mpt, "olmo": _olmo, "olmo2": _olmo2, "olmo3": _olmo2, "qwen2": _qwen2,
    "qwen2_moe": _qwen2, "qwen3": _qwen3, "qwen3_moe": _qwen3, "qwen3_vl": _qwen3, "gemma": _gemma, "gemma2": _gemma,
    "gemma3": _gemma, "deepseek_v2": _deepseek, "deepseek_v3": _deepseek,
}  # fmt: skip
_MLA_KEYS = (("kv_lora_rank",), ("qk_nope_head_dim",), ("qk_rope_head_dim",), ("v_head_dim",))
_WANTED: dict[_Family, tuple[tuple[str, ...], ...]] = {
    _gpt2: _SELF_SIZED_KEYS, _falcon: _SELF_SIZED_KEYS, _mpt: _SELF_SIZED_KEYS,
    _deepseek: (*_DECODER_KEYS, *_MLA_KEYS),
    _t5: (("num_layers",), ("d_model",), ("d_ff",), ("num_heads",), ("d_kv",), _VOCAB),
}  # fmt: skip
