"""Confidence intervals of what is counted on a sample: 95%, two-sided."""

from __future__ import annotations

import math

from .results import Interval

Z = 1.959963984540054
"""The normal quantile of 97.5%."""


def wilson(right: int, seen: int) -> Interval:
    """Returns Wilson's score interval of a share: `right` of `seen`.

    It stays within 0..1 and has a width even at 0 and 1 (Wilson 1927).
    """
    share = right / seen
    scale = 1 + Z**2 / seen
    middle = (share + Z**2 / (2 * seen)) / scale
    half = Z * math.sqrt(share * (1 - share) / seen + Z**2 / (4 * seen**2)) / scale
    return Interval(max(0.0, min(middle - half, share)), min(1.0, max(middle + half, share)))


def paired_ratio(right: int, base: int, both: int) -> Interval | None:
    """Returns the interval of right / base, two counts over the same samples; None for a zero.

    Wald's interval of the logarithm: its variance is the number of samples that only one of the
    two gets right, over right · base. One such sample is added, so that two which agree on every
    sample still get a width.
    """
    if right == 0 or base == 0:
        return None
    apart = (right - both) + (base - both) + 1
    half = Z * math.sqrt(apart / (right * base))
    ratio = right / base
    return Interval(ratio * math.exp(-half), ratio * math.exp(half))
