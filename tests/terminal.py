"""Emulates a terminal's screen, to test what a program writes."""

from __future__ import annotations

import re

_PIECE = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[\?\d+[a-z]|\r|\n|[^\x1b\r\n]+")


class Screen:
    """The lines of a screen; `most_bars` is the largest number of simultaneous progress bars."""

    def __init__(self, written: str) -> None:
        self.most_bars = 0
        self._rows, self._row, self._column = [""], 0, 0
        for piece in _PIECE.finditer(written):
            self._write(piece)
            self.most_bars = max(self.most_bars, sum("━" in row for row in self._rows))

    @property
    def lines(self) -> list[str]:
        """Returns the nonempty lines."""
        return [row.rstrip() for row in self._rows if row.strip()]

    def _write(self, piece: re.Match[str]) -> None:
        text, code = piece[0], piece[2]
        if text == "\n":
            self._row, self._column = self._row + 1, 0
            self._rows += [""] * (self._row + 1 - len(self._rows))
        elif text == "\r":
            self._column = 0
        elif code == "A":
            self._row = max(0, self._row - int(piece[1] or 1))
        elif code == "K":
            self._rows[self._row] = ""
        elif not text.startswith("\x1b"):
            row = self._rows[self._row].ljust(self._column)
            self._rows[self._row] = row[: self._column] + text + row[self._column + len(text) :]
            self._column += len(text)
