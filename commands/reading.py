"""The options of commands that read a model, and a function that loads it on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from ..common.console import Console
from ..common.libraries import check_pytorch
from ..exporter.requests import LoadRequest
from .options import READING, options_of, parse_config, parse_family, parse_setting

if TYPE_CHECKING:
    from ..data.batches import Feed
    from ..exporter.model import Model

LOADING = {
    "family": {"metavar": "<text>", "parser": parse_family},
    "config": {"metavar": "FILE", "parser": parse_config},
    "sets": {"metavar": "KEY=VALUE", "parser": parse_setting},
}
"""Typer's settings for the options of `LoadRequest`."""

ReadingOptions = Annotated[LoadRequest, options_of(LoadRequest, {READING: [*LOADING]}, **LOADING)]


def loader(
    request: LoadRequest, source: str, console: Console, data: Feed | None = None
) -> Callable[[], Model]:
    """Returns a function that loads the model of a command.

    A network that a factory returns is checked on the first inputs of `data`.
    """

    def read() -> Model:
        check_pytorch("reading a model")
        from ..exporter.checkpoints.load import load

        return load(source, replace(request, example=data, progress=console))

    return read
