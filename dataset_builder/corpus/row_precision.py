"""Precision, software and optimizer of a row."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dataset_builder.corpus.job_row import JobRow, RowError, row_device
from dataset_builder.corpus.spellings import precision_name
from dataset_builder.job.precision import PRECISION_PRESETS

_OPTIMIZERS = {
    "adam (apex fusedadam)": "adam", "distributed_fused_adam": "adam", "decoupled_adamw": "adamw", "none timed": "none",
}  # fmt: skip
_LINEAR_WORDS = (
    ("blockwise", "fp8_blockwise"), ("block scaling", "fp8_blockwise"), ("tensorwise", "fp8_tensorwise"),
    ("current", "fp8_current"), ("rowwise", "fp8_rowwise"), ("delayed", "fp8_delayed"),
)  # fmt: skip


def row_precision(row: JobRow) -> dict[str, Any]:
    """``precision``: a preset and what ``precision_detail`` changes of it."""
    name = _precision_name(row)
    policy: dict[str, Any] = {"preset": name}
    if name in ("fp32", "tf32") or (name in ("fp16", "bf16") and "master" not in row.detail):
        return policy
    if name in ("fp16", "bf16"):
        policy["preset"] = f"{name}_mixed"  # the source calls it pure, but its optimizer keeps fp32 master weights
    low = "fp16" if policy["preset"].startswith("fp16") else "bf16"
    policy["params"] = low if row.defaults.sixteen_bit_params else "fp32"
    if _is_apex_o2(row, name):
        policy |= {"params": "fp16", "grad_accum": "fp16", "grad_reduce": "fp16"}
        row.assume("precision: apex AMP at level O2, 16-bit weights and gradients with fp32 master weights")
    if row.is_mlperf_bert and name == "fp8_mixed":
        policy |= {"compute": "fp16", "params": "fp16", "loss_scaling": True}
    if name == "fp8_mixed":
        policy["linear"] = _fp8_recipe(row)
    elif name == "mxfp8" and "mxfp8" not in row_device(row).peak_flops_per_s:
        policy["linear"] = "fp8_blockwise"
        row.assume("linear: no MXFP8 hardware on this device, 128-block scaling taken")
    for key, target in (
        ("params", "params"), ("main_params", "main_params"), ("grad_reduce", "grad_reduce"),
        ("main_grads", "grad_accum"), ("exp_avg", "optimizer_state"),
    ):  # fmt: skip
        if key in row.detail_flags:
            policy[target] = row.detail_flags[key]
    if "TF32 possible" in row.detail:  # neither --bf16 nor --fp16: what is not quantised computes in fp32
        policy["compute"] = "tf32"
    if row.text("source_id") == "bigscience" and "section: Rebalancing layers" not in row.notes:
        # Its chronicle: gradients accumulated in 16 bits until a BF16 optimizer, "4bytes x params" more, came into use
        # in that section; memory of the tables before agrees with no other reading.
        policy |= {"grad_accum": low, "grad_reduce": low}
    if row.detail_flags.get("fp8_param_gather") == "1":
        policy["param_gather"] = "fp8"
    first, last = (row.detail_flags.get(f"bf16_layers_{end}", "") for end in ("start", "end"))
    if first.isdigit() and last.isdigit() and "fp8" in name:
        policy["high_precision_layers"] = {"first": int(first), "last": int(last)}
    if row.framework == "llm-foundry":  # FSDP gathers in the compute format and reduces in it only under PURE
        policy |= {"param_gather": low, "grad_reduce": low if "PURE" in row.detail else "fp32"}
    return policy


def _is_apex_o2(row: JobRow, precision: str) -> bool:
    """NVIDIA's PyTorch examples of 2019 to 2022 run fp16 through ``amp.initialize(opt_level="O2")``.

    (NVIDIA/DeepLearningExamples, BERT run_squad.py and run_pretraining.py, Transformer-XL train.py; BART's Lightning
    trainer uses native autocast.)
    """
    framework = row.text("framework") or ""
    return precision == "fp16_mixed" and framework.startswith("pytorch (DLE") and "BART" not in framework


def _precision_name(row: JobRow) -> str:
    stated = row.text("precision")
    if stated is None:
        usual = "bf16_mixed" if row_device(row).supports("bf16") else "fp16_mixed"
        row.assume(f"precision: not stated, {usual} taken")
        return usual
    name = precision_name(stated)
    if row.is_mlperf_bert and name == "fp16_mixed" and row_device(row).compute_capability >= 9:
        # NVIDIA's code, which all submit: configurations of Hopper and later pass --use_transformer_engine2, "Enable
        # FP8 layers" (mlcommons/training_results_v3.0 to v5.0, NVIDIA/benchmarks/bert/implementations).
        row.assume("precision: fp16 in the table, fp8 linears taken, which MLPerf's BERT has on Hopper and later")
        return "fp8_mixed"
    if name:
        return name
    raise RowError(f"precision: {stated!r} is none of {', '.join(PRECISION_PRESETS)}")


def _fp8_recipe(row: JobRow) -> str:
    words = row.detail.lower()
    for word, recipe in _LINEAR_WORDS:
        if word in words:
            return recipe
    if "mxfp8" in words:
        return "mxfp8"
    row.assume("linear: fp8 recipe not stated, delayed scaling taken")
    return "fp8_delayed"


def row_software(row: JobRow) -> dict[str, Any]:
    """``software``; what the row does not say is left out and stays unknown."""
    golden = row.text("source_id") == "megatron-golden"
    software: dict[str, Any] = {"framework": row.framework, "fused_kernels": row.defaults.fused_kernels}
    date = re.match(r"\d{4}-\d{2}", row.text("source_date") or "")
    software["date"] = date[0] if date else None
    software["attention"] = _attention_kernel(row)
    software["compile"] = row.flag("compile")
    if row.is_mlperf_bert and row_device(row).compute_capability >= 9:
        software["cuda_graphs"] = True  # --use_cuda_graph, in the same configurations
    if golden:
        software["cuda_graphs"] = "cuda_graph_impl" in row.flags or "cuda_graph_scope" in row.flags
        software["deterministic"] = row.flags.get("deterministic_mode") == "1"
    return {key: value for key, value in software.items() if value is not None}


def _attention_kernel(row: JobRow) -> str | None:
    kernel = (row.text("attention") or "").lower()
    if kernel.startswith(("naive", "te:unfused", "unfused")):
        return "unfused"
    if kernel == "te" or kernel.startswith(("flash", "fmha", "te:flash", "te:fused", "fused")):
        return "flash"
    if not kernel and row.defaults.attention:
        row.assume(f"attention: not stated, {row.defaults.attention} as {row.framework or 'plain PyTorch'} does")
        return row.defaults.attention
    return None  # "te:auto": the library chose, nobody recorded what


def row_optimizer(row: JobRow) -> str:
    """The optimizer's name; ``none`` where no step was timed."""
    name = (row.text("optimizer") or "adam").lower()
    name = _OPTIMIZERS.get(name, name)
    if "timed" in name:
        return "none"
    words: Callable[[str], bool] = name.__contains__
    for known in ("muon", "lamb", "lion", "adafactor", "adamw", "adam", "sgd", "none"):
        if words(known):
            return known
    row.assume(f"optimizer: {name!r} is not known, adam taken")
    return "adam"
