"""Draws the charts of studies as pictures: curves, bars and heat maps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...bench.report.charts import (
    SOLID,
    SYMBOLS,
    ChartPanel,
    Spec,
    chart,
    layer,
    lines,
    side_by_side,
    write_pictures,
)
from ...common.writing import whole_file

INKS = tuple(f"var(--{name})" for name in ("fp32", "fp16", "int8", "bf16", "int4", "fp8"))
BARE = "M-1.8,-.15H1.8V.15H-1.8Z"
"""The symbol in the legend for a line without points."""

ChartRows = list[dict[str, Any]]


def curve(number: int, name: str, points: Iterable[tuple[float, Any]], **style: Any) -> ChartRows:
    """Returns the rows of a line, with the colour and symbol for its number."""
    ink, symbol = INKS[number % len(INKS)], SYMBOLS[number % len(SYMBOLS)]
    marks = {"line": name, "ink": ink, "symbol": symbol, "dash": SOLID, **style}
    return [{"x": x, "y": y, "bare": marks["symbol"] == BARE, **marks} for x, y in points]


def curves(x: Spec, y: Spec) -> Spec:
    """Returns a chart of lines, some with bars or a band from `low` to `high`."""
    ends: Spec = {"y": "low", "y2": "high"}
    band = layer("band", "area", "datum.bare", {"opacity": 0.12}, detail="line", **ends)
    return chart(
        x,
        y,
        [band, layer("bars", "rule", "!datum.bare && isValid(datum.low)", **ends), *lines("y")],
    )


def ordinal(title: str | None, **axes: Any) -> Spec:
    """Returns an ordinal axis, whose ticks are labelled with numbers or names."""
    settings = {"labelOverlap": True, "labelAngle": 0, "grid": False, **axes}
    return {"field": "x", "type": "ordinal", "title": title, "sort": None, "axis": settings}


def bars(title: str | None, y: Spec, base: float = 0, **axes: Any) -> Spec:
    """Returns a bar chart; bars of later rows are drawn over those of earlier rows."""
    return chart(ordinal(title, **axes), y, [layer("bars", "bar", y2={"datum": base})])


def heat_map(
    x: str, columns: Sequence[int], y: str, scheme: str, domain: Sequence[float], **axes: Any
) -> Spec:
    """Returns a heat map of percentages; unknown values are blank."""
    key = {"orient": "bottom", "format": ".0%", "title": None, "gradientLength": 200}
    colour = {"field": "value", "type": "quantitative", "legend": key}
    colour["scale"] = {"scheme": scheme, "domain": list(domain)}
    rows = ordinal(y, **axes) | {"field": "row"}
    across = ordinal(x) | {"scale": {"domain": list(columns)}}
    return chart(across, rows, [layer("cells", "rect", color=colour)])


def draw(path: Path, panels: Sequence[ChartPanel], columns: int = 2, **params: Any) -> None:
    """Writes a picture of charts and a legend of their lines, all or nothing."""
    named = {
        row["line"]: (row["ink"], row["symbol"])
        for _, _, rows in panels
        for row in rows
        if row.get("line")
    }
    with whole_file(path) as partial:
        write_pictures(side_by_side(panels, named, columns=columns, **params), [partial])
