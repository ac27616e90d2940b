"""Adds the scores of a layer as outputs; imported only if requested."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ..errors import LoweringError
from .builder import Builder
from .layers.stored import Layer, SoftMoELayer
from .names import COLUMN_SUMS, COMBINE, DISPATCH


def add_scores(
    b: Builder, layer: SoftMoELayer, combine: ir.Value, logits: ir.Value | None = None
) -> None:
    """Adds C, its column sums and, if L is known, D as outputs, for all experts."""
    n, p = layer.spec.experts, layer.spec.slots
    by_expert = b.op("Reshape", combine, b.ints(0, 0, n, p), name=COMBINE)
    b.add_score(by_expert, None, n, p)
    if logits is not None:
        dispatch = b.op("Softmax", logits, axis=1, name="router/dispatch")
        b.add_score(b.op("Reshape", dispatch, b.ints(0, 0, n, p), name=DISPATCH), None, n, p)
    b.add_score(b.op("ReduceSum", by_expert, b.ints(1, 3), keepdims=0, name=COLUMN_SUMS), n)


def score_outputs(b: Builder, layer: Layer[Any], x: ir.Value) -> list[ir.Value]:
    """Returns a layer's scores, with their shapes, from its lowering or from its inputs.

    If the router is outside the layer, the scores are [b·m, k], one row per token. Raises
    `LoweringError` for a lowering of Soft MoE without scores.
    """
    if layer.spec.flat:
        _, weights, *_ = layer.routed
        fp32 = ir.DataType.FLOAT
        return [b.op("Cast", weights, to=fp32.value, name="router/weights")]
    for score, sizes in b.scores.items():
        assert x.shape is not None
        score.shape = ir.Shape([x.shape[0], *(x.shape[1] if n is None else n for n in sizes)])
    if not b.scores and layer.spec.chooses_sets:
        raise LoweringError(
            f"the lowering of the layer {layer.spec.name} has no score outputs",
            hint="choose another --lowering, or use --expose-routing without scores",
        )
    return [*b.scores]
