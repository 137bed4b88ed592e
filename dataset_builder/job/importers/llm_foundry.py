"""llm-foundry's training YAML (Composer): an MPT or a Hugging Face model, FSDP, and its amp precision."""

from __future__ import annotations

from typing import Any

from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.interpolation import interpolated
from dataset_builder.job.importers.model_names import preset_called
from dataset_builder.job.importers.reading import Draft, Reading, as_number

NAME, KNOWN_BY = "llm-foundry YAML", "global_train_batch_size, device_train_microbatch_size, fsdp_config"
_MARKS = ("global_train_batch_size", "device_train_microbatch_size", "device_eval_batch_size", "max_duration",
          "train_loader", "eval_loader", "fsdp_config", "max_seq_len", "variables", "callbacks")  # fmt: skip
_IGNORED = (
    "variables.*", "run_name", "tokenizer.*", "train_loader.*", "eval_loader.*", "scheduler.*", "optimizer.*",
    "algorithms.*", "eval_*", "max_duration", "seed", "device_eval_batch_size", "progress_bar", "log_to_console",
    "console_log_interval", "callbacks.*", "loggers.*", "save_*", "load_*", "model.name", "model.init_device",
    "model.max_seq_len", "model.*dropout*", "model.attn_config.*", "model.init_config*", "fsdp_config.*", "icl_*",
    "python_log_level", "autoresume", "dist_timeout", "model.use_auth_token", "model.pretrained", "metadata*",
    "model.emb_pdrop", "model.config_overrides*", "model.use_flash*", "parallelism_config.*",
)  # fmt: skip
_SHARDING = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "none", "HYBRID_SHARD": "hsdp",
             "_HYBRID_SHARD_ZERO2": "hsdp"}  # fmt: skip


def likeness(file: ConfigFile) -> int:
    # OLMo's trainer took its batch and evaluation keys from here; its data, sharding and model are written otherwise.
    if not any(file.node(key) is not None for key in ("train_loader", "fsdp_config", "model.name")):
        return 0
    count = sum(mark in file.values for mark in _MARKS)
    return count if count >= 3 else 0


def read(file: ConfigFile) -> Reading:
    draft = Draft(ConfigFile(file.path, interpolated(file.values)), "llm-foundry")
    name = str(draft.raw("model.name") or "")
    if name.startswith("mpt"):
        _read_mpt(draft)
    else:
        model = draft.text("model.pretrained_model_name_or_path")
        if model and (known := preset_called(model)):
            draft.state("model.preset", known, "model.pretrained_model_name_or_path", note=model[:60])
        elif model or name:
            draft.ask("model", f"{model or name} is no shipped model")
    draft.take("batch.seq_length", "max_seq_len", "model.max_seq_len")
    draft.take("batch.global_batch_size", "global_train_batch_size")
    _read_micro_batch(draft)
    _read_fsdp(draft)
    _read_precision(draft)
    optimizer = (draft.text("optimizer.name") or "").lower()
    known_optimizer = next((each for each in ("lion", "adamw", "adam", "sgd") if each in optimizer), None)
    if known_optimizer:
        draft.state("optimizer.name", known_optimizer, "optimizer.name")
    duration = str(draft.raw("max_duration") or "")
    if duration.endswith("ba") and duration[:-2].isdecimal() and int(duration[:-2][:15]) > 0:
        draft.state("training.steps", int(duration[:-2][:15]), "max_duration")
    elif duration.endswith("tok") and duration[:-3].isdecimal():
        draft.state("training.tokens", int(duration[:-3][:18]), "max_duration")
    if gpus := draft.count("compute.gpus"):
        draft.state("cluster.num_gpus", gpus, "compute.gpus")
    draft.framework("llm-foundry")
    draft.understood(*_IGNORED)
    return draft.reading()


def _read_micro_batch(draft: Draft) -> None:
    """A micro batch of at most the device's share of the global batch, or, once, the number of them in that share.

    A larger one is reduced to the share. From github.com/mosaicml/llm-foundry, llmfoundry/utils/config_utils.py:
    ``calculate_batch_size_info``. A configuration that it has logged has both keys; the number follows from the size.
    """
    size, number = "device_train_microbatch_size", "device_train_grad_accum"
    if draft.has(size):
        draft.take("batch.micro_batch_size", size)
        draft.default("batch.is_micro_batch_reduced", True)
        draft.understood(number)
    elif steps := draft.count(number, asks="batch.micro_batch_size"):
        draft.state("batch.gradient_accumulation_steps", steps, number)


def _read_mpt(draft: Draft) -> None:
    """MPT: layer norms, a plain gelu of ``expansion_ratio`` hidden,
    biases and learned positions unless switched off."""
    hidden = draft.take("model.hidden_size", "model.d_model")
    heads = draft.take("model.num_attention_heads", "model.n_heads")
    draft.take("model.num_layers", "model.n_layers")
    draft.take("model.vocab_size", "model.vocab_size")
    draft.take("model.dropout", "model.resid_pdrop", as_type=as_number)
    width = draft.count("model.ffn_config.ffn_hidden_size")
    ratio = draft.value(as_number, "model.expansion_ratio")
    if width:
        draft.state("model.ffn_hidden_size", width, "model.ffn_config.ffn_hidden_size")
    elif hidden and ratio:
        draft.state("model.ffn_hidden_size", int(hidden * ratio), "model.expansion_ratio", note=f"{ratio:g} x d_model")
    elif hidden:
        draft.default("model.ffn_hidden_size", 4 * hidden, "expansion_ratio 4")
    kind = str(draft.raw("model.attn_config.attn_type") or "")
    groups = draft.count("model.attn_config.kv_n_heads")
    if groups or kind == "multiquery_attention":
        draft.state(
            "model.num_query_groups", groups or 1, "model.attn_config.kv_n_heads", "model.attn_config.attn_type"
        )
    elif heads:
        draft.default("model.num_query_groups", heads, "multi-head attention")
    gated = "glu" in str(draft.raw("model.ffn_config.ffn_type") or "")
    draft.imply("model.activation", "geglu" if gated else "gelu", "an MPT")
    norm = str(draft.raw("model.norm_type") or "")
    if norm:
        draft.state("model.normalization", "rmsnorm" if "rms" in norm else "layernorm", "model.norm_type")
    draft.default("model.normalization", "layernorm")
    without = draft.flag("model.no_bias")
    if without is not None:
        draft.state("model.bias", not without, "model.no_bias")
    draft.default("model.bias", True, "no_bias false")
    tied = draft.flag("model.tie_word_embeddings")
    if tied is not None:
        draft.state("model.tie_embeddings", tied, "model.tie_word_embeddings")
    draft.default("model.tie_embeddings", True)
    if draft.flag("model.attn_config.qk_ln", "model.attn_config.qk_gn"):
        draft.state("model.qk_norm", True, "model.attn_config.qk_ln", "model.attn_config.qk_gn")
    _read_positions(draft)
    kernel = str(draft.raw("model.attn_config.attn_impl") or "flash")
    draft.state("software.attention", "flash" if kernel in ("flash", "triton") else "unfused",
                "model.attn_config.attn_impl")  # fmt: skip


def _read_positions(draft: Draft) -> None:
    for key, name in (("alibi", "alibi"), ("rope", "rope")):
        if draft.flag(f"model.attn_config.{key}"):
            draft.state("model.position_embedding", name, f"model.attn_config.{key}")
            return
    if draft.flag("model.learned_pos_emb") is False:
        draft.state("model.position_embedding", "none", "model.learned_pos_emb")
    draft.default("model.position_embedding", "learned", "learned_pos_emb true")
    draft.take("model.max_position_embeddings", "model.max_seq_len")


def _read_fsdp(draft: Draft) -> None:
    block = "parallelism_config.fsdp" if draft.has("parallelism_config.fsdp") else "fsdp_config"
    if not draft.has(block):
        draft.default("parallel.sharding", "none", "no fsdp_config")
        draft.default("parallel.recompute.mode", "none")
        return
    strategy = draft.text(f"{block}.sharding_strategy", f"{block}.data_parallel_shard_degree") or "FULL_SHARD"
    draft.state("parallel.sharding", _SHARDING.get(strategy.upper(), "zero3"), f"{block}.sharding_strategy", block)
    checkpointing = draft.flag(f"{block}.activation_checkpointing")
    mode = "full" if checkpointing else "none"
    draft.state("parallel.recompute.mode", mode, f"{block}.activation_checkpointing", block)
    if draft.flag(f"{block}.activation_cpu_offload"):
        draft.warn("activation_cpu_offload is not modelled; the time is without it")


def _read_precision(draft: Draft) -> None:
    """Autocast over fp32 shards; FSDP's ``mixed_precision`` says what is gathered and reduced."""
    word = draft.text("precision", asks="precision.preset")
    names = {"amp_bf16": "bf16_mixed", "amp_fp16": "fp16_mixed", "fp32": "fp32", "amp_fp8": "fp8_mixed"}
    if word is None:
        draft.default("precision.preset", "bf16_mixed", "amp_bf16")
        word = "amp_bf16"
    elif word not in names:
        draft.refuse(f"precision: got {word[:40]!r}; expected one of {', '.join(names)}")
        return
    else:
        draft.state("precision.preset", names[word], "precision")
    low: Any = "fp16" if word == "amp_fp16" else "bf16"
    if word == "fp32" or draft.get("parallel.sharding") == "none":
        return
    policy = draft.raw("fsdp_config.mixed_precision", "parallelism_config.fsdp.mixed_precision")
    policy = policy.upper() if isinstance(policy, str) else "DEFAULT"
    keys = ("fsdp_config.mixed_precision", "parallelism_config.fsdp.mixed_precision")
    draft.default("precision.params", "fp32", "sharded in fp32")
    gathered, reduced = {"PURE": (low, low), "FULL": ("fp32", "fp32")}.get(policy, (low, "fp32"))
    draft.state("precision.param_gather", gathered, *keys, "precision")
    draft.state("precision.grad_reduce", reduced, *keys, "precision")
