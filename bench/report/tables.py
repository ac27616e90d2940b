"""The report's tables beside the rows, as plain data: parity, what changed, which experts.

A card is `id`, `title`, `intro` and `notes` (sentences) and `tables`: each has a `title`, `heads`
and `groups` of lines under a heading. A cell is text, or text and what it is: good, bad, quiet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..analyses.findings import ExpertStudy
from ..analyses.report import titled
from .compare import Change, Comparison
from .summary import Section, line_name, milliseconds, percent

Cell = str | tuple[str, str]
Card = dict[str, Any]

PARITY_NOTE = (
    "Against PyTorch with the same k: the share of samples for which every layer chose the same "
    "experts, the mean Jaccard index of the chosen sets, and the outputs. There is nothing to "
    "compare where all experts are kept, and in PyTorch's own rows."
)

RANDOM_NOTE = (
    "Random: experts drawn anew for each input and layer, once per seed; σ is the seeds' sample "
    "standard deviation. All sets: best per input knows the label; best for all was chosen on the "
    "same labels; distinct best counts the sets with the least loss for some input. Shares are "
    "means over inputs."
)


def _card(
    name: str,
    title: str,
    tables: Sequence[tuple[str, Sequence[str], Mapping[str, Sequence[Sequence[Cell]]]]],
    *,
    intro: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Card:
    listed = [
        {
            "title": each,
            "heads": heads,
            "groups": {key: rows for key, rows in groups.items() if rows},
        }
        for each, heads, groups in tables
        if any(groups.values())
    ]
    return {"id": name, "title": title, "intro": intro, "tables": listed, "notes": notes}


def parity_card(shown: Sequence[Section]) -> Card:
    """Returns, per graph and k, whether PyTorch's experts were chosen and its values computed."""
    groups: dict[str, list[Sequence[Cell]]] = {}
    for section in shown:
        # Agreement does not depend on the batch size: it is taken once, and told once.
        if section.model in groups:
            continue
        lines: list[Sequence[Cell]] = []
        for line in section.series:
            for row in line.rows:
                routing, parity = row.routing, row.parity
                if routing is None and parity is None:
                    continue
                same = ("–", "–") if routing is None else _agreement(routing.exact, routing.jaccard)
                near = ("–", "–")
                if parity is not None:
                    near = (f"{parity.max_abs:.2g}", f"{parity.cosine:.7f}")
                lines.append((line.name, f"{row.k}/{row.experts}", *same, *near))
        groups[section.model] = lines
    heads = ("Engine", "k", "Same experts", "Jaccard", "Largest difference", "Cosine")
    note = PARITY_NOTE if any(groups.values()) else "Not measured."
    return _card("parity", "Parity with PyTorch", [("", heads, groups)], notes=[note])


def _agreement(exact: float, jaccard: float) -> tuple[str, str]:
    return f"{exact:.2%}", f"{jaccard:.4f}"


def comparison_card(comparison: Comparison) -> Card:
    """Returns what changed since an earlier file."""
    heads = ("Engine", "k", "Before, ms", "Now, ms", "Change", "Kept before", "Kept now")
    groups: dict[str, list[Sequence[Cell]]] = {}
    for change in comparison.notable:
        key = f"{change.now.model}, batch {change.now.batch}"
        groups.setdefault(key, []).append(_change(change))
    return _card(
        "comparison",
        "What changed",
        [("", heads, groups)],
        intro=[comparison.sentence],
        notes=comparison.notes,
    )


def _change(change: Change) -> tuple[Cell, ...]:
    moved: Cell = "–"
    if change.ratio is not None:
        sign = f"{change.ratio - 1:+.0%}"
        kind = "good" if change.ratio < 1 else "bad"
        moved = (sign, kind) if change.beyond_spread else (f"≈ {sign}", "quiet")
    both = (change.before, change.now)
    latencies = ["–" if r.median_ms is None else milliseconds(r.median_ms) for r in both]
    kept = ["–" if row.kept is None else percent(row.kept) for row in both]
    name = f"{change.now.k}/{change.now.experts}"
    return (line_name(change.now), name, *latencies, moved, *kept)


def analyses_card(studies: Sequence[ExpertStudy]) -> Card:
    """Returns the tables of the studies of experts."""
    tables = []
    for title, (header, rows) in titled(studies).items():
        groups: dict[str, list[Sequence[Cell]]] = {}
        for model, *cells in rows:
            groups.setdefault(model, []).append(cells)
        tables.append((title, header[1:], groups))
    return _card("experts", "Which experts", tables, notes=[RANDOM_NOTE])
