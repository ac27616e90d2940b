"""Chooses the wording of messages: options as typed in a shell, or keywords in Python."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import MoexportError

if TYPE_CHECKING:
    from .in_python import Keywords


@dataclass(slots=True)
class _Shell:
    """Counts the commands that are running."""

    commands: int = 0


RUNNING = _Shell()


@contextmanager
def in_shell() -> Iterator[None]:
    """Within the context, messages keep options as typed in a shell."""
    RUNNING.commands += 1
    try:
        yield
    finally:
        RUNNING.commands -= 1


@contextmanager
def for_callers(function: str, keywords: Callable[[], Keywords]) -> Iterator[None]:
    """Within the context, moexport's errors are reworded for Python callers.

    `keywords` returns the keywords of `function`; it is called only for an error.
    """
    try:
        yield
    except MoexportError as error:
        if not RUNNING.commands:
            from .in_python import reword  # needed for errors only

            reword(error, function, keywords())
        raise


def reworded(
    items: Generator[Any, Any, Any], function: str, keywords: Callable[[], Keywords]
) -> Iterator[Any]:
    """Yields what a generator yields, with its errors reworded for Python callers."""
    with for_callers(function, keywords):
        yield from items
