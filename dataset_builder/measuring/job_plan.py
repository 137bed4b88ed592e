"""The plan of a job: the reference program in plain PyTorch that its training step is measured with, and its row.

In: a job. Out: a :class:`StepPlan`, or CannotRunError with everything the reference program cannot run and everything
the row could not say: a row is written only when reading it back gives the job that was measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset_builder.corpus.job_row import ARCHITECTURES, RowError
from dataset_builder.corpus.run_jobs import job_mapping
from dataset_builder.job.errors import CannotRunError, JobError
from dataset_builder.job.hardware import DeviceSpec, LinkSpec, device, link
from dataset_builder.job.schema import SoftwareStack, TrainingJob
from dataset_builder.measuring.plan import PlannedGraph, StepPlan
from dataset_builder.measuring.table import Cell
from dataset_builder.tracing.job_blocks import JobBlocks, job_blocks
from dataset_builder.tracing.layout import RankLayout, rank_layout
from dataset_builder.tracing.trace import build_graph

_LINEAR_FORMATS = ("same", "fp8_current", "fp8_tensorwise", "fp8_rowwise")
_OPTIMIZERS = ("adam", "adamw", "sgd", "none")


def plan_of_file(path: str | Path, overrides: Mapping[str, Any]) -> StepPlan:
    """The plan of a job file with key paths set, its graph left out; raises JobError."""
    return job_plan(TrainingJob.from_yaml(path, overrides))


def graph_of_file(path: str | Path, overrides: Mapping[str, Any]) -> PlannedGraph:
    """The graph of the job that :func:`plan_of_file` plans."""
    return planned_graph(TrainingJob.from_yaml(path, overrides))


def planned_graph(job: TrainingJob) -> PlannedGraph:
    """The graph of what :func:`job_plan` plans."""
    graph = build_graph(_in_pytorch(job))
    stages = (
        tuple((graph.nodes[index], float(repeats[index])) for index in repeats.nonzero()[0])
        for repeats in graph.repeats
    )
    return PlannedGraph(graph.fingerprint, graph.tracer_version, tuple(stages))


def job_plan(job: TrainingJob) -> StepPlan:
    """The plan of a job; whatever software it states, plain PyTorch is what is measured, and the row says so."""
    job = _in_pytorch(job).resolved()
    layout = rank_layout(job)
    blocks = job_blocks(job, layout)
    reasons = [*_not_runnable(job, layout), *_not_runnable_blocks(blocks)]
    row = _row(job, layout)
    reasons = reasons or _not_said(job, row)
    if reasons:
        raise CannotRunError(reasons, job.name or "job")
    policy = job.precision
    is_decoder = job.model.architecture != "encoder"
    return StepPlan(
        name=job.name or job.model.name or "job",
        row=row,
        embedding=blocks.embedding,
        head=blocks.head,
        stages=tuple(
            tuple((structure, counts[stage]) for (structure, _), counts in blocks.layers.items() if counts[stage])
            for stage in range(layout.pipeline)
        ),
        sizes={name: round(value) for name, value in blocks.sizes[is_decoder].items()},
        tie_embeddings=job.model.tie_embeddings,
        is_cpu=job.cluster.gpu.vendor == "cpu",
        tensor=layout.tensor,
        data=layout.data,
        num_microbatches=layout.num_microbatches,
        sharding=job.parallel.sharding or "none",
        compute=policy.compute,
        params=policy.params or "fp32",
        grad_reduce=policy.grad_reduce or "fp32",
        param_gather=policy.param_gather or "fp32",
        loss_scaling=policy.loss_scaling,
        optimizer=job.optimizer.name,
    )


def _in_pytorch(job: TrainingJob) -> TrainingJob:
    kernel = job.software.attention or ("unfused" if job.model.position_embedding == "relative" else "flash")
    software = SoftwareStack(framework="pytorch", attention=kernel, compile=False, fused_kernels=False)
    return job.model_copy(update={"software": software})


def _not_runnable(job: TrainingJob, layout: RankLayout) -> list[str]:
    """What the reference program does not do, each with what it can."""
    plan, policy = job.parallel, job.precision
    sizes = {"context": layout.context, "expert": layout.expert, "expert_tensor": layout.expert_tensor,
             "virtual_pipeline": layout.virtual_pipeline}  # fmt: skip
    reasons = [
        f"parallel.{key}: got {value}; the reference program runs 1" for key, value in sizes.items() if value > 1
    ]
    if job.software.compile:
        reasons.append("software.compile: the reference program is eager")
    if layout.pipeline > 1 and plan.schedule != "1f1b":
        reasons.append(f"parallel.schedule: got {plan.schedule}; the reference program runs 1f1b")
    if layout.num_microbatches < layout.pipeline:
        reasons.append(f"batch: {layout.num_microbatches} microbatches do not fill {layout.pipeline} stages of 1f1b")
    if plan.sharding not in ("none", "zero3"):
        reasons.append(f"parallel.sharding: got {plan.sharding}; the reference program runs none and zero3 (FSDP2)")
    if plan.sharding == "zero3" and layout.tensor * layout.pipeline > 1:
        reasons.append(
            "parallel.sharding: zero3 beside tensor or pipeline parallel is not run by the reference program"
        )
    if job.model.architecture == "encoder_decoder" or job.model.lora:
        reasons.append("model: the reference program runs decoders and encoders without adapters")
    if policy.params != "fp32" and policy.main_params == "fp32":
        reasons.append("precision.main_params: fp32 beside 16-bit params is not run; mixed presets keep params fp32")
    if (policy.optimizer_state, policy.grad_accum) != (policy.params, policy.params):
        reasons.append("precision.optimizer_state, grad_accum: the reference program keeps both in the params' format")
    if policy.attention == "fp8":
        reasons.append("precision.attention: fp8 is not run by the reference program")
    if job.optimizer.name not in _OPTIMIZERS:
        reasons.append(f"optimizer: got {job.optimizer.name}; the reference program runs {', '.join(_OPTIMIZERS)}")
    return reasons


def _not_runnable_blocks(blocks: JobBlocks) -> list[str]:
    structures = [structure for structure, _ in blocks.layers]
    formats = {fmt for structure in structures for _, fmt in structure.linears}
    reasons = [
        f"precision.linear: got {fmt}; the reference program runs {', '.join(_LINEAR_FORMATS)}"
        for fmt in sorted(formats - {*_LINEAR_FORMATS})
    ]
    if formats and any(structure.tensor for structure in structures):
        reasons.append("precision.linear: fp8 beside tensor parallel is not run by the reference program")
    if any(structure.windowed for structure in structures):
        reasons.append("model.attention: sliding windows are not run by the reference program")
    return reasons


def _row(job: TrainingJob, layout: RankLayout) -> dict[str, Cell]:
    """The columns of the runs table that say which job this is."""
    model, plan, cluster = job.model, job.parallel, job.cluster
    moe = model.moe
    details = {"grad_reduce": job.precision.grad_reduce} if job.precision.grad_reduce != job.precision.params else {}
    linear = job.precision.linear.removeprefix("fp8_") if job.precision.linear.startswith("fp8_") else ""
    detail = [*([linear] if linear else []), *(f"{key}={value}" for key, value in details.items())]
    row: dict[str, Cell] = {
        "framework": "pytorch",
        "gpu": _device_cell(cluster.gpu),
        "num_gpus": cluster.num_gpus,
        "gpus_per_node": cluster.gpus_per_node,
        "intra_node": _link_cell(cluster.intra_node, cluster.gpus_per_node),
        "inter_node": _link_cell(cluster.inter_node, cluster.gpus_per_node),
        "model_name": model.name or job.name or "own",
        "arch": _architecture(job),
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "ffn_hidden": moe.expert_ffn_hidden_size if moe else model.ffn_hidden_size,
        "heads": model.num_attention_heads,
        "kv_heads": model.num_query_groups,
        "head_dim": model.head_dim,
        "vocab": model.vocab_size,
        "seq_len": job.batch.seq_length,
        "num_experts": moe.num_experts if moe else None,
        "top_k": moe.top_k if moe else None,
        "gated_mlp": int(model.is_gated),
        "tied_embeddings": int(model.tie_embeddings),
        "tp": layout.tensor, "pp": layout.pipeline, "dp": layout.data, "cp": layout.context,
        "ep": layout.expert if moe else None, "vpp": None,
        "sequence_parallel": int(bool(plan.sequence_parallel)),
        "sharding": plan.sharding,
        "micro_batch": job.batch.micro_batch_size,
        "global_batch": job.batch.global_batch_size,
        "grad_accum": layout.num_microbatches,
        "precision": job.precision.label,
        "precision_detail": ", ".join(detail) or None,
        "act_ckpt": plan.recompute.mode if plan.recompute else "none",
        "attention": job.software.attention,
        "compile": 0,
        "optimizer": job.optimizer.name,
        "notes": f"hidden_dropout={model.dropout:g}",
    }  # fmt: skip
    text = json.dumps({key: value for key, value in row.items() if not key.startswith("precision")}, sort_keys=True)
    return row | {"job_group": hashlib.sha256(text.encode()).hexdigest()[:10]}


def _architecture(job: TrainingJob) -> str:
    """The table's architecture whose operators are the model's; else the nearest, which the check finds out."""
    model = job.model
    if model.moe:
        return "moe"
    kind = (model.architecture, model.position_embedding, model.normalization, model.bias)
    known = {(a.architecture, a.position, a.normalization, a.bias): name for name, a in reversed(ARCHITECTURES.items())}
    return known.get(kind, "gpt")


def _device_cell(spec: DeviceSpec) -> str:
    try:
        if device(spec.name) == spec:
            return spec.name
    except KeyError:
        pass
    return spec.model_dump_json(exclude_none=True)


def _link_cell(spec: LinkSpec | None, gpus_per_node: int) -> str | None:
    if spec is None:
        return None
    try:
        if link(spec.name, gpus_per_node) == spec:
            return spec.name
    except KeyError:
        pass
    return spec.model_dump_json(exclude_none=True)


def _not_said(job: TrainingJob, row: Mapping[str, Cell]) -> list[str]:
    """Where the job that a reader of the row gets differs from the one that is measured."""
    written = {key: None if value is None else str(value) for key, value in row.items()}
    try:
        read = TrainingJob.parse(job_mapping({**written, "source_id": "benchmark"})[0], source="row").resolved()
    except (RowError, JobError) as error:
        return [f"a row of the runs table cannot say this job: {error}"]
    parts = ("model", "batch", "precision", "parallel", "optimizer", "cluster", "software")
    links = {"intra_node": job.cluster.gpus_per_node, "inter_node": job.cluster.num_nodes}
    unused = {link for link, joined in links.items() if joined == 1}
    unsaid = {"model": {"name"}, "precision": {"preset"}, "software": {"date"}, "cluster": unused}
    reasons = []
    for part in parts:
        first, second = (getattr(each, part).model_dump(exclude=unsaid.get(part)) for each in (job, read))
        for key in sorted(first):
            if first[key] != second[key]:
                reasons.append(f"{part}.{key}: a row of the runs table would say {second[key]}, not {first[key]}")
    return reasons
