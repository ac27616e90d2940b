"""The registry of loaders: for models of other libraries, and networks from code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    "plugins load models of other libraries and networks defined in code, but no plugin is "
    f"available: is {PLUGINS}=off set? `moexport doctor` lists the plugins that cannot be loaded"
)


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads one kind of model.

    A source is `package.module:factory` as typed, or the path of a checkpoint with a `config.json`.
    `finds` returns the family of its model, or None for a source of another kind; it reads no
    weights. `loads` returns the model for a configuration. `settings` are the configuration keys
    that must be recorded to load a model again; its files contain all others. `refuses` raises
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
"""All loaders come from plugins; the core loads its own families itself, before these."""


def loader_of(source: str | Path | nn.Module) -> tuple[ModelLoader, str] | None:
    """Returns the loader of a source and its model's family; None if no plugin loads it.

    Without a `config.json` in a folder, or next to a file, no plugin is tried. Raises
    `PluginError` if several plugins load it.
    """
    if isinstance(source, str | Path):
        name = str(source)
        if isinstance(source, Path):
            folder = source if source.is_dir() else source.parent
            if not (folder / "config.json").is_file():
                return None
        families = [(loader, loader.finds(source)) for loader in LOADERS]
    else:
        name = type(source).__name__
        families = [
            (loader, loader.finds_module(source)) for loader in LOADERS if loader.finds_module
        ]
    found = [(loader, family) for loader, family in families if family is not None]
    if len(found) > 1:
        names = " and ".join(loader.name for loader, _ in found)
        raise PluginError(
            f"{name}: several plugins load it: {names}",
            hint=f"remove all but one of them; {PLUGINS}=off disables all plugins",
        )
    return found[0] if found else None
