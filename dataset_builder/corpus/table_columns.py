"""The columns of a runs table: which one is missing or misspelt, and which nothing reads.

In: the names in a table's header. Out: sentences for whoever wrote the table.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from dataset_builder.corpus.job_row import JOB_COLUMNS, REQUIRED_COLUMNS, SIZE_COLUMNS
from dataset_builder.corpus.trust import FLAG_COLUMNS

LABEL_COLUMNS = (
    *FLAG_COLUMNS, "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "hfu_pct", "samples_per_s", "measured_field",
    "derivation",
)  # fmt: skip
"""Figures computed from the measured time, or about how it was: no job is built from them."""

LAYOUT_COLUMNS = (
    "framework", "arch", "tp", "pp", "sharding", "micro_batch", "act_ckpt", "attention", "sequence_parallel",
)  # fmt: skip
"""What decides most of a run's time and memory beside its sizes, and gets a default where a row leaves it blank."""

_MEASURED = ("iter_time_s", "peak_mem_gb")
_BOOKKEEPING = (
    "run_id", "job_group", "source", "license", "licence", "framework_version", "tokens_per_s", "tflops", "mfu", "hfu",
    "params_b",
)  # fmt: skip
_KNOWN = frozenset((*JOB_COLUMNS, *LABEL_COLUMNS, *_MEASURED, *_BOOKKEEPING))

# What other tools and people call a column, as _folded writes it; near spellings are found without.
_OTHER_NAMES = {
    "iter_time_s": ("iteration_time", "iter_time", "step_time", "time_per_step", "time_per_iteration", "seconds"),
    "gpu": ("gpu_type", "gpu_name", "gpu_model", "device", "accelerator"),
    "num_gpus": ("gpus", "n_gpus", "gpu_count", "ngpus", "world_size"),
    "gpus_per_node": ("nproc_per_node", "devices_per_node"),
    "layers": ("num_layers", "n_layers", "num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "hidden_dim", "d_model", "n_embd", "dim"),
    "ffn_hidden": ("ffn_hidden_size", "intermediate_size", "ffn_dim"),
    "heads": ("num_heads", "num_attention_heads", "n_heads", "n_head"),
    "kv_heads": ("num_query_groups", "num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "vocab": ("vocab_size", "vocabulary", "padded_vocab_size"),
    "seq_len": ("seq_length", "sequence_length", "max_seq_len", "context_length", "block_size"),
    "global_batch": ("global_batch_size", "gbs", "train_batch_size"),
    "micro_batch": ("micro_batch_size", "mbs", "micro_batch_size_per_gpu", "train_micro_batch_size_per_gpu"),
    "grad_accum": ("gradient_accumulation_steps", "grad_acc", "accumulation_steps"),
    "tp": ("tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size", "tensor"),
    "pp": ("pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size", "pipeline"),
    "dp": ("data_parallel", "data_parallel_size"),
    "cp": ("context_parallel", "context_parallel_size"),
    "ep": ("expert_parallel", "expert_model_parallel_size", "expert_parallel_size"),
    "vpp": ("virtual_pipeline", "virtual_pipeline_size"),
    "precision": ("dtype", "mixed_precision"),
    "act_ckpt": ("recompute", "activation_checkpointing", "recompute_granularity", "gradient_checkpointing"),
    "attention": ("attention_backend", "attn_implementation", "attn"),
    "sharding": ("zero", "zero_stage", "fsdp", "sharding_strategy"),
    "peak_mem_gb": ("peak_memory", "peak_memory_gb", "max_memory_allocated", "memory_gb"),
    "model_name": ("model",),
}


def missing_columns(columns: Collection[str]) -> list[str]:
    """A sentence for each column without which no row can be a job, and for the label's, which may be blank.

    Others can stand for some of them.
    """
    present = set(columns)
    replaced = SIZE_COLUMNS if "model_name" in present else ()
    if {"micro_batch", "grad_accum"} <= present:
        replaced = (*replaced, "global_batch")
    missing = [column for column in (*REQUIRED_COLUMNS, "iter_time_s") if column not in {*present, *replaced}]
    return [f"column {column!r} is missing{_by_another_name(column, columns)}" for column in missing]


def unread_columns(columns: Collection[str]) -> str:
    """One sentence with the columns that nothing reads and what each may be meant for; empty when all are read."""
    absent = sorted(_KNOWN - set(columns))
    meant = {name: column for column in absent for name in _meant_by(column, columns)}
    unread = [
        f"{name} (did you mean {meant[name]}?)" if name in meant else name
        for name in columns
        if name not in _KNOWN and not name.startswith("Unnamed: ")  # pandas' name for a column without one
    ]
    return f"columns that nothing reads: {', '.join(unread)}" if unread else ""


def _by_another_name(column: str, columns: Collection[str]) -> str:
    names = _meant_by(column, columns)
    unit = " in seconds" if column == "iter_time_s" else ""
    return f" (did you mean it by {names[0]!r}? then name that column {column}{unit})" if names else ""


def _meant_by(column: str, columns: Collection[str]) -> list[str]:
    """The columns that nothing reads and that bear another tool's name for this one, or nearly its own."""
    names = {_folded(column), *map(_folded, _OTHER_NAMES.get(column, ()))}
    unread = {name: _folded(name) for name in columns if name not in _KNOWN}
    exact = [name for name, folded in unread.items() if folded in names]
    return exact or difflib.get_close_matches(column, [*unread], n=1, cutoff=0.8)


def _folded(name: str) -> str:
    """A name without case, separators and the unit of a time."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"[ _(\[]+(ms|s|sec|seconds|msec)[)\]]?$", "", name.strip().lower()))
