"""Options for a Ray cluster."""

from __future__ import annotations

from typing import Annotated

from ...commands.options import option_for
from .request import ClusterOptions


def cluster_options(
    *,
    ray: Annotated[str | None, option_for(ClusterOptions, "ray", metavar="ADDRESS")] = None,
    on: Annotated[str | None, option_for(ClusterOptions, "on", metavar="RESOURCE")] = None,
) -> ClusterOptions:
    """Returns the options of `bench`, `calibrate` and `tune` for a cluster."""
    return ClusterOptions(ray=ray, on=on)
