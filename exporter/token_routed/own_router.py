"""A user's own router around our experts: its code is run and traced as it is.

`RoutedExperts` stands where the user's layer stood. Its k is the router's: a smaller one is asked
of the router, which says by a parameter `k` that it can be asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MoexportError, UsageError
from ...graphs.layers.base import sharing_weights
from ...graphs.layers.experts import Experts
from ..model import Model

Router = Callable[..., tuple[Tensor, Tensor]]
"""Takes what the layer is called with, and returns index [..., k] and weights [..., k]."""

ROUTER_HINT = (
    "a router takes what the layer takes and returns index [..., k], of whole numbers from 0 \
to n - 1, and weights [..., k], for the tokens x [..., d]"
)

K = "k"
"""What a router calls the number of experts that it can be asked for."""


class RoutedExperts(nn.Module):
    """Experts with the router that chooses them: x [..., d] to [..., o], as the user's layer does.

    `host` is the module whose parameters the router reads. Without a `router` the layer is called
    with index and weights. `k` is what the router is asked for; None where it is not asked.
    """

    def __init__(
        self, experts: Experts, router: Router | None, host: nn.Module | None, k: int | None = None
    ) -> None:
        super().__init__()
        self.experts = experts
        self.router = None if router is None else _Unregistered(router)
        self.host = host
        self.k = k

    def __deepcopy__(self, memo: dict[int, Any]) -> RoutedExperts:
        # The router may be a closure, which stays that of these modules: they are shared.
        experts = sharing_weights(self.experts)
        assert isinstance(experts, Experts)
        router = None if self.router is None else self.router.function
        copy = RoutedExperts(experts, router, self.host, self.k).train(self.training)
        memo[id(self)] = copy
        return copy

    @property
    def takes_k(self) -> bool:
        """Whether the router can be asked for another number of experts."""
        return self.router is not None and takes_k(self.router.function)

    @property
    def current_k(self) -> int:
        """How many experts the router gives each token."""
        return self.experts.spec.trained_k if self.k is None else self.k

    def forward(self, x: Tensor, *further: Any, **named: Any) -> Tensor:
        """Maps tokens x [..., d] to [..., o]; the router is given everything."""
        function = None if self.router is None else self.router.function
        index, weights = routing(function, (x, *further), named, self.k)
        rows: Tensor = self.experts(
            x.reshape(-1, x.shape[-1]),
            index.reshape(-1, index.shape[-1]),
            weights.reshape(-1, weights.shape[-1]),
        )
        return rows.reshape(*x.shape[:-1], rows.shape[-1])


class _Unregistered:
    """Holds a router that is a module itself, which is registered as part of its host already."""

    def __init__(self, function: Router) -> None:
        self.function = function


def takes_k(router: Router) -> bool:
    """Whether a router has a parameter `k`."""
    called = router.forward if isinstance(router, nn.Module) else router
    try:
        return K in inspect.signature(called).parameters
    except (TypeError, ValueError):  # code that is not Python's
        return False


def routing(
    router: Router | None, inputs: tuple[Any, ...], named: Mapping[str, Any], k: int | None
) -> tuple[Tensor, Tensor]:
    """Returns index, int64, and weights, float32, each [..., k]: what a router gives for inputs.

    Without a router they are the second and third input. Raises `UsageError` for what are not
    tensors of one shape with the tokens' axes before the last.
    """
    if router is None:
        found: Any = (*inputs[1:], *named.values())
        whose = "the layer is called with"
    else:
        found = router(*inputs, **named, **({} if k is None else {K: k}))
        whose = "its router returned"
    listed = found if isinstance(found, tuple | list) else [found]
    if len(listed) != 2 or not all(isinstance(each, Tensor) for each in listed):
        kinds = ", ".join(type(each).__name__ for each in listed)
        raise UsageError(f"{whose} {kinds or 'nothing'}, not index and weights", hint=ROUTER_HINT)
    index, weights = listed
    tokens = inputs[0].shape[:-1]
    fits = index.ndim > len(tokens) and index.shape[:-1] == tokens and weights.shape == index.shape
    if not fits or index.is_floating_point():
        shapes = f"index {index.dtype} {list(index.shape)} and weights {list(weights.shape)}"
        raise UsageError(
            f"{whose} {shapes}, for tokens {list(inputs[0].shape)}".replace("torch.", ""),
            hint=ROUTER_HINT,
        )
    return index.to(torch.int64), weights.to(torch.float32)


def check_experts(index: Tensor, experts: int) -> None:
    """Raises `UsageError` for an index of experts that are not there."""
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= experts:
        raise UsageError(
            f"its router chose expert {low if low < 0 else high}, and there are {experts}, counted "
            "from 0",
            hint="experts holds n of them, in the order of the router's numbers",
        )


def with_router_k(model: Model, k: Mapping[str, int | None]) -> Model:
    """Returns a model whose own routers are asked for each layer's k, weights shared.

    The model itself where all are asked for what they give. Raises `UsageError` for a k that is
    none of a router's: it has no parameter `k`, or gives another number.
    """
    routed = _routed(model)
    asked = {name: k[name] for name, each in routed.items() if k[name] != each.current_k}
    for name, wanted in asked.items():
        _check_asked(name, routed[name], wanted)
    if not asked:
        return model
    module = sharing_weights(model.module)
    for name, each in _by_layer(module).items():
        if name in asked:
            each.k = asked[name]
    changed = model.changed(module)
    _try(changed, asked)
    return changed


def _routed(model: Model) -> dict[str, RoutedExperts]:
    return {name: each for name, each in _by_layer(model.module).items() if name in model.layers}


def _by_layer(module: nn.Module) -> dict[str, RoutedExperts]:
    """The routed experts of a module, by the name of their layer."""
    return {
        each.experts.spec.name: each for each in module.modules() if isinstance(each, RoutedExperts)
    }


def _check_asked(name: str, routed: RoutedExperts, wanted: int | None) -> None:
    n, given = routed.experts.spec.experts, routed.experts.spec.trained_k
    if wanted is None:
        raise UsageError(
            f"--k input: the router of layer {name} is part of the graph, with the k that it is "
            "exported with",
            hint="export a bundle for each k"
            if routed.takes_k
            else "leave --k out: this router knows no other",
        )
    if routed.router is None:
        raise UsageError(
            f"--k {wanted}: the network around layer {name} chooses its experts, {given} for each "
            "row, and takes no k",
            hint="leave --k out, or give the factory an argument for it (--set)",
        )
    if not routed.takes_k:
        every = f"all {n} experts" if given == n else f"{given} of {n} experts"
        raise UsageError(
            f"--k {wanted}: the router of layer {name} gives each token {every} and takes no k",
            hint="leave --k out; a router that can choose fewer has a parameter k: "
            f"def route(x, k={given})",
        )


def _try(model: Model, asked: Mapping[str, int | None]) -> None:
    """Runs the network once on its example: a router may refuse a k, or give another number."""
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
    said = ", ".join(f"{name} {wanted}" for name, wanted in asked.items())
    try:
        with torch.no_grad():
            model.module(torch.from_numpy(model.example))
    except MoexportError:
        raise
    except Exception as error:  # the user's code may fail in any way
        raise UsageError(
            f"--k ({said}): the router failed: {type(error).__name__}: {error}",
            hint="use a k that the router knows",
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    for name, wanted in asked.items():
        if widths[name] != wanted:
            raise UsageError(
                f"--k {wanted}: the router of layer {name} was asked for {wanted} experts and "
                f"gives {widths[name]}",
                hint="its parameter k is to be the number of experts that each token gets",
            )
