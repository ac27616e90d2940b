"""The four ways to choose a range, on tensors where the right answer is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from moexport.calibration.methods import choose
from moexport.calibration.table import METHODS
from moexport.graphs.precision.types import Range
from moexport.graphs.targets import Method
from moexport.tests.calibration.test_histogram import of

RANDOM = np.random.default_rng(0)
NORMAL = RANDOM.standard_normal(100_000).astype(np.float32)
OUTLIER = np.concatenate([NORMAL, np.array([40.0], dtype=np.float32)])


def error(x: np.ndarray, r: Range) -> float:
    """The mean squared error of x in 8 bits over a range, computed value by value."""
    s = r.affine()
    q = np.clip(np.round(x.astype(np.float64) / s.scale) + s.zero_point, 0, 255)
    return float(np.square((q - s.zero_point) * s.scale - x).mean())


def test_minmax_keeps_everything() -> None:
    r = choose(of(OUTLIER), "minmax")
    assert (r.low, r.high) == (OUTLIER.min(), 40.0)
    assert r.count == OUTLIER.size


@pytest.mark.parametrize("percentile", [99.0, 99.9, 99.99])
def test_percentile_leaves_out_half_the_rest_at_each_end(percentile: float) -> None:
    seen = of(NORMAL)
    r = choose(seen, "percentile", percentile)
    ordered = np.sort(NORMAL)
    left_out = int((100 - percentile) / 200 * len(ordered))
    # The range ends at the bins' edges around the outermost values that are kept.
    assert ordered[left_out] - seen.width < r.low <= ordered[left_out]
    assert ordered[-1 - left_out] <= r.high <= ordered[-1 - left_out] + seen.width


def test_a_percentile_of_100_is_minmax() -> None:
    assert choose(of(OUTLIER), "percentile", 100.0) == choose(of(OUTLIER), "minmax")


def test_mse_is_close_to_the_best_threshold() -> None:
    for x in (NORMAL, OUTLIER, np.maximum(NORMAL, 0), NORMAL**3):
        chosen = error(x, choose(of(x), "mse"))
        peak = float(np.abs(x).max())
        low, high = float(x.min()), float(x.max())
        best = min(
            error(x, Range(max(low, -t), min(high, t), low, high, x.size))
            for t in np.linspace(peak / 16, peak, 60).tolist()
        )
        assert chosen <= 1.02 * best


@pytest.mark.parametrize("method", ["entropy", "mse"])
def test_a_lone_outlier_is_clipped(method: Method) -> None:
    assert choose(of(OUTLIER), method).high < 35.0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: np.maximum(x, 0),
        lambda x: np.minimum(x, 0) - 1,
        lambda x: np.full_like(x, 0.75),
        lambda x: np.abs(x[:1]) + 1,
        lambda x: x * 1e-20,
        lambda x: x * 1e20,
    ],
)
def test_ranges_stay_within_what_was_seen(
    method: Method, make: Callable[[np.ndarray], np.ndarray]
) -> None:
    x = make(NORMAL)
    r = choose(of(x), method)
    assert x.min() <= r.low <= r.high <= x.max()
    assert r.high > 0 or r.low < 0
