"""`factorised`: a muMoE layer as products with its factors; the weight tensor is never formed.

Every product is a MatMul of tokens [b, m, ·] with a constant matrix, except for TR's products of
two small matrices per token and Tucker's mix of the core's outputs. A layer of merged experts is
one product with a matrix per tensor, without a gate. With INT8 the input and output factors, and
Tucker's core, are integers; the gate and the experts' factors stay floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from math import prod

import onnx_ir as ir

from .. import names
from ..builder import Builder
from ..gating import MuMoELayer, coefficients
from ..layers.mumoe import MuMoESpec
from .base import LoweringOf
from .multilinear import (
    Gates,
    Tensor,
    all_coefficients_us,
    combine,
    factor_product,
    input_product,
    mix,
    through_tensors,
)


def build(b: Builder, layer: MuMoELayer, x: ir.Value) -> ir.Value:
    """Adds the gate once, then one or two factorised tensors that share its coefficients."""
    gates = coefficients(b, layer, x)
    converted = [
        b.cast(gate, ir.DataType.FLOAT, layer.compute.inner, f"{names.coefficients(level)}_narrow")
        for level, gate in enumerate(gates)
    ]
    parts = _ExpertModes(converted, _ablated_weights(b, layer, gates))
    return through_tensors(b, layer, x, gates, partial(_CONTRACTIONS[layer.spec.form], parts))


@dataclass(frozen=True, slots=True)
class _ExpertModes:
    """The coefficients [b, m, n] of each level, and those [b, m, P] of ablated combinations."""

    gates: Gates
    ablated: ir.Value | None


def _ablated_weights(b: Builder, layer: MuMoELayer, gates: Gates) -> ir.Value | None:
    """Adds the products of the coefficients of each ablated combination, or None."""
    if not layer.tensors.has("ablate.0"):
        return None
    weights: ir.Value | None = None
    for level, gate in enumerate(gates):
        experts = layer.stacked(b, f"ablate.{level}")
        part = b.op("MatMul", gate, experts, name=f"ablated/level_{level}")
        weights = part if weights is None else b.op("Mul", weights, part, name="ablated/weights")
    assert weights is not None
    return b.cast(weights, ir.DataType.FLOAT, layer.compute.inner, "ablated/narrow")


def _subtract(
    b: Builder, layer: MuMoELayer, parts: _ExpertModes, name: str, expert_modes: ir.Value
) -> ir.Value:
    """Subtracts the part of ablated combinations from the expert modes [b, m, ·]."""
    if parts.ablated is None:
        return expert_modes
    ablated = b.op(
        "MatMul", parts.ablated, layer.stacked(b, f"{name}.ablated"), name=f"{name}/ablated"
    )
    return b.op("Sub", expert_modes, ablated, name=f"{name}/present")


def _cp(
    parts: _ExpertModes, b: Builder, layer: MuMoELayer, tensor: Tensor, z: ir.Value
) -> ir.Value:
    """Adds y = [Π_e(a_e·G_e) ⊙ (z·A + a0)]·Bᵀ (Eq. 2): R numbers per token in between."""
    name, product = tensor.name, input_product(b, layer, tensor.name, z)
    modes = [
        b.op("MatMul", gate, layer.stacked(b, f"{name}.expert.{e}"), name=f"{name}/expert_{e}")
        for e, gate in enumerate(parts.gates)
    ]
    if parts.ablated is not None:  # subtracted from the product of the modes only
        joint = reduce(lambda x, y: b.op("Mul", x, y, name=f"{name}/experts"), modes)
        modes = [_subtract(b, layer, parts, name, joint)]
    for weights in modes:
        product = b.op("Mul", product, weights, name=f"{name}/product")
    return factor_product(b, layer, f"{name}.output", product, f"{name}/output")


def _tr(
    parts: _ExpertModes, b: Builder, layer: MuMoELayer, tensor: Tensor, z: ir.Value
) -> ir.Value:
    """Adds the ring of cores (Eq. 4): per token a chain of r × r' matrices, then the output core.

    The small matrices are multiplied from the left, so that the widest rank is used last.
    """
    name, spec, ring = tensor.name, tensor.spec, None
    gates = parts.gates
    for level, gate in enumerate(gates):
        core = layer.stacked(b, f"{name}.expert.{level}")
        flat = b.op("MatMul", gate, core, name=f"{name}/expert_{level}")
        ring = _extend_ring(b, tensor, level, ring, flat)
    if parts.ablated is not None and ring is not None:
        shape = b.ints(0, 0, spec.ranks[0] * spec.ranks[len(gates)])
        flat = b.op("Reshape", ring, shape, name=f"{name}/experts_flat")
        flat = _subtract(b, layer, parts, name, flat)
        shape = b.ints(0, 0, spec.ranks[0], spec.ranks[len(gates)])
        ring = b.op("Reshape", flat, shape, name=f"{name}/experts")
    ring = _extend_ring(b, tensor, len(gates), ring, input_product(b, layer, name, z))
    width = spec.ranks[0] * spec.ranks[-1]
    flat = b.op("Reshape", ring, b.ints(0, 0, width), name=f"{name}/ring_flat")
    return factor_product(b, layer, f"{name}.output", flat, f"{name}/output")


def _extend_ring(
    b: Builder, tensor: Tensor, mode: int, ring: ir.Value | None, flat: ir.Value
) -> ir.Value:
    """Adds the product of the ring so far [b, m, r1, r] with a core's matrix, given flat."""
    name, ranks = tensor.name, tensor.spec.ranks
    shape = b.ints(0, 0, ranks[mode], ranks[mode + 1])
    matrix = b.op("Reshape", flat, shape, name=f"{name}/matrix_{mode}")
    if ring is None:
        return matrix
    return b.op("MatMul", ring, matrix, name=f"{name}/ring_{mode}")


def _tucker(
    parts: _ExpertModes, b: Builder, layer: MuMoELayer, tensor: Tensor, z: ir.Value
) -> ir.Value:
    """Adds y = Z(a_1·U_1, …, a_E·U_E, z·U_d + u0)·U_oᵀ for the core Z (Eq. 3).

    The first mode costs one multiply-add per number of the core, whichever mode it is; the result
    per token, ΠR_e·R_o, is smallest if the input comes first, since its rank is the largest.
    """
    name, ranks = tensor.name, tensor.spec.ranks
    product = input_product(b, layer, name, z)
    core = factor_product(b, layer, f"{name}.core", product, f"{name}/core")
    shape = b.ints(0, 0, prod(ranks[:-2]), ranks[-1])
    outputs = b.op("Reshape", core, shape, name=f"{name}/core_outputs")
    reduced = [
        b.op("MatMul", gate, layer.stacked(b, f"{name}.expert.{e}"), name=f"{name}/expert_{e}")
        for e, gate in enumerate(parts.gates)
    ]
    weights = _subtract(b, layer, parts, name, combine(b, reduced, f"{name}/weights"))
    mixed = mix(b, weights, outputs, f"{name}/core")
    return factor_product(b, layer, f"{name}.output", mixed, f"{name}/output")


def _matrix(
    parts: _ExpertModes, b: Builder, layer: MuMoELayer, tensor: Tensor, z: ir.Value
) -> ir.Value:
    """Adds y = z·W + w: the experts are merged, so nothing is chosen."""
    return input_product(b, layer, tensor.name, z)


_CONTRACTIONS = {"cp": _cp, "tr": _tr, "tucker": _tucker, "matrix": _matrix}


def _unsupported(spec: MuMoESpec) -> str | None:
    return "its weight tensor is not factorised" if spec.form == "full" else None


LOWERING: LoweringOf[MuMoESpec] = LoweringOf(
    name="factorised",
    summary="products with the factors; the experts' weight tensor is never written out",
    build=build,
    predict_us=all_coefficients_us,
    unable=_unsupported,
    observable=True,
)
