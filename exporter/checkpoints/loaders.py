"""The registry of loaders: for models of other libraries, and networks from code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.registry import PLUGINS, Registry
from ...errors import PluginError
from ..model import Model
from ..requests import LoadRequest

if TYPE_CHECKING:
    from torch import nn

MISSING = (
    "models of other libraries, and networks from code, are loaded by plugins, but none is "
    f"available: is {PLUGINS}=off set? `moexport doctor` shows those that cannot be loaded"
)


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads one kind of model.

    A source is `package.module:factory` as typed, or the path of a checkpoint with a `config.json`.
    `finds` returns the family of its model, or None for a source of another kind; it reads no
    weights. `loads` returns the model with a configuration. `settings` are the configuration keys
    that must be recorded to load a model again; its files contain the rest. `refuses` raises
    `UsageError` for options of the plugin (`common.option.Panel`) that do not apply to a source.
    `finds_module` returns the family of a network in memory, or None; `loads` then receives the
    network. Without it, the plugin loads no networks in memory.
    """

    name: str
    finds: Callable[[str | Path], str | None]
    loads: Callable[[Any, Mapping[str, Any], LoadRequest], Model]
    settings: tuple[str, ...] = ()
    refuses: Callable[[str, LoadRequest], None] | None = None
    finds_module: Callable[[nn.Module], str | None] | None = None


LOADERS = Registry("moexport.loaders", ModelLoader)
"""All come from plugins: the core loads its families itself, and first."""


def loader_of(source: str | Path) -> tuple[ModelLoader, str] | None:
    """Returns the loader of a source and its model's family; None if no plugin loads it.

    Raises `PluginError` if two plugins do.
    """
    if isinstance(source, Path) and not _has_config(source):
        return None
    asked = ((loader, loader.finds(source)) for loader in LOADERS)
    return _only_one(str(source), asked)


def loader_of_module(module: nn.Module) -> tuple[ModelLoader, str] | None:
    """Returns the loader of a network in memory and its family; None if no plugin loads it.

    Raises `PluginError` if two plugins do.
    """
    finding = ((loader, loader.finds_module) for loader in LOADERS)
    asked = ((loader, finds(module)) for loader, finds in finding if finds is not None)
    return _only_one(type(module).__name__, asked)


def _only_one(
    source: str, asked: Iterable[tuple[ModelLoader, str | None]]
) -> tuple[ModelLoader, str] | None:
    found = [(loader, family) for loader, family in asked if family is not None]
    if len(found) > 1:
        names = " and ".join(loader.name for loader, _ in found)
        raise PluginError(
            f"{source}: several plugins load it: {names}",
            hint=f"remove all but one of them; {PLUGINS}=off disables all plugins",
        )
    return found[0] if found else None


def _has_config(place: Path) -> bool:
    """Whether a `config.json` is in a folder or next to a file; otherwise plugins are skipped."""
    return ((place if place.is_dir() else place.parent) / "config.json").is_file()
