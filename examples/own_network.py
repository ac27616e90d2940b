"""A network of your own with a Soft MoE layer, which moexport exports without knowing the network.

Run from the folder above this one:

    python examples/own_network.py gestures.pt
    moexport export examples.own_network:build --weights gestures.pt --k 4 -o gestures
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Expert(nn.Module):
    """A two-layer perceptron on slots (b, p, d)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, slots: Tensor) -> Tensor:
        """Returns the slots' outputs (b, p, d)."""
        outputs: Tensor = self.fc2(F.gelu(self.fc1(slots)))
        return outputs


class SoftMoE(nn.Module):
    """A Soft MoE layer on tokens (b, m, d).

    moexport recognises a layer of the family soft-moe-vit by the names `phi`, `scale` and
    `experts.{i}.fc1`, `.fc2`, and by their shapes; the arithmetic must also be that family's.
    """

    def __init__(self, dim: int, hidden: int, experts: int, slots: int) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(dim, experts, slots) * dim**-0.5)
        self.scale = nn.Parameter(torch.ones(1))
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the tokens' outputs (b, m, d)."""
        x = F.normalize(tokens, dim=-1)
        phi = self.scale * F.normalize(self.phi, dim=0)
        logits = torch.einsum("bmd,dnp->bmnp", x, phi)
        dispatch = logits.softmax(dim=1)
        combine = logits.flatten(2).softmax(dim=-1).view_as(logits)
        slots = torch.einsum("bmnp,bmd->bnpd", dispatch, x)
        outputs = torch.stack([f(slots[:, i]) for i, f in enumerate(self.experts)], dim=1)
        return torch.einsum("bmnp,bnpd->bmd", combine, outputs)


class GestureNet(nn.Module):
    """Classifies 64 readings of 6 motion sensors: (b, 64, 6) to (b, classes)."""

    def __init__(self, classes: int, dim: int = 48, experts: int = 16) -> None:
        super().__init__()
        self.embed = nn.Conv1d(6, dim, kernel_size=4, stride=4)
        self.norm = nn.LayerNorm(dim)
        self.moe = SoftMoE(dim, hidden=96, experts=experts, slots=1)
        self.head = nn.Linear(dim, classes)

    def example_input(self) -> Tensor:
        """Returns an input on which moexport compares this network with its own copy of it."""
        return torch.randn(4, 64, 6, generator=torch.Generator().manual_seed(0))

    def forward(self, readings: Tensor) -> Tensor:
        """Returns the class scores."""
        tokens = self.embed(readings.transpose(1, 2)).transpose(1, 2)  # (b, 16, dim)
        tokens = tokens + self.moe(self.norm(tokens))
        scores: Tensor = self.head(tokens.mean(dim=1))
        return scores


def build(classes: int = 5) -> nn.Module:
    """Returns the network; `moexport --set classes=7` passes an argument."""
    return GestureNet(classes)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save(build().state_dict(), sys.argv[1])  # you would train it first
