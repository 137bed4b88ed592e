"""What the measured operators of one cluster say about its kernels: for a kind and a format, time over roofline.

A kind's measured slowdown takes the place of the network's only where it predicts the cluster's own operators better,
each left out in turn: the network knows how a kernel's efficiency depends on its size, so on a device that it was
trained on there is little to gain; on one that it never saw there is much.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

import torch

from dataset_builder.corpus.measurements import OpMeasurement
from dataset_builder.job.errors import JobError
from gnn_predictor.adapter import kernel_key
from gnn_predictor.dataset import operator_examples
from gnn_predictor.network import Ensemble

_LEAST_OPERATORS = 3


def measured_slowdowns(
    operators: Sequence[OpMeasurement], network: Ensemble, num_workload: int, gpus: Sequence[str]
) -> dict[str, float]:
    """log(time / roofline) by :func:`kernel_key` of the kinds that are better known by it; messages are left out.

    ``num_workload``: workload features of the network. Raises JobError when the operators are of other devices.
    """
    if others := sorted({op.device.name for op in operators} - {*gpus}):
        raise JobError([f"measured on {', '.join(others)}; expected {', '.join(gpus)}, as the runs"], "ops")
    kernels = [op for op in operators if op.group is None]
    if not kernels:
        return {}
    examples = operator_examples(kernels, network.config.devices, network.config.libraries, num_workload)
    with torch.no_grad():
        predicted = network.node_times(examples.batch(torch.arange(len(examples)))).seconds.log()
    network_errors = (predicted - examples.log_seconds).abs().tolist()
    log_slowdowns = (examples.log_seconds - examples.log_roofline_s).tolist()
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for op, slowdown, error in zip(kernels, log_slowdowns, network_errors, strict=True):
        rows[kernel_key(op.node.kind, op.node.input_dtype)].append((slowdown, error))
    known = {}
    for key, pairs in sorted(rows.items()):
        slowdowns = [slowdown for slowdown, _ in pairs]
        if len(pairs) >= _LEAST_OPERATORS and _left_out_error(slowdowns) < statistics.fmean(e for _, e in pairs):
            known[key] = statistics.median(slowdowns)
    return known


def _left_out_error(slowdowns: Sequence[float]) -> float:
    """Mean absolute difference of each from the median of the others."""
    return statistics.fmean(
        abs(each - statistics.median([*slowdowns[:index], *slowdowns[index + 1 :]]))
        for index, each in enumerate(slowdowns)
    )
