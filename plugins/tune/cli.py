"""The command `tune`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...commands.options import (
    AsJson,
    ModelArgument,
    Verbosity,
    json_text,
    loader,
    output_option,
    typed_command,
)
from ...common.console import show
from ...common.text import count
from ...exporter.requests import LoadRequest
from .calls import tune_as, tune_plan_as
from .request import TuneRequest

if TYPE_CHECKING:
    from .tune import SearchPlan, Tuned


def tune(
    *,
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="Labelled inputs: an .npz, .tar or .parquet shards, a folder of images by class, "
            "package.module:iterable.",
        ),
    ],
    output: Annotated[Path, output_option("BUNDLE", "The folder to write.")],
    reading: LoadRequest,
    request: TuneRequest,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the size of the search, and do not search.")
    ] = False,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Find the fastest bundle that keeps an accuracy.

    Searches on one half of the data and confirms the result on the other. After an interruption,
    repeat the command: it continues where it stopped.
    """
    place = Path(request.report or output.with_name(f"{output.name}-report"))
    with verbosity.console() as console:
        images = Path(data).is_dir() or request.pixels is not None
        load = loader(reading, model, console, None if images else data)
        request = replace(request, report=place, command=typed_command(), progress=console)
        if dry_run:
            planned = tune_plan_as(load, data, request)
            show(json_text(asdict(planned)) if as_json else plan_text(planned))
            return
        tuned = tune_as(load, data, output, request)
    from .findings import text

    show(json_text(_as_json(tuned, place)) if as_json else text(tuned, place, request.command))


def plan_text(planned: SearchPlan) -> str:
    """Returns what `tune --dry-run` says."""
    confirming = "the rest" if planned.confirming is None else f"{planned.confirming} inputs"
    return (
        f"{count(planned.models)} models in all: {planned.choices} choices of single layers, timed "
        f"alone in {planned.forms} sizes and precisions, and up to {planned.graphs} whole graphs\n"
        f"{planned.searching} inputs serve the search, {confirming} confirm\n"
        f"at most about {planned.seconds:.0f} s; nothing was written (--dry-run)"
    )


def _as_json(tuned: Tuned, report: Path) -> dict[str, Any]:
    return {
        "bundle": str(tuned.bundle.path),
        "report": str(report / "report.html"),
        "contract": tuned.bundle.manifest.contract,
        "layers": [asdict(layer) for layer in tuned.bundle.manifest.layers],
    }
