"""Attention with sinks in small ops: a score of each head that takes part in the softmax alone."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ..builder import Builder


def attention_with_sinks(
    b: Builder,
    heads_first: Sequence[ir.Value],
    past: Sequence[ir.Value | None],
    mask: ir.Value | None,
    sinks: ir.Value,
    scale: float,
) -> list[ir.Value]:
    """Adds softmax(q·kᵀ·scale + mask, with sinks)·v; returns [b, m, heads·w] and the caches.

    `heads_first` are q [b, heads, m, w], and k and v [b, groups, m, w], which are appended to
    `past`; the heads of a group share them. `sinks` are [1, heads, 1, 1].
    """
    q, *new = heads_first
    assert q.shape is not None and new[0].shape is not None and q.dtype is not None
    heads, groups, width = q.shape[1], new[0].shape[1], q.shape[3]
    assert isinstance(heads, int) and isinstance(groups, int) and isinstance(width, int)
    present = [
        b.op("Concat", before, value, axis=2, name=name)
        for before, value, name in zip(past, new, ("keys", "values"), strict=True)
    ]
    keys, values = (b.op("Unsqueeze", value, b.ints(2), name="shared") for value in present)
    shared = heads // groups
    queries = b.op("Reshape", q, b.ints(0, groups, shared, -1, width), name="queries")
    turned = b.op("Transpose", keys, perm=[0, 1, 2, 4, 3], name="turned")
    scores = b.op("MatMul", queries, turned, name="products")
    scores = b.op("Mul", scores, b.number(scale, q.dtype), name="scores")
    if mask is not None:
        spread = b.op("Unsqueeze", mask, b.ints(2), name="mask")
        scores = b.op("Add", scores, spread, name="masked")
    sink = b.op("Reshape", sinks, b.ints(1, groups, shared, 1, 1), name="sinks")
    highest = b.op("ReduceMax", scores, b.ints(-1), keepdims=1, name="highest_score")
    highest = b.op("Max", highest, sink, name="highest")
    powers, of_sink = (
        b.op("Exp", b.op("Sub", value, highest, name="below"), name="powers")
        for value in (scores, sink)
    )
    total = b.op("ReduceSum", powers, b.ints(-1), keepdims=1, name="total_seen")
    total = b.op("Add", total, of_sink, name="total")
    y = b.op("MatMul", b.op("Div", powers, total, name="weights"), values, name="seen")
    y = b.op("Reshape", y, b.ints(0, heads, -1, width), name="of_heads")
    y = b.op("Transpose", y, perm=[0, 2, 1, 3], name="tokens_first")
    return [b.op("Reshape", y, b.ints(0, 0, -1), name="output"), *present]
