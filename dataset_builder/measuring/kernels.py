"""Real kernels for the operators that the tracer only knows the shape of: messages, quantised products, attention.

With them the very blocks that are traced run on a device, so the measured program is the traced one. Messages go
through the process group of their axis (NCCL or gloo); quantised products through ``torch._scaled_mm``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from dataset_builder.tracing.collectives import define_operators
from dataset_builder.tracing.linear import AttentionRule
from dataset_builder.tracing.precision import TORCH_DTYPE
from dataset_builder.tracing.recorder import scope

ATTEND = "attend"
_SCALED = (torch.float8_e4m3fn, torch.float8_e5m2)


def attend(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """torch's fused attention on [length, batch, heads, dimension]; all that it runs has the region ``attend``."""
    is_causal, _, has_dropout, _ = rule
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    with scope("", ATTEND):
        out = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=0.1 if has_dropout else 0.0, is_causal=is_causal, enable_gqa=k.shape[1] != q.shape[1]
        )
    return out.permute(2, 0, 1, 3)


@dataclass
class RealKernels:
    """The kernels of one process, registered for its device type while the object lives; ``groups`` by axis.

    ``scales`` holds the scale of every quantised tensor of the current step, by its memory: the traced operators carry
    none. :meth:`forget` ends a step.
    """

    device: torch.device
    groups: Mapping[str, dist.ProcessGroup]
    scales: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._definitions = define_operators()
        self._library = torch.library.Library("precision_graph", "IMPL")
        kernels = {
            "all_reduce": self._all_reduce, "all_gather": self._all_gather, "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all, "permute": _permute, "quantize": self._quantize,
            "scaled_mm": self._scaled_mm, "mm_accumulate": _mm_accumulate, "grouped_mm": _grouped_mm,
        }  # fmt: skip
        key = self.device.type.upper()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "overriding a previously registered kernel" is what is wanted
            for name, kernel in kernels.items():
                self._library.impl(name, kernel, key, allow_override=True)

    def close(self) -> None:
        """Gives the operators back to the tracer."""
        self._library._destroy()

    def forget(self) -> None:
        """Drops the scales of a step that is over."""
        self.scales.clear()

    def _all_reduce(self, x: Tensor, axis: str) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=self.groups[axis])
        return out

    def _all_gather(self, x: Tensor, size: int, axis: str) -> Tensor:
        out = x.new_empty((x.shape[0] * size, *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.groups[axis])
        return out

    def _reduce_scatter(self, x: Tensor, size: int, axis: str) -> Tensor:
        out = x.new_empty((x.shape[0] // size, *x.shape[1:]))
        dist.reduce_scatter_tensor(out, x.contiguous(), group=self.groups[axis])
        return out

    def _all_to_all(self, x: Tensor, rows: int, axis: str) -> Tensor:
        out = x.new_empty((rows, *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), group=self.groups[axis])
        return out

    def _quantize(self, x: Tensor, fmt: str, recipe: str, what: str, transpose: bool) -> tuple[Tensor, Tensor]:
        """Rows, and columns if asked for: scaled to the largest value of the tensor, or of each row."""
        rows = self._scaled(x.reshape(-1, x.shape[-1]), TORCH_DTYPE[fmt], recipe)
        if not transpose:
            return rows.view(x.shape), rows.new_empty(0)
        if recipe == "fp8_rowwise":
            columns = self._scaled(x.reshape(-1, x.shape[-1]).t().contiguous(), TORCH_DTYPE[fmt], recipe)
        else:
            columns = rows.t().contiguous()
            self.scales[columns.data_ptr()] = self.scales[rows.data_ptr()]
        return rows.view(x.shape), columns

    def _scaled(self, x: Tensor, dtype: torch.dtype, recipe: str) -> Tensor:
        largest = x.abs().amax(dim=-1, keepdim=True) if recipe == "fp8_rowwise" else x.abs().amax()
        scale = (largest.float() / torch.finfo(dtype).max).clamp(min=1e-12)
        out = (x / scale).to(dtype)
        self.scales[out.data_ptr()] = scale
        return out

    def _scaled_mm(self, a: Tensor, b: Tensor, input_format: str, out_dtype: str) -> Tensor:
        scale_a, scale_b = self.scales[a.data_ptr()], self.scales[b.data_ptr()]
        if scale_b.dim():
            scale_b = scale_b.t()
        out: Tensor = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=TORCH_DTYPE[out_dtype])
        return out


def _permute(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    """As many rows as the dispatch moves, read in a scattered order; with balanced experts which rows is no matter."""
    order = torch.arange(rows, device=x.device).mul_(97).remainder_(x.shape[0])
    return x.index_select(0, order)


def _mm_accumulate(a: Tensor, b: Tensor, main_grad: Tensor) -> None:
    main_grad.add_(a.mm(b))


def _grouped_mm(a: Tensor, b: Tensor, input_format: str, out_dtype: str) -> Tensor:
    return torch.bmm(a, b).to(TORCH_DTYPE[out_dtype])
