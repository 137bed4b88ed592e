"""A training job: what a user writes in job.yaml, validated, and the same job with every default filled in.

``TrainingJob.from_yaml(path)`` reads a file and raises one :class:`JobError` that lists every problem.
``job.resolved()`` fills what the file left open and lists each assumption in ``assumed``.
Nothing here imports torch: a bad job is answered before torch is loaded.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from dataset_builder.job.document import JobText, job_text, parse_document
from dataset_builder.job.errors import JobError
from dataset_builder.job.hardware import (
    DeviceSpec,
    LinkSpec,
    canonical_device,
    canonical_link,
    device,
    device_names,
    link,
)
from dataset_builder.job.model import ModelSpec
from dataset_builder.job.parallel import FOLDED_SCHEDULES, ParallelPlan, Recompute
from dataset_builder.job.precision import PrecisionPolicy, resolve_precision
from dataset_builder.job.reasons import reasons_of, shown
from dataset_builder.job.values import Count, Frozen, WalkedCount, in_unit


class BatchSpec(Frozen):
    """Batch sizes in sequences; ``target_seq_length`` is the decoder's length in an encoder-decoder."""

    seq_length: Annotated[Count, in_unit("tokens", "8192")]
    micro_batch_size: Count
    global_batch_size: Count
    target_seq_length: Annotated[Count, in_unit("tokens", "512")] | None = None


class ClusterSpec(Frozen):
    """The GPUs a job runs on. ``gpu`` and the links are named in the catalogue or given as a specification."""

    gpus_per_node: WalkedCount = 8  # first: a node's network cards are shared by its GPUs
    num_nodes: Count = 1
    gpu: DeviceSpec
    intra_node: LinkSpec | None = None
    inter_node: LinkSpec | None = None
    assumed: tuple[str, ...] = Field(default=(), exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _note_aliases(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        notes = []
        for key in ("gpu", "intra_node", "inter_node"):
            canonical = canonical_device if key == "gpu" else canonical_link
            written = data.get(key)
            if isinstance(written, str):
                try:
                    if (name := canonical(written)).lower() != written.strip().lower():
                        notes.append(f"cluster.{key}: {written!r} is taken as {name}")
                except KeyError:
                    continue  # reported by the field itself
        return {**data, "assumed": tuple(notes)}

    @field_validator("gpu", mode="before")
    @classmethod
    def _device_of_catalogue(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return device(value)
        except KeyError as error:
            every = f"; the catalogue has {', '.join(device_names())}"
            raise ValueError(_unknown("device", error, every)) from None

    @field_validator("intra_node", "inter_node", mode="before")
    @classmethod
    def _link_of_catalogue(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return link(value, info.data.get("gpus_per_node", 8))
        except KeyError as error:
            own = ", e.g. {bytes_per_s_per_gpu: 50e9, latency_s: 6e-6} for 400 Gb/s a GPU"
            raise ValueError(_unknown("link", error, own)) from None

    @model_validator(mode="after")
    def _nodes_are_joined(self) -> ClusterSpec:
        if self.num_nodes > 1 and self.inter_node is not None and self.inter_node.name == "none":
            raise ValueError(f"inter_node: got 'none' with {self.num_nodes} nodes; expected the link between them")
        return self

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node


def _unknown(what: str, error: KeyError, otherwise: str) -> str:
    """Names the nearest catalogue entries; ``otherwise`` is said when none is near."""
    near = error.args[0]
    if near:
        return f"expected a {what} of the catalogue or its specification (did you mean {near}?)"
    return f"expected a {what} of the catalogue or its specification{otherwise}"


class SoftwareStack(Frozen):
    """The software that runs the job; ``None`` is unknown, and the predictor treats it as unknown."""

    framework: str | None = None
    date: str | None = None  # YYYY-MM
    attention: Literal["flash", "unfused"] | None = None
    compile: bool | None = None
    fused_kernels: bool | None = None
    cuda_graphs: bool | None = None
    deterministic: bool | None = None

    @field_validator("framework")
    @classmethod
    def _in_lower_case(cls, value: str | None) -> str | None:
        """One spelling of PyTorch, NeMo and Megatron_LM: names are compared by defaults, network and calibrations."""
        return value and re.sub(r"[\s_]+", "-", value.strip().lower())

    @field_validator("date")
    @classmethod
    def _year_and_month(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"20\d\d(-(0[1-9]|1[0-2])(-\d\d)?)?", value):
            raise ValueError("expected a date as YYYY-MM, e.g. 2025-06")
        return value and value[:7]


class OptimizerSpec(Frozen):
    """``none`` times forward and backward only."""

    name: Literal["adam", "adamw", "sgd", "lion", "adafactor", "muon", "lamb", "none"] = "adamw"

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data


class TrainingLength(Frozen):
    """How long to train, in exactly one unit; gives total time and cost."""

    tokens: Annotated[float, Field(gt=0), in_unit("tokens", "15e12")] | None = None
    steps: Annotated[float, Field(gt=0)] | None = None
    samples: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> TrainingLength:
        given = [name for name in ("tokens", "steps", "samples") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"got {' and '.join(given) or 'nothing'}; expected exactly one of tokens, steps, samples")
        return self


class PriceSpec(Frozen):
    usd_per_gpu_hour: Annotated[float, Field(ge=0)]


class TrainingJob(Frozen):
    """One training job. Everything but ``model``, ``batch`` and ``cluster`` has a default."""

    name: str | None = None
    model: ModelSpec
    batch: BatchSpec
    cluster: ClusterSpec
    precision: PrecisionPolicy = PrecisionPolicy.model_validate("bf16_mixed")
    parallel: ParallelPlan = ParallelPlan()
    software: SoftwareStack = SoftwareStack()
    optimizer: OptimizerSpec = OptimizerSpec()
    training: TrainingLength | None = None
    price: PriceSpec | None = None
    assumed: tuple[str, ...] = Field(default=(), exclude=True)

    @classmethod
    def from_yaml(cls, source: str | Path | JobText, overrides: Mapping[str, Any] | None = None) -> TrainingJob:
        """Reads a job file (``-``: standard input) or a text read already; raises JobError with every problem in it.

        ``overrides`` maps key paths to values, as ``--set`` does; a text value is read as YAML, as in the file.
        """
        text = job_text(source)
        return cls.changed(text.values(), overrides or {}, source=text.name, folder=text.folder)

    @classmethod
    def changed(cls, data: Any, overrides: Mapping[str, Any], source: str, folder: Path | None = None) -> TrainingJob:
        """A job of plain values with key paths set; the stated keys that this drops stand in ``assumed``."""
        job = cls.parse(overridden(data, overrides), source, folder)
        return job.model_copy(update={"assumed": (*job.assumed, *_dropped(data, overrides))})

    @classmethod
    def parse(cls, data: Any, source: str = "job", folder: Path | None = None) -> TrainingJob:
        """Validates plain values; raises JobError with every problem. Relative paths start from ``folder``."""
        if not isinstance(data, Mapping):
            raise JobError([f"got {shown(data)}; expected a mapping with model, batch and cluster"], source)
        reasons = [
            f"{place}assumed: unknown key; expected none of that name"
            for place, part in (("", data), ("model.", data.get("model")), ("cluster.", data.get("cluster")))
            if isinstance(part, Mapping) and "assumed" in part
        ]
        try:
            job = cls.model_validate(dict(data), context={"folder": folder})
        except ValidationError as error:
            reasons += reasons_of(error, cls, data)
        if reasons:
            raise JobError(reasons, source)
        return job

    def resolved(self) -> TrainingJob:
        """This job with every derived or assumed value filled in, and one sentence per assumption in ``assumed``."""
        notes: list[str] = [*self.assumed, *self.model.assumed, *self.cluster.assumed]
        notes += [
            f"{key}: {value} assumed (not given)"
            for key, value in (("precision", "bf16_mixed"), ("optimizer", "adamw"))
            if key not in self.model_fields_set
        ]
        notes += [
            f"cluster.{key}: {getattr(self.cluster, key)} assumed (not given)"
            for key in ("num_nodes", "gpus_per_node")
            if key not in self.cluster.model_fields_set
        ]
        cluster = _resolved_cluster(self.cluster, notes)
        _note_software(self, notes)
        parallel = _resolved_parallel(self, notes)
        precision = _resolved_precision(self, parallel, notes)
        return self.model_copy(
            update={
                "model": _resolved_model(self),
                "batch": _resolved_batch(self, notes),
                "cluster": cluster,
                "parallel": parallel,
                "precision": precision,
                "assumed": tuple(dict.fromkeys(notes)),
            }
        )


def _resolved_model(job: TrainingJob) -> ModelSpec:
    """Learned positions reach as far as the job's sequences when nothing else is said."""
    if job.model.position_embedding != "learned" or job.model.max_position_embeddings is not None:
        return job.model
    return job.model.model_copy(update={"max_position_embeddings": job.batch.seq_length})


def _resolved_batch(job: TrainingJob, notes: list[str]) -> BatchSpec:
    if job.model.architecture != "encoder_decoder" or job.batch.target_seq_length is not None:
        return job.batch
    notes.append(f"batch.target_seq_length: {job.batch.seq_length} assumed, the encoder's (not given)")
    return job.batch.model_copy(update={"target_seq_length": job.batch.seq_length})


def _resolved_cluster(cluster: ClusterSpec, notes: list[str]) -> ClusterSpec:
    intra, inter = cluster.intra_node, cluster.inter_node
    if intra is None:
        name = "none" if cluster.gpus_per_node == 1 else cluster.gpu.intra_node or "pcie4"
        intra = link(name, cluster.gpus_per_node)
        if cluster.gpus_per_node > 1:
            notes.append(f"cluster.intra_node: {name} assumed, the usual link of {cluster.gpu.name} (not given)")
    if inter is None:
        name = "none" if cluster.num_nodes == 1 else cluster.gpu.inter_node or "unknown"
        inter = link(name, cluster.gpus_per_node)
        if cluster.num_nodes > 1:
            notes.append(f"cluster.inter_node: {name} assumed, the usual link of {cluster.gpu.name} nodes (not given)")
    return cluster.model_copy(update={"intra_node": intra, "inter_node": inter})


def attention_kernel(job: TrainingJob) -> Literal["flash", "unfused"]:
    """The kernel to trace: the one stated, else what such a device usually runs. A relative bias has no flash kernel.

    FlashAttention-2 needs compute capability 8.0 or CDNA2 (on other devices, bf16).
    """
    if job.model.position_embedding == "relative":
        return "unfused"
    if job.software.attention is not None:
        return job.software.attention
    gpu = job.cluster.gpu
    able = gpu.compute_capability >= 8.0 or gpu.architecture in ("cdna2", "cdna3", "cdna4")
    able = able or (gpu.vendor == "other" and gpu.supports("bf16"))
    return "flash" if able else "unfused"


def has_fused_kernels(job: TrainingJob) -> bool:
    """Whether to trace fused kernels: as stated, or because a compiler fuses; assumed where nothing is known."""
    return job.software.fused_kernels is not False or bool(job.software.compile)


def _note_software(job: TrainingJob, notes: list[str]) -> None:
    """What is traced where the software is unknown; the job itself keeps it as unknown, and so does the network."""
    traced = {"attention": attention_kernel(job), "compile": "false", "fused_kernels": str(has_fused_kernels(job))}
    for key, value in traced.items():
        if getattr(job.software, key) is None:
            notes.append(f"software.{key}: {value.lower()} assumed (not given)")


def _resolved_parallel(job: TrainingJob, notes: list[str]) -> ParallelPlan:
    plan, family = job.parallel, _framework_family(job.software.framework)
    data = plan.data or max(1, job.cluster.num_gpus // plan.model_parallel_size)
    filled: dict[str, Any] = {"data": data}
    if plan.schedule in (None, "1f1b", "interleaved"):
        filled["schedule"] = schedule = "interleaved" if plan.virtual_pipeline > 1 else "1f1b"
        if plan.schedule not in (None, schedule):
            notes.append(f"parallel.schedule: {schedule}, as virtual_pipeline is {plan.virtual_pipeline}")
    if plan.schedule in FOLDED_SCHEDULES and plan.virtual_pipeline == 1 and plan.pipeline > 1:
        filled["virtual_pipeline"] = 2
        notes.append(f"parallel.virtual_pipeline: 2, as {plan.schedule} folds two model chunks a rank to a V")
    if plan.sequence_parallel is None:
        experts = family == "megatron-lm" and job.model.moe is not None  # Megatron-LM refuses them without it
        filled["sequence_parallel"] = value = plan.tensor > 1 and (family == "megatron-core" or experts)
        if plan.tensor > 1:
            reason = ", which experts under tensor parallelism require" if experts else ""
            notes.append(f"parallel.sequence_parallel: {str(value).lower()} assumed{reason} (not given)")
    if plan.sharding is None:
        filled["sharding"] = {"megatron-core": "zero1", "megatron-lm": "zero1", "fsdp": "zero3"}.get(family, "none")
        notes.append(f"parallel.sharding: {filled['sharding']} assumed (not given)")
    if plan.recompute is None:
        filled["recompute"] = Recompute()
        notes.append("parallel.recompute: none assumed (not given)")
    if "overlap" not in plan.model_fields_set and job.cluster.num_gpus > 1:
        hidden = ", ".join(name for name, is_hidden in plan.overlap if is_hidden)
        notes.append(f"parallel.overlap: {hidden} assumed to run beside compute (not given)")
    if plan.shard_size is None and plan.sharding == "hsdp":
        filled["shard_size"] = math.gcd(data * plan.context, max(1, job.cluster.gpus_per_node // plan.tensor))
        notes.append(f"parallel.shard_size: {filled['shard_size']} assumed, one node's share (not given)")
    return plan.model_copy(update=filled)


def _resolved_precision(job: TrainingJob, parallel: ParallelPlan, notes: list[str]) -> PrecisionPolicy:
    family = _framework_family(job.software.framework)
    sixteen_bit = family in ("megatron-core", "megatron-lm", "deepspeed")
    policy = resolve_precision(job.precision, sixteen_bit_params=sixteen_bit)
    if job.precision.param_gather is None and parallel.sharding in ("zero3", "hsdp") and policy.params == "fp32":
        # FSDP's MixedPrecision gathers fp32 shards in the compute format.
        low = {"bf16": "bf16", "fp16": "fp16"}.get(policy.compute, "fp32")
        policy = policy.model_copy(update={"param_gather": low})
        notes.append(f"precision.param_gather: {low} assumed, as FSDP's mixed precision does (not given)")
    filled = [name for name in ("params", "main_params", "grad_reduce") if getattr(job.precision, name) is None]
    if filled:
        values = ", ".join(f"{name} {getattr(policy, name)}" for name in filled)
        if job.software.framework is not None:
            notes.append(f"precision: {values} assumed from the framework (not given)")
        else:
            is_autocast = "params" in filled and policy.compute in ("fp16", "bf16")
            what = "fp32 weights under autocast" if is_autocast else values
            notes.append(f"precision: {what} assumed (no software.framework given)")
    return policy


def _framework_family(framework: str | None) -> str:
    """Which defaults a framework has: ``megatron-core``, ``megatron-lm``, ``deepspeed``, ``fsdp`` or ``other``."""
    name = (framework or "").lower()
    families = {
        "deepspeed": ("deepspeed", "internevo", "colossalai"),
        "megatron-core": ("megatron-bridge", "megatron-core", "nemo"),
        "megatron-lm": ("megatron",),
        "fsdp": ("llm-foundry", "torchtitan", "fsdp"),
    }
    return next((family for family, marks in families.items() if any(mark in name for mark in marks)), "other")


WHOLE_MODEL = ("model.preset", "model.config")
"""Key paths that, set anew, replace the whole model."""


def overridden(data: Any, overrides: Mapping[str, Any]) -> Any:
    """A job's plain values with key paths set, in order; a text value is read as YAML, as in the file."""
    if not isinstance(data, dict):
        return data  # reported by validation
    for path, value in overrides.items():
        read = parse_document(value.encode(), f"--set {path}") if isinstance(value, str) else value
        data = _with_value(data, path.split("."), read)
    return data


def _dropped(data: Any, overrides: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for every part of a job that is replaced as a whole, with the keys that it stated beside its name."""
    for path, value in overrides.items():
        part = "model" if path in WHOLE_MODEL else path
        there: Any = data
        for key in part.split("."):
            there = there.get(key) if isinstance(there, Mapping) else None
        if not isinstance(there, Mapping):
            continue
        given = value if isinstance(value, Mapping) else {}
        left = {key: value for key, value in there.items() if key not in ("preset", "config", "name", "mode", *given)}
        if left:
            stated = ", ".join(itertools.islice(_key_values(left, ""), 12))
            kept = "; precision.preset=NAME would keep it" if path == "precision" else ""
            yield f"{path}: what is given replaces what the job states of {part} too: {stated}{kept}"


def _key_values(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _key_values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} {value}"[:80]


def _with_value(data: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """A copy of ``data`` with one key path set; a preset name on the way becomes a mapping that starts from it."""
    if path[0] == "model" and len(path) > 1:
        path, data = _within_model(data, path)
    key, *rest = path
    below = data.get(key)
    if not rest:
        return {**data, key: value}
    if key == "precision" and isinstance(below, str):
        below = {"preset": below}
    elif key == "optimizer" and isinstance(below, str):
        below = {"name": below}
    elif key == "recompute" and isinstance(below, str):
        below = {"mode": below}
    elif key == "gpu" and isinstance(below, str):
        below = _specification(below)
    return {**data, key: _with_value(below if isinstance(below, dict) else {}, rest, value)}


def _specification(name: str) -> Any:
    """The catalogue's facts of a device, to change one of them; an unknown name is left for validation to report."""
    try:
        return device(name).model_dump()
    except KeyError:
        return name


def _within_model(data: dict[str, Any], path: list[str]) -> tuple[list[str], dict[str, Any]]:
    """A size set on a preset or a config is an override; another preset or config replaces the whole model."""
    model = data.get("model")
    if not isinstance(model, dict):
        return path, data
    if path[1] in ("preset", "config"):
        return path, {**data, "model": {}}
    if path[1] in ("sizes", "overrides", "name"):
        return path, data
    if "preset" in model or "config" in model:
        return ["model", "overrides", *path[1:]], data
    return (["model", "sizes", *path[1:]] if "sizes" in model else path), data
