"""Small Soft MoE layers for the tests of the lowerings: weights, a graph of one node, numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from moexport.graphs.layers.base import StoredPart
from moexport.graphs.layers.expert import Activation
from moexport.graphs.layers.soft_moe import (
    ExpertKind,
    NormKind,
    SlotSource,
    SoftMoE,
    SoftMoESpec,
    SoftMoEWeights,
)
from moexport.graphs.layers.stored import Layer, LayerTensors
from moexport.graphs.lower import Lowered, lower
from moexport.graphs.lowerings import lowerings_of
from moexport.graphs.names import DOMAIN
from moexport.graphs.precision.types import FP32, ComputeTypes
from moexport.graphs.precision.weights import convert_weights
from moexport.graphs.targets import Target

LOWERINGS = lowerings_of("soft-moe")

Array = np.ndarray

EPS: dict[NormKind, float] = {
    "none": 0.0,
    "l2": 1e-12,
    "l2-plus": 1e-2,
    "l2-rsqrt": 1e-2,  # large, so that a wrong place for it shows
    "layernorm": 1e-2,
}


@dataclass(frozen=True)
class TinyLayer:
    """A layer with weights as the formulas have them: phi [d, n, p], w1 [n, d, ·] and so on."""

    spec: SoftMoESpec
    phi: Array
    w1: Array
    b1: Array | None
    w2: Array | None
    b2: Array | None
    gain: Array | None
    shift: Array | None

    def has(self, name: str) -> bool:
        return self._array(name) is not None

    def stacked(self, name: str, *, batched: bool = False) -> ir.TensorProtocol:
        array = self._array(name)
        assert array is not None
        single = array.astype(np.float32)
        return ir.tensor(single[None] if batched else single, name=name)

    def expert(self, name: str, index: int) -> ir.TensorProtocol:
        array = self._array(name)
        assert array is not None
        return ir.tensor(array[index].astype(np.float32), name=f"{name}.{index}")

    def _array(self, name: str) -> Array | None:
        if name == "phi":
            folded = self.gain is not None and self.spec.norm != "layernorm"
            phi = self.phi * self.gain[:, None, None] if folded and self.gain is not None else None
            return (self.phi if phi is None else phi).reshape(self.spec.dim, -1)
        found: Array | None = getattr(self, name.removeprefix("experts."), None)
        return found

    def parts(self) -> Iterator[StoredPart]:
        """The weights as a bundle stores them in float32, one expert at a time."""
        for name in ("phi", "gain", "shift", "w1", "b1", "w2", "b2"):
            full = f"experts.{name}" if name[0] in "wb" else name
            array = self._array(full)
            if array is not None:
                single = array.astype(np.float32)
                yield StoredPart(full, single.shape, single if name[0] in "wb" else [single])


class ConvertedTensors:
    """A layer's weights in the numbers of an arithmetic, in memory."""

    def __init__(self, parts: Iterable[StoredPart], compute: ComputeTypes) -> None:
        self._arrays: dict[str, ir.TensorProtocol] = {}
        for part in convert_weights(parts, compute):
            array = np.concatenate([np.ravel(piece) for piece in part.parts]).reshape(part.shape)
            self._arrays[part.name] = ir.tensor(array.astype(part.dtype.numpy()), name=part.name)

    def has(self, name: str) -> bool:
        return name in self._arrays

    def stacked(self, name: str, *, batched: bool = False) -> ir.TensorProtocol:
        array = self._arrays[name]
        return ir.tensor(array.numpy()[None], name=name) if batched else array

    def expert(self, name: str, index: int) -> ir.TensorProtocol:
        return ir.tensor(self._arrays[name].numpy()[index], name=f"{name}.{index}")


def tiny_layer(
    *,
    expert: ExpertKind = "mlp",
    activation: Activation = "relu",
    norm: NormKind = "l2",
    slots: int = 1,
    slots_from: SlotSource = "normalised",
    experts: int = 5,
    out: int = 6,
    biases: bool = True,
    gain: bool = False,
    seed: int = 0,
    dim: int = 6,
    hidden: int = 7,
) -> TinyLayer:
    """Random weights; routing is far from a tie for the inputs of `tokens`."""
    random = np.random.default_rng(seed)
    d, h = dim, 0 if expert == "linear" else hidden
    spec = SoftMoESpec(
        *("layer", experts, slots, d, h, out, expert, activation, norm, EPS[norm], slots_from)
    )

    def draw(*shape: int) -> Array:
        return random.standard_normal(shape).astype(np.float32).astype(np.float64)

    affine = gain or norm == "layernorm"
    linear = expert == "linear"
    return TinyLayer(
        spec,
        phi=draw(d, experts, slots) * 3,
        w1=draw(experts, d, spec.inner),
        b1=draw(experts, spec.inner) if biases else None,
        w2=None if linear else draw(experts, h, out),
        b2=draw(experts, out) if biases and not linear else None,
        gain=draw(d) if affine else None,
        shift=draw(d) if norm == "layernorm" else None,
    )


def tokens(batch: int, count: int, seed: int = 1, dim: int = 6) -> Array:
    """Inputs [b, m, d]."""
    return np.random.default_rng(seed).standard_normal((batch, count, dim)).astype(np.float32)


def torch_module(layer: TinyLayer) -> SoftMoE:
    """The layer in PyTorch."""

    def of(array: Array | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(array.astype(np.float32))

    phi, w1 = of(layer.phi), of(layer.w1)
    assert phi is not None and w1 is not None
    weights = SoftMoEWeights(
        phi, w1, of(layer.b1), of(layer.w2), of(layer.b2), of(layer.gain), of(layer.shift)
    )
    return SoftMoE(layer.spec, weights)


def soft_moe(
    layer: TinyLayer,
    x: Array,
    k: int,
    *,
    renormalize: bool = False,
    ablated: tuple[int, ...] = (),
    operand: Callable[[str, Array], Array] = lambda key, rows: rows,
) -> tuple[Array, Array]:
    """Algorithm 1 in float64, written from the formulas: y [b, m, o] and the chosen sets [b, k].

    What the `ablated` experts would have added is left out. `operand` says what becomes of the rows
    before they meet a weight of the experts.
    """
    spec = layer.spec
    y, chosen = [], []
    for one in x.astype(np.float64):
        met = _normalised(layer, one)
        logits = np.einsum("md,dnp->mnp", met, layer.phi)
        combine = np.exp(logits - logits.max(axis=(1, 2), keepdims=True))
        combine /= combine.sum(axis=(1, 2), keepdims=True)
        keep = np.sort(np.argsort(-combine.sum(axis=(0, 2)), kind="stable")[:k])
        dispatch = np.exp(logits - logits.max(axis=0))
        dispatch /= dispatch.sum(axis=0)
        source = met if spec.slots_from == "normalised" else one
        result = np.zeros((len(one), spec.out))
        for e in sorted(set(keep) - set(ablated)):
            slots = dispatch[:, e].T @ source
            result += combine[:, e] @ _expert(layer, e, slots, operand)
        if renormalize:
            result /= combine[:, keep].sum(axis=(1, 2))[:, None]
        y.append(result)
        chosen.append(keep)
    return np.stack(y), np.stack(chosen)


def _normalised(layer: TinyLayer, one: Array) -> Array:
    norm, eps = layer.spec.norm, layer.spec.norm_eps
    length = np.sqrt((one**2).sum(axis=1, keepdims=True))
    match norm:
        case "l2":
            one = one / np.maximum(length, eps)
        case "l2-plus":
            one = one / (length + eps)
        case "l2-rsqrt":
            one = one / np.sqrt(length**2 + eps)
        case "layernorm":
            one = one - one.mean(axis=1, keepdims=True)
            one = one / np.sqrt((one**2).mean(axis=1, keepdims=True) + eps)
    one = one if layer.gain is None else one * layer.gain
    return np.asarray(one if layer.shift is None else one + layer.shift)


def _expert(
    layer: TinyLayer, e: int, slots: Array, operand: Callable[[str, Array], Array]
) -> Array:
    hidden = operand("w1", slots) @ layer.w1[e]
    if layer.b1 is not None:
        hidden = hidden + layer.b1[e]
    if layer.w2 is None:
        return np.asarray(hidden)
    activate = _ACTIVATIONS[layer.spec.activation]
    if layer.spec.expert == "gated":
        half = layer.spec.hidden
        hidden = hidden[:, :half] * activate(hidden[:, half:])
    else:
        hidden = activate(hidden)
    output = operand("w2", hidden) @ layer.w2[e]
    return np.asarray(output if layer.b2 is None else output + layer.b2[e])


def _relu(x: Array) -> Array:
    return np.asarray(np.maximum(x, 0.0))


def _gelu(x: Array) -> Array:
    return np.asarray(x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))))


def _gelu_tanh(x: Array) -> Array:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
    return np.asarray(0.5 * x * (1.0 + np.tanh(inner)))


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


_ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "relu": _relu,
    "gelu": _gelu,
    "gelu-tanh": _gelu_tanh,
    "silu": lambda x: np.asarray(x / (1.0 + np.exp(-x))),
    "relu2": lambda x: _relu(x) ** 2,
    "softmax": _softmax,
    "identity": lambda x: x,
}


def lowered(
    layer: TinyLayer,
    lowering: str,
    kept: int | None,
    *,
    renormalize: bool = False,
    tensors: LayerTensors | None = None,
    compute: ComputeTypes = FP32,
    stream: ir.DataType = ir.DataType.FLOAT,
    target: Target = "onnx",
) -> Lowered:
    """The layer as a graph of its own; `kept` None makes k an input, `tensors` other weights."""
    spec = layer.spec
    x, y = (
        ir.Value(name=name, shape=ir.Shape(["batch", "tokens", width]), type=ir.TensorType(stream))
        for name, width in (("input", spec.dim), ("output", spec.out))
    )
    node = ir.node(spec.op_type, [x], attributes={"layer": spec.name}, domain=DOMAIN, outputs=[y])
    graph = ir.Graph([x], [y], nodes=[node], opset_imports={"": 20, DOMAIN: 1}, name="one_layer")
    if tensors is None:
        tensors = layer if compute == FP32 else ConvertedTensors(layer.parts(), compute)
    stored = Layer(
        spec=spec,
        tensors=tensors,
        k=kept,
        build=LOWERINGS[lowering].build,
        renormalize=renormalize,
        compute=compute,
        target=target,
    )
    return lower(ir.Model(graph, ir_version=10), {spec.name: stored})


def session(made: Lowered) -> ort.InferenceSession:
    """The graph in ONNX Runtime, with the chosen experts as a further output."""
    model = made.model.clone()
    selected = made.values["layer"].selected
    if selected is not None:
        (value,) = [v for node in model.graph for v in node.outputs if v.name == selected]
        value.type = ir.TensorType(ir.DataType.INT64)
        model.graph.outputs.append(value)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    # Its own fusion of Q/DQ with stacked weights is wrong, and saturates on CPUs without VNNI.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    content = ir.serde.serialize_model(model).SerializeToString()
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
