"""The model of a row: sizes from its columns, operators from its architecture, framework and name."""

from __future__ import annotations

import math
import re
from typing import Any

from dataset_builder.corpus.job_row import ARCHITECTURES, JobRow

_DEEPSEEK_V3_MLA = (1536, 512, 128, 64, 128)  # arXiv 2412.19437, section 4.2
_FINE_TUNING = r"squad|\bner\b|mrpc|mnli|glue|sst-?2"
_GATHERS_MASKED_POSITIONS = ("deepspeed-bert", "mlperf", "nvidia-dle")  # sources whose BERT is NVIDIA's
_MASKED_FRACTION = 80 / 512  # max_predictions_per_seq of 512; 20 of 128
_ADAPTER_RANK = 16
_ADAPTIVE_SOFTMAX_CLASSES = 32_768  # head cluster of 20,000 words plus the rarely computed tails, arXiv 1901.02860


def row_model(row: JobRow) -> dict[str, Any]:
    """``model``, written out as sizes."""
    kind = ARCHITECTURES[row.arch]
    gated = row.flag("gated_mlp")
    if gated is None:
        gated = row.arch in ("llama", "moe")
    tied = row.flag("tied_embeddings")
    from_scratch = row.arch in ("moe", "gpt", "llama") and row.text("source_id") == "megatron-golden"
    model: dict[str, Any] = {
        "name": row.model_name,
        "architecture": kind.architecture,
        "num_layers": row.need("layers"),
        "hidden_size": row.need("hidden"),
        "num_attention_heads": row.need("heads"),
        "vocab_size": row.need("vocab"),
        "activation": "swiglu" if gated else "gelu",
        "normalization": kind.normalization,
        "position_embedding": kind.position,
        "bias": kind.bias,
        "tie_embeddings": True if tied is None else tied,
        "dropout": _dropout(row),
    }
    for key, column in (("ffn_hidden_size", "ffn_hidden"), ("num_query_groups", "kv_heads"), ("head_dim", "head_dim")):
        if value := row.count(column):
            model[key] = value
    if model["hidden_size"] % model["num_attention_heads"] and "head_dim" not in model:
        model["head_dim"] = 2 ** round(math.log2(model["hidden_size"] / model["num_attention_heads"]))
        row.assume(f"head_dim: not stated, {model['head_dim']} taken")
    if from_scratch:
        _megatron_arguments(row, model)
    if kind.architecture == "encoder":
        model |= {"num_token_types": 2, **_encoder_head(row)}
    if kind.architecture == "encoder_decoder":
        _encoder_decoder(row, model)
    if row.count("num_experts"):
        _experts(row, model)
    _named_details(row, model)
    _shipped_details(row, model)
    _approximations(row, model)
    return model


def _adapter_rank(row: JobRow) -> int:
    """The rank of LoRA adapters: as stated, else that of MLPerf's reference, which adapts the attention's linears."""
    if stated := re.search(r"rank (\d+)", row.notes):
        return int(stated[1])
    row.assume(f"model.lora: rank not stated, {_ADAPTER_RANK} on the attention's projections taken")
    return _ADAPTER_RANK


def _encoder_head(row: JobRow) -> dict[str, Any]:
    """Fine-tuning has a classifier in place of the vocabulary; NVIDIA's pre-training scripts gather masked positions.

    Megatron-LM's and Hugging Face's BERT compute the vocabulary at every position.
    """
    if re.search(_FINE_TUNING, row.model_name.lower()):
        return {"head": "classification"}
    if row.text("source_id") not in _GATHERS_MASKED_POSITIONS:
        return {"head": "mlm"}
    row.assume(f"masked_fraction: {_MASKED_FRACTION} taken, the scripts' 80 predictions in 512 positions")
    return {"head": "mlm", "masked_fraction": _MASKED_FRACTION}


def _dropout(row: JobRow) -> float:
    stated = row.flags.get("hidden_dropout")
    if stated:
        return float(stated)
    if row.arch in ("llama", "moe", "mpt", "hybrid-mamba", "hybrid-mamba-moe"):
        return 0.0
    return row.defaults.dropout


def _megatron_arguments(row: JobRow, model: dict[str, Any]) -> None:
    """Megatron-LM builds a GPT from its arguments: what a test does not set is the argument's default."""
    flags = row.flags
    model["position_embedding"] = {"rope": "rope", "none": "none"}.get(
        flags.get("position_embedding_type", ""), "learned"
    )
    model["normalization"] = "rmsnorm" if flags.get("normalization") == "RMSNorm" else "layernorm"
    model["bias"] = flags.get("disable_bias_linear") != "1"
    model["qk_norm"] = flags.get("qk_layernorm") == "1"
    if flags.get("squared_relu") == "1":
        model["activation"] = "squared_relu"


def _encoder_decoder(row: JobRow, model: dict[str, Any]) -> None:
    layers = model["num_layers"]
    model |= {"num_encoder_layers": layers, "num_decoder_layers": row.note_count("decoder_layers") or layers}
    if row.arch == "t5" and row.framework in ("megatron-lm", "nemo"):
        model |= {"position_embedding": "learned", "normalization": "layernorm", "bias": True}  # Megatron's own T5
    if row.arch == "t5" and model["activation"] == "swiglu":
        model["activation"] = "geglu"  # T5 v1.1


def _experts(row: JobRow, model: dict[str, Any]) -> None:
    layers = model["num_layers"]
    top_k, width = row.count("top_k"), row.count("ffn_hidden")
    if not top_k or not width:
        top_k, width = top_k or 2, width or 4 * model["hidden_size"]
        row.assume(f"moe: not fully stated, Megatron's defaults taken: top_k {top_k}, expert_ffn_hidden_size {width}")
    moe: dict[str, Any] = {"num_experts": row.need("num_experts"), "top_k": top_k, "expert_ffn_hidden_size": width}
    if dense := row.note_count("dense_ffn"):
        model["ffn_hidden_size"] = dense
    sparse_layers = row.note_count("moe_layers")
    if sparse_layers and sparse_layers < layers:
        moe["dense_layers"] = list(range(layers - sparse_layers))
    if shared := row.note_count("shared_expert_ffn"):
        moe |= {"num_shared_experts": 1, "shared_expert_ffn_hidden_size": shared}
    if "token drop" in row.notes or "tokendrop" in row.model_name:
        moe["capacity_factor"] = 1.0
    model["moe"] = moe
    sizes = re.findall(r"\d+", row.flags.get("mla_q_kv_nope_rope_v", ""))
    if len(sizes) == 5:
        model["mla"] = _mla(*map(int, sizes))


def _mla(q_rank: int, kv_rank: int, nope: int, rope: int, value: int) -> dict[str, int]:
    return {
        "q_lora_rank": q_rank, "kv_lora_rank": kv_rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope,
        "v_head_dim": value,
    }  # fmt: skip


def _named_details(row: JobRow, model: dict[str, Any]) -> None:
    """What a well known model's name implies and the columns cannot say."""
    name = re.sub(r"[^a-z0-9]", "", row.model_name.lower())
    if name.startswith("deepseekv3") and (model["num_layers"], model["hidden_size"]) == (61, 7168) and "moe" in model:
        model |= {"mla": _mla(*_DEEPSEEK_V3_MLA), "ffn_hidden_size": 18432}
        model["moe"] |= {
            "num_shared_experts": 1, "shared_expert_ffn_hidden_size": 2048, "dense_layers": [0, 1, 2],
        }  # fmt: skip
    elif name.startswith("gptoss"):  # alternating windows of 128 (openai/gpt-oss-120b config.json)
        model |= {"attention": "sliding", "window": 128, "full_attention_every": 2, "qkv_bias": True}
    elif name.startswith("qwen3"):
        model["qk_norm"] = True
    elif name.startswith(("qwen2", "qwen15")):
        model["qkv_bias"] = True


_SHIPPED_DETAILS = (
    "mla", "attention", "window", "full_attention_every", "qk_norm", "qk_norm_over", "qkv_bias", "post_norm",
    "parallel_block",
)  # fmt: skip
_SHIPPED_KIND = ("activation", "normalization", "position_embedding", "bias")


def _shipped_details(row: JobRow, model: dict[str, Any]) -> None:
    """What no column says, of a shipped model whose sizes were taken."""
    shipped = row.shipped
    model |= {key: shipped[key] for key in _SHIPPED_DETAILS if key in shipped and key not in model}
    if row.text("arch") is None:
        model |= {key: shipped[key] for key in _SHIPPED_KIND if key in shipped}
    if "moe" in shipped and "moe" in model:
        model["moe"] = {**shipped["moe"], **model["moe"]}
        if "ffn_hidden_size" in shipped:
            model["ffn_hidden_size"] = shipped["ffn_hidden_size"]


def _approximations(row: JobRow, model: dict[str, Any]) -> None:
    if row.arch.startswith("hybrid-mamba"):
        model["num_layers"] = max(1, model["num_layers"] // 2)
        if "moe" in model:
            model["moe"].pop("dense_layers", None)
        row.assume("model: a Mamba hybrid, taken as a transformer with a layer for each pair of mixer and feed-forward")
    if row.arch == "transformer-xl":
        model["vocab_size"] = min(model["vocab_size"], _ADAPTIVE_SOFTMAX_CLASSES)
        row.assume(
            f"vocab_size: the adaptive softmax is taken as a plain one over {_ADAPTIVE_SOFTMAX_CLASSES} words; "
            "the recurrent memory's keys are not counted"
        )
    if row.arch == "electra" and model["head"] == "mlm":
        row.assume("model: the discriminator with the generator's vocabulary head; its layers are not counted")
    if row.is_frozen:
        model["lora"] = {"rank": _adapter_rank(row), "targets": "attention"}
    name = row.model_name.lower()
    named = "mtp" in name and "w/o mtp" not in name
    if stated := row.note_count("mtp_num_layers"):
        model["mtp_layers"] = 1 if row.flags.get("mtp_use_repeated_layer") == "1" else stated
    elif "mtp_num_layers" not in row.flags and (named or "MTP layer probably" in row.notes):
        model["mtp_layers"] = 1
        row.assume("mtp_layers: not stated, 1 taken")
