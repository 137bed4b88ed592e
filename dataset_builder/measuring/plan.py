"""What is measured of one job: its blocks at their sizes, its layout and formats, and the table row it will fill.

A plan is plain values, so that it can be written as JSON where the job is understood
(:mod:`dataset_builder.measuring.job_plan`) and measured on a machine that has only torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dataset_builder.job.errors import JobError
from dataset_builder.measuring.table import Cell
from dataset_builder.tracing.graph import OpNode
from dataset_builder.tracing.structure import BlockStructure

PLAN_VERSION = 1


@dataclass(frozen=True)
class PlannedGraph:
    """The traced graph that a job's step is: of each pipeline stage the nodes it runs, in the order of their ids in the
    file that ``dataset_builder.trace`` writes, each with its repeats.
    """

    fingerprint: str
    tracer_version: str
    stages: tuple[tuple[tuple[OpNode, float], ...], ...]


@dataclass(frozen=True)
class StepPlan:
    """One training step of every rank. ``row``: the columns of the runs table that say which job it is."""

    name: str
    row: dict[str, Cell]
    embedding: BlockStructure
    head: BlockStructure
    stages: tuple[tuple[tuple[BlockStructure, int], ...], ...]  # of each pipeline stage: layer blocks and their counts
    sizes: dict[str, int]  # by the names of tracing.symbols
    tie_embeddings: bool
    is_cpu: bool  # the job's device is a CPU
    tensor: int
    data: int
    num_microbatches: int
    sharding: str  # none | zero3
    compute: str
    params: str
    grad_reduce: str
    param_gather: str
    loss_scaling: bool
    optimizer: str
    graph: PlannedGraph | None = None  # for labels of its nodes only

    @property
    def pipeline(self) -> int:
        return len(self.stages)

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def device_formats(self) -> tuple[str, ...]:
        """Formats that the device has to multiply in."""
        is_quantised = any(structure.linears for stage in self.stages for structure, _ in stage)
        return (self.compute, "fp8_e4m3") if is_quantised else (self.compute,)

    @property
    def sequences(self) -> int:
        """Sequences of one optimizer step."""
        return self.sizes["b"] * self.num_microbatches * self.data

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequences * self.sizes["s"]


def write_plans(plans: list[StepPlan], path: Path) -> None:
    """Writes plans as one JSON file, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    values = {"plan_version": PLAN_VERSION, "plans": [dataclasses.asdict(plan) for plan in plans]}
    partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def read_plans(path: Path) -> list[StepPlan]:
    """The plans of a file; raises JobError when it holds none of this version."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.get("plan_version") != PLAN_VERSION:
            raise JobError([f"plan_version: got {values.get('plan_version')}; expected {PLAN_VERSION}"], str(path))
        return [_plan(each) for each in values["plans"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, JobError):
            raise
        raise JobError([f"no plan ({error}); `benchmark plan JOB.yaml` writes one"], str(path)) from None


def quick_plans(gpu: str, formats: tuple[str, ...]) -> list[StepPlan]:
    """The plans of a quick check on one GPU, which ``gpu`` names, in those precisions that it has hardware for."""
    plans = read_plans(Path(str(resources.files("dataset_builder.measuring").joinpath("quick_plans.json"))))
    return [
        dataclasses.replace(plan, row=plan.row | {"gpu": gpu}) for plan in plans if {*plan.device_formats} <= {*formats}
    ]


def _plan(values: dict[str, Any]) -> StepPlan:
    stages = tuple(tuple((_structure(block), int(count)) for block, count in stage) for stage in values["stages"])
    blocks = {key: _structure(values[key]) for key in ("embedding", "head")}
    graph = _graph(values["graph"]) if values.get("graph") else None
    return StepPlan(**{**values, **blocks, "stages": stages, "graph": graph})


def _graph(values: dict[str, Any]) -> PlannedGraph:
    stages = tuple(
        tuple((OpNode(**{**node, "shape": tuple(node["shape"])}), float(repeats)) for node, repeats in stage)
        for stage in values["stages"]
    )
    return PlannedGraph(values["fingerprint"], values["tracer_version"], stages)


def _structure(values: dict[str, Any]) -> BlockStructure:
    tuples = {"linears": tuple(tuple(pair) for pair in values["linears"]), "adapters": tuple(values["adapters"])}
    return BlockStructure(**{**values, **tuples})
