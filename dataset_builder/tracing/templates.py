"""Templates of traced blocks: bound to a job's sizes in microseconds, shipped with the package, traced on a miss.

``templates.json.gz`` holds one gzip member per block structure (so it unpacks to lines of JSON), and
``templates.index.json`` says where each is: loading a template reads that member only. The command
``python -m dataset_builder.tracing.regenerate [JOB.yaml | CORPUS ...]`` makes both anew.
"""

from __future__ import annotations

import functools
import gzip
import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dataset_builder.tracing.structure import BlockStructure
from dataset_builder.tracing.symbols import Monomial, Polynomial

if TYPE_CHECKING:
    from dataset_builder.tracing.kernels import Template

_FILE = "templates.json.gz"  # one gzip member per template; together they are lines of JSON
_INDEX = "templates.index.json"
_TRACING = threading.Lock()  # the autocast rules are set for the whole process while a block is traced
_PORTS = ("input", "output", "output_gradient", "input_gradient", "weight_gradient")


@dataclass(frozen=True, eq=False)
class StoredTemplate:
    """A template as arrays: ``values = bincount(polynomial, coefficient * monomials(sizes)[monomial])``."""

    names: tuple[str, ...]
    exponents: NDArray[np.float64]  # [monomials, names]
    polynomial: NDArray[np.int64]  # [terms]
    monomial: NDArray[np.int64]  # [terms]
    coefficient: NDArray[np.float64]  # [terms]
    num_polynomials: int
    kernels: tuple[dict[str, Any], ...]  # text fields, and the polynomials of shape and work
    edges: tuple[tuple[int, int, str], ...]
    ports: dict[str, tuple[int, ...]]
    output_dtype: str
    totals: dict[str, int]  # name -> polynomial

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """The parallel axes whose groups its messages cross."""
        return tuple(sorted({kernel["axis"] for kernel in self.kernels if kernel["axis"]}))

    def values(self, sizes: Sequence[float]) -> NDArray[np.float64]:
        """The value of every polynomial at a job's sizes, in the order of ``names``."""
        at = np.array(sizes, dtype=np.float64)
        monomials = np.prod(at**self.exponents, axis=1)
        terms = self.coefficient * monomials[self.monomial]
        summed: NDArray[np.float64] = np.bincount(self.polynomial, terms, self.num_polynomials).astype(np.float64)
        return summed


def to_json(template: Template) -> dict[str, Any]:
    """A template as plain values: equal monomials and polynomials are stored once."""
    names: dict[str, int] = {}
    monomials: dict[Monomial, int] = {}
    polynomials: dict[tuple[tuple[int, float], ...], int] = {}

    def number(polynomial: Polynomial) -> int:
        terms = []
        for monomial, coefficient in sorted(polynomial.terms.items()):
            if coefficient:
                for name, _ in monomial:
                    names.setdefault(name, len(names))
                terms.append((monomials.setdefault(monomial, len(monomials)), coefficient))
        return polynomials.setdefault(tuple(terms), len(polynomials))

    kernels = [
        {
            "kind": k.kind, "op": k.op, "module": k.module, "phase": k.phase, "in": k.input_dtype,
            "out": k.output_dtype, "acc": k.accumulate_dtype, "axis": k.axis, "per": k.per, "launches": k.launches,
            "causal": k.is_causal, "shape": [number(p) for p in k.shape],
            "work": [number(p) for p in (k.flops, k.bytes_read, k.bytes_written, k.message_bytes)],
        }
        for k in template.kernels
    ]  # fmt: skip
    totals = {"saved": number(template.saved_bytes), "recompute": number(template.recompute_bytes)}
    totals |= {f"{share}_parameters": number(p) for share, p in template.parameters.items()}
    return {
        "key": template.structure_key,
        "names": list(names),
        "monomials": [list(map(list, monomial)) for monomial in monomials],
        "polynomials": [list(map(list, terms)) for terms in polynomials],
        "kernels": kernels,
        "edges": [list(edge) for edge in template.edges],
        "ports": template.ports,
        "output_dtype": template.output_dtype,
        "totals": totals,
    }


def from_json(data: dict[str, Any]) -> StoredTemplate:
    position = {name: index for index, name in enumerate(data["names"])}
    exponents = np.zeros((len(data["monomials"]), len(position)))
    for row, monomial in enumerate(data["monomials"]):
        for name, exponent in monomial:
            exponents[row, position[name]] = exponent
    terms = [(p, m, c) for p, terms in enumerate(data["polynomials"]) for m, c in terms]
    return StoredTemplate(
        names=tuple(data["names"]),
        exponents=exponents,
        polynomial=np.array([t[0] for t in terms], dtype=np.int64),
        monomial=np.array([t[1] for t in terms], dtype=np.int64),
        coefficient=np.array([t[2] for t in terms], dtype=np.float64),
        num_polynomials=len(data["polynomials"]),
        kernels=tuple(data["kernels"]),
        edges=tuple((source, target, kind) for source, target, kind in data["edges"]),
        ports={name: tuple(data["ports"].get(name, ())) for name in _PORTS},
        output_dtype=data["output_dtype"],
        totals=data["totals"],
    )


def trace_structure(structure: BlockStructure) -> dict[str, Any]:
    """Traces a block at prime sizes; imports torch."""
    from dataset_builder.tracing.block import record_block
    from dataset_builder.tracing.kernels import reduce_recording
    from dataset_builder.tracing.optimizer import record_optimizer
    from dataset_builder.tracing.symbols import factor, traced_sizes

    record = record_optimizer if structure.block == "optimizer" else record_block
    sizes = traced_sizes(structure.kernel == "unfused" and not structure.grouped_queries)
    return to_json(reduce_recording(record(structure, sizes), factor))


@functools.cache
def template(structure: BlockStructure) -> StoredTemplate:
    """The template of a structure: from the shipped file, else traced now (a fraction of a second)."""
    data = _shipped(structure)
    if data is None:
        with _TRACING:
            data = json.loads(json.dumps(trace_structure(structure)))
    return from_json(data)


@functools.cache
def _index() -> dict[str, tuple[int, int]]:
    """Digest of a structure -> offset and length of its member; empty before the file is first made."""
    path = resources.files("dataset_builder.tracing").joinpath(_INDEX)
    return json.loads(path.read_text(encoding="ascii")) if path.is_file() else {}


def _shipped(structure: BlockStructure) -> dict[str, Any] | None:
    if structure.digest not in _index():
        return None
    offset, length = _index()[structure.digest]
    with resources.files("dataset_builder.tracing").joinpath(_FILE).open("rb") as archive:
        archive.seek(offset)
        data: dict[str, Any] = json.loads(gzip.decompress(archive.read(length)))
    return data if data["key"] == structure.key else None


def write_archive(structures: Iterable[BlockStructure], folder: Path) -> int:
    """Traces every structure and writes file and index: byte for byte the same for the same structures and torch."""
    traced = {s.digest: json.dumps(trace_structure(s), separators=(",", ":")) for s in set(structures)}
    index: dict[str, tuple[int, int]] = {}
    parts = []
    offset = 0
    for digest, text in sorted(traced.items()):
        member = gzip.compress(text.encode() + b"\n", compresslevel=9, mtime=0)
        index[digest] = (offset, len(member))
        offset += len(member)
        parts.append(member)
    for name, content in ((_FILE, b"".join(parts)), (_INDEX, json.dumps(index, separators=(",", ":")).encode())):
        partial = folder / f"{name}.partial"
        partial.write_bytes(content)
        partial.replace(folder / name)
    return len(traced)
