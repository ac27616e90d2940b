"""`unfactorised`: every expert of an unfactorised weight tensor computes every token."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from ..builder import Builder
from ..gating import MuMoELayer, coefficients
from ..layers.mumoe import MuMoESpec
from .base import LoweringOf
from .multilinear import Tensor, all_coefficients_us, combine, exclude, mix, through_tensors


def build(b: Builder, layer: MuMoELayer, x: ir.Value) -> ir.Value:
    """Adds the gate once and, for each tensor, a product with all experts and a mix."""
    gates = coefficients(b, layer, x)
    weights = combine(b, gates, "combinations")
    weights = b.cast(weights, ir.DataType.FLOAT, layer.compute.inner, "combinations/narrow")
    return through_tensors(b, layer, x, gates, partial(_contract, weights))


def _contract(
    weights: ir.Value, b: Builder, layer: MuMoELayer, tensor: Tensor, z: ir.Value
) -> ir.Value:
    """Adds y = Σ_N a_N·(z·W_N + w_N): one product with a constant [d, N·o], then the mix.

    The other order, (a ⊗ z)·W, saves the mix's N·o multiply-adds (of N·d·o) but writes N·d numbers
    per token. In measurements, it was never clearly faster, and several times slower for small o.
    The weights are stored by expert, so that `gathered` can share them; runtimes transpose the
    constant once, when they load the graph.
    """
    name, spec = tensor.name, tensor.spec
    experts, d, o = spec.combinations, spec.dim, spec.out
    b.tap(f"{name}.input", z)
    stored = layer.stacked(b, f"{name}.experts")
    by_input = b.op("Transpose", stored, perm=[2, 0, 1], name=f"{name}/by_input")
    matrix = b.op("Reshape", by_input, b.ints(d, experts * o), name=f"{name}/matrix")
    product = b.op("MatMul", z, matrix, name=f"{name}/outputs_flat")
    outputs = b.op("Reshape", product, b.ints(0, 0, experts, o), name=f"{name}/outputs")
    biases = layer.optional(b, f"{name}.biases")
    if biases is not None:
        outputs = b.op("Add", outputs, biases, name=f"{name}/outputs_biased")
    return mix(b, weights, exclude(b, layer, weights, outputs, name), name)


def unable(spec: MuMoESpec) -> str | None:
    """Returns why a lowering of whole tensors cannot serve a layer, or None."""
    return {"full": None, "matrix": "its experts are merged into one matrix"}.get(
        spec.form, "its weight tensor is factorised"
    )


LOWERING: LoweringOf[MuMoESpec] = LoweringOf(
    name="unfactorised",
    summary="every expert of an unfactorised weight tensor computes every token",
    build=build,
    predict_us=all_coefficients_us,
    unable=unable,
    observable=True,
)
