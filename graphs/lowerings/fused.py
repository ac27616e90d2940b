"""`fused`: ONNX Runtime's `com.microsoft.MoE`, with each slot as a token for one expert.

On a GPU it is a grouped product that reads each selected expert once, without copies. This module
is only imported for targets that have the op.
"""

from __future__ import annotations

import onnx_ir as ir

from ..builder import Builder
from ..layers.soft_moe import SoftMoESpec
from ..layers.stored import SoftMoELayer
from ..targets import TARGETS, Machine, Precision, Target
from .base import Lowering, SoftMoEPlan


def build(b: Builder, layer: SoftMoELayer, x: ir.Value) -> ir.Value:
    """Adds the layer around one fused node."""
    from .moe_layer import build as built

    return built(b, layer, x)


def _unable(spec: SoftMoESpec) -> str | None:
    from .moe_layer import unable

    return unable(spec)


def _no_kernel(precision: Precision, target: Target) -> str | None:
    record = TARGETS[target]
    if precision in record.moe or (precision in ("int8", "int4") and record.weight_only):
        return None
    return f"com.microsoft.MoE has no {precision.upper()} kernel there"


def _inexact(spec: SoftMoESpec, precision: Precision, target: Target) -> str | None:
    from .moe_op import inexact_gelu

    return inexact_gelu(spec, precision, target)


def _unfit(spec: SoftMoESpec, precision: Precision, target: Target) -> str | None:
    from .moe_layer import unfit

    return unfit(spec, precision, target)


def predict_us(plan: SoftMoEPlan, machine: Machine) -> float:
    """Returns the time to read the chosen experts once and compute their rows, in one node."""
    from .moe_layer import predict_us as predicted

    return predicted(plan, machine)


LOWERING = Lowering(
    name="fused",
    summary="ONNX Runtime's com.microsoft.MoE, each slot a token with one-hot router logits",
    needs=lambda target: bool(target.moe),
    build=build,
    predict_us=predict_us,
    unable=_unable,
    no_kernel=_no_kernel,
    inexact=_inexact,
    unfit=_unfit,
)
