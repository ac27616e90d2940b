"""The search space: k, experts and precision of each MoE layer, and the precision of the rest.

A `Point` is one model of a `Space`; a `Space` has the choices that a target supports.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ...errors import MoexportError, UsageError
from ...exporter.bundle.runtimes import RUNTIMES, check_computes
from ...exporter.bundle.weights import layer_bytes
from ...exporter.job import ExportJob, layers_to_plan
from ...exporter.model import edited
from ...exporter.options import ExportOptions
from ...exporter.quantization.precision import PrecisionPlan, apply_precision
from ...graphs.layers.base import MoELayer
from ...graphs.layers.mumoe import MuMoESpec
from ...graphs.precision.types import FP32
from ...graphs.targets import Precision, Scope, Target, runtime_of
from .accuracy.quality import Quality
from .recipe import LayerRecipe, Recipe, recipe_options
from .request import TuneRequest
from .routed import can_choose_k, routed_layers

BACKBONE = ""
"""The name of the network around the MoE layers, as a part of the model."""

INTEGERS: tuple[Precision, ...] = ("int8", "int4")
"""Precisions that apply to single parts of a model; floats apply to the whole model."""

RANGED: tuple[Precision, ...] = ("int8", "fp16")
"""Precisions that need the table of ranges: to quantise, or to find overflows."""


@dataclass(frozen=True, slots=True)
class Point:
    """A whole model that can be exported: a choice for each layer, and the rest's precision.

    `quantize` is `all` if the linear layers outside the MoE layers also compute in integers.
    `around` is the precision outside the MoE layers. All integers have the same width.
    """

    layers: tuple[tuple[str, LayerRecipe], ...]
    target: Target
    quantize: Scope = "experts"
    around: Precision = "fp32"

    @property
    def choices(self) -> dict[str, LayerRecipe]:
        return dict(self.layers)

    @property
    def k(self) -> dict[str, int]:
        return {name: choice.k for name, choice in self.layers}

    @property
    def precision(self) -> Precision:
        """The precision of the export: that of its integers, if there are any."""
        names = {choice.precision for _, choice in self.layers} | {self.around}
        return next((name for name in ("int4", "int8", "fp16", "bf16") if name in names), "fp32")

    def text(self, experts: Mapping[str, int]) -> str:
        """Describes each layer and the runtime; `experts` has the layers' numbers of experts.

        Layers with the same choice are described together; ONNX Runtime is not named.
        """
        names_of: dict[str, list[str]] = {}
        for name, choice in self.layers:
            names_of.setdefault(choice.text(experts[name]), []).append(name)
        parts = (
            list(names_of)
            if len(names_of) == 1
            else [f"{', '.join(names)}: {text}" for text, names in names_of.items()]
        )
        rest = "" if self.around == "fp32" else f"; the rest {self.around}"
        runtime = runtime_of(self.target)
        where = "" if runtime == "onnxruntime" else f"; in {RUNTIMES[runtime].title}"
        return "; ".join(parts) + rest + where

    @property
    def is_reduced(self) -> bool:
        """Whether a layer has fewer experts than in the checkpoint."""
        return any(choice.is_reduced for _, choice in self.layers)

    @property
    def key(self) -> str:
        """An identifier, which is equal for equal points."""
        return json.dumps(asdict(self), sort_keys=True)

    def with_layer(self, layer: str, choice: LayerRecipe) -> Point:
        return replace(self, layers=tuple((n, choice if n == layer else c) for n, c in self.layers))

    def with_around(self, precision: Precision) -> Point:
        """Returns the point with the network around the layers in another precision."""
        scope: Scope = "all" if precision in INTEGERS else "experts"
        return replace(self, around=precision, quantize=scope)

    def in_precision(self, precision: Precision) -> Point:
        """Returns the point with all MoE layers in a precision; floats apply to everything."""
        layers = tuple((name, replace(choice, precision=precision)) for name, choice in self.layers)
        around = "fp32" if precision in INTEGERS else precision
        return replace(self, layers=layers, quantize="experts", around=around)


@dataclass(frozen=True, slots=True)
class Trial:
    """The measurements of one point as a whole graph.

    `ms` is the median time of a batch of OPT inputs, corrected for the machine's current speed by
    timing the model as trained alternately. `bytes` is the size of the graph and its weights.
    `substitutes` is the SHA-256 of the arrays that replace experts.
    """

    point: Point
    lowerings: dict[str, str]
    quality: Quality
    ms: float
    predicted_ms: float
    bytes: int
    substitutes: str = ""


SMALL_N = 8
"""For up to this many experts, every k is tried."""


def ks_of(n: int) -> tuple[int, ...]:
    """Returns the values of k to try for n experts, descending from n, two per factor of 2."""
    if n <= SMALL_N:
        return tuple(range(n, 0, -1))
    steps = range(2 * n.bit_length())
    return tuple(dict.fromkeys(max(1, round(n / 2 ** (step / 2))) for step in steps))


def sizes_to_measure(listed: Sequence[LayerRecipe]) -> list[LayerRecipe]:
    """Returns the choices to time; the times of the others are interpolated."""
    n = listed[0].k
    if n <= SMALL_N:
        return [*listed]
    sizes = [*ks_of(n)]
    # The second size is the largest subset, whose time would otherwise be that of a larger size.
    measured = {*sizes[::2], sizes[1], sizes[-1]}
    return [choice for choice in listed if (choice.n or choice.k) in measured]


@dataclass(frozen=True)
class Space:
    """The choices for each layer in FP32, and the precisions that the target supports.

    `integers` maps each integer precision to the layers that can compute in it, with `BACKBONE` if
    layers outside the MoE layers can. `floats` are the float types of the whole model.
    """

    choices: dict[str, tuple[LayerRecipe, ...]]
    integers: dict[Precision, tuple[str, ...]]
    floats: tuple[Precision, ...] = ("fp32",)

    @property
    def size(self) -> int:
        """The number of different models."""
        total = 0
        for parts in ((), *self.integers.values()):
            layers = math.prod(
                len(listed) * (2 if name in parts else 1) for name, listed in self.choices.items()
            )
            total += layers * (2 if BACKBONE in parts else 1)
        return total + (len(self.floats) - 1) * math.prod(map(len, self.choices.values()))

    @property
    def forms(self) -> int:
        """The number of layer forms to measure."""
        return sum(
            len(sizes_to_measure(listed))
            * (len(self.floats) + sum(name in parts for parts in self.integers.values()))
            for name, listed in self.choices.items()
        )


def job_of(
    base: ExportJob,
    point: Point,
    lowerings: Mapping[str, str],
    substitutes: Mapping[str, np.ndarray] | None = None,
) -> ExportJob:
    """Returns the job that exports a point, with a lowering for each layer.

    `base` is the job of the model as trained, with the table of ranges if there is one.
    `substitutes` are the arrays that replace experts (`Edits.substitutes`).
    """
    recipe = recipe_of(base.options, point, lowerings, {})
    options = recipe_options(recipe, base.options, substitutes)
    model = edited(base.model, options.edits)
    model = model.host.with_k(model, point.k)
    return replace(
        base,
        model=model,
        options=options,
        layers=layers_to_plan(model, point.k, options),
        table=base.table if point.precision in RANGED else None,
    )


def job_without_lowerings(
    base: ExportJob, point: Point, substitutes: Mapping[str, np.ndarray] | None = None
) -> ExportJob:
    """Returns the job of a point whose lowerings have not been chosen yet."""
    names = {name: "" for name, _ in point.layers}
    job = job_of(base, point, names, substitutes)
    options = replace(
        base.options,
        target=point.target,
        precision=job.options.precision,
        quantize=job.options.quantize,
        keep_floating=job.options.keep_floating,
    )
    return replace(job, options=options)


def recipe_of(
    options: ExportOptions,
    point: Point,
    lowerings: Mapping[str, str],
    why: Mapping[str, str],
    **facts: Any,
) -> Recipe:
    """Returns a point as a recipe; `facts` are the fields that describe its origin."""
    return Recipe(
        **{"model": "", "data": "", **facts},
        target=point.target,
        batch=str(options.batches),
        tokens=str(options.token_counts),
        opset=options.least_opset,
        precision=point.precision,
        quantize=point.quantize,
        layers={
            name: replace(choice, lowering=lowerings[name], why=why.get(name, ""))
            for name, choice in point.layers
        },
    )


def covering_models(choices: Mapping[str, Sequence[LayerRecipe]]) -> list[dict[str, LayerRecipe]]:
    """Returns the fewest models that contain every choice of every layer."""
    longest = max(len(listed) for listed in choices.values())
    return [
        {name: listed[min(index, len(listed) - 1)] for name, listed in choices.items()}
        for index in range(longest)
    ]


def weight_bytes(layer: MoELayer, choice: LayerRecipe) -> float:
    """Returns the approximate size of a layer's weights, in bytes."""
    share = len(choice.experts) / layer.spec.experts if choice.experts else 1.0
    if choice.merged and isinstance(layer.spec, MuMoESpec):
        matrices = sum((tensor.dim + 1) * tensor.out for tensor in layer.spec.tensors)
        share = matrices / layer.spec.parameters
    width = {"fp16": 1 / 2, "bf16": 1 / 2, "int8": 1 / 4, "int4": 4.5 / 32}.get(
        choice.precision, 1.0
    )
    return layer_bytes(layer, FP32) * share * width


def precisions_on(target: Target, request: TuneRequest) -> list[Precision]:
    """Returns the precisions to try on a target, without those that this machine cannot compute."""
    computed: list[Precision] = []
    for precision in request.tried(target):
        try:
            check_computes(precision, target)
        except UsageError:
            if precision in request.precisions and len(request.targets) == 1:
                raise
        else:
            computed.append(precision)
    return computed


def space_of(
    base: ExportJob, traced: ir.Model, target: Target, wanted: Sequence[Precision]
) -> Space:
    """Returns the search space of a model on a target."""
    routed = routed_layers(base.model)
    choices = {}
    for name, layer in base.model.layers.items():
        trained_k = layer.spec.trained_k
        ks = [
            k
            for k in ks_of(trained_k)
            if not routed or (name in routed and can_choose_k(base.model, name, k))
        ]
        choices[name] = tuple(map(LayerRecipe, ks or [trained_k]))
    trained = Point(tuple((name, listed[0]) for name, listed in choices.items()), target)
    integers: dict[Precision, tuple[str, ...]] = {}
    for precision in (name for name in wanted if name in INTEGERS):
        plan = _planned(base, traced, trained.in_precision(precision))
        layers = {} if plan is None else plan.layers
        parts = [name for name, layer in layers.items() if layer.precision == precision]
        if not parts:
            continue
        plan = _planned(base, traced, trained.with_around(precision))
        if plan is not None and any(linear.reason is None for linear in plan.linears):
            parts.append(BACKBONE)
        integers[precision] = tuple(parts)
    floats: tuple[Precision, ...] = tuple(name for name in wanted if name not in INTEGERS)
    return Space(choices=choices, integers=integers, floats=floats)


def _planned(base: ExportJob, traced: ir.Model, point: Point) -> PrecisionPlan | None:
    """Returns the precisions of a point's layers; None if the model does not support them."""
    try:
        return apply_precision(job_without_lowerings(base, point), traced.clone(), base.table)
    except MoexportError:
        return None
