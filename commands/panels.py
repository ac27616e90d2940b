"""Adds the options of plugins, and groups of options, to a command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import typer

from ..common.option import Request, changed, panels_for, record_in
from ..common.registry import imported
from .command import Command
from .options import READING

T = TypeVar("T")

LOAD = "load"
"""The call whose panels are shown by every command that reads a model."""


class Groups:
    """The groups of options of one command, and their values."""

    def __init__(self, command: Command, own: Sequence[Any]) -> None:
        panels = panels_for(command.calls, [parameter.name for parameter in own])
        self._reading: list[Any] = []
        self._others: list[Any] = []
        for panel in panels:
            if panel.function is not None:
                groups = self._reading if LOAD in panel.calls else self._others
                groups.append(_parsed(panel.function, panel.title))
        self._others += [_parsed(function, None) for function in command.groups]

    def among(self, own: Sequence[Any]) -> list[Any]:
        """Returns the parameters of a command and of its groups, in the order of the help."""
        sections = [getattr(each, "rich_help_panel", None) for each in own]
        last = max((at for at, title in enumerate(sections) if title == READING), default=-1)
        reading, others = (
            [option for group in groups for option in group.params]
            for groups in (self._reading, self._others)
        )
        return [*own[: last + 1], *reading, *own[last + 1 :], *others]

    def records(self, typed: dict[str, Any]) -> tuple[Any, ...]:
        """Removes the options of the groups from `typed`, and returns the record of each group."""
        return tuple(
            group.callback(**{option.name: typed.pop(option.name) for option in group.params})
            for group in (*self._reading, *self._others)
        )


def _parsed(function: str, title: str | None) -> Any:
    """Returns a group parsed by Typer; `title` is the section of options that have none."""
    alone = typer.Typer(add_completion=False)
    alone.command()(imported(function))
    group: Any = typer.main.get_command(alone)
    for option in group.params:
        option.rich_help_panel = option.rich_help_panel or title
    return group


def given(context: typer.Context, kind: type[T]) -> T:
    """Returns the record of a group of the command."""
    record = record_in(context.obj, kind)
    assert record is not None, f"the command has no group that makes {kind.__name__}"
    return record


def further(context: typer.Context, request: type[Request]) -> tuple[Any, ...]:
    """Returns the records of those panels of a request whose options were given."""
    panels = panels_for(request.offered, ())
    records = (record_in(context.obj, panel.options) for panel in panels)
    return tuple(record for record in records if record is not None and changed(record))
