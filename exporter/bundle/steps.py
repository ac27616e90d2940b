"""The door for what adds files to a bundle beside its graphs, such as those that write text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...common.option import Mistake
from ...common.registry import Registry
from ...errors import PluginError
from ...graphs.precision.types import PRECISIONS
from ...graphs.targets import Precision
from .manifest import Manifest

if TYPE_CHECKING:
    from ..model import Model


class Export(Protocol):
    """What a step sees of an export.

    `writes_text`: its graphs write texts, a token at a time.
    """

    @property
    def model(self) -> Model: ...
    @property
    def writes_text(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Step:
    """What a model brings along for its bundles (`Host.steps`), or `--layout` asks for by name.

    `finish` writes files into the folder of a bundle that is otherwise complete, and returns the
    manifest that lists them. `check` yields why it cannot, before any work is done. It serves
    `precisions`, and writes the weights so many times again as there are `copies`. `contents` is
    what the bundle's page says of files, by their names.
    """

    name: str
    finish: Callable[[Export, Path, Manifest], Manifest]
    check: Callable[[Export], Iterable[Mistake]] = lambda _: ()
    precisions: tuple[Precision, ...] = PRECISIONS
    copies: int = 0
    contents: Mapping[str, str] = field(default_factory=dict)


STEPS = Registry("moexport.steps", Step)
"""All are plugins'."""


def layout_step(layout: str) -> Step:
    """Returns the step of `--layout`; raises `PluginError` where its plugin is not there."""
    try:
        return STEPS[layout]
    except PluginError as error:
        raise PluginError(
            f"--layout {layout}: moexport's plugin for texts writes it, and is not there: "
            f"{error.message}",
            hint=error.hint,
        ) from error
