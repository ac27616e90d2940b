"""The observing graph: a model that returns statistics of its tensors instead of its outputs.

All counting happens inside the graph; per batch and tensor, only a few numbers and one histogram
leave the runtime, whatever the tensor's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..data.batches import Fields, row_count
from ..errors import CalibrationError
from ..graphs.builder import Builder
from ..graphs.layers.stored import Layer
from ..graphs.lower import lower
from ..graphs.names import INPUT, is_ranged, range_key
from ..graphs.precision.backbone import backbone_linears
from .methods import BINS, HALF, Histogram

MASK = 1e30
"""Values beyond this are masks rather than activations (−inf, or the lowest float, before a
softmax)."""

_POWERS = 2.0 ** np.arange(-100, 128, dtype=np.float64)
"""The possible limits of one side's bins."""

_MOVES = frozenset(
    {
        *("Concat", "Expand", "Flatten", "Gather", "GatherND", "Identity", "Pad", "Reshape"),
        *("Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
    }
)
"""Ops that only move values: their outputs have the peaks of their inputs."""


@dataclass(frozen=True, slots=True)
class TensorOutputs:
    """The names of the graph's outputs that describe one tensor.

    `counts` int32 [BINS] as in `methods.Histogram`, `width` of a bin, `minimum`, `maximum`, and
    `magnitude`, Σ|x|, which is not finite if any value is not.
    """

    counts: str
    width: str
    minimum: str
    maximum: str
    magnitude: str


@dataclass(frozen=True)
class ObservingGraph:
    """A model whose outputs are observations: ranged tensors and peaks, both by key."""

    model: ir.Model
    ranged: Mapping[str, TensorOutputs]
    peaks: Mapping[str, str]


def observing_graph(traced: ir.Model, layers: Mapping[str, Layer[Any]]) -> ObservingGraph:
    """Returns a copy of a traced model whose outputs are observations.

    Ranges are those of the inputs of the backbone's linear layers and of the taps of each MoE
    layer's lowering (`names.range_key`), which must compute only the selected rows. Peaks are those
    of every other float value of the backbone's or an expert's ops.
    """
    ranged: dict[str, TensorOutputs] = {}
    peaks: dict[str, str] = {}

    def observe(b: Builder, key: str, name: str, value: ir.Value) -> list[ir.Value]:
        """Observes one tensor: its range if it may be quantised, or its peak."""
        if not is_ranged(name):
            peak = _peak(b, value, f"observed/{name}")
            peaks[key] = _name_of(peak)
            return [peak]
        values = _histogram(b, value, f"observed/{name}")
        ranged[key] = TensorOutputs(**{field: _name_of(v) for field, v in values.items()})
        return list(values.values())

    def observe_layer(b: Builder) -> list[ir.Value]:
        """Observes the taps of one lowered MoE layer (`graphs.lower.Observer`)."""
        added = []
        for tensor, parts in b.taps.items():
            value = parts[0]
            if len(parts) > 1:
                value = b.op("Concat", *parts, axis=0, name=f"observed/{tensor}")
            added += observe(b, range_key(b.layer, tensor), tensor, value)
        return added

    model = traced.clone()
    originals = {value.name for value in model.graph.outputs}
    _observe_backbone(model.graph, observe)
    lowered = lower(model, layers, observe_layer).model
    for value in [v for v in lowered.graph.outputs if v.name in originals]:
        lowered.graph.outputs.remove(value)
    return ObservingGraph(model=lowered, ranged=ranged, peaks=peaks)


def _observe_backbone(
    graph: ir.Graph, observe: Callable[[Builder, str, str, ir.Value], list[ir.Value]]
) -> None:
    tensors = [(linear.key, INPUT, linear.input) for linear in backbone_linears(graph)]
    for node in graph:
        if node.op_type not in _MOVES and node.outputs[0].dtype == ir.DataType.FLOAT:
            assert node.name is not None
            tensors.append((node.name, "output", node.outputs[0]))
    for key, tensor, value in tensors:
        b = Builder(f"{key}/{tensor}")
        graph.outputs.extend(observe(b, key, tensor, value))
        graph.extend(b.nodes)
        for initializer in b.initializers:
            graph.register_initializer(initializer)


def _histogram(b: Builder, x: ir.Value, name: str) -> dict[str, ir.Value]:
    """Adds a tensor's extremes and its counts; the names are those of `TensorOutputs`.

    Every step is exact: the width is a power of two, found by comparison with all of them.
    """
    minimum = b.op("ReduceMin", x, keepdims=0, name=f"{name}/minimum")
    maximum = b.op("ReduceMax", x, keepdims=0, name=f"{name}/maximum")
    magnitude = b.op("ReduceL1", x, keepdims=0, name=f"{name}/magnitude")
    below = b.op("Neg", minimum, name=f"{name}/below")
    peak = b.op("Max", maximum, below, name=f"{name}/peak")
    powers = b.constant(_POWERS.astype(np.float32))
    smaller = b.op("LessOrEqual", powers, peak, name=f"{name}/smaller")
    counted = b.op("Cast", smaller, to=ir.DataType.INT64.value, name=f"{name}/smaller_int")
    power = b.op("ReduceSum", counted, keepdims=0, name=f"{name}/place")
    power = b.op("Min", power, b.integer(len(_POWERS) - 1), name=f"{name}/place_within")
    side = b.op("Gather", powers, power, axis=0, name=f"{name}/side")
    width = b.op("Mul", side, b.number(1.0 / HALF), name=f"{name}/width")

    flat = b.op("Reshape", x, b.ints(-1), name=f"{name}/flat")
    scaled = b.op("Div", flat, width, name=f"{name}/scaled")
    floored = b.op("Floor", scaled, name=f"{name}/floored")
    index = b.op("Add", floored, b.number(HALF), name=f"{name}/bin")
    index = b.op("Cast", index, to=ir.DataType.INT32.value, name=f"{name}/bin_int")
    # Values that are not finite may fall into any bin (`magnitude` reports them), but not outside.
    first, last = np.array(0, np.int32), np.array(BINS - 1, np.int32)
    index = b.op("Clip", index, b.constant(first), b.constant(last), name=f"{name}/bin_within")
    shape = b.op("Shape", index, name=f"{name}/size")
    ones = b.op("Expand", b.constant(np.ones(1, np.int32)), shape, name=f"{name}/ones")
    counts = b.op(
        "ScatterElements",
        b.constant(np.zeros(BINS, np.int32)),
        index,
        ones,
        axis=0,
        reduction="add",
        name=f"{name}/counts",
    )
    for value in (width, minimum, maximum, magnitude):
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
    counts.type, counts.shape = ir.TensorType(ir.DataType.INT32), ir.Shape([BINS])
    return {
        "counts": counts,
        "width": width,
        "minimum": minimum,
        "maximum": maximum,
        "magnitude": magnitude,
    }


def _peak(b: Builder, x: ir.Value, name: str) -> ir.Value:
    """Adds the largest absolute value that is not a mask."""
    magnitudes = b.op("Abs", x, name=f"{name}/abs")
    usual = b.op("Less", magnitudes, b.number(MASK), name=f"{name}/usual")
    magnitudes = b.op("Where", usual, magnitudes, b.number(0.0), name=f"{name}/no_masks")
    peak = b.op("ReduceMax", magnitudes, keepdims=0, name=f"{name}/peak")
    peak.type, peak.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
    return peak


def _name_of(value: ir.Value) -> str:
    assert value.name is not None
    return value.name


@dataclass(frozen=True, slots=True)
class Observations:
    """A histogram of each ranged tensor, and the largest |x| of each other tensor.

    `unseen` are ranged tensors that no input has reached.
    """

    histograms: Mapping[str, Histogram]
    peaks: Mapping[str, float]
    unseen: frozenset[str] = frozenset()

    def __add__(self, other: Observations) -> Observations:
        """Returns the exact union of both observations, which does not depend on their order."""
        histograms = dict(self.histograms)
        for key, new in other.histograms.items():
            histograms[key] = histograms[key] + new if key in histograms else new
        peaks = {key: max(peak, other.peaks[key]) for key, peak in self.peaks.items()}
        return Observations(histograms=histograms, peaks=peaks, unseen=self.unseen & other.unseen)

    def check(self) -> None:
        """Raises `CalibrationError` naming a tensor without a usable range."""
        for key in sorted(self.unseen):
            raise CalibrationError(
                f"{key}: no input reached this tensor", hint="give a feed with inputs"
            )
        for key, histogram in self.histograms.items():
            if histogram.peak == 0.0:
                raise CalibrationError(
                    f"{key} is zero for all inputs, so it has no scale",
                    hint="give a feed of real inputs; if the model's own weights are zero here, it "
                    "cannot be quantised",
                )


def observe(
    run: Callable[[Fields], Mapping[str, np.ndarray]],
    graph: ObservingGraph,
    batches: Iterable[tuple[int, Fields]],
) -> Observations:
    """Returns the observations of a graph over batches, each with its first input's index.

    Raises `CalibrationError` naming a tensor with values that are not finite.
    """
    histograms: dict[str, Histogram] = {}
    peaks = dict.fromkeys(graph.peaks, 0.0)
    for first, batch in batches:
        values = run(batch)
        for key, names in graph.ranged.items():
            new = _read(key, values, names, f"inputs {first} to {first + row_count(batch) - 1}")
            histograms[key] = histograms[key] + new if key in histograms else new
        for key, output in graph.peaks.items():
            peaks[key] = max(peaks[key], float(values[output]))
    return Observations(
        histograms=histograms, peaks=peaks, unseen=frozenset(graph.ranged) - histograms.keys()
    )


def _read(
    key: str, values: Mapping[str, np.ndarray], names: TensorOutputs, where: str
) -> Histogram:
    magnitude = float(values[names.magnitude])
    if not math.isfinite(magnitude):
        kind = "NaN" if math.isnan(magnitude) else "infinite values"
        raise CalibrationError(
            f"{key} contains {kind} for {where}, so it has no range",
            hint="the model itself computes no usable output for these inputs: check their "
            "values, or leave them out of the feed",
        )
    return Histogram(
        counts=values[names.counts].astype(np.int64),
        width=float(values[names.width]),
        minimum=float(values[names.minimum]),
        maximum=float(values[names.maximum]),
    )
