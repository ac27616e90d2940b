"""Numbers and tables as text, for every page, message and report."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_HARMFUL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
_HARMFUL += "\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f"
"""Control characters, those that turn or hide text, and halves of surrogate pairs; not tabs."""


def printable(text: str, *, several: bool = False) -> str:
    """Returns a text with what could steer a terminal, or pass for other text, escaped.

    Names and messages out of files may hold anything. Characters are escaped as JSON does, so that
    JSON stays what it is; line breaks too, unless the text has `several` lines.
    """
    pattern = f"[{_HARMFUL}]" if several else f"[\n{_HARMFUL}]"
    return re.sub(pattern, _escaped, text)


def _escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def lines(*texts: str) -> str:
    """Returns lines, each of which stays one whatever it holds."""
    return "\n".join(map(printable, texts))


def markdown_text(text: str) -> str:
    """Returns a text out of a file as a line of Markdown that shows it as it is.

    It holds no HTML, image or link, begins no heading, quote, list or block of code, and ends
    neither its line nor a cell of a table.
    """
    line = re.sub(r"\\(?=[^\w\s]|$)|[\[\]|]", r"\\\g<0>", printable(text))
    line = line.replace("<", "&lt;")
    return re.sub(r"^(\s*)(?=#{1,6}\s|>|[-+*]\s|[=-]+\s*$|`{3}|~{3})", r"\1\\", line)


def csv_cell(value: object) -> object:
    """Returns a value for a cell of CSV: a text that a spreadsheet would compute is quoted."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


def listed(text: str) -> list[str]:
    """Returns the entries of a list as the command line takes it: `n,0.5`; empty ones are none."""
    return [part.strip() for part in text.split(",") if part.strip()]


def near_miss(value: str, known: Iterable[str]) -> str:
    """Returns `did you mean 'ort-cpu'? choose one of: …`: the likest of the known names, if any."""
    names = list(known)
    near = likest(value, names)
    return f"{near}choose one of: {', '.join(names)}"


def likest(value: str, names: Sequence[str]) -> str:
    """Returns `did you mean 'ort-cpu'? `, or nothing where no name is like the value."""
    typed = value.lower().replace("_", "-")
    whole = [name for name in names if typed.strip("-") and typed.strip("-") in name]
    near = difflib.get_close_matches(typed, names, n=1, cutoff=0.55) or whole
    return f"did you mean {near[0]!r}? " if near else ""


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns rows under a header in aligned columns; numbers to the right, words to the left."""
    cells = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    right = [
        bool(rows) and all(_is_number(row[column]) for row in cells[1:])
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
    """Returns rows under a header as a Markdown table; columns after `words` are to the right."""
    lines = ["|" + "".join(f" {c} |" if c else " |" for c in line) for line in (header, *rows)]
    left = len(header) if words is None else words
    rule = "|" + "---|" * left + "--:|" * (len(header) - left)
    return "\n".join((lines[0], rule, *lines[1:]))


def count(number: float) -> str:
    """Returns a number with its magnitude: 318.2K, 513.0M, 2.3B."""
    return _scaled(number, ("", "K", "M", "B"))


def size(nbytes: float) -> str:
    """Returns bytes in a unit that reads well: 12.3 MB."""
    return _scaled(nbytes, (" B", " kB", " MB", " GB"))


def _scaled(number: float, units: tuple[str, ...]) -> str:
    step = 0
    while abs(number) >= 1000 and step < len(units) - 1:
        number /= 1000
        step += 1
    return f"{number:.{1 if step else 0}f}{units[step]}"


def _is_number(cell: str) -> bool:
    return bool(cell) and (cell[0].isdigit() or cell[0] in "-–.") and not cell[-1].isspace()
