"""The door for models of no family: those of other libraries, and those that code names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.registry import PLUGINS, Registry
from ...errors import PluginError
from ..model import Model
from ..requests import LoadRequest

MISSING = (
    "models of other libraries, and networks that code names, are loaded by plugins, of which none "
    f"is here: is {PLUGINS}=off set? `moexport doctor` names those that cannot be loaded"
)


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads one kind of models.

    A source is `package.module:factory` as it was typed, or the path of a checkpoint with a
    `config.json`. `finds` returns the family of its model, or None for a source of another kind; it
    reads no weights. `loads` returns the model, with the configuration that was given. `settings`
    are the keys of a model's configuration that load it again as it was: its files say the rest.
    `refuses` raises `UsageError` for options of its own (`common.option.Panel`) beside a source, as
    it was typed, that they are not for.
    """

    name: str
    finds: Callable[[str | Path], str | None]
    loads: Callable[[str | Path, Mapping[str, Any], LoadRequest], Model]
    settings: tuple[str, ...] = ()
    refuses: Callable[[str, LoadRequest], None] | None = None


LOADERS = Registry("moexport.loaders", ModelLoader)
"""All are plugins': the core loads the families by itself, and comes first."""


def loader_of(source: str | Path) -> tuple[ModelLoader, str] | None:
    """Returns the loader of a source and its model's family, None where no plugin loads it.

    Raises `PluginError` where two do.
    """
    if isinstance(source, Path) and not _has_config(source):
        return None
    asked = ((loader, loader.finds(source)) for loader in LOADERS)
    found = [(loader, family) for loader, family in asked if family is not None]
    if len(found) > 1:
        names = " and ".join(loader.name for loader, _ in found)
        raise PluginError(
            f"{source}: the plugins {names} all load it",
            hint=f"remove all but one of them; {PLUGINS}=off runs without any plugin",
        )
    return found[0] if found else None


def _has_config(place: Path) -> bool:
    """Whether a `config.json` lies in a folder, or beside a file: else no plugin is imported."""
    return ((place if place.is_dir() else place.parent) / "config.json").is_file()
