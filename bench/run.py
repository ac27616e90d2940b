"""The benchmark: every case's accuracy, routing and parity, then its latency in turn.

`plan` says what will be measured, `Measurement` measures the pieces of one candidate (quality,
timing, memory, parts) and `bench` writes what they found. With a folder for the results, every
piece that is complete is kept there, and a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import onnx
import torch

from ..common import timing
from ..common.console import Progress, Silent
from ..common.environment import energy_counters, environment, memory_bytes
from ..common.files import sha256
from ..common.threads import Threads, fastest_threads, with_threads
from ..common.writing import held
from ..errors import UsageError
from ..exporter.bundle.bundle import Bundle
from ..exporter.bundle.manifest import external_files, is_bundle
from ..exporter.checkpoints.load import load_as
from ..exporter.inputs import Inputs, check_array
from ..exporter.model import Model, check_one_input
from ..graphs.names import K_INPUT
from .analyses.experts import Wanted, parse_analyses, studied
from .analyses.subgroups import compared
from .data import Labelled, LabelledData, Streamed, fingerprint, labelled, load_groups
from .engines import PYTORCH_COMPILE, Serves
from .evaluate import EvaluationState, evaluate, wrong
from .journal import FILE, Journal, unfinished
from .language import is_language_model, phase_inputs, phases_of, prompt_of, token_windows
from .measure.latency import Scheduled, group_batches, measure_group, parts_of
from .measure.memory import PeakMemory, measure_memories, worker_count
from .measure.roofline import Limit, Limits, Rates, not_held
from .plan import Candidate, Case, TimingGroup, describe, plan, select
from .report.compare import compare
from .report.page import write_all
from .request import ALL, BenchRequest
from .results import Absent, ModelInfo, PartTime, Results, Row
from .runners.base import Loader, Runner
from .runners.candidates import batch_sizes, candidates_of, check_exported, with_sources
from .runners.models import loaders
from .runners.pytorch import CUDA, PyTorch, outputs_of, untouched, without_tf32
from .service.findings import as_analyses
from .service.measure import service_of, settings_of

CALIBRATION_INPUTS = 256
"""INT8 takes its ranges from this many of the benchmark's inputs; their labels play no part."""

TRIAL_CALLS = 3  # calls of which the fastest stands for the others: the first one allocates
UNKNOWN_SAMPLES = 1000  # taken for an estimate where a feed does not tell how many samples it has
COMPILE_S = 30.0  # what compiling a small network for one batch size takes
MACHINE_PROBES = 5  # cases of each group that measure the machine's own rates (`limits`)
PHASE_INPUTS = 4  # distinct prompts of a language model
PROCESS_S = 4.0  # what starting a process and loading a runtime takes


def bench(
    candidates: Sequence[Candidate],
    data: Labelled,
    request: BenchRequest,
    *,
    absent: Sequence[Absent] = (),
    analyses: Mapping[str, Any] | None = None,
    only: int | None = None,
    known: Mapping[str, EvaluationState] | None = None,
    calibration: str | None = None,
    threads: Threads | None = None,
) -> Results:
    """Returns every row of a benchmark, whose engines, k and precisions are those of `candidates`.

    With `request.out` it writes results.json, report and figures there. A case that cannot be
    opened, evaluated or timed becomes a row with its error. `absent` names the engines that are not
    measured, and `analyses` is what else was found, for the results. `only` one of the batch sizes
    is timed where that is said, and qualities that are `known` are not taken again, by the names of
    candidates. `calibration` names the file that INT8 took its ranges from, for the report, and
    `threads` tells how the number of threads was found. Raises UsageError and FeedError, before
    anything is opened, for what cannot be measured at all.
    """
    progress, out = request.progress or Silent(), request.folder
    groups = plan(candidates, request)
    service = service_of(request, data, candidates)
    head = data.head(max(request.batches) * request.protocol.inputs)
    if only is not None:
        groups = tuple(group for group in groups if group.batch == only)
        request = replace(request, batch=(only,))
    for candidate in candidates:
        check_array(head.inputs, candidate.model.input, f"{candidate.name}: ")
    on_gpu = any(case.provider == CUDA for group in groups for case in group.cases)
    with ExitStack() as stack:
        # A second benchmark in the same folder is refused at once.
        stack.enter_context(held(out))
        stack.enter_context(with_threads(request.threads))
        stack.enter_context(without_tf32() if on_gpu else nullcontext())
        facts = environment() | {"threads": torch.get_num_threads()}
        takes = expected_time(candidates, groups, head, data.samples, request)
        progress.step(describe(groups, takes))
        models = tuple(map(model_info, candidates))
        same = _same_run(candidates, groups, data, request, facts, models)
        journal = Journal(None if out is None else out / FILE, same)
        if journal.summary:
            progress.step(journal.summary)
        rows: list[Row] = []
        protocol = _protocol(request, data, calibration, threads)
        if threads is not None and not journal.pieces("threads"):
            journal.add("threads", of=candidates[0].model.source.path, **asdict(threads))
        for candidate in candidates:
            one = Measurement(
                candidate=candidate,
                groups=groups,
                data=data,
                head=head,
                request=request,
                journal=journal,
                progress=progress,
                known=(known or {}).get(candidate.name),
            )
            rows += one.rows()
            if service is not None:
                service.serve(candidate, one.failures, journal)
            protocol["samples"] = max(protocol["samples"], one.seen)
            for name, entries in one.beside.items():
                protocol[name] = [*protocol.get(name, ()), *entries]
        results = Results(
            models=models,
            rows=tuple(rows),
            environment=facts,
            protocol=protocol,
            command=request.command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            absent=tuple(absent),
            analyses=dict(analyses or {})
            | (as_analyses(service.findings) if service is not None else {}),
        )
        _finish(results, request, journal)
        return results


def _finish(results: Results, request: BenchRequest, journal: Journal) -> None:
    """Writes results with every view of them, where that is asked, and ends the journal."""
    if results.disturbance and request.progress is not None:
        request.progress.step(results.disturbance)
    if request.folder is not None:
        before = request.before
        comparison = compare(before, results) if isinstance(before, Results) else None
        write_all(results, request.folder, comparison)
        journal.remove()


def _same_run(
    candidates: Sequence[Candidate],
    groups: Sequence[TimingGroup],
    data: Labelled,
    request: BenchRequest,
    facts: Mapping[str, Any],
    models: Sequence[ModelInfo],
) -> dict[str, Any]:
    """What must be as it was for a run to take the pieces that an interrupted one has kept."""
    return {
        "environment": facts,
        "models": [asdict(model) for model in models],
        "edits": [str(candidate.model.edits) for candidate in candidates],
        "rows": [asdict(c) for group in groups for c in group.cases],
        "graphs": [_file_hash(g.loader) for c in candidates for g in c.graphs],
        "data": {
            "source": str(request.data) if isinstance(request.data, str | Path) else None,
            "sha256": data.fingerprint,
        },
        "settings": request.measured,
    }


def _protocol(
    request: BenchRequest, data: Labelled, calibration: str | None, threads: Threads | None
) -> dict[str, Any]:
    """How rows are measured, for the results; the candidates add how many samples they saw."""
    ranges = {"calibration": calibration} if calibration else {}
    counted = {} if threads is None else {"threads": threads.sentence}
    return asdict(request.protocol) | {
        "samples": 0,
        "data": {
            "source": str(request.data) if isinstance(request.data, str | Path) else None,
            "sha256": data.fingerprint,
        },
        "labelled": data.labelled,
        "no_energy": energy_counters()[1],
        "batches": list(request.batches),
        **ranges,
        **counted,
    }


def opened(
    sources: Sequence[Model | Bundle | str | Path],
    request: BenchRequest,
) -> list[Model | Bundle]:
    """Returns the models and bundles that are named."""
    data, pixels = request.data, request.pixels
    # A folder of images by class can be read once the model has said its size, not before.
    place = Path(data) if isinstance(data, str | Path) else None
    images = pixels is not None or (
        place is not None and place.is_dir() and not any(place.glob("*.npy"))
    )
    example = None if images else place

    def one(source: Model | Bundle | str | Path) -> Model | Bundle:
        if isinstance(source, Model | Bundle):
            return source
        if is_bundle(source):
            return Bundle.open(source)
        if request.progress is not None:
            request.progress.step(f"loading {source}")
        return load_as(source, replace(request, example=example))

    return [one(source) for source in sources]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Candidates and their data, the benchmark of them, the engines that are not measured."""

    candidates: list[Candidate]
    data: Labelled
    request: BenchRequest
    absent: tuple[Absent, ...]
    threads: Threads


def sweep(
    listed: Sequence[Model | Bundle],
    request: BenchRequest,
    *,
    only: int | None = None,
    known: Mapping[str, EvaluationState] | None = None,
) -> Results:
    """Returns every row of models and bundles, measured as asked; writes them where that is asked.

    `only` and `known` are as in `bench`. Raises `UsageError` and `FeedError`, before anything is
    measured, for what cannot be meant.
    """
    watcher = request.progress or Silent()
    analyses_wanted(request)
    settings_of(request)
    with prepared(listed, request) as plans:
        return bench(
            plans.candidates,
            plans.data,
            plans.request,
            absent=plans.absent,
            analyses=_analyses(plans.candidates, plans.data, request, watcher),
            only=only,
            known=known,
            threads=plans.threads,
        )


def analyses_wanted(request: BenchRequest) -> Wanted | None:
    """Returns which analyses of experts are asked for; raises `UsageError` for what are none."""
    most = request.max_subsets
    wanted = (
        Wanted(parse_analyses(request.analysis), max_subsets=most) if request.analysis else None
    )
    if most is not None and not (wanted and "subsets" in wanted.names):
        raise UsageError(
            f"--max-subsets {most}: no subsets are tried", hint="add --analysis subsets"
        )
    return wanted


def analysed(listed: Sequence[Model | Bundle], request: BenchRequest) -> dict[str, Any]:
    """Returns what is asked about experts and subgroups; measures nothing else."""
    with prepared(listed, request) as plans:
        return _analyses(plans.candidates, plans.data, request, request.progress or Silent())


@contextmanager
def prepared(listed: Sequence[Model | Bundle], wanted: BenchRequest) -> Iterator[Prepared]:
    """Yields what a benchmark measures, exported, and how; raises what `sweep` raises."""
    watcher = wanted.progress or Silent()
    if wanted.analysis:
        for item in listed:
            if isinstance(item, Model):
                check_one_input(item, "--analysis")
    selection = select(wanted.engines, [_served(item) for item in listed])
    request = replace(wanted, engine=selection.names, batch=batch_sizes(listed, wanted))
    check_exported(listed, request)
    listed = with_sources(listed)
    first = next(item for item in listed if isinstance(item, Model))
    data = data_of(first, request, fixed_sizes(first, listed))
    head = data.head(CALIBRATION_INPUTS if {"int8", "fp8"} & {*request.precisions} else 1)
    absent = [engine for engine in selection.absent if engine.engine in wanted.engines]
    if absent and wanted.engine == ALL:
        names = ", ".join(engine.engine for engine in absent)
        watcher.step(f"not measured, the report says why: {names}")
    else:
        for engine in absent:
            watcher.step(f"not measured: {engine.engine}: {engine.reason}")
    sizes = request.batches
    threads = threads_for(
        [first], data, sizes, count=wanted.threads, work=wanted.folder, progress=watcher
    )
    # The same threads for every engine.
    request = replace(request, threads=threads.count)
    with candidates_of(listed, request, watcher, head.inputs) as candidates:
        phased = [in_phases(candidate, data, wanted.tokens) for candidate in candidates]
        yield Prepared(
            candidates=phased,
            data=data,
            request=request,
            absent=selection.absent,
            threads=threads,
        )


def threads_for(
    models: Sequence[Model],
    data: Labelled,
    batches: Sequence[int],
    *,
    count: int | None = None,
    work: Path | None = None,
    progress: Progress | None = None,
) -> Threads:
    """Returns how many threads every engine gets.

    As many as are asked for, else what an unfinished run in the folder `work` had, else those with
    which the untouched models are fastest. Raises FeedError where one cannot run the data.
    """
    if count is not None:
        return Threads(count)
    begun = unfinished(work, "threads", of=models[0].source.path)
    if begun is not None:
        return msgspec.convert(begun, Threads, strict=False)
    head = data.head(max(batches))
    if not len(head):
        return Threads(torch.get_num_threads())
    calls = []
    for model in models:
        base = untouched(model)
        for x in (head.batch(0, size) for size in batches):
            outputs_of(base, x, model.source.path)
            calls.append(base.bound(x))
    fastest = fastest_threads(*calls)
    if fastest.call_ms and progress is not None:
        progress.step(fastest.sentence)
    return fastest


def _analyses(
    candidates: Sequence[Candidate],
    data: Labelled,
    request: BenchRequest,
    watcher: Progress,
) -> dict[str, Any]:
    """What was asked about experts and subgroups."""
    wanted = analyses_wanted(request)
    analyses = studied(candidates, data, wanted, request.samples, watcher) if wanted else {}
    if request.group_by is None:
        return analyses
    if not isinstance(request.data, str | Path):
        raise UsageError(
            f"--group-by {request.group_by}: names an array of a file, and the data are none",
            hint="save inputs, labels and subgroups in an .npz",
        )
    held = data.head(sys.maxsize)
    groups = load_groups(Path(request.data), request.group_by, len(held))
    seen = held.head(len(held) if request.samples is None else request.samples)
    return analyses | compared(candidates, seen, groups[: len(seen)], request.group_by, watcher)


def _served(item: Model | Bundle) -> Serves:
    """Which engines of `engines.KINDS` a model is for, beside those for all."""
    ports = item.inputs if isinstance(item, Model) else item.manifest.inputs
    return "transformers" if len([p for p in ports if p.name != K_INPUT]) > 1 else "one-input"


def fixed_sizes(model: Model, listed: Sequence[Model | Bundle]) -> dict[str, int]:
    """Returns the sizes of a model's axes that its bundles have as constants, but for the batch."""
    shapes = {
        port.name: port.shape
        for item in listed
        if isinstance(item, Bundle)
        for port in item.manifest.inputs
    }
    return {
        axis: size
        for spec in model.inputs
        for axis, size in zip(spec.shape[1:], shapes.get(spec.name, ())[1:], strict=False)
        if isinstance(axis, str) and isinstance(size, int)
    }


def data_of(model: Model, request: BenchRequest, sizes: Mapping[str, int]) -> Labelled:
    """Returns the inputs that a model is measured on: windows of tokens for a language model.

    Random ones take `sizes` where an axis of the model is dynamic.
    """
    if is_language_model(model) and not isinstance(request.data, LabelledData | Streamed):
        return token_windows(request.data, model, prompt_of(model, request.tokens))
    if request.tokens is not None and not is_language_model(model):
        raise UsageError(
            f"--tokens {request.tokens}: {model.source.path} is no language model of transformers",
            hint="leave --tokens out: other models take inputs as the data have them",
        )
    return labelled(request.data, model, max(request.batches), request.pixels, sizes)


def in_phases(candidate: Candidate, data: Labelled, tokens: int | None) -> Candidate:
    """Returns a candidate with the calls that are timed, where it is a language model."""
    if not is_language_model(candidate.model):
        return candidate
    length = data.head(1).inputs.shape[1]
    prompt = min(prompt_of(candidate.model, tokens), length - 1)
    return replace(candidate, phases=phases_of(candidate.model, prompt))


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
    request: BenchRequest
    journal: Journal
    progress: Progress
    seen: int = 0
    beside: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    qualities: dict[Case, dict[str, Any]] = field(default_factory=dict)
    failures: dict[Case, str] = field(default_factory=dict)
    computed_in: dict[Case, str | None] = field(default_factory=dict)
    known: EvaluationState | None = None

    def rows(self) -> list[Row]:
        """Measures everything; returns the rows, group by group."""
        opening = loaders(self.candidate, self.request.batches)
        limits = None
        if self.request.limits and not self.candidate.phases:
            least = self.candidate.model.batch_of
            limits = Limits(self.candidate, self.head.batch(0, least), opening)
        runners = self._evaluated(opening)
        memories = self._memories({c: opening[c] for c in runners})
        rows: list[Row] = []
        for group in self.groups:
            if group.model != self.candidate.name:
                continue
            if self.request.limits and group.phase is not None:
                base = untouched(self.candidate.model)
                x: Inputs = phase_inputs(group.phase, self.head.batch(0, 1), base)
                limits = Limits(self.candidate, x, opening)
            measured = self._measured(group, runners, limits)
            of_cases = self._limits(group, limits, measured)
            for case in group.cases:
                identity: dict[str, Any] = asdict(case) | {"batch": group.batch}
                if group.phase is not None:
                    identity |= {
                        "phase": group.phase.name,
                        "tokens": group.phase.tokens,
                        "past": group.phase.past,
                    }
                failure = self.failures.get(case) or measured.failures.get(case.label)
                if failure is not None:
                    place = group.title.removeprefix(group.model)
                    self.progress.step(f"failed: {case.label}{place}: {failure}")
                    parity = self.qualities.get(case, {}).get("parity")
                    rows.append(Row(**identity, error=failure, parity=parity))
                    continue
                latency, limit = measured.latencies[case.label], of_cases.get(case, Limit())
                memory = memories.get(case.label)
                if memory is not None and group.batch not in memory.peak_mb:
                    memory = None
                rows.append(
                    Row(
                        **identity,
                        **self.qualities[case],
                        latency_ms=latency,
                        device_ms=measured.device.get(case.label),
                        joules=measured.joules.get(case.label),
                        throughput=_per_second(group.batch, latency),
                        tokens_per_s=None
                        if group.phase is None
                        else _per_second(group.batch * group.phase.tokens, latency),
                        peak_memory_mb=None if memory is None else memory.peak_mb[group.batch],
                        runtime_memory_mb=None if memory is None else memory.runtime_mb,
                        disk_bytes=_disk_bytes(opening[case], self.candidate.model),
                        work=limit.work,
                        limit_ms=limit.limit_ms,
                        no_limit=limit.reason,
                        parts=self._parts(case, group, opening[case]),
                        computed_in=self.computed_in[case],
                    )
                )
        return rows

    def _evaluated(self, opening: Mapping[Case, Loader]) -> dict[Case, Runner | Loader]:
        """Opens and evaluates every case; returns what to time of those that did not fail.

        Where all engines do not fit in half of the memory together, each is opened for its turn
        alone: a graph's weights are mapped and, as far as the runtime re-orders them, copied.
        """
        needed = self.candidate.weights_bytes * (1 + 2 * len(self.candidate.graphs))
        together = needed < memory_bytes() / 2
        runners: dict[Case, Runner] = {}
        for case, loader in opening.items():
            try:
                runner = loader()
            except Exception as error:  # noqa: BLE001  the row says what failed
                self.failures[case] = timing.in_one_line(error)
                continue
            self.computed_in[case] = runner.computed_in
            if together:
                runners[case] = runner
            else:
                with runner:
                    self._evaluate(case.label, {case: runner})
        if together:
            self._evaluate("all", runners)
        timed = runners if together else opening
        return {case: source for case, source in timed.items() if case not in self.failures}

    def _evaluate(self, group: str, runners: Mapping[Case, Runner]) -> None:
        """The quality of cases that are evaluated in one pass over the data."""
        keys = {"model": self.candidate.name, "group": group}
        pieces = self.journal.pieces("quality", **keys)
        state = self.known or evaluate(
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
        self.seen = max(self.seen, state.seen)
        for case in runners:
            if case.label in state.failures:
                self.failures[case] = state.failures[case.label]
            else:
                self.qualities[case] = state.quality(case)
                graph = self.candidate.cases[case]
                bounds = None if graph is None else graph.bounds
                reason = wrong(case, state.sums[case.label], bounds)
                if reason is not None:
                    self.failures[case] = reason

    def _measured(
        self, group: TimingGroup, runners: Mapping[Case, Runner | Loader], limits: Limits | None
    ) -> timing.Measured:
        """Times the cases of a group in turn; what disturbed them goes to `beside`."""
        keys = group.keys
        done = [
            msgspec.convert(piece, timing.Round) for piece in self.journal.pieces("round", **keys)
        ]
        before = Scheduled.now()
        measured, wrapper_ms = measure_group(
            group,
            runners,
            self.inputs(group),
            benchmarks={} if limits is None else limits.benchmarks,
            progress=self.progress,
            done=done,
            keep=lambda piece: self.journal.add("round", **keys, **asdict(piece)),
        )
        # The most of an interrupted group's parts.
        shares = [piece["share"] for piece in self.journal.pieces("waited", **keys)]
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
        self, group: TimingGroup, limits: Limits | None, measured: timing.Measured
    ) -> dict[Case, Limit]:
        """The work of each row of a group and the least time for it; empty where nobody asks."""
        if limits is None:
            return {}
        rates = limits.rates(measured)
        if isinstance(rates, Rates):
            self._tell("rates", group.keys | asdict(rates))
        by_case = {}
        for case, graph in self.candidate.cases.items():
            if case in group.cases:
                limit = limits.of(case, graph, group.batch, rates)
                took = measured.latencies.get(case.label)
                reason = None if took is None else not_held(limit, took.median, rates)
                by_case[case] = limit if reason is None else replace(limit, reason=reason)
        return by_case

    def inputs(self, group: TimingGroup) -> list[Inputs]:
        """The batches that a group takes in turn."""
        return timed_inputs(group, self.candidate, self.head)

    def _tell(self, name: str, entry: dict[str, Any]) -> None:
        self.beside.setdefault(name, []).append(entry)

    def _memories(self, opening: Mapping[Case, Loader]) -> dict[str, PeakMemory]:
        """The memory of each case by its label; what could not be measured is left out."""
        if not self.request.memory:
            return {}
        keys = {"model": self.candidate.name}
        done = {
            # JSON's keys are texts.
            piece["label"]: msgspec.convert(piece, PeakMemory, strict=False)
            for piece in self.journal.pieces("memory", **keys)
        }
        for label, memory in measure_memories(
            {c.label: loader for c, loader in opening.items() if c.label not in done},
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
        """Where the time of a graph goes, if its runtime can tell."""
        if not (self.request.parts and loader.profiles):
            return ()
        keys = {"label": case.label} | group.keys
        done = self.journal.pieces("parts", **keys)
        if done:
            return msgspec.convert(done[-1]["parts"], tuple[PartTime, ...])
        what = f"{case.label}{group.title.removeprefix(group.model)}"
        self.progress.step(f"{what}: where the time goes")
        layers = tuple(self.candidate.model.layers)
        try:
            parts = parts_of(loader, self.inputs(group), layers)
        except Exception as error:  # noqa: BLE001  the row is measured; only its parts are missing
            self.progress.step(f"{what}: no profile: {timing.in_one_line(error)}")
            return ()
        self.journal.add("parts", **keys, parts=[asdict(part) for part in parts])
        return parts


def timed_inputs(group: TimingGroup, candidate: Candidate, head: LabelledData) -> list[Inputs]:
    """Returns the batches that a group takes in turn; of a language model those of its phase."""
    batches = group_batches(group, head)
    if group.phase is None:
        return batches
    base = untouched(candidate.model)
    # Each has a cache of its own, which takes memory.
    return [phase_inputs(group.phase, x, base) for x in batches[:PHASE_INPUTS]]


def _per_second(count: int, latency: timing.Latency) -> float | None:
    return 1e3 * count / latency.median if latency.median > 0 else None


def expected_time(
    candidates: Sequence[Candidate],
    groups: Sequence[TimingGroup],
    head: LabelledData,
    samples: int | None,
    request: BenchRequest,
) -> str:
    """Returns how long it takes if all engines are as fast as PyTorch, by a few calls of that."""
    known = UNKNOWN_SAMPLES if samples is None else samples
    batches = math.ceil(min(known, request.samples or known) / request.evaluation_batch)
    workers = worker_count(max(candidate.weights_bytes for candidate in candidates))
    timed = quality = compiling = memory = 0.0
    for candidate in candidates:
        base, cases = untouched(candidate.model), candidate.cases
        # Every case, the untouched model, and a reference for every k.
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
    """Seconds as a reader wants them: `40 s`, `3 min`, `1.5 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def model_info(candidate: Candidate) -> ModelInfo:
    """Returns what the report says of a model, with the SHA-256 of its files, else its weights."""
    model, source = candidate.model, candidate.model.source
    parameters = sum(p.numel() for p in model.module.parameters())
    weights = (tensor.detach().cpu().numpy() for tensor in model.module.state_dict().values())
    digest = source.sha256() if source.files else fingerprint(*weights)
    kind = next(layer.spec.kind for layer in model.layers.values())
    return ModelInfo(
        name=candidate.name,
        family=model.family,
        source=source.path,
        parameters=parameters,
        sha256=digest,
        kind=kind,
    )


def _disk_bytes(loader: Loader, model: Model) -> int | None:
    """What lies on disk of a graph with its weights, or of a model's checkpoint."""
    files = list(model.source.files)
    if loader.file is not None and loader.file.is_file():
        content = onnx.load(loader.file, load_external_data=False)
        files = [loader.file, *(loader.file.parent / name for name in external_files(content))]
    return sum(file.stat().st_size for file in files if file.is_file()) or None


def _file_hash(loader: Loader) -> str:
    """The hash of a graph's file; empty for one that is not a file."""
    return sha256(loader.file) if loader.file is not None and loader.file.is_file() else ""
