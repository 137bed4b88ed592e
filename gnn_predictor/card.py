"""The figures of a checkpoint as text: its model card, and blocks of figures in the README and the documentation.

``python -m gnn_predictor.card README.md docs/accuracy.md docs/guides/memory.md`` writes the released checkpoint's
figures into the files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataset_builder.command_line import CommandParser
from gnn_predictor.run_classes import GPU_COUNTS, MODEL_SIZES

if TYPE_CHECKING:
    from gnn_predictor.checkpoint import Checkpoint

PROTOCOLS = {
    "P1": "unseen jobs",
    "P2": "unseen precision",
    "P3": "unseen precision, its operators too",
    "P4": "unseen GPU",
    "P5": "unseen source",
}

_BREAKDOWNS: dict[str, tuple[str, Sequence[str]]] = {
    "by_precision": ("precision", ()),
    "by_gpu": ("GPU", ()),
    "by_source": ("source", ()),
    "by_architecture": ("architecture", ()),
    "by_model_size": ("model size", MODEL_SIZES),
    "by_gpu_count": ("number of GPUs", GPU_COUNTS),
}
_ABLATIONS = {
    "full": "with all of it",
    "without_operators": "without operator tables",
    "without_format_properties": "without format properties",
    "without_hardware": "without hardware specification",
}
_ABLATIONS_TEXT = """## What each kind of knowledge is worth

P2's held-out rows, predicted by networks that were fitted on its splits without one kind of knowledge each. All figures
are MAPE, the median apart; those of the network alone, if not said otherwise. It is one network a split, the first of
the two that P2's own figures are made with.

- Without operator tables: a network that learns from runs alone, no measured operator has a weight.
- Without format properties: a format is only a name. Its bits, exponent, mantissa, block size and relative peak are
  hidden, and a kernel's work is described as that of 16 bits.
- Without hardware specification: nothing that follows from the specification of a device or its links is read, so a
  known device is only its learned vector.

What each kernel takes at the peaks of its device, in its own formats, stays in all of them: an estimate is a multiple
of that, which is physics and not learnt. So do the measured runs of like jobs, where they are blended in."""
_PEAK_METERS = {
    "megatron-golden": "Megatron-LM's tests (allocator's peak, last rank)",
    "bigscience": "BigScience (nvidia-smi, fullest GPU)",
}
_OPERATOR_HEAD = ("kind", "operators", "median error", "median error by input format")


def model_card(checkpoint: Checkpoint) -> str:
    """The checkpoint's ``README.md``: what it is for, how well it does on what it never saw, where it comes from."""
    config = checkpoint.config
    gpus, precisions = ", ".join(config.domain.gpus), ", ".join(config.domain.precisions)
    ranges = "\n".join(f"- {name}: {low:g} to {high:g}" for name, (low, high) in config.domain.ranges.items())
    return f"""# Model card: {config.name}

Predicts the time of one training iteration of a transformer, and of every pipeline stage, from a job file.
A graph neural network over the training graph gives seconds per kernel and message; a pipeline schedule adds them up.
What measured runs of like jobs took draws the sum, by a Gaussian process over whole jobs, the more the nearer they are.

- Intended use: planning and comparing training jobs before they run, at any mix of floating-point formats.
- Not intended: inference serving, models that are not transformers, jobs far outside the ranges below (such a
  prediction is marked as out of domain and has a wider interval).
- Licence: Apache-2.0.
- Format version {config.format_version}, features {config.feature_hash}, corpus {config.corpus_hash}.

## How accurate

{figures(checkpoint.metrics)}

The {config.interval.level:.0%} interval is calibrated on these held-out errors.

## Trained on

Public measurements only; every row of the corpus names its source and licence.

- GPUs: {gpus or "none"}
- precisions: {precisions or "none"}
{ranges}
"""


def figures(metrics: Mapping[str, Any]) -> str:
    """A Markdown table of held-out errors by protocol, beside the baselines on the same rows."""
    protocols = {name: metrics[name] for name in PROTOCOLS if name in metrics}
    if not protocols:
        return "This checkpoint has not been evaluated."
    baselines = sorted({name for each in protocols.values() for name in each["baselines"]})
    rows = [
        [
            f"{name} {PROTOCOLS[name]}",
            f"{each['count']:,}",
            _percent(each["mape_percent"]),
            _percent(each["median_ape_percent"]),
            _percent(each["macro_mape_by_source_percent"]),
            _percent(each.get("macro_mape_over_left_out_percent", {}).get("network")),
            *(_percent(each.get("parts", {}).get(part, {}).get("mape_percent")) for part in ("network", "runs")),
            *(_percent(each["baselines"].get(baseline, {}).get("mape_percent")) for baseline in baselines),
        ]
        for name, each in protocols.items()
    ]
    averages = ["MAPE", "median", "over sources", "over what is unseen", "network alone", "runs alone"]
    head = ["held out", "runs", *averages, *(f"{name} MAPE" for name in baselines)]
    unseen_jobs = metrics.get("P1", {})
    sentences = [
        speedup_sentence(unseen_jobs),
        ranking_sentence(unseen_jobs.get("layout_ranking")),
        memory_sentence(metrics.get("memory")),
    ]
    return _table(head, rows) + "".join(sentences)


def reading(metrics: Mapping[str, Any]) -> str:
    """Which protocol's error answers for a job, and where a prediction says so; nothing without both protocols."""
    if not {"P1", "P5"} <= metrics.keys():
        return ""
    known, new = (
        f"{_percent(of['mape_percent'])} on average and {_percent(of['median_ape_percent'])} in the median"
        for of in (metrics["P1"], metrics["P5"])
    )
    return (
        f"Which figure answers for a job: {known} (P1) where its siblings, of the same source and cluster, were "
        f"measured; {new} (P5) on a new cluster, before `gnn_predictor.calibrate`. `infer --format json` tells which a "
        "job is nearer to: `provenance.measured_runs_share` is the share that measured runs like it have in the "
        "estimate, near 1 for most jobs of P1 and below one half for most of P5. It compares jobs, not owners, so "
        "a high share does not make a new cluster a measured one; the interval is the job's own, wider the less was "
        "measured near it."
    )


def breakdowns(metrics: Mapping[str, Any]) -> str:
    """Markdown tables of every protocol's MAPE by precision, GPU, source, architecture, size and number of GPUs."""
    protocols = {name: metrics[name] for name in PROTOCOLS if name in metrics}
    parts = [f"### By {title}\n\n{_breakdown(protocols, key, order)}" for key, (title, order) in _BREAKDOWNS.items()]
    parts.append(_speedups(metrics["P1"]))
    return "\n\n".join([noise_sentence(metrics.get("noise_floor")), *parts, _operators(metrics["operators"])])


def ablations(metrics: Mapping[str, Any]) -> str:
    """A section on P2 without one kind of knowledge each; nothing where that was not run."""
    figures_of = metrics.get("P2", {}).get("ablations")
    if not figures_of:
        return ""
    each = [figures_of[name] for name in _ABLATIONS]
    over_left_out = "macro_mape_over_left_out_percent"
    lines = {
        "all runs": [own["mape_percent"] for own in each],
        "median": [own["median_ape_percent"] for own in each],
        "over what is unseen": [own[over_left_out] for own in each],
        **{f"{name} unseen": [own["by_precision"][name]["mape_percent"] for own in each]
           for name in each[0]["by_precision"]},
        "precision speed-up": [own["precision_speedup"]["mape_percent"] for own in each],
        "all runs, blended with measured runs": [own["blended"]["mape_percent"] for own in each],
        "over what is unseen, blended": [own["blended"][over_left_out] for own in each],
    }  # fmt: skip
    rows = [[name, *map(_percent, values)] for name, values in lines.items()]
    return f"{_ABLATIONS_TEXT}\n\n{_table(['', *_ABLATIONS.values()], rows)}"


def noise_sentence(noise: Mapping[str, Any] | None) -> str:
    """How far measurements are from each other; nothing where no job was measured twice."""
    if not noise or not noise["count"]:
        return ""
    median, mean, p90 = (_percent(noise[f"{name}_percent"]) for name in ("median", "mean", "p90"))
    return (
        f"The noise floor: {noise['count']:,} runs are repeats of a job. Half of them are within {median} of the job's "
        f"median, nine of ten within {p90}, and they are {mean} from it on average. No prediction can be better."
    )


def _breakdown(protocols: Mapping[str, Mapping[str, Any]], key: str, order: Sequence[str]) -> str:
    """Runs, MAPE and median of P1 with B2 beside it, and the MAPE of the others; most runs first, or in ``order``."""
    first = protocols["P1"]
    names = [name for name in order if name in first[key]] or sorted(
        first[key], key=lambda name: -int(first[key][name]["count"])
    )
    others = [name for name in protocols if name != "P1"]
    rows = [
        [
            name,
            f"{first[key][name]['count']:,}",
            _percent(first[key][name]["mape_percent"]),
            _percent(first[key][name]["median_ape_percent"]),
            _percent(first["baselines"].get("b2", {}).get(key, {}).get(name, {}).get("mape_percent")),
            *(_percent(protocols[other][key].get(name, {}).get("mape_percent")) for other in others),
        ]
        for name in names
    ]
    head = ["", "runs", "P1 MAPE", "P1 median", "B2 on P1", *(f"{name} MAPE" for name in others)]
    return _table(head, rows)


def _speedups(unseen_jobs: Mapping[str, Any]) -> str:
    """P6: the error of the speed-up from one precision to another, on pairs of runs that differ in nothing else."""
    of = {"error": unseen_jobs, **{f"{name.upper()} error": own for name, own in unseen_jobs["baselines"].items()}}
    pairs = unseen_jobs["precision_speedup"]["by_pair"]
    rows = [
        [
            name.replace("->", " to "),
            f"{each['count']:,}",
            *(_percent(own["precision_speedup"]["by_pair"].get(name, {}).get("mape_percent")) for own in of.values()),
        ]
        for name, each in sorted(pairs.items(), key=lambda item: -int(item[1]["count"]))
    ]
    table = _table(["speed-up", "pairs", *of], rows)
    return f"### Precision speed-up (P6)\n\nPairs of P1's unseen runs that differ only in precision.\n\n{table}"


def _operators(operators: Mapping[str, Any]) -> str:
    """Held-out operators by kind, and the formats of each."""
    rows = [
        [
            kind,
            f"{each['count']:,}",
            _percent(each["median_ape_percent"]),
            ", ".join(f"{fmt} {_percent(own['median_ape_percent'])}" for fmt, own in each["by_dtype"].items()),
        ]
        for kind, each in sorted(operators["by_kind"].items(), key=lambda item: -int(item[1]["count"]))
    ]
    return f"### Operators\n\nShapes that P1's networks never saw.\n\n{_table(_OPERATOR_HEAD, rows)}"


def speedup_sentence(unseen_jobs: Mapping[str, Any]) -> str:
    """P6: how well speed-ups between precisions are predicted, of P1's figures; nothing where there are no pairs."""
    speedup = unseen_jobs.get("precision_speedup", {})
    if not speedup.get("count"):
        return ""
    blind = unseen_jobs["baselines"].get("b3", {}).get("precision_speedup", {})
    beside = f" (B3 {_percent(blind['mape_percent'])})" if blind.get("count") else ""
    mean, median, direction = (
        _percent(speedup[f"{name}_percent"]) for name in ("mape", "median_ape", "right_direction")
    )
    return (
        f"\n\nP6, precision speed-up: of {speedup['count']:,} pairs of unseen runs that differ only in precision, it "
        f"is predicted with {mean} mean error{beside}, {median} median, and in the right direction in {direction}."
    )


def ranking_sentence(ranking: Mapping[str, Any] | None) -> str:
    """How well the layouts of unseen jobs are ranked; nothing where it was not figured."""
    if not ranking or not ranking["groups_for_top"]:
        return ""
    return (
        f"\n\nOf {ranking['groups_for_top']:,} unseen jobs measured in four layouts or more, the fastest layout is "
        f"among the three predicted fastest in {_percent(ranking['top3_hit_percent'])}; what is predicted fastest is "
        f"{_percent(ranking['mean_regret_percent'])} slower than the fastest on average."
    )


def memory_sentence(memory: Mapping[str, Any] | None) -> str:
    """How well peak memory was predicted for jobs that were not learnt from; nothing without measured peaks."""
    if not memory:
        return ""
    large = memory["large_jobs"]
    sentence = (
        f"\n\nPeak memory of unseen jobs, {memory['count']:,} measured peaks: {_percent(memory['mape_percent'])} MAPE, "
        f"{_percent(memory['median_ape_percent'])} median"
    )
    if large["count"]:
        low = f"{large['more_than_15_percent_low'] or 'none'} of them more than 15% low"
        sentence += f"; of the {large['count']:,} above 20 GB: {_percent(large['mape_percent'])} MAPE, {low}"
    doubted = memory.get("doubted", {"count": 0})
    if doubted["count"]:
        sentence += (
            f". Apart from these, {doubted['count']} peak{'s' * (doubted['count'] > 1)} above what the same source "
            f"measured with a larger micro batch: {_percent(doubted['mape_percent'])} MAPE"
        )
    return sentence + "."


def peaks(metrics: Mapping[str, Any]) -> str:
    """A Markdown table of held-out peaks of memory, by what is known and by source; nothing without measured peaks."""
    memory = metrics.get("memory")
    if not memory:
        return ""
    of = {"counted only": memory["counted"], "with what is learnt": memory, "of jobs above 20 GB": memory["large_jobs"]}
    of |= {_PEAK_METERS.get(source, source): own for source, own in memory["by_source"].items()}
    rows = [
        [name, f"{own['count']:,}", *(_percent(own[f"{key}_percent"]) for key in ("mape", "median_ape", "signed_mean"))]
        for name, own in of.items()
        if own["count"]
    ]
    table = _table(["measured peaks", "count", "MAPE", "median", "mean"], rows)
    coverage = f"The 90% interval holds {_percent(memory['interval_coverage'] * 100)} of peaks it was not made with."
    return f"{table}{memory_sentence(memory)} {coverage}"


def with_figures(text: str, metrics: Mapping[str, Any]) -> str:
    """``text`` with its blocks of figures replaced; raises ValueError when it has none.

    A block stands between ``<!-- name -->`` and ``<!-- /name -->``: ``metrics`` by protocol, ``ablations`` by what the
    network does not know, ``breakdowns`` by what distinguishes the runs, ``reading`` says which of them answers for a
    job, ``memory`` has those of peak memory.
    """
    blocks = {
        "reading": reading,
        "metrics": figures,
        "ablations": ablations,
        "breakdowns": breakdowns,
        "memory": peaks,
    }
    there = [name for name in blocks if f"<!-- {name} -->" in text and f"<!-- /{name} -->" in text]
    if not there:
        raise ValueError(f"no block between {' or '.join(f'<!-- {name} --> and <!-- /{name} -->' for name in blocks)}")
    for name in there:
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{blocks[name](metrics)}\n{end}{rest.partition(end)[2]}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites the figures in the files named; returns the exit code."""
    parser = CommandParser("gnn_predictor.card", "Writes the released checkpoint's figures into files.", ["README.md"])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.md", help="has a block of figures")
    options = parser.read(arguments)
    from gnn_predictor.checkpoint import load_checkpoint

    metrics = load_checkpoint().metrics
    for file in options.files:
        try:
            file.write_text(with_figures(file.read_text(encoding="utf-8"), metrics), encoding="utf-8")
        except (OSError, ValueError) as error:
            print(f"{file}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
            return 2
    return 0


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"


if __name__ == "__main__":
    sys.exit(main())
