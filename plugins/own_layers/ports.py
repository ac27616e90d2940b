"""Names the tensors among a network's arguments and results.

A network may take and return several tensors, or dictionaries of them. The code that traces, runs
and compares networks uses one tensor for each input and output, so `with_tensor_interface` adapts
the network to that.
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

SUPPORTED = "float32 (other floats are converted), bool, " + ", ".join(INTEGERS)

EXAMPLE_FORMS = (
    "example_input is a tensor (b, …), a tuple of forward's arguments, or a dictionary of them by "
    "parameter name"
)


@dataclass(frozen=True, slots=True)
class Arguments:
    """A network's arguments, with a name in place of each tensor."""

    args: tuple[Any, ...] = (INPUT,)
    named: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether a single tensor is the only argument."""
        return self.args == (INPUT,) and not self.named


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns arguments with the tensors in place of their names."""
    if isinstance(value, str):
        return tensors[value]
    if isinstance(value, tuple | list):
        return type(value)(_with_tensors(part, tensors) for part in value)
    if isinstance(value, dict):
        return {key: _with_tensors(part, tensors) for key, part in value.items()}
    return value


def arguments_of(
    source: str, module: nn.Module, example: object
) -> tuple[Arguments, dict[str, object]]:
    """Returns how a network is called with its example, and the example's tensors by name.

    Raises UsageError for an example without tensors, and for a name that an input cannot have.
    """
    found: dict[str, object] = {}
    if isinstance(example, Mapping) and accepts(module, example):
        form = Arguments((), {key: _label(key, value, found) for key, value in example.items()})
    else:
        values = tuple(example) if isinstance(example, tuple | list) else (example,)
        keys = [""] if len(values) == 1 else _parameter_names(module, len(values))
        pairs = zip(keys, values, strict=True)
        form = Arguments(tuple(_label(key, value, found) for key, value in pairs))
    for name in (K_INPUT, STEER_INPUT):
        if name in found:
            raise UsageError(
                f"{source}: the network has an input '{name}', but moexport uses that name for an "
                "input that it adds to graphs",
                hint="rename that parameter of the network's forward",
            )
    if not found:
        raise UsageError(f"{source}: the example contains no tensor", hint=EXAMPLE_FORMS)
    return form, found


def required_args(module: nn.Module) -> list[str]:
    """Returns the parameters of a network's forward that have no default."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return [
        name
        for name, parameter in signature(module.forward).parameters.items()
        if parameter.default is Parameter.empty and parameter.kind in kinds
    ]


def accepts(module: nn.Module, named: Mapping[Any, Any]) -> bool:
    """Whether a network's forward accepts exactly these keywords."""
    try:
        signature(module.forward).bind(**named)
    except TypeError:
        return False
    return True


def _parameter_names(module: nn.Module, count: int) -> list[str]:
    """Returns the names of the first parameters of a forward; those of `*xs` are numbered."""
    names: list[str] = []
    for name, parameter in signature(module.forward).parameters.items():
        if parameter.kind is Parameter.VAR_POSITIONAL:
            names += [f"{name}_{i}" for i in range(count - len(names))]
        elif parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            names.append(name)
    # Too many arguments raise PyTorch's own error when the network runs.
    return [*names, *(f"{INPUT}_{i}" for i in range(len(names), count))][:count]


def _join(name: str, key: object) -> str:
    return f"{name}_{key}" if name else str(key)


def _label(name: str, value: object, found: dict[str, object]) -> Any:
    """Returns an argument with names in place of its tensors, which are added to `found`."""
    if isinstance(value, Mapping):
        return {key: _label(_join(name, key), part, found) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [_label(_join(name or INPUT, i), part, found) for i, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if value is None:
        return None
    found[name or INPUT] = value
    return name or INPUT


def outputs_of(result: object, taken: Sequence[str], what: str) -> dict[str, Tensor]:
    """Returns the tensors that a network's forward returned, by name, without any None.

    The names are the keys of a dictionary, or numbers. `taken` are the names of the inputs, which
    outputs cannot have. Raises FamilyError for values that are not tensors.
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
        earlier = next((other for other, tensor in found.items() if tensor is value), None)
        if earlier is not None:
            raise FamilyError(
                f"{what}: its outputs '{earlier}' and '{name}' are the same tensor",
                hint="return it once: a graph cannot output the same value twice",
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
            yield from _results(_join(name, key), part)
    elif isinstance(value, tuple | list):
        for index, part in enumerate(value):
            yield from _results(_join(name or OUTPUT, index), part)
    elif value is not None or not name:
        yield name, value


def check_outputs(outputs: Mapping[str, Tensor], inputs: int, what: str) -> None:
    """Raises FamilyError for an output of an unsupported type or without a leading batch axis."""
    for name, tensor in outputs.items():
        output, shape = f"{what}: its output '{name}'", tuple(tensor.shape)
        if tensor.dtype == torch.bfloat16:
            raise FamilyError(f"{output} is bfloat16", hint="return y.float()")
        if tensor.is_complex():
            raise FamilyError(f"{output} is complex", hint="return torch.view_as_real(y)")
        if not shape:
            raise FamilyError(
                f"{output} is a scalar, but the first axis of every output must be the batch",
                hint="return one result for each input, without a mean or a loss over the batch",
            )
        if shape[0] != inputs:
            raise FamilyError(
                f"{output} has shape {shape} for {inputs} inputs, but the first axis of every "
                "output must be the batch",
                hint="if it is the batch times the tokens, return y.unflatten(0, (x.shape[0], -1))"
                if shape[0] % inputs == 0
                else "return the batch first: y.movedim(1, 0)",
            )


class TensorInterface(nn.Module):
    """A network that takes one tensor for each of its inputs, in order.

    The network's class becomes a subclass of this one and its own, so submodules keep their paths.
    If `flat`, the network returns a tensor for each output, otherwise what its own forward returns.
    """

    arguments: Arguments
    input_names: tuple[str, ...]
    flat: bool
    own_forward: Callable[..., Any] | None

    def forward(self, *tensors: Tensor) -> Any:
        by_name = dict(zip(self.input_names, tensors, strict=True))
        args, named = _with_tensors((self.arguments.args, dict(self.arguments.named)), by_name)
        forward = super().forward if self.own_forward is None else self.own_forward
        result = forward(*args, **named)
        return tuple(outputs_of(result, self.input_names, "").values()) if self.flat else result


def with_tensor_interface(
    network: nn.Module, arguments: Arguments, input_names: Sequence[str], *, flat: bool = False
) -> nn.Module:
    """Returns a copy of a network with `TensorInterface`; the network itself if it needs none.

    If `flat`, the copy returns a tuple with a tensor for each output. It shares the weights.
    """
    if flat and isinstance(network, TensorInterface):
        network.flat = True
        return network
    if arguments.plain and not flat:
        return network
    copy = sharing_weights(network)
    own = type(copy)
    copy.__class__ = type(own.__name__, (TensorInterface, own), {"__module__": own.__module__})
    assert isinstance(copy, TensorInterface)
    copy.own_forward = vars(copy).pop("forward", None)  # set on the object, not its class
    copy.arguments, copy.input_names, copy.flat = arguments, tuple(input_names), flat
    return copy
