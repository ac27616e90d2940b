"""Declares options once: for Python keywords, the command line and the job itself.

Fields of a frozen dataclass (a request) are declared with `option`, which includes the help text.
`takes` makes them keywords of a Python call, with types and defaults; `commands` makes them options
of the command line; the job receives the record. Plugins extend a request with a `Panel`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial, wraps
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    get_origin,
    overload,
)

from ..errors import MoexportError, PluginError, UsageError
from .registry import PLUGINS, Registry, left_out, names_in, record_of_plugin
from .text import near_miss

if TYPE_CHECKING:
    from .call_types import OneArgument, ThreeArguments, TwoArguments
    from .console import Progress
    from .messages.in_python import Keyword, Keywords

T = TypeVar("T")

DECLARED = "option"


@dataclass(frozen=True, slots=True)
class Declared:
    """The description of an option, next to its type and default.

    `words` is the help text, or a function that returns it, for lists of records that load late.
    `unset` describes the behaviour for None or an empty value. `flag` is the spelling in a shell,
    or None for an option of Python only. With `is_path`, the value names a file or folder.
    """

    words: str | Callable[[], str]
    unset: str | None
    flag: str | None
    is_path: bool

    @property
    def help(self) -> str:
        """The help text."""
        return self.words if isinstance(self.words, str) else self.words()

    @property
    def help_with_default(self) -> str:
        """The help text, with the behaviour without the option unless the default shows it."""
        if self.unset in (None, "none"):
            return self.help
        return f"{self.help.removesuffix('.')} [default: {self.unset}]."


def option(
    default: T,
    help: str | Callable[[], str],
    *,
    unset: str | None = None,
    flag: str | None = None,
    in_shell: bool = True,
    is_path: bool = False,
    compare: bool = True,
) -> T:
    """Declares a field of a request: its default and its help text.

    In a shell it is `--its-name`, or `flag`; `commands.options.options_of` offers it there.
    """
    declared = Declared(help, unset, (flag or "") if in_shell else None, is_path)
    untyped: Any = field(default=default, compare=compare, metadata={DECLARED: declared})
    declaration: T = untyped
    return declaration


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options that every call accepts.

    `offered` are the calls whose plugin options apply (`Panel.calls`); `further` has the records
    of plugins whose options were given.
    """

    offered: ClassVar[frozenset[str]] = frozenset()

    progress: Progress | None = option(
        None, "Receives every step.", unset="no progress", in_shell=False, compare=False
    )
    further: tuple[Any, ...] = ()

    def asked(self, options: type[T]) -> T:
        """Returns the given options of a plugin, or its defaults."""
        record = record_in(self.further, options)
        return options() if record is None else record

    def asking(self, record: Any) -> Self:
        """Returns a copy of the request with a plugin's record replaced."""
        others = (other for other in self.further if type(other) is not type(record))
        return replace(self, further=(*others, record))


def record_in(further: Iterable[Any], kind: type[T]) -> T | None:
    """Returns the plugin record of a kind, or None."""
    return next((record for record in further if isinstance(record, kind)), None)


def declared(request: type[Any]) -> dict[str, tuple[Field[Any], Declared]]:
    """Returns the options of a request by name: fields and descriptions."""
    return {
        field.name: (field, field.metadata[DECLARED])
        for field in fields(request)
        if DECLARED in field.metadata
    }


def spelled(request: type[Any], name: str) -> str:
    """Returns an option as typed in a shell: `--io-precision`."""
    return flags(request, name)[0]


def flags(request: type[Any], name: str) -> list[str]:
    """Returns all spellings of an option: `--engine` and `--runtime`."""
    flag = declared(request)[name][1].flag or f"--{name.replace('_', '-')}"
    return flag.split("/")


def shell_options(request: type[Any]) -> list[str]:
    """Returns the names of the options that the command line offers."""
    return [
        name for name, (_, declaration) in declared(request).items() if declaration.flag is not None
    ]


def changed(request: Any) -> list[str]:
    """Returns the names of command-line options that differ from their defaults.

    Options of plugins are not included; call `changed` with their record.
    """
    kind, known = type(request), declared(type(request))
    return [n for n in shell_options(kind) if _differs(getattr(request, n), known[n][0].default)]


def _differs(value: Any, default: Any) -> bool:
    if isinstance(value, bool | int | float | str):
        return bool(value != default)
    if isinstance(value, Sequence):
        return len(value) > 0 and value != default
    return value is not None and value is not default


def refuse_changed(request: Any, names: Collection[str], why: str) -> None:
    """Raises `UsageError` for the first given option among `names`, which have no effect."""
    for name in changed(request):
        if name in names:
            spelling = spelled(type(request), name)
            if getattr(request, name) is False:
                spelling = spelling.replace("--", "--no-", 1)
            raise UsageError(f"{spelling}{why}", hint=f"leave {spelling} out")


def at_least(request: Request, name: str, least: int) -> None:
    """Raises `UsageError` if a number is below `least`."""
    number = getattr(request, name)
    if number is not None and number < least:
        flag = spelled(type(request), name)
        raise UsageError(f"{flag} {number}: must be at least {least}", hint=f"leave {flag} out")


Mistake = tuple[str, str] | MoexportError
"""A message and a hint for a `UsageError` about an invalid option, or another error."""


def refuse(mistakes: Iterable[Mistake]) -> None:
    """Raises the first mistake, if any."""
    for mistake in mistakes:
        if isinstance(mistake, MoexportError):
            raise mistake
        raise UsageError(mistake[0], hint=mistake[1])


@dataclass(frozen=True, slots=True)
class Panel:
    """Options of a plugin: a section in the help of some commands, and keywords of their calls.

    If the core has a section with that `title`, the options join it. `calls` are members of
    `CALLS`, or commands of plugins that accept such options; `load` means every command that
    reads a model. `options` is a frozen dataclass of fields declared with `option`, which the
    request of a call carries (`Request.asked`). `function` is `package.module:function`: Typer
    reads its parameters as command-line options, and it returns the record; without it the options
    exist in Python only. A `rare` panel appears in a long help only with --help-all.
    """

    name: str
    title: str
    calls: tuple[str, ...]
    options: type[Any]
    function: str | None = None
    rare: bool = False


CALLS = ("load", "inspect", "export", "calibrate", "run", "bench")
"""Calls of the core that accept options of plugins."""

COMMANDS_GROUP = "moexport.commands"


def unknown_call(call: str) -> str:
    """Returns why a plugin cannot extend a call, with the nearest name; empty if it can."""
    known = (*CALLS, *names_in(COMMANDS_GROUP))
    return "" if call in known else f"there is no call '{call}'; {near_miss(call, known)}"


def _misplaced(panel: Panel) -> str:
    """Returns why a panel cannot extend its calls; empty if it can."""
    for call in panel.calls:
        command = None if call in CALLS else record_of_plugin(COMMANDS_GROUP, call)
        if command is not None and call not in command.calls:
            return f"the command '{call}' accepts no plugin options"
        if unknown_call(call):
            return unknown_call(call)
    return "" if panel.calls else f"it names no call; choose one of: {', '.join(CALLS)}"


PANELS = Registry("moexport.options", Panel, problem=_misplaced)
"""All panels come from plugins."""


def panels_of(request: type[Request]) -> list[Panel]:
    """Returns the panels of a request; raises as `panels_for` does."""
    return panels_for(request.offered, declared(request))


def panels_for(calls: Collection[str], own: Iterable[str]) -> list[Panel]:
    """Returns the panels of `calls`; `own` are the options that these have without plugins.

    Raises `PluginError` if two plugins, or a plugin and the core, claim one option.
    """
    offered = PANELS if calls else ()  # without a call, no plugin is needed
    panels = [panel for panel in offered if not set(calls).isdisjoint(panel.calls)]
    owners = dict.fromkeys(own, "moexport itself")
    for panel in panels:
        for name in declared(panel.options):
            if name in owners:
                option = f"--{name.replace('_', '-')}"
                raise PluginError(
                    f"{option} comes from {owners[name]} and from {_source(panel)}",
                    hint=f"remove one of them; {PLUGINS}=off disables all plugins",
                )
            owners[name] = _source(panel)
    return panels


def _source(panel: Panel) -> str:
    entry = PANELS.foreign(panel.name)
    return f"moexport's plugin '{panel.name}'" if entry is None else entry.distribution


P = ParamSpec("P")
Options = TypeVar("Options")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
Result = TypeVar("Result")


def speaks_python(function: Callable[P, A]) -> Callable[P, A]:
    """Makes the errors of a public function name Python arguments, at no cost to other calls."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> A:
        try:
            return function(*args, **kwargs)
        except MoexportError:
            from .messages.shell import for_callers  # needed for errors only

            with for_callers(function.__name__, dict):
                raise

    return call


class takes(Generic[P, Options]):  # noqa: N801  a decorator
    """Lets a function that takes an options record also accept the options as keywords.

    After `@takes(ExportOptions)`, `export(model, "out", k=4)` means `export(model, "out",
    ExportOptions(k=4))`. Type checkers derive the keywords from the record, and `help()` lists them
    with their descriptions. Plugins are searched only for keywords that the record lacks.
    """

    def __init__(self, request: Callable[P, Options]) -> None:
        self._request = request

    @overload
    def __call__(
        self, function: Callable[[A, Options], Result]
    ) -> OneArgument[A, P, Options, Result]: ...

    @overload
    def __call__(
        self, function: Callable[[A, B, Options], Result]
    ) -> TwoArguments[A, B, P, Options, Result]: ...

    @overload
    def __call__(
        self, function: Callable[[A, B, C, Options], Result]
    ) -> ThreeArguments[A, B, C, P, Options, Result]: ...

    def __call__(self, function: Callable[..., Any]) -> Any:
        """Returns the function with keywords."""
        request: Any = self._request
        signature = inspect.signature(function)
        *positional, record = signature.parameters.values()
        names = [parameter.name for parameter in positional]

        @wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            from .messages.shell import for_callers, reworded  # needed for calls only

            arguments = {name: named.pop(name) for name in [*named] if name in names}
            caller = function.__name__.removesuffix("_as"), partial(keywords_of, request)
            with for_callers(*caller):
                if values and isinstance(values[-1], request):
                    *rest, options = values
                    values = (*rest,)
                    refuse(misfits(request, {n: getattr(options, n) for n in declared(request)}))
                else:
                    options = requested(request, named)
                    named = {}
                refuse(misplaced(function, arguments | dict(zip(names, values, strict=False))))
                result = function(*values, **arguments, **named, **{record.name: options})
            return reworded(result, *caller) if inspect.isgenerator(result) else result

        keywords = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
            )
            for name, (field, _declared) in declared(request).items()
        ]
        if request.offered:
            keywords.append(inspect.Parameter("of_plugins", inspect.Parameter.VAR_KEYWORD))
        call.keywords = partial(keywords_of, request)  # type: ignore[attr-defined]
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*positional, *keywords]
        )
        call.__doc__ = f"{inspect.getdoc(function)}\n\n{explained(request)}"
        return call


def keywords_of(request: type[Any]) -> Keywords:
    """Returns the keywords of a call and its plugins by their shell options, for messages."""
    from .messages.in_python import Keyword  # needed for messages only
    from .messages.types import literals, type_of

    found: dict[str, Keyword] = {}
    for record in (request, *(panel.options for panel in panels_of(request))):
        for name, (option_field, _) in declared(record).items():
            kind, spellings = type_of(record, name), flags(record, name)
            keyword = Keyword(
                name=name,
                switch=isinstance(option_field.default, bool) or spellings[-1].startswith("--no-"),
                several=get_origin(kind) is Sequence,
                choices=frozenset(literals(kind)),
            )
            found[spellings[0].lstrip("-")] = keyword
    return found


def misfits(record: type[Any], given: Mapping[str, Any]) -> Iterator[Mistake]:
    """Yields values that do not fit the types of a record's fields."""
    from .messages.types import fits, literals, type_name, type_of

    for name, value in given.items():
        kind = type_of(record, name)
        if fits(value, kind):
            continue
        if isinstance(value, str) and (choices := [*literals(kind)]):
            yield f"{spelled(record, name)}={value}: unknown value", near_miss(value, choices)
        default = next(field.default for field in fields(record) if field.name == name)
        hint = "leave it out" if default is MISSING else f"the default is {default!r:.60}"
        yield f"{name}={value!r:.60}: not {type_name(kind)}", hint


def misplaced(function: Callable[..., Any], given: Mapping[str, Any]) -> Iterator[Mistake]:
    """Yields values of a function's own parameters that have the wrong type.

    The readers of models and feeds check those values themselves.
    """
    from .messages.types import fits, is_model_or_feed, type_name, type_of

    for name, value in given.items():
        kind = type_of(function, name)
        if callable(value):
            continue  # a network or its loader, which the call itself checks
        if not is_model_or_feed(kind) and not fits(value, kind):
            hint = f"help({function.__qualname__}) lists what it accepts"
            yield f"{name}={value!r:.60}: not {type_name(kind)}", hint


def explained(request: type[Any]) -> str:
    """Returns the options of a request as part of a docstring."""
    lines = ["Options:"]
    for name, (option_field, declaration) in declared(request).items():
        default = declaration.unset if declaration.unset is not None else option_field.default
        default = "required" if option_field.default is MISSING else default
        lines.append(f"    {name}: {declaration.help} [{default}]")
    if request.offered:
        lines.append("    of_plugins: Options of plugins, which the command's help lists.")
    return "\n".join(lines)


def requested(request: type[Request], named: Mapping[str, Any]) -> Any:
    """Returns the request for the keywords of a call, including those of plugins.

    Raises `TypeError` for a keyword that neither the core nor a plugin has.
    """
    known = declared(request)
    own = {name: value for name, value in named.items() if name in known}
    others = {name: value for name, value in named.items() if name not in known}
    refuse(misfits(request, own))
    result: Any = request(**own)
    for record in _records(request, others):
        result = result.asking(record)
    return result


def _records(request: type[Request], named: dict[str, Any]) -> Iterator[Any]:
    """Yields a record for each panel whose keywords are among those given."""
    panels = panels_of(request) if named else []
    for panel in panels:
        names = declared(panel.options).keys() & named.keys()
        if names:
            own = {name: named.pop(name) for name in names}
            refuse(misfits(panel.options, own))
            yield panel.options(**own)
    if named:
        name = next(iter(named))
        known = [*declared(request), *(n for panel in panels for n in declared(panel.options))]
        raise TypeError(f"{name}: there is no such option; {near_miss(name, known)}{left_out()}")
