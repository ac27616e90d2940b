"""Sixteen layers of public code, each with its adapter: find one similar to yours.

The layers are rebuilt from the formulas of public code. Copy this file into an empty folder, and
there:

    moexport export own_layers:build --set layer=masked --k 2 -o masked
    moexport verify masked

docs/own-layer-examples.md goes through them. Letters: b inputs of m tokens, d wide; n experts with
p slots each, of which k are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import moexport
import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIM, HIDDEN, EXPERTS, SLOTS = 16, 24, 4, 2


class Mlp(nn.Module):
    """An expert of two maps."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.gelu, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias), nn.Linear(HIDDEN, DIM, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Returns the expert's outputs for rows x (…, d)."""
        y: Tensor = self.down(self.activation(self.up(x)))
        return y


class SwiGlu(nn.Module):
    """An expert whose first map is gated by a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, HIDDEN), nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the expert's outputs for rows x (…, d)."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def experts_of(expert: Callable[[], nn.Module], count: int = EXPERTS) -> nn.ModuleList:
    """Returns experts that differ in their weights."""
    return nn.ModuleList(expert() for _ in range(count))


def dispatch(x: Tensor, shares: Tensor) -> Tensor:
    """Returns slots (b, n, p, d): averages of tokens (b, m, d) by shares (b, m, n, p)."""
    return torch.einsum("bmd,bmnp->bnpd", x, shares)


def over_slots(logits: Tensor) -> Tensor:
    """Returns a softmax of logits (b, m, n, p) over all slots of all experts."""
    return logits.flatten(2).softmax(dim=-1).view_as(logits)


def each_on_its_slots(experts: nn.ModuleList, slots: Tensor) -> Tensor:
    """Returns outputs (b, n, p, o) of slots (b, n, p, d)."""
    return torch.stack([expert(slots[:, e]) for e, expert in enumerate(experts)], dim=1)


def combined(outputs: Tensor, combine: Tensor) -> Tensor:
    """Returns tokens (b, m, o) of outputs (b, n, p, o) and C (b, m, n, p)."""
    return torch.einsum("bnpo,bmnp->bmo", outputs, combine)


def weighted(experts: nn.ModuleList, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Returns y = Σ_k weights · expert(x) for experts index (…, k)."""
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        y = y + ((index == number) * weights).sum(-1, keepdim=True) * expert(x)
    return y


# --- Soft MoE layers that moexport.SoftMoE describes ----------------------------------------------


class Tempered(nn.Module):
    """SwiGLU experts, a temperature, and the input added within the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(DIM, EXPERTS, SLOTS))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.experts = experts_of(SwiGlu)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (b, m, d)."""
        logits = torch.einsum("bmd,dnp->bmnp", x, self.phi) / self.temperature
        outputs = each_on_its_slots(self.experts, dispatch(x, logits.softmax(dim=1)))
        return x + combined(outputs, over_slots(logits))


@moexport.adapts(Tempered)
def adapt_tempered(layer: Tempered) -> moexport.SoftMoE:
    return moexport.SoftMoE(
        phi=layer.phi, temperature=layer.temperature, experts=layer.experts, residual=True
    )


class Biased(nn.Module):
    """A router that is a linear layer with a bias, on normalised tokens; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS * SLOTS)
        self.router.weight.data.mul_(3)
        self.experts = experts_of(lambda: Mlp(F.silu, bias=False))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Returns tokens (b, m, d) as `output`, and a loss."""
        seen = self.norm(x)
        logits = self.router(seen).unflatten(-1, (EXPERTS, SLOTS))
        outputs = each_on_its_slots(self.experts, dispatch(seen, logits.softmax(dim=1)))
        return {"output": x + combined(outputs, over_slots(logits)), "loss": logits.logsumexp(1)}


@moexport.adapts(Biased)
def adapt_biased(layer: Biased) -> moexport.SoftMoE:
    return moexport.SoftMoE(
        phi=layer.router.weight.T.view(DIM, EXPERTS, SLOTS),
        bias=layer.router.bias,
        experts=layer.experts,
        norm=layer.norm,
        residual=True,
    )


class Normed(nn.Module):
    """An expert with a LayerNorm and a ReLU after each of its maps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.inner, self.outer = nn.LayerNorm(HIDDEN), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the expert's outputs for rows x (…, d)."""
        hidden = self.inner(self.up(x)).relu()
        y: Tensor = self.outer(self.down(hidden)).relu()
        return y


class NormedExperts(nn.Module):
    """A Soft MoE of experts with norms."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(DIM, EXPERTS, SLOTS))
        self.experts = experts_of(Normed)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (b, m, d)."""
        logits = torch.einsum("bmd,dnp->bmnp", x, self.phi)
        outputs = each_on_its_slots(self.experts, dispatch(x, logits.softmax(dim=1)))
        return combined(outputs, over_slots(logits))


@moexport.adapts(NormedExperts)
def adapt_normed(layer: NormedExperts) -> moexport.SoftMoE:
    return moexport.SoftMoE(phi=layer.phi, experts=layer.experts)


class OneMap(nn.Module):
    """A Soft MoE as agents have it: an expert is one map with a ReLU, to another width."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(DIM, EXPERTS, SLOTS))
        self.scale = nn.Parameter(torch.tensor(4.0))
        self.experts = experts_of(lambda: nn.Sequential(nn.Linear(DIM, 20), nn.ReLU()))

    @staticmethod
    def unit(x: Tensor, dim: int) -> Tensor:
        """Returns x over its length."""
        return x / (x.square().sum(dim, keepdim=True).sqrt() + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (b, m, o)."""
        phi = self.scale * self.unit(self.phi, 0)
        logits = torch.einsum("bmd,dnp->bmnp", self.unit(x, -1), phi)
        outputs = each_on_its_slots(self.experts, dispatch(x, logits.softmax(dim=1)))
        return combined(outputs, over_slots(logits))


@moexport.adapts(OneMap)
def adapt_one_map(layer: OneMap) -> moexport.SoftMoE:
    phi = layer.scale * layer.unit(layer.phi, 0)
    return moexport.SoftMoE(
        phi=phi, experts=layer.experts, norm="l2-plus", eps=1e-6, slots_from="raw"
    )


class Mixed(nn.Module):
    """A Soft MoE whose phi is mixed over the experts by a graph of them."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(DIM, EXPERTS, SLOTS))
        self.register_buffer("graph", torch.rand(EXPERTS, EXPERTS) / EXPERTS)
        self.experts = experts_of(Mlp)

    def router(self) -> Tensor:
        """Returns the matrix by which tokens are multiplied, (d, n, p)."""
        graph: Any = self.graph
        mix = 0.7 * torch.eye(EXPERTS) + 0.3 * graph
        return torch.einsum("dnp,nq->dqp", 5 * F.normalize(self.phi, dim=0), mix)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (b, m, d)."""
        seen = F.normalize(x, dim=-1)
        logits = torch.einsum("bmd,dnp->bmnp", seen, self.router())
        outputs = each_on_its_slots(self.experts, dispatch(seen, logits.softmax(dim=1)))
        return combined(outputs, over_slots(logits))


@moexport.adapts(Mixed)
def adapt_mixed(layer: Mixed) -> moexport.SoftMoE:
    return moexport.SoftMoE(phi=layer.router(), experts=layer.experts, norm="l2")


# --- layers whose own forward gives the experts their slots ---------------------------------------


class Masked(nn.Module):
    """A Soft MoE with a mask: padding is in no slot, and comes out as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(DIM, EXPERTS, SLOTS))
        self.experts = experts_of(Mlp)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Returns tokens (b, m, d); `mask` (b, m) is False for padding."""
        logits = torch.einsum("bmd,dnp->bmnp", x, self.phi)
        hidden = logits.masked_fill(~mask[:, :, None, None], float("-inf"))
        outputs = each_on_its_slots(self.experts, dispatch(x, hidden.softmax(dim=1)))
        return combined(outputs, over_slots(logits)).masked_fill(~mask[..., None], 0)


@moexport.adapts(Masked)
def adapt_masked(layer: Masked) -> moexport.Experts:
    def forward(experts: Any, x: Tensor, mask: Tensor) -> Tensor:
        logits = torch.einsum("bmd,dnp->bmnp", x, layer.phi)
        hidden = logits.masked_fill(~mask[:, :, None, None], float("-inf"))
        slots = dispatch(x, hidden.softmax(dim=1))
        y: Tensor = experts(slots, combine=over_slots(logits))
        return y.masked_fill(~mask[..., None], 0)

    return moexport.Experts(experts=layer.experts, forward=forward)


class Swapped(nn.Module):
    """Dispatch by a softmax over the slots, combine by one over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(0.5 * torch.randn(DIM, EXPERTS, SLOTS))
        self.experts = experts_of(Mlp)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (b, m, d)."""
        logits = torch.einsum("bmd,dnp->bmnp", x, self.phi)
        outputs = each_on_its_slots(self.experts, dispatch(x, over_slots(logits)))
        return combined(outputs, logits.softmax(dim=1))


@moexport.adapts(Swapped)
def adapt_swapped(layer: Swapped) -> moexport.Experts:
    def forward(experts: Any, x: Tensor) -> Any:
        logits = torch.einsum("bmd,dnp->bmnp", x, layer.phi)
        return experts(dispatch(x, over_slots(logits)), combine=logits.softmax(dim=1))

    return moexport.Experts(experts=layer.experts, forward=forward)


class ExpertChoice(nn.Module):
    """Each expert takes its best tokens of a sequence, and adds its outputs for them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS, bias=False)
        self.gate.weight.data.mul_(4)
        self.experts = experts_of(lambda: Mlp(F.silu, bias=False))
        self.taken = 5

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (b, m, d)."""
        seen = self.norm(x)
        best, index = self.gate(seen).topk(self.taken, dim=1)
        shares = torch.zeros(*x.shape[:2], EXPERTS).scatter(1, index, best.softmax(dim=1))
        y = x
        for e, expert in enumerate(self.experts):
            y = y + shares[..., e, None] * expert(seen)
        return y


@moexport.adapts(ExpertChoice)
def adapt_expert_choice(layer: ExpertChoice) -> moexport.Experts:
    def forward(experts: Any, x: Tensor) -> Any:
        seen = layer.norm(x)
        best, index = layer.gate(seen).topk(layer.taken, dim=1)  # (b, p, n)
        taken = F.one_hot(index, x.shape[1]).to(x)  # (b, p, n, m)
        slots = torch.einsum("bpnm,bmd->bnpd", taken, seen)
        return x + experts(slots, combine=torch.einsum("bpnm,bpn->bmnp", taken, best.softmax(1)))

    return moexport.Experts(experts=layer.experts, forward=forward)


class Outside(nn.Module):
    """A layer that is given its logits, with softmaxes over an expert's slots and all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = experts_of(SwiGlu)

    def forward(self, x: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns rows (t, d) of rows x (t, d) and logits (t, n, p), and what was used."""
        shares, combine = logits.softmax(dim=-1), logits.softmax(dim=0)
        slots = torch.einsum("tnp,td->npd", shares, x)
        outputs = torch.stack([f(slots[e]) for e, f in enumerate(self.experts)])
        return torch.einsum("tnp,npd->td", combine, outputs), {"combine": combine}


@moexport.adapts(Outside)
def adapt_outside(layer: Outside) -> moexport.Experts:
    def forward(experts: Any, x: Tensor, logits: Tensor) -> Any:
        slots = torch.einsum("tnp,td->npd", logits.softmax(dim=-1), x)
        return experts(slots[None], combine=logits.softmax(dim=0)[None])[0]

    return moexport.Experts(experts=layer.experts, forward=forward)


# --- layers that choose experts for tokens --------------------------------------------------------


class Dense(nn.Module):
    """All experts on all tokens: an expert is one linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS)
        self.gate.weight.data.mul_(4)
        self.experts = experts_of(lambda: nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (…, d)."""
        shares = self.gate(x).softmax(dim=-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = y + shares[..., e, None] * expert(x)
        return y


@moexport.adapts(Dense)
def adapt_dense(layer: Dense) -> moexport.Experts:
    def forward(experts: Any, x: Tensor) -> Any:
        return experts(x, weights=layer.gate(x).softmax(dim=-1))

    return moexport.Experts(experts=layer.experts, forward=forward)


class Shared(nn.Module):
    """A shared expert in addition to the selected ones, the input added; returns more than y."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(DIM, EXPERTS, bias=False), SwiGlu()
        self.router.weight.data.mul_(4)
        self.experts = experts_of(SwiGlu)

    def route(self, x: Tensor, k: int = 2) -> tuple[Tensor, Tensor]:
        """Returns the experts of tokens x (…, d) and their weights, (…, k)."""
        weights, index = self.router(x).softmax(dim=-1).topk(k, dim=-1)
        return index, weights / (weights.sum(dim=-1, keepdim=True) + 1e-9)

    def forward(self, x: Tensor) -> tuple[Tensor, None, None]:
        """Returns tokens (…, d), and nothing."""
        return x + self.shared(x) + weighted(self.experts, x, *self.route(x)), None, None


@moexport.adapts(Shared)
def adapt_shared(layer: Shared) -> moexport.Experts:
    def forward(experts: Any, x: Tensor, k: int = 2) -> Any:
        return x + layer.shared(x) + experts(x, *layer.route(x, k))

    return moexport.Experts(experts=layer.experts, forward=forward)


class Sigmoid(nn.Module):
    """Sigmoid scores as weights, stacked matrices, one bias for what all experts give."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(0.3 * torch.randn(EXPERTS, DIM, HIDDEN))
        self.values = nn.Parameter(0.3 * torch.randn(EXPERTS, HIDDEN, DIM))
        self.choice, self.bias = nn.Linear(DIM, EXPERTS, False), nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens (…, d) and a loss."""
        scores = self.choice(x).sigmoid()
        best, index = scores.topk(2, dim=-1)
        gates = torch.zeros_like(scores).scatter(-1, index, best)
        hidden = torch.einsum("...d,ndh->...nh", x, self.keys).relu()
        y = torch.einsum("...nh,nho->...o", hidden * gates[..., None], self.values)
        return y + self.bias, scores.mean()


@moexport.adapts(Sigmoid)
def adapt_sigmoid(layer: Sigmoid) -> moexport.Experts:
    def forward(experts: Any, x: Tensor, k: int = 2) -> Any:
        weights, index = layer.choice(x).sigmoid().topk(k, dim=-1)
        return experts(x, index, weights) + layer.bias

    return moexport.Experts(w1=layer.keys, w2=layer.values, activation="relu", forward=forward)


class Heads(nn.Module):
    """The width is split in heads, each of which has a router and experts of its own."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        dim, self.heads = DIM // heads, heads
        self.routers = nn.ModuleList(nn.Linear(dim, EXPERTS, bias=False) for _ in range(heads))
        self.sets = nn.ModuleList(
            experts_of(lambda: nn.Sequential(nn.Linear(dim, 12), nn.GELU(), nn.Linear(12, dim)))
            for _ in range(heads)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (…, d)."""
        outputs = []
        for part, router, experts in zip(
            x.chunk(self.heads, -1), self.routers, self.sets, strict=True
        ):
            best, index = router(part).topk(2, dim=-1)
            assert isinstance(experts, nn.ModuleList)
            outputs.append(weighted(experts, part, index, best.softmax(dim=-1)))
        return torch.cat(outputs, dim=-1)


@moexport.adapts(Heads)
def adapt_heads(layer: Heads) -> moexport.Experts:
    def forward(experts: Any, x: Tensor, k: int = 2) -> Any:
        parts = x.view(*x.shape[:-1], layer.heads, -1)  # a head is a token of its own
        logits = torch.stack([r(parts[..., h, :]) for h, r in enumerate(layer.routers)], dim=-2)
        best, index = logits.topk(k, dim=-1)
        index = index + EXPERTS * torch.arange(layer.heads)[:, None]
        return experts(parts, index, best.softmax(dim=-1)).flatten(-2)

    every = [expert for experts in layer.sets for expert in experts]  # type: ignore[attr-defined]
    return moexport.Experts(experts=every, forward=forward)


class Convolved(nn.Module):
    """Channels first: experts are 1×1 convolutions in groups, the input is added."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Conv2d(DIM, EXPERTS, 1)
        self.first = nn.Conv2d(DIM, HIDDEN * EXPERTS, 1)
        self.second = nn.Conv2d(HIDDEN * EXPERTS, DIM * EXPERTS, 1, groups=EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        """Returns pixels (b, d, height, width)."""
        logits = self.gate(x)
        best, index = logits.topk(2, dim=1)
        shares = torch.zeros_like(logits).scatter(1, index, best.softmax(dim=1))
        outputs = self.second(F.silu(self.first(x))).unflatten(1, (EXPERTS, DIM))
        y: Tensor = (outputs * shares.unsqueeze(2)).sum(dim=1) + x
        return y


@moexport.adapts(Convolved)
def adapt_convolved(layer: Convolved) -> moexport.Experts:
    def forward(experts: Any, x: Tensor, k: int = 2) -> Any:
        best, index = layer.gate(x).topk(k, dim=1)
        last = [each.movedim(1, -1) for each in (x, index, best.softmax(dim=1))]
        return experts(*last).movedim(-1, 1) + x

    maps = [
        list(zip(c.weight.flatten(1).chunk(EXPERTS), c.bias.chunk(EXPERTS), strict=True))  # type: ignore[union-attr]
        for c in (layer.first, layer.second)
    ]
    return moexport.Experts(experts=[*zip(*maps, strict=True)], forward=forward)


class Capacity(nn.Module):
    """Experts with a limited capacity for tokens of the whole batch; ReLU squared."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.gate.weight.data.mul_(4)
        self.w1 = nn.Parameter(0.3 * torch.randn(EXPERTS, DIM, HIDDEN))
        self.b1 = nn.Parameter(0.3 * torch.randn(EXPERTS, 1, HIDDEN))
        self.w2 = nn.Parameter(0.3 * torch.randn(EXPERTS, HIDDEN, DIM))
        self.b2 = nn.Parameter(0.3 * torch.randn(EXPERTS, 1, DIM))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the experts of rows x (t, d) and their weights, 0 if there is no room."""
        best, index = self.gate(x).topk(2, dim=-1)
        taken = F.one_hot(index, EXPERTS).flatten(0, 1)  # (2t, n)
        before = ((taken.cumsum(dim=0) - 1) * taken).sum(dim=-1).view_as(index)
        return index, best.softmax(dim=-1) * (before < 2 * x.shape[0] // EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (b, m, d)."""
        rows = x.flatten(0, 1)
        index, weights = self.route(rows)
        hidden = (rows @ self.w1 + self.b1).relu().square()
        gates = torch.zeros(len(rows), EXPERTS).scatter(1, index, weights)
        return torch.einsum("ntd,tn->td", hidden @ self.w2 + self.b2, gates).view_as(x)


@moexport.adapts(Capacity)
def adapt_capacity(layer: Capacity) -> moexport.Experts:
    def forward(experts: Any, x: Tensor) -> Any:
        rows = x.flatten(0, 1)
        return experts(rows, *layer.route(rows)).view_as(x)

    w1, b1, w2, b2 = layer.w1, layer.b1.squeeze(1), layer.w2, layer.b2.squeeze(1)
    return moexport.Experts(w1=w1, b1=b1, w2=w2, b2=b2, activation="relu2", forward=forward)


# --- a muMoE layer whose gate sees something else -------------------------------------------------


class Backbone(nn.Module):
    """A CP tensor that sees what a small network makes of x, and a gate that sees x itself."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.ReLU())
        self.gate = nn.Linear(DIM, EXPERTS)
        self.expert = nn.Parameter(1 + torch.randn(8, EXPERTS))
        self.enter = nn.Parameter(0.3 * torch.randn(8, HIDDEN))
        self.leave = nn.Parameter(0.3 * torch.randn(8, DIM))

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (…, d)."""
        mixed = F.linear(self.gate(x).softmax(dim=-1), self.expert)
        return (F.linear(self.backbone(x), self.enter) * mixed) @ self.leave


@moexport.adapts(Backbone)
def adapt_backbone(layer: Backbone) -> moexport.MuMoE:
    def forward(mumoe: Any, x: Tensor) -> Any:
        return mumoe(layer.backbone(x), layer.gate(x).softmax(dim=-1))

    factors = [layer.expert.T, layer.enter.T, layer.leave.T]
    return moexport.MuMoE(weights=factors, forward=forward)


# --- what is refused ------------------------------------------------------------------------------


class Specialised(nn.Module):
    """An expert that adds a normalised third map of its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.third, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the expert's outputs for rows x (…, d)."""
        y = self.down(F.gelu(self.up(x)))
        return y + self.norm(self.third(y))  # type: ignore[no-any-return]


class SpecialisedExperts(Shared):
    """A mixture of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = experts_of(Specialised)


@moexport.adapts(SpecialisedExperts)
def adapt_specialised(layer: SpecialisedExperts) -> moexport.Experts:
    return moexport.Experts(experts=layer.experts, router=layer.route)


# --- a small network around each ------------------------------------------------------------------


class Host(nn.Module):
    """Calls a layer as its network does, and returns tokens (b, m, o)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.kind = layer, type(layer)
        self.router = nn.Linear(DIM, EXPERTS * SLOTS) if isinstance(layer, Outside) else None

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output."""
        if self.kind is Masked:
            y = self.layer(x, x[..., 0] > -1)
        elif self.router is not None:
            rows = x.flatten(0, 1)
            y, _ = self.layer(rows, self.router(rows).unflatten(-1, (EXPERTS, SLOTS)))
            y = y.view_as(x)
        elif self.kind is Convolved:
            y = self.layer(x.mT.reshape(x.shape[0], DIM, 3, 4)).flatten(2).mT
        else:
            y = self.layer(x)
        if isinstance(y, dict):
            y = y["output"]
        result: Tensor = y[0] if isinstance(y, tuple) else y
        return result


class Net(nn.Module):
    """Scores (b, 5) of 12 tokens (b, 12, 6)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.mixture = nn.Linear(6, DIM), Host(layer)
        self.head = nn.Linear(20 if isinstance(layer, OneMap) else DIM, 5)

    def example_input(self) -> Tensor:
        """Returns an input on which moexport compares this network with its own copy of it."""
        return torch.randn(16, 12, 6, generator=torch.Generator().manual_seed(0))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scores."""
        scores: Tensor = self.head(self.mixture(self.embed(x)).mean(dim=1))
        return scores


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "tempered": Tempered,
    "biased": Biased,
    "normed": NormedExperts,
    "one-map": OneMap,
    "mixed": Mixed,
    "masked": Masked,
    "swapped": Swapped,
    "expert-choice": ExpertChoice,
    "outside": Outside,
    "dense": Dense,
    "shared": Shared,
    "sigmoid": Sigmoid,
    "heads": Heads,
    "convolved": Convolved,
    "capacity": Capacity,
    "backbone": Backbone,
    "specialised": SpecialisedExperts,
}


def build(layer: str = "tempered") -> nn.Module:
    """Returns the network with random weights around a layer."""
    torch.manual_seed(1)
    net = Net(LAYERS[layer]())
    for weight in net.parameters():
        if weight.ndim < 2 and weight.numel() > 1:  # away from 0 and 1, as after training
            weight.data.add_(0.3 * torch.randn_like(weight))
    return net.eval()
