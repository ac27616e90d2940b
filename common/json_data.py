"""JSON as frozen dataclasses: what is wrong with a text is said by file, field and expectation.

Keys that a dataclass does not have are passed over: a later version may have written them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import MoexportError, ResultsError
from .documents import document, read_document

T = TypeVar("T")

WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "object": "an object",
    "array": "a list",
    "null": "null",
}


def read_json(
    kind: type[T],
    text: str,
    file: object,
    *,
    error: Callable[[str], MoexportError] = ResultsError,
) -> T:
    """Returns the dataclass that a JSON text holds.

    Raises `error`, naming the file and the field that is missing or of the wrong type.
    """
    return from_data(kind, document(text, "json", file, error), file, error=error)


def object_in(file: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds, an empty one where none can be read."""
    try:
        content = read_document(file, "json", MoexportError)
    except (OSError, MoexportError):
        return {}
    return content if isinstance(content, dict) else {}


def from_data(
    kind: type[T],
    data: Any,
    file: object,
    *,
    at: str = "",
    error: Callable[[str], MoexportError] = ResultsError,
) -> T:
    """Returns the dataclass that plain data hold; `at` is the path that leads to them."""
    import msgspec

    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as cause:
        raise error(f"{file}: {_in_words(str(cause), at)}") from cause


def _in_words(message: str, at: str) -> str:
    """A message of msgspec, such as "Expected `int`, got `str` - at `$.rows[3].k`", for a user."""
    what, _, path = message.partition(" - at ")
    where = (at + re.sub(r"^.*`\$(.*)`$", r"\1", path)).removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return f"field {f'{where}.' if where else ''}{missing[1]} is missing"
    subject = f"field {where}" if where else "the file"
    if types := re.fullmatch(r"Expected `(.*)`, got `(.*)`", what):
        # That null would do as well helps nobody.
        wanted = [WORDS.get(each, each) for each in types[1].split(" | ") if each != "null"]
        return f"{subject} should be {' or '.join(wanted)}, not {WORDS.get(types[2], types[2])}"
    if unknown := re.fullmatch(r"Invalid enum value (.*)", what):
        return f"{subject} is {unknown[1]}, which is unknown"
    return f"{subject}: {what[:1].lower()}{what[1:]}"
