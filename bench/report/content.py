"""The registry of a report's sections: their content, and how they show a plugin's findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.registry import Registry
from ...common.text import printable
from ..results import Results

Cell = str | tuple[str, str]
"""Text, or text and its style: good, bad, quiet, or heat-0 to heat-9."""


@dataclass(frozen=True, slots=True)
class TableContent:
    """A table: its title, the headings of its columns, and groups of rows by their heading."""

    title: str
    heads: Sequence[str]
    groups: Mapping[str, Sequence[Sequence[Cell]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionContent:
    """The content of a section: sentences before and after its tables."""

    tables: tuple[TableContent, ...]
    intro: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDecision:
    """The search that chose the last row, and the request it fulfils.

    `keep` is the requested share, if any. `request` is a sentence on it, and `keeps` on what
    the chosen row keeps, if confirmed. `recipe` is the file to export it with.
    """

    keep: float | None
    request: str
    keeps: str
    recipe: str


@dataclass(frozen=True, slots=True)
class PageChart:
    """A card of charts on the page, for a section.

    `points` returns the page's data under the section's name, or None for no chart. In the folder
    `assets`, `NAME.html` is the card, and `NAME.js` is a function without arguments that
    draws it with the functions of `report.js`, or hides it if there are no data.
    """

    points: Callable[[Results], dict[str, Any] | None]
    assets: Path

    def asset(self, name: str) -> str:
        """Returns the text of one of the chart's files."""
        return (self.assets / name).read_text(encoding="utf-8").strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """A section of a report, at its place on the page; a plugin's section shows its findings.

    `shows` is the name of these findings among the analyses of `results.json`; no function is
    called for results without them. `content` returns None if there is nothing to show. `text`
    returns findings for the terminal, `figures` writes them to a folder, `chart` draws them on the
    page, and `decision` returns the search that chose a row.
    """

    name: str
    title: str
    place: int
    content: Callable[[Results], SectionContent | None]
    shows: str = ""
    text: Callable[[Results], str] = lambda _: ""
    figures: Callable[[Results, Path], Sequence[Path]] = lambda *_: ()
    chart: PageChart | None = None
    decision: Callable[[Results], RowDecision | None] = lambda _: None

    def applies_to(self, results: Results) -> bool:
        """Returns whether results have the section's data; without `shows` it applies to all."""
        return not self.shows or self.shows in results.analyses


SECTIONS = Registry("moexport.sections", ReportSection)
"""The sections of plugins; the built-in ones are in `sections.py`."""


def plugin_sections(results: Results) -> list[ReportSection]:
    """Returns the sections of plugins that show findings of these results, in their order."""
    if not results.analyses:
        return []
    by_name = {section.shows: section for section in SECTIONS}
    return [by_name[name] for name in results.analyses if name in by_name]


def decision_of(results: Results) -> RowDecision | None:
    """Returns the search that chose the last row of these results, if any."""
    decisions = (section.decision(results) for section in plugin_sections(results))
    return next((decision for decision in decisions if decision is not None), None)


def left_out(results: Results) -> str:
    """Returns a sentence on findings that no section shows; empty if all are shown."""
    shown = {section.shows for section in plugin_sections(results)}
    names = [name for name in results.analyses if name not in shown]
    if not names:
        return ""
    listed = printable(", ".join(names))
    return f"Left out: {listed}. No installed plugin shows these findings; results.json has them."
