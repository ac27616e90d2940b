"""What the layers of a user's own network are called with, and what they and the network return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import FamilyError, MoexportError, UsageError
from .layers import LayerPlace

FITS = "does the example, or --set input_shape=…, fit the network?"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """One call of a layer: what it was given, x first, and what it returned, y.

    All are as they were at the call. `in_place` says whether the layer changed x, and `direct`
    whether it was its `forward` that was called, and not the module.
    """

    args: tuple[Any, ...]
    named: Mapping[str, Any]
    y: Tensor
    in_place: bool = False
    direct: bool = False

    @property
    def x(self) -> Tensor:
        """The tokens."""
        x: Tensor = self.args[0]
        return x

    @property
    def further(self) -> tuple[Any, ...]:
        """What stood after the tokens."""
        return self.args[1:]


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """What one forward pass showed: its inputs, the layers' last calls by path, and the result."""

    inputs: Tensor
    layers: Mapping[str, LayerCall]
    result: Tensor

    @property
    def finite(self) -> bool:
        """Whether the network and all its layers returned numbers."""
        results = (self.result, *(call.y for call in self.layers.values()))
        return all(bool(each.isfinite().all()) for each in results)


def forward_pass(
    module: nn.Module,
    places: Sequence[LayerPlace],
    inputs: Tensor,
    what: str,
    hint: str = FITS,
) -> ForwardPass:
    """Runs the network once on `inputs` and returns what those of its MoE layers did that it calls.

    Raises UsageError when its forward fails, with `hint`, and FamilyError when a layer is called
    with more than its tokens, when something is not computed in float32, or when the result is not
    one tensor. A router's layer may be called with more, which its router is given.
    """
    calls: dict[str, LayerCall] = {}
    with ExitStack() as watching, torch.no_grad():
        for place in places:
            watch = _Watch(module.get_submodule(place.path), place.path, calls)
            watching.enter_context(watch.watching())
        autocast = watching.enter_context(_Autocast())
        try:
            result = module(inputs.clone())
        except MoexportError:
            raise
        except Exception as error:  # the user's code may fail in any way
            raise UsageError(
                f"{what}: its forward failed on an input of shape {list(inputs.shape)}: "
                f"{type(error).__name__}: {error}",
                hint=hint,
            ) from error
    if autocast.dtype is not None:
        raise FamilyError(
            f"{what}: its forward computes in {_dtype(autocast.dtype)} under torch.autocast, and "
            "moexport takes a network that computes in float32",
            hint="give a factory whose network leaves autocast out, by an argument, say (--set "
            "amp=false); --precision says in what the exported graph computes",
        )
    by_path = {place.path: place for place in places}
    for path, call in calls.items():
        _check_call(by_path[path], call, what)
    if not isinstance(result, Tensor):
        raise FamilyError(
            f"{what}: its forward returned a {type(result).__name__}, not one tensor",
            hint="give a factory whose forward returns the logits alone",
        )
    if result.dtype == torch.bfloat16:
        raise FamilyError(f"{what}: its forward returned bfloat16", hint="return y.float()")
    return ForwardPass(inputs=inputs, layers=calls, result=result.detach())


class _Watch:
    """Enters each call of a layer under its path: of the module, or of its `forward` alone."""

    def __init__(self, layer: nn.Module, path: str, calls: dict[str, LayerCall]) -> None:
        self.layer, self.path, self.calls = layer, path, calls
        self.own_forward = layer.forward
        self.under_way: list[tuple[tuple[Any, ...], Mapping[str, Any], tuple[Any, ...]]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the context the layer is watched."""
        replaced = "forward" in vars(self.layer)
        hooks = (
            # Before hooks of the user's own, which what replaces the layer does not have.
            self.layer.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            self.layer.register_forward_hook(self._after, with_kwargs=True),
        )
        self.layer.forward = self._forward
        try:
            yield
        finally:
            if replaced:
                self.layer.forward = self.own_forward
            else:
                del self.layer.forward
            for hook in hooks:
                hook.remove()

    def _before(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        copies = tuple(map(_copied, args))
        self.under_way.append((copies, {key: _copied(each) for key, each in named.items()}, args))

    def _after(self, _: nn.Module, args: object, named: object, returned: object) -> None:
        del args, named  # as hooks of the user's own changed them
        self._enter(returned, direct=False)

    def _forward(self, *args: Any, **named: Any) -> Any:
        direct = not self.under_way
        if direct:
            self._before(self.layer, args, named)
        returned = self.own_forward(*args, **named)
        if direct:
            self._enter(returned, direct=True)
        return returned

    def _enter(self, returned: object, *, direct: bool) -> None:
        copies, named, args = self.under_way.pop()
        tensors = [(a, b) for a, b in zip(args, copies, strict=True) if isinstance(a, Tensor)]
        in_place = any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in tensors)
        y = _copied(returned)
        self.calls[self.path] = LayerCall(
            args=copies, named=named, y=y, in_place=in_place, direct=direct
        )


def _copied(value: Any) -> Any:
    """A tensor as it is now: what comes after may change it in place."""
    return value.detach().clone() if isinstance(value, Tensor) else value


class _Autocast(TorchFunctionMode):
    """Notes in which type `torch.autocast` makes the calls compute that are made within."""

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
    alone = (len(call.args) == 1 and not call.named) or place.routed is not None
    tensors = isinstance(call.y, Tensor) and call.args and isinstance(call.x, Tensor)
    if not (alone and tensors):
        raise FamilyError(
            f"{what}: {place.path or 'the layer'} is called with more than its tokens, or returns "
            "more than a tensor",
            hint="its forward must be y = layer(x) at inference",
        )
    for verb, tensor in (("is called on", call.x), ("returns", call.y)):
        if tensor.dtype != torch.float32:
            raise FamilyError(
                f"{what}: {place.at} {verb} {_dtype(tensor.dtype)}, and moexport takes layers that "
                "compute in float32",
                hint="leave the cast out; --precision says in what the exported graph computes",
            )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
