"""The command `adapt`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ....commands.options import options_of, output_option, parse_setting, parse_source
from ....commands.printing import Messages
from ....common.console import show
from ....errors import CheckError, OutputError
from ....exporter.requests import SIZES
from .calls import adapt as first_adapter
from .request import AdaptRequest

OPTIONS = options_of(
    AdaptRequest,
    sets={"metavar": "KEY=VALUE", "parser": parse_setting},
    batch={"metavar": SIZES},
    tokens={"metavar": SIZES},
    time={"metavar": "TIME"},
)


def adapt(
    *,
    layer: Annotated[
        str,
        typer.Argument(
            metavar="LAYER", parser=parse_source, help="The layer: package.module:Class."
        ),
    ],
    request: Annotated[AdaptRequest, OPTIONS],
    output: Annotated[Path | None, output_option("FILE.py", "The adapter's file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    messages: Messages,
) -> None:
    """Write a first adapter for a layer of your own, checked against the layer's outputs."""
    from ....common.writing import check_file, write_text

    if output is not None:
        check_file(output)
        if output.exists() and not force:
            raise OutputError(f"{output} already exists", hint="--force replaces it")
    with messages.console() as console:
        adapter = first_adapter(layer, replace(request, progress=console))
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
    if output is not None:
        show(f"{output}: the layer was recognised; pass --adapter {output.stem}:adapt")
