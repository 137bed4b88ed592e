"""How fast layouts are searched: a 405B model on 1,024 GPUs, against ``import torch``, and as jobs grow tenfold.

Prints processor seconds beside wall seconds: on a busy machine only the former say what the work costs.

    python benchmarks/plan_speed.py [--gpu H100-SXM5-80GB] [--workers 2]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import resource
import subprocess
import sys
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))
_JOB = """
name: llama3.1-405b
model: {preset: llama3.1-405b}
batch: {seq_length: 8192, micro_batch_size: 1, global_batch_size: 1024}
precision: bf16_mixed
parallel: {tensor: 8, pipeline: 16, virtual_pipeline: 4, sequence_parallel: true, sharding: zero1}
cluster: {gpu: %s, num_nodes: 128, gpus_per_node: 8}
software: {framework: megatron-bridge}
"""
_GROWN = {
    "as it is": {},
    "10x layers": {"model.num_layers": "1280"},
    "10x GPUs": {"cluster.num_nodes": "1280", "batch.global_batch_size": "10240"},
    "10x microbatches": {"batch.global_batch_size": "10240"},
}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="B200-SXM6-180GB", help="one with much memory leaves more layouts to predict")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    reference = min(_import_torch_s() for _ in range(3))
    print(f"import torch: {reference:.2f} s")
    import torch

    torch.set_num_threads(1)
    for name, settings in _GROWN.items():
        seconds = _new_layout_s(options.gpu, settings)
        print(
            f"one new layout, {name}: {seconds * 1e3:.2f} ms of processor time "
            f"(import torch / {reference / seconds:,.0f})"
        )
    _search(options.gpu, options.workers, reference)


def _import_torch_s() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - start


def _new_layout_s(gpu: str, settings: dict[str, str]) -> float:
    """Mean processor time of ``predict`` for a layout that was not asked before, of an architecture that was."""
    from dataset_builder.job.document import JobText
    from dataset_builder.job.schema import TrainingJob
    from gnn_predictor import predict

    text = JobText((_JOB % gpu).encode(), "job", Path())
    always = {"model.num_layers": "128", "parallel.virtual_pipeline": "1", "cluster.gpu.hbm_bytes": "1e15"}

    def jobs(pipelines: tuple[int, ...]) -> list[TrainingJob]:
        return [
            TrainingJob.from_yaml(
                text,
                {
                    **always, **settings, "parallel.pipeline": str(pipeline), "parallel.context": str(context),
                    "parallel.recompute": recompute, "parallel.sharding": sharding,
                },
            )
            for pipeline, context, recompute, sharding in itertools.product(
                pipelines, (1, 2), ("selective", "full"), ("none", "zero1", "zero3")
            )
        ]  # fmt: skip

    predict(jobs((2,)))
    new = jobs((4, 8, 16))
    gc.collect()  # what importing and reading left behind is not a layout's
    start = time.process_time()
    predict(new)
    return (time.process_time() - start) / len(new)


def _search(gpu: str, workers: int, reference: float) -> None:
    from dataset_builder.job.document import JobText
    from gnn_predictor.checkpoint import load_checkpoint
    from gnn_predictor.search import search
    from gnn_predictor.search_space import search_spaces

    start, before = time.perf_counter(), _processor_s()
    spaces = search_spaces(JobText((_JOB % gpu).encode(), "job", Path()), {}, {})
    plans = search(spaces, load_checkpoint(), top=10, num_workers=workers)
    wall, busy = time.perf_counter() - start, _processor_s() - before
    print(
        f"search: {plans.num_possible:,} layouts, {plans.num_evaluated:,} predicted; {wall:.1f} s on {workers} "
        f"processes ({wall / reference:.1f}x import torch), {busy:.1f} s of processor time: "
        f"{plans.num_possible / busy:,.0f} layouts a second and core; {_most_memory_gb():.2f} GB in the largest process"
    )


def _processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _most_memory_gb() -> float:
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1e6


if __name__ == "__main__":
    main()
