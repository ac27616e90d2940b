"""Algorithm 1 as ONNX nodes: logits, both softmaxes, scores, TopK, dispatch and combine.

Everything except the last product is FP32, whatever the type of tokens and experts, and does not
depend on how the experts are computed. Two exact transformations save passes over the tokens:
a per-token normalisation x̂ = r·x moves behind the products (x̂·φ = r·(x·φ) and Dᵀx̂ = (D·r)ᵀx), so
x̂ is never stored; and D is a softmax along each column, so it is computed for selected columns
only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .builder import Builder
from .layers.stored import SoftMoELayer
from .names import CONSTANTS, OUTPUT, SELECTED
from .targets import TARGETS

FEW_SLOTS = 64
"""Up to this number of slots, phi is stored with three axes, [1, d, n·p]. ONNX Runtime packs a
constant matrix in blocks of 256 rows when it loads a graph, and then reads the tokens once per
block, which does not pay off for few columns; it does not pack a constant with three axes."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The router's results for a batch, and the source of the slots.

    The slots are averages of `source` [b, m, d], scaled by `scale` [b, 1, m] in families that
    normalise. `logits` is L, [b, m, n·p], and `logits_by_slot` is the same with tokens last;
    `combine` is C, [b, m, n·p]. `selected` [b, k] is None if every expert is kept. `constant`
    [b, m, o] is the contribution of constant experts, or None.
    """

    source: ir.Value
    scale: ir.Value | None
    logits: ir.Value
    logits_by_slot: ir.Value
    combine: ir.Value
    selected: ir.Value | None
    constant: ir.Value | None = None


@dataclass(frozen=True, slots=True)
class Slots:
    """The inputs of the experts: `rows` [b, e·p, d] and their columns of C, `combine` [b, m, e·p].

    e is k for `selected_slots`, in the order of `Routed.selected`, and n for `all_slots`.
    `constant` is the same as in `Routed`. `kept` [b, e·p, 1] marks the slots of selected experts,
    or is None if all are selected.
    """

    rows: ir.Value
    combine: ir.Value
    constant: ir.Value | None
    kept: ir.Value | None = None


def route(b: Builder, layer: SoftMoELayer, x: ir.Value) -> Routed:
    """Adds the router for tokens x [b, m, d]; with external routing, x is C [b, m, n·p]."""
    if layer.spec.external_routing:
        return _external_routing(b, layer, x)
    x = b.cast(x, layer.x_type, ir.DataType.FLOAT, "router/tokens_fp32")
    normalised, scale = _normalise(b, layer, x)
    few_slots = layer.spec.routed * layer.spec.slots <= FEW_SLOTS
    phi = layer.stacked(b, "phi", batched=few_slots and TARGETS[layer.target].cpu_forms)
    logits = b.op("MatMul", normalised, phi, name="router/products")
    if scale is not None:
        logits = b.op("Mul", logits, scale, name="router/logits")
    if layer.spec.biased:
        logits = b.op("Add", logits, layer.stacked(b, "bias"), name="router/logits_biased")
    combine = b.op("Softmax", logits, axis=-1, name="router/C")
    constant = None
    if layer.spec.dropped:  # the softmax includes dropped experts
        spec = layer.spec
        kept_slots = spec.experts * spec.slots
        bounds = (b.ints(0), b.ints(kept_slots), b.ints(2))
        if spec.constants:
            sizes = b.ints(kept_slots, spec.dropped * spec.slots)
            names = ("router/C_kept", "combine/C_constant")
            combine, dropped = b.ops("Split", combine, sizes, axis=-1, names=names)
            constant = _constant(b, layer, dropped)
        else:
            combine = b.op("Slice", combine, *bounds, name="router/C_kept")
        logits = b.op("Slice", logits, *bounds, name="router/logits_kept")
    selected = _select(b, layer, combine) if layer.selects else None
    if layer.scores:
        from .scores import add_scores

        add_scores(b, layer, combine, logits)
    source = x if layer.spec.slots_from == "raw" else normalised
    if layer.spec.rounded:
        source = b.rounded(source, ir.DataType.FLOAT, "dispatch/source")
    return Routed(
        source=source,
        scale=_dispatch_scale(b, layer, scale),
        logits=logits,
        logits_by_slot=b.op("Transpose", logits, perm=[0, 2, 1], name="router/logits_by_slot"),
        combine=combine,
        selected=selected,
        constant=constant,
    )


def _external_routing(b: Builder, layer: SoftMoELayer, combine: ir.Value) -> Routed:
    """Uses the routing of the surrounding network: C, and the slots [b, n·p, d] as source."""
    combine = b.cast(combine, layer.x_type, ir.DataType.FLOAT, "router/C_fp32")
    (slots,) = layer.routed
    slots = b.cast(slots, slots.dtype or ir.DataType.FLOAT, ir.DataType.FLOAT, "dispatch/fp32")
    selected = _select(b, layer, combine) if layer.selects else None
    if layer.scores:
        from .scores import add_scores

        add_scores(b, layer, combine)
    return Routed(
        source=slots,
        scale=None,
        logits=combine,
        logits_by_slot=combine,
        combine=combine,
        selected=selected,
    )


def _constant(b: Builder, layer: SoftMoELayer, combine: ir.Value) -> ir.Value:
    """Adds the output of constant experts, [b, m, o], for their columns of C [b, m, dropped·p]."""
    constants = layer.stacked(b, CONSTANTS)
    contribution = b.op("MatMul", combine, constants, name="combine/constant")
    return b.cast(contribution, ir.DataType.FLOAT, layer.y_type, "combine/constant_narrow")


def all_slots(b: Builder, layer: SoftMoELayer, routed: Routed) -> Slots:
    """Adds the dispatch to every expert: slots [b, n·p, d]."""
    if layer.spec.external_routing:
        return Slots(routed.source, routed.combine, routed.constant)
    slots = _dispatch(b, layer, routed, routed.logits_by_slot, layer.spec.experts)
    return Slots(slots, routed.combine, routed.constant)


def selected_slots(b: Builder, layer: SoftMoELayer, routed: Routed) -> Slots:
    """Adds the dispatch to the selected experts: slots [b, k·p, d]."""
    if routed.selected is None:
        return all_slots(b, layer, routed)
    index = b.op("Unsqueeze", routed.selected, b.ints(2), name="router/index")
    if layer.spec.external_routing:
        combine = _selected_combine(b, layer, routed, index)
        d = layer.spec.dim
        rows = _gather_experts(b, layer, routed.source, index, "dispatch/slots", d)
        return Slots(rows, combine, routed.constant)
    logits = _gather_experts(b, layer, routed.logits_by_slot, index, "dispatch/logits")
    if layer.renormalize:
        by_token = b.op("Transpose", logits, perm=[0, 2, 1], name="combine/logits")
        combine = _renormalise(b, by_token)
    else:
        combine = _selected_combine(b, layer, routed, index)
    experts = layer.k if isinstance(layer.k, int) else None
    return Slots(_dispatch(b, layer, routed, logits, experts), combine, routed.constant)


def _selected_combine(b: Builder, layer: SoftMoELayer, routed: Routed, index: ir.Value) -> ir.Value:
    """Adds the selected experts' columns of C, [b, m, k·p]."""
    by_slot = b.op("Transpose", routed.combine, perm=[0, 2, 1], name="router/C_by_slot")
    by_slot = _gather_experts(b, layer, by_slot, index, "combine/C_by_slot")
    return b.op("Transpose", by_slot, perm=[0, 2, 1], name="combine/C")


def combine_outputs(b: Builder, layer: SoftMoELayer, slots: Slots, outputs: ir.Value) -> ir.Value:
    """Adds y [b, m, o] = C·Ỹ for the experts' outputs [b, e·p, o], in the experts' float type.

    The contribution of constant experts is added. Outputs of experts that were not selected are
    excluded by Where, not by a product with zero: they may be infinite.
    """
    inner = layer.compute.inner
    if slots.kept is not None:
        outputs = b.op("Where", slots.kept, outputs, b.number(0.0, inner), name="combine/selected")
    if layer.spec.rounded:
        outputs = b.rounded(outputs, inner, "combine/outputs")
    combine = b.cast(slots.combine, ir.DataType.FLOAT, inner, "combine/C_narrow")
    last = OUTPUT if slots.constant is None else "combine/computed"
    if inner == layer.y_type:
        output = b.op("MatMul", combine, outputs, name=last)
    else:
        output = b.op("MatMul", combine, outputs, name="combine/products")
        output = b.cast(output, inner, layer.y_type, last)
    if slots.constant is None:
        return output
    return b.op("Add", output, slots.constant, name=OUTPUT)


def is_expert(b: Builder, index: ir.Value, n: int) -> ir.Value:
    """Adds a comparison of indices [r, k] with each of n experts: bool [r, k, n]."""
    experts = b.constant(np.arange(n, dtype=np.int64))
    column = b.op("Unsqueeze", index, b.ints(2), name="router/index")
    return b.op("Equal", column, experts, name="router/one_hot")


def one_hot_experts(b: Builder, index: ir.Value, n: int) -> ir.Value:
    """Adds a one-hot encoding of indices [r, k]: float [r, k, n]."""
    one_hot = is_expert(b, index, n)
    return b.op("Cast", one_hot, to=ir.DataType.FLOAT.value, name="router/one_hot_float")


def _selection_mask(
    b: Builder, layer: SoftMoELayer, selected: ir.Value
) -> tuple[ir.Value, ir.Value]:
    if not TARGETS[layer.target].launches:
        one_hot = one_hot_experts(b, selected, layer.spec.experts)
        mask = b.op("ReduceMax", one_hot, b.ints(1), keepdims=0, name="router/mask")
        return mask, b.op("Unsqueeze", mask, b.ints(2), name="combine/mask")
    values = b.constant(np.array([0, 1], dtype=np.float32))
    depth = b.integer(layer.spec.experts)
    one_hot = b.op("OneHot", selected, depth, values, axis=1, name="router/one_hot_float")
    column = b.op("ReduceMax", one_hot, b.ints(2), keepdims=1, name="combine/mask")
    return b.op("Squeeze", column, b.ints(2), name="router/mask"), column


def masked_slots(b: Builder, layer: SoftMoELayer, routed: Routed) -> tuple[Slots, ir.Value | None]:
    """Adds the dispatch to every expert, and the mask of the selected ones.

    The mask is [b, n], or None if every expert is kept.
    """
    slots = all_slots(b, layer, routed)
    if routed.selected is None:
        return slots, None
    mask, column = _selection_mask(b, layer, routed.selected)
    n, p = layer.spec.experts, layer.spec.slots
    if p > 1:  # to [b, n·p, 1]: one entry per slot, by expert
        ones = b.constant(np.ones((1, 1, p), dtype=np.float32))
        repeated = b.op("Mul", column, ones, name="combine/mask_per_slot")
        column = b.op("Reshape", repeated, b.ints(0, n * p, 1), name="combine/mask_of_slots")
    kept = _to_bool(b, layer, column, "combine/kept")
    combine = slots.combine
    if layer.renormalize:
        row = b.op("Reshape", column, b.ints(0, 1, n * p), name="combine/mask_row")
        chosen = _to_bool(b, layer, row, "combine/kept_row")
        logits = b.op("Where", chosen, routed.logits, b.number(-np.inf), name="combine/logits")
        combine = _renormalise(b, logits)
    return Slots(slots.rows, combine, routed.constant, kept), mask


def _to_bool(b: Builder, layer: SoftMoELayer, ones: ir.Value, name: str) -> ir.Value:
    """Adds a conversion of ones and zeros to booleans."""
    if TARGETS[layer.target].launches:
        return b.op("Greater", ones, b.number(0.5), name=name)
    return b.op("Cast", ones, to=ir.DataType.BOOL.value, name=name)


def _renormalise(b: Builder, logits: ir.Value) -> ir.Value:
    """Adds C[S] / ΣC[S] for logits [b, m, e·p], which are −∞ for experts that were not selected.

    This is a softmax over the selected experts. The plain quotient would be 0 / 0 for a token that
    puts almost no weight on them.
    """
    return b.op("Softmax", logits, axis=-1, name="combine/C")


def _normalise(b: Builder, layer: SoftMoELayer, x: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Returns the tokens to multiply by phi, and any factor 1/‖x‖ [b, m, 1] to apply later."""
    spec = layer.spec
    if spec.norm == "none":
        return x, None
    if spec.norm == "layernorm":
        return _layer_norm(b, layer, x), None
    if spec.norm == "l2-rsqrt":
        shifted = b.op(
            "Add", _squares(b, layer, x), b.number(spec.norm_eps), name="router/squares_eps"
        )
        norm = b.op("Sqrt", shifted, name="router/norm")
    else:
        # ONNX Runtime's Max of a tensor and a scalar takes 20 times as long as its Clip.
        guard = "Clip" if spec.norm == "l2" else "Add"
        if _short_sum(layer) is None:
            length = b.op("ReduceL2", x, b.ints(2), keepdims=1, name="router/length")
        else:
            length = b.op("Sqrt", _squares(b, layer, x), name="router/length")
        norm = b.op(guard, length, b.number(spec.norm_eps), name="router/norm")
    return x, b.op("Reciprocal", norm, name="router/scale")


SHORT_SUMS = range(16, 49)
"""Lengths of partial sums of squares. ONNX Runtime adds squares sequentially, each addition waiting
for the previous one; it computes several sums of this length in parallel."""

SMALL_INPUT = 1 << 14
"""The size of an input below which the three additional nodes cost more than short sums save."""


def _squares(b: Builder, layer: SoftMoELayer, x: ir.Value) -> ir.Value:
    width = _short_sum(layer)
    if width is None:
        return b.op("ReduceSumSquare", x, b.ints(2), keepdims=1, name="router/squares")
    parts = b.op("Reshape", x, b.ints(0, 0, layer.spec.dim // width, width), name="router/parts")
    sums = b.op("ReduceSumSquare", parts, b.ints(3), keepdims=0, name="router/squares_of_parts")
    return b.op("ReduceSum", sums, b.ints(2), keepdims=1, name="router/squares")


def _short_sum(layer: SoftMoELayer) -> int | None:
    """Returns the number of squares in a partial sum, a divisor of d; None for a single sum."""
    small = layer.tokens is not None and layer.tokens * layer.spec.dim < SMALL_INPUT
    if not TARGETS[layer.target].cpu_forms or small:
        return None
    widths = [w for w in SHORT_SUMS if layer.spec.dim % w == 0 and w < layer.spec.dim]
    return min(widths, key=lambda w: abs(w - 32), default=None)


def _layer_norm(b: Builder, layer: SoftMoELayer, x: ir.Value) -> ir.Value:
    gain = layer.optional(b, "gain")
    return b.op(
        "LayerNormalization",
        x,
        b.constant(np.ones(layer.spec.dim, dtype=np.float32)) if gain is None else gain,
        layer.optional(b, "shift"),
        axis=-1,
        epsilon=layer.spec.norm_eps,
        name="router/layer_norm",
    )


def _dispatch_scale(b: Builder, layer: SoftMoELayer, scale: ir.Value | None) -> ir.Value | None:
    """Returns 1/‖x‖ as [b, 1, m] if the slots average normalised tokens, else None."""
    if scale is None or layer.spec.slots_from == "raw":
        return None
    if TARGETS[layer.target].launches:  # a change of shape launches no kernel
        return b.op("Reshape", scale, b.ints(0, 1, -1), name="dispatch/scale")
    return b.op("Transpose", scale, perm=[0, 2, 1], name="dispatch/scale")


def _select(b: Builder, layer: SoftMoELayer, combine: ir.Value) -> ir.Value:
    """Adds s = Σ_{m,p} C and the indices of the k largest, [b, k] (Algorithm 1)."""
    spec = layer.spec
    scores = b.op("ReduceSum", combine, b.ints(1), keepdims=0, name="router/slot_scores")
    if spec.slots > 1:
        by_expert = b.op(
            "Reshape", scores, b.ints(0, spec.experts, spec.slots), name="router/scores_by_expert"
        )
        scores = b.op("ReduceSum", by_expert, b.ints(2), keepdims=0, name="router/scores")
    k, names = layer.k_value(b), ("router/top", SELECTED)
    _, selected = b.ops("TopK", scores, k, axis=1, largest=1, sorted=1, names=names)
    return selected


def _gather_experts(
    b: Builder,
    layer: SoftMoELayer,
    by_slot: ir.Value,
    index: ir.Value,
    name: str,
    width: int | None = None,
) -> ir.Value:
    """Gathers the selected experts' rows of [b, n·p, m] as [b, k·p, m].

    A `width` replaces m as the last axis.
    """
    n, p = layer.spec.experts, layer.spec.slots
    if p == 1:
        return b.op("GatherND", by_slot, index, batch_dims=1, name=name)
    by_expert = b.op("Reshape", by_slot, b.ints(0, n, p, -1), name=f"{name}_by_expert")
    chosen = b.op("GatherND", by_expert, index, batch_dims=1, name=f"{name}_selected")
    shape = _gathered_shape(b, layer, by_slot, layer.tokens if width is None else width)
    return b.op("Reshape", chosen, shape, name=name)


def _gathered_shape(
    b: Builder, layer: SoftMoELayer, by_slot: ir.Value, width: int | None
) -> ir.Value:
    """Adds the shape [b, k·p, m] for a Reshape: constant unless both k and m are dynamic."""
    if isinstance(layer.k, int):
        return b.ints(0, layer.k * layer.spec.slots, -1)
    if width is not None:
        return b.ints(0, -1, width)
    tokens = b.op("Shape", by_slot, start=2, end=3, name="router/tokens")
    return b.op("Concat", b.ints(0, -1), tokens, axis=0, name="router/rows_by_tokens")


FEW_ROWS = range(2, 5)
LARGE_INPUT = 1 << 16
"""Numbers of rows, and the smallest input, for which averages are computed row by row. ONNX Runtime
multiplies a single row by a matrix in place, but copies the matrix for several rows, which pays off
from about eight rows. For fewer rows, a product per row is faster if a batch of the inputs is too
large for the caches; for smaller inputs its three additional nodes cost more."""


def _averages(
    b: Builder, layer: SoftMoELayer, weights: ir.Value, source: ir.Value, experts: int | None
) -> ir.Value:
    """Adds the product of weights [b, e·p, m] and tokens [b, m, d]: [b, e·p, d]."""
    rows = 0 if experts is None else experts * layer.spec.slots
    large = layer.tokens is None or layer.tokens * layer.spec.dim >= LARGE_INPUT
    if not TARGETS[layer.target].cpu_forms or rows not in FEW_ROWS or not large:
        return b.op("MatMul", weights, source, name="dispatch/slots")
    single_rows = b.op("Unsqueeze", weights, b.ints(2), name="dispatch/weights_apart")
    matrix = b.op("Unsqueeze", source, b.ints(1), name="dispatch/tokens_shared")
    slots = b.op("MatMul", single_rows, matrix, name="dispatch/slots_apart")  # [b, e·p, 1, d]
    return b.op("Squeeze", slots, b.ints(2), name="dispatch/slots")


def _dispatch(
    b: Builder, layer: SoftMoELayer, routed: Routed, logits: ir.Value, experts: int | None
) -> ir.Value:
    """Adds X̃ = Dᵀ·x for logits [b, e·p, m]; returns the slots [b, e·p, d].

    `experts` is e, or None if it is chosen per run.
    """
    weights = b.op("Softmax", logits, axis=-1, name="dispatch/D")
    if routed.scale is not None:
        weights = b.op("Mul", weights, routed.scale, name="dispatch/weights")
    slots = _averages(b, layer, weights, routed.source, experts)
    gain_pending = layer.spec.norm != "layernorm" and layer.spec.slots_from == "normalised"
    if gain_pending and layer.tensors.has("gain"):
        slots = b.op("Mul", slots, layer.stacked(b, "gain"), name="dispatch/gained")
    return slots
