"""What only a GPU can show: engines built, run, compared and timed. `make gpu-check` runs it.

For each flavour, precision and lowering that the machine has: the engine's outputs against the
PyTorch reference of its bundle, and its time for every k, on the GPU and from array to array; the
same for ONNX Runtime's providers. What is left out is listed with the reason and what failed with
its traceback, so that the results of a machine say what they are not about.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import moexport
import numpy as np
from moexport.errors import MoexportError
from moexport.exporter.engines.additions import engines_of
from moexport.exporter.engines.check import session_parity
from moexport.exporter.engines.device import first_gpu
from moexport.exporter.engines.flavours import FLAVOURS, Flavour
from moexport.exporter.engines.options import EngineOptions
from moexport.exporter.engines.profiles import parse_profile
from moexport.exporter.engines.session import EngineSession
from moexport.exporter.environment import environment
from moexport.exporter.manifest import GraphRecord
from moexport.exporter.parity import PARITY_FILE, Parity, Reference, compare, settled
from moexport.exporter.session import PROVIDERS, SessionOptions
from moexport.exporter.tolerance import TOLERANCES
from moexport.graphs.arithmetic import Precision
from moexport.graphs.target import Target

from .gpu_times import ROUNDS, RUNS, WARM_UPS, Timed, timed
from .scale import vit_checkpoint

LOWERINGS = ("dense", "gather", "conditional")
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16", "int8")
SAMPLES = 16
RTOL = 1e-3
"""FP32 on a GPU sums in another order than PyTorch on a CPU; the others have their own bounds."""


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


def guarded(
    what: str, work: Callable[[], Iterator[Checked | Trouble]]
) -> Iterator[Checked | Trouble]:
    """Yields what a check finds; what goes wrong ends it, and not the checks after it."""
    try:
        yield from work()
    except MoexportError as error:
        yield Trouble(what, f"{error.message}; {error.hint}", failure=True)
    except Exception as error:  # noqa: BLE001  a defect must not cost what else there is to find
        yield Trouble(what, f"{type(error).__name__}: {error}", True, traceback.format_exc())


def check_all(folder: Path, size: argparse.Namespace) -> Iterator[Checked | Trouble]:
    """Yields what was checked, and what was left out."""
    checkpoint = folder / "vit.pt"
    vit_checkpoint(
        checkpoint,
        experts=size.experts,
        hidden=size.hidden,
        depth=size.depth,
        moe_from=size.depth // 2,
    )
    model = moexport.load(checkpoint, config={"num_heads": 12})
    x = np.random.default_rng(0).standard_normal((SAMPLES, 3, 224, 224), np.float32)
    ks = [k for k in (size.experts // part for part in (1, 2, 4, 8)) if k]
    for flavour in FLAVOURS.values():
        if not flavour.installed():
            why = f"not installed: {flavour.install}"
            yield Trouble(flavour.title, why, failure=False)
            continue
        for precision in PRECISIONS:
            place = folder / f"{flavour.name}-{precision}"

            def engines(
                flavour: Flavour = flavour, precision: Precision = precision, place: Path = place
            ) -> Iterator[Checked | Trouble]:
                target = cast(Target, flavour.name)
                bundle = _export(model, place, target, precision, x, LOWERINGS)
                yield from check_engines(bundle, flavour, precision, ks)

            yield from guarded(f"{flavour.title}, {precision}", engines)
    for name in ("cuda", "tensorrt"):
        for precision in ("fp32", "fp16"):
            place = folder / f"onnxruntime-{name}-{precision}"

            def graphs(
                name: str = name, precision: Precision = precision, place: Path = place
            ) -> Iterator[Checked | Trouble]:
                target: Target = "ort-cuda" if name == "cuda" else "onnx"
                bundle = _export(model, place, target, precision, x, ("gather",))
                yield check_graph(bundle, name, precision, ks)

            yield from guarded(f"ONNX Runtime's {name}, {precision}", graphs)


def _export(
    model: moexport.Model,
    place: Path,
    target: Target,
    precision: Precision,
    x: np.ndarray,
    lowerings: Sequence[str],
) -> moexport.Bundle:
    return moexport.export(
        model,
        place,
        k="input",
        target=target,
        lowering=",".join(lowerings),
        precision=precision,
        data=x,
        engine=False,
    )


def check_engines(
    bundle: moexport.Bundle, flavour: Flavour, precision: Precision, ks: Sequence[int]
) -> Iterator[Checked | Trouble]:
    """Builds a bundle's engines, and yields each as it was found to be."""
    options = EngineOptions(
        profiles=(parse_profile(f"batch=1:1:{SAMPLES}"),),
        compute_capabilities=("current",) if flavour.builds_without_gpu else (),
    )
    expected = Reference.load(bundle.path / PARITY_FILE)
    for graph in bundle.manifest.graphs:
        lowering = "+".join(sorted(set(graph.lowerings.values())))

        def engine(
            graph: GraphRecord = graph, lowering: str = lowering
        ) -> Iterator[Checked | Trouble]:
            yield check_engine(bundle, graph, lowering, options, precision, expected, ks)

        yield from guarded(f"{flavour.title}, {precision}, {lowering}", engine)


def check_engine(
    bundle: moexport.Bundle,
    graph: GraphRecord,
    lowering: str,
    options: EngineOptions,
    precision: Precision,
    expected: Reference,
    ks: Sequence[int],
) -> Checked:
    """Builds the engine of one graph and returns how it was found to be."""
    built = moexport.build(bundle, graph=graph.file, options=options)
    (record,) = (each for each in engines_of(built.manifest) if each.graph == graph.file)
    rtol = RTOL if precision == "fp32" else TOLERANCES[precision].rtol
    with EngineSession(built.path / record.file, eager=True) as session:
        parity = session_parity(session, built.manifest, record, expected, rtol=rtol)
        times = list(timed(session, expected.x, ks, session.gpu_ms))
        recorded = session.recorded
    listing = json.loads((built.path / record.layers).read_text(encoding="utf-8"))
    return Checked(
        runner=record.flavour,
        precision=precision,
        lowering=lowering,
        **_found(parity),
        times=times,
        recorded=recorded,
        build_s=record.seconds,
        plan_bytes=(built.path / record.file).stat().st_size,
        products=record.precision,
        types=types_of(listing["inspector"]),
    )


def check_graph(
    bundle: moexport.Bundle, provider: str, precision: Precision, ks: Sequence[int]
) -> Checked:
    """Returns what a provider of ONNX Runtime makes of a bundle's main graph."""
    tolerance = TOLERANCES[precision]
    expected = settled(Reference.load(bundle.path / PARITY_FILE), tolerance.tie)
    session = bundle.session(options=SessionOptions(PROVIDERS[provider]))
    k = next(iter(expected.kept.values()))
    parity = compare(session, expected, {}, batch=4, tolerance=tolerance, k=k)
    return Checked(
        runner=f"onnxruntime-{provider}",
        precision=precision,
        lowering="gather",
        **_found(parity),
        times=list(timed(session, expected.x, ks, None)),
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
    """Runs the checks and writes their results; exit 1 when one failed, or without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--depth", type=int, default=4, help="blocks; the second half are MoE")
    asked = parser.parse_args()
    if first_gpu() is None:
        sys.exit("error: there is no NVIDIA GPU here\nhint: `moexport doctor` says what is")
    checked: list[Checked] = []
    troubles: list[Trouble] = []
    with tempfile.TemporaryDirectory(prefix="moexport-gpu-check-") as folder:
        for each in check_all(Path(folder), asked):
            print(each, file=sys.stderr, flush=True)
            (checked if isinstance(each, Checked) else troubles).append(each)  # type: ignore[arg-type]
            _write(asked, checked, troubles)  # what was found stays, whatever comes after it
    wrong = [each for each in troubles if each.failure]
    if wrong or not checked or not all(each.passed for each in checked):
        sys.exit(f"error: a check failed; {asked.output} has what was found")
    print(asked.output)


def _write(
    asked: argparse.Namespace, checked: Sequence[Checked], troubles: Sequence[Trouble]
) -> None:
    gpu = first_gpu()
    content = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "make gpu-check",
        "model": {name: getattr(asked, name) for name in ("experts", "hidden", "depth")},
        "protocol": {"warm_ups": WARM_UPS, "runs": RUNS, "rounds": ROUNDS},
        "environment": environment() | {"first_gpu": None if gpu is None else asdict(gpu)},
        "checked": [asdict(each) for each in checked],
        "left_out": [asdict(each) for each in troubles],
    }
    asked.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
