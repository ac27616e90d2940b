"""The program: lists its commands, and declares the options of a command when it is called."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..common.option import PANELS
from ..common.registry import Registry
from .command import Command, summaries
from .options import OPTIONAL, with_values
from .panels import PanelOptions, with_record_options

LAST_SECTIONS = ("Engines", "Weights of engines", "Cluster", "Options")
"""The last sections of a command's help."""

RARE_SECTIONS = ("Numbers", "Engines", "Weights of engines")
"""Sections shown only by --help-all, like rare panels, if the help is over two screens long."""

TWO_SCREENS = 80
"""The number of lines on two screens."""

EXIT_CODES = "Exit codes: 0 success, 1 failure, 2 wrong usage, 3 a check failed, 130 interrupted."


class SectionedCommand(TyperCommand):
    """A command whose help has sections, in plain text because Rich takes 0.1 s to load."""

    show_all = False
    panels: PanelOptions

    def add(self, panels: PanelOptions) -> None:
        """Adds the options of plugins."""
        self.panels = panels
        self.params = panels.merged_with(self.params)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, with the records of plugins in the context."""
        ctx.obj = self.panels.records(ctx.params)
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Handles --help-all, and options with optional values."""
        self.show_all = "--help-all" in args
        metavars = {opt: param.metavar or "" for param in self.params for opt in param.opts}
        optional = {opt: text for opt, text in metavars.items() if text.startswith(OPTIONAL)}
        return super().parse_args(ctx, ["--help"] if self.show_all else with_values(args, optional))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments and options under their headings."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                argument = parameter.param_type_name == "argument"
                heading = getattr(parameter, "rich_help_panel", None)
                heading = "Arguments" if argument else heading or "Options"
                sections.setdefault(heading, []).append(record)
        long = sum(map(len, sections.values())) > TWO_SCREENS / 2  # about two lines per option
        rare: set[str] = set()
        if long and not self.show_all:  # a short help shows everything
            rare = {*RARE_SECTIONS, *(panel.title for panel in PANELS if panel.rare)}
        titles = [*(title for title in sections if title not in LAST_SECTIONS), *LAST_SECTIONS]
        left_out = [title for title in titles if title in rare and title in sections]
        for heading in titles:
            if heading in sections and heading not in rare:
                with formatter.section(heading):
                    formatter.write_dl(sections[heading])
        if left_out:
            names = ", ".join(f"{title} ({len(sections[title])})" for title in left_out)
            formatter.write_paragraph()
            formatter.write_text(f"--help-all shows further options: {names}.")


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"moexport {version('moexport')}")
        raise typer.Exit


def _note_untested_versions() -> None:
    """Prints which packages have untested versions; they may still work."""
    from ..common.console import Console
    from ..common.libraries import untested_versions

    for line in untested_versions():
        Console().note(line)


def _before_command(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print more, and tracebacks of errors.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only results and errors.")
    ] = False,
) -> None:
    """Declares the options that may precede a command; `program` reads them."""


def program(name: str, about: str, commands: Registry[Command]) -> typer.Typer:
    """Creates the program from its commands.

    The help lists commands without importing their functions: declaring their 150 options would
    take longer than everything else.
    """

    class Commands(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            for command, summary in summaries(commands).items():
                self.add_command(TyperCommand(command, help=summary))

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            command, listed, rest = super().resolve_command(ctx, args)
            if command is None:
                return command, listed, rest
            flags = [f"--{name}" for name in ("verbose", "quiet") if ctx.params.get(name)]
            if command != "doctor" and {"--help", "-h", "--quiet", "-q"}.isdisjoint(
                (*flags, *rest)
            ):
                _note_untested_versions()
            return command, declared_command(commands[command]), [*flags, *rest]

    app = typer.Typer(
        cls=Commands,
        name=name,
        help=f"{about}\n\n{EXIT_CODES}",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_before_command)
    return app


def declared_command(command: Command) -> Any:
    """Returns a command with its options, for the parser; its help ends with the example."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(command.name, cls=SectionedCommand, epilog=f"Example: {command.example}")(
        with_record_options(command.loaded)
    )
    declared: Any = typer.main.get_command(app)
    declared.add(PanelOptions(command.calls, declared.params))
    return declared
