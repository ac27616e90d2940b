"""Finds code that a command line names, without importing it, which may take seconds."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ..common.text import closest
from ..errors import UsageError
from .user_code import no_module

DYNAMIC = frozenset({"globals", "exec", "eval", "setattr", "vars", "__getattr__", "modules"})
"""Names whose use may define further names, which do not appear in a module's text."""


def check_code(source: str) -> None:
    """Raises `UsageError` if the module of `source` is missing, or does not define its attribute.

    Imports nothing; a module that defines names dynamically passes.
    """
    name, _, attribute = source.partition(":")
    spec = _spec_of(source, name)
    if spec is None or not (spec.origin or "").endswith(".py"):
        return
    try:
        tree = ast.parse(Path(str(spec.origin)).read_bytes())
    except (OSError, SyntaxError, ValueError):  # importing it reports the error
        return
    names = {*_defined_names(tree)}
    wanted = attribute.partition(".")[0]
    if wanted in names or "*" in names or names & DYNAMIC:
        return
    known = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    raise UsageError(
        f"{source}: {name} has no {wanted}",
        hint=f"{closest(wanted, known)}it defines {', '.join(known) or 'no function or class'}",
    )


def _spec_of(source: str, name: str) -> ModuleSpec | None:
    """Returns a module's spec; None if only an import can tell. UsageError if it is missing."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    package, *parts = name.split(".")
    loaded = sys.modules.get(package)
    spec = importlib.util.find_spec(package) if loaded is None else loaded.__spec__
    if loaded is not None and spec is None:
        return None
    if spec is None:
        raise no_module(source, package)
    for depth, _ in enumerate(parts, 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        full_name, origin = ".".join((package, *parts[:depth])), str(spec.origin)
        spec = PathFinder.find_spec(full_name, [*spec.submodule_search_locations])
        if spec is None and origin.endswith("__init__.py") and full_name not in sys.modules:
            raise no_module(source, full_name)
    return spec


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """Yields all names in a module's text, among them those that it defines or calls."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.Attribute(attr=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for alias in aliases:
                    yield (alias.asname or alias.name).partition(".")[0]
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case _:
                pass
