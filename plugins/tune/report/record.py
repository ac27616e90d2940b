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
"""The name of a search among the analyses of `results.json`."""


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One point: its time for a batch, its size, and the quality it keeps.

    `searched` is the interval on the search's half, `confirmed` on the other (None if the point was
    not confirmed). `text` describes the layers; older files have a list of them.
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
    """A search: its bounds, metric and numbers of inputs, and every point it found.

    `recipe` is the file that exports the chosen point again.
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
        """The fastest point of each runtime that keeps enough: a confirmed one if there is any."""
        found: dict[Runtime, FrontPoint] = {}
        for runtime in dict.fromkeys(point.runtime for point in self.points):
            own = [point for point in self.points if point.runtime == runtime]
            confirmed = [point for point in own if self._enough(point.confirmed)]
            enough = confirmed or [point for point in own if self._enough(point.searched)]
            if enough:
                found[runtime] = min(enough, key=lambda point: point.ms)
        return found

    def _enough(self, interval: Interval | None) -> bool:
        return interval is not None and interval.low >= (self.keep or 0.0)

    @property
    def why_runtime(self) -> str:
        """A sentence on why the chosen point uses its runtime; empty if only one was tried."""
        if len({point.runtime for point in self.points}) < 2:
            return ""
        reasons = (
            f"{point.ms:.3g} ms in {RUNTIMES[name].title if name in RUNTIMES else name}"
            f"{'' if self._enough(point.confirmed) else ' (not confirmed)'}"
            for name, point in self.fastest.items()
        )
        return f"The fastest that keeps enough takes {' and '.join(reasons)}."


def tuning_in(analyses: Mapping[str, Any], *, name: str = "results.json") -> TuningRecord | None:
    """Returns the search among the analyses of a results file, None if there is none.

    Raises ResultsError with the file and the field that cannot be read.
    """
    if TUNING not in analyses:
        return None
    return from_data(TuningRecord, analyses[TUNING], name, at=f"analyses.{TUNING}")
