"""`conditional`: each expert computes all tokens, but only if any of them chose it."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from ....graphs.builder import Builder
from ....graphs.lowerings.base import LoweringOf
from ....graphs.lowerings.conditional import chosen_by_any, if_chosen, split
from ....graphs.lowerings.cost import packing_us, waiting_us
from ....graphs.targets import Machine
from ..layers.experts import ExpertsSpec
from .arithmetic import (
    ExpertsLayer,
    ScaledRows,
    both_products,
    by_expert,
    chosen,
    chosen_only,
    first_rows,
    normalised,
    outputs_type,
    pair_weights,
    products,
    token_rows,
    weighted_sum,
)
from .cost import ExpertsPlan, combine_us, one_by_one_us


def build(b: Builder, layer: ExpertsLayer, x: ir.Value) -> ir.Value:
    """Adds the layer with an `If` per expert."""
    n = layer.spec.experts
    one_hot, weights = chosen(b, layer), pair_weights(b, layer)
    mask = by_expert(b, one_hot, None)  # [t, n]
    shares = mask
    tokens = token_rows(b, layer, x)
    column: list[ir.Value] | None = None
    if layer.spec.weights_on == "input":
        columns = b.cast(
            by_expert(b, one_hot, weights),
            ir.DataType.FLOAT,
            layer.compute.inner,
            "dispatch/weights",
        )
        column = split(b, columns, n, 1, "dispatch/weight")
        rows = ScaledRows(values=tokens)
    else:
        shares = by_expert(b, one_hot, weights)
        rows = first_rows(b, layer, tokens)
    outputs = []
    for e, used in enumerate(chosen_by_any(b, mask, n)):
        run = b.nested(f"experts/{e}/run")
        expert_rows = rows
        if column is not None:
            expert_rows = first_rows(run, layer, run.op("Mul", tokens, column[e], name="weighted"))
        multiply = partial(products, run, layer, e)
        y = normalised(run, layer, both_products(run, layer, expert_rows, multiply, e))
        outputs.append(if_chosen(b, e, used, run, y, tokens, layer.spec.out, outputs_type(layer)))
    by_token = [
        b.op("Unsqueeze", y, b.ints(1), name=f"combine/expert_{e}") for e, y in enumerate(outputs)
    ]
    outputs_by_token = b.op("Concat", *by_token, axis=1, name="combine/outputs")
    return weighted_sum(b, layer, chosen_only(b, layer, outputs_by_token, one_hot), shares)


NODES = 8
"""The number of nodes of an expert, without its `If`."""


def predict_us(plan: ExpertsPlan, machine: Machine) -> float:
    """Returns the predicted time: chosen experts are read once and compute every token.

    Every expert costs a branch, chosen or not.
    """
    n, active = plan.spec.experts, plan.expected_active
    return (
        one_by_one_us(plan, active, plan.choosers * active, machine)
        + packing_us(plan, active, plan.choosers, machine)  # in every run, within a branch
        + combine_us(plan, plan.choosers * n, machine)
        + n * (machine.branch_us + waiting_us(NODES, machine))
    )


LOWERING: LoweringOf[ExpertsSpec] = LoweringOf(
    name="conditional",
    summary="an If per expert, which computes all tokens if any of them chose the expert",
    needs=lambda target: target.branches,
    branches=True,
    build=build,
    predict_us=predict_us,
)
