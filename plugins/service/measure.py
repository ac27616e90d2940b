"""Runs the cases of a benchmark in MLPerf's scenarios, each with the fastest layout."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ...bench.data import Labelled
from ...bench.engines import TRITON
from ...bench.journal import Journal
from ...bench.plan import Candidate, Case
from ...bench.request import BenchRequest
from ...bench.runners.base import GraphLoader, Loader, Runner, first_of
from ...bench.runners.models import loaders
from ...common.console import Progress, Silent
from ...common.environment import memory_bytes, usable_cores
from ...common.threads import with_threads
from ...common.writing import scratch_folder
from ...data.batches import Array
from ...errors import UsageError, one_line
from ...exporter.inputs import Inputs
from .findings import SERVICE, Layout, OfferedRun, Service, ServiceFindings
from .loadgen import Judgement, Scenario, Traffic, run_loadgen
from .queue import Queue, Submits, requests_per_second
from .settings import ServiceSettings, settings_of
from .triton import TritonService

MAX_LIBRARY = 1024
# searches and runs at other rates are shorter than the final run by this factor
SHORTENING = 5
# searches start at these shares of the rate from a full queue, until one meets the bound
SEARCH_STARTS = (1 / 4, 1 / 16, 1 / 64, 1 / 256)
MAX_RESTARTS, RESTART_FACTOR = 4, 1.25  # for searches above the rate found so far
# these shares of the found rate are offered in turn until one meets the bound
FINAL_SHARES = (1.0, 0.95, 0.9, 0.8, 0.6, 0.3)
OTHER_SHARES = (0.25, 0.5, 0.75, 1.1)  # shares of the found rate that are also measured
RATE_MARGIN = 1.2  # a run that was too short is repeated at its rate times this
SERVER_RUNS = 4  # estimated time for server, in durations: the search and the other runs
MAX_WARMED_UP = 32  # if no batch is larger than this, every size is warmed up


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a model, which maps the indices of samples to outputs.

    `runners` has a runner for batches up to each size. Batches are padded to the size `only` if the
    model has no other size.
    """

    runners: Mapping[int, Runner]
    samples: Inputs
    only: int | None

    def __call__(self, numbers: Sequence[int]) -> Array:
        """Computes a batch."""
        count = len(numbers)
        rows = np.array([*numbers, *[numbers[-1]] * ((self.only or count) - count)])
        x: Inputs = (
            self.samples[rows]
            if isinstance(self.samples, np.ndarray)
            else {name: array[rows] for name, array in self.samples.items()}
        )
        sizes = [size for size in self.runners if size >= count]
        return self.runners[min(sizes) if sizes else max(self.runners)].infer(x)[:count]


class Instances:
    """Opens the instances of a case; `by_size` has a loader for batches up to each size.

    All instances share one PyTorch module, since it keeps no state between calls, even if compiled.
    """

    def __init__(
        self, by_size: Mapping[int, Loader], samples: Inputs, max_batch: int, only: int | None
    ) -> None:
        self._by_size, self._samples, self._only = by_size, samples, only
        self._shared: dict[int, Runner] = {}
        self.max_batch = max_batch

    @contextmanager
    def instances(self, layout: Layout) -> Iterator[list[Instance]]:
        """Yields warmed-up instances, and closes them at the end."""
        with ExitStack() as stack, with_threads(layout.threads):
            instances = [
                Instance(
                    runners={
                        size: self._runner(size, layout.threads, stack) for size in self._by_size
                    },
                    samples=self._samples,
                    only=self._only,
                )
                for _ in range(layout.instances)
            ]
            largest = self.max_batch
            sizes = range(1, largest + 1) if largest <= MAX_WARMED_UP else (1, largest)
            with ThreadPoolExecutor(len(instances)) as pool:
                for size in sizes:
                    list(pool.map(lambda instance, size=size: instance([0] * size), instances))
            yield instances

    def _runner(self, size: int, threads: int, stack: ExitStack) -> Runner:
        loader = self._by_size[size]
        if isinstance(loader, GraphLoader):
            graph = replace(loader.graph, threads=threads)
            opened: Runner = replace(loader, graph=graph).deployed()
            return stack.enter_context(opened)
        if size not in self._shared:
            self._shared[size] = loader.deployed()
        return self._shared[size]

    def try_layouts(self, layouts: Sequence[tuple[int, int]]) -> tuple[Layout, ...]:
        """Returns the layouts with their measured rates from a full queue."""
        measured = []
        for count, threads in layouts:
            layout = Layout(instances=count, threads=threads, per_s=0.0)
            capacity = 2 * self.max_batch * count
            with self.queue(layout, capacity, 0.0) as queue:
                measured.append(replace(layout, per_s=requests_per_second(queue)))
        return tuple(measured)

    @contextmanager
    def queue(self, layout: Layout, capacity: int, max_delay_s: float) -> Iterator[Submits[int]]:
        """Yields a queue of the given capacity, served by the instances of a layout."""
        with (
            self.instances(layout) as opened,
            Queue[int, Any](
                opened, max_batch=self.max_batch, capacity=capacity, max_delay_s=max_delay_s
            ) as queue,
        ):
            yield queue

    def close(self) -> None:
        """Closes the shared runners."""
        for runner in self._shared.values():
            runner.close()


def layouts_of(cores: int, max_instances: int) -> list[tuple[int, int]]:
    """Returns layouts that use all cores: 1 × all, 2 × half, … up to `max_instances`."""
    counts = {1, *(n for n in range(2, cores + 1) if cores % n == 0 and n & (n - 1) == 0), cores}
    return [(n, cores // n) for n in sorted(counts) if n <= max(1, max_instances)]


@dataclass
class ServiceMeasurement:
    """Runs the cases of candidates as services, except scenarios that the journal has as finished.

    LoadGen draws from `samples` and writes its logs next to the results.
    """

    request: BenchRequest
    settings: ServiceSettings
    samples: Inputs
    services: list[Service] = field(default_factory=list)

    @property
    def findings(self) -> ServiceFindings:
        return ServiceFindings(
            services=tuple(self.services),
            duration_s=self.settings.duration_s,
            max_delay_ms=1e3 * self.settings.max_delay_s,
            library=len(first_of(self.samples)),
            price_per_hour=self.settings.price_per_hour,
        )

    def serve(self, candidate: Candidate, failures: Mapping[Case, str], journal: Journal) -> None:
        """Measures each case in each scenario, except those that failed before."""
        progress = self.request.progress or Silent()
        measurement = _CandidateMeasurement(
            candidate=candidate,
            request=self.request,
            settings=self.settings,
            samples=self.samples,
            threads=torch.get_num_threads(),
            journal=journal,
            progress=progress,
        )
        # Code compiled for fixed sizes must not pad a single request to a full batch.
        sizes = {*self.request.batches} | ({1} if candidate.only_batch is None else set())
        self.services += measurement.services(loaders(candidate, sorted(sizes)), failures)


def server_case(candidate: Candidate) -> Case:
    """Returns the case of the same bundle on a Triton server.

    Raises `UsageError` unless exactly one bundle is measured.
    """
    graphs = [case for case, graph in candidate.cases.items() if graph is not None]
    if len({(case.k, case.precision) for case in graphs}) != 1:
        raise UsageError(
            "--triton needs exactly one bundle with one k: the bundle that the server runs",
            hint="moexport bench BUNDLE --data DATA --scenario server --triton ADDRESS/MODEL",
        )
    return replace(graphs[0], engine=TRITON, provider="cpu")


def service_of(
    request: BenchRequest, data: Labelled, candidates: Sequence[Candidate]
) -> ServiceMeasurement | None:
    """Returns the measurement of services, or None if no scenario is requested.

    Raises the errors of `settings_of`, `UsageError` for a library larger than the data, and
    `UsageError` or `EngineError` if Triton cannot serve the candidates.
    """
    settings = settings_of(request)
    if settings is None:
        return None
    head = data.head(settings.library or MAX_LIBRARY)
    if settings.library is not None and len(head) < settings.library:
        raise UsageError(
            f"--library {settings.library}: the data has only {len(head)} inputs",
            hint=f"use --library {len(head)}, or give more data",
        )
    samples = head.batch(0, len(head))
    if settings.triton is not None:
        for candidate in candidates:
            server_case(candidate)
            TritonService(settings.triton, samples, 1).contact()
    return ServiceMeasurement(request, settings, samples)


@dataclass(frozen=True, slots=True)
class _CandidateMeasurement:
    """Measures the services of a candidate; `threads` is the number used for its latencies."""

    candidate: Candidate
    request: BenchRequest
    settings: ServiceSettings
    samples: Inputs
    threads: int
    journal: Journal
    progress: Progress

    def services(
        self, all_loaders: Mapping[Case, Loader], failures: Mapping[Case, str]
    ) -> Iterator[Service]:
        """Yields each case in each scenario, measured or from the journal."""
        grouped = self._grouped(failures)
        runs = sum(SERVER_RUNS if name == "server" else 1 for name in self.settings.scenarios)
        seconds = len(grouped) * runs * self.settings.duration_s
        self.progress.step(f"in service: {len(grouped)} cases, at least {seconds:.0f} s")
        for case, by_size in grouped.items():
            loaders = {size: all_loaders[case] for size, case in by_size.items()}
            keys = {"model": case.model, "label": f"{case.label} {case.scope}"}
            done = {
                piece["scenario"]: msgspec.convert(piece["service"], Service)
                for piece in self.journal.pieces(SERVICE, **keys)
            }
            if {*self.settings.scenarios} <= done.keys():
                yield from (done[scenario] for scenario in self.settings.scenarios)
                continue
            self.progress.step(f"in service: {case.label}")
            with closing(self._system(case, loaders)) as served:
                try:
                    layouts = served.try_layouts(self._layouts(case))
                except Exception as error:  # noqa: BLE001  the service reports it
                    for scenario in self.settings.scenarios:
                        yield self._service(case, scenario, reason=one_line(error))
                    continue
                for scenario in self.settings.scenarios:
                    service = done.get(scenario) or self._scenario(case, scenario, served, layouts)
                    if scenario not in done:
                        self.journal.add(
                            SERVICE, **keys, scenario=scenario, service=asdict(service)
                        )
                    yield service

    def _system(self, case: Case, by_size: Mapping[int, Loader]) -> Instances | TritonService:
        """Returns the system of a case: instances in this process, or a server."""
        if case.engine != TRITON:
            return Instances(by_size, self.samples, self._max_batch, self.candidate.only_batch)
        assert self.settings.triton is not None, "the case needs a server"
        return TritonService(self.settings.triton, self.samples, 4 * self._max_batch)

    @property
    def _max_batch(self) -> int:
        return self.candidate.only_batch or max(self.request.batches)

    def _grouped(self, failures: Mapping[Case, str]) -> dict[Case, dict[int, Case]]:
        """Groups cases that differ only in batch size, since `auto` may choose a graph per size."""
        sizes = {*self.request.batches}
        grouped: dict[Case, dict[int, Case]] = {}
        split: dict[tuple[Any, ...], dict[int, Case]] = {}
        for case, graph in self.candidate.cases.items():
            if case in failures:
                continue
            if graph is None or graph.batches is None or sizes <= graph.batches:
                grouped[case] = {self._max_batch: case}
            else:
                key = (case.engine, case.provider, case.precision, case.k, case.scope, case.bundle)
                split.setdefault(key, {}).update(dict.fromkeys(graph.batches, case))
        for by_size in split.values():
            names = dict.fromkeys(by_size[size].lowering or "" for size in sorted(by_size))
            grouped[replace(by_size[max(by_size)], lowering=", ".join(names))] = by_size
        if self.settings.triton is not None:
            grouped[server_case(self.candidate)] = {}
        return grouped

    def _layouts(self, case: Case) -> list[tuple[int, int]]:
        """Returns the layouts to try for a case.

        A GPU has one instance; on a CPU, instances may use at most half of the memory.
        """
        if case.provider != "cpu":
            return [(1, self.threads)]
        copies = memory_bytes() / 2 / max(1, 2 * self.candidate.weights_bytes)
        return layouts_of(usable_cores(), int(copies))

    def _scenario(
        self,
        case: Case,
        scenario: Scenario,
        served: Instances | TritonService,
        layouts: tuple[Layout, ...],
    ) -> Service:
        """Returns the result of a case in a scenario; a failure is its reason."""
        fastest = max(layouts, key=lambda layout: layout.per_s)
        # Single queries run on one instance, with the same threads as the latencies.
        used = (
            Layout(instances=1, threads=self.threads, per_s=fastest.per_s)
            if scenario == "single-stream"
            else fastest
        )
        bound_s = self.settings.bound_s or 0.0 if scenario == "server" else math.inf
        capacity = 2 * self._max_batch * used.instances
        if scenario == "server":  # requests that wait longer than twice the bound are useless
            capacity = max(capacity, math.ceil(2 * bound_s * used.per_s))
        out = self.request.folder
        name = f"{case.runs_in} k{case.k} {scenario}".replace(" ", "-")
        logs = f"{SERVICE}/{_file_name(case.model)}/{_file_name(name)}"
        opened_folder: Any = nullcontext(out) if out else scratch_folder(SERVICE)
        with opened_folder as folder:
            try:
                with served.queue(used, capacity, self.settings.max_delay_s) as queue:
                    run = _Runs(queue, len(first_of(self.samples)), self.settings, folder / logs)
                    reached = run.measure(scenario, used.per_s, bound_s)
            except Exception as error:  # noqa: BLE001  the service reports it
                reached = {"reason": one_line(error)}
        service = self._service(
            case,
            scenario,
            **{"layouts": layouts, "instances": used.instances, "threads": used.threads},
            logs=logs if out else "",
            **reached,
        )
        self.progress.step(f"in service: {case.label}: {service.reached}")
        return service

    def _service(self, case: Case, scenario: Scenario, **reached: Any) -> Service:
        serves = scenario == "server"
        bound = self.settings.bound_s
        identity = {
            name: getattr(case, name)
            for name in (
                *("model", "engine", "provider", "precision", "lowering", "k", "experts"),
                *("bundle", "apart"),
            )
        }
        facts = {
            "scenario": scenario,
            "max_batch": self._max_batch,
            "instances": 1,
            "threads": self.threads,
            "bound_ms": 1e3 * bound if serves and bound is not None else None,
            "fixed_rate": self.settings.rate if serves else None,
            "tokens": first_of(self.samples).shape[1] if self.candidate.phases else None,
        }
        return Service(**(identity | facts | reached))


class _Runs:
    """The LoadGen runs of a scenario."""

    def __init__(
        self, queue: Submits[int], library: int, settings: ServiceSettings, logs: Path
    ) -> None:
        self._queue, self._library, self._settings, self._logs = queue, library, settings, logs

    def measure(self, scenario: Scenario, per_s: float, bound_s: float) -> dict[str, Any]:
        """Returns the measured fields; the full queue had `per_s` samples per second."""
        load = Traffic(
            scenario=scenario, duration_s=self._settings.duration_s, rate=per_s, bound_s=bound_s
        )
        if scenario != "server":
            run = self._run(load, self._logs)
            for _ in range(2):
                if run.long_enough or run.rate <= load.rate:
                    break
                # The run was faster than expected, so it had too few queries for the duration.
                load = replace(load, rate=RATE_MARGIN * run.rate)
                run = self._run(load, self._logs)
            return _run_fields(run)
        rate = self._settings.rate
        if rate is not None:
            run = self._run(replace(load, rate=rate), self._logs)
            return _run_fields(run) | {"offered": (_offered(rate, run),)}
        return self._searched(load)

    def _searched(self, load: Traffic) -> dict[str, Any]:
        """Finds the highest rate within the bound by LoadGen's search, then measures that rate."""
        short = replace(load, duration_s=load.duration_s / SHORTENING)
        tried: list[Judgement] = []
        for share in SEARCH_STARTS:
            start = replace(short, rate=share * load.rate)
            tried.append(self._run(start, self._logs / "search", search=True))
            if tried[-1].met_bound:
                break
        else:
            return _bound_missed(min(run.p99_ms for run in tried), load)
        peak = tried[-1].peak or tried[-1].rate
        # A single disturbed run can end a search. Therefore, while the bound is met, another search
        # starts above the rate found so far.
        for _ in range(MAX_RESTARTS):
            above = replace(short, rate=RESTART_FACTOR * peak)
            restarted = self._run(above, self._logs / "search-further", search=True)
            if not restarted.met_bound:
                break
            peak = restarted.peak or above.rate
        for share in FINAL_SHARES:
            rate = share * peak
            run = self._run(replace(load, rate=rate), self._logs)
            if run.met_bound:
                break
            tried.append(run)
        else:
            return _bound_missed(min(run.p99_ms for run in tried if not run.met_bound), load)
        runs = [_offered(rate, run)]
        for share in OTHER_SHARES:
            other = self._run(
                replace(short, rate=share * rate), self._logs / f"at-{100 * share:.0f}-percent"
            )
            runs.append(_offered(share * rate, other))
        return _run_fields(run) | {"offered": tuple(sorted(runs, key=lambda run: run.offered))}

    def _run(self, load: Traffic, logs: Path, *, search: bool = False) -> Judgement:
        return run_loadgen(self._queue, self._library, load, logs, search=search)


def _run_fields(run: Judgement) -> dict[str, Any]:
    names = ("valid", "reason", "rate", "p50_ms", "p90_ms", "p99_ms")
    return {name: getattr(run, name) for name in names}


def _bound_missed(nearest_ms: float, load: Traffic) -> dict[str, Any]:
    bound = f"{1e3 * load.bound_s:g} ms"
    return {
        "reason": f"no rate meets p99 ≤ {bound}: the nearest p99 is {nearest_ms:.3g} ms",
        "nearest_ms": nearest_ms,
    }


def _offered(rate: float, run: Judgement) -> OfferedRun:
    names = ("rate", "p50_ms", "p90_ms", "p99_ms", "refused")
    return OfferedRun(offered=rate, **{name: getattr(run, name) for name in names})


def _file_name(text: str) -> str:
    """Turns a text into a valid folder name."""
    return re.sub(r"[^\w.=-]+", "-", text)
