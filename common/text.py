"""Formats numbers, tables and untrusted text; reads sizes and times as they are typed."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence

from ..errors import UsageError

_HARMFUL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
_HARMFUL += "\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f"
"""Control characters, characters that reorder or hide text, and lone surrogates; not tabs."""


def printable(text: str, *, several: bool = False) -> str:
    """Escapes characters that could control a terminal or disguise the text.

    Names and messages from files may contain anything. The escapes are those of JSON, so JSON stays
    valid; line breaks are also escaped, unless the text has `several` lines.
    """
    pattern = f"[{_HARMFUL}]" if several else f"[\n{_HARMFUL}]"
    return re.sub(pattern, _escaped, text)


def _escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def lines(*texts: str) -> str:
    """Joins texts as lines; line breaks inside a text are escaped."""
    return "\n".join(map(printable, texts))


def markdown_text(text: str) -> str:
    """Returns untrusted text as one line of Markdown that renders literally.

    It contains no HTML, image or link, starts no heading, quote, list or code block, and ends
    neither its line nor a table cell.
    """
    line = re.sub(r"\\(?=[^\w\s]|$)|[\[\]|]", r"\\\g<0>", printable(text))
    line = line.replace("<", "&lt;")
    return re.sub(r"^(\s*)(?=#{1,6}\s|>|[-+*]\s|[=-]+\s*$|`{3}|~{3})", r"\1\\", line)


def csv_cell(value: object) -> object:
    """Returns a value for a CSV cell; text that a spreadsheet would evaluate is quoted."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


def split_list(text: str) -> list[str]:
    """Returns the non-empty items of a comma-separated list: `n,0.5`."""
    return [part.strip() for part in text.split(",") if part.strip()]


def near_miss(value: object, known: Iterable[str]) -> str:
    """Returns `did you mean 'ort-cpu'? choose one of: …`, with a closely matching name, if any."""
    names = list(known)
    near = closest(value, names)
    return f"{near}choose one of: {', '.join(names)}"


def closest(value: object, names: Sequence[str]) -> str:
    """Returns `did you mean 'ort-cpu'? `, or an empty string if no name is close."""
    typed = str(value).lower().replace("_", "-")
    containing = [name for name in names if typed.strip("-") and typed.strip("-") in name]
    near = difflib.get_close_matches(typed, names, n=1, cutoff=0.55) or containing
    return f"did you mean {near[0]!r}? " if near else ""


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns aligned columns under a header: numbers right-aligned, words left-aligned."""
    cells = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    right = [
        bool(rows) and all(re.fullmatch(r"[\d–.-](.*\S)?", row[column]) for row in cells[1:])
        for column in range(len(header))
    ]
    lines = []
    for row in cells:
        parts = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def markdown(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, words: int | None = None
) -> str:
    """Returns a Markdown table; columns after the first `words` are right-aligned."""
    lines = ["|" + "".join(f" {c} |" if c else " |" for c in line) for line in (header, *rows)]
    left = len(header) if words is None else words
    rule = "|" + "---|" * left + "--:|" * (len(header) - left)
    return "\n".join((lines[0], rule, *lines[1:]))


def first_and_count(names: Sequence[str]) -> str:
    """Returns the first of several similar names and the number of others: `a and 2 like it`."""
    first, *others = names
    return f"{first} and {len(others)} like it" if others else first


def by_level(numbers: Iterable[int]) -> str:
    """Returns one number per level of a hierarchy: 128·4·4."""
    return "·".join(map(str, numbers))


def count(number: float) -> str:
    """Returns a number with three significant digits: 318K, 51.3M, 2.32B."""
    units = ("", "K", "M", "B", "T")
    step = 0
    while step < len(units) - 1 and abs(number) >= (999.5 if step else 1000):
        number /= 1000
        step += 1
    digits = 0 if not step or abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    return f"{number:.{digits}f}{units[step]}"


def size(nbytes: float) -> str:
    """Returns bytes in a readable unit: 12.3 MB."""
    return _scaled(nbytes, (" B", " kB", " MB", " GB"))


def _scaled(number: float, units: tuple[str, ...]) -> str:
    step = 0
    while abs(number) >= 1000 and step < len(units) - 1:
        number /= 1000
        step += 1
    return f"{number:.{1 if step else 0}f}{units[step]}"


_SIZE = r"([0-9]*\.?[0-9]+)\s*(?:([kmg])(i?b)?|b)?"


def parse_size(text: str | int, option: str) -> int:
    """Returns bytes from `1500000`, `1.5MB` (10⁶) or `2GiB` (2³⁰, also `2G`).

    A `UsageError` names the option.
    """
    match = re.fullmatch(_SIZE, str(text).strip().lower())
    size = 0
    if match is not None:
        base = 1000 if match[3] == "b" else 1024
        number = float(match[1]) * base ** (1 + "kmg".index(match[2]) if match[2] else 0)
        size = int(number) if number < 1 << 63 else 0
    if size < 1:
        raise UsageError(
            f"{option} {text}: not a number of bytes",
            hint=f"for example {option} 20MB (decimal) or 2GiB (binary)",
        )
    return size


_DURATION = r"([0-9]*\.?[0-9]+)\s*(us|µs|ms|s|min|h)?"
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_seconds(text: str | float, option: str, unit: str) -> float:
    """Returns seconds from `5ms`, `90s` or `10min`; a bare number is in `unit`.

    A `UsageError` names the option.
    """
    match = re.fullmatch(_DURATION, str(text).strip())
    seconds = float(match[1]) * _SECONDS[match[2] or unit] if match else math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(
            f"{option} {text}: not a time", hint=f"for example {option} 5ms, 90s or 10min"
        )
    return seconds


def parse_share(text: str | float, option: str) -> float:
    """Returns a share from `99%` or `0.99`; a `UsageError` names the option."""
    words = str(text).strip()
    try:
        return float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError:
        raise UsageError(
            f"{option} {text}: not a share", hint=f"for example {option} 99%, or {option} 0.99"
        ) from None
