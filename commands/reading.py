"""The options of commands that read a model, and a function that loads it on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..common.console import Console
from ..common.libraries import check_pytorch
from ..exporter.requests import LoadRequest
from .options import READING, option_for, typed_config, typed_family, typed_setting

if TYPE_CHECKING:
    from ..exporter.model import Model

FamilyOption = Annotated[
    str | None,
    option_for(LoadRequest, "family", READING, metavar="<text>", parser=typed_family),
]

ConfigOption = Annotated[
    Path | None, option_for(LoadRequest, "config", READING, metavar="FILE", parser=typed_config)
]

SetOption = Annotated[
    list[str] | None,
    option_for(LoadRequest, "sets", READING, metavar="KEY=VALUE", parser=typed_setting),
]


def loader(
    request: LoadRequest, source: str, console: Console, data: str | Path | None = None
) -> Callable[[], Model]:
    """Returns a function that loads the model of a command.

    The network of a factory is checked on the first inputs of `data`.
    """

    def read() -> Model:
        check_pytorch("reading a model")
        from ..exporter.checkpoints.load import load

        return load(source, replace(request, example=data, progress=console))

    return read
