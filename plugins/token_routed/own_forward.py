"""User code around one of our layers, which runs and is traced unchanged.

`OwnForward` replaces the user's layer. If a router chooses experts for tokens, it determines k,
which can change if the router has a parameter `k`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import getitem
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ...data.user_code import user_code
from ...errors import UsageError
from ...exporter.inputs import by_name
from ...exporter.model import Host, Model
from ...graphs.layers.base import MoELayer, sharing_weights
from ...graphs.layers.soft_moe import SoftMoE, SoftMoESpec
from .layers.experts import Experts, ExpertsSpec

Router = Callable[..., tuple[Tensor, Tensor]]
"""Takes the arguments of the user's layer and returns index [..., k] and weights [..., k]."""

Forward = Callable[..., Any]
"""User code around our layer: takes our layer, then the arguments of the user's layer."""

CHANNELS = "if channels come first, a forward moves them: experts(x.movedim(1, -1), …)"

ROUTER_HINT = (
    "a router takes the layer's arguments and returns index [..., k], of integers from 0 to n - 1, "
    "and weights [..., k], for the tokens x [..., d]; " + CHANNELS
)

CALLS = (
    "experts(x, index, weights) for tokens x [..., d], experts(x, weights=w) for w [..., n], or "
    "experts(slots, combine=C) for slots [b, n, p, d] and C [b, m, n, p]; " + CHANNELS
)

ROUTER_K = "use a k that the router supports"

K = "k"
"""The name of a router's parameter for the number of experts."""

EQUAL_SUMS = 1e-5
"""Sums of C whose relative difference is smaller differ only by rounding."""


class Bank(Protocol):
    """A description of experts (`descriptions.ExpertsDescription`)."""

    def build(self, name: str, k: int = 1) -> Experts: ...

    def build_for_slots(self, name: str, slots: int) -> SoftMoE: ...


class OwnForward(nn.Module):
    """User code around our layer: takes and returns what the user's layer does.

    `host` is the module whose parameters the code reads. `k` is passed to code that chooses experts
    for tokens; None passes none. With `all_weights` the code returns the weights of all experts,
    and the k largest are used. `even`: all experts have the same sum in its C, by which Algorithm 1
    then cannot choose. `returned` is what the user's layer returned, if that is more than a tensor.
    """

    def __init__(
        self,
        experts: MoELayer,
        code: Code,
        host: nn.Module | None,
        *,
        all_weights: bool = False,
        even: bool = False,
        returned: object = None,
        k: int | None = None,
    ) -> None:
        super().__init__()
        self.experts: nn.Module = experts
        self.spec = experts.spec
        self.returned = returned
        self.code = code
        self.host = host
        self.all_weights = all_weights
        self.even = even
        self.k = k

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnForward:
        # The code may be a closure over these modules, so they are shared.
        experts = sharing_weights(self.experts)
        assert isinstance(experts, MoELayer)
        copy = OwnForward(
            experts,
            self.code,
            self.host,
            all_weights=self.all_weights,
            even=self.even,
            returned=self.returned,
            k=self.k,
        )
        memo[id(self)] = copy.train(self.training)
        return copy

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the user's layer that the surrounding network reads."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            host = self.__dict__.get("_modules", {}).get("host")
            if host is None:
                raise
        return getattr(host, name)

    @property
    def takes_k(self) -> bool:
        """Whether the code accepts a different number of experts."""
        return self.all_weights or self.code.takes_k

    @property
    def current_k(self) -> int:
        return self.spec.trained_k if self.k is None else self.k

    def forward(self, *args: Any, **named: Any) -> Any:
        """Returns the code's result, in the structure of what the user's layer returned."""
        k = self.k if self.code.takes_k else None
        y = self.code.run(self._called, args, named, k)
        return like(self.returned, y)

    def _called(self, *args: Any, **named: Any) -> Tensor:
        """Computes the experts for a call by the code, which receives this method as `experts`."""
        spec = self.spec
        bank = isinstance(spec, ExpertsSpec) or (
            isinstance(spec, SoftMoESpec) and spec.external_routing
        )
        if not bank:
            y: Tensor = self.experts(*args, **named)
            return y
        call = ExpertsCall.of(args, named, self.spec.experts)
        if call.combine is not None:
            self._check_slots(call.combine.shape[3])
        elif call.index is None:
            call = call.with_largest(self.current_k)
        return call.through(self.experts)

    def _check_slots(self, slots: int) -> None:
        """Raises UsageError if the number of slots is not the layer's."""
        assert isinstance(self.spec, SoftMoESpec)
        expected, symbolic = self.spec.slots, isinstance(slots, torch.SymInt)
        if not symbolic and slots == expected:
            return
        given = "a number of slots that depends on the input" if symbolic else f"{slots} slots"
        raise UsageError(
            f"layer {self.spec.name}: its forward passes {given} to experts(slots, combine=C), "
            f"but passed {expected} when the layer was loaded",
            hint="in a graph an expert's number of slots is fixed: make it independent of the "
            "batch and the tokens, or fix both (--batch N and an example of N inputs)",
        )


class Code:
    """A user's function around a bank of experts; a router alone is a short form of one.

    It is not a module, but may contain modules, which are already part of its host.
    """

    def __init__(self, forward: Forward | None, router: Router | None = None) -> None:
        self.router = router
        self._forward = forward

    @property
    def alone(self) -> bool:
        """Whether there is no user code, because the layer is called with a router's choice."""
        return self.router is None and self._forward is None

    @property
    def takes_k(self) -> bool:
        function = self.router if self._forward is None else self._forward
        return function is not None and takes_k(function)

    def run(
        self,
        experts: Callable[..., Tensor],
        args: tuple[Any, ...],
        named: Mapping[str, Any],
        k: int | None = None,
    ) -> Any:
        """Calls the function with `experts` and returns its result."""
        if self._forward is not None:
            return self._forward(experts, *args, **named, **({} if k is None else {K: k}))
        index, weights = routing(self.router, args, named, k)
        return experts(args[0], index, weights)


class Tried:
    """A bank of experts for a trial run of user code: builds the layer that the code calls."""

    def __init__(self, bank: Bank, name: str = "") -> None:
        self._bank, self._name = bank, name
        self.layer: MoELayer | None = None
        self.calls = 0
        self.call: ExpertsCall | None = None

    @property
    def all_weights(self) -> bool:
        """Whether the code passed the weights of all experts."""
        return self.call is not None and self.call.index is None and self.call.combine is None

    @property
    def even(self) -> bool:
        """Whether all experts have the same sum of C in each input."""
        if self.call is None or self.call.combine is None:
            return False
        sums = self.call.combine.sum(dim=(1, 3))
        return bool((sums.amax(1) - sums.amin(1) <= EQUAL_SUMS * sums.amax(1)).all())

    def terms(self, most: int) -> tuple[Tensor, Tensor] | None:
        """Returns each expert's output, [t, c, o], and its weight, [t, c], for up to `most` tokens.

        Each slot of an expert counts as an expert. Returns None if the bank was not called.
        """
        if self.call is None or self.layer is None:
            return None
        call, layer = self.call, self.layer
        if call.combine is not None:
            b, m = call.combine.shape[:2]
            slots = torch.eye(call.combine[0, 0].numel()).expand(b, -1, -1)
            outputs: Tensor = layer(slots, call.x.flatten(1, 2))  # [b, n·p, o]
            by_token = outputs.unsqueeze(1).expand(b, m, *outputs.shape[1:]).flatten(0, 1)
            return by_token[:most], call.combine.flatten(0, 1).flatten(1)[:most]
        assert call.weights is not None and isinstance(layer, Experts)
        x = call.x.flatten(0, -2)[:most]
        outputs = torch.stack([layer.expert(i, x) for i in range(layer.spec.experts)], dim=1)
        weights = call.weights.flatten(0, -2)[:most]
        if call.index is not None:
            index = call.index.flatten(0, -2)[:most]
            weights = weights.new_zeros(outputs.shape[:2]).scatter_add(1, index, weights)
        return outputs, weights

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        self.calls += 1
        experts = self._bank.build(self._name)
        call = ExpertsCall.of(args, named, experts.spec.experts)
        self.call = call
        if call.combine is not None:
            self.layer = self._bank.build_for_slots(self._name, call.combine.shape[3])
            call.check(self.layer.spec.dim)
            return call.through(self.layer)
        call.check(experts.spec.dim)
        if call.index is None:
            call = call.with_largest(experts.spec.experts)
        assert call.index is not None
        check_experts(call.index, experts.spec.experts)
        self.layer = self._bank.build(self._name, call.index.shape[-1])
        return call.through(self.layer)


class InPlace(nn.Module):
    """Replaces a user's layer with ours; adapts layout, residual and the structure of the result.

    The tokens of `pixels` are the pixels of (b, d, …), row by row; each of `vectors` (b, d) is a
    token. With `returned` our result takes the place of the main tensor in its structure.
    """

    def __init__(
        self,
        layer: nn.Module,
        layout: Literal["tokens", "pixels", "vectors"] = "tokens",
        *,
        residual: bool = False,
        returned: object = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.layout, self.residual, self.returned = layout, residual, returned

    def forward(self, *args: Any, **named: Any) -> Any:
        """Returns our layer's result in the structure of the user's."""
        if self.layout == "tokens":
            y = self.layer(*args, **named)
        elif self.layout == "vectors":
            y = self.layer(args[0].unsqueeze(1)).squeeze(1)
        else:
            y = self.layer(args[0].flatten(2).transpose(1, 2)).transpose(1, 2)
            y = y.reshape(*y.shape[:2], *args[0].shape[2:])
        if self.residual:
            y = y + args[0]
        return like(self.returned, y)


RESULTS = ("y", "output", "hidden_states", "last_hidden_state")
"""The usual names of the main result of a layer that returns several by name."""


def result_of(returned: object) -> Tensor | None:
    """Returns the tensor that is a layer's main result.

    Of several it is the one with a usual name, or else the first.
    """
    if isinstance(returned, Tensor):
        return returned
    named = _by_name(returned)
    return next((value for _, value in named if isinstance(value, Tensor)), None)


def like(returned: object, y: Any) -> Any:
    """Returns y within the structure of what a layer returned; y itself if `returned` is None.

    Other floats become NaN, so that nothing can be computed from them, and other tensors None.
    """
    if returned is None or not isinstance(y, Tensor):
        return y
    named = _by_name(returned)
    main = next((key for key, value in named if isinstance(value, Tensor)), None)
    others = {key: _invalidated(value) for key, value in named}
    items = {key: y if key == main else others[key] for key in _keys(returned)}
    if isinstance(returned, Mapping):
        return type(returned)(items)  # type: ignore[call-arg]
    if is_dataclass(returned) and not isinstance(returned, type):
        return replace(returned, **items)
    constructor: Any = type(returned)
    return (
        constructor(*items.values())
        if hasattr(returned, "_fields")
        else constructor(items.values())
    )


def _keys(returned: object) -> list[Any]:
    if isinstance(returned, Mapping):
        return list(returned)
    if is_dataclass(returned):
        return [field.name for field in fields(returned)]
    return list(range(len(returned))) if isinstance(returned, tuple | list) else []


def _by_name(returned: object) -> list[tuple[Any, Any]]:
    """Returns what a layer returned, by name or number, with the usual names first."""
    keys = _keys(returned)
    first = [key for key in RESULTS if key in keys]
    get: Any = getattr if is_dataclass(returned) and not isinstance(returned, Mapping) else getitem
    return [(key, get(returned, key)) for key in [*first, *(k for k in keys if k not in first)]]


def _invalidated(value: object) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.full((), torch.nan) if value.ndim == 0 and value.is_floating_point() else None


@dataclass
class ExpertsCall:
    """The arguments of a bank of experts: `x` [..., d] or slots [b, n, p, d], and the weights.

    `index` and `weights` are [..., k]; `weights` without `index` is [..., n]. `combine` is C, [b,
    m, n, p].
    """

    x: Tensor
    index: Tensor | None = None
    weights: Tensor | None = None
    combine: Tensor | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...], named: Mapping[str, Any], n: int) -> ExpertsCall:
        """Reads the arguments of a call; raises UsageError if the tensors do not fit each other."""
        try:
            call = cls(*args, **named)
        except TypeError as error:
            raise UsageError(
                f"its forward calls experts({', '.join([*map(_kind, args), *named])})", hint=CALLS
            ) from error
        tensors = {
            key: getattr(call, key)
            for key in ("x", "index", "weights", "combine")
            if getattr(call, key) is not None
        }
        for key, value in tensors.items():
            if not isinstance(value, Tensor):
                raise UsageError(
                    f"its forward passes a {_kind(value)} as {key} to experts(…)", hint=CALLS
                )
        if tensors.keys() == {"x", "combine"}:
            call._check_slots(n)
        elif tensors.keys() == {"x", "weights"}:
            if call.weights.shape != (*call.x.shape[:-1], n):  # type: ignore[union-attr]
                raise UsageError(
                    f"its forward passes {_sizes(tensors)} to experts(x, weights=w), but w must be "
                    f"[..., {n}] for the tokens x [..., d]",
                    hint=CALLS,
                )
        elif tensors.keys() == {"x", "index", "weights"}:
            caller = "its forward passes to experts(x, index, weights)"
            x, index, weights = (tensors[key] for key in ("x", "index", "weights"))
            call.index, call.weights = _check_fit(caller, x, index, weights, CALLS)
        else:
            raise UsageError(f"its forward calls experts({', '.join(tensors)})", hint=CALLS)
        return call

    def _check_slots(self, n: int) -> None:
        assert self.combine is not None
        if self.x.ndim == self.combine.ndim == 3 and self.x.shape[1] == n:  # a slot for each expert
            self.x, self.combine = self.x.unsqueeze(2), self.combine.unsqueeze(3)
        x, combine = self.x, self.combine
        fits = x.ndim == combine.ndim == 4 and x.shape[1] == n and x.shape[0] == combine.shape[0]
        if not fits or combine.shape[2:] != x.shape[1:3]:
            raise UsageError(
                f"its forward passes slots {list(x.shape)} and C {list(combine.shape)} to "
                f"experts(slots, combine=C), but there are {n} experts",
                hint="slots are [b, n, p, d] and C is [b, m, n, p]: an expert's slots are a "
                "separate axis (unflatten)",
            )

    def check(self, d: int) -> None:
        """Raises UsageError if the width of the tokens is not d."""
        if self.x.shape[-1] != d:
            raise UsageError(
                f"its forward calls experts(…) with shape {list(self.x.shape)}, but the experts "
                f"take tokens (…, {d})",
                hint=CHANNELS
                if d in self.x.shape[1:-1]
                else "d is a token's width: a first map is an nn.Linear or [h, d], w1 is [n, d, h]",
            )

    def with_largest(self, k: int) -> ExpertsCall:
        """Returns the call with the k largest weights of each token."""
        assert self.weights is not None
        n = self.weights.shape[-1]
        if k == n:
            index = torch.arange(n, device=self.x.device).expand(self.weights.shape)
            return ExpertsCall(self.x, index, self.weights)
        weights, index = self.weights.topk(k, dim=-1)
        return ExpertsCall(self.x, index, weights)

    def through(self, layer: nn.Module) -> Tensor:
        """Returns the layer's outputs: [b, m, o] for slots, [..., o] for tokens."""
        if self.combine is not None:
            y: Tensor = layer(self.combine.flatten(2), self.x.flatten(1, 2))
            return y
        assert self.index is not None and self.weights is not None
        tensors = (self.x, self.index, self.weights)
        rows: Tensor = layer(*(tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors))
        return rows.reshape(*self.x.shape[:-1], rows.shape[-1])


def _kind(value: object) -> str:
    return type(value).__name__


def _sizes(tensors: Mapping[str, Tensor]) -> str:
    return " and ".join(f"{key} {list(tensor.shape)}" for key, tensor in tensors.items())


def takes_k(router: Router) -> bool:
    """Returns whether a router has a parameter `k`."""
    called = router.forward if isinstance(router, nn.Module) else router
    try:
        return K in inspect.signature(called).parameters
    except (TypeError, ValueError):  # code that is not written in Python
        return False


def routing(
    router: Router | None, inputs: tuple[Any, ...], named: Mapping[str, Any], k: int | None
) -> tuple[Tensor, Tensor]:
    """Returns a router's index, int64, and weights, at least float32, each [..., k], for inputs.

    Without a router they are the second and third input. Raises `UsageError` unless they are
    tensors of the same shape, with the tokens' axes before the last one.
    """
    if router is None:
        result: Any = (*inputs[1:], *named.values())
        caller = "the layer is called with"
    else:
        result = router(*inputs, **named, **({} if k is None else {K: k}))
        caller = "its router returned"
    listed = result if isinstance(result, tuple | list) else [result]
    if len(listed) != 2 or not all(isinstance(value, Tensor) for value in listed):
        kinds = ", ".join(map(_kind, listed))
        raise UsageError(f"{caller} {kinds or 'nothing'}, not index and weights", hint=ROUTER_HINT)
    index, weights = listed
    return _check_fit(caller, inputs[0], index, weights, ROUTER_HINT)


def _check_fit(
    caller: str, x: Tensor, index: Tensor, weights: Tensor, hint: str
) -> tuple[Tensor, Tensor]:
    """Returns index, as int64, and weights; raises `UsageError` if they do not fit the tokens x."""
    tokens = x.shape[:-1]
    fits = index.ndim > len(tokens) and index.shape[:-1] == tokens and weights.shape == index.shape
    if not fits or index.is_floating_point():
        shapes = f"index {index.dtype} {list(index.shape)} and weights {list(weights.shape)}"
        raise UsageError(
            f"{caller} {shapes}, for tokens {list(x.shape)}".replace("torch.", ""), hint=hint
        )
    return index.to(torch.int64), weights.to(torch.promote_types(weights.dtype, torch.float32))


def check_experts(index: Tensor, experts: int) -> None:
    """Raises `UsageError` for an index of experts that do not exist."""
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= experts:
        raise UsageError(
            f"its router chose expert {low if low < 0 else high}, but the experts are 0 to "
            f"{experts - 1}",
            hint="experts must have n entries, in the order of the router's numbers",
        )


class RouterHost(Host):
    """The host of networks with routers around our layers."""

    def with_k(self, model: Model, k: Mapping[str, int | None]) -> Model:
        """Returns a model with the same weights, whose routers use this k in each layer.

        Returns the model itself if no k changes. Raises `UsageError` for a k that a router does not
        support, because it has no parameter `k` or returns a different number of experts.
        """
        for layer in model.module.modules():
            if not (isinstance(layer, OwnForward) and layer.even):
                continue
            if k[layer.spec.name] != layer.spec.experts:
                raise UsageError(
                    f"--k: every expert of layer {layer.spec.name} has the same sum of combine "
                    "weights C, so Algorithm 1 cannot choose by it",
                    hint="leave --k out: a C that is a softmax over the tokens has the same sum "
                    "for every expert",
                )
        routed = {n: layer for n, layer in _by_layer(model.module).items() if n in model.layers}
        changes = {name: k[name] for name, layer in routed.items() if k[name] != layer.current_k}
        for name, new_k in changes.items():
            _check_change(name, routed[name], new_k)
        if not changes:
            return model
        module = sharing_weights(model.module)
        for name, layer in _by_layer(module).items():
            if name in changes:
                layer.k = changes[name]
        changed = model.with_module(module)
        if model.example is not None:  # a factory's network; a family's router supports every k
            _check_routers_on_example(changed, changes)
        return changed


def _by_layer(module: nn.Module) -> dict[str, OwnForward]:
    """Returns the user code that chooses experts for tokens, by the name of its layer."""
    layers = [layer for layer in module.modules() if isinstance(layer, OwnForward)]
    return {layer.spec.name: layer for layer in layers if isinstance(layer.spec, ExpertsSpec)}


def _check_change(name: str, routed: OwnForward, new_k: int | None) -> None:
    n, trained = routed.spec.experts, routed.spec.trained_k
    if new_k is None:
        raise UsageError(
            f"--k input: the router of layer {name} is part of the graph, where its k is constant",
            hint="export a bundle for each k"
            if routed.takes_k
            else "leave --k out: this router supports only one k",
        )
    if routed.code.alone:
        raise UsageError(
            f"--k {new_k}: the network around layer {name} chooses its experts, {trained} for "
            "each row, and has no parameter k",
            hint="leave --k out, or add an argument for it to the factory and set that with --set",
        )
    if not routed.takes_k:
        every = f"all {n} experts" if trained == n else f"{trained} of {n} experts"
        raise UsageError(
            f"--k {new_k}: the router of layer {name} selects {every} for each token and has no "
            "parameter k",
            hint="leave --k out; a router that can choose fewer has a parameter k: "
            f"def route(x, k={trained})",
        )


def _check_routers_on_example(model: Model, changes: Mapping[str, int | None]) -> None:
    """Runs the network once on its example, since a router may refuse a k or return another."""
    assert model.example is not None, "a factory's network has an example"
    widths: dict[str, int] = {}

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, Experts)
        widths[layer.spec.name] = inputs[1].shape[-1]

    hooks = [
        layer.register_forward_pre_hook(record)
        for layer in model.layers.values()
        if isinstance(layer, Experts)
    ]
    text = ", ".join(f"{name} {new_k}" for name, new_k in changes.items())
    try:
        with torch.no_grad(), user_code(f"--k ({text}): the router failed", ROUTER_K):
            arrays = by_name(model.example, model.inputs).values()
            model.module(*map(torch.from_numpy, arrays))
    finally:
        for hook in hooks:
            hook.remove()
    for name, new_k in changes.items():
        if widths[name] != new_k:
            raise UsageError(
                f"--k {new_k}: the router of layer {name} was called with k={new_k}, but returns "
                f"{widths[name]}",
                hint="its parameter k must be the number of experts of each token",
            )
