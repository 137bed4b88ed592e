"""Reads a Hugging Face ``config.json`` into the sizes of a :class:`ModelSpec`.

Known model types are mapped by what their reference code builds; an unknown type with the usual keys is read as a
Llama, or as a GPT when it has no RMS norms. Sizes only: ``max_position_embeddings`` is not the training sequence, and
a vision tower is left out.
Raises ValueError naming what is missing, which the job's validation places under ``model.config``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset_builder.job.importers.huggingface_families import FAMILIES, REFUSED, family_of, missing_keys

MAX_BYTES = 2**20


def read_config(path: Any, folder: Path) -> dict[str, Any]:
    """Sizes from a file; a relative ``path`` starts from ``folder``, the job file's."""
    if not isinstance(path, str | Path):
        raise ValueError(f"config: got {path!r}; expected the path of a Hugging Face config.json")
    file = folder / Path(path).expanduser()
    try:
        if not file.is_file():
            raise ValueError(f"config: {file} is no file; expected a Hugging Face config.json")
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"config: cannot read {file}: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise ValueError(f"config: {file} has more than {MAX_BYTES} bytes; expected a Hugging Face config.json")
    try:
        config = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config: {file} is not JSON ({str(error)[:80]}); expected a config.json") from None
    if not isinstance(config, dict):
        raise ValueError(f"config: {file} holds no JSON object; expected a Hugging Face config.json")
    return sizes_of_config(config)


def sizes_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes in a parsed config; a multimodal one is read from its ``text_config``."""
    outer = config
    while isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if config is not outer and "tie_word_embeddings" not in config:
        config = {**config, "tie_word_embeddings": outer.get("tie_word_embeddings")}
    model_type = str(config.get("model_type") or "").lower()
    notes: tuple[str, ...] = ()
    if config.get("block_configs"):
        config, notes = _equal_blocks(config, model_type)
    plain_type = model_type.removesuffix("_text")
    if plain_type in REFUSED:
        raise ValueError(f"config: {model_type} has layers without attention; expected a transformer")
    family = family_of(plain_type, config)
    missing = missing_keys(family, config)
    if missing:
        raise ValueError(
            "\n".join(f"config: {name} is missing in a config of type {model_type or 'unknown'}" for name in missing)
        )
    try:
        sizes = {key: value for key, value in family(config).items() if value is not None}
        if depths := int(config.get("num_nextn_predict_layers") or 0):
            sizes["mtp_layers"] = depths
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"config: a size of this {model_type or 'unknown'} model is no number ({error})") from None
    if plain_type not in FAMILIES:
        notes = (*notes, _read_as(model_type, sizes))
    if "text_config" in outer:
        notes = (*notes, f"model.config: the text model of {outer.get('model_type')} only, towers are left out")
    if notes:
        sizes["assumed"] = notes
    name = outer.get("_name_or_path") or model_type
    return {"name": str(name), **sizes} if name else sizes


def _read_as(model_type: str, sizes: Mapping[str, Any]) -> str:
    """What an unknown type is taken for, with all that this decides where the config is silent."""
    kind = "a Llama" if sizes.get("normalization") == "rmsnorm" else "a GPT"
    defaults = {"activation": "gelu", "normalization": "layernorm", "position_embedding": "learned"}
    taken = ", ".join(f"{key} {sizes.get(key, default)}" for key, default in defaults.items())
    tied = "shared" if sizes.get("tie_embeddings") else "separate"
    return (
        f"model.config: model type {model_type[:40] or 'missing'} is not known; read as {kind}: {taken}, embedding and "
        f"head {tied}; --set model.KEY=VALUE changes one"
    )


def _equal_blocks(config: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A model whose layers differ (``block_configs``) as one of equal layers with the same work and parameters.

    Layers without attention give their feed-forward to the others; widths follow DeciLM: ``2/3 ffn_mult h``, rounded up
    to 256. ValueError where a block has other parts, or attentions differ.
    """
    blocks, hidden, heads = config["block_configs"], config.get("hidden_size"), config.get("num_attention_heads")
    refusal = (
        f"config: {model_type or 'model'} gives every layer sizes of its own (block_configs) with parts that are not "
        "modelled; expected attention and feed-forward, or none, in each"
    )
    try:
        attentions = [block["attention"] for block in blocks]
        kept = [each for each in attentions if not each.get("no_op")]
        widths = [
            0
            if ffn.get("no_op")
            else ffn.get("intermediate_size") or -(-int(2 * ffn["ffn_mult"] * hidden / 3) // 256) * 256
            for ffn in (block["ffn"] for block in blocks)
        ]
        groups = {each.get("num_key_value_heads") or heads // each["n_heads_in_group"] for each in kept}
        odd = any(part.get("replace_with_linear") for block in blocks for part in (block["attention"], block["ffn"]))
        if odd or len(groups) != 1 or not kept:
            raise ValueError(refusal)
        width = round(sum(widths) / len(kept) / 256) * 256
    except (AttributeError, KeyError, TypeError, ZeroDivisionError, OverflowError):
        raise ValueError(refusal) from None
    note = (
        f"model.config: {len(blocks)} unequal layers, {len(kept)} of them with attention, are taken as {len(kept)} "
        f"equal ones with the mean feed-forward of {width}: the same parameters and work"
    )
    equal = {"num_hidden_layers": len(kept), "intermediate_size": width, "num_key_value_heads": groups.pop()}
    return {**config, **equal}, (note,)
