"""Whole graphs: each point is written, run over the search's half, and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir

from ..bench.data import LabelledData
from ..bench.journal import Journal
from ..bench.runners.pytorch import untouched
from ..calibration.feeds import Array, LabelledBatch, rebatched_pairs
from ..common.console import Progress
from ..common.timing import Latency, Protocol, measure
from ..common.writing import scratch_folder
from ..exporter.bundle.manifest import MAIN_GRAPH
from ..exporter.bundle.weights import WEIGHTS_FILE
from ..exporter.job import ExportJob
from ..exporter.plan import plan
from ..exporter.session import Session, SessionOptions
from ..exporter.write import write_graphs
from ..graphs.targets import TARGETS
from .quality import Metric, Quality, Tally
from .space import Point, job_of
from .times import LayerTimes

BATCH = 64

UNTOUCHED = "untouched"
"""The PyTorch model among what is timed."""

QUICK = Protocol(rounds=5, warmup=2, round_s=0.02, inputs=4)
"""Of a look at one graph."""

CAREFUL = Protocol(rounds=7, warmup=3, round_s=0.1, inputs=4)
"""Of the graphs of the front, which take turns."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was found of one point as a whole graph.

    `ms` is the median time of a batch of OPT, corrected for how fast the machine was just then, by
    the graph of the model as trained. `bytes` are those of the graph and its weights.
    """

    point: Point
    lowerings: dict[str, str]
    quality: Quality
    ms: float
    predicted_ms: float
    bytes: int


class Graphs:
    """Looks at points as whole graphs, each once: a journal keeps what was found."""

    def __init__(
        self,
        base: ExportJob,
        traced: ir.Model,
        times: LayerTimes,
        data: LabelledData,
        outputs: Array,
        metric: Metric,
        journal: Journal,
        progress: Progress,
        threads: int,
    ) -> None:
        self.base, self.traced, self.times = base, traced, times
        self.data, self.outputs, self.metric = data, outputs, metric
        self.journal, self.progress, self.threads = journal, progress, threads
        self.looks: dict[str, Look] = {}
        self.new = 0
        for each in journal.found("look"):
            look = msgspec.convert(each["look"], Look)
            self.looks[look.point.key] = look

    def look(self, point: Point) -> Look:
        """Returns what there is to know of a point; writes, runs and times it the first time.

        Raises what planning and running a graph raise.
        """
        if point.key not in self.looks:
            lowerings = self.times.lowerings(point)
            with self.opened([(point, lowerings)]) as (session,):
                found = self._look(point, lowerings, session.path.parent, session)
            self.looks[point.key] = found
            self.new += 1
            self.journal.add("look", look=msgspec.to_builtins(found))
        return self.looks[point.key]

    def _look(
        self, point: Point, lowerings: dict[str, str], folder: Path, session: Session
    ) -> Look:
        tally = self._tally(session)
        calls: dict[str, Callable[[int], object]] = {"own": self.call(session)}
        files = (folder / MAIN_GRAPH, folder / WEIGHTS_FILE)
        found = measure(calls, QUICK, title="timing").latencies["own"]
        return Look(
            point,
            lowerings,
            self.metric.quality(tally),
            found.median,
            self.times.predicted_ms(point),
            sum(file.stat().st_size for file in files),
        )

    def _tally(self, session: Session) -> Tally:
        """The sums of a graph over the search's half."""
        tally, size = Tally(), self.base.fixed_batch or BATCH
        for rows in self.data.batches(size):
            if self.base.fixed_batch and rows.stop - rows.start < size:
                break
            x = np.ascontiguousarray(self.data.inputs[rows])
            labels = None if self.data.labels is None else self.data.labels[rows]
            tally += self.metric.tally(session(x), self.outputs[rows], x, labels)
        return tally

    @contextmanager
    def opened(self, listed: Sequence[tuple[Point, Mapping[str, str]]]) -> Iterator[list[Session]]:
        """Yields a session for each point, from graphs in a folder that is removed after."""
        provider = TARGETS[self.base.options.target].provider
        assert provider is not None, "tune is for graphs (`TuneRequest`)"
        options = SessionOptions(provider=provider, threads=self.threads)
        with scratch_folder("tune") as folder:
            sessions = []
            for index, (point, lowerings) in enumerate(listed):
                place = folder / str(index)
                place.mkdir()
                job = job_of(self.base, point, lowerings)
                write_graphs(plan(job, self.traced, job.table), place)
                sessions.append(Session(place / MAIN_GRAPH, options))
            yield sessions

    def whole(self, batches: Iterable[LabelledBatch]) -> Iterator[LabelledBatch]:
        """Yields batches that graphs take: of the one size, where it is a constant of the graph."""
        size = self.base.fixed_batch
        if size is None:
            yield from batches
            return
        for x, labels in rebatched_pairs(batches, size):
            if len(x) == size:
                yield x, labels

    def call(self, session: Session) -> Callable[[int], object]:
        """Returns the call that is timed: batches of OPT from the search's half, in turn."""
        size = self.base.options.batch.opt
        batches = [self.data.batch(index, size) for index in range(QUICK.inputs)]
        return partial(_run, [session.bound(batch) for batch in batches])

    def timed(self, looks: Sequence[Look]) -> dict[str, Latency]:
        """Returns the latency of several points by their keys, and of the untouched model.

        They are measured in turn.
        """
        with self.opened([(each.point, each.lowerings) for each in looks]) as sessions:
            calls = {
                each.point.key: self.call(session)
                for each, session in zip(looks, sessions, strict=True)
            }
            size, model = self.base.options.batch.opt, untouched(self.base.model)
            batches = [self.data.batch(index, size) for index in range(QUICK.inputs)]
            calls[UNTOUCHED] = partial(_run, [model.bound(batch) for batch in batches])
            found = measure(calls, CAREFUL, title="timing the front", progress=self.progress)
        return found.latencies


def _run(calls: Sequence[Callable[[], object]], index: int) -> object:
    return calls[index % len(calls)]()
