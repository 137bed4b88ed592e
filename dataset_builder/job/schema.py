"""A training job: what a user writes in job.yaml, validated, and the same job with every default filled in.

``TrainingJob.from_yaml(path)`` reads a file and raises one :class:`JobError` that lists every problem.
``job.resolved()`` fills what the file left open and lists each assumption in ``assumed``.
Nothing here imports torch: a bad job is answered before torch is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dataset_builder.job.hardware import DeviceSpec, LinkSpec
from dataset_builder.job.model import ModelSpec
from dataset_builder.job.parallel import ParallelPlan
from dataset_builder.job.precision import PrecisionPolicy
from dataset_builder.job.values import Count, Frozen


class BatchSpec(Frozen):
    """Batch sizes in sequences; ``target_seq_length`` is the decoder's length in an encoder-decoder."""

    seq_length: Count
    micro_batch_size: Count
    global_batch_size: Count
    target_seq_length: Count | None = None


class ClusterSpec(Frozen):
    """The GPUs a job runs on. ``gpu`` and links are resolved from the catalogue or given as a specification."""

    gpu: DeviceSpec
    num_nodes: Count = 1
    gpus_per_node: Count = 8
    intra_node: LinkSpec | None = None
    inter_node: LinkSpec | None = None

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node


class SoftwareStack(Frozen):
    """The software that runs the job; ``None`` is unknown, and the predictor treats it as unknown."""

    framework: str | None = None
    date: str | None = None  # YYYY-MM
    attention: Literal["flash", "unfused"] | None = None
    compile: bool | None = None
    fused_kernels: bool | None = None
    cuda_graphs: bool | None = None
    deterministic: bool | None = None


class OptimizerSpec(Frozen):
    """``none`` times forward and backward only."""

    name: Literal["adam", "adamw", "sgd", "lion", "adafactor", "muon", "lamb", "none"] = "adamw"


class TrainingLength(Frozen):
    """How long to train, in exactly one unit; gives total time and cost."""

    tokens: Annotated[float, Field(gt=0)] | None = None
    steps: Annotated[float, Field(gt=0)] | None = None
    samples: Annotated[float, Field(gt=0)] | None = None


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
    def from_yaml(cls, source: str | Path, overrides: dict[str, Any] | None = None) -> TrainingJob:
        """Reads a job file (``-``: standard input); ``overrides`` maps key paths to values, as ``--set`` does."""
        raise RuntimeError("to be written")

    def resolved(self) -> TrainingJob:
        """This job with every derived or assumed value filled in, and one sentence per assumption in ``assumed``."""
        raise RuntimeError("to be written")
