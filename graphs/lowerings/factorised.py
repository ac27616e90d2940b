"""`factorised`: a muMoE layer as products with its factors; the weight tensor is never written out.

Every product is a MatMul of tokens [b, m, ·] with a constant matrix, but for TR's products of two
small matrices per token and Tucker's mix of what the core gives. A layer of merged experts is one
product with a matrix for each tensor, without a gate. In INT8 the factors of the input
and the output, and Tucker's core, are integers; gate and experts' factors stay in floats.
"""

from __future__ import annotations

from functools import partial
from math import prod

import onnx_ir as ir

from .. import names
from ..builder import Builder
from ..gating import coefficients
from ..layers.mumoe import MuMoESpec
from ..layers.stored import MuMoELayer
from .base import LoweringOf
from .multilinear import (
    Gates,
    Tensor,
    all_coefficients_us,
    combined,
    factor_product,
    input_product,
    mixed,
    through_tensors,
)


def build(b: Builder, layer: MuMoELayer, x: ir.Value) -> ir.Value:
    """Adds the gate once, then one or two factorised tensors that share its coefficients."""
    gates = coefficients(b, layer, x)
    converted = [
        b.cast(gate, ir.DataType.FLOAT, layer.compute.inner, f"{names.coefficients(level)}_narrow")
        for level, gate in enumerate(gates)
    ]
    return through_tensors(b, layer, x, gates, partial(_CONTRACTIONS[layer.spec.form], converted))


def _cp(gates: Gates, b: Builder, layer: MuMoELayer, tensor: Tensor, z: ir.Value) -> ir.Value:
    """Adds y = [Π_e(a_e·G_e) ⊙ (z·A + a0)]·Bᵀ (Eq. 2): R numbers per token in between."""
    name, product = tensor.name, input_product(b, layer, tensor.name, z)
    for level, gate in enumerate(gates):
        experts = layer.stacked(b, f"{name}.expert.{level}")
        weights = b.op("MatMul", gate, experts, name=f"{name}/expert_{level}")
        product = b.op("Mul", product, weights, name=f"{name}/product")
    return factor_product(b, layer, f"{name}.output", product, f"{name}/output")


def _tr(gates: Gates, b: Builder, layer: MuMoELayer, tensor: Tensor, z: ir.Value) -> ir.Value:
    """Adds the ring of cores (Eq. 4): per token a chain of r × r' matrices, then the output core.

    The small matrices are multiplied from the left, so that the widest rank comes in last.
    """
    name, spec, ring = tensor.name, tensor.spec, None
    for level, gate in enumerate(gates):
        core = layer.stacked(b, f"{name}.expert.{level}")
        flat = b.op("MatMul", gate, core, name=f"{name}/expert_{level}")
        ring = _chained(b, tensor, level, ring, flat)
    ring = _chained(b, tensor, len(gates), ring, input_product(b, layer, name, z))
    around = spec.ranks[0] * spec.ranks[-1]
    flat = b.op("Reshape", ring, b.ints(0, 0, around), name=f"{name}/ring_flat")
    return factor_product(b, layer, f"{name}.output", flat, f"{name}/output")


def _chained(
    b: Builder, tensor: Tensor, mode: int, ring: ir.Value | None, flat: ir.Value
) -> ir.Value:
    """Adds the product of the ring so far [b, m, r1, r] with a core's matrix, given flat."""
    name, ranks = tensor.name, tensor.spec.ranks
    shape = b.ints(0, 0, ranks[mode], ranks[mode + 1])
    matrix = b.op("Reshape", flat, shape, name=f"{name}/matrix_{mode}")
    if ring is None:
        return matrix
    return b.op("MatMul", ring, matrix, name=f"{name}/ring_{mode}")


def _tucker(gates: Gates, b: Builder, layer: MuMoELayer, tensor: Tensor, z: ir.Value) -> ir.Value:
    """Adds y = Z(a_1·U_1, …, a_E·U_E, z·U_d + u0)·U_oᵀ for the core Z (Eq. 3).

    Whatever mode meets the core first costs as many multiply-adds as the core has numbers; what is
    left per token is smallest after the input, whose rank is the largest: ΠR_e·R_o.
    """
    name, ranks = tensor.name, tensor.spec.ranks
    product = input_product(b, layer, name, z)
    core = factor_product(b, layer, f"{name}.core", product, f"{name}/core")
    shape = b.ints(0, 0, prod(ranks[:-2]), ranks[-1])
    outputs = b.op("Reshape", core, shape, name=f"{name}/core_outputs")
    reduced = [
        b.op("MatMul", gate, layer.stacked(b, f"{name}.expert.{e}"), name=f"{name}/expert_{e}")
        for e, gate in enumerate(gates)
    ]
    mix = mixed(b, combined(b, reduced, f"{name}/weights"), outputs, f"{name}/core")
    return factor_product(b, layer, f"{name}.output", mix, f"{name}/output")


def _matrix(gates: Gates, b: Builder, layer: MuMoELayer, tensor: Tensor, z: ir.Value) -> ir.Value:
    """Adds y = z·W + w: the experts are merged, so that there is nothing to choose."""
    del gates
    return input_product(b, layer, tensor.name, z)


_CONTRACTIONS = {"cp": _cp, "tr": _tr, "tucker": _tucker, "matrix": _matrix}


def _unable(spec: MuMoESpec) -> str | None:
    return "its weight tensor is not factorised" if spec.form == "full" else None


LOWERING: LoweringOf[MuMoESpec] = LoweringOf(
    name="factorised",
    summary="products with the factors; the experts' weight tensor is never written out",
    build=build,
    predict_us=all_coefficients_us,
    unable=_unable,
    observable=True,
)
