"""The use of experts as text and as a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ....bench.report.charts import ChartPanel, axis, empty_chart
from ....common.text import table
from ..figures import INKS, ChartRows, bars, cells, draw
from ..report import percent
from .count import LayerUsage, Usage

USAGE_FILE = "usage.png"

MOST_EXPERTS, MOST_GROUPS, MOST_LAYERS = 8, 20, 12
"""The largest number of a layer's experts and groups in the text, and of layers in the figure; JSON
has all."""


def usage_text(usage: Usage, layer: str | None = None) -> str:
    """Returns a row for each layer, notes, and each class's experts in the given layer.

    The default is the last layer.
    """
    lines = [f"experts used by {usage.inputs:,} inputs", "", _layers(usage)]
    notes = [*_notes(usage)]
    lines += ["", *notes] if notes else []
    grouped = [each for each in usage.layers if each.groups and layer in (None, each.layer)]
    if grouped:
        lines += ["", _by_group(usage, grouped[-1])]
    return "\n".join(lines)


def _layers(usage: Usage) -> str:
    """The table of the layers, with the columns for which some layer has a value."""
    columns: dict[str, list[str]] = {
        "layer": [_name(usage, layer) for layer in usage.layers],
        "k": [f"{layer.k} of {layer.experts}" for layer in usage.layers],
        "chosen most": [_extreme(layer, most=True) for layer in usage.layers],
        "chosen least": [_extreme(layer, most=False) for layer in usage.layers],
        "unused": [
            "–" if layer.chosen is None else str(len(layer.unused)) for layer in usage.layers
        ],
        "largest mean gate": [
            f"{int(np.argmax(layer.gates))} ({max(layer.gates):.1%})" for layer in usage.layers
        ],
        "balance loss": [
            "–" if layer.balance_loss is None else f"{layer.balance_loss:.3f}"
            for layer in usage.layers
        ],
        "dropped": [percent(layer.dropped) for layer in usage.layers],
        "uncomputed": [percent(layer.uncomputed) for layer in usage.layers],
    }
    shown = {name: cells for name, cells in columns.items() if any(cell != "–" for cell in cells)}
    return table(tuple(shown), list(zip(*shown.values(), strict=True)))


def _name(usage: Usage, layer: LayerUsage) -> str:
    several = sum(other.layer == layer.layer for other in usage.layers) > 1
    return f"{layer.layer} level {layer.level}" if several else layer.layer


def _extreme(layer: LayerUsage, *, most: bool) -> str:
    """The expert that the most, or the fewest, inputs or tokens choose, and their share."""
    if layer.chosen is None:
        return "–"
    expert = int(np.argmax(layer.chosen) if most else np.argmin(layer.chosen))
    return f"{expert} ({layer.chosen[expert]:.1%})"


def _notes(usage: Usage) -> Iterator[str]:
    """Notes on the numbers."""
    all_kept = [_name(usage, layer) for layer in usage.layers if layer.chosen is None]
    if all_kept:
        yield (
            f"all experts are kept in {_listed(all_kept)}: nothing is chosen there, and only mean "
            "gates show which experts matter; --k K counts choices"
        )
    for layer in usage.layers:
        unused = [str(expert) for expert in layer.unused]
        if unused:
            plural = len(unused) > 1
            yield (
                f"expert{'s' if plural else ''} {_listed(unused)} of {_name(usage, layer)} "
                f"{'are' if plural else 'is'} chosen by none of the {layer.of:,} {layer.chosen_by}"
            )
    if any(layer.balance_loss is not None for layer in usage.layers):
        yield (
            "balance loss: E·Σf·P, with f the share of the tokens that choose an expert and P its "
            "mean probability; k if all are used equally"
        )
    routed = [layer for layer in usage.layers if layer.routed and layer.chosen]
    unknown = [_name(usage, layer) for layer in routed if layer.probabilities is None]
    if unknown:
        yield (
            f"the router of {_listed(unknown)} does not compute probabilities of all experts, so "
            "its balance loss is unknown"
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_EXPERTS
    return ", ".join(names[:MOST_EXPERTS]) + (f" and {more} more" if more > 0 else "")


def _by_group(usage: Usage, layer: LayerUsage) -> str:
    """The experts that each class, attribute or subgroup chooses most, in one layer."""
    what = "mean gate" if layer.chosen is None else f"share of its {layer.chosen_by}"
    rows = []
    for group in layer.groups[:MOST_GROUPS]:
        shares = np.array(group.gates if group.chosen is None else group.chosen)
        order = np.argsort(-shares, kind="stable")[:MOST_EXPERTS]
        rows.append(
            (group.group, group.of, ", ".join(f"{e} {shares[e]:.0%}" for e in order if shares[e]))
        )
    heads = (usage.grouped_by, layer.chosen_by, f"experts of {_name(usage, layer)}, {what}")
    more = len(layer.groups) - MOST_GROUPS
    return table(heads, rows) + (f"\n… and {more} more" if more > 0 else "")


def draw_usage(usage: Usage, path: Path) -> None:
    """Writes a PNG: how often each expert of each layer is chosen, and by which class."""
    panels: list[ChartPanel] = []
    for layer in usage.layers[-MOST_LAYERS:]:
        what = (
            f"Share of {layer.of:,} {layer.chosen_by}" if layer.chosen is not None else "Mean gate"
        )
        rows = [{"x": x, "y": y, "ink": INKS[0]} for x, y in enumerate(layer.shown)]
        title = f"{_name(usage, layer)}, k = {layer.k} of {layer.experts}"
        panels.append((title, bars("expert", axis("y", "y", what, "percent")), rows))
        colours: ChartRows = [
            {"row": str(group.group), "x": x, "value": value}
            for group in layer.groups
            for x, value in enumerate(group.gates if group.chosen is None else group.chosen)
        ]
        most = max((cell["value"] for cell in colours), default=1.0)
        groups = cells(
            "expert",
            range(layer.experts),
            "",
            "blues",
            (0, most),
            labels=len(layer.groups) <= MOST_GROUPS,
        )
        by = f"By {usage.grouped_by}" if colours else ""
        panels.append((by, groups if colours else empty_chart(""), colours))
    draw(path, panels)
