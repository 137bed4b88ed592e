"""How a job is laid out over ranks: the sizes of the parallel axes, the pipeline schedule, sharding and recompute."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from dataset_builder.job.values import Count, CountOrZero, Frozen, WalkedCount

Sharding = Literal["none", "zero1", "zero2", "zero3", "hsdp"]
# ``zero_bubble`` is ZB-H1, which needs no more memory than 1F1B; ``zero_bubble_2p`` has the order of ZB-H2.
Schedule = Literal[
    "gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_2p", "zero_bubble_v", "dualpipe", "dualpipe_v"
]
# Their two model chunks of a rank are folded to a V: the first rank embeds and has the head.
FOLDED_SCHEDULES = ("zero_bubble_v", "dualpipe_v")
# Positions of the sequence that a context-parallel rank has at least in any layout that is searched or advised.
LEAST_POSITIONS = 1024


class Overlap(Frozen):
    """Which communication runs beside compute.

    ``pipeline``: hand-overs between stages and, where a schedule runs forward and backward passes in pairs (DualPipe),
    the experts' messages of each beside the compute of the other.
    """

    grad_reduce: bool = True
    param_gather: bool = True
    tensor: bool = False
    pipeline: bool = True


class Recompute(Frozen):
    """Activations recomputed: ``none``, ``selective`` (core attention), ``full``, or the first n layers of a stage."""

    mode: Literal["none", "selective", "full"] = "none"
    full_layers: CountOrZero | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"mode": data}
        if isinstance(data, dict) and "mode" not in data and "full_layers" in data:
            return {"mode": "full", **data}
        return data


class ParallelPlan(Frozen):
    """Sizes of the parallel axes; ``None`` means derived from the cluster or the framework's default."""

    tensor: Count = 1
    pipeline: WalkedCount = 1
    context: Count = 1
    expert: Count = 1
    expert_tensor: Count = 1
    data: Count | None = None
    virtual_pipeline: WalkedCount = 1
    schedule: Schedule | None = None
    layers_per_stage: tuple[CountOrZero, ...] | None = None
    sequence_parallel: bool | None = None
    sharding: Sharding | None = None
    shard_size: Count | None = None
    overlap: Overlap = Overlap()
    recompute: Recompute | None = Field(default=None)

    @model_validator(mode="before")
    @classmethod
    def _fsdp_is_zero3(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("sharding") == "fsdp":
            return {**data, "sharding": "zero3"}
        return data

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context
