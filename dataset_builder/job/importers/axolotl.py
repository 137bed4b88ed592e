"""axolotl's YAML: a base model by name, batch and sequence, FSDP or DeepSpeed, adapters."""

from __future__ import annotations

from collections.abc import Mapping

from dataset_builder.job.importers.accelerate import read_fsdp_formats
from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.reading import Draft, Reading
from dataset_builder.job.importers.trainers import (
    default_frozen_weights,
    loaded_format,
    names_mlp,
    read_amp,
    read_named_model,
    read_optimizer,
    state_fp8,
    state_targets,
    warn_fused_loss,
    warn_preferences,
)
from dataset_builder.job.reasons import shown

NAME, KNOWN_BY = "axolotl YAML", "base_model, sequence_len, micro_batch_size, datasets"
_MARKS = ("base_model", "sequence_len", "datasets", "micro_batch_size", "gradient_accumulation_steps", "adapter",
          "sample_packing", "dataset_prepared_path", "lr_scheduler", "flash_attention", "val_set_size")  # fmt: skip
_IGNORED = (
    "plugins", "dataset*", "special_tokens*", "output_dir", "num_epochs", "lr_scheduler*", "learning_rate",
    "logging_steps",
    "save*", "warmup*", "weight_decay", "val_set_size", "eval*", "wandb_*", "seed", "tokenizer*", "model_type", "hub_*",
    "chat_template", "group_by_length", "train_on_inputs", "early_stopping*", "resume*", "auto_resume*", "local_rank",
    "xformers*", "is_*_derived_model", "trust_remote_code", "strict", "load_in_*", "lora_*", "fsdp", "fsdp_*",
    "deepspeed", "adam_*", "max_grad_norm", "tf32", "gradient_checkpointing_kwargs*", "test_datasets", "tokens",
    "debug",
    "pad_to_sequence_len", "shuffle*", "base_model_config", "cut_cross_entropy", "liger_*", "mlflow*", "comet*",
    "sample_packing", "eval_sample_packing", "loraplus*", "pretraining_dataset*", "revision_of_model", "use_*",
)  # fmt: skip


def likeness(file: ConfigFile) -> int:
    count = sum(mark in file.values for mark in _MARKS)
    return count if "base_model" in file.values and count >= 2 else 0


def read(file: ConfigFile) -> Reading:
    draft = Draft(file, "axolotl")
    read_named_model(draft, "base_model")
    draft.take("batch.seq_length", "sequence_len")
    draft.take("batch.micro_batch_size", "micro_batch_size")
    _read_accumulation(draft)
    _read_precision(draft)
    _read_layout(draft)
    _read_recompute(draft)
    _read_adapter(draft)
    _read_weights(draft)
    _read_fp8(draft)
    _read_software(draft)
    if (method := draft.text("rl")) is not None:
        warn_preferences(draft, "rl", method)
    if draft.flag("sample_packing"):
        draft.warn("sample_packing: packed sequences are predicted as full ones (attention over the whole length)")
    steps = draft.count("max_steps")
    if steps and steps > 0:
        draft.state("training.steps", steps, "max_steps")
    draft.framework("axolotl", is_engine=False)
    draft.understood(*_IGNORED)
    return draft.reading()


def _read_accumulation(draft: Draft) -> None:
    """Accumulation steps, or ``batch_size``, the sequences that one GPU takes to an optimizer step."""
    path, keys = "batch.gradient_accumulation_steps", ("batch_size", "micro_batch_size")
    if draft.take(path, "gradient_accumulation_steps") is not None:
        return
    total, micro = (draft.count(key) for key in keys)
    if total and micro and total < micro:
        draft.refuse(f"batch_size: got {total}; expected at least micro_batch_size {micro}")
    elif total and micro and micro > 0:
        draft.state(path, total // micro, *keys, note=f"{total} // {micro}")
    draft.default(path, 1)


def _read_precision(draft: Draft) -> None:
    """``bf16`` is ``auto`` unless something else is said: on, where the GPU has it; ``full`` only adds evaluation.

    ``bfloat16`` and ``float16`` are weights in 16 bits without autocast.
    """
    word = str(draft.raw("bf16") or ("auto" if draft.raw("bf16") is None else "")).lower()
    pure = next((key for key in ("bfloat16", "float16") if draft.flag(key)), None)
    if word == "full" or (word == "auto" and not draft.flag("fp16")):
        draft.state("precision.preset", "bf16_mixed", "bf16", note=word)
        draft.understood("fp16", "tf32", "bfloat16", "float16")
    elif pure and not draft.flag("bf16") and not draft.flag("fp16"):
        draft.state("precision.preset", {"bfloat16": "bf16", "float16": "fp16"}[pure], pure)
        draft.understood("tf32")
    else:
        read_amp(draft, "bf16", "fp16", "tf32")


def _read_weights(draft: Draft) -> None:
    """Weights are loaded in the 16 bits that are computed in, and trained so: gradients and states follow them.

    DeepSpeed keeps fp32 master weights, and FSDP 1 casts what it trains to fp32; axolotl's FSDP 2 does not.
    """
    low, sharding = loaded_format(draft), draft.get("parallel.sharding")  # which is open under DeepSpeed
    version = draft.text("fsdp_version", "fsdp_config.fsdp_version") or "1"
    if "lora" in (draft.text("adapter") or ""):
        default_frozen_weights(draft)
    elif low and (sharding == "none" or (sharding is not None and version == "2")):
        for path in ("params", "grad_accum", "grad_reduce", "optimizer_state"):
            draft.default(f"precision.{path}", low, f"weights are loaded in {low} and trained in it")
        draft.default("precision.main_params", "none", f"weights are loaded in {low} and trained in it")


def _read_fp8(draft: Draft) -> None:
    """torchao's recipe, ``tensorwise`` unless ``fp8_config`` says otherwise.

    From github.com/axolotl-ai-cloud/axolotl, docs/mixed_precision.qmd.
    """
    recipe = draft.text("fp8_config.recipe") or "tensorwise"
    if not draft.flag("fp8"):
        draft.understood("fp8*")
    elif recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        state_fp8(draft, "fp8_tensorwise" if recipe == "tensorwise" else "fp8_rowwise", "fp8_config.recipe")
        if recipe == "rowwise_with_gw_hp":
            draft.warn(f"fp8_config.recipe {recipe}: weight gradients are in bf16, but are predicted in fp8")
    else:
        draft.refuse(f"fp8_config.recipe: got {shown(recipe)}; expected tensorwise, rowwise or rowwise_with_gw_hp")


def _read_recompute(draft: Draft) -> None:
    """Checkpointing by the trainer or by FSDP; a word says where the trainer's checkpoints are offloaded to."""
    keys = ("gradient_checkpointing", "fsdp_config.activation_checkpointing",
            "fsdp_config.fsdp_activation_checkpointing")  # fmt: skip
    word = str(draft.raw(keys[0])).lower()
    is_offloaded = word.startswith("offload") or word == "unsloth"
    is_on = is_offloaded or draft.flag(keys[0])
    in_fsdp = draft.flag(*keys[1:])
    draft.state("parallel.recompute.mode", "full" if is_on or in_fsdp else "none", *keys)
    if is_offloaded or draft.raw("activation_offloading") not in (None, False):
        key = keys[0] if is_offloaded else "activation_offloading"
        draft.warn(f"{key} {shown(draft.raw(key))}: the offload to host memory is not predicted, full recompute is")


def _read_layout(draft: Draft) -> None:
    draft.take("parallel.tensor", "tensor_parallel_size")
    draft.take("parallel.context", "context_parallel_size", "sequence_parallel_degree")
    expert = max(1, draft.take("parallel.expert", "expert_parallel_size") or 1)
    shards, replicas = draft.count("dp_shard_size"), draft.count("dp_replicate_size")
    keys = ("dp_shard_size", "dp_replicate_size")
    if shards or replicas:  # ranks of different experts have different sequences too
        data = max(1, shards or 1) * max(1, replicas or 1) * expert
        note = f"{shards or 1} x {replicas or 1}{f' x {expert}' if expert > 1 else ''}"
        draft.state("parallel.data", data, *keys, *(("expert_parallel_size",) if expert > 1 else ()), note=note)
    is_fsdp = draft.has("fsdp", "fsdp_config", "fsdp_version", "dp_shard_size")
    if draft.has("deepspeed"):
        name = draft.text("deepspeed") if not isinstance(draft.raw("deepspeed"), Mapping) else None
        if name:
            draft.refer(name)
            draft.ask("parallel.sharding", f"deepspeed {name[:80]} is another file; give it too")
    elif (replicas or 1) > 1 and (shards or 1) > 1:
        draft.state("parallel.sharding", "hsdp", *keys)
        draft.state("parallel.shard_size", (shards or 1) * expert * (draft.get("parallel.context") or 1), *keys)
    elif is_fsdp and (shards is None or shards * expert > 1):
        keeps = draft.flag("fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward") is False
        draft.state("parallel.sharding", "zero2" if keeps else "zero3", "fsdp", "fsdp_config", "dp_shard_size")
    else:
        draft.default("parallel.sharding", "none", "data parallel without FSDP or DeepSpeed")
    if str(draft.get("parallel.sharding")) in ("hsdp", "zero2", "zero3"):
        read_fsdp_formats(draft)
    if draft.flag("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params"):
        draft.warn("fsdp_config.offload_params is not modelled; the time is without it")
    draft.default("parallel.sequence_parallel", False)


def _read_adapter(draft: Draft) -> None:
    adapter = draft.text("adapter")
    if adapter is None:
        return
    if "lora" not in adapter:
        draft.warn(f"adapter {adapter[:30]} is not modelled; predicted as training every weight")
        return
    if draft.take("model.lora.rank", "lora_r") is None:
        draft.ask("model.lora.rank", f"adapter {adapter[:30]} is without lora_r")
    wide = [key for key in ("lora_target_modules", "lora_target_parameters") if names_mlp(draft.raw(key))]
    wide += ["lora_target_linear"] if draft.flag("lora_target_linear") else []
    state_targets(draft, wide, "lora_target_modules", "lora_target_linear", "lora_target_parameters", "adapter")
    if adapter == "qlora" or draft.flag("load_in_4bit") or draft.flag("load_in_8bit"):
        draft.warn("weights in 4 or 8 bit are not modelled; predicted as frozen 16-bit weights")


def _read_software(draft: Draft) -> None:
    kernel = draft.text("attn_implementation") or ""
    if draft.flag("flash_attention") or kernel.startswith("flash"):
        draft.state("software.attention", "flash", "flash_attention", "attn_implementation")
    elif kernel == "eager" or draft.flag("eager_attention"):
        draft.state("software.attention", "unfused", "attn_implementation", "eager_attention")
    draft.understood("sdp_attention", "flex_attention")
    if (compiles := draft.flag("torch_compile")) is not None:
        draft.state("software.compile", compiles, "torch_compile")
    plugins = draft.raw("plugins")
    fused = [str(name) for name in plugins if "cut_cross_entropy" in str(name)] if isinstance(plugins, list) else []
    fused += [key for key in ("cut_cross_entropy", "liger_fused_linear_cross_entropy") if draft.flag(key)]
    warn_fused_loss(draft, *fused)
    read_optimizer(draft, "optimizer")
