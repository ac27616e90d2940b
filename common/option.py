"""Options, declared once: keywords of a Python call, options of a shell, and what a job reads.

The fields of a frozen dataclass (a request) are declared with `option`, each with its meaning.
`takes` makes them the keywords of a Python call, with their types and defaults; `commands` makes
them options of the command line; and the job is handed the record itself. Plugins add theirs to a
request by a `Panel`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from ..errors import PluginError, UsageError
from .registry import PLUGINS, Registry, left_out
from .text import near_miss

if TYPE_CHECKING:
    from .console import Progress

T = TypeVar("T")

DECLARED = "option"


@dataclass(frozen=True, slots=True)
class Declared:
    """What is said of an option beside its type and default.

    `words` are its meaning, or return it where it comes from a list that is loaded late. `unset` is
    what None or nothing stands for. A section of the help begins at a `heading`. `shell`
    is what the parser has to know (`kind`, `flag`, `metavar`, `min`, `parser`), None for an option
    of Python alone. `further` in it returns choices beside those of the annotation.
    """

    words: str | Callable[[], str]
    unset: str | None
    heading: str | None
    shell: Mapping[str, Any] | None

    @property
    def help(self) -> str:
        """What the option means."""
        return self.words if isinstance(self.words, str) else self.words()


def option(
    default: T,
    help: str | Callable[[], str],
    *,
    unset: str | None = None,
    heading: str | None = None,
    in_shell: bool = True,
    compare: bool = True,
    **shell: Any,
) -> T:
    """Returns the declaration of a field of a request: its default and what it means.

    The parser makes a `kind` of what is typed: `kind_of` tells it where it is not given.
    """
    declared = Declared(help, unset, heading, shell if in_shell else None)
    made: Any = field(default=default, compare=compare, metadata={DECLARED: declared})
    declaration: T = made
    return declaration


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What every call takes.

    `offered` are the names by which plugins add options to the call (`Panel`); `further`
    has a record of each plugin's, where some were given.
    """

    offered: ClassVar[frozenset[str]] = frozenset()

    progress: Progress | None = option(
        None, "Receives every step.", unset="no progress", in_shell=False, compare=False
    )
    further: tuple[Any, ...] = ()

    def asked(self, options: type[T]) -> T:
        """Returns what was given of a plugin's options, else its defaults."""
        record = record_in(self.further, options)
        return options() if record is None else record

    def asking(self, record: Any) -> Self:
        """Returns the request with a plugin's options in place of those that it has."""
        others = (each for each in self.further if type(each) is not type(record))
        return replace(self, further=(*others, record))


def record_in(further: Iterable[Any], kind: type[T]) -> T | None:
    """Returns the record of a kind among those of plugins; None where none was given."""
    return next((each for each in further if isinstance(each, kind)), None)


def declared(request: type[Any]) -> dict[str, tuple[Field[Any], Declared]]:
    """Returns the options of a request by name: their fields, and what is said of them."""
    return {
        field.name: (field, field.metadata[DECLARED])
        for field in fields(request)
        if DECLARED in field.metadata
    }


def kind_of(request: type[Any], name: str) -> Any:
    """Returns what a shell makes of an option's text, by its declaration or its annotation.

    `AnyPath` is read as a path. What has no single type (`str | int`) is read as its default is,
    without one as text.
    """
    field, said = declared(request)[name]
    if said.shell is not None and "kind" in said.shell:
        return said.shell["kind"]
    kind, parts = _annotated(request, name)
    if set(parts) == {str, Path}:
        return Path
    if kind in (Sequence[str], list[str], tuple[str, ...]):
        return list[str]
    further = (said.shell or {}).get("further")
    if further is not None or get_origin(kind) is Literal:
        return Literal[*dict.fromkeys((*get_args(kind), *(further or tuple)()))]
    if isinstance(kind, type):
        return kind
    return str if field.default is None else type(field.default)


def _annotated(request: type[Any], name: str) -> tuple[Any, Sequence[Any]]:
    """The type of an option without None, and the types of which it is one, where it is a union.

    None and nothing where it has names that type checkers alone see.
    """
    owner = next(base for base in request.__mro__ if name in inspect.get_annotations(base))
    own = {name: inspect.get_annotations(owner)[name]}
    alone = type(name, (), {"__annotations__": own, "__module__": owner.__module__})
    try:
        kind = get_type_hints(alone)[name]
    except NameError:
        return None, ()
    if get_origin(kind) not in (Union, UnionType):
        return kind, ()
    parts = [part for part in get_args(kind) if part is not NoneType]
    return (parts[0] if len(parts) == 1 else kind), parts


def spelled(request: type[Any], name: str) -> str:
    """Returns an option as a shell has it: `--io-precision`."""
    shell = declared(request)[name][1].shell or {}
    return str(shell.get("flag", f"--{name.replace('_', '-')}")).partition("/")[0]


def shell_options(request: type[Any]) -> list[str]:
    """Returns the names of the options of a request that a shell has."""
    return [name for name, (_, said) in declared(request).items() if said.shell is not None]


def changed(request: Any) -> list[str]:
    """Returns the names of the options that a shell has and that are not their defaults.

    Those of plugins are not among them: `changed` of their own record has them.
    """
    kind, known = type(request), declared(type(request))
    return [n for n in shell_options(kind) if _says(getattr(request, n), known[n][0].default)]


def _says(value: Any, default: Any) -> bool:
    if isinstance(value, bool | int | float | str):
        return bool(value != default)
    if isinstance(value, Sequence):
        return len(value) > 0 and value != default
    return value is not None and value is not default


def refuse_changed(request: Any, names: Collection[str], why: str) -> None:
    """Raises `UsageError` for the first of some options that is not its default: it has no use."""
    for name in changed(request):
        if name in names:
            spelling = spelled(type(request), name)
            if getattr(request, name) is False:
                spelling = spelling.replace("--", "--no-", 1)
            raise UsageError(f"{spelling}{why}", hint=f"leave {spelling} out")


def at_least(request: Request, name: str, least: int) -> None:
    """Raises `UsageError` for a number that is smaller."""
    number = getattr(request, name)
    if number is not None and number < least:
        spelling = spelled(type(request), name)
        raise UsageError(f"{spelling} {number}: at least {least}", hint=f"leave {spelling} out")


Mistake = tuple[str, str]
"""Options that cannot be meant, or not together, with the reason; and what to do."""


def refuse(mistakes: Iterable[Mistake]) -> None:
    """Raises `UsageError` for the first mistake."""
    for message, hint in mistakes:
        raise UsageError(message, hint=hint)


_SIZE = r"([0-9]*\.?[0-9]+)\s*(?:([kmg])(i?b)?|b)?"


def parse_size(text: str | int, option: str) -> int:
    """Returns bytes from `1500000`, `1.5MB` (of 10⁶) or `2GiB` (of 2³⁰, as `2G`).

    `UsageError` names the option.
    """
    match = re.fullmatch(_SIZE, str(text).strip().lower())
    size = 0
    if match is not None:
        base = 1000 if match[3] == "b" else 1024
        number = float(match[1]) * base ** (1 + "kmg".index(match[2]) if match[2] else 0)
        size = int(number) if number < 1 << 63 else 0
    if size < 1:
        raise UsageError(
            f"{option} {text}: not a number of bytes",
            hint=f"for example {option} 20MB (decimal) or 2GiB (binary)",
        )
    return size


_DURATION = r"([0-9]*\.?[0-9]+)\s*(us|µs|ms|s|min|h)?"
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_seconds(text: str | float, option: str, unit: str) -> float:
    """Returns seconds from `5ms`, `90s` or `10min`; a number alone is in `unit`.

    `UsageError` names the option.
    """
    match = re.fullmatch(_DURATION, str(text).strip())
    seconds = float(match[1]) * _SECONDS[match[2] or unit] if match else math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(
            f"{option} {text}: not a time", hint=f"for example {option} 5ms, 90s or 10min"
        )
    return seconds


def parse_share(text: str | float, option: str) -> float:
    """Returns a share from `99%`, `0.99` or a number; `UsageError` names the option."""
    words = str(text).strip()
    try:
        return float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError:
        raise UsageError(
            f"{option} {text}: not a share", hint=f"for example {option} 99%, or {option} 0.99"
        ) from None


@dataclass(frozen=True, slots=True)
class Panel:
    """Options of a plugin: a section of the help of some commands, keywords of their calls.

    Where the core has a section of the `title`, they stand in that one.
    `options` is a frozen dataclass whose fields are declared with `common.option.option`; a request
    of one of the `calls` hands it on (`Request.asked`). `load` stands for every command that reads
    a model. A help of more than two screens leaves what is `rare` to --help-all.
    """

    name: str
    title: str
    calls: tuple[str, ...]
    options: type[Any]
    rare: bool = False


PANELS = Registry("moexport.options", Panel)
"""All are plugins'."""


def panels_of(request: type[Request]) -> list[Panel]:
    """Returns the panels of a request.

    Raises `PluginError` where two plugins, or one and the core, claim an option.
    """
    offered = PANELS if request.offered else ()  # who offers none needs no plugin
    panels = [panel for panel in offered if not request.offered.isdisjoint(panel.calls)]
    owners = dict.fromkeys(declared(request), "moexport itself")
    for panel in panels:
        for name in declared(panel.options):
            if name in owners:
                option = f"--{name.replace('_', '-')}"
                raise PluginError(
                    f"{option} comes from {owners[name]} and from {_source(panel)}",
                    hint=f"remove one of them; {PLUGINS}=off runs without any plugin",
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


class takes(Generic[P, Options]):  # noqa: N801  a decorator
    """Makes the fields of a request the keywords of a function, which gets them as one record.

    With `export = takes(ExportRequest)(api.export)`, `export(model, "out", k=4)` calls
    `api.export(model, "out", ExportRequest(k=4))`. Type checkers know the keywords from the record,
    `help()` shows them with what they mean. Keywords of plugins are looked up when they are used.
    """

    def __init__(self, request: Callable[P, Options]) -> None:
        self._request = request

    @overload
    def __call__(self, function: Callable[[Options], Result]) -> Callable[P, Result]: ...

    @overload
    def __call__(
        self, function: Callable[[A, Options], Result]
    ) -> Callable[Concatenate[A, P], Result]: ...

    @overload
    def __call__(
        self, function: Callable[[A, B, Options], Result]
    ) -> Callable[Concatenate[A, B, P], Result]: ...

    @overload
    def __call__(
        self, function: Callable[[A, B, C, Options], Result]
    ) -> Callable[Concatenate[A, B, C, P], Result]: ...

    def __call__(self, function: Callable[..., Any]) -> Any:
        """Returns the call with keywords."""
        request: Any = self._request
        signature = inspect.signature(function)
        *positional, record = signature.parameters.values()
        names = {parameter.name for parameter in positional}

        @wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            arguments = {name: named.pop(name) for name in [*named] if name in names}
            return function(*values, **arguments, **{record.name: requested(request, named)})

        keywords = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
            )
            for name, (field, _declared) in declared(request).items()
        ]
        if request.offered:
            keywords.append(inspect.Parameter("of_plugins", inspect.Parameter.VAR_KEYWORD))
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*positional, *keywords]
        )
        call.__doc__ = f"{inspect.getdoc(function)}\n\n{explained(request)}"
        return call


def explained(request: type[Any]) -> str:
    """Returns the options of a request as a docstring lists them."""
    lines = ["Options:"]
    for name, (option_field, said) in declared(request).items():
        default = said.unset if said.unset is not None else option_field.default
        default = "required" if option_field.default is MISSING else default
        lines.append(f"    {name}: {said.help} [{default}]")
    if request.offered:
        lines.append("    of_plugins: Options of plugins, as the help of the command lists them.")
    return "\n".join(lines)


def requested(request: type[Request], named: Mapping[str, Any]) -> Any:
    """Returns a request of the keywords of a call; those of plugins are among them.

    Raises `TypeError` for a keyword that neither the core nor a plugin has.
    """
    known = declared(request)
    own = {name: value for name, value in named.items() if name in known}
    others = {name: value for name, value in named.items() if name not in known}
    made: Any = request(**own)
    for record in _records(request, others):
        made = made.asking(record)
    return made


def _records(request: type[Request], named: dict[str, Any]) -> Iterator[Any]:
    """A record of each panel that has keywords among those named."""
    panels = panels_of(request) if named else []
    for panel in panels:
        names = declared(panel.options).keys() & named.keys()
        if names:
            yield panel.options(**{name: named.pop(name) for name in names})
    if named:
        name = next(iter(named))
        known = [*declared(request), *(n for panel in panels for n in declared(panel.options))]
        raise TypeError(f"{name}: there is no such option; {near_miss(name, known)}{left_out()}")


class CallablePackage(ModuleType):
    """A folder of the package that, called, is the function of the same name in `calls`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function of the package's name."""
        root, _, name = self.__name__.rpartition(".")
        return getattr(import_module(f"{root}.calls"), name)(*args, **kwargs)
