"""LLaMA-Factory's YAML, which names a Hugging Face trainer's arguments."""

from __future__ import annotations

from dataset_builder.job.importers.accelerate import read_fsdp_formats
from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.reading import Draft, Reading
from dataset_builder.job.importers.trainers import (
    default_frozen_weights,
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

NAME, KNOWN_BY = "LLaMA-Factory YAML", "model_name_or_path, finetuning_type, cutoff_len"
_MARKS = ("model_name_or_path", "finetuning_type", "cutoff_len", "per_device_train_batch_size", "stage", "template",
          "gradient_accumulation_steps", "do_train", "lora_rank", "lora_target")  # fmt: skip
_IGNORED = (
    "do_*", "template", "dataset*", "overwrite_*", "preprocessing_*", "output_dir", "logging_*", "save_*",
    "plot_loss", "learning_rate", "num_train_epochs", "lr_scheduler*", "warmup_*", "ddp_*", "resume_*", "val_size",
    "per_device_eval*", "eval_*", "max_samples", "report_to", "trust_remote_code", "weight_decay", "max_grad_norm",
    "seed", "packing", "lora_*", "deepspeed", "fsdp*", "dataloader_*", "run_name", "pref_*", "freeze_*", "predict_*",
    "image_*", "video_*", "tokenized_path", "streaming", "adam_*", "include_*", "neat_packing", "quantization_*",
    "enable_liger_kernel", "use_unsloth*", "rope_scaling", "shift_attn", "additional_target", "ref_model",
    "buffer_size",
)  # fmt: skip


def likeness(file: ConfigFile) -> int:
    count = sum(mark in file.values for mark in _MARKS)
    return count if "model_name_or_path" in file.values and count >= 3 else 0


def read(file: ConfigFile) -> Reading:
    draft = Draft(file, "LLaMA-Factory")
    read_named_model(draft, "model_name_or_path")
    if draft.take("batch.seq_length", "cutoff_len") is None:
        draft.default("batch.seq_length", 2048, "cutoff_len")
    if draft.take("batch.micro_batch_size", "per_device_train_batch_size") is None:
        draft.default("batch.micro_batch_size", 8, "per_device_train_batch_size")
    if draft.take("batch.gradient_accumulation_steps", "gradient_accumulation_steps") is None:
        draft.default("batch.gradient_accumulation_steps", 1)
    if draft.flag("pure_bf16"):
        draft.state("precision.preset", "bf16", "pure_bf16")
        draft.raw("bf16", "fp16", "tf32")
    else:
        read_amp(draft, "bf16", "fp16", "tf32")
    _read_sharding(draft)
    _read_adapter(draft)
    _read_fp8(draft)
    stage = draft.text("stage") or "sft"
    if stage not in ("sft", "pt"):
        warn_preferences(draft, "stage", stage)
    kernel = draft.text("flash_attn") or ""
    if kernel in ("fa2", "fa3", "sdpa"):
        draft.state("software.attention", "flash", "flash_attn")
    elif kernel == "disabled":
        draft.state("software.attention", "unfused", "flash_attn")
    if (compiles := draft.flag("torch_compile")) is not None:
        draft.state("software.compile", compiles, "torch_compile")
    warn_fused_loss(draft, *(key for key in ("enable_liger_kernel",) if draft.flag(key)))
    read_optimizer(draft, "optim")
    steps = draft.count("max_steps")
    if steps and steps > 0:
        draft.state("training.steps", steps, "max_steps")
    draft.framework("llama-factory", is_engine=False)
    draft.understood(*_IGNORED)
    return draft.reading()


def _read_fp8(draft: Draft) -> None:
    """torchao's ``rowwise`` recipe, or Transformer Engine's delayed scaling.

    From github.com/hiyouga/LLaMA-Factory, src/llamafactory/train/fp8_utils.py: ``create_fp8_kwargs``.
    """
    backend = (draft.text("fp8_backend") or "auto").lower()  # auto: torchao
    presets = {"auto": "fp8_rowwise", "torchao": "fp8_rowwise", "te": "fp8_mixed", "msamp": "fp8_mixed"}
    if not draft.flag("fp8"):
        draft.understood("fp8*")
    elif backend in presets:
        state_fp8(draft, presets[backend], "fp8_backend")
        if backend == "msamp":
            draft.warn("fp8_backend msamp: its fp8 weights, gradients and states are not modelled, its linears are")
    else:
        draft.refuse(f"fp8_backend: got {shown(backend)}; expected one of {', '.join(presets)}")


def _read_sharding(draft: Draft) -> None:
    off = draft.flag("disable_gradient_checkpointing")
    if off is not None:
        draft.state("parallel.recompute.mode", "none" if off else "full", "disable_gradient_checkpointing")
    draft.default("parallel.recompute.mode", "full", "gradient checkpointing is on")
    name = draft.text("deepspeed")
    if name:
        draft.refer(name)
        draft.ask("parallel.sharding", f"deepspeed {name[:80]} is another file; give it too")
    elif draft.has("fsdp"):
        options = str(draft.raw("fsdp"))
        name = "hsdp" if "hybrid_shard" in options else "zero3" if "full_shard" in options else "zero2"
        draft.state("parallel.sharding", name, "fsdp")
        read_fsdp_formats(draft)
    draft.default("parallel.sequence_parallel", False)


def _read_adapter(draft: Draft) -> None:
    kind = draft.text("finetuning_type") or "lora"
    if kind == "lora":
        rank = draft.count("lora_rank")
        draft.state("model.lora.rank", rank or 8, "lora_rank", "finetuning_type")
        is_wide = names_mlp(draft.raw("lora_target") or "all")
        state_targets(draft, ["lora_target"] if is_wide else [], "lora_target", "finetuning_type")
        default_frozen_weights(draft)
    elif kind != "full":
        draft.warn(f"finetuning_type {kind[:30]} is not modelled; predicted as training every weight")
    if draft.has("quantization_bit"):
        draft.warn("quantization_bit: weights in 4 or 8 bit are not modelled; predicted as frozen 16-bit weights")
