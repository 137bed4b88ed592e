# PYTHON_ARGCOMPLETE_OK
"""``python -m dataset_builder.trace JOB.yaml --output GRAPH.json``: the annotated training graph, one per stage.

A summary goes to stdout, everything else to stderr. Exit codes: 0 ok, 2 bad usage or invalid job (file, key path,
reason), 4 the job cannot run on its cluster (with the arithmetic).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataset_builder.command_line import CommandParser
from dataset_builder.job.errors import JobError

if TYPE_CHECKING:
    from dataset_builder.job.schema import TrainingJob
    from dataset_builder.tracing.graph import TrainingGraph

SCHEMA_VERSION = 1


def graph_to_dict(job: TrainingJob, graph: TrainingGraph) -> dict[str, Any]:
    """The graph as plain values: per stage the nodes it runs, renumbered, and the edges between them."""
    return {
        "schema_version": SCHEMA_VERSION,
        "tracer_version": graph.tracer_version,
        "fingerprint": graph.fingerprint,
        "job": job.resolved().model_dump(mode="json"),
        "num_microbatches": graph.num_microbatches,
        "stages": [_stage(graph, stage) for stage in range(len(graph.stages))],
    }


def _stage(graph: TrainingGraph, stage: int) -> dict[str, Any]:
    repeats = graph.repeats[stage]
    number = {int(index): position for position, index in enumerate(repeats.nonzero()[0])}
    nodes = [
        {"id": position, **dataclasses.asdict(graph.nodes[index]), "repeats": float(repeats[index])}
        for index, position in number.items()
    ]
    edges = [
        {"source": number[edge.source], "target": number[edge.target], "kind": edge.kind}
        for edge in graph.edges
        if edge.source in number and edge.target in number
    ]
    return {**dataclasses.asdict(graph.stages[stage]), "nodes": nodes, "edges": edges}


def graph_schema() -> dict[str, Any]:
    """The JSON schema that every written graph satisfies."""
    text = resources.files("dataset_builder.tracing").joinpath("graph.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def write_graph(data: dict[str, Any], path: Path) -> None:
    """Validates and writes the file, whole or not at all."""
    import jsonschema

    plain = json.loads(json.dumps(data, allow_nan=False))
    jsonschema.validate(plain, graph_schema())
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _summary(graph: TrainingGraph) -> str:
    lines = [f"{len(graph.nodes)} distinct nodes, {len(graph.edges)} edges, {graph.num_microbatches} microbatches"]
    for facts in graph.stages:
        repeats = graph.repeats[facts.stage]
        every = zip(graph.nodes, repeats, strict=True)
        flops = sum(node.flops * count for node, count in every if node.per == "microbatch")
        lines.append(
            f"stage {facts.stage}: {len(facts.layers)} layers, {facts.num_parameters:,} parameters a rank, "
            f"{int((repeats > 0).sum())} nodes, {flops:.4g} FLOP a microbatch"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        "dataset_builder.trace",
        "Writes the annotated training graph of a job, one per pipeline stage.",
        ["job.yaml --output graph.json", "- --output graph.json < job.yaml"],
    )
    parser.add_argument("job", metavar="JOB.yaml", help="job file, or - for standard input")
    parser.add_argument("--output", required=True, type=Path, metavar="GRAPH.json")
    options = parser.read(arguments)
    source = "standard input" if options.job == "-" else options.job
    try:
        from dataset_builder.job.schema import TrainingJob

        job = TrainingJob.from_yaml(options.job)
        from dataset_builder.tracing.trace import build_graph

        graph = build_graph(job)
        write_graph(graph_to_dict(job, graph), options.output)
    except JobError as error:
        sys.stderr.write("".join(f"{source}: {reason}\n" for reason in error.reasons))
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"{options.output}: {error.strerror or error}\n")  # a job's own file is a JobError
        return 2
    sys.stdout.write(_summary(graph) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
