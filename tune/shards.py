"""The sums of a whole graph over the search's half: here, or in shards on a Ray cluster.

Shards are batches apart, which are added in the order of the data: the sums are those of one
machine, to the last bit where the nodes compute alike. Times are none of a cluster's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from ..bench.data import LabelledData
from ..calibration.feeds import Array
from ..common.cluster import Task, connected, kinds_of
from ..common.console import Progress
from ..common.writing import scratch_folder
from ..exporter.bundle.manifest import MAIN_GRAPH
from ..exporter.session import Session, SessionOptions
from .halves import in_batches
from .quality import Metric, Tally


@dataclass(frozen=True, slots=True)
class Half:
    """The search's half with the untouched model's outputs, as graphs are run over it.

    Batches have `size` inputs; where that is `fixed` in the graph a shorter one is left out.
    """

    data: LabelledData
    outputs: Array
    metric: Metric
    size: int
    fixed: bool

    def tallies(self, session: Session, share: tuple[int, int]) -> dict[int, Tally]:
        """Returns the sums of every s-th batch from the i-th on, by its number, for (i, s)."""
        first, step = share
        found = {}
        for number, (rows, x, labels) in enumerate(in_batches(self.data, self.size)):
            whole = rows.stop - rows.start == self.size
            if number % step == first and (whole or not self.fixed):
                found[number] = self.metric.tally(session(x), self.outputs[rows], x, labels)
        return found


Evaluate = Callable[[Session, Half], Tally]
"""Returns the sums of a graph over a half."""


def evaluate_here(session: Session, half: Half) -> Tally:
    """Returns the sums of a graph over a half, on this machine."""
    return _added(half.tallies(session, (0, 1)))


@contextmanager
def evaluating_on_ray(address: str, on: str, progress: Progress) -> Iterator[Evaluate]:
    """Yields what evaluates graphs on the nodes of a cluster; raises `ClusterError`."""
    with connected(address, progress) as cluster:
        (kind,) = kinds_of(cluster.ray.nodes(), [on])
        held: dict[int, Any] = {}

        def evaluate(session: Session, half: Half) -> Tally:
            if id(half) not in held:  # sent once, and kept by the nodes
                held[id(half)] = cluster.ray.put(half)
            folder = session.path.parent
            files = {each.name: np.fromfile(each, np.uint8) for each in sorted(folder.iterdir())}
            sent = cluster.ray.put(files)
            tasks = [
                Task(
                    f"quality, shard {index + 1}/{kind.nodes}",
                    evaluate_share,
                    (held[id(half)], sent, session.options, (index, kind.nodes)),
                )
                for index in range(kind.nodes)
            ]
            found: dict[int, Tally] = {}
            for _, share in cluster.finished(kind, tasks):
                found |= share
            cluster.check_lost("evaluated")
            return _added(found)

        yield evaluate


def _added(tallies: Mapping[int, Tally]) -> Tally:
    return reduce(add, (tallies[number] for number in sorted(tallies)), Tally())


# --- what the nodes run --------------------------------------------------------------------------


def evaluate_share(
    half: Half, files: Mapping[str, Array], options: SessionOptions, share: tuple[int, int]
) -> dict[int, Tally]:
    """Returns the sums of some batches by their numbers, of a graph that comes as its files."""
    with scratch_folder("tune") as folder:
        for name, content in files.items():
            content.tofile(Path(folder) / name)
        return half.tallies(Session(Path(folder) / MAIN_GRAPH, options), share)
