"""Decides in what numbers each layer and the backbone compute, and narrows a traced model so.

What cannot be held stays wider, layer by layer, and every such decision keeps its reason: weights
beyond a 16-bit float's range or below it, and values that were observed to come too close.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from ..calibration.table import CalibrationTable
from ..errors import LoweringError, UsageError
from ..graphs.layers.base import MoELayer
from ..graphs.lower import simplify
from ..graphs.names import EXPERT_OUTPUTS, EXPERT_PRODUCTS, operand_of, range_key
from ..graphs.precision.backbone import QuantizedLinear, backbone_linears, quantize_backbone
from ..graphs.precision.fp16 import Fp32Node, beyond, misfit, to_fp16
from ..graphs.precision.types import (
    FLOAT_TYPES,
    FP32,
    HALF_TYPES,
    ComputeTypes,
    Precision,
    QuantizedProducts,
)
from ..graphs.precision.weights import CONVERTED, activation_scale
from .model import Model
from .options import ExportOptions

NO_FACTORS = "its weight tensor is held whole, and integer products are those of factors"


@dataclass(frozen=True, slots=True)
class LayerPrecision:
    """In what a layer computes, and why so."""

    precision: Precision
    reason: str
    compute: ComputeTypes


@dataclass(frozen=True)
class PrecisionPlan:
    """In what every part of a model computes."""

    layers: Mapping[str, LayerPrecision]
    fp32_nodes: tuple[Fp32Node, ...] = ()
    linears: tuple[QuantizedLinear, ...] = ()


def apply_precision(
    model: Model, traced: ir.Model, options: ExportOptions, table: CalibrationTable | None
) -> PrecisionPlan:
    """Narrows a traced model's backbone in place and returns the plan for it and for the layers.

    Raises `UsageError` for a precision that the target or the model cannot take, and where INT8
    has no ranges; `CalibrationError` for a table without a layer's ranges.
    """
    numbers, target = options.numbers, options.target
    numbers.check(target)
    unknown = numbers.floating - model.layers.keys()
    if unknown:
        raise UsageError(
            f"no MoE layer is called {', '.join(sorted(unknown))}",
            hint=f"the layers are {', '.join(model.layers)}",
        )
    layers = {name: _layer(name, layer, options, table) for name, layer in model.layers.items()}
    linears: list[QuantizedLinear] = []
    if numbers.precision == "int8" and numbers.scope == "all":
        assert table is not None
        linears = quantize_backbone(
            traced,
            list(backbone_linears(traced.graph)),
            table.range,
            numbers.quant_format(target),
            numbers.weight_quantization(target),
            FLOAT_TYPES[numbers.float_name(target)],
        )
    dtype = FLOAT_TYPES[numbers.float_name(target)]
    fp32_nodes: list[Fp32Node] = []
    if dtype in HALF_TYPES:
        peaks = {} if table is None else table.peaks
        fp32_nodes = to_fp16(traced, dtype, peaks=peaks, io=FLOAT_TYPES[numbers.io])
    if linears or fp32_nodes or dtype in HALF_TYPES:
        simplify(traced)
    return PrecisionPlan(layers, tuple(fp32_nodes), tuple(linears))


def _layer(
    name: str, layer: MoELayer, options: ExportOptions, table: CalibrationTable | None
) -> LayerPrecision:
    numbers, target = options.numbers, options.target
    float_name = numbers.float_name(target)
    inner = FLOAT_TYPES[float_name]
    problem = _overflow(name, layer, inner, table)
    if problem is not None:
        inner, float_name = ir.DataType.FLOAT, "fp32"
    kept = f"{problem}: kept in FP32" if problem else "asked for"
    if numbers.precision != "int8":
        return LayerPrecision(
            float_name, kept, ComputeTypes(inner) if inner != FP32.inner else FP32
        )
    if name in numbers.floating:
        measured = None if numbers.retention is None else numbers.retention.reason(name)
        reason = measured or "left out of the quantisation"
        around = f"; {problem}, so FP32" if problem else ""
        return LayerPrecision(float_name, f"{reason}{around}", ComputeTypes(inner))
    if table is None:
        raise no_ranges()
    form = numbers.quant_format(target)
    scales = {
        part.name: activation_scale(table.range(range_key(name, operand)), inner, qdq=form == "qdq")
        for part in layer.stored()
        if (operand := operand_of(part.name)) is not None
    }
    if not scales:
        raise LoweringError(
            f"layer {name}: --precision int8 does not serve this layer: {NO_FACTORS}",
            hint="use --precision fp16 or bf16 for a GPU, fp32 for a CPU",
        )
    quantized = QuantizedProducts(form, numbers.weight_quantization(target), scales)
    around = f"; {problem}, so FP32 around it" if problem else ""
    return LayerPrecision("int8", f"asked for{around}", ComputeTypes(inner, quantized))


def no_ranges() -> UsageError:
    """Returns the error for INT8 without a table and without inputs to make one from."""
    return UsageError(
        "--precision int8: ranges come from real inputs, and there are none",
        hint="give a feed with --data, or a table with --calibration",
    )


def _overflow(
    name: str, layer: MoELayer, inner: ir.DataType, table: CalibrationTable | None
) -> str | None:
    """Why a layer's experts cannot compute in a float type, or None."""
    if inner not in HALF_TYPES:
        return None
    for key, peak in _peaks(name, layer, table):
        if beyond(peak, inner):
            return f"{key} was seen to reach {peak:.3g}"
    for part in layer.stored():
        if part.name.startswith(CONVERTED):
            for array in part.parts:
                problem = misfit(array, inner)
                if problem is not None:
                    return f"{part.name}: {problem}"
    return None


def _peaks(
    name: str, layer: MoELayer, table: CalibrationTable | None
) -> Iterator[tuple[str, float]]:
    """What was observed within a layer: its name and its largest absolute value."""
    if table is None:
        return
    operands = [met for part in layer.stored() if (met := operand_of(part.name)) is not None]
    for tensor in (*operands[:1], EXPERT_PRODUCTS, *operands[1:], EXPERT_OUTPUTS):
        key = range_key(name, tensor)
        if key in table.ranges:
            yield key, table.ranges[key].peak
        elif key in table.peaks:
            yield key, table.peaks[key]


def precision_record(plan: PrecisionPlan, options: ExportOptions) -> dict[str, Any]:
    """Returns the record as plain data: empty for a model in FP32 throughout.

    `rest` is the float type of what is not quantised, `router` that of routers and gates;
    `fp32_nodes` are the nodes that stayed in FP32 for this model's weights or values,
    `usual_fp32_nodes` counts the others by op type. With INT8: how weights and activations are
    written, and `linears`, the backbone's, null where they are INT8 and the reason where not;
    `retention` (`retained.Retention`) where `--min-retention` was asked for.
    """
    numbers, target = options.numbers, options.target
    if numbers.precision == "fp32":
        return {}
    usual: dict[str, int] = {}
    for node in plan.fp32_nodes:
        if node.usual:
            usual[node.op_type] = usual.get(node.op_type, 0) + 1
    record: dict[str, Any] = {
        "rest": numbers.float_name(target),
        "router": "fp32",
        "io": numbers.io,
        "fp32_nodes": [asdict(node) for node in plan.fp32_nodes if not node.usual],
        "usual_fp32_nodes": usual,
    }
    if numbers.precision == "int8":
        weights, form = numbers.weight_quantization(target), numbers.quant_format(target)
        record |= {
            "form": form,
            "weights": f"{weights.dtype.name.lower()}, per expert and output channel, "
            f"-{weights.levels} to {weights.levels}",
            "activations": "int8, per tensor, symmetric" if form == "qdq" else "uint8, per tensor",
            "linears": {linear.node: linear.reason for linear in plan.linears},
        }
    if numbers.retention is not None:
        record["retention"] = numbers.retention.as_json()
    return record
