"""An expert given as a module: its forward, traced, and read as maps with what is around them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ...errors import UsageError
from ...graphs.layers.expert import Activation, ExpertNorm

READ = (
    "an expert is one linear map, two, or (gate, up, down), with activations, nn.LayerNorm or "
    "nn.RMSNorm between and after them"
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParts:
    """What one expert is made of: weights [out, in] with biases, norms, and activations.

    Of three maps the first is the gate's. `halves`: the first of two maps gives gate and up, or
    with `up_first` up and gate. `inner` follows the first map of two, `outer` the last one.
    An `activation` of None was not said.
    """

    maps: tuple[tuple[Tensor, Tensor | None], ...]
    inner: nn.Module | None = None
    outer: nn.Module | None = None
    activation: Activation | None = None
    out_activation: Activation = "identity"
    halves: bool = False
    up_first: bool = False

    @property
    def hidden_norm(self) -> ExpertNorm | None:
        """What follows the first map of two."""
        return None if self.inner is None else _norm(self.inner)

    @property
    def out_norm(self) -> ExpertNorm | None:
        """What follows the last map."""
        return None if self.outer is None else _norm(self.outer)

    @property
    def around(self) -> tuple[object, ...]:
        """All but the weights: the same for experts of one layer."""
        norms = [
            (_norm(each), each.weight is None, getattr(each, "bias", None) is None)
            for each in (self.inner, self.outer)
            if each is not None
        ]
        flags = (self.inner is None, self.halves, self.up_first)
        return (*flags, self.activation, self.out_activation, *norms)


def is_map(given: object) -> bool:
    """Whether a module is a linear map: a weight, and a bias or none."""
    if isinstance(given, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return True
    if not isinstance(given, nn.Module) or is_norm(given) or any(True for _ in given.children()):
        return False
    weight = getattr(given, "weight", None)
    names = {name for name, _ in given.named_parameters()}
    return isinstance(weight, Tensor) and weight.ndim > 1 and names <= {"weight", "bias"}


def is_norm(given: object) -> bool:
    """Whether a module is a normalisation over channels that an expert may hold."""
    return isinstance(given, nn.LayerNorm | nn.RMSNorm)


def _norm(module: nn.Module) -> ExpertNorm:
    if isinstance(module, nn.LayerNorm):
        return ExpertNorm("layernorm", module.eps)
    assert isinstance(module, nn.RMSNorm)
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return ExpertNorm("rmsnorm", eps)


def parts_of(what: str, module: nn.Module) -> ExpertParts:
    """Returns what the forward of a module computes; UsageError names what was not recognised."""
    name = f"{what} ({type(module).__name__})"
    try:
        graph = fx.symbolic_trace(module.eval())
    except Exception as error:  # the user's code may do anything
        raise UsageError(
            f"{name}: its forward cannot be read: {type(error).__name__}: {error}",
            hint=f"give its maps: [(e.up, e.down) for e in layer.experts]; {READ}",
        ) from error
    known: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            found = known.get(node.args[0])
            if isinstance(found, _Value) and found.at != "input":
                return found.parts()
            raise UsageError(f"{name}: its forward returns no expert's output", hint=READ)
        try:
            known[node] = _value(graph, node, known)
        except _UnknownStepError as error:
            raise UsageError(
                f"{name}: its forward has a step that is none of an expert's: {error}",
                hint=f"{READ}; what an expert does besides belongs into forward",
            ) from error
    raise AssertionError("a graph has an output")


class _UnknownStepError(Exception):
    """A step of a forward that no expert here has, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    """A value of an expert's forward: the maps before it, and where it is among them.

    `half` is which part of the first map's output it is. A `sigmoid` is a SiLU's, if it meets what
    it is of.
    """

    at: Literal["input", "first", "hidden", "last", "after"] = "input"
    maps: tuple[tuple[Tensor, Tensor | None], ...] = ()
    inner: nn.Module | None = None
    outer: nn.Module | None = None
    activation: Activation | None = None
    out_activation: Activation = "identity"
    half: int | None = None
    up_first: bool = False
    halves: bool = False
    sigmoid: bool = False

    def parts(self) -> ExpertParts:
        """Returns this as the output of an expert."""
        one = len(self.maps) == 1
        if self.half is not None or self.sigmoid or (not one and self.at not in ("last", "after")):
            raise UsageError("an expert's forward ends before its last map", hint=READ)
        return ExpertParts(
            maps=self.maps,
            inner=None if one else self.inner,
            outer=self.inner if one else self.outer,
            activation=None if one else self.activation,
            out_activation=(self.activation or "identity") if one else self.out_activation,
            halves=self.halves,
            up_first=self.up_first,
        )

    def mapped(self, weight: Tensor, bias: Tensor | None) -> _Value:
        """Returns what a linear map makes of this."""
        if self.at == "input":
            return replace(self, at="first", maps=((weight, bias),))
        if self.at in ("first", "hidden") and self.half is None and not self.sigmoid:
            activation = self.activation or "identity"
            maps = (*self.maps, (weight, bias))
            return replace(self, at="last", maps=maps, activation=activation)
        raise _UnknownStepError("a further linear map")

    def activated(self, activation: Activation) -> _Value:
        """Returns what an activation makes of this."""
        if self.at == "first":
            return replace(self, at="hidden", activation=activation)
        if self.at == "last":
            return replace(self, at="after", out_activation=activation)
        raise _UnknownStepError(f"{activation} of what is no map's output")

    def normalised(self, norm: nn.Module) -> _Value:
        """Returns what a normalisation makes of this."""
        if self.at == "first" and self.inner is None and self.half is None:
            return replace(self, inner=norm)
        if self.at == "last" and self.outer is None:
            return replace(self, outer=norm)
        raise _UnknownStepError(f"a {type(norm).__name__} of what is no map's output")

    def squared(self) -> _Value:
        """Returns the square of a ReLU."""
        if self.at == "hidden" and self.activation == "relu":
            return replace(self, activation="relu2")
        if self.at == "after" and self.out_activation == "relu":
            return replace(self, out_activation="relu2")
        raise _UnknownStepError("a square of what is no ReLU")

    def times(self, other: _Value) -> _Value:
        """Returns the product of two values: a gate's, or a SiLU's."""
        for gate, up in ((self, other), (other, self)):
            if gate.sigmoid and gate.maps is up.maps and gate.half == up.half:
                return up.activated("silu")
            if gate.at != "hidden" or up.at != "first" or gate.sigmoid or gate.inner is not None:
                continue
            if gate.half is not None and up.half == 1 - gate.half and gate.maps is up.maps:
                return replace(gate, half=None, halves=True, up_first=gate.half == 1)
            if gate.half is None and up.half is None and len(gate.maps) == len(up.maps) == 1:
                return replace(gate, maps=(*gate.maps, *up.maps))
        raise _UnknownStepError("a product that is no gate's")


_ACTIVATIONS: Mapping[object, Activation] = MappingProxyType(
    {
        nn.ReLU: "relu",
        nn.SiLU: "silu",
        F.relu: "relu",
        torch.relu: "relu",
        F.silu: "silu",
        "relu": "relu",
        "relu_": "relu",
    }
)

_NOTHING = ("contiguous", "float", "clone")
_DROPOUTS = (nn.Dropout, nn.Identity)


def _value(graph: fx.GraphModule, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """What a node computes, as far as an expert may."""
    args = [known.get(each, each) if isinstance(each, fx.Node) else each for each in node.args]
    first = args[0] if args else None
    if node.op == "placeholder":
        if first is not None or node.args:
            return first
        return _Value()
    if not isinstance(first, _Value):
        found = _of_weights(graph, node, args)
        if found is not None:
            return found
        raise _UnknownStepError(node.format_node() or str(node))
    if node.op == "call_module":
        return _of_module(graph.get_submodule(str(node.target)), first)
    return _of_function(node, first, args)


def _of_weights(graph: fx.GraphModule, node: fx.Node, args: list[Any]) -> Any:
    """What a node makes of parameters, or of a pair of halves; None for what is nothing known."""
    if node.op == "get_attr":
        found: Any = graph
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return found
    first = args[0] if args else None
    turned = node.target in ("t", "transpose") or (
        node.target is getattr and args[1] in ("T", "mT")
    )
    if isinstance(first, Tensor) and turned:
        return first.mT
    if isinstance(first, tuple) and node.target is operator.getitem:
        return first[int(args[1])]
    return None


def _of_module(module: nn.Module, x: _Value) -> _Value:
    if is_map(module):
        weight, bias = module.weight, module.bias
        if isinstance(module, _CONVOLUTIONS) and any(size != 1 for size in module.kernel_size):
            raise _UnknownStepError(f"{module}")
        assert isinstance(weight, Tensor)
        return x.mapped(weight.flatten(1), bias if isinstance(bias, Tensor) else None)
    if is_norm(module):
        return x.normalised(module)
    if isinstance(module, _DROPOUTS):
        return x
    if isinstance(module, nn.GELU):
        return x.activated("gelu" if module.approximate == "none" else "gelu-tanh")
    if type(module) in _ACTIVATIONS:
        return x.activated(_ACTIVATIONS[type(module)])
    raise _UnknownStepError(f"a {type(module).__name__}")


def _of_function(node: fx.Node, x: _Value, args: list[Any]) -> Any:
    target: Any = node.target
    second = args[1] if len(args) > 1 else None
    if isinstance(second, Tensor):
        found = _of_parameters(node, x, args)
        if found is not None:
            return found
    if target in _ACTIVATIONS or target is F.gelu:
        tanh = node.kwargs.get("approximate", second) == "tanh"
        gelu: Activation = "gelu-tanh" if tanh else "gelu"
        return x.activated(_ACTIVATIONS.get(target, gelu))
    if target in (operator.mul, torch.mul, "mul", "mul_") and isinstance(second, _Value):
        return x.times(second)
    if target in (torch.sigmoid, F.sigmoid, "sigmoid") and x.at in ("first", "last"):
        return replace(x, sigmoid=True, at="hidden" if x.at == "first" else "after")
    squares = target in (torch.square, "square")
    squares |= target in (pow, operator.pow, torch.pow, "pow") and second == 2
    if squares or target is F.dropout or target in _NOTHING:
        return x.squared() if squares else x
    return _halves(x, target, args)


def _halves(x: _Value, target: Any, args: list[Any]) -> tuple[_Value, _Value]:
    """The two halves of a first map's output: the last that a function may do to a value."""
    if target in (torch.chunk, "chunk") and args[1] == 2 and x.at == "first":
        return replace(x, half=0), replace(x, half=1)
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    raise _UnknownStepError(f"{name} of {' and '.join(map(_shown, args))}")


def _of_parameters(node: fx.Node, x: _Value, args: list[Any]) -> _Value | None:
    """What a function makes of a value and a parameter, where that is a map or a bias."""
    target: Any = node.target
    parameter: Tensor = args[1]
    if target is F.linear:
        bias = args[2] if len(args) > 2 else node.kwargs.get("bias")
        return x.mapped(parameter, bias if isinstance(bias, Tensor) else None)
    if target in (operator.matmul, torch.matmul, "matmul"):
        return x.mapped(parameter.mT, None)
    if target in (operator.add, torch.add, "add"):
        return _biased(x, parameter)
    return None


def _biased(x: _Value, bias: Tensor) -> _Value:
    if x.at in ("first", "last") and bias.ndim == 1 and x.maps[-1][1] is None:
        return replace(x, maps=(*x.maps[:-1], (x.maps[-1][0], bias)))
    raise _UnknownStepError("a sum that is no bias")


_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "input": "the expert's input",
        "first": "the first map's output",
        "hidden": "what is between the maps",
        "last": "the last map's output",
        "after": "what follows the last map",
    }
)


def _shown(value: object) -> str:
    return _WORDS[value.at] if isinstance(value, _Value) else str(value)
