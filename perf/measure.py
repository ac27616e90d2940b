"""Functions that the benchmarks share: timing in turn, saved results, and cells of tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from moexport.bench.data import LabelledData
from moexport.bench.measure.latency import group_batches, measure_group
from moexport.bench.measure.roofline import (
    FP32_BYTES,
    NUMBER_BYTES,
    Microbenchmarks,
    Rates,
    arithmetic_of,
    limit_ms,
    products_of,
    work_of,
)
from moexport.bench.plan import Candidate, Case, GraphSource, TimingGroup
from moexport.bench.results import ModelInfo, Results, Row
from moexport.bench.runners.base import Loader, Runner
from moexport.bench.runners.models import TorchLoader, loaders
from moexport.common import timing
from moexport.common.console import Console
from moexport.common.environment import environment, usable_cores
from moexport.exporter.model import Model

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opened(Loader):
    """A loader of a runner that is already open, so that several measurements can use it."""

    runner: Runner

    def __call__(self) -> Runner:
        """Returns the runner."""
        return self.runner


def opened(*graphs: GraphSource) -> tuple[GraphSource, ...]:
    """Returns graphs that are opened once for all batch sizes."""
    return tuple(replace(graph, loader=Opened(graph.loader())) for graph in graphs)


def in_pytorch(model: Model, engine: str, name: str, batches: Sequence[int] = ()) -> GraphSource:
    """Returns another form of a model in PyTorch, to measure with the model's graphs."""
    n = max(layer.spec.experts for layer in model.layers.values())
    loader = TorchLoader(Case(name, engine, n, n), tuple(batches), False, lambda: model)
    return GraphSource(n, name, loader, engine=engine)


def timed(
    candidate: Candidate,
    data: LabelledData,
    protocol: timing.Protocol,
    machine: Microbenchmarks,
    names: Mapping[str, str],
) -> tuple[list[Row], Rates]:
    """Returns a row per case of a candidate, timed in turn on all inputs as one batch.

    Also returns the rates of the machine, which are measured in the same rounds and determine the
    limits. `names` has the names of PyTorch's rows, by engine.
    """
    batch = len(data)
    group = TimingGroup(tuple(candidate.cases), batch, protocol)
    runners = {case: load() for case, load in loaders(candidate, (batch,)).items()}
    with Console() as console:
        batches = group_batches(group, data)
        found, _ = measure_group(
            group, runners, batches, benchmarks=machine.calls, progress=console
        )
        for label, error in found.failures.items():
            console.step(f"failed: {label}: {error}")
    rates, work = machine.rates(found.latencies), work_of(candidate.model, data.inputs)
    layers = candidate.model.layers
    rows = []
    for case, graph in candidate.cases.items():
        latency = found.latencies.get(case.label)
        if latency is None:
            continue
        parts = work.parts(
            dict.fromkeys(layers, case.k),
            batch,
            int8=layers if case.precision == "int8" else (),
            int8_backbone=products_of(graph.integer_linears if graph else (), {"batch": 1}),
            number_bytes=NUMBER_BYTES.get(case.precision, FP32_BYTES),
            arithmetic=arithmetic_of(case),
        )
        identity = asdict(case) | {"lowering": case.lowering or names[case.engine]}
        rows.append(
            Row(
                **identity,
                batch=batch,
                latency_ms=latency,
                limit_ms=limit_ms(parts, rates),
                throughput=1000 * batch / latency.median,
            )
        )
    return rows, rates


def in_own_process(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a function in its own process, which then frees its memory; returns the result."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
        return process.submit(work, *args, **kwargs).result()


def threads() -> int:
    """Returns the number of threads for every engine, and sets it in PyTorch."""
    count = usable_cores()
    torch.set_num_threads(count)
    return count


def results(
    command: str,
    models: Iterable[ModelInfo],
    rows: Iterable[Row],
    protocol: timing.Protocol,
    rates: Sequence[Rates],
    **facts: object,
) -> Results:
    """Returns measured rows as results, with the medians of the machine's rates."""
    names = [field.name for field in fields(Rates)]
    measured = {name: [getattr(rate, name) for rate in rates] for name in names}
    typical = {
        name: float(np.median(values))
        for name, values in measured.items()
        if all(isinstance(value, float) for value in values)
    }
    return Results(
        tuple(models),
        tuple(rows),
        environment() | {"threads": usable_cores()},
        {"rounds": protocol.rounds, "round_s": protocol.round_s} | facts | typical,
        command=f"python -m perf {command}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def random_weights(model: Model, name: str) -> ModelInfo:
    """Returns the entry of a model in the results."""
    parameters = sum(p.numel() for p in model.module.parameters())
    return ModelInfo(name, model.family, "random weights", parameters)


def keep(file: Path, command: str, **figures: object) -> None:
    """Writes the figures of a command and the machine that measured them."""
    body = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m perf {command}",
        "environment": environment(),
        **figures,
    }
    file.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def kept(file: Path) -> Any:
    """Reads a results file of a benchmark."""
    return json.loads(file.read_text(encoding="utf-8"))


def measured_on(body: Any) -> str:
    """Returns the day and the machine of saved results: processor, cores and memory."""
    facts = body["environment"]
    return (
        f"{body['created'][:10]}: {facts['cpu']['model']}, {facts['cpu']['cores']} cores, "
        f"{facts['memory_bytes'] / 1e9:.0f} GB of memory"
    )


def peak_bytes() -> int:
    """Returns the largest resident set of this process so far.

    This does not use getrusage, whose peak includes the parent process's.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    return 1024 * int(peak[1])


def ms(value: float | None) -> str:
    """Returns milliseconds as a cell."""
    return "–" if value is None else f"{value:.2f}"


def times(slower: float | None, faster: float | None) -> str:
    """Returns the ratio of two times as a cell."""
    return "–" if slower is None or faster is None else f"{slower / faster:.1f}×"
