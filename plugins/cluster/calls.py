"""The Python function for benchmarks on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...bench.calls import bench_on_nodes
from ...bench.request import BenchRequest
from ...common.option import takes
from ...exporter.requests import AnyPath
from .executor import RAY

if TYPE_CHECKING:
    from ...bench.results import Results


@takes(BenchRequest)
def bench_on_ray(models: AnyPath | Sequence[AnyPath], request: BenchRequest) -> dict[str, Results]:
    """Measures models and bundles on the nodes of a Ray cluster; returns results by kind of node.

    Every node must have moexport and read models and data from the same paths or URLs. With
    several kinds of node, `out` gets a folder for each kind and a table of all kinds.

    Raises:
        UsageError: before anything is measured, if an argument is invalid.
        ClusterError: if the cluster cannot be reached, lacks a resource, or loses its nodes.
    """
    return bench_on_nodes(RAY, models, request)
