"""Intervals of shares, and of ratios of shares of the same samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from moexport.bench.metrics import TopKCounts, score_interval, wilson
from scipy.stats import binomtest


@pytest.mark.parametrize(("right", "seen"), [(15, 50), (50, 50), (0, 50), (1, 1), (9_999, 10_000)])
def test_wilson_intervals_are_those_of_scipy(right: int, seen: int) -> None:
    found, expected = wilson(right, seen), binomtest(right, seen).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_interval_is_that_of_the_score_test() -> None:
    # No input apart: 1 / (1 + z² / n), as Wilson's.
    same = score_interval(430, 0, 0)
    assert same.low == pytest.approx(1 / (1 + 1.95996**2 / 430), abs=1e-6)
    assert same.high == pytest.approx(1 / same.low)
    # Of models that differ on many inputs, Wald's interval says the same.
    many = score_interval(8000, 600, 500)
    half = 1.95996 * math.sqrt(1100 / (8600 * 8500))
    assert many.low == pytest.approx(8500 / 8600 * math.exp(-half), abs=2e-4)
    assert many.high == pytest.approx(8500 / 8600 * math.exp(half), abs=2e-4)
    turned = score_interval(8000, 500, 600)
    assert turned.low == pytest.approx(1 / many.high)
    assert score_interval(0, 10, 0).low == 0.0
    assert 1 < score_interval(0, 0, 10).low < math.inf


def test_what_is_kept_has_an_interval_where_the_untouched_model_has_any_right() -> None:
    close, far = (score_interval(both, 100 - both, 90 - both) for both in (90, 80))
    assert far.low < close.low < 0.9 < close.high < far.high
    outputs, labels = np.eye(2, dtype=np.float32)[[0, 1, 1]], np.array([0, 1, 0])
    untouched = TopKCounts.of(outputs, labels)
    kept = TopKCounts.of(outputs, labels, outputs).accuracy(untouched).retention_interval
    assert kept is not None and kept.low < 1 < kept.high
    wrong = TopKCounts.of(outputs, 1 - labels, outputs)
    assert wrong.accuracy(TopKCounts(0, 3, None)).retention_interval is None
