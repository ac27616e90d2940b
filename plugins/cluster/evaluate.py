"""Evaluates whole graphs on one of the two halves of `tune`'s data, in shards on a Ray cluster.

The sums of the batches are added in the order of the data, so the result is that of one machine,
bit-identical if the nodes compute identically. Times are not measured on the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from ...common.console import Progress
from ...common.writing import scratch_folder
from ...data.batches import Array
from ...exporter.bundle.manifest import MAIN_GRAPH
from ...exporter.bundle.runtimes import open_graph
from ...exporter.session import Session, SessionOptions
from ..tune.accuracy.quality import Tally
from ..tune.shards import Batch, Evaluate, Tallies
from .ray import Task, connected, kinds_of

SHARD_BYTES = 1 << 30
"""The approximate limit on the size of a task's inputs and outputs, kept in its node's memory."""


@contextmanager
def evaluating_on_ray(address: str, on: str, progress: Progress) -> Iterator[Evaluate]:
    """Yields a function that evaluates graphs on the nodes of a cluster; raises `ClusterError`."""
    with connected(address, progress) as cluster:
        (kind,) = kinds_of(cluster.ray.nodes(), [on])

        def evaluate(batches: Iterable[Batch]) -> Tallies:
            stored: list[Any] = []  # references to batches that the cluster keeps
            total = 0
            for batch in batches:
                stored.append(cluster.ray.put(batch))
                total += batch.bytes
            count = min(len(stored), max(kind.nodes, math.ceil(total / SHARD_BYTES)))

            def tally(session: Session) -> Tally:
                folder = session.path.parent
                files = {f.name: np.fromfile(f, np.uint8) for f in sorted(folder.iterdir())}
                sent = cluster.ray.put(files)
                tasks = [
                    Task(
                        f"quality, shard {index + 1}/{count}",
                        evaluate_shard,
                        (sent, session.options, *stored[index::count]),
                    )
                    for index in range(count)
                ]
                sums: dict[int, Tally] = {}
                for index, shard in cluster.completed(kind, tasks):
                    sums |= zip(range(index, len(stored), count), shard, strict=True)
                cluster.check_lost("evaluated")
                return reduce(add, (sums[number] for number in sorted(sums)), Tally())

            return lambda sessions: [tally(session) for session in sessions]

        yield evaluate


# --- runs on the nodes ---------------------------------------------------------------------------


def evaluate_shard(
    files: Mapping[str, Array], options: SessionOptions, *batches: Batch
) -> list[Tally]:
    """Returns a graph's sums for each of the batches; `files` maps names to contents."""
    with scratch_folder("tune") as folder:
        for name, content in files.items():
            content.tofile(Path(folder) / name)
        session = open_graph(Path(folder) / MAIN_GRAPH, options)
        return [batch.tally(session) for batch in batches]
