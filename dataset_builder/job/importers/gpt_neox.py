"""GPT-NeoX YAML: Megatron's model, DeepSpeed's batch and ZeRO, keys with dashes or underscores."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dataset_builder.job.importers import deepspeed
from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.megatron import storage_format
from dataset_builder.job.importers.reading import Draft, Reading, as_number

NAME, KNOWN_BY = "GPT-NeoX YAML", "pipe_parallel_size, model_parallel_size, pos_emb"
_MARKS = ("pipe_parallel_size", "model_parallel_size", "pos_emb", "no_weight_tying", "train_micro_batch_size_per_gpu",
          "checkpoint_activations", "partition_activations", "hidden_size", "attention_config", "norm",
          "scaled_upper_triang_masked_softmax_fusion", "gpt_j_residual", "lr_decay_style", "data_impl")  # fmt: skip
_IGNORED = (
    "optimizer*", "zero_optimization*", "data_*", "split", "partition_activations", "synchronize_each_layer",
    "checkpoint_*", "gradient_clipping", "weight_decay", "*dropout", "train_iters", "lr_*", "distributed_backend",
    "warmup", "eval_*", "log_*", "steps_per_print", "keep_last_n_checkpoints", "wall_clock_breakdown", "*_path*",
    "save",
    "load", "vocab_file", "merge_file", "tensorboard_*", "use_wandb", "wandb_*", "num_workers", "min_lr",
    "init_method*",
    "output_layer_init_method", "rotary_*", "fp16*", "bf16*", "*_fusion", "deepspeed*", "launcher", "layernorm_epsilon",
    "rms_norm_epsilon", "output_layer_parallelism", "hostfile", "extra_save_iters", "finetune", "seed", "exit_interval",
    "contiguous_checkpointing", "dist*", "include", "attention_config", "master_*", "user_script", "use_shared_fs",
    "te_*",
)  # fmt: skip
_GPT2_VOCABULARY, _NEOX_VOCABULARY = 50257, 50277  # of the GPT-2 and of the 20B tokenizer
_POSITIONS = {"rotary": "rope", "learned": "learned", "alibi": "alibi", "none": "none", "rpe": "relative",
              "sinusoidal": "learned"}  # fmt: skip


def likeness(file: ConfigFile) -> int:
    keys = {str(key).replace("-", "_") for key in file.values}
    count = sum(mark in keys for mark in _MARKS)
    return count if count >= 3 and {"pipe_parallel_size", "model_parallel_size", "pos_emb"} & keys else 0


def read(file: ConfigFile) -> Reading:
    spelling = {str(key).replace("-", "_"): str(key) for key in file.values}
    values = {name: file.values[written] for name, written in spelling.items()}
    draft = Draft(ConfigFile(file.path, values, spelling=spelling), "GPT-NeoX")
    _read_layout(draft)
    _read_model(draft)
    deepspeed.read_batch(draft)
    if draft.get("batch.gradient_accumulation_steps") is None and draft.get("batch.global_batch_size") is None:
        draft.default("batch.gradient_accumulation_steps", 1)
    draft.take("batch.seq_length", "seq_length")
    _read_precision(draft)
    _read_fp8(draft)
    deepspeed.read_zero(draft)
    _read_software(draft)
    steps = draft.count("train_iters")
    if steps and steps > 0:
        draft.state("training.steps", steps, "train_iters")
    draft.framework("gpt-neox (deepspeed)")
    draft.understood(*_IGNORED)
    return draft.reading()


def _read_layout(draft: Draft) -> None:
    draft.take("parallel.tensor", "model_parallel_size")
    if (stages := draft.count("pipe_parallel_size", asks="parallel.pipeline")) is not None:
        draft.state(
            "parallel.pipeline", max(1, stages), "pipe_parallel_size", note="0: no pipeline" if not stages else ""
        )
    draft.take("parallel.context", "context_parallel_size")
    draft.take("parallel.expert", "moe_expert_parallel_size")
    if (on := draft.flag("sequence_parallel")) is not None:
        draft.state("parallel.sequence_parallel", on and (draft.get("parallel.tensor") or 1) > 1, "sequence_parallel")
    draft.default("parallel.sequence_parallel", False)
    on = draft.flag("checkpoint_activations")
    draft.state("parallel.recompute.mode", "full" if on else "none", "checkpoint_activations")
    if gpus := draft.count("global_num_gpus", "num_gpus"):
        draft.state("cluster.num_gpus", gpus, "global_num_gpus", "num_gpus")


def _read_model(draft: Draft) -> None:
    layers = draft.take("model.num_layers", "num_layers")
    hidden = draft.take("model.hidden_size", "hidden_size")
    heads = draft.take("model.num_attention_heads", "num_attention_heads")
    if layers is None and hidden is None:
        return
    draft.take("model.num_query_groups", "num_kv_heads")
    if heads and draft.get("model.num_query_groups") is None:
        draft.default("model.num_query_groups", heads)
    _read_feed_forward(draft, hidden)
    norm = draft.text("norm") or ""
    if norm:
        draft.state("model.normalization", "rmsnorm" if "rms" in norm.lower() else "layernorm", "norm")
    draft.default("model.normalization", "layernorm")
    position = (draft.text("pos_emb") or "learned").lower()
    if position not in _POSITIONS:
        draft.refuse(f"pos_emb: got {position[:40]!r}; expected one of {', '.join(_POSITIONS)}")
    elif draft.has("pos_emb"):
        draft.state("model.position_embedding", _POSITIONS[position], "pos_emb")
    draft.default("model.position_embedding", "learned")
    untied = draft.flag("no_weight_tying")
    if untied is not None:
        draft.state("model.tie_embeddings", not untied, "no_weight_tying")
    draft.default("model.tie_embeddings", True)
    bias = draft.flag("use_bias_in_mlp", "use_bias_in_attn_linear")
    if bias is not None:
        draft.state("model.bias", bias, "use_bias_in_mlp", "use_bias_in_attn_linear")
    draft.default("model.bias", True)
    if draft.flag("gpt_j_residual"):
        draft.state("model.parallel_block", True, "gpt_j_residual")
    if draft.flag("use_qk_layernorm"):
        draft.state("model.qk_norm", True, "use_qk_layernorm")
    draft.take("model.max_position_embeddings", "max_position_embeddings")
    draft.take("model.dropout", "hidden_dropout", as_type=as_number)
    _read_experts(draft)
    _read_vocabulary(draft)


def _read_feed_forward(draft: Draft, hidden: int | None) -> None:
    """Older versions gate by ``mlp_type: llama``, newer ones by the activation.

    The older inner width is ``intermediate_size``, or 8/3 hidden in steps of 256; the newer one is a third of
    ``intermediate_size`` (4 hidden when absent), as both halves of the gate come out of two thirds of it. From
    github.com/EleutherAI/gpt-neox, megatron/model/transformer.py: ``LLaMAParallelMLP`` and ``ParallelMLP``.
    """
    word = (draft.text("activation") or "gelu").lower()
    is_llama = draft.text("mlp_type") == "llama"
    names = {"swiglu": "swiglu", "geglu": "geglu", "relu": "relu", "squared_relu": "squared_relu"}
    if is_llama:
        draft.state("model.activation", "swiglu", "mlp_type")
    elif draft.has("activation"):
        draft.state("model.activation", names.get(word, "gelu"), "activation")
        if word not in (*names, "gelu"):
            draft.warn(f"activation {word[:30]} is predicted as gelu, which reads and writes as much")
    draft.default("model.activation", "gelu")
    stated = draft.count("intermediate_size", asks="model.ffn_hidden_size")
    step = max(1, draft.count("mlp_multiple_of") or 1)
    if is_llama and hidden and stated is None:
        draft.state("model.ffn_hidden_size", _up(8 * hidden // 3, 256), "mlp_type", note="8/3 hidden, in steps of 256")
    elif is_llama or word not in ("swiglu", "geglu"):
        draft.take("model.ffn_hidden_size", "intermediate_size")
        if hidden:
            draft.default("model.ffn_hidden_size", 4 * hidden, "4 x hidden")
    elif width := stated or (hidden and 4 * hidden):
        note = "a third of it, gated" if stated else "a third of 4 x hidden, gated"
        draft.state("model.ffn_hidden_size", _up(width // 3, step), "intermediate_size", "activation", note=note)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _read_experts(draft: Draft) -> None:
    experts = draft.count("moe_num_experts")
    if experts and experts > 1:
        draft.state("model.moe.num_experts", experts, "moe_num_experts")
        if draft.take("model.moe.top_k", "moe_top_k") is None:
            draft.default("model.moe.top_k", 1)
        draft.default("model.moe.expert_ffn_hidden_size", draft.get("model.ffn_hidden_size"), "the dense width")


def _read_vocabulary(draft: Draft) -> None:
    kind = (draft.text("tokenizer_type") or "GPT2BPETokenizer").lower()
    if draft.take("model.vocab_multiple", "make_vocab_size_divisible_by") is None:
        draft.default("model.vocab_multiple", 128)
    size = draft.count("vocab_size", "padded_vocab_size")
    if size is None:
        known = "20b" in str(draft.raw("vocab_file") or "").lower()
        if "gpt2" not in kind and not known:
            draft.ask("model.vocab_size", f"the vocabulary of {kind[:40]} is not in the file")
            return
        size = _NEOX_VOCABULARY if known else _GPT2_VOCABULARY
    if draft.has("vocab_size", "padded_vocab_size", "tokenizer_type"):
        draft.state("model.vocab_size", size, "vocab_size", "padded_vocab_size", "tokenizer_type")
    else:
        draft.imply("model.vocab_size", size, "no tokenizer_type, so the GPT-2 one")
        draft.warn(f"model.vocab_size: {size} of the GPT-2 tokenizer, GPT-NeoX's default, before padding")


def _read_precision(draft: Draft) -> None:
    """``precision`` in one word, or DeepSpeed's blocks; gradients are reduced as DeepSpeed does."""
    word = draft.text("precision", asks="precision.preset")
    if word is None:
        deepspeed.read_precision(draft)
        return
    low = storage_format(word)
    if low is None:
        draft.refuse(f"precision: got {word[:40]!r}; expected bfloat16, fp16 or fp32")
    elif low == "fp32":
        draft.state("precision.preset", "fp32", "precision")
    else:
        other = {"fp16": "bf16", "bf16": "fp16"}[low]
        if draft.flag(f"{other}.enabled"):
            draft.refuse(f"precision {word} and {other}.enabled are both on; expected one of them")
        deepspeed.state_low(draft, low, "precision")


def _read_fp8(draft: Draft) -> None:
    """Transformer Engine computes in fp8 where ``te_fp8_mha`` is on; a format alone only says how it would.

    From github.com/EleutherAI/gpt-neox, megatron/model/transformer.py: ``ParallelTransformerLayer.forward``.
    """
    written = draft.text("te_fp8_format")
    if draft.flag("te_fp8_mha"):
        draft.state("precision.linear", "fp8_delayed", "te_fp8_mha", "te_fp8_format", note="delayed scaling")
        draft.state("precision.attention", "fp8", "te_fp8_mha")
        if not draft.flag("te_layernorm_mlp") and not (
            draft.flag("te_columnparallel") and draft.flag("te_rowparallel")
        ):
            draft.warn("te_fp8_mha without te_layernorm_mlp leaves the feed-forward as it is; predicted as fp8 too")
        if not draft.flag("te_fp8_wgrad"):
            draft.warn("te_fp8_wgrad is off: weight gradients are not in fp8, but are predicted as if they were")
    elif written:
        draft.warn(f"te_fp8_format {written[:20]} has no effect without te_fp8_mha: nothing runs in fp8")


def _read_software(draft: Draft) -> None:
    attention = draft.raw("attention_config")
    is_flash = "flash" in str(attention)[:10_000]
    engines = [key for key in ("te_mha", "te_fp8_mha") if draft.flag(key)]
    if engines:
        draft.state("software.attention", "flash", *engines)
    elif attention is not None:
        draft.state("software.attention", "flash" if is_flash else "unfused", "attention_config")
    else:
        draft.default("software.attention", "unfused", "global attention")
    fusions = ("scaled_upper_triang_masked_softmax_fusion", "scaled_masked_softmax_fusion", "bias_gelu_fusion",
               "rope_fusion", "layernorm_fusion", "rmsnorm_fusion", "te_layernorm_mlp")  # fmt: skip
    given = [key for key in fusions if draft.has(key)]
    if given:
        draft.state("software.fused_kernels", any(draft.flag(key) for key in given), *given)
    block = draft.raw("optimizer")
    name = str(block.get("type", "") if isinstance(block, Mapping) else block or "").lower()
    known = next((each for each in ("lion", "adamw", "adam", "sgd") if each in re.sub(r"[^a-z]", "", name)), None)
    if known:
        draft.state("optimizer.name", known, "optimizer")
    elif name:
        draft.warn(f"optimizer {name[:40]} is not modelled; adamw is taken")
