"""Runs the checks that need a GPU, in ten minutes on one card: `make gpu-check`.

First, `perf.gpu_rows` compares graphs of `ort-cuda` with PyTorch's outputs and times. Then, for
each backend, precision and lowering that the machine supports, this module compares the engine's
outputs with the reference in the bundle and times every k, on the GPU and from array to array. ONNX
Runtime's providers follow in the same way, and finally the tests that need a GPU. The most
informative checks come first: FP16 of a small and of a large model before the other precisions. A
fault on the GPU ends a process or makes CUDA unusable in it, so each of these units has its own
process (`--unit`), with its request as JSON on stdin and its answer on the last line of stdout.
Results are written after each unit, including the output of TensorRT's inspector for an engine; the
same command continues an interrupted check. The results list every omitted check with its reason,
such as a missing TensorRT, and every failure with its message and traceback.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import moexport
import numpy as np
from moexport.common.environment import environment
from moexport.common.writing import write_text
from moexport.errors import MissingExtraError, MoexportError
from moexport.exporter.bundle.parity import (
    PARITY_FILE,
    TOLERANCES,
    Parity,
    Reference,
    compare,
    gpu_bounds,
    stored_bounds,
)
from moexport.exporter.session import PROVIDERS, Session, SessionOptions
from moexport.exporter.tensorrt import cache, cuda
from moexport.exporter.tensorrt.backends import BACKENDS, TENSORRT, Backend, Gpu, first_gpu
from moexport.exporter.tensorrt.options import EngineOptions
from moexport.exporter.tensorrt.ort_provider import load_libraries
from moexport.exporter.tensorrt.profiles import parse_profile
from moexport.exporter.tensorrt.records import engines_of
from moexport.exporter.tensorrt.session import EngineSession
from moexport.exporter.tensorrt.verify import engine_parity, without_ties
from moexport.graphs.targets import Precision, Target

from .scale import vit_checkpoint

LOWERINGS = ("gather", "dense", "conditional", "block-grouped")
PRECISIONS: tuple[Precision, ...] = ("fp16", "int8", "bf16", "fp32", "fp8", "int4")
"""The sources of an engine, with the most frequently deployed first."""
PROVIDER_TARGETS: Mapping[str, Target] = {
    "onnxruntime-cuda": "ort-cuda",
    "onnxruntime-tensorrt": "tensorrt",
}
PROVIDER_PRECISIONS: tuple[Precision, ...] = ("fp16", "fp32")
UNIT = (sys.executable, "-m", f"{__package__}.gpu_check", "--unit")
UNIT_LIMIT_S = 900.0
"""The time limit of a unit."""

TESTS = "pytest -m gpu"
"""The tests that need a GPU: one of the last units, which share the check's time and engines."""

KERNELS = (
    "pytest -p moexport.tests.hard.on_cuda tests/exporter/test_cuda_graphs.py "
    "plugins/token_routed/tests/test_fused_on_cuda.py "
    "plugins/token_routed/tests/test_cuda_graphs.py "
    "plugins/token_routed/tests/test_routed_precisions.py"
)
"""The tests of the graphs of `ort-cuda`, with CUDA's kernels instead of the CPU's."""

ROWS = "perf.gpu_rows"
"""The module that measures ONNX Runtime and PyTorch, whose rows come first."""

ROWS_SHARE = 0.75
"""The rows' share of the time, because engines and tests follow."""

SIZES = ("small", "large")
SMALL = {"dim": 192, "experts": 8, "hidden": 192, "depth": 2}
"""The small model, which comes first."""

SAMPLES = 16
BATCHES = (1, 8)
WARM_UPS, RUNS, ROUNDS = 3, 20, 5

Row = Mapping[str, Any]
"""A `Checked`, `Passed` or `Trouble` as JSON."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of the rounds' medians, and their range, in milliseconds."""

    median_ms: float
    spread_ms: float


@dataclass(frozen=True, slots=True)
class Timed:
    """The time of one run: on the GPU alone, and from array to array, with both copies."""

    k: int
    batch: int
    gpu: Spread | None
    end_to_end: Spread


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit to check: a graph of a bundle, in a backend or a provider of ONNX Runtime.

    `runner` is a backend's name, `onnxruntime-cuda` or `onnxruntime-tensorrt`; `size` is small or
    large; `graph` is a file in the folder `bundle`; `ks` are the values of k to time. The output of
    the inspector for an engine is written to the file `inspector`.
    """

    runner: str
    size: str
    precision: Precision
    lowering: str
    bundle: str
    graph: str
    ks: Sequence[int]
    inspector: str

    @property
    def name(self) -> str:
        """The name that reports show."""
        return named(self.runner, self.size, self.precision, self.lowering)


def named(*parts: str) -> str:
    """Returns the name of a unit, or of a group of units."""
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Checked:
    """One engine or graph on the GPU: its difference from PyTorch, and its times.

    `recorded` is whether the runner could record its work as a CUDA graph (null: the runtime does
    this itself). `types` counts the tensors of each type, named as in TensorRT's inspector.
    """

    runner: str
    size: str
    precision: Precision
    lowering: str
    max_rel: float
    cosine: float
    samples: int
    passed: bool
    times: list[Timed]
    recorded: bool | None = None
    build_s: float | None = None
    plan_bytes: int | None = None
    products: dict[str, int] = field(default_factory=dict)
    types: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Passed:
    """Tests that passed: their last line of output, and their time."""

    what: str
    summary: str
    seconds: float
    passed: bool = True


@dataclass(frozen=True, slots=True)
class Trouble:
    """An omitted or failed part and the reason; a failure may have a traceback."""

    what: str
    why: str
    failure: bool
    traceback: str | None = None

    @staticmethod
    def of(what: str, error: Exception) -> Trouble:
        """Returns a failure: moexport's errors with their hints, others with their tracebacks."""
        if isinstance(error, MoexportError):
            return Trouble(what, "; ".join(filter(None, (error.message, error.hint))), failure=True)
        why = f"{type(error).__name__}: {error}"
        return Trouble(what, why, failure=True, traceback=traceback.format_exc())


@dataclass(frozen=True, slots=True)
class Export:
    """One export: graphs of a size and precision, with the runners of each lowering."""

    size: str
    precision: Precision
    target: Target
    runners: Mapping[str, Sequence[str]]

    def names(self, lowering: str) -> list[str]:
        """Returns the names of the units of one lowering."""
        return [
            named(runner, self.size, self.precision, lowering) for runner in self.runners[lowering]
        ]


def exports(
    asked: argparse.Namespace, runners: Collection[str], done: Collection[str] = ()
) -> Iterator[Export]:
    """Yields the exports for these runners, the most informative first.

    The order is FP16 of both sizes, then the other precisions of the small model, then of the large
    one.
    """
    first, *others = PRECISIONS
    order = [(size, first) for size in SIZES] + list(itertools.product(SIZES, others))
    for size, precision in order:
        if precision not in asked.precision:
            continue
        for target in dict.fromkeys(map(target_of, runners)):
            remaining = {
                lowering: [
                    runner
                    for runner in runners
                    if target_of(runner) == target
                    and offered(runner, precision, lowering)
                    and named(runner, size, precision, lowering) not in done
                ]
                for lowering in LOWERINGS
                if lowering in asked.lowering
            }
            remaining = {lowering: found for lowering, found in remaining.items() if found}
            if remaining:
                yield Export(size=size, precision=precision, target=target, runners=remaining)


def target_of(runner: str) -> Target:
    """Returns the target of a runner's exports: both TensorRTs build the same graphs."""
    return PROVIDER_TARGETS.get(runner, "tensorrt")


def offered(runner: str, precision: Precision, lowering: str) -> bool:
    """Whether a runner is checked with these; providers only with common ones."""
    return runner in BACKENDS or (precision in PROVIDER_PRECISIONS and lowering == "gather")


Graph = tuple[str, str]
"""A bundle's folder, and the file of one of its graphs."""


def exported(
    wanted: Export, lowerings: Sequence[str], model: moexport.Model, x: np.ndarray, folder: Path
) -> Iterator[tuple[str, Graph | Exception]]:
    """Exports lowerings together; yields each with its graph, or with the error of its export."""
    place = folder / "-".join((wanted.target, wanted.size, wanted.precision, *lowerings))
    try:
        bundle = moexport.export(
            model,
            place,
            k="input",
            target=wanted.target,
            lowering=",".join(lowerings),
            precision=wanted.precision,
            data=x,
            engine=False,
        )
    except Exception as error:  # noqa: BLE001  the other exports must still be checked
        if len(lowerings) == 1:
            yield lowerings[0], error
            return
        for each in lowerings:  # so that one refusal does not hide the others
            yield from exported(wanted, [each], model, x, folder)
        return
    for lowering, graph in zip(lowerings, bundle.manifest.graphs, strict=True):
        yield lowering, (str(place), graph.file)


def rows(
    folder: Path, asked: argparse.Namespace, gpu: Gpu | None, done: Collection[str] = ()
) -> Iterator[Row]:
    """Yields each unit that was checked or omitted, except those in `done`.

    Units are omitted if no time is left. The tests on the GPU come last.
    """
    until = time.monotonic() + 60 * asked.minutes
    if gpu is not None and ROWS not in done:
        yield card_rows(asked, 60 * asked.minutes * ROWS_SHARE)
    missing = {name: absent(name, gpu) for name in (*BACKENDS, *PROVIDER_TARGETS)}
    yield from (asdict(trouble) for trouble in missing.values() if trouble is not None)
    available = [name for name, trouble in missing.items() if trouble is None]
    x = np.random.default_rng(0).standard_normal((SAMPLES, 3, 224, 224), np.float32)
    models: dict[str, moexport.Model] = {}
    for wanted in exports(asked, available, done):
        why = no_units(wanted.precision, gpu) or (NO_TIME if time.monotonic() > until else None)
        if why is not None:
            for what in itertools.chain.from_iterable(map(wanted.names, wanted.runners)):
                yield asdict(Trouble(what, why, failure=False))
            continue
        shape = SMALL if wanted.size == "small" else _shape(asked)
        if wanted.size not in models:
            models[wanted.size] = _model(folder, wanted.size, shape)
        graphs = exported(wanted, [*wanted.runners], models[wanted.size], x, folder)
        for lowering, graph in graphs:
            for runner, what in zip(wanted.runners[lowering], wanted.names(lowering), strict=True):
                if isinstance(graph, Exception):
                    yield asdict(Trouble.of(what, graph))
                    continue
                name = f"{asked.output.stem}-{what.replace(', ', '-')}.json"
                unit = Unit(
                    runner=runner,
                    size=wanted.size,
                    precision=wanted.precision,
                    lowering=lowering,
                    bundle=graph[0],
                    graph=graph[1],
                    ks=[k for k in (shape["experts"] // part for part in (1, 2, 4, 8)) if k],
                    inspector=str(asked.output.with_name(name)),
                )
                left_s = until - time.monotonic()
                yield outcome(what, UNIT, json.dumps(asdict(unit)), left_s=left_s)
    for what in (TESTS, KERNELS):
        if gpu is not None and what not in done:
            yield tests(until - time.monotonic(), what)


NO_TIME = "the time of --minutes is over: repeat the command to continue"


def _shape(asked: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(asked, name) for name in SMALL}


def _model(folder: Path, size: str, shape: Mapping[str, int]) -> moexport.Model:
    checkpoint = folder / f"{size}.pt"
    vit_checkpoint(
        checkpoint,
        experts=shape["experts"],
        hidden=shape["hidden"],
        dim=shape["dim"],
        depth=shape["depth"],
        moe_from=shape["depth"] // 2,
    )
    return moexport.load(checkpoint, config={"num_heads": 12, "rest": "default"})


def absent(runner: str, gpu: Gpu | None) -> Trouble | None:
    """Returns why a runner is omitted: it is not installed, or does not support this GPU."""
    backend: Backend | None = BACKENDS.get(runner)
    if runner == "onnxruntime-tensorrt":
        try:
            load_libraries()
            TENSORRT.check_installed()
        except MissingExtraError as error:
            return Trouble(runner, f"{error.message}; {error.hint}", failure=False)
    if backend is None:
        return None
    if gpu is not None and not backend.serves(gpu.compute_capability):
        why = f"it supports {backend.served}, but {gpu.name} is {gpu.compute_capability}"
        return Trouble(runner, why, failure=False)
    if not backend.installed():
        return Trouble(runner, f"not installed: {backend.install}", failure=False)
    return None


def no_units(precision: Precision, gpu: Gpu | None) -> str | None:
    """Returns why a GPU cannot compute in a precision, or None."""
    least = {"bf16": 8.0, "fp8": 8.9}.get(precision, 0.0)
    if gpu is None or float(gpu.compute_capability) >= least:
        return None
    return f"{gpu.name} has no units for {precision.upper()}, which need compute capability {least}"


def outcome(
    what: str,
    command: Sequence[str],
    request: str,
    most_s: float = UNIT_LIMIT_S,
    left_s: float = math.inf,
) -> Row:
    """Runs a unit in its own process and returns its answer, or how it ended without one.

    A unit that exceeds its time limit has failed; one that exceeds the remaining total time is
    only omitted.
    """
    no_time = asdict(Trouble(what, NO_TIME, failure=False))
    if left_s <= 0:
        return no_time
    try:
        done = subprocess.run(
            command,
            input=request,
            capture_output=True,
            text=True,
            timeout=min(most_s, left_s),
            check=False,
        )
    except subprocess.TimeoutExpired:
        if left_s < most_s:
            return no_time
        return asdict(Trouble(what, f"it took longer than {most_s:.0f} s", failure=True))
    last = done.stdout.splitlines()[-1:]
    if done.returncode == 0 and last:
        answer: Row = json.loads(last[0])
        return answer
    end = "\n".join(done.stderr.splitlines()[-20:])
    why = f"its process ended with status {done.returncode}"
    return asdict(Trouble(what, why, failure=True, traceback=end or None))


def card_rows(asked: argparse.Namespace, left_s: float, *more: str) -> Row:
    """Measures the rows of `perf.gpu_rows`, prints their table, and returns the outcome.

    If a row ends the process, another process measures the remaining rows.
    """
    if left_s <= 0:
        return asdict(Trouble(ROWS, NO_TIME, failure=False))
    output = asked.output.with_name(f"{asked.output.stem}-rows.json")
    begun, end, status, printed = time.monotonic(), time.monotonic() + left_s, -1, ""
    module = f"{__package__}.gpu_rows"
    while status < 0 and time.monotonic() < end:
        minutes = str((end - time.monotonic()) / 60)
        command = (sys.executable, "-m", module, "-o", str(output), "--minutes", minutes, *more)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        status, printed = done.returncode, done.stdout
    print(printed)
    seconds = round(time.monotonic() - begun, 1)
    if status:
        return asdict(Trouble(ROWS, f"a row failed: see {output}", failure=True))
    return asdict(Passed(ROWS, summary=f"all rows in {output}", seconds=seconds))


def tests(left_s: float, what: str = TESTS, command: Sequence[str] = ()) -> Row:
    """Runs tests on the GPU in the remaining time, and returns their result."""
    command = command or (sys.executable, "-m", *what.split())
    no_time = asdict(Trouble(what, NO_TIME, failure=False))
    if left_s <= 0:
        return no_time
    begun, root = time.monotonic(), Path(__file__).parents[1]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=left_s, check=False
        )
    except subprocess.TimeoutExpired:
        return no_time
    lines = (done.stdout or done.stderr).splitlines()
    last = lines[-1] if lines else f"status {done.returncode}"
    if done.returncode:
        return asdict(Trouble(what, last, failure=True, traceback="\n".join(lines[-200:])))
    return asdict(Passed(what, summary=last, seconds=round(time.monotonic() - begun, 1)))


def run(asked: argparse.Namespace, gpu: Gpu | None) -> bool:
    """Runs all checks, writes the results after each, and returns whether all passed.

    Keeps the results of an unfinished run of the same check on the same machine.
    """
    results = _unfinished(asked, gpu)
    _write(asked, gpu, results, complete=False)
    with tempfile.TemporaryDirectory(prefix="moexport-gpu-check-") as folder:
        for row in rows(Path(folder), asked, gpu, {_name(row) for row in results}):
            results.append(row)
            print(_line(row), file=sys.stderr, flush=True)
            _write(asked, gpu, results, complete=False)
    complete = not any(row.get("why") == NO_TIME for row in results)
    _write(asked, gpu, results, complete=complete)
    judged = (row for row in results if "runner" in row or row.get("what") == ROWS)
    checked = [row.get("passed", False) for row in judged]
    failed = any(row.get("failure") for row in results)
    return complete and bool(checked) and all(checked) and not failed


def _unfinished(asked: argparse.Namespace, gpu: Gpu | None) -> list[Row]:
    """Returns the units that passed in an interrupted run; failed ones are checked again."""
    if not asked.output.exists():
        return []
    content = json.loads(asked.output.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(_about(asked, gpu)))
    if content.get("complete") or any(content.get(key) != value for key, value in now.items()):
        return []
    return [row for row in content["checked"] if row["passed"]]


def _name(row: Row) -> str:
    return (
        row["what"]
        if "what" in row
        else named(row["runner"], row["size"], row["precision"], row["lowering"])
    )


def _line(row: Row) -> str:
    if "passed" not in row:
        return f"{'FAILED' if row['failure'] else 'omitted'} {row['what']}: {row['why']}"
    if "summary" in row:
        return f"passed {row['what']}: {row['summary']}"
    name = _name(row)
    verdict = "passed" if row["passed"] else "FAILED"
    times = ", ".join(
        f"k={each['k']} batch={each['batch']} "
        f"{(each['gpu'] or each['end_to_end'])['median_ms']:.3g} ms"
        for each in row["times"]
    )
    return f"{verdict} {name}: {row['max_rel']:.2g} of max|y| off; {times}"


def _about(asked: argparse.Namespace, gpu: Gpu | None) -> dict[str, Any]:
    """Returns the model, protocol and machine of a check, which identify an interrupted run."""
    return {
        "model": _shape(asked),
        "protocol": {"warm_ups": WARM_UPS, "runs": RUNS, "rounds": ROUNDS},
        "environment": environment() | {"first_gpu": None if gpu is None else asdict(gpu)},
    }


def _write(
    asked: argparse.Namespace, gpu: Gpu | None, results: Sequence[Row], *, complete: bool
) -> None:
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "make gpu-check",
        "complete": complete,
        **_about(asked, gpu),
        "checked": [row for row in results if "passed" in row],
        "failed": [row for row in results if row.get("failure")],
        "left_out": [row for row in results if row.get("failure") is False],
    }
    write_text(json.dumps(content, indent=1) + "\n", asked.output)


def check(unit: Unit) -> Checked:
    """Checks a unit; raises any error of building, loading and running."""
    bundle = moexport.Bundle.open(unit.bundle)
    if unit.runner in BACKENDS:
        return check_engine(bundle, unit)
    return check_graph(bundle, unit)


def check_engine(bundle: moexport.Bundle, unit: Unit) -> Checked:
    """Builds the engine of one graph and checks it."""
    options = EngineOptions(
        profiles=(parse_profile(f"batch=1:1:{SAMPLES}"),),
        compute_capabilities=("current",) if BACKENDS[unit.runner].builds_without_gpu else (),
        cache=cache.default_cache(),
    )
    expected = Reference.load(bundle.path / PARITY_FILE)
    built = moexport.build(bundle, graph=unit.graph, target=unit.runner, options=options)
    (record,) = (
        each
        for each in engines_of(built.manifest)
        if (each.graph, each.flavour) == (unit.graph, unit.runner)
    )
    with EngineSession(built.path / record.file, trust=True, eager=True) as session:
        bounds = gpu_bounds(stored_bounds(built.manifest.parity, unit.precision), unit.precision)
        parity = engine_parity(session, built.manifest, record, expected, bounds)
        times = list(timed(session, expected.x, unit.ks, session.gpu_ms))
        captured = session.recorded
    shutil.copyfile(built.path / record.layers, unit.inspector)
    listing = json.loads((built.path / record.layers).read_text(encoding="utf-8"))
    return Checked(
        **_found(unit, parity),
        times=times,
        recorded=captured,
        build_s=record.seconds,
        plan_bytes=(built.path / record.file).stat().st_size,
        products=record.precision,
        types=types_of(listing["inspector"]),
    )


def check_graph(bundle: moexport.Bundle, unit: Unit) -> Checked:
    """Checks a bundle's main graph in a provider."""
    tolerance = gpu_bounds(TOLERANCES[unit.precision], unit.precision)
    expected = without_ties(Reference.load(bundle.path / PARITY_FILE), tolerance.tie)
    provider = PROVIDERS[unit.runner.removeprefix("onnxruntime-")]
    session = bundle.session(options=SessionOptions(provider))
    k = expected.main_k
    parity = compare(session, expected, {}, batch=4, tolerance=tolerance, k=k)
    return Checked(**_found(unit, parity), times=list(timed(session, expected.x, unit.ks, None)))


def _found(unit: Unit, parity: Parity) -> dict[str, Any]:
    of_unit = {name: getattr(unit, name) for name in ("runner", "size", "precision", "lowering")}
    checked = ("max_rel", "cosine", "samples", "passed")
    return of_unit | {name: getattr(parity, name) for name in checked}


def types_of(inspector: Any) -> dict[str, int]:
    """Returns how often the inspector names each type of tensor, in any version's spelling."""
    found: dict[str, int] = {}
    parts = list(inspector.items()) if isinstance(inspector, dict) else []
    for name, value in parts:
        if isinstance(value, str) and "datatype" in name.lower():
            found[value] = found.get(value, 0) + 1
    nested = [v for _, v in parts] if parts else inspector if isinstance(inspector, list) else []
    for value in nested:
        for name, count in types_of(value).items():
            found[name] = found.get(name, 0) + count
    return found


def answer_request() -> None:
    """Checks the unit that stdin names; an error is also an answer."""
    request: Mapping[str, Any] = json.load(sys.stdin)
    unit = Unit(**request)
    answer: Checked | Trouble
    try:
        answer = check(unit)
    except Exception as error:  # noqa: BLE001  a defect is also a result
        answer = Trouble.of(unit.name, error)
    print(f"\n{json.dumps(asdict(answer))}", flush=True)


def timed(
    session: EngineSession | Session,
    x: np.ndarray,
    ks: Sequence[int],
    gpu_ms: Callable[[np.ndarray, int], float] | None,
) -> Iterator[Timed]:
    """Yields the times of every k and batch, which take turns in a new order each round."""
    cases = [(k, batch) for k in ks for batch in BATCHES if batch <= len(x)]
    order = random.Random(0)
    gpu: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    whole: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for _ in range(ROUNDS):
        for k, batch in order.sample(cases, len(cases)):
            for _ in range(WARM_UPS):
                session.run(x[:batch], k)
            whole[k, batch].append(_median(lambda: _wall_ms(session, x[:batch], k)))  # noqa: B023
            if gpu_ms is not None:
                gpu[k, batch].append(_median(lambda: gpu_ms(x[:batch], k)))  # noqa: B023
    for k, batch in cases:
        alone = _spread(gpu[k, batch]) if gpu_ms is not None else None
        yield Timed(k, batch, alone, _spread(whole[k, batch]))


def _median(measure: Callable[[], float]) -> float:
    return float(np.median([measure() for _ in range(RUNS)]))


def _wall_ms(session: EngineSession | Session, x: np.ndarray, k: int) -> float:
    begun = time.perf_counter()
    session.run(x, k)
    return (time.perf_counter() - begun) * 1e3


def _spread(medians: Sequence[float]) -> Spread:
    return Spread(float(np.median(medians)), max(medians) - min(medians))


def _listed(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns a parser for a list of known names."""

    def names(text: str) -> tuple[str, ...]:
        listed = tuple(text.split(","))
        unknown = [name for name in listed if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]}: choose from {', '.join(known)}")
        return listed

    return names


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's options."""
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("-o", "--output", type=Path, default=Path("gpu-check.json"))
    found.add_argument(
        "--precision", type=_listed(PRECISIONS), default=PRECISIONS, help="only these: fp16,int8"
    )
    found.add_argument(
        "--lowering", type=_listed(LOWERINGS), default=LOWERINGS, help="only these: gather,dense"
    )
    found.add_argument("--minutes", type=float, default=10.0, help="the time limit")
    found.add_argument("--dim", type=int, default=768, help="a multiple of 12, the number of heads")
    found.add_argument("--experts", type=int, default=32)
    found.add_argument("--hidden", type=int, default=768)
    found.add_argument("--unit", action="store_true", help="check the one unit that stdin names")
    found.add_argument("--depth", type=int, default=4, help="blocks; the second half are MoE")
    return found


def main() -> None:
    """Runs the checks and writes their results; exits with 1 if one failed, or without a GPU."""
    asked = parser().parse_args()
    if asked.unit:
        answer_request()
        return
    # Engines are cached, so that neither the next run nor a test builds them again.
    os.environ.setdefault(cache.CACHE_ENV, str(asked.output.with_suffix(".engines").absolute()))
    gpu = first_gpu()
    if gpu is None:
        sys.exit("error: there is no NVIDIA GPU here\nhint: `moexport doctor` lists the hardware")
    try:
        cuda.check_device()  # if the driver is too old, every unit would fail after minutes
    except MoexportError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
    if not run(asked, gpu):
        sys.exit(f"error: a check failed, or there was no time for all; see {asked.output}")
    print(asked.output)


if __name__ == "__main__":
    main()
