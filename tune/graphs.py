"""Whole graphs: each point is written, run over the search's half, and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from ..bench.data import InputsAndLabels, LabelledData
from ..bench.journal import Journal
from ..bench.runners.base import first_of
from ..bench.runners.pytorch import untouched
from ..calibration.feeds import Array, rebatched_pairs
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
from .budget import INPUTS, LOOK, OPEN, QUICK, RUN, WAYS, Clock, protocol_for, spin_for
from .halves import in_batches, rows_of
from .quality import Metric, Quality
from .routed import Traces
from .shards import Batch, Evaluate, evaluate_here
from .space import Point, job_of
from .substitutes.substitutes import Substitutes
from .times import LayerTimes

BATCH = 64

BATCH_BYTES = 1 << 27
"""Of the outputs of a batch: those of language models hold the scores of all words."""

UNTOUCHED = "untouched"
"""The PyTorch model among what is timed."""

TOLD_APART = 0.97
"""A lowering takes at most so much of another's time to be taken in its place."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was found of one point as a whole graph.

    `ms` is the median time of a batch of OPT, corrected for how fast the machine was just then, by
    the graph of the model as trained, which takes turns. `bytes` are those of the graph and its
    weights. `substitutes` is the SHA-256 of what takes the places of experts.
    """

    point: Point
    lowerings: dict[str, str]
    quality: Quality
    ms: float
    predicted_ms: float
    bytes: int
    substitutes: str = ""


class Graphs:
    """Looks at points as whole graphs, each once: a journal keeps what was found."""

    def __init__(
        self,
        base: ExportJob,
        traces: Traces,
        times: LayerTimes,
        data: LabelledData,
        outputs: Array,
        metric: Metric,
        journal: Journal,
        progress: Progress,
        threads: int,
        clock: Clock,
        substitutes: Substitutes,
        evaluate: Evaluate = evaluate_here,
    ) -> None:
        self.base, self.traces, self.times = base, traces, times
        self.data, self.outputs, self.metric = data, outputs, metric
        self.journal, self.progress, self.threads = journal, progress, threads
        self.clock, self.substitutes = clock, substitutes
        self.looks: dict[str, Look] = {}
        self.batch = batch_size(outputs)
        self.evaluate = evaluate
        size = base.fixed_batch
        # A shorter batch than the one size of a graph is left out.
        self.tallies = evaluate(
            [
                Batch(x, labels, outputs[rows], metric)
                for rows, x, labels in in_batches(data, size or self.batch)
                if size in (None, rows.stop - rows.start)
            ]
        )
        self._beside: tuple[Look, Session] | None = None
        for each in journal.found("look"):
            look = msgspec.convert(each["look"], Look)
            if look.substitutes == substitutes.digest(look.point):
                self.looks[look.point.key] = look

    def look(self, point: Point) -> Look:
        """Returns what there is to know of a point; writes, runs and times it the first time.

        Raises what planning and running a graph raise.
        """
        if point.key not in self.looks:
            lowerings = self.times.lowerings(point)
            opened = self.opened([(point, lowerings)], spin_ms=self._spin_ms())
            with self.clock.step(LOOK), opened as (session,):
                found = self._look(point, lowerings, session.path.parent, session)
            self.looks[point.key] = found
            self.journal.add("look", look=msgspec.to_builtins(found))
        return self.looks[point.key]

    def trained_further(self, look: Look, seconds: float) -> bool:
        """Trains what takes the places of a point's experts for so many seconds more.

        Where that helps, it is looked at again, as are the points that have the same in other
        precisions; returns whether it did.
        """
        with self.clock.step(LOOK):
            if not self.substitutes.train_further(look.point, seconds):
                return False
            sharing = [
                each.point
                for each in self.looks.values()
                if self.substitutes.shared(each.point, look.point)
            ]
            for point in sharing:
                del self.looks[point.key]
            for point in sharing:
                self.look(point)
        return True

    def _look(
        self, point: Point, lowerings: dict[str, str], folder: Path, session: Session
    ) -> Look:
        with self.clock.step(RUN):
            (tally,) = self.tallies([session])
        files = (folder / MAIN_GRAPH, folder / WEIGHTS_FILE)
        return Look(
            point,
            lowerings,
            self.metric.quality(tally),
            self._ms([session])[0],
            self.times.predicted_ms(point),
            sum(file.stat().st_size for file in files),
            self.substitutes.digest(point),
        )

    @contextmanager
    def beside(self, base: Look) -> Iterator[None]:
        """Within the context every graph is timed in turn with that of the model as trained."""
        opened = self.opened([(base.point, base.lowerings)], spin_ms=spin_for(base.ms))
        with opened as (session,):
            self._beside = base, session
            try:
                yield
            finally:
                self._beside = None

    def _spin_ms(self, look: Look | None = None) -> float | None:
        """How long threads spin: as those of the graph beside, if there is one."""
        beside = look if self._beside is None else self._beside[0]
        return None if beside is None else spin_for(beside.ms)

    def _ms(self, sessions: Sequence[Session]) -> list[float]:
        """What graphs take, in turn: as many times as the one beside as in the median round."""
        calls = {str(index): self.call(session) for index, session in enumerate(sessions)}
        if self._beside is None:
            found = measure(calls, QUICK, title="timing").latencies
            return [found[name].median for name in calls]
        base, session = self._beside
        both = {**calls, UNTOUCHED: self.call(session)}
        found = measure(both, protocol_for(base.ms), title="timing").latencies
        return [base.ms * times_as_long(found[name], found[UNTOUCHED]) for name in calls]

    def lowered(self, look: Look) -> Look:
        """Returns a point with its fastest lowerings, timed as whole graphs.

        What is fastest for a layer alone need not be among others, which fill the caches.
        """
        ways = self.times.ways(look.point, look.lowerings)
        if len(ways) == 1:
            return look
        opened = self.opened([(look.point, way) for way in ways], spin_ms=self._spin_ms(look))
        with self.clock.step(WAYS), opened as sessions:
            times = self._ms(sessions)
        at = int(np.argmin(times))
        if times[at] > TOLD_APART * times[0]:
            return look
        found = replace(look, lowerings=ways[at], ms=times[at])
        self.looks[look.point.key] = found
        self.journal.add("look", look=msgspec.to_builtins(found))
        return found

    @contextmanager
    def opened(
        self, listed: Sequence[tuple[Point, Mapping[str, str]]], *, spin_ms: float | None = None
    ) -> Iterator[list[Session]]:
        """Yields a session for each point, from graphs in a folder that is removed after.

        Where several run in turn, batch by batch, they take several times as long while threads of
        the others spin (`spin_ms`, as in `SessionOptions`).
        """
        provider = TARGETS[self.base.options.target].provider
        assert provider is not None, "tune is for graphs (`SearchOptions`)"
        options = SessionOptions(provider=provider, threads=self.threads, spin_ms=spin_ms)
        with scratch_folder("tune") as folder:
            sessions = []
            for index, (point, lowerings) in enumerate(listed):
                place = folder / str(index)
                place.mkdir()
                job = job_of(self.base, point, lowerings, self.substitutes.trained_for(point))
                traced = self.traces.of(job)
                with self.clock.step(OPEN):
                    write_graphs(plan(job, traced, job.table), place)
                    sessions.append(Session(place / MAIN_GRAPH, options))
            yield sessions

    def whole(self, batches: Iterable[InputsAndLabels]) -> Iterator[InputsAndLabels]:
        """Yields batches that graphs take: of the one size, where it is a constant of the graph."""
        size = self.base.fixed_batch
        if size is not None:
            arrays = ((first_of(x), labels) for x, labels in batches)
            yield from ((x, y) for x, y in rebatched_pairs(arrays, size) if len(x) == size)
            return
        for x, labels in batches:
            for start in range(0, len(first_of(x)), self.batch):
                rows = slice(start, start + self.batch)
                yield rows_of(x, rows), None if labels is None else labels[rows]

    def call(self, session: Session) -> Callable[[int], object]:
        """Returns the call that is timed: batches of OPT from the search's half, in turn."""
        size = self.base.options.batch.opt
        batches = [self.data.batch(index, size) for index in range(INPUTS)]
        return partial(_run, [session.bound(batch) for batch in batches])

    def timed(self, looks: Sequence[Look], protocol: Protocol) -> dict[str, Latency]:
        """Returns the latency of several points by their keys, and of the untouched model.

        They are measured in turn.
        """
        points = [(each.point, each.lowerings) for each in looks]
        with self.opened(points, spin_ms=spin_for(looks[0].ms)) as sessions:
            calls = {
                each.point.key: self.call(session)
                for each, session in zip(looks, sessions, strict=True)
            }
            size, model = self.base.options.batch.opt, untouched(self.base.model)
            batches = [self.data.batch(index, size) for index in range(INPUTS)]
            calls[UNTOUCHED] = partial(_run, [model.bound(batch) for batch in batches])
            found = measure(calls, protocol, title="timing the front", progress=self.progress)
        return found.latencies


def times_as_long(latency: Latency, other: Latency) -> float:
    """Returns how many times as long one takes as another, in the median of rounds in turn."""
    return float(np.median(np.array(latency.rounds) / np.array(other.rounds)))


def batch_size(outputs: Array) -> int:
    """Returns how many inputs run at once, whose outputs are known: some, or all of them."""
    return max(1, min(BATCH, BATCH_BYTES // max(1, outputs[:1].nbytes)))


def _run(calls: Sequence[Callable[[], object]], index: int) -> object:
    return calls[index % len(calls)]()
