"""A whole Soft MoE ViT-B/16 for every k, against PyTorch eager and compiled, and `torch.onnx`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import moexport
import numpy as np
import torch
from moexport.bench.measure.roofline import (
    NO_PRODUCTS,
    Microbenchmarks,
    ModelWork,
    Products,
    Rates,
    limit_ms,
    products_of,
    work_of,
)
from moexport.bench.plan import IntegerLinear
from moexport.bench.results import ModelInfo, Results, Row
from moexport.bench.runners.candidates import Sweep, exported
from moexport.common import timing
from moexport.common.environment import environment, usable_cores

from .layers import COMPILED, PLAIN, Shape, compiled, plain_onnx, timed_calls, to_stderr
from .scale import vit_checkpoint

SHAPES = (Shape(128, 384), Shape(8, 7680))
BATCHES = (1, 16)
CALIBRATION_IMAGES = 8
"""Images that give INT8 its ranges."""

EAGER = "eager"
_ENGINES = {EAGER: "pytorch-eager", COMPILED: "pytorch-compile"}
AUTO = "auto"
INT8 = "auto, INT8"
"""The exported graphs: in FP32, and with all linear layers but the head in INT8."""


@dataclass(frozen=True)
class _Vit:
    """A model with random weights, everything measured of it, and what one input asks for."""

    shape: Shape
    name: str
    model: moexport.Model
    work: ModelWork
    plain: Callable[[torch.Tensor], object]
    graphs: dict[tuple[str, int], Callable[[np.ndarray], object]]
    integers: Products


def name_of(shape: Shape) -> str:
    """How tables call the model with such experts."""
    return f"ViT-B/16, 6 MoE layers, {shape.name}"


def kept(shape: Shape) -> tuple[int, ...]:
    """Every k that is measured."""
    n = shape.experts
    return (n, n // 2, n // 4, n // 8)


def run(
    shapes: tuple[Shape, ...] = SHAPES,
    batches: tuple[int, ...] = BATCHES,
    *,
    round_s: float = 0.2,
    progress: Callable[[str], None] = print,
) -> Iterator[Results]:
    """Yields a row per model, batch, engine and k: all so far, after each model and batch.

    All cases of a batch are interleaved, in a process of their own: what they hold is several
    times a model.
    """
    threads = usable_cores()
    rows: list[Row] = []
    models: dict[str, ModelInfo] = {}
    for shape, batch in product(shapes, batches):
        progress(f"{name_of(shape)}, batch {batch}")
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
            info, found = process.submit(_measure, shape, batch, round_s, threads).result()
        models[info.name] = info
        rows += found
        yield Results(
            tuple(models.values()),
            tuple(rows),
            environment() | {"threads": threads},
            {"rounds": timing.MIN_ROUNDS, "round_s": round_s},
            command="python -m perf models",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def _measure(shape: Shape, batch: int, round_s: float, threads: int) -> tuple[ModelInfo, list[Row]]:
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        vit = _enter(shape, batch, threads, stack)
        parameters = sum(p.numel() for p in vit.model.module.parameters())
        info = ModelInfo(vit.name, vit.model.family, "random weights", parameters)
        return info, _time_batch(vit, batch, round_s, Microbenchmarks(threads))


def _images(batch: int) -> np.ndarray:
    random = np.random.default_rng(1)
    return random.standard_normal((batch, 3, 224, 224)).astype(np.float32)


def _enter(shape: Shape, batch: int, threads: int, stack: ExitStack) -> _Vit:
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="moexport-vit-")))
    checkpoint = folder / "vit.pt"
    # Stacked experts are the faster of the two published forms in PyTorch.
    vit_checkpoint(checkpoint, experts=shape.experts, hidden=shape.hidden, stacked=True)
    model = moexport.load(checkpoint, config={"num_heads": 12, "rest": "default"})
    plain = plain_onnx(model.module, torch.from_numpy(_images(1)), folder, threads)
    floats = Sweep(ks=kept(shape), batches=(batch,), threads=threads)
    integers = replace(
        floats, precisions=("int8",), calibration=_images(CALIBRATION_IMAGES), scope="all"
    )
    graphs: dict[tuple[str, int], Callable[[np.ndarray], object]] = {}
    linears: tuple[IntegerLinear, ...] = ()
    for name, asked in ((AUTO, floats), (INT8, integers)):
        candidate = stack.enter_context(exported(model, asked))
        graphs |= {(name, source.k): source.open().infer for source in candidate.graphs}
        linears = candidate.graphs[0].integers
    work, products = work_of(model, _images(1)), products_of(linears, {"batch": 1})
    return _Vit(shape, name_of(shape), model, work, plain, graphs, products)


def _time_batch(
    vit: _Vit,
    batch: int,
    round_s: float,
    machine: Microbenchmarks,
) -> list[Row]:
    x, n = _images(batch), vit.shape.experts
    images = torch.from_numpy(x)
    calls: dict[tuple[str, int], Callable[[], object]] = {
        (EAGER, n): partial(vit.model.module, images),
        (COMPILED, n): compiled(vit.model.module, images),
        (PLAIN, n): partial(vit.plain, images),
    }
    for case, graph in vit.graphs.items():
        calls[case] = partial(graph, x)
    protocol = timing.Protocol(round_s=round_s, warmup=1)
    latencies, measured = timed_calls(calls, protocol, to_stderr, machine)
    rates = machine.rates(measured)
    return [_row(vit, k, batch, name, found, rates) for (name, k), found in latencies.items()]


def _row(vit: _Vit, k: int, batch: int, name: str, latency: timing.Latency, rates: Rates) -> Row:
    int8 = name == INT8
    parts = vit.work.parts(
        dict.fromkeys(vit.model.layers, k),
        batch,
        int8=vit.model.layers if int8 else (),
        int8_backbone=vit.integers if int8 else NO_PRODUCTS,
    )
    return Row(
        engine=_ENGINES.get(name, "onnxruntime"),
        k=k,
        experts=vit.shape.experts,
        batch=batch,
        model=vit.name,
        provider="cpu",
        precision="int8" if int8 else "fp32",
        lowering=name,
        latency_ms=latency,
        limit_ms=limit_ms(parts, rates),
        throughput=1000 * batch / latency.median,
    )
