"""Several readings as one job: what they agree on, what follows from them, and what is still to be asked.

In: readings and ``--set`` values. Out: an :class:`ImportedJob`, the plain values of a job file with the origin of
each. Raises JobError with every question and every contradiction at once, each with its arithmetic, or CannotRunError
when only the layout does not fit the GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dataset_builder.job.errors import CannotRunError, JobError
from dataset_builder.job.importers.model_names import contradictions, parameters_text
from dataset_builder.job.importers.reading import Rank, Reading, Setting, as_count
from dataset_builder.job.model import ModelSpec
from dataset_builder.job.reasons import shown
from dataset_builder.job.schema import WHOLE_MODEL, TrainingJob, overridden

_GPUS, _STEPS = ("cluster", "num_gpus"), ("batch", "gradient_accumulation_steps")
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
_ALWAYS = ("batch.seq_length", "batch.micro_batch_size", "batch.global_batch_size", "precision.preset", "cluster.gpu",
           "cluster.num_gpus")  # fmt: skip
_BESIDE_MODEL = ("name", "lora", "overrides")  # what says nothing of a model's sizes
_MOST_TOLD = 12
_NARROW = ("fp8", "mxfp8", "nvfp4")  # formats that a preset is named after
_HINTS = {
    "model": "no file gives a model; give its config.json as another file, or --set model.preset=NAME",
    "batch.seq_length": "tokens of a sequence; --set batch.seq_length=N",
    "batch.micro_batch_size": "sequences a GPU computes at once; --set batch.micro_batch_size=N",
    "batch.global_batch_size": "sequences of an optimizer step; --set batch.global_batch_size=N, or "
    "--set batch.gradient_accumulation_steps=N",
    "precision.preset": "the formats to train in, e.g. --set precision.preset=bf16_mixed (or fp32, fp8_mixed, ...)",
    "cluster.gpu": "the device, e.g. --set cluster.gpu=H100-SXM5-80GB",
    "cluster.num_gpus": "how many GPUs in all; --set cluster.num_gpus=N (or cluster.num_nodes, cluster.gpus_per_node)",
}


@dataclass(frozen=True)
class ImportedJob:
    """``data`` as a job file holds it; ``origins`` by key path; ``warnings``: what merging found."""

    data: Mapping[str, Any]
    origins: Mapping[str, str]
    warnings: tuple[str, ...]
    job: TrainingJob


def merge(readings: Sequence[Reading], source: str, overrides: Mapping[str, Any]) -> ImportedJob:
    """One job from all readings; ``overrides`` (``--set``) win over every file. ``source`` names them in errors."""
    settings, reasons = _agreed(readings, overrides)
    warnings: list[str] = []
    _choose_model(settings, warnings)
    if "precision" in overrides:
        warnings += _replaced_precision(settings)
    warnings += _replaced_model(settings, overrides)
    draft = _JobDraft(settings, overrides, reasons + [reason for reading in readings for reason in reading.reasons])
    draft.pad_vocabulary()
    draft.narrow_adapters()
    draft.derive_cluster()
    draft.reduce_micro_batch()
    draft.derive_batch()
    draft.ask(readings)
    if draft.reasons:
        own_name = f"{PurePath(source).name}: "  # of a single file, which stands before every reason already
        reasons = [reason.removeprefix(own_name) for reason in [*draft.reasons, *draft.layout, *_invalid(draft.data)]]
        raise JobError(list(dict.fromkeys(reasons)), source)
    if draft.layout and draft.lacks_batch:
        raise CannotRunError(draft.layout, source)
    warnings += draft.notes + draft.layout  # the layout itself refuses to run
    job = TrainingJob.parse(draft.data, source=source)
    warnings.append(f"model: {parameters_text(job.model)} parameters")
    warnings += _beyond_table(job)
    warnings += contradictions(job.model, [*(each.path for each in readings if each.path != "-"), job.name or ""])
    return ImportedJob(draft.data, draft.leaf_origins(), tuple(dict.fromkeys(warnings)), job)


def _beyond_table(job: TrainingJob) -> list[str]:
    """A sequence longer than a table of learned positions, which a training run could not look up."""
    length, table = job.batch.seq_length, job.model.max_position_embeddings
    if job.model.position_embedding != "learned" or table is None or length <= table:
        return []
    return [f"batch.seq_length: {length} tokens, but the model has {table} learned positions; expected at most {table}"]


def _invalid(data: Mapping[str, Any]) -> list[str]:
    """What is wrong with the values that are there, whatever is missing beside them."""
    try:
        TrainingJob.parse(data)
    except JobError as error:
        return [reason for reason in error.reasons if ": missing" not in reason]
    return []


def _agreed(readings: Sequence[Reading], overrides: Mapping[str, Any]) -> tuple[dict[str, Setting], list[str]]:
    """The firmest value of every key path; two firm ones that differ are a reason, unless ``--set`` decides."""
    bases = {PurePath(name).name for reading in readings for name in reading.extends}
    candidates: dict[str, list[Setting]] = {}
    for reading in readings:
        is_base = PurePath(reading.path).name in bases
        for path, setting in _settings_under(reading, overrides).items():
            rank = Rank.INHERITED if is_base and setting.rank is Rank.STATED else setting.rank
            candidates.setdefault(path, []).append(Setting(setting.value, setting.origin, rank))
    settings, reasons = {}, []
    for path, options in candidates.items():
        best = min(option.rank for option in options)
        firm = [option for option in options if option.rank == best]
        settings[path] = firm[0]
        different = next((option for option in firm[1:] if option.value != firm[0].value), None)
        # Several files of one run may speak of several frameworks: the first is the one that was asked for first.
        is_open = best is not Rank.DEFAULT and path != "software.framework"
        if different and is_open and not _is_set(path, overrides):
            reasons.append(
                f"{path}: {shown(firm[0].value)} in {firm[0].origin}, {shown(different.value)} in {different.origin}; "
                f"expected one value, e.g. --set {path}={_plain(firm[0].value)}"
            )
    return settings, reasons


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_set(path: str, overrides: Mapping[str, Any]) -> bool:
    """Whether ``--set`` gives a key path, or the whole that it is a part of."""
    whole_model = any(given in overrides for given in WHOLE_MODEL) and path.startswith("model.")
    return (whole_model and not _is_lora(path)) or any(
        path == given or path.startswith(f"{given}.") for given in overrides
    )


def _is_lora(path: str) -> bool:
    """Whether a key path is about an adapter, which is trained on whichever base model."""
    return path.removeprefix("model.").removeprefix("overrides.").startswith("lora.")


def absent(readings: Sequence[Reading]) -> list[str]:
    """A sentence per file that another refers to and that was not given; none is opened for it."""
    given = {PurePath(reading.path).name for reading in readings}
    return [
        f"{PurePath(reading.path).name}: refers to {shown(name)}, which is not read from there; give it as another file"
        for reading in readings
        for name in (*reading.extends, *reading.refers)
        if PurePath(name).name not in given
    ]


def _choose_model(settings: dict[str, Setting], warnings: list[str]) -> None:
    """A model's name gives way to the sizes of another file; single sizes beside a name are changes to it."""
    named = settings.get("model.preset")
    if named is None:
        return
    sizes = [f"model.{size}" for size in _SIZES[:2]]
    if all(size in settings for size in sizes):
        del settings["model.preset"]
        warnings.append(
            f"model: {named.value} is named in {named.origin}; the sizes of {settings[sizes[0]].origin} hold"
        )
        return
    for path in [path for path in settings if path.startswith("model.") and path not in ("model.preset", "model.name")]:
        settings[f"model.overrides.{path[6:]}"] = settings.pop(path)


def _replaced_model(settings: Mapping[str, Setting], overrides: Mapping[str, Any]) -> list[str]:
    """What the files state of a model and ``--set`` of a whole one replaces."""
    given = next((path for path in WHOLE_MODEL if path in overrides), None)
    stated = [
        f"{path.partition('.')[2]} {setting.value}"[:80]
        for path, setting in settings.items()
        if path.startswith("model.") and path not in (*WHOLE_MODEL, "model.name", "model.vocab_multiple")
        and not _is_lora(path) and setting.rank <= Rank.INHERITED
    ]  # fmt: skip
    if not given or not stated:
        return []
    return [f"{given}: what is given replaces what the files state of model too: {', '.join(stated[:_MOST_TOLD])}"]


def _settings_under(reading: Reading, overrides: Mapping[str, Any]) -> dict[str, Setting]:
    """A file's settings; what follows from its own precision goes when ``--set`` gives another preset."""
    preset = reading.settings.get("precision.preset")
    given = overrides.get("precision.preset")
    if preset is None or given in (None, preset.value):
        return dict(reading.settings)
    return {
        path: setting
        for path, setting in reading.settings.items()
        if not path.startswith("precision.")
        or path == "precision.preset"
        or (setting.rank <= Rank.INHERITED and not str(setting.value).startswith(_NARROW))
    }


def _replaced_precision(settings: Mapping[str, Setting]) -> list[str]:
    """What the files state beside a preset and ``--set precision=NAME`` replaces with it."""
    stated = [
        f"{path.partition('.')[2]} {setting.value}"
        for path, setting in settings.items()
        if path.startswith("precision.") and path != "precision.preset" and setting.rank <= Rank.INHERITED
    ]
    if not stated:
        return []
    return [
        f"precision: what is given replaces all of it, {', '.join(stated)} of the files too; "
        "--set precision.preset=NAME changes the preset alone"
    ]


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Key paths as mappings in each other; a mapping where another file has a number stays, for validation to name."""
    nested: dict[str, Any] = {}
    for path, value in sorted(values.items(), key=lambda item: item[0].count(".")):
        *parents, key = path.split(".")
        node = nested
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        node[key] = value
    return nested


class _JobDraft:
    """A job's plain values while what follows from them is filled in; ``layout`` holds what does not fit the GPUs."""

    def __init__(self, settings: Mapping[str, Setting], overrides: Mapping[str, Any], reasons: list[str]) -> None:
        held = _nested({path: setting.value for path, setting in settings.items()})
        self.data: dict[str, Any] = _with_lora(overridden(held, overrides), settings, overrides)
        self.origins = {path: setting.origin for path, setting in settings.items()}
        self.overrides = overrides
        self.origins |= dict.fromkeys(overrides, "given with --set")
        self.reasons = reasons
        self.layout: list[str] = []
        self.notes: list[str] = []
        self._data_size: int | None = None

    def _part(self, key: str) -> dict[str, Any]:
        part = self.data.get(key)
        return part if isinstance(part, dict) else {}

    def _number(self, part: str, key: str) -> int | None:
        """A whole number of the data; a broken one is ``None`` here and reported by the job's validation."""
        try:
            value = self._part(part).get(key)
            return None if value is None else as_count(value)
        except (ValueError, TypeError, OverflowError):
            return None

    def _fill(self, path: str, value: Any, origin: str) -> None:
        part, key = path.split(".")
        self.data.setdefault(part, {})[key] = value
        self.origins[path] = origin

    def _layout_size(self) -> tuple[int, str]:
        """GPUs of one copy of the model, and how they are multiplied."""
        sizes = {axis: max(1, self._number("parallel", axis) or 1) for axis in ("tensor", "pipeline", "context")}
        written = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "tensor")
        return math.prod(sizes.values()), written

    def pad_vocabulary(self) -> None:
        """Megatron and its kin pad the vocabulary, so that every tensor rank has as many rows; ``--set`` is final."""
        model = self._part("model")
        step = self._number("model", "vocab_multiple")
        model.pop("vocab_multiple", None)
        size = self._number("model", "vocab_size")
        if not step or not size or step < 0 or size < 0 or "model.vocab_size" in self.overrides:
            return
        tensor = max(1, self._number("parallel", "tensor") or 1)
        padded = -(-size // (step * tensor)) * step * tensor
        if padded != size:
            note = f"{size} padded to a multiple of {step} x tensor {tensor}"
            self._fill("model.vocab_size", padded, f"{self.origins.get('model.vocab_size')}; {note}")

    def narrow_adapters(self) -> None:
        """To attention beside experts, whose adapters are not modelled; another file or ``--set`` may give the experts.

        Targets that ``--set`` gives are final.
        """
        is_final = any(_is_lora(f"{path}.") and not path.endswith(".rank") for path in self.overrides)
        for path in ("model.lora.targets", "model.overrides.lora.targets"):
            if is_final or _value_at(self.data, path) != "attention_and_mlp":
                continue
            narrow = overridden(self.data, {path: "attention"})
            if _has_experts(narrow["model"]):
                self.data = narrow
                self.notes.append(
                    f"{path}: adapters of experts are not modelled; predicted with those of attention alone "
                    f"({self._origin(path)})"
                )

    def derive_cluster(self) -> None:
        """Nodes from the GPUs in all,
        GPUs from a layout whose data-parallel size is stated; checks one by the other."""
        ranks, layout = self._layout_size()
        stated_data = self._number("parallel", "data")
        total, origin = self._number(*_GPUS), self.origins.get(".".join(_GPUS), "")
        self._part("cluster").pop(_GPUS[1], None)
        nodes, per_node = self._number("cluster", "num_nodes"), self._number("cluster", "gpus_per_node")
        if total is None and nodes is None and stated_data:
            total, origin = ranks * stated_data, f"{layout} x data {stated_data} ({self.origins.get('parallel.data')})"
        if total is not None and total > 0:
            self._split_nodes(total, origin)
            nodes, per_node = self._number("cluster", "num_nodes"), self._number("cluster", "gpus_per_node")
        if nodes is None or per_node is None:
            return
        given = nodes * per_node
        if given % ranks or (stated_data and given != ranks * stated_data):
            needed = f"{layout}{f' x data {stated_data}' if stated_data else ''} = {ranks * (stated_data or 1)}"
            wanted = "GPUs" if stated_data else "GPUs or a multiple of it"
            self.layout.append(
                f"cluster: {nodes} nodes x {per_node} = {given} GPUs ({self.origins.get('cluster.num_nodes')}), but "
                f"{needed} {wanted} are needed; e.g. --set cluster.num_gpus={ranks * (stated_data or 1)}"
            )
        else:
            self._data_size = given // ranks

    def _split_nodes(self, total: int, origin: str) -> None:
        nodes, per_node = self._number("cluster", "num_nodes"), self._number("cluster", "gpus_per_node")
        by_set = [key for key in ("num_nodes", "gpus_per_node") if f"cluster.{key}" in self.overrides]
        if nodes and per_node and nodes * per_node != total and ".".join(_GPUS) in self.overrides:
            nodes = None  # the files' nodes give way to the GPUs asked for
        elif nodes and per_node and len(by_set) == 2:
            return
        if nodes and per_node:
            if nodes * per_node != total:
                self.reasons.append(
                    f"cluster: {nodes} nodes x {per_node} = {nodes * per_node} GPUs, but {total} by {origin}; "
                    "expected the same number"
                )
            return
        if per_node is None:
            fits = [size for size in range(1, 9) if total % size == 0]
            per_node = total // nodes if nodes and total % nodes == 0 else max(fits)
            note = f"{origin} / {nodes} nodes" if nodes else f"nodes of {per_node} assumed"
            self._fill("cluster.gpus_per_node", per_node, note)
        if total % per_node:
            smaller = min(total, per_node)
            if total > per_node:
                self.reasons.append(f"cluster: {total} GPUs ({origin}) are no whole number of nodes of {per_node}")
                return
            self._fill("cluster.gpus_per_node", smaller, f"{origin}: less than one node")
            per_node = smaller
        self._fill("cluster.num_nodes", total // per_node, f"{total} GPUs ({origin}) / {per_node} a node")

    def reduce_micro_batch(self) -> None:
        """To a GPU's share of the global batch, by a framework that does so; ``--set`` is final."""
        is_reduced = self._part("batch").pop("is_micro_batch_reduced", False)
        micro, stated = self._number("batch", "micro_batch_size"), self._number("batch", "global_batch_size")
        if not is_reduced or not micro or not stated or not self._data_size or stated % self._data_size:
            return
        share = stated // self._data_size
        if 0 < share < micro and "batch.micro_batch_size" not in self.overrides:
            note = f"reduced from {micro} to {stated} sequences / {self._data_size} data-parallel GPUs"
            origin = self.origins.get("batch.micro_batch_size")
            self._fill("batch.micro_batch_size", share, f"{origin}; {note}")
            self.notes.append(f"batch.micro_batch_size: {note}, as the framework does ({origin})")

    def derive_batch(self) -> None:
        """The global batch from accumulation steps, or a check of it: batch = micro x steps x data-parallel GPUs."""
        steps, origin = self._number(*_STEPS), self.origins.get(".".join(_STEPS))
        self._part("batch").pop(_STEPS[1], None)
        micro, stated = self._number("batch", "micro_batch_size"), self._number("batch", "global_batch_size")
        data = self._data_size
        if not steps or not data:
            return
        if not micro:
            if stated and stated % (steps * data) == 0 and self._part("batch").get("micro_batch_size") is None:
                note = f"global batch {stated} / (accumulation {steps} x data {data})"
                self._fill("batch.micro_batch_size", stated // (steps * data), note)
            return
        product = micro * steps * data
        written = f"micro batch {micro} x accumulation {steps} x {data} data-parallel GPUs"
        if stated is None:
            self._fill("batch.global_batch_size", product, f"{written} ({origin})")
        elif stated != product and "batch.global_batch_size" not in self.overrides:
            self.reasons.append(
                f"batch.global_batch_size: {stated} ({self.origins.get('batch.global_batch_size')}), but {written} = "
                f"{product} ({origin}); expected the same number"
            )

    def ask(self, readings: Sequence[Reading]) -> None:
        """One line for everything that is missing: what a file left open, then what no file speaks of."""
        questions: dict[str, str] = {}
        for reading in readings:
            for path, why in reading.questions.items():
                questions[path] = f"{questions[path]}; {why}" if path in questions else why
        steps = ".".join(_STEPS)
        if "batch" in self.data and self._part("batch").get("global_batch_size") is not None:
            questions.pop(steps, None)
        if steps in self.overrides:
            questions.pop("batch.global_batch_size", None)
        if self._part("cluster").get("num_nodes") is not None:
            questions.pop(".".join(_GPUS), None)
        for path, why in questions.items():
            if not self._is_known(path):
                hint = _HINTS.get(path, f"--set {path}={_example(path)}")
                self.reasons.append(f"{path}: missing, as {why}; {hint}")
        for path in ("model", *(f"model.{size}" for size in _SIZES), *_ALWAYS):
            if path not in questions and not self._is_known(path):
                self.reasons.append(f"{path}: missing; {_HINTS.get(path, f'--set {path}={_example(path)}')}")
        cluster = self._part("cluster")
        if self._has_open_steps() and cluster.get("num_nodes") is not None and cluster.get("gpus_per_node") is None:
            self.reasons.append(
                "cluster.gpus_per_node: missing; the global batch follows from the number of GPUs; "
                "--set cluster.gpus_per_node=N, or cluster.num_gpus=N in place of cluster.num_nodes"
            )

    def _is_known(self, path: str) -> bool:
        part, _, key = path.partition(".")
        held = self.data.get(part)
        if path == "model.num_layers" and isinstance(held, dict) and held.get("num_decoder_layers") is not None:
            return True
        if part == "model" and isinstance(held, dict) and not held.keys() <= set(_BESIDE_MODEL):
            whole = any(held.get(way) is not None for way in ("preset", "config", "sizes"))
            return not key or whole or _value_at(held, key) is not None
        if part == "model":
            return bool(key) or isinstance(held, str)  # the whole model is asked for
        if path == "cluster.num_gpus":
            return self._part("cluster").get("num_nodes") is not None
        if path == "batch.global_batch_size" and self._has_open_steps():
            return True
        if path == "precision.preset" and isinstance(held, dict):
            return held.get("preset") is not None or held.get("compute") is not None
        return _value_at(held, key) is not None if key and not isinstance(held, str) else held is not None

    def _has_open_steps(self) -> bool:
        """Whether accumulation is known and only waits for the micro batch or the GPUs, which are asked for."""
        return ".".join(_STEPS) in self.origins and not (self._number("batch", "micro_batch_size") and self._data_size)

    @property
    def lacks_batch(self) -> bool:
        """Whether the global batch would follow from a data-parallel size that does not come out."""
        return self._part("batch").get("global_batch_size") is None

    def leaf_origins(self) -> dict[str, str]:
        """The origin of every value, by its key path in the data."""
        return {path: self._origin(path) for path, _ in _leaves(self.data, "")}

    def _origin(self, path: str) -> str:
        plain = path.replace("model.overrides.", "model.", 1).replace("model.sizes.", "model.", 1)
        if _is_set(path, self.overrides) or _is_set(plain, self.overrides):
            return "given with --set"
        return self.origins.get(path) or self.origins.get(plain) or "derived"


def _with_lora(data: dict[str, Any], settings: Mapping[str, Setting], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The data with the files' adapter on the model that ``--set`` gives; what it says of the adapter holds."""
    if not any(given in overrides for given in WHOLE_MODEL):
        return data
    kept = {
        f"model.overrides.{path.removeprefix('model.').removeprefix('overrides.')}": setting.value
        for path, setting in settings.items()
        if path.startswith("model.") and _is_lora(path)
    }
    given = {path: value for path, value in overrides.items() if path.startswith("model.") and _is_lora(path)}
    kept_on: dict[str, Any] = overridden(data, {**kept, **given})
    return kept_on


def _has_experts(model: Mapping[str, Any]) -> bool:
    """Whether a model is a mixture of experts, however it is given; one that is incomplete is refused elsewhere."""
    try:
        return ModelSpec.model_validate(model).moe is not None
    except ValueError:  # of the sizes, or of a config.json that --set names
        return False


def _value_at(node: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node


def _example(path: str) -> str:
    words = {"model.normalization": "rmsnorm|layernorm", "model.activation": "swiglu|gelu",
             "model.tie_embeddings": "true|false", "model.bias": "true|false",
             "model.position_embedding": "rope|learned|none", "parallel.sequence_parallel": "true|false",
             "parallel.recompute.mode": "none|selective|full",
             "parallel.sharding": "none|zero1|zero2|zero3|hsdp"}  # fmt: skip
    return words.get(path, "N")


def _leaves(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
