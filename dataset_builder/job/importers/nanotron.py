"""nanotron's YAML: a Hugging Face style ``model_config``, ``parallelism``, ``tokens`` and ``optimizer``."""

from __future__ import annotations

from collections.abc import Mapping

from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.huggingface_reading import read_sizes
from dataset_builder.job.importers.megatron import storage_format
from dataset_builder.job.importers.reading import Draft, Reading

NAME, KNOWN_BY = "nanotron YAML", "model.model_config, parallelism, tokens"
_IGNORED = (
    "checkpoints*", "data_stages*", "general*", "lighteval*", "logging*", "profiler*", "tokenizer*", "metrics*", "s3*",
    "model.init_method*", "model.ddp_bucket_cap_mb", "model.model_config.*", "optimizer.clip_grad",
    "optimizer.learning_rate_scheduler*", "optimizer.optimizer_factory.*", "optimizer.weight_decay*", "data*",
    "tokens.limit_*", "tokens.val_check_interval", "parallelism.tp_recompute_allgather",
)  # fmt: skip


def likeness(file: ConfigFile) -> int:
    has_model = isinstance(file.node("model.model_config"), Mapping)
    parts = sum(isinstance(file.values.get(key), Mapping) for key in ("parallelism", "tokens", "optimizer", "general"))
    return 3 * has_model + parts if parts >= 2 and "tokens" in file.values else 0


def read(file: ConfigFile) -> Reading:
    draft = Draft(file, "nanotron")
    _read_layout(draft)
    _read_model(draft)
    draft.take("batch.seq_length", "tokens.sequence_length")
    draft.take("batch.micro_batch_size", "tokens.micro_batch_size")
    if draft.take("batch.gradient_accumulation_steps", "tokens.batch_accumulation_per_replica") is None:
        draft.default("batch.gradient_accumulation_steps", 1)
    steps = draft.count("tokens.train_steps")
    if steps and steps > 0:
        draft.state("training.steps", steps, "tokens.train_steps")
    _read_precision(draft)
    name = (draft.text("optimizer.optimizer_factory.name") or "adamw").lower()
    if name in ("adamw", "adam", "sgd"):
        draft.state("optimizer.name", name, "optimizer.optimizer_factory.name")
    draft.framework("nanotron")
    draft.understood(*_IGNORED)
    return draft.reading()


def _read_layout(draft: Draft) -> None:
    for path, key in (("tensor", "tp"), ("pipeline", "pp"), ("data", "dp"), ("context", "context_parallel_size"),
                      ("expert", "expert_parallel_size")):  # fmt: skip
        draft.take(f"parallel.{path}", f"parallelism.{key}")
    mode = (draft.text("parallelism.tp_mode") or "").upper()
    tensor = draft.get("parallel.tensor") or 1
    if mode:
        draft.state("parallel.sequence_parallel", "REDUCE_SCATTER" in mode and tensor > 1, "parallelism.tp_mode")
    else:
        draft.default("parallel.sequence_parallel", False)
    if (overlaps := draft.flag("parallelism.tp_linear_async_communication")) is not None:
        draft.state("parallel.overlap.tensor", overlaps, "parallelism.tp_linear_async_communication")
    engine = (draft.text("parallelism.pp_engine") or "").lower()
    if engine and (draft.get("parallel.pipeline") or 1) > 1:
        draft.state("parallel.schedule", "gpipe" if engine == "afab" else "1f1b", "parallelism.pp_engine")
    recompute = draft.flag("parallelism.recompute_layer")
    if recompute is not None:
        draft.state("parallel.recompute.mode", "full" if recompute else "none", "parallelism.recompute_layer")
    draft.default("parallel.recompute.mode", "none")
    stage = draft.count("optimizer.zero_stage", asks="parallel.sharding")
    if stage is not None and 0 <= stage <= 3:
        draft.state("parallel.sharding", ("none", "zero1", "zero2", "zero3")[stage], "optimizer.zero_stage")
    draft.default("parallel.sharding", "none")


def _read_model(draft: Draft) -> None:
    config = draft.file.node("model.model_config")
    if not isinstance(config, Mapping):
        return
    kind = next((name for name in ("qwen2", "starcoder2", "llama") if config.get(f"is_{name}_config")), "llama")
    key = "model.model_config.attention_bias"
    if kind == "qwen2":
        # Hugging Face's Qwen2 always has this bias; nanotron's (models/qwen.py) only where it is asked for.
        draft.default("model.qkv_bias", False, "attention_bias false")
    read_sizes(draft, {"model_type": kind, **config}, "model.model_config.")
    if kind == "qwen2" and (has_bias := draft.flag(key)) is not None:
        draft.state("model.qkv_bias", has_bias, key)
    _read_experts(draft)
    draft.take("model.vocab_multiple", "model.make_vocab_size_divisible_by")


def _read_experts(draft: Draft) -> None:
    """``moe_config`` of a Qwen; older versions have no widths there, and every expert is as wide as the dense layer.

    From github.com/huggingface/nanotron, nn/moe.py and, for the defaults, config/models_config.py: ``MoEConfig``.
    """
    block = "model.model_config.moe_config"
    if not isinstance(draft.raw(block), Mapping):
        return
    dense = draft.get("model.ffn_hidden_size")
    for path, key, default in (("num_experts", "num_experts", 8), ("top_k", "top_k", 2),
                               ("expert_ffn_hidden_size", "moe_intermediate_size", dense)):  # fmt: skip
        if draft.take(f"model.moe.{path}", f"{block}.{key}") is None and default:
            draft.default(f"model.moe.{path}", default, f"no {key}")
    if draft.flag(f"{block}.enable_shared_expert"):
        draft.state("model.moe.num_shared_experts", 1, f"{block}.enable_shared_expert")
        shared = "model.moe.shared_expert_ffn_hidden_size"
        if draft.take(shared, f"{block}.shared_expert_intermediate_size") is None and dense:
            draft.default(shared, dense, "no shared_expert_intermediate_size")
    sparse, layers = draft.raw(f"{block}.layers"), draft.get("model.num_layers")
    if isinstance(sparse, list) and sparse != [-1] and isinstance(layers, int):
        listed = {layer for layer in sparse if isinstance(layer, int)}
        dense_layers = [layer for layer in range(min(layers, 10_000)) if layer not in listed]
        draft.state("model.moe.dense_layers", dense_layers, f"{block}.layers")


def _read_precision(draft: Draft) -> None:
    """Weights in ``model.dtype``, bf16 when it is absent; fp32 master weights and gradients with
    ``accumulate_grad_in_fp32``, which has no default, else none."""
    dtype = draft.raw("model.dtype")
    low = storage_format("bf16" if dtype is None else dtype)
    store = draft.default if dtype is None else draft.imply
    in_full = draft.flag("optimizer.accumulate_grad_in_fp32")
    if low is None:
        draft.ask("precision.preset", f"model.dtype is {str(dtype)[:40]}")
    elif low == "fp32":
        draft.state("precision.preset", "fp32", "model.dtype")
    elif in_full is None:
        store("precision.params", low, f"model.dtype {low}")
        draft.ask("precision.preset", f"optimizer.accumulate_grad_in_fp32 is open: {low}_mixed with it, {low} without")
    elif in_full is False:
        draft.state("precision.preset", low, "model.dtype", "optimizer.accumulate_grad_in_fp32")
    else:
        draft.state("precision.preset", f"{low}_mixed", "model.dtype")
        store("precision.params", low, f"model.dtype {low}")
        draft.imply("precision.main_params", "fp32", "optimizer.accumulate_grad_in_fp32")
        for path in ("precision.grad_accum", "precision.grad_reduce"):
            draft.state(path, "fp32", "optimizer.accumulate_grad_in_fp32")
