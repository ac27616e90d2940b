"""Arguments and options that several commands share, and their parsers."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_origin

import typer

from ..common.libraries import check_pytorch
from ..common.messages.types import type_of, union_parts
from ..common.option import changed, declared, flags, refuse_changed, shell_options
from ..errors import FeedError, UsageError

T = TypeVar("T")


def parse_path(text: str | Path) -> Path:
    """Parses a path; refuses an empty one, which would mean `.`."""
    if text == "":
        raise typer.BadParameter("it is empty: name a file or a folder (. is the current folder)")
    from ..common.locations import path_of, url_of

    return Path(text) if url_of(text) is not None else path_of(text)


def parse_output(text: str | Path) -> Path:
    """Parses the path of a result; refuses a URL, which cannot be written."""
    from ..common.locations import url_of

    path = parse_path(text)
    if url_of(text) is not None:
        raise typer.BadParameter(f"{text} is a URL: write to a local file, then copy it there")
    return path


def parse_source(text: str) -> str:
    """Parses MODEL; raises an error if it is empty or does not exist."""
    if not text:
        raise UsageError("MODEL is empty", hint="name a checkpoint or package.module:factory")
    from ..common.locations import is_missing_checkpoint, no_such_checkpoint
    from ..data.typed_code import check_code
    from ..data.user_code import names_code

    if names_code(text):
        check_code(text)
        return text
    if is_missing_checkpoint(text):
        raise no_such_checkpoint(Path(text))
    return str(parse_path(text)) if text.startswith("file:") else text


OPTIONAL = "[="
"""The start of the metavar of an option with an optional value: `[=scores]`, `[=this|that]`."""


def with_values(args: Sequence[str], optional: Mapping[str, str]) -> list[str]:
    """Returns the arguments with an empty value after each option that was given without one.

    `optional` has the metavars of such options by spelling. The next argument is the value only if
    the metavar lists it.
    """
    result: list[str] = []
    words = iter(args)
    for word in words:
        if word == "--":
            return [*result, word, *words]
        name, _, value = (result[-1] if result else "").partition("=")
        if name in optional and not value and word in optional[name][2:-1].split("|"):
            result[-1] = f"{name}={word}"
        else:
            result.append(f"{word}=" if word in optional else word)
    return result


def parse_switch(text: str | bool) -> str | bool:
    """Parses an option with an optional value: True if it has none."""
    return text or text == ""


def parse_feed(text: str) -> str:
    """Parses the path of inputs, or the code that yields them; raises an error if missing."""
    from ..common.locations import no_such_feed

    if _is_missing(text):
        raise no_such_feed(text)
    return text


def parse_data(text: str) -> str:
    """Parses the path of labelled inputs, or their code; raises an error if missing."""
    if _is_missing(text):
        raise FeedError(
            f"{text}: no such file",
            hint="give an .npz file with inputs and labels; for a language model, a text file, "
            "an .npz with 'input_ids', or an .npy of token ids",
        )
    return text


def _is_missing(text: str) -> bool:
    """Returns whether inputs are missing; raises an error if they name code that is not there."""
    from ..common.locations import url_of
    from ..data.typed_code import check_code
    from ..data.user_code import names_code

    if names_code(text):
        check_code(text)
        return False
    if url_of(text) is not None:
        return False
    from ..data.feeds import has_inputs

    return not has_inputs(text)


def parse_config(text: str | Path) -> Path:
    """Parses the path of a settings file; raises `UsageError` if it cannot be read."""
    from ..exporter.checkpoints.settings import read_config

    path = parse_path(text)
    read_config(path)
    return path


def parse_family(text: str) -> str:
    """Parses the name of a family; raises `FamilyError` if there is no such family."""
    from ..exporter.families import check_family

    check_family(text)
    return text


def parse_setting(text: str) -> str:
    """Parses a setting; raises `UsageError` if it is not `KEY=VALUE`."""
    from ..exporter.checkpoints.settings import split_setting

    split_setting(text)
    return text


def parse_table(text: str | Path) -> Path:
    """Parses the path of a table of INT8 ranges; raises `CalibrationError` if it is invalid."""
    from ..common.locations import url_of

    path = parse_path(text)
    if url_of(text) is None:
        check_pytorch("calibration")
        from ..calibration.table import CalibrationTable

        CalibrationTable.read(path)
    return path


def parse_weights(text: str | Path) -> Path:
    """Parses the path of weights; raises `CheckpointError` if they do not exist."""
    from ..common.locations import is_missing_checkpoint, no_such_checkpoint

    path = parse_path(text)
    if is_missing_checkpoint(text):
        raise no_such_checkpoint(path)
    return path


def parse_code(text: str) -> str:
    """Parses the name of code; raises `UsageError` if it does not exist."""
    from ..data.typed_code import check_code
    from ..data.user_code import names_code

    if names_code(text):  # the caller reports any other text
        check_code(text)
    return text


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        parser=parse_source,
        help="A checkpoint file or folder, its URL, or package.module:factory.",
    ),
]

BundleArgument = Annotated[
    Path, typer.Argument(metavar="BUNDLE", parser=parse_path, help="A folder that export wrote.")
]


def command_line() -> str:
    """Returns the command line, quoted for a shell."""
    return shlex.join(["moexport", *sys.argv[1:]])


def json_text(content: Any) -> str:
    """Returns plain data as indented JSON."""
    import json

    return json.dumps(content, indent=2, ensure_ascii=False)


def output_option(metavar: str, text: str) -> Any:
    """Declares `--output`, for every command that writes."""
    return typer.Option("--output", "-o", metavar=metavar, parser=parse_output, help=text)


def option_for(request: type[Any], name: str, section: str | None = None, **settings: Any) -> Any:
    """Declares the option of a request's field, with its spelling and help text.

    `section` is the heading in the help; `settings` are other arguments for Typer
    (`metavar`, `min`, `parser`).
    """
    names = flags(request, name)
    if names[-1].startswith("--no-"):  # both sides of a switch
        names = ["/".join(names)]
    text = declared(request)[name][1].help_with_default
    return typer.Option(*names, help=text, rich_help_panel=section, **settings)


def options_of(
    request: type[T],
    sections: Mapping[str, Sequence[str]] | None = None,
    **settings: Mapping[str, Any],
) -> Callable[..., T]:
    """Returns a function for Typer that takes a record's options and returns the record.

    `sections` has the names of the options under each heading of the help; the others follow.
    `settings` has further arguments of `option_for` by option, and a `kind` if the field does not
    determine it.
    """
    headings: dict[str, str | None] = {
        name: heading for heading, names in (sections or {}).items() for name in names
    }
    headings |= {name: None for name in shell_options(request) if name not in headings}

    def record(**typed: Any) -> T:
        return request(**{name: value for name, value in typed.items() if value is not None})

    untyped: Any = record
    untyped.__name__ = request.__name__
    untyped.__signature__ = inspect.Signature(
        [
            _parameter(request, name, heading, **settings.get(name, {}))
            for name, heading in headings.items()
        ]
    )
    return record


def _parameter(
    request: type[Any], name: str, section: str | None, kind: Any = None, **settings: Any
) -> inspect.Parameter:
    """Returns the parameter that declares an option to Typer."""
    field, declaration = declared(request)[name]
    kind = kind or _shell_type(type_of(request, name), is_path=declaration.is_path)
    if kind is Path:
        settings.setdefault("parser", parse_path)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if field.default == () else field.default,
        annotation=Annotated[kind, option_for(request, name, section, **settings)],
    )


def _shell_type(kind: Any, *, is_path: bool) -> Any:
    """Returns the type of an option in a shell: text if the field accepts text and other types."""
    parts = union_parts(kind)
    if is_path or {str, Path} <= {*parts} <= {str, Path, NoneType}:
        return Path
    for part in (str, bool, int, float):
        if part in parts:
            return part
    first = parts[0]
    return first if get_origin(first) is Literal else list[str]


READING = "Reading MODEL"
"""The help section of the options of `LoadRequest`."""


def refuse_idle(*records: Any, why: str, but: Sequence[str] = ()) -> None:
    """Raises `UsageError` if an option of the records was given, except those in `but`.

    The option would have no effect; `why` says why.
    """
    for record in records:
        for options in (record, *record.further):
            refuse_changed(options, {*changed(options)} - {*but}, f": {why}")
