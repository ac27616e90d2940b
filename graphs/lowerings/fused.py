"""`fused`: ONNX Runtime's `com.microsoft.MoE`, each slot a token that is sent to one expert."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from ..builder import Builder
from ..layers.base import MoESpec
from ..layers.expert import Activation, AroundMaps
from ..layers.soft_moe import SoftMoESpec
from ..layers.stored import Layer
from ..names import MICROSOFT
from ..routing import combine_outputs, route, selected_slots
from ..targets import TARGETS, Machine, Precision, Target, TargetRecord
from .base import Lowering
from .cost import PACKED_ROWS, Work, around_experts_us, expert_macs, stacked_us
from .experts import expert_rows

OP_ACTIVATIONS: Mapping[Activation, str] = MappingProxyType(
    {
        "silu": "silu",
        "gelu": "gelu",
        "gelu-tanh": "gelu",
        "relu": "relu",
        "identity": "identity",
    }
)
"""What the op calls an expert's activation; its GELU is the tanh form."""

NEVER = -16.0
"""A router logit that is never chosen. The weight of the one that is chosen is divided by itself,
so it is exactly 1; an exp that underflows would take several times as long."""


def build(b: Builder, layer: Layer, x: ir.Value) -> ir.Value:
    """Adds the layer around one fused node; router logits are 0 for the slot's own expert."""
    p, o = layer.spec.slots, layer.spec.out
    routed = route(b, layer, x)
    slots = selected_slots(b, layer, routed)
    rows = expert_rows(b, layer, slots.rows)
    rows = b.op("Reshape", rows, b.ints(-1, layer.spec.dim), name="experts/rows")
    transposed = {
        name: b.op(
            "Transpose",
            layer.stacked(b, f"experts.{name}"),
            perm=[0, 2, 1],  # the op wants [n, out, in]; the runtime folds this once, when loading
            name=f"experts/{name}_by_output",
        )
        for name in ("w1", "w2")
    }
    biases = {name: layer.optional(b, f"experts.{name}") for name in ("b1", "b2")}
    logits = _router_logits(b, layer, routed.selected, slots.rows)
    outputs = b.op(
        "MoE",
        rows,
        b.cast(logits, ir.DataType.FLOAT, layer.compute.inner, "experts/logits_narrow"),
        transposed["w1"],
        biases["b1"],
        transposed["w2"],
        biases["b2"],
        domain=MICROSOFT,
        k=1,
        activation_type=OP_ACTIVATIONS[layer.spec.activation],
        normalize_routing_weights=1,
        name="experts/outputs",
    )
    if isinstance(layer.k, int):
        shape = b.ints(-1, layer.k * p, o)
    else:
        rows_per_input = b.op("Shape", slots.rows, start=1, end=2, name="combine/rows")
        shape = b.op(
            "Concat", b.ints(-1), rows_per_input, b.ints(o), axis=0, name="combine/outputs_shape"
        )
    return combine_outputs(b, layer, slots, b.op("Reshape", outputs, shape, name="combine/outputs"))


def _router_logits(
    b: Builder, layer: Layer, selected: ir.Value | None, slots: ir.Value
) -> ir.Value:
    """One-hot logits [b·e·p, n] that send each slot to its own expert."""
    n, p = layer.spec.experts, layer.spec.slots
    if selected is None:
        own = np.full((1, n * p, n), NEVER, dtype=np.float32)
        own[0, np.arange(n * p), np.arange(n * p) // p] = 0.0
        batch = b.op("Shape", slots, start=0, end=1, name="experts/batch")
        shape = b.op("Concat", batch, b.ints(1, 1), axis=0, name="experts/logits_shape")
        logits = b.op("Expand", b.constant(own), shape, name="experts/logits_by_input")
        return b.op("Reshape", logits, b.ints(-1, n), name="experts/logits")
    index = b.op("Unsqueeze", selected, b.ints(2), name="experts/index")
    if p > 1:
        zeros = b.constant(np.zeros((1, 1, p), dtype=np.int64))
        index = b.op("Add", index, zeros, name="experts/index_per_slot")
    column = b.op("Reshape", index, b.ints(-1, 1), name="experts/expert_of_row")
    own_expert = b.op(
        "Equal", column, b.constant(np.arange(n, dtype=np.int64)), name="experts/one_hot"
    )
    return b.op("Where", own_expert, b.number(0.0), b.number(NEVER), name="experts/logits")


def _unable(spec: SoftMoESpec) -> str | None:
    if spec.expert != "mlp":
        return f"com.microsoft.MoE has no {spec.expert} experts of this form"
    if spec.activation not in OP_ACTIVATIONS or spec.alpha != 1.0:
        return f"com.microsoft.MoE has no {spec.activation} of this form"
    return around_maps(spec) or other_width(spec)


def has_op(target: TargetRecord) -> bool:
    """Whether a target has the op."""
    return bool(target.moe)


def around_maps(spec: AroundMaps) -> str | None:
    """Why the op cannot compute what follows the experts' maps."""
    if spec.hidden_norm or spec.out_norm or spec.out_activation != "identity":
        return "com.microsoft.MoE has no normalisation in an expert, and no activation after it"
    return None


def other_width(spec: MoESpec) -> str | None:
    """Why the op cannot compute experts whose outputs are wider or narrower than their inputs."""
    if spec.dim != spec.out:
        return f"com.microsoft.MoE keeps the width, and this layer maps {spec.dim} to {spec.out}"
    return None


def inexact_gelu(spec: AroundMaps, precision: Precision, target: Target) -> str | None:
    """How what the op computes for GELU differs from it.

    In ONNX Runtime GPU 1.31.1 it is the tanh form where GELU is the epilogue of the product (FP32
    everywhere, and cards older than Hopper: `EpilogueOpDefaultFtGelu`), and the exact one where it
    is a kernel of its own (`doActivationKernel`, after Hopper's own products in FP16): read from
    its sources and its library's symbols, not run.
    """
    gelu = spec.activation in ("gelu", "gelu-tanh")
    if gelu and precision == "fp16" and precision in TARGETS[target].moe:
        return (
            "com.microsoft.MoE computes the tanh form of GELU, and with the FP16 products of newer "
            "cards (from Hopper on) the exact one, up to 5e-4 apart"
        )
    if spec.activation == "gelu":
        return "com.microsoft.MoE computes the tanh form of GELU, up to 5e-4 from the exact one"
    return None


def _no_kernel(precision: Precision, target: Target) -> str | None:
    if precision in TARGETS[target].moe:
        return None
    return f"com.microsoft.MoE has no {precision.upper()} kernel there"


KERNELS = 7
"""What the node takes on a GPU beside the first of its kernels: it chooses an expert, sorts the
rows, copies them in that order, multiplies twice, and brings them back."""

EXPONENTIAL = 8
"""What the tanh of a GELU takes in that node, in passes over its input."""


def predict_us(work: Work, machine: Machine) -> float:
    """The chosen experts are read once and compute the rows that chose them, in one node.

    A GPU's takes several kernels. The CPU's sends every row to its expert by a softmax over all of
    them, in one thread, packs weights anew in every run, and goes over the rows and over what the
    activation takes number by number.
    """
    rows = work.selections * work.spec.slots
    tanh = 1 if work.spec.activation in ("relu", "identity") else EXPONENTIAL
    return (
        stacked_us(work, work.expected_active, PACKED_ROWS, machine)
        + expert_macs(work, work.selections) / machine.macs_per_us
        + rows * work.spec.experts * machine.routing_us
        + rows * (4 * work.spec.dim + tanh * work.spec.hidden) * machine.scalar_us
        + (10 + (KERNELS if machine.reads_once else 0)) * machine.node_us
        + around_experts_us(work, machine)
    )


LOWERING = Lowering(
    name="fused",
    summary="ONNX Runtime's com.microsoft.MoE, each slot a token with one-hot router logits",
    needs=has_op,
    build=build,
    predict_us=predict_us,
    unable=_unable,
    no_kernel=_no_kernel,
    inexact=inexact_gelu,
)
