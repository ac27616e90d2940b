"""The doors of the core: records by name, its own first, then those of installed plugins.

A plugin is a distribution with an entry point in a group of `moexport.…`. The module that the entry
point names says with `API` for which version of the records it was written. Nothing of a plugin is
imported before one of its records is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions
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


_UNLOADABLE: dict[Entry, Unloadable] = {}

_UNREADABLE: list[str] = []

_OWN_NAMES: dict[str, frozenset[str]] = {}
"""The names of the core's records, by door: of those that were imported so far."""


def unloadable() -> tuple[Unloadable, ...]:
    """Returns the plugins that could not be loaded so far."""
    return tuple(_UNLOADABLE.values())


def foreign_plugins() -> dict[str, list[str]]:
    """Returns the entry points of other distributions, by distribution: each is loaded.

    A line is `group: name`, with the reason where that cannot be loaded; those of our own that
    cannot are among them.
    """
    found: dict[str, list[str]] = {}
    for entry in _found():
        loaded = _loaded(entry, object)
        if loaded and entry.own:
            continue
        failed = "" if loaded else f" cannot be loaded: {_UNLOADABLE[entry].reason}"
        found.setdefault(entry.distribution, []).append(f"{entry.group}: {entry.name}{failed}")
    return found


def troubles() -> tuple[str, ...]:
    """Returns what two packages claim, or one and the core (`_OWN_NAMES`), a line for each.

    After them come the packages whose entry points cannot be read.
    """
    claimed = ((group, name) for group, names in _doors().items() for name in names)
    return (*(said for claim in claimed if (said := _clash(*claim))), *_UNREADABLE)


def _clash(group: str, name: str) -> str:
    """Who brings a record of that name, where it is not one alone; else empty."""
    sources = ["moexport itself"] if name in _OWN_NAMES.get(group, ()) else []
    sources += [entry.distribution for entry in _doors().get(group, {}).get(name, ())]
    return f"{group}: '{name}' comes from {' and from '.join(sources)}" if sources[1:] else ""


def _off() -> bool:
    return os.environ.get(PLUGINS) == "off"


@dataclass(frozen=True, slots=True, eq=False)  # each is found once: hashed without a call
class Entry:
    """A plugin's entry point: of a distribution, its name and version, and its `summary`."""

    point: EntryPoint
    distribution: str
    summary: str
    own: bool

    @property
    def name(self) -> str:
        """What users call the record."""
        return self.point.name

    @property
    def group(self) -> str:
        """The door."""
        return self.point.group


@cache
def _found() -> tuple[Entry, ...]:
    """The entry points of all plugins by the order of their names, read once.

    Of the packages that are installed twice the first counts, as in an import. Metadata are parsed
    of those alone that bring a plugin: of all it takes as long as the rest of `--help`.
    """
    if _off():
        return ()
    found: dict[str, list[Entry]] = {}
    for distribution in distributions():
        try:
            if "[moexport." in (distribution.read_text("entry_points.txt") or ""):
                name, entries = _entries_of(distribution)
                found.setdefault(name, entries)
        except (TypeError, ValueError) as error:  # what importlib raises for damaged ones
            name = distribution.metadata["Name"]
            _UNREADABLE.append(f"plugin {name}: its entry_points.txt cannot be read: {error}")
    entries = [entry for several in found.values() for entry in several]
    return tuple(sorted(entries, key=lambda entry: (entry.name, entry.distribution)))


def _doors() -> dict[str, dict[str, list[Entry]]]:
    """The entry points by their group and their name: one each, unless two claim it."""
    return _by_door(_found())


@cache
def _by_door(entries: tuple[Entry, ...]) -> dict[str, dict[str, list[Entry]]]:
    doors: dict[str, dict[str, list[Entry]]] = {}
    for entry in entries:
        doors.setdefault(entry.group, {}).setdefault(entry.name, []).append(entry)
    return doors


def _entries_of(distribution: Distribution) -> tuple[str, list[Entry]]:
    """The name of a package, and its entry points in our doors."""
    metadata = distribution.metadata
    name = metadata["Name"]
    about = f"{name} {metadata['Version']}", metadata["Summary"] or "", name == OWN
    points = distribution.entry_points
    ours = [Entry(point, *about) for point in points if point.group.startswith("moexport.")]
    return name, ours


def left_out() -> str:
    """Returns what to add to a hint where no plugin is there: one may bring what was asked for."""
    return f"; {PLUGINS}=off leaves out plugins, and what they bring" if _off() else ""


def names_in(group: str) -> tuple[str, ...]:
    """Returns the names of the plugins' records of a door; imports none."""
    return tuple(_doors().get(group, ()))


class Registry(Generic[R]):
    """The records of one kind: `own` are the core's, `group` is that of the plugins' entry points.

    Plugins follow in the order of their names.
    """

    def __init__(self, group: str, kind: type[R], own: Sequence[R] = ()) -> None:
        self.group = group
        self._kind = kind
        self._own = {record.name: record for record in own}
        _OWN_NAMES[group] = frozenset(self._own)

    @property
    def own(self) -> tuple[R, ...]:
        """The core's records."""
        return tuple(self._own.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all records; imports no plugin."""
        return tuple(dict.fromkeys((*self._own, *names_in(self.group))))

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> R:
        """Returns a record.

        Raises `PluginError` where there is none, where it cannot be loaded, and where two have its
        name.
        """
        self._refuse_two_of(name)
        if name in self._own:
            return self._own[name]
        entry = self._entry(name)
        if entry is None:
            raise PluginError(
                f"{self.group}: nothing that is installed is called '{name}'",
                hint=f"is {PLUGINS}=off set? Else install again what brings it; "
                f"there is {', '.join(self.names) or 'none'}",
            )
        record: R | None = _loaded(entry, self._kind)
        if record is None:
            failed = _UNLOADABLE[entry]
            raise PluginError(
                f"{name}: the plugin of {failed.distribution} cannot be loaded: {failed.reason}",
                hint=f"install a version that fits, or remove it; {PLUGINS}=off runs without any",
            )
        return record

    def __iter__(self) -> Iterator[R]:
        """Yields all records; a plugin that cannot be loaded is left out (`unloadable`).

        Raises `PluginError` where two have one name.
        """
        for name in self.names:
            self._refuse_two_of(name)
        yield from self._own.values()
        for entry in self._entries():
            record = _loaded(entry, self._kind)
            if record is not None:
                yield record

    def foreign(self, name: str) -> Entry | None:
        """Returns the entry point of another distribution that brings a record; imports nothing.

        Raises `PluginError` where two have its name.
        """
        self._refuse_two_of(name)
        entry = None if name in self._own else self._entry(name)
        return None if entry is None or entry.own else entry

    def _entries(self) -> list[Entry]:
        return [entry for several in _doors().get(self.group, {}).values() for entry in several]

    def _entry(self, name: str) -> Entry | None:
        return next(iter(_doors().get(self.group, {}).get(name, ())), None)

    def _refuse_two_of(self, name: str) -> None:
        clash = _clash(self.group, name)
        if clash:
            raise PluginError(
                clash, hint=f"remove one of them; {PLUGINS}=off runs without any plugin"
            )


def _loaded(entry: Entry, kind: type[Any]) -> Any:
    """The record of an entry point; None where that fails, which is kept."""
    point = entry.point
    if entry in _UNLOADABLE:
        return None
    try:
        api = getattr(import_module(point.module), "API", None)
        record = point.load() if api == API else None
    except (Exception, SystemExit) as error:  # noqa: BLE001  it may fail in any way, and end us
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        if api != API:
            reason = f"{point.module} is for API {api}, and this moexport has API {API}"
        elif not isinstance(record, kind):
            reason = f"{point.value} is no {kind.__name__}"
        elif getattr(record, "name", None) != point.name:
            reason = f"{point.value} is not named '{point.name}'"
        else:
            return record
    _UNLOADABLE[entry] = Unloadable(entry.group, entry.name, entry.distribution, reason)
    return None
