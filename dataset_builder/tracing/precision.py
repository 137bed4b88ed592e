"""CUDA's autocast rules on (fake) CPU tensors.

Without a GPU only AutocastCPU can run, and its op lists differ from CUDA's (softmax, layer norm and the losses stay
low precision). So while tracing, AutocastCPU is reprogrammed with the lists of ``ATen/autocast_mode.h``, the header
in the torch wheel that AutocastCUDA itself is compiled from. Rules: an op of the lower-precision list casts every
floating argument; fp32 parameters are cast once per autocast region (cached), activations once per consumer.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

LOWER, FP32, FP32_SET_DTYPE, PROMOTE = (
    "AT_FORALL_LOWER_PRECISION_FP", "AT_FORALL_FP32", "AT_FORALL_FP32_SET_OPT_DTYPE", "AT_FORALL_PROMOTE",
)  # fmt: skip
# Ops that AutocastCPU treats specially and AutocastCUDA does not list: they must fall through.
_CPU_ONLY = (
    "avg_pool3d", "binary_cross_entropy_with_logits", "cat", "cdist", "cosine_embedding_loss", "cross_entropy_loss",
    "ctc_loss.IntList", "ctc_loss.Tensor", "grid_sampler", "index_copy", "kl_div", "mse_loss", "multilabel_margin_loss",
    "nanquantile", "polar", "prod", "quantile", "stack", "stft", "trace", "view_as_complex",
)  # fmt: skip

TORCH_DTYPE = {
    "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
    "mxfp8": torch.float8_e4m3fn, "nvfp4": torch.float8_e4m3fn,  # stand-ins; the format travels beside the tensor
}  # fmt: skip


def cuda_autocast_ops() -> dict[str, list[tuple[str, str]]]:
    """The (op, overload) entries of each of CUDA's four lists."""
    header = Path(torch.__path__[0]) / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text(encoding="utf-8")
    lists = {}
    for name in (LOWER, FP32, FP32_SET_DTYPE, PROMOTE):
        body = re.search(rf"#define {name}\(_\)(.*?)\n\n", text, re.DOTALL)
        if body is None:
            raise RuntimeError(f"{header} does not define {name}: this torch version is not supported")
        entries = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1))
        lists[name] = [(op, overload or "default") for op, overload in entries]
    return lists


def resolve_op(name: str, overload: str) -> Any:
    """The operator of a list entry; every entry must resolve, or an op would silently keep the wrong format."""
    return getattr(getattr(torch.ops.aten, name), overload)


class CudaAutocast:
    """Casts by CUDA's rules; holds the weight cast cache of the current autocast region."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        self._casts.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """A floating tensor in ``dtype``, fp32 leaf parameters through the cache; anything else unchanged."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if value.dtype in (dtype, torch.float64):
            return value
        is_parameter = value.is_leaf and value.requires_grad and not value._is_view()
        if dtype == torch.float32 or value.dtype != torch.float32 or not is_parameter:
            return value.to(dtype)
        if id(value) not in self._casts:
            self._casts[id(value)] = (value, value.to(dtype))
        return self._casts[id(value)][1]

    def kernel(self, op: Any, rule: str) -> Callable[..., Any]:
        """The autocast kernel of one op under one of the four rules."""
        excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        argument_names = [argument.name for argument in op._schema.arguments]

        def set_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
            first = next(a for a in tree_leaves(args) if isinstance(a, torch.Tensor))
            takes_dtype = "dtype" in argument_names and len(args) <= argument_names.index("dtype")
            if first.is_floating_point() and takes_dtype and kwargs.get("dtype") is None:
                return {**kwargs, "dtype": torch.float32}
            return kwargs

        def target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
            if rule == FP32:
                return torch.float32
            low = torch.get_autocast_dtype("cpu")
            floating = {
                t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_floating_point()
            }
            return torch.float32 if rule == PROMOTE and torch.float32 in floating else low

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                if rule == FP32_SET_DTYPE:
                    return op(*args, **set_dtype(args, kwargs))
                dtype = target(args, kwargs)
                # C++ evaluates the casts from right to left: kept, so that the order of kernels is CUDA's
                cast = [tree_map(lambda t: self.cast(t, dtype), arg) for arg in reversed(args)]
                return op(*reversed(cast), **tree_map(lambda t: self.cast(t, dtype), kwargs))

        return run


@contextlib.contextmanager
def cuda_autocast_on_cpu() -> Iterator[CudaAutocast]:
    """Within it ``torch.autocast("cpu", ...)`` follows CUDA's rules; AutocastCPU's own come back afterwards."""
    rules = CudaAutocast()
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    clear_cache = torch.clear_autocast_cache

    def clear() -> None:  # autocast calls it when the outermost region ends; recomputation casts weights again
        rules.clear()
        clear_cache()

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "overriding a previously registered kernel" is what is wanted
            listed = set()
            for rule, entries in cuda_autocast_ops().items():
                for name, overload in entries:
                    op = resolve_op(name, overload)
                    library.impl(op, rules.kernel(op, rule), allow_override=True)
                    listed.add(name)
            for entry in _CPU_ONLY:
                name, _, overload = entry.partition(".")
                if name not in listed:
                    op = resolve_op(name, overload or "default")
                    library.impl(op, torch.library.fallthrough_kernel, allow_override=True)
        torch.clear_autocast_cache = clear
        yield rules
    finally:
        torch.clear_autocast_cache = clear_cache
        rules.clear()
        library._destroy()
