"""How often a tensor takes which values: counts whose bins can always be merged exactly.

Bins are as wide as a power of two and lie at multiples of their width. Where a later batch holds
larger values, the width is doubled and pairs of bins become one, which is exactly what counting
with the wider bins from the beginning would have given. So one pass over the data is enough, and
the result depends on neither the order nor the batch size of the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

HALF = 4096
"""Bins on each side of zero. A tensor's largest absolute value falls into the outer half of them,
so between 2048 and 4096 bins hold one side: eight times the levels of 8 bits, or more."""

BINS = 2 * HALF


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts [BINS] of values by ⌊value / width⌋, from −HALF up, and what was seen of the extremes.

    `width` is a power of two.
    """

    counts: np.ndarray
    width: float
    minimum: float
    maximum: float

    @property
    def count(self) -> int:
        """How many numbers were seen."""
        return int(self.counts.sum())

    @property
    def peak(self) -> float:
        """The largest absolute value."""
        return max(abs(self.minimum), abs(self.maximum))

    def edges(self) -> np.ndarray:
        """The lower edges of the bins and the upper one of the last, [BINS + 1]."""
        return np.arange(-HALF, HALF + 1, dtype=np.float64) * self.width

    def __add__(self, other: Histogram) -> Histogram:
        """The histogram of both sets of values."""
        width = max(self.width, other.width)
        a, b = self.coarsened(width), other.coarsened(width)
        return Histogram(
            a.counts + b.counts,
            width,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
        )

    def coarsened(self, width: float) -> Histogram:
        """The same values in bins of `width`, a power of two that is not smaller."""
        counts, factor = self.counts, round(width / self.width)
        if factor == 1:
            return self
        if factor >= HALF:
            # Everything is next to zero: one bin on each side.
            merged = np.zeros_like(counts)
            merged[HALF - 1], merged[HALF] = counts[:HALF].sum(), counts[HALF:].sum()
            return Histogram(merged, width, self.minimum, self.maximum)
        side = HALF // factor
        merged = np.zeros_like(counts)
        merged[HALF - side : HALF + side] = counts.reshape(2 * side, factor).sum(axis=1)
        return Histogram(merged, width, self.minimum, self.maximum)
