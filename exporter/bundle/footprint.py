"""Measures the peak memory of a process that runs a bundle's graph for one input."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from ...common.environment import peak_memory_bytes, python_environment
from ...graphs.targets import for_cpus, runtime_of
from ..session import SessionOptions
from .manifest import Manifest
from .parity import PARITY_FILE, Reference
from .runtimes import open_graph

CALLS = 2


def with_peak_memory(directory: Path, manifest: Manifest) -> Manifest:
    """Returns the manifest with the peak memory, if the graphs are for CPUs.

    The process runs inputs of the check in Python with the runtime, but without PyTorch.
    """
    if not for_cpus(manifest.target) or not (directory / PARITY_FILE).is_file():
        return manifest
    batch = manifest.batches.opt if manifest.batches.fixed else manifest.group_size
    graph, runtime = manifest.graph_for(batch).file, runtime_of(manifest.target)
    child = subprocess.run(
        [sys.executable, "-m", __name__, directory, graph, runtime, str(batch), manifest.k],
        env=python_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode or not child.stdout.strip().isdigit():
        why = child.stderr.strip().rpartition("\n")[2] or f"it exited with code {child.returncode}"
        note = f"the memory for one input could not be measured: {why}"
        return replace(manifest, notes=[*manifest.notes, note])
    return replace(manifest, peak_memory_bytes=int(child.stdout) or None)


def _main(directory: Path, graph: str, runtime: str, batch: int, k: str) -> None:
    expected = Reference.load(directory / PARITY_FILE)
    session = open_graph(directory / graph, SessionOptions(runtime=runtime))
    feeds = expected.feeds(session.input_name, batch)
    for _ in range(CALLS):
        session.run(feeds, expected.main_k if k == "input" else None)
    print(peak_memory_bytes())


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
