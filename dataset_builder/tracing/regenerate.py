"""``python -m dataset_builder.tracing.regenerate [JOB.yaml ...]``: traces the shipped templates anew.

The structures are those of the shipped model presets under every precision and the usual layouts, and of the jobs
given. A job whose structure is not among them is traced when it is first asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from dataset_builder.job.errors import JobError
from dataset_builder.job.precision import PRECISION_PRESETS
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.job_blocks import job_structures
from dataset_builder.tracing.structure import BlockStructure
from dataset_builder.tracing.templates import write_archive

# One model per structure (presets that differ in size share their templates), the first under every precision.
_EVERY_PRECISION = ("gpt3-175b", "llama3-8b")
_MODELS = (
    "gpt2-small", "mixtral-8x7b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v2", "deepseek-v3",
    "gemma2-9b", "gemma3-12b", "bert-large", "t5-large", "mpt-7b", "olmo-7b", "olmo2-7b", "falcon-40b",
)  # fmt: skip
_USUAL_PRECISIONS = ("fp32", "bf16_mixed", "fp8_mixed")
_LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"tensor": 2, "sequence_parallel": True},
    {"tensor": 2, "sequence_parallel": False},
)
_FRAMEWORKS = ("megatron-core", "pytorch")
_RECOMPUTE = ("none", "selective", "full")


def usual_jobs() -> Iterator[dict[str, Any]]:
    """Job files (as values) whose structures are shipped."""
    models = [(model, tuple(PRECISION_PRESETS)) for model in _EVERY_PRECISION]
    models += [(model, _USUAL_PRECISIONS) for model in _MODELS]
    for model, precisions in models:
        for precision, framework in product(precisions, _FRAMEWORKS):
            is_usual = framework == "megatron-core" and precision in ("bf16_mixed", "fp8_mixed")
            layouts = _LAYOUTS if framework == "megatron-core" else _LAYOUTS[:1]
            for layout, recompute in product(layouts, _RECOMPUTE if is_usual else _RECOMPUTE[:1]):
                yield {
                    "model": {"preset": model},
                    "batch": {"seq_length": 512, "micro_batch_size": 1, "global_batch_size": 64},
                    "cluster": {"gpu": "B200-SXM6-180GB", "num_nodes": 1, "gpus_per_node": 8},
                    "precision": precision,
                    "parallel": {**layout, "recompute": recompute},
                    "software": {"framework": framework},
                }


def main(arguments: Sequence[str]) -> int:
    """Writes the files into the package; prints how many templates there are."""
    structures: set[BlockStructure] = set()
    for values in usual_jobs():
        try:
            structures |= set(job_structures(TrainingJob.parse(values)))
        except JobError as error:  # a preset that this layout does not divide, or that was renamed
            sys.stderr.write(f"left out: {values['model']['preset']} {values['parallel']}: {error}\n")
    for path in arguments:
        structures |= set(job_structures(TrainingJob.from_yaml(path)))
    count = write_archive(structures, Path(__file__).resolve().parent)
    sys.stdout.write(f"{count} templates\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
