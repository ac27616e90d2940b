"""The report's section on services: for each model a sentence on the best service, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...bench.engines import PYTORCH_EAGER
from ...bench.report.summary import KEPT, kept_text, line_name, milliseconds, proven_retention
from ...bench.results import Results, Row
from ...common.text import table
from .findings import Service, ServiceFindings, best, requests, services_in

HEADS = ("Engine", "k", "Rate", "p50, ms", "p99, ms", "vs all experts", "vs PyTorch", "By LoadGen")
OFFERED_HEADS = ("Offered", "Completed", "p50, ms", "p90, ms", "p99, ms", "Refused")
SCENARIOS = {
    "server": "Server: requests at random times",
    "offline": "Offline: all at once",
    "multi-stream": "Multi-stream: queries of eight, one after the other",
    "single-stream": "Single-stream: one request after the other",
}


def service_name(service: Service) -> str:
    """Returns the title of a service's engine: `ONNX Runtime, grouped, INT8`."""
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
            bundle=service.bundle,
            apart=service.apart,
        )
    )


def searched_services(results: Results) -> list[Service]:
    """Returns the services whose rate within the bound was searched for."""
    findings = services_in(results.analyses)
    services = () if findings is None else findings.of("server")
    return [service for service in services if service.fixed_rate is None]


def answers(results: Results) -> Iterator[str]:
    """Yields a sentence for each model: the highest rate within the bound, and how it compares.

    Graphs that are proven to keep 99% of the accuracy have priority. A run that LoadGen calls
    invalid is reported only if there is no other, and without ratios. There are no ratios either if
    other work disturbed the benchmark.
    """
    searched = searched_services(results)
    for model in dict.fromkeys(row.model for row in searched):
        services = [row for row in searched if row.model == model]
        bound = f"p99 ≤ {services[0].bound_ms:g} ms"
        kept = {id(row): _kept(results, row) for row in services}
        exported = [row for row in services if row.exported]
        keeping = [row for row in exported if (kept[id(row)][1] or 0.0) >= KEPT]
        choices = (keeping, exported, services)
        valid = ([row for row in rows if row.valid] for rows in choices)
        top = next(filter(None, map(best, (*valid, *choices))), None)
        if top is None:
            near = min(
                (row for row in services if row.nearest_ms is not None),
                key=lambda row: row.nearest_ms or 0.0,
                default=None,
            )
            if near is not None and near.nearest_ms is not None:
                yield (
                    f"{model}: no rate meets {bound}. The nearest is {service_name(near)}, "
                    f"k = {near.k}: {milliseconds(near.nearest_ms)} ms."
                )
            else:
                yield f"{model}: nothing could be served: {services[0].reason}."
            continue
        share, low = kept[id(top)]
        accuracy = "" if share is None else f" {kept_text(share, low, 'accuracy')} and"
        others = {"all experts": _all_experts(top, services), "PyTorch": _pytorch(services)}
        against = [
            _against(top, other, what, results)
            for what, other in others.items()
            if other is not None and other is not top
        ]
        compared = f": {', '.join(against)}" if against else ""
        doubt = "" if top.valid else f" LoadGen does not call the run valid: {top.reason}"
        yield (
            f"{model}: k = {top.k} in {top.precision.upper()} on {service_name(top)}{accuracy} "
            f"serves {requests(top.rate or 0.0)} at {bound}{compared}.{doubt}"
        )


def _against(top: Service, other: Service, what: str, results: Results) -> str:
    if other.rate is None:
        return f"{what} met the bound at no rate"
    if results.disturbance:
        return f"not compared with {what}, because other work disturbed the machine"
    ratio = _ratio(top, other)
    if ratio is None:
        run = "this run" if other.valid else f"the run of {what}"
        return f"not compared with {what}, because LoadGen does not call {run} valid"
    return f"{ratio:.0f} times {what}" if ratio >= 20 else f"{ratio:.1f} times {what}"


def _ratio(service: Service, other: Service | None) -> float | None:
    """Returns the ratio of two rates, if both runs are valid and neither rate was given."""
    if other is None or not (service.rate and other.rate and service.valid and other.valid):
        return None
    return None if service.fixed_rate is not None else service.rate / other.rate


def _all_experts(service: Service, others: Sequence[Service]) -> Service | None:
    """Returns the service with the same engine and precision, but the untouched model's k."""
    untouched = _pytorch(others)
    full = service.experts if untouched is None else untouched.k
    key = (service.engine, service.provider, service.precision, full)
    same = [s for s in others if (s.engine, s.provider, s.precision, s.k) == key]
    return best(same) or next(iter(same), None)


def _pytorch(others: Sequence[Service]) -> Service | None:
    return next((s for s in others if s.engine == PYTORCH_EAGER and s.provider == "cpu"), None)


def _kept(results: Results, service: Service) -> tuple[float | None, float | None]:
    """Returns the share of the accuracy that a service keeps, and the interval's lower end."""
    key = (service.engine, service.provider, service.precision, service.k, service.bundle)
    rows = (
        row
        for row in results.of_model(service.model)
        if (row.engine, row.provider or "cpu", row.precision, row.k, row.bundle) == key
    )
    judged = next((row for row in rows if row.kept is not None), None)
    if judged is None:
        return None, None
    full = (row.k for row in results.of_model(service.model) if row.is_reference)
    return judged.kept, proven_retention(judged, next(full, judged.experts))


def service_tables(results: Results) -> list[tuple[str, Sequence[str], dict[str, list[Any]]]]:
    """Returns the tables of the section: titles, headings, and rows by model."""
    findings = services_in(results.analyses)
    if findings is None:
        return []
    tables: list[tuple[str, Sequence[str], dict[str, list[Any]]]] = []
    for scenario, title in SCENARIOS.items():
        services = findings.of(scenario)
        if services:
            price = ("A million requests",) if findings.price_per_hour is not None else ()
            groups: dict[str, list[Any]] = {}
            for row in services:
                groups.setdefault(row.model, []).append(_cells(row, services, results, findings))
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
        tables.append(("Latency against the offered rate", OFFERED_HEADS, groups))
    return tables


def _cells(
    service: Service, others: Sequence[Service], results: Results, findings: ServiceFindings
) -> tuple[Any, ...]:
    same_model = [other for other in others if other.model == service.model]
    percentiles = (service.p50_ms, service.p99_ms)
    if service.scenario == "offline":
        percentiles = (None, None)  # meaningless: all samples arrive at once
    references = (_all_experts(service, same_model), _pytorch(same_model))
    ratios = [
        "–" if ratio is None or results.disturbance else f"{ratio:.2f}×"
        for ratio in (_ratio(service, other) for other in references)
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
    """Describes how services were measured."""
    delay = (
        f"waited up to {findings.max_delay_ms:g} ms" if findings.max_delay_ms else "did not wait"
    )
    rates = {row.fixed_rate for row in findings.of("server")}
    found = "The server's rate was found by LoadGen's own search. " if rates else ""
    if rates - {None}:
        found = "The server's rate was given. "
    return (
        "MLPerf's LoadGen issued the queries and judged the runs; its logs are in the folder "
        f"service next to the results. A run took at least {findings.duration_s:g} s and drew from "
        f"{findings.library:,} inputs. {found}The queue {delay} to fill a batch; the instances and "
        "threads are those with the highest rate from a full queue. LoadGen, queue and engine "
        "shared the machine, so the queue limits the rate of requests below a millisecond.",
    )


def service_text(results: Results) -> str:
    """Returns the sentences and the `server` table for the terminal, if there are any."""
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
