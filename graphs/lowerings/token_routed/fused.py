"""`fused`: ONNX Runtime's `com.microsoft.MoE`, or `QMoE` for INT4, each pair a row of its own.

The op routes by itself, from logits. Here every pair of a token and an expert is a row, whose
logits send it to that expert with a weight of exactly 1; the weights that the graph around it
gives, of whatever sign, follow.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...builder import Builder
from ...layers.experts import ExpertsSpec
from ...names import MICROSOFT
from ...precision.products import INT8_ROWS
from ...targets import CPU_PROVIDER, CUDA_PROVIDER, MICROSOFT_OPS, TARGETS, Precision, Target
from ..base import LoweringOf
from ..cost import PACKED_ROWS, Machine, expert_macs, stacked_us
from ..fused import EXPONENTIAL, NEVER, inexact_gelu, other_width
from .arithmetic import ExpertsLayer, by_token, pair_rows, routed
from .cost import ExpertsWork, combine_us

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu-tanh": "gelu", "relu": "relu"}
"""What the op calls an expert's activation; its GELU is the tanh form. It has no other with a gate
than SiLU."""


def build(b: Builder, layer: ExpertsLayer, x: ir.Value) -> ir.Value:
    """Adds the layer around one fused node."""
    index, weights = routed(b, layer)
    rows = pair_rows(b, layer, x, index, weights)
    outputs = _node(b, layer, rows, _logits(b, layer, index))
    return by_token(b, layer, outputs, index, weights)


def _logits(b: Builder, layer: ExpertsLayer, index: ir.Value) -> ir.Value:
    """Logits [t·k, n] that send each row to its expert."""
    inner = layer.compute.inner
    column = b.op("Reshape", index, b.ints(-1, 1), name="experts/expert_of_row")
    experts = b.constant(np.arange(layer.spec.experts, dtype=np.int64))
    own = b.op("Equal", column, experts, name="experts/one_hot")
    return b.op("Where", own, b.number(0.0, inner), b.number(NEVER, inner), name="experts/logits")


def _node(b: Builder, layer: ExpertsLayer, rows: ir.Value, logits: ir.Value) -> ir.Value:
    """The op on rows [r, d]: [r, o]."""
    spec, blocked = layer.spec, layer.compute.blocked
    options: dict[str, int | float | str] = {"k": 1, "normalize_routing_weights": 1}
    if spec.gate == "none":
        options["activation_type"] = _ACTIVATIONS[spec.activation]
    else:
        options |= {"activation_type": "swiglu", "swiglu_fusion": 1}
        options |= {"activation_alpha": spec.alpha, "activation_beta": spec.up_offset}
        if spec.limit is not None:
            options["swiglu_limit"] = spec.limit
    inputs: list[ir.Value | None] = [rows, logits]
    for which in ("1", "2"):
        inputs.append(_matrices(b, layer, f"w{which}"))
        if blocked is not None:
            scale = layer.stacked(b, f"experts.w{which}.scale")
            inputs.append(_in_turn(b, layer, scale, f"w{which}.scale"))
        bias = f"experts.b{which}"
        if layer.tensors.has(bias):
            inputs.append(_in_turn(b, layer, layer.stacked(b, bias), f"b{which}"))
        else:
            inputs.append(None)
    if blocked is not None:
        options |= {"expert_weight_bits": 4, "block_size": blocked.block}
        options["accuracy_level"] = INT8_ROWS
    op = "MoE" if blocked is None else "QMoE"
    return b.op(op, *inputs, domain=MICROSOFT, name="experts/outputs", **options)


def _matrices(b: Builder, layer: ExpertsLayer, key: str) -> ir.Value:
    """The matrices of all experts as the op wants them, [n, out, in]; folded when it is loaded."""
    n, out = layer.spec.experts, layer.spec.inner if key == "w1" else layer.spec.out
    weight = layer.stacked(b, f"experts.{key}")
    if layer.compute.blocked is None:
        turned = b.op("Transpose", weight, perm=[0, 2, 1], name=f"experts/{key}_by_output")
    else:  # [n, out, blocks, bytes]
        turned = b.op("Reshape", weight, b.ints(n, out, -1), name=f"experts/{key}_by_output")
    return _in_turn(b, layer, turned, key)


def _in_turn(b: Builder, layer: ExpertsLayer, value: ir.Value, key: str) -> ir.Value:
    """With a gate, [n, 2h, …] of the first product with the outputs of gate and up in turn."""
    n, h = layer.spec.experts, layer.spec.hidden
    if layer.spec.gate == "none" or key.startswith(("w2", "b2")):
        return value
    halves = b.op("Reshape", value, b.ints(n, 2, h, -1), name=f"experts/{key}_halves")
    pairs = b.op("Transpose", halves, perm=[0, 2, 1, 3], name=f"experts/{key}_pairs")
    shape = b.ints(n, 2 * h) if key == "b1" else b.ints(n, 2 * h, -1)
    return b.op("Reshape", pairs, shape, name=f"experts/{key}_in_turn")


def _unable(spec: ExpertsSpec) -> str | None:
    if spec.gate != "none" and spec.activation != "silu":
        return f"com.microsoft.MoE has no gate with {spec.activation}"
    if spec.gate == "none" and (spec.activation not in _ACTIVATIONS or spec.alpha != 1.0):
        return f"com.microsoft.MoE has no {spec.activation} of this form"
    return other_width(spec)


def _no_kernel(precision: Precision, target: Target) -> str | None:
    """The op has FP32 everywhere, FP16 on CUDA, and INT4 in the form that is written for a CPU."""
    served: dict[str | None, tuple[Precision, ...]] = {
        CPU_PROVIDER: ("fp32", "int4"),
        CUDA_PROVIDER: ("fp32", "fp16"),
    }
    if precision in served.get(TARGETS[target].provider, ()):
        return None
    return f"com.microsoft.MoE has no {precision.upper()} kernel there"


def predict_us(work: ExpertsWork, machine: Machine) -> float:
    """The chosen experts are read once and compute the rows that chose them, in one node.

    The CPU's sends every row to its expert by a softmax over all of them, in one thread, packs
    FP32 weights anew in every run, and goes over the rows and over what the activation takes number
    by number.
    """
    spec, rows = work.spec, work.selections
    passes = 1 if spec.activation == "relu" else EXPONENTIAL
    return (
        stacked_us(work, work.expected_active, PACKED_ROWS, machine)
        + expert_macs(work, rows) / machine.macs_per_us
        + rows * spec.experts * machine.routing_us
        + rows * (4 * spec.dim + passes * spec.hidden) * machine.scalar_us
        + combine_us(work, rows, machine)
        + 12 * machine.node_us
    )


LOWERING: LoweringOf[ExpertsSpec] = LoweringOf(
    name="fused",
    summary="ONNX Runtime's com.microsoft.MoE or QMoE, each (token, expert) pair a row of its own",
    targets=MICROSOFT_OPS,
    build=build,
    predict_us=predict_us,
    unable=_unable,
    no_kernel=_no_kernel,
    inexact=inexact_gelu,
    kind="experts",
)
