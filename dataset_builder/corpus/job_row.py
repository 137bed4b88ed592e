"""A row of a runs table as it is read for a job: its columns, its values, what its framework and architecture imply.

In: a mapping of :data:`JOB_COLUMNS` (never a column that was derived from the measured time). Out: :class:`JobRow`.
What a source does not state is filled with the default of the framework it ran (:data:`FRAMEWORKS`), so that a blank
means the same in every row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dataset_builder.corpus.spellings import architecture_name, cell_text, shipped_model, size_columns
from dataset_builder.job.hardware import DeviceSpec, cell_device

REQUIRED_COLUMNS = ("gpu", "num_gpus", "layers", "hidden", "heads", "vocab", "seq_len", "global_batch")
"""Without these there is no job; a shipped ``model_name`` stands for the sizes."""
SIZE_COLUMNS = ("layers", "hidden", "heads", "vocab")
OPTIONAL_COLUMNS = (
    "precision", "source_id", "source_date", "framework", "gpus_per_node", "intra_node", "inter_node", "model_name",
    "arch",
    "ffn_hidden", "kv_heads", "head_dim", "num_experts", "top_k", "gated_mlp", "tied_embeddings", "tp", "pp", "dp",
    "cp", "ep", "vpp", "sequence_parallel", "sharding", "micro_batch", "grad_accum", "precision_detail", "act_ckpt",
    "attention", "compile", "optimizer", "notes",
)  # fmt: skip
JOB_COLUMNS = REQUIRED_COLUMNS + OPTIONAL_COLUMNS
"""The only columns a job is built from; the label and everything computed from it stay outside."""


class RowError(ValueError):
    """A row that describes no job; the message says which field is missing or cannot be used."""


@dataclass(frozen=True)
class FrameworkDefaults:
    """What a framework does where a source does not say; ``None`` stays unknown."""

    sixteen_bit_params: bool
    sequence_parallel: bool
    sharding: str
    fused_kernels: bool
    dropout: float
    attention: str | None = None  # assumed where a row leaves it blank
    recompute: str = "none"
    overlap: bool = True
    micro_batch: str = "one"  # one | unaccumulated


FRAMEWORKS: dict[str, FrameworkDefaults] = {
    # megatron-lm: plain command line defaults (arguments.py): no overlap, no distributed optimizer, dropout 0.1;
    # tuned rows (JobRow.is_tuned) overlap and use sequence parallel
    "megatron-lm": FrameworkDefaults(True, False, "none", True, 0.1, overlap=False),
    "megatron-deepspeed": FrameworkDefaults(True, False, "none", True, 0.1, "unfused", overlap=False),
    # NeMo and Megatron Bridge recipes: distributed optimizer with overlap, sequence parallel with tensor parallel
    "nemo": FrameworkDefaults(True, True, "zero1", True, 0.0, "flash"),
    "megatron-bridge": FrameworkDefaults(True, True, "zero1", True, 0.0, "flash"),
    "internevo": FrameworkDefaults(True, False, "zero1", True, 0.0, "flash"),
    "deepspeed": FrameworkDefaults(True, False, "none", True, 0.1, "unfused"),
    "llm-foundry": FrameworkDefaults(False, False, "zero3", False, 0.0, "flash"),
    "pytorch": FrameworkDefaults(False, False, "none", False, 0.1, "unfused", micro_batch="unaccumulated"),
    "tensorflow": FrameworkDefaults(False, False, "none", False, 0.1, "unfused", micro_batch="unaccumulated"),
    "paddle": FrameworkDefaults(False, False, "none", False, 0.1, "unfused", micro_batch="unaccumulated"),
    "jax": FrameworkDefaults(False, False, "none", True, 0.0, micro_batch="unaccumulated"),
    # submissions tuned by hand: fused kernels throughout, no accumulation
    "mlperf": FrameworkDefaults(True, True, "none", True, 0.1, "flash", micro_batch="unaccumulated"),
}
_FRAMEWORK_WORDS = (
    ("megatron-bridge", "megatron-bridge"), ("megatron-deepspeed", "megatron-deepspeed"), ("megatron", "megatron-lm"),
    ("nemo", "nemo"), ("llm-foundry", "llm-foundry"), ("internevo", "internevo"), ("tensorflow", "tensorflow"),
    ("jax", "jax"), ("paddle", "paddle"), ("deepspeed", "deepspeed"), ("torch", "pytorch"),
)  # fmt: skip


@dataclass(frozen=True)
class ArchitectureDefaults:
    """What an architecture's name says about the model's operators."""

    architecture: str
    position: str
    normalization: str
    bias: bool


ARCHITECTURES: dict[str, ArchitectureDefaults] = {
    "gpt": ArchitectureDefaults("decoder", "learned", "layernorm", True),
    "llama": ArchitectureDefaults("decoder", "rope", "rmsnorm", False),
    "mpt": ArchitectureDefaults("decoder", "alibi", "layernorm", False),
    "moe": ArchitectureDefaults("decoder", "rope", "rmsnorm", False),
    "transformer-xl": ArchitectureDefaults("decoder", "relative", "layernorm", True),
    "bert": ArchitectureDefaults("encoder", "learned", "layernorm", True),
    "electra": ArchitectureDefaults("encoder", "learned", "layernorm", True),
    "t5": ArchitectureDefaults("encoder_decoder", "relative", "rmsnorm", False),
    "bart": ArchitectureDefaults("encoder_decoder", "learned", "layernorm", True),
    "transformer-encdec": ArchitectureDefaults("encoder_decoder", "learned", "layernorm", True),
    "hybrid-mamba": ArchitectureDefaults("decoder", "none", "rmsnorm", False),
    "hybrid-mamba-moe": ArchitectureDefaults("decoder", "none", "rmsnorm", False),
}


@dataclass
class JobRow:
    """A row being read: its values, the flags of its notes, and the assumptions made so far."""

    values: Mapping[str, Any]
    assumed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.notes = self.text("notes") or ""
        self.flags = {key: value.strip() for key, value in re.findall(r"(\w+)=([^;]*)", self.notes)}
        self.detail = self.text("precision_detail") or ""
        self.detail_flags = dict(re.findall(r"(\w+)=([^,\s]*)", self.detail))
        self.framework = canonical_framework(self.text("framework"), self.text("source_id"))
        self.defaults = FRAMEWORKS[self.framework or "pytorch"]
        self.date = (self.text("source_date") or "")[:7]
        self.shipped = shipped_model(self.values) or {}
        self._fill_shipped_sizes()
        self.arch = self._architecture()
        self.model_name = self.text("model_name") or self.arch

    def _fill_shipped_sizes(self) -> None:
        columns = size_columns(self.shipped) if self.shipped else {}
        blank = {column: value for column, value in columns.items() if self.text(column) is None}
        if any(column in (*SIZE_COLUMNS, "ffn_hidden", "kv_heads", "num_experts") for column in blank):
            self.values = {**self.values, **blank}
            self.assume(f"model: {', '.join(blank)} not stated, those of {self.shipped['name']} taken")
        else:
            self.shipped = {}

    def _architecture(self) -> str:
        stated = (self.text("arch") or "").lower()
        if stated in ARCHITECTURES:
            return stated
        guessed = "moe" if self.count("num_experts") else "llama" if self.flag("gated_mlp") else "gpt"
        name = architecture_name(stated) or architecture_name(self.text("model_name") or "") or guessed
        if stated:
            self.assume(f"arch: {stated!r} is none of the table's, {name} taken")
        return name

    @property
    def is_tuned(self) -> bool:
        """Whether the row comes from those who tune the framework; tests of Megatron-LM say what they set."""
        if self.text("source_id") == "megatron-golden":
            return False
        recent = self.framework == "megatron-lm" and self.date[:4] >= "2023"
        return recent or self.framework in ("nemo", "megatron-bridge", "mlperf")

    @property
    def is_mlperf_bert(self) -> bool:
        """Whether the row is one of MLPerf's BERT submissions, which all run NVIDIA's code."""
        return self.text("source_id") == "mlperf" and self.arch == "bert"

    @property
    def is_frozen(self) -> bool:
        """Whether the row fine-tunes adapters on frozen weights."""
        return "lora" in f"{self.notes} {self.model_name}".lower()

    def text(self, column: str) -> str | None:
        return cell_text(self.values.get(column), column)

    def number(self, column: str) -> float | None:
        text = self.text(column)
        if text is None:
            return None
        try:
            value = float({"true": "1", "false": "0"}.get(text.lower(), text.replace(",", "")))
        except ValueError:
            raise RowError(f"{column}: {text!r} is not a number") from None
        return value if math.isfinite(value) else None

    def count(self, column: str) -> int | None:
        value = self.number(column)
        if value is None:
            return None
        if value != int(value) or value < 0:
            raise RowError(f"{column}: {value:g} is not a whole number")
        return int(value)

    def need(self, column: str) -> int:
        value = self.count(column)
        if not value:
            raise RowError(f"{column} is missing")
        return value

    def flag(self, column: str) -> bool | None:
        value = self.number(column)
        return None if value is None else bool(value)

    def note_count(self, key: str) -> int | None:
        """A whole number among the notes' flags, such as ``moe_layers=12``."""
        text = self.flags.get(key, "")
        return int(text) if text.isdigit() else None

    def assume(self, sentence: str) -> None:
        self.assumed.append(sentence)


def canonical_framework(name: str | None, source_id: str | None = None) -> str | None:
    """One of :data:`FRAMEWORKS` for the name a source gives; ``None`` if it names none that is known."""
    lowered = (name or "").lower()
    for word, canonical in _FRAMEWORK_WORDS[:4] if source_id == "mlperf" else _FRAMEWORK_WORDS:
        if word in lowered:
            return canonical
    return "mlperf" if source_id == "mlperf" else None


def row_device(row: JobRow) -> DeviceSpec:
    gpu = row.text("gpu") or ""
    try:
        return cell_device(gpu)
    except KeyError as error:
        if gpu.startswith("{"):
            raise RowError(f"gpu: the specification cannot be used: {error.args[0]}") from None
        near = f"; the nearest are {error.args[0]}" if error.args[0] else ""
        raise RowError(f"gpu: {gpu!r} is not in the device catalogue{near}") from None
