"""Sixteen layers of public code, each with its adapter: find one similar to yours.

The layers are rebuilt from the formulas of public code. Copy this file into an empty folder and run
there:

    moexport export own_layers:build --set layer=masked --k 2 -o masked
    moexport verify masked

The page own-layer-examples.md explains them. In shapes, b is the number of inputs, m of tokens, d
of the width, n of experts, p of slots per expert, and k of the experts that are computed.
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
    """An expert of two linear maps."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.gelu, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias), nn.Linear(HIDDEN, DIM, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Returns the expert's outputs for rows x (…, d)."""
        y: Tensor = self.down(self.activation(self.up(x)))
        return y


class SwiGlu(nn.Module):
    """An expert with a gated first map."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, HIDDEN), nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the expert's outputs for rows x (…, d)."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def make_experts(expert: Callable[[], nn.Module], count: int = EXPERTS) -> nn.ModuleList:
    """Returns experts with different weights."""
    return nn.ModuleList(expert() for _ in range(count))


def dispatch(x: Tensor, shares: Tensor) -> Tensor:
    """Returns slots (b, n, p, d): averages of tokens (b, m, d) by shares (b, m, n, p)."""
    return torch.einsum("bmd,bmnp->bnpd", x, shares)


def softmax_over_slots(logits: Tensor) -> Tensor:
    """Returns a softmax of logits (b, m, n, p) over all slots of all experts."""
    return logits.flatten(2).softmax(dim=-1).view_as(logits)


def apply_experts(experts: nn.ModuleList, slots: Tensor) -> Tensor:
    """Returns the experts' outputs (b, n, p, o) for their slots (b, n, p, d)."""
    return torch.stack([expert(slots[:, e]) for e, expert in enumerate(experts)], dim=1)


def combine_outputs(outputs: Tensor, combine: Tensor) -> Tensor:
    """Returns tokens (b, m, o) from outputs (b, n, p, o) and C (b, m, n, p)."""
    return torch.einsum("bnpo,bmnp->bmo", outputs, combine)


def mix_experts(experts: nn.ModuleList, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Returns y = Σ_k weights · expert(x) for the experts `index` (…, k)."""
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
        self.experts = make_experts(SwiGlu)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (b, m, d)."""
        logits = torch.einsum("bmd,dnp->bmnp", x, self.phi) / self.temperature
        outputs = apply_experts(self.experts, dispatch(x, logits.softmax(dim=1)))
        return x + combine_outputs(outputs, softmax_over_slots(logits))


@moexport.adapts(Tempered)
def adapt_tempered(layer: Tempered) -> moexport.SoftMoE:
    return moexport.SoftMoE(
        phi=layer.phi, temperature=layer.temperature, experts=layer.experts, residual=True
    )


class Biased(nn.Module):
    """A router with a bias, on normalised tokens; the layer returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS * SLOTS)
        self.router.weight.data.mul_(3)
        self.experts = make_experts(lambda: Mlp(F.silu, bias=False))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Returns tokens (b, m, d) as `output`, and a loss."""
        normed = self.norm(x)
        logits = self.router(normed).unflatten(-1, (EXPERTS, SLOTS))
        outputs = apply_experts(self.experts, dispatch(normed, logits.softmax(dim=1)))
        return {
            "output": x + combine_outputs(outputs, softmax_over_slots(logits)),
            "loss": logits.logsumexp(1),
        }


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
        self.experts = make_experts(Normed)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (b, m, d)."""
        logits = torch.einsum("bmd,dnp->bmnp", x, self.phi)
        outputs = apply_experts(self.experts, dispatch(x, logits.softmax(dim=1)))
        return combine_outputs(outputs, softmax_over_slots(logits))


@moexport.adapts(NormedExperts)
def adapt_normed(layer: NormedExperts) -> moexport.SoftMoE:
    return moexport.SoftMoE(phi=layer.phi, experts=layer.experts)


class OneMap(nn.Module):
    """A Soft MoE as in reinforcement learning: an expert is a ReLU of a map to another width."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(DIM, EXPERTS, SLOTS))
        self.scale = nn.Parameter(torch.tensor(4.0))
        self.experts = make_experts(lambda: nn.Sequential(nn.Linear(DIM, 20), nn.ReLU()))

    @staticmethod
    def unit(x: Tensor, dim: int) -> Tensor:
        """Returns x divided by its length."""
        return x / (x.square().sum(dim, keepdim=True).sqrt() + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (b, m, o)."""
        phi = self.scale * self.unit(self.phi, 0)
        logits = torch.einsum("bmd,dnp->bmnp", self.unit(x, -1), phi)
        outputs = apply_experts(self.experts, dispatch(x, logits.softmax(dim=1)))
        return combine_outputs(outputs, softmax_over_slots(logits))


@moexport.adapts(OneMap)
def adapt_one_map(layer: OneMap) -> moexport.SoftMoE:
    phi = layer.scale * layer.unit(layer.phi, 0)
    return moexport.SoftMoE(
        phi=phi, experts=layer.experts, norm="l2-plus", eps=1e-6, slots_from="raw"
    )


class Mixed(nn.Module):
    """A Soft MoE whose phi is mixed over the experts by a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(DIM, EXPERTS, SLOTS))
        self.register_buffer("graph", torch.rand(EXPERTS, EXPERTS) / EXPERTS)
        self.experts = make_experts(Mlp)

    def router(self) -> Tensor:
        """Returns the matrix by which tokens are multiplied, (d, n, p)."""
        graph: Any = self.graph
        mix = 0.7 * torch.eye(EXPERTS) + 0.3 * graph
        return torch.einsum("dnp,nq->dqp", 5 * F.normalize(self.phi, dim=0), mix)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (b, m, d)."""
        normed = F.normalize(x, dim=-1)
        logits = torch.einsum("bmd,dnp->bmnp", normed, self.router())
        outputs = apply_experts(self.experts, dispatch(normed, logits.softmax(dim=1)))
        return combine_outputs(outputs, softmax_over_slots(logits))


@moexport.adapts(Mixed)
def adapt_mixed(layer: Mixed) -> moexport.SoftMoE:
    return moexport.SoftMoE(phi=layer.router(), experts=layer.experts, norm="l2")


# --- layers whose own forward computes the experts' slots -----------------------------------------


class Masked(nn.Module):
    """A Soft MoE with a mask: padding is in no slot, and its outputs are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(DIM, EXPERTS, SLOTS))
        self.experts = make_experts(Mlp)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Returns tokens (b, m, d); `mask` (b, m) is False for padding."""
        logits = torch.einsum("bmd,dnp->bmnp", x, self.phi)
        hidden = logits.masked_fill(~mask[:, :, None, None], float("-inf"))
        outputs = apply_experts(self.experts, dispatch(x, hidden.softmax(dim=1)))
        return combine_outputs(outputs, softmax_over_slots(logits)).masked_fill(~mask[..., None], 0)


@moexport.adapts(Masked)
def adapt_masked(layer: Masked) -> moexport.Experts:
    def forward(experts: Any, x: Tensor, mask: Tensor) -> Tensor:
        logits = torch.einsum("bmd,dnp->bmnp", x, layer.phi)
        hidden = logits.masked_fill(~mask[:, :, None, None], float("-inf"))
        slots = dispatch(x, hidden.softmax(dim=1))
        y: Tensor = experts(slots, combine=softmax_over_slots(logits))
        return y.masked_fill(~mask[..., None], 0)

    return moexport.Experts(experts=layer.experts, forward=forward)


class Swapped(nn.Module):
    """Dispatch by a softmax over the slots, combine by a softmax over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(0.5 * torch.randn(DIM, EXPERTS, SLOTS))
        self.experts = make_experts(Mlp)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (b, m, d)."""
        logits = torch.einsum("bmd,dnp->bmnp", x, self.phi)
        outputs = apply_experts(self.experts, dispatch(x, softmax_over_slots(logits)))
        return combine_outputs(outputs, logits.softmax(dim=1))


@moexport.adapts(Swapped)
def adapt_swapped(layer: Swapped) -> moexport.Experts:
    def forward(experts: Any, x: Tensor) -> Any:
        logits = torch.einsum("bmd,dnp->bmnp", x, layer.phi)
        return experts(dispatch(x, softmax_over_slots(logits)), combine=logits.softmax(dim=1))

    return moexport.Experts(experts=layer.experts, forward=forward)


class ExpertChoice(nn.Module):
    """Each expert selects its best tokens of a sequence and adds its outputs to them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS, bias=False)
        self.gate.weight.data.mul_(4)
        self.experts = make_experts(lambda: Mlp(F.silu, bias=False))
        self.capacity = 5

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (b, m, d)."""
        normed = self.norm(x)
        best, index = self.gate(normed).topk(self.capacity, dim=1)
        shares = torch.zeros(*x.shape[:2], EXPERTS).scatter(1, index, best.softmax(dim=1))
        y = x
        for e, expert in enumerate(self.experts):
            y = y + shares[..., e, None] * expert(normed)
        return y


@moexport.adapts(ExpertChoice)
def adapt_expert_choice(layer: ExpertChoice) -> moexport.Experts:
    def forward(experts: Any, x: Tensor) -> Any:
        normed = layer.norm(x)
        best, index = layer.gate(normed).topk(layer.capacity, dim=1)  # (b, p, n)
        taken = F.one_hot(index, x.shape[1]).to(x)  # (b, p, n, m)
        slots = torch.einsum("bpnm,bmd->bnpd", taken, normed)
        return x + experts(slots, combine=torch.einsum("bpnm,bpn->bmnp", taken, best.softmax(1)))

    return moexport.Experts(experts=layer.experts, forward=forward)


class Outside(nn.Module):
    """A layer that receives its logits; its softmaxes are over an expert's slots and all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = make_experts(SwiGlu)

    def forward(self, x: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns rows (t, d) for rows x (t, d) and logits (t, n, p), and the combine weights."""
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
    """All experts on all tokens; an expert is one linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS)
        self.gate.weight.data.mul_(4)
        self.experts = make_experts(lambda: nn.Linear(DIM, DIM))

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
    """A shared expert in addition to the selected ones, and a residual; returns more than y."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(DIM, EXPERTS, bias=False), SwiGlu()
        self.router.weight.data.mul_(4)
        self.experts = make_experts(SwiGlu)

    def route(self, x: Tensor, k: int = 2) -> tuple[Tensor, Tensor]:
        """Returns the experts of tokens x (…, d) and their weights, (…, k)."""
        weights, index = self.router(x).softmax(dim=-1).topk(k, dim=-1)
        return index, weights / (weights.sum(dim=-1, keepdim=True) + 1e-9)

    def forward(self, x: Tensor) -> tuple[Tensor, None, None]:
        """Returns tokens (…, d), and None twice."""
        return x + self.shared(x) + mix_experts(self.experts, x, *self.route(x)), None, None


@moexport.adapts(Shared)
def adapt_shared(layer: Shared) -> moexport.Experts:
    def forward(experts: Any, x: Tensor, k: int = 2) -> Any:
        return x + layer.shared(x) + experts(x, *layer.route(x, k))

    return moexport.Experts(experts=layer.experts, forward=forward)


class Sigmoid(nn.Module):
    """Sigmoid scores as weights, stacked matrices, and one bias for the sum of all experts."""

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
    """The width is split into heads, each of which has its own router and experts."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        dim, self.heads = DIM // heads, heads
        self.routers = nn.ModuleList(nn.Linear(dim, EXPERTS, bias=False) for _ in range(heads))
        self.sets = nn.ModuleList(
            make_experts(lambda: nn.Sequential(nn.Linear(dim, 12), nn.GELU(), nn.Linear(12, dim)))
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
            outputs.append(mix_experts(experts, part, index, best.softmax(dim=-1)))
        return torch.cat(outputs, dim=-1)


@moexport.adapts(Heads)
def adapt_heads(layer: Heads) -> moexport.Experts:
    def forward(experts: Any, x: Tensor, k: int = 2) -> Any:
        parts = x.view(*x.shape[:-1], layer.heads, -1)  # each head is a separate token
        logits = torch.stack([r(parts[..., h, :]) for h, r in enumerate(layer.routers)], dim=-2)
        best, index = logits.topk(k, dim=-1)
        index = index + EXPERTS * torch.arange(layer.heads)[:, None]
        return experts(parts, index, best.softmax(dim=-1)).flatten(-2)

    flat = [expert for experts in layer.sets for expert in experts]  # type: ignore[attr-defined]
    return moexport.Experts(experts=flat, forward=forward)


class Convolved(nn.Module):
    """Channels first: experts are grouped 1×1 convolutions, with a residual."""

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
        chosen = F.one_hot(index, EXPERTS).flatten(0, 1)  # (2t, n)
        before = ((chosen.cumsum(dim=0) - 1) * chosen).sum(dim=-1).view_as(index)
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


# --- a muMoE layer whose gate has a different input -----------------------------------------------


class Backbone(nn.Module):
    """A CP tensor on the output of a small network, with a gate on that network's input x."""

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


# --- a layer that is refused ----------------------------------------------------------------------


class Specialised(nn.Module):
    """An expert that adds a normalised third map of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.third, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the expert's outputs for rows x (…, d)."""
        y = self.down(F.gelu(self.up(x)))
        return y + self.norm(self.third(y))  # type: ignore[no-any-return]


class SpecialisedExperts(Shared):
    """A mixture of specialised experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = make_experts(Specialised)


@moexport.adapts(SpecialisedExperts)
def adapt_specialised(layer: SpecialisedExperts) -> moexport.Experts:
    return moexport.Experts(experts=layer.experts, router=layer.route)


# --- a small network around each layer ------------------------------------------------------------


class Host(nn.Module):
    """Calls a layer as its network does and returns tokens (b, m, o)."""

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
    """A network from 12 tokens (b, 12, 6) to scores (b, 5)."""

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
    """Returns a network with random weights around the named layer."""
    torch.manual_seed(1)
    net = Net(LAYERS[layer]())
    for weight in net.parameters():
        if weight.ndim < 2 and weight.numel() > 1:  # not exactly 0 or 1, as after training
            weight.data.add_(0.3 * torch.randn_like(weight))
    return net.eval()
