"""Reads frozen dataclasses from JSON, and says which file and field is wrong."""

from __future__ import annotations

import types
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import ResultsError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reader:
    """A JSON object and the path that leads to it, for messages.

    Every method raises ResultsError for what is missing or of the wrong type.
    """

    file: str
    path: str
    body: Any

    def __post_init__(self) -> None:
        if not isinstance(self.body, dict):
            where = self.path or "the file"
            raise ResultsError(f"{self.file}: {where} is not an object but {kind_of(self.body)}")

    def get(self, key: str, kind: type[T]) -> T:
        """Returns the value under `key`, of a plain type."""
        if key not in self.body:
            raise ResultsError(f"{self.file}: field {self._where(key)} is missing")
        value: T = self._value(self._where(key), self.body[key], kind)
        return value

    def build(self, kind: type[T]) -> T:
        """Returns a dataclass of this object's keys; those it does not know are passed over."""
        hints = get_type_hints(kind)
        found: dict[str, Any] = {}
        for each in fields(kind):  # type: ignore[arg-type]
            if each.name in self.body:
                where = self._where(each.name)
                found[each.name] = self._value(where, self.body[each.name], hints[each.name])
            elif _required(each):
                raise ResultsError(f"{self.file}: field {self._where(each.name)} is missing")
        return kind(**found)

    def _where(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _value(self, where: str, value: Any, hint: Any) -> Any:
        origin = get_origin(hint)
        if origin in (Union, types.UnionType):
            (inner,) = (each for each in get_args(hint) if each is not type(None))
            return None if value is None else self._value(where, value, inner)
        if origin is tuple:
            self._check(where, value, list)
            item = get_args(hint)[0]
            return tuple(self._value(f"{where}[{i}]", each, item) for i, each in enumerate(value))
        plain = origin or hint
        if plain in NAMES:
            # JSON has one kind of number.
            if plain is float and isinstance(value, int) and not isinstance(value, bool):
                return float(value)
            self._check(where, value, plain)
            return value
        return Reader(self.file, where, value).build(plain)

    def _check(self, where: str, value: Any, kind: type) -> None:
        # bool is an int to Python.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ResultsError(
                f"{self.file}: field {where} should be {NAMES[kind]}, not {kind_of(value)}"
            )


NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "an object",
    list: "a list",
}


def kind_of(value: Any) -> str:
    """Returns what a JSON value is, in words."""
    return "null" if value is None else NAMES.get(type(value), type(value).__name__)


def _required(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING
