"""A digit classifier with a custom Soft MoE layer, its training, and the layer's adapter.

Copy this file into an empty folder and run there:

    python own_layer.py
    moexport export own_layer:build --weights digits.pt --data test.npz --k 8 -o digits-k8

The page own-layer.md explains it step by step.
"""

from __future__ import annotations

import moexport
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Perceptron(nn.Module):
    """An expert, which computes its slots (b, p, d)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, slots: Tensor) -> Tensor:
        """Returns the slots' outputs (b, p, d)."""
        outputs: Tensor = self.down(F.gelu(self.up(slots)))
        return outputs


class SoftMixture(nn.Module):
    """The Soft MoE layer of "From Sparse to Soft Mixtures of Experts", on tokens (b, m, d)."""

    def __init__(self, dim: int, hidden: int, experts: int, slots: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(dim, experts, slots))
        self.sharpness = nn.Parameter(torch.tensor(4.0))
        self.perceptrons = nn.ModuleList(Perceptron(dim, hidden) for _ in range(experts))

    def router(self) -> Tensor:
        """Returns the matrix by which tokens are multiplied, (d, n, p)."""
        return self.sharpness * F.normalize(self.queries, dim=0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the tokens' outputs (b, m, d)."""
        logits = torch.einsum("bmd,dnp->bmnp", F.normalize(tokens, dim=-1), self.router())
        dispatch = logits.softmax(dim=1)  # over the tokens
        combine = logits.flatten(2).softmax(dim=-1).view_as(logits)  # over all slots
        slots = torch.einsum("bmnp,bmd->bnpd", dispatch, tokens)
        outputs = [expert(slots[:, i]) for i, expert in enumerate(self.perceptrons)]
        return torch.einsum("bmnp,bnpd->bmd", combine, torch.stack(outputs, dim=1))


@moexport.adapts(SoftMixture)
def adapt(layer: SoftMixture) -> moexport.SoftMoE:
    """Describes a SoftMixture for moexport."""
    return moexport.SoftMoE(
        phi=layer.router(),
        experts=[(expert.up, expert.down) for expert in layer.perceptrons],
        norm="l2",
        slots_from="raw",
        activation="gelu",
    )


class DigitNet(nn.Module):
    """Classifies images (b, 8, 8) of digits by their 16 patches of 2 × 2 pixels."""

    def __init__(self, dim: int = 32, hidden: int = 64, experts: int = 16, slots: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(4, dim)
        self.places = nn.Parameter(torch.randn(16, dim) * 0.1)
        self.norm = nn.LayerNorm(dim)
        self.mixture = SoftMixture(dim, hidden, experts, slots)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the class scores (b, 10)."""
        patches = images.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        tokens = self.embed(patches) + self.places
        tokens = tokens + self.mixture(self.norm(tokens))
        scores: Tensor = self.head(tokens.mean(dim=1))
        return scores


def build(experts: int = 16) -> nn.Module:
    """Returns the network, which moexport fills with --weights; --set experts=8 is possible."""
    return DigitNet(experts=experts)


def main() -> None:
    """Trains the network; writes digits.pt and test.npz."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels.reshape(-1, 8, 8) / 16, dtype=torch.float32)
    classes = torch.tensor(labels)
    torch.manual_seed(0)
    order = torch.randperm(len(images))
    train, test = order[:1400], order[1400:]
    network = build()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(40):
        for batch in train[torch.randperm(len(train))].view(-1, 100):
            loss = F.cross_entropy(network(images[batch]), classes[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        right = (network(images[test]).argmax(dim=1) == classes[test]).float().mean()
    print(f"accuracy: {right:.1%}")
    torch.save(network.state_dict(), "digits.pt")
    np.savez("test.npz", input=images[test].numpy(), label=classes[test].numpy())


if __name__ == "__main__":
    main()
