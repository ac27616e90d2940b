"""How far outputs are from those that are expected, each input in its own scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Bounds(Protocol):
    """How far outputs may be off (`exporter.parity.Tolerance`)."""

    @property
    def atol(self) -> float:
        """What any input may be off."""
        ...

    @property
    def rtol(self) -> float:
        """What an input may be off, over its own scale."""
        ...

    @property
    def outlier(self) -> float:
        """How many times that a few may be off."""
        ...

    @property
    def least_cosine(self) -> float:
        """The smallest cosine of an input."""
        ...


FEW_NUMBERS = 8
"""Of fewer numbers the largest may be near zero by chance, and their direction says little."""

SILENT = 1e-3
"""Of what quiet inputs give: less than that is no scale, since rounding leaves as much."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one output is off, by input [s]: the largest difference, and the cosine.

    `own` is the largest number that was expected of an input, and `numbers` how many there are.
    Inputs are `counted` of which anything was compared.
    """

    off: np.ndarray
    own: np.ndarray
    cosine: np.ndarray
    counted: np.ndarray
    numbers: int

    def scale(self) -> np.ndarray:
        """Returns what the difference of each input is relative to: its own largest number.

        An output of few numbers has the scale of most inputs at least, and one of zeros that of the
        quiet inputs: the largest number of all would hide whatever happens to the others.
        """
        some = self.own[self.counted & (self.own > 0)]
        if not some.size:
            return np.ones_like(self.own)
        quiet = float(np.quantile(some, 0.1))
        least = float(np.median(some)) if self.numbers < FEW_NUMBERS else SILENT * quiet
        return np.maximum(np.where(self.own > 0, self.own, quiet), least)

    @property
    def inputs(self) -> int:
        """How many inputs are counted."""
        return int(self.counted.sum())

    @property
    def max_abs(self) -> float:
        """The largest difference."""
        return float(self.off.max(initial=0.0))

    @property
    def relative(self) -> np.ndarray:
        """The difference of each input that is counted, in its scale."""
        relative: np.ndarray = (self.off / self.scale())[self.counted]
        return relative

    @property
    def max_rel(self) -> float:
        """The largest difference in the scale of its input."""
        return float(self.relative.max(initial=0.0))

    @property
    def usual_rel(self) -> float:
        """What all inputs but the outliers are within, in their scales."""
        return _usual(self.relative)

    @property
    def loudness(self) -> tuple[float, float]:
        """The largest number of the quietest input and of the loudest."""
        own = self.own[self.counted]
        return float(own.min(initial=np.inf)) if own.size else 0.0, float(own.max(initial=0.0))

    @property
    def least_cosine(self) -> float:
        """The smallest cosine of an input's outputs."""
        return float(self.cosine[self.counted].min(initial=1.0))

    def within(self, bounds: Bounds) -> bool:
        """Whether the inputs are within the bounds, each in its own scale."""
        usual = _usual(self._beyond(bounds.atol)) <= bounds.rtol
        return usual and self.within_outliers(bounds)

    def within_outliers(self, bounds: Bounds) -> bool:
        """Whether each of a few inputs is as near as an outlier may be."""
        largest = float(self._beyond(bounds.atol).max(initial=0.0))
        return largest <= bounds.outlier * bounds.rtol and not self.turned(bounds.least_cosine)

    def near(self, usual: Distance, bounds: Bounds) -> bool:
        """Whether a few inputs with another number of tokens are no far outliers.

        They may be further off where the furthest at the usual number are so, too.
        """
        largest = float(self._beyond(bounds.atol).max(initial=0.0))
        most = max(OUTLIER_AT_TOKENS * bounds.rtol, FURTHER_AT_TOKENS * usual.max_rel)
        return largest <= most and self.within_outliers(bounds)

    def _beyond(self, atol: float) -> np.ndarray:
        """By how much more than `atol` each input that is counted is off, in its scale."""
        excess: np.ndarray = (np.maximum(0.0, self.off - atol) / self.scale())[self.counted]
        return excess

    def turned(self, least: float) -> bool:
        """Whether the outputs of an input point elsewhere, as far as they have a direction."""
        if self.numbers < FEW_NUMBERS:
            return False
        heard = self.counted & (self.own >= self.scale())
        return bool((self.cosine[heard] < least).any())

    def like(self, other: Distance, rows: np.ndarray, bounds: Bounds) -> bool:
        """Whether inputs in another batch are as near as the bounds allow, or as they are anyway.

        They are those `rows` of an other, which tells their scales: a few of them say little.
        """
        allowed, off = bounds.atol + bounds.rtol * other.scale()[rows], other.off[rows]
        return bool((self.off <= np.where(off > allowed, OUTLIER_IN_A_BATCH * off, allowed)).all())

    @staticmethod
    def of(parts: Sequence[Distance]) -> Distance:
        """Returns the distance over the inputs of all parts."""
        joined = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("off", "own", "cosine", "counted")
        }
        return Distance(**joined, numbers=min(part.numbers for part in parts))


OUTLIERS = 0.05
"""Of the inputs so many, rounded down, may be outliers where a precision allows any."""


OUTLIER_AT_TOKENS = 1.5
"""How far a few inputs may be off at another number of tokens, over what most may be off."""

FURTHER_AT_TOKENS = 2.0
"""The same, over what the furthest are off at the usual number."""

OUTLIER_IN_A_BATCH = 1.5
"""How far an outlier may be off in a batch of another size, over what it is off anyway."""


def _usual(relative: np.ndarray) -> float:
    """What all are within but the outliers."""
    if not relative.size:
        return 0.0
    return float(np.sort(relative)[len(relative) - 1 - int(OUTLIERS * len(relative))])


def distance(expected: np.ndarray, y: np.ndarray, same: np.ndarray) -> Distance:
    """How far outputs are off in the samples [s] or tokens [s, m] that are `same`.

    Whole numbers are no distances: whoever compares counts those that differ.
    """
    if expected.dtype.kind != "f":
        expected = y = np.zeros(expected.shape)
    spread = same.reshape(*same.shape, *(1,) * (y.ndim - same.ndim))
    actual = np.where(spread, y, 0.0).astype(np.float64).reshape(len(y), -1)
    wanted = np.where(spread, expected, 0.0).astype(np.float64).reshape(len(y), -1)
    off = np.abs(actual - wanted).max(axis=1, initial=0.0)
    return Distance(
        off=np.where(np.isfinite(off), off, np.inf),
        own=np.abs(wanted).max(axis=1, initial=0.0),
        cosine=cosines(actual, wanted),
        counted=np.asarray(same.reshape(len(y), -1).any(axis=1)),
        numbers=actual.shape[1],
    )


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the cosine of each sample's outputs, [s, …], [s, …] → [s], in float64.

    1 where both are zero, 0 where one is, or where a number is not finite.
    """
    a, b = (part.reshape(len(part), -1).astype(np.float64) for part in (a, b))
    zero = ~a.any(axis=1) & ~b.any(axis=1)
    with np.errstate(invalid="ignore"):
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosine = np.where(zero, 1.0, (a * b).sum(axis=1) / np.where(norms == 0, 1.0, norms))
    return np.where(np.isfinite(cosine), cosine, 0.0)
