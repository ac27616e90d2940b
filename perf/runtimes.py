"""Compares a whole Soft MoE ViT-S/16 in ONNX Runtime and OpenVINO with peers, in each precision.

The peers are PyTorch, eager and compiled, `torch.onnx` in both runtimes, OpenVINO's own conversion
from PyTorch and, if NNCF is installed, the INT8 version that NNCF makes of it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import moexport
import numpy as np
import torch
from moexport.bench.data import LabelledData
from moexport.bench.engines import ONNXRUNTIME, PYTORCH_COMPILE, PYTORCH_EAGER, titles
from moexport.bench.measure.roofline import Microbenchmarks, Rates
from moexport.bench.plan import GraphSource
from moexport.bench.request import BenchRequest
from moexport.bench.results import ModelInfo, Results, Row
from moexport.bench.runners.base import GraphFile, Loader, Refused, Runner, first_of
from moexport.bench.runners.exported import exported
from moexport.bench.runners.graphs import SessionLoader
from moexport.common import timing
from moexport.common.console import Progress
from moexport.common.text import markdown
from moexport.exporter.inputs import Inputs
from moexport.exporter.model import Model
from moexport.exporter.session import SessionOptions
from moexport.plugins.openvino.session import OPENVINO, openvino_package

from .layers.soft_moe import COMPILED, plain_onnx
from .measure import in_own_process, ms, random_weights, results, threads, timed, times
from .scale import vit_checkpoint

EXPERTS, DIM, HIDDEN, HEADS = 32, 384, 1536, 6
BATCHES = (1, 16)
CALIBRATION_IMAGES = 8
PROTOCOL = timing.Protocol(warmup=1, inputs=2)

EAGER, CONVERTED, NNCF = "eager", "ov.convert_model", "NNCF"
ALL, QUARTER = "k = n", "k = n/4"


def run(
    progress: Progress,
    batches: tuple[int, ...] = BATCHES,
    protocol: timing.Protocol = PROTOCOL,
    depth: int = 12,
) -> Iterator[Results]:
    """Yields a row per batch, engine, precision and k: all rows so far, after each batch."""
    rows: list[Row] = []
    rates: list[Rates] = []
    for batch in batches:
        progress.step(f"ViT-S/16, {EXPERTS} experts, batch {batch}")
        info, found, rate = in_own_process(measure, batch, protocol, depth)
        rows += found
        rates.append(rate)
        yield results("runtimes", [info], rows, protocol, rates)


def measure(
    batch: int, protocol: timing.Protocol, depth: int = 12
) -> tuple[ModelInfo, list[Row], Rates]:
    """Returns the rows of one batch size, all timed in turn."""
    count = threads()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="moexport-vit-")))
        vit_checkpoint(
            folder / "vit.pt",
            experts=EXPERTS,
            hidden=HIDDEN,
            dim=DIM,
            depth=depth,
            moe_from=depth // 2,
        )
        model = moexport.load(folder / "vit.pt", config={"num_heads": HEADS, "rest": "default"})
        info = random_weights(model, f"ViT-S/16, {EXPERTS} experts")
        images = _images(CALIBRATION_IMAGES)
        plain = stack.enter_context(plain_onnx(model, _images(2), count))
        assert plain.loader.file is not None
        graph = GraphFile(path=plain.loader.file, threads=count)
        in_openvino = SessionLoader(graph, SessionOptions(runtime=OPENVINO))
        peers = [plain, replace(plain, loader=in_openvino, engine=OPENVINO)]
        peers += converted(model, images, count)
        asked = BenchRequest(
            k=("n", EXPERTS // 4),
            batch=(batch,),
            engine=(ONNXRUNTIME, OPENVINO, PYTORCH_COMPILE),
            precision=("fp32", "bf16", "int8"),
            quantize="all",
            target="ort-cpu",
            threads=count,
        )
        candidate = stack.enter_context(exported(model, asked, inputs=images, name=info.name))
        named = [
            replace(each, lowering=ALL if each.k == EXPERTS else QUARTER)
            for each in candidate.graphs
            if each.engine in (ONNXRUNTIME, OPENVINO) and not isinstance(each.loader, Refused)
        ]
        rows, rates = timed(
            replace(candidate, graphs=(*peers, *named), ks=()),
            LabelledData(_images(batch), None),
            protocol,
            Microbenchmarks(count, bf16=True),
            {PYTORCH_EAGER: EAGER, PYTORCH_COMPILE: COMPILED},
        )
        # It is unknown which products NNCF computes in integers.
        known = [replace(row, limit_ms=None) if row.lowering == NNCF else row for row in rows]
        return info, known, rates


def converted(model: Model, images: np.ndarray, count: int) -> Iterator[GraphSource]:
    """Yields a model as OpenVINO converts it from PyTorch, and the same model in NNCF's INT8."""
    load = partial(_converted, model, images)
    yield GraphSource(EXPERTS, CONVERTED, ConvertedLoader(load, count), engine=OPENVINO)
    if importlib.util.find_spec("nncf") is not None:
        load = partial(_nncf, model, images)
        loader = ConvertedLoader(load, count)
        yield GraphSource(EXPERTS, NNCF, loader, precision="int8", engine=OPENVINO)


def _converted(model: Model, images: np.ndarray) -> Any:
    example = torch.from_numpy(images[:2])
    with torch.no_grad():
        return openvino_package().convert_model(
            model.untouched, example_input=example, input=[[-1, *images.shape[1:]]]
        )


def _nncf(model: Model, images: np.ndarray) -> Any:
    import nncf

    data = nncf.Dataset([each[None] for each in images])
    kind = nncf.ModelType.TRANSFORMER
    return nncf.quantize(_converted(model, images), data, model_type=kind)


@dataclass(frozen=True)
class ConvertedRunner(Runner):
    """A compiled network that OpenVINO converted."""

    request: Any

    def infer(self, x: Inputs, output: int = 0) -> np.ndarray:
        """Maps inputs [b, …] to outputs [b, …]."""
        y: np.ndarray = self.bound(x)()[0]
        return y

    def bound(self, x: Inputs) -> Callable[[], Any]:
        """Returns the runtime's own call."""
        return partial(self.request.infer, [first_of(x)], share_inputs=True)


@dataclass(frozen=True)
class ConvertedLoader(Loader):
    """Converts a network and compiles it in the way that `OpenVinoSession` compiles a graph."""

    load: Callable[[], Any]
    threads: int

    def __call__(self) -> Runner:
        """Returns the compiled network."""
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": self.threads,
        }
        compiled = openvino_package().Core().compile_model(self.load(), "CPU", settings)
        return ConvertedRunner(compiled.create_infer_request())


def _images(batch: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((batch, 3, 224, 224), np.float32)


def table(results: Results) -> str:
    """Returns the medians in ms as Markdown, also relative to FP32 in ONNX Runtime at k = n/4.

    A last column has them divided by the minimum time that this machine needs for the products.
    """
    medians = {(_key(row), row.batch): row.median_ms for row in results.rows}
    limits = {(_key(row), row.batch): row.limit_ms for row in results.rows}
    batches = sorted({row.batch for row in results.rows})
    lines = []
    for key in dict.fromkeys(_key(row) for row in results.rows):
        cells: list[str] = []
        for batch in batches:
            base = medians.get(((QUARTER, ONNXRUNTIME, "fp32"), batch))
            own = medians.get((key, batch))
            cells += [ms(own), times(base, own), times(own, limits.get((key, batch)))]
        name, engine, precision = key
        lines.append((name, titles().get(engine, engine), precision.upper(), *cells))
    header = ["graph", "runtime", "precision"]
    for batch in batches:
        header += [f"batch {batch}", "vs k = n/4, FP32", "× limit"]
    return markdown(tuple(header), lines, words=3)


def _key(row: Row) -> tuple[str, str, str]:
    return str(row.lowering), row.engine, row.precision
