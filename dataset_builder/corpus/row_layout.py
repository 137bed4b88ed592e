"""Cluster, parallel layout and batch of a row; what is blank follows from the rest or is the smallest that fits."""

from __future__ import annotations

import math
import re
from typing import Any

from dataset_builder.corpus.job_row import JobRow, RowError, row_device
from dataset_builder.corpus.spellings import recompute_name, sharding_name
from dataset_builder.job.hardware import canonical_link, cell_link

_MEGATRON_FAMILY = ("megatron-lm", "megatron-bridge", "nemo", "mlperf")
_SEQUENCE_PARALLEL_SINCE = "2022-05"  # arXiv 2205.05198
TRAINING_BYTES_PER_PARAMETER = 18.0  # 16-bit weight and fp32 gradient, master weight and two moments (arXiv 1910.02054)
FROZEN_BYTES_PER_PARAMETER = 2.5
_LINK_FAMILIES = ("none", "unknown", "nvlink", "nvswitch", "xgmi", "pcie", "ib", "roce", "efa")  # of no one generation


def row_cluster(row: JobRow) -> dict[str, Any]:
    """``cluster``: nodes that divide the GPUs, and the links that the row names."""
    num_gpus = row.need("num_gpus")
    device, stated = row_device(row), row.text("gpu") or ""
    is_specified = stated.startswith("{")
    gpu = device.model_dump(mode="json", exclude_none=True) if is_specified else device.name
    if not is_specified and device.name.lower() != stated.lower():
        row.assume(f"gpu: {stated!r} is taken as {gpu}")
    per_node = row.count("gpus_per_node") or 8
    if num_gpus <= per_node:
        per_node = num_gpus
    elif num_gpus % per_node:
        usable = max(size for size in range(1, per_node + 1) if num_gpus % size == 0)
        row.assume(f"gpus_per_node: {num_gpus} GPUs on nodes of {per_node} taken as {usable} a node")
        per_node = usable
    cluster: dict[str, Any] = {"gpu": gpu, "num_nodes": num_gpus // per_node, "gpus_per_node": per_node}
    for tier, crossed in (("intra_node", per_node > 1), ("inter_node", num_gpus > per_node)):
        if crossed and (name := _link(row.text(tier))):
            cluster[tier] = name
        elif crossed:
            row.assume(f"{tier}: {row.text(tier) or 'not stated'}, the device's usual link was taken")
    return cluster


def _link(stated: str | None) -> str | dict[str, Any] | None:
    """The catalogue's name or a specification; ``None`` where nothing, or only the family of the link, is stated."""
    if stated is None or stated.lower() in _LINK_FAMILIES:
        return None
    if stated.startswith("{"):
        try:
            return cell_link(stated).model_dump(mode="json", exclude_none=True)
        except KeyError as error:
            raise RowError(f"link: the specification cannot be used: {error.args[0]}") from None
    try:
        name = canonical_link(stated)
    except KeyError:
        return None
    return "nvlink5-nvl72" if name == "nvl72" else name


def row_parallel(row: JobRow, model: dict[str, Any], cluster: dict[str, Any]) -> dict[str, Any]:
    """``parallel``: the stated sizes, or the smallest layout that fits; raises RowError when none divides."""
    num_gpus = row.need("num_gpus")
    tensor, pipeline, context = _model_parallel(row, model, cluster)
    model_parallel = tensor * pipeline * context
    if num_gpus % model_parallel:
        raise RowError(f"tp {tensor} x pp {pipeline} x cp {context} = {model_parallel} does not divide {num_gpus} GPUs")
    data = num_gpus // model_parallel
    if (stated := row.count("dp")) and stated != data:
        row.assume(f"data: {stated} in the row, {num_gpus} / {model_parallel} = {data} taken")
    expert = row.count("ep") or 1
    if expert > 1 and "moe" not in model:
        raise RowError(f"missing: num_experts (ep is {expert})")
    return {
        "tensor": tensor,
        "pipeline": pipeline,
        "context": context,
        "expert": expert,
        "expert_tensor": _expert_tensor(row, tensor),
        "data": data,
        "virtual_pipeline": row.count("vpp") or 1,
        "sequence_parallel": _sequence_parallel(row, tensor),
        **_sharding(row),
        "overlap": _overlap(row),
        "recompute": _recompute(row),
    }


def _model_parallel(row: JobRow, model: dict[str, Any], cluster: dict[str, Any]) -> tuple[int, int, int]:
    """Tensor, pipeline and context size; what is blank follows from the others, is 1, or is the smallest that fits."""
    num_gpus, batch = row.need("num_gpus"), row.count("global_batch")
    tensor, pipeline, context, data = (row.count(column) or None for column in ("tp", "pp", "cp", "dp"))
    if tensor is None and pipeline is None:
        return *_guess_layout(row, model, cluster), context or 1
    stated = (tensor or 1) * (pipeline or 1) * (context or 1)
    if tensor is not None and pipeline is not None:
        return tensor, pipeline, context or 1
    rest = num_gpus // (stated * data) if data and num_gpus % (stated * data) == 0 else 1
    if rest > 1:
        row.assume(f"{'pp' if tensor else 'tp'}: not stated, {rest} = {num_gpus} GPUs / {stated} / dp {data}")
        return tensor or rest, pipeline or rest, context or 1
    divides = num_gpus % stated == 0 and (batch is None or batch % (num_gpus // stated) == 0)
    return (
        (tensor or 1, pipeline or 1, context or 1) if divides else (*_guess_layout(row, model, cluster), context or 1)
    )


def _guess_layout(row: JobRow, model: dict[str, Any], cluster: dict[str, Any]) -> tuple[int, int]:
    """The smallest tensor x pipeline size whose weights and optimizer fit, in the order a practitioner would try."""
    num_gpus, batch = row.need("num_gpus"), row.count("global_batch")
    per_parameter = FROZEN_BYTES_PER_PARAMETER if row.is_frozen else TRAINING_BYTES_PER_PARAMETER
    weights = 12 if model["activation"] == "gelu" else 13  # 12 h^2 a layer; grouped queries and swiglu come near it
    needed_bytes = weights * model["num_layers"] * float(model["hidden_size"]) ** 2 * per_parameter
    memory_bytes = row_device(row).hbm_bytes
    context, fixed = row.count("cp") or 1, (row.count("tp"), row.count("pp"))
    candidates = sorted(
        ((tensor, pipeline) for tensor in {1, 2, 4, 8, fixed[0] or 1} for pipeline in {*range(1, 17), fixed[1] or 1}),
        key=lambda sizes: (sizes[0] * sizes[1], -sizes[0]),
    )
    for share, is_even in ((0.7, True), (1.0, True), (math.inf, True), (math.inf, False)):
        for tensor, pipeline in candidates:
            ranks = tensor * pipeline * context
            divides = tensor <= cluster["gpus_per_node"] and model["num_attention_heads"] % tensor == 0
            divides = divides and num_gpus % ranks == 0 and pipeline <= model["num_layers"]
            divides = divides and (model["num_layers"] % pipeline == 0 or not is_even)
            divides = divides and (batch is None or batch % (num_gpus // ranks) == 0)
            divides = divides and fixed in ((None, None), (tensor, None), (None, pipeline))
            if divides and needed_bytes / (tensor * pipeline) <= share * memory_bytes:
                row.assume(f"parallel: not stated, tensor {tensor} x pipeline {pipeline}, the smallest that fits")
                return tensor, pipeline
    raise RowError(f"tp, pp: not stated, and none divides {num_gpus} GPUs and a global batch of {batch}")


def _expert_tensor(row: JobRow, tensor: int) -> int:
    if not row.count("num_experts"):
        return 1
    if stated := row.note_count("expert_tensor_parallel_size"):
        return stated
    return tensor if row.text("source_id") == "megatron-golden" else 1  # Megatron-LM: as wide as tensor parallel


def _sequence_parallel(row: JobRow, tensor: int) -> bool:
    stated = row.flag("sequence_parallel")
    if tensor == 1:
        return False
    if stated is not None:
        return stated
    if row.count("num_experts") and row.framework in _MEGATRON_FAMILY:
        row.assume("sequence_parallel: not stated, True, which experts under tensor parallel require in Megatron")
        return True
    value = row.defaults.sequence_parallel or row.is_tuned
    if row.date and row.date < _SEQUENCE_PARALLEL_SINCE:
        value = False
    row.assume(f"sequence_parallel: not stated, {value} as {row.framework} rows of that time do")
    return value


def _sharding(row: JobRow) -> dict[str, Any]:
    stated = row.text("sharding")
    sharding = sharding_name(stated) if stated else None
    group = re.search(r"shard group (\d+)", row.notes)
    if group and 1 < int(group[1]) < row.need("num_gpus"):
        return {"sharding": "hsdp", "shard_size": int(group[1])}
    within = re.search(r"zero1 within (\d+) GPUs", row.notes)
    if within and sharding == "zero1":
        row.assume(f"sharding: zero1 within {within[1]} GPUs in the source, over all data-parallel ranks taken")
    if sharding is None:
        row.assume(f"sharding: {stated or 'not stated'}, {row.defaults.sharding} as {row.framework} does")
        sharding = row.defaults.sharding
    return {"sharding": sharding}


def _overlap(row: JobRow) -> dict[str, bool]:
    default = row.defaults.overlap or row.is_tuned
    tensor = row.flags.get("tp_comm_overlap") == "1"
    if row.text("source_id") == "megatron-golden":
        return {
            "grad_reduce": row.flags.get("overlap_grad_reduce") == "1",
            "param_gather": row.flags.get("overlap_param_gather") == "1",
            "tensor": tensor,
            "pipeline": (row.count("vpp") or 1) > 1,
        }
    if "overlap DP/TP/PP enabled" in row.notes:
        return {"grad_reduce": True, "param_gather": True, "tensor": True, "pipeline": True}
    return {"grad_reduce": default, "param_gather": default, "tensor": tensor, "pipeline": default}


def _recompute(row: JobRow) -> Any:
    cell = row.text("act_ckpt")
    stated = recompute_name(cell) if cell else None
    modules = row.flags.get("recompute_modules")
    if stated == "selective" and modules and "core_attn" not in modules:
        row.assume(f"recompute: only {modules}, cheap operators: none taken")
        return "none"
    if stated:
        return stated
    for word, mode in (("selective recompute", "selective"), ("full recompute", "full")):
        # a convention such as "hardware FLOPs incl. full recompute" says the same of the run itself
        if word in row.notes and "fused in TE/flash" not in row.notes:
            return mode
    row.assume(f"recompute: {cell or 'not stated'}, {row.defaults.recompute} taken")
    return row.defaults.recompute


def row_batch(row: JobRow, model: dict[str, Any], data: int) -> dict[str, Any]:
    """``batch`` of ``data`` data-parallel ranks; raises RowError when they do not divide it."""
    global_batch, seq_length = _global_batch(row, data), row.need("seq_len")
    if re.search(r"unpadded|packed variable-length", row.notes) or (seq_length == 512 and "binning" in row.notes):
        # Half of BERT's 512 positions is padding in Wikipedia (arXiv 2107.02027, section 1), which bins leave out too.
        seq_length = max(1, seq_length // 2)
        row.assume(f"seq_length: variable-length samples without padding, the mean of {seq_length} taken")
    if global_batch % data:
        raise RowError(f"global_batch {global_batch} is not a multiple of the data-parallel size {data}")
    per_rank = global_batch // data
    micro = row.count("micro_batch")
    if row.is_mlperf_bert and micro in (None, per_rank / 2):
        # PACKING_FACTOR=2 and GRADIENT_STEPS=1 of its configurations: a packed sample counts as two of the batch.
        row.assume(f"micro_batch_size: {micro or 'not stated'}, all {per_rank} sequences of a rank at once taken")
        micro = per_rank
    if micro is None and (accumulation := row.count("grad_accum")):
        micro = max(1, per_rank // accumulation)
    if micro is None:
        micro = 1 if row.defaults.micro_batch == "one" else min(per_rank, max(1, 16_384 // seq_length))
        row.assume(f"micro_batch_size: not stated, {_nearest_divisor(per_rank, micro)} taken")
        micro = _nearest_divisor(per_rank, micro)
    if per_rank % micro:
        nearest = _nearest_divisor(per_rank, micro)
        row.assume(f"micro_batch_size: {micro} does not divide {global_batch} / {data}, {nearest} taken")
        micro = nearest
    batch = {"seq_length": seq_length, "micro_batch_size": micro, "global_batch_size": global_batch}
    if model["architecture"] == "encoder_decoder":
        batch["target_seq_length"] = _target_length(row, seq_length)
    return batch


def _global_batch(row: JobRow, data: int) -> int:
    if row.text("global_batch") is not None:
        return row.need("global_batch")
    total = row.need("micro_batch") * row.need("grad_accum") * data
    row.assume(f"global_batch: not stated, micro_batch x grad_accum x {data} = {total} taken")
    return total


def _nearest_divisor(total: int, wanted: int) -> int:
    divisors = {size for low in range(1, math.isqrt(total) + 1) if total % low == 0 for size in (low, total // low)}
    return min(divisors, key=lambda size: (abs(math.log(size / wanted)), size))


def _target_length(row: JobRow, seq_length: int) -> int:
    stated = row.note_count("decoder_seq")
    if stated is None and (found := re.search(r"dec(?: seq)? (\d+)", row.notes)):
        stated = int(found[1])
    if stated is None:
        row.assume(f"target_seq_length: not stated, {seq_length} as the source side")
    return stated or seq_length


def split_over_stages(row: JobRow, model: dict[str, Any], parallel: dict[str, Any]) -> None:
    """Layers per stage where they do not divide: Megatron counts the embedding and the head as a layer each."""
    stages, chunks = parallel["pipeline"], parallel["virtual_pipeline"]
    if stages == 1:
        parallel["virtual_pipeline"] = 1
        return
    layers = model["num_layers"] + model.get("num_encoder_layers", 0)
    slots = stages * chunks
    if slots > layers + 2:
        raise RowError(f"pp {stages} x vpp {chunks} = {slots} model chunks are more than the {layers} layers can fill")
    first, last = (row.note_count(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    if first and last and stages > 2 and chunks == 1:
        parallel["layers_per_stage"] = [first, *_even(layers - first - last, stages - 2), last]
    elif layers % slots and row.framework == "megatron-deepspeed" and (layers + 2) % slots:
        # DeepSpeed's pipeline module fills every stage but the last alike (partition_method type:transformer).
        each = -(-layers // slots)
        full, rest = divmod(layers, each)
        split = [each] * full + [rest] * (full < slots) + [0] * (slots - full - 1)
        parallel["layers_per_stage"] = split
        row.assume(f"layers_per_stage: {layers} layers over {slots} stages taken as {split}")
    elif layers % slots:
        ends = _even(layers + 2, slots)
        split = [ends[0] - 1, *ends[1:-1], ends[-1] - 1]
        parallel["layers_per_stage"] = split
        row.assume(f"layers_per_stage: {layers} layers over {stages} stages x {chunks} chunks taken as {split}")


def _even(layers: int, stages: int) -> list[int]:
    """As even as possible, the longer stages in the middle."""
    base, extra = divmod(layers, stages)
    start = (stages - extra) // 2
    return [base + (start <= stage < start + extra) for stage in range(stages)]
