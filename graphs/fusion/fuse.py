"""Writes a traced backbone's attention, rotary embeddings and RMS norms as one op each.

A norm of a sum takes the sum into its op, which is ONNX Runtime's.

PyTorch's exporter writes them in small ops, about eighty for a layer, each of which takes some
microseconds whatever it computes: that is most of what a token of a language model takes besides
its weights. Opset 23 has an op for each. What does not have exactly the form that is looked for
stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..builder import Builder
from ..lower import simplify
from ..names import MICROSOFT, PAST
from .decomposed import DecomposedAttention, appended_to, decomposed, is_plain
from .kernels import SKIP_RANKS, are_float32, takes_heads
from .patterns import (
    HEADS_FIRST,
    flat_before,
    heads_of,
    integers_in,
    joins_heads,
    made,
    name_of,
    number_in,
    only_user,
    orders,
    other_input,
    permutes,
    span,
    unscaled,
    width_of,
)
from .sinks import attention_with_sinks

FUSED_OPSET = 23
"""The first with `Attention`, `RotaryEmbedding` and `RMSNormalization`."""


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
        for first, second in orders(node.inputs):
            plain, turned = made(first, "Mul"), made(second, "Mul")
            if plain is None or turned is None:
                continue
            for halves, sin in orders(turned.inputs):
                x = _turned(halves)
                for value, cos in orders(plain.inputs):
                    if x is None or value is not x or not are_float32(x, sin, cos):
                        continue
                    tables = [_by_position(table, x) for table in (cos, sin)]
                    if None not in tables:
                        b = Builder(f"{name_of(node)}/rotary")
                        cos_half, sin_half = (self._half(b, table, node) for table in tables)
                        y = b.op("RotaryEmbedding", x, cos_half, sin_half, name="embedded")
                        self._put(b, node, node.outputs[0], y)
                        return

    def norm(self, node: ir.Node) -> None:
        """w·(x / √(mean(x²) + ε)), over the last axis."""
        root = made(node.inputs[0], "Sqrt")
        shifted = None if root is None else made(root.inputs[0], "Add")
        scaled = only_user(node.outputs[0], "Mul")
        outer = None if scaled is None else only_user(scaled.outputs[0], "Mul")
        if shifted is None or scaled is None or outer is None:
            return
        for averaged, added in orders(shifted.inputs):
            mean, epsilon = made(averaged, "ReduceMean"), number_in(added)
            square = None if mean is None else made(mean.inputs[0], "Pow")
            if (
                mean is None
                or square is None
                or epsilon is None
                or number_in(square.inputs[1]) != 2
            ):
                continue
            x = square.inputs[0]
            weight = other_input(outer, scaled.outputs[0])
            last_axis = integers_in(mean.inputs[1]) == [-1]
            if (
                x is None
                or other_input(scaled, node.outputs[0]) is not x
                or not (last_axis and _is_row_of(weight, x) and are_float32(x, weight))
            ):
                continue
            b = Builder(f"{name_of(outer)}/norm")
            parts = _same_shape(made(x, "Add"))
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
        parts = decomposed(node)
        merged = None if parts is None else self._merged(parts.last)
        sizes = None if parts is None or merged is None else self._cache(parts)
        if parts is None or (parts.sinks is not None and sizes is None):
            return  # only the op that appends in place has sinks
        b = Builder(f"{name_of(parts.last)}/attention")
        q, k, v = parts.q, parts.k, parts.v
        past: list[ir.Value | None] = []
        if parts.joined is not None:
            past = [joined.inputs[0] for joined in parts.joined]
            k, v = (appended_to(joined) for joined in parts.joined)
        flat = [self._flat(b, value) for value in (q, k, v)]
        if sizes is not None:  # the op that appends in place takes no others
            flat = [join or _joined(b, value) for join, value in zip(flat, (q, k, v), strict=True)]
        options: dict[str, int | float] = {"scale": parts.scale}
        if None not in flat and merged is not None:
            options |= {"q_num_heads": heads_of(q), "kv_num_heads": heads_of(k)}
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
        parts: DecomposedAttention,
        inputs: Sequence[ir.Value | None],
        past: Sequence[ir.Value | None],
        options: dict[str, int | float],
    ) -> list[ir.Value]:
        """Adds an attention as one op, ONNX Runtime's own where that has all it takes."""
        heads = options.get("q_num_heads")
        if heads is not None and is_plain(parts):
            self.graph.opset_imports.setdefault(MICROSOFT, 1)
            rows, own = (*inputs, _added_before(inputs)), {"num_heads": heads, "scale": parts.scale}
            y = b.op("MultiHeadAttention", *rows, name="output", domain=MICROSOFT, **own)
            return [y]
        names = ("output",) if parts.joined is None else ("output", "keys", "values")
        return b.ops("Attention", *inputs, parts.mask, *past, names=names, domain="", **options)

    def _appending(
        self,
        b: Builder,
        parts: DecomposedAttention,
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
            heads_first = (parts.q, *(appended_to(joined) for joined in parts.joined))
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

    def _cache(self, parts: DecomposedAttention) -> _Cache | None:
        """The sizes of the cache, found once for all attentions that append to theirs in place.

        None for one without a cache or a mask, for heads that the op does not take, and where the
        inputs do not tell these sizes.
        """
        if parts.joined is None or parts.mask is None or width_of(parts.k) != width_of(parts.v):
            return None
        rank = 0 if parts.mask.shape is None else len(parts.mask.shape)
        if rank != 4 or not takes_heads(width_of(parts.k)):
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
        turned = made(value, "RotaryEmbedding")
        before = flat_before(turned.inputs[0] if turned is not None else value)
        if turned is None or before is None:
            return before
        x, cos, sin = before, *turned.inputs[1:3]
        assert value is not None
        return b.op("RotaryEmbedding", x, cos, sin, num_heads=heads_of(value), name="embedded")

    def _merged(self, last: ir.Node) -> tuple[ir.Node, ...] | None:
        """The nodes that bring an attention's output [b, heads, m, w] to [b, m, heads·w]."""
        where = only_user(last.outputs[0], "Where")
        if where is not None:
            condition, zero = where.inputs[0], where.inputs[1]
            sizes = None if condition is None or condition.shape is None else condition.shape
            if sizes is None or len(sizes) != 4 or sizes[1] != 1 or number_in(zero) is None:
                return None
        end = where or last
        turned = only_user(end.outputs[0], "Transpose")
        if turned is None or not permutes(turned, HEADS_FIRST):
            return None
        shaped = only_user(turned.outputs[0], "Reshape")
        if shaped is None or not joins_heads(shaped.outputs[0], turned.outputs[0]):
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


def join_products(graph: ir.Graph) -> None:
    """Takes the product of queries, keys and values into ONNX Runtime's op for all of them."""
    for node in list(graph):
        split = made(node.inputs[0], "Split") if node.op_type == "MultiHeadAttention" else None
        product = None if split is None else made(split.inputs[0], "MatMul")
        if split is None or product is None or list(split.outputs) != list(node.inputs[:3]):
            continue
        x, weight = product.inputs
        alone = len(list(product.outputs[0].uses())) == 1
        if not alone or weight is None or weight.const_value is None or x is None:
            continue
        if weight.shape is None or len(weight.shape) != 2 or x.shape is None or len(x.shape) != 3:
            continue
        b = Builder(name_of(node))
        bias = node.inputs[3] if len(node.inputs) > 3 else None
        if bias is None:  # without one the kernel reads where nothing is, and the process ends
            width = weight.const_value.shape.numpy()[1]
            bias = b.constant(np.zeros(width, dtype=np.float32))
        heads, scale = (node.attributes[name].value for name in ("num_heads", "scale"))
        options = {"num_heads": heads, "scale": scale}
        y = b.op("Attention", x, weight, bias, name="joined", domain=MICROSOFT, **options)
        old = node.outputs[0]
        y.shape, y.type = old.shape, old.type
        b.insert_before(graph, node)
        ir.convenience.replace_all_uses_with(old, y, replace_graph_outputs=True)
        graph.remove([node, split, product], safe=True)


def _added_before(inputs: Sequence[ir.Value | None]) -> ir.Value | None:
    """Takes the bias of one product off that queries, keys and values are parts of; returns it."""
    split = made(inputs[0], "Split")
    if split is None or list(split.outputs) != list(inputs):
        return None
    add = made(split.inputs[0], "Add")
    for product, bias in orders(() if add is None else add.inputs):
        tensor = None if bias is None else bias.const_value
        if tensor is not None and len(tensor.shape) == 1 and made(product, "MatMul") is not None:
            split.replace_input_with(0, product)
            return bias
    return None


def _same_shape(add: ir.Node | None) -> tuple[ir.Value, ir.Value] | None:
    """The two values that a node adds, if neither is repeated for it."""
    if add is None:
        return None
    x, y = add.inputs
    total = add.outputs[0].shape
    if x is None or y is None or total is None or x.const_value or y.const_value:
        return None
    known = all(isinstance(size, int) or size.value is not None for size in total)
    alike = known and len(total) in SKIP_RANKS and x.shape == total == y.shape
    return (x, y) if alike else None


def _is_row_of(weight: ir.Value | None, x: ir.Value) -> bool:
    """Whether a value has a number for each column of another."""
    if weight is None or weight.shape is None or x.shape is None or len(weight.shape) != 1:
        return False
    return weight.shape[0] == x.shape[-1]


def _turned(value: ir.Value | None) -> ir.Value | None:
    """The x of (−second half of x, first half of x), or None."""
    joined = made(value, "Concat")
    if joined is None or len(joined.inputs) != 2:
        return None
    opposite = made(joined.inputs[0], "Neg")
    second = None if opposite is None else made(opposite.inputs[0], "Slice")
    first = made(joined.inputs[1], "Slice")
    if first is None or second is None or first.inputs[0] is not second.inputs[0]:
        return None
    x = first.inputs[0]
    if x is None or x.shape is None or len(x.shape) != 4 or not isinstance(x.shape[3], int):
        return None
    width = x.shape[3]
    spans = [span(value, width) for value in (first, second)]
    return x if spans == [(0, width // 2), (width // 2, width)] else None


def _by_position(value: ir.Value | None, x: ir.Value) -> ir.Value | None:
    """The table [b, m, w] of cosines or sines that multiplies x, if its halves are the same."""
    spread = made(value, "Unsqueeze")
    if spread is None or integers_in(spread.inputs[1]) != [1]:
        return None
    table = spread.inputs[0]
    if table is None or table.shape is None or x.shape is None:
        return None
    if list(table.shape) != [x.shape[0], x.shape[2], x.shape[3]]:
        return None
    inner: ir.Value | None = table
    while (node := made(inner, "Mul", "Cos", "Sin")) is not None:
        inner = unscaled(inner)[0] if node.op_type == "Mul" else node.inputs[0]
        if inner is node.outputs[0]:  # no constant
            return None
    doubled = made(inner, "Concat")
    if doubled is None or len(doubled.inputs) != 2 or doubled.inputs[0] is not doubled.inputs[1]:
        return None
    return table if doubled.attributes.get_int("axis") in (-1, 2) else None


def _joined(b: Builder, value: ir.Value) -> ir.Value:
    """Adds a value [b, heads, m, w] as [b, m, heads·w]."""
    turned = b.op("Transpose", value, perm=HEADS_FIRST, name="heads_last")
    return b.op("Reshape", turned, b.ints(0, 0, -1), name="heads_joined")
