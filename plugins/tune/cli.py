"""The command `tune`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...commands.options import (
    ModelArgument,
    command_line,
    json_text,
    options_of,
    output_option,
    parse_code,
    parse_data,
    parse_path,
)
from ...commands.printing import Printing
from ...commands.reading import ReadingOptions, loader
from ...common.console import show
from ...common.locations import is_missing
from ...common.text import count
from ...exporter.requests import SIZES
from .calls import tune as search
from .calls import tune_plan
from .request import RecipeOptions, TuneRequest, no_such_recipe

if TYPE_CHECKING:
    from .tune import SearchPlan


OPTIONS = options_of(
    TuneRequest,
    {
        "Requirements": ("keep", "max_latency", "max_bytes", "scenario", "metric"),
        "Search space": ("target", "batch", "tokens", "precision", "all_experts"),
        "Search": ("time", "threads", "pixels", "report"),
    },
    keep={"metavar": "SHARE"},
    max_latency={"metavar": "TIME"},
    max_bytes={"metavar": "BYTES"},
    metric={"metavar": "<text>", "kind": str, "parser": parse_code},
    batch={"metavar": SIZES},
    tokens={"metavar": SIZES},
    time={"metavar": "TIME"},
    threads={"min": 1},
    report={"metavar": "DIR"},
)


def tune(
    *,
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            parser=parse_data,
            help="Labelled inputs: an .npz, .tar or .parquet shards, a folder of images by class, "
            "or package.module:iterable.",
        ),
    ],
    output: Annotated[Path, output_option("BUNDLE", "The folder to write.")],
    reading: ReadingOptions,
    request: Annotated[TuneRequest, OPTIONS],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the size of the search, without searching.")
    ] = False,
    printing: Printing,
) -> None:
    """Find the fastest bundle that keeps an accuracy.

    Searches on one half of the data and confirms the result on the other. After an interruption,
    repeat the command: it continues where it stopped.
    """
    report_folder = Path(request.report or output.with_name(f"{output.name}-report"))
    with printing.console() as console:
        images = Path(data).is_dir() or request.pixels is not None
        load = loader(reading, model, console, None if images else data)
        request = replace(request, report=report_folder, command=command_line(), progress=console)
        if dry_run:
            planned = tune_plan(load, data, request)
            show(json_text(asdict(planned)) if printing.as_json else plan_text(planned))
            return
        tuned = search(load, data, output, request)
    from .findings import text

    if not printing.as_json:
        show(text(tuned))
        return
    manifest = tuned.bundle.manifest
    content = {
        "bundle": str(tuned.bundle.path),
        "report": str(report_folder / "report.html"),
        "contract": manifest.contract,
        "layers": [asdict(layer) for layer in manifest.layers],
    }
    show(json_text(content))


def plan_text(planned: SearchPlan) -> str:
    confirming = "the rest" if planned.confirming is None else f"{planned.confirming} inputs"
    return (
        f"{count(planned.models)} possible models; the search tries {planned.choices} choices for "
        f"single layers, times {planned.forms} of their sizes and precisions alone, and measures "
        f"up to {planned.graphs} whole graphs\n"
        f"{planned.searching} inputs for the search, {confirming} to confirm\n"
        f"estimated time: at most {planned.seconds:.0f} s; nothing was written (--dry-run)"
    )


def typed_recipe(text: str | Path) -> Path:
    """Parses the path of a recipe; raises `UsageError` if the file does not exist."""
    path = parse_path(text)
    if is_missing(text):
        raise no_such_recipe(path, "No such file or directory")
    return path


recipe_options = options_of(
    RecipeOptions, recipe={"metavar": "RECIPE.YAML", "kind": Path, "parser": typed_recipe}
)
