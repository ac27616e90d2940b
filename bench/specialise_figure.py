"""The figure of `specialise`: which classes each expert's removal changes, and how many."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .report.figures import COLOURS, INK, REFERENCE, STYLE
from .specialise import ExpertEffect, Specialisation
from .specialise_views import expert_name, ranked

ROWS = 40
"""Experts drawn: those that change most."""


def draw(found: Specialisation, path: Path) -> None:
    """Writes a PNG: a row per expert, its change of each class beside its polysemanticity."""
    import matplotlib as mpl

    shown = ranked(found)[:ROWS]
    with mpl.rc_context(STYLE):
        height = 1.9 + 0.21 * max(len(shown), 3)
        figure = Figure(figsize=(8.6, height), dpi=200, layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.9, 1))
        left.set_title("Change in accuracy, by class")
        if shown:
            _changes(figure, left, found, shown)
            _distances(right, found, shown)
        else:
            for axes in (left, right):
                axes.set_axis_off()
            left.text(0.5, 0.5, "no expert's removal changes a class", ha="center", color=INK)
        figure.suptitle(_title(found, len(shown)), fontsize=9.5, color=INK)
        figure.savefig(path, format="png")


def _title(found: Specialisation, shown: int) -> str:
    changing = len(ranked(found))
    text = (
        f"{Path(found.model).stem}, layer {found.layer}: removing {changing} of "
        f"{len(found.experts)} experts changes a class ({sum(found.samples)} inputs)"
    )
    return text if shown == changing else f"{text}; the {shown} that change most"


def _changes(figure: Figure, axes: Axes, found: Specialisation, shown: list[ExpertEffect]) -> None:
    """A cell per expert and class: red where accuracy is lost, blue where it is won."""
    table = np.array([[np.nan if c is None else c for c in e.change] for e in shown])
    largest = float(np.nanmax(np.abs(table)))
    image = axes.imshow(
        table, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest"
    )
    axes.grid(visible=False)
    axes.set_yticks(range(len(shown)), [expert_name(found, each) for each in shown], fontsize=7.5)
    axes.xaxis.set_major_locator(MaxNLocator(20, integer=True))
    axes.set_xlabel("class")
    axes.set_ylabel("expert removed")
    bar = figure.colorbar(image, ax=axes, location="bottom", aspect=45, pad=0.02)
    bar.ax.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    bar.outline.set_visible(False)


def _distances(axes: Axes, found: Specialisation, shown: list[ExpertEffect]) -> None:
    """A dot per expert, and the mean over all that change a class."""
    values = [each.polysemanticity or 0.0 for each in shown]
    axes.hlines(range(len(shown)), 0, values, color="#d5dbe4", linewidth=1)
    axes.plot(values, range(len(shown)), "o", color=COLOURS[0], markersize=4)
    mean = found.mean_polysemanticity
    assert mean is not None
    axes.set_title(f"Polysemanticity, mean {mean:.2f}")
    axes.axvline(mean, color=REFERENCE, linestyle="--", linewidth=1.2)
    axes.set_xlim(left=0)
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.set_xlabel("0: one class lost, no other changed")
