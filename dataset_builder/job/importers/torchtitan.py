"""torchtitan's TOML, and the JSON that its newer versions save: the same sections, a model by name and flavour."""

from __future__ import annotations

import re
from typing import Any

from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.megatron import storage_format
from dataset_builder.job.importers.model_names import preset_called
from dataset_builder.job.importers.reading import Draft, Reading
from dataset_builder.job.presets import preset

NAME, KNOWN_BY = "torchtitan TOML or JSON", "[training] seq_len, [parallelism], [activation_checkpoint]"
_SECTIONS = ("training", "parallelism", "activation_checkpoint", "model", "model_spec", "optimizer", "lr_scheduler",
             "checkpoint", "metrics", "profiling", "job", "compile", "float8", "quantize", "experimental")  # fmt: skip
_IGNORED = (
    "job.*", "profiling.*", "profiler.*", "metrics.*", "checkpoint.*", "lr_scheduler.*", "comm.*", "validation.*",
    "validator.*", "debug.*", "fault_tolerance.*", "memory_estimation.*", "experimental.*", "model.*", "model_spec.*",
    "optimizer.lr", "optimizer.eps", "optimizer.beta*", "optimizer.weight_decay", "optimizer.implementation",
    "optimizer.*early_step*", "training.max_norm", "training.dataset*", "training.seed", "training.gc_*",
    "training.deterministic", "training.steps", "float8.*", "quantize.*", "mx.*", "activation_checkpoint.*",
    "dataloader.*", "tokenizer.*", "loss.*", "hf_assets_path", "dump_folder", "parallelism.context_parallel_*",
    "parallelism.disable_loss_parallel", "parallelism.pipeline_parallel_schedule_csv", "training.data_parallel_*",
    "compile.backend", "compile.components", "training.mixed_precision_*", "training.warmup_steps",
)  # fmt: skip
_SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "loopedbfs": "interleaved",
    "interleavedzerobubble": "zero_bubble", "zbvzerobubble": "zero_bubble_v", "dualpipev": "dualpipe_v",
}  # fmt: skip


def likeness(file: ConfigFile) -> int:
    batch = ("training.seq_len", "training.local_batch_size", "training.batch_size", "training.mixed_precision_param")
    if not any(file.node(key) is not None for key in batch):
        return 0
    return 1 + sum(isinstance(file.values.get(section), dict) for section in _SECTIONS)


def read(file: ConfigFile) -> Reading:
    draft = Draft(file, "torchtitan")
    layers = _read_model(draft)
    _read_layout(draft, layers)
    _read_batch(draft)
    _read_precision(draft)
    _read_recompute(draft)
    _read_software(draft)
    draft.framework("torchtitan")
    draft.understood(*_IGNORED)
    return draft.reading()


def _read_model(draft: Draft) -> int | None:
    """By flavour, or by the sizes that a saved configuration spells out; returns the layers."""
    name, flavor = (str(draft.raw(f"model.{key}", f"model_spec.{key}") or "") for key in ("name", "flavor"))
    root = "model_spec.model" if draft.has("model_spec.model.dim") else "model"
    if draft.has(f"{root}.dim"):
        _read_sizes(draft, root)
        return draft.get("model.num_layers") if isinstance(draft.get("model.num_layers"), int) else None
    plain = re.sub(r"_(flex|varlen|sdpa|cp)(_attn)?$", "", flavor)
    found = next(
        (known for model in (name, name.replace("llama3", "llama3.1")) if (known := preset_called(f"{model}-{plain}"))),
        None,
    )
    keys = [key for key in ("model.name", "model.flavor", "model_spec.name", "model_spec.flavor") if draft.has(key)]
    if found:
        draft.state("model.preset", found, *keys, note=f"{name} {flavor}")
        return preset(found).get("num_layers")
    if name or flavor:
        draft.ask("model", f"{' '.join(keys)} {name} {flavor} is no shipped model")
    return None


def _read_sizes(draft: Draft, root: str) -> None:
    draft.take("model.hidden_size", f"{root}.dim")
    draft.take("model.num_layers", f"{root}.n_layers")
    draft.take("model.vocab_size", f"{root}.vocab_size")
    for path, key in (("num_attention_heads", "n_heads"), ("num_query_groups", "n_kv_heads"), ("head_dim", "head_dim")):
        draft.take(f"model.{path}", f"{root}.{key}", f"{root}.layer.attention.{key}")
    draft.take("model.ffn_hidden_size", f"{root}.hidden_dim", f"{root}.layer.feed_forward.hidden_dim")
    if draft.get("model.ffn_hidden_size") is None:
        draft.ask("model.ffn_hidden_size", "torchtitan derives it from its ffn_dim_multiplier and multiple_of")
    tied = draft.flag(f"{root}.enable_weight_tying")
    for path, value in (("activation", "swiglu"), ("normalization", "rmsnorm"), ("bias", False),
                        ("position_embedding", "rope"), ("tie_embeddings", bool(tied))):  # fmt: skip
        draft.imply(f"model.{path}", value, "a model of torchtitan")


def _read_layout(draft: Draft, layers: int | None) -> None:
    def degree(*names: str) -> int | None:
        keys = [f"{section}.{name}" for section in ("parallelism", "experimental", "training") for name in names]
        return draft.count(*keys)

    def keys_of(name: str) -> list[str]:
        return [f"{section}.{name}" for section in ("parallelism", "experimental", "training")]

    sizes: dict[str, int] = {}
    for path, name in (
        ("tensor", "tensor_parallel_degree"), ("pipeline", "pipeline_parallel_degree"),
        ("context", "context_parallel_degree"), ("expert", "expert_parallel_degree"),
        ("expert_tensor", "expert_tensor_parallel_degree"),
    ):  # fmt: skip
        value = degree(name)
        if value is not None and value > 0:
            sizes[path] = value
            draft.state(f"parallel.{path}", value, *keys_of(name))
    replicas = degree("data_parallel_replicate_degree") or 1
    shards = degree("data_parallel_shard_degree", "data_parallel_degree")
    shards = -1 if shards is None else shards
    keys = [*keys_of("data_parallel_shard_degree"), *keys_of("data_parallel_replicate_degree"),
            *keys_of("data_parallel_degree")]  # fmt: skip
    keys = [key for key in keys if draft.has(key)] or ["parallelism.data_parallel_shard_degree"]
    _read_sharding(draft, replicas, shards, sizes, keys)
    if shards > 0:
        draft.state("parallel.data", replicas * shards, *keys, note=f"{replicas} x {shards}" if replicas > 1 else "")
    else:
        draft.ask("cluster.num_gpus", "data_parallel_shard_degree -1 takes whatever GPUs there are")
    sequence = draft.flag("parallelism.enable_sequence_parallel")
    draft.default(
        "parallel.sequence_parallel", sizes.get("tensor", 1) > 1 and sequence is not False, "with tensor size"
    )
    is_async = draft.flag(*keys_of("enable_async_tensor_parallel"))
    draft.default("parallel.overlap.tensor", False, "no async tensor parallelism")
    if is_async is not None:
        draft.state("parallel.overlap.tensor", is_async, *keys_of("enable_async_tensor_parallel"))
    if sizes.get("pipeline", 1) > 1:
        _read_schedule(draft, sizes["pipeline"], layers)


def _read_sharding(draft: Draft, replicas: int, shards: int, sizes: dict[str, int], keys: list[str]) -> None:
    reshard = draft.text("parallelism.fsdp_reshard_after_forward") or "default"
    keeps = reshard == "never" or (reshard == "default" and sizes.get("pipeline", 1) > 1)
    if shards == 1:
        draft.state("parallel.sharding", "none" if sizes.get("context", 1) == 1 else "zero3", *keys)
    elif replicas > 1:
        draft.state("parallel.sharding", "hsdp", *keys)
        if shards > 0:
            draft.state("parallel.shard_size", shards * sizes.get("context", 1), *keys)
    elif keeps:
        why = "weights stay gathered between forward and backward"
        draft.state("parallel.sharding", "zero2", *keys, "parallelism.fsdp_reshard_after_forward", note=why)
    else:
        draft.state("parallel.sharding", "zero3", *keys)


def _read_schedule(draft: Draft, stages: int, layers: int | None) -> None:
    """The schedule, and the layers of each chunk: torchtitan counts embedding and head as a layer each."""
    word = draft.text("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule") or "1F1B"
    keys = ("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule")
    name = _SCHEDULES.get(word.lower())
    if name is None:
        draft.refuse(f"pipeline_parallel_schedule: got {word[:40]!r}; expected one of {', '.join(_SCHEDULES)}")
        return
    draft.state("parallel.schedule", name, *keys)
    per_chunk = draft.count("parallelism.pipeline_parallel_layers_per_stage")
    first, last = (draft.count(f"parallelism.pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last"))
    ends = (1 if first is None else first, 1 if last is None else last)
    chunks = 1 if name in ("1f1b", "gpipe") else 2
    if layers and per_chunk:
        chunks = max(1, -(-(layers + sum(ends)) // per_chunk) // stages)
        draft.state("parallel.virtual_pipeline", chunks, "parallelism.pipeline_parallel_layers_per_stage")
    elif chunks > 1:
        draft.default("parallel.virtual_pipeline", chunks, f"{word} has two chunks a rank")
    slots = stages * chunks
    if layers and slots <= layers and draft.has("training.local_batch_size"):  # older versions split evenly
        base, extra = divmod(layers + sum(ends), slots)
        counts = [base + (slot < extra) for slot in range(slots)]
        counts[0] -= ends[0]
        counts[-1] -= ends[1]
        if min(counts) > 0 and len(set(counts)) > 1:
            why = f"embedding and head count as {ends[0]} and {ends[1]} layers"
            draft.default("parallel.layers_per_stage", counts, why)


def _read_batch(draft: Draft) -> None:
    draft.take("batch.seq_length", "training.seq_len")
    keys = ("training.local_batch_size", "training.batch_size")
    local = draft.count(*keys, asks="batch.micro_batch_size")
    micro, steps = local, 1
    if (draft.get("parallel.pipeline") or 1) > 1 and local:
        size = draft.count("parallelism.pipeline_parallel_microbatch_size")
        number = draft.count(
            "parallelism.pipeline_parallel_microbatches", "experimental.pipeline_parallel_microbatches"
        )
        micro = local // number if number and local % number == 0 else size or 1
        steps = local // micro if micro and local % micro == 0 else 1
    if micro:
        draft.state("batch.micro_batch_size", micro, *keys, note="of a pipeline" if micro != local else "")
    total = draft.count("training.global_batch_size")
    if total and total > 0:
        draft.state("batch.global_batch_size", total, "training.global_batch_size")
    else:
        draft.default("batch.gradient_accumulation_steps", steps, "the local batch on every data-parallel rank")
    count = draft.count("training.steps")
    if count and count > 0:
        draft.state("training.steps", count, "training.steps")


def _read_precision(draft: Draft) -> None:
    """Weights in fp32 shards, gathered and computed in bf16, gradients reduced in fp32, unless the file says else."""
    stored = storage_format(draft.raw("training.dtype")) or "fp32"
    compute = storage_format(draft.raw("training.mixed_precision_param")) or "bf16"
    reduce = storage_format(draft.raw("training.mixed_precision_reduce"))
    if stored == "bf16":
        draft.state("precision.preset", "bf16", "training.dtype")
    elif compute == "fp32":
        draft.state("precision.preset", "fp32", "training.mixed_precision_param")
    elif draft.has("training.mixed_precision_param"):
        draft.state("precision.preset", f"{compute}_mixed", "training.mixed_precision_param")
    else:
        draft.default("precision.preset", "bf16_mixed", "mixed_precision_param bfloat16")
    if stored == "fp32" and compute != "fp32":
        draft.default("precision.params", "fp32", "training.dtype float32")
        draft.default("precision.param_gather", compute, "mixed_precision_param")
        draft.default("precision.grad_reduce", "fp32", "mixed_precision_reduce float32")
    if reduce:
        draft.state("precision.grad_reduce", reduce, "training.mixed_precision_reduce")
    _read_eight_bits(draft)
    if state := storage_format(draft.raw("optimizer.state_dtype")):
        draft.state("precision.optimizer_state", state, "optimizer.state_dtype")


def _read_eight_bits(draft: Draft) -> None:
    keys = ("model.converters", "model_converters.converters", "model_converters", "model_spec.converters")
    converters = str(draft.raw(*keys) or "").lower()
    block = "quantize.linear.float8" if draft.has("quantize.linear.float8.recipe_name") else "float8"
    if "float8" in converters:
        recipe = (draft.text(f"{block}.recipe_name", "quantize.linear.float8.recipe_name") or "tensorwise").lower()
        linear = "fp8_rowwise" if recipe.startswith("rowwise") else "fp8_tensorwise"
        draft.state("precision.preset", linear, *keys, f"{block}.recipe_name")
        draft.warn_mixed("bf16", "float8", linear)
        sections = ("float8", "quantize.linear.float8")
        if draft.flag(*(names := tuple(f"{section}.enable_fsdp_float8_all_gather" for section in sections))):
            draft.state("precision.param_gather", "fp8", *names)
        _read_filter(draft, linear, *(f"{section}.filter_fqns" for section in sections))
    elif "mx" in converters:
        draft.state("precision.preset", "mxfp8", *keys)
        draft.warn_mixed("bf16", "mxfp8", "mxfp8")
    draft.raw("float8", "mx", "quantize")


def _read_filter(draft: Draft, linear: str, *keys: str) -> None:
    """The linears left out of float8 by parts of their names: the head is told apart, others are not."""
    names = draft.raw(*keys)
    names = names if isinstance(names, list) else str(names or "").split(",")
    filtered = [name for each in names if (name := str(each).strip())]
    if "output" in filtered:
        draft.state("precision.lm_head", "bf16", *keys)
    if others := [name[:40] for name in filtered if name != "output"]:
        draft.warn(f"{draft.key_of(*keys)} {', '.join(others[:9])}: predicted in {linear} as the other linears are")


def _read_recompute(draft: Draft) -> None:
    mode = draft.text("activation_checkpoint.mode")
    if mode in ("none", "full", "selective"):
        draft.state("parallel.recompute.mode", mode, "activation_checkpoint.mode")
        option = draft.raw("activation_checkpoint.selective_ac_option")
        if mode == "selective":
            draft.warn(f"selective checkpointing ({option or 'op'}) is predicted as recomputing core attention")
    elif mode is not None:
        draft.warn(f"activation_checkpoint.mode {mode[:30]} is predicted as full recomputation")
        draft.state("parallel.recompute.mode", "full", "activation_checkpoint.mode")
    else:
        draft.default("parallel.recompute.mode", "selective")


def _read_software(draft: Draft) -> None:
    components: Any = draft.raw("compile.components")
    enabled = draft.flag("compile.enable")
    older = draft.flag("training.compile")
    if enabled is not None:
        model = components is None or "model" in (components if isinstance(components, list) else [components])
        draft.state("software.compile", enabled and model, "compile.enable", "compile.components")
    elif older is not None:
        draft.state("software.compile", older, "training.compile")
    else:
        draft.default("software.compile", False)
    optimizer = (draft.text("optimizer.name") or "adamw").lower()
    known = next((name for name in ("muon", "adamw", "adam", "sgd", "lion") if name in optimizer), None)
    if known:
        draft.state("optimizer.name", known, "optimizer.name")
    if draft.flag("training.enable_cpu_offload"):
        draft.warn("training.enable_cpu_offload is not modelled; the time is without it")
