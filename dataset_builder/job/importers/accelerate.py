"""accelerate's launcher YAML: processes, machines, mixed precision, FSDP or DeepSpeed; no model and no batch."""

from __future__ import annotations

from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.reading import Draft, Reading

NAME, KNOWN_BY = "accelerate YAML", "distributed_type, num_processes, mixed_precision"
_MARKS = ("distributed_type", "num_processes", "num_machines", "mixed_precision", "compute_environment", "machine_rank",
          "fsdp_config", "rdzv_backend", "main_training_function", "downcast_bf16", "deepspeed_config",
          "parallelism_config", "dynamo_config")  # fmt: skip
_IGNORED = (
    "compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "fsdp_config*", "machine_rank", "use_cpu",
    "main_*", "rdzv_backend", "same_network", "tpu_*", "deepspeed_config*", "gpu_ids", "dynamo_config*", "ipex_config*",
    "megatron_lm_config*", "parallelism_config*", "mpirun_config*", "fp8_config*", "distributed_type", "commands",
    "command_file", "deepspeed_hostfile",
)  # fmt: skip
_SHARDING = {"full_shard": "zero3", "1": "zero3", "shard_grad_op": "zero2", "2": "zero2", "no_shard": "none",
             "3": "none", "hybrid_shard": "hsdp", "4": "hsdp", "hybrid_shard_zero2": "hsdp", "5": "hsdp"}  # fmt: skip


def likeness(file: ConfigFile) -> int:
    count = sum(mark in file.values for mark in _MARKS)
    return count if count >= 2 and "distributed_type" in file.values else 0


def read(file: ConfigFile) -> Reading:
    draft = Draft(file, "accelerate")
    processes, machines = draft.count("num_processes"), draft.count("num_machines")
    if machines:
        draft.state("cluster.num_nodes", machines, "num_machines")
    if processes:
        draft.state("cluster.num_gpus", processes, "num_processes")
    _read_precision(draft)
    kind = (draft.text("distributed_type") or "").upper()
    if kind == "FSDP":
        _read_fsdp(draft)
    elif kind == "DEEPSPEED":
        _read_deepspeed(draft)
    elif kind in ("MULTI_GPU", "NO", ""):
        draft.default("parallel.sharding", "none", f"distributed_type {kind or 'absent'}")
    else:
        draft.warn(f"distributed_type {kind[:30]} is not read; give its own configuration")
    for path, key in (("tensor", "tp_size"), ("context", "cp_size")):
        draft.take(f"parallel.{path}", f"parallelism_config.parallelism_config_{key}", f"parallelism_config.{key}")
    backend = (draft.text("dynamo_config.dynamo_backend", "dynamo_backend") or "no").lower()
    if draft.has("dynamo_config.dynamo_backend", "dynamo_backend"):
        draft.state("software.compile", backend == "inductor", "dynamo_config.dynamo_backend", "dynamo_backend")
    draft.framework("accelerate", is_engine=False)
    draft.understood(*_IGNORED)
    return draft.reading()


def _read_precision(draft: Draft) -> None:
    word = (draft.text("mixed_precision", asks="precision.preset") or "").lower()
    names = {"bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp8": "fp8_mixed", "no": "fp32", "false": "fp32"}
    if word in names:
        draft.state("precision.preset", names[word], "mixed_precision")
    elif word:
        draft.refuse(f"mixed_precision: got {word[:30]!r}; expected one of no, bf16, fp16, fp8")
    elif not draft.has("deepspeed_config.deepspeed_config_file"):  # which decides instead
        draft.default("precision.preset", "fp32", "mixed_precision no")


def _read_fsdp(draft: Draft) -> None:
    """FSDP 1 by strategy; FSDP 2 by whether weights are resharded. Its policy gathers and reduces as computed."""
    block = "fsdp_config"
    strategy = draft.text(f"{block}.fsdp_sharding_strategy", f"{block}.sharding_strategy")
    reshard = draft.flag(f"{block}.fsdp_reshard_after_forward")
    if strategy is not None and (name := _SHARDING.get(strategy.lower())):
        draft.state("parallel.sharding", name, f"{block}.fsdp_sharding_strategy", f"{block}.sharding_strategy")
    elif strategy is not None:
        draft.refuse(f"{block}.fsdp_sharding_strategy: got {strategy[:40]!r}; expected e.g. FULL_SHARD")
    else:
        name = "zero2" if reshard is False else "zero3"
        draft.state("parallel.sharding", name, f"{block}.fsdp_reshard_after_forward", block)
    read_fsdp_formats(draft)
    if (checkpointing := draft.flag(f"{block}.fsdp_activation_checkpointing")) is not None:
        mode = "full" if checkpointing else "none"
        draft.state("parallel.recompute.mode", mode, f"{block}.fsdp_activation_checkpointing")
    if draft.flag(f"{block}.fsdp_offload_params"):
        draft.warn("fsdp_offload_params is not modelled; the time is without it")


def read_fsdp_formats(draft: Draft) -> None:
    """accelerate's policy for FSDP gathers weights and reduces gradients in the format of autocast."""
    low = {"bf16_mixed": "bf16", "fp16_mixed": "fp16"}.get(str(draft.get("precision.preset")))
    if low:
        for path in ("param_gather", "grad_reduce"):
            draft.imply(f"precision.{path}", low, f"FSDP under mixed_precision {low}")


def _read_deepspeed(draft: Draft) -> None:
    block = "deepspeed_config"
    if name := draft.text(f"{block}.deepspeed_config_file"):
        draft.refer(name)
        draft.ask("parallel.sharding", f"deepspeed_config_file {name[:80]} is another file; give it too")
        return
    stage = draft.count(f"{block}.zero_stage", asks="parallel.sharding")
    if stage is not None and 0 <= stage <= 3:
        draft.state("parallel.sharding", ("none", "zero1", "zero2", "zero3")[stage], f"{block}.zero_stage")
    draft.default("parallel.sharding", "zero2", "zero_stage 2")
    draft.take("batch.gradient_accumulation_steps", f"{block}.gradient_accumulation_steps")
    for part in ("offload_optimizer_device", "offload_param_device"):
        if (draft.text(f"{block}.{part}") or "none") != "none":
            draft.warn(f"{part} is not modelled; the time is without it")
