"""NeMo and Megatron-Bridge YAML: the launcher's ``trainer`` and ``model``, or Bridge's ``model``, ``train``, ``ddp``.

Both name Megatron's arguments in sections; they are renamed and read as such. A Bridge file without ``_target_`` is a
change to a recipe: what it leaves out stands in the recipe and is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataset_builder.job.importers import megatron
from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.interpolation import interpolated
from dataset_builder.job.importers.model_names import preset_called
from dataset_builder.job.importers.reading import Draft, Reading

NAME, KNOWN_BY = "NeMo or Megatron-Bridge YAML", "model with trainer, or with train, ddp, mixed_precision"
_BRIDGE = ("train", "ddp", "mixed_precision", "comm_overlap", "dist", "rng", "logger", "checkpoint", "scheduler",
           "tokenizer", "dataset", "optimizer")  # fmt: skip
# NeMo's names of Megatron's arguments, by section; the sections of Bridge use Megatron's own.
_NEMO = {
    "trainer.num_nodes": "num_nodes", "trainer.devices": "gpus_per_node", "trainer.max_steps": "train_iters",
    "model.activations_checkpoint_granularity": "recompute_granularity",
    "model.activations_checkpoint_method": "recompute_method",
    "model.activations_checkpoint_num_layers": "recompute_num_layers", "model.ub_tp_comm_overlap": "tp_comm_overlap",
    "model.optim.overlap_grad_sync": "overlap_grad_reduce", "model.optim.overlap_param_sync": "overlap_param_gather",
    "model.optim.name": "optimizer", "model.data.seq_length": "sequence_length",
    "model.tokenizer.type": "tokenizer_type", "model.tokenizer.model": "tokenizer_model",
    "model.tokenizer.vocab_file": "vocab_file", "model.tokenizer.merge_file": "merge_file",
}  # fmt: skip
_SECTIONS = ("model", "train", "ddp", "optimizer", "dist", "comm_overlap", "mixed_precision", "dataset", "tokenizer")
_OTHER = (
    "run*", "exp_manager*", "hydra*", "defaults*", "logger*", "checkpoint*", "rng*", "profiling*", "scheduler*",
    "nvrx*",
    "rerun_state_machine*", "straggler*", "ft*", "inprocess_restart*", "validation*", "tensor_inspect*", "_target_",
    "optimizer_config_override_provider*", "*._target_", "*._call_", "*._partial_", "*._args_", "trainer.*", "restore*",
    "apply_query_key*", "pre_process", "post_process", "gradient_as_*", "fsdp*", "native_amp*", "megatron_amp_O2",
    "sharp",
    "mcore_gpt", "transformer_engine", "sync_batch*", "gc_interval", "tp_comm_*", "batch_p2p*", "growth_interval",
    "activations_checkpoint_layers*", "num_micro_batches_with*", "resume_from_checkpoint", "accelerator", "max_*",
    "precision",
    "gradient_clip_val", "accumulate_grad_batches", "limit_*", "use_distributed_sampler", "enable_checkpointing",
    "val_check_interval", "log_every_n_steps", "hidden_dropout", "autocast_*", "params_dtype", "pipeline_dtype", "fp32",
)  # fmt: skip
_PRESETS = {
    "bf16_mixed": ("bf16_mixed", "same"), "fp16_mixed": ("fp16_mixed", "same"),
    "fp8_delayed": ("fp8_mixed", "fp8_delayed"), "fp8_current": ("fp8_mixed", "fp8_current"),
    "mxfp8": ("mxfp8", "mxfp8"), "fp8_subchannel": ("fp8_blockwise", "fp8_blockwise"),
    "nvfp4": ("nvfp4", "nvfp4"),
}  # fmt: skip


def likeness(file: ConfigFile) -> int:
    model = file.values.get("model")
    if not isinstance(model, Mapping):
        return 0
    if isinstance(file.values.get("trainer"), Mapping):
        return 3 + sum(key in model for key in ("micro_batch_size", "tensor_model_parallel_size", "encoder_seq_length"))
    bridge = sum(isinstance(file.values.get(key), Mapping | str) for key in _BRIDGE)
    return bridge + 1 if bridge >= 2 and "train" in file.values else 0


def read(file: ConfigFile) -> Reading:
    document = interpolated(file.values)
    is_nemo = isinstance(document.get("trainer"), Mapping)
    name = "NeMo" if is_nemo else "Megatron-Bridge"
    flags, spelling = _renamed(document, is_nemo)
    is_complete = is_nemo or "_target_" in document
    draft = Draft(ConfigFile(file.path, flags, spelling=spelling), name)
    if is_nemo:
        _read_nemo_precision(draft)
        draft.take("cluster.num_nodes", "num_nodes")
        draft.take("cluster.gpus_per_node", "gpus_per_node")
    else:
        _read_bridge_precision(draft)
        _read_recipe(draft)
    megatron.read_arguments(draft, complete=is_complete)
    if not is_complete:
        for axis, key in (("tensor", "tensor_model_parallel_size"), ("pipeline", "pipeline_model_parallel_size")):
            if not draft.has(key):
                draft.ask(f"parallel.{axis}", f"{key} stands in the recipe that this one changes")
    if is_nemo:
        _read_nemo_defaults(draft)
    draft.framework("nemo" if is_nemo else "megatron-bridge")
    draft.understood(*_OTHER, "model.*", "data.*", "hf_*", "target", "*_fusion", "grad_*", "apex_*", "nsys_*", "onnx_*")
    return draft.reading()


def _renamed(document: Mapping[str, Any], is_nemo: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Megatron's argument names with their values, and how the file spells each."""
    flags: dict[str, Any] = {}
    spelling: dict[str, str] = {}

    def put(name: str, value: Any, written: str) -> None:
        if value is not None and flags.get(name) is None:
            flags[name], spelling[name] = value, written

    for written, name in _NEMO.items() if is_nemo else ():
        node: Any = document
        for step in written.split("."):
            node = node.get(step) if isinstance(node, Mapping) else None
        put(name, node, written)
    renamed = _NEMO if is_nemo else {}
    for section in ("model", "trainer") if is_nemo else _SECTIONS:
        part = document.get(section)
        if isinstance(part, Mapping):
            for key, value in part.items():
                # A section of a section keeps its own names, unless it is a Python object written out.
                if f"{section}.{key}" in renamed or (isinstance(value, Mapping) and "_target_" not in value):
                    continue
                # Bridge's model repeats what mixed_precision decides.
                if section == "model" and not is_nemo and _is_decided_elsewhere(key, document):
                    continue
                put(str(key), value, f"{section}.{key}")
        elif isinstance(part, str):
            put(section, part, section)
    return flags, spelling


def _is_decided_elsewhere(key: str, document: Mapping[str, Any]) -> bool:
    precision = document.get("mixed_precision")
    return bool(precision) and key.startswith(("fp8", "fp16", "bf16", "fp4", "num_layers_at_", "first_last"))


def _read_nemo_precision(draft: Draft) -> None:
    """``trainer.precision`` and Transformer Engine's fp8, which is off unless ``fp8`` itself is on."""
    word = str(draft.raw("precision") or "").lower().removesuffix("-mixed")
    low = {"bf16": "bf16", "16": "fp16", "fp16": "fp16", "bf16-true": "bf16"}.get(word)
    values = dict(draft.file.values)
    spelling = dict(draft.file.spelling)
    if low:
        values[low], spelling[low] = True, spelling["precision"]
    is_on = values.get("fp8") is True
    hybrid = values.pop("fp8_hybrid", None)
    e4m3 = values.pop("fp8_e4m3", None)
    if "fp8" in values:
        values["fp8"] = ("hybrid" if hybrid or not e4m3 else "e4m3") if is_on else False
    if not low and word not in ("32", "fp32", "32-true", ""):
        draft.refuse(f"trainer.precision: got {word[:40]!r}; expected bf16, 16 or 32")
    draft.file = ConfigFile(draft.file.path, values, spelling=spelling)


def _read_nemo_defaults(draft: Draft) -> None:
    optimizer = str(draft.raw("optimizer") or "")
    if "distributed" in optimizer:
        draft.state("parallel.sharding", "zero1", "optimizer")
    if draft.flag("fsdp"):
        strategy = (draft.text("fsdp_sharding_strategy") or "full").lower()
        sharding = {"full": "zero3", "hybrid": "hsdp", "grad": "zero2"}.get(strategy)
        if sharding is None:
            draft.refuse(f"model.fsdp_sharding_strategy: got {strategy[:30]!r}; expected full, hybrid or grad")
        else:
            draft.state("parallel.sharding", sharding, "fsdp", "fsdp_sharding_strategy")
        if reduced := megatron.storage_format(draft.raw("fsdp_grad_reduce_dtype")):
            draft.state("precision.grad_reduce", reduced, "fsdp_grad_reduce_dtype")
    if draft.get("precision.preset") in ("bf16_mixed", "fp8_mixed") and draft.flag("megatron_amp_O2") is False:
        draft.state("precision.params", "fp32", "megatron_amp_O2")
        draft.state("precision.main_params", "none", "megatron_amp_O2")


def _read_bridge_precision(draft: Draft) -> None:
    """A named recipe, such as ``bf16_with_fp8_current_scaling_mixed``."""
    name = draft.text("mixed_precision")
    if name is None:
        return
    word = next((key for key in reversed(_PRESETS) if key in name), None)
    if word is None:
        draft.refuse(
            f"mixed_precision: got {name[:60]!r}; expected e.g. bf16_mixed, bf16_with_fp8_current_scaling_mixed"
        )
        return
    preset, linear = _PRESETS[word]
    draft.state("precision.preset", preset, "mixed_precision")
    if linear != "same":
        draft.state("precision.linear", linear, "mixed_precision")
        draft.warn_mixed("bf16", linear, linear)
    draft.imply("precision.params", "fp16" if preset == "fp16_mixed" else "bf16", f"mixed_precision {name}")
    draft.imply("precision.main_params", "fp32", f"mixed_precision {name}")


def _read_recipe(draft: Draft) -> None:
    """The model that a provider's class or a Hugging Face name means, where the file has no sizes."""
    model = draft.raw("hf_model_id")
    target = draft.raw("_target_")
    texts = [_spaced(str(text)) for text in (model, target) if text]
    named = next((known for text in texts if (known := preset_called(text))), None)
    if named and not draft.has("num_layers"):
        draft.imply("model.preset", named, f"the model {str(model or target)[:80]}")


def _spaced(target: str) -> str:
    """``...llama.Llama3ModelProvider8B`` as ``Llama3-8B``."""
    return target.rsplit(".", 1)[-1].replace("ModelProvider", "-") if "ModelProvider" in target else target
