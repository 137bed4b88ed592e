"""What trainers on Hugging Face's stack have in common: how they name a model, load, adapt and train its weights."""

from __future__ import annotations

from collections.abc import Sequence

from dataset_builder.job.importers.model_names import preset_called
from dataset_builder.job.importers.reading import Draft
from dataset_builder.job.reasons import shown

_OPTIMIZERS = (("muon", "muon"), ("lion", "lion"), ("adafactor", "adafactor"), ("adam", "adamw"), ("sgd", "sgd"))


def read_named_model(draft: Draft, key: str) -> None:
    """The shipped model of a name; a name of another model or a folder is asked for by its config.json."""
    name = draft.text(key, asks="model")
    if name is None:
        return
    if known := preset_called(name):
        draft.imply("model.preset", known, f"{key}: {name[:80]}")
    else:
        draft.ask("model", f"{key} {name[:80]} is no shipped model")


def read_amp(draft: Draft, bf16: str, fp16: str, tf32: str) -> None:
    """Automatic mixed precision of a Hugging Face trainer: one of two formats, or fp32 (TF32 when switched on)."""
    on_bf16, on_fp16 = (draft.flag(key, asks="precision.preset") for key in (bf16, fp16))
    if on_bf16 and on_fp16:
        draft.refuse(f"{bf16} and {fp16} are both true; expected one of them")
    elif on_bf16 or on_fp16:
        draft.state("precision.preset", "bf16_mixed" if on_bf16 else "fp16_mixed", bf16 if on_bf16 else fp16)
        if draft.flag(tf32):
            draft.warn(f"{tf32} beside {bf16 if on_bf16 else fp16}: only what stays in fp32 would use it; not modelled")
    elif not any(draft.has(key) and draft.flag(key) is None for key in (bf16, fp16)):
        name = "tf32" if draft.flag(tf32) else "fp32"
        draft.default("precision.preset", name, f"{bf16} and {fp16} are off")


def state_fp8(draft: Draft, preset: str, *keys: str) -> None:
    """fp8 linears over the formats that are read already, which FSDP keeps for everything else."""
    gather = "fp8_enable_fsdp_float8_all_gather"
    gathers = draft.flag(gather)
    draft.state("precision.preset", preset, "fp8", *keys)
    draft.warn_mixed("bf16", "fp8", preset)
    if gathers and preset != "fp8_tensorwise":
        draft.warn(f"{gather} is left out: only torchao's tensorwise recipe gathers weights in fp8")
    elif gathers and draft.get("parallel.sharding") in ("zero2", "zero3", "hsdp"):
        draft.state("precision.param_gather", "fp8", gather)


def loaded_format(draft: Draft) -> str | None:
    """The 16-bit format of autocast, which these trainers load the weights in; ``None`` in fp32."""
    return {"bf16_mixed": "bf16", "fp16_mixed": "fp16"}.get(str(draft.get("precision.preset")))


def default_frozen_weights(draft: Draft) -> None:
    """Beside adapters, which are trained in fp32, the weights stay in 16 bits, as they are loaded."""
    if low := loaded_format(draft):
        draft.default("precision.params", low, "frozen weights are loaded in 16 bits")
        draft.default("precision.main_params", "fp32", "adapters are trained in fp32")


def names_mlp(targets: object) -> bool:
    """Whether a list, a name or a pattern of adapted modules reaches beyond attention."""
    words = ("gate", "up_proj", "down", "mlp", "all", "experts", "w1", "w2", "w3")
    return any(word in str(targets) for word in words)


def state_targets(draft: Draft, wide: Sequence[str], *keys: str) -> None:
    """``wide``: the keys that adapt feed-forward layers too; of a model with experts, merging leaves them out."""
    told = ", ".join(f"{key} {shown(draft.raw(key))}" for key in wide if draft.has(key))
    draft.state("model.lora.targets", "attention_and_mlp" if wide else "attention", *keys, note=told)


def warn_preferences(draft: Draft, key: str, value: str) -> None:
    """Preferences and rewards take more passes than the one that is predicted."""
    draft.warn(
        f"{key} {value[:30]}: predicted as one forward and backward pass of the trained model with one sequence a "
        "sample; passes of a reference or reward model, second answers and generation are not counted"
    )


def warn_fused_loss(draft: Draft, *switches: str) -> None:
    """A loss fused with the head keeps no logits, which are counted."""
    if switches:
        draft.warn(f"{switches[0][:80]}: a loss that keeps no logits is not modelled; memory is with them")


def read_optimizer(draft: Draft, key: str) -> None:
    """A Hugging Face trainer's optimizer: its family; 8-bit states are told."""
    name = (draft.text(key) or "").lower()
    known = next((known for word, known in _OPTIMIZERS if word in name), None)
    if known:
        draft.state("optimizer.name", known, key)
    elif name:
        draft.warn(f"{key} {name[:40]} is not modelled; adamw is taken")
    if "8bit" in name or "paged" in name:
        draft.warn(f"{key} {name[:40]}: 8-bit or paged states are not modelled")
