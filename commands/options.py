"""The arguments and options that several commands share, and how the parser gets them."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from ..common.console import Console
from ..common.libraries import check_pytorch
from ..common.option import PANELS, Request, changed, declared, kind_of, panels_of, refuse_changed
from ..common.registry import Registry
from ..errors import UsageError
from .command import Command, summaries

if TYPE_CHECKING:
    from ..exporter.model import Model
    from ..exporter.requests import LoadRequest


def typed_path(text: str | Path) -> Path:
    """Returns the path that was typed; bad usage for an empty one, which would be `.`."""
    if text == "":
        raise typer.BadParameter("it is empty: name a file or folder, . for the current one")
    from ..common.locations import path_of, url_of

    return Path(text) if url_of(text) is not None else path_of(text)


def typed_output(text: str | Path) -> Path:
    """Returns the path of a result that was typed; bad usage for a URL, which is not written."""
    from ..common.locations import url_of

    path = typed_path(text)
    if url_of(text) is not None:
        raise typer.BadParameter(f"{text} is a URL: write to this machine, and copy it there")
    return path


def typed_source(text: str) -> str:
    """Returns the MODEL that was typed; `UsageError` for an empty one."""
    if not text:
        raise UsageError("MODEL is empty", hint="give a checkpoint or package.module:factory")
    if text.startswith("file:"):
        from ..common.user_code import names_code

        return text if names_code(text) else str(typed_path(text))
    return text


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        parser=typed_source,
        help="A checkpoint file or folder, its URL, or package.module:factory.",
    ),
]

BundleArgument = Annotated[
    Path, typer.Argument(metavar="BUNDLE", parser=typed_path, help="A folder that export wrote.")
]

TrustEngine = Annotated[
    bool,
    typer.Option("--trust-engine", help="Load an unverified engine file; it may execute code."),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def typed_command() -> str:
    """The command as it was typed, to be typed again."""
    return shlex.join(["moexport", *sys.argv[1:]])


def json_text(content: Any) -> str:
    """Plain data as indented JSON, as `--json` prints it."""
    import json

    return json.dumps(content, indent=2, ensure_ascii=False)


def typed_name(feed: Any) -> str | None:
    """Returns a feed as it was typed: in a shell it is a name."""
    return None if feed is None else str(feed)


def output_option(metavar: str, text: str) -> Any:
    """Returns the declaration of `--output`, which every command has that writes."""
    return typer.Option("--output", "-o", metavar=metavar, parser=typed_output, help=text)


def loader(
    request: LoadRequest, source: str, console: Console, data: str | Path | None = None
) -> Callable[[], Model]:
    """Returns what loads the model that a command names, when it is called.

    A factory's network is checked on the first inputs of `data`.
    """

    def load() -> Model:
        check_pytorch("reading a model")
        from ..exporter.checkpoints.load import load_as

        console.step(f"loading {source}")
        return load_as(source, replace(request, example=data))

    return load


@dataclass(frozen=True, slots=True, kw_only=True)
class Verbosity:
    """How much a command says beside its result."""

    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print more, and tracebacks of errors.")
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")] = (
        False
    )

    def console(self) -> Console:
        """Returns what the command speaks through."""
        return Console(verbose=self.verbose, quiet=self.quiet)


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command as Typer wants it: a parameter that is a record becomes its options.

    A record is a request (`common.option`), of which what a shell can say becomes an option, those
    of plugins' panels after it; or a dataclass of what a shell alone has, declared as parameters
    are, `Annotated[int, typer.Option(…)] = 1`. So an option stands in one place, however many
    commands have it.
    """
    hints = get_type_hints(command, include_extras=True)
    records: dict[str, list[tuple[Any, list[inspect.Parameter]]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            records[name] = _with_panels(hints[name])
            parameters += [option for _, options in records[name] for option in options]
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=kind, annotation=hints[name]))

    @wraps(command)
    def flat(**typed: Any) -> None:
        typed = {n: typed_path(v) if isinstance(v, Path) else v for n, v in typed.items()}
        whole = {}
        for name, kinds in records.items():
            request, *further = (_made(*kind, typed) for kind in kinds)
            for record in filter(changed, further):
                request = request.asking(record)
            whole[name] = request
        command(**typed, **whole)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return flat


def _with_panels(record: Any) -> list[tuple[Any, list[inspect.Parameter]]]:
    """A record and the records that plugins add to it, each with its options."""
    panels = panels_of(record) if issubclass(record, Request) else []
    return [
        (record, options_of(record)),
        *((panel.options, options_of(panel.options, panel.title)) for panel in panels),
    ]


def _made(record: Any, options: Sequence[inspect.Parameter], typed: dict[str, Any]) -> Any:
    """A record of what was typed; all else is the record's own default."""
    values = {option.name: typed.pop(option.name) for option in options}
    return record(**{name: value for name, value in values.items() if value is not None})


def options_of(record: Any, title: str | None = None) -> list[inspect.Parameter]:
    """Returns the options of a dataclass as Typer wants parameters, under a title in the help."""
    if not declared(record):
        hints = get_type_hints(record, include_extras=True)
        return [
            _keyword(
                field.name,
                hints[field.name].__origin__,
                hints[field.name].__metadata__[0],
                inspect.Parameter.empty if field.default is MISSING else field.default,
            )
            for field in fields(record)
        ]
    options, heading = [], title
    for name, (field, said) in declared(record).items():
        if said.shell is None:
            continue
        heading = said.heading or heading
        shell = dict(said.shell)
        default = None if field.default == () else field.default
        shell.pop("kind", None)
        shell.pop("further", None)
        kind = kind_of(record, name)
        flag = shell.pop("flag", f"--{name.replace('_', '-')}" if default is False else None)
        text = said.help if said.unset is None else _with_default(said.help, said.unset)
        # What is no switch may have two names.
        names = flag.split("/") if flag and kind is not bool else [flag] if flag else []
        made = typer.Option(*names, help=text, rich_help_panel=heading, **shell)
        options.append(_keyword(name, kind if default is not None else kind | None, made, default))
    return options


def _with_default(text: str, unset: str) -> str:
    return f"{text.removesuffix('.')} [default: {unset}]." if unset != "none" else text


def _keyword(name: str, kind: Any, option: Any, default: Any) -> inspect.Parameter:
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, only, default=default, annotation=Annotated[kind, option])


def refuse_idle(*records: Any, why: str, but: Sequence[str] = ()) -> None:
    """Raises `UsageError` for the first option of some records that was typed and has no use.

    Those named in `but` have one.
    """
    for record in records:
        for each in (record, *record.further):
            refuse_changed(each, {*changed(each)} - {*but}, f": {why}")


LAST = ("Cluster", "Options")
"""Sections of a command's help that end it."""

FURTHER = ("Numbers", "Engines", "Weights of engines")
"""Sections that a help of more than two screens leaves to --help-all, beside rare panels."""

SCREENS = 80
"""Lines of two screens."""

EXIT_CODES = "Exit codes: 0 success, 1 failure, 2 wrong usage, 3 a check failed, 130 interrupted."


class SectionedCommand(TyperCommand):
    """A command whose help has a section per kind of option, in plain text: Rich takes 0.1 s."""

    whole = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes --help-all for a --help that leaves nothing out."""
        self.whole = "--help-all" in args
        return super().parse_args(ctx, ["--help"] if self.whole else args)

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
        long = sum(map(len, sections.values())) > SCREENS / 2  # an option takes about two lines
        rare: set[str] = set()
        if long and not self.whole:  # a short help needs no plugin
            rare = {*FURTHER, *(panel.title for panel in PANELS if panel.rare)}
        left_out = [title for title in sections if title in rare]
        last = [title for title in LAST if title in sections]
        listed = [title for title in sections if title not in (*last, *left_out)]
        for heading in listed + last:
            with formatter.section(heading):
                formatter.write_dl(sections[heading])
        if left_out:
            names = ", ".join(f"{title} ({len(sections[title])})" for title in left_out)
            formatter.write_paragraph()
            formatter.write_text(f"--help-all shows further options: {names}.")


def _say_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"moexport {version('moexport')}")
        raise typer.Exit


def _say_outside() -> None:
    """Says which packages are older or newer than what was run: they may work all the same."""
    from ..common.console import Console
    from ..common.versions import outside_of_what_was_run

    for line in outside_of_what_was_run():
        Console().note(line)


def _before_command(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    verbosity: Verbosity,
) -> None:
    """What may stand before the command; `program` hands it on."""


def program(name: str, about: str, commands: Registry[Command]) -> typer.Typer:
    """Makes the program of commands.

    Its help lists them and imports none of their functions: to declare their options, 150 in all,
    takes longer than everything else that it does.
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
            said = [f"--{name}" for name in ("verbose", "quiet") if ctx.params.get(name)]
            if command != "doctor" and {"--help", "-h", "--quiet", "-q"}.isdisjoint((*said, *rest)):
                _say_outside()
            return command, _declared(commands[command]), [*said, *rest]

    app = typer.Typer(
        cls=Commands,
        name=name,
        help=f"{about}\n\n{EXIT_CODES}",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(flattened(_before_command))
    return app


def _declared(command: Command) -> Any:
    """A command as the parser has it, with its options; its help ends with the example."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(command.name, cls=SectionedCommand, epilog=f"Example: {command.example}")(
        flattened(command.loaded)
    )
    return typer.main.get_command(alone)
