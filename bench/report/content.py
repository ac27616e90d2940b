"""The door for sections of a report: what each holds, and how it shows what a plugin has found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.registry import Registry
from ...common.text import printable
from ..results import Results

Cell = str | tuple[str, str]
"""Text, or text and what it is: good, bad, quiet, or heat-0 to heat-9."""


@dataclass(frozen=True, slots=True)
class TableContent:
    """A table: its title, the headings of its columns, and groups of rows by their heading."""

    title: str
    heads: Sequence[str]
    groups: Mapping[str, Sequence[Sequence[Cell]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionContent:
    """What a section holds: sentences before and after its tables."""

    tables: tuple[TableContent, ...]
    intro: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDecision:
    """What has chosen the last of the rows, by what was asked of it.

    `keep` is the share that was to be kept, None where nothing was said. `asked` is a sentence, and
    `keeps` what the chosen row keeps, if that was confirmed. `recipe` exports it again.
    """

    keep: float | None
    asked: str
    keeps: str
    recipe: str


@dataclass(frozen=True, slots=True)
class PageChart:
    """A card of charts on the page, for a section.

    `points` returns the data that the page has under the section's name, None for no chart. A file
    `NAME.html` in the folder `assets` is the card, and `NAME.js` a function without arguments that
    draws it, or hides it without data, by the functions of `report.js`.
    """

    points: Callable[[Results], dict[str, Any] | None]
    assets: Path

    def asset(self, name: str) -> str:
        """Returns the text of one of its files."""
        return (self.assets / name).read_text(encoding="utf-8").strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """A section of a report, at its place on the page; those of a plugin show what it has found.

    `shows` is the name that these findings have among the analyses of `results.json`; of results
    without them nothing else is called. `content` returns None where there is nothing to show.
    `text` returns findings for the terminal, `figures` writes them to a folder, `chart` draws them
    on the page, and `decision` returns what they have chosen of the rows.
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

    def is_of(self, results: Results) -> bool:
        """Whether these results hold what it shows; a section of rows shows those of any."""
        return not self.shows or self.shows in results.analyses


SECTIONS = Registry("moexport.sections", ReportSection)
"""Those of plugins; the core's own are in `sections.py`."""


def showing(results: Results) -> list[ReportSection]:
    """Returns the sections of plugins that show findings of these results, in their order."""
    if not results.analyses:
        return []
    by_name = {section.shows: section for section in SECTIONS}
    return [by_name[name] for name in results.analyses if name in by_name]


def decision_of(results: Results) -> RowDecision | None:
    """Returns what has chosen the last row of these results, None where nothing has."""
    decisions = (section.decision(results) for section in showing(results))
    return next((decision for decision in decisions if decision is not None), None)


def left_out(results: Results) -> str:
    """Returns a sentence on findings that no section shows; empty where all are shown."""
    shown = {section.shows for section in showing(results)}
    names = [name for name in results.analyses if name not in shown]
    if not names:
        return ""
    listed = printable(", ".join(names))
    return f"Left out: {listed}. Nothing that is installed shows this; results.json has it."
