"""Hosts that are no more than the layer itself, on tokens or on pixels."""

from __future__ import annotations

from torch import Tensor, nn


class TokenHost(nn.Module):
    """One layer on tokens: (b, m, d) to (b, m, o)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output."""
        y: Tensor = self.layer(x)
        return y


class PixelHost(nn.Module):
    """One layer whose tokens are the pixels of (b, d, H, W), row by row; returns (b, o, H, W)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output in the layout of its input."""
        y: Tensor = self.layer(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        return y.reshape(y.shape[0], y.shape[1], x.shape[2], x.shape[3])
