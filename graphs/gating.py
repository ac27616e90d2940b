"""A muMoE layer's coefficients as ONNX nodes: logits, activation, and the k largest.

Everything is computed in FP32, without Sort or CumSum: entmax15 and sparsemax find their threshold
τ by Newton's method, with two sums over the experts per step. The equations in τ are convex and
decreasing, and the start is left of the root. Every step therefore stays left of it, and τ only
grows: a coefficient that reaches zero stays zero, and a step can update r = [z − τ]₊.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from . import names
from .builder import Builder
from .layers.mumoe import NORM_EPS, MuMoESpec, logit_scale
from .layers.stored import Layer
from .precision.products import one_token

MuMoELayer = Layer[MuMoESpec]

ENTMAX_STEPS = ((64, 5), (256, 6), (2048, 7))
"""Newton steps by the largest number of experts: one more than any tested distribution, including
adversarial ones, needed to converge to rounding error."""

ERROR = 1e-6
"""The largest error of a coefficient after the iterations, before rounding."""


def entmax15_steps(n: int) -> int:
    """Returns the number of Newton steps of entmax15 for n experts."""
    return next((steps for size, steps in ENTMAX_STEPS if n <= size), _bounded_steps(n))


def sparsemax_steps(n: int) -> int:
    """Returns the number of Newton steps of sparsemax for n experts, from a bound.

    For a convex f, each step from τ₀ to τ₁ satisfies f(τ₁)/f(τ₀) + f'(τ₁)/f'(τ₀) ≤ 1, so |f·f'|
    falls to a quarter or less. It is at most n² at the start, and |f'|, the size of the support, is
    at least 1: after these steps the coefficients are accurate to `ERROR`.
    """
    return _bounded_steps(n * n)


def _bounded_steps(start: int) -> int:
    return math.ceil(math.log(start / ERROR, 4))


@dataclass(frozen=True, slots=True)
class KeptLevel:
    """One level's coefficients [b, m, n], zero except for the k largest, and indices [b, m, k].

    `indices` is None if the level keeps all its experts.
    """

    coefficients: ir.Value
    indices: ir.Value | None


def coefficients(b: Builder, layer: MuMoELayer, x: ir.Value) -> list[ir.Value]:
    """Adds each level's coefficients [b, m, n] for tokens x [b, m, d], limited to the k largest."""
    return [level.coefficients for level in kept_levels(b, layer, x)]


def kept_levels(b: Builder, layer: MuMoELayer, x: ir.Value) -> list[KeptLevel]:
    """Adds each level's coefficients for tokens x [b, m, d], and the indices of the kept ones."""
    fp32 = ir.DataType.FLOAT
    if not layer.spec.external_routing:
        x = b.cast(x, layer.x_type, fp32, "gate/tokens_fp32")
    activations = {"entmax15": _entmax15, "sparsemax": _sparsemax, "softmax": _softmax}
    levels = []
    for level, n in enumerate(layer.spec.levels):
        name = names.coefficients(level)
        k = layer.spec.k_by_level(layer.k)[level] if isinstance(layer.k, int) else None
        selects = k is None or k < n
        if layer.spec.external_routing:
            a = layer.routed[level]
            a = b.cast(a, a.dtype or fp32, fp32, f"gate/{name}_fp32")
            if layer.scores:  # score outputs are named after the layer
                score = b.op("Reshape", a, b.ints(0, 0, n), name=f"all_{name}")
                b.add_score(score, None, n)
        else:
            logits = _logits(b, layer, level, x)
            a = activations[layer.spec.activation](b, logits, n, f"all_{name}" if selects else name)
            if layer.scores and selects:
                b.add_score(a, None, n)
        levels.append(_keep_largest(b, layer, a, n, k, name) if selects else KeptLevel(a, None))
    return levels


def _logits(b: Builder, layer: MuMoELayer, level: int, x: ir.Value) -> ir.Value:
    """Adds the normalised logits [b, m, n], scaled for the activation."""
    name = f"gate.{level}"
    weight = layer.stacked(b, f"{name}.weight")
    bias = layer.stacked(b, f"{name}.bias") if layer.spec.norm == "bn" else None
    if bias is not None and layer.tokens == 1:
        return one_token(b, x, weight, bias, f"{name}/logits")
    logits = b.op("MatMul", x, weight, name=f"{name}/products")
    if bias is not None:
        return b.op("Add", logits, bias, name=f"{name}/logits")
    n = layer.spec.levels[level]
    scale = b.constant(np.full(n, logit_scale(layer.spec), dtype=np.float32))
    return b.op(
        "LayerNormalization", logits, scale, axis=-1, epsilon=NORM_EPS, name=f"{name}/logits"
    )


def _softmax(b: Builder, logits: ir.Value, n: int, name: str) -> ir.Value:
    return b.op("Softmax", logits, axis=-1, name=name)


def _entmax15(b: Builder, z: ir.Value, n: int, name: str) -> ir.Value:
    """Adds p = [z − τ]₊² with Σp = 1 for z = logits / 2, from τ = max z − 1.

    Newton's method solves ‖[z − τ]₊‖ = 1 instead of its square: the norm is linear in τ when all
    values in the support are equal, so about half as many steps are enough.
    """
    r = _start(b, z, name)
    for _ in range(entmax15_steps(n)):
        length = b.op("ReduceL2", r, b.ints(-1), keepdims=1, name=f"{name}/length")
        total = b.op("ReduceSum", r, b.ints(-1), keepdims=1, name=f"{name}/total")
        excess = b.op("Sub", length, b.number(1.0), name=f"{name}/excess")
        slope = b.op("Div", total, length, name=f"{name}/slope")
        r = _step(b, r, b.op("Div", excess, slope, name=f"{name}/step"), name)
    return b.op("Mul", r, r, name=name)


def _sparsemax(b: Builder, logits: ir.Value, n: int, name: str) -> ir.Value:
    """Adds p = [z − τ]₊ with Σp = 1, from τ = max z − 1: the slope is the size of the support."""
    r = _start(b, logits, name)
    steps = sparsemax_steps(n)
    for step in range(1, steps + 1):
        total = b.op("ReduceSum", r, b.ints(-1), keepdims=1, name=f"{name}/total")
        signs = b.op("Sign", r, name=f"{name}/signs")
        support = b.op("ReduceSum", signs, b.ints(-1), keepdims=1, name=f"{name}/support")
        excess = b.op("Sub", total, b.number(1.0), name=f"{name}/excess")
        # Rounding may move τ to the right of the root; a step back would revive zeros.
        excess = b.op("Relu", excess, name=f"{name}/excess_left")
        shift = b.op("Div", excess, support, name=f"{name}/step")
        # Other code looks up the name of the result, so no Identity may follow the last step.
        r = _step(b, r, shift, name, name if step == steps else None)
    return r


def _start(b: Builder, z: ir.Value, name: str) -> ir.Value:
    """Adds r = [z − τ]₊ for τ = max z − 1, which is never right of the root."""
    largest = b.op("ReduceMax", z, b.ints(-1), keepdims=1, name=f"{name}/largest")
    start = b.op("Sub", largest, b.number(1.0), name=f"{name}/start")
    return _step(b, z, start, name)


def _step(
    b: Builder, r: ir.Value, step: ir.Value, name: str, result: str | None = None
) -> ir.Value:
    shifted = b.op("Sub", r, step, name=f"{name}/moved")
    return b.op("Relu", shifted, name=result or f"{name}/above")


def _keep_largest(
    b: Builder, layer: MuMoELayer, a: ir.Value, n: int, fixed_k: int | None, name: str
) -> KeptLevel:
    """Adds coefficients [b, m, n], all but the k largest zeroed; k is an input if not fixed."""
    k = layer.k_value(b) if fixed_k is None else b.ints(fixed_k)
    # One k serves all levels, but this one may have fewer experts.
    if fixed_k is None and n < layer.spec.experts:
        k = b.op("Min", k, b.ints(n), name=f"{name}/k")
    values, indices = b.ops(
        "TopK", a, k, axis=-1, largest=1, sorted=0, names=(f"{name}/largest", f"{name}/indices")
    )
    zeros = b.op("Mul", a, b.number(0.0), name=f"{name}/zeros")
    kept = b.op("ScatterElements", zeros, indices, values, axis=-1, name=name)
    return KeptLevel(kept, indices)
