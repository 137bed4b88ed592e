"""The model that Megatron's arguments describe; names with underscores (``num_layers``), whoever spells them.

``complete``: the arguments are all there are, so that what is absent is Megatron's default. Arguments that only
change a recipe or another file are not complete, and what is absent is asked for.
"""

from __future__ import annotations

import re
from typing import Any

from dataset_builder.job.importers.model_names import vocabulary_of
from dataset_builder.job.importers.reading import Draft, as_count, as_number, as_text

_GPT2_VOCABULARY = 50257  # the byte-pair encoding of GPT-2, which a vocab.json and a merges.txt mean
_BERT_VOCABULARIES = {"bertwordpiecelowercase": 30522, "bertwordpiececase": 28996}
_WITH_EXTRA_IDS = (*_BERT_VOCABULARIES, "sentencepiecetokenizer")  # tokenizers that heed vocab_extra_ids
_WORD_PIECE_PROGRAMS = ("encoder", "encoder_decoder")  # architectures whose training programs default to word pieces
_MAX_LAYERS = 10_000


def read_model(draft: Draft, complete: bool) -> None:
    """States ``model.*``."""
    layers = draft.take("model.num_layers", "num_layers")
    if draft.take("model.num_encoder_layers", "encoder_num_layers") is not None:
        draft.state("model.architecture", "encoder_decoder", "encoder_num_layers")
        decoder = draft.take("model.num_decoder_layers", "decoder_num_layers")
        if decoder is not None:
            draft.state("model.num_layers", decoder, "decoder_num_layers")
    hidden = draft.take("model.hidden_size", "hidden_size")
    heads = draft.take("model.num_attention_heads", "num_attention_heads")
    # An engine-only file says nothing of the model, not even by default; one that leaves its sizes open does.
    has_model = draft.has("num_layers", "hidden_size", "encoder_num_layers")
    complete = complete and has_model
    _read_shape(draft, complete)
    _read_feed_forward(draft, hidden, complete)
    _read_groups(draft, heads, complete)
    _read_mla(draft)
    _read_experts(draft, layers)
    _read_window(draft)
    if has_model:
        _read_vocabulary(draft, complete)
    draft.take("model.mtp_layers", "mtp_num_layers")


def _read_shape(draft: Draft, complete: bool) -> None:
    draft.take("model.head_dim", "kv_channels")
    draft.take("model.max_position_embeddings", "max_position_embeddings")
    _read_normalization(draft, complete)
    _read_position(draft, complete)
    untied = draft.flag("untie_embeddings_and_output_weights", asks="model.tie_embeddings")
    shared = draft.flag("share_embeddings_and_output_weights", asks="model.tie_embeddings")
    if untied is not None or shared is not None:
        tied = not untied if untied is not None else bool(shared)
        keys = ("untie_embeddings_and_output_weights", "share_embeddings_and_output_weights")
        draft.state("model.tie_embeddings", tied, *keys)
    without = draft.flag("disable_bias_linear", asks="model.bias")
    added = draft.flag("add_bias_linear", "bias", asks="model.bias")
    if without is not None or added is not None:
        bias = not without if without is not None else bool(added)
        draft.state("model.bias", bias, "disable_bias_linear", "add_bias_linear", "bias")
    for path, default in (("model.tie_embeddings", True), ("model.bias", True)):
        _default_or_ask(draft, path, default, complete)
    if (qkv := draft.flag("add_qkv_bias", "qkv_bias")) is not None:
        draft.state("model.qkv_bias", qkv or bool(draft.get("model.bias")), "add_qkv_bias", "qkv_bias")
    if draft.flag("qk_layernorm") and not draft.flag("multi_latent_attention"):
        draft.state("model.qk_norm", True, "qk_layernorm")  # latent attention has its own norms
    dropout = draft.value(as_number, "hidden_dropout")
    if dropout is not None:
        draft.state("model.dropout", dropout, "hidden_dropout")
    elif complete:
        draft.default("model.dropout", 0.1)


def _default_or_ask(draft: Draft, path: str, default: Any, complete: bool, why: str = "") -> None:
    if draft.get(path) is not None:
        return
    if complete:
        draft.default(path, default, why)
    elif draft.has("num_layers", "hidden_size"):
        draft.ask(path, "it stands in the file or recipe that this one changes")


def _read_normalization(draft: Draft, complete: bool) -> None:
    word = draft.text("normalization", asks="model.normalization")
    if word is not None:
        name = "rmsnorm" if "rms" in word.lower() else "layernorm"
        draft.state("model.normalization", name, "normalization")
    _default_or_ask(draft, "model.normalization", "layernorm", complete)


def _read_position(draft: Draft, complete: bool) -> None:
    word = draft.text("position_embedding_type", asks="model.position_embedding")
    if draft.flag("use_rotary_position_embeddings", asks="model.position_embedding"):
        draft.state("model.position_embedding", "rope", "use_rotary_position_embeddings")
    elif word is not None:
        names = {"learned_absolute": "learned", "rope": "rope", "mrope": "rope", "yarn": "rope", "none": "none",
                 "relative": "relative", "alibi": "alibi", "learned": "learned"}  # fmt: skip
        name = names.get(word.lower())
        if name is None:
            draft.refuse(f"{draft.key_of('position_embedding_type')}: got {word!r}; expected one of {', '.join(names)}")
        else:
            draft.state("model.position_embedding", name, "position_embedding_type")
    _default_or_ask(draft, "model.position_embedding", "learned", complete)


def _read_feed_forward(draft: Draft, hidden: int | None, complete: bool) -> None:
    _read_activation(draft, complete)
    width = draft.take("model.ffn_hidden_size", "ffn_hidden_size")
    if width is None and hidden:
        is_gated = draft.get("model.activation") == "swiglu"
        default, why = (
            (int(4 * hidden * 2 / 3 / 64) * 64, "8/3 hidden, in steps of 64")
            if is_gated
            else (4 * hidden, "4 x hidden")
        )
        _default_or_ask(draft, "model.ffn_hidden_size", default, complete, why)


def _read_activation(draft: Draft, complete: bool) -> None:
    for key, name in (("swiglu", "swiglu"), ("squared_relu", "squared_relu"), ("quick_geglu", "geglu"),
                      ("geglu", "geglu")):  # fmt: skip
        if draft.flag(key, asks="model.activation"):
            draft.state("model.activation", name, key)
    function = draft.raw("activation", "activation_func")
    if isinstance(function, dict):
        function = function.get("_target_")
    word = str(function or "").lower().rsplit(".", 1)[-1]
    gated = bool(draft.flag("gated_linear_unit"))
    if word:
        if "silu" in word or "swiglu" in word:
            name = "swiglu"
        elif "geglu" in word or ("gelu" in word and gated):
            name = "geglu"
        else:
            name = "squared_relu" if "squared" in word else "relu" if "relu" in word else "gelu"
        draft.state("model.activation", name, "activation", "activation_func", "gated_linear_unit")
    _default_or_ask(draft, "model.activation", "gelu", complete)


def _read_groups(draft: Draft, heads: int | None, complete: bool) -> None:
    """Groups only count with ``--group-query-attention``; alone, every head has its keys.

    Megatron-DeepSpeed's ``--num-key-value-heads`` needs no switch, and gives way to the groups where that is on.
    """
    groups = draft.count("num_query_groups", asks="model.num_query_groups")
    grouped = draft.flag("group_query_attention", asks="model.num_query_groups")
    is_flag = draft.key_of("num_query_groups").startswith("--")  # a configuration has no switch beside the number
    if groups is not None and (grouped or (grouped is None and not is_flag)):
        draft.state("model.num_query_groups", groups, "num_query_groups")
    elif groups is not None and not draft.has("group_query_attention"):
        draft.warn(f"{draft.key_of('num_query_groups')} {groups} has no effect without --group-query-attention")
    elif grouped and groups is None:
        draft.default("model.num_query_groups", 1, "group query attention without a number")
    if grouped:
        draft.understood("num_key_value_heads")
    else:
        draft.take("model.num_query_groups", "num_key_value_heads")
    if heads:
        _default_or_ask(draft, "model.num_query_groups", heads, complete, "no grouped queries")


def _read_mla(draft: Draft) -> None:
    if not draft.flag("multi_latent_attention"):
        draft.understood("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        return
    draft.state("model.num_query_groups", draft.get("model.num_attention_heads"), "multi_latent_attention")
    draft.take("model.mla.q_lora_rank", "q_lora_rank")
    for path, key, default in (("kv_lora_rank", "kv_lora_rank", 32), ("qk_nope_head_dim", "qk_head_dim", 128),
                               ("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
                               ("v_head_dim", "v_head_dim", 128)):  # fmt: skip
        if draft.take(f"model.mla.{path}", key) is None:
            draft.default(f"model.mla.{path}", default)
    nope, rope = draft.get("model.mla.qk_nope_head_dim"), draft.get("model.mla.qk_rope_head_dim")
    draft.state("model.head_dim", nope + rope, "qk_head_dim", "qk_pos_emb_head_dim")


def _read_experts(draft: Draft, layers: int | None) -> None:
    experts = draft.count("num_experts", "num_moe_experts", asks="model.moe.num_experts")
    if not experts:
        draft.understood("moe_*")
        return
    draft.state("model.moe.num_experts", experts, "num_experts", "num_moe_experts")
    if draft.take("model.moe.top_k", "moe_router_topk") is None:
        draft.default("model.moe.top_k", 2)
    if draft.take("model.moe.expert_ffn_hidden_size", "moe_ffn_hidden_size") is None:
        draft.default("model.moe.expert_ffn_hidden_size", draft.get("model.ffn_hidden_size"), "the dense width")
    shared = draft.count("moe_shared_expert_intermediate_size")
    if shared:
        draft.state("model.moe.num_shared_experts", 1, "moe_shared_expert_intermediate_size")
        draft.state("model.moe.shared_expert_ffn_hidden_size", shared, "moe_shared_expert_intermediate_size")
    capacity = draft.value(as_number, "moe_expert_capacity_factor")
    if capacity is not None and capacity > 0:
        draft.state("model.moe.capacity_factor", capacity, "moe_expert_capacity_factor")
    frequency = draft.raw("moe_layer_freq")
    if frequency is not None and layers:
        try:
            pattern = layer_pattern(frequency, layers)
        except ValueError as error:
            draft.refuse(f"{draft.key_of('moe_layer_freq')}: {error}")
            return
        draft.state("model.moe.dense_layers", [i for i, is_moe in enumerate(pattern) if not is_moe], "moe_layer_freq")
    draft.understood("moe_router_*", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_grouped_gemm",
                     "moe_token_dispatcher_type", "moe_permute_fusion", "moe_use_legacy_grouped_gemm",
                     "moe_pad_expert_input_to_capacity", "moe_token_drop_policy", "moe_per_layer_logging",
                     "moe_enable_deepep", "moe_flex_*", "moe_deepep_*", "moe_hybridep_*", "moe_input_jitter_eps",
                     "moe_shared_expert_overlap", "moe_token_dropping", "moe_extended_tp",
                     "moe_upcycling*")  # fmt: skip


def layer_pattern(frequency: Any, layers: int) -> list[bool]:
    """Which layers are mixtures: every n-th (the first included), or a pattern such as ``([0]*1+[1]*15)``.

    Raises ValueError when the text is no pattern or has another number of layers.
    """
    if layers > _MAX_LAYERS:
        raise ValueError(f"got {layers} layers; expected at most {_MAX_LAYERS}")
    if isinstance(frequency, list):
        pattern = [bool(as_count(each)) for each in frequency]
    elif re.fullmatch(r"\s*\d+\s*", str(frequency)):
        step = max(1, int(frequency))
        return [layer % step == 0 for layer in range(layers)]
    else:
        pattern = []
        text = re.sub(r"\s", "", str(frequency)).strip("()")
        for term in text.split("+"):
            match = re.fullmatch(r"\(?\[([01](?:,[01])*)\]\)?(?:\*(\d{1,5}))?", term)
            if match is None:
                raise ValueError(f"got {str(frequency)[:80]!r}; expected a number or a pattern such as ([0]*1+[1]*15)")
            pattern += [each == "1" for each in match[1].split(",")] * min(int(match[2] or 1), _MAX_LAYERS)
            if len(pattern) > _MAX_LAYERS:
                break
    if len(pattern) != layers:
        raise ValueError(f"the pattern has {len(pattern)} layers, the model {layers}; expected the same number")
    return pattern


def _read_window(draft: Draft) -> None:
    window = draft.raw("window_size")
    if window is None:
        return
    words = window if isinstance(window, list) else re.split(r"[\s,]+", str(window).strip("()[] "))
    try:
        width = as_count(words[0]) if words else -1
    except (ValueError, TypeError):
        draft.refuse(f"{draft.key_of('window_size')}: got {str(window)[:40]!r}; expected two numbers, e.g. 128,0")
        return
    if width > 0:
        draft.state("model.attention", "sliding", "window_size")
        draft.state("model.window", width + 1, "window_size", note="to the left, and the token itself")
        every = draft.count("window_attn_skip_freq")
        if every:
            draft.state("model.full_attention_every", every, "window_attn_skip_freq")


def _read_vocabulary(draft: Draft, complete: bool) -> None:
    """The tokens of the tokenizer; Megatron pads them to a multiple of ``make_vocab_size_divisible_by`` x tensor."""
    padded, stated = (
        draft.count("padded_vocab_size", "pad_vocab_size_to"),
        draft.count("vocab_size", asks="model.vocab_size"),
    )
    kind = (draft.value(as_text, "tokenizer_type") or "").lower()
    model = draft.value(as_text, "tokenizer_model", "hf_model_id")
    draft.raw("vocab_file", "merge_file")
    extra = draft.count("vocab_extra_ids", asks="model.vocab_size") or 0
    pads = draft.flag("should_pad_vocab")
    step = draft.count("make_vocab_size_divisible_by")
    if padded:
        draft.state("model.vocab_size", padded, "padded_vocab_size", "pad_vocab_size_to")
        return
    if pads is not False and (step or complete):
        if step:
            draft.state("model.vocab_multiple", step, "make_vocab_size_divisible_by")
        draft.default("model.vocab_multiple", 128)
    if stated is not None:
        adds = kind == "nulltokenizer" and pads is None  # this tokenizer adds its end-of-document token to the size
        note = f"{stated} and the end-of-document token" if adds else ""
        draft.state("model.vocab_size", stated + adds, "vocab_size", note=note)
        return
    if not kind and not model and draft.has("vocab_file") and draft.get("model.architecture") in _WORD_PIECE_PROGRAMS:
        kind = "bertwordpiecelowercase"  # what pretrain_bert.py and pretrain_t5.py take
    extra = extra if kind in _WITH_EXTRA_IDS else 0
    added = f" and {extra} of {draft.key_of('vocab_extra_ids')}" if extra else ""
    if model and (known := vocabulary_of(str(model))):
        draft.imply("model.vocab_size", known + extra, f"the vocabulary of {str(model)[:60]}{added}")
        draft.warn(
            f"model.vocab_size: taken from the tokenizer's name {str(model)[:60]}: {known}{added}, before padding"
        )
    elif kind.startswith("gpt2") or (not kind and draft.has("merge_file")):
        draft.imply("model.vocab_size", _GPT2_VOCABULARY, "vocab_file and merge_file, the GPT-2 encoding's")
        draft.warn("model.vocab_size: 50257, the GPT-2 byte-pair encoding's, before padding")
    elif known := _BERT_VOCABULARIES.get(kind):
        draft.imply("model.vocab_size", known + extra, f"tokenizer_type {kind}{added}")
        draft.warn(f"model.vocab_size: {known}{added}, the usual vocabulary of {kind}, before padding")
    else:
        name = model or kind or draft.value(as_text, "patch_tokenizer_type") or "of this job"
        draft.ask("model.vocab_size", f"the size of the tokenizer {name} is not in the file")
