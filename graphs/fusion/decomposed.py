"""Attention as PyTorch's exporter writes it, in small ops: where it is, and what goes into it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..builder import Builder
from .kernels import are_float32, takes_mask
from .patterns import (
    HEADS_FIRST,
    TOKENS_LAST,
    heads_of,
    integers_in,
    made,
    name_of,
    only_user,
    permutes,
    span,
    unscaled,
    width_of,
)


@dataclass(frozen=True, slots=True)
class DecomposedAttention:
    """A decomposed attention: the end of it, and what the op takes, all [b, heads, m, w]."""

    last: ir.Node
    q: ir.Value
    k: ir.Value
    v: ir.Value
    mask: ir.Value | None
    scale: float
    joined: tuple[ir.Node, ir.Node] | None
    """The nodes that append new keys and values to those of earlier tokens."""
    sinks: ir.Value | None
    """[1, heads, 1, 1], scores that take part in the softmax and in nothing else."""


def decomposed(softmax: ir.Node) -> DecomposedAttention | None:
    """The attention that a softmax is part of, or None."""
    weights, scores, sinks = softmax.outputs[0], softmax.inputs[0], None
    cut = only_user(weights, "Slice")
    if cut is not None:
        weights = cut.outputs[0]
        scores, sinks = _before_sinks(softmax, cut)
    last = only_user(weights, "MatMul")
    if last is None or last.inputs[0] is not weights:
        return None
    if softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    masked, mask = made(scores, "Add"), None
    if masked is not None:
        scores, mask = masked.inputs
        if made(scores, "MatMul", "Mul", "Div") is None:
            scores, mask = mask, scores
    scores, scale = unscaled(scores)
    product = made(scores, "MatMul")
    if product is None:
        return None
    q, of_q = unscaled(product.inputs[0])
    turned, of_turned = unscaled(product.inputs[1])
    k, of_k = unscaled(_unturned(turned))
    k, v = _unrepeated(k), _unrepeated(last.inputs[1])
    if q is None or k is None or v is None or not (heads_of(q) and heads_of(k) == heads_of(v) != 0):
        return None
    taken = _alike(q, k, v) and takes_mask(mask, q, k) and are_float32(q, k, v, mask)
    if not taken or not (sinks is None or _is_of_heads(sinks, q)):
        return None
    joins = [made(value, "Concat") for value in (k, v)]
    joined = None
    if joins[0] is not None and joins[1] is not None and all(_appends(join) for join in joins):
        joined = (joins[0], joins[1])
    return DecomposedAttention(
        last=last,
        q=q,
        k=k,
        v=v,
        mask=mask,
        scale=scale * of_q * of_turned * of_k,
        joined=joined,
        sinks=sinks,
    )


def is_plain(attention: DecomposedAttention) -> bool:
    """Whether every token sees all others, each head with keys of its own, as in a ViT.

    For these ONNX Runtime's own op is faster than that of ONNX.
    """
    other = (attention.mask, attention.joined, attention.sinks)
    sizes = {
        (heads_of(value), width_of(value)) for value in (attention.q, attention.k, attention.v)
    }
    return other == (None, None, None) and len(sizes) == 1


def _alike(q: ir.Value, k: ir.Value, v: ir.Value) -> bool:
    """Whether queries are of the keys' width and batch, which one that all inputs share is not.

    The ops repeat neither, and share keys and values among heads of queries, not the other way.
    """
    assert q.shape is not None and k.shape is not None and v.shape is not None
    same = (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    return same and v.shape[0] == k.shape[0] and heads_of(q) % heads_of(k) == 0


def _is_of_heads(value: ir.Value, q: ir.Value) -> bool:
    """Whether a value has a number for each of the heads of q, [1, heads, 1, 1]."""
    return value.shape is not None and list(value.shape) == [1, heads_of(q), 1, 1]


def _before_sinks(softmax: ir.Node, cut: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """The scores and the sinks that a softmax was taken of, cut off behind it; or neither.

    softmax(x − max(x)) of x = (scores, sinks), as gpt-oss computes it.
    """
    shifted = made(softmax.inputs[0], "Sub")
    joined = None if shifted is None else made(shifted.inputs[0], "Concat")
    highest = None if shifted is None else made(shifted.inputs[1], "ReduceMax")
    if joined is None or highest is None or len(joined.inputs) != 2 or span(cut, 1) != (0, -1):
        return None, None
    along = [joined.attributes.get_int("axis"), *(integers_in(highest.inputs[1]) or [0])]
    spread = made(joined.inputs[1], "Expand")
    if highest.inputs[0] is not joined.outputs[0] or spread is None or {*along} - {-1, 3}:
        return None, None
    return joined.inputs[0], spread.inputs[0]


def _appends(concat: ir.Node | None) -> bool:
    """Whether keys or values are appended to those that the graph is given."""
    if concat is None or len(concat.inputs) != 2:
        return False
    axis, past = concat.attributes.get_int("axis"), concat.inputs[0]
    return axis in (-2, 2) and past is not None and past.is_graph_input()


def appended_to(joined: ir.Node) -> ir.Value:
    """The keys or values that are appended."""
    value = joined.inputs[1]
    assert value is not None
    return value


def _unturned(value: ir.Value | None) -> ir.Value | None:
    """The value [b, heads, m, w] that one [b, heads, w, m] was made of."""
    node = made(value, "Transpose")
    if node is not None:
        if permutes(node, TOKENS_LAST):
            _take_apart(node)
        return node.inputs[0] if permutes(node, [0, 1, 3, 2]) else None
    # Where the rank is not known beforehand, PyTorch's exporter goes by three axes.
    shaped = made(value, "Reshape")
    turned = None if shaped is None else made(shaped.inputs[0], "Transpose")
    flat = None if turned is None else made(turned.inputs[0], "Reshape")
    if turned is None or flat is None or not permutes(turned, [0, 2, 1]):
        return None
    return flat.inputs[0]


def _take_apart(node: ir.Node) -> None:
    """Makes a transpose to [b, heads, w, m] one to [b, heads, m, w] and another after it."""
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
    """Keys or values before they were repeated for the heads that share them."""
    shaped = made(value, "Reshape")
    spread = None if shaped is None else made(shaped.inputs[0], "Expand")
    apart = None if spread is None else made(spread.inputs[0], "Unsqueeze")
    if apart is None or integers_in(apart.inputs[1]) != [2]:
        return value
    return apart.inputs[0]
