"""The options of `bench` for services. This module imports no large library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...common.option import Panel, option

API = 1


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """The load under which the models of a benchmark are measured as services."""

    scenario: str | Sequence[str] = option(
        "",
        "A list of MLPerf scenarios to measure: single-stream,multi-stream,server,offline.",
        unset="none",
    )
    latency_bound: str | float | None = option(
        None,
        "The latency that 99% of the requests must meet in the scenario server, such as 50ms.",
        unset="none; server needs one",
    )
    offered_rate: float | None = option(
        None,
        "The request rate of the scenario server, per second.",
        unset="the highest rate within the bound, found by a search",
    )
    max_delay: str | float | None = option(
        None,
        "The longest time that the queue waits to fill a batch, such as 2ms.",
        unset="no waiting",
    )
    duration: str | float = option("10s", "The shortest time that a run of LoadGen takes.")
    library: int | None = option(None, "How many inputs LoadGen uses.", unset="all, at most 1024")
    triton: str | None = option(
        None,
        "The same bundle on a running Triton server, to compare: 127.0.0.1:8001/vit.",
        unset="no server",
    )
    price_per_hour: float | None = option(
        None,
        "The hourly price of this machine, to show the cost of a million requests.",
        unset="unknown",
        compare=False,
    )


PANEL = Panel(
    "service",
    "In service",
    ("bench",),
    ServiceOptions,
    "moexport.plugins.service.cli:service_options",
)
