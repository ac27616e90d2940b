"""Recognises attention that PyTorch wrote in small ops, and builds attention with sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ..builder import Builder
from .kernels import are_float32, supports_mask
from .patterns import (
    HEADS_FIRST,
    TOKENS_LAST,
    heads_of,
    integers_in,
    name_of,
    node_of,
    only_user,
    permutes,
    span,
    unscaled,
    width_of,
)


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """Attention in small ops: its last node, and the fused op's inputs, all [b, heads, m, w].

    `scores` are the products of queries and keys, which the fused op does not return.
    """

    last: ir.Node
    q: ir.Value
    k: ir.Value
    v: ir.Value
    scores: ir.Value
    mask: ir.Value | None
    scale: float
    joined: tuple[ir.Node, ir.Node] | None
    """The nodes that append new keys and values to the cached ones."""
    sinks: ir.Value | None
    """Scores [1, heads, 1, 1] that only the softmax includes."""


def match_attention(softmax: ir.Node) -> AttentionParts | None:
    """Returns the attention around a softmax, or None."""
    weights, scores, sinks = softmax.outputs[0], softmax.inputs[0], None
    sliced = only_user(weights, "Slice")
    if sliced is not None:
        weights = sliced.outputs[0]
        scores, sinks = _before_sinks(softmax, sliced)
    last = only_user(weights, "MatMul")
    if last is None or last.inputs[0] is not weights:
        return None
    if softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    masked, mask = node_of(scores, "Add"), None
    if masked is not None:
        scores, mask = masked.inputs
        if node_of(scores, "MatMul", "Mul", "Div") is None:
            scores, mask = mask, scores
    scores, scale = unscaled(scores)
    product = node_of(scores, "MatMul")
    if product is None:
        return None
    q, q_scale = unscaled(product.inputs[0])
    transposed, transposed_scale = unscaled(product.inputs[1])
    k, k_scale = unscaled(_untransposed(transposed))
    k, v = _unrepeated(k), _unrepeated(last.inputs[1])
    if q is None or k is None or v is None or not (heads_of(q) and heads_of(k) == heads_of(v) != 0):
        return None
    supported = _same_width(q, k, v) and supports_mask(mask, q, k) and are_float32(q, k, v, mask)
    by_head = sinks is None or (
        sinks.shape is not None and [*sinks.shape] == [1, heads_of(q), 1, 1]
    )
    if not (supported and by_head):
        return None
    joins = [node_of(value, "Concat") for value in (k, v)]
    joined = None
    if joins[0] is not None and joins[1] is not None and all(_appends(join) for join in joins):
        joined = (joins[0], joins[1])
    return AttentionParts(
        last=last,
        q=q,
        k=k,
        v=v,
        scores=product.outputs[0],
        mask=mask,
        scale=scale * q_scale * transposed_scale * k_scale,
        joined=joined,
        sinks=sinks,
    )


def is_plain(attention: AttentionParts) -> bool:
    """Returns whether every token attends to all others, with keys per head, as in a ViT.

    For such attention, ONNX Runtime's own op is faster than ONNX's.
    """
    extras = (attention.mask, attention.joined, attention.sinks)
    values = (attention.q, attention.k, attention.v)
    sizes = {(heads_of(value), width_of(value)) for value in values}
    return extras == (None, None, None) and len(sizes) == 1


def _same_width(q: ir.Value, k: ir.Value, v: ir.Value) -> bool:
    """Returns whether queries have the keys' width and batch, unlike a query shared by all inputs.

    The ops broadcast neither: heads of queries may share keys and values, but not the reverse.
    """
    assert q.shape is not None and k.shape is not None and v.shape is not None
    same = (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    return same and v.shape[0] == k.shape[0] and heads_of(q) % heads_of(k) == 0


def _before_sinks(softmax: ir.Node, sliced: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """Returns the scores and the sinks of a softmax whose sink column is sliced off, or None, None.

    The form is softmax(x − max(x)) of x = (scores, sinks), as in gpt-oss.
    """
    shifted = node_of(softmax.inputs[0], "Sub")
    joined = None if shifted is None else node_of(shifted.inputs[0], "Concat")
    highest = None if shifted is None else node_of(shifted.inputs[1], "ReduceMax")
    if joined is None or highest is None or len(joined.inputs) != 2 or span(sliced, 1) != (0, -1):
        return None, None
    axes = [joined.attributes.get_int("axis"), *(integers_in(highest.inputs[1]) or [0])]
    expand = node_of(joined.inputs[1], "Expand")
    if highest.inputs[0] is not joined.outputs[0] or expand is None or {*axes} - {-1, 3}:
        return None, None
    return joined.inputs[0], expand.inputs[0]


def _appends(concat: ir.Node | None) -> bool:
    """Returns whether a node appends keys or values to an input of the graph."""
    if concat is None or len(concat.inputs) != 2:
        return False
    axis, past = concat.attributes.get_int("axis"), concat.inputs[0]
    return axis in (-2, 2) and past is not None and past.is_graph_input()


def appended_by(joined: ir.Node) -> ir.Value:
    """Returns the new keys or values, which a node appends to cached ones."""
    value = joined.inputs[1]
    assert value is not None
    return value


def _untransposed(value: ir.Value | None) -> ir.Value | None:
    """Returns the value [b, heads, m, w] that was transposed to one [b, heads, w, m]."""
    node = node_of(value, "Transpose")
    if node is not None:
        if permutes(node, TOKENS_LAST):
            _split_transpose(node)
        return node.inputs[0] if permutes(node, [0, 1, 3, 2]) else None
    # If the rank is unknown, PyTorch's exporter transposes with three axes.
    reshape = node_of(value, "Reshape")
    transpose = None if reshape is None else node_of(reshape.inputs[0], "Transpose")
    flat = None if transpose is None else node_of(transpose.inputs[0], "Reshape")
    if transpose is None or flat is None or not permutes(transpose, [0, 2, 1]):
        return None
    return flat.inputs[0]


def _split_transpose(node: ir.Node) -> None:
    """Splits a transpose to [b, heads, w, m] into two, with [b, heads, m, w] between them."""
    x, graph = node.inputs[0], node.graph
    if x is None or x.shape is None or graph is None:
        return
    b = Builder(name_of(node))
    keys = b.op("Transpose", x, perm=HEADS_FIRST, name="heads_first")
    keys.shape, keys.type = ir.Shape([x.shape[axis] for axis in HEADS_FIRST]), x.type
    b.insert_before(graph, node)
    node.replace_input_with(0, keys)
    node.attributes["perm"] = ir.AttrInt64s("perm", [0, 1, 3, 2])


def _unrepeated(value: ir.Value | None) -> ir.Value | None:
    """Returns keys or values before they were repeated for the heads that share them."""
    reshape = node_of(value, "Reshape")
    expand = None if reshape is None else node_of(reshape.inputs[0], "Expand")
    unsqueeze = None if expand is None else node_of(expand.inputs[0], "Unsqueeze")
    if unsqueeze is None or integers_in(unsqueeze.inputs[1]) != [2]:
        return value
    return unsqueeze.inputs[0]


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
    `past`; heads of one group share keys and values. `sinks` are [1, heads, 1, 1].
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
    transposed = b.op("Transpose", keys, perm=[0, 1, 2, 4, 3], name="turned")
    scores = b.op("MatMul", queries, transposed, name="products")
    scores = b.op("Mul", scores, b.number(scale, q.dtype), name="scores")
    if mask is not None:
        unsqueezed = b.op("Unsqueeze", mask, b.ints(2), name="mask")
        scores = b.op("Add", scores, unsqueezed, name="masked")
    sink = b.op("Reshape", sinks, b.ints(1, groups, shared, 1, 1), name="sinks")
    highest = b.op("ReduceMax", scores, b.ints(-1), keepdims=1, name="highest_score")
    highest = b.op("Max", highest, sink, name="highest")
    powers, sink_power = (
        b.op("Exp", b.op("Sub", value, highest, name="below"), name="powers")
        for value in (scores, sink)
    )
    total = b.op("ReduceSum", powers, b.ints(-1), keepdims=1, name="total_seen")
    total = b.op("Add", total, sink_power, name="total")
    y = b.op("MatMul", b.op("Div", powers, total, name="weights"), values, name="seen")
    y = b.op("Reshape", y, b.ints(0, heads, -1, width), name="of_heads")
    y = b.op("Transpose", y, perm=[0, 2, 1, 3], name="tokens_first")
    return [b.op("Reshape", y, b.ints(0, 0, -1), name="output"), *present]
