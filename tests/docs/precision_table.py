"""The generated tables of docs/guides/precision.md: what one transformer block really runs under every preset.

``python -m tests.docs.precision_table`` writes them anew; a test holds them up to date.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dataset_builder.job.precision import PRECISION_PRESETS
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.graph import OpNode
from dataset_builder.tracing.trace import build_graph

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "precision.md"
_MODEL = {
    "num_layers": 2, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_query_groups": 8,
    "vocab_size": 32000, "activation": "swiglu", "normalization": "rmsnorm", "bias": False, "tie_embeddings": False,
    "position_embedding": "rope",
}  # fmt: skip
_JOB: dict[str, Any] = {
    "model": _MODEL,
    "batch": {"seq_length": 2560, "micro_batch_size": 1, "global_batch_size": 32},
    "cluster": {"gpu": "B200-SXM6-180GB", "num_nodes": 1, "gpus_per_node": 8},
}
# The two ways in which stacks run mixed precision; everything else of the job is equal.
STACKS: dict[str, dict[str, Any]] = {
    "stored": {
        "software": {"framework": "megatron-core", "fused_kernels": True, "attention": "flash"},
        "parallel": {"sharding": "zero1"},
    },
    "autocast": {
        "software": {"framework": "torchtitan", "fused_kernels": False, "attention": "flash"},
        "parallel": {"sharding": "zero3"},
    },
}
_FP8_MESSAGES: dict[str, Any] = {"preset": "fp8_tensorwise", "param_gather": "fp8"}


def nodes(precision: Any, stack: str) -> tuple[OpNode, ...]:
    """The training graph's nodes under one precision."""
    return build_graph(TrainingJob.parse({**_JOB, **STACKS[stack], "precision": precision})).nodes


def _of_block(every: Iterable[OpNode], *kinds: str) -> list[OpNode]:
    return [node for node in every if node.module.startswith("decoder_layer") and node.kind in kinds]


def _counted(chosen: Iterable[OpNode], text: Callable[[OpNode], str]) -> str:
    """``7 bf16 -> fp32, 1 fp32 -> bf16``: how often each text occurs; a dash for none."""
    counts = Counter(map(text, chosen))
    return "<br>".join(f"{count} {name}" for name, count in counts.items()) or "-"


def _formats(node: OpNode) -> str:
    return f"{node.input_dtype} → {node.output_dtype}"


def _quantisation(node: OpNode) -> str:
    """What is quantised, how often its elements are read, and whether a transposed copy is written beside it."""
    elements, what = node.shape[0], node.op.rsplit(".", 1)[1]
    wide = {"bf16": 2, "fp16": 2, "fp32": 4}[node.input_dtype]
    passes = round(node.bytes_read / elements / wide)
    copies = round(node.bytes_written / elements / {"nvfp4": 0.5625, "mxfp8": 1.03125}.get(node.output_dtype, 1.0))
    often = ", once an iteration" if node.per == "iteration" else ""
    return (
        f"{what} → {node.output_dtype} ({'amax, then cast' if passes > 1 else 'one pass'}"
        f"{', transposed copy' if copies > 1 else ''}{often})"
    )


def _products(every: Iterable[OpNode], phase: str) -> str:
    return _counted((node for node in _of_block(every, "gemm") if node.phase == phase), _formats)


def _casts(every: Iterable[OpNode], phase: str) -> str:
    def text(node: OpNode) -> str:
        size = node.shape[0]
        is_weight = size in _WEIGHT_ELEMENTS
        what = "weight" if is_weight and phase == "forward" else "weight gradient" if is_weight else "activation"
        return f"{what} {_formats(node)}"

    return _counted((node for node in _of_block(every, "cast") if node.phase == phase), text)


_HIDDEN, _FFN, _KEYS = 4096, 14336, 1024
_WEIGHT_ELEMENTS = {_HIDDEN * _HIDDEN, _HIDDEN * _KEYS, _HIDDEN * _FFN}  # differ from those of all activations


def _optimizer(every: Iterable[OpNode]) -> str:
    parts = []
    for node in every:
        if node.phase != "optimizer" or not node.module.startswith("optimizer."):
            continue
        step = node.module.removeprefix("optimizer.")
        named = {
            "gradient_copy": f"gradients {_formats(node)}", "unscale": f"unscale and inf check in {node.input_dtype}",
            "update": f"update in {node.output_dtype}", "weight_copy": f"weights {_formats(node)}",
        }  # fmt: skip
        parts += [named[step]] if step in named and named[step] not in parts else []
    return "<br>".join(parts)


def _message(every: Sequence[OpNode], kinds: tuple[str, ...]) -> str:
    found = {node.input_dtype for node in every if node.axis == "data" and node.kind in kinds}
    return ", ".join(sorted(found)) or "-"


def _row(name: str, every: Sequence[OpNode]) -> list[str]:
    attention = {_formats(node) for node in _of_block(every, "attention")}
    return [
        name,
        _products(every, "forward"),
        _products(every, "backward"),
        _counted(_of_block(every, "quantize"), _quantisation),
        _casts(every, "forward"),
        _casts(every, "backward"),
        ", ".join(sorted(attention)),
        _optimizer(every),
        _message(every, ("reduce_scatter", "all_reduce")),
        _message(every, ("all_gather",)),
    ]


_HEAD = (
    "precision", "products, forward", "products, backward", "quantise", "casts, forward", "casts, backward",
    "attention", "optimizer step", "gradients sent in", "parameters gathered in",
)  # fmt: skip


def table(stack: str) -> str:
    """One row a preset, in Markdown."""
    rows = [_row(f"`{preset}`", nodes(preset, stack)) for preset in PRECISION_PRESETS]
    if stack == "autocast":
        rows.append(_row("`fp8_tensorwise` with `param_gather: fp8`", nodes(_FP8_MESSAGES, stack)))
    lines = [_HEAD, ["---"] * len(_HEAD), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_tables(text: str) -> str:
    """``text`` with the table of each stack between its marks."""
    for stack in STACKS:
        begin, end = f"<!-- {stack} -->", f"<!-- /{stack} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table(stack)}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
