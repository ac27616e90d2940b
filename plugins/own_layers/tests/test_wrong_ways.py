"""The message about a wrong adapter names the mistake, for all usual mistakes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import moexport
import pytest
import torch
from moexport.errors import ParityError
from torch import Tensor, nn
from torch.nn import functional as F

D, N, P = 16, 4, 2


class Expert(nn.Module):
    """A gated expert whose matrices are square, so that a transposed one fits."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Soft(nn.Module):
    """A Soft MoE with a norm, a bias on the logits, a temperature and its input added."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.bias = nn.Parameter(torch.randn(D, N, P)), nn.Parameter(torch.randn(N, P))
        self.norm, self.tau = nn.LayerNorm(D), 2.0
        nn.init.normal_(self.norm.weight)
        self.experts = nn.ModuleList(Expert() for _ in range(N))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        logits = (torch.einsum("bmd,dnp->bmnp", h, self.phi) + self.bias) / self.tau
        slots = torch.einsum("bmnp,bmd->bnpd", logits.softmax(1), h)
        outputs = torch.stack([e(slots[:, i]) for i, e in enumerate(self.experts)], 1)
        combine = logits.flatten(2).softmax(2).view_as(logits)
        return x + torch.einsum("bmnp,bnpd->bmd", combine, outputs)


class Routed(nn.Module):
    """Two experts for each token, a shared one, a norm, a temperature and its input added."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.norm, self.tau = nn.Linear(D, N), nn.LayerNorm(D), 2.0
        self.shared, self.noise = Expert(), 0.0
        self.experts = nn.ModuleList(Expert() for _ in range(N))

    def route(self, h: Tensor, tau: float | None = None) -> tuple[Tensor, Tensor]:
        logits = self.router(h) / (self.tau if tau is None else tau)
        logits = logits + self.noise * torch.randn_like(logits)
        weights, index = logits.softmax(dim=-1).topk(2)
        return index, weights

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        index, weights = self.route(h)
        outputs = torch.stack([e(h) for e in self.experts], dim=2)
        chosen = outputs.gather(2, index[..., None].expand(*index.shape, D))
        y: Tensor = x + self.shared(h) + (chosen * weights[..., None]).sum(2)
        return y


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(D, 3)
        self.example_input = torch.randn(4, 6, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(x).mean(1))
        return y


def net(kind: str = "Soft", noise: float = 0.0) -> Net:
    torch.manual_seed(0)
    layer: Any = {"Soft": Soft, "Routed": Routed}[kind]()
    layer.noise = noise
    return Net(layer)


def maps(layer: Any, turned: str = "", biases: bool = True, order: str = "gate up down") -> Any:
    """The experts' maps, with the weight of one transposed, without biases, or in another order."""

    def one(linear: nn.Linear, name: str) -> Any:
        weight = linear.weight.T if name == turned else linear.weight
        return (weight, linear.bias) if biases else weight

    names = order.split()
    return [tuple(one(getattr(e, name), name) for name in names) for e in layer.experts]


def loaded(kind: str, describe: Callable[[Any], Any], **given: Any) -> Any:
    def adapt(layer: Any) -> Any:
        return describe(layer)

    adapt.__annotations__ = {"layer": {"Soft": Soft, "Routed": Routed}[kind]}
    sys.modules["wrong_ways"] = sys.modules[__name__]
    return moexport.load("wrong_ways:net", config={"kind": kind, **given}, adapter=adapt)


def soft(layer: Any, **changes: Any) -> moexport.SoftMoE:
    right: dict[str, Any] = {"phi": layer.phi, "bias": layer.bias, "temperature": layer.tau}
    right |= {"norm": layer.norm, "residual": True, "activation": "silu", "experts": maps(layer)}
    return moexport.SoftMoE(**(right | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (lambda layer: {"experts": maps(layer, "gate")}, "the weights of gate transposed$"),
        (lambda layer: {"experts": maps(layer, "up")}, "the weights of up transposed$"),
        (lambda layer: {"experts": maps(layer, "down")}, "the last weight transposed$"),
        (lambda layer: {"activation": "gelu"}, "with activation='silu'$"),
        (lambda layer: {"residual": False}, "x is subtracted from y: the layer adds its input$"),
        (lambda layer: {"experts": maps(layer, biases=False)}, "the experts with their biases$"),
        (lambda layer: {"bias": None}, "with bias=layer.bias$"),
        (lambda layer: {"experts": maps(layer, order="up gate down")}, "gate and up exchanged$"),
        (lambda layer: {"temperature": 1.0}, "with temperature=layer.tau$"),
        (lambda layer: {"norm": "none"}, "its input is what layer.norm returns, not x$"),
        (lambda layer: {"norm": "layernorm"}, "its input is what layer.norm returns, not x$"),
        (
            lambda layer: {"phi": layer.phi.reshape(D, P, N).mT},
            r"with phi=phi\.mT\.flatten\(1\)\.unflatten\(1, \(4, 2\)\)$",
        ),
    ],
)
def test_a_soft_moe_that_is_wrong_in_one_way_is_told_that_way(
    changes: Callable[[Any], dict[str, Any]], says: str
) -> None:
    with pytest.raises(ParityError, match=says) as refused:
        loaded("Soft", lambda layer: soft(layer, **changes(layer)))
    assert refused.value.hint


def routed(
    forward: Callable[[Any, Any, Tensor, Tensor], Any] | None = None, **more: Any
) -> Callable[[Any], moexport.Experts]:
    """An adapter whose forward takes the layer, the bank, x and the normalised x."""

    def right(layer: Any, experts: Any, x: Tensor, h: Tensor) -> Any:
        return x + layer.shared(h) + experts(h, *layer.route(h))

    def adapt(layer: Any) -> moexport.Experts:
        def bound(experts: Any, x: Tensor) -> Any:
            return (forward or right)(layer, experts, x, layer.norm(x))

        return moexport.Experts(experts=maps(layer, **more), activation="silu", forward=bound)

    return adapt


def divided(layer: Any, experts: Any, x: Tensor, h: Tensor) -> Any:
    index, weights = layer.route(h)
    return x + layer.shared(h) + experts(h, index, weights / weights.sum(-1, keepdim=True))


def other_axis(layer: Any, experts: Any, x: Tensor, h: Tensor) -> Any:
    weights, index = (layer.router(h) / layer.tau).softmax(dim=1).topk(2)
    return x + layer.shared(h) + experts(h, index, weights)


WEIGHTS = r"its experts are correct, but their weights are not: token \d+ has .* of expert"


@pytest.mark.parametrize(
    ("adapter", "says", "hint"),
    [
        (routed(lambda layer, e, x, h: x + e(h, *layer.route(h))), "what layer.shared", "shared("),
        (
            routed(lambda layer, e, x, h: layer.shared(h) + e(h, *layer.route(h))),
            "x is subtracted from y: the layer adds its input$",
            "return x +",
        ),
        (
            routed(lambda layer, e, x, h: e(h, *layer.route(h))),
            "once x and what layer.shared returns are subtracted from y: the layer adds both$",
            "x + layer.shared(…)",
        ),
        (
            routed(lambda layer, e, x, h: x + layer.shared(x) + e(x, *layer.route(x))),
            "its input is what layer.norm returns, not x$",
            "layer.norm(x)",
        ),
        (
            routed(lambda layer, e, x, h: x + layer.shared(h) + e(h, *layer.route(h, tau=1.0))),
            WEIGHTS,
            "a temperature",
        ),
        (routed(other_axis), WEIGHTS, "the axis of a softmax"),
        (routed(divided), WEIGHTS, "divided by their sum"),
        (routed(biases=False), "the experts with their biases$", "these options"),
        (routed(turned="down"), "the last weight transposed$", "these options"),
        (routed(order="up gate down"), "gate and up exchanged$", "these options"),
        (
            lambda layer: moexport.Experts(experts=maps(layer), router=layer.route),
            "none of [0-9]+ combinations",
            "the layer also runs layer.norm, layer.shared, which needs a forward",
        ),
    ],
)
def test_a_forward_that_is_wrong_in_one_way_is_told_that_way(
    adapter: Callable[[Any], moexport.Experts], says: str, hint: str
) -> None:
    with pytest.raises(ParityError, match=says) as refused:
        loaded("Routed", adapter)
    assert hint in str(refused.value.hint)


def test_the_right_ones_are_right_and_a_random_router_is_told() -> None:
    loaded("Soft", soft)
    loaded("Routed", routed())
    with pytest.raises(ParityError, match="a different result each time it is called"):
        loaded("Routed", routed(), noise=1.0)


def test_weights_of_slots_are_looked_at_too() -> None:
    def swapped(layer: Any) -> moexport.Experts:
        def forward(experts: Any, x: Tensor) -> Any:
            h = layer.norm(x)
            logits = (torch.einsum("bmd,dnp->bmnp", h, layer.phi) + layer.bias) / layer.tau
            slots = torch.einsum("bmnp,bmd->bnpd", logits.softmax(1), h)
            return x + experts(slots, combine=logits.softmax(2))

        return moexport.Experts(experts=maps(layer), activation="silu", forward=forward)

    with pytest.raises(ParityError, match=WEIGHTS):
        loaded("Soft", swapped)
