"""Calibrates on a Ray cluster: every node observes a share of the batches.

The observations are counts, extremes and peaks, which can be merged exactly, so for every
method the table is bit-identical to that of one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from ...calibration.table import CalibrationTable, Origin
from ...common.console import Progress, Silent
from ...errors import ClusterError
from ...exporter.checkpoints.load import load
from ...exporter.job import calibration_job
from ...exporter.quantization.calibrate import CalibrationJob, Observed, ensure_table, observe_model
from ...exporter.requests import CalibrateRequest, LoadRequest
from .ray import Cluster, NodeKind, Task, connected, kinds_of


@dataclass(frozen=True, slots=True)
class CalibrationSource:
    """What a node needs to calibrate: the model and its loading options, the data and options."""

    model: str
    loading: LoadRequest
    data: str
    options: CalibrateRequest

    def job(self) -> CalibrationJob:
        """Returns the job, with the model loaded."""
        model = load(self.model, replace(self.loading, example=self.data))
        return calibration_job(model, self.data, self.options)


def calibrate_on_ray(
    source: CalibrationSource,
    *,
    address: str,
    on: str,
    out: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> CalibrationTable:
    """Returns the ranges of a model's tensors; `out` and `force` are as in `ensure_table`.

    Raises the errors of nodes, and `ClusterError` if the cluster cannot be reached or used, or if
    its nodes read different inputs.
    """
    with connected(address, progress or Silent()) as cluster:
        (kind,) = kinds_of(cluster.ray.nodes(), [on])

        def origin() -> Origin:
            (result,) = _results_of(cluster, kind, "comparing", full_origin, [(source,)])
            assert isinstance(result, Origin)
            return result

        def make() -> CalibrationTable:
            shares = [(source, (index, kind.nodes)) for index in range(kind.nodes)]
            observed = merged(_results_of(cluster, kind, "ranges", observed_share, shares))
            return observed.table(source.options.method, source.options.share)

        if out is None:
            return make()
        return ensure_table(out, origin, make, force=force, progress=progress)


def merged(parts: list[Observed]) -> Observed:
    """Merges all shares; raises `CalibrationError` if a tensor has no range."""
    first, *others = parts
    if any(other.origin != first.origin for other in others):
        raise ClusterError(
            "the nodes did not read the same model and inputs",
            hint="compare the files at these paths on each node, or use URLs",
        )
    observations = reduce(add, (part.observations for part in parts))
    observations.check()
    return replace(first, observations=observations)


def _results_of(
    cluster: Cluster,
    kind: NodeKind,
    name: str,
    function: Callable[..., Any],
    arguments: list[tuple[Any, ...]],
) -> list[Any]:
    """Returns a function's results for each of the argument tuples, in their order."""
    count = len(arguments)
    tasks = [
        Task(name=f"{name} {i + 1}/{count}", function=function, arguments=values)
        for i, values in enumerate(arguments)
    ]
    results = dict(cluster.completed(kind, tasks))
    cluster.check_lost("calibrated")
    return [results[number] for number in range(count)]


# --- runs on the nodes ---------------------------------------------------------------------------


def observed_share(source: CalibrationSource, share: tuple[int, int]) -> Observed:
    """Returns the observations of the model's tensors over a share of the batches."""
    return observe_model(source.job(), share)


def full_origin(source: CalibrationSource) -> Origin:
    """Returns the origin of the table over all batches."""
    return source.job().full_origin()
