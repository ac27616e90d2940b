"""Token-routed experts with random weights, in every option, and their outputs in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from moexport.graphs.layers.base import StoredPart
from moexport.graphs.layers.stored import Layer
from moexport.graphs.lower import Lowered, lower
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.names import DOMAIN, operand_of
from moexport.graphs.precision.types import (
    DYNAMIC_ROW,
    FLOAT_TYPES,
    FP32,
    SEVEN_BITS,
    BlockedWeights,
    ComputeTypes,
    QuantizedProducts,
)
from moexport.graphs.precision.weights import convert_weights, quantize, quantize_in_blocks
from moexport.graphs.targets import TARGETS, Precision, Target
from moexport.plugins.token_routed.layers.experts import Experts, ExpertsSpec, ExpertsWeights
from numpy.typing import NDArray

Array = NDArray[np.float64]

PLAIN = ExpertsSpec("mlp.experts", experts=6, k=2, dim=16, hidden=24, out=16)

SPECS: dict[str, ExpertsSpec] = {
    "silu": PLAIN,
    "interleaved": replace(PLAIN, gate="interleaved"),
    "ungated": replace(PLAIN, gate="none"),
    "gelu": replace(PLAIN, activation="gelu"),
    "gelu-tanh": replace(PLAIN, activation="gelu-tanh"),
    "relu": replace(PLAIN, activation="relu"),
    "relu2 ungated": replace(PLAIN, gate="none", activation="relu2"),
    "gpt-oss": replace(PLAIN, gate="interleaved", alpha=1.702, limit=0.7, up_offset=1.0),
    "limit": replace(PLAIN, limit=0.5),
    "quick-gelu ungated": replace(PLAIN, gate="none", alpha=1.702),
    "post-norm": replace(PLAIN, post_norm=True, post_norm_eps=1e-3),
    "weights on input": replace(PLAIN, weights_on="input"),
    "other widths": replace(PLAIN, dim=12, hidden=8, out=20),
    "k = 1": replace(PLAIN, k=1),
    "k = n": replace(PLAIN, k=6),
    "many experts": replace(PLAIN, experts=70, k=3),
}
"""A layer for each option of the kind."""

CAPACITY = replace(
    PLAIN,
    activation="gelu-tanh",
    gate="none",
    group=9,
    capacities=tuple(range(2, 2 + PLAIN.experts)),
)


def experts(
    spec: ExpertsSpec,
    *,
    biases: bool = False,
    transposed: bool = False,
    apart: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Experts:
    """A layer with random weights: `transposed` views, or separate matrices (`apart`)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    n = spec.experts
    w1 = normal(n, spec.dim, spec.inner) / spec.dim**0.5
    w2 = normal(n, spec.hidden, spec.out) / spec.hidden**0.5
    b1, b2 = (normal(n, spec.inner) / 4, normal(n, spec.out) / 4) if biases else (None, None)
    scale = 1.0 + normal(spec.out) / 4 if spec.post_norm else None
    w1, w2 = w1.to(dtype), w2.to(dtype)
    if transposed:
        w1, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w2))
    if apart:
        return Experts(spec, ExpertsWeights(tuple(w1), tuple(w2), b1, b2, scale))
    return Experts(spec, ExpertsWeights(w1, w2, b1, b2, scale))


def routed(
    spec: ExpertsSpec, tokens: int, *, k: int | None = None, seed: int = 1
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Tokens, k unordered experts for each, and their weights."""
    random = np.random.default_rng(seed)
    k = spec.k if k is None else k
    x = random.standard_normal((tokens, spec.dim)).astype(np.float32)
    chosen = [random.permutation(spec.experts)[:k] for _ in range(tokens)]
    index = np.array(chosen, np.int64).reshape(tokens, k)
    weights = random.uniform(0.1, 1.0, (tokens, k)).astype(np.float32)
    return x, index, weights


def formula(
    layer: Experts, x: NDArray[np.float32], index: NDArray[np.int64], weights: NDArray[np.float32]
) -> Array:
    """The layer in float64, token by token."""
    y = np.zeros((len(x), layer.spec.out))
    for t in range(len(x)):
        for j in range(index.shape[1]):
            weight, row = float(weights[t, j]), x[t].astype(np.float64)
            if layer.spec.weights_on == "input":
                y[t] += _expert(layer, int(index[t, j]), row * weight)
            else:
                y[t] += weight * _expert(layer, int(index[t, j]), row)
    return y


def _expert(layer: Experts, e: int, row: Array) -> Array:
    spec = layer.spec
    hidden = row @ _array(layer.w1[e])
    if layer.b1 is not None:
        hidden = hidden + _array(layer.b1[e])
    if spec.linear:
        return np.asarray(hidden)
    if spec.gate == "none":
        hidden = _activation(spec, hidden)
    else:
        pairs = hidden.reshape(2, -1) if spec.gate == "concatenated" else hidden.reshape(-1, 2).T
        gate, up = pairs
        if spec.limit is not None:
            gate, up = np.minimum(gate, spec.limit), np.clip(up, -spec.limit, spec.limit)
        hidden = _activation(spec, gate) * (up + spec.up_offset)
    assert layer.w2 is not None
    y = np.asarray(hidden @ _array(layer.w2[e]))
    if layer.b2 is not None:
        y = y + _array(layer.b2[e])
    if spec.post_norm:
        if layer.scale is not None:
            y = y * _array(layer.scale)
        y = y / np.sqrt((y * y).mean() + spec.post_norm_eps)
    return np.asarray(y)


def _activation(spec: ExpertsSpec, z: Array) -> Array:
    match spec.activation:
        case "silu":
            return np.asarray(z / (1.0 + np.exp(-spec.alpha * z)))
        case "gelu":
            return np.asarray(z * 0.5 * (1.0 + np.vectorize(math.erf)(z / math.sqrt(2.0))))
        case "gelu-tanh":
            inner = math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3)
            return np.asarray(0.5 * z * (1.0 + np.tanh(inner)))
        case "relu" | "relu2":
            return np.asarray(np.maximum(z, 0.0) ** (2 if spec.activation == "relu2" else 1))
        case "softmax":
            shares = np.exp(z - z.max())
            return np.asarray(shares / shares.sum())
        case "identity":
            return z


def _array(tensor: torch.Tensor) -> Array:
    return np.asarray(tensor.double().numpy())


def computed(layer: Experts, *inputs: np.ndarray) -> np.ndarray:
    """The output of PyTorch."""
    with torch.no_grad():
        y = layer(*(torch.from_numpy(each) for each in inputs))
    return np.asarray(y.numpy())


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference over the largest value."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


class InMemory:
    """A layer's weights in the numbers that it computes in (`LayerTensors`)."""

    def __init__(self, layer: Experts, compute: ComputeTypes) -> None:
        self._tensors: dict[str, tuple[NDArray[Any], StoredPart]] = {}
        for part in convert_weights(layer.stored(), compute):
            packed = part.dtype == ir.DataType.INT4
            kind = np.uint8 if packed else part.dtype.numpy()
            parts = [np.ravel(np.ascontiguousarray(piece)) for piece in part.parts]
            shape = (part.shape[0], -1) if packed else part.shape
            self._tensors[part.name] = np.concatenate(parts).astype(kind).reshape(shape), part

    def has(self, name: str) -> bool:
        return name in self._tensors

    def stacked(self, name: str, *, batched: bool = False) -> ir.TensorProtocol:
        array, part = self._tensors[name]
        return self._tensor(array, (1, *part.shape) if batched else part.shape, part.dtype, name)

    def expert(self, name: str, index: int) -> ir.TensorProtocol:
        array, part = self._tensors[name]
        return self._tensor(array[index], part.shape[1:], part.dtype, f"{name}.{index}")

    @staticmethod
    def _tensor(
        array: NDArray[Any], shape: tuple[int, ...], dtype: ir.DataType, name: str
    ) -> ir.TensorProtocol:
        if dtype == ir.DataType.INT4:
            return ir.PackedTensor(array.ravel(), dtype, shape=ir.Shape(shape), name=name)
        return ir.tensor(array.reshape(shape), name=name)


def lowered(
    layer: Experts,
    lowering: str,
    *,
    compute: ComputeTypes = FP32,
    target: Target = "onnx",
    stream: ir.DataType = ir.DataType.FLOAT,
    width: int | str = "k",
    opset: int = 20,
) -> Lowered:
    """The layer as a graph of its own: `x` [t, d], `index` [t, width] and `weights` to `y`."""
    spec = layer.spec

    def value(name: str, size: int | str, dtype: ir.DataType) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(["t", size]), type=ir.TensorType(dtype))

    inputs = [
        value("x", spec.dim, stream),
        value("index", width, ir.DataType.INT64),
        value("weights", width, ir.DataType.FLOAT),
    ]
    y = value("y", spec.out, stream)
    node = ir.node(spec.op_type, inputs, {"layer": spec.name}, domain=DOMAIN, outputs=[y])
    graph = ir.Graph(inputs, [y], nodes=[node], opset_imports={"": opset, DOMAIN: 1}, name="layer")
    stored = Layer(
        spec=spec,
        tensors=InMemory(layer, compute),
        k=spec.k,
        build=lowerings_of("experts")[lowering].build,
        compute=compute,
        target=target,
    )
    return lower(ir.Model(graph, ir_version=10), {spec.name: stored})


def session(made: Lowered, threads: int = 1) -> ort.InferenceSession:
    """The graph in ONNX Runtime."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    content = ir.serde.serialize_model(made.model).SerializeToString()
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run(made: Lowered | ort.InferenceSession, *inputs: np.ndarray) -> NDArray[Any]:
    """The output of the graph."""
    found = session(made) if isinstance(made, Lowered) else made
    (y,) = found.run(None, dict(zip(("x", "index", "weights"), inputs, strict=True)))
    return np.asarray(y)


def computes_in(precision: Precision, layer: Experts, target: Target) -> ComputeTypes:
    """The types of a precision that needs no calibration."""
    keys = frozenset(part.name for part in layer.stored() if operand_of(part.name) is not None)
    form = TARGETS[target].integers
    match precision:
        case "int8":
            steps = dict.fromkeys(keys, DYNAMIC_ROW)
            return ComputeTypes(quantized=QuantizedProducts(form, SEVEN_BITS, steps, dynamic=True))
        case "int4":
            return ComputeTypes(blocked=BlockedWeights(form, keys))
        case "fp32" | "fp16" | "bf16":
            return ComputeTypes(FLOAT_TYPES[precision])
        case "fp8":
            raise AssertionError("FP8 needs calibration")


def rounded(layer: Experts, precision: Precision) -> Experts:
    """A layer whose weights are the values of an integer precision."""

    def nearest(matrix: torch.Tensor) -> torch.Tensor:
        if precision == "int8":
            integers, scale = quantize(matrix.numpy(), SEVEN_BITS)
        else:
            integers, scale = quantize_in_blocks(matrix.numpy(), 32)
            scale = scale.repeat(32, axis=0)
        return torch.from_numpy(integers.astype(np.float32) * scale)

    spec = layer.spec
    stored = {part.name: [torch.from_numpy(a) for a in part.parts] for part in layer.stored()}
    spec = spec if spec.gate == "none" else replace(spec, gate="concatenated")
    b1, b2 = (torch.stack(stored[b]) if b in stored else None for b in ("experts.b1", "experts.b2"))
    w1, w2 = (tuple(map(nearest, stored[w])) for w in ("experts.w1", "experts.w2"))
    return Experts(spec, ExpertsWeights(w1, w2, b1, b2))
