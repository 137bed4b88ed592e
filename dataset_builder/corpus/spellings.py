"""Words of other tables as this schema's: precisions, sharding, recomputation, architectures, shipped models.

In: a cell's text in whatever spelling. Out: the schema's word, or ``None`` where the text means none of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dataset_builder.job.precision import PRECISION_PRESETS
from dataset_builder.job.presets import preset, preset_names

_BLANK = ("", "nan", "<na>", "na", "n/a", "null", "nil", "nat", "?", "-", "unknown")
_NONE_IS_A_VALUE = ("sharding", "act_ckpt", "optimizer", "intra_node", "inter_node", "attention")
_SHARDING = {
    "none": "none", "ddp": "none", "dp": "none", "no": "none", "zero0": "none",
    "zero1": "zero1", "distributedoptimizer": "zero1", "os": "zero1", "zero2": "zero2", "osg": "zero2",
    "shardgradop": "zero2", "zero3": "zero3", "fsdp": "zero3", "fsdp2": "zero3", "fullshard": "zero3",
    "megatronfsdp": "zero3", "hsdp": "hsdp", "hybridshard": "hsdp",
}  # fmt: skip
_RECOMPUTE = {
    "none": "none", "no": "none", "false": "none", "0": "none", "off": "none",
    "full": "full", "true": "full", "yes": "full", "1": "full", "on": "full", "uniform": "full", "block": "full",
    "selective": "selective", "coreattn": "selective",
}  # fmt: skip
_PRECISIONS = {
    "float32": "fp32", "single": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "amp": "fp16_mixed",
    "mixed_fp16": "fp16_mixed", "mixed_bf16": "bf16_mixed", "amp_bf16": "bf16_mixed", "amp_fp16": "fp16_mixed",
    "fp8": "fp8_mixed", "amp_fp8": "fp8_mixed", "fp8_hybrid": "fp8_mixed", "fp8_delayed": "fp8_mixed",
    "mxfp8_mixed": "mxfp8", "nvfp4_mixed": "nvfp4", "fp4": "nvfp4",
}  # fmt: skip
# Words of a model's name that say its architecture, the longer before what they contain.
_ARCHITECTURES = (
    ("transformer-xl", "transformer-xl"), ("electra", "electra"), ("mixtral", "moe"), ("deepseek", "moe"),
    ("bert", "bert"), ("bart", "bart"), ("t5", "t5"), ("mpt", "mpt"), ("moe", "moe"), ("gpt", "gpt"), ("opt-", "gpt"),
    ("bloom", "gpt"), ("llama", "llama"), ("mistral", "llama"), ("qwen", "llama"), ("yi-", "llama"),
    ("encoder-decoder", "transformer-encdec"), ("encoder_decoder", "transformer-encdec"), ("encoder", "bert"),
)  # fmt: skip
_COLUMNS = {
    "layers": "num_layers", "hidden": "hidden_size", "ffn_hidden": "ffn_hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_query_groups", "head_dim": "head_dim", "vocab": "vocab_size", "tied_embeddings": "tie_embeddings",
}  # fmt: skip
_VARIANT = re.compile(r"(lora|sft|instruct|chat|base|hf|pretrain|finetune)+$")


def cell_text(value: Any, column: str) -> str | None:
    """A cell as text; ``None`` for the many ways to leave one blank (``none`` is a value where it can be one)."""
    text = "" if value is None else str(value).strip()
    is_none = text == "None" or (text.lower() == "none" and column not in _NONE_IS_A_VALUE)
    return None if is_none or text.lower() in _BLANK else text


def precision_name(text: str) -> str | None:
    """A precision preset's name."""
    word = re.sub(r"[\s-]+", "_", text.strip().lower())
    word = _PRECISIONS.get(word, word)
    return word if word in PRECISION_PRESETS else None


def sharding_name(text: str) -> str | None:
    """``none``, ``zero1``, ``zero2``, ``zero3`` or ``hsdp``."""
    return _SHARDING.get(re.sub(r"[^a-z0-9]", "", text.lower()))


def recompute_name(text: str) -> str | None:
    """``none``, ``selective`` or ``full``."""
    return _RECOMPUTE.get(re.sub(r"[^a-z0-9]|\.0$", "", text.lower()))


def architecture_name(text: str) -> str | None:
    """The table's architecture that a model's name speaks of."""
    return next((known for word, known in _ARCHITECTURES if word in text.lower()), None)


def shipped_model(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The shipped model of a row's ``model_name``, when exactly that name is shipped and no stated size differs."""
    wanted = _folded(str(values.get("model_name") or "").rsplit("/", 1)[-1])
    variants = (wanted, _VARIANT.sub("", wanted))
    for name in preset_names():
        if wanted and _folded(name) in variants:
            sizes = preset(name)
            usual = {"kv_heads": sizes["num_attention_heads"], "ffn_hidden": 4 * sizes["hidden_size"]}
            columns = {**usual, **size_columns(sizes)}
            return sizes if all(_agrees(values.get(column), columns[column], column) for column in columns) else None
    return None


def size_columns(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The table's columns for a shipped model's sizes; of a mixture, ``ffn_hidden`` is one expert's."""
    columns = {column: sizes[key] for column, key in _COLUMNS.items() if sizes.get(key) is not None}
    if "mla" in sizes:
        columns.pop("head_dim", None)
    if moe := sizes.get("moe"):
        columns |= {"num_experts": moe["num_experts"], "top_k": moe["top_k"]}
        columns["ffn_hidden"] = moe["expert_ffn_hidden_size"]
    columns["gated_mlp"] = sizes.get("activation") in ("swiglu", "geglu")
    return columns


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _agrees(stated: Any, known: Any, column: str) -> bool:
    text = cell_text(stated, column)
    if text is None or column in ("vocab", "tied_embeddings"):  # padded, or not a size
        return True
    try:
        return float({"true": "1", "false": "0"}.get(text.lower(), text)) == float(known)
    except ValueError:
        return False
