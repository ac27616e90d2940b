"""The results of the analyses, as frozen data for `results.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.documents import from_data

EXPERTS = "experts"
"""The key of the studies in the analyses of `results.json`."""

SUMS, PASSES = "sums", "passes"


@dataclass(frozen=True, slots=True)
class KeptAccuracy:
    """The accuracy with the k experts of Algorithm 1, 0..1, and its ratio to that of all experts.

    `retention`, the ratio, is None if the untouched model gives no correct answer.
    """

    k: int
    top1: float
    retention: float | None


@dataclass(frozen=True, slots=True)
class RandomChoice:
    """Algorithm 1 compared with k experts drawn at random for each input and layer.

    `accuracies` has one value per seed; `std` is their sample standard deviation. Algorithm 1 is
    `sigmas` standard deviations above `mean`, None if all seeds agree.
    """

    k: int
    algorithm_1: float
    mean: float
    std: float
    sigmas: float | None
    accuracies: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BestSubsets:
    """The results of all C(n, k) sets of experts on every input, with one set for all layers.

    `best` is the share of inputs that some set classifies correctly: the limit of an oracle.
    `distinct` is the number of sets that have the smallest loss for at least one input. `average`
    is the exact mean accuracy over all sets, `fixed` the accuracy of the best set for all inputs.
    If C(n, k) is above the limit, nothing was tried and these are None.
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
    """The share of ΣC, the sum of the scores s, that the j largest make up, for j = 1 … n.

    `mean`, `low` and `high` are the mean and the 10th and 90th percentiles over inputs. A uniform
    router has j/n.
    """

    layer: str
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExpertStudy:
    """The analyses of the experts of one model, on `samples` labelled inputs.

    `experts` is n of the largest layer, `top1` the accuracy of the untouched PyTorch model.
    `method` is how choices were evaluated: by "sums" of the experts' contributions, if the class
    scores are such sums, or by "passes" through the whole model.
    """

    model: str
    experts: int
    layers: int
    samples: int
    top1: float | None
    method: str
    retention: tuple[KeptAccuracy, ...] = ()
    random: tuple[RandomChoice, ...] = ()
    subsets: tuple[BestSubsets, ...] = ()
    shares: tuple[Shares, ...] = ()

    def kept(self, k: int) -> float | None:
        """Returns the share of the accuracy kept with k experts; None if it was not measured."""
        return next((kept.retention for kept in self.retention if kept.k == k), None)


def analyses_of(studies: Sequence[ExpertStudy]) -> dict[str, list[dict[str, Any]]]:
    """Returns studies as plain data for the analyses of a results file."""
    import msgspec

    return {EXPERTS: msgspec.to_builtins(studies)}


def studies_in(analyses: Mapping[str, Any], *, name: str = "results.json") -> list[ExpertStudy]:
    """Returns the studies among the analyses of a results file.

    Raises a `ResultsError` that names the file and the field that cannot be read.
    """
    studies = analyses.get(EXPERTS, ())
    return from_data(list[ExpertStudy], studies, name, at=f"analyses.{EXPERTS}")
