"""The options of `bench` for services. Importing this loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...common.option import Panel, option

API = 1


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """The load for the rows of a benchmark."""

    scenario: str | Sequence[str] = option(
        "",
        "MLPerf scenarios, a list: single-stream,multi-stream,server,offline.",
        unset="none",
    )
    latency_bound: str | float | None = option(
        None,
        "The longest that 99% of the requests of server may take: 50ms.",
        unset="none; server needs one",
    )
    offered_rate: float | None = option(
        None,
        "The rate that server offers, in requests a second.",
        unset="the highest rate within the bound, by a search",
    )
    max_delay: str | float | None = option(
        None,
        "The longest that the queue waits to fill a batch: 2ms.",
        unset="no waiting",
    )
    duration: str | float = option("10s", "The least time of each run of LoadGen.")
    library: int | None = option(None, "Inputs that LoadGen draws from.", unset="all, 1024 at most")
    triton: str | None = option(
        None,
        "The same bundle on a running Triton server, to compare with: 127.0.0.1:8001/vit.",
        unset="no server",
    )
    price_per_hour: float | None = option(
        None,
        "What an hour of this machine costs, for the cost of a million requests.",
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
