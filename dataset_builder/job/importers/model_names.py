"""Shipped models by the names that files give them, and names that contradict the sizes beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath

from dataset_builder.job.model import ModelSpec, num_parameters
from dataset_builder.job.presets import preset, preset_names

_VARIANT = re.compile(r"-(instruct|chat|base|hf|it|pt|sft|lora|bf16|fp8|v\d+(\.\d+)*|\d{4})$")
_ALIASES = {
    "gpt2": "gpt2-small", "llama3405b": "llama3.1-405b", "llama3.370b": "llama3.1-70b",
    "deepseekv3671b": "deepseek-v3", "deepseekv3.1": "deepseek-v3", "deepseekr1": "deepseek-v3",
    # MaxText's names, of its src/maxtext/configs/models; three of DeepSeek V3 have the same sizes, sharded otherwise.
    "deepseek216b": "deepseek-v2-lite", "deepseek2236b": "deepseek-v2", "deepseek3671b": "deepseek-v3",
    "deepseek3671b2dfsdp": "deepseek-v3", "deepseek3671bbatchsplit": "deepseek-v3",
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([mb])")
# Names round, and count tied or input embeddings or not; small models differ most.
_TOLERANCE = 0.35


def preset_called(name: str) -> str | None:
    """The shipped model of a name such as ``meta-llama/Llama-3.1-8B-Instruct``; ``None`` when none is meant."""
    base = PurePath(name.strip().rstrip("/")).name.lower().replace("_", "-")
    name = base.removeprefix("meta-")
    while (found := _by_folded_name(_folded(name))) is None and _VARIANT.search(name):
        name = _VARIANT.sub("", name)  # one at a time: what looks like a version may be part of the name
    return found


def _by_folded_name(folded: str) -> str | None:
    known = {_folded(name): name for name in preset_names()} | _ALIASES
    return known.get(folded)


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def vocabulary_of(tokenizer: str) -> int | None:
    """The vocabulary of the shipped model that a tokenizer's name belongs to."""
    name = preset_called(tokenizer)
    return int(preset(name)["vocab_size"]) if name else None


def contradictions(model: ModelSpec, names: Iterable[str]) -> list[str]:
    """A sentence per name (a path, a run's name) that means a model of other sizes than these."""
    found = []
    for name in names:
        for part in PurePath(name).parts[-2:]:
            if sentence := _contradiction(model, part):
                found.append(sentence)
    return list(dict.fromkeys(found))


def _contradiction(model: ModelSpec, name: str) -> str | None:
    count = num_parameters(model.model_copy(update={"max_position_embeddings": model.max_position_embeddings or 1}))
    held = f"{model.num_layers} layers of hidden size {model.hidden_size}, {_short(count)} parameters"
    for candidate in _joined_words(name):
        called = _by_folded_name(candidate)
        if called is None:
            continue
        sizes = preset(called)
        layers, hidden = sizes.get("num_layers", sizes.get("num_decoder_layers")), sizes["hidden_size"]
        if (layers, hidden) == (model.num_layers, model.hidden_size):
            return None
        as_named = f"{layers} layers of hidden size {hidden}"
        real = _preset_of(model)
        return (
            f"the name {name!r} means {called} ({as_named}), but the sizes are {held}{f', as {real}' if real else ''}"
        )
    for word in _words(name):
        if match := _SIZE.fullmatch(word):
            named = float(match[1]) * {"m": 1e6, "b": 1e9}[match[2]]
            if named > 0 and abs(count / named - 1) > _TOLERANCE:
                return f"the name {name!r} says {match[0].upper()}, but the sizes are {held}"
    return None


def _preset_of(model: ModelSpec) -> str | None:
    for name in preset_names():
        sizes = preset(name)
        if (sizes.get("num_layers"), sizes["hidden_size"], sizes["num_attention_heads"]) == (
            model.num_layers,
            model.hidden_size,
            model.num_attention_heads,
        ):
            return name
    return None


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9.]+", name.lower().rsplit(".", 1)[0]) if word][:40]


def _joined_words(name: str) -> Iterator[str]:
    """Neighbouring words joined, the longer first: ``llama3_8b_fp8`` gives ``llama38bfp8``, ``llama38b``, ..."""
    words = _words(name)
    for length in range(min(4, len(words)), 0, -1):
        for start in range(len(words) - length + 1):
            yield "".join(words[start : start + length])


def _short(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def parameters_text(model: ModelSpec) -> str:
    """The parameter count, for the reader to compare with what the model is known to have."""
    return _short(
        num_parameters(model.model_copy(update={"max_position_embeddings": model.max_position_embeddings or 1}))
    )
