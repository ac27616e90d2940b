"""Compares one Soft MoE layer with PyTorch, at the shapes of the speed targets, by k and lowering.

PyTorch's dense layer is measured in both published forms: a loop over experts that are separate
modules, and experts stacked in one tensor with batched matmuls.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from moexport.bench.data import LabelledData
from moexport.bench.engines import ONNXRUNTIME, PYTORCH_ALGORITHM_2, PYTORCH_COMPILE, PYTORCH_EAGER
from moexport.bench.measure.roofline import Microbenchmarks, Rates
from moexport.bench.plan import GraphSource
from moexport.bench.request import BenchRequest
from moexport.bench.results import ModelInfo, Results, Row
from moexport.bench.runners.base import GraphFile
from moexport.bench.runners.exported import exported
from moexport.bench.runners.graphs import SessionLoader
from moexport.common import timing
from moexport.common.console import Progress
from moexport.examples.studies.random_layers import (
    layer_model,
    one_by_one,
    random_tokens,
    soft_moe_spec,
    soft_moe_weights,
)
from moexport.exporter.model import Model
from moexport.graphs.layers.expert import Activation
from moexport.graphs.layers.soft_moe import SoftMoE, SoftMoESpec
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.lowerings.base import SoftMoEPlan
from moexport.graphs.lowerings.choice import choose
from moexport.graphs.targets import Precision

from ..measure import in_own_process, in_pytorch, opened, results, threads, timed

BATCHES = (1, 4, 16, 100)

LOWERINGS = ("dense", "gather", "grouped", "conditional")

GATHER_LIMIT_BYTES = 2 << 30
"""`gather` is not measured if one batch would copy more weights than this."""

CALIBRATION_INPUTS = 16
"""The number of inputs for INT8's ranges."""

PROTOCOL = timing.Protocol(warmup=2)

STACKED, LOOP, COMPILED, PLAIN = "stacked", "loop", "torch.compile", "torch.onnx"

BASELINES = (STACKED, LOOP, COMPILED, PLAIN)
"""The untouched layer: eager in both published forms, and the stacked form compiled or exported by
PyTorch itself."""

ALGORITHM_2 = "algorithm-2"


@dataclass(frozen=True, slots=True)
class Layer:
    """The sizes of a layer: d, n, h, p and its tokens m."""

    dim: int
    experts: int
    hidden: int
    slots: int = 1
    tokens: int = 197
    activation: Activation = "gelu"

    @property
    def name(self) -> str:
        """The name of the layer in tables and results."""
        return f"n={self.experts}, h={self.hidden}"

    @property
    def ks(self) -> tuple[int, ...]:
        """Every k of the grid."""
        n = self.experts
        return tuple(sorted({n, n // 2, n // 4, n // 8, max(1, n // 32), 1}, reverse=True))

    @property
    def integer_ks(self) -> tuple[int, ...]:
        """Every k of the grid in INT8."""
        n = self.experts
        return (n, n // 2, n // 4, n // 8)

    @property
    def spec(self) -> SoftMoESpec:
        """The spec of the layer, in the ViT family."""
        return soft_moe_spec(
            "layer",
            experts=self.experts,
            dim=self.dim,
            hidden=self.hidden,
            slots=self.slots,
            activation=self.activation,
        )

    def plan(self, k: int, batch: int, precision: Precision = "fp32") -> SoftMoEPlan:
        """Returns the plan of the layer."""
        return SoftMoEPlan(self.spec, k, batch, self.tokens, precision)

    def chosen(self, k: int, batch: int, precision: Precision = "fp32") -> str:
        """Returns the choice of `auto` on a CPU."""
        return choose(self.plan(k, batch, precision), "ort-cpu").lowering.name

    def models(self) -> tuple[Model, Model]:
        """Returns models of the layer with the same weights: experts stacked, and one by one."""
        stacked = soft_moe_weights(self.spec)
        first, second = (
            layer_model(self.name, SoftMoE(self.spec, weights), self.tokens)
            for weights in (stacked, one_by_one(stacked))
        )
        return first, second

    def inputs(self, samples: int) -> LabelledData:
        """Returns random tokens."""
        return random_tokens(samples, self.tokens, self.dim)


SHAPES = (Layer(768, 8, 7680), Layer(768, 128, 384))

LARGE = Layer(768, 8, 30720)
"""The layer of Table 3. It has 1.5 GB of weights, so only the choice of `auto` is measured."""

HELD_OUT = Layer(768, 32, 1536)
"""A layer that the cost model was not fitted to."""


def run(
    progress: Progress,
    layers: tuple[Layer, ...] = (*SHAPES, HELD_OUT, LARGE),
    batches: tuple[int, ...] = BATCHES,
    protocol: timing.Protocol = PROTOCOL,
) -> Iterator[Results]:
    """Yields a row per layer, batch, engine, lowering and k: all rows so far, after each layer.

    All cases of a batch are interleaved.
    """
    rows: list[Row] = []
    rates: list[Rates] = []
    for index, layer in enumerate(layers):
        progress.step(f"{layer.name}: exporting")
        found = in_own_process(measure, layer, batches, protocol)
        rows += found[0]
        rates += found[1]
        models = [ModelInfo(s.name, "soft-moe-vit", "random weights") for s in layers[: index + 1]]
        facts = {"tokens": layer.tokens, "dim": layer.dim}
        yield results("layers", models, rows, protocol, rates, **facts)


def measure(
    layer: Layer, batches: tuple[int, ...], protocol: timing.Protocol
) -> tuple[list[Row], list[Rates]]:
    """Returns the rows of a layer, and the machine's rates for each batch."""
    count = threads()
    machine = Microbenchmarks(count)
    stacked, loop = layer.models()
    lowerings = ("auto",) if layer == LARGE else LOWERINGS
    floats = BenchRequest(
        k=layer.ks,
        lowering=lowerings,
        batch=batches,
        engine=(PYTORCH_ALGORITHM_2, ONNXRUNTIME),
        target="ort-cpu",
        threads=count,
    )
    integers = replace(floats, k=layer.integer_ks, precision="int8")
    inputs = layer.inputs(CALIBRATION_INPUTS).inputs
    rows: list[Row] = []
    rates: list[Rates] = []
    with ExitStack() as stack:
        baselines = opened(
            in_pytorch(stacked, PYTORCH_EAGER, STACKED),
            in_pytorch(stacked, PYTORCH_COMPILE, COMPILED, batches),
            stack.enter_context(plain_onnx(stacked, layer.inputs(2).inputs, count)),
        )
        candidate = stack.enter_context(exported(loop, floats, name=layer.name))
        lowered = (
            candidate.graphs + stack.enter_context(exported(loop, integers, inputs=inputs)).graphs
        )
        lowered = opened(*lowered)
        for batch in batches:
            graphs = tuple(graph for graph in lowered if _fits(layer, graph, batch))
            found, rate = timed(
                replace(candidate, graphs=baselines + graphs),
                layer.inputs(batch),
                protocol,
                machine,
                {PYTORCH_EAGER: LOOP, PYTORCH_ALGORITHM_2: ALGORITHM_2},
            )
            rows += found
            rates.append(rate)
    return rows, rates


def _fits(layer: Layer, graph: GraphSource, batch: int) -> bool:
    """Returns whether a graph is measured at a batch: for `LARGE`, only the choice of `auto`."""
    precision: Precision = "int8" if graph.precision == "int8" else "fp32"
    if layer == LARGE:
        return graph.lowering == layer.chosen(graph.k, batch, precision)
    plan = layer.plan(graph.k, batch, precision)
    return lowerings_of("soft-moe")[graph.lowering].copied_bytes(plan) <= GATHER_LIMIT_BYTES


@contextlib.contextmanager
def plain_onnx(model: Model, x: np.ndarray, count: int) -> Iterator[GraphSource]:
    """Yields the graph that `torch.onnx.export` writes for inputs like x [2, …], with k = n."""
    n = max(layer.spec.experts for layer in model.layers.values())
    with TemporaryDirectory(prefix="moexport-plain-") as folder:
        path = Path(folder) / "plain.onnx"
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model.module,
                (torch.from_numpy(x),),
                dynamo=True,
                input_names=["input"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False,
            )
            assert program is not None
            program.save(path, external_data=True)
        yield GraphSource(n, PLAIN, SessionLoader(GraphFile(path=path, threads=count)))
