"""Documents of plain data, each format by one reader within a budget: JSON, YAML and TOML.

Files of a few hundred bytes can hang their usual readers: aliases and merges of YAML multiply, and
dotted keys of TOML cost the square of their length. So the size of a file is limited before it is
read, and its nesting and numbers before anything is made of them.

JSON becomes frozen dataclasses: what is wrong is said by file, field and expectation. Keys that a
dataclass does not have are passed over: a later version may have written them.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ..errors import MoexportError, ResultsError

MOST_BYTES = {"json": 16 << 20, "toml": 1 << 20, "yaml": 1 << 20}
"""Of a file. A recipe for 61 layers of 256 experts has 120 kB, a `config.json` that names 21,000
classes 2 MB."""

MOST_LEVELS = 64
"""Of nested lists and mappings."""

MOST_DIGITS = 1000
"""Of a number in YAML, which has numbers of base 60: one costs the square of its length."""

TUPLE = "tag:yaml.org,2002:python/tuple"
"""Of sequences in YAML, which ml_collections prints so, and refers to one again where it recurs."""

MOST_REPEATED = 1 << 12
"""Values at most that a document in YAML repeats by references."""

MOST_KEY_PARTS = 16
"""Of a dotted key of TOML."""

_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_LONG_KEY = re.compile(rf"(?<![\w-])(?:{_PART}){{{MOST_KEY_PARTS}}}")

_FAILURES = (ValueError, ArithmeticError, LookupError, TypeError, RecursionError)
"""What parsers raise: PyYAML makes a number of `!!int ""` without a look at it."""


def read_document(
    file: Path,
    kind: str,
    error: Callable[[str], MoexportError],
    most: int | None = None,
    bits: int = 64,
) -> Any:
    """Returns what a file holds, as `document` does; OSError where it cannot be read.

    `most` are its bytes at most, where a file of its kind may have more than usual.
    """
    limit = MOST_BYTES[kind] if most is None else most
    with file.open("rb") as opened:
        data = opened.read(limit + 1)
    if len(data) > limit:
        raise error(f"{file}: has more than {limit} bytes, the limit of a {kind.upper()} file")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(f"{file}: cannot be read: not text in UTF-8 ({cause})") from cause
    return document(text, kind, file, error, bits)


def document(
    text: str, kind: str, name: object, error: Callable[[str], MoexportError], bits: int = 64
) -> Any:
    """Returns what a text holds as plain data; `kind` is `json`, `toml` or `yaml`.

    Whole numbers have at most `bits`. Raises `error` with a sentence that names the document and
    what is wrong with it.
    """
    try:
        match kind:
            case "json":
                content = json.loads(text)
                if "\\ud" in text.lower():
                    json.dumps(content, ensure_ascii=False).encode()  # half a pair is no text
            case "toml":
                content = _toml(text)
            case _:
                content = _yaml(text)
        _check(content, bits)
    except _FAILURES as cause:
        said = " ".join(str(cause).split()) or type(cause).__name__
        raise error(f"{name}: not valid {kind.upper()}: {said[:300]}") from cause
    return content


def _toml(text: str) -> Any:
    if _LONG_KEY.search(text):
        raise ValueError(f"a key of more than {MOST_KEY_PARTS} parts")
    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    import yaml  # which a machine that only runs bundles lacks

    safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader: Any = type("Loader", (safe,), {})
    loader.add_constructor(TUPLE, safe.construct_yaml_seq)
    try:
        _check_events(yaml, yaml.parse(text, Loader=loader))
        return yaml.load(text, Loader=loader)  # safe
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _check_events(yaml: Any, events: Iterator[Any]) -> None:
    """Raises ValueError for what YAML has beside plain data, or deeper or longer than it may be."""
    values, repeated, begun = 0, 0, list[tuple[str | None, int]]()
    sizes = dict[str, int]()  # the values in each tuple that may be referred to
    for event in events:
        line = f"line {event.start_mark.line + 1}"
        anchor: Any = getattr(event, "anchor", None)
        tag = getattr(event, "tag", None)
        of_tuple = isinstance(event, yaml.SequenceStartEvent) and tag == TUPLE
        if anchor is not None and not of_tuple and anchor not in sizes:
            raise ValueError(f"{line}: anchors and aliases (&, *) are not read; write it out")
        if tag is not None and not of_tuple:
            raise ValueError(f"{line}: tags ({tag}) are not read")
        values += 1
        if isinstance(event, yaml.AliasEvent):
            repeated += sizes[anchor]
            values += sizes[anchor]
            if repeated > MOST_REPEATED:
                raise ValueError(f"{line}: aliases (*) repeat more than {MOST_REPEATED} values")
        elif isinstance(event, yaml.CollectionStartEvent):
            begun.append((anchor, values))
            _check_levels(len(begun))
        elif isinstance(event, yaml.CollectionEndEvent):
            name, before = begun.pop()
            if name is not None:
                sizes[name] = values - before
        elif isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
            if event.value == "<<":
                raise ValueError(f"{line}: merges (<<) are not read; write the keys out")
            if len(event.value) > MOST_DIGITS and event.value[:1] in "+-.0123456789":
                raise ValueError(f"{line}: a number of more than {MOST_DIGITS} digits")


def _check_levels(levels: int) -> None:
    if levels > MOST_LEVELS:
        raise ValueError(f"lists and mappings nest deeper than {MOST_LEVELS} levels")


def _check(content: Any, bits: int) -> None:
    """Raises ValueError for what nests too deep, or a whole number that nothing here can hold."""
    left = [(content, 0)]
    while left:
        value, levels = left.pop()
        if isinstance(value, dict | list):
            _check_levels(levels + 1)
            inner = value.values() if isinstance(value, dict) else value
            left += [(value, levels + 1) for value in inner]
        elif isinstance(value, int) and value.bit_length() >= bits:
            raise ValueError(f"a whole number of more than {bits} bits")


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


LARGE_BITS = 1024
"""Of the whole numbers of settings that programs write as 10³⁰ for no limit, and of counts."""


def object_in(file: Path, most: int | None = None) -> dict[str, Any]:
    """Returns the object that a JSON file holds, an empty one where none can be read.

    `most` are its bytes at most, where a file of its kind may have more than usual.
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
        wanted = [WORDS.get(name, name) for name in types[1].split(" | ") if name != "null"]
        return f"{subject} should be {' or '.join(wanted)}, not {WORDS.get(types[2], types[2])}"
    if unknown := re.fullmatch(r"Invalid enum value (.*)", what):
        return f"{subject} is {unknown[1]}, which is unknown"
    return f"{subject}: {what[:1].lower()}{what[1:]}"
