"""One Soft MoE layer at the shapes of the speed targets: every k and lowering against PyTorch.

PyTorch's dense layer is measured in both forms in which it is published: a loop over experts that
are modules of their own, and experts stacked in one tensor with batched matmuls.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import onnxruntime as ort
import torch
from moexport.bench.measure.roofline import Microbenchmarks, Rates, layer_parts, limit_ms
from moexport.bench.results import ModelInfo, Results, Row
from moexport.bench.runners.candidates import Sweep, exported
from moexport.common import timing
from moexport.common.environment import environment, usable_cores
from moexport.exporter.families.layer_only import TokenBackbone
from moexport.exporter.model import Model, Source, TensorSpec
from moexport.graphs.choices import Precision
from moexport.graphs.layers.soft_moe import SoftMoE, SoftMoESpec, SoftMoEWeights, algorithm_1
from moexport.graphs.lowerings import LOWERINGS as SOFT_MOE_LOWERINGS
from moexport.graphs.lowerings.choice import choose
from moexport.graphs.lowerings.cost import Work
from torch import nn

TOKENS, DIM = 197, 768

BATCHES = (1, 4, 16, 100)

LOWERINGS = ("dense", "gather", "grouped", "conditional")

GATHER_LIMIT_BYTES = 2 << 30
"""`gather` is left out where one batch would copy more weights than this."""

CALIBRATION_INPUTS = 16
"""Inputs that give INT8 its ranges."""

STACKED, LOOP, COMPILED, PLAIN = "stacked", "loop", "torch.compile", "torch.onnx"

BASELINES = (STACKED, LOOP, COMPILED, PLAIN)
"""The untouched layer: eager in both published forms, and the stacked one compiled or exported by
PyTorch itself."""

ALGORITHM_2 = "algorithm-2"

Measured = tuple[str, int, Precision]
"""What is measured: a baseline or a lowering, its k, and its precision."""

Key = TypeVar("Key", bound=tuple[object, ...])


@dataclass(frozen=True, slots=True)
class Shape:
    """The experts of a layer: n of them with hidden width h."""

    experts: int
    hidden: int

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"n={self.experts}, h={self.hidden}"

    @property
    def ks(self) -> tuple[int, ...]:
        """Every k that is measured."""
        n = self.experts
        return tuple(sorted({n, n // 2, n // 4, n // 8, max(1, n // 32), 1}, reverse=True))

    @property
    def integer_ks(self) -> tuple[int, ...]:
        """Every k that is measured in INT8."""
        n = self.experts
        return (n, n // 2, n // 4, n // 8)


SHAPES = (Shape(8, 7680), Shape(128, 384))

LARGE = Shape(8, 30720)
"""Table 3's own layer: 1.5 GB of weights, so only the choice of `auto` is measured."""

HELD_OUT = Shape(32, 1536)
"""A layer that the cost model was not fitted to."""


def spec_of(shape: Shape) -> SoftMoESpec:
    """The layer of the ViT family: L2-normalised tokens, exact GELU."""
    return SoftMoESpec("layer", shape.experts, 1, DIM, shape.hidden, DIM, norm="l2", norm_eps=1e-12)


def random_weights(shape: Shape) -> tuple[SoftMoEWeights, SoftMoEWeights]:
    """The same weights stacked and one by one, of a plausible scale; they share their storage.

    The scale of phi spreads the routing over the experts.
    """
    random = torch.Generator().manual_seed(0)

    def draw(*size: int, scale: float) -> torch.Tensor:
        return torch.randn(*size, generator=random) * scale

    n, h = shape.experts, shape.hidden
    phi = torch.nn.functional.normalize(draw(DIM, n, 1, scale=1.0), dim=0) * 10.0
    first = draw(n, h, DIM, scale=DIM**-0.5)
    second = draw(n, DIM, h, scale=h**-0.5)
    b1, b2 = draw(n, h, scale=0.1), draw(n, DIM, scale=0.1)
    whole = SoftMoEWeights(phi, first.transpose(1, 2), b1, second.transpose(1, 2), b2)
    apart = SoftMoEWeights(
        phi, tuple(w.T for w in first.unbind()), b1, tuple(w.T for w in second.unbind()), b2
    )
    return whole, apart


def layer_model(shape: Shape, weights: SoftMoEWeights) -> Model:
    """The layer alone as a model; its token count is a constant, as in a ViT."""
    layer = SoftMoE(spec_of(shape), weights)
    port = TensorSpec("input", "float32", ("batch", TOKENS, DIM))
    return Model(
        TokenBackbone(layer).eval(),
        "soft-moe-vit",
        {},
        Source(shape.name, ()),
        (port,),
        (TensorSpec("output", "float32", ("batch", TOKENS, DIM)),),
    )


def tokens_of(batch: int) -> np.ndarray:
    """Inputs whose routing differs from input to input: each has its own direction and noise."""
    random = np.random.default_rng(1)
    own = random.standard_normal((batch, 1, DIM))
    return (own + random.standard_normal((batch, TOKENS, DIM))).astype(np.float32)


def run(
    shapes: tuple[Shape, ...] = (*SHAPES, HELD_OUT, LARGE),
    batches: tuple[int, ...] = BATCHES,
    *,
    round_s: float = 0.2,
    progress: Callable[[str], None] = print,
) -> Iterator[Results]:
    """Yields a row per shape, batch, engine, lowering and k: all so far, after each shape.

    All cases of a batch are interleaved. Each shape has a process of its own, which gives its
    memory back.
    """
    threads = usable_cores()
    rows: list[Row] = []
    rates: list[Rates] = []
    for index, shape in enumerate(shapes):
        progress(f"{shape.name}: exporting")
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
            found = process.submit(measure, shape, batches, round_s, threads).result()
        rows += found[0]
        rates += found[1]
        yield Results(
            tuple(ModelInfo(s.name, "soft-moe-vit", "random weights") for s in shapes[: index + 1]),
            tuple(rows),
            environment() | {"threads": threads},
            {"rounds": timing.MIN_ROUNDS, "round_s": round_s, "tokens": TOKENS, "dim": DIM}
            | asdict(_typical(rates)),
            command="python -m perf layers",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def measure(
    shape: Shape, batches: tuple[int, ...], round_s: float, threads: int
) -> tuple[list[Row], list[Rates]]:
    """Returns the rows of a shape, and the machine's rates beside each batch."""
    torch.set_num_threads(threads)
    machine = Microbenchmarks(threads)
    rows: list[Row] = []
    rates: list[Rates] = []
    with ExitStack() as stack:
        entered = _enter(shape, batches, threads, stack)
        for batch in batches:
            found, rate = _time_batch(entered, batch, round_s, machine, to_stderr)
            rows += found
            rates.append(rate)
    return rows, rates


def to_stderr(line: str) -> None:
    """Says what is being measured, or failed."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Entered:
    """Everything that is measured of one shape."""

    shape: Shape
    stacked: Model
    loop: Model
    plain: Callable[[torch.Tensor], object]
    graphs: dict[Measured, Callable[[np.ndarray], object]]


def _enter(shape: Shape, batches: tuple[int, ...], threads: int, stack: ExitStack) -> _Entered:
    stacked, loop = (layer_model(shape, weights) for weights in random_weights(shape))
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="moexport-plain-")))
    plain = plain_onnx(stacked.module, torch.from_numpy(tokens_of(1)), folder, threads)
    lowerings = ("auto",) if shape == LARGE else LOWERINGS
    floats = Sweep(ks=shape.ks, lowerings=lowerings, batches=batches, threads=threads)
    integers = replace(
        floats,
        ks=shape.integer_ks,
        precisions=("int8",),
        calibration=tokens_of(CALIBRATION_INPUTS),
    )
    graphs: dict[Measured, Callable[[np.ndarray], object]] = {}
    forms: tuple[tuple[Precision, Sweep], ...] = (("fp32", floats), ("int8", integers))
    for precision, asked in forms:
        candidate = stack.enter_context(exported(loop, asked))
        for source in candidate.graphs:
            graphs[str(source.lowering), source.k, precision] = source.open().infer
    return _Entered(shape, stacked, loop, plain, graphs)


def _time_batch(
    entered: _Entered,
    batch: int,
    round_s: float,
    machine: Microbenchmarks,
    progress: Callable[[str], None],
) -> tuple[list[Row], Rates]:
    """Measures everything at one batch size; the machine's rates in the same rounds."""
    shape, x = entered.shape, tokens_of(batch)
    tokens = torch.from_numpy(x)
    n = shape.experts
    calls: dict[Measured, Callable[[], object]] = {
        (STACKED, n, "fp32"): partial(entered.stacked.module, tokens),
        (LOOP, n, "fp32"): partial(entered.loop.module, tokens),
        (COMPILED, n, "fp32"): compiled(entered.stacked.module, tokens),
        (PLAIN, n, "fp32"): partial(entered.plain, tokens),
    }
    for k in shape.ks[1:]:
        calls[ALGORITHM_2, k, "fp32"] = partial(_algorithm_2, entered.loop, k, tokens)
    for (lowering, k, precision), graph in entered.graphs.items():
        if _fits(shape, lowering, k, batch, precision):
            calls[lowering, k, precision] = partial(graph, x)
    progress(f"{shape.name}, batch {batch}: {len(calls)} cases")
    protocol = timing.Protocol(round_s=round_s, warmup=2, inputs=1)
    latencies, measured = timed_calls(calls, protocol, progress, machine)
    rates = machine.rates(measured)
    rows = [
        _row(shape, k, batch, name, precision, latency, rates)
        for (name, k, precision), latency in latencies.items()
    ]
    return rows, rates


def timed_calls(
    calls: Mapping[Key, Callable[[], object]],
    protocol: timing.Protocol,
    progress: Callable[[str], None],
    machine: Microbenchmarks | None = None,
) -> tuple[dict[Key, timing.Latency], Mapping[str, timing.Latency]]:
    """Returns the latency of each call that does not fail, and all latencies by name.

    All are interleaved, the `machine` of the machine's rates with them.
    """
    names = {" ".join(map(str, key)): key for key in calls}
    cases: dict[str, timing.Call] = {} if machine is None else dict(machine.calls)
    cases |= {name: partial(_ignoring_index, calls[key]) for name, key in names.items()}
    with torch.inference_mode():
        measured = timing.measure(cases, protocol)
    for name, error in measured.failures.items():
        progress(f"failed: {name}: {error}")
    found = measured.latencies
    return {key: found[name] for name, key in names.items() if name in found}, found


def _ignoring_index(call: Callable[[], object], index: int) -> object:
    return call()


def compiled(module: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """Returns a call of the module compiled for exactly this input."""
    call = torch.compile(module, dynamic=False)
    return lambda: call(x)


def plain_onnx(
    module: nn.Module, x: torch.Tensor, folder: Path, threads: int
) -> Callable[[torch.Tensor], object]:
    """Returns the module as `torch.onnx.export` writes it, in ONNX Runtime on a CPU."""
    path = folder / "plain.onnx"
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            (x[:1].expand(2, *x.shape[1:]),),
            dynamo=True,
            input_names=["input"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
        assert program is not None
        program.save(path, external_data=True)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def call(tokens: torch.Tensor) -> list[np.ndarray]:
        outputs: list[np.ndarray] = session.run(None, {"input": tokens.numpy()})
        return outputs

    return call


def _typical(rates: list[Rates]) -> Rates:
    """The medians of what several batches measured."""
    return Rates(
        *(
            float(np.median([getattr(rate, field.name) for rate in rates]))
            for field in fields(Rates)
        )
    )


def _fits(shape: Shape, lowering: str, k: int, batch: int, precision: Precision) -> bool:
    """Whether a graph is measured at a batch: of a large layer, only what `auto` takes there."""
    if shape == LARGE:
        return lowering == chosen(shape, k, batch, precision)
    work = Work(spec_of(shape), k, batch, TOKENS, precision)
    return SOFT_MOE_LOWERINGS[lowering].copied_bytes(work) <= GATHER_LIMIT_BYTES


def _algorithm_2(model: Model, k: int, tokens: torch.Tensor) -> torch.Tensor:
    with algorithm_1(model.module, {"layer": k}, algorithm="selected"):
        output: torch.Tensor = model.module(tokens)
    return output


_ENGINES = {
    STACKED: "pytorch-eager",
    LOOP: "pytorch-eager",
    COMPILED: "pytorch-compile",
    ALGORITHM_2: "pytorch-algorithm-2",
}


def _row(
    shape: Shape,
    k: int,
    batch: int,
    name: str,
    precision: Precision,
    latency: timing.Latency,
    rates: Rates,
) -> Row:
    work = Work(spec_of(shape), k, batch, TOKENS, precision)
    return Row(
        engine=_ENGINES.get(name, "onnxruntime"),
        k=k,
        experts=shape.experts,
        batch=batch,
        model=shape.name,
        provider="cpu",
        precision=precision,
        lowering=name,
        latency_ms=latency,
        limit_ms=limit_ms(tuple(layer_parts(work, int8_experts=precision == "int8")), rates),
        throughput=1000 * batch / latency.median,
    )


def chosen(shape: Shape, k: int, batch: int, precision: Precision = "fp32") -> str:
    """What `auto` takes for a cell of the grid."""
    return choose(Work(spec_of(shape), k, batch, TOKENS, precision), "ort-cpu").lowering.name
