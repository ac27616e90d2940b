"""Histograms: merging is exact, so neither order nor batches change what comes out."""

from __future__ import annotations

import math

import numpy as np
from moexport.calibration.methods import BINS, HALF, Histogram


def width_for(peak: float) -> float:
    """The width of the bins of a tensor whose largest absolute value is `peak`."""
    _, exponent = math.frexp(peak)  # peak = f · 2^exponent with 0.5 ≤ f < 1
    return math.ldexp(1.0, exponent) / HALF


def of(x: np.ndarray, width: float | None = None) -> Histogram:
    """A histogram by definition, with the width of its own peak unless told."""
    width = width or width_for(float(np.abs(x).max()))
    bins = np.floor(x.astype(np.float64) / width).astype(np.int64) + HALF
    return Histogram(np.bincount(bins, minlength=BINS), width, float(x.min()), float(x.max()))


def batches(seed: int = 0) -> list[np.ndarray]:
    """Batches whose peaks differ by orders of magnitude."""
    random = np.random.default_rng(seed)
    scales = (1e-6, 1.0, 3.0, 0.0, 250.0, 0.1)
    return [(random.standard_normal(500) * scale).astype(np.float32) for scale in scales]


def summed(parts: list[np.ndarray]) -> Histogram:
    total = of(parts[0])
    for part in parts[1:]:
        total = total + of(part)
    return total


def test_a_sum_is_what_counting_everything_at_once_gives() -> None:
    parts = batches()
    total, whole = summed(parts), of(np.concatenate(parts))
    assert total.width == whole.width
    assert np.array_equal(total.counts, whole.counts)
    assert (total.minimum, total.maximum) == (whole.minimum, whole.maximum)


def test_order_does_not_matter() -> None:
    parts = batches()
    forth, back = summed(parts), summed(parts[::-1])
    assert forth.width == back.width
    assert np.array_equal(forth.counts, back.counts)


def test_edges_are_those_of_the_bins() -> None:
    h = of(np.array([0.0, 1.0, -0.25], dtype=np.float32))
    for value in (0.0, 1.0, -0.25):
        place = int(np.floor(value / h.width)) + HALF
        assert h.counts[place] == 1
        assert h.edges()[place] <= value < h.edges()[place + 1]
