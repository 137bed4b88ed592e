"""A template bound to a job's sizes: the nodes of one block as one rank runs them.

In: a template, a value for each of its size names and the sizes of the parallel groups. Out: :class:`BoundBlock`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from dataset_builder.tracing.graph import OpNode
from dataset_builder.tracing.templates import StoredTemplate
from dataset_builder.tracing.work import visible_fraction


@dataclass(frozen=True)
class BoundBlock:
    """A template with a job's numbers: nodes, edges and ports with indices of its own, and totals."""

    nodes: tuple[OpNode, ...]
    edges: tuple[tuple[int, int, str], ...]
    ports: Mapping[str, tuple[int, ...]]
    totals: dict[str, float]
    output_dtype: str


def bind(stored: StoredTemplate, sizes: Mapping[str, float], prefix: str, groups: Mapping[str, int]) -> BoundBlock:
    """Puts sizes into a template; ``groups``: size of the group of every axis."""
    values = tuple(sizes[name] for name in stored.names)
    return _bound(stored, values, prefix, tuple(groups[axis] for axis in stored.axes))


@functools.lru_cache(maxsize=2**10)
def _bound(stored: StoredTemplate, sizes: tuple[float, ...], prefix: str, group_sizes: tuple[int, ...]) -> BoundBlock:
    """Layouts of a job share most blocks; those that differ in pipeline, data and sharding only share all of them."""
    values = stored.values(sizes).tolist()
    groups = dict(zip(stored.axes, group_sizes, strict=True))
    nodes = []
    for kernel in stored.kernels:
        shape = tuple(max(1, round(values[p])) for p in kernel["shape"])
        flops, read, written, message = (values[p] for p in kernel["work"])
        if kernel["kind"] == "attention":
            flops *= visible_fraction(shape[3], shape[4], shape[6], kernel["causal"])
        axis = kernel["axis"]
        node = OpNode(
            kernel["kind"], kernel["op"], _module(prefix, kernel["module"]), kernel["phase"], shape, kernel["in"],
            kernel["out"], kernel["acc"], axis, groups[axis] if axis else 1,
            "iteration" if prefix == "optimizer" else kernel["per"], flops, read, written, message, kernel["launches"],
        )  # fmt: skip
        nodes.append(node)
    totals = {name: values[p] for name, p in stored.totals.items()}
    return BoundBlock(tuple(nodes), stored.edges, stored.ports, totals, stored.output_dtype)


def _module(block: str, module: str) -> str:
    """The module path of a kernel; the embedding, the head and the optimizer name themselves."""
    return module if module.partition(".")[0] == block else f"{block}.{module}"
