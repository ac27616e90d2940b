"""Calls of the layers in a user's network, and the outputs of layers and network."""

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
from .layers import LayerPlace
from .ports import check_outputs, outputs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """One call of a layer: its arguments, x first, and its return value, with its result y.

    All are copies from the time of the call. `structure` is the return value if that is more than a
    tensor. `in_place`: the layer changed x. `direct`: the network called its `forward`, not the
    module.
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
    def further(self) -> tuple[Any, ...]:
        return self.args[1:]

    def described(self, first: int = 0) -> list[str]:
        """Describes the arguments from a position on, for messages."""
        pairs = [("", value) for value in self.args[first:]]
        pairs += [(f"{key}=", value) for key, value in self.named.items()]
        return [
            f"{name}a tensor {_dtype(value.dtype)} {[*value.shape]}"
            if isinstance(value, Tensor)
            else f"{name}{type(value).__name__} {value!r}"[:60]
            for name, value in pairs
        ]

    def copied(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns copies of the arguments, which user code may change in place."""
        return _copied_in_depth(self.args), _copied_in_depth(dict(self.named))


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One forward pass: inputs and outputs by name, and each layer's last call.

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
    places: Sequence[LayerPlace],
    inputs: Mapping[str, Tensor],
    what: str,
    hint: str = "check that the example, or --set input_shape=…, fits the network",
) -> ForwardPass:
    """Runs the network once on `inputs`; returns its outputs and the calls of its MoE layers.

    It takes a tensor for each input, in order. Raises UsageError, with `hint`, if its forward
    fails, and FamilyError if a layer is called with more than its tokens, if something is not
    computed in float32, or for an output of an unsupported type. A layer with user code around it
    may be called with more.
    """
    calls: dict[str, LayerCall] = {}
    with ExitStack() as watching, torch.no_grad():
        for place in places:
            layer = module.get_submodule(place.path)
            watching.enter_context(_recorded(layer, place.path, calls))
        autocast = watching.enter_context(_Autocast())
        with user_code(f"{what}: its forward failed on {shapes_of(inputs)}", hint):
            result = module(*(tensor.clone() for tensor in inputs.values()))
    if autocast.dtype is not None:
        raise FamilyError(
            f"{what}: its forward computes in {_dtype(autocast.dtype)} under torch.autocast, but "
            "moexport needs a network that computes in float32",
            hint="use a factory that can disable autocast, for example by --set amp=false; "
            "--precision sets what the exported graph computes in",
        )
    by_path = {place.path: place for place in places}
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
def _recorded(layer: nn.Module, path: str, calls: dict[str, LayerCall]) -> Iterator[None]:
    """Records each call of a layer, of the module or of its `forward` alone, in the context."""
    own_forward, replaced = layer.forward, "forward" in vars(layer)
    under_way: list[tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = []

    def begin(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        copies = tuple(map(_copied, args))
        under_way.append((copies, {key: _copied(value) for key, value in named.items()}, args))

    def end(returned: object, *, direct: bool) -> None:
        copies, named, args = under_way.pop()
        tensors = [(a, b) for a, b in zip(args, copies, strict=True) if isinstance(a, Tensor)]
        calls[path] = LayerCall(
            args=copies,
            named=named,
            y=_copied(result_of(returned)),
            structure=None if isinstance(returned, Tensor) else returned,
            in_place=any(not _same(a, b) for a, b in tensors),
            direct=direct,
        )

    def forward(*args: Any, **named: Any) -> Any:
        direct = not under_way
        if direct:
            begin(layer, args, named)
        returned = own_forward(*args, **named)
        if direct:
            end(returned, direct=True)
        return returned

    hooks = (
        # This hook runs before the user's, which the layer's replacement does not have.
        layer.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
        layer.register_forward_hook(lambda _, __, returned: end(returned, direct=False)),
    )
    layer.forward = forward
    try:
        yield
    finally:
        if replaced:
            layer.forward = own_forward
        else:
            del layer.forward
        for hook in hooks:
            hook.remove()


def changed_buffers(module: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the buffers of a module that changed."""
    return [
        name
        for name, buffer in module.named_buffers()
        if name not in before or not _same(before[name], buffer)
    ]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _copied(value: Any) -> Any:
    """A copy of a tensor, since later code may change it in place."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _copied_in_depth(value: Any) -> Any:
    """A structure of arguments with its tensors copied."""
    if isinstance(value, tuple | list):
        return type(value)(map(_copied_in_depth, value))
    if isinstance(value, dict):
        return {key: _copied_in_depth(item) for key, item in value.items()}
    return _copied(value)


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


def _check_call(place: LayerPlace, call: LayerCall, what: str) -> None:
    """Raises FamilyError for a call of a layer that cannot be replaced."""
    if not isinstance(call.y, Tensor):
        raise FamilyError(
            f"{what}: {place.at} returns a {type(call.structure).__name__} without a tensor",
            hint="a layer must return y, alone or with others: (y, loss), or {'y': y, …}",
        )
    if not call.args or not isinstance(call.x, Tensor):
        raise FamilyError(
            f"{what}: {place.at} is called with no tensor before its named arguments "
            f"({', '.join(call.named)})",
            hint="the network must call it as layer(x, …), with the tokens first",
        )
    if (len(call.args) > 1 or call.named) and not place.own_code:
        names = ", ".join([*(f"a{i}" for i in range(1, len(call.args))), *call.named])
        further = ", ".join(call.described(1))
        raise FamilyError(
            f"{what}: {place.at} is called with more than its tokens: {further}",
            hint=f"an adapter with a forward accepts them: moexport.Experts(forward=lambda "
            f"experts, x, {names}: …, experts=…)",
        )
    for verb, tensor in (("is called on", call.x), ("returns", call.y)):
        if tensor.dtype != torch.float32:
            raise FamilyError(
                f"{what}: {place.at} {verb} {_dtype(tensor.dtype)}, but moexport needs layers that "
                "compute in float32",
                hint="remove the cast; --precision sets what the exported graph computes in",
            )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
