"""The pieces of one candidate's measurement, put together to rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ...common import timing
from ...common.console import Progress
from ...common.environment import memory_bytes
from ..data import Labelled, LabelledData
from ..evaluate import Quality, State, evaluate
from ..journal import Journal
from ..plan import Settings, TimingGroup
from ..results import Part, Row
from ..runners.pytorch import Candidate, Case, Entry, Runner, cases
from .latency import Scheduled, group_batches, measure_group
from .limits import Limit, Limits
from .memory import Memory, peaks
from .profile import parts_of
from .roofline import Rates


@dataclass
class Measurement:
    """The pieces of one candidate, each taken from the journal where an earlier run has done it.

    `rates` are the machine's, as measured beside each group, and `waited` the share of the time for
    which threads waited for a core in it.
    """

    candidate: Candidate
    groups: Sequence[TimingGroup]
    data: Labelled
    head: LabelledData
    settings: Settings
    journal: Journal
    progress: Progress
    seen: int = 0
    limits: Limits | None = None
    rates: list[dict[str, Any]] = field(default_factory=list)
    waited: list[dict[str, Any]] = field(default_factory=list)

    def rows(self) -> list[Row]:
        """Measures everything; returns the rows, group by group."""
        entries = cases(self.candidate, self.settings.batches)
        if self.settings.limits:
            self.limits = Limits(self.candidate, self.head.batch(0, 1), entries)
        # Where all engines do not fit in memory together, each is opened for its turn alone.
        together = _fit_together(self.candidate)
        runners: dict[Case, Runner] = {}
        failures: dict[Case, str] = {}
        if together:
            for case, entry in entries.items():
                try:
                    runners[case] = entry.open()
                except Exception as error:  # noqa: BLE001  the row says what failed
                    failures[case] = timing.in_one_line(error)
        qualities, failed = self._qualities(entries, runners, failures, together=together)
        failures |= failed
        rows = []
        mine = [group for group in self.groups if group.model == self.candidate.name]
        memories = self._memories({c: e for c, e in entries.items() if c not in failures})
        for group in mine:
            alive = {c: entries[c] for c in entries if c not in failures}
            measured = self._measured(group, alive, runners)
            limits = self._heat_limits(group, entries, measured)
            for case in group.cases:
                failure = failures.get(case) or measured.failures.get(case.label)
                row = self._row(case, group, qualities, measured, failure)
                if row.error is not None:
                    self.progress.step(f"failed: {case.label}, batch {group.batch}: {row.error}")
                else:
                    entry = entries[case]
                    row = _with_memory(row, memories.get(case.label))
                    row = _with_limit(row, limits[case]) if limits else row
                    row = replace(row, parts=self._parts(case, group, entry))
                rows.append(row)
        return rows

    def _qualities(
        self,
        entries: dict[Case, Entry],
        runners: dict[Case, Runner],
        failures: dict[Case, str],
        *,
        together: bool,
    ) -> tuple[dict[Case, Quality], dict[Case, str]]:
        if together:
            return self._evaluated("all", runners)
        qualities: dict[Case, Quality] = {}
        failed: dict[Case, str] = {}
        for case, entry in entries.items():
            try:
                runner = entry.open()
            except Exception as error:  # noqa: BLE001  the row says what failed
                failures[case] = timing.in_one_line(error)
                continue
            good, bad = self._evaluated(case.label, {case: runner})
            qualities |= good
            failed |= bad
        return qualities, failed

    def _evaluated(
        self, group: str, runners: dict[Case, Runner]
    ) -> tuple[dict[Case, Quality], dict[Case, str]]:
        """The quality of cases that are evaluated in one pass over the data."""
        keys = {"model": self.candidate.name, "group": group}
        kept = self.journal.found("quality", **keys)
        state = State.from_json(kept[-1]["state"]) if kept else None
        last = state

        def keep(body: dict[str, Any]) -> None:
            nonlocal last
            last = State.from_json(body)
            self.journal.add("quality", **keys, state=body)

        found = evaluate(
            runners,
            self.candidate,
            self.data,
            self.settings.evaluation_batch,
            limit=self.settings.samples,
            progress=self.progress,
            state=state,
            keep=keep,
        )
        self.seen = max(self.seen, 0 if last is None else last.seen)
        return found

    def _measured(
        self, group: TimingGroup, alive: dict[Case, Entry], runners: dict[Case, Runner]
    ) -> timing.Measured:
        keys = {"model": self.candidate.name, "batch": group.batch}
        done = [
            timing.Round(entry["ms"], entry["failures"], entry.get("device_ms", {}))
            for entry in self.journal.found("round", **keys)
        ]
        before = Scheduled.now()
        measured = measure_group(
            group,
            {c: runners[c] for c in alive if c in runners},
            self.head,
            openers={c: e.open for c, e in alive.items() if c not in runners},
            probes=None if self.limits is None else self.limits.cases,
            progress=self.progress,
            done=done,
            keep=lambda found: self.journal.add("round", **keys, **asdict(found)),
        )
        ran = len(done) < group.protocol.rounds
        self._note_waiting(group, Scheduled.now().waited_share(before) if ran else None)
        return measured

    def _note_waiting(self, group: TimingGroup, share: float | None) -> None:
        """Keeps how long threads waited for a core: the most of an interrupted group's parts."""
        keys = {"model": group.model, "batch": group.batch}
        shares = [entry["share"] for entry in self.journal.found("waited", **keys)]
        if share is not None:
            self.journal.add("waited", **keys, share=share)
            shares.append(share)
        if shares:
            self.waited.append({**keys, "share": max(shares)})

    def _heat_limits(
        self, group: TimingGroup, entries: dict[Case, Entry], measured: timing.Measured
    ) -> dict[Case, Limit]:
        """The work of each row of a group and the least time for it; empty where nobody asks."""
        if self.limits is None:
            return {}
        rates = self.limits.rates(measured)
        if isinstance(rates, Rates):
            self.rates.append({"model": group.model, "batch": group.batch} | rates.as_json())
        return {c: self.limits.of(c, entries[c].graph, group.batch, rates) for c in group.cases}

    def _memories(self, alive: dict[Case, Entry]) -> dict[str, Memory]:
        """The memory of each case by its label; what could not be measured is left out."""
        if not self.settings.memory:
            return {}
        keys = {"model": self.candidate.name}
        done = {
            entry["label"]: Memory(entry["runtime"], {int(b): v for b, v in entry["peak"].items()})
            for entry in self.journal.found("memory", **keys)
        }
        recipes = {c.label: e.recipe for c, e in alive.items() if c.label not in done}
        inputs = {size: self.head.batch(0, size) for size in self.settings.batches}
        for label, found in peaks(
            recipes,
            inputs,
            threads=torch.get_num_threads(),
            weights_bytes=weights_bytes(self.candidate),
            title=self.candidate.name,
            progress=self.progress,
        ):
            done[label] = found
            self.journal.add(
                "memory",
                **keys,
                label=label,
                runtime=found.runtime_mb,
                peak={str(b): v for b, v in found.peak_mb.items()},
            )
        return done

    def _parts(self, case: Case, group: TimingGroup, entry: Entry) -> tuple[Part, ...]:
        """Where the time of a graph goes, if its runtime can tell."""
        if not self.settings.parts or not hasattr(entry.open, "profiled"):
            return ()
        keys = {"label": case.label, "batch": group.batch}
        kept = self.journal.found("parts", **keys)
        if kept:
            return tuple(Part(**part) for part in kept[-1]["parts"])
        what = f"{case.label}, batch {group.batch}"
        self.progress.step(f"{what}: where the time goes")
        layers = tuple(self.candidate.model.layers)
        try:
            found = parts_of(entry.open, group_batches(group, self.head), layers)
        except Exception as error:  # noqa: BLE001  the row is measured; only its parts are missing
            self.progress.step(f"{what}: no profile: {timing.in_one_line(error)}")
            return ()
        self.journal.add("parts", **keys, parts=[asdict(part) for part in found])
        return found

    def _row(
        self,
        case: Case,
        group: TimingGroup,
        qualities: dict[Case, Quality],
        measured: timing.Measured,
        failure: str | None,
    ) -> Row:
        identity: dict[str, Any] = asdict(case) | {"batch": group.batch}
        if failure is not None:
            return Row(**identity, error=failure)
        quality, latency = qualities[case], measured.latencies[case.label]
        return Row(
            **identity,
            latency_ms=latency,
            device_ms=measured.device.get(case.label),
            throughput=1000 * group.batch / latency.median if latency.median > 0 else None,
            accuracy=quality.accuracy,
            perplexity=quality.perplexity,
            routing=quality.routing,
            parity=quality.parity,
        )


def _fit_together(candidate: Candidate) -> bool:
    """Whether every engine of a candidate can be open at once, in half of this machine's memory.

    A graph's weights are mapped and, as far as the runtime re-orders them, copied.
    """
    room = memory_bytes()
    return room is None or weights_bytes(candidate) * (1 + 2 * len(candidate.graphs)) < room / 2


def weights_bytes(candidate: Candidate) -> int:
    """Returns the bytes of a model's parameters."""
    return sum(p.nbytes for p in candidate.model.module.parameters())


def _with_memory(row: Row, memory: Memory | None) -> Row:
    if memory is None or row.batch not in memory.peak_mb:
        return row
    return replace(
        row, peak_memory_mb=memory.peak_mb[row.batch], runtime_memory_mb=memory.runtime_mb
    )


def _with_limit(row: Row, limit: Limit) -> Row:
    return replace(row, work=limit.work, limit_ms=limit.limit_ms, no_limit=limit.reason)
