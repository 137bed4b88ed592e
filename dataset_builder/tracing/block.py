"""Runs one block forward and backward on fake tensors, no memory allocated, and returns everything it executed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dataset_builder.tracing.collectives import define_operators
from dataset_builder.tracing.linear import BlockContext
from dataset_builder.tracing.model import Embedding, EncoderNorm, Head, Layer, MtpInput
from dataset_builder.tracing.precision import TORCH_DTYPE, cuda_autocast_on_cpu
from dataset_builder.tracing.recorder import RawOp, Recorder, TensorRef, scope
from dataset_builder.tracing.structure import BlockStructure


@dataclass
class Recording:
    """What a block executed, and which storages are its ports; ``None``: it has no such port."""

    structure: BlockStructure
    ops: list[RawOp]
    parameters: list[tuple[str, TensorRef]] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)  # storages of the parameters that get a gradient
    persistent: set[int] = field(default_factory=set)  # parameters, gradient buffers, tables: never saved activations
    inputs: set[int] = field(default_factory=set)
    output: TensorRef | None = None
    output_gradient: int | None = None
    input_gradients: set[int] = field(default_factory=set)
    weight_gradients: set[int] = field(default_factory=set)


@contextlib.contextmanager
def fake_training(fake: bool = True) -> Iterator[None]:
    """Fake tensors and a single-threaded autograd engine, so that backward operators run under our modes.

    Gradients are on whatever the caller's mode is: a predictor may ask for a graph in its inference mode.
    """
    define_operators()
    tensors = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autograd.set_multithreading_enabled(False),
        tensors,
    ):
        yield


def position_tables(context: BlockContext) -> tuple[Tensor, ...]:
    """Position tables a layer is given: rotary cosines and sines, or what is added to the attention scores."""
    structure, sizes = context.structure, context.sizes
    length = context.full_length
    keys = length * (sizes["c"] if structure.context else 1)
    heads = sizes["g"] * sizes["r"]
    positions = structure.position_embedding
    if structure.attention != "multi_head":
        return torch.empty(length, 1, 1, 2 * sizes["j"]), torch.empty(length, 1, 1, 2 * sizes["j"])
    if positions == "rope":
        return torch.empty(length, 1, 1, sizes["d"]), torch.empty(length, 1, 1, sizes["d"])
    if positions == "alibi":
        return (torch.empty(1, heads, 1, keys, dtype=context.low),)
    if positions == "relative" and structure.causal and not structure.cross_attention:
        return (torch.empty(keys, sizes["h"], dtype=context.stream_dtype),)
    if positions == "relative":
        trained = not structure.frozen
        return (torch.empty(1, heads, length, keys, dtype=context.stream_dtype, requires_grad=trained),)
    return ()


def _place(parameter: str) -> str:
    """The module path of a parameter, without the containers and the parameter's own name."""
    parts = [part for part in parameter.split(".") if part not in ("norms", "inputs", "weight", "bias")]
    return ".".join(part for part in parts if not part.isdigit()) or "embedding"


def _prepare_gradients(block: nn.Module, context: BlockContext) -> set[int]:
    """Gives parameters the buffers gradients of earlier microbatches are in; returns the buffers' storages."""
    structure = context.structure
    if not structure.accumulate:
        return set()
    buffers = set()
    target = TORCH_DTYPE[structure.grad_accum]
    for name, parameter in block.named_parameters():
        if not parameter.requires_grad:
            continue
        buffer = torch.empty_like(parameter, dtype=target, requires_grad=False)
        buffers.add(buffer.untyped_storage()._cdata)
        if target == parameter.dtype and (structure.autocast or not structure.fused):
            parameter.grad = buffer
            continue
        parameter.main_grad = buffer  # type: ignore[attr-defined]

        def add(p: nn.Parameter, place: str = _place(name)) -> None:
            if p.grad is None:  # the GEMM added to main_grad itself
                return
            with scope(place, "accumulate"):
                p.main_grad.add_(p.grad)  # type: ignore[attr-defined]
            p.grad = None

        parameter.register_post_accumulate_grad_hook(add)
    return buffers


def _accumulate_over_layers(memory: Tensor) -> None:
    """Every decoder layer adds its gradient to that of the encoder's output."""
    total = torch.empty_like(memory, requires_grad=False)

    def add(encoded: Tensor) -> None:
        with scope("memory_gradient"):
            total.add_(encoded.grad)  # type: ignore[arg-type]
        encoded.grad = total

    memory.register_post_accumulate_grad_hook(add)


def record_block(structure: BlockStructure, sizes: Mapping[str, int], fake: bool = True) -> Recording:
    """Traces one block at the given sizes; ``fake`` off really computes it, on the CPU."""
    recorder = Recorder()
    with fake_training(fake), cuda_autocast_on_cpu() as rules:
        context = BlockContext(structure, sizes, rules, recorder)
        recording, run = _build(context, recorder)
        cast = torch.autocast("cpu", TORCH_DTYPE[structure.compute]) if structure.autocast else contextlib.nullcontext()
        with recorder, cast:
            output: Tensor = run()
        recording.output = recorder.ref(output)
        if output.requires_grad:  # a frozen embedding has no backward pass
            gradient = torch.empty_like(output)
            with recorder:
                recorder.phase = "backward"
                output.backward(gradient)
            recording.output_gradient = recorder.ref(gradient).storage
        for tensor in run.activations:
            if tensor.grad is not None:
                recording.input_gradients.add(recorder.ref(tensor.grad).storage)
        for _, parameter in run.block.named_parameters():
            if parameter.grad is not None:
                recording.weight_gradients.add(recorder.ref(parameter.grad).storage)
    recording.ops = recorder.ops
    return recording


def _labels(context: BlockContext) -> tuple[Tensor, Tensor | None]:
    """A head's labels, and the positions it computes (``None``: all)."""
    sizes, structure = context.sizes, context.structure
    if structure.masked_positions:
        ranks = sizes["t"] if context.is_scattered else 1
        return torch.zeros(sizes["M"] * ranks, dtype=torch.long), torch.zeros(sizes["M"], dtype=torch.long)
    length = context.local_length if structure.head == "classification" else context.full_length
    return torch.zeros(length, sizes["b"], dtype=torch.long), None


@dataclass
class _Run:
    """A block with its arguments; ``activations`` are those that carry gradients to the block before."""

    block: nn.Module
    arguments: tuple[object, ...]
    activations: tuple[Tensor, ...]

    def __call__(self) -> Tensor:
        out: Tensor = self.block(*self.arguments)
        return out


def _build(context: BlockContext, recorder: Recorder) -> tuple[Recording, _Run]:
    structure, sizes = context.structure, context.sizes
    batch, hidden, local, full = sizes["b"], sizes["h"], context.local_length, context.full_length

    def activation(length: int) -> Tensor:
        return torch.empty(length, batch, hidden, dtype=context.stream_dtype, requires_grad=True)

    def indices(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.long)

    tables: tuple[Tensor, ...] = ()
    if structure.block == "embedding":
        block: nn.Module = Embedding(context)
        arguments: tuple[object, ...] = (indices(batch, full), indices(1, local), indices(batch, local))
        activations: tuple[Tensor, ...] = ()
    elif structure.block == "encoder_norm":
        block = EncoderNorm(context)
        activations = arguments = (activation(local),)
    elif structure.block == "mtp":
        block = MtpInput(context)
        activations = arguments = (activation(local), activation(local))
    elif structure.block == "head":
        block = Head(context)
        activations = (activation(local),)
        arguments = (activations[0], *_labels(context))
    else:
        block = Layer(context)
        tables = position_tables(context)
        memory = None
        if structure.cross_attention:
            memory = activation(sizes["o"] if context.is_scattered else sizes["m"])
            _accumulate_over_layers(memory)
        activations = (activation(local), *((memory,) if memory is not None else ()))
        arguments = (activations[0], tables, memory)
    recording = Recording(structure, [])
    recording.parameters = [(name, recorder.ref(p)) for name, p in block.named_parameters()]
    recording.trained = {recorder.ref(p).storage for p in block.parameters() if p.requires_grad}
    recording.persistent = {ref.storage for _, ref in recording.parameters} | _prepare_gradients(block, context)
    recording.weight_gradients = set(recording.persistent) - {ref.storage for _, ref in recording.parameters}
    constants = [*tables, *(a for a in arguments if isinstance(a, Tensor) and not a.is_floating_point())]
    recording.persistent |= {recorder.ref(t).storage for t in constants}
    recording.inputs = {recorder.ref(t).storage for t in activations}
    return recording, _Run(block, arguments, activations)
