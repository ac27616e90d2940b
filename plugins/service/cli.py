"""The options for services."""

from __future__ import annotations

from typing import Annotated

from ...commands.options import option_for
from ...common.option import changed
from .request import ServiceOptions


def service_options(
    *,
    scenario: Annotated[str, option_for(ServiceOptions, "scenario")] = "",
    latency_bound: Annotated[
        str | None, option_for(ServiceOptions, "latency_bound", metavar="TIME")
    ] = None,
    offered_rate: Annotated[
        float | None, option_for(ServiceOptions, "offered_rate", metavar="RATE")
    ] = None,
    max_delay: Annotated[
        str | None, option_for(ServiceOptions, "max_delay", metavar="TIME")
    ] = None,
    duration: Annotated[str, option_for(ServiceOptions, "duration", metavar="TIME")] = "10s",
    library: Annotated[int | None, option_for(ServiceOptions, "library", min=1)] = None,
    triton: Annotated[
        str | None, option_for(ServiceOptions, "triton", metavar="ADDRESS/MODEL")
    ] = None,
    price_per_hour: Annotated[
        float | None, option_for(ServiceOptions, "price_per_hour", metavar="PRICE")
    ] = None,
) -> ServiceOptions:
    """Returns the options of `bench` for services."""
    options = ServiceOptions(
        scenario=scenario,
        latency_bound=latency_bound,
        offered_rate=offered_rate,
        max_delay=max_delay,
        duration=duration,
        library=library,
        triton=triton,
        price_per_hour=price_per_hour,
    )
    if changed(options):
        from .settings import parse

        parse(options)  # refused before PyTorch is imported
    return options
