"""`fused`: ONNX Runtime's `com.microsoft.MoE`, or `QMoE` for integers.

The op itself routes, from logits: it weights the k experts of a row by the softmax over their
logits. If the weights from the surrounding graph are known not to be negative, each token is one
row and its logits are the logarithms of these weights. The softmax then returns each weight's share
of their sum, and the output is multiplied by the sum. The CPU's kernels are slower this way, so
there it is used only for integers.

Otherwise every (token, expert) pair is a row, whose logits send it to that expert with a weight of
exactly 1; the weights, of any sign, are applied afterwards.

`QMoE` has a fast kernel only for weights in blocks, and rounds a row block by block. INT8 has one
scale for a column, which is then the scale of all its blocks.
"""

from __future__ import annotations

import onnx_ir as ir

from ....common.libraries import ROUTED_WEIGHTS, older
from ....graphs.builder import Builder
from ....graphs.fusion.patterns import integers_in, node_of
from ....graphs.lowerings.base import LoweringOf
from ....graphs.lowerings.cost import PACKED_ROWS, expert_bytes, expert_macs, stacked_us, stream_us
from ....graphs.lowerings.moe_op import (
    OP_ACTIVATIONS,
    TANH_PASSES,
    OpExperts,
    column_block_size,
    excluded_logit,
    grouped_read_us,
    inexact_gelu,
    kernels_after_first,
    moe_node,
    one_hot_logits,
    unsupported_on_gpu,
    unsupported_parts,
    unsupported_width,
)
from ....graphs.targets import TARGETS, Machine, Precision, Target
from ..layers.experts import ExpertsSpec
from .arithmetic import ExpertsLayer, by_token, output, outputs_type, pair_rows, routed, token_rows
from .cost import ExpertsPlan, combine_us


def build(b: Builder, layer: ExpertsLayer, x: ir.Value) -> ir.Value:
    """Adds the layer around one fused node."""
    index, weights = routed(b, layer)
    experts = _experts(layer.spec)
    if not _op_applies_weights(layer):
        rows = pair_rows(b, layer, x, index, weights)
        outputs = moe_node(
            b, layer, experts, rows, one_hot_logits(b, layer, index, layer.compute.inner)
        )
        return by_token(b, layer, outputs, index, weights)
    assert isinstance(layer.k, int)
    rows = token_rows(b, layer, x)
    by_expert = _weights_by_expert(b, layer, index, weights)  # the k largest are the chosen ones
    if TARGETS[layer.target].on_cpu:
        return output(
            b, layer, moe_node(b, layer, experts, rows, by_expert, layer.k, weights=by_expert)
        )
    logits = _log_weights(b, layer, by_expert)
    shares = moe_node(b, layer, experts, rows, logits, layer.k)
    if _sums_to_one(layer.routed[1]):
        return output(b, layer, shares)
    total = b.op("ReduceSum", weights, b.ints(1), keepdims=1, name="combine/total_weight")
    narrow = b.cast(total, ir.DataType.FLOAT, outputs_type(layer), "combine/total_narrow")
    return output(b, layer, b.op("Mul", shares, narrow, name="combine/weighted"))


def _experts(spec: ExpertsSpec) -> OpExperts:
    return OpExperts(
        spec.activation,
        spec.gate != "none",
        alpha=spec.alpha,
        offset=spec.up_offset,
        limit=spec.limit,
    )


def _op_applies_weights(layer: ExpertsLayer) -> bool:
    """Returns whether the op may weight the experts' outputs and sum them."""
    spec, on_cpu = layer.spec, TARGETS[layer.target].on_cpu
    summed = spec.weights_on == "output" and not (spec.post_norm or spec.rounded)
    dropped = bool(spec.capacities) and not on_cpu  # outputs may be infinite
    known_k = isinstance(layer.k, int) and layer.k <= spec.experts
    faster = layer.compute.precision in ("int8", "int4") or not on_cpu
    return faster and summed and not dropped and known_k and _nonnegative(layer.routed[1])


KEEP_NONNEGATIVE = frozenset(
    {
        *("Cast", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Expand", "ReduceSum"),
        *("Gather", "GatherElements", "GatherND", "TopK"),
    }
)
"""Ops whose first output contains no negative number if the first input contains none."""


def _nonnegative(value: ir.Value | None) -> bool:
    """Returns whether a value is never negative, judged by the nodes that compute it."""
    node = None if value is None else value.producer()
    if node is None:
        tensor = None if value is None else value.const_value
        return tensor is not None and bool((tensor.numpy() >= 0).all())
    if node.domain:
        return False
    match node.op_type:
        case "Softmax" | "Sigmoid" | "Exp" | "Relu" | "Abs" | "Sqrt" | "Softplus":
            return True
        case "Add" | "Mul" | "Div":
            return all(_nonnegative(operand) for operand in node.inputs)
        case op_type if op_type in KEEP_NONNEGATIVE:
            return value is node.outputs[0] and _nonnegative(node.inputs[0])
        case _:
            return False


def _sums_to_one(value: ir.Value | None) -> bool:
    """Returns whether a token's weights are divided by their sum, judged by their nodes."""
    node = node_of(value, "Cast", "Softmax", "Div")
    if node is None:
        return False
    if node.op_type == "Cast":
        return _sums_to_one(node.inputs[0])
    if node.op_type == "Softmax":
        return node.attributes.get_int("axis", -1) in (-1, 1)
    total = node_of(node.inputs[1], "ReduceSum")
    if total is None or total.inputs[0] is not node.inputs[0] or len(total.inputs) < 2:
        return False
    return integers_in(total.inputs[1]) in ([-1], [1])


def _weights_by_expert(
    b: Builder, layer: ExpertsLayer, index: ir.Value, weights: ir.Value
) -> ir.Value:
    """Adds each token's weight for each expert [t, n], in as few nodes as possible.

    In decoding, every node adds to the latency. An expert that a token chose twice has the sum of
    both weights.
    """
    tokens = b.op("Shape", index, start=0, end=1, name="router/tokens")
    shape = b.op("Concat", tokens, b.ints(layer.spec.experts), axis=0, name="router/shape")
    zeros = b.op("ConstantOfShape", shape, name="router/none")
    return b.op(
        "ScatterElements", zeros, index, weights, axis=1, reduction="add", name="router/by_expert"
    )


def _log_weights(b: Builder, layer: ExpertsLayer, by_expert: ir.Value) -> ir.Value:
    """Adds logits [t, n] whose softmax is each expert's share of the token's total weight.

    The weights are divided by the largest, whose logarithm is then 0: in 16 bits a logarithm near 0
    has the smallest rounding error, and errors of small weights matter little.
    """
    peak = b.op("ReduceMax", by_expert, b.ints(1), keepdims=1, name="router/largest")
    share = b.op("Div", by_expert, peak, name="router/of_largest")
    log = b.op("Log", share, name="router/logarithms")
    chosen = b.op("Greater", by_expert, b.number(0.0), name="router/weighted")
    other = b.number(excluded_logit(layer.target))
    logits = b.op("Where", chosen, log, other, name="router/logits")
    return b.cast(logits, ir.DataType.FLOAT, layer.compute.inner, "router/logits_narrow")


def _unsupported(spec: ExpertsSpec) -> str | None:
    if spec.linear:
        return "com.microsoft.MoE does not support experts with only one linear layer"
    if spec.gate != "none" and spec.activation != "silu":
        return f"com.microsoft.MoE supports gates with silu only, not with {spec.activation}"
    if spec.gate == "none" and (spec.activation not in OP_ACTIVATIONS or spec.alpha != 1.0):
        return f"com.microsoft.MoE does not support this form of {spec.activation}"
    return unsupported_parts(spec) or unsupported_width(spec)


def _no_kernel(precision: Precision, target: Target) -> str | None:
    record, integers = TARGETS[target], precision in ("int8", "int4")
    if precision not in record.moe and not (integers and (record.on_cpu or record.weight_only)):
        return f"com.microsoft.MoE has no {precision.upper()} kernel for {target}"
    if integers and record.on_cpu and not record.new_kernels:
        return "com.microsoft.QMoE does not accept routing weights in onnxruntime-web up to 1.30"
    if integers and older("onnxruntime", ROUTED_WEIGHTS):
        return "com.microsoft.QMoE accepts routing weights only in ONNX Runtime 1.31 and later"
    return None


INTEGER_READ, INTEGER_MACS = 0.75, 2.3
"""The time that `QMoE` takes in INT8 to read an expert and to compute a row, relative to the
products of `grouped`; measured with 1 to 256 tokens, in one thread of one machine."""


def predict_us(plan: ExpertsPlan, machine: Machine) -> float:
    """Returns the predicted time: chosen experts are read once and compute their rows, in one node.

    The CPU's kernel routes every row by a softmax over all experts, in one thread, packs FP32
    weights again in every run, and loops over the rows and the activation's inputs one number at a
    time. Integer weights are packed when they are loaded, and the INT8 rate includes the full cost
    of a row.
    """
    spec, rows = plan.spec, plan.selections
    passes = 1 if spec.activation in ("relu", "identity") else TANH_PASSES
    read = stacked_us(plan, plan.expected_active, PACKED_ROWS, machine)
    macs = expert_macs(plan, rows) / machine.macs_per_us
    if machine.reads_once:
        read = grouped_read_us(spec, plan.expected_active, machine)
    elif plan.precision == "int8":
        size, layer = (expert_bytes(plan, n) for n in (plan.expected_active, spec.experts))
        read = INTEGER_READ * stream_us(plan, size, layer, machine.bytes_per_us, machine)
        macs *= INTEGER_MACS
        if column_block_size(spec) is None:  # unpacked to floats in every run
            read += size * machine.number_us
    return (
        read
        + macs
        + rows * spec.experts * machine.routing_us
        + rows * (4 * spec.dim + passes * spec.hidden) * machine.scalar_us
        + combine_us(plan, rows, machine)
        + (12 + (kernels_after_first(rows) if machine.reads_once else 0)) * machine.node_us
    )


LOWERING: LoweringOf[ExpertsSpec] = LoweringOf(
    name="fused",
    summary="one node for all experts: ONNX Runtime's com.microsoft.MoE or QMoE",
    needs=lambda target: bool(target.moe),
    build=build,
    predict_us=predict_us,
    unable=_unsupported,
    no_kernel=_no_kernel,
    inexact=inexact_gelu,
    unfit=unsupported_on_gpu,
)
