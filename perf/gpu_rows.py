"""Measures times and values of ONNX Runtime's CUDA provider and PyTorch on one card.

The subjects are a ViT-S/16 with Soft MoE layers in its last six blocks, single layers at the sizes
of the papers, and every recorded case. Outputs are compared with PyTorch's, and replayed CUDA
graphs with plain runs. Times are measured on the GPU, by CUDA events, and from array to array; the
GPU's are compared with the limit at the card's rates, which are measured first. The most
informative rows come first. Results are written after each row, and the same command continues an
interrupted run; a row that ended the process then counts as a failure. `--tiny` runs everything at
small sizes, even on a CPU. `make gpu-check` runs this module first.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import moexport
import numpy as np
import torch
from moexport.bench.engines import KINDS, ModelEngine
from moexport.bench.measure.gpu_rates import SQUARES, GpuProbes, device_ms
from moexport.bench.measure.roofline import ModelWork, Rates, limit_ms, work_of
from moexport.bench.runners.base import ModelRun, Runner
from moexport.bench.runners.pytorch import PyTorch, on_device, without_tf32
from moexport.common.environment import environment
from moexport.common.text import table
from moexport.common.writing import write_text
from moexport.errors import one_line
from moexport.exporter.bundle.gpu_runs import UNCAPTURED
from moexport.exporter.bundle.parity import TOLERANCES, gpu_bounds
from moexport.exporter.model import Model
from moexport.exporter.session import CPU, CUDA, Session, SessionOptions
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.targets import Precision

from .layers.soft_moe import Layer
from .scale import vit_checkpoint

TARGET = "ort-cuda"
FLOATS: tuple[Precision, ...] = ("fp16", "fp32")
FORMS = ("pytorch-compile", "pytorch-stacked", "pytorch-grouped-mm", "pytorch-eager")
"""The forms of PyTorch, the fastest first."""

RECORDED = 0.5
"""The share of the time within which recorded cases must begin, because other rows follow."""

Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes and numbers of the measurements."""

    vit: Mapping[str, Any]  # the arguments of `vit_checkpoint`
    heads: int
    layers: tuple[Layer, ...]
    batches: tuple[int, ...] = (1, 8, 32)
    rounds: int = 5
    runs: int = 20
    warm_ups: int = 3
    stream_bytes: int = 1 << 30
    squares: Mapping[str, int] = field(default_factory=lambda: SQUARES)
    recorded: int | None = None
    forms: tuple[str, ...] = FORMS


FULL = Sizes(
    vit={"experts": 32, "hidden": 1536, "dim": 384, "depth": 12, "moe_from": 6},
    heads=6,
    layers=(
        Layer(768, 128, 384, tokens=196),
        Layer(768, 8, 7680, tokens=196),
        Layer(768, 8, 30720, tokens=196),
    ),
)

TINY = Sizes(
    vit={"experts": 8, "hidden": 16, "dim": 24, "depth": 2, "moe_from": 1},
    heads=2,
    layers=(Layer(16, 8, 16, tokens=9),),
    batches=(1, 2),
    rounds=2,
    runs=2,
    warm_ups=1,
    stream_bytes=1 << 16,
    squares={"fp32": 16, "fp16": 16},
    recorded=2,
    forms=("pytorch-eager", "pytorch-stacked", "pytorch-grouped-mm"),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One row: milliseconds on the GPU and from array to array, with the range of the rounds.

    `limit_ms` is the minimum time at the card's measured rates, and `over_limit` the GPU's time
    divided by it. `off` is the largest difference from PyTorch's outputs, `replay_off` that of a
    replayed CUDA graph from a plain run, both relative to max|y|; `plain` is why runs were not
    replayed.
    """

    part: str
    what: str
    precision: str
    batch: int
    k: int | None = None
    gpu_ms: float | None = None
    gpu_spread_ms: float | None = None
    host_ms: float | None = None
    limit_ms: float | None = None
    over_limit: float | None = None
    off: float | None = None
    replay_off: float | None = None
    plain: str | None = None
    passed: bool = True
    error: str | None = None

    @property
    def name(self) -> str:
        """The fields that identify the row."""
        k = "" if self.k is None else f", k={self.k}"
        return f"{self.part}: {self.what}, {self.precision}, batch {self.batch}{k}"


Item = tuple[Measured, Callable[[], Mapping[str, Any]]]
"""A row before it is measured, and the function that measures it."""


class Subject:
    """A model, its results on the CPU, its least work, and its forms on the device."""

    def __init__(self, name: str, model: Model, x: np.ndarray, rates: Rates | None) -> None:
        self.name, self.model, self.x, self.rates = name, model, x, rates
        self.experts = max(layer.spec.experts for layer in model.layers.values())

    @functools.cached_property
    def expected(self) -> np.ndarray:
        """The untouched model's outputs for all inputs, in FP32 on the CPU, in small batches."""
        base = PyTorch(self.model.untouched, self.model.inputs)
        return np.concatenate([base.infer(self.x[i : i + 8]) for i in range(0, len(self.x), 8)])

    @functools.cached_property
    def work(self) -> ModelWork:
        """The least work of one input."""
        return work_of(self.model, self.x[:1])

    def limit(self, k: int, batch: int, precision: str) -> float | None:
        """Returns the minimum time of a batch on this card in milliseconds."""
        if self.rates is None:
            return None
        short = precision == "fp16"
        parts = self.work.parts(
            {name: min(k, self.experts) for name in self.model.layers},
            batch,
            number_bytes=2 if short else 4,
            arithmetic="fp16" if short else "fp32",
        )
        return limit_ms(parts, self.rates)


@dataclass(frozen=True, slots=True)
class Check:
    """The settings of this run: sizes, device, and a folder for bundles."""

    sizes: Sizes
    device: str
    folder: Path

    def timed(self, gpu_ms: Callable[[], float | None], call: Callable[[], object]) -> Result:
        """Returns the times of a call: medians of rounds, on the device and by the wall clock."""
        for _ in range(self.sizes.warm_ups):
            call()
        gpu: list[float] = []
        host: list[float] = []
        for _ in range(self.sizes.rounds):
            found = [gpu_ms() for _ in range(self.sizes.runs)]
            gpu += [median(ms for ms in found if ms is not None)] if None not in found else []
            host.append(median(device_ms(call, "cpu") for _ in range(self.sizes.runs)))
        return {
            "gpu_ms": median(gpu) if gpu else None,
            "gpu_spread_ms": max(gpu) - min(gpu) if gpu else None,
            "host_ms": median(host),
        }

    def session(self, bundle: moexport.Bundle, graph: str | None, *, graphs: bool) -> Session:
        """Opens a graph of a bundle on the device."""
        provider = CUDA if self.device == "cuda" else CPU
        options = SessionOptions(provider, cuda_graphs=graphs, timed=self.device == "cuda")
        return bundle.session(graph, options)


def largest(y: np.ndarray, wanted: np.ndarray) -> float:
    """Returns the largest difference relative to max|y|."""
    return float(np.abs(y.astype(np.float64) - wanted).max() / np.abs(wanted).max())


def bound_of(precision: Precision) -> float:
    """Returns the largest permitted difference of outputs on a GPU, relative to max|y|."""
    return gpu_bounds(TOLERANCES[precision], precision).rtol


# --- moexport's graphs ---------------------------------------------------------------------------


class Graphs:
    """The graphs of a model in a precision, exported on demand and opened on a device.

    Only the graphs of one lowering and k are open at a time, because large layers fill a card.
    """

    def __init__(self, check: Check, subject: Subject, precision: Precision) -> None:
        self.check, self.subject, self.precision = check, subject, precision
        self._open: dict[bool, Session] = {}
        self._opened: tuple[str, int | None] | None = None
        self._combined: moexport.Bundle | None = None

    def session(self, lowering: str, k: int | None, *, graphs: bool) -> Session:
        """Returns a graph that replays CUDA graphs if `graphs`; without k, k is an input."""
        if self._opened != (lowering, k):
            self._open, self._opened = {}, (lowering, k)
        if graphs not in self._open:
            bundle = self._exported(lowering, k)
            graph = lowering if k is None else None
            self._open[graphs] = self.check.session(bundle, graph, graphs=graphs)
        return self._open[graphs]

    def _exported(self, lowering: str, k: int | None) -> moexport.Bundle:
        if k is not None:
            return self._export(lowering, k)
        if self._combined is None:
            try:
                self._combined = self._export(",".join(lowerings()), None)
            except (
                moexport.MoexportError
            ):  # a lowering does not support this model: export each separately
                return self._export(lowering, None)
        return self._combined

    def _export(self, lowering: str, k: int | None) -> moexport.Bundle:
        name = f"{self.subject.name}-{self.precision}-{lowering}-{k}".replace(" ", "")
        folder = self.check.folder / name
        if (folder / "manifest.json").exists():
            return moexport.Bundle.open(folder)
        return moexport.export(
            self.subject.model,
            folder,
            k=k or "input",
            target=TARGET,
            lowering=lowering,
            precision=self.precision,
            verify=False,
        )


def lowerings() -> list[str]:
    """Returns the lowerings of Soft MoE that the target supports."""
    return [each.name for each in lowerings_of("soft-moe").values() if TARGET in each.targets]


def graph_items(
    check: Check,
    subject: Subject,
    ks: Sequence[int],
    precision: Precision,
    *,
    auto: bool = False,
    named: Sequence[str] = (),
) -> Iterator[Item]:
    """Yields a model's rows: the choice of `auto` for each k, and lowerings with k as an input."""
    opened = Graphs(check, subject, precision)
    plans = [("auto", k, k) for k in ks if auto] + [(name, None, k) for name in named for k in ks]
    for lowering, fixed, k in plans:
        for batch in check.sizes.batches:
            row = Measured(subject.name, f"moexport, {lowering}", precision, batch, k)
            session = functools.partial(opened.session, lowering, fixed)
            yield row, functools.partial(_graph_row, check, subject, row, session, fixed)


def _graph_row(
    check: Check,
    subject: Subject,
    row: Measured,
    session: Callable[..., Session],
    fixed: int | None,
) -> Result:
    x, k = subject.x[: row.batch], None if fixed else row.k
    precision: Precision = "fp16" if row.precision == "fp16" else "fp32"
    y = session(graphs=False)(x, k)
    replaying = session(graphs=True)
    for _ in range(3):  # plain, captured, replayed
        replayed = replaying(x, k)
    call = replaying.bound(x, k)
    on_device = (
        functools.partial(replaying.gpu_ms, x, k)
        if check.device == "cuda"
        else functools.partial(device_ms, call, "cpu")
    )
    times = check.timed(on_device, call)
    off = largest(y, subject.expected[: row.batch]) if row.k == subject.experts else None
    replay_off = largest(replayed, y)
    return {
        **times,
        "limit_ms": subject.limit(row.k or subject.experts, row.batch, precision),
        "off": off,
        "replay_off": replay_off,
        "plain": replaying.no_cuda_graphs,
        "passed": (off is None or off <= bound_of(precision)) and replay_off <= 1e-3,
    }


# --- PyTorch -------------------------------------------------------------------------------------


def torch_items(
    check: Check, subject: Subject, forms: Sequence[str], floats: Sequence[str]
) -> Iterator[Item]:
    """Yields PyTorch's rows of a model."""
    placed: list[Model] = []
    runners: dict[tuple[str, str], Runner] = {}

    def runner(form: str, precision: str) -> Runner:
        if not placed:
            placed.append(on_device(subject.model, check.device))
        if (form, precision) not in runners:
            runners.clear()
            kind = KINDS[f"{form}-cuda"]
            assert isinstance(kind, ModelEngine)
            asked = ModelRun(
                model=placed[0],
                provider=check.device,
                k=subject.experts,
                k_by_layer={},
                batches=check.sizes.batches,
                renormalize=False,
                precision=precision,
            )
            runners[form, precision] = kind.loader(asked)
        return runners[form, precision]

    for form in forms:
        for precision in floats:
            for batch in check.sizes.batches:
                title = KINDS[f"{form}-cuda"].title
                row = Measured(subject.name, title, precision, batch, subject.experts)
                yield row, functools.partial(_torch_row, check, subject, row, runner, form)


def _torch_row(
    check: Check, subject: Subject, row: Measured, runner: Callable[[str, str], Runner], form: str
) -> Result:
    x, opened = subject.x[: row.batch], runner(form, row.precision)
    off = largest(opened.infer(x), subject.expected[: row.batch])
    call = functools.partial(opened.infer, x)
    on_device = (
        functools.partial(opened.device_ms, x)
        if check.device == "cuda"
        else functools.partial(device_ms, call, "cpu")
    )
    return {
        **check.timed(on_device, call),
        "limit_ms": subject.limit(subject.experts, row.batch, row.precision),
        "off": off,  # reported, but not judged: it is the error of PyTorch's FP16
    }


# --- recorded cases ------------------------------------------------------------------------------


def recorded_items(check: Check) -> Iterator[Item]:
    """Yields every recorded case, in FP32 with the fewest experts and in FP16 with all."""
    from moexport.tests.recorded import MUMOE, SOFT_MOE, read_case

    for precision in ("fp32", "fp16"):
        for name in [*SOFT_MOE, *MUMOE][: check.sizes.recorded]:
            case = read_case(name)
            k = case.ks[0] if precision == "fp32" and case.ks else None
            row = Measured("recorded", name, precision, len(case.x), k)
            yield row, functools.partial(_recorded_row, check, row, case)


def _recorded_row(check: Check, row: Measured, case: Any) -> Result:
    model = moexport.load(case.weights, config=case.config, family=case.family)
    precision: Precision = "fp16" if row.precision == "fp16" else "fp32"
    bundle = moexport.export(
        model, check.folder / "recorded", k=row.k or "n", target=TARGET, precision=precision,
        verify=False, force=True,
    )  # fmt: skip
    x = case.x if case.x.dtype.kind in "iu" else case.x.astype(np.float32)
    plain, replaying = (check.session(bundle, None, graphs=graphs) for graphs in (False, True))
    x = x[:, None] if len(bundle.manifest.inputs[0].shape) == x.ndim + 1 else x
    y = plain(x)
    for _ in range(3):
        replayed = replaying(x)
    wanted = case.y(row.k)
    off, replay_off = largest(y.reshape(wanted.shape), wanted), largest(replayed, y)
    bound = bound_of(precision)
    return {
        "off": off,
        "replay_off": replay_off,
        "plain": replaying.no_cuda_graphs,
        "passed": off <= bound and replay_off <= 1e-3,
    }


# --- all rows ------------------------------------------------------------------------------------


def items(check: Check, rates: Rates | None) -> Iterator[tuple[Item, float]]:
    """Yields all rows, the most informative first, each with the share of the time to begin within.

    A model is created when its first row is measured.
    """
    sizes, most = check.sizes, max(check.sizes.batches)
    checkpoint = check.folder / "vit.pt"
    vit_checkpoint(checkpoint, **sizes.vit)
    model = moexport.load(checkpoint, config={"num_heads": sizes.heads, "rest": "default"})
    x = np.random.default_rng(1).standard_normal((most, 3, 224, 224), np.float32)
    vit = Subject("ViT", model, x, rates)
    n, named = vit.experts, lowerings()
    captured = [name for name in named if name not in UNCAPTURED]
    yield from _all(graph_items(check, vit, (n, n // 4), "fp16", auto=True, named=captured))
    yield from _all(recorded_items(check), RECORDED)
    subjects = []
    for layer in sizes.layers:
        x = np.asarray(layer.inputs(most).inputs)
        subject = Subject(layer.name, layer.models()[0], x, rates)
        ks = tuple(k for k in (subject.experts // part for part in (1, 2, 4, 8)) if k)
        yield from _all(graph_items(check, subject, ks, "fp16", named=captured))
        subjects.append(subject)
    yield from _all(graph_items(check, vit, (n, n // 4), "fp32", auto=True))
    yield from _all(torch_items(check, vit, sizes.forms[1:], FLOATS))
    # The first call of a compiled form takes a minute.
    yield from _all(torch_items(check, vit, sizes.forms[:1], FLOATS[:1]))
    others = [name for name in named if name in UNCAPTURED]
    yield from _all(graph_items(check, vit, (n, n // 4), "fp16", named=others))
    for subject in subjects:
        yield from _all(torch_items(check, subject, sizes.forms[1:3], FLOATS[:1]))
    yield from _all(torch_items(check, vit, sizes.forms[:1], FLOATS[1:]))


def _all(rows: Iterator[Item], share: float = 1.0) -> Iterator[tuple[Item, float]]:
    for row in rows:
        yield row, share


def measured_rates(check: Check) -> dict[str, Any]:
    """Returns the rates that the device reaches, as medians of a few calls each."""
    probes = GpuProbes(
        check.device, stream_bytes=check.sizes.stream_bytes, squares=check.sizes.squares
    )
    ms = {}
    for name, call in probes.calls.items():
        call(0)
        ms[name] = median(call.device_ms(0) for _ in range(check.sizes.runs))  # type: ignore[attr-defined]
    return probes.rates(ms)


class Kept:
    """The file of results, which is written after each row, so that a later run can continue.

    `begun` is the row that is being measured: if an earlier file has one, it ended the process.
    """

    def __init__(self, output: Path, about: Mapping[str, Any]) -> None:
        self.output, self.about = output, dict(about)
        self.rows: list[Result] = []
        self.rates: dict[str, Any] | None = None
        before = json.loads(output.read_text("utf-8")) if output.exists() else {}
        same = all(before.get(n) == v for n, v in json.loads(json.dumps(self.about)).items())
        if before and same and not before.get("complete"):
            self.rows, self.rates = list(before["rows"]), before["rates"]
            if before.get("begun") is not None:
                self.rows.append({**before["begun"], "passed": False, "error": "ended the process"})
        self.done = {Measured(**row).name for row in self.rows}

    def add(self, row: Measured) -> None:
        """Adds a row."""
        self.rows.append(asdict(row))
        self.write(None, complete=False)

    def write(self, begun: Measured | None, *, complete: bool) -> None:
        """Writes all results."""
        content = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **self.about,
            "complete": complete,
            "rates": self.rates,
            "rows": self.rows,
            "begun": None if begun is None else asdict(begun),
        }
        write_text(json.dumps(content, indent=1) + "\n", self.output)


def run(output: Path, sizes: Sizes, device: str, minutes: float) -> bool:
    """Measures all rows for which there is time, and returns whether none failed."""
    until, begun = 60 * minutes, time.monotonic()
    left_out = 0
    about = {"sizes": asdict(sizes), "device": device, "environment": environment()}
    kept = Kept(output, about)
    with tempfile.TemporaryDirectory(prefix="moexport-gpu-") as folder, without_tf32():
        check = Check(sizes, device, Path(folder))
        kept.rates = kept.rates or measured_rates(check)
        rates = Rates(**kept.rates, gpu=True)
        for (row, measure), share in items(check, rates):
            if row.name in kept.done:
                continue
            if time.monotonic() - begun > share * until:
                left_out += 1
                continue
            kept.write(row, complete=False)
            found = measured(row, measure)
            kept.add(found)
            print(line(found), file=sys.stderr, flush=True)
    kept.write(None, complete=not left_out)
    print(results_table(kept.rows, kept.rates))
    if left_out:
        print(f"no time was left for {left_out} rows: repeat the command to measure them")
    return all(row["passed"] for row in kept.rows)


def measured(row: Measured, measure: Callable[[], Mapping[str, Any]]) -> Measured:
    """Measures a row and returns it, with the error after a failure."""
    facts = asdict(row)
    try:
        facts |= measure()
    except Exception as error:  # noqa: BLE001  a defect is also a result
        refused = isinstance(error, moexport.UsageError)  # the model is not supported
        return Measured(**{**facts, "error": one_line(error), "passed": refused})
    if facts["gpu_ms"] and facts["limit_ms"]:
        facts["over_limit"] = facts["gpu_ms"] / facts["limit_ms"]
    return Measured(**facts)


def line(row: Measured) -> str:
    """Returns a row in one line."""
    if row.error is not None:
        return f"{'unsupported' if row.passed else 'FAILED'} {row.name}: {row.error}"
    facts = [
        *([f"{row.gpu_ms:.3g} ms on the device"] if row.gpu_ms is not None else []),
        *([f"{row.off:.1e} off"] if row.off is not None else []),
    ]
    return f"{'' if row.passed else 'FAILED '}{row.name}: {', '.join(facts)}"


def results_table(rows: Sequence[Mapping[str, Any]], rates: Mapping[str, float] | None) -> str:
    """Returns all rows as one table, with the rates of the card below it."""
    heads = (
        *("subject", "form", "precision", "batch", "k", "GPU ms", "± ms", "array to array ms"),
        *("× limit", "off", "replay off", ""),
    )
    cells = [
        (
            *(str(row[name]) for name in ("part", "what", "precision", "batch")),
            "n" if row["k"] is None else str(row["k"]),
            *(_cell(row[name], ".3f") for name in ("gpu_ms", "gpu_spread_ms", "host_ms")),
            _cell(row["over_limit"], ".1f"),
            *(_cell(row[name], ".1e") for name in ("off", "replay_off")),
            row["error"] or row["plain"] or ("" if row["passed"] else "FAILED"),
        )
        for row in rows
    ]
    listed = ", ".join(f"{name} {value:,.0f}" for name, value in (rates or {}).items())
    return f"{table(heads, cells)}\n\nmeasured rates: {listed}"


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def main() -> None:
    """Measures all rows; exits with 1 if one failed, or if there is no GPU and no `--tiny`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu-rows.json"))
    parser.add_argument("--minutes", type=float, default=8.0, help="the time limit")
    parser.add_argument(
        "--tiny", action="store_true", help="run everything at small sizes, even on a CPU"
    )
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not asked.tiny:
        sys.exit("error: PyTorch finds no GPU here\nhint: --tiny runs everything at small sizes")
    if not run(asked.output, TINY if asked.tiny else FULL, device, asked.minutes):
        sys.exit(f"error: a row failed; see {asked.output}")


if __name__ == "__main__":
    main()
