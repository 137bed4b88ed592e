"""A DeepSpeed configuration: batch, ZeRO stage and precision. ``auto`` is asked for: only a trainer would fill it.

What is absent follows DeepSpeed: gradients are communicated in the format that is computed in, and accumulated in it
unless bf16 runs without ZeRO, where they are kept in fp32.
"""

from __future__ import annotations

from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.megatron import storage_format
from dataset_builder.job.importers.reading import Draft, Reading, as_count, is_open

NAME, KNOWN_BY = "DeepSpeed JSON", "zero_optimization, train_micro_batch_size_per_gpu"
_MARKS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
          "fp16", "bf16", "gradient_clipping", "steps_per_print", "zero_allow_untested_optimizer")  # fmt: skip
_STAGES = ("none", "zero1", "zero2", "zero3")
_IGNORED = (
    "gradient_clipping", "zero_allow_untested_optimizer", "steps_per_print", "wall_clock_breakdown", "scheduler*",
    "optimizer.params*", "fp16.*", "bf16.*", "zero_optimization.*", "activation_checkpointing*", "flops_profiler*",
    "tensorboard*", "wandb*", "csv_monitor*", "comms_logger*", "dump_state", "prescale_gradients", "checkpoint*",
    "zero_force_ds_cpu_optimizer", "memory_breakdown", "amp*", "aio*", "gradient_predivide_factor", "data_efficiency*",
    "elasticity*", "sparse_gradients", "monitor_config*", "seed", "optimizer.legacy_fusion", "gradient_allreduce*",
)  # fmt: skip


def likeness(file: ConfigFile) -> int:
    is_other = {"num_layers", "num-layers", "model", "base_model", "model_name_or_path"} & set(file.values)
    count = sum(mark in file.values for mark in _MARKS)
    return 0 if is_other or file.script is not None or count < 2 else count


def read(file: ConfigFile) -> Reading:
    draft = Draft(file, "DeepSpeed")
    read_batch(draft)
    if draft.get("batch.micro_batch_size") and not draft.has("train_batch_size"):
        draft.default("batch.gradient_accumulation_steps", 1)
    read_precision(draft)
    read_zero(draft)
    _read_layout(draft)
    draft.framework("deepspeed")
    optimizer = (draft.text("optimizer.type") or "").lower()
    if optimizer:
        known = next((name for name in ("muon", "lion", "lamb", "adamw", "adam", "sgd") if name in optimizer), None)
        if known:
            draft.state("optimizer.name", known, "optimizer.type")
        else:
            draft.warn(f"optimizer.type {optimizer[:40]} is not modelled; adamw is taken")
    draft.understood(*_IGNORED)
    return draft.reading()


def read_batch(draft: Draft) -> None:
    """States batch sizes; shared with GPT-NeoX, whose files hold the same keys."""
    draft.take("batch.micro_batch_size", "train_micro_batch_size_per_gpu")
    draft.take("batch.gradient_accumulation_steps", "gradient_accumulation_steps")
    draft.take("batch.global_batch_size", "train_batch_size")


def read_precision(draft: Draft) -> None:
    """``bf16``, ``fp16``, or fp32 when neither is on."""
    keys = {"fp16": ("fp16.enabled",), "bf16": ("bf16.enabled", "bfloat16.enabled")}
    blocks = {low: draft.raw(*names) for low, names in keys.items()}
    on = [low for low, names in keys.items() if draft.flag(*names)]
    if len(on) > 1:
        draft.refuse("fp16.enabled and bf16.enabled are both true; expected one of them")
    elif on:
        state_low(draft, on[0], f"{on[0]}.enabled")
    elif any(is_open(value) for value in blocks.values()):
        left = " and ".join(f"{low}.enabled" for low, value in blocks.items() if is_open(value))
        draft.ask("precision.preset", f'{left} "auto"')
    else:
        draft.default("precision.preset", "fp32", "neither fp16 nor bf16 is enabled")


def state_low(draft: Draft, low: str, *keys: str) -> None:
    """16-bit weights with fp32 master weights, and the formats that gradients have then."""
    draft.state("precision.preset", f"{low}_mixed", *keys)
    draft.imply("precision.params", low, f"{keys[0]}: weights are stored in it")
    draft.imply("precision.main_params", "fp32", f"{keys[0]}: fp32 master weights")
    communicated = storage_format(draft.raw("communication_data_type"))
    if communicated:
        draft.state("precision.grad_reduce", communicated, "communication_data_type")
    elif draft.flag("fp32_allreduce"):
        draft.state("precision.grad_reduce", "fp32", "fp32_allreduce")
    else:
        draft.default("precision.grad_reduce", low, f"communicated as computed, in {low}")
    accumulated = storage_format(draft.raw("data_types.grad_accum_dtype"))
    stage = draft.raw("zero_optimization.stage")
    if accumulated:
        draft.state("precision.grad_accum", accumulated, "data_types.grad_accum_dtype")
    else:
        without_zero = str(stage) in ("0", "None")
        draft.default("precision.grad_accum", "fp32" if low == "bf16" and without_zero else low)


def read_zero(draft: Draft) -> None:
    """The ZeRO stage, one number; a list is for the autotuner, which tries one after the other. Follows the formats."""
    stage = draft.raw("zero_optimization.stage")
    if isinstance(stage, list):
        draft.refuse(
            f"zero_optimization.stage: got {stage!r:.60}, which the autotuner would try one after the other; "
            "expected one stage, 0 to 3"
        )
        return
    number = draft.value(as_count, "zero_optimization.stage", asks="parallel.sharding")
    is_off = number == 0 or not draft.has("zero_optimization.stage")
    if is_off and _has_bf16_optimizer(draft):
        _state_bf16_optimizer(draft)
    elif number is None:
        draft.default("parallel.sharding", "none", "no zero_optimization.stage")
    elif not 0 <= number <= 3:
        draft.refuse(f"zero_optimization.stage: got {number}; expected 0 to 3")
    else:
        draft.state("parallel.sharding", _STAGES[number], "zero_optimization.stage")
        hierarchical = draft.count("zero_optimization.zero_hpz_partition_size")
        if number == 3 and hierarchical and hierarchical > 1:
            draft.warn(f"zero_hpz_partition_size {hierarchical}: its second copy of the weights is not modelled")
    if (overlap := draft.flag("zero_optimization.overlap_comm")) is not None:
        draft.state("parallel.overlap.grad_reduce", overlap, "zero_optimization.overlap_comm")
    for part in ("offload_optimizer", "offload_param"):
        device = draft.raw(f"zero_optimization.{part}.device")
        if device not in (None, "none") and not is_open(device):
            draft.warn(f"zero_optimization.{part} to {str(device)[:20]} is not modelled; the time is without it")
    # What the two were called before: switches, as the CPU was the only place to go.
    for key in ("cpu_offload", "cpu_offload_params", "cpu_offload_param"):
        if draft.flag(f"zero_optimization.{key}"):
            draft.warn(f"zero_optimization.{key} is not modelled; the time is without it")
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if draft.flag(f"zero_optimization.{key}"):
            draft.warn(f"zero_optimization.{key} (ZeRO++) is not modelled; messages keep their format")


def _has_bf16_optimizer(draft: Draft) -> bool:
    """Whether bf16 without ZeRO runs in BF16_Optimizer: as its gradients are accumulated in fp32, the default there.

    From github.com/deepspeedai/DeepSpeed, deepspeed/runtime/engine.py: ``_do_optimizer_sanity_check``. Since its pull
    request 7515 (August 2025) only pipelines do; others are plain data parallel and accumulate in bf16, which had been
    an error before and so tells the two apart where it is stated.
    """
    return (draft.get("precision.preset"), draft.get("precision.grad_accum")) == ("bf16_mixed", "fp32")


def _state_bf16_optimizer(draft: Draft) -> None:
    why = "DeepSpeed's BF16_Optimizer shards optimizer states over data-parallel ranks even at stage 0"
    stage = f"{draft.key_of('zero_optimization.stage')} 0 with bf16"
    draft.imply("parallel.sharding", "zero1", f"{stage}: {why}")
    newer = "" if draft.get("parallel.pipeline") else (
        "; since September 2025 it does so in pipelines only, and nothing is sharded otherwise: "
        "--set parallel.sharding=none --set precision.grad_accum=bf16"
    )  # fmt: skip
    draft.warn(f"{stage} is taken as zero1: {why}{newer}")


def _read_layout(draft: Draft) -> None:
    draft.take("parallel.tensor", "tensor_parallel.autotp_size")
    size = draft.count("sequence_parallel_size")
    if size and size > 1:
        draft.state("parallel.context", size, "sequence_parallel_size")
