"""Charts as Vega-Lite specifications; each is the same on the page and in image files.

A chart draws the data set `rows`, which the page replaces when its reader filters, and reads
parameters: `chosen`, the index of the row that has a ring, and the thresholds `keep` and `bound`.
The style of a row is in its fields `ink`, `symbol`, `dash`, `line` and the text `hover`. Colours
are the variables of the page's style sheet; image files have those of the light page.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ...common.text import printable

Spec = dict[str, Any]

SYMBOLS = (
    "M1,0A1,1,0,1,1,-1,0A1,1,0,1,1,1,0Z",
    "M-.9,-.9H.9V.9H-.9Z",
    "M0,-1L1,.8H-1Z",
    "M0,-1.1L1.1,0L0,1.1L-1.1,0Z",
    "M0,1L1,-.8H-1Z",
    "M-.35,-1H.35V-.35H1V.35H.35V1H-.35V.35H-1V-.35H-.35Z",
    "M-.6,-1L0,-.4L.6,-1L1,-.6L.4,0L1,.6L.6,1L0,.4L-.6,1L-1,.6L-.4,0L-1,-.6Z",
    "M0,-1L1,-.2L.6,.9H-.6L-1,-.2Z",
)
"""Paths of the symbols of engines, in a square from -1 to 1."""

STAR = "M0,-1.1L.27,-.37L1.05,-.34L.43,.14L.65,.89L0,.45L-.65,.89L-.43,.14L-1.05,-.34L-.27,-.37Z"
LEVEL = "M-1.8,-.2H-.4V.2H-1.8ZM.4,-.2H1.8V.2H.4Z"  # a line across the chart, in a legend
SOLID, DOTTED, DASHED = [1, 0], [2, 3], [5, 4]
DASHES = (SOLID, [8, 3, 2, 3], [7, 3], [7, 2, 1, 2, 1, 2], [3, 2])
"""The dashes of models in one chart, the first of them solid."""

REFERENCE = "var(--reference)"
OFFSET = 1.03  # the factor by which lines of equal values are moved along the axis of k
PARAMS: Spec = {"keep": None, "bound": None, "chosen": -1, "ticks": [], "of": ""}
"""The parameters: thresholds, the row with a ring, the ticks of k, and the title of an axis."""

PLAIN: Spec = {}
TEXT = {"labelColor": "var(--soft)", "titleColor": "var(--soft)", "titleFontWeight": "normal"}
SIZES = {"labelFontSize": 12, "titleFontSize": 12, "labelPadding": 5, "titlePadding": 8}
CONFIG: Spec = {
    "background": None,
    "aria": False,  # the page describes the whole chart
    "font": "system-ui, DejaVu Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {**TEXT, **SIZES, "gridColor": "var(--faint)", "domain": False, "ticks": False},
    "axisY": {"minExtent": 52, "tickCount": 6},
    "legend": {
        "labelFontSize": 12,
        "labelLimit": 0,
        "symbolOpacity": 1,
        "labelColor": "var(--ink)",
    },
    "title": {"color": "var(--ink)", "anchor": "start", "fontSize": 13},
    "point": {"opacity": 1, "strokeWidth": 1.5, "size": 62},
    "line": {"strokeWidth": 1.8},
    "text": {"fontSize": 12},
}

# Ticks of a logarithmic axis: 1, 10 if it is long, else 1, 2, 5; even steps if it is short.
_TENS = [10.0**power for power in range(-6, 10)]
_FIVES = [digit * ten for ten in _TENS for digit in (1, 2, 5)]
_STEP = "P * ((H - L) / P > 25 ? 10 : (H - L) / P > 10 ? 5 : (H - L) / P > 5 ? 2 : 1)".replace(
    "P", "pow(10, floor(log((H - L) / 5) / LN10))"
)
_SHORT = f"sequence(ceil(L / ({_STEP})) * {_STEP}, H, {_STEP})"
_TICKS = f"H > 500 * L ? {_TENS} : H > 8 * L ? {_FIVES} : {_SHORT}"


def ink_of(precision: str) -> str:
    """Returns the colour of a precision."""
    return f"var(--{precision})" if precision in _palette() else "var(--accent)"


def axis(channel: str, field: str, title: str, kind: str = "zero") -> Spec:
    """Returns an axis by its kind: zero, near, percent (from 0), share, log, or k (the `ticks`).

    If the title is "of", the parameter with that name is shown.
    """
    log = {"type": "log", "base": 2 if kind == "k" else 10}
    kinds = log if kind in ("log", "k") else {"zero": False}
    scale: Spec = {"nice": False, "padding": 14, **kinds}
    digits = ".3~%" if kind in ("share", "percent") else ",.6~r"
    axes: Spec = {"labelExpr": f"format(datum.value, '{digits}')"}
    if "type" in scale:
        ends = {"L": f"domain('chart_{channel}')[0]", "H": f"domain('chart_{channel}')[1]"}
        expr = re.sub(r"\b[LH]\b", lambda end: ends[end[0]], _TICKS)
        axes["values"] = {"expr": "ticks" if kind == "k" else expr}
    if kind in ("zero", "percent"):
        scale = {"zero": True, "nice": True}
    text: Any = {"signal": "of"} if title == "of" else title
    return {"field": field, "type": "quantitative", "title": text, "axis": axes, "scale": scale}


def layer(name: str, mark: str, where: str = "", /, style: Spec = PLAIN, **channels: Any) -> Spec:
    """Returns the marks of the rows for which the expression `where` is true.

    A channel is a field of the rows; "=field" is used without a scale. All marks have the chart's
    axes, the row's `ink` and its text, unless a channel changes that.
    """
    drawn = {name: _channel(value) for name, value in channels.items()}
    steps = [{"filter": where}] if where else []
    spec = {"name": f"chart_{name}", "transform": steps, "mark": {"type": mark, **style}}
    return spec | {"encoding": drawn}


def _channel(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    unscaled = {"type": "nominal", "scale": None}
    return {"field": value[1:], **unscaled} if value.startswith("=") else {"field": value}


def chart(x: Spec, y: Spec, layers: Iterable[Spec], transform: Sequence[Spec] = ()) -> Spec:
    """Returns a chart of layers that share both axes."""
    text = {"field": "hover", "type": "nominal"}
    return {
        "name": "chart",
        "data": {"name": "rows"},
        "params": [{"name": name, "value": value} for name, value in PARAMS.items()],
        "transform": list(transform),
        "encoding": {"x": x, "y": y, "color": _channel("=ink"), "tooltip": text},
        "layer": list(layers),
        "config": CONFIG,
    }


def _calc(**fields: str) -> list[Spec]:
    return [{"calculate": expression, "as": name} for name, expression in fields.items()]


def _join_aggregate(by: Sequence[str] = (), **fields: str) -> Spec:
    parts = [(name, *each.split()) for name, each in fields.items()]
    ops = [{"op": op, "as": name, **({"field": of[0]} if of else {})} for name, op, *of in parts]
    return {"joinaggregate": ops, "groupby": list(by)}


def threshold(channel: str, name: str) -> Spec:
    """Returns a line across the chart at the value of a parameter, if it has one."""
    axes = {"x": None, "y": None, "color": {"value": "var(--bad)"}, "tooltip": None, channel: name}
    line = layer(name, "rule", "", {"strokeDash": DASHED, "strokeWidth": 1.2}, **axes)
    steps = [*_calc(**{name: name}), {"filter": f"isValid(datum.{name})"}]
    return line | {"data": {"values": [{}]}, "transform": steps}


def _points(where: str, solid: str) -> list[Spec]:
    """Returns the points, which are filled if `solid` is true, the ring and the labels."""
    fill = {"expr": f"{solid} ? datum.ink : 'transparent'"}
    style = {"fill": fill, "size": {"expr": "datum.front ? 100 : 62"}}
    ring = {"size": 330, "strokeWidth": 2.5}
    return [
        layer("points", "point", where, style, shape="=symbol"),
        layer("ring", "point", "datum.index === chosen", ring, color={"value": "var(--ink)"}),
        layer("labels", "text", "datum.label", {"align": "left", "dx": 8, "dy": -8}, text="label"),
    ]


def lines(field: str) -> list[Spec]:
    """Returns lines, their points, and levels across the chart."""
    valid = f"!datum.level && isValid(datum['{field}'])"
    return [
        layer("levels", "rule", "datum.level", {"size": 1.8}, x=None, strokeDash="=dash"),
        layer("lines", "line", valid, strokeDash="=dash", detail="line"),
        *_points(f"{valid} && !datum.bare", "!datum.open"),
    ]


def over_k(field: str, title: str, kind: str, *, apart: bool = False) -> Spec:
    """Returns a chart of values over k with their bars, and the untouched model across it.

    On an axis of latencies from zero, an outlying bar ends in an arrow. With `apart`, lines of
    equal values are drawn side by side, unless one of the same precision covers the other.
    """
    ends: Spec = {"y": f"{field}_low", "y2": f"{field}_high"}
    layers = [layer("bars", "rule", f"isValid(datum['{field}_low']) && !datum.level", **ends)]
    steps = [{"filter": f"isValid(datum['{field}'])"}, *_calc(level="datum.untouched", x="datum.k")]
    if field == "ms":
        dots = {"strokeWidth": 1.2, "strokeDash": DOTTED}
        arrow = {"shape": "triangle-up", "filled": True}
        layers += [
            layer("band", "rect", "datum.level", {"opacity": 0.13}, x=None, **ends),
            layer("limits", "line", "isValid(datum.limit)", dots, y="limit", detail="precision"),
            layer("cut", "point", "datum.cut && !datum.level", arrow, y="arrow"),
        ]
        steps += _limited_axis() if kind == "zero" else []
    if field == "kept":
        layers.append(threshold("y", "keep"))
    steps += _offset(field) if apart else []
    y = axis("y", field, title, kind)
    return chart(axis("x", "x", "of", "k"), y, [*layers, *lines(field)], steps)


def _limited_axis() -> list[Spec]:
    """Returns the steps that end the axis above every median and every bar except outliers."""
    top = "1.06 * max(datum.highest, min(1.5 * datum.highest, datum.reach))"
    cut = _calc(top=top, cut="datum.ms_high > datum.top", arrow="0.965 * datum.top")
    high = _calc(ms_high="min(datum.ms_high, datum.top)")
    return [_join_aggregate(highest="max ms", reach="max ms_high"), *cut, *high]


def _offset(field: str) -> list[Spec]:
    first, longest = {"field": "first"}, {"field": "length", "order": "descending"}
    same = f"[datum.level, datum.model, datum.precision, datum.k, format(datum['{field}'], '.6r')]"
    turn, place = {"op": "row_number", "as": "turn"}, {"op": "dense_rank", "as": "place"}
    return [
        *_calc(same=same),
        _join_aggregate(["line"], length="count", first="min index"),
        {"window": [turn], "groupby": ["same"], "sort": [longest, first]},
        _join_aggregate(["line"], turn="min turn"),
        {"filter": "datum.level || datum.turn === 1 || datum.index === chosen"},
        {"window": [place], "groupby": ["level"], "sort": [first]},
        *_calc(x=f"datum.k * pow({OFFSET}, datum.place - 1)"),
    ]


def trade_off(title: str) -> Spec:
    """Returns the chart of retention over latency, with the Pareto front."""
    front = {"interpolate": "step-after", "strokeWidth": 1.5}
    channels = {"color": "=front_ink", "strokeDash": "=front_dash", "detail": "run"}
    layers = [
        threshold("y", "keep"),
        threshold("x", "bound"),
        layer("front", "line", "datum.front", front, **channels),
        layer("bars_x", "rule", "isValid(datum.ms_low)", x="ms_low", x2="ms_high"),
        layer("bars_y", "rule", "isValid(datum.kept_low)", y="kept_low", y2="kept_high"),
        *_points("", "datum.front || datum.run"),
    ]
    ink, dash = "datum.run ? datum.ink : 'var(--soft)'", f"datum.run ? {DOTTED} : {SOLID}"
    x, y = axis("x", "ms", "median latency, ms (log)", "log"), axis("y", "kept", title, "share")
    return chart(x, y, layers, _calc(front_ink=ink, front_dash=dash))


def stacked() -> Spec:
    """Returns a bar for each name in `ticks`, divided into coloured parts."""
    named = {"labelExpr": "ticks[datum.value]", "labelLimit": 220, "grid": False}
    y = {"field": "place", "type": "ordinal", "title": None, "axis": named}
    y["scale"] = {"paddingInner": 0.3}
    return chart(axis("x", "value", "of"), y, [layer("bars", "bar", order="order")])


def histogram() -> Spec:
    """Returns a histogram of the times of calls, with lines at the named percentiles."""
    text = {"align": {"expr": "datum.right ? 'right' : 'left'"}, "baseline": "top"}
    text["dx"] = {"expr": "datum.right ? -4 : 4"}
    ink = {"value": "var(--ink)"}
    x, y = axis("x", "low", "ms (log)", "log"), axis("y", "calls", "of", "log")
    y["scale"] |= {"domainMin": 0.7, "padding": 0}
    layers = [
        layer("bars", "bar", "datum.calls", x2="high", y2={"datum": 0.7}),
        layer("marks", "rule", "datum.label", {"strokeDash": DOTTED}, x="at", y=None, color=ink),
        layer("labels", "text", "datum.label", text, x="at", y="above", text="label", color=ink),
    ]
    return chart(x, y, layers)


def drawn_lines(x: Spec, y: Spec, *more: Spec) -> Spec:
    """Returns a chart of lines whose style is in the data."""
    return chart(x, y, [*more, *lines(y["field"])])


def core_charts(quality: str) -> dict[str, Spec]:
    """Returns the page's own charts by name, for models that are judged by `quality`."""
    batch, rate = axis("x", "batch", "batch", "k"), axis("y", "rate", "of", "log")
    return {
        "deploy": trade_off(f"{quality} kept"),
        "ms": over_k("ms", "median latency, ms", "zero"),
        "ms_log": over_k("ms", "median latency, ms (log)", "log"),
        "kept": over_k("kept", f"{quality} kept", "share", apart=True),
        "rate": over_k("rate", "tokens/s", "zero"),
        "rate_log": over_k("rate", "tokens/s (log)", "log"),
        "ppl": over_k("ppl", "perplexity", "near", apart=True),
        "ppl_log": over_k("ppl", "perplexity (log)", "log", apart=True),
        "throughput": drawn_lines(batch, rate),
        "calls": histogram(),
        "stacked": stacked(),
    }


def empty_chart(why: str) -> Spec:
    """Returns a chart that shows only a sentence."""
    return {"mark": {"type": "text", "text": why, "color": "var(--ink)"}}


ChartPanel = tuple[str, Spec, Sequence[Mapping[str, Any]]]
"""A title, a chart, and its rows."""


def side_by_side(
    panels: Sequence[ChartPanel],
    legend: Mapping[str, tuple[str, str]],
    models: Sequence[str] = (),
    *,
    columns: int = 3,
    title: str = "",
    **params: Any,
) -> Spec:
    """Returns an image of charts, with a legend of colours and symbols, and one of dashes."""
    placed: list[Spec] = []
    for number, (name, spec, rows) in enumerate(panels):
        # In one image every chart needs a distinct name.
        unique = json.loads(re.sub(r"(?<=[\"'])chart(?=[_\"])", f"chart{number}", json.dumps(spec)))
        size = {"width": (320, 320, 200)[min(columns, len(panels)) - 1], "height": 250}
        content = {"title": printable(name), "data": {"values": list(rows)}}
        unique = {key: value for key, value in unique.items() if key not in ("config", "params")}
        placed.append(size | unique | content)
    given = [{"name": name, "value": value} for name, value in (PARAMS | params).items()]
    parts: list[Spec] = [{"concat": placed, "columns": columns}]
    if legend:
        named = {printable(name): drawn for name, drawn in legend.items()}
        parts.append(_legend(named, list(map(printable, models))))
    head = {"title": printable(title)} if title else {}
    return {"config": CONFIG | {"background": "white"}, "params": given, "vconcat": parts, **head}


def _legend(legend: Mapping[str, tuple[str, str]], models: Sequence[str]) -> Spec:
    names = [*legend, *models]
    columns = max(1, min(4, 720 // (7 * max(map(len, names), default=1) + 30)))
    key = {"orient": "bottom", "title": None, "columns": columns, "direction": "horizontal"}

    def channel(values: Sequence[str], drawn: Sequence[Any], **more: Any) -> Spec:
        scale = {"domain": list(values), "range": list(drawn)}
        return {"field": "name", "type": "nominal", "scale": scale, "legend": key | more}

    inks, symbols = zip(*legend.values(), strict=True)
    encoding = {"color": channel(list(legend), inks), "shape": channel(list(legend), symbols)}
    layers: list[Spec] = [
        {"mark": {"type": "point", "filled": True, "opacity": 0}, "encoding": encoding}
    ]
    if models:
        dashes = [DASHES[index % len(DASHES)] for index, _ in enumerate(models)]
        dash = channel(models, dashes, symbolType="stroke", symbolSize=400)
        layers.append({"mark": {"type": "line", "opacity": 0}, "encoding": {"strokeDash": dash}})
    data = {"values": [{"name": name} for name in names]}
    return {"data": data, "width": 700, "height": 1, "layer": layers}


@functools.cache
def _palette() -> dict[str, str]:
    """Returns the colours of the light page, by the names of their variables."""
    text = resources.files(__package__).joinpath("assets", "report.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([\w-]+): (#\w+)", text.partition("}")[0]))


def write_pictures(spec: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Writes a chart to files, as PNG or SVG depending on their suffixes."""
    import vl_convert

    text = re.sub(r"var\(--([\w-]+)\)", lambda name: _palette()[name[1]], json.dumps(spec))
    for path in paths:
        if path.suffix == ".svg":
            path.write_text(vl_convert.vegalite_to_svg(text, vl_version="6.4"), encoding="utf-8")
        else:
            path.write_bytes(vl_convert.vegalite_to_png(text, vl_version="6.4", scale=2))
