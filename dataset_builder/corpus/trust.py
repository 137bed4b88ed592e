"""Which measured times are not learnt from, and why: a written decision, made without looking at any prediction.

In: a row of a runs table. Out: the reason for not learning from its time, empty for almost all rows. Such rows stay in
the corpus and are predicted like every other; held-out figures give them in a line of their own. A reason lies in what
the source says of the measurement (its spread, its precision, the machine), or in work that the tracer cannot see; it
is never the error of a prediction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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


def label_flags(label_info: str) -> str:
    """The flags among a source's remarks on the measured time, without the figures computed from it."""
    return "; ".join(re.findall(r"FLAG[^;]*", label_info))


def _text(row: Mapping[str, Any], column: str) -> str:
    return cell_text(row.get(column), column) or ""
