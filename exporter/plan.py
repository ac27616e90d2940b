"""What an export will do: every layer's k and lowering, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

import onnx_ir as ir

from ..common.timing import Latency, differs
from ..errors import UsageError
from ..graphs.layers.base import MoESpec
from ..graphs.lowerings import lowering
from ..graphs.lowerings.choice import LoweringChoice, check, choose
from ..graphs.lowerings.cost import AnyWork, WorkOf, machine_for
from ..graphs.names import DOMAIN
from ..graphs.targets import Target
from .axes import AxisRange
from .bundle.manifest import MAIN_GRAPH
from .bundle.weights import INLINE_BYTES, WEIGHTS_FILE, layer_bytes
from .inputs import fixed_axes
from .model import Model, edited
from .options import AUTO, CHOOSERS, TUNE, ExportOptions, KOption
from .precision import PrecisionPlan


@dataclass(frozen=True, slots=True)
class TimedLowering:
    """One lowering of a layer and what one batch took, in milliseconds."""

    lowering: str
    latency_ms: Latency


@dataclass(frozen=True, slots=True)
class TunedLayers:
    """Layers of one shape and k, measured once: each candidate's latency, the fastest first.

    `layers` are their names and `k` what was kept, also where k is a graph input. `left_out` says
    why a lowering that could serve was not timed. Without candidates there was nothing to compare:
    `chosen` is the only one.
    """

    layers: tuple[str, ...]
    experts: int
    k: int
    batch: int
    tokens: int
    precision: str
    chosen: str
    candidates: tuple[TimedLowering, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def choice(self, work: AnyWork, target: Target) -> LoweringChoice:
        """The choice for one of the layers, with the figures as its reason."""
        chosen = lowering(self.chosen)
        predicted_us = chosen.predict_us(work, machine_for(target, work.precision))
        return LoweringChoice(chosen, self._reason(), predicted_us)

    def _reason(self) -> str:
        if not self.candidates:
            return "the only lowering for this layer and target: nothing was measured"
        best, *others = self.candidates
        listed = [
            f"{other.lowering} {other.latency_ms.median:.3g} ms"
            + ("" if differs(best.latency_ms, other.latency_ms) else ", no difference")
            for other in others
        ] + list(self.left_out)
        return (
            f"measured {best.latency_ms.median:.3g} ms, spread {best.latency_ms.spread:.0%}, for "
            f"k = {self.k} of {self.experts} at batch {self.batch}"
            + (f" (others: {'; '.join(listed)})" if listed else "")
        )


@dataclass(frozen=True, slots=True)
class Tuning:
    """Everything that was measured for one export, and on what: as it stands in the manifest.

    `machine` is the CPU or GPU, `inputs` says what the layers were fed.
    """

    machine: str
    provider: str
    runtime: str
    threads: int
    rounds: int
    inputs: str
    measured: tuple[TunedLayers, ...]

    def of(self, layer: str) -> TunedLayers:
        """Returns what was found for a layer."""
        return next(group for group in self.measured if layer in group.layers)

    def as_json(self) -> dict[str, Any]:
        """The record as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer's part of a graph. `kept` is None where k is a graph input."""

    name: str
    k: int | None
    choice: LoweringChoice
    work: AnyWork


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """One graph of the bundle: its file and its layers, in execution order."""

    file: str
    layers: tuple[LayerPlan, ...]

    @property
    def predicted_us(self) -> float:
        """The MoE layers' predicted time on one batch; the backbone is not counted."""
        return sum(layer.choice.predicted_us for layer in self.layers)

    @property
    def lowerings(self) -> tuple[str, ...]:
        """The lowering of each layer, in execution order."""
        return tuple(layer.choice.lowering.name for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Plan:
    """The graphs to write and the bytes of weights that they share."""

    graphs: tuple[GraphPlan, ...]
    weights_bytes: int
    tuning: Tuning | None = None
    """What was measured for `--lowering tune`."""

    @property
    def files(self) -> dict[str, int | None]:
        """Names of the files to write, with their bytes where those are known beforehand."""
        return {WEIGHTS_FILE: self.weights_bytes} | {graph.file: None for graph in self.graphs}


def check_request(model: Model, options: ExportOptions) -> None:
    """Raises what `plan` would, as far as the layers alone tell: tracing takes up to a minute."""
    fixed_axes(model.input, options)
    specs = {name: layer.spec for name, layer in edited(model, options.edits).layers.items()}
    for name, k in resolve_k(options.k, specs).items():
        work = _work(specs[name], k, options.tokens.opt, options)
        for asked in options.lowerings:
            if asked not in CHOOSERS:
                check(lowering(asked), work, options.target)


def plan(
    model: Model,
    traced: ir.Model,
    options: ExportOptions,
    numbers: PrecisionPlan,
    tuning: Tuning | None = None,
) -> Plan:
    """Returns the plan for a model that was traced, and narrowed by `numbers`.

    `tuning` holds what was measured, where the options ask for that. Raises `UsageError` for a k
    that does not fit, `LoweringError` for a lowering that cannot serve.
    """
    kept = resolve_k(options.k, {name: layer.spec for name, layer in model.layers.items()})
    graphs = [
        plan_graph(
            model,
            traced,
            kept,
            options,
            lowering_name=name,
            file=MAIN_GRAPH if index == 0 else f"model-{name}.onnx",
            tuning=tuning,
        )
        for index, name in enumerate(options.lowerings)
    ]
    return Plan(tuple(graphs), _weights_bytes(model, traced, numbers), tuning)


def plan_graph(
    model: Model,
    traced: ir.Model,
    kept: Mapping[str, int | None],
    options: ExportOptions,
    *,
    lowering_name: str,
    file: str,
    tuning: Tuning | None = None,
) -> GraphPlan:
    """Returns the plan of one graph: every layer with one lowering, or what is chosen for it."""
    return GraphPlan(
        file,
        tuple(
            LayerPlan(name, kept[name], _choice(work, lowering_name, options, tuning), work)
            for name, work in layer_works(model, traced, kept, options).items()
        ),
    )


def layer_works(
    model: Model, traced: ir.Model, kept: Mapping[str, int | None], options: ExportOptions
) -> dict[str, AnyWork]:
    """Returns the job of each traced layer that a plan is made for, in the order of execution.

    Raises `UsageError` for a layer that cannot be renormalised as asked.
    """
    return {
        name: _work(model.layers[name].spec, kept[name], tokens, options)
        for name, tokens in _tokens(traced, options.tokens).items()
    }


def _work(spec: MoESpec, k: int | None, tokens: int, options: ExportOptions) -> AnyWork:
    if options.renormalize and not spec.renormalizable:
        raise UsageError(
            f"--renormalize: layer {spec.name} is a {spec.kind} layer, whose coefficients stay as "
            "they are",
            hint="leave --renormalize out",
        )
    # With k as an input the plan must be good for every k: a quarter of n stands for them.
    typical = k if k is not None else max(1, spec.experts // 4)
    return WorkOf(spec, typical, options.batch.opt, tokens, options.numbers.precision)


def resolve_k(k: KOption, specs: Mapping[str, MoESpec]) -> dict[str, int | None]:
    """Returns each layer's k, None where it is a graph input.

    Raises `UsageError` for a k above n and for a list of the wrong length.
    """
    names = list(specs)
    if k == "input":
        return dict.fromkeys(names)
    if isinstance(k, tuple):
        if len(k) != len(names):
            raise UsageError(
                f"--k {','.join(map(str, k))}: {len(k)} values for {len(names)} MoE layers",
                hint=f"give one k for all, or one each for: {', '.join(names)}",
            )
        asked: list[int | Fraction | str] = list(k)
    else:
        asked = [k] * len(names)
    return {name: _kept(value, specs[name]) for name, value in zip(names, asked, strict=True)}


def _kept(value: int | Fraction | str, spec: MoESpec) -> int:
    n = spec.experts
    if value == "n":
        return n
    if isinstance(value, Fraction):
        return max(1, round(value * n))
    assert isinstance(value, int)
    if not 1 <= value <= n:
        raise UsageError(
            f"--k {value}: layer {spec.name} has {n} experts",
            hint=f"use 1 ≤ k ≤ {n}, or n for all",
        )
    return value


def _choice(
    work: AnyWork, name: str, options: ExportOptions, tuning: Tuning | None
) -> LoweringChoice:
    if name == AUTO:
        return choose(work, options.target)
    if name == TUNE:
        assert tuning is not None, "tune.tune measures before anything is planned"
        return tuning.of(work.spec.name).choice(work, options.target)
    return check(lowering(name), work, options.target)


def _tokens(traced: ir.Model, dynamic: AxisRange) -> dict[str, int]:
    """The token count of each traced layer, in the order of execution."""
    tokens = {}
    for node in traced.graph:
        if node.domain == DOMAIN:
            x = node.inputs[0]
            size = x.shape[1] if x is not None and x.shape is not None else None
            tokens[node.attributes.get_string("layer")] = (
                size if isinstance(size, int) else dynamic.opt
            )
    return tokens


def _weights_bytes(model: Model, traced: ir.Model, numbers: PrecisionPlan) -> int:
    backbone = sum(
        tensor.nbytes
        for value in traced.graph.initializers.values()
        if (tensor := value.const_value) is not None and tensor.nbytes >= INLINE_BYTES
    )
    layers = sum(
        layer_bytes(layer, numbers.layers[name].compute) for name, layer in model.layers.items()
    )
    return backbone + layers
