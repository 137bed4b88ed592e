"""Measured operators of a cluster: what they replace, and what they leave to the network."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from dataset_builder.corpus.measurements import OpMeasurement
from dataset_builder.corpus.operators import OperatorRow, operator_node
from dataset_builder.job.errors import JobError
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from dataset_builder.tracing.work import roofline_s
from gnn_predictor.adapter import kernel_key, measured_times
from gnn_predictor.batch import collate
from gnn_predictor.checkpoint import Checkpoint
from gnn_predictor.features import FORMATS, featurize
from gnn_predictor.kernel_times import measured_slowdowns
from gnn_predictor.prediction import network_of

_GPU = "A100-SXM4-80GB"


def _products(slowdown: float, gpu: str = _GPU, scatter: float = 0.0) -> list[OpMeasurement]:
    """bf16 products of several sizes, each ``slowdown`` times its roofline."""
    measured = []
    for number, size in enumerate((1024, 2048, 4096, 8192)):
        cells: dict[str, Any] = {
            "op_id": str(number),
            "op": "gemm",
            "direction": "fwd",
            "dtype": "bf16",
            "gpu": gpu,
            "dtype_out": "bf16",
            "b": 1,
            "m": size,
            "n": size,
            "k": size,
            "latency_us": 1e6,
        }
        node, device, group = operator_node(OperatorRow(cells))  # fmt: skip
        latency_s = roofline_s(node, device, group) * slowdown * math.exp(scatter * (-1) ** number)
        measured.append(OpMeasurement(str(number), "benchmark", gpu, node, device, group, latency_s, str(number)))
    return measured


def _batch(released: Checkpoint, gpu: str = _GPU) -> tuple[Any, Any]:
    job = TrainingJob.parse(
        {"model": {"preset": "gpt2-small"}, "cluster": {"gpu": gpu},
         "batch": {"seq_length": 512, "micro_batch_size": 2, "global_batch_size": 16}}
    ).resolved()  # fmt: skip
    network, config = network_of(released)
    batch = collate([featurize(job, build_graph(job), rank_layout(job))], config.devices)
    return network, batch


def test_a_slowdown_that_the_network_does_not_know_is_taken(released: Checkpoint) -> None:
    network, batch = _batch(released)
    known = measured_slowdowns(_products(7.0), network, batch.workload.shape[1], [_GPU])
    assert known == {"gemm/bf16": pytest.approx(math.log(7.0), rel=1e-4)}


def test_scattered_operators_and_few_of_them_leave_the_network_as_it_is(released: Checkpoint) -> None:
    network, batch = _batch(released)
    workload = batch.workload.shape[1]
    assert measured_slowdowns(_products(1.3, scatter=2.0), network, workload, [_GPU]) == {}
    assert measured_slowdowns(_products(7.0)[:2], network, workload, [_GPU]) == {}


def test_operators_of_another_device_are_refused(released: Checkpoint) -> None:
    network, batch = _batch(released)
    with pytest.raises(JobError, match="H100"):
        measured_slowdowns(_products(2.0, "H100-SXM5-80GB"), network, batch.workload.shape[1], [_GPU])


def test_measured_kernels_take_exactly_their_time_and_the_others_keep_theirs(released: Checkpoint) -> None:
    network, batch = _batch(released)
    with torch.inference_mode():  # as predictions are made, which share the network
        times = network.node_times(batch)
    informed = measured_times(batch, times, [{kernel_key("gemm", "bf16"): math.log(3.0)}])
    is_replaced = (informed.seconds - batch.log_roofline_s.exp() * 3.0).abs() < 1e-6 * informed.seconds
    is_same = informed.seconds == times.seconds
    assert is_replaced.any()
    assert (is_replaced | is_same).all()
    assert {FORMATS[i] for i in batch.node_formats[is_replaced & ~is_same, 0].tolist()} == {"bf16"}
    untouched = measured_times(batch, times, [{}])
    assert all(
        bool((getattr(untouched, f.name) == getattr(times, f.name)).all())
        for f in dataclasses.fields(times)
        if f.name in ("seconds", "exposed_s")
    )
