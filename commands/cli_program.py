"""The program of several commands: the options of one are declared when it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .cli_groups import flattened

Command = Callable[..., None]


def program(name: str, about: str, commands: dict[str, Command]) -> typer.Typer:
    """Makes the program of commands in the order of its help, each beside an example of its use.

    The help lists the commands and has no need of their options, 150 in all: to declare them takes
    longer than everything else that it does, but for loading the parser.
    """
    by_name = {function.__name__: (function, example) for example, function in commands.items()}

    class Commands(TyperGroup):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            for command, (function, _) in by_name.items():
                self.add_command(TyperCommand(command, help=inspect.getdoc(function)))

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            command, listed, rest = super().resolve_command(ctx, args)
            if command is None:
                return command, listed, rest
            return command, _declared(*by_name[command]), rest

    app = typer.Typer(
        cls=Commands,
        name=name,
        help=about,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(lambda: None)  # Typer has groups for programs with commands or a callback
    return app


def _declared(function: Command, example: str) -> Any:
    """A command as the parser has it, with its options; its help ends with the example."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(function.__name__, epilog=f"Example: {example}")(flattened(function))
    return typer.main.get_command(alone)
