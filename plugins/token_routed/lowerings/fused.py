"""`fused`: ONNX Runtime's `com.microsoft.MoE`, or `QMoE` for integers, each pair a row of its own.

The op routes by itself, from logits. Here every pair of a token and an expert is a row, whose
logits send it to that expert with a weight of exactly 1; the weights that the graph around it
gives, of whatever sign, follow.

`QMoE` takes weights as well, and a token once for all its experts, but leaves out an expert whose
weight is negative: it is given them where they come of a softmax or of the like.

`QMoE` has a fast kernel for weights in blocks alone, and rounds a row block by block. INT8 has one
scale for a column: the scale of all its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ....common.versions import ROUTED_WEIGHTS, older
from ....graphs.builder import Builder
from ....graphs.lowerings.base import LoweringOf
from ....graphs.lowerings.cost import PACKED_ROWS, expert_bytes, expert_macs, stacked_us, stream_us
from ....graphs.lowerings.fused import (
    EXPONENTIAL,
    KERNELS,
    NEVER,
    OP_ACTIVATIONS,
    around_maps,
    has_op,
    inexact_gelu,
    other_width,
)
from ....graphs.names import MICROSOFT
from ....graphs.precision.products import INT8_ROWS
from ....graphs.precision.types import block_of
from ....graphs.targets import TARGETS, Machine, Precision, Target
from ..layers.experts import ExpertsSpec
from .arithmetic import ExpertsLayer, by_token, output, pair_rows, routed, token_rows
from .cost import ExpertsWork, combine_us


def build(b: Builder, layer: ExpertsLayer, x: ir.Value) -> ir.Value:
    """Adds the layer around one fused node."""
    index, weights = routed(b, layer)
    if _weights_itself(layer):
        spread = _spread(b, layer, index, weights)  # whose k largest are those chosen
        assert isinstance(layer.k, int)
        return output(b, layer, _node(b, layer, token_rows(b, layer, x), spread, layer.k))
    rows = pair_rows(b, layer, x, index, weights)
    outputs = _node(b, layer, rows, _logits(b, layer, index))
    return by_token(b, layer, outputs, index, weights)


def _weights_itself(layer: ExpertsLayer) -> bool:
    """Whether the op may weight the experts' outputs and sum them up."""
    spec = layer.spec
    summed = spec.weights_on == "output" and not (spec.post_norm or spec.rounded)
    known = isinstance(layer.k, int) and layer.k <= spec.experts
    return _integers(layer) is not None and summed and known and _positive(layer.routed[1])


MOVING = ("Cast", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Expand", "ReduceSum")
CHOOSING = ("Gather", "GatherElements", "GatherND", "TopK")


def _positive(value: ir.Value | None) -> bool:
    """Whether no number of a value can be negative, by the nodes that made it."""
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
            return all(_positive(port) for port in node.inputs)
        case moved if moved in MOVING or moved in CHOOSING:
            return value is node.outputs[0] and _positive(node.inputs[0])
        case _:
            return False


def _spread(b: Builder, layer: ExpertsLayer, index: ir.Value, weights: ir.Value) -> ir.Value:
    """Each token's weight of each expert [t, n], in the fewest nodes: a token alone waits for each.

    An expert that was chosen twice has both weights.
    """
    tokens = b.op("Shape", index, start=0, end=1, name="router/tokens")
    shape = b.op("Concat", tokens, b.ints(layer.spec.experts), axis=0, name="router/shape")
    none = b.op("ConstantOfShape", shape, name="router/none")
    return b.op(
        "ScatterElements",
        none,
        index,
        weights,
        axis=1,
        reduction="add",
        name="router/by_expert",
    )


def _logits(b: Builder, layer: ExpertsLayer, index: ir.Value) -> ir.Value:
    """Logits [t·k, n] that send each row to its expert."""
    inner = layer.compute.inner
    column = b.op("Reshape", index, b.ints(-1, 1), name="experts/expert_of_row")
    experts = b.constant(np.arange(layer.spec.experts, dtype=np.int64))
    own = b.op("Equal", column, experts, name="experts/one_hot")
    return b.op("Where", own, b.number(0.0, inner), b.number(NEVER, inner), name="experts/logits")


def _node(
    b: Builder, layer: ExpertsLayer, rows: ir.Value, logits: ir.Value, k: int | None = None
) -> ir.Value:
    """The op on rows [r, d]: [r, o].

    With k the logits are the weights of k experts, and what the others of a row have is zero.
    """
    spec, integers = layer.spec, _integers(layer)
    options: dict[str, int | float | str] = {
        "k": 1 if k is None else k,
        "normalize_routing_weights": int(k is None),
    }
    if spec.gate == "none":
        options["activation_type"] = OP_ACTIVATIONS[spec.activation]
    else:
        options |= {"activation_type": "swiglu", "swiglu_fusion": 1}
        options |= {"activation_alpha": spec.alpha, "activation_beta": spec.up_offset}
        if spec.limit is not None:
            options["swiglu_limit"] = spec.limit
    inputs: list[ir.Value | None] = [rows, logits]
    for which in ("1", "2"):
        inputs.append(_matrices(b, layer, f"w{which}"))
        if integers is not None:
            inputs.append(_scales(b, layer, f"w{which}", integers.block))
        bias = f"experts.b{which}"
        if layer.tensors.has(bias):
            inputs.append(_in_turn(b, layer, layer.stacked(b, bias), f"b{which}"))
        else:
            inputs.append(None)
    if integers is not None:
        options |= {"expert_weight_bits": integers.bits, "accuracy_level": INT8_ROWS}
        if integers.block is not None:
            options["block_size"] = integers.block
    if k is not None:
        inputs += [None] * (ROUTER_WEIGHTS - len(inputs)) + [logits]
    op = "MoE" if integers is None else "QMoE"
    return b.op(op, *inputs, domain=MICROSOFT, name="experts/outputs", **options)


ROUTER_WEIGHTS = 14
"""The place of the weights among the inputs of `QMoE`."""


@dataclass(frozen=True, slots=True)
class _Integers:
    """The weights that `QMoE` takes: their bits, and how many of a column share a block."""

    bits: int
    block: int | None


def _integers(layer: ExpertsLayer) -> _Integers | None:
    blocked = layer.compute.blocked
    if blocked is not None:
        return _Integers(blocked.bits, blocked.block)
    return None if layer.compute.quantized is None else _Integers(8, _block(layer.spec))


def _block(spec: ExpertsSpec) -> int | None:
    """The block of INT8; None where no size divides both matrices, which are slow then."""
    return block_of("kernel", (spec.dim, spec.hidden), bits=8)


def _matrices(b: Builder, layer: ExpertsLayer, key: str) -> ir.Value:
    """The matrices of all experts as the op wants them, [n, out, in]; folded when it is loaded."""
    n, out = layer.spec.experts, layer.spec.inner if key == "w1" else layer.spec.out
    weight = layer.stacked(b, f"experts.{key}")
    if layer.compute.blocked is not None:  # [n, out, blocks, bytes]
        turned = b.op("Reshape", weight, b.ints(n, out, -1), name=f"experts/{key}_by_output")
        return _in_turn(b, layer, turned, key)
    quantized = layer.compute.quantized
    if quantized is not None and not quantized.weights.zero_point:
        # The op takes them plus 128: of a byte, that is its first bit turned over.
        byte = ir.DataType.UINT8
        unsigned = b.op("Cast", weight, to=byte.value, name=f"experts/{key}_bytes")
        first_bit = b.constant(np.array(128, dtype=np.uint8))
        weight = b.op("BitwiseXor", unsigned, first_bit, name=f"experts/{key}_unsigned")
    turned = b.op("Transpose", weight, perm=[0, 2, 1], name=f"experts/{key}_by_output")
    return _in_turn(b, layer, turned, key)


def _scales(b: Builder, layer: ExpertsLayer, key: str, block: int | None) -> ir.Value:
    """The scales of a matrix's columns, or of their blocks, [n, out, blocks]."""
    scale = layer.stacked(b, f"experts.{key}.scale")
    if layer.compute.blocked is None and block is not None:
        n, out = layer.spec.experts, layer.spec.inner if key == "w1" else layer.spec.out
        blocks = (layer.spec.dim if key == "w1" else layer.spec.hidden) // block
        column = b.op("Unsqueeze", scale, b.ints(2), name=f"experts/{key}_scale_columns")
        shape = b.ints(n, out, blocks)
        scale = b.op("Expand", column, shape, name=f"experts/{key}_scale_blocks")
    return _in_turn(b, layer, scale, f"{key}.scale")


def _in_turn(b: Builder, layer: ExpertsLayer, value: ir.Value, key: str) -> ir.Value:
    """With a gate, [n, 2h, …] of the first product with the outputs of gate and up in turn."""
    n, h = layer.spec.experts, layer.spec.hidden
    if layer.spec.gate == "none" or key.startswith(("w2", "b2")):
        return value
    halves = b.op("Reshape", value, b.ints(n, 2, h, -1), name=f"experts/{key}_halves")
    pairs = b.op("Transpose", halves, perm=[0, 2, 1, 3], name=f"experts/{key}_pairs")
    flat = value.shape is not None and len(value.shape) == 2  # a bias, or a scale of each column
    shape = b.ints(n, 2 * h) if flat else b.ints(n, 2 * h, -1)
    return b.op("Reshape", pairs, shape, name=f"experts/{key}_in_turn")


def _unable(spec: ExpertsSpec) -> str | None:
    if spec.linear:
        return "com.microsoft.MoE has no experts of one map"
    if around_maps(spec):
        return around_maps(spec)
    if spec.gate != "none" and spec.activation != "silu":
        return f"com.microsoft.MoE has no gate with {spec.activation}"
    if spec.gate == "none" and (spec.activation not in OP_ACTIVATIONS or spec.alpha != 1.0):
        return f"com.microsoft.MoE has no {spec.activation} of this form"
    return other_width(spec)


def _no_kernel(precision: Precision, target: Target) -> str | None:
    """The op has integers in the form written for a CPU."""
    record, integers = TARGETS[target], precision in ("int8", "int4")
    if precision not in record.moe and not (integers and record.on_cpu):
        return f"com.microsoft.MoE has no {precision.upper()} kernel there"
    if integers and not record.new_kernels:
        return "com.microsoft.QMoE takes the experts' weights in no onnxruntime-web up to 1.30"
    if integers and older("onnxruntime", ROUTED_WEIGHTS):
        return "com.microsoft.QMoE takes the experts' weights from ONNX Runtime 1.31 on"
    return None


INTEGER_READ, INTEGER_MACS = 0.75, 2.3
"""What `QMoE` takes in INT8 to read an expert, and to compute a row, in times of what the products
of `grouped` take: measured beside it from 1 to 256 tokens, in one thread of one machine."""


def predict_us(work: ExpertsWork, machine: Machine) -> float:
    """The chosen experts are read once and compute the rows that chose them, in one node.

    The CPU's sends every row to its expert by a softmax over all of them, in one thread, packs
    FP32 weights anew in every run, and goes over the rows and over what the activation takes number
    by number. Integer weights are packed when they are loaded, and the rate of INT8 has all in it
    that a row takes.
    """
    spec, rows = work.spec, work.selections
    passes = 1 if spec.activation in ("relu", "identity") else EXPONENTIAL
    read = stacked_us(work, work.expected_active, PACKED_ROWS, machine)
    macs = expert_macs(work, rows) / machine.macs_per_us
    if work.precision == "int8":
        size, layer = (expert_bytes(work, n) for n in (work.expected_active, spec.experts))
        read = INTEGER_READ * stream_us(work, size, layer, machine.bytes_per_us, machine)
        macs *= INTEGER_MACS
        if _block(spec) is None:  # unpacked to floats in every run
            read += size * machine.number_us
    return (
        read
        + macs
        + rows * spec.experts * machine.routing_us
        + rows * (4 * spec.dim + passes * spec.hidden) * machine.scalar_us
        + combine_us(work, rows, machine)
        + (12 + (KERNELS if machine.reads_once else 0)) * machine.node_us
    )


LOWERING: LoweringOf[ExpertsSpec] = LoweringOf(
    name="fused",
    summary="ONNX Runtime's com.microsoft.MoE or QMoE, each (token, expert) pair a row of its own",
    needs=has_op,
    build=build,
    predict_us=predict_us,
    unable=_unable,
    no_kernel=_no_kernel,
    inexact=inexact_gelu,
)
