"""What may vary: for each MoE layer its k, its experts and its precision; the network around.

A `Point` is one model of a `Space`, which has what serves on a target.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ...errors import MoexportError, UsageError
from ...exporter.bundle.runtimes import RUNTIMES, check_computes
from ...exporter.bundle.weights import layer_bytes
from ...exporter.edits import Edits, KeptExperts, MergedExperts
from ...exporter.job import ExportJob
from ...exporter.model import edited
from ...exporter.options import ExportOptions
from ...exporter.quantization.precision import apply_precision
from ...graphs.layers.base import MoELayer
from ...graphs.layers.mumoe import MuMoESpec
from ...graphs.precision.types import FP32
from ...graphs.targets import Precision, Scope, Target, runtime_of
from .accuracy.quality import Quality
from .recipe import LayerRecipe, Recipe, recipe_options
from .request import SearchOptions
from .routed import asked_for, may_choose, routed_layers

AROUND = ""
"""The part of a model that is no layer: the network around them."""

INTEGERS: tuple[Precision, ...] = ("int8", "int4")
"""Of these each part of a model may have its own share; floats are those of all of it."""

RANGED: tuple[Precision, ...] = ("int8", "fp16")
"""Precisions that read the table of ranges: to quantise, and to see what would overflow."""


@dataclass(frozen=True, slots=True)
class Point:
    """A whole model as it may be exported: a choice for each layer, and what INT8 includes.

    `target` says in which runtime. `quantize` is `all` where the linear layers around are integers,
    too. All integers are of one width.
    """

    layers: tuple[tuple[str, LayerRecipe], ...]
    target: Target
    quantize: Scope = "experts"
    around: Precision = "fp32"

    @property
    def choices(self) -> dict[str, LayerRecipe]:
        """The choice of each layer."""
        return dict(self.layers)

    @property
    def k(self) -> dict[str, int]:
        """The k of each layer."""
        return {name: choice.k for name, choice in self.layers}

    @property
    def precision(self) -> Precision:
        """The precision of the export: that of its integers, if any."""
        names = {choice.precision for _, choice in self.layers} | {self.around}
        return next((name for name in ("int4", "int8", "fp16", "bf16") if name in names), "fp32")

    def text(self, experts: Mapping[str, int]) -> str:
        """In words: what each layer is, of so many `experts` in the checkpoint, and the runtime.

        Layers that are alike are said once, ONNX Runtime is not.
        """
        names_of: dict[str, list[str]] = {}
        for name, choice in self.layers:
            names_of.setdefault(choice.text(experts[name]), []).append(name)
        parts = (
            list(names_of)
            if len(names_of) == 1
            else [f"{', '.join(names)}: {text}" for text, names in names_of.items()]
        )
        around = "" if self.around == "fp32" else f"; around them {self.around}"
        runtime = runtime_of(self.target)
        place = "" if runtime == "onnxruntime" else f"; in {RUNTIMES[runtime].title}"
        return "; ".join(parts) + around + place

    @property
    def fewer(self) -> bool:
        """Whether a layer has fewer experts than in the checkpoint."""
        return any(choice.fewer for _, choice in self.layers)

    @property
    def key(self) -> str:
        """The same text for the same point."""
        return json.dumps(asdict(self), sort_keys=True)

    def with_layer(self, layer: str, choice: LayerRecipe) -> Point:
        """Returns the point with another choice for one layer."""
        return replace(self, layers=tuple((n, choice if n == layer else c) for n, c in self.layers))

    def with_around(self, precision: Precision) -> Point:
        """Returns the point with the network around in another precision."""
        whole: Scope = "all" if precision in INTEGERS else "experts"
        return replace(self, around=precision, quantize=whole)

    def in_floats(self, precision: Precision) -> Point:
        """Returns the point with everything in one type of floats."""
        layers = tuple((name, replace(choice, precision=precision)) for name, choice in self.layers)
        return replace(self, layers=layers, quantize="experts", around=precision)


@dataclass(frozen=True, slots=True)
class Trial:
    """What was found of one point as a whole graph.

    `ms` is the median time of a batch of OPT, corrected for how fast the machine was just then, by
    the graph of the model as trained, which takes turns. `bytes` are those of the graph and its
    weights. `substitutes` is the SHA-256 of what takes the places of experts.
    """

    point: Point
    lowerings: dict[str, str]
    quality: Quality
    ms: float
    predicted_ms: float
    bytes: int
    substitutes: str = ""


FEW = 8
"""Of so many experts every number is looked at."""


def ks_of(n: int) -> tuple[int, ...]:
    """Returns the numbers of n experts that are looked at, n first: two to each halving."""
    if n <= FEW:
        return tuple(range(n, 0, -1))
    steps = range(2 * n.bit_length())
    return tuple(dict.fromkeys(max(1, round(n / 2 ** (step / 2))) for step in steps))


def sizes_measured(listed: Sequence[LayerRecipe]) -> list[LayerRecipe]:
    """Returns the choices whose time is measured: for others it is taken from those around."""
    n = listed[0].k
    if n <= FEW:
        return [*listed]
    sizes = [*ks_of(n)]
    # Not beyond the largest subset either: it would seem as fast as the next one that was measured.
    measured = {*sizes[::2], sizes[1], sizes[-1]}
    return [choice for choice in listed if (choice.n or choice.k) in measured]


@dataclass(frozen=True)
class Space:
    """What a model's layers may become: the choices of each, in FP32, and the integers that serve.

    `integers` names the layers that compute in a precision, and the network around them where it
    has layers that can. `floats` are those in which all of a model may compute.
    """

    choices: dict[str, tuple[LayerRecipe, ...]]
    integers: dict[Precision, tuple[str, ...]]
    floats: tuple[Precision, ...] = ("fp32",)

    @property
    def size(self) -> int:
        """How many different models there are."""
        total = 0
        for parts in ((), *self.integers.values()):
            layers = math.prod(
                len(listed) * (2 if name in parts else 1) for name, listed in self.choices.items()
            )
            total += layers * (2 if AROUND in parts else 1)
        return total + (len(self.floats) - 1) * math.prod(map(len, self.choices.values()))

    @property
    def forms(self) -> int:
        """How many forms of layers are to be measured."""
        return sum(
            len(sizes_measured(listed))
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

    `base` is the job of the model as it was trained, with the table of ranges if there is one.
    `substitutes` are what takes the places of experts (`Edits.substitutes`).
    """
    recipe = recipe_of(base.options, point, lowerings, {})
    options = recipe_options(recipe, base.options, substitutes)
    k = point.k
    return replace(
        base,
        model=asked_for(edited(base.model, options.edits), k),
        options=options,
        k=k,
        table=base.table if point.precision in RANGED else None,
    )


def unlowered(
    base: ExportJob, point: Point, substitutes: Mapping[str, np.ndarray] | None = None
) -> ExportJob:
    """Returns the job of a point whose lowerings are not chosen yet."""
    names = {name: "" for name, _ in point.layers}
    job = job_of(base, point, names, substitutes)
    precision = job.options.precision
    return replace(job, options=replace(base.options, precision=precision, target=point.target))


def recipe_of(
    options: ExportOptions,
    point: Point,
    lowerings: Mapping[str, str],
    why: Mapping[str, str],
    **facts: Any,
) -> Recipe:
    """Returns a point as a recipe; `facts` are the fields that say where it comes from."""
    return Recipe(
        **{"model": "", "data": "", **facts},
        target=point.target,
        batch=str(options.batch),
        tokens=str(options.tokens),
        opset=options.opset,
        precision=point.precision,
        quantize=point.quantize,
        layers={
            name: replace(choice, lowering=lowerings[name], why=why.get(name, ""))
            for name, choice in point.layers
        },
    )


def edits_of(point: Point) -> Edits:
    """Returns what a point drops and merges of the experts in the checkpoint."""
    return Edits(
        kept=tuple(
            KeptExperts(name, layer.experts) for name, layer in point.layers if layer.experts
        ),
        merged=tuple(MergedExperts(name) for name, layer in point.layers if layer.merged),
    )


def covering_models(choices: Mapping[str, Sequence[LayerRecipe]]) -> list[dict[str, LayerRecipe]]:
    """Returns as few models as have every choice of every layer, one of each layer at a time."""
    longest = max(len(listed) for listed in choices.values())
    return [
        {name: listed[min(index, len(listed) - 1)] for name, listed in choices.items()}
        for index in range(longest)
    ]


def weight_bytes(layer: MoELayer, choice: LayerRecipe) -> float:
    """Returns about what a layer's weights take."""
    share = len(choice.experts) / layer.spec.experts if choice.experts else 1.0
    if choice.merged and isinstance(layer.spec, MuMoESpec):
        matrices = sum((tensor.dim + 1) * tensor.out for tensor in layer.spec.tensors)
        share = matrices / layer.spec.parameters
    width = {"fp16": 1 / 2, "bf16": 1 / 2, "int8": 1 / 4, "int4": 4.5 / 32}.get(
        choice.precision, 1.0
    )
    return layer_bytes(layer, FP32) * share * width


def computed_on(target: Target, request: SearchOptions) -> list[Precision]:
    """The precisions to try on a target, without those that its device here does not compute."""
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
    """What the model's layers may become on a target."""
    routed = routed_layers(base.model)
    choices = {
        name: tuple(
            LayerRecipe(k)
            for k in ks_of(layer.spec.trained_k)
            if not routed or (name in routed and may_choose(base.model, name, k))
        )
        for name, layer in base.model.layers.items()
    }
    choices = {
        name: listed or (LayerRecipe(base.model.layers[name].spec.trained_k),)
        for name, listed in choices.items()
    }
    first = {name: listed[0].k for name, listed in choices.items()}
    integers: dict[Precision, tuple[str, ...]] = {}
    for precision in wanted:
        if precision not in INTEGERS:
            continue
        try:
            layers = _served(base, traced, choices, precision, first, target)
        except MoexportError:  # this model's layers do not take it
            continue
        around = (
            [AROUND] if layers and _has_integers_around(base, traced, precision, target) else []
        )
        if layers:
            integers[precision] = (*layers, *around)
    floats: tuple[Precision, ...] = tuple(name for name in wanted if name not in INTEGERS)
    return Space(choices=choices, integers=integers, floats=floats)


def _served(
    base: ExportJob,
    traced: ir.Model,
    layers: Iterable[str],
    precision: Precision,
    k: Mapping[str, int],
    target: Target,
) -> list[str]:
    """The layers that really compute in a precision: others keep floats, with a reason."""
    point = Point(tuple((name, LayerRecipe(k[name], precision)) for name in layers), target)
    plan = apply_precision(unlowered(base, point), traced.clone(), base.table)
    return [name for name, layer in plan.layers.items() if layer.precision == precision]


def _has_integers_around(
    base: ExportJob, traced: ir.Model, precision: Precision, target: Target
) -> bool:
    layers = tuple((name, LayerRecipe(k or 1)) for name, k in base.k.items())
    point = Point(layers, target).with_around(precision)
    try:
        plan = apply_precision(unlowered(base, point), traced.clone(), base.table)
    except MoexportError:
        return False
    return any(linear.reason is None for linear in plan.linears)
