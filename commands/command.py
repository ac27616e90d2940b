"""The door for commands: the program lists them, and imports one when it is called."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from ..common.registry import Registry
from ..errors import PluginError


@dataclass(frozen=True)
class Command:
    """A command of the program.

    `summary` is its line in the list of commands, and `example` ends its help. `function` is
    `package.module:function`, whose parameters are its arguments and options (`flattened`). The
    list has the commands by `order`.
    """

    name: str
    summary: str
    example: str
    function: str
    order: float = math.inf

    @cached_property
    def loaded(self) -> Any:
        """The function, imported now."""
        module, _, name = self.function.partition(":")
        return getattr(import_module(module), name)


def summaries(commands: Registry[Command]) -> dict[str, str]:
    """Returns the line of each command in the order of the list.

    A package of somebody else is not imported for it: what its metadata say stands for it.
    """
    lines: dict[str, tuple[float, str]] = {}
    for name in commands.names:
        try:
            entry = commands.foreign(name)
            if entry is None:
                lines[name] = commands[name].order, commands[name].summary
            else:
                about = f"{entry.summary.rstrip('. ')} ({entry.distribution})"
                lines[name] = math.inf, about.strip()
        except PluginError as error:  # the list of the others is not lost
            lines[name] = math.inf, error.message
    return {name: text for name, (_, text) in sorted(lines.items(), key=lambda line: line[1][0])}
