"""Which measured times are not learnt from, and why: a written decision, made without looking at any prediction.

In: a row of a runs table. Out: the reason for not learning from its time, empty for almost all rows. Such rows stay in
the corpus and are predicted like every other; held-out figures give them in a line of their own. A reason lies in what
the source says of the measurement (its spread, its precision, the machine), or in work that the tracer cannot see; it
is never the error of a prediction.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from dataset_builder.corpus.spellings import cell_text

FLAG_COLUMNS = ("label_flags", "label_info")  # the shipped table's, and the shared schema's

_FLAGGED = (
    ("FLAG_noisy", "its own steps spread by more than half (90th over 10th percentile above 1.5)"),
    ("FLAG_ambiguous_config", "the same times were published for two configurations"),
    ("implausible", "it would need more than the device's realistic peak"),
)
_NOTED = (
    ("AMBIGUOUS-PRECISION", "the source leaves its precision open"),
    ("offload", "activations move to host memory, which is not traced"),
)


def doubt(row: Mapping[str, Any]) -> str:
    """Why the time of this row is not learnt from; empty when it is."""
    flags = "; ".join(_text(row, column) for column in FLAG_COLUMNS)
    for word, reason in _FLAGGED:
        if word in flags:
            return reason
    name = _text(row, "model_name")
    for word, reason in _NOTED:
        if word in f"{name}; {_text(row, 'notes')}":
            return reason
    if _text(row, "arch").startswith("hybrid-mamba"):
        return "its state-space layers are not traced"
    if _text(row, "source_id") == "megatron-golden" and name.endswith("_1node") and "GB200" in _text(row, "gpu"):
        # All 46 take 0.6 to 3.1 s, 1.8 to 32 (median 7) times their own two-node twins on twice the GPUs.
        return "single-node GB200 tests take several times their two-node twins whatever they compute"
    return ""


def peak_doubts(peaks: Sequence[tuple[Hashable, int, float]]) -> list[str]:
    """Why each peak memory is not learnt from; empty when it is.

    In, of every run: what it shares with those that differ from it in the micro batch only, its micro batch, and GB.
    All else alike, a larger micro batch never needs less. So it is in all of the shipped table but for one pair: where
    bigscience tuned 176B to 196B models on 384 GPUs with TP8, peaks rise by 11 to 13 GB from 2 to 4 samples (39 to 52,
    45 to 56, 39 to 50, 61 to 72), but in one layout fall from 65 to 56; 45 would be like the others.
    """
    reasons = []
    for shared, size, peak in peaks:
        below = [other for key, larger, other in peaks if key == shared and larger > size and other < peak]
        reasons.append(f"the same run with a larger micro batch needs less: {min(below):g} GB" if below else "")
    return reasons


def label_flags(label_info: str) -> str:
    """The flags among a source's remarks on the measured time, without the figures computed from it."""
    return "; ".join(re.findall(r"FLAG[^;]*", label_info))


def _text(row: Mapping[str, Any], column: str) -> str:
    return cell_text(row.get(column), column) or ""
