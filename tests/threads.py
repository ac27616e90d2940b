"""A network for tests of the number of threads."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


class SlowOnManyThreads(nn.Module):
    """A network that is slower with more threads, as small ones are; it records their number."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.had: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.had.append(torch.get_num_threads())
        time.sleep(2e-3 * (torch.get_num_threads() - 1))
        y: Tensor = self.network(x)
        return y
