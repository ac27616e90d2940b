"""Registries: records by name, the core's own first, then those of installed plugins.

A plugin is a distribution with an entry point in a group `moexport.…`. The module of the entry
point defines `API`, the version of the records it was written for. A plugin is imported only when
one of its records is needed.
"""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, Generic, Protocol, TypeVar

from ..errors import PluginError

API = 1
"""The version of the records that plugins provide."""

OWN = "moexport"
"""The distribution whose plugins are part of moexport."""

PLUGINS = "MOEXPORT_PLUGINS"
"""The environment variable that disables all plugins if it is `off`."""


class Named(Protocol):
    """A record in a registry."""

    @property
    def name(self) -> str:
        """The name that users give."""
        ...


R = TypeVar("R", bound=Named)


_UNLOADABLE: list[Entry] = []

_UNREADABLE: list[str] = []

_PROBLEMS: dict[str, Callable[[Any], str]] = {}
"""Functions that return why a plugin's record is unusable, by group."""

_OWN_NAMES: dict[str, frozenset[str]] = {}
"""The names of the core's records by group, for the registries imported so far."""


def unloadable() -> tuple[Entry, ...]:
    """Returns the plugins that have failed to load so far."""
    return tuple(_UNLOADABLE)


def foreign_plugins() -> dict[str, list[str]]:
    """Loads all plugins; returns the entry points of other distributions by distribution.

    A line is `group: name`, with the reason if it cannot be loaded. Entry points of moexport are
    included only if they fail.
    """
    found: dict[str, list[str]] = {}
    for entry in _found():
        loaded = _loaded(entry, object)
        if loaded and entry.own:
            continue
        failed = "" if loaded else f" cannot be loaded: {entry.reason}"
        found.setdefault(entry.distribution, []).append(f"{entry.group}: {entry.name}{failed}")
    return found


def foreign_packages() -> dict[str, str]:
    """Returns the distributions of other authors' plugins by the package that each imports."""
    entries = (entry for entry in _found() if not entry.own)
    # A damaged entry point has no `module`.
    modules = ((entry.point.value.partition(":")[0], entry.distribution) for entry in entries)
    return {module.partition(".")[0]: distribution for module, distribution in modules}


def plugin_problems() -> tuple[str, ...]:
    """Returns a line for each name that two packages, or a package and the core, claim.

    Lines for packages whose entry points cannot be read follow.
    """
    claimed = ((group, name) for group, names in _by_group().items() for name in names)
    return (*(clash for claim in claimed if (clash := _clash(*claim))), *_UNREADABLE)


def _clash(group: str, name: str) -> str:
    """Returns a line on a name that more than one package claims; otherwise empty."""
    sources = ["moexport itself"] if name in _OWN_NAMES.get(group, ()) else []
    sources += [entry.distribution for entry in _by_group().get(group, {}).get(name, ())]
    return f"{group}: '{name}' comes from {' and from '.join(sources)}" if sources[1:] else ""


def _off() -> bool:
    return os.environ.get(PLUGINS) == "off"


@dataclass(slots=True, eq=False)  # compared by identity, so hashing is cheap
class Entry:
    """An entry point of a plugin, with its distribution, version and `summary`.

    `reason` tells why its record cannot be loaded, once loading has failed.
    """

    point: EntryPoint
    distribution: str
    summary: str
    own: bool
    reason: str = ""

    @property
    def name(self) -> str:
        return self.point.name

    @property
    def group(self) -> str:
        return self.point.group


@cache
def _found() -> tuple[Entry, ...]:
    """Returns the entry points of all plugins, sorted by name, read once.

    Of two installed copies of a package, the first one counts, as in an import. Only the metadata
    of packages with plugins is parsed: parsing all of it takes as long as the rest of `--help`.
    """
    if _off():
        return ()
    found: dict[str, list[Entry]] = {}
    for distribution in distributions():
        try:
            if "[moexport." in (distribution.read_text("entry_points.txt") or ""):
                name, entries = _entries_of(distribution)
                found.setdefault(name, entries)
        except (TypeError, ValueError) as error:  # importlib raises them for damaged files
            name = distribution.metadata["Name"]
            _UNREADABLE.append(f"plugin {name}: its entry_points.txt cannot be read: {error}")
    entries = [entry for listed in found.values() for entry in listed]
    return tuple(sorted(entries, key=lambda entry: (entry.name, entry.distribution)))


def _by_group() -> dict[str, dict[str, list[Entry]]]:
    """Returns the entry points by group and name; more than one if packages clash."""
    return _grouped(_found())


@cache
def _grouped(entries: tuple[Entry, ...]) -> dict[str, dict[str, list[Entry]]]:
    groups: dict[str, dict[str, list[Entry]]] = {}
    for entry in entries:
        groups.setdefault(entry.group, {}).setdefault(entry.name, []).append(entry)
    return groups


def _entries_of(distribution: Distribution) -> tuple[str, list[Entry]]:
    """Returns the name of a package, and its entry points in moexport's groups."""
    metadata = distribution.metadata
    name = metadata["Name"]
    about = f"{name} {metadata['Version']}", metadata["Summary"] or "", name == OWN
    points = distribution.entry_points
    ours = [Entry(point, *about) for point in points if point.group.startswith("moexport.")]
    return name, ours


def left_out() -> str:
    """Returns an addition to a hint if a missing plugin may provide what was requested."""
    if _off():
        return f"; {PLUGINS}=off disables all plugins"
    failed = ", ".join(sorted({entry.distribution for entry in unloadable()}))
    return f"; `moexport doctor` shows why {failed} cannot be loaded" if failed else ""


def names_in(group: str) -> tuple[str, ...]:
    """Returns the names of plugins' records in a group; imports none."""
    return tuple(_by_group().get(group, ()))


def record_of_plugin(group: str, name: str) -> Any:
    """Returns the record of a plugin; None if it does not exist or does not load.

    For modules that may not import the registry, which is in a higher layer.
    """
    entry = _entry(group, name)
    return None if entry is None else _loaded(entry, object)


def _entry(group: str, name: str) -> Entry | None:
    return next(iter(_by_group().get(group, {}).get(name, ())), None)


def imported(reference: str) -> Any:
    """Imports and returns what `package.module:name` refers to."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


class LazyRecords(UserDict[str, Any]):
    """Records by name, imported on use: `references` has a `module:attribute` for each name."""

    def __init__(self, package: str, references: Mapping[str, str]) -> None:
        super().__init__(references)
        self._package = package

    def __getitem__(self, name: str) -> Any:
        return imported(f"{self._package}.{self.data[name]}")


Records = Mapping[str, R] | Sequence[R]


def by_name(records: Records[R]) -> Mapping[str, R]:
    """Returns records by name; those of `LazyRecords` are not imported."""
    return records if isinstance(records, Mapping) else {record.name: record for record in records}


class Registry(Generic[R]):
    """The records of one kind: `own` are the core's, `group` names the entry points of plugins.

    Plugins follow in the order of their names. `kind` is the class of a record, or the name of one
    that is slow to import (`module:class`). `problem` returns why a plugin's record is unusable, or
    an empty string.
    """

    def __init__(
        self,
        group: str,
        kind: type[R] | str,
        own: Records[R] = (),
        problem: Callable[[R], str] | None = None,
    ) -> None:
        self.group = group
        if problem is not None:
            _PROBLEMS[group] = problem
        self._kind = kind
        self._own = by_name(own)
        _OWN_NAMES[group] = frozenset(self._own)

    @property
    def own(self) -> tuple[R, ...]:
        return tuple(self._own.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all records; imports no plugin."""
        return tuple(dict.fromkeys((*self._own, *names_in(self.group))))

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> R:
        """Returns a record by name.

        Raises `PluginError` if there is none, if it cannot be loaded, or if two share the name.
        """
        self._check_unique(name)
        if name in self._own:
            return self._own[name]
        entry = _entry(self.group, name)
        if entry is None:
            raise PluginError(
                f"{self.group}: no installed package provides '{name}'",
                hint=f"is {PLUGINS}=off set? If not, reinstall the package that provides it; "
                f"available: {', '.join(self.names) or 'none'}",
            )
        record: R | None = _loaded(entry, self._kind)
        if record is None:
            raise PluginError(
                f"{name}: the plugin of {entry.distribution} cannot be loaded: {entry.reason}",
                hint="install a compatible version, or uninstall it; "
                f"{PLUGINS}=off disables all plugins",
            )
        return record

    def __iter__(self) -> Iterator[R]:
        """Yields all records, except those that cannot be loaded (`unloadable`).

        Raises `PluginError` if two share a name.
        """
        for name in self.names:
            self._check_unique(name)
        yield from self._own.values()
        for entries in _by_group().get(self.group, {}).values():
            record = _loaded(entries[0], self._kind)
            if record is not None:
                yield record

    def foreign(self, name: str) -> Entry | None:
        """Returns the entry point of another distribution for a name; imports nothing.

        Raises `PluginError` if two share the name.
        """
        self._check_unique(name)
        entry = None if name in self._own else _entry(self.group, name)
        return None if entry is None or entry.own else entry

    def _check_unique(self, name: str) -> None:
        clash = _clash(self.group, name)
        if clash:
            raise PluginError(
                clash, hint=f"uninstall one of them; {PLUGINS}=off disables all plugins"
            )


def _loaded(entry: Entry, kind: type[Any] | str) -> Any:
    """Returns the record of an entry point; None if loading fails, with the reason recorded."""
    point = entry.point
    if entry.reason:
        return None
    try:
        api = getattr(import_module(point.module), "API", None)
        record = point.load() if api == API else None
        expected = imported(kind) if isinstance(kind, str) else kind
    except (Exception, SystemExit) as error:  # noqa: BLE001  a plugin may fail in any way
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        if api != API:
            reason = f"{point.module} is for API {api}, but this moexport has API {API}"
        elif not isinstance(record, expected):
            reason = f"{point.value} is not a {expected.__name__}"
        elif getattr(record, "name", None) != point.name:
            reason = f"{point.value} is not named '{point.name}'"
        elif entry.group not in _PROBLEMS or not (reason := _PROBLEMS[entry.group](record)):
            return record
    entry.reason = reason
    _UNLOADABLE.append(entry)
    return None
