"""What a search found in a report: the record by which the core finds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....bench.report.content import (
    Cell,
    PageChart,
    ReportSection,
    RowDecision,
    SectionContent,
    TableContent,
)
from ....bench.report.summary import caveat, kept_text, milliseconds, percent, sections, summary
from ....bench.results import Interval, Results
from ....common.text import size
from .record import TUNING, FrontPoint, TuningRecord, tuning_in

API = 1


def _decision(results: Results) -> RowDecision | None:
    """What the search was asked, and what it has chosen."""
    search = tuning_in(results.analyses)
    if search is None:
        return None
    keeps = (
        kept_text(point.confirmed_kept, point.confirmed.low, search.metric)
        for point in search.points
        if point.chosen and point.confirmed is not None and point.confirmed_kept is not None
    )
    return RowDecision(
        keep=search.keep, asked=_bounds_text(search), keeps=next(keeps, ""), recipe=search.recipe
    )


def _bounds_text(search: TuningRecord) -> str:
    """What a search was asked for."""
    bounds = []
    if search.keep is not None:
        bounds.append(f"to keep {percent(search.keep)} of the {search.metric}")
    if search.max_latency_ms is not None:
        bounds.append(f"to take {search.max_latency_ms:g} ms at the most")
    if search.max_bytes is not None:
        bounds.append(f"to take {size(search.max_bytes)} at the most")
    return (
        f"Asked was {' and '.join(bounds)}; confirmed on {search.confirming:,} inputs that the "
        "search did not see."
    )


def _search(results: Results) -> SectionContent | None:
    """The points that a search found on its front, and those that were confirmed."""
    search = tuning_in(results.analyses)
    if search is None:
        return None
    heads = ("ms", "size", "kept", "95% interval", "confirmed", "95% interval", "what it is")
    lines: list[Sequence[Cell]] = []
    for point in search.points:
        if not point.front and point.confirmed is None:
            continue
        confirmed: tuple[Cell, Cell] = (("–", "quiet"), "")
        if point.confirmed is not None and point.confirmed_kept is not None:
            held = search.keep is None or point.confirmed.low >= search.keep
            kind = "good" if held else "bad"
            confirmed = ((percent(point.confirmed_kept), kind), _interval_text(point.confirmed))
        chosen = " (chosen)" if point.chosen else ""
        lines.append(
            (
                milliseconds(point.ms),
                size(point.bytes),
                percent(point.kept),
                _interval_text(point.searched),
                *confirmed,
                f"{point.text}{chosen}",
            )
        )
    intro = (
        f"{len(search.points)} graphs were made in {search.seconds:.0f} s. The search saw "
        f"{search.searching} inputs; {search.confirming} others, read once, confirm what it found. "
        f"Kept is of the untouched model's {search.metric}."
    )
    groups = {f"{search.model}, batch {search.batch}": lines}
    table = TableContent("", heads, groups)
    return SectionContent(tables=(table,), intro=tuple(filter(None, (intro, search.why_runtime))))


def _interval_text(interval: Interval) -> str:
    """An interval of shares: `98.1% to 99.9%`."""
    return f"{percent(interval.low)} to {percent(interval.high)}"


def _points(results: Results) -> dict[str, Any] | None:
    """What the page draws of a search: every point, with what hovering over it says."""
    search, shown = tuning_in(results.analyses), sections(results)
    if search is None:
        return None
    return {
        "keep": search.keep,
        "metric": search.metric,
        "points": [asdict(point) | {"told": _hover_lines(point)} for point in search.points],
        "answer": summary(shown[0]) if shown else "",
        "told": caveat(shown[0]) if shown else "",
    }


def _hover_lines(point: FrontPoint) -> list[str]:
    lines = [f"{milliseconds(point.ms)} ms, {size(point.bytes)}"]
    lines.append(f"{percent(point.kept)} kept, {_interval_text(point.searched)}")
    if point.confirmed is not None and point.confirmed_kept is not None:
        lines.append(
            f"confirmed: {percent(point.confirmed_kept)}, {_interval_text(point.confirmed)}"
        )
    return [*lines, *point.text.split("; ")]


SECTION = ReportSection(
    name="search",
    title="What tune found",
    place=30,
    content=_search,
    shows=TUNING,
    chart=PageChart(_points, Path(__file__).parent / "assets"),
    decision=_decision,
)
