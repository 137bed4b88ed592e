"""torchao's float8 training as an independent witness of what a linear layer runs under scaled 8-bit formats."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.graph import OpNode
from dataset_builder.tracing.trace import build_graph

TOKENS, COLUMNS, WIDER = 256, 512, 2048
_OUR_NAMES = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2", torch.bfloat16: "bf16"}


@dataclass
class Witness(TorchDispatchMode):
    """What really ran: quantised tensors, the shapes of their scales, and products."""

    quantised: set[tuple[int, str]] = field(default_factory=set)  # elements and format
    scale_sizes: set[int] = field(default_factory=set)  # how many scales a tensor gets
    products: list[tuple[tuple[int, ...], str]] = field(default_factory=list)  # m, k, n sorted, and format put out

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name == "_to_copy" and out.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            self.quantised.add((out.numel(), _OUR_NAMES[out.dtype]))
        if name in ("max", "amax"):
            self.scale_sizes.add(out.numel())
        if name in ("mm", "_scaled_mm"):
            sizes = (args[0].shape[0], args[0].shape[1], args[1].shape[1])
            self.products.append((tuple(sorted(sizes)), _OUR_NAMES[out.dtype]))
        return out


def witnessed(recipe: str) -> Witness:
    """One linear layer, forward and backward, under torchao on a CPU (its products emulated in bf16)."""
    float8 = pytest.importorskip("torchao.float8")
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    layer = torch.nn.Sequential(torch.nn.Linear(COLUMNS, WIDER, bias=False, dtype=torch.bfloat16))
    float8.convert_to_float8_training(layer, config=config)
    x = torch.randn(TOKENS, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
    with Witness() as witness:
        layer(x).sum().backward()
    return witness


def traced(recipe: str) -> list[OpNode]:
    """The nodes of a linear layer of these sizes in our graph."""
    job = TrainingJob.parse(
        {
            "model": {"num_layers": 1, "hidden_size": COLUMNS, "ffn_hidden_size": WIDER, "num_attention_heads": 8,
                      "vocab_size": 32000, "activation": "gelu"},
            "batch": {"seq_length": TOKENS, "micro_batch_size": 1, "global_batch_size": 1},
            "precision": f"fp8_{recipe}",
            "cluster": {"gpu": "H100-SXM5-80GB", "num_nodes": 1, "gpus_per_node": 1},
            "software": {"framework": "pytorch"},
        }
    )  # fmt: skip
    return [node for node in build_graph(job).nodes if node.module.endswith("mlp.fc1")]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_same_tensors_are_quantised_to_the_same_formats(recipe: str) -> None:
    """Input and weight forward, the output's gradient backward; a tensor that is cast for two products counts once."""
    ours = {(node.shape[0], node.output_dtype) for node in traced(recipe) if node.kind == "quantize"}
    assert ours == witnessed(recipe).quantised
    assert len(ours) == 3


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_same_products_run_and_put_out_the_same_format(recipe: str) -> None:
    ours = [(tuple(sorted(node.shape[1:4])), node.output_dtype) for node in traced(recipe) if node.kind == "gemm"]
    assert sorted(ours) == sorted(witnessed(recipe).products)


def test_one_scale_a_tensor_needs_a_pass_of_its_own_and_one_a_row_does_not() -> None:
    """The largest value of a whole tensor is known only after all of it was read; a row fits into one kernel."""
    passes = {
        recipe: {node.launches for node in traced(recipe) if node.kind == "quantize"}
        for recipe in ("tensorwise", "rowwise")
    }
    assert witnessed("tensorwise").scale_sizes == {1}
    assert passes["tensorwise"] == {2.0}
    assert witnessed("rowwise").scale_sizes == {TOKENS, COLUMNS, WIDER}
    assert passes["rowwise"] == {1.0}
