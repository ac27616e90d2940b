"""Layers in the style of public code, for tests of `moexport adapt` that copy them to a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Expert(nn.Module):
    def __init__(self, d: int = 16, h: int = 20) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


def combined(experts: nn.ModuleList, x: Tensor, index: Tensor, w: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        y = y + ((index == e) * w).sum(-1, keepdim=True) * expert(x)
    return y


class TopTwo(nn.Module):
    """Two experts for each token: the base of variants below."""

    def __init__(self, d: int = 16, n: int = 6) -> None:
        super().__init__()
        self.k, self.gate = 2, nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList(Expert(d) for _ in range(n))

    def logits(self, x: Tensor) -> Tensor:
        y: Tensor = self.gate(x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        w, index = self.logits(x).softmax(-1).topk(self.k, -1)
        return combined(self.experts, x, index, w / w.sum(-1, keepdim=True))


class SoftOnes(nn.Module):
    """A Soft MoE layer."""

    def __init__(self, d: int = 16, n: int = 4) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(d, n, 2))
        self.experts = nn.ModuleList(Expert(d) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
        slots = torch.einsum("bmd,bmnp->bnpd", x, logits.softmax(1))
        y = torch.stack([f(slots[:, i]) for i, f in enumerate(self.experts)], 1)
        weights = logits.flatten(2).softmax(-1).view_as(logits)
        return torch.einsum("bnpd,bmnp->bmd", y, weights)

    def logits(self, x: Tensor) -> Tensor:
        return torch.einsum("bmd,dnp->bmnp", x, self.phi)


# --- limits, masks and branches -------------------------------------------------------------------


class Clamped(TopTwo):
    def logits(self, x: Tensor) -> Tensor:
        return torch.clamp(self.gate(x), -5, 5)


class SoftClamped(SoftOnes):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x).clamp(max=30.0)


class NormedClamped(TopTwo):
    """Larger inputs do not reach the clamp, but larger weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def logits(self, x: Tensor) -> Tensor:
        return torch.clamp(self.gate(self.norm(x)), -9, 9)


class OutputClamped(TopTwo):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-20, 20)


class Where(TopTwo):
    def logits(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        return torch.where(logits.abs() > 8, logits.sign() * 8, logits)


class LongBranch(TopTwo):
    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.gate(x)
        if x.shape[1] > 100:
            logits = logits - logits.flip(-1) / 4
        return logits


LONG = 50


class LongByName(TopTwo):
    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.gate(x)
        return logits - logits.flip(-1) / 4 if x.shape[1] > LONG else logits


class LongByAttribute(TopTwo):
    def __init__(self) -> None:
        super().__init__()
        self.long = 60

    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.gate(x)
        return logits if x.shape[1] <= self.long else logits / 2


class LongUnreached(TopTwo):
    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.gate(x)
        if x.shape[1] > 4000: logits = logits / 2  # fmt: skip  # noqa: E701
        return logits / 2 if x.shape[1] > 5000 else logits


class Capacity(TopTwo):
    """Experts with a capacity of tokens of an input."""

    def forward(self, x: Tensor) -> Tensor:
        w, index = self.logits(x).softmax(-1).topk(self.k, -1)
        taken = F.one_hot(index, len(self.experts)).flatten(1, 2)
        before = ((taken.cumsum(1) - 1) * taken).sum(-1).view_as(index)
        room = before < 6
        return combined(self.experts, x, index, w * room)


class Unreached(TopTwo):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = self.gate(x).clamp(-1e9, 1e9)
        if bias is not None:
            logits = logits + bias
        w, index = logits.softmax(-1).topk(self.k, -1)
        return combined(self.experts, x, index, w)


class Batched(TopTwo):
    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.gate(x)
        return logits if (len(x) + 4) // 10 < 4 else logits.flip(-1)


class Long(TopTwo):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] >= 48, "48 tokens at least"
        return super().forward(x)


# --- names ----------------------------------------------------------------------------------------


class InSequential(TopTwo):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 6))  # type: ignore[assignment]


class InTables(nn.Module):
    """Keys that are not identifiers, and experts in a `ModuleDict`."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleDict({"task-0": nn.Linear(16, 5), "class": nn.Linear(16, 5)})
        self.bank = nn.ModuleDict({f"expert {i}": Expert() for i in range(5)})

    def forward(self, x: Tensor) -> Tensor:
        w = self.routers["class"](x).softmax(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.bank.values()):
            y = y + w[..., i, None] * expert(x)
        return y


class InParameterList(SoftOnes):
    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.ParameterList([nn.Parameter(torch.randn(16, 8))])
        del self.phi

    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = x @ self.queries[0]
        return logits.view(*x.shape[:-1], 4, 2)


class NoIdentifier(TopTwo):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("my gate", self.gate)
        del self.gate

    def logits(self, x: Tensor) -> Tensor:
        y: Tensor = getattr(self, "my gate")(x)
        return y


class Nested(nn.Module):
    """The whole mixture one level deeper, with a norm before it and the input added."""

    def __init__(self) -> None:
        super().__init__()
        self.moe, self.norm = TopTwo(), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        w, index = self.moe.gate(h).softmax(-1).topk(2, -1)
        return x + combined(self.moe.experts, h, index, w)


# --- shared experts, and lists other than the experts -----------------------------------------


class SharedInSequential(TopTwo):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 16))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) + self.shared(x)
        return y


class SharedMaps(TopTwo):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.ModuleList([nn.Linear(16, 12), nn.Linear(12, 16)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) + self.shared[1](F.relu(self.shared[0](x)))
        return y


class SharedGated(TopTwo):
    """A shared expert of maps of the layer itself, with a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.share = nn.Linear(16, 12), nn.Linear(12, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.second(F.silu(self.first(x)))
        y: Tensor = super().forward(x) + self.share(x).sigmoid() * shared
        return y


class Corrected(TopTwo):
    """A bias that affects only the choice, and weights times a number of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = 2.5
        self.register_buffer("correction", torch.linspace(-0.3, 0.3, 6))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        index = (scores + self.correction).topk(self.k, -1).indices
        w = scores.gather(-1, index)
        w = w / w.sum(-1, keepdim=True) * self.scaling
        return combined(self.experts, x, index, w)


class ThreeStacks(nn.Module):
    def __init__(self, d: int = 16, h: int = 20, n: int = 4) -> None:
        super().__init__()
        self.k, self.router = 2, nn.Linear(d, n)
        self.w1 = nn.Parameter(torch.randn(n, h, d) / 4)
        self.w2 = nn.Parameter(torch.randn(n, d, h) / 4)
        self.w3 = nn.Parameter(torch.randn(n, h, d) / 4)

    def forward(self, x: Tensor) -> Tensor:
        up = torch.einsum("...d,nhd->...nh", x, self.w3)
        hidden = F.silu(torch.einsum("...d,nhd->...nh", x, self.w1)) * up
        y = torch.einsum("...nh,noh->...no", hidden, self.w2)
        w, index = self.router(x).topk(self.k, -1)
        every = torch.zeros(*x.shape[:-1], 4).scatter(-1, index, w.softmax(-1))
        return torch.einsum("...no,...n->...o", y, every)


class Halves(TopTwo):
    """Two gates, which are not experts; no adapter with one call computes this."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(16, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        layer = torch.stack([expert(x) for expert in self.experts], -2)
        shares = [gate(x).softmax(-1) for gate in self.gates]
        return torch.stack([(w[..., None] * layer).sum(-2) for w in shares], 1)


class Mangled(nn.Module):
    """Names that are private to the class."""

    def __init__(self) -> None:
        super().__init__()
        self.__gate = nn.Linear(16, 4)
        self.__experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        w: Tensor = torch.sin(self.__gate(x))
        y = torch.stack([expert(x) for expert in self.__experts], -2)
        return (w[..., None] * y).sum(-2)


class Waves(TopTwo):
    def logits(self, x: Tensor) -> Tensor:
        return torch.sin(self.gate(x))
