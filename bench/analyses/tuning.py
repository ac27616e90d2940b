"""What `tune` found, as frozen data that goes into `results.json` and is drawn by the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...common.json_data import from_data
from ..results import Interval

TUNING = "tuning"
"""Where a search stands among the analyses of `results.json`."""


@dataclass(frozen=True, slots=True)
class TunedLayer:
    """What one layer is at a point: `experts` are those that stay, empty where all do."""

    layer: str
    k: int
    of: int
    precision: str
    lowering: str
    experts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One point that was found: its time for a batch, its size, and what it keeps.

    `searched` is on the half that the search saw, `confirmed` on the other: None where it was not
    looked at there.
    """

    ms: float
    predicted_ms: float
    bytes: int
    kept: float
    searched: Interval
    text: str
    layers: tuple[TunedLayer, ...]
    around: str = "fp32"
    front: bool = False
    chosen: bool = False
    confirmed_kept: float | None = None
    confirmed: Interval | None = None


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """A search: what was asked, by which metric, on how many inputs, and every point it found.

    `recipe` is the file that exports the chosen one again.
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


def tuning_in(analyses: Mapping[str, Any], *, name: str = "results.json") -> TuningRecord | None:
    """Returns the search among the analyses of a results file, None where there is none.

    Raises ResultsError that names the file and the field that cannot be read.
    """
    if TUNING not in analyses:
        return None
    return from_data(TuningRecord, analyses[TUNING], name, at=f"analyses.{TUNING}")
