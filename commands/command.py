"""The registry entry of a command, whose function is imported only when the command runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..common.registry import Registry, imported
from ..errors import PluginError


@dataclass(frozen=True)
class Command:
    """A command of the program.

    `summary` describes it in the list of commands, which is sorted by `order`; `example` ends its
    help. `function` is `package.module:function`, whose parameters Typer reads as arguments and
    options. The command also has the options that plugins add to the API functions in `calls`.
    """

    name: str
    summary: str
    example: str
    function: str
    order: float = math.inf
    calls: tuple[str, ...] = ()

    @cached_property
    def loaded(self) -> Callable[..., Any]:
        """Imports the function and returns it."""
        function: Callable[..., Any] = imported(self.function)
        return function


def summaries(commands: Registry[Command]) -> dict[str, str]:
    """Returns the summary of each command, sorted for the list of commands.

    The summaries of other packages' commands come from their metadata, without an import.
    """
    lines: dict[str, tuple[float, str]] = {}
    for name in commands.names:
        try:
            entry = commands.foreign(name)
            if entry is None:
                lines[name] = commands[name].order, commands[name].summary
            else:
                summary = f"{entry.summary.rstrip('. ')} ({entry.distribution})"
                lines[name] = math.inf, summary.strip()
        except PluginError as error:  # the others are still listed
            lines[name] = math.inf, error.message
    return {name: text for name, (_, text) in sorted(lines.items(), key=lambda line: line[1][0])}
