"""Megatron-LM's arguments as YAML: ``MODEL_ARGS`` of its functional tests and of model zoos, and Primus configs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dataset_builder.job.importers import megatron
from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.interpolation import interpolated
from dataset_builder.job.importers.reading import Draft, Reading

NAME, KNOWN_BY = (
    "Megatron-LM argument YAML or Primus",
    "MODEL_ARGS with --num-layers, or num_layers, num_attention_heads",
)
_FORMAT = "Megatron-LM"
_MARKS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "seq_length",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size", "global_batch_size",
    "tokenizer_type", "swiglu", "normalization", "group_query_attention", "untie_embeddings_and_output_weights",
)  # fmt: skip
_PRIMUS_ONLY = (
    "work_group", "user_name", "exp_name", "workspace", "enable_primus_turbo", "use_turbo_*", "*_sink_level",
    "disable_wandb", "disable_tensorboard", "model_type", "is_instruct*", "auto_continue_train", "disable_last_saving",
    "modules*", "framework", "config", "platform*", "primus_*", "trainable", "includes",
)  # fmt: skip
# What an experiment does not override; the files are github.com/AMD-AGI/Primus, primus/configs.
_PRIMUS_DEFAULTS: dict[str, Any] = {
    "precision.preset": "bf16_mixed", "precision.params": "bf16", "precision.main_params": "fp32",
    "parallel.tensor": 1, "parallel.pipeline": 1, "parallel.context": 1, "parallel.expert": 1,
    "parallel.sequence_parallel": True, "parallel.sharding": "none", "parallel.recompute.mode": "none",
    "parallel.overlap.grad_reduce": False, "parallel.overlap.param_gather": False, "parallel.overlap.tensor": False,
    "batch.micro_batch_size": 2, "batch.global_batch_size": 128, "batch.seq_length": 4096,
}  # fmt: skip


def likeness(file: ConfigFile) -> int:
    if file.script is not None:
        return 0
    if isinstance(file.values.get("MODEL_ARGS"), Mapping):
        return 20
    flat = _primus(file.values)[0] if isinstance(file.values.get("modules"), Mapping) else file.values
    plain = {str(key).lstrip("-").replace("-", "_") for key in flat}
    is_other = {"zero_optimization", "pipe_parallel_size", "architectures", "trainer", "model"} & set(file.values)
    count = sum(mark in plain for mark in _MARKS)
    return 0 if is_other else count + ("extends" in file.values) if count >= 3 else 0


def read(file: ConfigFile) -> Reading:
    """Arguments spelt as flags are all there are; Primus configs that extend another file are not."""
    document = interpolated(file.values)
    arguments = document.get("MODEL_ARGS")
    is_flags = isinstance(arguments, Mapping)
    values, extends = (dict(arguments), []) if isinstance(arguments, Mapping) else _primus(document)
    flags: dict[str, Any] = {}
    spelling: dict[str, str] = {}
    for key, value in values.items():
        name = re.sub(r"^--?", "", str(key)).replace("-", "_")
        flags[name], spelling[name] = value, str(key)
    draft = Draft(ConfigFile(file.path, flags, spelling=spelling), _FORMAT)
    draft.extend(*extends)
    is_primus = not is_flags and (bool(extends) or "modules" in document)
    megatron.read_arguments(draft, complete=not is_primus)
    draft.framework("primus" if is_primus else "megatron-lm")
    draft.understood(*_PRIMUS_ONLY)
    if "modules" in document:
        for path, value in _PRIMUS_DEFAULTS.items():
            draft.default(path, value, "trainer_base.yaml, language_model.yaml")
    if is_flags:
        _read_environment(draft, document)
    return draft.reading()


def _primus(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The overrides of an experiment, or the keys of a model file; and the files that they build on."""
    extends = document.get("extends") or []
    bases = [str(name) for name in (extends if isinstance(extends, list) else [extends])]
    modules = document.get("modules")
    if not isinstance(modules, Mapping):
        return {key: value for key, value in document.items() if key != "extends"}, bases
    values: dict[str, Any] = {}
    for module in modules.values():
        if isinstance(module, Mapping):
            bases += [str(module[key]) for key in ("model", "config") if isinstance(module.get(key), str)]
            if isinstance(module.get("overrides"), Mapping):
                values |= module["overrides"]
    return values, bases


def _read_environment(draft: Draft, document: Mapping[str, Any]) -> None:
    environment = document.get("ENV_VARS")
    if not isinstance(environment, Mapping):
        return
    off = {key for key in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN") if str(environment.get(key)) == "0"}
    if len(off) == 2 and draft.get("software.attention") is None:
        draft.imply("software.attention", "unfused", "NVTE_FLASH_ATTN 0, NVTE_FUSED_ATTN 0")
