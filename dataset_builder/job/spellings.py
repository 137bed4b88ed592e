"""What users of other tools write in a job file, and the keys and values that they mean: for error messages only.

Nothing here is accepted as a value: an unknown key stays an error, which then names the key that is meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dataset_builder.job.errors import suggestion

_AXES = {
    "tensor": ("tp", "tensor_model_parallel"),
    "pipeline": ("pp", "pipeline_model_parallel"),
    "context": ("cp",),
    "expert": ("ep", "expert_model_parallel"),
    "expert_tensor": ("etp", "expert_tensor_model_parallel"),
    "data": ("dp",),
}
_ENDINGS = ("", "_size", "_degree", "_parallel", "_parallel_size", "_parallel_degree")
_KEYS: Mapping[str, str] = {
    f"{name.removesuffix('_parallel')}{ending}": f"parallel.{axis}"
    for axis, names in _AXES.items()
    for name in (axis, *names)
    for ending in _ENDINGS
} | {
    "vp": "parallel.virtual_pipeline", "vpp": "parallel.virtual_pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline", "sp": "parallel.sequence_parallel",
    "fsdp": "parallel.sharding", "zero": "parallel.sharding", "zero_stage": "parallel.sharding",
    "activation_checkpointing": "parallel.recompute", "gradient_checkpointing": "parallel.recompute",
    "nodes": "cluster.num_nodes", "nnodes": "cluster.num_nodes", "nproc_per_node": "cluster.gpus_per_node",
    "seq_len": "batch.seq_length", "sequence_length": "batch.seq_length", "max_seq_length": "batch.seq_length",
    "mbs": "batch.micro_batch_size", "gbs": "batch.global_batch_size",
}  # fmt: skip
_NUMBERS_OF_GPUS = ("num_gpus", "n_gpus", "ngpus", "gpus", "world_size", "num_devices")

# By the key that the value stands under; what is meant most often comes first.
_VALUES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "sharding": {
        "0": ("none",), "1": ("zero1",), "2": ("zero2",), "3": ("zero3",), "ddp": ("none",), "fsdp2": ("zero3",),
        "stage1": ("zero1",), "stage2": ("zero2",), "stage3": ("zero3",), "full_shard": ("zero3",),
        "shard_grad_op": ("zero2",), "hybrid_shard": ("hsdp",), "no_shard": ("none",),
    },
    "precision": {
        "amp": ("bf16_mixed", "fp16_mixed"), "mixed": ("bf16_mixed", "fp16_mixed"),
        "bfloat16": ("bf16_mixed", "bf16"), "float16": ("fp16_mixed", "fp16"), "half": ("fp16_mixed", "fp16"),
        "float32": ("fp32", "tf32"), "fp8": ("fp8_mixed", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"),
        "float8": ("fp8_mixed", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"), "fp4": ("nvfp4",),
    },
    "linear": {
        "fp8": ("fp8_delayed", "fp8_current", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"),
        "float8": ("fp8_delayed", "fp8_current", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"),
        "fp4": ("nvfp4",),
    },
}  # fmt: skip
_FORMATS: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("bf16",), "float16": ("fp16",), "half": ("fp16",), "float32": ("fp32",), "float": ("fp32",),
}  # fmt: skip


def key_hint(parents: Sequence[str], key: str, sections: Mapping[str, Sequence[str]]) -> str | None:
    """What an unknown key means, if that is known: the section it belongs under, or its name here.

    ``sections``: the keys that each part of a job has.
    """
    name = key.lower().replace("-", "_")
    if name in _NUMBERS_OF_GPUS:
        return "give cluster.num_nodes and cluster.gpus_per_node"
    here = parents[0] if parents else ""
    elsewhere = [section for section, keys in sections.items() if section != here and name in keys]
    if 0 < len(elsewhere) <= 2:
        return f"it belongs under {' or '.join(elsewhere)}"
    return f"{_KEYS[name]} is meant" if name in _KEYS else None


def value_hint(key: str, value: object, options: Sequence[str]) -> str:
    """`` (did you mean a, b?)``: what others call so, else the options that are spelt nearly so; or nothing."""
    name = str(value).lower().replace("-", "_")
    meant = _VALUES.get(key, {}).get(name) or [each for each in _FORMATS.get(name, ()) if each in options]
    return f" (did you mean {', '.join(meant)}?)" if meant else suggestion(str(value), options)
