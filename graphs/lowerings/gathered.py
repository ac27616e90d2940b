"""`gathered`: each token gathers the matrices of its kept experts."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir

from .. import names
from ..builder import Builder
from ..gating import KeptLevel, MuMoELayer, kept_levels
from ..layers.mumoe import MuMoESpec
from ..targets import Machine
from . import unfactorised
from .base import LayerPlan, LoweringOf
from .multilinear import Tensor, combine, exclude, gate_us, mix, through_tensors


def build(b: Builder, layer: MuMoELayer, x: ir.Value) -> ir.Value:
    """Adds the layer with matrices gathered to [b, m, K, o, d]; at k = n nothing needs gathering.

    Each token passes over K/N of the weights three times (read, write, read again). Many tokens
    together pass over more than the whole tensor, which `unfactorised` streams once.
    """
    if not layer.selects:
        return unfactorised.build(b, layer, x)
    levels = kept_levels(b, layer, x)
    gates = [level.coefficients for level in levels]
    return through_tensors(b, layer, x, gates, partial(_contract, *_choices(b, layer, levels)))


def _choices(b: Builder, layer: MuMoELayer, levels: list[KeptLevel]) -> tuple[ir.Value, ir.Value]:
    """Adds each token's kept combinations: row-major indices for (e_1, …, e_E), and weights.

    Both are [b, m, K].
    """
    indices: list[ir.Value] = []
    weights: list[ir.Value] = []
    step = 1
    for level, n in reversed(list(enumerate(layer.spec.levels))):
        kept = levels[level]
        name = names.coefficients(level)
        if kept.indices is None:  # a level with fewer experts than k keeps all
            index, values = b.constant(np.arange(n).reshape(1, 1, n)), kept.coefficients
        else:
            # Read from the kept coefficients, which therefore stay in the graph for parity checks.
            index = kept.indices
            values = b.op(
                "GatherElements", kept.coefficients, index, axis=-1, name=f"{name}/values"
            )
        if step > 1:
            index = b.op("Mul", index, b.integer(step), name=f"{name}/offsets")
        indices.insert(0, index)
        weights.insert(0, values)
        step *= n
    products = combine(b, weights, "combinations")
    return (
        combine(b, indices, "combinations/numbers", "Add"),
        b.cast(products, ir.DataType.FLOAT, layer.compute.inner, "combinations/narrow"),
    )


def _contract(
    indices: ir.Value, weights: ir.Value, b: Builder, layer: MuMoELayer, tensor: Tensor, z: ir.Value
) -> ir.Value:
    """Adds y = Σ_K a_K·(W_K·z + w_K) over the kept combinations of each token."""
    name = tensor.name
    b.tap(f"{name}.input", z)
    stacked = layer.stacked(b, f"{name}.experts")
    matrices = b.op("Gather", stacked, indices, axis=0, name=f"{name}/matrices")
    column = b.op("Unsqueeze", z, b.ints(2, 4), name=f"{name}/column")  # [b, m, 1, d, 1]
    products = b.op("MatMul", matrices, column, name=f"{name}/products")
    outputs = b.op("Squeeze", products, b.ints(4), name=f"{name}/outputs")
    stored = layer.optional(b, f"{name}.biases")
    if stored is not None:
        biases = b.op("Gather", stored, indices, axis=0, name=f"{name}/biases")
        outputs = b.op("Add", outputs, biases, name=f"{name}/outputs_biased")
    return mix(b, weights, exclude(b, layer, weights, outputs, name), name)


def copied_bytes(plan: LayerPlan[MuMoESpec]) -> float:
    """Returns the bytes of the kept experts that every token copies."""
    selects = plan.typical_k < plan.spec.experts
    return (
        float(plan.batch * plan.tokens * plan.spec.bytes_read(plan.typical_k)) if selects else 0.0
    )


def predict_us(plan: LayerPlan[MuMoESpec], machine: Machine) -> float:
    """Returns the time of the copy and of the kept experts' arithmetic."""
    if plan.typical_k >= plan.spec.experts:
        # Nothing needs gathering: it is the same graph.
        return unfactorised.LOWERING.predict_us(plan, machine)
    macs = sum(plan.spec.macs(plan.tokens, plan.typical_k).values())
    return (
        copied_bytes(plan) / machine.copy_bytes_per_us
        + plan.batch * macs / machine.batched_macs_per_us
        + gate_us(plan, machine)
    )


LOWERING: LoweringOf[MuMoESpec] = LoweringOf(
    name="gathered",
    summary="each token gathers the matrices of only those experts that it keeps",
    build=build,
    predict_us=predict_us,
    copied_bytes=copied_bytes,
    unable=unfactorised.unable,
)
