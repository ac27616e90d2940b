"""The user's own code, named `package.module:attribute`: a factory, an adapter or a feed."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..common.locations import path_of
from ..errors import MoexportError, UsageError

if TYPE_CHECKING:
    from torch import nn

_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_][\w.]*")


def names_code(text: str) -> bool:
    """Whether a text has the form `package.module:attribute` and is not a file."""
    return _NAME.fullmatch(text) is not None and not path_of(text).exists()


def no_module(source: str, name: str) -> UsageError:
    """Returns the error for code whose module is missing."""
    return UsageError(
        f"{source}: no module named {name}",
        hint="run from the folder that contains it, or install its package",
    )


def module_of(name: str) -> ModuleType:
    """Imports a module by name, also from the current directory; raises its exceptions."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name.partition(":")[0])


def attribute_of(module: ModuleType, name: str) -> Any:
    """Returns an attribute of a module by its dotted name; AttributeError if it is missing."""
    value: Any = module
    for part in name.partition(":")[2].split("."):
        value = getattr(value, part)
    return value


def callable_named(source: str, what: str) -> Callable[..., Any]:
    """Returns the callable that `source` names; import errors become UsageError.

    `what` describes the callable in messages: `a factory`.
    """
    if not names_code(source):
        raise UsageError(f"{source}: not the name of {what}", hint="package.module:function")
    name, _, attribute = source.partition(":")
    failed = f"{source}: importing {name} failed"
    with user_code(failed):
        try:
            module = module_of(source)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                raise no_module(source, error.name) from error
            raise UsageError(f"{failed}: {error}", hint="install what it needs") from error
    try:
        value = attribute_of(module, source)
    except AttributeError as error:
        raise UsageError(
            f"{source}: {name} has no {attribute}", hint="check the name after the colon"
        ) from error
    if not callable(value):
        raise UsageError(f"{source}: {attribute} is a {type(value).__name__}, not callable")
    return value  # type: ignore[no-any-return]


@contextmanager
def user_code(what: str, hint: str | None = None) -> Iterator[None]:
    """Within the context, failures of the user's code become UsageError.

    `what` names the code in the message: `net:build()`. moexport's own errors pass unchanged.
    """
    try:
        yield
    except MoexportError:
        raise
    except Exception as error:
        raise UsageError(f"{what}: {type(error).__name__}: {error}", hint=hint) from error


def build_network(source: str, what: str, arguments: Mapping[str, Any], hint: str) -> nn.Module:
    """Returns the module that a function or class creates; UsageError for other results."""
    from torch import nn

    function = callable_named(source, what)
    listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    with user_code(f"{source}({listed}) failed", hint):
        module = function(**arguments)
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"{source} returned a {type(module).__name__}, not a torch.nn.Module",
            hint=f"name {what} that returns one",
        )
    return module
