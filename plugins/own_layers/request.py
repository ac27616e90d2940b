"""The options for networks of user code, in every call that loads a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.option import Panel, option
from ...exporter.requests import AnyPath

API = 1

Adapter = Callable[[Any], Any]
"""A user's function that describes one of the user's layers."""


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The weights for a factory's network, and the adapters for its layers."""

    weights: AnyPath | None = option(
        None, "Weights for a package.module:factory.", unset="those of the factory", is_path=True
    )
    adapter: Adapter | str | Sequence[Adapter | str] = option(
        (), "An adapter for the factory's own MoE layers.", unset="none"
    )


PANEL = Panel(
    "own-layers",
    "Your own network",
    ("load",),
    NetworkOptions,
    "moexport.plugins.own_layers.cli:network_options",
)
