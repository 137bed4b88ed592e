"""``python -m gnn_predictor.report.accuracy_plots docs/images``: the held-out errors of a checkpoint as pictures.

In: the held-out rows and the reference table that a checkpoint carries. Out: ``accuracy-errors.svg``, how many runs of
each protocol are within which error, with the noise floor beside them; ``accuracy-sources.svg``, the MAPE of every
source, seen and unseen; ``accuracy-measured.png``, predicted against measured times. Needs matplotlib (extra ``dev``).
"""

from __future__ import annotations

import sys
from pathlib import Path

from dataset_builder.command_line import CommandParser


def _parser() -> CommandParser:
    name = "gnn_predictor.report.accuracy_plots"
    parser = CommandParser(name, "Draws a checkpoint's held-out errors.", ["docs/images"])
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the pictures go")
    parser.add_argument("--checkpoint", metavar="DIR", help="default: the released one")
    return parser


if __name__ == "__main__" and {"-h", "--help", "--version"} & set(sys.argv[1:]):
    _parser().parse_args()  # answers and ends, before what takes seconds to import

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gnn_predictor.baselines import read_reference
from gnn_predictor.card import PROTOCOLS
from gnn_predictor.checkpoint import CheckpointError, load_checkpoint
from gnn_predictor.metrics import repeat_deviations
from gnn_predictor.widening import read_held_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind tell apart; grey lines are read on white and on black.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#7f7f7f")
_GREY = "#7f7f7f"
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "accuracy", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "text.color": _GREY, "axes.labelcolor": _GREY, "axes.edgecolor": _GREY, "xtick.color": _GREY, "ytick.color": _GREY,
    "savefig.transparent": True, "legend.frameon": False,
}  # fmt: skip
_PERCENT_SHOWN = (0.5, 100.0)
_SHORT_NAMES = 24


def draw(held_out: pd.DataFrame, reference: pd.DataFrame, folder: Path) -> list[Path]:
    """Writes the pictures; returns their paths.

    ``held_out``: rows of :mod:`gnn_predictor.widening`; ``reference``: what the same runs are.
    """
    import matplotlib

    matplotlib.use("Agg")
    columns = ["source_id", "precision"]
    rows = held_out.join(reference.set_index("run_id")[columns], on="run_id", how="inner")
    rows["error_percent"] = 100.0 * np.expm1(-rows["log_error"]).abs()
    with matplotlib.rc_context(_STYLE):
        return [
            _saved(_errors(rows, repeat_deviations(reference)), folder / "accuracy-errors.svg"),
            _saved(_sources(rows), folder / "accuracy-sources.svg"),
            _saved(_measured(rows[rows["protocol"] == "P1"]), folder / "accuracy-measured.png"),
        ]


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _saved(figure: Figure, path: Path) -> Path:
    """Without a date, so that equal figures are equal files."""
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _errors(rows: pd.DataFrame, repeats: pd.Series[float]) -> Figure:
    figure, axes = _axes(7.0, 3.8)
    protocols = [name for name in PROTOCOLS if name in set(rows["protocol"])]
    curves = {f"{name} {PROTOCOLS[name]}": rows.loc[rows["protocol"] == name, "error_percent"] for name in protocols}
    for (label, errors), colour in zip(curves.items(), _COLOURS, strict=False):
        axes.plot(*_cumulative(errors), color=colour, label=label)
    axes.plot(*_cumulative(repeats), color=_GREY, linestyle="--", label="noise floor: repeats of one job")
    axes.set(xscale="log", xlim=_PERCENT_SHOWN, ylim=(0, 100), xlabel="error, at most (%)", ylabel="runs (%)")
    axes.set_xticks([0.5, 1, 2, 5, 10, 20, 50, 100], labels=["0.5", "1", "2", "5", "10", "20", "50", "100"])
    axes.grid(alpha=0.25)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return figure


def _cumulative(errors: pd.Series[float]) -> tuple[np.ndarray, np.ndarray]:
    """Sorted errors, and the share of runs that have no more, in percent."""
    values = np.sort(errors.to_numpy(float))
    return values, 100.0 * np.arange(1, len(values) + 1) / len(values)


def _sources(rows: pd.DataFrame) -> Figure:
    """Sources by their error as unseen jobs, the best on top."""
    table = rows.pivot_table(index="source_id", columns="protocol", values="error_percent", aggfunc="mean")
    shown = table[[name for name in ("P1", "P5") if name in table]].sort_values("P1", ascending=False)
    counts = rows.loc[rows["protocol"] == "P1", "source_id"].value_counts()
    figure, axes = _axes(7.0, 0.27 * len(shown) + 1.1)
    places = np.arange(len(shown))
    for (name, errors), colour, marker in zip(shown.items(), (_COLOURS[0], _COLOURS[3]), "os", strict=False):
        axes.plot(errors, places, marker, color=colour, label=f"{name} {PROTOCOLS[str(name)]}")
    axes.set_yticks(places, labels=[f"{name[:_SHORT_NAMES]} ({counts.get(name, 0):,})" for name in shown.index])
    axes.set(xlabel="MAPE (%)", xlim=(0, None))
    axes.grid(axis="x", alpha=0.25)
    figure.legend(loc="outside upper center", ncols=2, fontsize=8)
    return figure


def _measured(rows: pd.DataFrame) -> Figure:
    figure, axes = _axes(5.0, 4.6)
    for (name, own), colour in zip(rows.groupby("precision"), _COLOURS, strict=False):
        predicted = own["iter_time_s"] * np.exp(-own["log_error"])
        axes.plot(own["iter_time_s"], predicted, ".", color=colour, markersize=2.5, alpha=0.6, label=str(name))
    ends = [rows["iter_time_s"].min(), rows["iter_time_s"].max()]
    axes.plot(ends, ends, color=_GREY, linewidth=0.8)
    axes.set(
        xscale="log", yscale="log", xlabel="measured (s)", ylabel="predicted (s), each by a network without its job"
    )
    axes.legend(fontsize=8, markerscale=4)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = _parser().read(arguments)
    try:
        path = load_checkpoint(options.checkpoint).path
        reference = read_reference(path) if path else None
        if path is None or reference is None:
            raise CheckpointError(f"checkpoint {path}: carries no reference table; train it with this version")
        options.folder.mkdir(parents=True, exist_ok=True)
        for each in draw(read_held_out(path), reference, options.folder):
            print(each)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
