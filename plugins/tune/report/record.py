"""The outcome of a search as frozen data for `results.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....bench.results import Interval
from ....common.documents import from_data
from ....exporter.bundle.runtimes import RUNTIMES
from ....graphs.targets import Runtime
from ..recipe import LayerRecipe

TUNING = "tuning"
"""The key of a search in the analyses of `results.json`."""


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A point: its time for a batch, its size, and the quality that it keeps.

    `searched` is the interval on the search's half, `confirmed` the one on the other half, None if
    the point was not tested there. `text` describes the layers; in older files, `layers` is a list.
    """

    ms: float
    predicted_ms: float
    bytes: int
    kept: float
    searched: Interval
    text: str
    layers: dict[str, LayerRecipe] | list[Any]
    around: str = "fp32"
    front: bool = False
    chosen: bool = False
    confirmed_kept: float | None = None
    confirmed: Interval | None = None
    runtime: Runtime = "onnxruntime"


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """A search: its bounds, its metric, the numbers of inputs, and every point that was measured.

    `recipe` is the recipe file of the chosen point.
    """

    model: str
    metric: str
    batch: int
    searching: int
    confirming: int
    seconds: float
    keep: float | None
    max_latency_ms: float | None
    max_bytes: int | None
    recipe: str
    points: tuple[FrontPoint, ...]

    @property
    def fastest(self) -> dict[Runtime, FrontPoint]:
        """The fastest point that keeps enough in each runtime, preferably a confirmed one."""
        found: dict[Runtime, FrontPoint] = {}
        for runtime in dict.fromkeys(point.runtime for point in self.points):
            points = [point for point in self.points if point.runtime == runtime]
            confirmed = [point for point in points if self._keeps_enough(point.confirmed)]
            enough = confirmed or [point for point in points if self._keeps_enough(point.searched)]
            if enough:
                found[runtime] = min(enough, key=lambda point: point.ms)
        return found

    def _keeps_enough(self, interval: Interval | None) -> bool:
        return interval is not None and interval.low >= (self.keep or 0.0)

    @property
    def why_runtime(self) -> str:
        """A sentence that explains the choice of the runtime; empty if only one was tried."""
        if len({point.runtime for point in self.points}) < 2:
            return ""
        times = (
            f"{point.ms:.3g} ms in {RUNTIMES[name].title if name in RUNTIMES else name}"
            f"{'' if self._keeps_enough(point.confirmed) else ' (not confirmed)'}"
            for name, point in self.fastest.items()
        )
        return f"The fastest model that keeps enough takes {' and '.join(times)}."


def tuning_in(analyses: Mapping[str, Any], *, name: str = "results.json") -> TuningRecord | None:
    """Returns the search in the analyses of a results file, or None.

    Raises a `ResultsError` that names the file and the field that cannot be read.
    """
    if TUNING not in analyses:
        return None
    return from_data(TuningRecord, analyses[TUNING], name, at=f"analyses.{TUNING}")
