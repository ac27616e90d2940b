"""Reads JSON, YAML and TOML as plain data, within limits on size and nesting.

A few hundred bytes can hang the usual parsers: YAML aliases and merges multiply, and the time for a
dotted key in TOML grows with the square of its length. So a file's size is checked before it is
read, and nesting and numbers are checked before objects are built.

JSON is converted to frozen dataclasses; errors name the file, the field and the expected type.
Unknown keys are ignored, because a later version may have written them.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ..errors import MoexportError, ResultsError

MAX_BYTES = {"json": 16 << 20, "toml": 1 << 20, "yaml": 1 << 20}
"""The largest file of each kind. A recipe for 61 layers of 256 experts takes 120 kB, and a
`config.json` that names 21,000 classes takes 2 MB."""

MAX_LEVELS = 64
"""Levels of nested lists and mappings."""

MAX_DIGITS = 1000
"""Digits of a number in YAML: the time for a base-60 number grows with the square of its length."""

TUPLE = "tag:yaml.org,2002:python/tuple"
"""The tag that ml_collections writes for tuples; it writes repeated tuples as aliases."""

MAX_REPEATED = 1 << 12
"""Values that aliases in one YAML document may repeat."""

MAX_KEY_PARTS = 16
"""Parts of a dotted key in TOML."""

_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_LONG_KEY = re.compile(rf"(?<![\w-])(?:{_PART}){{{MAX_KEY_PARTS}}}")

_FAILURES = (ValueError, ArithmeticError, LookupError, TypeError, RecursionError)
"""Errors that parsers raise; PyYAML fails on `!!int ""` with an IndexError, for example."""


def read_document(
    file: Path,
    kind: str,
    error: Callable[[str], MoexportError],
    most: int | None = None,
    bits: int = 64,
) -> Any:
    """Returns the content of a file, as `document` does; raises OSError if it cannot be read.

    `most` overrides the usual limit in bytes.
    """
    limit = MAX_BYTES[kind] if most is None else most
    with file.open("rb") as opened:
        data = opened.read(limit + 1)
    if len(data) > limit:
        raise error(f"{file} has more than {limit} bytes, the limit for {kind.upper()} files")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(f"{file}: cannot be read: not UTF-8 text ({cause})") from cause
    return document(text, kind, file, error, bits)


def document(
    text: str, kind: str, name: object, error: Callable[[str], MoexportError], bits: int = 64
) -> Any:
    """Returns the plain data in a text; `kind` is `json`, `toml` or `yaml`.

    Whole numbers may have up to `bits` bits. Errors name the document and the fault.
    """
    try:
        match kind:
            case "json":
                content = json.loads(text)
                if "\\ud" in text.lower():
                    json.dumps(content, ensure_ascii=False).encode()  # refuses lone surrogates
            case "toml":
                if _LONG_KEY.search(text):
                    raise ValueError(f"a key has more than {MAX_KEY_PARTS} parts")
                content = tomllib.loads(text)
            case _:
                content = _yaml(text)
        _check(content, bits)
    except _FAILURES as cause:
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise error(f"{name}: not valid {kind.upper()}: {reason[:300]}") from cause
    return content


def _yaml(text: str) -> Any:
    import yaml  # not installed on machines that only run bundles

    safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader: Any = type("Loader", (safe,), {})
    loader.add_constructor(TUPLE, safe.construct_yaml_seq)
    try:
        _check_events(yaml, yaml.parse(text, Loader=loader))
        return yaml.load(text, Loader=loader)  # a safe loader
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _check_events(yaml: Any, events: Iterator[Any]) -> None:
    """Raises ValueError for YAML that is not plain data, too deeply nested, or too large."""
    values, repeated, open_collections = 0, 0, list[tuple[str | None, int]]()
    sizes = dict[str, int]()  # the number of values in each tuple with an anchor
    for event in events:
        line = f"line {event.start_mark.line + 1}"
        anchor: Any = getattr(event, "anchor", None)
        tag = getattr(event, "tag", None)
        is_tuple = isinstance(event, yaml.SequenceStartEvent) and tag == TUPLE
        if anchor is not None and not is_tuple and anchor not in sizes:
            raise ValueError(f"{line}: anchors and aliases (&, *) are refused; repeat the value")
        if tag is not None and not is_tuple:
            raise ValueError(f"{line}: tags ({tag}) are not supported")
        values += 1
        if isinstance(event, yaml.AliasEvent):
            repeated += sizes[anchor]
            values += sizes[anchor]
            if repeated > MAX_REPEATED:
                raise ValueError(f"{line}: aliases (*) repeat more than {MAX_REPEATED} values")
        elif isinstance(event, yaml.CollectionStartEvent):
            open_collections.append((anchor, values))
            _check_levels(len(open_collections))
        elif isinstance(event, yaml.CollectionEndEvent):
            name, before = open_collections.pop()
            if name is not None:
                sizes[name] = values - before
        elif isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
            if event.value == "<<":
                raise ValueError(f"{line}: merges (<<) are not supported; repeat the keys")
            if len(event.value) > MAX_DIGITS and event.value[:1] in "+-.0123456789":
                raise ValueError(f"{line}: a number has more than {MAX_DIGITS} digits")


def _check_levels(levels: int) -> None:
    if levels > MAX_LEVELS:
        raise ValueError(f"lists and mappings are nested deeper than {MAX_LEVELS} levels")


def _check(content: Any, bits: int) -> None:
    """Raises ValueError for data that is nested too deeply, or a whole number that is too large."""
    pending = [(content, 0)]
    while pending:
        value, levels = pending.pop()
        if isinstance(value, dict | list):
            _check_levels(levels + 1)
            inner = value.values() if isinstance(value, dict) else value
            pending += [(value, levels + 1) for value in inner]
        elif isinstance(value, int) and value.bit_length() >= bits:
            raise ValueError(f"a whole number has more than {bits} bits")


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
    kind: type[T], text: str, file: object, *, error: Callable[[str], MoexportError] = ResultsError
) -> T:
    """Returns the dataclass for a JSON text.

    Raises `error`, which names the file and the field that is missing or has the wrong type.
    """
    return from_data(kind, document(text, "json", file, error), file, error=error)


LARGE_BITS = 1024
"""The limit for files that may contain large counts, or 10³⁰ for "no limit"."""


def object_in(file: Path, most: int | None = None) -> dict[str, Any]:
    """Returns the object in a JSON file, or an empty one if the file cannot be read.

    `most` overrides the usual limit in bytes.
    """
    try:
        content = read_document(file, "json", MoexportError, most, LARGE_BITS)
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
    """Returns the dataclass for plain data; `at` is the path of the data within the document."""
    import msgspec

    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as cause:
        raise error(f"{file}: {_reword(str(cause), at)}") from cause


def _reword(message: str, at: str) -> str:
    """Rewords an error of msgspec, such as "Expected `int`, got `str` - at `$.rows[3].k`"."""
    what, _, path = message.partition(" - at ")
    where = (at + re.sub(r"^.*`\$(.*)`$", r"\1", path)).removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        return f"field {f'{where}.' if where else ''}{missing[1]} is missing"
    subject = f"field {where}" if where else "the file"
    if types := re.fullmatch(r"Expected `(.*)`, got `(.*)`", what):
        # Users need not know that null is also allowed.
        expected = [WORDS.get(name, name) for name in types[1].split(" | ") if name != "null"]
        return f"{subject} should be {' or '.join(expected)}, not {WORDS.get(types[2], types[2])}"
    if unknown := re.fullmatch(r"Invalid enum value (.*)", what):
        return f"{subject} is {unknown[1]}, which is unknown"
    return f"{subject}: {what[:1].lower()}{what[1:]}"
