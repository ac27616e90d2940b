"""Records a forward pass of a user's network: its outputs, and the calls of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...data.user_code import user_code
from ...errors import FamilyError
from ..token_routed.own_forward import result_of
from .layers import FoundLayer
from .ports import check_outputs, outputs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """One call of a layer: its arguments, of which x is the first, and its result y.

    Tensors are copied at the time of the call. `structure` is the return value if it is more than a
    tensor. `in_place`: the layer changed an argument in place. `direct`: the network called the
    layer's `forward` instead of the module.
    """

    args: tuple[Any, ...]
    named: Mapping[str, Any]
    y: Tensor
    structure: object = None
    in_place: bool = False
    direct: bool = False

    @property
    def x(self) -> Tensor:
        x: Tensor = self.args[0]
        return x

    @property
    def extra_args(self) -> tuple[Any, ...]:
        return self.args[1:]

    def describe_args(self, start: int = 0) -> list[str]:
        """Describes each argument from a position on, for messages."""
        pairs = [("", value) for value in self.args[start:]]
        pairs += [(f"{key}=", value) for key, value in self.named.items()]
        return [
            f"{name}a tensor {_dtype(value.dtype)} {[*value.shape]}"
            if isinstance(value, Tensor)
            else f"{name}{type(value).__name__} {value!r}"[:60]
            for name, value in pairs
        ]

    def copy_args(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns copies of the arguments, because user code may change arguments in place."""
        return _deep_copy(self.args), _deep_copy(dict(self.named))


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One forward pass: inputs and outputs by name, and each layer's last call by path.

    `single`: the network returned one tensor, not a tuple or dictionary.
    """

    inputs: Mapping[str, Tensor]
    layers: Mapping[str, LayerCall]
    outputs: Mapping[str, Tensor]
    single: bool

    @property
    def finite(self) -> bool:
        """Whether all outputs of the network and its layers are finite."""
        results = (*self.outputs.values(), *(call.y for call in self.layers.values()))
        return all(bool(result.isfinite().all()) for result in results)


def forward_pass(
    module: nn.Module,
    found_layers: Sequence[FoundLayer],
    inputs: Mapping[str, Tensor],
    what: str,
    hint: str = "check that the example, or --set input_shape=…, fits the network",
) -> ForwardPass:
    """Runs a network once on `inputs`; returns its outputs and the calls of its MoE layers.

    The network takes one tensor for each input, in order. Raises UsageError, with `hint`, if its
    forward fails. Raises FamilyError if a layer is called with more than its tokens although no
    user code surrounds it, if something is not computed in float32, or for an unsupported output.
    """
    calls: dict[str, LayerCall] = {}
    with ExitStack() as stack, torch.no_grad():
        for found in found_layers:
            layer = module.get_submodule(found.path)
            stack.enter_context(_record_calls(layer, found.path, calls))
        autocast = stack.enter_context(_Autocast())
        with user_code(f"{what}: its forward failed on {shapes_of(inputs)}", hint):
            result = module(*(tensor.clone() for tensor in inputs.values()))
    if autocast.dtype is not None:
        raise FamilyError(
            f"{what}: its forward computes in {_dtype(autocast.dtype)} under torch.autocast, but "
            "moexport needs a network that computes in float32",
            hint="use a factory that can disable autocast, for example by --set amp=false; "
            "--precision sets the precision of the exported graph",
        )
    by_path = {found.path: found for found in found_layers}
    for path, call in calls.items():
        _check_call(by_path[path], call, what)
    outputs = {n: y.detach() for n, y in outputs_of(result, [*inputs], what).items()}
    check_outputs(outputs, len(next(iter(inputs.values()))), what)
    single = isinstance(result, Tensor)
    return ForwardPass(inputs=inputs, layers=calls, outputs=outputs, single=single)


def shapes_of(inputs: Mapping[str, Tensor]) -> str:
    if len(inputs) == 1:
        return f"an input of shape {[*next(iter(inputs.values())).shape]}"
    return "inputs " + ", ".join(f"{name} {[*x.shape]}" for name, x in inputs.items())


@contextmanager
def _record_calls(layer: nn.Module, path: str, calls: dict[str, LayerCall]) -> Iterator[None]:
    """Records the calls of a layer, or of its `forward` alone, within the context."""
    own_forward, overridden = layer.forward, "forward" in vars(layer)
    pending: list[tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = []

    def begin(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        copies = tuple(map(_copy, args))
        pending.append((copies, {key: _copy(value) for key, value in named.items()}, args))

    def end(returned: object, *, direct: bool) -> None:
        copies, named, args = pending.pop()
        tensors = [(a, b) for a, b in zip(args, copies, strict=True) if isinstance(a, Tensor)]
        calls[path] = LayerCall(
            args=copies,
            named=named,
            y=_copy(result_of(returned)),
            structure=None if isinstance(returned, Tensor) else returned,
            in_place=any(not _equal(a, b) for a, b in tensors),
            direct=direct,
        )

    def forward(*args: Any, **named: Any) -> Any:
        direct = not pending
        if direct:
            begin(layer, args, named)
        returned = own_forward(*args, **named)
        if direct:
            end(returned, direct=True)
        return returned

    hooks = (
        # Runs before the user's hooks, which the layer's replacement does not have.
        layer.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
        layer.register_forward_hook(lambda _, __, returned: end(returned, direct=False)),
    )
    layer.forward = forward
    try:
        yield
    finally:
        if overridden:
            layer.forward = own_forward
        else:
            del layer.forward
        for hook in hooks:
            hook.remove()


def changed_buffers(module: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of a module's buffers that differ from `before`."""
    return [
        name
        for name, buffer in module.named_buffers()
        if name not in before or not _equal(before[name], buffer)
    ]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _copy(value: Any) -> Any:
    """Returns a copy of a tensor, because later code may change it; other values themselves."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _deep_copy(value: Any) -> Any:
    """Returns a structure of arguments with its tensors copied."""
    if isinstance(value, tuple | list):
        return type(value)(map(_deep_copy, value))
    if isinstance(value, dict):
        return {key: _deep_copy(item) for key, item in value.items()}
    return _copy(value)


class _Autocast(TorchFunctionMode):
    """Records the type in which `torch.autocast` computes within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype: torch.dtype | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.is_autocast_enabled("cpu"):
            self.dtype = torch.get_autocast_dtype("cpu")
        return func(*args, **(kwargs or {}))


def _check_call(found: FoundLayer, call: LayerCall, what: str) -> None:
    """Raises FamilyError if this call of a layer shows that the layer cannot be replaced."""
    if not isinstance(call.y, Tensor):
        raise FamilyError(
            f"{what}: {found.label} returns a {type(call.structure).__name__} without a tensor",
            hint="a layer must return y, alone or with others: (y, loss), or {'y': y, …}",
        )
    if not call.args or not isinstance(call.x, Tensor):
        raise FamilyError(
            f"{what}: {found.label} is called without a tensor as its first positional "
            f"argument: {', '.join(call.describe_args()) or 'no arguments'}",
            hint="the network must call it as layer(x, …), with the tokens first",
        )
    if (len(call.args) > 1 or call.named) and not found.own_code:
        names = ", ".join([*(f"a{i}" for i in range(1, len(call.args))), *call.named])
        extra = ", ".join(call.describe_args(1))
        raise FamilyError(
            f"{what}: {found.label} is called with more than its tokens: {extra}",
            hint=f"an adapter with a forward accepts them: moexport.Experts(forward=lambda "
            f"experts, x, {names}: …, experts=…)",
        )
    for verb, tensor in (("is called on", call.x), ("returns", call.y)):
        if tensor.dtype != torch.float32:
            raise FamilyError(
                f"{what}: {found.label} {verb} {_dtype(tensor.dtype)}, but moexport needs layers "
                "that compute in float32",
                hint="remove the cast; --precision sets the precision of the exported graph",
            )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
