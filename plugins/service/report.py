"""What k buys in service, in a report: the sentence, tables, and a chart of the rate for each k."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...bench.engines import PYTORCH_EAGER
from ...bench.report.figures import COLOURS, MARKERS, REFERENCE, by_factors, drawn, log2_axis
from ...bench.report.summary import KEPT, UNTOUCHED, line_name, milliseconds, percent
from ...bench.results import Results, Row
from ...common.text import table
from .findings import Service, ServiceFindings, best, requests, services_in

HEADS = ("Engine", "k", "Rate", "p50, ms", "p99, ms", "vs all experts", "vs PyTorch", "By LoadGen")
OFFERED_HEADS = ("Offered", "Completed", "p50, ms", "p90, ms", "p99, ms", "Refused")
SCENARIOS = {
    "server": "Server: requests come at random",
    "offline": "Offline: all at once",
    "multi-stream": "Multi-stream: queries of eight, one after the other",
    "single-stream": "Single-stream: one request after the other",
}


def service_name(service: Service) -> str:
    """Returns what a reader calls the engine of a service: `ONNX Runtime, grouped, INT8`."""
    return line_name(
        Row(
            engine=service.engine,
            k=service.k,
            experts=service.experts,
            batch=service.max_batch,
            model=service.model,
            provider=service.provider,
            precision=service.precision,
            lowering=service.lowering,
        )
    )


def answers(results: Results) -> Iterator[str]:
    """Yields for each model what serves most requests within the bound, and what that is against.

    Of what is exported, it is what keeps 99% of the accuracy, if that is known and anything does.
    """
    findings = services_in(results.analyses)
    searched = (
        [] if findings is None else [row for row in findings.of("server") if row.fixed_rate is None]
    )
    for model in dict.fromkeys(row.model for row in searched):
        here = [row for row in searched if row.model == model]
        bound = f"p99 ≤ {here[0].bound_ms:g} ms"
        kept = {id(row): _kept(results, row) for row in here}
        exported = [row for row in here if row.exported]
        keeping = [row for row in exported if (kept[id(row)] or 0.0) >= KEPT]
        most = best(keeping) or best(exported) or best(here)
        if most is None:
            near = min(
                (row for row in here if row.nearest_ms is not None),
                key=lambda row: row.nearest_ms or 0.0,
                default=None,
            )
            if near is not None and near.nearest_ms is not None:
                yield (
                    f"{model}: no rate keeps {bound}. The nearest is {service_name(near)}, "
                    f"k = {near.k}: {milliseconds(near.nearest_ms)} ms."
                )
            else:
                yield f"{model}: nothing could be served: {here[0].reason}."
            continue
        share = kept[id(most)]
        accuracy = "" if share is None else f" (keeps {percent(share)} of the accuracy)"
        others = {"all experts": _all_experts(most, here), "PyTorch": _pytorch(here)}
        against = [
            _against(most, other, what)
            for what, other in others.items()
            if other is not None and other is not most
        ]
        beside = f": {', '.join(against)}" if against else ""
        doubt = "" if most.valid else f" LoadGen does not call the run valid: {most.reason}"
        yield (
            f"{model}: k = {most.k} in {most.precision.upper()} on {service_name(most)}{accuracy} "
            f"serves {requests(most.rate or 0.0)} at {bound}{beside}.{doubt}"
        )


def _against(most: Service, other: Service, what: str) -> str:
    if other.rate is None:
        return f"kept at no rate by {what}"
    ratio = (most.rate or 0.0) / other.rate
    return f"{ratio:.0f} times {what}" if ratio >= 20 else f"{ratio:.1f} times {what}"


def _all_experts(service: Service, others: Sequence[Service]) -> Service | None:
    """The same engine in the same precision with the k of the untouched model."""
    untouched = _pytorch(others)
    full = service.experts if untouched is None else untouched.k
    key = (service.engine, service.provider, service.precision, full)
    of = [s for s in others if (s.engine, s.provider, s.precision, s.k) == key]
    return best(of) or next(iter(of), None)


def _pytorch(others: Sequence[Service]) -> Service | None:
    return next((s for s in others if s.engine == PYTORCH_EAGER and s.provider == "cpu"), None)


def _kept(results: Results, service: Service) -> float | None:
    """What the row of a service keeps of the accuracy."""
    key = (service.engine, service.provider, service.precision, service.k)
    rows = (
        row
        for row in results.of_model(service.model)
        if (row.engine, row.provider or "cpu", row.precision, row.k) == key
    )
    return next((row.kept for row in rows if row.kept is not None), None)


def service_tables(results: Results) -> list[tuple[str, Sequence[str], dict[str, list[Any]]]]:
    """Returns the tables of the section: titles, headings, and rows by model."""
    findings = services_in(results.analyses)
    if findings is None:
        return []
    tables: list[tuple[str, Sequence[str], dict[str, list[Any]]]] = []
    for scenario, title in SCENARIOS.items():
        of = findings.of(scenario)
        if of:
            price = ("A million requests",) if findings.price_per_hour is not None else ()
            groups: dict[str, list[Any]] = {}
            for row in of:
                groups.setdefault(row.model, []).append(_cells(row, of, findings))
            tables.append((title, (*HEADS, *price), groups))
    groups = {
        f"{row.model}: {service_name(row)}, k = {row.k}": [
            (
                requests(run.offered),
                requests(run.rate),
                *(milliseconds(ms) for ms in (run.p50_ms, run.p90_ms, run.p99_ms)),
                f"{run.refused:,}",
            )
            for run in row.offered
        ]
        for row in findings.of("server")
        if row.offered
    }
    if groups:
        tables.append(("Latency over the offered rate", OFFERED_HEADS, groups))
    return tables


def _cells(
    service: Service, others: Sequence[Service], findings: ServiceFindings
) -> tuple[Any, ...]:
    own = [other for other in others if other.model == service.model]
    percentiles = (service.p50_ms, service.p99_ms)
    if service.scenario == "offline":
        percentiles = (None, None)  # every sample waits for those before it
    ratios = [
        f"{service.rate / other.rate:.2f}×"
        if service.rate and other and other.rate and service.fixed_rate is None
        else "–"
        for other in (_all_experts(service, own), _pytorch(own))
    ]
    cost = service.cost_of_a_million(findings.price_per_hour)
    threads = f" × {service.threads} threads" if service.threads else ""
    layout = f"{service.instances}{threads or ' in the server'}"
    return (
        f"{service_name(service)} ({layout})",
        f"{service.k}/{service.experts}",
        "–" if service.rate is None else requests(service.rate),
        *("–" if ms is None else milliseconds(ms) for ms in percentiles),
        *ratios,
        ("valid", "good") if service.valid else (service.reason, "bad"),
        *(() if findings.price_per_hour is None else ("–" if cost is None else f"{cost:,.2f}",)),
    )


def service_notes(findings: ServiceFindings) -> tuple[str, ...]:
    """Returns how services were measured."""
    delay = (
        f"waited up to {findings.max_delay_ms:g} ms" if findings.max_delay_ms else "did not wait"
    )
    given = {row.fixed_rate is not None for row in findings.of("server")}
    found = "The server's rate was found by LoadGen's own search. " if given else ""
    if True in given:
        found = "The server's rate was given. "
    return (
        "MLPerf's LoadGen issued the queries and judged the runs; its own logs lie in the folder "
        f"service beside the results. A run took {findings.duration_s:g} s at least, and drew from "
        f"{findings.library:,} inputs. {found}The queue {delay} to fill a batch; instances and "
        "threads are those that "
        "answered most from a full queue. LoadGen, queue and engine shared the machine: "
        "the rate of requests shorter than a millisecond is more that of the queue.",
    )


def service_text(results: Results) -> str:
    """Returns the sentences and the table of the server for the terminal; empty without any."""
    lines = list(answers(results))
    for title, heads, groups in service_tables(results):
        if title in SCENARIOS.values():
            rows = [
                [cell if isinstance(cell, str) else cell[0] for cell in row]
                for rows in groups.values()
                for row in rows
            ]
            lines += [title, table(heads, rows)]
    return "\n".join(lines)


def _lines(results: Results) -> Iterator[tuple[str, str, list[Service]]]:
    """Yields each line of the chart: its model, its name, and what it serves, by k."""
    findings = services_in(results.analyses)
    lines: dict[tuple[str, str], list[Service]] = {}
    for row in () if findings is None else findings.of("server"):
        if row.exported and row.rate and row.fixed_rate is None:
            precision = "" if row.precision == "fp32" else f", {row.precision.upper()}"
            engine = service_name(row).partition(",")[0]
            lines.setdefault((row.model, f"{engine}{precision}"), []).append(row)
    for (model, name), services in lines.items():
        # Of several lowerings with the same k the fastest.
        by_k: dict[int, Service] = {}
        for row in sorted(services, key=lambda row: row.rate or 0.0):
            by_k[row.k] = row
        yield model, name, [by_k[k] for k in sorted(by_k)]


def service_points(results: Results) -> dict[str, Any] | None:
    """Returns what the page draws: the rate of each line over k, and percentiles over the rate."""
    findings = services_in(results.analyses)
    server = (
        [] if findings is None else [row for row in findings.of("server") if row.fixed_rate is None]
    )
    if not any(row.rate for row in server):
        return None
    return {
        "bound": server[0].bound_ms,
        "lines": [
            {"name": name, "model": model, "k": [s.k for s in of], "rate": [s.rate for s in of]}
            for model, name, of in _lines(results)
        ],
        "pytorch": [
            {"model": row.model, "rate": row.rate}
            for row in server
            if row.rate and row.engine == PYTORCH_EAGER and row.provider == "cpu"
        ],
        "offered": [
            {
                "name": f"{service_name(row)}, k = {row.k}",
                "rate": [run.offered for run in row.offered],
                "p50": [run.p50_ms for run in row.offered],
                "p99": [run.p99_ms for run in row.offered],
            }
            for row in server
            if row.offered
        ],
    }


def service_figure(results: Results, directory: Path) -> tuple[Path, ...]:
    """Writes the rate over k and the p99 over the offered rate, PNG and SVG; a row per model."""
    lines = list(_lines(results))
    models = list(dict.fromkeys(model for model, _, _ in lines))
    if not models:
        return ()
    findings = services_in(results.analyses)
    assert findings is not None
    names = list(dict.fromkeys(name for _, name, _ in lines))
    paths = tuple(directory / f"service_rate{kind}" for kind in (".png", ".svg"))
    with drawn(paths, (8, 0.75 + 3.1 * len(models)), rows=len(models)) as grid:
        for (left, right), model in zip(grid, models, strict=True):
            own = [(name, services) for of, name, services in lines if of == model]
            bound = own[0][1][0].bound_ms
            left.set_title(f"{model}: p99 ≤ {bound:g} ms")
            left.set_ylabel("requests per second")
            right.set_title(f"{model}: latency under load")
            right.set_ylabel("p99, ms")
            right.set_xlabel("offered requests per second")
            right.axhline(bound, color=REFERENCE, linestyle=":", linewidth=1.2)
            pytorch = _pytorch([row for row in findings.of("server") if row.model == model])
            if pytorch is not None and pytorch.rate:
                left.axhline(pytorch.rate, color=REFERENCE, linestyle="--", label=UNTOUCHED)
            for name, services in own:
                index = names.index(name)
                look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "linewidth": 1.8}
                look |= {"marker": MARKERS[index % len(MARKERS)], "markersize": 5}
                left.plot([s.k for s in services], [s.rate for s in services], label=name, **look)
                for row in services:
                    offered = [run.offered for run in row.offered]
                    right.plot(offered, [run.p99_ms for run in row.offered], **look)
                    if offered:
                        right.annotate(f"k = {row.k}", (offered[-1], row.offered[-1].p99_ms))
            left.set_ylim(bottom=0)
            by_factors(right)
            ks = sorted({row.k for _, services in own for row in services})
            log2_axis(left, ks, f"experts computed, k of {own[0][1][0].experts}")
    return paths
