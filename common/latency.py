"""Latencies of single calls, and whether two of them differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of single calls in ms, over all rounds.

    `n` is the number of calls. `rounds` has the median of each round, and `spread` is the relative
    range of these medians, (max − min) / median: smaller differences between two latencies mean
    nothing. `counts` is a histogram from `min` to `max` with logarithmic bins.
    """

    median: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float
    mean: float
    std: float
    n: int
    rounds: tuple[float, ...]
    spread: float
    counts: tuple[int, ...] = ()


def summarise(rounds_ms: list[list[float]]) -> Latency:
    """Returns the statistics of the calls of several rounds; no outliers are removed."""
    import numpy as np  # not needed to read measured latencies

    calls = np.concatenate([np.asarray(r, np.float64) for r in rounds_ms])
    medians = [float(np.median(r)) for r in rounds_ms]
    p50, p90, p95, p99 = (float(p) for p in np.percentile(calls, [50, 90, 95, 99]))
    middle = float(np.median(medians))
    return Latency(
        median=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        min=float(calls.min()),
        max=float(calls.max()),
        mean=float(calls.mean()),
        std=float(calls.std(ddof=1)) if calls.size > 1 else 0.0,
        n=int(calls.size),
        rounds=tuple(medians),
        spread=(max(medians) - min(medians)) / middle if middle > 0 else 0.0,
        counts=_counts(calls),
    )


BINS = 24


def _counts(calls: np.ndarray) -> tuple[int, ...]:
    """Returns a histogram with logarithmic bins; empty if all times are equal or one is zero."""
    import numpy as np

    if calls.min() <= 0 or calls.min() == calls.max():
        return ()
    logs = np.log(calls)
    return tuple(np.histogram(logs, BINS, (logs.min(), logs.max()))[0].tolist())


def differs(a: Latency, b: Latency) -> bool:
    """Whether two medians differ by more than the spread of either."""
    smaller = min(a.median, b.median)
    if smaller <= 0:
        return a.median != b.median
    return abs(a.median - b.median) / smaller > max(a.spread, b.spread)
