"""`make soak`: a bundle's graph served for an hour at 80% of the rate that keeps a bound.

`python -m moexport.tests.hard.soak --seconds 3600`. The time is cut into windows, each a run of
LoadGen's server on one queue that stays open. It fails where a request failed or was refused, where
memory grew, or where the p99 of the last windows is not that of the first. Then comes a flood
of requests: the queue has to refuse, to lose nothing, and to serve as before afterwards.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import moexport
import psutil
from moexport.errors import QueueFullError
from moexport.plugins.demo.digits import Training, load_digits, save, train
from moexport.plugins.service.loadgen import Judgement, Traffic, run_loadgen
from moexport.plugins.service.queue import Queue

WINDOWS = 12
FLOOD = 200_000
GROWTH_MB = 32.0
"""What memory may grow by after the first window: allocators settle."""

APART = 3.0
"""So many times that of the first may the p99 of the last windows be: others use the machine."""


def soak(seconds: float, bound_s: float, folder: Path) -> list[str]:
    """Serves for so long; prints each window, and returns what was not as it must be."""
    digits = load_digits()
    # Large enough that the graph takes the time, not the queue, and not trained to be right.
    save(train(Training(experts=64, hidden=2048, epochs=1), digits.train), folder / "digits.pt")
    model = moexport.load(folder / "digits.pt")
    session = moexport.export(model, folder / "bundle", k="16").session(threads=1)

    def instance(numbers: Sequence[int]) -> Sequence[int]:
        session(digits.test.batch(numbers[0], len(numbers)))
        return numbers

    wrong: list[str] = []
    window_s = seconds / WINDOWS
    load = Traffic(scenario="server", duration_s=min(5.0, window_s), rate=50.0, bound_s=bound_s)
    with Queue([instance], max_batch=8, capacity=4096) as queue:
        found = run_loadgen(queue, 64, load, folder / "search", search=True)
        if found.peak is None:
            return [f"50 requests a second do not keep {1e3 * bound_s:g} ms: {found.reason}"]
        load = replace(load, duration_s=window_s, rate=0.8 * found.peak)
        print(f"{load.rate:.0f} requests/s, 80% of {found.peak:.0f}", flush=True)
        windows: list[tuple[Judgement, float]] = []
        for index in range(WINDOWS):
            run = run_loadgen(queue, 64, load, folder / f"window-{index}")
            windows.append((run, psutil.Process().memory_info().rss / 1e6))
            print(
                f"{run.queries:,} requests, p99 {run.p99_ms:.3g} ms, {run.refused} refused, "
                f"{windows[-1][1]:.0f} MB",
                flush=True,
            )
        refused = sum(run.refused for run, _ in windows)
        if refused:
            wrong.append(f"{refused} requests were refused at 80% of the rate")
        grown = windows[-1][1] - windows[0][1]
        if grown > GROWTH_MB:
            wrong.append(f"memory grew by {grown:.0f} MB")
        p99s = [run.p99_ms for run, _ in windows]
        third = WINDOWS // 3
        if median(p99s[-third:]) > APART * median(p99s[:third]):
            wrong.append(f"p99 rose: {', '.join(f'{ms:.3g}' for ms in p99s)} ms")
        refused, answers = 0, []
        for number in range(FLOOD):
            try:
                answers.append(queue.submit(number % 64))
            except QueueFullError:
                refused += 1
        lost = sum(each.exception(60) is not None for each in answers)
        print(f"{FLOOD:,} requests at once: {len(answers):,} answered, {refused:,} refused")
        if not refused or lost:
            wrong.append(
                f"a flood: {refused} requests were refused, and {lost} of those taken failed"
            )
        after = run_loadgen(queue, 64, replace(load, duration_s=window_s), folder / "after")
        print(f"afterwards: p99 {after.p99_ms:.3g} ms, {after.refused} refused")
        if after.refused or after.p99_ms > APART * median(p99s):
            wrong.append(f"it did not recover: p99 {after.p99_ms:.3g} ms, {after.refused} refused")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--bound-ms", type=float, default=50.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = soak(given.seconds, given.bound_ms / 1e3, Path(folder))
    print("\n".join(wrong) or "memory, errors and p99 are as they must be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
