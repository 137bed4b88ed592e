"""``python -m dataset_builder.tracing.regenerate [JOB.yaml | CORPUS ...]``: traces the shipped templates anew.

The structures are those of the shipped model presets under every precision and the usual layouts, and of the jobs
given: job files, and directories that ``dataset_builder.build`` wrote, with the jobs of all their runs. The shipped
files hold those of ``conf/job/*.yaml`` and of the corpus of the shipped tables. A job whose structure is not among them
is traced when it is first asked for.
"""

from __future__ import annotations

import sys

from dataset_builder.command_line import CommandParser


def _parser() -> CommandParser:
    parser = CommandParser(
        "dataset_builder.tracing.regenerate",
        "Traces the shipped templates anew, with those of the jobs given.",
        ["conf/job/*.yaml build/corpus"],
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB.yaml|CORPUS", help="job files, and folders of built corpora")
    return parser


if __name__ == "__main__" and {"-h", "--help", "--version"} & set(sys.argv[1:]):
    _parser().parse_args()  # answers and ends, before what takes seconds to import

import json
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


_MIXTURES = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2", "deepseek-v3")


def usual_jobs() -> Iterator[dict[str, Any]]:
    """Job files (as values) whose structures are shipped."""
    models = [(model, tuple(PRECISION_PRESETS)) for model in _EVERY_PRECISION]
    models += [(model, _USUAL_PRECISIONS) for model in _MODELS]
    for model, precisions in models:
        for precision, framework in product(precisions, _FRAMEWORKS):
            is_usual = framework == "megatron-core" and precision in ("bf16_mixed", "fp8_mixed")
            layouts = _LAYOUTS if framework == "megatron-core" else _LAYOUTS[:1]
            for layout, recompute in product(layouts, _RECOMPUTE if is_usual else _RECOMPUTE[:1]):
                yield _job(model, precision, {**layout, "recompute": recompute}, {"framework": framework})
    for model, layout, precision in product(_MIXTURES, _LAYOUTS, ("bf16_mixed", "fp8_mixed", "mxfp8")):
        yield _job(model, precision, {**layout, "expert": 4}, {"framework": "megatron-core"})
    for layout, precision in product(_LAYOUTS, ("bf16_mixed", "fp8_mixed", "mxfp8")):
        yield _job("deepseek-v3", precision, layout, {"framework": "megatron-core"}, {"mtp_layers": 1})
    for model, precision, framework in product(("gpt3-175b", "llama3-8b"), _USUAL_PRECISIONS, _FRAMEWORKS):
        yield _job(model, precision, {"context": 2, "tensor": 2}, {"framework": framework})
        # one microbatch a step: no gradients to add to
        yield {**_job(model, precision, {}, {"framework": framework}), "batch": {**_BATCH, "global_batch_size": 8}}
        yield _job(model, precision, {}, {"framework": framework, "fused_kernels": False})
    for model, precision in product(("gpt3-175b", "bert-large"), ("fp32", "tf32", "fp16_mixed", "bf16_mixed")):
        for framework, fused in product(_FRAMEWORKS, (True, False)):
            software = {"framework": framework, "fused_kernels": fused, "attention": "unfused"}
            yield _job(model, precision, {}, software)
    for optimizer, precision, framework in product(_OPTIMIZERS, _USUAL_PRECISIONS[:2], _FRAMEWORKS):
        yield {**_job("gpt3-175b", precision, {}, {"framework": framework}), "optimizer": optimizer}

    for head, precision, framework in product(_HEADS, _USUAL_PRECISIONS[:2], _FRAMEWORKS):
        yield _job("bert-large", precision, {}, {"framework": framework}, head)
    for model, targets, precision in product(("llama2-70b", "llama3-8b"), _ADAPTED, ("bf16_mixed", "fp8_mixed")):
        for framework, layout in (*product(_FRAMEWORKS[:1], _LAYOUTS), ("pytorch", _LAYOUTS[0])):
            yield _job(model, precision, layout, {"framework": framework}, {"lora": {"targets": targets}})


_HEADS: tuple[dict[str, Any], ...] = ({"masked_fraction": 0.15625}, {"head": "classification"})
_ADAPTED = ("attention", "attention_and_mlp")
_OPTIMIZERS = ("adam", "adamw", "sgd", "lion", "adafactor", "muon", "lamb")
_BATCH = {"seq_length": 512, "micro_batch_size": 1, "global_batch_size": 64}


def _job(
    model: str,
    precision: str,
    parallel: dict[str, Any],
    software: dict[str, Any],
    overrides: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "model": {"preset": model, "overrides": overrides or {}},
        "batch": _BATCH,
        "cluster": {"gpu": "B200-SXM6-180GB", "num_nodes": 1, "gpus_per_node": 8},
        "precision": precision,
        "parallel": parallel,
        "software": software,
    }


def corpus_jobs(folder: Path) -> Iterator[TrainingJob]:
    """The distinct jobs of a built corpus, as its runs table holds them."""
    import pyarrow.parquet as pq  # nothing else here reads tables

    for text in dict.fromkeys(pq.read_table(folder / "runs.parquet", columns=["job"])["job"].to_pylist()):
        yield TrainingJob.model_validate(json.loads(text))


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the files into the package; prints how many templates there are."""
    options = _parser().read(arguments)
    structures: set[BlockStructure] = set()
    for values in usual_jobs():
        try:
            structures |= set(job_structures(TrainingJob.parse(values)))
        except JobError as error:  # a preset that this layout does not divide, or that was renamed
            sys.stderr.write(f"left out: {values['model']['preset']} {values['parallel']}: {error}\n")
    for path in options.jobs:
        jobs = corpus_jobs(Path(path)) if Path(path).is_dir() else [TrainingJob.from_yaml(path)]
        for job in jobs:
            structures |= set(job_structures(job))
    count = write_archive(structures, Path(__file__).resolve().parent)
    sys.stdout.write(f"{count} templates\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
