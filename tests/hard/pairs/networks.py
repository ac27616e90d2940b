"""Networks of a user's own, for the matrix: published names, and layers that adapters describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import moexport
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HIDDEN, TOKENS, FEATURES = 32, 64, 6, 5


class Pair(nn.Module):
    """An expert of two maps under the names of a published code."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))  # type: ignore[no-any-return]


class Soft(nn.Module):
    """A Soft MoE layer of tanh-GELU experts on raw tokens, which an adapter describes."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(6, 2, WIDTH))
        self.parts = nn.ModuleList(Pair() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x / (x.norm(dim=-1, keepdim=True) + 0.03)
        logits = 2 * torch.einsum("bmd,npd->bmnp", scaled, self.queries)
        slots = torch.einsum("bmnp,bmd->bnpd", logits.softmax(1), x)
        outputs = [
            each.fc2(F.gelu(each.fc1(slots[:, i]), approximate="tanh"))  # type: ignore[operator]
            for i, each in enumerate(self.parts)
        ]
        combine = logits.flatten(2).softmax(2).view_as(logits)
        return torch.einsum("bmnp,bnpo->bmo", combine, torch.stack(outputs, 1))


class Published(nn.Module):
    """The same with names and arithmetic of a published layer: it needs no adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(WIDTH, 8, 1))
        self.scale = nn.Parameter(torch.full((1,), 4.0))
        self.experts = nn.ModuleList(Pair() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        seen = F.normalize(x, dim=-1)
        logits = torch.einsum("bmd,dnp->bmnp", seen, self.scale * F.normalize(self.phi, dim=0))
        slots = torch.einsum("bmnp,bmd->bnpd", logits.softmax(1), seen)
        outputs = torch.stack([each(slots[:, i]) for i, each in enumerate(self.experts)], 1)
        combine = logits.flatten(2).softmax(2).view_as(logits)
        return torch.einsum("bmnp,bnpo->bmo", combine, outputs)


class Whole(nn.Module):
    """A muMoE layer whose 8 matrices are held as they are, with a softmax over them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 8)
        self.matrices = nn.Parameter(torch.randn(8, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        a = self.gate(x).softmax(-1)
        return torch.einsum("bmn,bmd,ndo->bmo", a, x, self.matrices)


class Factors(nn.Module):
    """A muMoE layer in CP form with a softmax over 8 experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 8)
        shapes = ((8, 12), (WIDTH + 1, 12), (WIDTH, 12))
        self.factors = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        a = self.gate(x).softmax(-1)
        with_one = torch.cat((x, torch.ones_like(x[..., :1])), -1)
        experts, columns, rows = self.factors
        y: Tensor = ((a @ experts) * (with_one @ columns)) @ rows.T
        return y


class Routed(nn.Module):
    """The k of 6 SwiGLU experts with the largest scores; `without` is one that gives nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 6, bias=False)
        self.k, self.without = 2, -1
        shapes = {"gate": (6, HIDDEN, WIDTH), "up": (6, HIDDEN, WIDTH), "down": (6, WIDTH, HIDDEN)}
        self.maps = nn.ParameterDict({key: torch.randn(s) / 6 for key, s in shapes.items()})

    def choose(self, x: Tensor, k: int | None = None) -> tuple[Tensor, Tensor]:
        weights, index = self.router(x).softmax(-1).topk(k or self.k, -1)
        return index, weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        index, weights = self.choose(x)
        maps, every = self.maps, []
        for i in range(6):
            inner = F.silu(x @ maps["gate"][i].T) * (x @ maps["up"][i].T)
            every.append(inner @ maps["down"][i].T * float(i != self.without))
        share = (F.one_hot(index, 6).to(x.dtype) * weights[..., None]).sum(-2)
        return torch.einsum("bmne,bmn->bme", torch.stack(every, -2), share)


def same_largest(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Whether the largest of an input's outputs is where its label says: a metric of a user's."""
    same: np.ndarray = outputs.reshape(len(outputs), -1).argmax(-1) == labels
    return same.astype(np.float64)


class Net(nn.Module):
    """Two such layers, each beside what it is given, between linear maps: (b, 6, 5) to (b, 4)."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 4)
        self.first, self.second = layer(), layer()

    def example_input(self) -> Tensor:
        return torch.randn(4, TOKENS, FEATURES, generator=torch.Generator().manual_seed(0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.first(x)
        x = x + self.second(F.layer_norm(x, (WIDTH,)))
        y: Tensor = self.head(x.mean(1))
        return y


def _network(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Net(layer).eval()


def published() -> nn.Module:
    return _network(Published)


def soft() -> nn.Module:
    return _network(Soft)


def factors() -> nn.Module:
    return _network(Factors)


def whole() -> nn.Module:
    return _network(Whole)


def routed() -> nn.Module:
    return _network(Routed)


@moexport.adapts(Soft)
def as_soft(layer: Soft) -> moexport.SoftMoE:
    return moexport.SoftMoE(
        phi=2 * layer.queries.permute(2, 0, 1),
        experts=[(each.fc1, each.fc2) for each in layer.parts],
        norm="l2-plus",
        eps=0.03,
        slots_from="raw",
        activation="gelu-tanh",
    )


@moexport.adapts(Factors)
def as_factors(layer: Factors) -> moexport.MuMoE:
    return moexport.MuMoE(
        gates=[layer.gate], weights=list(layer.factors), norm="none", activation="softmax"
    )


@moexport.adapts(Whole)
def as_whole(layer: Whole) -> moexport.MuMoE:
    return moexport.MuMoE(
        gates=[layer.gate], weights=layer.matrices, norm="none", activation="softmax"
    )


@moexport.adapts(Routed)
def as_routed(layer: Routed) -> moexport.Experts:
    maps: Any = layer.maps
    experts = list(zip(maps["gate"], maps["up"], maps["down"], strict=True))
    return moexport.Experts(router=layer.choose, experts=experts)
