"""Groups of options: a command takes frozen dataclasses, and Typer sees their fields.

`…Flags` hold options as they were typed, the exporter's `…Options` as they were parsed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command as Typer wants it: each parameter that is a dataclass becomes its fields.

    A field is declared as a parameter would be, `Annotated[int, typer.Option(…)] = 1`, in the order
    of the help. So an option stands in one place, whatever number of commands have it.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            parameters += _fields(groups[name])
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=kind, annotation=hints[name]))

    @wraps(command)
    def flat(**given: Any) -> None:
        whole = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **whole)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return flat


def _fields(group: Any) -> list[inspect.Parameter]:
    """The parameters that make up a group."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
