"""Loaders of runners that a test has made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moexport.bench.runners.base import Loader, Runner


@dataclass(frozen=True)
class Made(Loader):
    """Opens what a function makes; another process cannot."""

    make: Callable[[], Runner]

    def __call__(self) -> Runner:
        return self.make()
