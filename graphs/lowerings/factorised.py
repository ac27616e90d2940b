"""`factorised`: a muMoE layer as products with its factors; the weight tensor is never written out.

Every product is a MatMul of tokens [b, m, ·] with a constant matrix, but for TR's products of two
small matrices per token.
"""

from __future__ import annotations

import onnx_ir as ir

from ..builder import Builder
from ..gating import coefficients
from ..mumoe_spec import NORM_EPS, FactorisedSpec, MuMoESpec
from ..parameters import MuMoELayer
from .base import STANDARD, LoweringOf, serves_all


def build(b: Builder, layer: MuMoELayer, x: ir.Value) -> ir.Value:
    """Adds the gate once, then one or two factorised tensors that share its coefficients."""
    gates = coefficients(b, layer, x)
    z = x
    if layer.spec.input_norm:
        z = b.op(
            "LayerNormalization",
            x,
            layer.stacked(b, "gain"),
            layer.stacked(b, "shift"),
            axis=-1,
            epsilon=NORM_EPS,
            name="input/normalised",
        )
    for index, tensor in enumerate(layer.spec.tensors):
        if index:
            z = b.op("Gelu", z, name="hidden")
        contract = _cp if tensor.form == "cp" else _tr
        z = contract(b, layer, f"tensor.{index}", tensor, gates, z)
    return _rewritten(b, layer, gates, z) if layer.tensors.has("rewrite.0") else z


def _rewritten(b: Builder, layer: MuMoELayer, gates: list[ir.Value], y: ir.Value) -> ir.Value:
    """Adds y_o += λ·Π_e(ā_eᵀ·a_e) for all re-written outputs at once (Eq. 5)."""
    added: ir.Value | None = None
    for level, gate in enumerate(gates):
        means = layer.stacked(b, f"rewrite.{level}")
        alike = b.op("MatMul", gate, means, name=f"rewrite/level_{level}")
        added = alike if added is None else b.op("Mul", added, alike, name="rewrite/alike")
    assert added is not None
    if layer.tensors.has("rewrite.output"):
        added = b.op("MatMul", added, layer.stacked(b, "rewrite.output"), name="rewrite/added")
    return b.op("Add", y, added, name="rewritten")


def _cp(
    b: Builder,
    layer: MuMoELayer,
    name: str,
    spec: FactorisedSpec,
    gates: list[ir.Value],
    z: ir.Value,
) -> ir.Value:
    """Adds y = [Π_e(a_e·G_e) ⊙ (z·A + a0)]·Bᵀ (Eq. 2): R numbers per token in between."""
    del spec
    product = _input(b, layer, name, z)
    for level, gate in enumerate(gates):
        experts = layer.stacked(b, f"{name}.expert.{level}")
        weights = b.op("MatMul", gate, experts, name=f"{name}/expert_{level}")
        product = b.op("Mul", product, weights, name=f"{name}/product")
    b.tap(f"{name}.product", product)
    return b.op("MatMul", product, layer.stacked(b, f"{name}.output"), name=f"{name}/output")


def _tr(
    b: Builder,
    layer: MuMoELayer,
    name: str,
    spec: FactorisedSpec,
    gates: list[ir.Value],
    z: ir.Value,
) -> ir.Value:
    """Adds the ring of cores (Eq. 4): per token a chain of r × r' matrices, then the output core.

    The small matrices are multiplied from the left, so that the widest rank comes in last.
    """
    ring: ir.Value | None = None
    for level, gate in enumerate(gates):
        core = layer.stacked(b, f"{name}.expert.{level}")
        flat = b.op("MatMul", gate, core, name=f"{name}/expert_{level}")
        ring = _chained(b, name, spec, level, ring, flat)
    ring = _chained(b, name, spec, len(gates), ring, _input(b, layer, name, z))
    around = spec.ranks[0] * spec.ranks[-1]
    flat = b.op("Reshape", ring, b.ints(0, 0, around), name=f"{name}/ring_flat")
    b.tap(f"{name}.product", flat)
    return b.op("MatMul", flat, layer.stacked(b, f"{name}.output"), name=f"{name}/output")


def _chained(
    b: Builder,
    name: str,
    spec: FactorisedSpec,
    mode: int,
    ring: ir.Value | None,
    flat: ir.Value,
) -> ir.Value:
    """Adds the product of the ring so far [b, m, r1, r] with a core's matrix, given flat."""
    shape = b.ints(0, 0, spec.ranks[mode], spec.ranks[mode + 1])
    matrix = b.op("Reshape", flat, shape, name=f"{name}/matrix_{mode}")
    if ring is None:
        return matrix
    return b.op("MatMul", ring, matrix, name=f"{name}/ring_{mode}")


def _input(b: Builder, layer: MuMoELayer, name: str, z: ir.Value) -> ir.Value:
    """Adds z·A + a0: the last row of the input factor, which a 1 would meet, is added instead."""
    b.tap(f"{name}.input", z)
    product = b.op("MatMul", z, layer.stacked(b, f"{name}.input"), name=f"{name}/input")
    if not layer.tensors.has(f"{name}.bias"):
        return product
    return b.op("Add", product, layer.stacked(b, f"{name}.bias"), name=f"{name}/input_biased")


LOWERING: LoweringOf[MuMoESpec] = LoweringOf(
    name="factorised",
    summary="products with the factors; the experts' weight tensor is never written out",
    targets=STANDARD,
    build=build,
    unable=serves_all,
    inexact=serves_all,
    kind="mumoe",
)
