"""What is predicted of one pipeline stage, added up from its times. All times in seconds; of every stage

    total_s = microbatches * (forward_s + backward_s + recompute_s) + communication_exposed_s + optimizer_s + overhead_s
    iteration_time_s = total_s + bubble_s

A rank of DualPipe runs two stages, each for half of the microbatches: ``total_s`` is the mean of theirs, with both
optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from gnn_predictor.batch import pipeline_shape
from gnn_predictor.critical_path import StepDetail
from gnn_predictor.event_order import paired_passes, stages_of_rank
from gnn_predictor.features import SLOTS
from gnn_predictor.memory import StageMemory
from gnn_predictor.schedule import TIMES

_ROUNDING = 1e-5  # relative: the network adds up in single precision


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """One pipeline stage; forward, backward and recompute per microbatch, the rest per iteration."""

    stage: int
    layers: tuple[int, ...]
    forward_s: float
    backward_s: float
    recompute_s: float
    communication_exposed_s: float
    bubble_s: float
    optimizer_s: float
    overhead_s: float
    total_s: float
    memory: StageMemory

    @property
    def peak_memory_bytes(self) -> float:
        return self.memory.total

    def to_dict(self) -> dict[str, Any]:
        """The stage as in the command's JSON; ``layers`` is the first and the last (absent without layers)."""
        names = (each.name for each in fields(self) if each.name not in ("layers", "memory", "stage"))
        times = {name: getattr(self, name) for name in names}
        memory = {key: getattr(self.memory, key) for key in ("params", "grads", "optimizer", "activations", "other")}
        return {
            "stage": self.stage,
            "layers": [self.layers[0], self.layers[-1]] if self.layers else [],
            "num_layers": len(self.layers),
            **times,
            "peak_memory_bytes": self.peak_memory_bytes,
            "memory": memory,
        }


def stage_predictions(
    detail: StepDetail, memory: Sequence[StageMemory], iteration_s: float
) -> tuple[StagePrediction, ...]:
    """Every pipeline stage of a step that takes ``iteration_s``, with the peak memory of one of its ranks."""
    times, shape = detail.times, pipeline_shape(detail.arrays)
    microbatches = shape.num_microbatches
    # Of every stage, the messages that run beside a pass of the other direction, which nobody waits for.
    pairs = np.array(paired_passes(shape))  # [forward or backward, stage]
    hidden = (pairs * times.stage_s[[TIMES.index("hidden_forward"), TIMES.index("hidden_backward")]]).sum(axis=0)
    hidden_s, busy_s = hidden.tolist(), (microbatches * (times.forward_s + times.backward_s) - hidden).tolist()
    forward_s, backward_s, step_s = times.forward_s.tolist(), times.backward_s.tolist(), times.iteration_s.tolist()
    stages = []
    for index, (facts, slots) in enumerate(zip(detail.graph.stages, times.slots.tolist(), strict=True)):
        slot = dict(zip(SLOTS, slots, strict=True))
        of_rank = stages_of_rank(shape, index)
        mean_busy_s = sum(busy_s[stage] for stage in of_rank) / len(of_rank)
        total = mean_busy_s + sum(step_s[stage] for stage in of_rank) + times.overhead_s
        bubble = iteration_s - total
        stages.append(
            StagePrediction(
                stage=index,
                layers=facts.layers,
                forward_s=forward_s[index] - slot["comm_forward"],
                backward_s=backward_s[index] - slot["recompute"] - slot["comm_backward"],
                recompute_s=slot["recompute"],
                communication_exposed_s=microbatches * (slot["comm_forward"] + slot["comm_backward"])
                + slot["comm_iteration"]
                - hidden_s[index],
                bubble_s=bubble if bubble > _ROUNDING * iteration_s else 0.0,
                optimizer_s=step_s[index] - slot["comm_iteration"],
                overhead_s=times.overhead_s,
                total_s=total,
                memory=memory[index],
            )
        )
    return tuple(stages)
