"""One job in several variants side by side: what changes, where the time goes, and why a narrower format may not pay.

``infer --compare precision=bf16_mixed,fp8_mixed parallel.tensor=1,2`` asks for the product of the values. All times in
seconds. Nothing here loads torch before the variants are known to be valid jobs.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dataset_builder.job.document import JobText, job_text, parse_document
from dataset_builder.job.errors import CannotRunError, JobError
from dataset_builder.job.schema import WHOLE_MODEL, TrainingJob

if TYPE_CHECKING:
    from dataset_builder.job.importers.formats import ImportedFiles
    from gnn_predictor.critical_path import Breakdown
    from gnn_predictor.prediction import Prediction

SCHEMA_VERSION = 1
MAX_VARIANTS = 64
# A narrower format pays when its speed-up is at least this share of the gain that its GEMM peak suggests.
LEAST_SHARE_OF_PEAK_GAIN = 0.5
_PARTS: dict[str, tuple[str, ...]] = {
    "gemm": ("gemm", "grouped_gemm"),
    "attention": ("attention",),
    "cast_and_quantize": ("cast", "quantize"),
    "optimizer": ("optimizer",),
    "host": ("host",),
}
PARTS = ("gemm", "attention", "cast_and_quantize", "communication", "optimizer", "other", "host")
# A part is named as a reason when it holds this share of what is missing to the peak ratio.
_LEAST_SHARE_OF_GAP = 0.1
_MOST_REASONS = 4
# Shares and changes below this are noise in a sentence.
_NOTABLE = 0.05


@dataclass(frozen=True)
class Variant:
    """A job with some of its keys changed, and its prediction or the reason why it cannot run."""

    settings: Mapping[str, Any]
    job: TrainingJob
    outcome: Prediction | CannotRunError

    @property
    def prediction(self) -> Prediction | None:
        return None if isinstance(self.outcome, CannotRunError) else self.outcome

    @property
    def reason(self) -> str:
        """Why it cannot run, in one line; empty when it can."""
        return "; ".join(_reasons(self.outcome)) if isinstance(self.outcome, CannotRunError) else ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why variant ``variant`` is less than ``threshold`` times as fast as ``versus`` (both indices of variants)."""

    variant: int
    versus: int
    speedup: float
    gemm_peak_ratio: float
    threshold: float
    text: str


@dataclass(frozen=True)
class Comparison:
    """Variants of one job; speed-ups are over the first that runs."""

    variants: tuple[Variant, ...]

    @property
    def reference(self) -> int | None:
        """The first variant that runs; None when none does."""
        return next((index for index, each in enumerate(self.variants) if each.prediction is not None), None)

    def speedup(self, prediction: Prediction) -> float:
        reference = self.variants[self.reference or 0].prediction
        assert reference is not None, "a comparison with a prediction has a reference"
        return reference.iteration_time_s / prediction.iteration_time_s

    @property
    def explanations(self) -> tuple[Explanation, ...]:
        found = (self._explanation(index) for index in range(len(self.variants)))
        return tuple(each for each in found if each is not None)

    def _explanation(self, index: int) -> Explanation | None:
        """Against the next slower GEMM format under the same other settings; None when there is none, or it pays."""
        narrow = self.variants[index].prediction
        others = _other_settings(self.variants[index])
        if narrow is None:
            return None
        slower: list[tuple[float, int]] = []
        for place, each in enumerate(self.variants):
            if each.prediction is not None and _other_settings(each) == others:
                ratio = narrow.gemm_peak_flops_per_s / each.prediction.gemm_peak_flops_per_s
                slower += [(ratio, place)] if ratio > 1 + _NOTABLE else []
        if not slower:
            return None
        ratio, versus = min(slower)
        wide = self.variants[versus].prediction
        assert wide is not None, "chosen among those that run"
        speedup, threshold = wide.iteration_time_s / narrow.iteration_time_s, paying_speedup(ratio)
        if speedup >= threshold:
            return None
        text = (
            f"{self._format_label(index)} is {speedup:.2f}x of {self._format_label(versus)} (GEMM peak {ratio:.1f}x)"
            f"{_with(others)}: {', '.join(_why(narrow, wide, ratio))}"
        )
        return Explanation(index, versus, speedup, ratio, threshold, text)

    def _format_label(self, index: int) -> str:
        settings = {key: value for key, value in self.variants[index].settings.items() if _is_precision(key)}
        if tuple(settings) == ("precision",):
            return value_text(settings["precision"])
        return " ".join(f"{key.removeprefix('precision.')}={value_text(value)}" for key, value in settings.items())

    def to_dict(self) -> dict[str, Any]:
        """The value that ``infer --compare ... --format json`` prints (see ``report/comparison.schema.json``)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "base": self.variants[0].job.resolved().model_dump(mode="json"),
            "reference": self.reference,
            "variants": [self._variant(each) for each in self.variants],
            "explanations": [asdict(each) for each in self.explanations],
        }

    def _variant(self, variant: Variant) -> dict[str, Any]:
        prediction = variant.prediction
        if prediction is None:
            return {"set": dict(variant.settings), "status": "cannot_run", "reason": variant.reason}
        seconds = parts(prediction.breakdown)
        return {
            "set": dict(variant.settings),
            "status": "ok",
            "iteration_time_s": prediction.iteration_time_s,
            "iteration_time_low_s": prediction.iteration_time_low_s,
            "iteration_time_high_s": prediction.iteration_time_high_s,
            "speedup": self.speedup(prediction),
            "tokens_per_s": prediction.tokens_per_s,
            "peak_memory_bytes": peak_memory_bytes(prediction),
            "fits_memory": prediction.fits_memory,
            "mfu": prediction.mfu,
            "parts": seconds | {"communication": dict(prediction.breakdown.exposed_communication_by_dtype)},
            "in_domain": prediction.in_domain,
            "warnings": list(prediction.warnings),
        }


def read_variants(
    source: str | JobText | ImportedFiles, settings: Mapping[str, Any], choices: Mapping[str, Sequence[Any]]
) -> list[tuple[dict[str, Any], TrainingJob]]:
    """A job under every combination of ``choices``; ``settings`` hold for all. JobError lists every problem."""
    name, job_under = _reader(source)
    variants, problems = [], dict[str, None]()
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        try:
            job = job_under(_in_order(settings, chosen))
        except JobError as error:
            problems |= dict.fromkeys(error.reasons)
        else:
            variants.append((chosen, job))
    if problems:
        raise JobError(list(problems), source=name)
    return variants


def _reader(source: str | JobText | ImportedFiles) -> tuple[str, Callable[[Mapping[str, Any]], TrainingJob]]:
    """The source's name, and the job it holds under settings; a file is read once for all variants."""
    if not isinstance(source, str | JobText):
        return source.name, source.job
    text = job_text(source)
    data = text.values()

    def job_under(settings: Mapping[str, Any]) -> TrainingJob:
        return TrainingJob.changed(data, settings, source=text.name, folder=text.folder)

    return text.name, job_under


def compare(
    variants: Sequence[tuple[Mapping[str, Any], TrainingJob]], checkpoint: str | None = None, force: bool = False
) -> Comparison:
    """Predicts the variants in one batch; one that cannot run stays in the answer with its reason."""
    from gnn_predictor.prediction import predict_each

    outcomes = predict_each([job for _, job in variants], checkpoint=checkpoint, force=force)
    return Comparison(tuple(Variant(chosen, job, each) for (chosen, job), each in zip(variants, outcomes, strict=True)))


def read_choices(
    texts: Sequence[str], option: str = "--compare", most: int | None = MAX_VARIANTS
) -> dict[str, list[Any]]:
    """``KEY.PATH=V1,V2`` as key paths to values of YAML types; ValueError says what is wrong with one."""
    choices: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not values or not all(part.strip() for part in key.split(".")):
            raise ValueError(f"{option} {text}: expected KEY.PATH=V1,V2, e.g. precision=bf16_mixed,fp8_mixed")
        if key in choices:
            raise ValueError(f"{option} {text}: {key} is given twice; expected all its values in one list")
        choices[key] = parse_document(f"[{values}]".encode(), f"{option} {key}")
    count = math.prod(map(len, choices.values()))
    if most is not None and count > most:
        product = " x ".join(str(len(values)) for values in choices.values())
        raise ValueError(f"{option}: got {count} = {product} variants; expected at most {most}")
    return choices


def _in_order(settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The whole before its parts, so that ``--set precision.attention=fp32`` holds under every compared precision."""
    merged = {**settings, **chosen}
    # Another preset or config replaces the whole model, sizes set on it included.
    return dict(sorted(merged.items(), key=lambda item: (item[0] not in WHOLE_MODEL, item[0].count("."))))


def paying_speedup(gemm_peak_ratio: float) -> float:
    """The least speed-up at which a format with this ratio of GEMM peaks counts as paying."""
    return 1 + LEAST_SHARE_OF_PEAK_GAIN * (gemm_peak_ratio - 1)


def parts(breakdown: Breakdown) -> dict[str, float]:
    """Seconds of the critical path by part, exposed communication included; they add up to the iteration."""
    seconds = {part: _sum(breakdown.by_kind.get(kind, 0.0) for kind in kinds) for part, kinds in _PARTS.items()}
    seconds["communication"] = _sum(breakdown.exposed_communication.values())
    seconds["other"] = _sum(breakdown.by_kind[kind] for kind in _other_kinds(breakdown))
    return {part: seconds[part] for part in PARTS}


def _why(narrow: Prediction, wide: Prediction, gemm_peak_ratio: float) -> list[str]:
    """The reasons of the estimates as they are before a floor scales all parts alike, those that did not change too."""
    now, before = (each.breakdown.scaled(1 / each.raised_by) for each in (narrow, wide))
    speedup = sum(parts(before).values()) / sum(parts(now).values())
    told = reasons(now, before, gemm_peak_ratio) if speedup < paying_speedup(gemm_peak_ratio) else []
    if narrow.raised_by > 1:
        told.append(f"all of it raised to the physical floor of its {narrow.floor.bound} ({narrow.raised_by - 1:+.0%})")
    return told


def reasons(narrow: Breakdown, wide: Breakdown, gemm_peak_ratio: float) -> list[str]:
    """Phrases that say what keeps ``narrow`` from being ``gemm_peak_ratio`` times as fast as ``wide``, worst first.

    Had every part become faster by the ratio, nothing would be missing; so what each part takes beyond that adds up to
    what is missing of the whole.
    """
    now, before = parts(narrow), parts(wide)
    missing = {part: now[part] - before[part] / gemm_peak_ratio for part in PARTS}
    gap = sum(missing.values())
    ranked = sorted(PARTS, key=lambda part: -missing[part])
    named = [part for part in ranked if missing[part] >= _LEAST_SHARE_OF_GAP * gap][:_MOST_REASONS]
    return [_phrase(part, narrow, wide) for part in named or ranked[:1]]


def _phrase(part: str, narrow: Breakdown, wide: Breakdown) -> str:
    now, before = parts(narrow), parts(wide)
    share, was = now[part] / sum(now.values()), before[part]
    if part == "gemm":
        return _gemm_phrase(narrow, wide)
    growth = (now[part] - was) / sum(before.values())
    if part == "cast_and_quantize" and growth > 0.005:
        return f"casts and quantisation {growth:+.0%}"
    names = {
        "attention": "attention", "cast_and_quantize": "casts and quantisation", "optimizer": "optimizer",
        "communication": "exposed communication", "host": "waiting for the host", "other": _name_of_other(narrow),
    }  # fmt: skip
    change = now[part] / was - 1 if was > 0 else math.inf
    if abs(change) < _NOTABLE:
        return f"{names[part]} {share:.0%} unchanged"
    return f"{names[part]} {share:.0%}" + (f" ({change:+.0%})" if math.isfinite(change) else " (new)")


def _gemm_phrase(narrow: Breakdown, wide: Breakdown) -> str:
    """How much faster the matrix products became, and what part of them a narrower format cannot help."""
    now, before = parts(narrow)["gemm"], parts(wide)["gemm"]
    bounds = [narrow.by_bound.get(kind, {}) for kind in _PARTS["gemm"]]
    small = _sum(bound.get("memory", 0.0) + bound.get("launch", 0.0) for bound in bounds) / now
    details = [f"{small:.0%} of their time memory- or launch-bound"] if small >= _NOTABLE else []
    for dtype, seconds in narrow.gemm_by_dtype.items():
        if dtype in wide.gemm_by_dtype and seconds / now >= _NOTABLE:
            details.append(f"{seconds / now:.0%} still in {dtype}")
    return f"GEMMs {before / now:.2f}x" + (f" ({', '.join(details)})" if details else " by their shapes")


def _name_of_other(breakdown: Breakdown) -> str:
    """The kernels outside matrix products and attention are memory-bound unless they are tiny."""
    bounds = [breakdown.by_bound.get(kind, {}) for kind in _other_kinds(breakdown)]
    memory, whole = _sum(bound.get("memory", 0.0) for bound in bounds), _sum(sum(bound.values()) for bound in bounds)
    return "memory-bound kernels" if memory >= whole / 2 else "small kernels"


def _other_kinds(breakdown: Breakdown) -> list[str]:
    named = set(itertools.chain.from_iterable(_PARTS.values()))
    return [kind for kind in breakdown.by_kind if kind not in named]


def peak_memory_bytes(prediction: Prediction) -> float:
    """Of the fullest pipeline stage."""
    return max(stage.peak_memory_bytes for stage in prediction.stages)


def value_text(value: Any) -> str:
    """A compared value as one would type it."""
    return value if isinstance(value, str) else json.dumps(value)


def _reasons(error: CannotRunError) -> list[str]:
    """Without the stages that fit, of those that do not only the first, and without the hint at ``--force``."""
    stages = [each for each in error.reasons if each.startswith("memory: stage")]
    full = next((each for each in stages if each.endswith("does not fit")), None)
    kept = [each for each in error.reasons if each not in stages or each is full]
    return [each for each in kept if not each.startswith("--force")]


def _is_precision(key: str) -> bool:
    return key == "precision" or key.startswith("precision.")


def _other_settings(variant: Variant) -> dict[str, Any]:
    return {key: value for key, value in variant.settings.items() if not _is_precision(key)}


def _with(settings: Mapping[str, Any]) -> str:
    named = ", ".join(f"{key}={value_text(value)}" for key, value in settings.items())
    return f" with {named}" if named else ""


def _sum(values: Iterable[float]) -> float:
    return math.fsum(values)
