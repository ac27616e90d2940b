"""Peak memory of an engine, measured in a separate process.

The process measures its own largest resident set from its start to the end of the last batch,
including the runtime's code and the pages of mapped files. Opening the model counts, because every
user has to do it.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from ...common.console import Progress
from ...common.environment import memory_bytes, peak_memory_bytes, python_environment, usable_cores
from ...errors import one_line
from ...exporter.inputs import Inputs
from ..runners.base import Loader

CALLS = 3
TIMEOUT_S = 900.0
MB = 1e6
MAX_PROCESSES = 4
WEIGHTS_FACTOR = 4  # a process may take this multiple of the weights, plus the runtime's own memory
RUNTIME_BYTES = 500 << 20


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Resident megabytes (10⁶ bytes): before the engine was opened, and the peak by batch size."""

    runtime_mb: float
    peak_mb: Mapping[int, float]


def worker_count(weights_bytes: int) -> int:
    """Returns how many processes may run at once, using half of the memory and all cores."""
    fitting = memory_bytes() // 2 // (WEIGHTS_FACTOR * weights_bytes + RUNTIME_BYTES)
    return max(1, min(MAX_PROCESSES, usable_cores(), fitting))


def measure_memories(
    loaders: Mapping[str, Loader],
    inputs: Mapping[int, Inputs],
    *,
    threads: int,
    weights_bytes: int,
    title: str,
    progress: Progress,
) -> Iterator[tuple[str, PeakMemory]]:
    """Yields the memory of each case as its process ends; failures are reported and skipped."""
    jobs = {
        label: data for label, loader in loaders.items() if (data := pickled(loader)) is not None
    }
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
                memory = future.result()
            except (RuntimeError, OSError, ValueError) as error:
                progress.step(f"memory of {label} not measured: {one_line(error)}")
            else:
                yield label, memory
            progress.advance(1)


def pickled(loader: object) -> bytes | None:
    """Returns a loader as bytes; None for one that cannot be pickled."""
    try:
        return pickle.dumps(loader)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def measure_memory(
    loader: bytes, inputs: Mapping[int, Inputs], *, threads: int | None = None
) -> PeakMemory:
    """Returns the memory of a pickled loader's engine when it runs these batches, by batch size.

    Sizes run in ascending order, so that each has its own peak. Raises RuntimeError with the last
    line of the process's error output if it fails.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=pickle.dumps((loader, sorted(inputs.items()), threads)),
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
            env=python_environment(),
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the process did not end within {TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"the process ended with code {done.returncode}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return PeakMemory(answer["runtime"] / MB, {int(b): v / MB for b, v in answer["peak"].items()})


def _main() -> None:
    pickled_loader, inputs, threads = pickle.load(sys.stdin.buffer)
    loader: Loader = pickle.loads(pickled_loader)  # imports the runtime
    if threads is not None and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    runtime = peak_memory_bytes()
    runner = loader.deployed()
    peak = {}
    for size, x in inputs:
        for _ in range(CALLS):
            runner.infer(x)
        peak[size] = peak_memory_bytes()
    print(json.dumps({"runtime": runtime, "peak": peak}))


if __name__ == "__main__":
    _main()
