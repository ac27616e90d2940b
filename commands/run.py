"""The command `run`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from .. import api
from ..common.console import show
from ..exporter.requests import RunRequest
from .options import AsJson, BundleArgument, Verbosity, json_text, output_option


def run(
    *,
    bundle: BundleArgument,
    input_file: Annotated[
        Path, typer.Option("--input", "-i", metavar="X.NPZ", help="An .npz with the inputs.")
    ],
    output: Annotated[Path, output_option("Y.NPZ", "The .npz to write.")],
    request: RunRequest,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Run a bundle on the inputs in an .npz file."""
    with verbosity.console() as console:
        written = api.run(bundle, input_file, output, replace(request, progress=console))
    if as_json:
        facts = {name: fact for name, fact in asdict(written).items() if fact != {}}
        show(json_text({"output": str(output), **facts}))
    else:
        further = "".join(f", {name} {shape}" for name, shape in written.further.items())
        console.note(f"{output}: output of shape {written.shape}{further}")
    if written.not_finite:
        console.note(
            f"{written.not_finite} values of the output are NaN or infinite: look at the inputs; "
            "a 16-bit graph overflows beyond what was calibrated"
        )
