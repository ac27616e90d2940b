"""The door for steps of an export: options of plugins, and files beside a bundle's graphs."""

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
    from ..requests import ExportRequest


class Export(Protocol):
    """What a step sees of an export.

    `writes_text`: its graphs write texts, a token at a time.
    """

    @property
    def model(self) -> Model: ...
    @property
    def options(self) -> ExportOptions: ...
    @property
    def writes_text(self) -> bool: ...


def _refuses_nothing(request: ExportRequest) -> None:
    del request


def _unchanged(options: ExportOptions, request: ExportRequest) -> ExportOptions:
    del request
    return options


def _no_files(export: Export, directory: Path, manifest: Manifest) -> Manifest:
    del export, directory
    return manifest


@dataclass(frozen=True, slots=True)
class Step:
    """What a plugin does in an export.

    Its options ask for it (`asked`), or a model brings it along (`Host.steps`). `refuses` raises
    `UsageError` for options that are given beside the plugin's and have no use there, before any of
    them is parsed. `change` returns the options of the export with what the plugin's own options
    stand for. `check` yields what cannot be meant: of the options alone, and again when the model
    is loaded, both before any work is done. `finish` writes files into the folder of a bundle that
    is otherwise complete, and returns the manifest that lists them; the weights are written so many
    times again as there are `copies`. `contents` is what the bundle's page says of files, by their
    names.
    """

    name: str
    asked: Callable[[ExportOptions], bool] = lambda _: False
    refuses: Callable[[ExportRequest], None] = _refuses_nothing
    change: Callable[[ExportOptions, ExportRequest], ExportOptions] = _unchanged
    check: Callable[[ExportOptions, Model | None], Iterable[Mistake]] = lambda _options, _model: ()
    finish: Callable[[Export, Path, Manifest], Manifest] = _no_files
    copies: int = 0
    contents: Mapping[str, str] = field(default_factory=dict)


STEPS = Registry("moexport.steps", Step)
"""All are plugins'."""


def asked(options: ExportOptions) -> list[Step]:
    """Returns the steps that the options of plugins ask for."""
    return [step for step in STEPS if step.asked(options)] if options.further else []
