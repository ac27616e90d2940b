"""The doors of the core: records by name, its own first, then those of installed plugins.

A plugin is a distribution with an entry point in a group of `moexport.…`. The module that the entry
point names says with `API` for which version of the records it was written. Nothing of a plugin is
imported before one of its records is asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Protocol, TypeVar

from ..errors import PluginError

API = 1
"""The version of the records that plugins hand over."""

OWN = "moexport"
"""The distribution whose plugins come with the core."""

PLUGINS = "MOEXPORT_PLUGINS"
"""The environment variable that leaves all plugins out when it is `off`."""


class Named(Protocol):
    """A record of a registry."""

    @property
    def name(self) -> str:
        """What users call it."""
        ...


R = TypeVar("R", bound=Named)


@dataclass(frozen=True, slots=True)
class Unloadable:
    """A plugin's entry point that gave no record, and why."""

    group: str
    name: str
    distribution: str
    reason: str


_UNLOADABLE: dict[tuple[str, str], Unloadable] = {}


def unloadable() -> tuple[Unloadable, ...]:
    """Returns the plugins that could not be loaded so far."""
    return tuple(_UNLOADABLE.values())


def foreign_plugins() -> dict[str, list[str]]:
    """Returns the entry points of other distributions, by distribution: each is loaded.

    A line is `group: name`, with the reason where that cannot be loaded; those of our own that
    cannot are among them.
    """
    found: dict[str, list[str]] = {}
    for group, points in _found().items():
        for point in points:
            loaded = _loaded(group, point, object)
            if loaded and point.dist is not None and point.dist.name == OWN:
                continue
            failed = "" if loaded else f" cannot be loaded: {_UNLOADABLE[group, point.name].reason}"
            found.setdefault(distribution_of(point), []).append(f"{group}: {point.name}{failed}")
    return found


def _off() -> bool:
    return os.environ.get(PLUGINS) == "off"


@cache
def _found() -> dict[str, tuple[EntryPoint, ...]]:
    """The entry points of all plugins, by group, read once."""
    if _off():
        return {}
    points = entry_points()
    groups = sorted(group for group in points.groups if group.startswith("moexport."))
    return {group: tuple(points.select(group=group)) for group in groups}


def distribution_of(point: EntryPoint) -> str:
    """Returns the name and version of the distribution that an entry point is of."""
    return "unknown" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def left_out() -> str:
    """Returns what to add to a hint where no plugin is there: one may bring what was asked for."""
    return f"; {PLUGINS}=off leaves out plugins, and what they bring" if _off() else ""


class Registry(Generic[R]):
    """The records of one kind: `own` are the core's, `group` is that of the plugins' entry points.

    Plugins follow in the order of their names.
    """

    def __init__(self, group: str, kind: type[R], own: Sequence[R] = ()) -> None:
        self.group = group
        self._kind = kind
        self._own = {record.name: record for record in own}

    @property
    def own(self) -> tuple[R, ...]:
        """The core's records."""
        return tuple(self._own.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all records; imports no plugin."""
        return (*self._own, *self._points())

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._points()

    def __getitem__(self, name: str) -> R:
        """Returns a record; raises `PluginError` where there is none, or it cannot be loaded."""
        if name in self._own:
            return self._own[name]
        point = self._points().get(name)
        if point is None:
            raise PluginError(
                f"{self.group}: nothing that is installed is called '{name}'",
                hint=f"is {PLUGINS}=off set? Else install again what brings it; "
                f"there is {', '.join(self.names) or 'none'}",
            )
        record: R | None = _loaded(self.group, point, self._kind)
        if record is None:
            failed = _UNLOADABLE[self.group, name]
            raise PluginError(
                f"{name}: the plugin of {failed.distribution} cannot be loaded: {failed.reason}",
                hint=f"install a version that fits, or remove it; {PLUGINS}=off runs without any",
            )
        return record

    def __iter__(self) -> Iterator[R]:
        """Yields all records; a plugin that cannot be loaded is left out (`unloadable`)."""
        yield from self._own.values()
        for point in self._points().values():
            record = _loaded(self.group, point, self._kind)
            if record is not None:
                yield record

    def _points(self) -> dict[str, EntryPoint]:
        """The plugins' entry points by name; `PluginError` where two have one name."""
        found: dict[str, EntryPoint] = {}
        for point in sorted(_found().get(self.group, ()), key=lambda point: point.name):
            other = found.get(point.name)
            if other is not None or point.name in self._own:
                theirs = "moexport itself" if other is None else distribution_of(other)
                raise PluginError(
                    f"{self.group}: '{point.name}' comes from {theirs} and from "
                    f"{distribution_of(point)}",
                    hint=f"remove one of them; {PLUGINS}=off runs without any plugin",
                )
            found[point.name] = point
        return found


def _loaded(group: str, point: EntryPoint, kind: type[Any]) -> Any:
    """The record of an entry point; None where that fails, which is kept."""
    key = (group, point.name)
    if key in _UNLOADABLE:
        return None
    try:
        record = point.load()
    except Exception as error:  # noqa: BLE001  a plugin's module may fail in any way
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        api = getattr(sys.modules[point.module], "API", None)
        if api != API:
            reason = f"{point.module} is for API {api}, and this moexport has API {API}"
        elif not isinstance(record, kind):
            reason = f"{point.value} is no {kind.__name__}"
        elif getattr(record, "name", None) != point.name:
            reason = f"{point.value} is not named '{point.name}'"
        else:
            return record
    _UNLOADABLE[key] = Unloadable(*key, distribution_of(point), reason)
    return None
