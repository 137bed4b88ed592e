"""MaxText's YAML: a model's sizes with ``base_`` names, or a run's configuration with its mesh of ici and dcn axes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.megatron import storage_format
from dataset_builder.job.importers.reading import Draft, Reading, as_number
from dataset_builder.job.importers.trainers import read_named_model
from dataset_builder.job.presets import preset
from dataset_builder.job.reasons import shown

NAME, KNOWN_BY = "MaxText YAML", "base_emb_dim, base_num_decoder_layers, decoder_block"
_MARKS = ("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_num_decoder_layers",
          "mlp_activations", "decoder_block", "logits_via_embedding", "per_device_batch_size", "max_target_length",
          "ici_fsdp_parallelism", "ici_tensor_parallelism", "remat_policy")  # fmt: skip
_IGNORED = (
    "normalization_layer_epsilon", "final_logits_soft_cap", "attn_logits_soft_cap", "rope_*", "enable_dropout",
    "use_*_norm", "*_path", "base_config", "run_name", "hardware", "dataset_*", "tokenizer_*", "learning_rate*",
    "adam_*", "enable_checkpointing", "checkpoint*", "async_checkpointing", "base_output_directory", "profiler*",
    "scan_layers", "logits_dot_in_fp32", "log_period", "model_name", "megablox", "sparse_matmul", "load_balance*",
    "routed_*", "n_routing_groups", "topk_routing_group", "mscale", "max_position_embeddings", "original_max_*",
    "sharding_tolerance", "cosine_*", "gradient_clipping*", "warmup*", "dcn_*", "ici_*", "weight_dtype", "dtype",
    "global_parameter_scale", "query_pre_attn_scalar", "local_rope*", "attention_type", "beta_*", "decoder_block",
)  # fmt: skip
# Decoder blocks of which one MaxText layer holds two.
_LAYERS_OF_BLOCK = {"gemma2": 2}
_MOE_WIDTH = ("base_moe_mlp_dim", "base_moe_dim")  # the newer key, and what it was called before


def likeness(file: ConfigFile) -> int:
    count = sum(mark in file.values for mark in _MARKS)
    return count if count >= 3 else 0


def read(file: ConfigFile) -> Reading:
    draft = Draft(file, "MaxText")
    _read_model(draft)
    _read_mesh(draft)
    draft.take("batch.seq_length", "max_target_length")
    _read_batch(draft)
    _read_precision(draft)
    policy = draft.text("remat_policy")
    if policy is not None:
        mode = "full" if policy == "full" else "none" if policy in ("none", "minimal_offloaded") else "selective"
        draft.state("parallel.recompute.mode", mode, "remat_policy")
        if mode == "selective":
            draft.warn(f"remat_policy {policy[:40]} is predicted as recomputing core attention")
    kernel = draft.text("attention")
    if kernel:
        draft.state("software.attention", "unfused" if kernel == "dot_product" else "flash", "attention")
    draft.default("parallel.recompute.mode", "full", "remat_policy full")
    draft.default("software.compile", True, "XLA compiles the step")
    steps = draft.count("steps")
    if steps and steps > 0:
        draft.state("training.steps", steps, "steps")
    optimizer = (draft.text("opt_type") or "").lower()
    if "adam" in optimizer or "sgd" in optimizer or "muon" in optimizer:
        known = next(name for name in ("muon", "sgd", "adamw") if name.rstrip("w") in optimizer)
        draft.state("optimizer.name", known, "opt_type")
    draft.framework("maxtext")
    draft.understood(*_IGNORED)
    return draft.reading()


def _read_model(draft: Draft) -> None:
    if not draft.has("base_emb_dim") and draft.raw("model_name") not in (None, "default"):
        _read_model_by_name(draft)
        return
    block = (draft.text("decoder_block") or "").lower()
    layers = draft.count("base_num_decoder_layers", asks="model.num_layers")
    if layers is None and not draft.has("base_emb_dim"):
        return
    merged = _LAYERS_OF_BLOCK.get(block, 1)
    if layers is not None:
        note = f"{merged} layers in each of its {layers} blocks" if merged > 1 else ""
        draft.state("model.num_layers", layers * merged, "base_num_decoder_layers", note=note)
    heads = draft.take("model.num_attention_heads", "base_num_query_heads")
    for path, key in (("hidden_size", "base_emb_dim"), ("num_query_groups", "base_num_kv_heads"),
                      ("ffn_hidden_size", "base_mlp_dim"), ("head_dim", "head_dim"), ("vocab_size", "vocab_size"),
                      ):  # fmt: skip
        draft.take(f"model.{path}", key)
    if heads and draft.get("model.num_query_groups") is None:
        draft.ask("model.num_query_groups", "base_num_kv_heads is not in the file")
    _read_activation(draft)
    tied = draft.flag("logits_via_embedding")
    if tied is not None:
        draft.state("model.tie_embeddings", tied, "logits_via_embedding")
    draft.default("model.tie_embeddings", False)
    draft.imply(
        "model.normalization", "layernorm" if block == "gpt3" else "rmsnorm", f"decoder_block {block or 'default'}"
    )
    draft.imply("model.bias", block == "gpt3", f"decoder_block {block or 'default'}")
    draft.imply(
        "model.position_embedding", "learned" if block == "gpt3" else "rope", f"decoder_block {block or 'default'}"
    )
    if draft.flag("use_post_attn_norm") or draft.flag("use_post_ffw_norm"):
        draft.state("model.post_norm", True, "use_post_attn_norm", "use_post_ffw_norm")
    if draft.flag("use_qk_norm"):
        draft.state("model.qk_norm", True, "use_qk_norm")
    window = draft.count("sliding_window_size")
    if window and window > 0:
        draft.state("model.attention", "sliding", "sliding_window_size")
        draft.state("model.window", window, "sliding_window_size")
        every = {"gemma2": 2, "gemma3": 6}.get(block)
        if every:
            draft.imply("model.full_attention_every", every, f"decoder_block {block}")
    if draft.has("final_logits_soft_cap", "attn_logits_soft_cap"):
        draft.warn("soft caps on logits are left out: they add elementwise work only")
    _read_experts(draft)
    if draft.text("attention_type") == "mla":
        _read_mla(draft)


def _read_model_by_name(draft: Draft) -> None:
    """A run names a model, whose sizes MaxText keeps in a file of its own; only its experts' capacity is the run's."""
    read_named_model(draft, "model_name")
    known = draft.get("model.preset")
    if known and "moe" in preset(known):
        _read_capacity(draft)
    elif known:
        draft.understood("capacity_factor")


def _read_activation(draft: Draft) -> None:
    """One activation is plain; with ``linear`` beside it, gated."""
    activations: Any = draft.raw("mlp_activations")
    if activations is None:
        draft.default("model.activation", "swiglu", "mlp_activations silu, linear")
        return
    words = [str(word).lower() for word in (activations if isinstance(activations, list) else [activations])][:4]
    gated, first = "linear" in words, next((word for word in words if word != "linear"), "linear")
    if gated:
        name = "swiglu" if first in ("silu", "swish") else "geglu"
    else:
        name = "relu" if first == "relu" else "squared_relu" if "squared" in first else "gelu"
    draft.state("model.activation", name, "mlp_activations")


def _read_experts(draft: Draft) -> None:
    experts = draft.count("num_experts")
    if not experts or experts == 1:
        draft.understood("num_experts_per_tok", *_MOE_WIDTH, "shared_experts", "first_num_dense_layers",
                         "capacity_factor")  # fmt: skip
        return
    draft.state("model.moe.num_experts", experts, "num_experts")
    draft.take("model.moe.top_k", "num_experts_per_tok")
    if draft.take("model.moe.expert_ffn_hidden_size", *_MOE_WIDTH) is None:
        draft.default("model.moe.expert_ffn_hidden_size", draft.get("model.ffn_hidden_size"), "base_mlp_dim")
    if shared := draft.count("shared_experts"):
        draft.state("model.moe.num_shared_experts", shared, "shared_experts")
    first = draft.count("first_num_dense_layers")
    if first and first <= 10_000:
        draft.state("model.moe.dense_layers", list(range(first)), "first_num_dense_layers")
    _read_capacity(draft)


def _read_capacity(draft: Draft) -> None:
    """Tokens are dropped above a capacity, unless it is negative (-1, the default) or the sparse kernels run."""
    capacity = draft.value(as_number, "capacity_factor")
    is_sparse = any(draft.flag(key) for key in ("megablox", "sparse_matmul"))
    if capacity is None or capacity <= 0:
        return
    if is_sparse:
        draft.warn(f"capacity_factor {capacity:g} has no effect beside megablox or sparse_matmul, which drop no tokens")
    else:
        draft.state("model.moe.capacity_factor", capacity, "capacity_factor")


def _read_mla(draft: Draft) -> None:
    rank = draft.count("q_lora_rank")
    if rank:
        draft.state("model.mla.q_lora_rank", rank, "q_lora_rank")
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        draft.take(f"model.mla.{key}", key)
    nope, rope = draft.get("model.mla.qk_nope_head_dim"), draft.get("model.mla.qk_rope_head_dim")
    if nope and rope:
        draft.state("model.head_dim", nope + rope, "qk_nope_head_dim", "qk_rope_head_dim")


def _read_mesh(draft: Draft) -> None:
    """Sizes of the mesh inside (ici) and across (dcn) slices; -1 takes what is left, so the GPUs are asked for."""
    sizes: dict[str, int] = {}
    is_open = False
    for axis in ("data", "fsdp", "fsdp_transpose", "tensor", "tensor_sequence", "sequence", "context", "expert",
                 "pipeline"):  # fmt: skip
        sizes[axis] = 1
        for tier in ("ici", "dcn"):
            value = draft.count(f"{tier}_{axis}_parallelism")
            is_open = is_open or (value is not None and value < 1)
            sizes[axis] *= value if value and value > 0 else 1
    present = [key for key, _ in draft.file.leaves() if key.endswith("_parallelism")]
    if not present:
        draft.default("parallel.sharding", "zero3", "ici_fsdp_parallelism -1")
        return
    for path, axes in (("tensor", ("tensor", "tensor_sequence")), ("context", ("sequence", "context")),
                       ("expert", ("expert",)), ("pipeline", ("pipeline",))):  # fmt: skip
        size = 1
        for axis in axes:
            size *= sizes[axis]
        keys = [f"{tier}_{axis}_parallelism" for axis in axes for tier in ("ici", "dcn")]
        if any(draft.has(key) for key in keys):
            draft.state(f"parallel.{path}", size, *keys)
    sharded = sizes["fsdp"] * sizes["fsdp_transpose"]
    keys = [f"{tier}_fsdp_parallelism" for tier in ("ici", "dcn")]
    draft.state(
        "parallel.sharding", "zero3" if sharded > 1 or any(draft.raw(key) == -1 for key in keys) else "none", *keys
    )
    if is_open:
        draft.ask("cluster.num_gpus", "an axis of the mesh is -1 and takes whatever devices there are")
    else:
        data = sizes["data"] * sharded * sizes["expert"]
        draft.state("parallel.data", data, *present[:4])


def _read_batch(draft: Draft) -> None:
    """A step takes ``per_device_batch_size`` times all devices, whatever the mesh, and may be a fraction.

    Devices that work on the same sequences (tensor, context) therefore have that many times it together, and those of
    a pipeline split theirs into its micro batches. From github.com/AI-Hypercomputer/maxtext, MaxText/pyconfig.py:
    ``calculate_global_batch_sizes``.
    """
    each = draft.value(as_number, "per_device_batch_size", asks="batch.micro_batch_size")
    stages = draft.get("parallel.pipeline") or 1
    micro_batches = draft.count("num_pipeline_microbatches") or -1
    if stages == 1 or micro_batches < 1:
        micro_batches = stages
    steps = draft.count("gradient_accumulation_steps", asks="batch.gradient_accumulation_steps")
    if steps is not None or draft.has("per_device_batch_size"):
        note = f"{micro_batches} micro batches of the pipeline in each" if micro_batches > 1 else ""
        draft.state(
            "batch.gradient_accumulation_steps", (steps or 1) * micro_batches, "gradient_accumulation_steps", note=note
        )
    if each is None:
        return
    if not 0 < each < 2**31:
        draft.refuse(
            f"per_device_batch_size: got {shown(draft.raw('per_device_batch_size'))}; expected sequences, above 0"
        )
        return
    share = Fraction(each).limit_denominator(4096)
    sharing = (draft.get("parallel.tensor") or 1) * (draft.get("parallel.context") or 1)
    together = share * sharing * stages / micro_batches
    if together.denominator == 1 and together > 0:
        note = f"{share} x {sharing} devices that share their sequences" if sharing > 1 else ""
        draft.state("batch.micro_batch_size", int(together), "per_device_batch_size", note=note)
    else:
        sequences = "one sequence" if share.numerator == 1 else f"{share.numerator} sequences"
        draft.ask(
            "batch.micro_batch_size",
            f"per_device_batch_size is {each:g}, {sequences} for {share.denominator} devices, but tensor x context of "
            f"the mesh is {sharing}; with {share.denominator} it is a micro batch of {share.numerator}",
        )


def _read_precision(draft: Draft) -> None:
    """Activations in ``dtype``, weights in ``weight_dtype``; the defaults are those of MaxText's base.yml."""
    compute, stored, gradients = (
        storage_format(default if draft.raw(key) is None else draft.raw(key))
        for key, default in (("dtype", "bfloat16"), ("weight_dtype", "float32"), ("grad_dtype", "float32"))
    )
    quantization = (draft.text("quantization") or "").lower()
    if compute is None:
        draft.ask("precision.preset", f"dtype is {str(draft.raw('dtype'))[:40]}")
        return
    if compute == "fp32":
        draft.state("precision.preset", "fp32", "dtype")
    elif stored == compute:
        draft.state("precision.preset", compute, "dtype", "weight_dtype")
    else:
        draft.state("precision.preset", f"{compute}_mixed", "dtype", note="" if draft.has("dtype") else "bfloat16")
        draft.state("precision.params", stored or "fp32", "weight_dtype")
    if gradients is not None:
        draft.state("precision.grad_reduce", gradients, "grad_dtype")
    if "fp8" in quantization:
        linear = "fp8_delayed" if "delayed" in quantization or quantization in ("fp8", "nanoo_fp8") else "fp8_current"
        draft.state("precision.linear", linear, "quantization")
        draft.state("precision.preset", "fp8_mixed", "quantization", "dtype")
        draft.warn_mixed(compute, quantization[:30], linear)
    elif quantization:
        draft.warn(f"quantization {quantization[:30]} is not modelled; the time is without it")
    if (moments := storage_format(draft.raw("mu_dtype"))) is not None:
        draft.state("precision.optimizer_state", moments, "mu_dtype")
