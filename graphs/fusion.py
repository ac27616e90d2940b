"""Writes a traced backbone's attention, rotary embeddings and RMS norms as one op each.

A norm of a sum takes the sum into its op, which is ONNX Runtime's.

PyTorch's exporter writes them in small ops, about eighty for a layer, each of which takes some
microseconds whatever it computes: that is most of what a token of a language model takes besides
its weights. Opset 23 has an op for each. What does not have exactly the form that is looked for
stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .builder import Builder
from .lower import simplify
from .names import MICROSOFT, PAST
from .sinks import attention_with_sinks

FUSED_OPSET = 23
"""The first with `Attention`, `RotaryEmbedding` and `RMSNormalization`."""

HEADS_FIRST = [0, 2, 1, 3]
"""From [b, m, heads, w] to [b, heads, m, w], and back."""

TOKENS_LAST = [0, 2, 3, 1]
"""From [b, m, heads, w] to [b, heads, w, m]."""


def fuse(model: ir.Model) -> None:
    """Replaces what it finds in a traced model, in place, and raises its opset for it."""
    graph, work = model.graph, _Fusion(model.graph)
    for node in list(graph):
        match node.op_type:
            case "Add":
                work.rotary(node)
            case "Reciprocal":
                work.norm(node)
            case "Softmax":
                work.attention(node)
            case _:
                pass
    work.free_of_past_sizes()
    if work.count:
        model.opset_imports[""] = max(FUSED_OPSET, model.opset_imports[""])
        simplify(model)
        graph.sort()  # what else reads a cache may stand before the attention that gives it now


@dataclass(frozen=True, slots=True)
class _Attention:
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


@dataclass(frozen=True, slots=True)
class _Cache:
    """How much is in a cache, from the inputs beside it: in place, it has room for more.

    `rows` [1] are the inputs, `past` [1] the earlier tokens, `total` all tokens, `last` [b] the
    place of the last one, and `in_place` whether `GroupQueryAttention` takes these sizes: not
    several new tokens of several inputs after earlier ones.
    """

    rows: ir.Value
    past: ir.Value
    total: ir.Value
    last: ir.Value
    in_place: ir.Value


def appends_in_place(model: ir.Model) -> bool:
    """Whether what a graph is given of earlier tokens may lie in the buffers that it writes to.

    Then nothing looks at the size of these inputs, and the attention of each layer appends to them.
    """
    caches = [value for value in model.graph.inputs if PAST in str(value.name)]
    users = [node for value in caches for node, _ in value.uses()]
    return bool(users) and all(node.graph is not model.graph for node in users)


class _Fusion:
    """One pass over a graph; `count` tells what was replaced."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph, self.count = graph, 0
        self._sizes: _Cache | None = None
        self._halves: dict[ir.Value, ir.Value] = {}
        self._rows: dict[ir.Value, ir.Value] = {}

    def rotary(self, node: ir.Node) -> None:
        """x·cos + turned(x)·sin, where both halves of cos and sin are the same."""
        for first, second in _orders(node.inputs):
            plain, turned = _made(first, "Mul"), _made(second, "Mul")
            if plain is None or turned is None:
                continue
            for halves, sin in _orders(turned.inputs):
                x = _turned(halves)
                for value, cos in _orders(plain.inputs):
                    if x is None or value is not x:
                        continue
                    tables = [_by_position(table, x) for table in (cos, sin)]
                    if None not in tables:
                        b = Builder(f"{_name(node)}/rotary")
                        cos_half, sin_half = (self._half(b, table, node) for table in tables)
                        y = b.op("RotaryEmbedding", x, cos_half, sin_half, name="embedded")
                        self._put(b, node, node.outputs[0], y)
                        return

    def norm(self, node: ir.Node) -> None:
        """w·(x / √(mean(x²) + ε)), over the last axis."""
        root = _made(node.inputs[0], "Sqrt")
        shifted = None if root is None else _made(root.inputs[0], "Add")
        scaled = _only_user(node.outputs[0], "Mul")
        outer = None if scaled is None else _only_user(scaled.outputs[0], "Mul")
        if shifted is None or scaled is None or outer is None:
            return
        for averaged, added in _orders(shifted.inputs):
            mean, epsilon = _made(averaged, "ReduceMean"), _number(added)
            square = None if mean is None else _made(mean.inputs[0], "Pow")
            if mean is None or square is None or epsilon is None or _number(square.inputs[1]) != 2:
                continue
            x = square.inputs[0]
            weight = _other(outer, scaled.outputs[0])
            last_axis = _integers(mean.inputs[1]) == [-1]
            known = weight is not None and weight.shape is not None and len(weight.shape) == 1
            if x is None or _other(scaled, node.outputs[0]) is not x or not (last_axis and known):
                continue
            b = Builder(f"{_name(outer)}/norm")
            parts = _same_shape(_made(x, "Add"))
            if parts is None:
                y = b.op("RMSNormalization", x, weight, axis=-1, epsilon=epsilon, name="normalised")
            else:
                y, *unused, total = b.ops(
                    "SkipSimplifiedLayerNormalization",
                    *parts,
                    weight,
                    names=("normalised", "mean", "inverse", "sum"),
                    domain=MICROSOFT,
                    epsilon=epsilon,
                )
                for value in unused:  # which the kernel does not give
                    value.name = ""
                self.graph.opset_imports.setdefault(MICROSOFT, 1)
                total.shape, total.type = x.shape, x.type
            self._put(b, outer, outer.outputs[0], y)
            if parts is not None:
                self._rename(x, total)
            return

    def attention(self, node: ir.Node) -> None:
        """softmax(q·kᵀ·scale + mask)·v, with keys and values of earlier tokens or without."""
        parts = _decomposed(node)
        merged = None if parts is None else self._merged(parts.last)
        sizes = None if parts is None or merged is None else self._cache(parts)
        if parts is None or (parts.sinks is not None and sizes is None):
            return  # only the op that appends in place has sinks
        b = Builder(f"{_name(parts.last)}/attention")
        q, k, v = parts.q, parts.k, parts.v
        past: list[ir.Value | None] = []
        if parts.joined is not None:
            past = [joined.inputs[0] for joined in parts.joined]
            k, v = (_new(joined) for joined in parts.joined)
        flat = [self._flat(b, value) for value in (q, k, v)]
        if sizes is not None:  # the op that appends in place takes no others
            flat = [join or _joined(b, value) for join, value in zip(flat, (q, k, v), strict=True)]
        options: dict[str, int | float] = {"scale": parts.scale}
        if None not in flat and merged is not None:
            options |= {"q_num_heads": _heads(q), "kv_num_heads": _heads(k)}
            inputs, last = flat, merged[-1]
        else:
            b, inputs, last, merged = Builder(b.layer), [q, k, v], parts.last, ()
        if sizes is not None:
            y, *present = self._appending(b, parts, (*inputs, *past), sizes, options)
        else:
            y, *present = self._one_op(b, parts, inputs, past, options)
        for where in merged[:-2]:  # between the product and the change of shape
            condition = where.inputs[0]
            assert condition is not None
            if condition not in self._rows:
                rows = self._rows[condition] = b.op("Squeeze", condition, b.ints(1), name="rows")
                rows.type = condition.type
            y = b.op("Where", self._rows[condition], where.inputs[1], y, name="seen")
        if parts.joined is not None:
            # They stand where the first of them is read, which is before the output is.
            for joined, value in zip(parts.joined, present, strict=True):
                value.shape, value.type = joined.outputs[0].shape, joined.outputs[0].type
        self._put(b, last, last.outputs[0], y)
        for joined, value in zip(parts.joined or (), present, strict=True):
            self._rename(joined.outputs[0], value)

    def _one_op(
        self,
        b: Builder,
        parts: _Attention,
        inputs: Sequence[ir.Value | None],
        past: Sequence[ir.Value | None],
        options: dict[str, int | float],
    ) -> list[ir.Value]:
        """Adds an attention as one op, ONNX Runtime's own where that has all it takes."""
        heads = options.get("q_num_heads")
        if heads is not None and _is_plain(parts):
            self.graph.opset_imports.setdefault(MICROSOFT, 1)
            rows, own = (*inputs, _added_before(inputs)), {"num_heads": heads, "scale": parts.scale}
            y = b.op("MultiHeadAttention", *rows, name="output", domain=MICROSOFT, **own)
            return [y]
        names = ("output",) if parts.joined is None else ("output", "keys", "values")
        return b.ops("Attention", *inputs, parts.mask, *past, names=names, domain="", **options)

    def _appending(
        self,
        b: Builder,
        parts: _Attention,
        inputs: Sequence[ir.Value | None],
        sizes: _Cache,
        options: dict[str, int | float],
    ) -> list[ir.Value]:
        """Adds an attention that appends to its cache in place, but for sizes that it cannot.

        `inputs` are queries, keys and values, and those of earlier tokens.
        """
        here, there = b.nested("in_place"), b.nested("appended")
        names = ("output", "keys", "values")
        counted = [sizes.last, sizes.total, None, None, None, parts.mask]
        if parts.sinks is not None:
            counted.append(b.op("Reshape", parts.sinks, b.ints(-1), name="sinks"))
        in_place = here.ops(
            "GroupQueryAttention",
            *inputs,
            *counted,
            names=names,
            domain=MICROSOFT,
            num_heads=options["q_num_heads"],
            kv_num_heads=options["kv_num_heads"],
            scale=options["scale"],
        )
        queries, keys, values, *past = inputs
        if parts.sinks is None:
            appended = there.ops(
                "Attention",
                queries,
                keys,
                values,
                parts.mask,
                *past,
                names=names,
                domain="",
                **options,
            )
        else:
            assert parts.joined is not None
            heads_first = (parts.q, *(_new(joined) for joined in parts.joined))
            appended = attention_with_sinks(
                there, heads_first, past, parts.mask, parts.sinks, parts.scale
            )
        for value in (*in_place, *(v for node in there.nodes for v in node.outputs)):
            value.type = parts.q.type
        self.graph.opset_imports.setdefault(MICROSOFT, 1)
        return b.ops(
            "If",
            sizes.in_place,
            then_branch=b.branch(here, in_place, "in_place"),
            else_branch=b.branch(there, appended, "appended"),
            names=names,
        )

    def _cache(self, parts: _Attention) -> _Cache | None:
        """The sizes of the cache, found once for all attentions that append to theirs in place.

        None for one without a cache or a mask, and where the inputs do not tell these sizes.
        """
        if parts.joined is None or parts.mask is None or _width(parts.k) != _width(parts.v):
            return None
        inputs = {value.name: value for value in self.graph.inputs}
        if self._sizes is None and {"input_ids", "attention_mask"} <= inputs.keys():
            b, ids = Builder("cache"), inputs["input_ids"]
            rows = b.op("Shape", ids, start=0, end=1, name="rows")
            new = b.op("Shape", ids, start=1, end=2, name="new")
            seen = b.op("Shape", inputs["attention_mask"], start=1, end=2, name="seen")
            past = b.op("Sub", seen, new, name="past")
            single = [
                b.op("Equal", size, b.ints(one), name=f"{name}_is_{one}")
                for name, size, one in (("rows", rows, 1), ("new", new, 1), ("past", past, 0))
            ]
            either = b.op("Or", *single[:2], name="one_row_or_token")
            in_place = b.op("Or", either, single[2], name="in_place")
            total = b.cast(seen, ir.DataType.INT64, ir.DataType.INT32, "total")
            one = b.constant(np.array([1], dtype=np.int32))
            before = b.op("Sub", total, one, name="last")
            last = b.op("Expand", before, rows, name="last_of_rows")
            scalar = b.op("Squeeze", total, name="total_of_all")
            for node in b.nodes:
                for value in node.outputs:
                    boolean = node.op_type in ("Equal", "Or")
                    value.type = ir.TensorType(ir.DataType.BOOL if boolean else ir.DataType.INT64)
            for value in (total, before, last, scalar):
                value.type = ir.TensorType(ir.DataType.INT32)
            b.insert_before(self.graph, self.graph[0])
            self._sizes = _Cache(rows=rows, past=past, total=scalar, last=last, in_place=in_place)
        return self._sizes

    def free_of_past_sizes(self) -> None:
        """Takes sizes from ids and mask where they are read from a cache."""
        if self._sizes is None:
            return
        sizes = {(0, 1): self._sizes.rows, (2, 3): self._sizes.past}
        for value in self.graph.inputs:
            for node, _ in [*value.uses()] if PAST in str(value.name) else ():
                bounds = tuple(node.attributes.get_int(name, None) for name in ("start", "end"))
                if node.op_type == "Shape" and bounds in sizes:
                    self._rename(node.outputs[0], sizes[bounds])

    def _flat(self, b: Builder, value: ir.Value | None) -> ir.Value | None:
        """A value [b, heads, m, w] as [b, m, heads·w], if it was that before."""
        turned = _made(value, "RotaryEmbedding")
        before = _flat_before(turned.inputs[0] if turned is not None else value)
        if turned is None or before is None:
            return before
        x, cos, sin = before, *turned.inputs[1:3]
        assert value is not None
        return b.op("RotaryEmbedding", x, cos, sin, num_heads=_heads(value), name="embedded")

    def _merged(self, last: ir.Node) -> tuple[ir.Node, ...] | None:
        """The nodes that bring an attention's output [b, heads, m, w] to [b, m, heads·w]."""
        where = _only_user(last.outputs[0], "Where")
        if where is not None:
            condition, zero = where.inputs[0], where.inputs[1]
            sizes = None if condition is None or condition.shape is None else condition.shape
            if sizes is None or len(sizes) != 4 or sizes[1] != 1 or _number(zero) is None:
                return None
        end = where or last
        turned = _only_user(end.outputs[0], "Transpose")
        if turned is None or not _permutes(turned, HEADS_FIRST):
            return None
        shaped = _only_user(turned.outputs[0], "Reshape")
        if shaped is None or not _joins_heads(shaped.outputs[0], turned.outputs[0]):
            return None
        return (turned, shaped) if where is None else (where, turned, shaped)

    def _half(self, b: Builder, table: ir.Value | None, node: ir.Node) -> ir.Value:
        """The first half of a table [b, m, w]: one for all layers."""
        assert table is not None and table.shape is not None
        if table not in self._halves:
            half = int(table.shape[-1]) // 2  # type: ignore[arg-type]
            bounds = (b.ints(0), b.ints(half), b.ints(-1))
            self._halves[table] = b.op("Slice", table, *bounds, name="half")
        return self._halves[table]

    def _put(self, b: Builder, node: ir.Node, old: ir.Value, new: ir.Value) -> None:
        """Puts nodes before one whose output they give instead; dead nodes go later."""
        new.shape, new.type = old.shape, old.type
        b.insert_before(self.graph, node)
        for inner in b.nodes:
            for value in inner.outputs:  # what is not a float has its type already
                value.type = value.type or old.type
        self._rename(old, new)
        self.count += 1

    def _rename(self, old: ir.Value, new: ir.Value) -> None:
        if old in self.graph.outputs:  # the graph's own outputs keep their names
            new.name, old.name = old.name, None
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _decomposed(softmax: ir.Node) -> _Attention | None:
    """The attention that a softmax is part of, or None."""
    weights, scores, sinks = softmax.outputs[0], softmax.inputs[0], None
    cut = _only_user(weights, "Slice")
    if cut is not None:
        weights = cut.outputs[0]
        scores, sinks = _before_sinks(softmax, cut)
    last = _only_user(weights, "MatMul")
    if last is None or last.inputs[0] is not weights:
        return None
    if softmax.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    masked, mask = _made(scores, "Add"), None
    if masked is not None:
        scores, mask = masked.inputs
        if _made(scores, "MatMul", "Mul", "Div") is None:
            scores, mask = mask, scores
    scores, scale = _unscaled(scores)
    product = _made(scores, "MatMul")
    if product is None:
        return None
    q, of_q = _unscaled(product.inputs[0])
    turned, of_turned = _unscaled(product.inputs[1])
    k, of_k = _unscaled(_unturned(turned))
    k, v = _unrepeated(k), _unrepeated(last.inputs[1])
    if q is None or k is None or v is None or not (_heads(q) and _heads(k) == _heads(v) != 0):
        return None
    assert q.shape is not None and k.shape is not None
    # A query that all inputs share is another batch than the keys: the ops repeat none.
    alike = (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    if not alike or not (sinks is None or _is_of_heads(sinks, q)):
        return None
    joins = [_made(value, "Concat") for value in (k, v)]
    joined = None
    if joins[0] is not None and joins[1] is not None and all(_appends(join) for join in joins):
        joined = (joins[0], joins[1])
    return _Attention(
        last=last,
        q=q,
        k=k,
        v=v,
        mask=mask,
        scale=scale * of_q * of_turned * of_k,
        joined=joined,
        sinks=sinks,
    )


def _is_plain(attention: _Attention) -> bool:
    """Whether every token sees all others, each head with keys of its own, as in a ViT.

    For these ONNX Runtime's own op is faster than that of ONNX.
    """
    other = (attention.mask, attention.joined, attention.sinks)
    return other == (None, None, None) and _heads(attention.q) == _heads(attention.k)


def _added_before(inputs: Sequence[ir.Value | None]) -> ir.Value | None:
    """Takes the bias of one product off that queries, keys and values are parts of; returns it."""
    split = _made(inputs[0], "Split")
    if split is None or list(split.outputs) != list(inputs):
        return None
    add = _made(split.inputs[0], "Add")
    for product, bias in _orders(() if add is None else add.inputs):
        tensor = None if bias is None else bias.const_value
        if tensor is not None and len(tensor.shape) == 1 and _made(product, "MatMul") is not None:
            split.replace_input_with(0, product)
            return bias
    return None


def join_products(graph: ir.Graph) -> None:
    """Takes the product of queries, keys and values into ONNX Runtime's op for all of them."""
    for node in list(graph):
        split = _made(node.inputs[0], "Split") if node.op_type == "MultiHeadAttention" else None
        product = None if split is None else _made(split.inputs[0], "MatMul")
        if split is None or product is None or list(split.outputs) != list(node.inputs[:3]):
            continue
        x, weight = product.inputs
        alone = len(list(product.outputs[0].uses())) == 1
        if not alone or weight is None or weight.const_value is None or x is None:
            continue
        if weight.shape is None or len(weight.shape) != 2 or x.shape is None or len(x.shape) != 3:
            continue
        b = Builder(_name(node))
        bias = node.inputs[3] if len(node.inputs) > 3 else None
        heads, scale = (node.attributes[name].value for name in ("num_heads", "scale"))
        options = {"num_heads": heads, "scale": scale}
        y = b.op("Attention", x, weight, bias, name="joined", domain=MICROSOFT, **options)
        old = node.outputs[0]
        y.shape, y.type = old.shape, old.type
        b.insert_before(graph, node)
        ir.convenience.replace_all_uses_with(old, y, replace_graph_outputs=True)
        graph.remove([node, split, product], safe=True)


def _is_of_heads(value: ir.Value, q: ir.Value) -> bool:
    """Whether a value has a number for each of the heads of q, [1, heads, 1, 1]."""
    return value.shape is not None and list(value.shape) == [1, _heads(q), 1, 1]


def _before_sinks(softmax: ir.Node, cut: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """The scores and the sinks that a softmax was taken of, cut off behind it; or neither.

    softmax(x − max(x)) of x = (scores, sinks), as gpt-oss computes it.
    """
    shifted = _made(softmax.inputs[0], "Sub")
    joined = None if shifted is None else _made(shifted.inputs[0], "Concat")
    highest = None if shifted is None else _made(shifted.inputs[1], "ReduceMax")
    if joined is None or highest is None or len(joined.inputs) != 2 or _span(cut, 1) != (0, -1):
        return None, None
    along = [joined.attributes.get_int("axis"), *(_integers(highest.inputs[1]) or [0])]
    spread = _made(joined.inputs[1], "Expand")
    if highest.inputs[0] is not joined.outputs[0] or spread is None or {*along} - {-1, 3}:
        return None, None
    return joined.inputs[0], spread.inputs[0]


def _appends(concat: ir.Node | None) -> bool:
    """Whether keys or values are appended to those that the graph is given."""
    if concat is None or len(concat.inputs) != 2:
        return False
    axis, past = concat.attributes.get_int("axis"), concat.inputs[0]
    return axis in (-2, 2) and past is not None and past.is_graph_input()


def _same_shape(add: ir.Node | None) -> tuple[ir.Value, ir.Value] | None:
    """The two values that a node adds, if neither is repeated for it."""
    if add is None:
        return None
    x, y = add.inputs
    total = add.outputs[0].shape
    if x is None or y is None or total is None or x.const_value or y.const_value:
        return None
    known = all(isinstance(size, int) or size.value is not None for size in total)
    return (x, y) if known and x.shape == total == y.shape else None


def _new(joined: ir.Node) -> ir.Value:
    """The keys or values that are appended."""
    value = joined.inputs[1]
    assert value is not None
    return value


def _unscaled(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """A value without the constant that it is multiplied with, and that constant."""
    node = _made(value, "Mul", "Div")
    if node is not None and node.op_type == "Div":
        divisor = _number(node.inputs[1])
        return (node.inputs[0], 1 / divisor) if divisor else (value, 1.0)
    if node is not None:
        for x, factor in _orders(node.inputs):
            number = _number(factor)
            if number is not None:
                return x, number
    return value, 1.0


def _unturned(value: ir.Value | None) -> ir.Value | None:
    """The value [b, heads, m, w] that one [b, heads, w, m] was made of."""
    node = _made(value, "Transpose")
    if node is not None:
        if _permutes(node, TOKENS_LAST):
            _take_apart(node)
        return node.inputs[0] if _permutes(node, [0, 1, 3, 2]) else None
    # Where the rank is not known beforehand, PyTorch's exporter goes by three axes.
    shaped = _made(value, "Reshape")
    turned = None if shaped is None else _made(shaped.inputs[0], "Transpose")
    flat = None if turned is None else _made(turned.inputs[0], "Reshape")
    if turned is None or flat is None or not _permutes(turned, [0, 2, 1]):
        return None
    return flat.inputs[0]


def _take_apart(node: ir.Node) -> None:
    """Makes a transpose to [b, heads, w, m] one to [b, heads, m, w] and another after it."""
    x, graph = node.inputs[0], node.graph
    if x is None or x.shape is None or graph is None:
        return
    b = Builder(_name(node))
    keys = b.op("Transpose", x, perm=HEADS_FIRST, name="heads_first")
    keys.shape, keys.type = ir.Shape([x.shape[axis] for axis in HEADS_FIRST]), x.type
    b.insert_before(graph, node)
    node.replace_input_with(0, keys)
    node.attributes["perm"] = ir.AttrInt64s("perm", [0, 1, 3, 2])


def _unrepeated(value: ir.Value | None) -> ir.Value | None:
    """Keys or values before they were repeated for the heads that share them."""
    shaped = _made(value, "Reshape")
    spread = None if shaped is None else _made(shaped.inputs[0], "Expand")
    apart = None if spread is None else _made(spread.inputs[0], "Unsqueeze")
    if apart is None or _integers(apart.inputs[1]) != [2]:
        return value
    return apart.inputs[0]


def _turned(value: ir.Value | None) -> ir.Value | None:
    """The x of (−second half of x, first half of x), or None."""
    joined = _made(value, "Concat")
    if joined is None or len(joined.inputs) != 2:
        return None
    opposite = _made(joined.inputs[0], "Neg")
    second = None if opposite is None else _made(opposite.inputs[0], "Slice")
    first = _made(joined.inputs[1], "Slice")
    if first is None or second is None or first.inputs[0] is not second.inputs[0]:
        return None
    x = first.inputs[0]
    if x is None or x.shape is None or len(x.shape) != 4 or not isinstance(x.shape[3], int):
        return None
    width = x.shape[3]
    spans = [_span(value, width) for value in (first, second)]
    return x if spans == [(0, width // 2), (width // 2, width)] else None


def _span(node: ir.Node, width: int) -> tuple[int, int] | None:
    """From where to where a slice of the last axis goes."""
    start, end, axis, *step = (_integers(value) for value in node.inputs[1:])
    if not start or not end or axis not in ([3], [-1]) or step not in ([], [[1]]):
        return None
    return start[0], min(end[0], width)


def _by_position(value: ir.Value | None, x: ir.Value) -> ir.Value | None:
    """The table [b, m, w] of cosines or sines that multiplies x, if its halves are the same."""
    spread = _made(value, "Unsqueeze")
    if spread is None or _integers(spread.inputs[1]) != [1]:
        return None
    table = spread.inputs[0]
    if table is None or table.shape is None or x.shape is None:
        return None
    if list(table.shape) != [x.shape[0], x.shape[2], x.shape[3]]:
        return None
    inner: ir.Value | None = table
    while (node := _made(inner, "Mul", "Cos", "Sin")) is not None:
        inner = _unscaled(inner)[0] if node.op_type == "Mul" else node.inputs[0]
        if inner is node.outputs[0]:  # no constant
            return None
    doubled = _made(inner, "Concat")
    if doubled is None or len(doubled.inputs) != 2 or doubled.inputs[0] is not doubled.inputs[1]:
        return None
    return table if doubled.attributes.get_int("axis") in (-1, 2) else None


def _flat_before(value: ir.Value | None) -> ir.Value | None:
    """What [b, heads, m, w] was before its heads were taken apart, [b, m, heads·w]."""
    turned = _made(value, "Transpose")
    if turned is None or not _permutes(turned, HEADS_FIRST):
        return None
    apart = _made(turned.inputs[0], "Reshape")
    x = None if apart is None else apart.inputs[0]
    return x if apart is not None and _joins_heads(x, apart.outputs[0]) else None


def _joins_heads(flat: ir.Value | None, apart: ir.Value) -> bool:
    """Whether a value [b, m, heads·w] is another's [b, m, heads, w]."""
    if flat is None or flat.shape is None or apart.shape is None or len(apart.shape) != 4:
        return False
    b, m, heads, width = apart.shape
    if not isinstance(heads, int) or not isinstance(width, int):
        return False
    return list(flat.shape) == [b, m, heads * width]


def _joined(b: Builder, value: ir.Value) -> ir.Value:
    """Adds a value [b, heads, m, w] as [b, m, heads·w]."""
    turned = b.op("Transpose", value, perm=HEADS_FIRST, name="heads_last")
    return b.op("Reshape", turned, b.ints(0, 0, -1), name="heads_joined")


def _width(value: ir.Value) -> int | ir.SymbolicDim:
    """The width w of a value [b, heads, m, w]."""
    assert value.shape is not None
    return value.shape[3]


def _heads(value: ir.Value) -> int:
    """The heads of a value [b, heads, m, w]; 0 where they are not known."""
    if value.shape is None or len(value.shape) != 4:
        return 0
    heads = value.shape[1]
    return heads if isinstance(heads, int) else 0


def _made(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node of one of these types that made a value."""
    node = None if value is None else value.producer()
    return node if node is not None and not node.domain and node.op_type in op_types else None


def _permutes(transpose: ir.Node, axes: Sequence[int]) -> bool:
    return list(transpose.attributes.get_ints("perm", ())) == list(axes)


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """The one node that reads a value, if it is of this type."""
    users = [node for node, _ in value.uses()]
    if len(users) != 1 or value.is_graph_output():
        return None
    return users[0] if not users[0].domain and users[0].op_type == op_type else None


def _orders(
    inputs: Sequence[ir.Value | None],
) -> Iterator[tuple[ir.Value | None, ir.Value | None]]:
    """The two inputs of a node for which their order does not count."""
    if len(inputs) == 2:
        yield inputs[0], inputs[1]
        yield inputs[1], inputs[0]


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The other input of a node with two."""
    return next((other for one, other in _orders(node.inputs) if one is value), None)


def _number(value: ir.Value | None) -> float | None:
    """A constant scalar."""
    tensor = None if value is None else value.const_value
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 else None


def _integers(value: ir.Value | None) -> list[int] | None:
    """A constant vector."""
    tensor = None if value is None else value.const_value
    return None if tensor is None else [int(number) for number in tensor.numpy().reshape(-1)]


def _name(node: ir.Node) -> str:
    assert node.name is not None
    return node.name
