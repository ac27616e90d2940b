"""The layers of adapters, computed slowly in float64, expert by expert, as on their page."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from moexport.plugins.own_layers.descriptions import (
    Description,
    ExpertsDescription,
    MuMoEDescription,
    SoftMoEDescription,
)
from torch import Tensor, nn
from torch.nn import functional as F

Rows = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Rows] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "relu2": lambda z: F.relu(z).square(),
    "identity": lambda z: z,
}


def forward_of(description: Description, k: int | None = None) -> Callable[..., Any]:
    """Returns a substitute for the user's layer that computes k of its experts."""
    if isinstance(description, SoftMoEDescription):
        return _around(description, lambda x: soft_moe(description, x, k))
    if isinstance(description, MuMoEDescription):
        return _around(description, lambda x, a: _cp(description, x, a, k))
    forward: Any = description.forward
    router: Any = description.router
    own = forward or router
    more = {"k": k} if k is not None and "k" in inspect.signature(own).parameters else {}
    bank = Bank(description, k)
    if forward is None:
        return lambda x, *args: bank(x, *router(x, *args, **more))
    return lambda *args, **named: forward(bank, *args, **named, **more)


def _around(description: SoftMoEDescription | MuMoEDescription, layer: Any) -> Callable[..., Any]:
    forward = description.forward
    return layer if forward is None else lambda *args, **named: forward(layer, *args, **named)


def soft_moe(d: SoftMoEDescription, x: Tensor, k: int | None = None) -> Tensor:
    """Returns y of tokens (b, m, d) with k experts by Algorithm 1."""
    phi = d.phi.double() if d.phi.ndim == 3 else d.phi.double().unsqueeze(2)
    seen = _normalised(d, x)
    logits = torch.einsum("bmd,dnp->bmnp", seen, phi)
    if d.bias is not None:
        logits = logits + d.bias.double().reshape(phi.shape[1:])
    logits = logits / float(d.temperature)
    source = x if d.slots_from == "raw" else seen
    slots = torch.einsum("bmnp,bmd->bnpd", logits.softmax(dim=1), source)
    combine = logits.flatten(2).softmax(dim=2).view_as(logits)
    y = by_slots(experts_of(d, "gelu"), slots, combine, k)
    return y + x if d.residual else y


def _normalised(d: SoftMoEDescription, x: Tensor) -> Tensor:
    if not isinstance(d.norm, str):
        module: Any = d.norm
        normalised: Tensor = module.double()(x)
        return normalised
    length = x.norm(dim=-1, keepdim=True)
    norms: dict[str, Callable[[Any], Tensor]] = {
        "none": lambda eps: x,
        "l2": lambda eps: x / length.clamp_min(eps or 1e-12),
        "l2-plus": lambda eps: x / (length + eps),
        "l2-rsqrt": lambda eps: x / (length.square() + eps).sqrt(),
        "layernorm": lambda eps: F.layer_norm(x, x.shape[-1:], eps=eps or 1e-5),
    }
    y = norms[d.norm](d.eps)
    y = y if d.gain is None else y * d.gain.double()
    return y if d.shift is None else y + d.shift.double()


def _cp(d: MuMoEDescription, x: Tensor, coefficients: Tensor, k: int | None) -> Tensor:
    """A CP tensor with coefficients [b, m, n], of which each token keeps k."""
    if k is not None:
        best = coefficients.topk(k, dim=-1)
        coefficients = torch.zeros_like(coefficients).scatter(-1, best.indices, best.values)
    weights: Any = d.weights
    expert, enter, leave = (factor.double() for factor in weights)
    y: Tensor = ((x @ enter) * (coefficients @ expert)) @ leave.T
    return y


class Bank:
    """The argument `experts` of a forward."""

    def __init__(self, description: ExpertsDescription, k: int | None) -> None:
        self.experts, self.k = experts_of(description, "silu"), k
        self.on_input = description.weights_on == "input"

    def __call__(
        self,
        x: Tensor,
        index: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        combine: Tensor | None = None,
    ) -> Tensor:
        if combine is not None:
            return by_slots(self.experts, x, combine, self.k)
        assert weights is not None
        if index is None:
            weights, index = weights.topk(self.k or len(self.experts), dim=-1)
        return by_tokens(self.experts, x, index, weights, on_input=self.on_input)


def by_slots(experts: Sequence[Rows], slots: Tensor, combine: Tensor, k: int | None) -> Tensor:
    """Returns Σ C · outputs over the k experts with the largest column sums of C [b, m, n, p]."""
    if k is not None:
        sums = combine.sum(dim=(1, 3))
        kept = torch.zeros_like(sums).scatter(1, sums.topk(k, dim=1).indices, 1.0)
        combine = combine * kept[:, None, :, None]
    outputs = torch.stack([expert(slots[:, e]) for e, expert in enumerate(experts)], dim=1)
    return torch.einsum("bmnp,bnpo->bmo", combine, outputs)


def by_tokens(
    experts: Sequence[Rows], x: Tensor, index: Tensor, weights: Tensor, *, on_input: bool = False
) -> Tensor:
    """Returns Σ weights · expert(x), or Σ expert(weights · x), over each token's experts."""
    y = torch.zeros(())
    for e, expert in enumerate(experts):
        for choice in range(index.shape[-1]):
            w = weights[..., choice, None]
            chosen = index[..., choice, None] == e
            y = y + torch.where(chosen, expert(x * w) if on_input else expert(x) * w, 0.0)
    return y


def experts_of(d: SoftMoEDescription | ExpertsDescription, default: str) -> list[Rows]:
    """Returns each expert as a function of rows."""
    between = ACTIVATIONS[d.activation or default]
    if d.alpha != 1.0:
        between = lambda z: z * torch.sigmoid(d.alpha * z)  # noqa: E731
    after = ACTIVATIONS[d.out_activation or "identity"]
    if d.experts is not None:
        return [_listed(expert, between, after) for expert in d.experts]
    count = len(d.w1)  # type: ignore[arg-type]
    rows = [
        {key: _row(getattr(d, key), e) for key in ("w1", "b1", "w2", "b2")} for e in range(count)
    ]
    return [_stacked(each, d, between, after) for each in rows]


def _row(stack: Any, index: int) -> Tensor | None:
    return None if stack is None else stack[index].double()


def _stacked(of: dict[str, Any], d: Any, between: Rows, after: Rows) -> Rows:
    def expert(x: Tensor) -> Tensor:
        h = x @ of["w1"] + (0 if of["b1"] is None else of["b1"])
        if of["w2"] is None:
            return after(h)
        if d.gate is None:
            h = between(h)
        else:
            gate, up = h.chunk(2, -1) if d.gate == "concatenated" else (h[..., ::2], h[..., 1::2])
            limit = getattr(d, "limit", None)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            h = between(gate) * (up + getattr(d, "up_offset", 0.0))
        return after(h @ of["w2"] + (0 if of["b2"] is None else of["b2"]))

    return expert


def _listed(expert: Any, between: Rows, after: Rows) -> Rows:
    if isinstance(expert, nn.Module) and not isinstance(expert, nn.ModuleList):
        whole = expert.double()
        return lambda x: after(whole(x))
    maps: list[Any] = []
    norms = {}
    for part in expert:
        if isinstance(part, nn.LayerNorm | nn.RMSNorm):
            norms[len(maps)] = part.double()
        elif isinstance(part, nn.Module):
            maps.append(part.double())
        else:
            weight, bias = part if isinstance(part, tuple) else (part, None)
            maps.append(_linear(weight, bias))

    def mapped(number: int, x: Tensor) -> Tensor:
        y: Tensor = maps[number - 1](x)
        return norms[number](y) if number in norms else y

    def of_two(x: Tensor) -> Tensor:
        return after(mapped(2, between(mapped(1, x))))

    def gated(x: Tensor) -> Tensor:
        return after(mapped(3, between(mapped(1, x)) * mapped(2, x)))

    return of_two if len(maps) == 2 else gated


def _linear(weight: Tensor, bias: Tensor | None) -> Rows:
    return lambda x: F.linear(x, weight.double(), None if bias is None else bias.double())
