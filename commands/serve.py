"""`triton`: a bundle for a server; `cli.py` adds it to the program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import api
from ..common.console import show
from ..common.text import lines
from .options import AsJson, CallOptions, Verbosity, json_text, output_option, typed_path

if TYPE_CHECKING:
    from ..exporter.triton.repository import ServedModel

SERVING = CallOptions(
    api.triton,
    "name backend device k version instances threads delay_us",
    headings={"name": "Models", "instances": "Speed"},
)
"""What is served, and how."""


def triton(
    *,
    bundles: Annotated[
        list[Path],
        typer.Argument(metavar="BUNDLE…", parser=typed_path, help="Folders that export wrote."),
    ],
    output: Annotated[Path, output_option("REPOSITORY", "The model repository to write.")],
    given: Annotated[dict[str, Any], SERVING],
    force: Annotated[bool, typer.Option("--force", help="Replace a model that is there.")] = False,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Write a model repository for Triton Inference Server.

    Several bundles of one network with different k are also combined into an ensemble.
    """
    with verbosity.console() as console:
        models = api.triton(bundles, output, **given, force=force, progress=console)
    if as_json:
        show(json_text([each.as_json() for each in models]))
        return
    for each in models:
        show(served_text(output, each))
        for note in each.notes:
            console.note(note)


def served_text(repository: Path, model: ServedModel) -> str:
    """One line about a model of a repository."""
    told = model.as_json()
    batch = told["max_batch_size"]
    batches = f"batches to {batch}" if batch else "not batched by Triton"
    inputs, outputs = ", ".join(told["inputs"]), ", ".join(told["outputs"])
    return lines(f"{repository / model.name}: {told['backend']}, {batches}, {inputs} → {outputs}")
