"""``torchrun ... -m dataset_builder.benchmark [JOB ...] --output DIR``: measures on the devices at hand.

Writes ``DIR/cluster.json`` (the device and its link as a job's ``cluster``), ``DIR/ops.csv`` and ``DIR/runs.csv`` (rows
of the shared schema); with ``--profile`` also ``DIR/nodes.csv``, the seconds of every node of the jobs' traced graphs.
Needs torch and numpy; a JOB that is a ``.yaml`` needs this package's other dependencies, so on a bare machine give it
the plans that ``--plan FILE.json`` writes elsewhere. What is in the tables already is not measured again. NCCL on GPUs,
gloo on CPUs. Exit codes: 0 ok, 2 bad usage or an invalid job, 4 the job cannot run here.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dataset_builder.command_line import CommandParser
from dataset_builder.job.errors import JobError

_PARTS = ("cluster", "operators", "collectives", "steps")
_PRECISIONS = "fp32,bf16_mixed,bf16"
_QUICK_S = {"operators": 240.0, "collectives": 30.0, "steps": 180.0}
_PEAK_SAMPLES_S = 1.0  # a peak is the fastest of many samples, and no job may be faster
_ELEMENTS = (2**10, 2**14, 2**18, 2**20, 2**22, 2**24)
_SIZES = {
    "cpu": ((256, 256), (512, 512), (512, 1024), (1024, 512)),
    "cuda": ((4096, 4096), (2048, 1024), (8192, 8192), (16384, 2048)),
}


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        "dataset_builder.benchmark",
        "Measures operators, collectives and training steps on the devices at hand.",
        ["--output measured --quick", "job.yaml --output measured --only steps --precision fp32,bf16_mixed"],
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="job files, or plans (.json), whose steps are measured")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where cluster.json, ops.csv and runs.csv go")
    parser.add_argument("--only", default="", help=f"parts to measure; default: all, {','.join(_PARTS)}")
    parser.add_argument(
        "--precision",
        default=_PRECISIONS,
        help="presets, measured side by side (jobs, not plans); default: %(default)s",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes a key of every job")
    parser.add_argument(
        "--budget-s", type=float, default=600.0, help="seconds each part may take; default: %(default)g"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="steps timed of each job and precision, or more; default: %(default)s"
    )
    parser.add_argument(
        "--most-uncertainty", type=float, default=0.05, help="no row whose median is known worse; default: %(default)g"
    )
    parser.add_argument(
        "--gpu", default="", help="the device as ops.csv names it; default: cluster.json, or torch's name"
    )
    parser.add_argument("--quick", action="store_true", help="everything in under 10 minutes on one GPU")
    parser.add_argument("--plan", type=Path, metavar="FILE.json", help="writes the jobs' plans and measures nothing")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="a few further steps of every job under torch.profiler: nodes.csv, the seconds of each node of its graph",
    )
    options = parser.read(arguments)
    if (options.output is None) == (options.plan is None):
        parser.error("expected one of --output and --plan")
    if options.profile and options.only and "steps" not in _listed(options.only):
        parser.error("--profile: profiles the jobs' steps, which --only leaves out")
    if options.profile and not options.jobs:
        parser.error("--profile: expected a JOB, whose graph's nodes are labelled")
    if unknown := [part for part in _listed(options.only) if part not in _PARTS]:
        parser.error(f"--only: got {','.join(unknown)}; expected {','.join(_PARTS)}")
    return options


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def plans_of(options: argparse.Namespace, cluster: dict[str, Any] | None) -> list[list[Any]]:
    """For each job its plans, one a precision; a file of plans is measured as it is."""
    from dataset_builder.measuring.plan import read_plans

    overrides: dict[str, Any] = {"cluster": cluster} if cluster else {}
    for setting in options.set:
        key, separator, value = setting.partition("=")
        if not separator:
            raise JobError([f"--set {setting}: expected KEY=VALUE"], "benchmark")
        overrides[key] = value
    groups = []
    for name in options.jobs:
        if name.endswith(".json"):
            groups.append(read_plans(Path(name)))
            continue
        try:
            from dataset_builder.measuring.job_plan import graph_of_file, plan_of_file
        except ModuleNotFoundError as error:
            hint = f"needs {error.name}; write its plan elsewhere with --plan FILE.json and measure that"
            raise JobError([hint], name) from None
        every = [{**overrides, "precision": each} for each in _listed(options.precision)]
        plans = [plan_of_file(name, each) for each in every]
        graphs = [graph_of_file(name, each) if options.profile else None for each in every]
        groups.append([replace(plan, graph=graph) for plan, graph in zip(plans, graphs, strict=True)])
    return groups


def check_graphs(groups: Sequence[Sequence[Any]]) -> None:
    """Raises JobError unless every plan holds the graph whose nodes are to be labelled."""
    without = dict.fromkeys(plan.name for group in groups for plan in group if plan.graph is None)
    if without:
        hint = "--profile: the plan holds no graph; give the job file, or a plan that was written with --plan --profile"
        raise JobError([hint], ", ".join(without))


@dataclass(frozen=True)
class _Places:
    """Files of an output directory."""

    output: Path

    @property
    def cluster(self) -> Path:
        return self.output / "cluster.json"

    @property
    def ops(self) -> Path:
        return self.output / "ops.csv"

    @property
    def runs(self) -> Path:
        return self.output / "runs.csv"

    @property
    def nodes(self) -> Path:
        return self.output / "nodes.csv"


def _measure(options: argparse.Namespace) -> None:
    from dataset_builder.measuring import cluster as clusters
    from dataset_builder.measuring import collectives, op_rows, operators, profile, steps, table
    from dataset_builder.measuring.machine import cell
    from dataset_builder.measuring.plan import quick_plans
    from dataset_builder.measuring.world import join, leave

    world = join()
    try:
        machine, places = world.machine, _Places(options.output)
        parts = _listed(options.only) or [part for part in _PARTS[1:] if part != "collectives" or world.size > 1]
        options.output.mkdir(parents=True, exist_ok=True)
        sample_budget_s = 0.1 if options.quick else 0.2
        budget = {part: _QUICK_S[part] if options.quick else options.budget_s for part in _QUICK_S}
        needs_cluster = not machine.is_gpu and not (options.gpu or options.plan)
        if "cluster" in parts or (needs_cluster and not world.agreed(float(places.cluster.exists()))):
            measured = clusters.measured_cluster(world, _PEAK_SAMPLES_S)
            if world.is_first:
                clusters.write_cluster(measured, places.cluster)
            world.wait()
        cluster = clusters.read_cluster(places.cluster) if places.cluster.exists() else None
        gpu = options.gpu or cell(cluster["gpu"] if cluster else machine.name)
        link = cell(cluster["intra_node"]) if cluster and "intra_node" in cluster else ""
        limits = op_rows.OpSettings(budget["operators"], sample_budget_s, options.most_uncertainty, gpu, link)

        def opened(path: Path, columns: tuple[str, ...]) -> table.MeasurementTable | None:
            return table.MeasurementTable(path, columns) if world.is_first else None

        if "operators" in parts:
            cases = operators.cases(machine, machine.formats, _SIZES[machine.device.type])
            op_rows.measure_operators(cases, world, opened(places.ops, table.OP_COLUMNS), limits)
        if "collectives" in parts:
            every = collectives.messages(machine.formats, _ELEMENTS, world.size)
            op_rows.measure_collectives(every, world, opened(places.ops, table.OP_COLUMNS), limits)
        groups = plans_of(options, cluster) if "steps" in parts else []
        if options.quick and not options.jobs and machine.is_gpu:
            groups = [quick_plans(gpu, machine.formats)]
        if options.profile:
            check_graphs(groups)
        if groups:
            runs = opened(places.runs, table.RUN_COLUMNS)
            settings = steps.StepSettings(options.rounds, budget["steps"] / len(groups), options.most_uncertainty)
            for group in groups:
                steps.measure_steps(group, world, runs, settings)
                if options.profile:
                    profile.label_nodes(group, world, runs, opened(places.nodes, table.NODE_COLUMNS))
    finally:
        leave()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _arguments(arguments)
    warnings.simplefilter("ignore", FutureWarning)  # names that older torch versions need are deprecated in the newest
    try:
        if options.plan:
            from dataset_builder.measuring.plan import write_plans

            write_plans([plan for group in plans_of(options, None) for plan in group], options.plan)
        else:
            _measure(options)
    except JobError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except ValueError as error:
        if type(error).__name__ != "TableError":
            raise
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
