"""Decides the precision of each layer and of the backbone, and converts a traced model to it.

What a 16-bit float cannot hold stays in FP32, layer by layer, and the reason is kept: weights that
are too large or too small, and values that were observed to come close to that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import onnx_ir as ir

from ...calibration.table import CalibrationTable
from ...graphs.layers.base import MoELayer
from ...graphs.lower import simplify
from ...graphs.names import EXPERT_OUTPUTS, EXPERT_PRODUCTS, operand_of, range_key
from ...graphs.precision.backbone import (
    QuantizedLinear,
    backbone_linears,
    block_backbone,
    quantize_backbone,
)
from ...graphs.precision.fp16 import Fp32Node, beyond, misfit, to_fp16
from ...graphs.precision.types import (
    DYNAMIC_ROW,
    FLOAT_TYPES,
    HALF_TYPES,
    INT4_BLOCK,
    INT8_LEVELS,
    BlockedWeights,
    ComputeTypes,
    QuantizedProducts,
    Scale,
    block_of,
)
from ...graphs.precision.weights import CONVERTED, activation_scale, not_in_blocks
from ...graphs.targets import TARGETS, FloatName, QuantFormat
from ..bundle.manifest import Fp32NodeRecord, Numbers
from ..job import ExportJob
from ..options import ExportOptions

Measure = Literal["accuracy", "agreement", "cosine"]

BACKBONE = "the linear layers outside the MoE layers"
"""The part of a model that `--quantize all` adds to its MoE layers, all together."""

_MEASURES: dict[Measure, str] = {
    "accuracy": "accuracy over FP32's on {n} labelled inputs",
    "agreement": "share of {n} inputs without labels that get FP32's class",
    "cosine": "mean cosine with FP32's outputs on {n} inputs",
}


@dataclass(frozen=True, slots=True)
class KeptPart:
    """A part that stayed in floats, and the retention that was too low while it was INT8."""

    name: str
    before: float


@dataclass(frozen=True, slots=True)
class Retention:
    """What INT8 keeps of what the FP32 model answers on the inputs of a feed.

    `reached` is `measure` (`accuracy_search.ReferenceOutputs`) over `samples` inputs, with the
    parts `kept` in `floats`, in the order in which they were given up. `whole`: nothing is left in
    INT8.
    """

    asked: float
    reached: float
    measure: Measure
    samples: int
    floats: FloatName
    kept: tuple[KeptPart, ...]
    whole: bool

    def reason(self, layer: str) -> str | None:
        """Why a layer stayed in floats, None where it is INT8."""
        for part in self.kept:
            if part.name == layer:
                return (
                    f"kept in {self.floats} for --min-retention {self.asked:g}: {part.before:.4f} "
                    "with it in INT8"
                )
        return None

    def notes(self) -> tuple[str, ...]:
        """Returns what a user should know: what was reached, by which measure, at what price."""
        names = ", ".join(part.name for part in self.kept) or "nothing"
        notes = [
            f"--min-retention {self.asked:g}: {self.reached:.4f} reached "
            f"({self.how}); kept in {self.floats}: {names}"
        ]
        if self.whole:
            notes.append(f"nothing is left in INT8: --precision {self.floats} writes the same")
        if 0 < 1 - self.asked < 1 / self.samples:
            notes.append(
                f"one of {self.samples} inputs is {1 / self.samples:.2g} of the retention: more "
                "inputs in --data measure it more finely"
            )
        return tuple(notes)

    @property
    def how(self) -> str:
        """The measure in words."""
        return _MEASURES[self.measure].format(n=self.samples)

    @property
    def names(self) -> frozenset[str]:
        """The parts that stayed in floats."""
        return frozenset(part.name for part in self.kept)


@dataclass(frozen=True)
class PrecisionPlan:
    """In what every part of a model computes; `retention` is what `--min-retention` found."""

    layers: Mapping[str, ComputeTypes]
    fp32_nodes: tuple[Fp32Node, ...] = ()
    linears: tuple[QuantizedLinear, ...] = ()
    retention: Retention | None = None


def quantised_parts(job: ExportJob) -> list[str]:
    """Returns what a job asks to be INT8: its MoE layers, and `BACKBONE` with `--quantize all`."""
    precision = job.options.precision
    layers = [name for name in job.model.layers if name not in precision.floating]
    return [*layers, BACKBONE] if precision.scope == "all" else layers


def apply_precision(
    job: ExportJob,
    traced: ir.Model,
    table: CalibrationTable | None,
    *,
    floats: Collection[str] = (),
    retention: Retention | None = None,
) -> PrecisionPlan:
    """Narrows a traced model's backbone in place and returns the plan for it and for the layers.

    `floats` are parts that stay in floats although the job asks for INT8, and those of `retention`,
    which tells why. Raises `CalibrationError` for a table without a layer's ranges.
    """
    precision, target = job.options.precision, job.options.target
    quantised = {*quantised_parts(job)} - {*floats}
    if retention is not None:
        quantised -= retention.names
    layers = {}
    for name, layer in job.model.layers.items():
        kept = None if retention is None else retention.reason(name)
        reason = None if name in quantised else kept or "left out of the quantisation"
        layers[name] = _layer(name, layer, job.options, table, reason)
    dtype = FLOAT_TYPES[precision.float_name(target)]
    linears: list[QuantizedLinear] = []
    if precision.name == "int4" and BACKBONE in quantised:
        products = list(backbone_linears(traced.graph))
        linears = block_backbone(traced, products, precision.quant_format(target))
    if precision.ranged and BACKBONE in quantised:
        linears = quantize_backbone(
            traced,
            list(backbone_linears(traced.graph)),
            None if table is None else table.range,
            precision.quant_format(target),
            precision.weight_quantization(target),
            dtype,
            by_token=job.writes_text and TARGETS[target].new_kernels,
        )
    fp32_nodes: list[Fp32Node] = []
    if dtype in HALF_TYPES:
        peaks = {} if table is None or precision.fp16_weights(target) else table.peaks
        joined = dtype == ir.DataType.BFLOAT16 and TARGETS[target].bf16_attention
        fp32_nodes = to_fp16(
            traced, dtype, peaks=peaks, io=FLOAT_TYPES[precision.io], attention=joined
        )
    if linears or dtype in HALF_TYPES:
        simplify(traced)
    return PrecisionPlan(
        layers=layers, fp32_nodes=tuple(fp32_nodes), linears=tuple(linears), retention=retention
    )


def _layer(
    name: str,
    layer: MoELayer,
    options: ExportOptions,
    table: CalibrationTable | None,
    left_out: str | None,
) -> ComputeTypes:
    """The numbers of a layer; `left_out` is why it stays in floats where INT8 is asked for."""
    precision, target = options.precision, options.target
    inner = FLOAT_TYPES[precision.float_name(target)]
    seen_by = None if precision.fp16_weights(target) else table  # FP32 holds what was seen
    problem = _overflow(name, layer, inner, seen_by)
    if problem is not None:
        inner = ir.DataType.FLOAT
    if precision.name == "int4":
        return _in_blocks(layer, options, left_out)
    if not precision.ranged:
        return ComputeTypes(inner, reason=f"{problem}: kept in FP32" if problem else "asked for")
    around = f"; {problem}, so FP32" if problem else ""
    if left_out is not None:
        return ComputeTypes(inner, reason=f"{left_out}{around}")
    form = precision.quant_format(target)
    dynamic = layer.spec.dynamic_int8 and form != "qdq"

    weights = precision.weight_quantization(target)
    levels = weights.levels if weights.floats else INT8_LEVELS

    def scale(operand: str) -> Scale:
        if dynamic:
            return DYNAMIC_ROW
        assert table is not None, "a job without ranges is refused (`export_job`)"
        seen = table.range(range_key(name, operand))
        return activation_scale(seen, inner, qdq=form == "qdq", levels=levels)

    scales = {
        part.name: scale(operand)
        for part in layer.stored()
        if (operand := operand_of(part.name)) is not None
    }
    quantised = QuantizedProducts(format=form, weights=weights, inputs=scales, dynamic=dynamic)
    around = f"{around} around it" if around else ""
    return ComputeTypes(inner, quantized=quantised, reason=f"asked for{around}")


def _in_blocks(layer: MoELayer, options: ExportOptions, left_out: str | None) -> ComputeTypes:
    """A layer's experts with weights of four bits, unless their rows are not whole blocks."""
    target = options.target
    # An engine computes in its usual float; ONNX Runtime's CPU kernels in FP32.
    floats = options.precision.float_name(target) if TARGETS[target].compiled else "fp32"
    inner = FLOAT_TYPES[floats]
    if left_out is not None:
        return ComputeTypes(inner, reason=left_out)
    form = options.precision.quant_format(target)
    problem = not_in_blocks(layer.stored(), form)
    if problem is not None:
        return ComputeTypes(inner, reason=f"{problem}: kept in {floats.upper()}")
    shapes = {p.name: p.shape for p in layer.stored() if operand_of(p.name) is not None}
    block = block_of(form, (shape[-2] for shape in shapes.values()))
    assert block is not None  # each of them is whole blocks of the smallest size
    blocked = BlockedWeights(format=form, weights=frozenset(shapes), block=block)
    return ComputeTypes(inner, blocked=blocked, reason="asked for")


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


def _activations(plan: PrecisionPlan, form: QuantFormat) -> str:
    """How what meets integer weights is written, in words."""
    if form == "qdq":
        return "int8, per tensor, symmetric"
    quantised = [layer.quantized for layer in plan.layers.values()]
    ways = {layer.dynamic for layer in quantised if layer is not None} or {False}
    words = {False: "uint8, per tensor", True: "uint8, per row, found while the graph runs"}
    return "; ".join(words[way] for way in sorted(ways))


def precision_record(plan: PrecisionPlan, options: ExportOptions) -> Numbers:
    """Returns the record as plain data: empty for a model in FP32 throughout.

    `rest` is the float type of what is not quantised, `router` that of routers and gates;
    `fp32_nodes` are the nodes that stayed in FP32 for this model's weights or values,
    `usual_fp32_nodes` counts the others by op type. With INT8: how weights and activations are
    written, and `linears`, the backbone's, null where they are INT8 and the reason where not;
    `retention` (`Retention`) where `--min-retention` was asked for.
    """
    precision, target = options.precision, options.target
    if precision.name == "fp32":
        return {}
    usual: dict[str, int] = {}
    for node in plan.fp32_nodes:
        if node.usual:
            usual[node.op_type] = usual.get(node.op_type, 0) + 1
    record: Numbers = {
        "rest": precision.float_name(target),
        "router": "fp32",
        "io": precision.io,
        "fp32_nodes": [
            Fp32NodeRecord(
                node=node.node, op_type=node.op_type, reason=node.reason, usual=node.usual
            )
            for node in plan.fp32_nodes
            if not node.usual
        ],
        "usual_fp32_nodes": usual,
    }
    if precision.name == "int4":
        blocked = (layer.blocked for layer in plan.layers.values())
        sizes = " or ".join(str(size) for size in sorted({b.block for b in blocked if b}))
        record |= {
            "form": precision.quant_format(target),
            "weights": f"int4, per expert, in blocks of {sizes or INT4_BLOCK} of each output "
            "channel",
            "activations": precision.float_name(target),
            "linears": {linear.node: linear.reason for linear in plan.linears},
        }
    if precision.ranged:
        weights, form = precision.weight_quantization(target), precision.quant_format(target)
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
