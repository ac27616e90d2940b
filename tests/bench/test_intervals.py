"""Intervals of shares, and of ratios of shares of the same samples."""

from __future__ import annotations

import pytest
from moexport.bench.metrics import paired_ratio, wilson


def test_wilson_intervals_are_those_of_the_tables() -> None:
    found = wilson(15, 50)
    assert (found.low, found.high) == pytest.approx((0.1910, 0.4375), abs=1e-4)
    assert wilson(50, 50).high == 1.0
    assert wilson(50, 50).low == pytest.approx(0.9287, abs=1e-4)
    assert wilson(0, 50).low == 0.0


def test_the_interval_of_a_ratio_uses_that_the_samples_are_the_same() -> None:
    close = paired_ratio(90, 100, 90)
    far = paired_ratio(90, 100, 80)
    assert close is not None
    assert far is not None
    assert far.low < close.low < 0.9 < close.high < far.high
    assert paired_ratio(0, 10, 0) is None
    same = paired_ratio(360, 360, 360)
    assert same is not None
    assert same.low < 1 < same.high
