"""Records every operator that autograd really runs on fake tensors: formats, shapes, phase, place and storages.

In: tensors under a FakeTensorMode and code that marks where it is with :func:`scope`. Out: :class:`RawOp` records in
execution order. Backward operators are placed by the autograd node that runs them: its sequence number is the one the
forward operator got.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dataset_builder.tracing.graph import Phase

FORMAT_OF_DTYPE: dict[torch.dtype, str] = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.uint8: "uint8", torch.bool: "bool",
    torch.uint64: "int64",
}  # fmt: skip
_FORMAT_KEEPING = {f"precision_graph::{name}" for name in ("all_gather", "all_to_all", "permute", "reduce_scatter")}
_SKIPPED = {
    "prim::device", "aten::detach", "aten::sym_size", "aten::lift_fresh", "aten::_local_scalar_dense",
    "aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scope:
    """Where an operator stands: module path, and the region whose pointwise operators one fused kernel covers."""

    module: str = ""
    region: str = ""


_OUTSIDE = Scope()
_SCOPE: ContextVar[Scope] = ContextVar("scope", default=_OUTSIDE)


@contextlib.contextmanager
def scope(module: str, region: str = "") -> Iterator[None]:
    """Appends ``module`` to the module path; ``region`` names the fused kernel the operators inside belong to."""
    outer = _SCOPE.get()
    path = f"{outer.module}.{module}" if outer.module and module else outer.module or module
    token = _SCOPE.set(Scope(path, region))
    try:
        yield
    finally:
        _SCOPE.reset(token)


def resume_scope() -> Callable[[], AbstractContextManager[None]]:
    """A context that puts operators where the caller of this function stands now, for code that runs later."""
    place = _SCOPE.get()

    @contextlib.contextmanager
    def resumed() -> Iterator[None]:
        token = _SCOPE.set(place)
        try:
            yield
        finally:
            _SCOPE.reset(token)

    return resumed


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as an operator touches it; broadcast dimensions count as one."""

    storage: int
    shape: tuple[int, ...]
    fmt: str
    start: int = 0  # first and last + 1 column of the storage's rows that the tensor reaches
    stop: int = 0


@dataclass(slots=True)
class RawOp:
    """One dispatched operator that does work (views are gone)."""

    name: str
    phase: Phase
    scope: Scope
    inputs: list[TensorRef]
    outputs: list[TensorRef]
    attributes: dict[str, Any]


class Recorder(TorchDispatchMode):
    """The dispatch mode; ``phase`` is set by whoever runs the step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[RawOp] = []
        self.phase: Phase = "forward"
        self.formats: dict[int, str] = {}  # storage -> format, where the torch dtype only stands in for it
        self._kept: list[Any] = []  # storages, so that their ids are not used again (tensors would change autograd)
        self._rows: dict[int, int] = {}  # storage -> columns of the tensor it was made for
        self._scope_of_node: dict[int, Scope] = {}
        self._last_scope = Scope()

    @contextlib.contextmanager
    def recompute(self) -> Iterator[None]:
        """Marks forward operators that run again during the backward pass."""
        outer, self.phase = self.phase, "recompute"
        try:
            yield
        finally:
            self.phase = outer

    def ref(self, tensor: torch.Tensor) -> TensorRef:
        storage = tensor.untyped_storage()
        shape = tuple(1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        fmt = self.formats.get(storage._cdata, FORMAT_OF_DTYPE[tensor.dtype])
        row = self._rows.setdefault(storage._cdata, tensor.shape[-1] if tensor.dim() else 1)
        start = int(tensor.storage_offset()) % max(row, 1)
        within = (
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride < row
        )
        return TensorRef(storage._cdata, shape, fmt, start, start + int(sum(within)) + 1)

    def _place(self) -> Scope:
        node = torch._C._current_autograd_node()
        if self.phase != "backward":
            scope_now = _SCOPE.get()
            self._scope_of_node.setdefault(torch.autograd._get_sequence_nr() - 1, scope_now)  # type: ignore[attr-defined]
            return scope_now
        explicit = _SCOPE.get()
        if explicit.module:
            return explicit
        if node is not None:
            # gradient accumulation has no forward operator: it belongs to what produced the gradient
            self._last_scope = self._scope_of_node.get(node._sequence_nr(), self._last_scope)
        return self._last_scope

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = (torch.Tensor, torch.nn.Parameter, FakeTensor)
        if any(not issubclass(kind, known) for kind in types):
            return NotImplemented
        out = func(*args, **kwargs)
        name = func._schema.name
        place = self._place()
        inputs = [self.ref(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.numel()]
        out_tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.numel()]
        attributes = {}
        if name.startswith("precision_graph::"):
            attributes = {
                argument.name: value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if not isinstance(value, torch.Tensor | list | tuple)
            }
            fmt = attributes.get("fmt")
            if name in _FORMAT_KEEPING and inputs:
                fmt = self.formats.get(inputs[0].storage)
            if fmt is not None:
                for tensor in out_tensors:
                    self.formats[tensor.untyped_storage()._cdata] = fmt
        outputs = [self.ref(t) for t in out_tensors]
        mutated = [
            self.ref(value)
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            # torch's fused optimizers write gradients only when they unscale them
            if not (argument.name == "grads" and kwargs.get("grad_scale") is None)
            for value in tree_leaves(value)
            if isinstance(value, torch.Tensor)
        ]
        sources = {ref.storage for ref in inputs}
        is_view = not mutated and all(ref.storage in sources for ref in outputs)
        if name in _SKIPPED or is_view or not (outputs or mutated):
            return out
        seen = {(ref.storage, ref.shape) for ref in outputs}
        outputs += [ref for ref in mutated if (ref.storage, ref.shape) not in seen]
        self._kept += [t.untyped_storage() for t in out_tensors]
        self.ops.append(RawOp(name, self.phase, place, inputs, outputs, attributes))
        return out
