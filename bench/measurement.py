"""Measures one candidate (quality, latency, memory, parts); estimates a benchmark's duration."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import onnx
import torch

from ..common import timing
from ..common.console import Progress
from ..common.environment import memory_bytes
from ..common.latency import Latency
from ..errors import one_line
from ..exporter.bundle.manifest import external_files
from ..exporter.inputs import Inputs
from ..exporter.model import Model
from .data import Labelled, LabelledData
from .engines import PYTORCH_COMPILE
from .evaluate import EvaluationState, deviation_of, evaluate
from .graph_hash import graph_hash
from .journal import Journal
from .measure.latency import group_batches, measure_group, parts_of, scheduled_ns, waited_share
from .measure.memory import PeakMemory, measure_memories, worker_count
from .measure.roofline import Limit, Limits, Rates, why_below_limit
from .measure.sequences import phase_inputs
from .plan import Candidate, Case, TimingGroup
from .request import BenchRequest
from .results import PartTime, Row
from .runners.base import Loader, Runner
from .runners.models import loaders
from .runners.pytorch import PyTorch, outputs_of, untouched

TRIAL_CALLS = 3  # the fastest of these calls counts, because the first one allocates
UNKNOWN_SAMPLES = 1000  # the assumed number for feeds of unknown length
COMPILE_S = 30.0  # time to compile a small network for one batch size
MACHINE_PROBES = 5  # cases in each group that measure the machine's rates (`limits`)
PHASE_INPUTS = 4  # distinct prompts of a language model
PROCESS_S = 4.0  # time to start a process and load a runtime


@dataclass
class Measurement:
    """The measurements of one candidate, taken from the journal if an earlier run made them.

    `entries` receives entries for the protocol: the machine's `rates` as measured with each group,
    the share of time that threads `waited` for a core, and the ms that the `wrapper` adds to a
    graph's call. `samples` were evaluated. An `earlier_evaluation` is used instead of a new one.
    """

    candidate: Candidate
    groups: Sequence[TimingGroup]
    data: Labelled
    head: LabelledData
    request: BenchRequest
    journal: Journal
    progress: Progress
    entries: dict[str, list[dict[str, Any]]]
    samples: int = 0
    qualities: dict[Case, dict[str, Any]] = field(default_factory=dict)
    failures: dict[Case, str] = field(default_factory=dict)
    computed_in: dict[Case, str | None] = field(default_factory=dict)
    no_cuda_graph: dict[Case, str | None] = field(default_factory=dict)
    earlier_evaluation: EvaluationState | None = None

    def rows(self) -> list[Row]:
        """Measures everything; returns the rows, group by group."""
        case_loaders = loaders(self.candidate, self.request.batches)
        limits: dict[str, Limits] = {}
        if self.request.limits and not self.candidate.phases:
            size = self.candidate.only_batch or self.candidate.model.batch_of
            limits = self._all_limits(self.head.batch(0, size), case_loaders)
        runners = self._open_cases(case_loaders)
        weights: dict[tuple[str, int, int], str] = {}
        hashes: dict[Path | None, str] = {
            file: graph_hash(file, weights)
            for file in {case_loaders[case].file for case in runners}
            if file is not None and file.is_file()
        }
        memories = self._memories({c: case_loaders[c] for c in runners})
        rows: list[Row] = []
        for group in self.groups:
            if group.model != self.candidate.name:
                continue
            if self.request.limits and group.phase is not None:
                first = self.head.batch(0, 1)
                x = phase_inputs(self.candidate.model, group.phase, first)
                limits = self._all_limits(x, case_loaders)
            measured = self._time_group(group, runners, limits)
            case_limits = self._limits(group, limits, measured)
            for case in group.cases:
                own = self.candidate.for_case(case)
                levels, k_levels = own.by_levels(case.k)
                identity: dict[str, Any] = asdict(case) | {
                    "batch": group.batch,
                    "levels": levels,
                    "k_levels": k_levels,
                }
                if group.phase is not None:
                    identity |= {
                        "phase": group.phase.name,
                        "tokens": group.phase.tokens,
                        "past": group.phase.past,
                    }
                failure = self.failures.get(case) or measured.failures.get(case.label)
                if failure is not None:
                    sizes = group.title.removeprefix(group.model)
                    self.progress.step(f"failed: {case.label}{sizes}: {failure}")
                    parity = self.qualities.get(case, {}).get("parity")
                    rows.append(Row(**identity, error=failure, parity=parity))
                    continue
                graph = self.candidate.cases[case]
                latency, limit = measured.latencies[case.label], case_limits.get(case, Limit())
                memory = memories.get(case.label)
                if memory is not None and group.batch not in memory.peak_mb:
                    memory = None
                rows.append(
                    Row(
                        **identity,
                        **self.qualities[case],
                        latency_ms=latency,
                        device_ms=measured.device.get(case.label),
                        throughput=_per_second(group.batch, latency),
                        tokens_per_s=None
                        if group.phase is None
                        else _per_second(group.batch * group.phase.tokens, latency),
                        peak_memory_mb=None if memory is None else memory.peak_mb[group.batch],
                        runtime_memory_mb=None if memory is None else memory.runtime_mb,
                        disk_bytes=_disk_bytes(case_loaders[case], own.model),
                        work=limit.work,
                        limit_ms=limit.limit_ms,
                        no_limit=limit.reason,
                        parts=self._parts(case, group, case_loaders[case]),
                        computed_in=self.computed_in[case],
                        no_cuda_graph=self.no_cuda_graph[case],
                        graph_sha256=hashes.get(case_loaders[case].file),
                        deploy=() if graph is None else graph.deploy,
                    )
                )
        return rows

    def _all_limits(self, x: Inputs, cases: Collection[Case]) -> dict[str, Limits]:
        """Returns the `Limits` of the model (under "") and of distinct bundles, by name."""
        bundles = {bundle.name: bundle for bundle in self.candidate.distinct_bundles}
        candidates = {"": self.candidate} | bundles
        return {name: Limits(candidate, x, cases) for name, candidate in candidates.items()}

    def _open_cases(self, case_loaders: Mapping[Case, Loader]) -> dict[Case, Runner | Loader]:
        """Opens and evaluates every case; returns the runners or loaders of successful ones.

        If all engines together exceed half of the memory, each is only open during its turn: a
        graph's weights are mapped, and copied if the runtime reorders them.
        """
        needed = self.candidate.weights_bytes * (1 + 2 * len(self.candidate.graphs))
        all_open = needed < memory_bytes() / 2
        runners: dict[Case, Runner] = {}
        for case, loader in case_loaders.items():
            try:
                runner = loader()
            except Exception as error:  # noqa: BLE001  recorded in the row
                self.failures[case] = one_line(error)
                continue
            self.computed_in[case] = runner.computed_in
            self.no_cuda_graph[case] = runner.no_cuda_graph
            if all_open:
                runners[case] = runner
            else:
                with runner:
                    self._evaluate(case.label, {case: runner})
        if all_open:
            self._evaluate("all", runners)
        sources = runners if all_open else case_loaders
        return {case: source for case, source in sources.items() if case not in self.failures}

    def _evaluate(self, group: str, runners: Mapping[Case, Runner]) -> None:
        keys = {"model": self.candidate.name, "group": group}
        pieces = self.journal.pieces("quality", **keys)
        state = self.earlier_evaluation or evaluate(
            runners,
            self.candidate,
            self.data,
            self.request.evaluation_batch,
            limit=self.request.samples,
            progress=self.progress,
            state=msgspec.convert(pieces[-1]["state"], EvaluationState, strict=False)
            if pieces
            else None,
            keep=lambda state: self.journal.add("quality", **keys, state=asdict(state)),
        )
        self.samples = max(self.samples, state.samples)
        for case in runners:
            if case.label in state.failures:
                self.failures[case] = state.failures[case.label]
            else:
                self.qualities[case] = state.quality(case)
                graph = self.candidate.cases[case]
                bounds = None if graph is None else graph.bounds
                reason = deviation_of(case, state.sums[case.label], bounds)
                if reason is not None:
                    self.failures[case] = reason

    def _time_group(
        self,
        group: TimingGroup,
        runners: Mapping[Case, Runner | Loader],
        limits: Mapping[str, Limits],
    ) -> timing.Measured:
        """Times the cases of a group in turn; disturbances are added to `entries`."""
        keys = group.keys
        done = [
            msgspec.convert(piece, timing.Round) for piece in self.journal.pieces("round", **keys)
        ]
        before = scheduled_ns()
        measured, wrapper_ms = measure_group(
            group,
            runners,
            timed_inputs(group, self.candidate, self.head),
            benchmarks=limits[""].benchmarks if limits else {},
            progress=self.progress,
            done=done,
            keep=lambda piece: self.journal.add("round", **keys, **asdict(piece)),
        )
        # The maximum over the parts of an interrupted group.
        shares = [piece["share"] for piece in self.journal.pieces("waited", **keys)]
        share = waited_share(before, scheduled_ns())
        if share is not None and len(done) < group.protocol.rounds:
            self.journal.add("waited", **keys, share=share)
            shares.append(share)
        if shares:
            self._add_entry("waited", {**keys, "share": max(shares)})
        for label, ms in wrapper_ms.items():
            self._add_entry("wrapper", {**keys, "case": label, "ms": ms})
        return measured

    def _limits(
        self, group: TimingGroup, limits: Mapping[str, Limits], measured: timing.Measured
    ) -> dict[Case, Limit]:
        """Returns each row's work and the minimum time for it; empty unless requested."""
        if not limits:
            return {}
        model_limits = limits[""]
        on_cpu, on_gpu = model_limits.rates(measured), model_limits.gpu_rates(measured)
        for rates in (on_cpu, on_gpu):
            if isinstance(rates, Rates):
                entry = asdict(rates)
                if not rates.gpu:
                    del entry["gpu"], entry["fp16_gflop_s"]
                self._add_entry("rates", group.keys | entry)
        by_case = {}
        for case, graph in self.candidate.cases.items():
            if case in group.cases:
                rates, label = on_cpu if case.provider == "cpu" else on_gpu, case.label
                case_limits = limits.get(case.bundle or "", model_limits)
                limit = case_limits.of(case, graph, group.batch, rates)
                latency = measured.device.get(label) or measured.latencies.get(label)
                reason = None if latency is None else why_below_limit(limit, latency.median, rates)
                by_case[case] = limit if reason is None else replace(limit, reason=reason)
        return by_case

    def _add_entry(self, name: str, entry: dict[str, Any]) -> None:
        self.entries.setdefault(name, []).append(entry)

    def _memories(self, case_loaders: Mapping[Case, Loader]) -> dict[str, PeakMemory]:
        """Returns the memory of each case by its label; failed cases are skipped."""
        if not self.request.memory:
            return {}
        keys = {"model": self.candidate.name}
        done = {
            # `strict=False`, because JSON keys are strings
            piece["label"]: msgspec.convert(piece, PeakMemory, strict=False)
            for piece in self.journal.pieces("memory", **keys)
        }
        for label, memory in measure_memories(
            {c.label: loader for c, loader in case_loaders.items() if c.label not in done},
            {
                size: self.head.batch(0, size)
                for size in self.request.batches
                if self.candidate.only_batch in (None, size)
            },
            threads=torch.get_num_threads(),
            weights_bytes=self.candidate.weights_bytes,
            title=self.candidate.name,
            progress=self.progress,
        ):
            done[label] = memory
            self.journal.add("memory", **keys, label=label, **asdict(memory))
        return done

    def _parts(self, case: Case, group: TimingGroup, loader: Loader) -> tuple[PartTime, ...]:
        """Returns the times of a graph's parts, if its runtime can profile."""
        if not (self.request.parts and loader.profiles):
            return ()
        keys = {"label": case.label} | group.keys
        done = self.journal.pieces("parts", **keys)
        if done:
            return msgspec.convert(done[-1]["parts"], tuple[PartTime, ...])
        what = f"{case.label}{group.title.removeprefix(group.model)}"
        self.progress.step(f"{what}: profiling")
        layers = tuple(self.candidate.for_case(case).model.layers)
        try:
            parts = parts_of(loader, timed_inputs(group, self.candidate, self.head), layers)
        except Exception as error:  # noqa: BLE001  only the parts are missing from the row
            self.progress.step(f"{what}: no profile: {one_line(error)}")
            return ()
        self.journal.add("parts", **keys, parts=[asdict(part) for part in parts])
        return parts


def timed_inputs(group: TimingGroup, candidate: Candidate, head: LabelledData) -> list[Inputs]:
    """Returns the batches that a group uses in turn; for a language model, those of its phase."""
    batches = group_batches(group, head)
    if group.phase is None:
        return batches
    # Each batch has its own cache, which takes memory.
    return [phase_inputs(candidate.model, group.phase, x) for x in batches[:PHASE_INPUTS]]


def _per_second(count: int, latency: Latency) -> float | None:
    return 1e3 * count / latency.median if latency.median > 0 else None


def expected_time(
    candidates: Sequence[Candidate],
    groups: Sequence[TimingGroup],
    head: LabelledData,
    samples: int | None,
    request: BenchRequest,
) -> str:
    """Returns the expected duration if all engines are as fast as PyTorch in trial calls."""
    known = UNKNOWN_SAMPLES if samples is None else samples
    batches = math.ceil(min(known, request.samples or known) / request.evaluation_batch)
    workers = worker_count(max(candidate.weights_bytes for candidate in candidates))
    timed = quality = compiling = memory = 0.0
    for candidate in candidates:
        base, cases = untouched(candidate.model), candidate.cases
        # Every case, the unmodified model, and a reference for every k.
        passes = len(cases) + 1 + len({c.k for c in cases})
        size = min(request.evaluation_batch, len(head))
        batch_ms = _call_ms(base, head.batch(0, size), candidate.name)
        batch_ms *= request.evaluation_batch / size
        quality += passes * batches * batch_ms / 1e3
        compiled = sum(c.engine == PYTORCH_COMPILE for c in cases)
        compiling += compiled * len(request.batches) * COMPILE_S
        memory += len(cases) * PROCESS_S / workers if request.memory else 0.0
        for group in groups:
            if group.model == candidate.name:
                timed += group.seconds(
                    _call_ms(base, timed_inputs(group, candidate, head)[0], candidate.name)
                )
    if request.limits:
        timed += len(groups) * MACHINE_PROBES * request.protocol.rounds * request.protocol.round_s
    names = ("timing", "accuracy and parity", "compiling", "memory")
    spent = (timed, quality, compiling, memory)
    listed = [f"{name} {_duration(s)}" for name, s in zip(names, spent, strict=True) if s >= 1]
    return f"about {_duration(sum(spent))}" + (f" ({', '.join(listed)})" if listed else "")


def _call_ms(base: PyTorch, x: Inputs, name: str) -> float:
    times = []
    for _ in range(TRIAL_CALLS):
        started = time.perf_counter()
        outputs_of(base, x, name)
        times.append(1e3 * (time.perf_counter() - started))
    return min(times)


def _duration(seconds: float) -> str:
    """Returns seconds in a readable unit: `40 s`, `3 min`, `1.5 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _disk_bytes(loader: Loader, model: Model) -> int | None:
    """Returns the size on disk of a graph with its weights, or of a model's checkpoint."""
    files = list(model.source.files)
    if loader.file is not None and loader.file.is_file():
        content = onnx.load(loader.file, load_external_data=False)
        files = [loader.file, *(loader.file.parent / name for name in external_files(content))]
    return sum(file.stat().st_size for file in files if file.is_file()) or None
