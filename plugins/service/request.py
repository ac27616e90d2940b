"""What is asked of services: options of `bench`. Importing this loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...common.option import Panel, option

API = 1


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Which load is offered to the rows of a benchmark, and how."""

    scenario: str | Sequence[str] = option(
        "",
        "MLPerf scenarios, a list: single-stream,multi-stream,server,offline.",
        unset="none",
    )
    latency_bound: str | float | None = option(
        None,
        "The longest that 99% of the requests of server may take: 50ms.",
        unset="none; server needs one",
        metavar="TIME",
    )
    offered_rate: float | None = option(
        None,
        "Offer server so many requests a second.",
        unset="the most that keeps the bound is searched for",
        metavar="RATE",
    )
    max_delay: str | float | None = option(
        None,
        "The longest that the queue waits to fill a batch: 2ms.",
        unset="it does not wait",
        metavar="TIME",
    )
    duration: str | float = option("10s", "The least time of each run of LoadGen.", metavar="TIME")
    library: int | None = option(
        None, "Inputs that LoadGen draws from.", unset="all, 1024 at most", min=1
    )
    triton: str | None = option(
        None,
        "The same bundle on a running Triton server, served beside: 127.0.0.1:8001/vit.",
        unset="no server",
        kind=str,
        metavar="ADDRESS/MODEL",
    )
    price_per_hour: float | None = option(
        None,
        "What an hour of this machine costs, for the cost of a million requests.",
        unset="not known",
        compare=False,
        metavar="PRICE",
    )


PANEL = Panel("service", "In service", ("bench",), ServiceOptions)
