"""What is asked of networks that code names: options of every call that loads a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.option import Panel, option
from ...exporter.requests import AnyPath

API = 1

Adapter = Callable[[Any], Any]
"""A user's function that says what a layer of the user's own is."""


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """What a factory's network is filled with, and what its layers are."""

    weights: AnyPath | None = option(
        None, "Weights for a package.module:factory.", unset="those of the factory"
    )
    adapter: Adapter | str | Sequence[Adapter | str] = option(
        (),
        "Adapter for the factory's own MoE layers.",
        unset="none",
        kind=list[str],
        metavar="MODULE:FUNCTION",
    )


PANEL = Panel("own-layers", "Your own network", ("load",), NetworkOptions)
