"""The command `run`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..common.console import show
from ..exporter.requests import RunRequest
from ..graphs.targets import compiled_names, runtime_names
from .options import BundleArgument, json_text, options_of, output_option
from .printing import Printing

if TYPE_CHECKING:
    Runtime = str
else:
    Runtime = Literal[*runtime_names(), *compiled_names()]  # includes runtimes of plugins


OPTIONS = options_of(
    RunRequest,
    {
        "Options": ("k", "graph", "batch_size"),
        "Runtime": (
            *("threads", "engine", "provider", "cuda_graphs", "trust_engine", "host_weights"),
        ),
    },
    batch_size={"min": 1},
    threads={"min": 1},
    engine={"kind": Runtime},
)


def run(
    *,
    bundle: BundleArgument,
    input_file: Annotated[
        Path, typer.Option("--input", "-i", metavar="X.NPZ", help="An .npz with the inputs.")
    ],
    output: Annotated[Path, output_option("Y.NPZ", "The .npz to write.")],
    request: Annotated[RunRequest, OPTIONS],
    printing: Printing,
) -> None:
    """Run a bundle on the inputs in an .npz file."""
    from ..exporter.bundle.run import run as run_bundle

    with printing.console() as console:
        written = run_bundle(bundle, input_file, output, replace(request, progress=console))
    if printing.as_json:
        facts = {name: fact for name, fact in asdict(written).items() if fact != {}}
        show(json_text({"output": str(output), **facts}))
    else:
        others = "".join(f", {name} {shape}" for name, shape in written.further.items())
        console.note(f"{output}: output of shape {written.shape}{others}")
    if written.not_finite:
        console.note(
            f"{written.not_finite} values of the output are NaN or infinite: check the inputs; "
            "a 16-bit graph can overflow outside the calibrated range"
        )
