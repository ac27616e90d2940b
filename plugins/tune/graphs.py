"""Measures points as whole graphs: writes them, runs them on the search's half and times them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from ...bench.data import InputsAndLabels
from ...bench.plan import Candidate, GraphSource
from ...bench.request import BenchRequest
from ...bench.runners.base import GraphFile, first_of
from ...bench.runners.graphs import SessionLoader
from ...bench.runners.pytorch import PyTorch, untouched
from ...common.console import Progress
from ...common.latency import Latency
from ...common.timing import Protocol, measure
from ...common.writing import scratch_folder
from ...data.batches import rebatched_pairs
from ...exporter.bundle.manifest import MAIN_GRAPH
from ...exporter.bundle.runtimes import open_graph, options_for
from ...exporter.bundle.weights import WEIGHTS_FILE
from ...exporter.plan import plan_traced
from ...exporter.session import Session
from ...exporter.write import write_graphs
from ...graphs.targets import TARGETS, Target
from ..service.findings import ServiceFindings
from ..service.measure import MAX_LIBRARY, ServiceMeasurement
from ..service.request import ServiceOptions
from ..service.settings import MIN_BOUNDS, settings_of
from .accuracy.holdout import batch_size, in_batches, rows_of
from .budget import INPUTS, LOWERINGS, OPEN, QUICK, RUN, TRIAL, protocol_for, spin_for
from .prepare import SearchJob
from .request import TuneRequest
from .routed import Traces
from .shards import Batch, Evaluate
from .space import Point, Trial, job_of
from .substitutes.substitutes import Substitutes
from .times import LayerTimes

UNTOUCHED = "untouched"
"""The name of the untouched PyTorch model in timings."""

MIN_SERVED_S = 2.0
"""The shortest run of LoadGen, in seconds."""

MAX_TIME_SHARE = 0.97
"""Lowerings replace others if the graph then takes at most this share of its time."""


class Graphs:
    """Measures each point once as a whole graph, and records the results in the journal."""

    def __init__(
        self,
        job: SearchJob,
        times: Mapping[Target, LayerTimes],
        substitutes: Substitutes,
        progress: Progress,
        evaluate: Evaluate,
    ) -> None:
        self.base, self.metric, self.data = job.base, job.metric, job.holdout.search
        self.journal, self.clock = job.journal, job.clock
        self.times, self.substitutes = times, substitutes
        self.progress, self.evaluate = progress, evaluate
        self.traces = Traces(job.base, job.traced)
        self.trials: dict[str, Trial] = {}
        self.batch = batch_size(job.outputs)
        size = self.base.whole_batch
        # A graph with a fixed batch size cannot run a smaller last batch, so that is left out.
        self.tallies = evaluate(
            [
                Batch(inputs=x, labels=labels, outputs=job.outputs[rows], metric=job.metric)
                for rows, x, labels in in_batches(self.data, size or self.batch)
                if size in (None, rows.stop - rows.start)
            ]
        )
        self._baseline: tuple[Trial, Session] | None = None
        for piece in self.journal.pieces("trial"):
            trial = msgspec.convert(piece["trial"], Trial)
            if trial.substitutes == substitutes.digest(trial.point):
                self.trials[trial.point.key] = trial

    def trial(self, point: Point) -> Trial:
        """Returns the trial of a point; the first time, writes, runs and times its graph.

        Raises the errors of planning and running a graph.
        """
        if point.key not in self.trials:
            times = self.times[point.target]
            lowerings = times.lowerings(point)
            opened = self.opened([(point, lowerings)], spin_ms=self._spin_ms())
            with self.clock.step(TRIAL), opened as (session,):
                with self.clock.step(RUN):
                    (tally,) = self.tallies([session])
                files = (session.path, session.path.with_name(WEIGHTS_FILE))
                trial = Trial(
                    point=point,
                    lowerings=lowerings,
                    quality=self.metric.quality(tally),
                    ms=self._times_ms([session])[0],
                    predicted_ms=times.predicted_ms(point),
                    bytes=sum(file.stat().st_size for file in files),
                    substitutes=self.substitutes.digest(point),
                )
            self._add(trial)
        return self.trials[point.key]

    def _add(self, trial: Trial) -> None:
        self.trials[trial.point.key] = trial
        self.journal.add("trial", trial=msgspec.to_builtins(trial))

    def train_further(self, trial: Trial, seconds: float) -> bool:
        """Trains a point's substitutes for `seconds` more; returns whether that helped.

        If it did, this point and those that share its substitutes, in other precisions, are
        measured again.
        """
        with self.clock.step(TRIAL):
            if not self.substitutes.train_further(trial.point, seconds):
                return False
            sharing = [
                other.point
                for other in self.trials.values()
                if self.substitutes.shared(other.point, trial.point)
            ]
            for point in sharing:
                del self.trials[point.key]
            for point in sharing:
                self.trial(point)
        return True

    @contextmanager
    def timed_with(self, base: Trial) -> Iterator[None]:
        """Within the context, times every graph alternately with the model as trained."""
        opened = self.opened([(base.point, base.lowerings)], spin_ms=spin_for(base.ms))
        with opened as (session,):
            self._baseline = base, session
            try:
                yield
            finally:
                self._baseline = None

    def _spin_ms(self, trial: Trial | None = None) -> float | None:
        """Returns how long threads spin: as for the baseline, or for `trial` without a baseline."""
        baseline = trial if self._baseline is None else self._baseline[0]
        return None if baseline is None else spin_for(baseline.ms)

    def _times_ms(self, sessions: Sequence[Session]) -> list[float]:
        """Returns the times of graphs, measured in turn and corrected by the baseline, if any."""
        calls = {str(index): self.call(session) for index, session in enumerate(sessions)}
        if self._baseline is None:
            latencies = measure(calls, QUICK, title="timing").latencies
            return [latencies[name].median for name in calls]
        base, session = self._baseline
        with_base = {**calls, UNTOUCHED: self.call(session)}
        latencies = measure(with_base, protocol_for(base.ms), title="timing").latencies
        return [base.ms * median_ratio(latencies[name], latencies[UNTOUCHED]) for name in calls]

    def with_best_lowerings(self, trial: Trial) -> Trial:
        """Returns a trial with its fastest lowerings, compared in whole graphs.

        A layer's fastest lowering alone may be slower in a graph, where other layers fill caches.
        """
        variants = self.times[trial.point.target].lowering_variants(trial.point, trial.lowerings)
        if len(variants) == 1:
            return trial
        opened = self.opened([(trial.point, v) for v in variants], spin_ms=self._spin_ms(trial))
        with self.clock.step(LOWERINGS), opened as sessions:
            times = self._times_ms(sessions)
        fastest = int(np.argmin(times))
        if times[fastest] > MAX_TIME_SHARE * times[0]:
            return trial
        faster = replace(trial, lowerings=variants[fastest], ms=times[fastest])
        self._add(faster)
        return faster

    @contextmanager
    def opened(
        self, listed: Sequence[tuple[Point, Mapping[str, str]]], *, spin_ms: float | None = None
    ) -> Iterator[list[Session]]:
        """Yields a session for each point; removes the graphs' folder afterwards.

        If sessions run in turn, each is several times slower while the threads of the others spin
        (for `spin_ms`, as in `SessionOptions`).
        """
        with scratch_folder("tune") as folder:
            sessions = []
            for index, (point, lowerings) in enumerate(listed):
                subfolder = folder / str(index)
                subfolder.mkdir()
                job = job_of(self.base, point, lowerings, self.substitutes.trained_for(point))
                traced = self.traces.of(job)
                options = options_for(point.target, torch.get_num_threads(), spin_ms)
                with self.clock.step(OPEN):
                    write_graphs(plan_traced(job, traced, job.table), subfolder)
                    sessions.append(open_graph(subfolder / MAIN_GRAPH, options))
            yield sessions

    def graph_batches(self, batches: Iterable[InputsAndLabels]) -> Iterator[InputsAndLabels]:
        """Yields batches that the graphs accept: of their batch size, if that is fixed."""
        size = self.base.whole_batch
        if size is not None:
            arrays = ((first_of(x), labels) for x, labels in batches)
            yield from ((x, y) for x, y in rebatched_pairs(arrays, size) if len(x) == size)
            return
        for x, labels in batches:
            for start in range(0, len(first_of(x)), self.batch):
                rows = slice(start, start + self.batch)
                yield rows_of(x, rows), None if labels is None else labels[rows]

    def call(self, model: Session | PyTorch) -> Callable[[int], object]:
        """Returns the call to time, which runs batches of OPT inputs from the search's half."""
        size = self.base.options.batches.opt
        calls = [model.bound(self.data.batch(index, size)) for index in range(INPUTS)]
        return lambda index: calls[index % INPUTS]()

    def timed(self, trials: Sequence[Trial], protocol: Protocol) -> dict[str, Latency]:
        """Times points and the untouched model in turn; returns latencies by the points' keys.

        The latency of the untouched model is under `UNTOUCHED`.
        """
        points = [(trial.point, trial.lowerings) for trial in trials]
        with self.opened(points, spin_ms=spin_for(trials[0].ms)) as sessions:
            calls = {
                trial.point.key: self.call(session)
                for trial, session in zip(trials, sessions, strict=True)
            }
            calls[UNTOUCHED] = self.call(untouched(self.base.model))
            measured = measure(calls, protocol, title="timing the front", progress=self.progress)
        return measured.latencies

    def serve(
        self, trials: Sequence[Trial], folder: Path, request: TuneRequest
    ) -> tuple[dict[str, float], ServiceFindings]:
        """Returns the requests per second of each point, by its key, and the findings.

        The rate of a point that misses the latency bound is 0. LoadGen's logs are in `folder`.
        """
        job, bound_ms = self.base, request.latency_ms
        assert bound_ms is not None, "--scenario needs a latency bound"
        reference = BenchRequest(
            batch=(job.options.batches.opt, job.whole_batch or job.options.batches.max),
            out=folder,
            progress=self.progress,
        ).asking(
            ServiceOptions(
                scenario=request.scenario or "",
                latency_bound=f"{bound_ms}ms",
                duration=max(MIN_SERVED_S, 2 * MIN_BOUNDS * bound_ms / 1e3),
            )
        )
        settings = settings_of(reference)
        assert settings is not None, "the request names a scenario"
        with self.opened([(trial.point, trial.lowerings) for trial in trials]) as sessions:
            candidate = Candidate(
                name=Path(job.model.source.path).stem,
                model=job.model,
                graphs=tuple(
                    self._source(trial, session.path)
                    for trial, session in zip(trials, sessions, strict=True)
                ),
                engines=(),
                only_batch=job.whole_batch,
            )
            data = self.data.head(MAX_LIBRARY)
            service = ServiceMeasurement(reference, settings, data.batch(0, len(data)))
            service.serve(candidate, {}, self.journal)
        rates = {row.lowering: row.rate or 0.0 for row in service.services}
        by_key = {trial.point.key: rates[self._name(trial)] for trial in trials}
        return by_key, service.findings

    def _name(self, trial: Trial) -> str:
        layers = self.base.model.layers
        return trial.point.text({name: layer.spec.experts for name, layer in layers.items()})

    def _source(self, trial: Trial, path: Path) -> GraphSource:
        target, graph = trial.point.target, GraphFile(path=path)
        return GraphSource(
            k=max(trial.point.k.values()),
            lowering=self._name(trial),
            loader=SessionLoader(graph, options_for(target)),
            precision=trial.point.precision,
            engine=TARGETS[target].runtime,
        )


def median_ratio(latency: Latency, other: Latency) -> float:
    """Returns the ratio of two latencies: the median of the ratios of their rounds."""
    return float(np.median(np.array(latency.rounds) / np.array(other.rounds)))
