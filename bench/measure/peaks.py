"""Peak memory of many contestants: processes side by side, as far as memory and cores allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

from ...common.environment import memory_bytes, usable_cores
from ...common.progress import Progress
from ...common.timing import in_one_line
from ..bench_data import Array
from ..runners.pytorch import Runner
from .memory import Memory, measure_memory, portable

AT_ONCE = 4
ROOM = 4
"""A process may take this many times the weights, beside what a runtime takes by itself."""

RUNTIME_BYTES = 500 << 20


def worker_count(weights_bytes: int) -> int:
    """Returns how many processes may run at once: in half of the memory, and no more than cores."""
    room = memory_bytes() or (8 << 30)
    fitting = room // 2 // (ROOM * weights_bytes + RUNTIME_BYTES)
    return max(1, min(AT_ONCE, usable_cores(), fitting))


def peaks(
    recipes: Mapping[str, Callable[[], Runner]],
    inputs: Mapping[int, Array],
    *,
    threads: int,
    weights_bytes: int,
    title: str,
    progress: Progress,
) -> Iterator[tuple[str, Memory]]:
    """Yields the memory of each recipe as its process ends; one that fails is told and left out."""
    jobs = {label: data for label, r in recipes.items() if (data := portable(r)) is not None}
    if not jobs:
        return
    progress.step(f"{title}: peak memory of {len(jobs)} processes", total=len(jobs))
    with ThreadPoolExecutor(worker_count(weights_bytes)) as pool:
        futures = {
            pool.submit(measure_memory, data, inputs, threads=threads): label
            for label, data in jobs.items()
        }
        for future in as_completed(futures):
            label = futures[future]
            try:
                found = future.result()
            except (RuntimeError, OSError, ValueError) as error:
                progress.step(f"no memory for {label}: {in_one_line(error)}")
            else:
                yield label, found
            progress.advance(1)
