"""What an unfinished sweep has found so far, so that a killed one goes on where it stopped.

A file of JSON lines beside the results: the first says what is measured, each further one is a
piece that is complete. It is removed when the results are written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..common.writing import output_errors, write_text

FILE = "unfinished.jsonl"

FORMAT = 3
"""Of the pieces: those of another format are not read, since their keys may mean other things."""


class Journal:
    """The pieces of a sweep that are done; without a path they are kept nowhere.

    `what` is everything that the numbers depend on: a file that was begun for anything else is
    started anew. `resumed` tells how many pieces were found, `discarded` which parts of `what`
    differed from those of a file that could not be used.
    """

    kept: ClassVar[bool] = False
    """Whether this process has begun one that an interrupt leaves."""

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
        # Written anew: a kill may have left half a line at the end.
        text = "".join(_line(entry) for entry in ({"what": digests}, *self._entries))
        write_text(text, path)
        Journal.kept = True

    @property
    def resumed(self) -> int:
        """How many pieces an earlier run has left."""
        return len(self._entries)

    @property
    def summary(self) -> str:
        """What became of an earlier run, in words; empty where there was none."""
        if self.resumed:
            return f"going on with an unfinished run: {self.resumed} measurements are done"
        if not self.discarded:
            return ""
        changed = ", ".join(self.discarded)
        return f"an unfinished run of something else was discarded (changed: {changed})"

    def pieces(self, kind: str, **keys: Any) -> list[dict[str, Any]]:
        """Returns the pieces of a kind that have these values, oldest first."""
        wanted = {"kind": kind} | keys
        return [entry for entry in self._entries if wanted.items() <= entry.items()]

    def add(self, kind: str, **content: Any) -> None:
        """Adds a complete piece."""
        if self._path is not None:
            with output_errors(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(_line({"kind": kind} | content))

    def remove(self) -> None:
        """Ends the journal: the results hold everything."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        Journal.kept = False


def unfinished(folder: Path | None, kind: str, **keys: Any) -> dict[str, Any] | None:
    """Returns the first piece of a kind in a folder's unfinished run, None where there is none."""
    wanted = {"kind": kind} | keys
    entries = () if folder is None else _lines(folder / FILE)
    return next((entry for entry in entries if wanted.items() <= entry.items()), None)


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a journal; what comes after a damaged one is not trusted."""
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
