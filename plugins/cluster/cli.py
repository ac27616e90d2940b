"""Options of `bench`, `calibrate` and `tune` for a Ray cluster."""

from __future__ import annotations

from ...commands.options import options_of
from .request import ClusterOptions

cluster_options = options_of(ClusterOptions, ray={"metavar": "ADDRESS"}, on={"metavar": "RESOURCE"})
