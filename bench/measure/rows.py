"""The pieces of one candidate's measurement, put together to rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import torch

from ...common import timing
from ...common.console import Progress
from ...common.environment import memory_bytes
from ..cases import Candidate, Case, GraphSource, TimingGroup
from ..data import Labelled, LabelledData
from ..evaluate import EvaluationState, Quality, evaluate
from ..journal import Journal
from ..plan import Settings
from ..results import Part, Row
from ..runners.base import Loader, Runner
from ..runners.pytorch import cases
from .latency import Scheduled, group_batches, measure_group
from .memory import Memory, measure_memories
from .profile import parts_of
from .roofline import Limit, Limits, Rates


@dataclass
class Measurement:
    """The pieces of one candidate, each taken from the journal where an earlier run has done it.

    `seen` samples were evaluated. `beside` is what else the protocol tells: the machine's `rates`,
    as measured with each group, the share of the time for which threads `waited` for a core, and
    the milliseconds that the `wrapper` adds to a graph's bare call.
    """

    candidate: Candidate
    groups: Sequence[TimingGroup]
    data: Labelled
    head: LabelledData
    settings: Settings
    journal: Journal
    progress: Progress
    seen: int = 0
    beside: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    qualities: dict[Case, Quality] = field(default_factory=dict)
    failures: dict[Case, str] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        """Measures everything; returns the rows, group by group."""
        loaders = cases(self.candidate, self.settings.batches)
        graphs = {self.candidate.case(graph): graph for graph in self.candidate.graphs}
        limits = None
        if self.settings.limits:
            limits = Limits(self.candidate, self.head.batch(0, 1), loaders)
        runners = self._evaluated(loaders)
        memories = self._memories({c: loaders[c] for c in runners})
        rows = []
        for group in self.groups:
            if group.model != self.candidate.name:
                continue
            measured = self._measured(group, runners, limits)
            of_cases = self._limits(group, limits, graphs, measured)
            for case in group.cases:
                identity: dict[str, Any] = asdict(case) | {"batch": group.batch}
                failure = self.failures.get(case) or measured.failures.get(case.label)
                if failure is not None:
                    self.progress.step(f"failed: {case.label}, batch {group.batch}: {failure}")
                    rows.append(Row(**identity, error=failure))
                    continue
                latency, quality = measured.latencies[case.label], self.qualities[case]
                limit = of_cases.get(case, Limit())
                runtime, peak = _megabytes(memories.get(case.label), group.batch)
                rows.append(
                    Row(
                        **identity,
                        latency_ms=latency,
                        device_ms=measured.device.get(case.label),
                        throughput=1e3 * group.batch / ms if (ms := latency.median) > 0 else None,
                        accuracy=quality.accuracy,
                        perplexity=quality.perplexity,
                        routing=quality.routing,
                        parity=quality.parity,
                        peak_memory_mb=peak,
                        runtime_memory_mb=runtime,
                        work=limit.work,
                        limit_ms=limit.limit_ms,
                        no_limit=limit.reason,
                        parts=self._parts(case, group, loaders[case]),
                    )
                )
        return rows

    def _evaluated(self, loaders: Mapping[Case, Loader]) -> dict[Case, Runner | Loader]:
        """Opens and evaluates every case; returns what to time of those that did not fail.

        Where all engines do not fit in memory together, each is opened for its turn alone.
        """
        together = _fit_together(self.candidate)
        runners: dict[Case, Runner] = {}
        for case, loader in loaders.items():
            try:
                runner = loader()
            except Exception as error:  # noqa: BLE001  the row says what failed
                self.failures[case] = timing.in_one_line(error)
                continue
            if together:
                runners[case] = runner
            else:
                with runner:
                    self._evaluate(case.label, {case: runner})
        if together:
            self._evaluate("all", runners)
        timed = runners if together else loaders
        return {c: each for c, each in timed.items() if c not in self.failures}

    def _evaluate(self, group: str, runners: Mapping[Case, Runner]) -> None:
        """The quality of cases that are evaluated in one pass over the data."""
        keys = {"model": self.candidate.name, "group": group}
        found = self.journal.found("quality", **keys)
        state = evaluate(
            runners,
            self.candidate,
            self.data,
            self.settings.evaluation_batch,
            limit=self.settings.samples,
            progress=self.progress,
            state=msgspec.convert(found[-1]["state"], EvaluationState) if found else None,
            keep=lambda state: self.journal.add("quality", **keys, state=asdict(state)),
        )
        self.seen = max(self.seen, state.seen)
        for case in runners:
            if case.label in state.failures:
                self.failures[case] = state.failures[case.label]
            else:
                self.qualities[case] = state.quality(case)

    def _measured(
        self,
        group: TimingGroup,
        runners: Mapping[Case, Runner | Loader],
        limits: Limits | None,
    ) -> timing.Measured:
        """Times the cases of a group in turn; what disturbed them goes to `beside`."""
        keys = {"model": group.model, "batch": group.batch}
        done = [
            timing.Round(each["ms"], each["failures"], each.get("device_ms", {}))
            for each in self.journal.found("round", **keys)
        ]
        before = Scheduled.now()
        measured, wrapper_ms = measure_group(
            group,
            runners,
            self.head,
            benchmarks=None if limits is None else limits.benchmarks,
            progress=self.progress,
            done=done,
            keep=lambda found: self.journal.add("round", **keys, **asdict(found)),
        )
        # The most of an interrupted group's parts.
        shares = [each["share"] for each in self.journal.found("waited", **keys)]
        share = Scheduled.now().waited_share(before)
        if share is not None and len(done) < group.protocol.rounds:
            self.journal.add("waited", **keys, share=share)
            shares.append(share)
        if shares:
            self._tell("waited", {**keys, "share": max(shares)})
        for label, ms in wrapper_ms.items():
            self._tell("wrapper", {**keys, "case": label, "ms": ms})
        return measured

    def _limits(
        self,
        group: TimingGroup,
        limits: Limits | None,
        graphs: Mapping[Case, GraphSource],
        measured: timing.Measured,
    ) -> dict[Case, Limit]:
        """The work of each row of a group and the least time for it; empty where nobody asks."""
        if limits is None:
            return {}
        rates = limits.rates(measured)
        if isinstance(rates, Rates):
            self._tell("rates", {"model": group.model, "batch": group.batch} | asdict(rates))
        return {c: limits.of(c, graphs.get(c), group.batch, rates) for c in group.cases}

    def _tell(self, name: str, entry: dict[str, Any]) -> None:
        self.beside.setdefault(name, []).append(entry)

    def _memories(self, loaders: Mapping[Case, Loader]) -> dict[str, Memory]:
        """The memory of each case by its label; what could not be measured is left out."""
        if not self.settings.memory:
            return {}
        keys = {"model": self.candidate.name}
        done = {
            each["label"]: Memory(each["runtime"], {int(b): v for b, v in each["peak"].items()})
            for each in self.journal.found("memory", **keys)
        }
        for label, found in measure_memories(
            {c.label: loader for c, loader in loaders.items() if c.label not in done},
            {size: self.head.batch(0, size) for size in self.settings.batches},
            threads=torch.get_num_threads(),
            weights_bytes=self.candidate.weights_bytes,
            title=self.candidate.name,
            progress=self.progress,
        ):
            done[label] = found
            peak = {str(b): v for b, v in found.peak_mb.items()}
            self.journal.add("memory", **keys, label=label, runtime=found.runtime_mb, peak=peak)
        return done

    def _parts(self, case: Case, group: TimingGroup, loader: Loader) -> tuple[Part, ...]:
        """Where the time of a graph goes, if its runtime can tell."""
        if not (self.settings.parts and loader.profiles):
            return ()
        keys = {"label": case.label, "batch": group.batch}
        done = self.journal.found("parts", **keys)
        if done:
            return tuple(Part(**part) for part in done[-1]["parts"])
        what = f"{case.label}, batch {group.batch}"
        self.progress.step(f"{what}: where the time goes")
        layers = tuple(self.candidate.model.layers)
        try:
            found = parts_of(loader, group_batches(group, self.head), layers)
        except Exception as error:  # noqa: BLE001  the row is measured; only its parts are missing
            self.progress.step(f"{what}: no profile: {timing.in_one_line(error)}")
            return ()
        self.journal.add("parts", **keys, parts=[asdict(part) for part in found])
        return found


def _megabytes(memory: Memory | None, batch: int) -> tuple[float | None, float | None]:
    """What the runtime takes and the peak with a batch size, where that was measured."""
    if memory is None or batch not in memory.peak_mb:
        return None, None
    return memory.runtime_mb, memory.peak_mb[batch]


def _fit_together(candidate: Candidate) -> bool:
    """Whether every engine of a candidate can be open at once, in half of this machine's memory.

    A graph's weights are mapped and, as far as the runtime re-orders them, copied.
    """
    room = memory_bytes()
    return room is None or candidate.weights_bytes * (1 + 2 * len(candidate.graphs)) < room / 2
