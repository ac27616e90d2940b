"""Fuses a traced backbone's attention, rotary embeddings and RMS norms into one op each.

An RMS norm of a sum becomes one op of ONNX Runtime. For CUDA, where each node costs a kernel
launch, so does a layer norm of a sum, and a bias becomes part of its GELU (`residuals.py`).

PyTorch's exporter writes about eighty small ops for a layer, each of which takes a few
microseconds: they take most of a language model's time per token, apart from reading weights. Opset
23 has an op for each pattern. Subgraphs that do not match a pattern exactly stay unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..builder import Builder
from ..lower import simplify
from ..names import MICROSOFT, PAST
from ..targets import FUSED_OPSET, FusedOps
from .decomposed import AttentionParts, appended_by, attention_with_sinks, is_plain, match_attention
from .kernels import are_float32, supports_heads
from .masks import fuse_cast, fuse_fully_masked, fuse_mask, fuse_zero
from .patterns import (
    HEADS_FIRST,
    both_orders,
    flat_before,
    heads_of,
    integers_in,
    joins_heads,
    name_of,
    node_of,
    number_in,
    only_user,
    other_input,
    permutes,
    replace_output,
    replace_value,
    span,
    unscaled,
    width_of,
)
from .residuals import (
    detach_joint_bias,
    fuse_bias,
    fuse_residual,
    is_row_of,
    residual_operands,
    skip_norm,
    without_biases,
)

RSQRT_EXPONENT = -0.5
"""The exponent of a reciprocal square root."""

FUSED_OPSET_OPS = frozenset({"Attention", "RotaryEmbedding", "RMSNormalization"})
"""The ops from ONNX's own domain that fusion adds, which need `FUSED_OPSET`."""

LAUNCH_FUSIONS: Mapping[str, Callable[[ir.Graph, ir.Node], bool]] = {
    "LayerNormalization": fuse_residual,
    "Gelu": fuse_bias,
    "Mul": fuse_mask,
    "Less": fuse_fully_masked,
    "Not": fuse_zero,
    "Cast": fuse_cast,
}
"""Fusions for targets on which each node costs a kernel launch, by the op at a pattern's end."""


def fuse(model: ir.Model, ops: FusedOps, *, newest: bool) -> None:
    """Replaces the patterns in a traced model, in place, with ops in `ops`.

    Raises the model's opset if an op needs a newer one and `newest` allows it.
    """
    if not ops.floats:
        return
    graph, fusion = model.graph, _Fusion(model.graph, ops, newest)
    launch_fusions = LAUNCH_FUSIONS if ops.residuals else {}
    for node in list(graph):
        match node.op_type:
            case "Add" if newest:
                fusion.fuse_rotary(node)
            case "Reciprocal":
                fusion.fuse_norm(node, node_of(node.inputs[0], "Sqrt"))
            case "Pow" if number_in(node.inputs[1]) == RSQRT_EXPONENT:
                fusion.fuse_norm(node, node)
            case "Softmax":
                fusion.fuse_attention(node)
            case op_type if op_type in launch_fusions:
                fusion.count += launch_fusions[op_type](graph, node)
            case _:
                pass
    fusion.replace_past_sizes()
    if fusion.count:
        if not ops.any_opset or any(
            node.op_type in FUSED_OPSET_OPS and not node.domain for node in graph.all_nodes()
        ):
            model.opset_imports[""] = max(FUSED_OPSET, model.opset_imports[""])
        simplify(model)
        graph.sort()  # other users of a cache may precede the attention that now returns it


@dataclass(frozen=True, slots=True)
class _Cache:
    """The sizes of a cache, computed from the graph's inputs: an in-place buffer is larger.

    `rows` [1] is the batch, `past` [1] the number of earlier tokens, `total` the number of all
    tokens, `last` [b] the position of the last one, and `in_place` whether `GroupQueryAttention`
    supports these sizes: several new tokens after earlier tokens need a batch of 1.
    """

    rows: ir.Value
    past: ir.Value
    total: ir.Value
    last: ir.Value
    in_place: ir.Value


def appends_in_place(model: ir.Model) -> bool:
    """Returns whether the cache's inputs may share buffers with its outputs.

    If so, nothing reads the sizes of these inputs, and each layer's attention appends to them.
    """
    caches = [value for value in model.graph.inputs if PAST in str(value.name)]
    users = [node for value in caches for node, _ in value.uses()]
    return bool(users) and all(node.graph is not model.graph for node in users)


class _Fusion:
    """One pass over a graph; `count` counts the replacements."""

    def __init__(self, graph: ir.Graph, ops: FusedOps, newest: bool) -> None:
        self.graph, self.count = graph, 0
        self._ops, self._newest = ops, newest
        self._sizes: _Cache | None = None
        self._halves: dict[ir.Value, ir.Value] = {}
        self._rows: dict[ir.Value, ir.Value] = {}

    def fuse_rotary(self, node: ir.Node) -> None:
        """Fuses x·cos + rotated(x)·sin if both halves of cos and of sin are equal."""
        for first, second in both_orders(node.inputs):
            plain, rotated = node_of(first, "Mul"), node_of(second, "Mul")
            if plain is None or rotated is None:
                continue
            for halves, sin in both_orders(rotated.inputs):
                x = _rotation_source(halves)
                for value, cos in both_orders(plain.inputs):
                    if x is None or value is not x or not are_float32(x, sin, cos):
                        continue
                    tables = [_position_table(table, x) for table in (cos, sin)]
                    if None not in tables:
                        b = Builder(f"{name_of(node)}/rotary")
                        cos_half, sin_half = (self._half(b, table, node) for table in tables)
                        y = b.op("RotaryEmbedding", x, cos_half, sin_half, name="embedded")
                        replace_output(self.graph, b, node, node.outputs[0], y)
                        self.count += 1
                        return

    def fuse_norm(self, node: ir.Node, root: ir.Node | None) -> None:
        """Fuses w·(x / √(mean(x²) + ε)) over the last axis; `root` is the square root's node."""
        scaled = only_user(node.outputs[0], "Mul")
        if root is None or scaled is None:
            return
        shifted = node_of(root.inputs[0], "Add")
        sums = [(root.inputs[0], None)] if shifted is None else [*both_orders(shifted.inputs)]
        for averaged, added in sums:
            mean = node_of(averaged, "ReduceMean")
            epsilon = 0.0 if added is None else number_in(added)
            square = None if mean is None else node_of(mean.inputs[0], "Pow")
            if (
                mean is None
                or square is None
                or epsilon is None
                or number_in(square.inputs[1]) != 2
            ):
                continue
            x = square.inputs[0]
            if (
                x is None
                or other_input(scaled, node.outputs[0]) is not x
                or not (integers_in(mean.inputs[1]) == [-1] and are_float32(x))
            ):
                continue
            outer, weight = self._gain(scaled, x)
            b = Builder(f"{name_of(outer)}/norm")
            if weight is None:
                width = None if x.shape is None else x.shape[-1]
                if not isinstance(width, int):
                    return
                weight = b.constant(np.ones(width, dtype=np.float32))
            parts = residual_operands(node_of(x, "Add"))
            if parts is None and not self._newest:
                return
            hidden = [square.outputs[0], *(() if outer is scaled else scaled.outputs)]
            if parts is None:
                y = b.op("RMSNormalization", x, weight, axis=-1, epsilon=epsilon, name="normalised")
            else:
                op_type = "SkipSimplifiedLayerNormalization"
                y, total = skip_norm(self.graph, b, op_type, (*parts, weight), x, epsilon)
                hidden.append(x)
            replace_output(self.graph, b, outer, outer.outputs[0], y, hidden=hidden)
            self.count += 1
            if parts is not None:
                replace_value(self.graph, x, total)
            return

    def _gain(self, scaled: ir.Node, x: ir.Value) -> tuple[ir.Node, ir.Value | None]:
        """Returns the last node of a norm, and its gain per column, if any."""
        outer = only_user(scaled.outputs[0], "Mul")
        weight = None if outer is None else other_input(outer, scaled.outputs[0])
        if outer is not None and is_row_of(weight, x) and are_float32(weight):
            return outer, weight
        return scaled, None

    def fuse_attention(self, node: ir.Node) -> None:
        """Fuses softmax(q·kᵀ·scale + mask)·v, with or without cached keys and values."""
        parts = match_attention(node)
        merged = None if parts is None else self._merging_nodes(parts.last)
        if parts is None or (not self._newest and (merged is None or not is_plain(parts))):
            return
        sizes = self._cache(parts) if self._ops.in_place and merged is not None else None
        if parts.sinks is not None and sizes is None:
            return  # only the op that appends in place supports sinks
        b = Builder(f"{name_of(parts.last)}/attention")
        q, k, v = parts.q, parts.k, parts.v
        past: list[ir.Value | None] = []
        if parts.joined is not None:
            past = [joined.inputs[0] for joined in parts.joined]
            k, v = (appended_by(joined) for joined in parts.joined)
        flat = [self._flatten(b, value) for value in (q, k, v)]
        if sizes is not None:  # the op that appends in place requires them
            flat = [join or _merge(b, value) for join, value in zip(flat, (q, k, v), strict=True)]
        options: dict[str, int | float] = {"scale": parts.scale}
        if None not in flat and merged is not None:
            options |= {"q_num_heads": heads_of(q), "kv_num_heads": heads_of(k)}
            inputs, last = flat, merged[-1]
        else:
            b, inputs, last, merged = Builder(b.layer), [q, k, v], parts.last, ()
        if sizes is not None:
            y, *present = self._cached_attention(b, parts, (*inputs, *past), sizes, options)
        else:
            y, *present = self._fused_attention(b, parts, inputs, past, options)
        for where in merged[:-2]:  # between the product and the reshape
            y = self._mask_tokens(b, where, y)
        if parts.joined is not None:
            for joined, value in zip(parts.joined, present, strict=True):
                value.shape, value.type = joined.outputs[0].shape, joined.outputs[0].type
        replace_output(self.graph, b, last, last.outputs[0], y, hidden=[parts.scores])
        self.count += 1
        for joined, value in zip(parts.joined or (), present, strict=True):
            replace_value(self.graph, joined.outputs[0], value)

    def _mask_tokens(self, b: Builder, where: ir.Node, y: ir.Value) -> ir.Value:
        """Applies `where` to an output [b, m, heads·w], for tokens that attend to no token."""
        condition = where.inputs[0]
        assert condition is not None
        if condition not in self._rows:
            rows = self._rows[condition] = b.op("Squeeze", condition, b.ints(1), name="rows")
            rows.type = condition.type
        return b.op("Where", self._rows[condition], where.inputs[1], y, name="seen")

    def _fused_attention(
        self,
        b: Builder,
        parts: AttentionParts,
        inputs: Sequence[ir.Value | None],
        past: Sequence[ir.Value | None],
        options: dict[str, int | float],
    ) -> list[ir.Value]:
        """Adds an attention as one op: ONNX Runtime's own if it supports the inputs."""
        heads = options.get("q_num_heads")
        if heads is not None and is_plain(parts):
            self.graph.opset_imports.setdefault(MICROSOFT, 1)
            bias, attrs = detach_joint_bias(inputs), {"num_heads": heads, "scale": parts.scale}
            if bias is None and self._ops.residuals:
                inputs, bias = without_biases(b, inputs)
            y = b.op("MultiHeadAttention", *inputs, bias, name="output", domain=MICROSOFT, **attrs)
            return [y]
        names = ("output",) if parts.joined is None else ("output", "keys", "values")
        return b.ops("Attention", *inputs, parts.mask, *past, names=names, domain="", **options)

    def _cached_attention(
        self,
        b: Builder,
        parts: AttentionParts,
        inputs: Sequence[ir.Value | None],
        sizes: _Cache,
        options: dict[str, int | float],
    ) -> list[ir.Value]:
        """Adds an attention that appends to its cache in place if the sizes allow it.

        `inputs` are queries, keys and values, and the cached keys and values.
        """
        then, otherwise = b.nested("in_place"), b.nested("appended")
        names = ("output", "keys", "values")
        arguments = [sizes.last, sizes.total, None, None, None, parts.mask]
        if parts.sinks is not None:
            arguments.append(b.op("Reshape", parts.sinks, b.ints(-1), name="sinks"))
        in_place = then.ops(
            "GroupQueryAttention",
            *inputs,
            *arguments,
            names=names,
            domain=MICROSOFT,
            num_heads=options["q_num_heads"],
            kv_num_heads=options["kv_num_heads"],
            scale=options["scale"],
        )
        queries, keys, values, *past = inputs
        if parts.sinks is None:
            appended = otherwise.ops(
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
            heads_first = (parts.q, *(appended_by(joined) for joined in parts.joined))
            appended = attention_with_sinks(
                otherwise, heads_first, past, parts.mask, parts.sinks, parts.scale
            )
        for value in (*in_place, *(v for node in otherwise.nodes for v in node.outputs)):
            value.type = parts.q.type
        self.graph.opset_imports.setdefault(MICROSOFT, 1)
        return b.ops(
            "If",
            sizes.in_place,
            then_branch=b.branch(then, in_place, "in_place"),
            else_branch=b.branch(otherwise, appended, "appended"),
            names=names,
        )

    def _cache(self, parts: AttentionParts) -> _Cache | None:
        """Returns the sizes of the cache, computed once for all attentions that append in place.

        Returns None for an attention without cache or mask, for head sizes that the op does not
        support, or if the inputs do not determine these sizes.
        """
        if parts.joined is None or parts.mask is None or width_of(parts.k) != width_of(parts.v):
            return None
        rank = 0 if parts.mask.shape is None else len(parts.mask.shape)
        if rank != 4 or not supports_heads(width_of(parts.k)):
            return None
        inputs = {value.name: value for value in self.graph.inputs}
        if self._sizes is None and {"input_ids", "attention_mask"} <= inputs.keys():
            b, ids = Builder("cache"), inputs["input_ids"]
            rows = b.op("Shape", ids, start=0, end=1, name="rows")
            new = b.op("Shape", ids, start=1, end=2, name="new")
            tokens = b.op("Shape", inputs["attention_mask"], start=1, end=2, name="seen")
            past = b.op("Sub", tokens, new, name="past")
            conditions = [
                b.op("Equal", size, b.ints(number), name=f"{name}_is_{number}")
                for name, size, number in (("rows", rows, 1), ("new", new, 1), ("past", past, 0))
            ]
            either = b.op("Or", *conditions[:2], name="one_row_or_token")
            in_place = b.op("Or", either, conditions[2], name="in_place")
            total = b.cast(tokens, ir.DataType.INT64, ir.DataType.INT32, "total")
            one = b.constant(np.array([1], dtype=np.int32))
            last_position = b.op("Sub", total, one, name="last")
            last = b.op("Expand", last_position, rows, name="last_of_rows")
            scalar = b.op("Squeeze", total, name="total_of_all")
            for node in b.nodes:
                for value in node.outputs:
                    boolean = node.op_type in ("Equal", "Or")
                    value.type = ir.TensorType(ir.DataType.BOOL if boolean else ir.DataType.INT64)
            for value in (total, last_position, last, scalar):
                value.type = ir.TensorType(ir.DataType.INT32)
            b.insert_before(self.graph, self.graph[0])
            self._sizes = _Cache(rows=rows, past=past, total=scalar, last=last, in_place=in_place)
        return self._sizes

    def replace_past_sizes(self) -> None:
        """Computes sizes from the token ids and the mask instead of the cache's shapes."""
        if self._sizes is None:
            return
        sizes = {(0, 1): self._sizes.rows, (2, 3): self._sizes.past}
        for value in self.graph.inputs:
            for node, _ in [*value.uses()] if PAST in str(value.name) else ():
                bounds = tuple(node.attributes.get_int(name, None) for name in ("start", "end"))
                if node.op_type == "Shape" and bounds in sizes:
                    replace_value(self.graph, node.outputs[0], sizes[bounds])

    def _flatten(self, b: Builder, value: ir.Value | None) -> ir.Value | None:
        """Adds a value [b, heads, m, w] as [b, m, heads·w], if it was derived from that shape."""
        rotary = node_of(value, "RotaryEmbedding")
        source = rotary.inputs[0] if rotary is not None else value
        flat = flat_before(source)
        if flat is None and self._ops.residuals:
            flat = _flatten_tokens(b, source)
        if rotary is None or flat is None:
            return flat
        x, cos, sin = flat, *rotary.inputs[1:3]
        assert value is not None
        return b.op("RotaryEmbedding", x, cos, sin, num_heads=heads_of(value), name="embedded")

    def _merging_nodes(self, last: ir.Node) -> tuple[ir.Node, ...] | None:
        """Returns the nodes that reshape an output [b, heads, m, w] to [b, m, heads·w]."""
        where = only_user(last.outputs[0], "Where")
        if where is not None:
            condition, zero = where.inputs[0], where.inputs[1]
            sizes = None if condition is None or condition.shape is None else condition.shape
            if sizes is None or len(sizes) != 4 or sizes[1] != 1 or number_in(zero) is None:
                return None
        end = where or last
        transpose = only_user(end.outputs[0], "Transpose")
        if transpose is None or not permutes(transpose, HEADS_FIRST):
            return None
        reshape = only_user(transpose.outputs[0], "Reshape")
        if reshape is None or not joins_heads(reshape.outputs[0], transpose.outputs[0]):
            return None
        return (transpose, reshape) if where is None else (where, transpose, reshape)

    def _half(self, b: Builder, table: ir.Value | None, node: ir.Node) -> ir.Value:
        """Adds the first half of a table [b, m, w], shared by all layers."""
        assert table is not None and table.shape is not None
        if table not in self._halves:
            half = int(table.shape[-1]) // 2  # type: ignore[arg-type]
            bounds = (b.ints(0), b.ints(half), b.ints(-1))
            self._halves[table] = b.op("Slice", table, *bounds, name="half")
        return self._halves[table]


def join_products(graph: ir.Graph) -> None:
    """Moves the product of queries, keys and values into ONNX Runtime's attention op."""
    for node in list(graph):
        split = node_of(node.inputs[0], "Split") if node.op_type == "MultiHeadAttention" else None
        product = None if split is None else node_of(split.inputs[0], "MatMul")
        if split is None or product is None or list(split.outputs) != list(node.inputs[:3]):
            continue
        x, weight = product.inputs
        used_once = len(list(product.outputs[0].uses())) == 1
        if not used_once or weight is None or weight.const_value is None or x is None:
            continue
        if weight.shape is None or len(weight.shape) != 2 or x.shape is None or len(x.shape) != 3:
            continue
        b = Builder(name_of(node))
        bias = node.inputs[3] if len(node.inputs) > 3 else None
        if bias is None:  # without a bias, the kernel reads invalid memory and crashes
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


def _rotation_source(value: ir.Value | None) -> ir.Value | None:
    """Returns x if a value is (−second half of x, first half of x), else None."""
    joined = node_of(value, "Concat")
    if joined is None or len(joined.inputs) != 2:
        return None
    negation = node_of(joined.inputs[0], "Neg")
    second = None if negation is None else node_of(negation.inputs[0], "Slice")
    first = node_of(joined.inputs[1], "Slice")
    if first is None or second is None or first.inputs[0] is not second.inputs[0]:
        return None
    x = first.inputs[0]
    if x is None or x.shape is None or len(x.shape) != 4 or not isinstance(x.shape[3], int):
        return None
    width = x.shape[3]
    spans = [span(value, width) for value in (first, second)]
    return x if spans == [(0, width // 2), (width // 2, width)] else None


def _position_table(value: ir.Value | None, x: ir.Value) -> ir.Value | None:
    """Returns the table [b, m, w] of cosines or sines for x, if its halves are equal."""
    unsqueeze = node_of(value, "Unsqueeze")
    if unsqueeze is None or integers_in(unsqueeze.inputs[1]) != [1]:
        return None
    table = unsqueeze.inputs[0]
    if table is None or table.shape is None or x.shape is None:
        return None
    if list(table.shape) != [x.shape[0], x.shape[2], x.shape[3]]:
        return None
    inner: ir.Value | None = table
    while (node := node_of(inner, "Mul", "Cos", "Sin")) is not None:
        inner = unscaled(inner)[0] if node.op_type == "Mul" else node.inputs[0]
        if inner is node.outputs[0]:  # not a constant
            return None
    doubled = node_of(inner, "Concat")
    if doubled is None or len(doubled.inputs) != 2 or doubled.inputs[0] is not doubled.inputs[1]:
        return None
    return table if doubled.attributes.get_int("axis") in (-1, 2) else None


def _flatten_tokens(b: Builder, value: ir.Value | None) -> ir.Value | None:
    """Adds a value [b, heads, m, w] as [b, m, heads·w], if `_tokens_first` finds its source."""
    split = _tokens_first(b, value)
    if split is None or value is None or value.shape is None or not isinstance(value.shape[3], int):
        return None
    flat = b.op("Reshape", split, b.ints(0, 0, -1), name="flat")
    flat.shape = ir.Shape([value.shape[0], value.shape[2], heads_of(value) * value.shape[3]])
    return flat


def _tokens_first(b: Builder, value: ir.Value | None) -> ir.Value | None:
    """Returns [b, heads, m, w] as [b, m, heads, w], if it or its norm's input was transposed."""
    transpose = node_of(value, "Transpose")
    if transpose is not None:
        return transpose.inputs[0] if permutes(transpose, HEADS_FIRST) else None
    norm = node_of(value, "LayerNormalization", "RMSNormalization")
    if norm is None or norm.attributes.get_int("axis", -1) not in (-1, 3):
        return None
    by_token = _tokens_first(b, norm.inputs[0])
    if by_token is None:
        return None
    options = {name: attribute.value for name, attribute in norm.attributes.items()}
    inputs = (by_token, *norm.inputs[1:])
    return b.op(norm.op_type, *inputs, name="normalised", **options)


def _merge(b: Builder, value: ir.Value) -> ir.Value:
    transposed = b.op("Transpose", value, perm=HEADS_FIRST, name="heads_last")
    return b.op("Reshape", transposed, b.ints(0, 0, -1), name="heads_joined")
