"""The command `triton`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...commands.options import json_text, options_of, output_option, parse_path
from ...commands.printing import Printing
from ...common.console import show
from ...common.text import lines
from .calls import triton as write_models
from .request import TritonRequest

if TYPE_CHECKING:
    from .repository import ServedModel


OPTIONS = options_of(
    TritonRequest,
    {
        "Models": ("name", "backend", "device", "k", "version"),
        "Speed": ("instances", "threads", "delay_us"),
    },
)


def triton(
    *,
    bundles: Annotated[
        list[Path],
        typer.Argument(metavar="BUNDLE…", parser=parse_path, help="Folders that export wrote."),
    ],
    output: Annotated[Path, output_option("REPOSITORY", "The model repository to write.")],
    request: Annotated[TritonRequest, OPTIONS],
    printing: Printing,
) -> None:
    """Write a model repository for Triton Inference Server.

    Several bundles of one network with different k are also combined into an ensemble.
    """
    with printing.console() as console:
        models = write_models(bundles, output, request)
    if printing.as_json:
        show(json_text([model.as_json() for model in models]))
        return
    for model in models:
        show(model_text(output, model))
        for note in model.notes:
            console.note(note)


def model_text(repository: Path, model: ServedModel) -> str:
    """Describes a model of a repository in one line."""
    fields = model.as_json()
    batch = fields["max_batch_size"]
    batches = f"batches of up to {batch}" if batch else "not batched by Triton"
    inputs, outputs = ", ".join(fields["inputs"]), ", ".join(fields["outputs"])
    return lines(f"{repository / model.name}: {fields['backend']}, {batches}, {inputs} → {outputs}")
