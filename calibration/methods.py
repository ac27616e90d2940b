"""Four methods to choose a tensor's INT8 range from its observed values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..graphs.precision.types import UINT8_LEVELS, Range
from ..graphs.targets import Method

HALF = 4096
"""The number of bins on each side of zero. The largest absolute value falls into the outer half, so
one side occupies between 2048 and 4096 bins: at least eight times the levels of 8 bits."""

BINS = 2 * HALF


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts [BINS] of values by ⌊value / width⌋, from −HALF up, and the observed extremes.

    `width` is a power of two.
    """

    counts: np.ndarray
    width: float
    minimum: float
    maximum: float

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @property
    def peak(self) -> float:
        return max(abs(self.minimum), abs(self.maximum))

    def edges(self) -> np.ndarray:
        """Returns the lower edges of the bins and the upper edge of the last, [BINS + 1]."""
        return np.arange(-HALF, HALF + 1, dtype=np.float64) * self.width

    def __add__(self, other: Histogram) -> Histogram:
        width = max(self.width, other.width)
        a, b = self.coarsen(width), other.coarsen(width)
        return Histogram(
            counts=a.counts + b.counts,
            width=width,
            minimum=min(self.minimum, other.minimum),
            maximum=max(self.maximum, other.maximum),
        )

    def coarsen(self, width: float) -> Histogram:
        """Returns the values in bins of `width`, a power of two and not below the current one."""
        counts, factor = self.counts, round(width / self.width)
        if factor == 1:
            return self
        if factor >= HALF:
            # All values are close to zero: one bin on each side.
            merged = np.zeros_like(counts)
            merged[HALF - 1], merged[HALF] = counts[:HALF].sum(), counts[HALF:].sum()
            return replace(self, counts=merged, width=width)
        side = HALF // factor
        merged = np.zeros_like(counts)
        merged[HALF - side : HALF + side] = counts.reshape(2 * side, factor).sum(axis=1)
        return replace(self, counts=merged, width=width)


DEFAULT_METHOD: Method = "percentile"

DEFAULT_PERCENTILE = 99.99
"""Half of the excluded values are beyond each end. Chosen by measurement: see
docs/calibration.md."""

_CANDIDATES = 256
"""The number of clipping thresholds that `mse` and `entropy` try."""

_POINTS = 4
"""The points per bin at which `mse` evaluates the rounding error: for thresholds far below the
peak, steps are narrower than bins."""

_TINY = 1e-10
"""Replaces a share of zero, so that the divergence does not divide by it."""

_Loss = Callable[[Histogram, np.ndarray, float, float], float]
"""Returns the loss for a histogram, its populated bins, and the ends of a range."""


def choose(hist: Histogram, method: Method, percentile: float = DEFAULT_PERCENTILE) -> Range:
    """Returns the range of a tensor by one of the methods.

    `minmax`: all observed values. `percentile`: without (100 − percentile)/2 % of the values at
    each end. `mse`: |x| clipped so that the mean squared error of 8-bit values is smallest.
    `entropy`: |x| clipped so that the Kullback-Leibler divergence between the values and their
    8-bit form is smallest.
    """
    match method:
        case "minmax":
            low, high = hist.minimum, hist.maximum
        case "percentile":
            low, high = _percentile(hist, percentile)
        case "mse":
            low, high = _best(hist, _squared_error)
        case "entropy":
            low, high = _best(hist, _divergence)
    return Range(low=low, high=high, minimum=hist.minimum, maximum=hist.maximum, count=hist.count)


def _percentile(hist: Histogram, percentile: float) -> tuple[float, float]:
    """Returns the range without the tails, between bin edges, with at least the requested share."""
    tail = (100.0 - percentile) / 200.0 * hist.count
    edges = hist.edges()
    first = int(np.argmax(np.cumsum(hist.counts) > tail))
    last = len(hist.counts) - 1 - int(np.argmax(np.cumsum(hist.counts[::-1]) > tail))
    return max(float(edges[first]), hist.minimum), min(float(edges[last + 1]), hist.maximum)


def _best(hist: Histogram, loss: _Loss) -> tuple[float, float]:
    """Returns the range clipped at the |x| with the smallest loss; in a tie, at the largest |x|."""
    # Below one bin per level, all thresholds are equivalent; values may all have one sign.
    smallest = max(UINT8_LEVELS * hist.width, hist.minimum, -hist.maximum)
    thresholds = np.geomspace(hist.peak, smallest, _CANDIDATES)
    ranges = [(max(hist.minimum, -t), min(hist.maximum, t)) for t in thresholds.tolist()]
    populated = np.flatnonzero(hist.counts)
    losses = [loss(hist, populated, low, high) for low, high in ranges]
    return ranges[int(np.argmin(losses))]


def _squared_error(hist: Histogram, populated: np.ndarray, low: float, high: float) -> float:
    """Returns the mean squared error of values clipped to a range and rounded to its levels."""
    scale = Range(
        low=low, high=high, minimum=hist.minimum, maximum=hist.maximum, count=hist.count
    ).affine()
    inside = (np.arange(_POINTS) + 0.5) / _POINTS
    values = (populated[:, None] - HALF + inside) * hist.width
    # Bins at the ends extend beyond the observed values.
    values = np.clip(values, hist.minimum, hist.maximum)
    # Zero is a level itself, which matters if most values are close to it, as after a ReLU.
    numbers = np.clip(np.round(values / scale.scale) + scale.zero_point, 0, UINT8_LEVELS)
    rounded = (numbers - scale.zero_point) * scale.scale
    error = np.square(values - rounded).mean(axis=1)
    return float((error * hist.counts[populated]).sum() / hist.count)


def _divergence(hist: Histogram, populated: np.ndarray, low: float, high: float) -> float:
    """Returns the divergence between P, the counts clipped to a range, and Q, P in 256 levels.

    As in TensorRT's calibrator, P adds the clipped values to its outermost bins, and Q spreads each
    level's count evenly over its nonempty bins.
    """
    first = math.floor(low / hist.width) + HALF
    last = min(math.floor(high / hist.width) + HALF, len(hist.counts) - 1)
    bins = np.clip(populated, first, last)
    p = np.bincount(bins - first, weights=hist.counts[populated], minlength=last - first + 1)
    inside = hist.counts[first : last + 1].astype(np.float64)
    levels = np.arange(len(inside)) * (UINT8_LEVELS + 1) // len(inside)
    filled = inside > 0
    total = np.bincount(levels, weights=inside)
    share = total / np.maximum(np.bincount(levels, weights=filled), 1)
    q = np.where(filled, share[levels], 0.0)
    p, q = p / p.sum(), q / max(q.sum(), 1.0)
    nonzero = p > 0
    return float((p[nonzero] * np.log(p[nonzero] / np.maximum(q[nonzero], _TINY))).sum())
