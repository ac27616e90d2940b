"""The files that options name, as nodes with another working directory find them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ...common.option import Request, kind_of, shell_options

T = TypeVar("T")
R = TypeVar("R", bound=Request)


def everywhere(where: Any) -> Any:
    """Returns a path that exists here as an absolute one; all else as it is."""
    here = isinstance(where, str | Path) and Path(where).exists()
    return str(Path(where).absolute()) if here else where


def with_paths_everywhere(request: R) -> R:
    """Returns a request with the paths in its options, and in those of plugins, absolute."""
    further = tuple(_absolute(record) for record in request.further)
    return replace(_absolute(request), further=further)


def paths_in(request: Request) -> list[Any]:
    """Returns what the options of a request, and those of plugins, have for paths."""
    records = (request, *request.further)
    return [getattr(record, name) for record in records for name in _path_names(record)]


def _absolute(record: T) -> T:
    made: Any = record
    changed = {name: everywhere(getattr(record, name)) for name in _path_names(record)}
    absolute: T = replace(made, **changed)
    return absolute


def _path_names(record: Any) -> list[str]:
    """The options for paths that a shell has: nodes write no results and no tables."""
    kind = type(record)
    return [name for name in shell_options(kind) if kind_of(kind, name) is Path]
