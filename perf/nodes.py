"""`python -m perf.nodes NODES CELLS`: the overhead of a cell on many nodes of Ray on this machine.

The nodes are Ray's own, each with its processes and one configured CPU. The cells are empty, so
only the code of `bench --ray` is measured: how it places, runs, collects and saves them. The memory
and the start time of a node are also printed.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moexport.bench.journal import FILE, Journal
from moexport.common.console import Silent
from moexport.plugins.cluster.ray import Task, connected, kinds_of

STORE_BYTES = 80 << 20

CONFIG = {
    "memory_monitor_refresh_ms": 0,  # every node would monitor the memory of all nodes
    "health_check_timeout_ms": 60_000,  # a node that waits for a core is not lost
    "health_check_period_ms": 30_000,
    "worker_register_timeout_seconds": 900,
}
"""Settings for nodes that share one machine."""


def nothing(cell: int) -> dict[str, int]:
    """Returns the results of a cell."""
    return {"cell": cell}


def main(nodes: int, cells: int) -> None:
    """Starts the nodes, runs the cells twice and prints their times."""
    from ray.cluster_utils import Cluster

    began = time.monotonic()
    head: dict[str, Any] = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    head |= {"include_dashboard": False, "_system_config": CONFIG}
    started: Any = Cluster(initialize_head=True, head_node_args=head, connect=False)
    with TemporaryDirectory() as folder, connected(started.address, Silent()) as cluster:
        for _ in range(nodes - 1):  # each immediately starts its process for tasks
            started.add_node(wait=False, num_cpus=1, object_store_memory=STORE_BYTES)
        started.wait_for_nodes(timeout=600)
        took = time.monotonic() - began
        print(f"{nodes} nodes started in {took:.0f} s, load {_load()}", flush=True)
        (kind,) = kinds_of(cluster.ray.nodes(), ["CPU"])
        # The first run starts the missing processes.
        for name, count in (("first", kind.nodes), ("again", cells), ("again", cells)):
            journal = Journal(Path(folder) / FILE, {"name": name})
            tasks = [Task(f"cell {i}", nothing, (i,)) for i in range(count)]
            began, cpu_s = time.monotonic(), time.process_time()
            for number, found in cluster.completed(kind, tasks):
                journal.add("timed", on=kind.name, part=number, found=found)
            took, cpu_s = time.monotonic() - began, time.process_time() - cpu_s
            print(
                f"{name}: {count} cells on {kind.nodes} nodes in {took:.1f} s, "
                f"{1e3 * took / count:.2f} ms each, {1e3 * cpu_s / count:.2f} ms in this process, "
                f"load {_load()}, {_memory_mb() / nodes:.0f} MB per node",
                flush=True,
            )
    started.shutdown()


def _load() -> str:
    load = "not known"
    if sys.platform != "win32":
        load = f"{os.getloadavg()[0]:.1f}"
    return load


def _memory_mb() -> float:
    """Returns the unshared memory of the processes of all nodes."""
    psutil: Any = importlib.import_module("psutil")  # installed with Ray
    found = 0
    for process in psutil.Process().children(recursive=True):
        try:
            found += process.memory_full_info().uss
        except psutil.Error:  # it ended just now
            continue
    return found / 1e6


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
