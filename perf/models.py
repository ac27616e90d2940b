"""Compares a whole Soft MoE ViT-B/16 at every k with PyTorch, compiled PyTorch and `torch.onnx`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import moexport
import numpy as np
from moexport.bench.data import LabelledData
from moexport.bench.engines import ONNXRUNTIME, PYTORCH_COMPILE, PYTORCH_EAGER
from moexport.bench.measure.roofline import Microbenchmarks, Rates
from moexport.bench.request import BenchRequest
from moexport.bench.results import ModelInfo, Results, Row
from moexport.bench.runners.exported import exported
from moexport.common import timing
from moexport.common.console import Progress
from moexport.common.text import markdown

from .layers.soft_moe import COMPILED, PLAIN, SHAPES, Layer, plain_onnx
from .measure import in_own_process, ms, random_weights, results, threads, timed, times
from .scale import vit_checkpoint

BATCHES = (1, 16)
CALIBRATION_IMAGES = 8
"""The number of images for INT8's ranges."""

PROTOCOL = timing.Protocol(warmup=1)

EAGER, AUTO, INT8 = "eager", "auto", "auto, INT8"
"""The untouched model and the exported graphs, in FP32 and with all linear layers except the head
in INT8."""


def run(
    progress: Progress,
    layers: tuple[Layer, ...] = SHAPES[::-1],
    batches: tuple[int, ...] = BATCHES,
    protocol: timing.Protocol = PROTOCOL,
) -> Iterator[Results]:
    """Yields a row per model, batch, engine and k: all rows so far, after each model and batch.

    All cases of a batch take turns in one process, which needs memory for several models.
    """
    models: dict[str, ModelInfo] = {}
    rows: list[Row] = []
    rates: list[Rates] = []
    for layer, batch in product(layers, batches):
        progress.step(f"ViT-B/16, {layer.name}, batch {batch}: exporting")
        info, found, rate = in_own_process(measure, layer, batch, protocol)
        models[info.name] = info
        rows += found
        rates.append(rate)
        yield results("models", models.values(), rows, protocol, rates)


def measure(
    layer: Layer, batch: int, protocol: timing.Protocol
) -> tuple[ModelInfo, list[Row], Rates]:
    """Returns the rows of a model with six such MoE layers, for k from n to n/8."""
    count = threads()
    with ExitStack() as stack:
        checkpoint = Path(stack.enter_context(TemporaryDirectory(prefix="moexport-vit-"))) / "v.pt"
        # Stacked experts are the faster of the two published forms in PyTorch.
        vit_checkpoint(checkpoint, experts=layer.experts, hidden=layer.hidden, stacked=True)
        model = moexport.load(checkpoint, config={"num_heads": 12, "rest": "default"})
        info = random_weights(model, f"ViT-B/16, 6 MoE layers, {layer.name}")
        floats = BenchRequest(
            k=layer.integer_ks,
            batch=(batch,),
            engine=(ONNXRUNTIME, PYTORCH_COMPILE),
            target="ort-cpu",
            threads=count,
        )
        integers = replace(floats, precision="int8", quantize="all")
        images = _images(CALIBRATION_IMAGES)
        plain = stack.enter_context(plain_onnx(model, _images(2), count))
        graphs = [plain]
        for name, asked in ((AUTO, floats), (INT8, integers)):
            candidate = stack.enter_context(exported(model, asked, inputs=images, name=info.name))
            graphs += [replace(graph, lowering=name) for graph in candidate.graphs]
        rows, rates = timed(
            replace(candidate, graphs=tuple(graphs)),
            LabelledData(_images(batch), None),
            protocol,
            Microbenchmarks(count),
            {PYTORCH_EAGER: EAGER, PYTORCH_COMPILE: COMPILED},
        )
        return info, rows, rates


def _images(batch: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((batch, 3, 224, 224), np.float32)


def table(results: Results, batch: int | None = None) -> str:
    """Returns whole models as Markdown: medians in ms for every k, with their limits.

    With `batch`, only for that batch size.
    """
    lines = []
    found = {(row.model, row.batch, row.lowering, row.k): row for row in results.rows}
    for (model, size, lowering, k), row in found.items():
        if lowering != AUTO or row.median_ms is None or batch not in (None, size):
            continue
        untouched = [
            other.median_ms if (other := found.get((model, size, name, row.experts))) else None
            for name in (EAGER, COMPILED, PLAIN)
        ]
        integers = found.get((model, size, INT8, k))
        integer_ms = None if integers is None else integers.median_ms
        limit = None if integers is None else integers.limit_ms
        lines.append(
            (
                *(model.rpartition("layers, ")[2], str(size), str(k), *map(ms, untouched)),
                *(ms(row.median_ms), ms(row.limit_ms), times(untouched[0], row.median_ms)),
                *(ms(integer_ms), ms(limit), times(untouched[0], integer_ms)),
            )
        )
    header = (
        *("experts", "batch", "k", "PyTorch eager", "`torch.compile`", "`torch.onnx`"),
        *("FP32", "limit", "vs eager", "INT8", "limit", "vs eager"),
    )
    return markdown(header, lines)
