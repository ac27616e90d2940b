"""Makes the paths in options absolute, for nodes with another working directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ...common.option import Request, declared

T = TypeVar("T")
R = TypeVar("R", bound=Request)


def absolute(where: Any) -> Any:
    """Makes an existing path absolute; returns other values unchanged."""
    exists = isinstance(where, str | Path) and Path(where).exists()
    return str(Path(where).absolute()) if exists else where


def with_paths_everywhere(request: R) -> R:
    """Makes the paths in the options of a request and of its plugins absolute."""
    further = tuple(_absolute(record) for record in request.further)
    return replace(_absolute(request), further=further)


def paths_in(request: Request) -> list[Any]:
    """Returns the paths in the options of a request and of its plugins."""
    records = (request, *request.further)
    return [getattr(record, name) for record in records for name in _path_names(record)]


def _absolute(record: T) -> T:
    instance: Any = record
    paths = {name: absolute(getattr(record, name)) for name in _path_names(record)}
    changed: T = replace(instance, **paths)
    return changed


def _path_names(record: Any) -> list[str]:
    """Returns the names of the path options, except those for files that nodes do not write."""
    kind = type(record)
    return [name for name, (_, settings) in declared(kind).items() if settings.is_path]
