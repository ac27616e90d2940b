"""The arithmetic of the experts, shared by the lowerings."""

from __future__ import annotations

import onnx_ir as ir

from ..builder import Builder
from ..parameters import Layer
from ..ranges import EXPERT_HIDDEN, EXPERT_INPUT, EXPERT_OUTPUTS, EXPERT_PRODUCTS


def activate(b: Builder, layer: Layer, hidden: ir.Value, name: str = "experts") -> ir.Value:
    """Adds the nonlinearity: [..., inner] to [..., h]."""
    if layer.spec.expert == "geglu":
        value, gate = b.ops(
            "Split",
            hidden,
            names=(f"{name}/value", f"{name}/gate"),
            axis=-1,
            num_outputs=2,
        )
        gated = b.op("Gelu", gate, name=f"{name}/gelu")
        return b.op("Mul", value, gated, name=f"{name}/hidden")
    match layer.spec.activation:
        case "gelu":
            return b.op("Gelu", hidden, name=f"{name}/hidden")
        case "gelu-tanh":
            return b.op("Gelu", hidden, name=f"{name}/hidden", approximate="tanh")
        case "relu":
            return b.op("Relu", hidden, name=f"{name}/hidden")


def batched_experts(
    b: Builder,
    layer: Layer,
    rows: ir.Value,
    weights: dict[str, ir.Value],
) -> ir.Value:
    """Adds batched MatMuls: rows [..., r, d] times w1 [..., d, inner] and so on; [..., r, o].

    `weights` holds w1, w2, b1 and b2 where the layer has them; biases are [..., 1, inner].
    """
    hidden = b.op("MatMul", rows, weights["w1"], name="experts/products")
    if "b1" in weights:
        hidden = b.op("Add", hidden, weights["b1"], name="experts/biased")
    if "w2" not in weights:
        return hidden
    hidden = activate(b, layer, hidden)
    outputs = b.op("MatMul", hidden, weights["w2"], name="experts/outputs")
    if "b2" in weights:
        outputs = b.op("Add", outputs, weights["b2"], name="experts/outputs_biased")
    return outputs


def one_expert(b: Builder, layer: Layer, index: int, rows: ir.Value) -> ir.Value:
    """Adds expert `index` on rows [r, d], with weights that are constants; returns [r, o]."""
    name = f"experts/{index}"
    b.tap(EXPERT_INPUT, rows)
    hidden = _linear(b, layer, index, "1", rows, f"{name}/products")
    b.tap(EXPERT_PRODUCTS, hidden)
    if not layer.tensors.has("experts.w2"):
        return hidden
    hidden = activate(b, layer, hidden, name)
    b.tap(EXPERT_HIDDEN, hidden)
    outputs = _linear(b, layer, index, "2", hidden, f"{name}/outputs")
    b.tap(EXPERT_OUTPUTS, outputs)
    return outputs


def _linear(
    b: Builder, layer: Layer, index: int, which: str, rows: ir.Value, name: str
) -> ir.Value:
    weight = layer.expert(b, f"experts.w{which}", index)
    if not layer.tensors.has(f"experts.b{which}"):
        return b.op("MatMul", rows, weight, name=name)
    return b.op("Gemm", rows, weight, layer.expert(b, f"experts.b{which}", index), name=name)
