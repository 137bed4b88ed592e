"""Marks every operator of a real step for the profiler, and says what each is in the trace's terms.

In: code under a :class:`StepMarker` that marks where it is as the tracer does. Out: :class:`MarkedOp` records in the
order of execution; the profiler's range ``node#i`` is around the i-th.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dataset_builder.tracing.graph import Phase
from dataset_builder.tracing.recorder import (
    FORMAT_OF_DTYPE,
    PlacingMode,
    RawOp,
    Scope,
    TensorRef,
    attributes_of,
    is_plain,
    touched,
)

MARK = "node#"


@dataclass(frozen=True, slots=True)
class MarkedOp:
    """One dispatched operator.

    ``turn``: which forward or backward pass of the step it ran in; ``listed``: elements of the list of tensors it takes
    first, if it takes one; ``work``: ``None`` for what does none (views, allocations).
    """

    name: str
    phase: Phase
    module: str
    region: str
    turn: int
    listed: int
    work: RawOp | None


class StepMarker(PlacingMode):
    """The dispatch mode of a profiled step; outside of one it only keeps the phase."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[MarkedOp] = []
        self._turns: Counter[Phase] = Counter()

    @contextlib.contextmanager
    def passing(self, phase: Phase) -> Iterator[None]:
        """One forward pass, backward pass or optimizer step."""
        self._turns[phase] += 1
        outer, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = outer

    def forget(self) -> None:
        """Ends a step."""
        self.ops = []
        self._turns.clear()
        self._scope_of_node.clear()
        self._last_scope = Scope()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_plain(types):
            return NotImplemented
        if func.namespace == "profiler":  # ranges that torch's own optimizers mark
            return func(*args, **kwargs)
        with torch.profiler.record_function(f"{MARK}{len(self.ops)}"):
            out = func(*args, **kwargs)
        place, name = self.place(), func._schema.name
        refs = touched(func, args, kwargs, out, _ref)
        if func.namespace == "c10d":  # whose schemas do not say what they write
            tensors = [_ref(leaf) for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            refs = (tensors, tensors)
        work = None if refs is None else RawOp(name, self.phase, place, *refs, attributes_of(func, args))
        turn = self._turns["backward" if self.phase == "recompute" else self.phase]
        self.ops.append(MarkedOp(name, self.phase, place.module, place.region, turn, _listed(args), work))
        return out


def _ref(tensor: torch.Tensor) -> TensorRef:
    shape = tuple(1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return TensorRef(tensor.untyped_storage()._cdata, shape, FORMAT_OF_DTYPE.get(tensor.dtype, str(tensor.dtype)))


def _listed(args: Any) -> int:
    first = args[0] if args and isinstance(args[0], list | tuple) else ()
    return sum(each.numel() for each in first if isinstance(each, torch.Tensor))
