"""The types of options: whether a value fits, and how messages name the type."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_TYPES: dict[Any, tuple[type[Any], str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a string"),
    Path: (PathLike, "a path"),
    Sequence: (Iterable, "a list"),
    Mapping: (Mapping, "a mapping"),
    Iterable: (Iterable, "an iterable"),
    NoneType: (NoneType, "None"),
}
"""The values that fit a type, and its name in messages."""


class _Later(type):
    """A type that a module imports only for type checkers; it is imported when a value needs it."""

    module: str

    @property
    def type(cls) -> Any:
        """The type itself, or `Any` if it cannot be imported."""
        try:
            return getattr(import_module(cls.module), cls.__name__)
        except (ImportError, AttributeError):
            return Any


class _Names(dict[str, Any]):
    """The names of a module, including those that it imports only for type checkers."""

    def __init__(self, module: str) -> None:
        super().__init__(vars(sys.modules[module]))
        self._module = module

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        module, is_module = _type_checking_imports(self._module)[name]
        if is_module:
            return import_module(module)
        later = _Later(name, (), {})
        later.module = module
        return later


@cache
def _type_checking_imports(module: str) -> dict[str, tuple[str, bool]]:
    """Returns the names that a module imports only for type checkers, with their modules.

    The flag is true for a name that is itself a module.
    """
    found: dict[str, tuple[str, bool]] = {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # no source
        return found
    package = module.split(".")
    for block in tree.body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for node in block.body:
                if isinstance(node, ast.ImportFrom):
                    base = package[: -node.level] if node.level else []
                    source = ".".join([*base, *filter(None, [node.module])])
                    found |= {alias.asname or alias.name: (source, False) for alias in node.names}
                elif isinstance(node, ast.Import):
                    found |= {
                        alias.asname or alias.name: (alias.name, True) for alias in node.names
                    }
    return found


def type_of(record: Any, name: str) -> Any:
    """Returns the type of a record's field or a function's parameter; None if it is unknown."""
    owners = record.__mro__ if isinstance(record, type) else (record,)
    owner = next(candidate for candidate in owners if name in inspect.get_annotations(candidate))
    one_field = SimpleNamespace(__annotations__={name: inspect.get_annotations(owner)[name]})
    try:
        return get_type_hints(one_field, {}, _Names(owner.__module__))[name]
    except (AttributeError, NameError, TypeError):  # a plugin's annotation may be anything
        return None


def literals(kind: Any) -> Iterator[str]:
    if get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    else:
        for part in get_args(kind):
            yield from literals(part)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value fits a type; every value fits an unknown type.

    A number that may also be text is not checked here but when the text is parsed.
    """
    parts = union_parts(kind)
    parsed = str in parts and not {int, float}.isdisjoint(parts)
    known = [part for part in parts if not isinstance(part, _Later)]
    if kind is None or parsed or any(_is_instance(value, part) for part in known):
        return True
    return any(fits(value, part.type) for part in parts if isinstance(part, _Later))


def is_model_or_feed(kind: Any) -> bool:
    """Whether a value of this type may be a model or feed: a network, function or iterable."""
    names = ("Any", "Callable", "Iterable", "Module")
    return any(getattr(base, "__name__", "Any") in names for base in map(_base, _all_parts(kind)))


def type_name(kind: Any) -> str:
    """Returns the name of a type for messages: `a number or None`."""
    names = [_part_name(part) for part in _all_parts(kind) if isinstance(_base(part), type)]
    choices = ", ".join(literals(kind))
    return " or ".join(dict.fromkeys([*names, *([f"one of {choices}"] if choices else [])]))


def _all_parts(kind: Any) -> list[Any]:
    """Returns the parts of a type; those imported only for type checkers are looked up."""
    parts = (part.type if isinstance(part, _Later) else part for part in union_parts(kind))
    return [inner for part in parts for inner in union_parts(part)]


def _base(kind: Any) -> Any:
    return get_origin(kind) or kind


def _part_name(kind: Any) -> str:
    """Returns the name of a type in a message; for a list, also the type of its items."""
    base = _base(kind)
    if base is Sequence and (inner := type_name(get_args(kind)[0])):
        return f"a list in which each entry is {inner}"
    if base in _TYPES:
        return _TYPES[base][1]
    name: str = base.__name__
    return "an array" if name == "ndarray" else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def union_parts(kind: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_instance(value: Any, kind: Any) -> bool:
    base = get_origin(kind) or kind
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if base is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if base is Any or not isinstance(base, type):
        return True
    if base not in _TYPES:
        array = base.__name__ == "ndarray" and hasattr(value, "__array__")  # also a tensor
        return array or isinstance(value, base)
    if base is bool and isinstance(value, int):
        return value in (0, 1)
    if base is Sequence and get_args(kind) and isinstance(value, list | tuple):
        return all(fits(item, get_args(kind)[0]) for item in value)
    excluded: Any = {int: bool, float: bool, Sequence: str | bytes}.get(base, ())
    return isinstance(value, _TYPES[base][0]) and not isinstance(value, excluded)
