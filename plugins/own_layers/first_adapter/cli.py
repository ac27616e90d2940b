"""The command `adapt`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ....commands.options import Verbosity, output_option, typed_source
from ....common.console import show
from ....errors import CheckError
from .calls import adapt_as
from .request import AdaptRequest


def adapt(
    *,
    layer: Annotated[
        str,
        typer.Argument(
            metavar="LAYER", parser=typed_source, help="The layer: package.module:Class."
        ),
    ],
    request: AdaptRequest,
    output: Annotated[Path | None, output_option("FILE.py", "The file of the adapter.")] = None,
    verbosity: Verbosity,
) -> None:
    """Write a first adapter for a layer of your own, compared with what the layer gives."""
    from ....common.writing import write_text

    with verbosity.console() as console:
        adapter = adapt_as(layer, replace(request, progress=console))
    if output is None:
        show(adapter.code)
    else:
        write_text(adapter.code, output)
    for note in adapter.notes:
        console.note(note)
    if adapter.missing:
        raise CheckError(
            f"{layer} was not recognised: {'; '.join(adapter.missing)}",
            hint="complete the adapter's forward: docs/own-layer.md",
        )
