"""Adds the options of a command's records, and those of plugins, to the command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, get_type_hints

import typer

from ..common.option import Request, changed, panels_for, record_in
from ..common.registry import imported
from .options import READING

T = TypeVar("T")

LOAD = "load"
"""The call whose panels every command that reads a model shows."""


class PanelOptions:
    """The options that plugins add to a command, and their values."""

    def __init__(self, calls: Collection[str], own: Sequence[Any]) -> None:
        self._reading: list[Any] = []
        self._others: list[Any] = []
        for panel in panels_for(calls, [parameter.name for parameter in own]):
            if panel.function is not None:
                groups = self._reading if LOAD in panel.calls else self._others
                groups.append(_parse_panel(panel.function, panel.title))

    def merged_with(self, own: Sequence[Any]) -> list[Any]:
        """Returns the parameters of a command and of its plugins, in the order of the help."""
        sections = [getattr(parameter, "rich_help_panel", None) for parameter in own]
        last = max((index for index, title in enumerate(sections) if title == READING), default=-1)
        reading, others = (
            [option for group in groups for option in group.params]
            for groups in (self._reading, self._others)
        )
        return [*own[: last + 1], *reading, *own[last + 1 :], *others]

    def records(self, typed: dict[str, Any]) -> tuple[Any, ...]:
        """Removes the options of plugins from `typed`, and returns the record of each panel."""
        return tuple(
            group.callback(**{option.name: typed.pop(option.name) for option in group.params})
            for group in (*self._reading, *self._others)
        )


def _parse_panel(function: str, title: str) -> Any:
    """Returns a panel parsed by Typer; `title` is the section of options without one."""
    app = typer.Typer(add_completion=False)
    app.command()(with_record_options(imported(function)))
    group: Any = typer.main.get_command(app)
    for option in group.params:
        option.rich_help_panel = option.rich_help_panel or title
    return group


def given_records(context: typer.Context, request: type[Request]) -> tuple[Any, ...]:
    """Returns the records of a request's panels for which options were given."""
    panels = panels_for(request.offered, ())
    records = (record_in(context.obj, panel.options) for panel in panels)
    return tuple(record for record in records if record is not None and changed(record))


def with_record_options(function: Callable[..., T]) -> Callable[..., T]:
    """Returns a function for Typer, with a record's options in place of each record.

    A parameter for a record is annotated with its class and its `options_of`. Requests also
    get the records of plugins.
    """
    hints = get_type_hints(function, include_extras=True)
    records = {
        name: make
        for name, hint in hints.items()
        for make in getattr(hint, "__metadata__", ())
        if inspect.isfunction(make)
    }
    if not records:
        return function

    @wraps(function)
    def call(typer_context: typer.Context, **typed: Any) -> T:
        for name, make in records.items():
            options = inspect.signature(make).parameters
            record = make(**{option: typed.pop(option) for option in options})
            if isinstance(record, Request):
                record = replace(record, further=given_records(typer_context, type(record)))
            typed[name] = record
        return function(**typed)

    parameters = [
        inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    ]
    for name, parameter in inspect.signature(function).parameters.items():
        if name in records:
            parameters += inspect.signature(records[name]).parameters.values()
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(annotation=hints[name], kind=kind))
    untyped: Any = call
    untyped.__signature__ = inspect.Signature(parameters)
    return call
