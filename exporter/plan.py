"""What an export will do: every layer's k and lowering, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import onnx_ir as ir

from ..errors import UsageError
from ..graphs.cost import Choice, check, choose
from ..graphs.lowerings.base import AnyWork, WorkOf
from ..graphs.lowerings.registry import lowering
from ..graphs.moe import MoESpec
from ..graphs.names import DOMAIN
from ..graphs.narrowing import narrowed
from .manifest import MAIN_GRAPH
from .model import Model
from .options import AUTO, AxisRange, ExportOptions, Kept
from .precision import NumbersPlan
from .weights import INLINE_BYTES, WEIGHTS_FILE, size_of


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer's part of a graph. `kept` is None where k is a graph input."""

    name: str
    kept: int | None
    choice: Choice
    work: AnyWork


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """One graph of the bundle: its file and its layers, in execution order."""

    file: str
    layers: tuple[LayerPlan, ...]

    @property
    def predicted_us(self) -> float:
        """The MoE layers' predicted time on one batch; the host is not counted."""
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

    @property
    def files(self) -> dict[str, int | None]:
        """Names of the files to write, with their bytes where those are known beforehand."""
        return {WEIGHTS_FILE: self.weights_bytes} | {graph.file: None for graph in self.graphs}


def plan(model: Model, portable: ir.Model, options: ExportOptions, numbers: NumbersPlan) -> Plan:
    """Returns the plan for a model that was traced, and narrowed by `numbers`.

    Raises `UsageError` for a k that does not fit, `LoweringError` for a lowering that cannot serve.
    """
    kept = resolve_k(options.k, {name: layer.spec for name, layer in model.layers.items()})
    graphs = [
        plan_graph(
            model,
            portable,
            kept,
            options,
            lowering_name=name,
            file=MAIN_GRAPH if index == 0 else f"model-{name}.onnx",
        )
        for index, name in enumerate(options.lowerings)
    ]
    return Plan(tuple(graphs), _weights_bytes(model, portable, numbers))


def plan_graph(
    model: Model,
    portable: ir.Model,
    kept: Mapping[str, int | None],
    options: ExportOptions,
    *,
    lowering_name: str,
    file: str,
) -> GraphPlan:
    """Returns the plan of one graph: every layer with one lowering, or what `auto` chooses."""
    specs = {name: layer.spec for name, layer in model.layers.items()}
    return GraphPlan(
        file,
        tuple(
            _layer(specs[name], kept[name], tokens, lowering_name, options)
            for name, tokens in _tokens(portable, options.tokens).items()
        ),
    )


def resolve_k(k: Kept, specs: Mapping[str, MoESpec]) -> dict[str, int | None]:
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


def _layer(
    spec: MoESpec, kept: int | None, tokens: int, name: str, options: ExportOptions
) -> LayerPlan:
    if options.renormalize and not spec.renormalizable:
        raise UsageError(
            f"--renormalize: layer {spec.name} is a {spec.kind} layer, whose coefficients stay as "
            "they are",
            hint="leave --renormalize out",
        )
    # With k as an input the plan must be good for every k: a quarter of n stands for them.
    typical = kept if kept is not None else max(1, spec.experts // 4)
    work: AnyWork = WorkOf(spec, typical, options.batch.opt, tokens, options.numbers.precision)
    if name == AUTO:
        choice = choose(work, options.target)
    else:
        choice = check(lowering(name), work, options.target)
    return LayerPlan(spec.name, kept, choice, work)


def _tokens(portable: ir.Model, dynamic: AxisRange) -> dict[str, int]:
    """The token count of each traced layer, in the order of execution."""
    tokens = {}
    for node in portable.graph:
        if node.domain == DOMAIN:
            x = node.inputs[0]
            size = x.shape[1] if x is not None and x.shape is not None else None
            tokens[node.attributes.get_string("layer")] = (
                size if isinstance(size, int) else dynamic.opt
            )
    return tokens


def _weights_bytes(model: Model, portable: ir.Model, numbers: NumbersPlan) -> int:
    host = sum(
        tensor.nbytes
        for value in portable.graph.initializers.values()
        if (tensor := value.const_value) is not None and tensor.nbytes >= INLINE_BYTES
    )
    layers = sum(
        size_of(part.shape, part.dtype)
        for name, layer in model.layers.items()
        for part in narrowed(layer.stored(), numbers.layers[name].arithmetic)
    )
    return host + layers
