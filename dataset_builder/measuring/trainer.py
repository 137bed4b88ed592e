"""One rank's training step of a plan, really run: data, tensor, sequence and pipeline parallel, DDP or FSDP2.

Ranks are numbered as in :mod:`dataset_builder.tracing.layout`: tensor fastest, then data, pipeline slowest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from dataset_builder.job.errors import CannotRunError
from dataset_builder.measuring.kernels import RealKernels
from dataset_builder.measuring.plan import StepPlan
from dataset_builder.measuring.program import Stage, computing
from dataset_builder.measuring.world import World
from dataset_builder.tracing.graph import Phase
from dataset_builder.tracing.precision import TORCH_DTYPE
from dataset_builder.tracing.recorder import scope

_LEARNING_RATE = 1e-6
_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


@dataclass(frozen=True)
class StepSample:
    """Seconds of one step of one rank; ``forward_s`` and ``backward_s`` over all its microbatches."""

    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    loss: float


class _Clock:
    """Marks on the device's time line: events on a GPU, the host's clock on a CPU."""

    def __init__(self, is_gpu: bool) -> None:
        self.is_gpu = is_gpu
        self.marks: list[Any] = []

    def mark(self) -> None:
        if not self.is_gpu:
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def seconds(self) -> list[float]:
        """Between each mark and the next; waits for the last."""
        if self.is_gpu:
            self.marks[-1].synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [a.elapsed_time(b) * 1e-3 if self.is_gpu else b - a for a, b in pairs]


class _TimedStage(PipelineStage):
    """A pipeline stage that marks where its forward and backward passes begin and end."""

    def __init__(self, plan: StepPlan, stage: Stage, index: int, group: dist.ProcessGroup) -> None:
        device = stage.batch.ids.device
        super().__init__(stage, index, plan.pipeline, device, group=group)
        self.spans: dict[str, list[_Clock]] = {"forward": [], "backward": []}

    def seconds(self, phase: str) -> float:
        """All passes of a phase since the last call."""
        spans, self.spans[phase] = self.spans[phase], []
        return sum(span.seconds()[0] for span in spans)

    @contextlib.contextmanager
    def _span(self, phase: Phase) -> Iterator[None]:
        clock = _Clock(self.device.type == "cuda")
        clock.mark()
        with cast(Stage, self.submod).marker.passing(phase):
            yield
        clock.mark()
        self.spans[phase].append(clock)

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        with self._span("forward"):
            return super().forward_one_chunk(*arguments, **options)

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        with self._span("backward"):
            return super().backward_one_chunk(*arguments, **options)


@dataclass(frozen=True)
class Groups:
    """The process groups of this rank by axis, and its place on each."""

    groups: dict[str, dist.ProcessGroup]
    stage: int


def rank_groups(plan: StepPlan, world: World) -> Groups:
    """Makes every group of the plan (each rank takes part in making all); raises CannotRunError when ranks differ."""
    if plan.num_ranks != world.size:
        raise CannotRunError([f"ranks: {world.size} run, the job has {plan.num_ranks}"], plan.name)
    axes = {
        "tensor": (plan.tensor, 1),
        "data": (plan.data, plan.tensor),
        "pipeline": (plan.pipeline, plan.tensor * plan.data),
    }
    mine: dict[str, dist.ProcessGroup] = {}
    for axis, (size, stride) in axes.items():
        for first in range(world.size):
            if (first // stride) % size:
                continue
            ranks = [first + stride * index for index in range(size)]
            group = dist.new_group(ranks)
            if world.rank in ranks:
                mine[axis] = cast(dist.ProcessGroup, group)
    return Groups(mine, world.rank // (plan.tensor * plan.data))


class Trainer:
    """Runs steps of one plan. Every rank makes the same trainers in the same order."""

    def __init__(self, plan: StepPlan, world: World) -> None:
        if plan.is_cpu == world.machine.is_gpu:
            kind = "a GPU" if world.machine.is_gpu else "a CPU"
            raise CannotRunError([f"cluster.gpu: this machine's ranks have {kind}, the job's do not"], plan.name)
        places = rank_groups(plan, world)
        self.plan, self.device, self.groups = plan, world.machine.device, places.groups
        self.stage = Stage(plan, places.stage, self.device)
        self.module = self._spread()
        self.optimizer = _optimizer(plan, self.module)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=plan.loss_scaling)
        self.pipe: _TimedStage | None = None
        if plan.pipeline > 1:
            self.pipe = _TimedStage(plan, self.stage, places.stage, self.groups["pipeline"])
            self.schedule = Schedule1F1B(self.pipe, plan.num_microbatches, loss_fn=lambda loss, _: loss.sum())

    def _spread(self) -> nn.Module:
        """The stage as data-parallel ranks hold it."""
        plan, stage = self.plan, self.stage
        if plan.sharding == "zero3":
            policy = MixedPrecisionPolicy(
                param_dtype=TORCH_DTYPE[plan.param_gather], reduce_dtype=TORCH_DTYPE[plan.grad_reduce]
            )
            mesh = DeviceMesh.from_group(self.groups["data"], self.device.type)
            for layer in stage.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(stage, mesh=mesh, mp_policy=policy)
            return stage
        if plan.data == 1 or plan.pipeline > 1:
            return stage
        ids = [self.device] if self.device.type == "cuda" else None
        module = DistributedDataParallel(
            stage,
            device_ids=ids,
            process_group=self.groups["data"],
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
        if plan.grad_reduce != plan.params:
            module.register_comm_hook(self.groups["data"], _HOOKS[plan.grad_reduce])
        return module

    def step(self, kernels: RealKernels) -> StepSample:
        """One optimizer step."""
        clock = _Clock(self.device.type == "cuda")
        clock.mark()
        with self.stage.marker.passing("optimizer"), scope("optimizer.zero_gradient"):
            self.optimizer.zero_grad(set_to_none=not self.plan.embedding.accumulate)
        loss = self._microbatches(clock) if self.pipe is None else self._pipelined(clock)
        with self.stage.marker.passing("backward"):
            self._reduce_outside_autograd()
        if self.plan.optimizer != "none":
            with self.stage.marker.passing("optimizer"):
                self._update()
        clock.mark()
        self.stage.rules.clear()
        kernels.forget()
        seconds = clock.seconds()
        phases = seconds[:-1]
        if self.pipe is not None:
            phases = [self.pipe.seconds(phase) for phase in ("forward", "backward")]
        return StepSample(
            step_s=sum(seconds),
            forward_s=sum(phases[0::2]),
            backward_s=sum(phases[1::2]),
            optimizer_s=seconds[-1],
            loss=float(loss),
        )

    def _update(self) -> None:
        with scope("optimizer.unscale"):
            self.scaler.unscale_(self.optimizer)
        with scope("optimizer.clip"):
            nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        with scope("optimizer.update"):
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _microbatches(self, clock: _Clock) -> Tensor:
        count = self.plan.num_microbatches
        for index in range(count):
            with self._without_reduction(index < count - 1):
                with self.stage.marker.passing("forward"), computing(self.plan, self.device):
                    loss: Tensor = self.module(self.stage.batch.ids)
                clock.mark()
                with self.stage.marker.passing("backward"):
                    self.scaler.scale(loss / count).backward()
                clock.mark()
            self.stage.rules.clear()
        return loss.detach()

    def _pipelined(self, clock: _Clock) -> Tensor:
        """All microbatches through the schedule."""
        count = self.plan.num_microbatches
        losses: list[Tensor] = []
        with computing(self.plan, self.device):
            if self.stage.is_first:
                self.schedule.step(self.stage.batch.ids.repeat(count, 1))
            elif self.stage.is_last:
                target = torch.zeros(count, device=self.device)
                self.schedule.step(target=target, losses=losses)
            else:
                self.schedule.step()
        clock.mark()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    @contextlib.contextmanager
    def _without_reduction(self, enabled: bool) -> Iterator[None]:
        """Gradients of all but the last microbatch stay on their rank."""
        if isinstance(self.module, DistributedDataParallel) and enabled:
            with self.module.no_sync():
                yield
            return
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(not enabled)
        yield

    def _reduce_outside_autograd(self) -> None:
        """What neither DDP nor FSDP2 sums: a pipeline stage's copies, and norms under sequence parallelism."""
        plan = self.plan
        if plan.pipeline > 1 and plan.data > 1:
            with scope("data"):
                _sum_gradients(list(self.stage.parameters()), self.groups["data"], TORCH_DTYPE[plan.grad_reduce])
        if plan.tensor > 1 and plan.embedding.sequence_parallel:
            norms = [p for name, p in self.stage.named_parameters() if "norm" in name]
            with scope("tensor"):
                _sum_gradients(norms, self.groups["tensor"], None)


def _sum_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype | None) -> None:
    """Sums the gradients over a group in one message, in ``dtype`` or their own."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    message = flat if dtype is None else flat.to(dtype)
    dist.all_reduce(message, group=group)
    start = 0
    for gradient in gradients:
        gradient.copy_(message[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def _optimizer(plan: StepPlan, module: nn.Module) -> torch.optim.Optimizer:
    """torch's fused optimizer, its state in the parameters' format."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if plan.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=_LEARNING_RATE, momentum=0.9, fused=True)
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam if plan.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=_LEARNING_RATE, fused=True)
