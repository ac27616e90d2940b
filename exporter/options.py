"""The options of an export: one record, checked by `refusals`. This module is cheap to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ..common.option import Request, option
from ..common.text import split_list
from ..errors import LoweringError, UsageError
from ..graphs.k import K, KOption, parse_k
from ..graphs.sizes import Sizes
from ..graphs.targets import (
    CPU_PROVIDER,
    QDQ,
    TARGETS,
    FloatName,
    Method,
    Precision,
    QuantFormat,
    Scope,
    Target,
)
from .requests import FEED, AnyPath, AxisSizes

if TYPE_CHECKING:
    from ..calibration.table import CalibrationTable
    from ..data.batches import Feed
    from ..graphs.edits import Edits
    from ..graphs.precision.types import WeightQuantization
    from .bundle.parity import Tolerance
    from .tensorrt.options import EngineOptions

WEIGHT_BITS = (7, 8)

MIN_OPSET, MAX_OPSET = 20, 23
"""The first is the default, unless an op of a later opset replaces many nodes."""

BLOCKED_OPSET = 21
"""The first opset in which DequantizeLinear supports INT4 and blocks."""

CALIBRATED = ("int8", "fp8", "fp16")
"""Precisions for which ranges are found: to quantise, or to detect overflows."""

VERIFY_SAMPLES = 256
"""The number of inputs of a feed that are compared, unless `--verify-samples` sets it."""

AUTO = "auto"
TUNE = "tune"
CHOOSERS = (AUTO, TUNE)
"""How a lowering is chosen: by prediction, or by measurement here (`tune`)."""

RoutingName = Literal["chosen", "scores"]
"""The part of a layer's routing that is an output: its choices, or also its scores."""


def _no_edits() -> Edits:
    from ..graphs.edits import NO_EDITS

    return NO_EDITS


@dataclass(frozen=True, kw_only=True)  # slots would prevent cached properties
class ExportOptions(AxisSizes, Request):
    """Which graphs of a model are written, how they are checked, and which are compiled.

    The fields are the options of `export` as given; properties parse them. A plugin's options set
    the fields without an option (`bundle.steps`): `layer_lowerings` maps layers to a lowering and
    the reason for it; `edits` are made to the model. `destination` is None if no bundle is to be
    kept. Invalid options are refused before the work begins (`refusals`).
    """

    offered: ClassVar[frozenset[str]] = frozenset({"export"})

    k: K = option(
        "n",
        "Experts to compute of each layer's n: a number (4), a share (0.25, n/4), all (n), a "
        "number per layer (4,4,8), or input, which makes k an input of the graph. For token-routed "
        "models, n and shares refer to the k that the router was trained with.",
    )
    target: Target = option(
        "onnx", "The runtime of the graph; onnx means any of them, with standard ops."
    )
    lowering: str = option(
        "auto",
        "How to compute the experts: auto (predicted to be fastest), tune (measures "
        "them), or a name (dense, gather, grouped, ...); a,b writes one graph each.",
    )
    batch: Sizes = option(
        "1:1:32", "The range of batch sizes, optimised for OPT; one number fixes the axis."
    )
    tokens: Sizes = option(
        "1:196:1024", "The same for the number of tokens, if that axis is dynamic."
    )
    renormalize: bool = option(False, "Divide the selected combine weights by their sum.")
    expose_routing: bool | RoutingName = option(
        False,
        "Add the selected experts of every layer as outputs of the graphs and their engines; for a "
        "muMoE layer, its coefficients. scores: also their scores (D, C and its column sums; "
        "all coefficients; or the gates).",
    )
    precision: Precision = option(
        "fp32",
        "The precision of the graph. int8 and fp8 (engines only) need data or a calibration; int4 "
        "quantises the weights only.",
    )
    quantize: Scope = option("experts", "What to quantise: the experts, or all linear layers.")
    method: Method | None = option(
        None, "How to choose INT8 ranges from the data.", unset="percentile"
    )
    calibration: CalibrationTable | AnyPath | None = option(
        None, "INT8 ranges that calibrate found, or their file.", unset="none", is_path=True
    )
    keep_floating: Sequence[str] = option(
        (), "Names of MoE layers to keep in floating point.", unset="none", in_shell=False
    )
    min_retention: float | None = option(
        None,
        "The share of FP32's accuracy to keep, above 0 and up to 1; sensitive layers then stay in "
        "floating point.",
        unset="all are INT8",
    )
    data: Feed | None = option(None, FEED, unset="a few random ones", compare=False)
    atol: float | None = option(None, "The largest absolute difference from PyTorch.", unset="0")
    rtol: float | None = option(
        None,
        "The largest difference from PyTorch relative to max|y|.",
        unset="FP32 1e-4, FP16 0.01, BF16 0.05, INT8 0.1",
    )
    verify_samples: int | None = option(
        None, "The largest number of inputs to compare.", unset="256"
    )
    verify: bool = option(
        True,
        "Compare every graph with PyTorch; a mismatch is an error.",
        flag="--verify/--no-verify",
    )
    threads: int | None = option(
        None,
        "Threads of PyTorch and ONNX Runtime.",
        unset="those with which the untouched model is fastest",
    )
    rest: FloatName | None = option(
        None, "The float type of everything that is not quantised.", unset="fp32; for TensorRT fp16"
    )
    weight_bits: int | None = option(
        None,
        "Bits of INT8 weights on CPUs: 7, or 8, which is slower without VNNI.",
        unset="7; for TensorRT 8",
    )
    io_precision: FloatName = option("fp32", "The type of the graph's float inputs and outputs.")
    opset: int | None = option(
        None, "The ONNX opset, 20 to 23.", unset="20; 23 for language models with --target ort-cpu"
    )
    engine: EngineOptions | bool | None = option(
        None,
        "Compile TensorRT engines, with the options of `build`; in Python, `EngineOptions`.",
        unset="if the target has engines and this machine can build them",
        flag="--engine/--no-engine",
    )
    force: bool = option(False, "Replace an existing bundle.")
    layer_lowerings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    edits: Edits = field(default_factory=_no_edits)
    destination: Path | None = None

    @cached_property
    def kept(self) -> KOption:
        """k, parsed."""
        return parse_k(self.k)

    @property
    def shown_routing(self) -> RoutingName | None:
        """The part of the routing that is an output of the graphs."""
        shown = self.expose_routing
        return shown if isinstance(shown, str) else "chosen" if shown else None

    @cached_property
    def lowerings(self) -> tuple[str, ...]:
        """The graphs to write, each `auto`, `tune` or a lowering; the first is `model.onnx`."""
        return parse_lowerings(self.lowering)

    @property
    def least_opset(self) -> int:
        """The opset of the graph, unless an op of a later opset replaces many small ones.

        If `opset` is set, it is exactly that one.
        """
        return self.needed_opset if self.opset is None else self.opset

    @property
    def needed_opset(self) -> int:
        """The first opset that supports the precision."""
        blocked = self.precision == "int4" and TARGETS[self.target].standard_ops
        return BLOCKED_OPSET if blocked else MIN_OPSET

    @property
    def data_reads(self) -> int:
        """How many times an export reads its data: for ranges, comparison and accuracy."""
        ranges = self.finds_ranges and self.calibration is None
        return ranges + self.verify + (self.min_retention is not None)

    @property
    def finds_ranges(self) -> bool:
        """Whether this precision needs the value ranges of tensors."""
        stored = self.fp16_weights or self.in_blocks
        return self.precision in CALIBRATED and not stored

    @property
    def floating(self) -> frozenset[str]:
        """The MoE layers that are not quantised."""
        return frozenset(self.keep_floating)

    @property
    def integers(self) -> bool:
        """Whether weights are quantised to integers."""
        return self.precision in ("int8", "int4", "fp8")

    @property
    def ranged(self) -> bool:
        """Whether both factors of a product have eight bits; this needs value ranges."""
        return self.precision in ("int8", "fp8") and not self.in_blocks

    @property
    def in_blocks(self) -> bool:
        """Whether only weights are quantised, with a scale for each block of a column."""
        weight_only = TARGETS[self.target].weight_only
        return self.precision == "int4" or (self.precision == "int8" and weight_only)

    @property
    def float_name(self) -> FloatName:
        """The float type of everything that is not quantised."""
        match self.precision:
            case "int8" | "int4" | "fp8":
                return self.rest or TARGETS[self.target].rest
            case _:
                return self.precision

    @property
    def fp16_weights(self) -> bool:
        """Whether weights are stored in FP16 but everything is computed in FP32."""
        return self.float_name == "fp16" and TARGETS[self.target].provider == CPU_PROVIDER

    @property
    def narrow_cache(self) -> bool:
        """Whether keys and values in the cache have the type in which the graph computes them.

        Casting them would launch a kernel for every layer and token.
        """
        return self.float_name == "fp16" and TARGETS[self.target].launches

    @property
    def quant_format(self) -> QuantFormat:
        """How integer products are written for the target."""
        return TARGETS[self.target].integers

    @property
    def weight_quantization(self) -> WeightQuantization:
        """The integers of weights for the target."""
        from ..graphs.precision import types

        if self.precision == "fp8":
            return types.EIGHT_BIT_FLOATS
        if TARGETS[self.target].compiled:
            return types.EIGHT_BITS
        if self.weight_bits != WEIGHT_BITS[1]:
            return types.SEVEN_BITS
        return types.EIGHT_BITS if self.quant_format in QDQ else types.EIGHT_BITS_UNSIGNED

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on the precision on the target."""
        note = TARGETS[self.target].notes.get(self.precision)
        return () if note is None else (note,)

    @property
    def samples_to_verify(self) -> int:
        """The largest number of inputs of a feed that are compared."""
        return self.verify_samples or VERIFY_SAMPLES

    @property
    def tolerance(self) -> Tolerance:
        """The bounds of the parity check: the requested ones, or those of the precision.

        The check passes if |difference| ≤ atol + rtol · max|y|.
        """
        from .bundle.parity import TOLERANCES

        return TOLERANCES[self.precision].with_user_bounds(self.atol, self.rtol)

    @property
    def bounded_by_rounding(self) -> bool:
        """Whether FP32 graphs may differ from float64 only by rounding."""
        return self.precision == "fp32" and self.atol is None and self.rtol is None


def parse_lowerings(text: str) -> tuple[str, ...]:
    """Returns the names of a comma-separated list; `UsageError` for an unknown name."""
    names = tuple(split_list(text))
    if not names:
        raise UsageError("--lowering is empty", hint="--lowering auto lets the cost model choose")
    for name in names:
        if name not in CHOOSERS:
            from ..graphs.lowerings import check_name  # loaded if one is named

            try:
                check_name(name)
            except LoweringError as error:
                raise UsageError(f"--lowering {name}: {error.message}", hint=error.hint) from None
    return names
