"""One row of a runs table as the job it measured: the mapping of ``runs.csv`` columns to a ``TrainingJob`` mapping.

In: a row of :data:`JOB_COLUMNS` (never a column that was derived from the measured time). Out: the mapping that
``TrainingJob.parse`` reads and one sentence for each value the row leaves open. What a source does not state is
filled with the default of the framework it ran (:data:`FRAMEWORKS`), so that a blank means the same in every row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dataset_builder.corpus.spellings import (
    architecture_name,
    cell_text,
    precision_name,
    recompute_name,
    sharding_name,
    shipped_model,
    size_columns,
)
from dataset_builder.job.hardware import DeviceSpec, canonical_device, canonical_link, device
from dataset_builder.job.precision import PRECISION_PRESETS

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
_DEEPSEEK_V3_MLA = (1536, 512, 128, 64, 128)  # arXiv 2412.19437, section 4.2
_ADAPTIVE_SOFTMAX_CLASSES = 32_768  # head cluster of 20,000 words plus the rarely computed tails, arXiv 1901.02860
_OPTIMIZERS = {
    "adam (apex fusedadam)": "adam", "distributed_fused_adam": "adam", "decoupled_adamw": "adamw", "none timed": "none",
}  # fmt: skip
_LINEAR_WORDS = (
    ("blockwise", "fp8_blockwise"), ("block scaling", "fp8_blockwise"), ("tensorwise", "fp8_tensorwise"),
    ("current", "fp8_current"), ("rowwise", "fp8_rowwise"), ("delayed", "fp8_delayed"),
)  # fmt: skip
_MEGATRON_FAMILY = ("megatron-lm", "megatron-bridge", "nemo", "mlperf")
_SEQUENCE_PARALLEL_SINCE = "2022-05"  # arXiv 2205.05198
TRAINING_BYTES_PER_PARAMETER = 18.0  # 16-bit weight and fp32 gradient, master weight and two moments (arXiv 1910.02054)
FROZEN_BYTES_PER_PARAMETER = 2.5


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


def job_mapping(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The job of a row and what was assumed; raises :class:`RowError` when the row describes none."""
    row = JobRow(values)
    _check_present(row)
    if row.framework is None:
        row.assume("framework: unknown, the defaults of plain PyTorch were taken")
    cluster = _cluster(row)
    model = _model(row)
    parallel = _parallel(row, model, cluster)
    batch = _batch(row, model, parallel["data"])
    _pipeline_split(row, model, parallel)
    return {
        "name": row.model_name,
        "model": model,
        "batch": batch,
        "cluster": cluster,
        "precision": _precision(row),
        "parallel": parallel,
        "software": _software(row),
        "optimizer": {"name": _optimizer(row)},
    }, tuple(row.assumed)


def _check_present(row: JobRow) -> None:
    missing = [column for column in REQUIRED_COLUMNS if row.text(column) is None]
    if "global_batch" in missing and row.count("micro_batch") and row.count("grad_accum"):
        missing.remove("global_batch")
    if missing:
        raise RowError(f"missing: {', '.join(missing)}")


def _cluster(row: JobRow) -> dict[str, Any]:
    num_gpus = row.need("num_gpus")
    gpu = _device(row).name
    if gpu.lower() != (row.text("gpu") or "").lower():
        row.assume(f"gpu: {row.text('gpu')!r} is taken as {gpu}")
    per_node = row.count("gpus_per_node") or 8
    if num_gpus <= per_node:
        per_node = num_gpus
    elif num_gpus % per_node:
        usable = max(size for size in range(1, per_node + 1) if num_gpus % size == 0)
        row.assume(f"gpus_per_node: {num_gpus} GPUs on nodes of {per_node} taken as {usable} a node")
        per_node = usable
    cluster: dict[str, Any] = {"gpu": gpu, "num_nodes": num_gpus // per_node, "gpus_per_node": per_node}
    for tier, crossed in (("intra_node", per_node > 1), ("inter_node", num_gpus > per_node)):
        if crossed and (name := _link(row.text(tier))):
            cluster[tier] = name
        elif crossed:
            row.assume(f"{tier}: {row.text(tier) or 'not stated'}, the device's usual link was taken")
    return cluster


_LINK_FAMILIES = ("none", "unknown", "nvlink", "nvswitch", "xgmi", "pcie", "ib", "roce", "efa")  # of no one generation


def _device(row: JobRow) -> DeviceSpec:
    gpu = row.text("gpu") or ""
    try:
        return device(canonical_device(gpu))
    except KeyError as error:
        near = f"; the nearest are {error.args[0]}" if error.args[0] else ""
        raise RowError(f"gpu: {gpu!r} is not in the device catalogue{near}") from None


def _link(stated: str | None) -> str | None:
    """The catalogue's name; ``None`` where nothing, or only the family of the link, is stated."""
    if stated is None or stated.lower() in _LINK_FAMILIES:
        return None
    try:
        name = canonical_link(stated)
    except KeyError:
        return None
    return "nvlink5-nvl72" if name == "nvl72" else name


def _model(row: JobRow) -> dict[str, Any]:
    kind = ARCHITECTURES[row.arch]
    gated = row.flag("gated_mlp")
    if gated is None:
        gated = row.arch in ("llama", "moe")
    tied = row.flag("tied_embeddings")
    from_scratch = row.arch in ("moe", "gpt", "llama") and row.text("source_id") == "megatron-golden"
    model: dict[str, Any] = {
        "name": row.model_name,
        "architecture": kind.architecture,
        "num_layers": row.need("layers"),
        "hidden_size": row.need("hidden"),
        "num_attention_heads": row.need("heads"),
        "vocab_size": row.need("vocab"),
        "activation": "swiglu" if gated else "gelu",
        "normalization": kind.normalization,
        "position_embedding": kind.position,
        "bias": kind.bias,
        "tie_embeddings": True if tied is None else tied,
        "dropout": _dropout(row),
    }
    for key, column in (("ffn_hidden_size", "ffn_hidden"), ("num_query_groups", "kv_heads"), ("head_dim", "head_dim")):
        if value := row.count(column):
            model[key] = value
    if model["hidden_size"] % model["num_attention_heads"] and "head_dim" not in model:
        model["head_dim"] = 2 ** round(math.log2(model["hidden_size"] / model["num_attention_heads"]))
        row.assume(f"head_dim: not stated, {model['head_dim']} taken")
    if from_scratch:
        _megatron_arguments(row, model)
    if kind.architecture == "encoder":
        model |= {"mlm_head": "squad" not in row.model_name.lower(), "num_token_types": 2}
    if kind.architecture == "encoder_decoder":
        _encoder_decoder(row, model)
    if row.count("num_experts"):
        _experts(row, model)
    _named_details(row, model)
    _shipped_details(row, model)
    _approximations(row, model)
    return model


def _dropout(row: JobRow) -> float:
    stated = row.flags.get("hidden_dropout")
    if stated:
        return float(stated)
    if row.arch in ("llama", "moe", "mpt", "hybrid-mamba", "hybrid-mamba-moe"):
        return 0.0
    return row.defaults.dropout


def _megatron_arguments(row: JobRow, model: dict[str, Any]) -> None:
    """Megatron-LM builds a GPT from its arguments: what a test does not set is the argument's default."""
    flags = row.flags
    model["position_embedding"] = {"rope": "rope", "none": "none"}.get(
        flags.get("position_embedding_type", ""), "learned"
    )
    model["normalization"] = "rmsnorm" if flags.get("normalization") == "RMSNorm" else "layernorm"
    model["bias"] = flags.get("disable_bias_linear") != "1"
    model["qk_norm"] = flags.get("qk_layernorm") == "1"
    if flags.get("squared_relu") == "1":
        model["activation"] = "squared_relu"


def _encoder_decoder(row: JobRow, model: dict[str, Any]) -> None:
    layers = model["num_layers"]
    model |= {"num_encoder_layers": layers, "num_decoder_layers": row.note_count("decoder_layers") or layers}
    if row.arch == "t5" and row.framework in ("megatron-lm", "nemo"):
        model |= {"position_embedding": "learned", "normalization": "layernorm", "bias": True}  # Megatron's own T5
    if row.arch == "t5" and model["activation"] == "swiglu":
        model["activation"] = "geglu"  # T5 v1.1


def _experts(row: JobRow, model: dict[str, Any]) -> None:
    layers = model["num_layers"]
    top_k, width = row.count("top_k"), row.count("ffn_hidden")
    if not top_k or not width:
        top_k, width = top_k or 2, width or 4 * model["hidden_size"]
        row.assume(f"moe: not fully stated, Megatron's defaults taken: top_k {top_k}, expert_ffn_hidden_size {width}")
    moe: dict[str, Any] = {"num_experts": row.need("num_experts"), "top_k": top_k, "expert_ffn_hidden_size": width}
    if dense := row.note_count("dense_ffn"):
        model["ffn_hidden_size"] = dense
    sparse_layers = row.note_count("moe_layers")
    if sparse_layers and sparse_layers < layers:
        moe["dense_layers"] = list(range(layers - sparse_layers))
    if shared := row.note_count("shared_expert_ffn"):
        moe |= {"num_shared_experts": 1, "shared_expert_ffn_hidden_size": shared}
    if "token drop" in row.notes or "tokendrop" in row.model_name:
        moe["capacity_factor"] = 1.0
    model["moe"] = moe
    sizes = re.findall(r"\d+", row.flags.get("mla_q_kv_nope_rope_v", ""))
    if len(sizes) == 5:
        model["mla"] = _mla(*map(int, sizes))


def _mla(q_rank: int, kv_rank: int, nope: int, rope: int, value: int) -> dict[str, int]:
    return {
        "q_lora_rank": q_rank, "kv_lora_rank": kv_rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope,
        "v_head_dim": value,
    }  # fmt: skip


def _named_details(row: JobRow, model: dict[str, Any]) -> None:
    """What a well known model's name implies and the columns cannot say."""
    name = re.sub(r"[^a-z0-9]", "", row.model_name.lower())
    if name.startswith("deepseekv3") and (model["num_layers"], model["hidden_size"]) == (61, 7168) and "moe" in model:
        model |= {"mla": _mla(*_DEEPSEEK_V3_MLA), "ffn_hidden_size": 18432}
        model["moe"] |= {
            "num_shared_experts": 1, "shared_expert_ffn_hidden_size": 2048, "dense_layers": [0, 1, 2],
        }  # fmt: skip
    elif name.startswith("gptoss"):  # alternating windows of 128 (openai/gpt-oss-120b config.json)
        model |= {"attention": "sliding", "window": 128, "full_attention_every": 2, "qkv_bias": True}
    elif name.startswith("qwen3"):
        model["qk_norm"] = True
    elif name.startswith(("qwen2", "qwen15")):
        model["qkv_bias"] = True


_SHIPPED_DETAILS = (
    "mla", "attention", "window", "full_attention_every", "qk_norm", "qk_norm_over", "qkv_bias", "post_norm",
    "parallel_block",
)  # fmt: skip
_SHIPPED_KIND = ("activation", "normalization", "position_embedding", "bias")


def _shipped_details(row: JobRow, model: dict[str, Any]) -> None:
    """What no column says, of a shipped model whose sizes were taken."""
    shipped = row.shipped
    model |= {key: shipped[key] for key in _SHIPPED_DETAILS if key in shipped and key not in model}
    if row.text("arch") is None:
        model |= {key: shipped[key] for key in _SHIPPED_KIND if key in shipped}
    if "moe" in shipped and "moe" in model:
        model["moe"] = {**shipped["moe"], **model["moe"]}
        if "ffn_hidden_size" in shipped:
            model["ffn_hidden_size"] = shipped["ffn_hidden_size"]


def _approximations(row: JobRow, model: dict[str, Any]) -> None:
    if row.arch.startswith("hybrid-mamba"):
        model["num_layers"] = max(1, model["num_layers"] // 2)
        if "moe" in model:
            model["moe"].pop("dense_layers", None)
        row.assume("model: a Mamba hybrid, taken as a transformer with a layer for each pair of mixer and feed-forward")
    if row.arch == "transformer-xl":
        model["vocab_size"] = min(model["vocab_size"], _ADAPTIVE_SOFTMAX_CLASSES)
        row.assume(
            f"vocab_size: the adaptive softmax is taken as a plain one over {_ADAPTIVE_SOFTMAX_CLASSES} words; "
            "the recurrent memory's keys are not counted"
        )
    if row.arch == "electra":
        row.assume("model: the discriminator only, with a vocabulary head; the generator's layers are not counted")
    if _is_frozen(row):
        row.assume("model: LoRA on frozen base weights, taken as training without an optimizer step")
    if "mtp" in row.model_name.lower() or "mtp_num_layers" in row.flags or "MTP layer probably" in row.notes:
        row.assume("model: the multi-token prediction layer is not counted")


def _is_frozen(row: JobRow) -> bool:
    return "lora" in f"{row.notes} {row.model_name}".lower()


def _parallel(row: JobRow, model: dict[str, Any], cluster: dict[str, Any]) -> dict[str, Any]:
    num_gpus = row.need("num_gpus")
    tensor, pipeline, context = _model_parallel(row, model, cluster)
    model_parallel = tensor * pipeline * context
    if num_gpus % model_parallel:
        raise RowError(f"tp {tensor} x pp {pipeline} x cp {context} = {model_parallel} does not divide {num_gpus} GPUs")
    data = num_gpus // model_parallel
    if (stated := row.count("dp")) and stated != data:
        row.assume(f"data: {stated} in the row, {num_gpus} / {model_parallel} = {data} taken")
    expert = row.count("ep") or 1
    if expert > 1 and "moe" not in model:
        raise RowError(f"missing: num_experts (ep is {expert})")
    return {
        "tensor": tensor,
        "pipeline": pipeline,
        "context": context,
        "expert": expert,
        "expert_tensor": _expert_tensor(row, tensor),
        "data": data,
        "virtual_pipeline": row.count("vpp") or 1,
        "sequence_parallel": _sequence_parallel(row, tensor),
        **_sharding(row),
        "overlap": _overlap(row),
        "recompute": _recompute(row),
    }


def _model_parallel(row: JobRow, model: dict[str, Any], cluster: dict[str, Any]) -> tuple[int, int, int]:
    """Tensor, pipeline and context size; what is blank follows from the others, is 1, or is the smallest that fits."""
    num_gpus, batch = row.need("num_gpus"), row.count("global_batch")
    tensor, pipeline, context, data = (row.count(column) or None for column in ("tp", "pp", "cp", "dp"))
    if tensor is None and pipeline is None:
        return *_guess_layout(row, model, cluster), context or 1
    stated = (tensor or 1) * (pipeline or 1) * (context or 1)
    if tensor is not None and pipeline is not None:
        return tensor, pipeline, context or 1
    rest = num_gpus // (stated * data) if data and num_gpus % (stated * data) == 0 else 1
    if rest > 1:
        row.assume(f"{'pp' if tensor else 'tp'}: not stated, {rest} = {num_gpus} GPUs / {stated} / dp {data}")
        return tensor or rest, pipeline or rest, context or 1
    divides = num_gpus % stated == 0 and (batch is None or batch % (num_gpus // stated) == 0)
    return (
        (tensor or 1, pipeline or 1, context or 1) if divides else (*_guess_layout(row, model, cluster), context or 1)
    )


def _guess_layout(row: JobRow, model: dict[str, Any], cluster: dict[str, Any]) -> tuple[int, int]:
    """The smallest tensor x pipeline size whose weights and optimizer fit, in the order a practitioner would try."""
    num_gpus, batch = row.need("num_gpus"), row.count("global_batch")
    per_parameter = FROZEN_BYTES_PER_PARAMETER if _is_frozen(row) else TRAINING_BYTES_PER_PARAMETER
    weights = 12 if model["activation"] == "gelu" else 13  # 12 h^2 a layer; grouped queries and swiglu come near it
    needed_bytes = weights * model["num_layers"] * float(model["hidden_size"]) ** 2 * per_parameter
    memory_bytes = device(cluster["gpu"]).hbm_bytes
    context, fixed = row.count("cp") or 1, (row.count("tp"), row.count("pp"))
    candidates = sorted(
        ((tensor, pipeline) for tensor in {1, 2, 4, 8, fixed[0] or 1} for pipeline in {*range(1, 17), fixed[1] or 1}),
        key=lambda sizes: (sizes[0] * sizes[1], -sizes[0]),
    )
    for share, is_even in ((0.7, True), (1.0, True), (math.inf, True), (math.inf, False)):
        for tensor, pipeline in candidates:
            ranks = tensor * pipeline * context
            divides = tensor <= cluster["gpus_per_node"] and model["num_attention_heads"] % tensor == 0
            divides = divides and num_gpus % ranks == 0 and pipeline <= model["num_layers"]
            divides = divides and (model["num_layers"] % pipeline == 0 or not is_even)
            divides = divides and (batch is None or batch % (num_gpus // ranks) == 0)
            divides = divides and fixed in ((None, None), (tensor, None), (None, pipeline))
            if divides and needed_bytes / (tensor * pipeline) <= share * memory_bytes:
                row.assume(f"parallel: not stated, tensor {tensor} x pipeline {pipeline}, the smallest that fits")
                return tensor, pipeline
    raise RowError(f"tp, pp: not stated, and none divides {num_gpus} GPUs and a global batch of {batch}")


def _expert_tensor(row: JobRow, tensor: int) -> int:
    if not row.count("num_experts"):
        return 1
    if stated := row.note_count("expert_tensor_parallel_size"):
        return stated
    return tensor if row.text("source_id") == "megatron-golden" else 1  # Megatron-LM: as wide as tensor parallel


def _sequence_parallel(row: JobRow, tensor: int) -> bool:
    stated = row.flag("sequence_parallel")
    if tensor == 1:
        return False
    if stated is not None:
        return stated
    if row.count("num_experts") and row.framework in _MEGATRON_FAMILY:
        row.assume("sequence_parallel: not stated, True, which experts under tensor parallel require in Megatron")
        return True
    value = row.defaults.sequence_parallel or row.is_tuned
    if row.date and row.date < _SEQUENCE_PARALLEL_SINCE:
        value = False
    row.assume(f"sequence_parallel: not stated, {value} as {row.framework} rows of that time do")
    return value


def _sharding(row: JobRow) -> dict[str, Any]:
    stated = row.text("sharding")
    sharding = sharding_name(stated) if stated else None
    group = re.search(r"shard group (\d+)", row.notes)
    if group and 1 < int(group[1]) < row.need("num_gpus"):
        return {"sharding": "hsdp", "shard_size": int(group[1])}
    within = re.search(r"zero1 within (\d+) GPUs", row.notes)
    if within and sharding == "zero1":
        row.assume(f"sharding: zero1 within {within[1]} GPUs in the source, over all data-parallel ranks taken")
    if sharding is None:
        row.assume(f"sharding: {stated or 'not stated'}, {row.defaults.sharding} as {row.framework} does")
        sharding = row.defaults.sharding
    return {"sharding": sharding}


def _overlap(row: JobRow) -> dict[str, bool]:
    default = row.defaults.overlap or row.is_tuned
    tensor = row.flags.get("tp_comm_overlap") == "1"
    if row.text("source_id") == "megatron-golden":
        return {
            "grad_reduce": row.flags.get("overlap_grad_reduce") == "1",
            "param_gather": row.flags.get("overlap_param_gather") == "1",
            "tensor": tensor,
            "pipeline": (row.count("vpp") or 1) > 1,
        }
    if "overlap DP/TP/PP enabled" in row.notes:
        return {"grad_reduce": True, "param_gather": True, "tensor": True, "pipeline": True}
    return {"grad_reduce": default, "param_gather": default, "tensor": tensor, "pipeline": default}


def _recompute(row: JobRow) -> Any:
    cell = row.text("act_ckpt")
    stated = recompute_name(cell) if cell else None
    modules = row.flags.get("recompute_modules")
    if stated == "selective" and modules and "core_attn" not in modules:
        row.assume(f"recompute: only {modules}, cheap operators: none taken")
        return "none"
    if stated:
        return stated
    for word, mode in (("selective recompute", "selective"), ("full recompute", "full")):
        # a convention such as "hardware FLOPs incl. full recompute" says the same of the run itself
        if word in row.notes and "fused in TE/flash" not in row.notes:
            return mode
    row.assume(f"recompute: {cell or 'not stated'}, {row.defaults.recompute} taken")
    return row.defaults.recompute


def _batch(row: JobRow, model: dict[str, Any], data: int) -> dict[str, Any]:
    global_batch, seq_length = _global_batch(row, data), row.need("seq_len")
    if re.search(r"unpadded|packed variable-length", row.notes):
        seq_length = max(1, seq_length // 2)
        row.assume(f"seq_length: variable-length samples without padding, the mean of {seq_length} taken")
    if global_batch % data:
        raise RowError(f"global_batch {global_batch} is not a multiple of the data-parallel size {data}")
    per_rank = global_batch // data
    micro = row.count("micro_batch")
    if micro is None and (accumulation := row.count("grad_accum")):
        micro = max(1, per_rank // accumulation)
    if micro is None:
        micro = 1 if row.defaults.micro_batch == "one" else min(per_rank, max(1, 16_384 // seq_length))
        row.assume(f"micro_batch_size: not stated, {_nearest_divisor(per_rank, micro)} taken")
        micro = _nearest_divisor(per_rank, micro)
    if per_rank % micro:
        nearest = _nearest_divisor(per_rank, micro)
        row.assume(f"micro_batch_size: {micro} does not divide {global_batch} / {data}, {nearest} taken")
        micro = nearest
    batch = {"seq_length": seq_length, "micro_batch_size": micro, "global_batch_size": global_batch}
    if model["architecture"] == "encoder_decoder":
        batch["target_seq_length"] = _target_length(row, seq_length)
    return batch


def _global_batch(row: JobRow, data: int) -> int:
    if row.text("global_batch") is not None:
        return row.need("global_batch")
    total = row.need("micro_batch") * row.need("grad_accum") * data
    row.assume(f"global_batch: not stated, micro_batch x grad_accum x {data} = {total} taken")
    return total


def _nearest_divisor(total: int, wanted: int) -> int:
    divisors = {size for low in range(1, math.isqrt(total) + 1) if total % low == 0 for size in (low, total // low)}
    return min(divisors, key=lambda size: (abs(math.log(size / wanted)), size))


def _target_length(row: JobRow, seq_length: int) -> int:
    stated = row.note_count("decoder_seq")
    if stated is None and (found := re.search(r"dec(?: seq)? (\d+)", row.notes)):
        stated = int(found[1])
    if stated is None:
        row.assume(f"target_seq_length: not stated, {seq_length} as the source side")
    return stated or seq_length


def _pipeline_split(row: JobRow, model: dict[str, Any], parallel: dict[str, Any]) -> None:
    """Layers per stage where they do not divide: Megatron counts the embedding and the head as a layer each."""
    stages, chunks = parallel["pipeline"], parallel["virtual_pipeline"]
    if stages == 1:
        parallel["virtual_pipeline"] = 1
        return
    layers = model["num_layers"] + model.get("num_encoder_layers", 0)
    slots = stages * chunks
    if slots > layers + 2:
        raise RowError(f"pp {stages} x vpp {chunks} = {slots} model chunks are more than the {layers} layers can fill")
    first, last = (row.note_count(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    if first and last and stages > 2 and chunks == 1:
        parallel["layers_per_stage"] = [first, *_even(layers - first - last, stages - 2), last]
    elif layers % slots:
        ends = _even(layers + 2, slots)
        split = [ends[0] - 1, *ends[1:-1], ends[-1] - 1]
        parallel["layers_per_stage"] = split
        row.assume(f"layers_per_stage: {layers} layers over {stages} stages x {chunks} chunks taken as {split}")


def _even(layers: int, stages: int) -> list[int]:
    """As even as possible, the longer stages in the middle."""
    base, extra = divmod(layers, stages)
    start = (stages - extra) // 2
    return [base + (start <= stage < start + extra) for stage in range(stages)]


def _precision(row: JobRow) -> dict[str, Any]:
    name = _precision_name(row)
    policy: dict[str, Any] = {"preset": name}
    if name in ("fp32", "tf32") or (name in ("fp16", "bf16") and "master" not in row.detail):
        return policy
    if name in ("fp16", "bf16"):
        policy["preset"] = f"{name}_mixed"  # the source calls it pure, but its optimizer keeps fp32 master weights
    low = "fp16" if policy["preset"].startswith("fp16") else "bf16"
    policy["params"] = low if row.defaults.sixteen_bit_params else "fp32"
    if name == "fp8_mixed":
        policy["linear"] = _fp8_recipe(row)
    elif name == "mxfp8" and "mxfp8" not in _device(row).peak_flops_per_s:
        policy["linear"] = "fp8_blockwise"
        row.assume("linear: no MXFP8 hardware on this device, 128-block scaling taken")
    for key, target in (
        ("params", "params"), ("main_params", "main_params"), ("grad_reduce", "grad_reduce"),
        ("main_grads", "grad_accum"), ("exp_avg", "optimizer_state"),
    ):  # fmt: skip
        if key in row.detail_flags:
            policy[target] = row.detail_flags[key]
    if row.detail_flags.get("fp8_param_gather") == "1":
        policy["param_gather"] = "fp8"
    first, last = (row.detail_flags.get(f"bf16_layers_{end}", "") for end in ("start", "end"))
    if first.isdigit() and last.isdigit() and "fp8" in name:
        policy["high_precision_layers"] = {"first": int(first), "last": int(last)}
    if row.framework == "llm-foundry":  # FSDP gathers in the compute format and reduces in it only under PURE
        policy |= {"param_gather": low, "grad_reduce": low if "PURE" in row.detail else "fp32"}
    return policy


def _precision_name(row: JobRow) -> str:
    stated = row.text("precision")
    if stated is None:
        usual = "bf16_mixed" if _device(row).supports("bf16") else "fp16_mixed"
        row.assume(f"precision: not stated, {usual} taken")
        return usual
    if name := precision_name(stated):
        return name
    raise RowError(f"precision: {stated!r} is none of {', '.join(PRECISION_PRESETS)}")


def _fp8_recipe(row: JobRow) -> str:
    words = row.detail.lower()
    for word, recipe in _LINEAR_WORDS:
        if word in words:
            return recipe
    if "mxfp8" in words:
        return "mxfp8"
    row.assume("linear: fp8 recipe not stated, delayed scaling taken")
    return "fp8_delayed"


def _software(row: JobRow) -> dict[str, Any]:
    golden = row.text("source_id") == "megatron-golden"
    software: dict[str, Any] = {"framework": row.framework, "fused_kernels": row.defaults.fused_kernels}
    date = re.match(r"\d{4}-\d{2}", row.text("source_date") or "")
    software["date"] = date[0] if date else None
    software["attention"] = _attention_kernel(row)
    software["compile"] = row.flag("compile")
    if golden:
        software["cuda_graphs"] = "cuda_graph_impl" in row.flags or "cuda_graph_scope" in row.flags
        software["deterministic"] = row.flags.get("deterministic_mode") == "1"
    return {key: value for key, value in software.items() if value is not None}


def _attention_kernel(row: JobRow) -> str | None:
    kernel = (row.text("attention") or "").lower()
    if kernel.startswith(("naive", "fmha", "te:unfused", "unfused")):
        return "unfused"
    if kernel == "te" or kernel.startswith(("flash", "te:flash", "te:fused", "fused")):
        return "flash"
    if not kernel and row.defaults.attention:
        row.assume(f"attention: not stated, {row.defaults.attention} as {row.framework or 'plain PyTorch'} does")
        return row.defaults.attention
    return None  # "te:auto": the library chose, nobody recorded what


def _optimizer(row: JobRow) -> str:
    if _is_frozen(row):
        return "none"
    name = (row.text("optimizer") or "adam").lower()
    name = _OPTIMIZERS.get(name, name)
    if "timed" in name:
        return "none"
    words: Callable[[str], bool] = name.__contains__
    for known in ("muon", "lamb", "lion", "adafactor", "adamw", "adam", "sgd", "none"):
        if words(known):
            return known
    row.assume(f"optimizer: {name!r} is not known, adam taken")
    return "adam"
