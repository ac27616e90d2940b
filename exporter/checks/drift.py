"""Tests whether new inputs choose other experts than the export's: a distance and its interval.

The distance of two histograms p and q is Σ|p − q| / 2: the share of the choices that would have to
go to other experts. Chance alone makes it larger than 0, more so with more experts. The noise is
therefore simulated from how much single inputs differ: tokens of one input are not independent
draws. The interval contains the multiples λ·|p − q| for which the observation is within the noise;
the distance is the one for which it is the median, or 0 if chance explains all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ...data.batches import Fields
from ..bundle.manifest import Check, Manifest
from ..bundle.parity import MAX_LISTED, Reference
from ..session import Session
from .choices import ChoiceHistogram, choices_of, chosen_k, deviations, recorded_histograms

LEVEL = 0.99
"""The joint level of all layers' intervals: one bundle in a hundred is reported wrongly."""

MIN_INPUTS = 8
"""The fewest inputs with a known spread."""

DRAWS = 500

NAME = "routing of --data"


@dataclass(frozen=True, slots=True)
class Drift:
    """The share of a layer's choices that have moved, with the ends of its interval."""

    layer: str
    distance: float
    low: float
    high: float

    @property
    def drifted(self) -> bool:
        """Whether chance does not explain the change."""
        return self.low > 0

    @property
    def text(self) -> str:
        """In words: `12.3% [10.1%, 14.6%]`."""
        return f"{self.distance:.1%} [{self.low:.1%}, {self.high:.1%}]"


@dataclass(frozen=True, slots=True)
class DriftCheck(Check):
    """The findings of `verify` on the choices of new inputs; `drift` is empty if unknown."""

    drift: tuple[Drift, ...] = ()


def drift_of(layer: str, before: ChoiceHistogram, now: np.ndarray, level: float = LEVEL) -> Drift:
    """Returns how far the choices of a layer have moved.

    `now` [s, n] are the counts of each new input.
    """
    totals = now.sum(axis=1)
    moved = now.sum(axis=0) / totals.sum() - before.counts / before.counts.sum()
    observed = float(np.abs(moved).sum()) / 2
    noise = _noise(before, now)

    def quantile(times: float, z: float) -> float:
        """Returns a quantile of distances, if the true difference is `times` the observed one."""
        # Wilson and Hilferty: the cube root of a sum of squares is nearly normal.
        powers = (np.abs(times * moved + noise).sum(axis=1) / 2) ** (2 / 3)
        return math.pow(max(0.0, float(powers.mean() + z * powers.std())), 1.5)

    def distance_at(z: float) -> float:
        return observed * _root(lambda times: quantile(times, z) - observed) if observed else 0.0

    z = NormalDist().inv_cdf((1 + level) / 2)
    high = distance_at(-z) if observed else quantile(0.0, z)
    return Drift(layer, distance_at(0.0), distance_at(z), min(1.0, high))


def _noise(before: ChoiceHistogram, now: np.ndarray) -> np.ndarray:
    """Draws differences of two histograms of one distribution, [draws, n]."""
    count, random = len(now), np.random.default_rng(0)
    changes = deviations(now)
    noise: np.ndarray = random.standard_normal((DRAWS, count)) @ changes / np.sqrt(count - 1)
    # If the new inputs vary less, by chance, the variance is that of both sets of inputs.
    variance = (changes**2).sum(axis=0) / (count - 1)
    pooled = (before.inputs * before.spread**2 + count * variance) / (before.inputs + count)
    extra = np.sqrt(np.maximum(0.0, pooled - variance))
    noise += extra * random.standard_normal(noise.shape)
    # Inputs of the export vary more if they are shorter.
    longer = max(1.0, float(now.sum() / count * before.inputs / before.counts.sum()))
    noise *= np.sqrt(longer / before.inputs + 1 / count)
    # As in a t-test: a few inputs do not determine the variance well.
    noise *= np.sqrt((count - 1) / random.chisquare(count - 1, (DRAWS, 1)))
    return noise


def _root(function: Callable[[float], float]) -> float:
    """Returns the λ ≥ 0 at which an increasing function reaches 0; 0 if it starts above 0."""
    if function(0.0) >= 0:
        return 0.0
    low, high = 0.0, 1.0
    while function(high) < 0:
        low, high = high, 2 * high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return high


def drift_checks(
    manifest: Manifest,
    open_session: Callable[[Mapping[str, int]], Session],
    batches: Iterable[Fields],
    expected: Reference | None,
) -> Iterator[Check]:
    """Yields whether new inputs choose other experts than the export's inputs.

    `open_session` returns the main graph with additional values as outputs. Yields nothing for a
    bundle without histograms.
    """
    before = recorded_histograms(manifest.answers)
    if not before or expected is None:
        return
    graph = manifest.graphs[0]
    session = open_session(expected.observed(graph.selected))
    k = chosen_k(manifest, expected)
    found = choices_of(session, manifest, graph, batches, k)
    now = {choice: found.of(choice) for choice in before if choice in found.counts}
    count = max((len(counts) for counts in now.values()), default=0)
    fewest = min(layer.inputs for layer in before.values())
    if count < MIN_INPUTS or fewest < MIN_INPUTS:
        which = f"{count} inputs" if count < MIN_INPUTS else f"the {fewest} inputs of the export"
        text = f"{which} are too few to tell whether routing has drifted"
        export = "" if count < MIN_INPUTS else "export with more inputs in --data: "
        yield DriftCheck(NAME, True, text, f"{export}{MIN_INPUTS} or more are needed")
        return
    level = 1 - (1 - LEVEL) / len(now)  # Bonferroni
    drift = tuple(
        drift_of(choice, before[choice], counts, level)
        for choice, counts in now.items()
        if counts.sum() > 0 and len(before[choice].counts) == counts.shape[1]
    )
    at_k = "" if k is None else f", with k = {k}"
    yield _drift_check(drift, count, max(layer.inputs for layer in before.values()), at_k)


def _drift_check(drift: tuple[Drift, ...], now: int, before: int, at_k: str) -> DriftCheck:
    drifted = sorted((layer for layer in drift if layer.drifted), key=lambda layer: -layer.distance)
    compared = (
        f"{now:,} inputs compared with the {before:,} of the export{at_k}, intervals of {LEVEL:.0%}"
    )
    if not drifted:
        furthest = max(drift, key=lambda layer: (layer.distance, layer.high))
        text = f"no drift: {furthest.text} of the choices changed"
        if len(drift) > 1:
            text += f" in layer {furthest.layer}, the most of {len(drift)} layers"
        return DriftCheck(NAME, True, f"{text} ({compared})", drift=drift)
    where = ", ".join(f"{layer.text} in layer {layer.layer}" for layer in drifted[:MAX_LISTED])
    extra = len(drifted) - MAX_LISTED
    where += f", and less in {extra} more" if extra > 0 else ""
    return DriftCheck(
        NAME,
        True,
        f"DRIFTED: the choices of experts differ from those of the export, by {where} ({compared})",
        "measure the accuracy on new labels, or export again with these inputs as --data",
        drift,
    )
