"""The MNIST network: patches of one image as tokens, one Soft MoE layer, a linear head."""

from __future__ import annotations

from torch import Tensor, nn


class PatchClassifier(nn.Module):
    """Images (b, 1, g·s, g·s) to logits (b, classes), with g × g patches of s × s pixels."""

    def __init__(self, grid: int, patch: int, classes: int) -> None:
        super().__init__()
        self.windows = (-1, grid, patch, grid, patch)
        self.tokens = (-1, grid * grid, patch * patch)
        self.features = (-1, grid * grid * patch * patch)
        self.layer: nn.Module = nn.Identity()
        self.decoder = nn.Linear(self.features[1], classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        x = x.reshape(self.windows).transpose(2, 3).reshape(self.tokens)
        x = self.layer(x).reshape(self.features)
        logits: Tensor = self.decoder(x)
        return logits
