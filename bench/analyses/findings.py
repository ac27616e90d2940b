"""What the analyses find, and a search of `tune`, as frozen data that goes into `results.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.documents import from_data
from ...exporter.bundle.recipe import LayerRecipe
from ...graphs.targets import RUNTIME_TITLES, Runtime
from ..results import Interval

EXPERTS = "experts"
"""Where studies stand among the analyses of `results.json`."""

SUMS, PASSES = "sums", "passes"


@dataclass(frozen=True, slots=True)
class Kept:
    """Algorithm 1 with k experts: its accuracy, 0..1, and what that is of all experts'.

    `retention` is None where the untouched model gets nothing right.
    """

    k: int
    top1: float
    retention: float | None


@dataclass(frozen=True, slots=True)
class RandomChoice:
    """Algorithm 1 beside k experts drawn at random for each input and layer.

    `accuracies` has one value per seed; `std` is their sample standard deviation. `sigmas` is how
    many of them Algorithm 1 lies above `mean`; None where all seeds agree.
    """

    k: int
    algorithm_1: float
    mean: float
    std: float
    sigmas: float | None
    accuracies: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BestSubsets:
    """All C(n, k) sets of experts tried on every input; the same set in every layer.

    `best` is the share of inputs that some set classifies right: what an oracle could reach.
    `distinct` counts the sets that have the least loss for at least one input. `average` is the
    accuracy of a set drawn at random, exactly; `fixed` that of the best single set for all inputs.
    Where C(n, k) is beyond the limit, nothing was tried and all are None.
    """

    k: int
    subsets: int
    algorithm_1: float
    best: float | None = None
    fixed: float | None = None
    average: float | None = None
    distinct: int | None = None


@dataclass(frozen=True, slots=True)
class Shares:
    """The share of ΣC, the sum of the scores s, that the j largest hold, for j = 1 … n.

    Over inputs: the mean and the 10th and 90th percentile. A router that does not care has j/n.
    """

    layer: str
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExpertStudy:
    """What was found about the experts of one model, on `samples` labelled inputs.

    `experts` is n of the largest layer, `top1` the accuracy of the untouched PyTorch model.
    `method` says how choices were evaluated: `sums` of what each expert contributes, where the
    class scores are such a sum, or `passes` through the whole model.
    """

    model: str
    experts: int
    layers: int
    samples: int
    top1: float | None
    method: str
    retention: tuple[Kept, ...] = ()
    random: tuple[RandomChoice, ...] = ()
    subsets: tuple[BestSubsets, ...] = ()
    shares: tuple[Shares, ...] = ()

    def kept(self, k: int) -> float | None:
        """What Algorithm 1 with k experts keeps of the accuracy with all; None if not measured."""
        return next((kept.retention for kept in self.retention if kept.k == k), None)


def analyses_of(studies: Sequence[ExpertStudy]) -> dict[str, Any]:
    """Returns studies as the analyses of a results file: plain data, as they are read again."""
    import msgspec

    return {EXPERTS: [msgspec.to_builtins(one) for one in studies]}


def studies_in(analyses: Mapping[str, Any], *, name: str = "results.json") -> list[ExpertStudy]:
    """Returns the studies among the analyses of a results file.

    Raises ResultsError that names the file and the field that cannot be read.
    """
    studies = analyses.get(EXPERTS, ())
    return from_data(list[ExpertStudy], studies, name, at=f"analyses.{EXPERTS}")


TUNING = "tuning"
"""Where a search stands among the analyses of `results.json`."""


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One point that was found: its time for a batch, its size, and what it keeps.

    `searched` is on the half that the search saw, `confirmed` on the other: None where it was not
    looked at there. `text` has the layers in words; files of before hold a list of them.
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

    @property
    def fastest(self) -> dict[Runtime, FrontPoint]:
        """The fastest point of each runtime that keeps enough: a confirmed one, if there is any.

        Others were looked at by the search alone.
        """
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
        """Why the chosen point runs where it does, in a sentence; empty with one runtime."""
        if len({point.runtime for point in self.points}) < 2:
            return ""
        reasons = (
            f"{point.ms:.3g} ms in {RUNTIME_TITLES[name]}"
            f"{'' if self._enough(point.confirmed) else ' (not confirmed)'}"
            for name, point in self.fastest.items()
        )
        return f"The fastest that keeps enough takes {' and '.join(reasons)}."


def tuning_in(analyses: Mapping[str, Any], *, name: str = "results.json") -> TuningRecord | None:
    """Returns the search among the analyses of a results file, None where there is none.

    Raises ResultsError that names the file and the field that cannot be read.
    """
    if TUNING not in analyses:
        return None
    return from_data(TuningRecord, analyses[TUNING], name, at=f"analyses.{TUNING}")
