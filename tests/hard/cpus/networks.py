"""Networks whose products tell FP16 sums from FP32 ones: long, cancelling, and of large parts."""

from __future__ import annotations

import torch
from moexport.tests.hard.pairs.networks import TOKENS, WIDTH, Published
from torch import Tensor, nn

LONG = 768


class _Network(nn.Module):
    """A Soft MoE layer, and maps of `LONG` numbers after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Published()
        self.wide, self.deep, self.last = (
            nn.Linear(WIDTH, LONG),
            nn.Linear(LONG, LONG),
            nn.Linear(LONG, 10),
        )

    @property
    def example_input(self) -> Tensor:
        return torch.randn(8, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.deep(self.wide(self.layer(x)).relu()).relu().mean(1))
        return y


class _Opposite(_Network):
    """Numbers around 1500 that almost cancel: in pairs, or `first` all of one sign."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        step = 2.0**-6 if first else 2.0**-11  # FP16 holds 1 and 1 less this
        one, other = torch.ones(10, LONG), torch.full((10, LONG), step - 1)
        pairs = torch.stack((one, other), -1).flatten(1)
        self.register_buffer("signs", torch.cat((one, other), 1) if first else pairs)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        # Near one another, so that little is left of a pair.
        large = 1500 + self.wide(self.layer(x)).tanh()
        both = torch.cat((large, large), -1) if self.first else large.repeat_interleave(2, dim=-1)
        signs: Tensor = self.signs  # type: ignore[assignment]
        deep: Tensor = self.last(self.deep(large))
        return deep * 1e-6 + (both @ signs.T).mean(1, keepdim=True)


def _made(network: type[nn.Module], **settings: bool) -> nn.Module:
    torch.manual_seed(0)
    return network(**settings).eval()


def long() -> nn.Module:
    """Products of many numbers."""
    return _made(_Network)


def cancelling() -> nn.Module:
    """Sums of large numbers of both signs in turn."""
    return _made(_Opposite, first=False)


def large() -> nn.Module:
    """The same, whose parts are beyond what FP16 holds: first those above zero."""
    return _made(_Opposite, first=True)
