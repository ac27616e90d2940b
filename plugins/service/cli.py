"""The options for services."""

from __future__ import annotations

from typing import Annotated

from ...commands.options import options_of
from ...common.option import changed
from .request import ServiceOptions

OPTIONS = options_of(
    ServiceOptions,
    latency_bound={"metavar": "TIME"},
    offered_rate={"metavar": "RATE"},
    max_delay={"metavar": "TIME"},
    duration={"metavar": "TIME"},
    library={"min": 1},
    triton={"metavar": "ADDRESS/MODEL"},
    price_per_hour={"metavar": "PRICE"},
)


def service_options(options: Annotated[ServiceOptions, OPTIONS]) -> ServiceOptions:
    """Returns the options of `bench` for services, after a check of their values."""
    if changed(options):
        from .settings import parse

        parse(options)  # refused before PyTorch is imported
    return options
