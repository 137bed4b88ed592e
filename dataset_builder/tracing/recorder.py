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


class PlacingMode(TorchDispatchMode):
    """A dispatch mode that knows where every operator stands; ``phase`` is set by whoever runs the step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "forward"
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

    def place(self) -> Scope:
        """Where the operator that is dispatched now stands."""
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


def is_plain(types: Any) -> bool:
    """Whether a mode sees the operator on these tensor types itself; subclasses take it apart first."""
    return all(issubclass(kind, torch.nn.Parameter | FakeTensor) or kind is torch.Tensor for kind in types)


def attributes_of(func: Any, args: Any) -> dict[str, Any]:
    """What an operator of the own library is called with beside tensors."""
    if not func._schema.name.startswith("precision_graph::"):
        return {}
    return {
        argument.name: value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if not isinstance(value, torch.Tensor | list | tuple)
    }


def touched(
    func: Any, args: Any, kwargs: Any, out: Any, ref: Callable[[torch.Tensor], TensorRef]
) -> tuple[list[TensorRef], list[TensorRef]] | None:
    """What an operator reads and writes; ``None`` when it does no work (views, allocations)."""
    inputs = [ref(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.numel()]
    outputs = [ref(t) for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.numel()]
    mutated = [
        ref(value)
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        # torch's fused optimizers write gradients only when they unscale them
        if not (argument.name == "grads" and kwargs.get("grad_scale") is None)
        for value in tree_leaves(value)
        if isinstance(value, torch.Tensor)
    ]
    sources = {each.storage for each in inputs}
    is_view = not mutated and all(each.storage in sources for each in outputs)
    if func._schema.name in _SKIPPED or is_view or not (outputs or mutated):
        return None
    seen = {(each.storage, each.shape) for each in outputs}
    return inputs, outputs + [each for each in mutated if (each.storage, each.shape) not in seen]


class Recorder(PlacingMode):
    """Keeps every operator of a step on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[RawOp] = []
        self.formats: dict[int, str] = {}  # storage -> format, where the torch dtype only stands in for it
        self._kept: list[Any] = []  # storages, so that their ids are not used again (tensors would change autograd)
        self._rows: dict[int, int] = {}  # storage -> columns of the tensor it was made for

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_plain(types):
            return NotImplemented
        out = func(*args, **kwargs)
        place = self.place()
        tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.numel()]
        attributes = attributes_of(func, args)
        fmt = attributes.get("fmt")
        if func._schema.name in _FORMAT_KEEPING:
            fmt = self.formats.get(args[0].untyped_storage()._cdata)
        if fmt is not None:
            self.formats |= {tensor.untyped_storage()._cdata: fmt for tensor in tensors}
        refs = touched(func, args, kwargs, out, self.ref)
        if refs is not None:
            self._kept += [t.untyped_storage() for t in tensors]
            self.ops.append(RawOp(func._schema.name, self.phase, place, *refs, attributes))
        return out
