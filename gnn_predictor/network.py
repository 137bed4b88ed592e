"""The network: seconds of every node of a training graph, and from them stage and iteration times.

    seconds(node) = roofline(node) * exp(slowdown(node)) + launches(node) * launch_s

``slowdown`` is read out of a message-passing network over the training graph, conditioned on an embedding of the
hardware (specification through an MLP, plus a learned vector per known device that is dropped at random in training,
so that an unknown device works), of the software and of the workload. A measured operator also says by a learned vector
which library it is of; jobs run whatever their framework chose, the average library. The slowdown of an untrained
network is small, so an unseen size or device falls back to physics, and what is learnt of a job's messages stays near
their time on the wire. One definition serves training (batched by torch-geometric) and inference (which never imports
it): the network reads attributes of whatever batch it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gnn_predictor.batch import GraphBatch
from gnn_predictor.event_order import last_to_step
from gnn_predictor.features import (
    EDGE_KINDS,
    FORMATS,
    JOB_FEATURES,
    KERNEL_FEATURES,
    KERNEL_SLICES,
    NUM_SLOTS,
    SLOTS,
    GraphArrays,
)
from gnn_predictor.schedule import TIMES, DifferentiableMakespan


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of the network. ``devices`` and ``libraries`` are those that have a learned vector."""

    node_features: int
    format_features: int
    hardware_features: int
    software_features: int
    workload_features: int
    devices: tuple[str, ...]
    libraries: tuple[str, ...]
    hidden: int = 64
    layers: int = 2
    context: int = 48
    format_embedding: int = 4
    device_dropout: float = 0.3
    library_dropout: float = 0.15
    software_dropout: float = 0.15
    format_dropout: float = 0.3
    workload_dropout: float = 0.1
    feature_dropout: float = 0.1  # of single workload features

    @classmethod
    def fitting(
        cls, graph: GraphArrays, devices: tuple[str, ...], libraries: tuple[str, ...] = (), **sizes: Any
    ) -> NetworkConfig:
        """The configuration whose inputs are the columns of graphs like this one."""
        return cls(
            node_features=graph.node_features.shape[1],
            format_features=graph.format_features.shape[1],
            hardware_features=graph.hardware.shape[1],
            software_features=graph.software.shape[1],
            workload_features=graph.workload.shape[1],
            devices=devices,
            libraries=libraries,
            **sizes,
        )


@dataclass(frozen=True)
class NodeTimes:
    """Of every node: its own seconds, and the part that the critical path waits for."""

    seconds: Tensor  # [N]
    exposed_s: Tensor  # [N]
    host_s_per_launch: Tensor  # [B]
    overhead_s: Tensor  # [B] per iteration, independent of the graph
    log_spread: Tensor  # [B] log of the expected log-error


@dataclass(frozen=True)
class StageTable:
    """Seconds of every distinct stage; forward, backward and recompute per microbatch, the rest per iteration."""

    slots: Tensor  # [K, NUM_SLOTS] device time
    forward_s: Tensor  # [K] with exposed communication, at least the host's time
    backward_s: Tensor  # [K] with recompute and exposed communication
    weight_gradient_s: Tensor  # [K] of backward_s, what a split schedule runs apart
    hidden_forward_s: Tensor  # [K] of forward_s, what is hidden beside a backward pass
    hidden_backward_s: Tensor  # [K] of backward_s, what is hidden beside a forward pass
    iteration_s: Tensor  # [K] optimizer and exposed data-parallel communication
    hop_s: Tensor  # [K] all sends of a microbatch


# Where training starts from; what it learns are factors on these.
KERNEL_LAUNCH_S = 4e-6  # between kernels on the device
HOST_LAUNCH_S = 8e-6  # of the host's time
STEP_OVERHEAD_S = 3e-3  # of an iteration, whatever it runs
_STARTING_LOG_SLOWDOWN = 0.5
STARTING_SLOWDOWN = math.exp(_STARTING_LOG_SLOWDOWN)  # of a node over its roofline
_TYPICAL_LOG_SPREAD = -2.3  # log of an expected error of 10%
_MOST_LOG_FACTOR = 4.0
_LEAST_S = 1e-12
# A job's message over its time on the wire: a little below it where switches reduce or a link is better than specified,
# and down to a quarter of the bandwidth. Without bounds messages explain whatever large jobs lack.
_LEAST_OF_WIRE, _MOST_OF_WIRE = 0.8, 4.0
# Of a tensor-parallel message that goes in pieces beside its matrix product: what ten measured runs are best met by
# (they are too few to teach it).
_HIDDEN_OF_CHUNKED = 0.25


def _limited(log_factor: Tensor) -> Tensor:
    """Keeps a learned factor within e^-4 to e^4, softly: no input can make a time overflow."""
    return _MOST_LOG_FACTOR * torch.tanh(log_factor / _MOST_LOG_FACTOR)


def _limited_to_wire(log_factor: Tensor) -> Tensor:
    """Keeps a message's learned factor between the least and the most of its time on the wire, softly."""
    least, most = math.log(_LEAST_OF_WIRE), math.log(_MOST_OF_WIRE)
    middle, half = (least + most) / 2, (most - least) / 2
    return middle + half * torch.tanh((log_factor - middle) / half)


def _identity_scale(columns: int) -> Tensor:
    return torch.stack([torch.zeros(columns), torch.ones(columns)])


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Standardised, and limited to where the network was trained and a little beyond."""
    return ((values - scale[0]) / scale[1]).clamp(-6, 6)


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))


class MessagePassing(nn.Module):
    """One round: every node receives the mean of its sources' and of its targets' messages, by kind of edge."""

    def __init__(self, hidden: int, context: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.message = nn.Linear(hidden, hidden)
        self.kind = nn.Embedding(2 * len(EDGE_KINDS), hidden)
        self.update = nn.Sequential(nn.Linear(3 * hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.condition = nn.Linear(context, 2 * hidden)

    def forward(self, h: Tensor, context: Tensor, batch: GraphBatch) -> Tensor:
        """[N, hidden] and [B, context] -> [N, hidden]."""
        scale, shift = self.condition(context).chunk(2, dim=-1)
        x = self.norm(h) * _rows(1 + scale, batch.node_graph) + _rows(shift, batch.node_graph)
        message = self.message(x)
        source, target = batch.edge_index
        incoming = _mean_over(message, source, target, self.kind(batch.edge_kind))
        outgoing = _mean_over(message, target, source, self.kind(batch.edge_kind + len(EDGE_KINDS)))
        return h + torch.as_tensor(self.update(torch.cat([x, incoming, outgoing], dim=-1)))


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` of a table with many columns, by copies of whole rows, which take a third of the time."""
    return table.index_select(0, index)


def _mean_over(message: Tensor, source: Tensor, target: Tensor, bias: Tensor) -> Tensor:
    total = torch.zeros_like(message)
    if source.numel() == 0:
        return total
    total.index_add_(0, target, _rows(message, source) + bias)
    count = torch.zeros(len(message), dtype=message.dtype).index_add_(
        0, target, torch.ones(len(target), dtype=message.dtype)
    )
    return total / count.clamp(min=1).unsqueeze(-1)


class KernelStream(nn.Module):
    """What a kernel costs on a device whatever job it is in: the only place that sees formats.

    Operators and jobs share it, so a format that no run used is known from operators, and what jobs add to a kernel
    (software, neighbours, workload) carries over from other formats.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        inputs = len(KERNEL_FEATURES) + config.format_features + 2 * config.format_embedding
        self.inputs = nn.Linear(inputs, config.hidden)
        self.condition = nn.Linear(config.context, 2 * config.hidden)
        self.body = nn.Sequential(
            nn.SiLU(), nn.Linear(config.hidden, config.hidden), nn.SiLU(), nn.Linear(config.hidden, config.hidden),
            nn.SiLU(),
        )  # fmt: skip
        self.outputs = nn.Linear(config.hidden, 2)
        nn.init.zeros_(self.outputs.bias)
        nn.init.normal_(self.outputs.weight, std=0.02)

    def forward(self, inputs: Tensor, hardware: Tensor, batch: GraphBatch) -> Tensor:
        """[N, inputs] and [B, context] -> log slowdown and log launch factor, [N, 2]."""
        scale, shift = self.condition(hardware).chunk(2, dim=-1)
        conditioned = self.inputs(inputs) * _rows(1 + scale, batch.node_graph) + _rows(shift, batch.node_graph)
        return torch.as_tensor(self.outputs(self.body(conditioned)))


class Predictor(nn.Module):
    """Node times from a batch of graphs. Units: seconds."""

    node_scale: Tensor
    workload_scale: Tensor

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        hidden, context = config.hidden, config.context
        self.format = nn.Embedding(len(FORMATS), config.format_embedding)
        self.kernel = KernelStream(config)
        self.encode = _mlp(JOB_FEATURES, hidden, hidden)
        self.hardware = _mlp(config.hardware_features, context, context)
        self.device = nn.Embedding(len(config.devices) + 1, context)
        self.library = nn.Embedding(len(config.libraries) + 1, context, padding_idx=0)
        self.software = nn.Linear(config.software_features, context)
        self.workload = _mlp(config.workload_features, context, context)
        self.mix = nn.Sequential(nn.SiLU(), nn.Linear(context, context), nn.SiLU())
        self.rounds = nn.ModuleList(MessagePassing(hidden, context) for _ in range(config.layers))
        self.readout = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 3))
        self.graph_readout = nn.Linear(context, 4)
        self.register_buffer("node_scale", _identity_scale(config.node_features))
        self.register_buffer("workload_scale", _identity_scale(config.workload_features))
        self._start_from_physics()

    def _start_from_physics(self) -> None:
        """Starts at 1.6x the roofline, with most of the communication exposed and typical launch costs."""
        last = self.readout[-1]
        assert isinstance(last, nn.Linear)
        nn.init.normal_(last.weight, std=0.02)
        nn.init.zeros_(self.device.weight)
        nn.init.zeros_(self.library.weight)
        nn.init.zeros_(self.format.weight)
        nn.init.normal_(self.graph_readout.weight, std=0.02)
        with torch.no_grad():
            last.bias.copy_(torch.tensor([_STARTING_LOG_SLOWDOWN, 0.5, 0.0]))
            nn.init.zeros_(self.graph_readout.bias)

    def set_scales(self, node: Tensor, workload: Tensor) -> None:
        """Mean and deviation (rows 0 and 1) by which inputs are brought to order one."""
        self.node_scale.copy_(node)
        self.workload_scale.copy_(workload)

    def _context(self, batch: GraphBatch) -> Tensor:
        """[B, context]"""
        config = self.config
        software = self.software(batch.software * self._keep(len(batch.software), config.software_dropout))
        workload = _scaled(batch.workload, self.workload_scale)
        keep = self._keep(len(workload), config.workload_dropout)
        if self.training:
            keep = keep * (torch.rand_like(workload[:, 1:]) >= config.feature_dropout)
        workload = torch.cat([batch.workload[:, :1], workload[:, 1:] * keep], dim=1)  # first column: job or operator
        total = self._hardware(batch) + software + self.workload(workload)
        return torch.as_tensor(self.mix(total))

    def _hardware(self, batch: GraphBatch) -> Tensor:
        """[B, context] specification through an MLP, plus the learned vectors of the device and of the library whose
        kernel an operator is; jobs have none."""
        device = self.device(self._drop_rows(batch.device, self.config.device_dropout))
        library = self.library(self._drop_rows(batch.library, self.config.library_dropout))
        return torch.as_tensor(self.hardware(batch.hardware) + device + library)

    def _keep(self, rows: int, dropout: float) -> Tensor:
        if not self.training:
            return torch.ones(rows, 1)
        return (torch.rand(rows, 1) >= dropout).float()

    def _drop_rows(self, index: Tensor, dropout: float) -> Tensor:
        """Index 0, "unknown", in place of some indices."""
        return index * self._keep(len(index), dropout).squeeze(1).long()

    def node_times(self, batch: GraphBatch) -> NodeTimes:
        """Seconds of every node of every graph in the batch."""
        context = self._context(batch)
        formats = self.format(batch.node_formats).flatten(1)
        formats = formats * self._keep(len(formats), self.config.format_dropout)
        node = _scaled(batch.node_features, self.node_scale)
        h = self.encode(node[:, :JOB_FEATURES])
        for layer in self.rounds:
            h = layer(h, context, batch)
        slowdown, exposure, launch = self.readout(h).unbind(-1)
        kernel_inputs = torch.cat([*(node[:, part] for part in KERNEL_SLICES), batch.format_features, formats], dim=-1)
        kernel_slowdown, kernel_launch = self.kernel(kernel_inputs, self._hardware(batch), batch).unbind(-1)
        slowdown, launch = slowdown + kernel_slowdown, launch + kernel_launch
        host, overhead, spread, kernel = self.graph_readout(context).unbind(-1)
        launch_s = KERNEL_LAUNCH_S * torch.exp(_limited(launch + kernel[batch.node_graph]))
        message, share = batch.is_overlappable, torch.sigmoid(exposure)
        in_job = message * batch.workload[:, 0][batch.node_graph]  # small messages are measured alone, with all latency
        slowdown = torch.where(in_job > 0, _limited_to_wire(slowdown), _limited(slowdown))
        seconds = torch.exp(batch.log_roofline_s + slowdown) + batch.launches * launch_s
        share = (share + (1 - share) * batch.is_serial) * (1 - _HIDDEN_OF_CHUNKED * batch.is_chunked)
        exposed = seconds * (1 - message + message * share)
        return NodeTimes(
            seconds,
            exposed,
            host_s_per_launch=HOST_LAUNCH_S * torch.exp(_limited(host)),
            overhead_s=STEP_OVERHEAD_S * torch.exp(_limited(overhead)),
            log_spread=_TYPICAL_LOG_SPREAD + _limited(spread),
        )

    def forward(self, batch: GraphBatch) -> tuple[Tensor, NodeTimes, StageTable]:
        """Iteration seconds [B], node times and stage table."""
        times = self.node_times(batch)
        table = stage_table(batch, times)
        return iteration_times(batch, table, times.overhead_s), times, table


def stage_table(batch: GraphBatch, times: NodeTimes) -> StageTable:
    """Sums node times over every distinct stage; kernels of a microbatch cannot outrun the host."""
    cells = torch.zeros_like(batch.cell_launches)
    cells = cells.index_add(0, batch.entry_cell, times.exposed_s[batch.entry_node] * batch.entry_weight)
    slots = cells.view(-1, NUM_SLOTS)
    host = (batch.cell_launches * times.host_s_per_launch[batch.cell_graph]).view(-1, NUM_SLOTS)
    pick = {name: i for i, name in enumerate(SLOTS)}
    forward = slots[:, pick["forward"]] + slots[:, pick["comm_forward"]]
    backward = slots[:, pick["backward"]] + slots[:, pick["recompute"]] + slots[:, pick["comm_backward"]]
    host_forward = host[:, pick["forward"]] + host[:, pick["comm_forward"]]
    host_backward = host[:, pick["backward"]] + host[:, pick["recompute"]] + host[:, pick["comm_backward"]]
    iteration = slots[:, pick["optimizer"]] + slots[:, pick["comm_iteration"]]
    forward_s, backward_s = _at_least(forward, host_forward), _at_least(backward, host_backward)
    weight_gradient = _slots_of(batch, times, batch.is_weight_gradient)[:, pick["backward"]]
    messages = _slots_of(batch, times, batch.is_hidden_in_pairs)
    of_forward, of_backward = messages[:, pick["comm_forward"]], messages[:, pick["comm_backward"]]
    return StageTable(
        slots=slots,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_gradient_s=backward_s * weight_gradient / backward.clamp(min=_LEAST_S),
        hidden_forward_s=torch.minimum(of_forward, (backward_s - of_backward).clamp(min=0)),
        hidden_backward_s=torch.minimum(of_backward, (forward_s - of_forward).clamp(min=0)),
        iteration_s=_at_least(iteration, host[:, pick["optimizer"]]),
        hop_s=slots[:, pick["hop"]],
    )


def _slots_of(batch: GraphBatch, times: NodeTimes, is_meant: Tensor) -> Tensor:
    """The part of every distinct stage's slots that some nodes [N] make up; [K, NUM_SLOTS]."""
    seconds = (times.exposed_s * is_meant)[batch.entry_node] * batch.entry_weight
    return torch.zeros_like(batch.cell_launches).index_add(0, batch.entry_cell, seconds).view(-1, NUM_SLOTS)


def stage_times(table: StageTable, rows: Sequence[int]) -> Tensor:
    """What the schedule is made of, [len(TIMES), stages], for the pipeline stages at these rows of the table."""
    columns = {name: getattr(table, f"{name}_s") for name in TIMES}
    return torch.stack([columns[name][list(rows)] for name in TIMES])


def _at_least(device_s: Tensor, host_s: Tensor) -> Tensor:
    """A smooth maximum of device and host time (their 6-norm: 12% above when equal, the larger when they differ)."""
    scale = torch.maximum(device_s, host_s).detach().clamp(min=1e-12)
    return scale * ((device_s / scale) ** 6 + (host_s / scale) ** 6 + 1e-24) ** (1 / 6)


def iteration_times(batch: GraphBatch, table: StageTable, overhead_s: Tensor) -> Tensor:
    """Iteration seconds [B]: the pipeline's makespan, then the slowest rank's optimizer step and reduction."""
    results = []
    for shape, rows in zip(batch.shapes, batch.stage_rows, strict=True):
        step_s = table.iteration_s[list(rows)]
        tail = step_s[list(last_to_step(shape, step_s.tolist()))].sum()
        if shape.num_ranks == 1:
            busy = (table.forward_s[rows[0]] + table.backward_s[rows[0]]) * shape.num_microbatches
        else:
            index = list(rows)
            hop = table.hop_s[index].sum() / shape.num_hops
            busy = DifferentiableMakespan.apply(  # type: ignore[no-untyped-call]
                stage_times(table, rows), hop, shape
            )
        results.append(busy + tail)
    return torch.stack(results) + overhead_s


def is_population(member: int) -> bool:
    """Whether this member of an ensemble is trained with source effects beside it: every second one is."""
    return member % 2 == 1


class Ensemble(nn.Module):
    """Several networks of one configuration; node times are their means, so every figure stays consistent.

    Arithmetic means: runs teach sums of node times, and members may divide a sum differently among its nodes. Any
    other mean of the nodes would make the sum smaller than every member's. ``population_share`` [B], 0 to 1, is what
    those members have in a job's means that :func:`is_population` tells, where there are others; without it all have
    the same.
    """

    def __init__(self, members: Sequence[Predictor]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    @property
    def config(self) -> NetworkConfig:
        return cast(Predictor, self.members[0]).config

    @classmethod
    def from_tensors(cls, config: NetworkConfig, tensors: Mapping[str, Tensor]) -> Ensemble:
        """Rebuilds the ensemble of a state dictionary; raises RuntimeError when it does not fit ``config``."""
        count = 1 + max(int(name.split(".")[1]) for name in tensors)
        ensemble = cls([Predictor(config) for _ in range(count)])
        ensemble.load_state_dict(dict(tensors))
        return ensemble.eval()

    def node_times(self, batch: GraphBatch, population_share: Tensor | None = None) -> NodeTimes:
        """Means of the members' node times."""
        each = [cast(Predictor, member).node_times(batch) for member in self.members]
        of_job = self._weights(len(each[0].overhead_s), population_share)
        of_node = of_job[:, batch.node_graph]

        def mean(pick: Callable[[NodeTimes], Tensor], weight: Tensor) -> Tensor:
            return (torch.stack([pick(times) for times in each]) * weight).sum(0)

        return NodeTimes(
            seconds=mean(lambda t: t.seconds, of_node),
            exposed_s=mean(lambda t: t.exposed_s, of_node),
            host_s_per_launch=mean(lambda t: t.host_s_per_launch, of_job),
            overhead_s=mean(lambda t: t.overhead_s, of_job),
            log_spread=mean(lambda t: t.log_spread, of_job),
        )

    def _weights(self, jobs: int, population_share: Tensor | None) -> Tensor:
        """Of every member in every job. [member, B]"""
        of_population = torch.tensor([is_population(index) for index in range(len(self.members))])
        count = int(of_population.sum())
        if population_share is None or count == 0:
            return torch.full((len(self.members), jobs), 1 / len(self.members))
        share = population_share.float()
        return torch.where(of_population[:, None], share / count, (1 - share) / (len(self.members) - count))

    def forward(
        self, batch: GraphBatch, population_share: Tensor | None = None
    ) -> tuple[Tensor, NodeTimes, StageTable]:
        """Iteration seconds [B], node times and stage table."""
        times = self.node_times(batch, population_share)
        table = stage_table(batch, times)
        return iteration_times(batch, table, times.overhead_s), times, table
