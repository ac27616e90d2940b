"""The registry of export steps: options of plugins, and files next to a bundle's graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...common.option import Mistake
from ...common.registry import Registry
from .manifest import Manifest

if TYPE_CHECKING:
    from ..model import Model
    from ..options import ExportOptions
    from ..requests import LoadRequest


class Export(Protocol):
    """An export as steps see it.

    `writes_text` is whether its graphs generate text, token by token.
    """

    @property
    def model(self) -> Model: ...
    @property
    def options(self) -> ExportOptions: ...
    @property
    def writes_text(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Step:
    """A plugin's part in an export.

    Its options request it (`requested`), or a model includes it (`Host.steps`). `refuses` raises
    `UsageError` for options that have no effect together with the plugin's. `change` returns the
    export's options after applying the plugin's own. `check` yields mistakes in the options, before
    the model is loaded and again afterwards. `finish` writes files into the folder of an otherwise
    complete bundle, and returns the manifest that lists them; `copies` is the number of additional
    copies of the weights. `contents` describes files on the bundle's page, by name, and `page`
    yields further paragraphs. `reading` returns how a command reads the model of a source, with
    settings from the plugin's options.
    """

    name: str
    requested: Callable[[ExportOptions], bool] = lambda _: False
    refuses: Callable[[ExportOptions], None] = lambda _: None
    change: Callable[[ExportOptions], ExportOptions] = lambda options: options
    check: Callable[[ExportOptions, Model | None], Iterable[Mistake]] = lambda _options, _model: ()
    finish: Callable[[Export, Path, Manifest], Manifest] = lambda _job, _folder, manifest: manifest
    copies: int = 0
    page: Callable[[Manifest], Iterable[str]] = lambda _: ()
    reading: Callable[[LoadRequest, ExportOptions, str], LoadRequest] = lambda reading, *_: reading
    contents: Mapping[str, str] = field(default_factory=dict)


STEPS = Registry("moexport.steps", Step)
"""All steps come from plugins."""


def requested_steps(options: ExportOptions) -> list[Step]:
    """Returns the steps that options of plugins request."""
    return [step for step in STEPS if step.requested(options)] if options.further else []


def read_as(reading: LoadRequest, request: ExportOptions, source: str) -> LoadRequest:
    """Returns how an export's model is read, with the settings from its steps."""
    for step in STEPS if request.further else ():
        reading = step.reading(reading, request, source)
    return reading
