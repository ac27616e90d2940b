"""The arguments and options that several commands share, and how the parser gets them."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from .. import api
from ..common.console import Console
from ..common.pytorch import check_pytorch
from ..errors import UsageError
from ..graphs.targets import FloatName, Method, Precision, Scope, Target

if TYPE_CHECKING:
    from ..exporter.model import Model


def typed_path(text: str | Path) -> Path:
    """Returns the path that was typed; bad usage for an empty one, which would be `.`."""
    if text == "":
        raise typer.BadParameter("it is empty: name a file or folder, . for the current one")
    return Path(text)


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

FEED: Any = typer.Option(
    metavar="FEED",
    help="Inputs: an .npz, a folder of .npy, shards (.tar, .parquet) or package.module:iterable.",
)

Data = Annotated[str | None, FEED]

SIZES = {"batch": {"metavar": "MIN:OPT:MAX"}, "tokens": {"metavar": "MIN:OPT:MAX"}}
"""What the parser has to know of ranges of sizes (`CallOptions.more`)."""

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
    return json.dumps(content, indent=2, ensure_ascii=False)


def output_option(metavar: str, text: str) -> Any:
    """Returns the declaration of `--output`, which every command has that writes."""
    return typer.Option("--output", "-o", metavar=metavar, parser=typed_output, help=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """How MODEL is read."""

    HEADINGS: ClassVar = {"family": "Reading MODEL"}

    family: Annotated[
        str | None, typer.Option(help="Skip detection: soft-moe-vit, mumoe-gpt2, …")
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(help="Settings that the weights do not contain, as JSON, YAML or TOML."),
    ] = None
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One such setting: --set num_heads=12."),
    ] = None
    weights: Annotated[Path | None, typer.Option(help="Weights for a package.module:factory.")] = (
        None
    )
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Adapter for the factory's own MoE layers."),
    ] = None

    def given(self) -> dict[str, Any]:
        """Returns them as `moexport.load` takes them, the configuration read."""
        check_pytorch("reading a model")
        from ..exporter.checkpoints.load import read_config

        config = read_config(self.config, self.sets or ())
        return {
            "family": self.family,
            "config": config,
            "weights": self.weights,
            "adapter": self.adapter or (),
        }

    def loader(
        self, source: str, console: Console, data: str | Path | None = None
    ) -> Callable[[], Model]:
        """Returns what loads the model that a command names, when it is called.

        A factory's network is checked on the first inputs of `data`.
        """

        def load() -> Model:
            return api.load(source, **self.given(), example=data, progress=console)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFlags:
    """A Ray cluster, and which of its nodes."""

    HEADINGS: ClassVar = {"ray": "Cluster"}

    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Use the nodes of a Ray cluster: its address, auto (that of this machine) or "
            "local.",
        ),
    ] = None
    on: Annotated[
        str | None,
        typer.Option(
            metavar="RESOURCE",
            help="The resource of its nodes: accelerator_type:L4 [default: CPU].",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """Returns what was typed, as the calls of `api.py` take it; nothing without a cluster."""
        if self.ray is None:
            refuse_idle(self, why="there is no cluster: name one with --ray")
        named = {"ray": self.ray, "on": self.on}
        return {name: value for name, value in named.items() if value is not None}


PARSED: Mapping[str, Any] = {
    **{"Sequence[str]": list[str], "Labelled": str, "AnyPath": Path},
    **{"Target": Target, "Precision": Precision, "Scope": Scope, "FloatName": FloatName},
    **{"Method": Method, "Engine": api.Engine, "Provider": api.Provider},
    **{"ServingBackend": api.ServingBackend, "Device": api.Device, "CpuTarget": api.CpuTarget},
    **{"K": str, "str": str, "bool": bool, "float": float, "int": int},
}
"""What the parser makes of a parameter of `api.py`: of the words in its type the first of these."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options of a command that are parameters of a call in `api.py`, declared there alone.

    Type, default and explanation (`Args:` of the docstring) are the parameter's. `names` says which
    are options; `headings` at which a section of the help begins; `more` what the parser alone has
    to know of one (`metavar`, `min`). A command has them as `Annotated[dict[str, Any], …]` and
    gets what was typed, to be handed to the call.
    """

    call: Callable[..., Any]
    names: str
    headings: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def parameters(self) -> list[inspect.Parameter]:
        """Returns them as Typer wants parameters."""
        declared, helps, heading = inspect.signature(self.call).parameters, self._helps(), None
        options = []
        for name in self.names.split():
            default, kind = declared[name].default, _parsed(declared[name].annotation)
            flag = [f"--{name.replace('_', '-')}"] if default is False else []
            heading = self.headings.get(name, heading)
            more = {"help": helps[name], "rich_help_panel": heading, **self.more.get(name, {})}
            if default is None or default == ():
                default, kind = None, kind | None
            options.append(_keyword(name, kind, typer.Option(*flag, **more), default))
        return options

    def _helps(self) -> dict[str, str]:
        """The explanation of each parameter; what None or nothing stands for is its default."""
        _, _, listed = (inspect.getdoc(self.call) or "").partition("Args:\n")
        found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", listed, flags=re.MULTILINE)
        helps = {}
        for name, text in found:
            what, _, default = " ".join(text.split()).removesuffix(").").rpartition(" (")
            shown = f" [default: {default[6:]}]" if default.startswith("None: ") else ""
            helps[name] = f"{what[:1].upper()}{what[1:]}{shown}."
        return helps


def _parsed(annotation: str) -> Any:
    def has(word: str) -> bool:
        return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", annotation) is not None

    return next(kind for word, kind in PARSED.items() if has(word))


def _keyword(name: str, kind: Any, option: Any, default: Any) -> inspect.Parameter:
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, only, default=default, annotation=Annotated[kind, option])


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command as Typer wants it: a parameter that is a group becomes the group's options.

    A group is a dataclass, whose fields are declared as parameters would be, `Annotated[int,
    typer.Option(…)] = 1`, in the order of the help, or the `CallOptions` of a dict. So an option
    stands in one place, whatever number of commands have it. `HEADINGS` of a dataclass names fields
    at which a section of the help begins.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[Any, list[inspect.Parameter]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        (call, *_) = getattr(hints[name], "__metadata__", (None,))
        if isinstance(call, CallOptions):
            groups[name] = _given_to_call, call.parameters()
        elif is_dataclass(hints[name]):
            groups[name] = hints[name], _fields(hints[name])
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=kind, annotation=hints[name]))
        parameters += groups[name][1] if name in groups else ()

    @wraps(command)
    def flat(**given: Any) -> None:
        whole = {
            name: group(**{each.name: given.pop(each.name) for each in options})
            for name, (group, options) in groups.items()
        }
        command(**given, **whole)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return flat


def _given_to_call(**typed: Any) -> dict[str, Any]:
    """What was typed; for the rest the call has defaults of its own."""
    return {name: value for name, value in typed.items() if value is not None}


def _fields(group: Any) -> list[inspect.Parameter]:
    """The parameters that make up a dataclass."""
    hints = get_type_hints(group, include_extras=True)
    headings, heading = getattr(group, "HEADINGS", {}), None
    parameters = []
    for each in fields(group):
        heading = headings.get(each.name, heading)
        hint = hints[each.name]
        option = copy(hint.__metadata__[0])
        option.rich_help_panel = option.rich_help_panel or heading
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        parameters.append(_keyword(each.name, hint.__origin__, option, default))
    return parameters


def refuse_idle(*groups: Any, why: str, but: Sequence[str] = ()) -> None:
    """Raises `UsageError` for the first option of groups that was given and would do nothing.

    A group is a dataclass of options, or `CallOptions` with what was typed. An option is given
    where its value is not its default; those named in `but` do something.
    """
    for group in groups:
        if isinstance(group, tuple):
            options, typed = group
            parameters = options.parameters()
        else:
            parameters = _fields(type(group))
            typed = {each.name: getattr(group, each.name) for each in parameters}
        for parameter in parameters:
            value = typed.get(parameter.name)
            if parameter.name in but or value in (parameter.default, None, []):
                continue
            declared = parameter.annotation.__metadata__[
                0
            ].default  # Typer puts the first name there
            named = isinstance(declared, str) and declared.startswith("--")
            option = declared if named else f"--{parameter.name.replace('_', '-')}"
            if parameter.default is True:
                option = option.replace("--", "--no-", 1)
            raise UsageError(f"{option}: {why}", hint=f"leave {option} out")


Command = Callable[..., None]

EXIT_CODES = "Exit codes: 0 success, 1 failure, 2 wrong usage, 3 a check failed, 130 interrupted."


class SectionedCommand(TyperCommand):
    """A command whose help has a section per kind of option, in plain text: Rich takes 0.1 s."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments and options under their headings."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None:
                argument = each.param_type_name == "argument"
                heading = getattr(each, "rich_help_panel", None)
                heading = "Arguments" if argument else heading or "Options"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _say_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"moexport {version('moexport')}")
        raise typer.Exit


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
            said = [f"--{name}" for name in ("verbose", "quiet") if ctx.params.get(name)]
            return command, _declared(*by_name[command]), [*said, *rest]

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


def _declared(function: Command, example: str) -> Any:
    """A command as the parser has it, with its options; its help ends with the example."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(function.__name__, cls=SectionedCommand, epilog=f"Example: {example}")(
        flattened(function)
    )
    return typer.main.get_command(alone)
