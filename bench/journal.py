"""The results so far of an unfinished sweep, from which a killed run continues.

It is a file of JSON lines next to the results: the first line describes the measurement, and each
of the other lines is one complete piece. The file is removed when the results are written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..common.writing import output_errors, write_text

FILE = "unfinished.jsonl"

FORMAT = 4
"""The version of the pieces; files of other versions are discarded, as their keys may differ."""


class Journal:
    """The finished pieces of a sweep; without a path they are not saved.

    `what` is everything that the numbers depend on: an existing file with a different `what` is
    discarded. `resumed` is the number of pieces found, and `discarded` lists the parts of `what`
    that differed in a discarded file.
    """

    started: ClassVar[bool] = False
    """Whether this process has started a journal, which an interrupt leaves behind."""

    def __init__(self, path: Path | None, what: Mapping[str, Any]) -> None:
        self._path = path
        self._entries: list[dict[str, Any]] = []
        self.discarded: tuple[str, ...] = ()
        digests = {"format": str(FORMAT)} | {name: _digest(value) for name, value in what.items()}
        if path is None:
            return
        lines = list(_lines(path))
        if lines and lines[0].get("what") == digests:
            self._entries = lines[1:]
        elif lines:
            old = lines[0].get("what", {})
            names = dict.fromkeys((*digests, *old))
            self.discarded = tuple(n for n in names if digests.get(n) != old.get(n))
        # Rewritten, because a killed run may have left half a line at the end.
        text = "".join(_line(entry) for entry in ({"what": digests}, *self._entries))
        write_text(text, path)
        Journal.started = True

    @property
    def resumed(self) -> int:
        return len(self._entries)

    @property
    def summary(self) -> str:
        """A sentence on an earlier run; empty if there is none."""
        if self.resumed:
            return f"continuing an unfinished run: {self.resumed} measurements are done"
        if not self.discarded:
            return ""
        changed = ", ".join(self.discarded)
        return f"a different unfinished run was discarded (changed: {changed})"

    def pieces(self, kind: str, **keys: Any) -> list[dict[str, Any]]:
        """Returns the pieces of a kind with these values, oldest first."""
        wanted = {"kind": kind} | keys
        return [entry for entry in self._entries if wanted.items() <= entry.items()]

    def add(self, kind: str, **content: Any) -> None:
        if self._path is not None:
            with output_errors(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(_line({"kind": kind} | content))

    def remove(self) -> None:
        """Removes the journal: the results contain everything."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        Journal.started = False


def unfinished(folder: Path | None, kind: str, **keys: Any) -> dict[str, Any] | None:
    """Returns the first piece of a kind in a folder's unfinished run, or None."""
    wanted = {"kind": kind} | keys
    entries = () if folder is None else _lines(folder / FILE)
    return next((entry for entry in entries if wanted.items() <= entry.items()), None)


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the complete lines of a journal, up to the first damaged one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(entry, dict):
            return
        yield entry


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
