"""Named tensors for a network's arguments and results: its ports.

A network may take several tensors, or dictionaries of them, and return several. The code that
traces, runs and compares it uses one tensor for each input and output; `ported` makes such a
network of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import FamilyError, UsageError
from ...exporter.inputs import INTEGERS
from ...graphs.layers.base import sharing_weights
from ...graphs.names import K_INPUT, STEER_INPUT

INPUT = "input"
"""The name of a network's only input, whatever its parameter is called."""

OUTPUT = "output"

SERVED = "float32 (other floats are converted), bool, " + ", ".join(INTEGERS)

GIVE = (
    "example_input is a tensor (b, …), a tuple of them as forward takes them, or a dictionary by "
    "the names of its parameters"
)


@dataclass(frozen=True, slots=True)
class Arguments:
    """A network's arguments, with a name in place of each tensor."""

    args: tuple[Any, ...] = (INPUT,)
    named: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether there is one tensor only."""
        return self.args == (INPUT,) and not self.named


def _with_tensors(place: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Arguments with tensors in place of their names."""
    if isinstance(place, str):
        return tensors[place]
    if isinstance(place, tuple | list):
        return type(place)(_with_tensors(part, tensors) for part in place)
    if isinstance(place, dict):
        return {key: _with_tensors(part, tensors) for key, part in place.items()}
    return place


def arguments_of(
    source: str, module: nn.Module, example: object
) -> tuple[Arguments, dict[str, object]]:
    """Returns how a network is called with its example, and the example's tensors by name.

    Raises UsageError for a name that a port cannot have.
    """
    found: dict[str, object] = {}
    if isinstance(example, Mapping) and takes(module, example):
        form = Arguments((), {key: _named(key, value, found) for key, value in example.items()})
    else:
        values = tuple(example) if isinstance(example, tuple | list) else (example,)
        keys = [""] if len(values) == 1 else _parameters(module, len(values))
        pairs = zip(keys, values, strict=True)
        form = Arguments(tuple(_named(key, value, found) for key, value in pairs))
    for name in (K_INPUT, STEER_INPUT):
        if name in found:
            raise UsageError(
                f"{source}: the network has an input '{name}', a name that graphs of moexport use "
                "for their own input",
                hint="give that parameter of its forward another name",
            )
    if not found:
        raise UsageError(f"{source}: the example contains no tensor", hint=GIVE)
    return form, found


def required(module: nn.Module) -> list[str]:
    """Returns the parameters of a network's forward that have no default."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return [
        name
        for name, parameter in signature(module.forward).parameters.items()
        if parameter.default is Parameter.empty and parameter.kind in kinds
    ]


def takes(module: nn.Module, named: Mapping[Any, Any]) -> bool:
    """Whether a network's forward accepts exactly these keywords."""
    try:
        signature(module.forward).bind(**named)
    except TypeError:
        return False
    return True


def _parameters(module: nn.Module, count: int) -> list[str]:
    """The names of the first parameters of a network's forward; those of `*xs` are numbered."""
    names: list[str] = []
    for name, parameter in signature(module.forward).parameters.items():
        if parameter.kind is Parameter.VAR_POSITIONAL:
            names += [f"{name}_{i}" for i in range(count - len(names))]
        elif parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            names.append(name)
    # Too many arguments raise PyTorch's own error when the network runs.
    return [*names, *(f"{INPUT}_{i}" for i in range(len(names), count))][:count]


def _joined(name: str, key: object) -> str:
    return f"{name}_{key}" if name else str(key)


def _named(name: str, value: object, found: dict[str, object]) -> Any:
    """An argument with a name in place of each tensor; `found` gets the tensors by name."""
    if isinstance(value, Mapping):
        return {key: _named(_joined(name, key), part, found) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [_named(_joined(name or INPUT, i), part, found) for i, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if value is None:
        return None
    found[name or INPUT] = value
    return name or INPUT


def outputs_of(result: object, taken: Sequence[str], what: str) -> dict[str, Tensor]:
    """Returns the tensors that a network's forward returned, by name; None is left out.

    The names are the keys of a dictionary, or numbers. `taken` are the names of the inputs, which
    no output can have. Raises FamilyError for anything but tensors.
    """
    found: dict[str, Tensor] = {}
    for path, value in _results("", result):
        name = path or OUTPUT
        name = f"{name}_out" if name in taken else name
        if not isinstance(value, Tensor):
            raise FamilyError(
                f"{what}: its output '{name}' is a {type(value).__name__}, not a tensor",
                hint="return only tensors: one, a tuple, or a dictionary of them",
            )
        twin = next((other for other, tensor in found.items() if tensor is value), None)
        if twin is not None:
            raise FamilyError(
                f"{what}: its outputs '{twin}' and '{name}' are the same tensor",
                hint="return it once: the outputs of a graph are different values",
            )
        found[name] = value
    if not found:
        raise FamilyError(
            f"{what}: its forward returned a {type(result).__name__} without a tensor",
            hint="return tensors: one, a tuple, or a dictionary of them",
        )
    return found


def _results(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        value = dict(zip(value._fields, value, strict=True))
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _results(_joined(name, key), part)
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from _results(_joined(name or OUTPUT, index), part)
    elif value is not None or not name:
        yield name, value


def check_outputs(outputs: Mapping[str, Tensor], inputs: int, what: str) -> None:
    """Raises FamilyError for an unsupported output: the batch is the first axis of each."""
    for name, tensor in outputs.items():
        port, shape = f"{what}: its output '{name}'", tuple(tensor.shape)
        if tensor.dtype == torch.bfloat16:
            raise FamilyError(f"{port} is bfloat16", hint="return y.float()")
        if tensor.is_complex():
            raise FamilyError(f"{port} is complex", hint="return torch.view_as_real(y)")
        if not shape:
            raise FamilyError(
                f"{port} is one number, but the first axis of every output must be the batch",
                hint="return one result for each input, without a mean or a loss over the batch",
            )
        if shape[0] != inputs:
            raise FamilyError(
                f"{port} has shape {shape} for {inputs} inputs, but the first axis of every "
                "output must be the batch",
                hint="if it is the batch times the tokens, return y.unflatten(0, (x.shape[0], -1))"
                if shape[0] % inputs == 0
                else "return the batch first: y.movedim(1, 0)",
            )


class Ported(nn.Module):
    """A network that takes a tensor for each of its ports, in their order.

    The module stays the same, with the paths of all its submodules: this class is put before its
    own. `flat`: it returns a tensor for each output; otherwise the result of its own forward.
    """

    arguments: Arguments
    takes: tuple[str, ...]
    flat: bool
    own_forward: Callable[..., Any] | None

    def forward(self, *tensors: Tensor) -> Any:
        by_name = dict(zip(self.takes, tensors, strict=True))
        args, named = _with_tensors((self.arguments.args, dict(self.arguments.named)), by_name)
        forward = super().forward if self.own_forward is None else self.own_forward
        result = forward(*args, **named)
        return tuple(outputs_of(result, self.takes, "").values()) if self.flat else result


def ported(
    network: nn.Module, arguments: Arguments, takes: Sequence[str], *, flat: bool = False
) -> nn.Module:
    """Returns a network that takes a tensor for each of `takes`; itself if it already does.

    If `flat`, it returns a tuple with a tensor for each output. Its weights are shared.
    """
    if flat and isinstance(network, Ported):
        network.flat = True
        return network
    if arguments.plain and not flat:
        return network
    copy = sharing_weights(network)
    own = type(copy)
    copy.__class__ = type(own.__name__, (Ported, own), {"__module__": own.__module__})
    assert isinstance(copy, Ported)
    copy.own_forward = vars(copy).pop("forward", None)  # of the object, not of its class
    copy.arguments, copy.takes, copy.flat = arguments, tuple(takes), flat
    return copy
