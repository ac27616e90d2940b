"""`python -m perf.nodes NODES CELLS`: what a cell costs on many nodes of Ray, all on this machine.

The nodes are Ray's own, each with its processes and one CPU that it is told to have. The cells do
nothing: what is measured is how they are placed, run, collected and kept by the code of `bench
--ray`. A node takes about 200 MB of memory and some seconds to start.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moexport.bench.journal import FILE, Journal
from moexport.common.cluster import Task, connected, kinds_of
from moexport.common.console import Silent

STORE_BYTES = 80 << 20


def nothing(cell: int) -> dict[str, int]:
    """Returns what a cell found."""
    return {"cell": cell}


def main(nodes: int, cells: int) -> None:
    """Starts the nodes, runs the cells twice and prints what they took."""
    from ray.cluster_utils import Cluster

    began = time.monotonic()
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    started: Any = Cluster(initialize_head=True, head_node_args=head, connect=False)
    for _ in range(nodes - 1):
        started.add_node(wait=False, num_cpus=1, object_store_memory=STORE_BYTES)
    started.wait_for_nodes(timeout=600)
    print(f"{nodes} nodes started in {time.monotonic() - began:.0f} s", flush=True)
    with TemporaryDirectory() as folder, connected(started.address, Silent()) as cluster:
        (kind,) = kinds_of(cluster.ray.nodes(), ["CPU"])
        # The first run starts a process on each node.
        for name, count in (("first", kind.nodes), ("again", cells), ("again", cells)):
            journal = Journal(Path(folder) / FILE, {"name": name})
            tasks = [Task(f"cell {i}", nothing, (i,)) for i in range(count)]
            began, own = time.monotonic(), time.process_time()
            for number, found in cluster.finished(kind, tasks):
                journal.add("timed", on=kind.name, part=number, found=found)
            took, own = time.monotonic() - began, time.process_time() - own
            load = "not known"
            if sys.platform != "win32":
                load = f"{os.getloadavg()[0]:.1f}"
            print(
                f"{name}: {count} cells on {kind.nodes} nodes in {took:.1f} s, "
                f"{1e3 * took / count:.2f} ms each, {1e3 * own / count:.2f} ms of them here "
                f"(load {load})",
                flush=True,
            )
    started.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
