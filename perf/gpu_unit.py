"""One unit of `make gpu-check`, in a process of its own: an engine or a graph, compared and timed.

A fault on the GPU ends a process, or leaves its CUDA unusable; here it costs the unit alone. The
request comes as JSON on stdin, what was found goes as JSON to the last line of stdout.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import moexport
import numpy as np
from moexport.errors import MoexportError
from moexport.exporter.parity import PARITY_FILE, TOLERANCES, Parity, Reference, compare, settled
from moexport.exporter.session import PROVIDERS, Session, SessionOptions
from moexport.exporter.tensorrt.backends import BACKENDS
from moexport.exporter.tensorrt.check import session_parity
from moexport.exporter.tensorrt.options import EngineOptions
from moexport.exporter.tensorrt.profiles import parse_profile
from moexport.exporter.tensorrt.records import engines_of
from moexport.exporter.tensorrt.session import EngineSession
from moexport.graphs.precision.types import Precision

BATCHES = (1, 8)

WARM_UPS, RUNS, ROUNDS = 3, 20, 5


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of the rounds' medians, and how far these are apart, in milliseconds."""

    median_ms: float
    spread_ms: float


@dataclass(frozen=True, slots=True)
class Timed:
    """The time of one run: of the GPU alone, and from array to array with both copies."""

    k: int
    batch: int
    gpu: Spread | None
    end_to_end: Spread


def timed(
    session: EngineSession | Session,
    x: np.ndarray,
    ks: Sequence[int],
    gpu_ms: Callable[[np.ndarray, int], float] | None,
) -> Iterator[Timed]:
    """Yields the times of every k and batch; they take turns, in another order each round."""
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


SAMPLES = 16

RTOL = 1e-3
"""FP32 on a GPU sums in another order than PyTorch on a CPU; the others have their own bounds."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is checked: a graph of a bundle, in a backend or a provider of ONNX Runtime.

    `runner` is a backend's name or `onnxruntime-cuda`, `onnxruntime-tensorrt`; `graph` the file in
    the folder `bundle`; `ks` are timed.
    """

    runner: str
    precision: Precision
    lowering: str
    bundle: str
    graph: str
    ks: Sequence[int]

    @property
    def name(self) -> str:
        """What a reader calls it."""
        return f"{self.runner}, {self.precision}, {self.lowering}"


@dataclass(frozen=True, slots=True)
class Checked:
    """One engine or graph on the GPU: how far it is from PyTorch, and its times.

    `recorded` says whether the runner could record its work as a CUDA graph (null: the runtime does
    it by itself). `types` counts the types of tensors as TensorRT's inspector names them.
    """

    runner: str
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
class Trouble:
    """What was left out, and why; a traceback where that is a failure."""

    what: str
    why: str
    failure: bool
    traceback: str | None = None


def check(unit: Unit) -> Checked:
    """Returns how a unit was found to be; raises what building, loading and running raise."""
    bundle = moexport.Bundle.open(unit.bundle)
    if unit.runner in BACKENDS:
        return check_engine(bundle, unit)
    return check_graph(bundle, unit)


def check_engine(bundle: moexport.Bundle, unit: Unit) -> Checked:
    """Builds the engine of one graph and returns how it was found to be."""
    options = EngineOptions(
        profiles=(parse_profile(f"batch=1:1:{SAMPLES}"),),
        compute_capabilities=("current",) if BACKENDS[unit.runner].builds_without_gpu else (),
    )
    expected = Reference.load(bundle.path / PARITY_FILE)
    built = moexport.build(bundle, graph=unit.graph, options=options)
    (record,) = (each for each in engines_of(built.manifest) if each.graph == unit.graph)
    rtol = RTOL if unit.precision == "fp32" else TOLERANCES[unit.precision].rtol
    with EngineSession(built.path / record.file, eager=True) as session:
        parity = session_parity(session, built.manifest, record, expected, rtol=rtol)
        times = list(timed(session, expected.x, unit.ks, session.gpu_ms))
        recorded = session.recorded
    listing = json.loads((built.path / record.layers).read_text(encoding="utf-8"))
    return Checked(
        runner=unit.runner,
        precision=unit.precision,
        lowering=unit.lowering,
        **_found(parity),
        times=times,
        recorded=recorded,
        build_s=record.seconds,
        plan_bytes=(built.path / record.file).stat().st_size,
        products=record.precision,
        types=types_of(listing["inspector"]),
    )


def check_graph(bundle: moexport.Bundle, unit: Unit) -> Checked:
    """Returns what a provider of ONNX Runtime makes of a bundle's main graph."""
    tolerance = TOLERANCES[unit.precision]
    expected = settled(Reference.load(bundle.path / PARITY_FILE), tolerance.tie)
    provider = PROVIDERS[unit.runner.removeprefix("onnxruntime-")]
    session = bundle.session(options=SessionOptions(provider))
    k = next(iter(expected.kept.values()))
    parity = compare(session, expected, {}, batch=4, tolerance=tolerance, k=k)
    return Checked(
        runner=unit.runner,
        precision=unit.precision,
        lowering=unit.lowering,
        **_found(parity),
        times=list(timed(session, expected.x, unit.ks, None)),
    )


def _found(parity: Parity) -> dict[str, Any]:
    return {name: getattr(parity, name) for name in ("max_rel", "cosine", "samples", "passed")}


def types_of(inspector: Any) -> dict[str, int]:
    """Returns how often the inspector names each type of tensor, whatever its version calls it."""
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


def main() -> None:
    """Checks the unit that stdin names; what goes wrong is an answer, too."""
    request: Mapping[str, Any] = json.load(sys.stdin)
    unit = Unit(**request)
    answer: Checked | Trouble
    try:
        answer = check(unit)
    except MoexportError as error:
        answer = Trouble(
            unit.name, "; ".join(filter(None, (error.message, error.hint))), failure=True
        )
    except Exception as error:  # noqa: BLE001  a defect is a result, too
        why = f"{type(error).__name__}: {error}"
        answer = Trouble(unit.name, why, failure=True, traceback=traceback.format_exc())
    print(f"\n{json.dumps(asdict(answer))}", flush=True)


if __name__ == "__main__":
    main()
