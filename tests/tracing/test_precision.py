"""CUDA's autocast rules on CPU tensors: complete, right where it is easy to get wrong, and gone afterwards."""

import pytest
import torch
from torch.nn import functional

from dataset_builder.tracing.precision import cuda_autocast_on_cpu, cuda_autocast_ops, resolve_op


def test_every_entry_of_the_four_lists_resolves():
    lists = cuda_autocast_ops()
    entries = [entry for ops in lists.values() for entry in ops]
    assert len(entries) > 100
    assert all(ops for ops in lists.values())
    for name, overload in entries:
        assert resolve_op(name, overload) is not None


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_formats_follow_cuda_not_cpu(low):
    x, layer = torch.randn(4, 8), torch.nn.Linear(8, 8)
    with cuda_autocast_on_cpu(), torch.autocast("cpu", low):
        y = layer(x)
        assert y.dtype == low
        assert torch.softmax(y, -1).dtype == torch.float32  # CPU keeps it low
        assert functional.layer_norm(y, (8,)).dtype == torch.float32
        assert functional.gelu(y).dtype == low
        assert (y + x).dtype == torch.float32
        assert torch.bmm(y[None], y.t()[None]).dtype == low


def test_the_cpu_rules_come_back():
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        before = torch.softmax(x.bfloat16(), -1).dtype
    with cuda_autocast_on_cpu():
        pass
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.softmax(x.bfloat16(), -1).dtype == before


def test_a_weight_is_cast_once_per_region_and_an_activation_once_per_consumer():
    from dataset_builder.tracing.recorder import Recorder

    weight = torch.nn.Parameter(torch.randn(8, 8))
    x = torch.randn(4, 8)
    recorder = Recorder()
    with cuda_autocast_on_cpu(), recorder, torch.autocast("cpu", torch.bfloat16):
        functional.linear(x, weight)
        functional.linear(x, weight)
    casts = [op.inputs[0].shape for op in recorder.ops if op.name == "aten::_to_copy"]
    assert casts.count((8, 8)) == 1
    assert casts.count((4, 8)) == 2
