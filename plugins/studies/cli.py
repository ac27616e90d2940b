"""The command `specialise`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ...commands.options import AsJson, Verbosity, loader, output_option, typed_source
from ...common.console import show
from ...common.libraries import check_pytorch
from ...exporter.requests import LoadRequest
from .calls import specialise_as
from .request import SpecialiseRequest


def specialise(
    *,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…", parser=typed_source, help="A checkpoint, or several to compare."
        ),
    ],
    data: Annotated[
        Path, typer.Option(metavar="X.NPZ", help="An .npz with the arrays input and label.")
    ],
    output: Annotated[Path | None, output_option("DIR", "The folder for JSON and figure.")] = None,
    reading: LoadRequest,
    request: SpecialiseRequest,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Show which classes each expert serves.

    Removes each expert in turn and measures the accuracy of every class. Compares subgroups, and
    several models.
    """
    check_pytorch("specialise")
    from ...common.writing import check_folder
    from .specialisation_report import (
        several_json,
        several_text,
        text,
        to_json,
        write,
        write_several,
    )

    if output is not None:
        check_folder(output)
    findings = []
    with verbosity.console() as console:
        for model in models:
            loaded = loader(reading, model, console, data)()
            findings.append(specialise_as(loaded, data, replace(request, progress=console)))
    (first, *others) = findings
    if output is not None:
        written = write_several(findings, output) if others else write(first, output)
    if as_json:
        show(several_json(findings) if others else to_json(first), end="")
        return
    show(several_text(findings) if others else text(first))
    if output is not None:
        show(f"\nwritten: {', '.join(map(str, written))}")
