"""Charts of services: the request rate over k, and latencies against the offered rate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...bench.engines import PYTORCH_EAGER
from ...bench.report.charts import (
    DASHED,
    DOTTED,
    LEVEL,
    REFERENCE,
    SOLID,
    SYMBOLS,
    axis,
    drawn_lines,
    ink_of,
    side_by_side,
    threshold,
    write_pictures,
)
from ...bench.report.summary import UNTOUCHED, milliseconds
from ...bench.results import Results
from .findings import Service, requests
from .report import answers, searched_services, service_name

RATE = drawn_lines(axis("x", "k", "of", "k"), axis("y", "rate", "requests per second"))
LATENCY = drawn_lines(
    axis("x", "rate", "offered requests per second (log)", "log"),
    axis("y", "ms", "ms (log)", "log"),
    threshold("y", "bound"),
)


def _line_name(service: Service) -> str:
    """Returns the name of a service's line: its engine and precision."""
    precision = "" if service.precision == "fp32" else f", {service.precision.upper()}"
    return f"{service_name(service).partition(',')[0]}{precision}"


def _lines(results: Results) -> Iterator[tuple[str, str, list[Service]]]:
    """Yields, for each line of the chart, its model, its name and its services in order of k."""
    lines: dict[tuple[str, str], list[Service]] = {}
    for row in searched_services(results):
        if row.exported and row.rate:
            lines.setdefault((row.model, _line_name(row)), []).append(row)
    for (model, name), services in lines.items():
        # Draws only the fastest of several lowerings with the same k.
        by_k: dict[int, Service] = {}
        for row in sorted(services, key=lambda row: row.rate or 0.0):
            by_k[row.k] = row
        yield model, name, [by_k[k] for k in sorted(by_k)]


def _symbols(results: Results) -> dict[str, str]:
    """Returns a symbol for each line's name."""
    names = dict.fromkeys(name for _, name, _ in _lines(results))
    return {name: SYMBOLS[index % len(SYMBOLS)] for index, name in enumerate(names)}


def _rates(results: Results) -> Iterator[dict[str, Any]]:
    """Yields the points of every line over k, and a level for untouched PyTorch."""
    symbols = _symbols(results)
    for model, name, services in _lines(results):
        for row in services:
            doubt = "" if row.valid else "\nnot valid according to LoadGen"
            hover = f"{model}: {name}, k = {row.k}\n{requests(row.rate or 0.0)}{doubt}"
            yield {
                **{"model": model, "line": f"{model}: {name}", "k": row.k, "rate": row.rate},
                **{"ink": ink_of(row.precision), "symbol": symbols[name], "dash": SOLID},
                **{"open": not row.valid, "hover": hover},
            }
    for row in searched_services(results):
        if row.rate and row.engine == PYTORCH_EAGER and row.provider == "cpu":
            hover = f"{row.model}: {UNTOUCHED}\n{requests(row.rate)}"
            level = {"level": True, "ink": REFERENCE, "dash": DASHED, "hover": hover}
            yield {"model": row.model, "rate": row.rate, **level}


def _latencies(results: Results) -> Iterator[dict[str, Any]]:
    """Yields the p99 and the dotted p50 of each service at each offered rate."""
    symbols = _symbols(results)
    for index, row in enumerate(searched_services(results)):
        ink = ink_of(row.precision) if row.exported else REFERENCE
        for what, dash in (("p99", SOLID), ("p50", DOTTED)):
            for run in row.offered:
                ms = run.p99_ms if what == "p99" else run.p50_ms
                last = what == "p99" and run is row.offered[-1]
                yield {
                    **{
                        "model": row.model,
                        "line": f"{index} {what}",
                        "rate": run.offered,
                        "ms": ms,
                    },
                    **{
                        "ink": ink,
                        "symbol": symbols.get(_line_name(row), SYMBOLS[0]),
                        "dash": dash,
                    },
                    **{"label": f"k = {row.k}" if last else "", "label_ink": ink},
                    "hover": f"{service_name(row)}, k = {row.k}\n{requests(run.offered)} offered: "
                    f"{what} {milliseconds(ms)} ms",
                }


def service_points(results: Results) -> dict[str, Any] | None:
    """Returns the charts' data, or None if no service has a rate within the bound."""
    searched = searched_services(results)
    if not any(row.rate for row in searched):
        return None
    lines = list(_lines(results))
    symbols, several = _symbols(results), len({row.model for row in searched}) > 1
    rates = list(_rates(results))
    return {
        "answers": list(answers(results)),
        "bound": searched[0].bound_ms,
        "keys": [
            (f"{model}: {name}" if several else name, symbols[name], ink_of(services[0].precision))
            for model, name, services in lines
        ],
        "pytorch": any(row.get("level") for row in rates),
        "ks": sorted({row.k for _, _, services in lines for row in services}),
        "charts": {"rate": RATE, "latency": LATENCY},
        "rates": rates,
        "latencies": list(_latencies(results)),
    }


def service_figure(results: Results, directory: Path) -> tuple[Path, ...]:
    """Writes both charts as one PNG and one SVG picture, with a row per model."""
    lines = list(_lines(results))
    if not lines:
        return ()
    rates, latencies = list(_rates(results)), list(_latencies(results))
    panels = []
    for model in dict.fromkeys(model for model, _, _ in lines):
        bound = next(row.bound_ms for row in searched_services(results) if row.model == model)
        for title, spec, rows in (
            (f"p99 ≤ {bound:g} ms", RATE, rates),
            ("p99 under load, p50 dotted", LATENCY, latencies),
        ):
            panels.append(
                (f"{model}: {title}", spec, [row for row in rows if row["model"] == model])
            )
    symbols = _symbols(results)
    legend = {name: (ink_of(services[0].precision), symbols[name]) for _, name, services in lines}
    if any(row.get("level") for row in rates):
        legend[UNTOUCHED] = (REFERENCE, LEVEL)
    experts = {row.experts for _, _, services in lines for row in services}
    label = "experts computed, k" + (f" of {experts.pop()}" if len(experts) == 1 else "")
    paths = tuple(directory / f"service_rate{kind}" for kind in (".png", ".svg"))
    ks = sorted({row.k for _, _, services in lines for row in services})
    bound = lines[0][2][0].bound_ms
    write_pictures(side_by_side(panels, legend, columns=2, ticks=ks, of=label, bound=bound), paths)
    return paths
