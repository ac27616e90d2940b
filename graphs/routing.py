"""Algorithm 1 as ONNX nodes: logits, both softmaxes, the scores, TopK, dispatch and combine.

Everything here is FP32 but for the last product, whatever type the tokens and the experts have, and
independent of how the experts are computed. Two rewritings keep the passes over the tokens few, and
both are exact: a normalisation x̂ = r·x by a factor per token moves behind the products
(x̂·φ = r·(x·φ) and Dᵀx̂ = (D·r)ᵀx), so x̂ is never written; and D is a softmax down its own column,
so it is computed for the selected columns alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .builder import Builder
from .layers.stored import Layer
from .names import CONSTANTS, OUTPUT, SELECTED
from .targets import TARGETS


@dataclass(frozen=True, slots=True)
class Routed:
    """The router's results for a batch, and what the slots are made from.

    `source` [b, m, d] is averaged into the slots, after the factor `scale` [b, 1, m] where the
    family normalises. `logits` is L, [b, m, n·p], and `logits_by_slot` the same with tokens last;
    `combine` is C, [b, m, n·p]. `selected` [b, k] is None where every expert is kept. `constant`
    [b, m, o] is what constant experts add to the outputs, None where there are none.
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
    `constant` is that of `Routed`. `kept` [b, e·p, 1] tells which slots are those of selected
    experts, None where all are.
    """

    rows: ir.Value
    combine: ir.Value
    constant: ir.Value | None
    kept: ir.Value | None = None


def route(b: Builder, layer: Layer, x: ir.Value) -> Routed:
    """Adds the router for tokens x [b, m, d]; for C [b, m, n·p] where the layer is given slots."""
    if layer.spec.external_routing:
        return _external_routing(b, layer, x)
    x = b.cast(x, layer.x_type, ir.DataType.FLOAT, "router/tokens_fp32")
    normalised, scale = _normalise(b, layer, x)
    phi = layer.stacked(b, "phi", batched=_unpacked(layer))
    logits = b.op("MatMul", normalised, phi, name="router/products")
    if scale is not None:
        logits = b.op("Mul", logits, scale, name="router/logits")
    if layer.spec.biased:
        logits = b.op("Add", logits, layer.stacked(b, "bias"), name="router/logits_biased")
    combine = b.op("Softmax", logits, axis=-1, name="router/C")
    constant = None
    if layer.spec.dropped:  # they had their part in that sum
        spec = layer.spec
        kept = spec.experts * spec.slots
        columns = (b.ints(0), b.ints(kept), b.ints(2))
        if spec.constants:
            sizes = b.ints(kept, spec.dropped * spec.slots)
            names = ("router/C_kept", "combine/C_constant")
            combine, dropped = b.ops("Split", combine, sizes, axis=-1, names=names)
            constant = _constant(b, layer, dropped)
        else:
            combine = b.op("Slice", combine, *columns, name="router/C_kept")
        logits = b.op("Slice", logits, *columns, name="router/logits_kept")
    selected = _select(b, layer, combine) if layer.selects else None
    return Routed(
        source=_rounded(b, layer, x if layer.spec.slots_from == "raw" else normalised),
        scale=_dispatch_scale(b, layer, scale),
        logits=logits,
        logits_by_slot=b.op("Transpose", logits, perm=[0, 2, 1], name="router/logits_by_slot"),
        combine=combine,
        selected=selected,
        constant=constant,
    )


def _external_routing(b: Builder, layer: Layer, combine: ir.Value) -> Routed:
    """What the network around the layer decided: C, and the slots [b, n·p, d] as the source."""
    combine = b.cast(combine, layer.x_type, ir.DataType.FLOAT, "router/C_fp32")
    (slots,) = layer.routed
    slots = b.cast(slots, slots.dtype or ir.DataType.FLOAT, ir.DataType.FLOAT, "dispatch/fp32")
    selected = _select(b, layer, combine) if layer.selects else None
    return Routed(
        source=slots,
        scale=None,
        logits=combine,
        logits_by_slot=combine,
        combine=combine,
        selected=selected,
    )


def _rounded(b: Builder, layer: Layer, source: ir.Value) -> ir.Value:
    """The tokens that the slots average, rounded to BF16 where the layer does so."""
    if not layer.spec.rounded:
        return source
    return b.rounded(source, ir.DataType.FLOAT, "dispatch/source")


def _constant(b: Builder, layer: Layer, combine: ir.Value) -> ir.Value:
    """Adds what constant experts give, [b, m, o], for their columns of C, [b, m, dropped·p]."""
    constants = layer.stacked(b, CONSTANTS)
    added = b.op("MatMul", combine, constants, name="combine/constant")
    return b.cast(added, ir.DataType.FLOAT, layer.y_type, "combine/constant_narrow")


def all_slots(b: Builder, layer: Layer, routed: Routed) -> Slots:
    """Adds the dispatch for every expert: slots [b, n·p, d]."""
    if layer.spec.external_routing:
        return Slots(routed.source, routed.combine, routed.constant)
    slots = _dispatch(b, layer, routed, routed.logits_by_slot, layer.spec.experts)
    return Slots(slots, routed.combine, routed.constant)


def selected_slots(b: Builder, layer: Layer, routed: Routed) -> Slots:
    """Adds the dispatch for the selected experts alone: slots [b, k·p, d]."""
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
        combine = _renormalised(b, by_token)
    else:
        combine = _selected_combine(b, layer, routed, index)
    experts = layer.k if isinstance(layer.k, int) else None
    return Slots(_dispatch(b, layer, routed, logits, experts), combine, routed.constant)


def _selected_combine(b: Builder, layer: Layer, routed: Routed, index: ir.Value) -> ir.Value:
    """Adds the selected experts' columns of C, [b, m, k·p]."""
    by_slot = b.op("Transpose", routed.combine, perm=[0, 2, 1], name="router/C_by_slot")
    by_slot = _gather_experts(b, layer, by_slot, index, "combine/C_by_slot")
    return b.op("Transpose", by_slot, perm=[0, 2, 1], name="combine/C")


def combine_outputs(b: Builder, layer: Layer, slots: Slots, outputs: ir.Value) -> ir.Value:
    """Adds y [b, m, o] = C·Ỹ for the experts' outputs [b, e·p, o], in the experts' float type.

    What constant experts give is added to it. Outputs of experts that were not selected are left
    out by a choice and not by a product: they may be infinite.
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


def one_hot_experts(b: Builder, index: ir.Value, n: int) -> ir.Value:
    """Adds ones where the experts of an index [r, k] are, and zeros: float [r, k, n]."""
    experts = b.constant(np.arange(n, dtype=np.int64))
    column = b.op("Unsqueeze", index, b.ints(2), name="router/index")
    one_hot = b.op("Equal", column, experts, name="router/one_hot")
    return b.op("Cast", one_hot, to=ir.DataType.FLOAT.value, name="router/one_hot_float")


def selection_mask(b: Builder, layer: Layer, selected: ir.Value) -> ir.Value:
    """Adds the selection as ones and zeros, float [b, n]."""
    one_hot = one_hot_experts(b, selected, layer.spec.experts)
    return b.op("ReduceMax", one_hot, b.ints(1), keepdims=0, name="router/mask")


def masked_slots(b: Builder, layer: Layer, routed: Routed) -> tuple[Slots, ir.Value | None]:
    """Adds the dispatch for every expert, and the mask of those that are selected.

    The mask is [b, n], or None where every expert is kept.
    """
    slots = all_slots(b, layer, routed)
    if routed.selected is None:
        return slots, None
    mask = selection_mask(b, layer, routed.selected)
    n, p = layer.spec.experts, layer.spec.slots
    column = b.op("Unsqueeze", mask, b.ints(2), name="combine/mask")  # [b, n, 1]
    if p > 1:  # to [b, n·p, 1]: each slot follows its expert
        ones = b.constant(np.ones((1, 1, p), dtype=np.float32))
        repeated = b.op("Mul", column, ones, name="combine/mask_per_slot")
        column = b.op("Reshape", repeated, b.ints(0, n * p, 1), name="combine/mask_of_slots")
    kept = b.op("Cast", column, to=ir.DataType.BOOL.value, name="combine/kept")
    combine = slots.combine
    if layer.renormalize:
        row = b.op("Reshape", column, b.ints(0, 1, n * p), name="combine/mask_row")
        chosen = b.op("Cast", row, to=ir.DataType.BOOL.value, name="combine/kept_row")
        logits = b.op("Where", chosen, routed.logits, b.number(-np.inf), name="combine/logits")
        combine = _renormalised(b, logits)
    return Slots(slots.rows, combine, routed.constant, kept), mask


def _renormalised(b: Builder, logits: ir.Value) -> ir.Value:
    """Adds C[S] / ΣC[S] for the logits [b, m, e·p] of the kept experts, −∞ those of the others.

    It is their own softmax. The quotient itself is 0 / 0 for a token that all but ignores them.
    """
    return b.op("Softmax", logits, axis=-1, name="combine/C")


def _normalise(b: Builder, layer: Layer, x: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Returns what meets phi, and 1/‖x‖ per token [b, m, 1] where that factor is left out of it."""
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
        # ONNX Runtime's Max of a tensor and a scalar takes twenty times as long as Clip.
        guard = "Clip" if spec.norm == "l2" else "Add"
        length = _lengths(b, layer, x)
        norm = b.op(guard, length, b.number(spec.norm_eps), name="router/norm")
    return x, b.op("Reciprocal", norm, name="router/scale")


SHORT_SUMS = range(16, 49)
"""ONNX Runtime adds squares one after the other, and each addition waits for the one before. It
computes several sums at a time where they are as short as this."""

SMALL_INPUT = 1 << 14
"""Below so many numbers per input, the three nodes more cost what short sums save."""


def _lengths(b: Builder, layer: Layer, x: ir.Value) -> ir.Value:
    """Adds ‖x‖ per token, [b, m, 1]."""
    if _short_sum(layer) is None:
        return b.op("ReduceL2", x, b.ints(2), keepdims=1, name="router/length")
    return b.op("Sqrt", _squares(b, layer, x), name="router/length")


def _squares(b: Builder, layer: Layer, x: ir.Value) -> ir.Value:
    """Adds ‖x‖² per token, [b, m, 1]."""
    width = _short_sum(layer)
    if width is None:
        return b.op("ReduceSumSquare", x, b.ints(2), keepdims=1, name="router/squares")
    parts = b.op("Reshape", x, b.ints(0, 0, layer.spec.dim // width, width), name="router/parts")
    sums = b.op("ReduceSumSquare", parts, b.ints(3), keepdims=0, name="router/squares_of_parts")
    return b.op("ReduceSum", sums, b.ints(2), keepdims=1, name="router/squares")


def _short_sum(layer: Layer) -> int | None:
    """How many squares to add at a time: a divisor of d, or None for all at once."""
    small = layer.tokens is not None and layer.tokens * layer.spec.dim < SMALL_INPUT
    if not TARGETS[layer.target].cpu_forms or small:
        return None
    widths = [w for w in SHORT_SUMS if layer.spec.dim % w == 0 and w < layer.spec.dim]
    return min(widths, key=lambda w: abs(w - 32), default=None)


def _layer_norm(b: Builder, layer: Layer, x: ir.Value) -> ir.Value:
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


def _dispatch_scale(b: Builder, layer: Layer, scale: ir.Value | None) -> ir.Value | None:
    """1/‖x‖ as [b, 1, m] where the slots average normalised tokens, else None."""
    if scale is None or layer.spec.slots_from == "raw":
        return None
    return b.op("Transpose", scale, perm=[0, 2, 1], name="dispatch/scale")


def _select(b: Builder, layer: Layer, combine: ir.Value) -> ir.Value:
    """Adds s = Σ_{m,p} C and its k largest, [b, k] (Algorithm 1)."""
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
    layer: Layer,
    by_slot: ir.Value,
    index: ir.Value,
    name: str,
    width: int | None = None,
) -> ir.Value:
    """Takes the selected experts' rows of [b, n·p, m]; returns [b, k·p, m].

    With a `width`, that is the last axis instead of m.
    """
    n, p = layer.spec.experts, layer.spec.slots
    if p == 1:
        return b.op("GatherND", by_slot, index, batch_dims=1, name=name)
    by_expert = b.op("Reshape", by_slot, b.ints(0, n, p, -1), name=f"{name}_by_expert")
    chosen = b.op("GatherND", by_expert, index, batch_dims=1, name=f"{name}_selected")
    shape = _rows_by_tokens(b, layer, by_slot, layer.tokens if width is None else width)
    return b.op("Reshape", chosen, shape, name=name)


def _rows_by_tokens(b: Builder, layer: Layer, by_slot: ir.Value, width: int | None) -> ir.Value:
    """The shape [b, k·p, m] for a Reshape, from constants unless both k and m are dynamic."""
    if isinstance(layer.k, int):
        return b.ints(0, layer.k * layer.spec.slots, -1)
    if width is not None:
        return b.ints(0, -1, width)
    tokens = b.op("Shape", by_slot, start=2, end=3, name="router/tokens")
    return b.op("Concat", b.ints(0, -1), tokens, axis=0, name="router/rows_by_tokens")


FEW_SLOTS = 64
"""ONNX Runtime packs a constant matrix when it loads a graph, in blocks of 256 rows, and then reads
the tokens once per block: for a few columns that costs more than it saves. A constant of three axes
is left as it is."""


def _unpacked(layer: Layer) -> bool:
    """Whether phi is better a batch of one matrix, [1, d, n·p]."""
    return TARGETS[layer.target].cpu_forms and layer.spec.routed * layer.spec.slots <= FEW_SLOTS


FEW_ROWS = range(2, 5)
LARGE_INPUT = 1 << 16
"""ONNX Runtime multiplies one row by a matrix as that lies in memory, and copies it for more rows,
which pays from about eight. For so few rows, and inputs of so many numbers that a batch leaves the
caches, a product per row is faster; elsewhere its three nodes more are not worth it."""


def _averages(
    b: Builder, layer: Layer, weights: ir.Value, source: ir.Value, experts: int | None
) -> ir.Value:
    """Adds weights [b, e·p, m] times the tokens [b, m, d]: [b, e·p, d]."""
    rows = 0 if experts is None else experts * layer.spec.slots
    large = layer.tokens is None or layer.tokens * layer.spec.dim >= LARGE_INPUT
    if not TARGETS[layer.target].cpu_forms or rows not in FEW_ROWS or not large:
        return b.op("MatMul", weights, source, name="dispatch/slots")
    apart = b.op("Unsqueeze", weights, b.ints(2), name="dispatch/weights_apart")
    shared = b.op("Unsqueeze", source, b.ints(1), name="dispatch/tokens_shared")
    slots = b.op("MatMul", apart, shared, name="dispatch/slots_apart")  # [b, e·p, 1, d]
    return b.op("Squeeze", slots, b.ints(2), name="dispatch/slots")


def _dispatch(
    b: Builder, layer: Layer, routed: Routed, logits: ir.Value, experts: int | None
) -> ir.Value:
    """Adds X̃ = Dᵀ·x for logits [b, e·p, m]; returns the slots [b, e·p, d].

    `experts` is e, or None where it is chosen per run.
    """
    weights = b.op("Softmax", logits, axis=-1, name="dispatch/D")
    if routed.scale is not None:
        weights = b.op("Mul", weights, routed.scale, name="dispatch/weights")
    slots = _averages(b, layer, weights, routed.source, experts)
    gain_pending = layer.spec.norm != "layernorm" and layer.spec.slots_from == "normalised"
    if gain_pending and layer.tensors.has("gain"):
        slots = b.op("Mul", slots, layer.stacked(b, "gain"), name="dispatch/gained")
    return slots
