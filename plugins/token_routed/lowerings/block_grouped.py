"""`block-grouped`: puts (token, expert) pairs in padded tiles, each with one gathered matrix.

Every shape depends only on the inputs' shapes, as engines require
(`graphs.lowerings.block_grouped`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import onnx_ir as ir

from ....graphs.builder import Builder
from ....graphs.lowerings.base import LoweringOf
from ....graphs.lowerings.block_grouped import (
    SORTING_NODES,
    best_tile,
    costed_precision,
    from_tiles,
    into_tiles,
    planned_tiles,
    tiles_us,
)
from ....graphs.lowerings.cost import expert_bytes, machine_for, rates_of
from ....graphs.lowerings.experts import stacked_linear
from ....graphs.precision.products import product
from ....graphs.targets import SERVER_GPU, Machine
from ..layers.experts import ExpertsSpec
from .arithmetic import ExpertsLayer, both_products, by_token, first_rows, pair_rows, routed
from .cost import ExpertsPlan, between_us, combine_us


def build(b: Builder, layer: ExpertsLayer, x: ir.Value) -> ir.Value:
    """Adds the layer with weights gathered to [tiles, d, inner] and [tiles, h, o]."""
    index, weights = routed(b, layer)
    tiles = into_tiles(
        b,
        pair_rows(b, layer, x, index, weights),
        b.op("Reshape", index, b.ints(-1), name="tiles/expert_of_pair"),
        experts=layer.spec.experts,
        tile=_tile_for(layer),
        width=layer.spec.dim,
    )
    rows = first_rows(b, layer, tiles.rows)
    outputs = both_products(b, layer, rows, partial(_products, b, layer, tiles.expert), None)
    return by_token(b, layer, from_tiles(b, tiles, outputs, layer.spec.out), index, weights)


def _products(
    b: Builder, layer: ExpertsLayer, expert: ir.Value, which: str, rows: ir.Value, name: str
) -> ir.Value:
    """Adds each tile's product [tiles, T, ·] with the matrix of its expert [tiles]."""
    linear = stacked_linear(b, layer, which)

    def gathered(value: ir.Value | None, what: str) -> ir.Value | None:
        if value is None:
            return None
        return b.op("Gather", value, expert, axis=0, name=f"experts/{what}{which}_of_tile")

    weight = gathered(linear.weight, "w")
    assert weight is not None
    scale, bias = gathered(linear.scale, "scale"), gathered(linear.bias, "b")
    return product(
        b, layer.compute, rows, replace(linear, weight=weight, scale=scale, bias=bias), name
    )


def _tile_for(layer: ExpertsLayer) -> int:
    """Returns the tile predicted to be fastest for a prompt, since one token fills no tile."""
    spec, precision = layer.spec, costed_precision(layer.compute)
    plan = ExpertsPlan(spec, spec.k, 1, spec.typical_tokens[-1], precision)
    return best_tile(plan, machine_for(layer.target, precision), between_us)


def _for_prompt(plan: ExpertsPlan) -> ExpertsPlan:
    """Returns the plan for a prompt, for which the tile is chosen."""
    return replace(plan, batch=1, tokens=plan.spec.typical_tokens[-1])


def _unsupported(spec: ExpertsSpec) -> str | None:
    normed = spec.hidden_norm is not None or spec.out_norm is not None
    return "its tiles do not support a normalisation within an expert" if normed else None


def copied_bytes(plan: ExpertsPlan) -> float:
    """Returns the size of the copied weights: every tile copies its expert."""
    tile = best_tile(_for_prompt(plan), rates_of(SERVER_GPU)["fp32"], between_us)
    return expert_bytes(plan, planned_tiles(plan, tile))


def predict_us(plan: ExpertsPlan, machine: Machine) -> float:
    """Returns the predicted time of copying weights, computing tiles, and sorting the pairs."""
    tile = best_tile(_for_prompt(plan), machine, between_us)
    return (
        tiles_us(plan, machine, tile, between_us)
        + plan.selections * plan.spec.experts * machine.sort_us
        + combine_us(plan, plan.selections, machine)
        + SORTING_NODES * machine.node_us
    )


LOWERING: LoweringOf[ExpertsSpec] = LoweringOf(
    name="block-grouped",
    summary="sorts the tokens' choices by expert into padded tiles; one batched product for all",
    needs=lambda target: target.compiled,
    build=build,
    predict_us=predict_us,
    copied_bytes=copied_bytes,
    unable=_unsupported,
)
