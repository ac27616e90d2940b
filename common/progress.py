"""What a long job tells whoever waits for it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told which step begins, and how far it is where that can be known."""

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        """A step begins; `total` is its work, None where that is not known.

        With a `unit` its rate is of interest: so many `inputs` a second.
        """
        ...

    def advance(self, amount: int) -> None:
        """A part of the step's work is done."""
        ...


class Silent:
    """Progress that nobody watches."""

    def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
        """Says nothing."""

    def advance(self, amount: int) -> None:
        """Says nothing."""
