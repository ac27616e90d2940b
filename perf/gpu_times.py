"""Times of engines and graphs on a GPU, for every k and several batch sizes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from moexport.exporter.session import Session
from moexport.exporter.tensorrt.session import EngineSession

BATCHES = (1, 8)
WARM_UPS, RUNS, ROUNDS = 3, 20, 5


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of the rounds' medians, and how far these are apart, in milliseconds."""

    median_ms: float
    spread_ms: float


@dataclass(frozen=True, slots=True)
class Timed:
    """The time of one run: of the GPU alone, and from array to array with both copies."""

    k: int
    batch: int
    gpu: Spread | None
    end_to_end: Spread


def timed(
    session: EngineSession | Session,
    x: np.ndarray,
    ks: Sequence[int],
    gpu_ms: Callable[[np.ndarray, int], float] | None,
) -> Iterator[Timed]:
    """Yields the times of every k and batch; they take turns, in another order each round."""
    cases = [(k, batch) for k in ks for batch in BATCHES if batch <= len(x)]
    order = random.Random(0)
    gpu: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    whole: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(ROUNDS):
        for k, batch in order.sample(cases, len(cases)):
            for _ in range(WARM_UPS):
                session.run(x[:batch], k)
            whole[k, batch].append(_median(lambda: _wall_ms(session, x[:batch], k)))  # noqa: B023
            if gpu_ms is not None:
                gpu[k, batch].append(_median(lambda: gpu_ms(x[:batch], k)))  # noqa: B023
    for k, batch in cases:
        alone = _spread(gpu[k, batch]) if gpu_ms is not None else None
        yield Timed(k, batch, alone, _spread(whole[k, batch]))


def _median(measure: Callable[[], float]) -> float:
    return float(np.median([measure() for _ in range(RUNS)]))


def _wall_ms(session: EngineSession | Session, x: np.ndarray, k: int) -> float:
    begun = time.perf_counter()
    session.run(x, k)
    return (time.perf_counter() - begun) * 1e3


def _spread(medians: Sequence[float]) -> Spread:
    return Spread(float(np.median(medians)), max(medians) - min(medians))
