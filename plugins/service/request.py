"""The options of `bench` for services. This module imports no large library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...common.option import Panel, option

API = 1


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """The load under which the rows of a benchmark are measured as services."""

    scenario: str | Sequence[str] = option(
        "",
        "MLPerf scenarios, a list: single-stream,multi-stream,server,offline.",
        unset="none",
    )
    latency_bound: str | float | None = option(
        None,
        "The longest that 99% of the requests may take in the scenario server: 50ms.",
        unset="none; server needs one",
    )
    offered_rate: float | None = option(
        None,
        "The rate of the scenario server, in requests per second.",
        unset="the highest rate within the bound, by a search",
    )
    max_delay: str | float | None = option(
        None,
        "The longest that the queue waits to fill a batch: 2ms.",
        unset="no waiting",
    )
    duration: str | float = option("10s", "The least time of each run of LoadGen.")
    library: int | None = option(None, "Inputs that LoadGen draws from.", unset="all, at most 1024")
    triton: str | None = option(
        None,
        "The same bundle on a running Triton server, to compare with: 127.0.0.1:8001/vit.",
        unset="no server",
    )
    price_per_hour: float | None = option(
        None,
        "The price of this machine per hour, to show the cost of a million requests.",
        unset="not known",
        compare=False,
    )


PANEL = Panel(
    "service",
    "In service",
    ("bench",),
    ServiceOptions,
    "moexport.plugins.service.cli:service_options",
)
