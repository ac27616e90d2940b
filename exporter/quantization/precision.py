"""Decides the precision of each layer and of the backbone, and converts a traced model to it.

Parts that a 16-bit float cannot represent stay in FP32, layer by layer, with a recorded reason:
weights that are too large or too small, and observed values close to the limit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import onnx_ir as ir

from ...graphs.layers.base import MoELayer
from ...graphs.lower import simplify
from ...graphs.names import EXPERT_OUTPUTS, EXPERT_PRODUCTS, operand_of, range_key
from ...graphs.precision.types import (
    DYNAMIC_ROW,
    FLOAT_TYPES,
    HALF_TYPES,
    INT4_BLOCK,
    INT8_LEVELS,
    Bits,
    BlockedWeights,
    ComputeTypes,
    QuantizedProducts,
    Scale,
    block_of,
)
from ...graphs.precision.weights import CONVERTED_PREFIXES, activation_scale, not_in_blocks
from ...graphs.targets import TARGETS, FloatName, QuantFormat
from ..bundle.manifest import Fp32NodeRecord, Numbers
from ..job import ExportJob
from ..options import ExportOptions

if TYPE_CHECKING:
    from ...calibration.table import CalibrationTable
    from ...graphs.precision.backbone import QuantizedLinear
    from ...graphs.precision.fp16 import Fp32Node

Measure = Literal["accuracy", "agreement", "cosine"]

BACKBONE = "the linear layers outside the MoE layers"
"""The part of a model that `--quantize all` quantises as a whole, besides the MoE layers."""

_MEASURES: dict[Measure, str] = {
    "accuracy": "accuracy over FP32's on {n} labelled inputs",
    "agreement": "share of {n} inputs without labels that get FP32's class",
    "cosine": "mean cosine with FP32's outputs on {n} inputs",
}


@dataclass(frozen=True, slots=True)
class KeptPart:
    """A part that stayed in floats, and the insufficient retention while it was in INT8."""

    name: str
    before: float


@dataclass(frozen=True, slots=True)
class Retention:
    """The share of the FP32 model's answers on the inputs of a feed that INT8 retains.

    `reached` is the value of `measure` (see `accuracy_search.ReferenceOutputs`) on `samples` inputs
    with the parts `kept` in `floats`, in the order in which they became floats. If `whole`, nothing
    is left in INT8.
    """

    asked: float
    reached: float
    measure: Measure
    samples: int
    floats: FloatName
    kept: tuple[KeptPart, ...]
    whole: bool

    def reason(self, layer: str) -> str | None:
        """Returns why a layer stayed in floats; None if it is INT8."""
        for part in self.kept:
            if part.name == layer:
                return (
                    f"kept in {self.floats} for --min-retention {self.asked:g}: only "
                    f"{part.before:.4f} with it in INT8"
                )
        return None

    def notes(self) -> tuple[str, ...]:
        """Returns notes for users: the retention, its measure and its cost."""
        names = ", ".join(part.name for part in self.kept) or "nothing"
        measure = _MEASURES[self.measure].format(n=self.samples)
        notes = [
            f"--min-retention {self.asked:g}: reached {self.reached:.4f} "
            f"({measure}); kept in {self.floats}: {names}"
        ]
        if self.whole:
            notes.append(f"nothing is left in INT8, so --precision {self.floats} writes the same")
        if 0 < 1 - self.asked < 1 / self.samples:
            notes.append(
                f"each of {self.samples} inputs is {1 / self.samples:.2g} of the retention: "
                "more inputs in --data make it more precise"
            )
        return tuple(notes)


@dataclass(frozen=True)
class PrecisionPlan:
    """The precision of every part of a model; `retention` is the result of `--min-retention`."""

    layers: Mapping[str, ComputeTypes]
    fp32_nodes: tuple[Fp32Node, ...] = ()
    linears: tuple[QuantizedLinear, ...] = ()
    retention: Retention | None = None


def quantised_parts(job: ExportJob) -> list[str]:
    """Returns the parts to quantise: the MoE layers, and `BACKBONE` with `--quantize all`."""
    options = job.options
    layers = [name for name in job.model.layers if name not in options.floating]
    return [*layers, BACKBONE] if options.quantize == "all" else layers


def apply_precision(
    job: ExportJob,
    traced: ir.Model,
    table: CalibrationTable | None,
    *,
    floats: Collection[str] = (),
    retention: Retention | None = None,
) -> PrecisionPlan:
    """Converts a traced model's backbone in place; returns the plan for it and for the layers.

    `floats` are parts that stay in floats although the job requests INT8, in addition to those in
    `retention`, which also has the reasons. Raises `CalibrationError` for a table without a layer's
    ranges.
    """
    options = job.options
    quantised = {*quantised_parts(job)} - {*floats}
    if retention is not None:
        quantised -= {part.name for part in retention.kept}
    layers = {}
    for name, layer in job.model.layers.items():
        kept = None if retention is None else retention.reason(name)
        reason = None if name in quantised else kept or "excluded from quantisation"
        layers[name] = _layer_types(name, layer, options, table, reason)
    linears, fp32_nodes = [], []
    if BACKBONE in quantised:
        linears = _convert_linears(job, traced, table)
    half = FLOAT_TYPES[options.float_name] in HALF_TYPES
    if half:
        fp32_nodes = _convert_to_half(options, traced, table)
    if linears or half:
        simplify(traced)
    return PrecisionPlan(
        layers=layers, fp32_nodes=tuple(fp32_nodes), linears=tuple(linears), retention=retention
    )


def _convert_linears(
    job: ExportJob, traced: ir.Model, table: CalibrationTable | None
) -> list[QuantizedLinear]:
    """Converts the backbone's linear layers to integers, if supported; returns their records."""
    from ...graphs.precision.backbone import backbone_linears, block_backbone, quantize_backbone

    options, products = job.options, list(backbone_linears(traced.graph))
    target = TARGETS[options.target]
    if options.in_blocks:
        return block_backbone(
            traced, products, options.quant_format, _bits(options), on_gpu=target.weight_only
        )
    if not options.ranged:
        return []
    return quantize_backbone(
        traced,
        products,
        None if table is None else table.range,
        options.quant_format,
        options.weight_quantization,
        FLOAT_TYPES[options.float_name],
        by_token=job.writes_text and target.new_kernels,
    )


def _convert_to_half(
    options: ExportOptions, traced: ir.Model, table: CalibrationTable | None
) -> list[Fp32Node]:
    """Converts the backbone to a 16-bit float; returns the nodes that stay in FP32."""
    from ...graphs.precision.fp16 import to_fp16

    dtype, target = FLOAT_TYPES[options.float_name], TARGETS[options.target]
    return to_fp16(
        traced,
        dtype,
        peaks={} if table is None or options.fp16_weights else table.peaks,
        io=FLOAT_TYPES[options.io_precision],
        attention=dtype == ir.DataType.BFLOAT16 and target.bf16_attention,
        wide_sums=target.fused.wide_sums,
        narrow_cache=options.narrow_cache,
    )


def _layer_types(
    name: str,
    layer: MoELayer,
    options: ExportOptions,
    table: CalibrationTable | None,
    float_reason: str | None,
) -> ComputeTypes:
    """Returns a layer's types; `float_reason` is why it stays in floats despite INT8."""
    inner = FLOAT_TYPES[options.float_name]
    observed = None if options.fp16_weights else table  # FP32 represents all observed values
    problem = _overflow(name, layer, inner, observed)
    if problem is not None:
        inner = ir.DataType.FLOAT
    if options.in_blocks:
        return _blocked_types(layer, options, float_reason, problem)
    if not options.ranged:
        return ComputeTypes(inner, reason=f"{problem}: kept in FP32" if problem else "requested")
    suffix = f"; {problem}: kept in FP32" if problem else ""
    if float_reason is not None:
        return ComputeTypes(inner, reason=f"{float_reason}{suffix}")
    form = options.quant_format
    dynamic = layer.spec.dynamic_int8 and form != "qdq"

    weights = options.weight_quantization
    levels = weights.levels if weights.floats else INT8_LEVELS

    def scale(operand: str) -> Scale:
        if dynamic:
            return DYNAMIC_ROW
        assert table is not None, "a job without ranges is refused (`export_job`)"
        observed = table.range(range_key(name, operand))
        return activation_scale(observed, inner, qdq=form == "qdq", levels=levels)

    scales = {
        part.name: scale(operand)
        for part in layer.stored()
        if (operand := operand_of(part.name)) is not None
    }
    quantised = QuantizedProducts(format=form, weights=weights, inputs=scales, dynamic=dynamic)
    suffix = f"; {problem}: other operators in FP32" if problem else ""
    return ComputeTypes(inner, quantized=quantised, reason=f"requested{suffix}")


def _bits(options: ExportOptions) -> Bits:
    return 4 if options.precision == "int4" else 8


def _blocked_types(
    layer: MoELayer, options: ExportOptions, float_reason: str | None, overflow: str | None
) -> ComputeTypes:
    """Returns the types of a layer with blocked expert weights, if their rows are whole blocks.

    `overflow` is why the experts cannot compute in the surrounding float type, or None.
    """
    target, on_gpu = TARGETS[options.target], TARGETS[options.target].weight_only
    # An engine and a GPU compute in their usual float; ONNX Runtime's CPU kernels in FP32.
    floats = options.float_name if target.compiled or on_gpu else "fp32"
    if on_gpu and overflow is not None:
        return ComputeTypes(reason=f"{overflow}: kept in FP32")
    inner = FLOAT_TYPES[floats]
    if float_reason is not None:
        return ComputeTypes(inner, reason=float_reason)
    form = options.quant_format
    problem = not_in_blocks(layer.stored(), form)
    if problem is not None:
        return ComputeTypes(inner, reason=f"{problem}: kept in {floats.upper()}")
    shapes = {p.name: p.shape for p in layer.stored() if operand_of(p.name) is not None}
    bits = _bits(options)
    block = block_of(form, (shape[-2] for shape in shapes.values()), bits, on_gpu=on_gpu)
    assert block is not None  # each of them is a multiple of the smallest block
    blocked = BlockedWeights(form, frozenset(shapes), block, bits, on_gpu)
    return ComputeTypes(inner, blocked=blocked, reason="requested")


def _overflow(
    name: str, layer: MoELayer, inner: ir.DataType, table: CalibrationTable | None
) -> str | None:
    """Returns why a layer's experts cannot compute in a float type, or None."""
    if inner not in HALF_TYPES:
        return None
    from ...graphs.precision.fp16 import lacks_headroom, misfit

    operands = [o for part in layer.stored() if (o := operand_of(part.name)) is not None]
    for tensor in (*operands[:1], EXPERT_PRODUCTS, *operands[1:], EXPERT_OUTPUTS):
        key = range_key(name, tensor)
        peak = None
        if table is not None:
            peak = table.ranges[key].peak if key in table.ranges else table.peaks.get(key)
        if peak is not None and lacks_headroom(peak, inner):
            return f"{key} reached {peak:.3g} in calibration"
    for part in layer.stored():
        if part.name.startswith(CONVERTED_PREFIXES):
            for array in part.parts:
                problem = misfit(array, inner)
                if problem is not None:
                    return f"{part.name}: {problem}"
    return None


def _activations(plan: PrecisionPlan, form: QuantFormat) -> str:
    if form == "qdq":
        return "int8, per tensor, symmetric"
    quantised = [layer.quantized for layer in plan.layers.values()]
    dynamic = {layer.dynamic for layer in quantised if layer is not None} or {False}
    words = {False: "uint8, per tensor", True: "uint8, per row, scaled at run time"}
    return "; ".join(words[way] for way in sorted(dynamic))


def precision_record(plan: PrecisionPlan, options: ExportOptions) -> Numbers:
    """Returns the record as plain data: empty for a model in FP32 throughout.

    `rest` is the float type of parts that are not quantised, `router` that of routers and gates;
    `fp32_nodes` are the nodes that stayed in FP32 because of this model's weights or values,
    `usual_fp32_nodes` counts the others by op type. With INT8 there are the encodings of weights
    and activations, and the backbone's `linears` with null for INT8 or the reason for floats;
    `retention` (`Retention`) if `--min-retention` was given.
    """
    if options.precision == "fp32":
        return {}
    usual: dict[str, int] = {}
    for node in plan.fp32_nodes:
        if node.usual:
            usual[node.op_type] = usual.get(node.op_type, 0) + 1
    record: Numbers = {
        "rest": options.float_name,
        "router": "fp32",
        "io": options.io_precision,
        "fp32_nodes": [
            Fp32NodeRecord(
                node=node.node, op_type=node.op_type, reason=node.reason, usual=node.usual
            )
            for node in plan.fp32_nodes
            if not node.usual
        ],
        "usual_fp32_nodes": usual,
    }
    if options.in_blocks:
        blocked = (layer.blocked for layer in plan.layers.values())
        sizes = " or ".join(str(size) for size in sorted({b.block for b in blocked if b}))
        record |= {
            "form": options.quant_format,
            "weights": f"{options.precision}, per expert, in blocks of {sizes or INT4_BLOCK} of "
            "each output channel",
            "activations": options.float_name,
            "linears": {linear.node: linear.reason for linear in plan.linears},
        }
    if options.ranged:
        weights, form = options.weight_quantization, options.quant_format
        record |= {
            "form": form,
            "weights": f"{weights.dtype.name.lower()}, per expert and output channel, "
            f"-{weights.levels} to {weights.levels}",
            "activations": _activations(plan, form),
            "linears": {linear.node: linear.reason for linear in plan.linears},
        }
    if plan.retention is not None:
        record["retention"] = asdict(plan.retention)
    return record
