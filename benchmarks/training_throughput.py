"""What training costs: rows a second on one rank and on two, and the memory that a corpus ten times as large takes.

Throughput: the same few epochs over the same runs, by one process and by two gloo ranks, in turns; each has one thread.
Memory: the peak of a process that loads a corpus and trains an epoch on a part of its runs spread over all of it, with
the corpus as it is and with synthetic copies of it, all graphs in memory and a bounded number of them.

    python benchmarks/training_throughput.py [--corpus build/corpus] [--copies 10] [--only throughput]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--copies", type=int, default=10, help="how many times the corpus the larger one is")
    parser.add_argument("--graphs-held", type=int, default=512, help="the bound")
    parser.add_argument("--runs", type=int, default=480, help="of which throughput is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("throughput", "memory"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.measure:
        found = _MEASUREMENTS[options.measure.partition(":")[0]](options)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found))
        return
    if options.only != "memory":
        _throughput(options)
    if options.only != "throughput":
        _memory(options)


def _throughput(options: argparse.Namespace) -> None:
    found: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for _ in range(options.rounds):
        for ranks, each in found.items():
            each.append(_measured(options, options.corpus, "rate", ranks))
    for key, what in (("rows_per_s", "second"), ("rows_per_busy_s", "second that the first rank computed")):
        one, two = (statistics.median(each[key] for each in found[ranks]) for ranks in found)
        print(f"runs a {what}: {one:.0f} on one rank, {two:.0f} on two, {two / one:.2f} times", flush=True)


def _memory(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        larger = Path(folder) / "corpus"
        _write_copies(options.corpus, larger, options.copies)
        for name, corpus in (("as it is", options.corpus), (f"{options.copies} times as large", larger)):
            for held in (options.graphs_held, 0):
                found = _measured(options, corpus, f"memory:{held}", 1)
                bound = f"at most {held} graphs held" if held else "all graphs in memory"
                print(f"corpus {name}, {bound}: {found['peak_gb']:.2f} GB at most ({found['imports_gb']:.2f} GB of it"
                      f" after the imports), {found['runs']:,} runs loaded in {found['load_s']:.0f} s,"
                      f" {found['rows_per_s']:.0f} runs/s", flush=True)  # fmt: skip


def _measured(options: argparse.Namespace, corpus: Path, what: str, ranks: int) -> dict[str, Any]:
    """What a process of its own, or the first of several ranks, prints."""
    command = [__file__, f"--corpus={corpus}", f"--runs={options.runs}", f"--measure={what}"]
    start = [sys.executable, *command]
    if ranks > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        start = [sys.executable, *launch, *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(start, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    return value


def _rate(options: argparse.Namespace) -> dict[str, Any]:
    from dataset_builder.corpus.build import load_corpus
    from gnn_predictor import ranks
    from gnn_predictor.examples import ExampleLimits, load_examples

    with ranks.joined(), tempfile.TemporaryDirectory() as scratch:
        limits = ExampleLimits(options.runs, max_operators=20000)
        examples = load_examples(load_corpus(options.corpus), limits, Path(scratch))
        return _rates(examples, range(len(examples.runs)), epochs=12)


def _peak(options: argparse.Namespace) -> dict[str, Any]:
    from dataset_builder.corpus.build import load_corpus
    from gnn_predictor.examples import ExampleLimits, load_examples

    held = int(options.measure.partition(":")[2]) or None
    imports_gb = _peak_gb()
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        examples = load_examples(load_corpus(options.corpus), ExampleLimits(None, 120000, held), Path(scratch))
        load_s = time.perf_counter() - start
        rows = range(0, len(examples.runs), max(1, len(examples.runs) // options.runs))
        rates = _rates(examples, rows, epochs=1)
    facts = {"runs": len(examples.runs), "load_s": load_s, "imports_gb": imports_gb}
    return {**facts, **rates, "peak_gb": _peak_gb()}


_MEASUREMENTS = {"rate": _rate, "memory": _peak}


def _rates(examples: Any, rows: range, epochs: int) -> dict[str, float]:
    """Runs a second, and a second of processor time, in the fastest epoch."""
    import numpy as np
    import torch

    from gnn_predictor.fitting import FitSettings, fit
    from gnn_predictor.network import NetworkConfig

    torch.set_num_threads(1)
    seconds: list[float] = []
    busy = [time.process_time()]

    def report(_: int, metrics: dict[str, float]) -> None:
        seconds.append(metrics["epoch_s"])
        busy.append(time.process_time())

    runs = examples.runs.select(np.array(rows))
    config = NetworkConfig.fitting(runs.graphs[0], examples.devices)
    fit(config, FitSettings(epochs=epochs), runs, examples.operators, report=report)
    if not seconds:  # followers report nothing
        return {}
    least_busy = min(after - before for before, after in itertools.pairwise(busy))
    return {"rows_per_s": len(runs) / min(seconds), "rows_per_busy_s": len(runs) / least_busy}


def _write_copies(corpus: Path, target: Path, copies: int) -> None:
    """A corpus of so many copies of each run, graph and operator, under names and numbers of their own."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from dataset_builder.corpus.build import ROW_GROUPS

    target.mkdir(parents=True)
    facts = json.loads((corpus / "corpus.json").read_text(encoding="utf-8"))
    for name, row_group in ROW_GROUPS.items():
        table = pq.read_table(corpus / f"{name}.parquet")
        with pq.ParquetWriter(target / f"{name}.parquet", table.schema, compression="zstd") as writer:
            for copy in range(copies):
                changed = {}
                if "graph" in table.column_names:
                    changed["graph"] = pc.add(table["graph"], pa.scalar(copy * facts["num_graphs"], pa.int32()))
                for key in {"run_id", "op_id"} & set(table.column_names):
                    changed[key] = pc.binary_join_element_wise(table[key], f"copy {copy}", " ")
                part = table
                for key, values in changed.items():
                    part = part.set_column(part.column_names.index(key), key, values)
                writer.write_table(part, row_group)
    grown = {key: facts[key] * copies for key in ("num_runs", "num_graphs", "num_operators")}
    (target / "corpus.json").write_text(json.dumps({**facts, **grown}), encoding="utf-8")


def _peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    main()
