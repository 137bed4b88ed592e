"""Traces the optimizer step on a symbolic parameter vector: unscaling, clipping, the update, the copy to the weights.

Adam, AdamW and SGD are torch's own fused ones. LAMB (arXiv 1904.00962), Lion (2302.06675), Adafactor (1804.04235) and
Muon have no fused kernel in torch: their update rules stand here, as one fused region that reads and writes what each
rule has to; Muon's Newton-Schulz products are GEMMs on [N, h, h] matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dataset_builder.tracing.block import Recording, fake_training
from dataset_builder.tracing.precision import TORCH_DTYPE
from dataset_builder.tracing.recorder import Recorder, scope
from dataset_builder.tracing.structure import BlockStructure

_NEWTON_SCHULZ_STEPS = 5


def _lamb(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    with scope("update", "moments"):
        m.mul_(0.9).add_(g)
        v.mul_(0.999).addcmul_(g, g)
        update = m / (v.sqrt() + 1e-6) + p * 0.01
    with scope("trust_ratio", "trust_ratio"):
        ratio = torch.linalg.vector_norm(p) / torch.linalg.vector_norm(update)
    with scope("apply", "apply"):
        p.sub_(update * ratio)


def _lion(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    with scope("update", "moments"):
        p.sub_(torch.sign(m * 0.9 + g))
        m.mul_(0.99).add_(g)


def _adafactor(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    """Factored second moments are negligible in size: statistics of the squared gradient, then the update."""
    with scope("statistics", "statistics"):
        scale = (g * g).mean()
    with scope("update", "moments"):
        p.sub_(g * torch.rsqrt(scale))


def _muon(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    with scope("update", "moments"):
        m.mul_(0.95).add_(g)
        x = m.bfloat16()
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.transpose(1, 2)
        polynomial = torch.baddbmm(gram, gram, gram)
        x = torch.baddbmm(x, polynomial, x)
    with scope("apply", "apply"):
        p.sub_(x)


_RULES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], None]] = {
    "lamb": _lamb, "lion": _lion, "adafactor": _adafactor, "muon": _muon,
}  # fmt: skip


def _fused_torch_step(name: str, parameter: nn.Parameter, moments: list[Tensor]) -> Callable[[], None]:
    """A step of torch's fused optimizer with its state already there, as after the first iteration."""
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
        optimizer.state[parameter] = {"momentum_buffer": moments[0]}
    else:
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        optimizer = kind([parameter], lr=0.1, fused=True)
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": moments[0],
            "exp_avg_sq": moments[1],
        }

    def step() -> None:
        with scope("update"):
            optimizer.step()

    return step


def record_optimizer(structure: BlockStructure, sizes: Mapping[str, int]) -> Recording:
    """The step on ``N`` elements of the ``G`` whose gradients the rank holds (for Muon matrices of the hidden size)."""
    recorder = Recorder()
    recorder.phase = "optimizer"
    element = (sizes["h"], sizes["h"]) if structure.optimizer == "muon" else ()
    shape = (sizes["N"], *element)
    has_main = structure.main_params != "none" and structure.main_params != structure.params
    stored = TORCH_DTYPE[structure.main_params if has_main else structure.params]
    with fake_training(), torch.no_grad():
        parameter = nn.Parameter(torch.empty(shape, dtype=stored))
        weight = torch.empty(shape, dtype=TORCH_DTYPE[structure.params])
        buffer = torch.empty((sizes["G"], *element), dtype=TORCH_DTYPE[structure.grad_accum])
        gradient = buffer[: sizes["N"]]
        has_rule = structure.optimizer in _RULES
        # torch's kernels refuse most mixes of formats: there the parameter's format stands in for the state's
        state_dtype = TORCH_DTYPE[structure.optimizer_state] if has_rule else stored
        moments = [torch.empty(shape, dtype=state_dtype) for _ in range(2)]
        recorder.formats |= {moment.untyped_storage()._cdata: structure.optimizer_state for moment in moments}
        found_inf, scale = torch.zeros(1), torch.zeros(1)
        converted = gradient.dtype != parameter.dtype
        parameter.grad = torch.empty_like(parameter) if converted else gradient
        step = None if has_rule else _fused_torch_step(structure.optimizer, parameter, moments)
        with recorder, scope("optimizer"):
            if converted:
                with scope("gradient_copy"):
                    parameter.grad.copy_(gradient)
            if structure.loss_scaling:
                with scope("unscale"):
                    torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], found_inf, scale)
            with scope("clip"):
                norm = torch.linalg.vector_norm(parameter.grad)
                parameter.grad.mul_(norm)
            if step is not None:
                step()
            else:
                _RULES[structure.optimizer](parameter.data, parameter.grad, *moments)
            if has_main:
                with scope("weight_copy"):
                    weight.copy_(parameter)
            if structure.accumulate:
                with scope("zero_gradient"):
                    buffer.zero_()
    return Recording(structure, recorder.ops)
