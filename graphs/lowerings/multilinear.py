"""The common parts of the muMoE lowerings, and products over combinations of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import onnx_ir as ir

from ..builder import Builder
from ..gating import MuMoELayer
from ..layers.mumoe import NORM_EPS, FactorisedSpec
from ..names import operand_of
from ..precision.products import Linear, Rows, operand, product
from ..targets import Machine
from .base import AnyPlan

Gates = Sequence[ir.Value]
"""The coefficients [b, m, n] of each level."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One weight tensor of a layer: its name among the layer's weights, and its form."""

    name: str
    spec: FactorisedSpec


Contract = Callable[[Builder, MuMoELayer, Tensor, ir.Value], ir.Value]
"""Adds y = W(a_1, …, a_E, z) [b, m, o] for a tensor and its input z [b, m, d]."""


def through_tensors(
    b: Builder, layer: MuMoELayer, x: ir.Value, gates: Gates, contract: Contract
) -> ir.Value:
    """Adds one or two tensors on tokens x [b, m, d], and rewrites outputs with the coefficients.

    If the layer normalises x, it does that in FP32, like everything in the gate.
    """
    fp32, inner = ir.DataType.FLOAT, layer.compute.inner
    if layer.spec.input_norm:
        z = b.op(
            "LayerNormalization",
            b.cast(x, layer.x_type, fp32, "input/tokens_fp32"),
            layer.stacked(b, "gain"),
            layer.stacked(b, "shift"),
            axis=-1,
            epsilon=NORM_EPS,
            name="input/normalised",
        )
        z = b.cast(z, fp32, inner, "input/normalised_narrow")
    else:
        z = b.cast(x, layer.x_type, inner, "input/narrow")
    for index, tensor in enumerate(layer.spec.tensors):
        if index:
            z = b.op("Gelu", z, name="hidden")
        z = contract(b, layer, Tensor(f"tensor.{index}", tensor), z)
    z = b.cast(z, inner, layer.y_type, "outputs")
    return _rewrite(b, layer, gates, z) if layer.tensors.has("rewrite.0") else z


def _rewrite(b: Builder, layer: MuMoELayer, gates: Gates, y: ir.Value) -> ir.Value:
    """Adds y_o += λ·Π_e(ā_eᵀ·a_e) for all rewritten outputs at once (Eq. 5)."""
    terms: ir.Value | None = None
    for level, gate in enumerate(gates):
        means = layer.stacked(b, f"rewrite.{level}")
        score = b.op("MatMul", gate, means, name=f"rewrite/level_{level}")
        terms = score if terms is None else b.op("Mul", terms, score, name="rewrite/alike")
    assert terms is not None
    if layer.tensors.has("rewrite.output"):
        terms = b.op("MatMul", terms, layer.stacked(b, "rewrite.output"), name="rewrite/added")
    terms = b.cast(terms, ir.DataType.FLOAT, layer.y_type, "rewrite/narrow")
    return b.op("Add", y, terms, name="rewritten")


def input_product(b: Builder, layer: MuMoELayer, name: str, z: ir.Value) -> ir.Value:
    """Adds z·A + a0: the last row of the input factor is added, in place of a 1 appended to z."""
    bias = layer.optional(b, f"{name}.bias")
    return factor_product(b, layer, f"{name}.input", z, f"{name}/input", bias)


def factor_product(
    b: Builder, layer: MuMoELayer, key: str, rows: ir.Value, name: str, bias: ir.Value | None = None
) -> ir.Value:
    """Adds rows·W + bias for rows [b, m, ·] and a large factor W, in integers if W is quantised.

    Large factors are those of the input and the output, and Tucker's core.
    """
    tensor = operand_of(key)
    assert tensor is not None, f"{key} is not a large factor"
    b.tap(tensor, rows)
    form: Rows = "token" if layer.tokens == 1 else "tokens"
    scale = layer.optional(b, f"{key}.scale")
    factor = Linear(key=key, weight=layer.stacked(b, key), scale=scale, bias=bias, rows=form)
    return product(b, layer.compute, operand(b, layer.compute, key, rows, name), factor, name)


def combine(b: Builder, vectors: Sequence[ir.Value], name: str, op: str = "Mul") -> ir.Value:
    """Adds all products (or sums) of one number from each vector [b, m, ·], row-major.

    A single vector is returned unchanged.
    """

    def pair(left: ir.Value, right: ir.Value) -> ir.Value:
        column = b.op("Unsqueeze", left, b.ints(3), name=f"{name}/column")
        row = b.op("Unsqueeze", right, b.ints(2), name=f"{name}/row")
        table = b.op(op, column, row, name=f"{name}/table")
        return b.op("Reshape", table, b.ints(0, 0, -1), name=name)

    return reduce(pair, vectors)


def exclude(
    b: Builder, layer: MuMoELayer, weights: ir.Value, outputs: ir.Value, name: str
) -> ir.Value:
    """Adds the outputs [b, m, N, o], with zeros for zero weights [b, m, N] if some are excluded.

    It uses Where instead of a product with zero: excluded outputs may be infinite.
    """
    if not layer.selects:
        return outputs
    column = b.op("Unsqueeze", weights, b.ints(3), name=f"{name}/weight_columns")
    kept = b.op("Cast", column, to=ir.DataType.BOOL.value, name=f"{name}/kept")
    zero = b.number(0.0, layer.compute.inner)
    return b.op("Where", kept, outputs, zero, name=f"{name}/outputs_kept")


def mix(b: Builder, weights: ir.Value, outputs: ir.Value, name: str) -> ir.Value:
    """Adds Σ_N a_N·y_N [b, m, o] for weights [b, m, N] and the outputs [b, m, N, o]."""
    row = b.op("Unsqueeze", weights, b.ints(2), name=f"{name}/weights")
    product_row = b.op("MatMul", row, outputs, name=f"{name}/mix")
    return b.op("Squeeze", product_row, b.ints(2), name=f"{name}/mixed")


LEVEL_NODES = 50
"""The approximate number of nodes of one level of a layer."""


def gate_us(plan: AnyPlan, machine: Machine) -> float:
    """Returns the time of a layer's nodes, most of which are the gate's steps."""
    return float(LEVEL_NODES * len(plan.spec.levels) * machine.node_us)


def all_coefficients_us(plan: AnyPlan, machine: Machine) -> float:
    """Returns the time of a layer whose factors or whole tensor are read once for all tokens."""
    n = plan.spec.experts
    macs: int = sum(plan.spec.macs(plan.tokens, n).values())
    traffic: float = plan.spec.bytes_read(n) / machine.bytes_per_us
    return max(traffic, plan.batch * macs / machine.macs_per_us) + gate_us(plan, machine)
