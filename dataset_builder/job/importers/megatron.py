"""Megatron-LM's arguments as a job: batch, layout, precision, software. The model is ``megatron_model``'s.

Names have underscores; launch scripts, argument YAML, Primus, NeMo and Megatron-Bridge all come here. Defaults are
those of Megatron-LM's ``arguments.py``.
"""

from __future__ import annotations

import re
from typing import Any

from dataset_builder.job.importers.megatron_model import read_model
from dataset_builder.job.importers.reading import Draft, as_count, as_text, is_open
from dataset_builder.job.reasons import shown

_RECIPES = {"delayed": "fp8_delayed", "tensorwise": "fp8_current", "current": "fp8_current", "mxfp8": "mxfp8",
            "blockwise": "fp8_blockwise", "subchannel": "fp8_blockwise", "rowwise": "fp8_rowwise"}  # fmt: skip
_IGNORED = (
    "lr", "min_lr", "lr_*", "*_lr", "decoupled_*", "weight_decay*", "start_weight_decay", "end_weight_decay", "adam_*",
    "sgd_*", "clip_grad", "init_method*", "seed", "log_*", "logging_level", "timing_*", "tensorboard_*", "wandb_*",
    "save*", "load*", "eval_*", "exit_*", "ckpt_*", "*_ckpt*", "dist_ckpt*", "auto_detect_*", "async_*", "finetune",
    "data_*", "train_data*", "valid_data*", "test_data*", "mock_data", "split", "tokenizer_*", "vocab_*", "merge_file",
    "num_workers", "no_mmap*", "dataloader_*", "reset_*", "eod_mask_loss", "no_create_attention_mask*", "tiktoken_*",
    "distributed_backend", "distributed_timeout*", "manual_gc*", "empty_unused_*", "use_mcore_models", "use_legacy*",
    "rotary_*", "norm_epsilon", "layernorm_epsilon", "apply_layernorm*", "attention_dropout", "attention_softmax*",
    "cross_entropy_*", "calculate_per_token_loss", "check_*", "no_check_*", "profile*", "use_pytorch_profiler",
    "enable_experimental", "node_rank", "master_*", "rdzv*", "local_rank", "max_restarts", "rescale*", "mscale*",
    "no_rope_fusion", "apply_rope*", "fp8_amax*", "fp8_margin", "fp8_interval", "fp8_wgrad", "mtp_*", "override_*",
    "no_load*", "no_save*", "initial_loss_scale", "loss_scale*", "min_loss_scale", "hysteresis", "use_checkpoint*",
    "no_initialization", "use_cpu_initialization", "global_rank", "straggler*", "inference_*", "result_rejected*",
    "accumulate_allreduce*", "nccl_*", "kv_channels", "gradient_accumulation_fusion", "no_gradient_accum*", "te_rng*",
    "no_position_embedding", "deepspeed*", "abort_on_unmet*", "kill_switch_path", "embed_layernorm",
    "extra_vocab_size", "max_padding_length", "patch_tokenizer_type", "train_mode", "dataset",
    "max_tokens_to_oom", "use_persistent_*", "skip_train", "mmap_*", "bias_*_fusion", "no_bias_*", "no_masked_*",
    "masked_softmax*", "no_persist*", "persist_layer_norm", "distribute_saved*", "tee", "log_dir", "redirects",
)  # fmt: skip


def read_arguments(draft: Draft, complete: bool) -> None:
    """States everything that Megatron's arguments say; ``complete``: what is absent is Megatron's default."""
    _read_layout(draft, complete)
    read_model(draft, complete)
    _read_stages(draft)
    _read_batch(draft)
    _read_precision(draft, complete)
    _read_sharding(draft, complete)
    _read_recompute(draft)
    _read_software(draft)
    _read_length(draft)
    draft.understood(*_IGNORED)


def _read_layout(draft: Draft, complete: bool) -> None:
    for path, key in (
        ("tensor", "tensor_model_parallel_size"), ("pipeline", "pipeline_model_parallel_size"),
        ("context", "context_parallel_size"), ("expert", "expert_model_parallel_size"),
        ("expert_tensor", "expert_tensor_parallel_size"),
    ):  # fmt: skip
        draft.take(f"parallel.{path}", key)
    if (on := draft.flag("sequence_parallel", asks="parallel.sequence_parallel")) is not None:
        tensor = draft.get("parallel.tensor")
        if on and tensor in (None, 1) and not draft.has("tensor_model_parallel_size") and complete:
            tensor = 1
        if on and tensor == 1:
            draft.warn("sequence parallelism has no effect with tensor size 1")
        draft.state("parallel.sequence_parallel", on and tensor != 1, "sequence_parallel")
    elif complete:
        draft.default("parallel.sequence_parallel", False)
    experts = draft.has("num_experts", "num_moe_experts")
    if experts and complete and draft.get("parallel.expert_tensor") is None and draft.get("parallel.tensor"):
        draft.default("parallel.expert_tensor", draft.get("parallel.tensor"), "the tensor size")


def _read_stages(draft: Draft) -> None:
    """How layers are dealt out to stages: chunks a stage, uneven ends, or a layout string."""
    pipeline = draft.get("parallel.pipeline") or 1
    layers = draft.get("model.num_layers")
    chunks = draft.take("parallel.virtual_pipeline", "num_virtual_stages_per_pipeline_rank",
                        "virtual_pipeline_model_parallel_size")  # fmt: skip
    per_chunk = draft.count("num_layers_per_virtual_pipeline_stage", asks="parallel.virtual_pipeline")
    if per_chunk and layers:
        if layers % (pipeline * per_chunk):
            draft.refuse(
                f"{draft.key_of('num_layers_per_virtual_pipeline_stage')}: {layers} layers do not divide into "
                f"chunks of {per_chunk} on {pipeline} stages ({layers} / ({pipeline} x {per_chunk}))"
            )
        else:
            chunks = layers // (pipeline * per_chunk)
            note = f"{layers} layers / (pipeline {pipeline} x {per_chunk})"
            draft.state("parallel.virtual_pipeline", chunks, "num_layers_per_virtual_pipeline_stage", note=note)
    layout = draft.text("pipeline_model_parallel_layout")
    first = draft.count("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
    last = draft.count("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
            "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")  # fmt: skip
    split: tuple[str, ...] = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    embedding, loss = (draft.flag(key) for key in split)
    if "embedding" in (draft.text("pp_partition_method") or ""):  # Megatron-DeepSpeed's, by type of layer
        split, embedding, loss = ("pp_partition_method",), True, True
    slots = pipeline * (chunks or 1)
    if not isinstance(layers, int) or not 1 < slots <= 10_000:
        return
    counts: list[int] | None = None
    if layout:
        counts = _layout_counts(layout)
        if sum(counts) != layers or len(counts) % pipeline:
            draft.refuse(
                f"{draft.key_of('pipeline_model_parallel_layout')}: {sum(counts)} layers in {len(counts)} chunks; "
                f"expected {layers} layers in a multiple of {pipeline} chunks"
            )
            return
        draft.state("parallel.virtual_pipeline", len(counts) // pipeline, "pipeline_model_parallel_layout")
        draft.state("parallel.layers_per_stage", counts, "pipeline_model_parallel_layout", note="by chunk")
    elif (first or last) and slots == pipeline:
        inner = layers - (first or 0) - (last or 0)
        others = pipeline - bool(first) - bool(last)
        if others and inner % others == 0:
            counts = [*([first] if first else []), *[inner // others] * others, *([last] if last else [])]
            draft.state("parallel.layers_per_stage", counts, *ends)
    elif embedding or loss:
        total = layers + bool(embedding) + bool(loss)
        if total % slots:
            draft.refuse(f"{total} = {layers} layers + embedding or loss do not divide into {slots} chunks")
            return
        counts = [total // slots] * slots
        counts[0] -= bool(embedding)
        counts[-1] -= bool(loss)
        draft.state("parallel.layers_per_stage", counts, *split)


def _layout_counts(layout: str) -> list[int]:
    """Transformer layers (``t``) of each chunk in a layout such as ``Et*3|(tt|)*29m|L``."""
    text = re.sub(r"[\s,]", "", layout)[:2000]
    while match := re.search(r"(\(([^()]*)\)|[A-Za-z])\*(\d{1,4})", text):
        unit = match[2] if match[2] is not None else match[1]
        text = text[: match.start()] + unit * min(int(match[3]), 4000) + text[match.end() :]
        if len(text) > 20_000:
            return []
    return [chunk.count("t") for chunk in text.replace("(", "").replace(")", "").split("|")]


def _read_batch(draft: Draft) -> None:
    draft.take("batch.micro_batch_size", "micro_batch_size")
    draft.take("batch.global_batch_size", "global_batch_size")
    draft.take("batch.seq_length", "seq_length", "encoder_seq_length", "sequence_length")
    if draft.get("model.architecture") == "encoder_decoder":
        draft.take("batch.target_seq_length", "decoder_seq_length")
    schedule = draft.raw("step_batch_size_schedule", "rampup_batch_size")
    if schedule is not None:
        draft.warn(
            f"{draft.key_of('step_batch_size_schedule', 'rampup_batch_size')} {str(schedule)[:80]}: the batch grows in "
            f"phases; the final one ({draft.get('batch.global_batch_size') or 'not stated'}) is predicted, "
            "--set batch.global_batch_size=N predicts another"
        )


def _read_precision(draft: Draft, complete: bool) -> None:
    fp16, bf16 = draft.flag("fp16", asks="precision.preset"), draft.flag("bf16", asks="precision.preset")
    if fp16 and bf16:
        draft.refuse("fp16 and bf16 are both on; expected one of them")
        return
    is_narrow_open = _ask_eight_bits(draft)
    if fp16 or bf16:
        low = "fp16" if fp16 else "bf16"
        if not is_narrow_open:
            draft.state("precision.preset", f"{low}_mixed", low)
        draft.imply("precision.params", low, f"{low}: weights are stored in it, with fp32 master weights")
        draft.imply("precision.main_params", "fp32", f"{low}: fp32 master weights")
        _read_gradients(draft, low)
    elif complete:
        draft.default("precision.preset", "fp32", "neither fp16 nor bf16 is on")
        return
    if not is_narrow_open:
        _read_eight_bits(draft, bool(bf16))
    _read_states(draft)


def _read_gradients(draft: Draft, low: str) -> None:
    """bf16 gradients are accumulated and reduced in fp32 unless told otherwise, fp16 ones the other way round."""
    in_low = draft.flag("grad_reduce_in_bf16")
    in_full = draft.flag("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32")
    for path in ("precision.grad_accum", "precision.grad_reduce"):
        if in_low:
            draft.state(path, "bf16", "grad_reduce_in_bf16")
        elif in_full is not None:
            draft.state(path, "fp32" if in_full else low, "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32")
        else:
            draft.default(path, "fp32" if low == "bf16" else "fp16", f"with {low}")


def _ask_eight_bits(draft: Draft) -> bool:
    """Asks for the precision where nobody knows whether or how 8 or 4 bits are on; whether it did."""
    for keys in (("fp4_format", "fp4"), ("fp8_format", "fp8"), ("fp8_recipe",)):
        value = draft.raw(*keys)
        if is_open(value):
            draft.ask("precision.preset", f"{draft.key_of(*keys)} is {shown(value)}")
            draft.understood("fp8_*", "fp4_*", "first_last_layers_bf16", "num_layers_at_*_in_bf16")
            return True
    return False


def _read_eight_bits(draft: Draft, bf16: bool) -> None:
    four, eight = draft.raw("fp4_format", "fp4"), draft.raw("fp8_format", "fp8")
    recipe = (draft.text("fp8_recipe") or "delayed").lower()
    draft.raw("fp4_recipe")
    on = [
        value for value in (four, eight) if value is not None and str(value).lower() not in ("false", "none", "0", "")
    ]
    if not on:
        draft.understood("fp8_*", "fp4_*", "first_last_layers_bf16", "num_layers_at_*_in_bf16")
        return
    keys: tuple[str, ...] = ("fp8_format", "fp8", "fp8_recipe")
    if four in on:
        linear, keys = "nvfp4", ("fp4_format", "fp4")
    elif recipe in _RECIPES:
        linear = _RECIPES[recipe]
    else:
        draft.refuse(f"{draft.key_of('fp8_recipe')}: got {recipe!r}; expected one of {', '.join(_RECIPES)}")
        return
    presets = {"nvfp4": "nvfp4", "mxfp8": "mxfp8", "fp8_blockwise": "fp8_blockwise"}
    draft.state("precision.preset", presets.get(linear, "fp8_mixed"), *keys, "bf16")
    draft.state(
        "precision.linear", linear, *keys, note="" if draft.has("fp8_recipe") or four in on else "delayed scaling"
    )
    if bf16:
        draft.warn_mixed(draft.key_of("bf16"), draft.key_of(*keys), linear)
    if draft.flag("fp8_param_gather", "fp8_param"):
        draft.state("precision.param_gather", "fp8", "fp8_param_gather", "fp8_param")
    if draft.flag("fp8_dot_product_attention", "fp8_multi_head_attention"):
        draft.state("precision.attention", "fp8", "fp8_dot_product_attention", "fp8_multi_head_attention")
    ends = {"first": "num_layers_at_start_in_bf16", "last": "num_layers_at_end_in_bf16"}
    kept = {end: draft.count(key) for end, key in ends.items()}
    if draft.flag("first_last_layers_bf16"):
        for end, key in ends.items():
            count = kept[end]
            draft.state(f"precision.high_precision_layers.{end}", 1 if count is None else count, key,
                        "first_last_layers_bf16")  # fmt: skip


def _read_states(draft: Draft) -> None:
    """The precision-aware optimizer keeps its states, master weights and gradients in formats of their own."""
    for path, key in (
        ("precision.optimizer_state", "exp_avg_dtype"), ("precision.main_params", "main_params_dtype"),
        ("precision.grad_accum", "main_grads_dtype"),
    ):  # fmt: skip
        value = draft.raw(key)
        name = storage_format(value)
        if value is not None and draft.flag("use_precision_aware_optimizer") is not False and name:
            draft.state(path, name, key)
    draft.raw("exp_avg_sq_dtype", "use_precision_aware_optimizer")


def storage_format(value: Any) -> str | None:
    """``fp32``, ``fp16`` or ``bf16`` of a dtype in any spelling; ``None`` for anything else."""
    if isinstance(value, dict):
        value = value.get("_target_")
    word = str(value).lower().rsplit(".", 1)[-1]
    return {"fp32": "fp32", "float32": "fp32", "float": "fp32", "32": "fp32", "fp16": "fp16", "float16": "fp16",
            "half": "fp16", "16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}.get(word)  # fmt: skip


def _read_sharding(draft: Draft, complete: bool) -> None:
    distributed = draft.flag("use_distributed_optimizer", asks="parallel.sharding")
    fsdp = (draft.flag("use_torch_fsdp2", asks="parallel.sharding"),
            draft.flag("use_megatron_fsdp", "use_custom_fsdp", asks="parallel.sharding"))  # fmt: skip
    strategy = draft.text("data_parallel_sharding_strategy")
    names = {"no_shard": "none", "optim": "zero1", "optim_grads": "zero2", "optim_grads_params": "zero3"}
    zero = draft.count("zero_stage", asks="parallel.sharding")
    if any(fsdp):
        name = names.get(strategy or "", "zero3") if fsdp[1] else "zero3"
        draft.state("parallel.sharding", name, "data_parallel_sharding_strategy", "use_megatron_fsdp",
                    "use_custom_fsdp", "use_torch_fsdp2")  # fmt: skip
    elif zero == 0 and draft.flag("deepspeed") and draft.flag("bf16"):
        why = "DeepSpeed's BF16_Optimizer shards optimizer states over data-parallel ranks even at stage 0"
        draft.imply("parallel.sharding", "zero1", f"{draft.key_of('zero_stage')} 0 with bf16: {why}")
        draft.warn(f"{draft.key_of('zero_stage')} 0 with bf16 is taken as zero1: {why}")
    elif zero is not None and 0 <= zero <= 3:
        draft.state("parallel.sharding", ("none", "zero1", "zero2", "zero3")[zero], "zero_stage")
    elif distributed is not None:
        draft.state("parallel.sharding", "zero1" if distributed else "none", "use_distributed_optimizer")
    elif complete:
        draft.default("parallel.sharding", "none")
    for path, key in (("grad_reduce", "overlap_grad_reduce"), ("param_gather", "overlap_param_gather"),
                      ("tensor", "tp_comm_overlap"), ("pipeline", "overlap_p2p_comm")):  # fmt: skip
        value = draft.flag(key, asks=f"parallel.overlap.{path}")
        if value is not None:
            draft.state(f"parallel.overlap.{path}", value, key)
        elif complete and path in ("grad_reduce", "param_gather", "tensor"):
            draft.default(f"parallel.overlap.{path}", False)
    if draft.flag("no_overlap_p2p_communication"):
        draft.state("parallel.overlap.pipeline", False, "no_overlap_p2p_communication")
    if draft.flag("optimizer_cpu_offload", "cpu_optimizer", "cpu_offloading"):
        draft.warn("offloading to the host is not modelled; the time is without it")


def _read_recompute(draft: Draft) -> None:
    mode = "parallel.recompute.mode"
    granularity = draft.text("recompute_granularity", asks=mode)
    method, modules = draft.text("recompute_method"), draft.raw("recompute_modules")
    if (older := draft.text("activations_checkpoint_method", asks=mode)) and granularity is None:
        granularity, method = "full", older  # the spelling of Megatron-LM 2, which knows whole layers alone
    count = ("recompute_num_layers", "activations_checkpoint_num_layers")
    draft.raw(*count)
    selective, full = draft.flag("recompute_activations", asks=mode), draft.flag("checkpoint_activations", asks=mode)
    if (selective or full) and granularity is None:
        draft.state(mode, "selective" if selective else "full", "recompute_activations", "checkpoint_activations")
    elif granularity in ("selective", "full"):
        draft.state(mode, granularity, "recompute_granularity", "activations_checkpoint_method")
        layers = None
        if granularity == "full" and method == "block":  # uniform recomputes all layers, in whatever steps
            layers = draft.count(*count, asks="parallel.recompute.full_layers")
        if layers is not None:
            chunks = draft.get("parallel.virtual_pipeline") or 1
            draft.state("parallel.recompute.full_layers", layers * chunks, *count,
                        note=f"block, in each of {chunks} chunks" if chunks > 1 else "block")  # fmt: skip
        if granularity == "selective" and modules and "core_attn" not in str(modules):
            draft.warn(f"recompute_modules {str(modules)[:80]}: predicted as recomputing core attention")
    elif granularity is None:
        draft.default(mode, "none")
    else:
        draft.refuse(f"{draft.key_of('recompute_granularity')}: got {granularity!r}; expected selective or full")


def _read_software(draft: Draft) -> None:
    backend = (draft.text("attention_backend") or "").lower().rsplit(".", 1)[-1]
    if backend in ("flash", "fused"):
        draft.state("software.attention", "flash", "attention_backend")
    elif backend in ("unfused", "local"):
        draft.state("software.attention", "unfused", "attention_backend")
    elif draft.flag("use_flash_attn", "use_flash_attn_v2"):
        draft.state("software.attention", "flash", "use_flash_attn", "use_flash_attn_v2")
    if (deterministic := draft.flag("deterministic_mode")) is not None:
        draft.state("software.deterministic", deterministic, "deterministic_mode")
    implementation = draft.text("cuda_graph_impl")
    graphs = draft.flag("enable_cuda_graph", "external_cuda_graph")
    if (implementation and implementation != "none") or graphs:
        draft.state("software.cuda_graphs", True, "cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
    draft.understood("cuda_graph_*")
    draft.raw("transformer_impl")
    optimizer = draft.value(as_text, "optimizer")
    if isinstance(optimizer, str) and optimizer:
        known = next((name for name in ("muon", "lion", "adamw", "adam", "sgd") if name in optimizer.lower()), None)
        if known:
            draft.state("optimizer.name", known, "optimizer")
        else:
            draft.warn(f"{draft.key_of('optimizer')} {optimizer[:40]} is not modelled; adam is taken")
    if draft.get("optimizer.name") is None:
        draft.default("optimizer.name", "adam")


def _read_length(draft: Draft) -> None:
    steps, samples = draft.value(as_count, "train_iters"), draft.value(as_count, "train_samples")
    if steps and steps > 0:
        draft.state("training.steps", steps, "train_iters")
    elif samples and samples > 0:
        draft.state("training.samples", samples, "train_samples")
