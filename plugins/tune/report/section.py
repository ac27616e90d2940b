"""Registers the report's section on a search."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....bench.report.charts import SYMBOLS, ink_of, trade_off
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
from ..recipe import bounds_text
from .record import TUNING, FrontPoint, tuning_in

API = 1


def _decision(results: Results) -> RowDecision | None:
    search = tuning_in(results.analyses)
    if search is None:
        return None
    keeps = (
        kept_text(point.confirmed_kept, point.confirmed.low, search.metric)
        for point in search.points
        if point.chosen and point.confirmed is not None and point.confirmed_kept is not None
    )
    bounds = bounds_text(search.keep, search.metric, search.max_latency_ms, search.max_bytes)
    text = (
        f"The requirement was {bounds}; the result is confirmed on {search.confirming:,} inputs "
        "that the search did not use."
    )
    return RowDecision(keep=search.keep, request=text, keeps=next(keeps, ""), recipe=search.recipe)


def _search(results: Results) -> SectionContent | None:
    """Returns a table of the points on the front and those that were tested to confirm."""
    search = tuning_in(results.analyses)
    if search is None:
        return None
    heads = ("ms", "size", "kept", "95% interval", "confirmed", "95% interval", "model")
    lines: list[Sequence[Cell]] = []
    for point in search.points:
        if not point.front and point.confirmed is None:
            continue
        confirmed: tuple[Cell, Cell] = (("–", "quiet"), "")
        if point.confirmed is not None and point.confirmed_kept is not None:
            enough = search.keep is None or point.confirmed.low >= search.keep
            kind = "good" if enough else "bad"
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
        f"{len(search.points)} graphs were measured in {search.seconds:.0f} s. The search used "
        f"{search.searching} inputs; {search.confirming} others, read once, confirm its result. "
        f"Kept is the share of the untouched model's {search.metric} that a point keeps."
    )
    groups = {f"{search.model}, batch {search.batch}": lines}
    table = TableContent("", heads, groups)
    return SectionContent(tables=(table,), intro=tuple(filter(None, (intro, search.why_runtime))))


def _interval_text(interval: Interval) -> str:
    """Formats an interval of shares, such as `98.1% to 99.9%`."""
    return f"{percent(interval.low)} to {percent(interval.high)}"


def _points(results: Results) -> dict[str, Any] | None:
    """Returns the data of the page's chart: every point, with its tooltip."""
    search, shown = tuning_in(results.analyses), sections(results)
    if search is None:
        return None
    precisions = dict.fromkeys(map(_precision, search.points))
    return {
        "keep": search.keep,
        "keys": [(name.upper(), ink_of(name)) for name in precisions],
        "chart": trade_off(f"{search.metric} kept"),
        "points": [_point(index, point) for index, point in enumerate(search.points)],
        "chosen": next((i for i, point in enumerate(search.points) if point.chosen), None),
        "answer": summary(shown[0]) if shown else "",
        "told": caveat(shown[0]) if shown else "",
    }


def _point(index: int, point: FrontPoint) -> dict[str, Any]:
    """Returns a point of the chart, with its interval if it is on the front."""
    bars = {"kept_low": point.searched.low, "kept_high": point.searched.high}
    return {
        "index": index,
        "ms": point.ms,
        "kept": point.kept,
        "front": point.front,
        "ink": ink_of(_precision(point)),
        "symbol": SYMBOLS[0],
        "hover": "\n".join(_hover_lines(point)),
        **(bars if point.front else {}),
    }


def _precision(point: FrontPoint) -> str:
    """Returns the first precision of a point's layers other than FP32, which sets its colour."""
    layers = point.layers.values() if isinstance(point.layers, dict) else ()
    names = [*(layer.precision for layer in layers), point.around]
    return next((name for name in names if name and name != "fp32"), "fp32")


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
    title="Result of tune",
    place=30,
    content=_search,
    shows=TUNING,
    chart=PageChart(_points, Path(__file__).parent / "assets"),
    decision=_decision,
)
