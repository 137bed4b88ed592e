"""The reference program of one rank: its pipeline stage built from the traced blocks, and its data.

In: a :class:`StepPlan`. Out: modules with random weights on the device. Gradients of the loss are stand-ins of the
right cost (the vocabulary-parallel loss of the trace does not know which rank holds a label), so the learning rate is
next to nothing and the loss says no more than that the step was computed: it is finite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dataset_builder.measuring.kernels import attend
from dataset_builder.measuring.marks import StepMarker
from dataset_builder.measuring.plan import StepPlan
from dataset_builder.tracing.block import position_tables
from dataset_builder.tracing.linear import BlockContext
from dataset_builder.tracing.model import Embedding, Head, Layer
from dataset_builder.tracing.precision import TORCH_DTYPE, CudaAutocast
from dataset_builder.tracing.recorder import scope
from dataset_builder.tracing.structure import BlockStructure

_INITIAL_STD = 0.02


class Stage(nn.Module):
    """The layers of one pipeline stage; the first embeds, the last computes the loss."""

    def __init__(self, plan: StepPlan, stage: int, device: torch.device) -> None:
        super().__init__()
        self.rules = CudaAutocast()
        self.index = stage
        self.is_first, self.is_last = stage == 0, stage == plan.pipeline - 1
        self.marker = StepMarker()

        def context(structure: BlockStructure) -> BlockContext:
            return BlockContext(structure, plan.sizes, self.rules, self.marker, attend)

        with torch.device(device):
            layers = [Layer(context(structure)) for structure, count in plan.stages[stage] for _ in range(count)]
            self.layers = nn.ModuleList(layers)
            first = context(plan.stages[stage][0][0])
            self.tables = tuple(_filled(table) for table in position_tables(first))
            self.embedding = Embedding(context(plan.embedding)) if self.is_first else None
            self.head = Head(context(plan.head)) if self.is_last else None
        if (
            plan.tie_embeddings
            and self.embedding is not None
            and self.head is not None
            and plan.head.head != "classification"
        ):
            self.head.lm_head.weight = self.embedding.weight
        self.batch = batch_of(plan, first, device)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids [batch, length] at the first stage, activations [length, batch, hidden] at the others."""
        if self.embedding is not None:
            x = self.embedding(x, self.batch.positions, self.batch.types)
        for number, layer in enumerate(self.layers):
            with scope(f"layer{number}"):
                x = layer(x, self.tables)
        if self.head is None:
            return x
        loss: Tensor = self.head(x, self.batch.labels, self.batch.masked)
        return loss.view(1)  # the pipeline schedule puts the losses of the microbatches side by side


@dataclass(frozen=True)
class Batch:
    """One microbatch of random data."""

    ids: Tensor  # [batch, length]
    positions: Tensor  # [1, local length]
    types: Tensor  # [batch, local length]
    labels: Tensor  # [length, batch], or of the masked positions
    masked: Tensor | None


def batch_of(plan: StepPlan, context: BlockContext, device: torch.device) -> Batch:
    """Random tokens and labels at the plan's sizes."""
    sizes, full, local = plan.sizes, context.full_length, context.local_length
    generator = torch.Generator(device="cpu").manual_seed(1)

    def integers(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=generator).to(device)

    batch = sizes["b"]
    rows = sizes["M"] * (sizes["t"] if context.is_scattered else 1)
    shape = (local if plan.head.head == "classification" else full, batch)
    return Batch(
        ids=integers(sizes["v"], batch, full).clamp_(min=1),  # a split table takes one off
        positions=torch.arange(local, device=device).unsqueeze(0),
        types=integers(sizes["y"], batch, local),
        labels=integers(sizes["C" if plan.head.head == "classification" else "v"],
                        *((rows,) if plan.head.masked_positions else shape)),
        masked=integers(local * batch, sizes["M"]) if plan.head.masked_positions else None,
    )  # fmt: skip


def _filled(table: Tensor) -> Tensor:
    """Rotary tables hold angles; what is added to scores is nothing."""
    with torch.no_grad():
        if table.dim() == 4 and table.shape[1:3] == (1, 1):
            table.copy_(torch.arange(table.shape[0]).view(-1, 1, 1, 1).expand_as(table) * 0.01).cos_()
        else:
            table.zero_()
    return table


def _initialise(stage: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _INITIAL_STD)


@contextlib.contextmanager
def computing(plan: StepPlan, device: torch.device) -> Iterator[None]:
    """The region a microbatch's forward pass runs in: autocast where the plan mixes formats, TF32 only where asked."""
    torch.backends.cuda.matmul.allow_tf32 = plan.compute == "tf32"
    torch.backends.cudnn.allow_tf32 = plan.compute == "tf32"
    is_mixed = plan.compute in ("fp16", "bf16") and plan.params == "fp32"
    with torch.autocast(device.type, TORCH_DTYPE[plan.compute] if is_mixed else torch.bfloat16, enabled=is_mixed):
        yield
