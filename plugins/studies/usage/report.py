"""Shows the use of experts as text and as a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ....bench.report.charts import ChartPanel, axis, empty_chart
from ....common.text import table
from ..figures import INKS, ChartRows, bars, draw, heat_map
from ..report import percent
from .count import LayerUsage, Usage

USAGE_FILE = "usage.png"

MAX_EXPERTS, MAX_GROUPS, MAX_LAYERS = 8, 20, 12
"""How many experts and groups the text shows for a layer, and layers the figure; JSON has all."""


def usage_text(usage: Usage, layer: str | None = None) -> str:
    """Returns a row for each layer, notes, and each class's experts in a layer.

    By default, that is the last layer.
    """
    lines = [f"experts used by {usage.inputs:,} inputs", "", _layers(usage)]
    notes = list(_notes(usage))
    lines += ["", *notes] if notes else []
    grouped = [row for row in usage.layers if row.groups and layer in (None, row.layer)]
    if grouped:
        lines += ["", _by_group(usage, grouped[-1])]
    return "\n".join(lines)


def _layers(usage: Usage) -> str:
    """Returns a table of the layers, without columns for which no layer has a value."""
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
    """Returns the expert that is chosen most, or least, with its share."""
    if layer.chosen is None:
        return "–"
    expert = int(np.argmax(layer.chosen) if most else np.argmin(layer.chosen))
    return f"{expert} ({layer.chosen[expert]:.1%})"


def _notes(usage: Usage) -> Iterator[str]:
    """Yields notes on the numbers."""
    all_kept = [_name(usage, layer) for layer in usage.layers if layer.chosen is None]
    if all_kept:
        yield (
            f"all experts are kept in {_listed(all_kept)}: nothing is chosen, so only mean gates "
            "show which experts matter; --k K counts choices"
        )
    for layer in usage.layers:
        unused = [str(expert) for expert in layer.unused]
        if unused:
            plural = len(unused) > 1
            yield (
                f"expert{'s' if plural else ''} {_listed(unused)} of {_name(usage, layer)} "
                f"{'are' if plural else 'is'} chosen for none of the {layer.of:,} {layer.chosen_by}"
            )
    if any(layer.balance_loss is not None for layer in usage.layers):
        yield (
            "balance loss: E·Σf·P, with f the share of the tokens that choose an expert and P its "
            "mean probability; it is k if all experts are used equally"
        )
    routed = [layer for layer in usage.layers if layer.routed and layer.chosen]
    unknown = [_name(usage, layer) for layer in routed if layer.probabilities is None]
    if unknown:
        yield (
            f"the router of {_listed(unknown)} does not compute probabilities of all experts, so "
            "its balance loss is unknown"
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_EXPERTS
    return ", ".join(names[:MAX_EXPERTS]) + (f" and {more} more" if more > 0 else "")


def _by_group(usage: Usage, layer: LayerUsage) -> str:
    """Returns a table of the experts that a layer uses most for each class or subgroup."""
    what = "mean gate" if layer.chosen is None else f"share of its {layer.chosen_by}"
    rows = []
    for group in layer.groups[:MAX_GROUPS]:
        shares = np.array(group.gates if group.chosen is None else group.chosen)
        order = np.argsort(-shares, kind="stable")[:MAX_EXPERTS]
        rows.append(
            (group.group, group.of, ", ".join(f"{e} {shares[e]:.0%}" for e in order if shares[e]))
        )
    heads = (usage.grouped_by, layer.chosen_by, f"experts of {_name(usage, layer)}, {what}")
    more = len(layer.groups) - MAX_GROUPS
    return table(heads, rows) + (f"\n… and {more} more" if more > 0 else "")


def draw_usage(usage: Usage, path: Path) -> None:
    """Writes a PNG: how often each expert of each layer is chosen, and by which class."""
    panels: list[ChartPanel] = []
    for layer in usage.layers[-MAX_LAYERS:]:
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
        largest = max((cell["value"] for cell in colours), default=1.0)
        groups = heat_map(
            "expert",
            range(layer.experts),
            "",
            "blues",
            (0, largest),
            labels=len(layer.groups) <= MAX_GROUPS,
        )
        by = f"By {usage.grouped_by}" if colours else ""
        panels.append((by, groups if colours else empty_chart(""), colours))
    draw(path, panels)
