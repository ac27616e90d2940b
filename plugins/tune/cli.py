"""The command `tune`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ...commands.options import (
    AsJson,
    ModelArgument,
    Quiet,
    Verbose,
    json_text,
    option_for,
    output_option,
    typed_code,
    typed_command,
    typed_data,
    typed_path,
)
from ...commands.panels import further
from ...commands.reading import ConfigOption, FamilyOption, SetOption, loader
from ...common.console import Console, show
from ...common.locations import is_missing
from ...common.text import count
from ...exporter.requests import SIZES, LoadRequest
from .calls import tune as search
from .calls import tune_plan
from .request import RecipeOptions, TuneRequest, no_such_recipe

if TYPE_CHECKING:
    from .tune import SearchPlan


def tune(
    context: typer.Context,
    *,
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            parser=typed_data,
            help="Labelled inputs: an .npz, .tar or .parquet shards, a folder of images by class, "
            "package.module:iterable.",
        ),
    ],
    output: Annotated[Path, output_option("BUNDLE", "The folder to write.")],
    family: FamilyOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    keep: Annotated[
        str | None, option_for(TuneRequest, "keep", "Requirements", metavar="SHARE")
    ] = None,
    max_latency: Annotated[
        str | None, option_for(TuneRequest, "max_latency", "Requirements", metavar="TIME")
    ] = None,
    max_bytes: Annotated[
        str | None, option_for(TuneRequest, "max_bytes", "Requirements", metavar="BYTES")
    ] = None,
    scenario: Annotated[
        Literal["server"] | None, option_for(TuneRequest, "scenario", "Requirements")
    ] = None,
    metric: Annotated[
        str | None,
        option_for(TuneRequest, "metric", "Requirements", metavar="<text>", parser=typed_code),
    ] = None,
    target: Annotated[str, option_for(TuneRequest, "target", "Search space")] = "ort-cpu",
    batch: Annotated[
        str, option_for(TuneRequest, "batch", "Search space", metavar=SIZES)
    ] = "1:1:32",
    tokens: Annotated[
        str, option_for(TuneRequest, "tokens", "Search space", metavar=SIZES)
    ] = "1:196:1024",
    precision: Annotated[str | None, option_for(TuneRequest, "precision", "Search space")] = None,
    all_experts: Annotated[bool, option_for(TuneRequest, "all_experts", "Search space")] = False,
    time: Annotated[str | None, option_for(TuneRequest, "time", "Search", metavar="TIME")] = None,
    threads: Annotated[int | None, option_for(TuneRequest, "threads", "Search", min=1)] = None,
    pixels: Annotated[str | None, option_for(TuneRequest, "pixels", "Search")] = None,
    report: Annotated[
        Path | None, option_for(TuneRequest, "report", "Search", metavar="DIR", parser=typed_path)
    ] = None,
    force: Annotated[bool, option_for(TuneRequest, "force", "Options")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the size of the search without searching.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Find the fastest bundle that keeps an accuracy.

    Searches on one half of the data and confirms the result on the other. After an interruption,
    repeat the command: it continues where it stopped.
    """
    place = Path(report or output.with_name(f"{output.name}-report"))
    reading = LoadRequest(
        family=family, config=config, sets=sets or (), further=further(context, LoadRequest)
    )
    with Console(verbose=verbose, quiet=quiet) as console:
        images = Path(data).is_dir() or pixels is not None
        load = loader(reading, model, console, None if images else data)
        request = TuneRequest(
            keep=keep,
            max_latency=max_latency,
            max_bytes=max_bytes,
            scenario=scenario,
            metric=metric,
            target=target,
            batch=batch,
            tokens=tokens,
            precision=precision,
            all_experts=all_experts,
            time=time,
            threads=threads,
            pixels=pixels,
            report=place,
            command=typed_command(),
            force=force,
            progress=console,
            further=further(context, TuneRequest),
        )
        if dry_run:
            planned = tune_plan(load, data, request)
            show(json_text(asdict(planned)) if as_json else plan_text(planned))
            return
        tuned = search(load, data, output, request)
    from .findings import text

    if not as_json:
        show(text(tuned))
        return
    manifest = tuned.bundle.manifest
    content = {
        "bundle": str(tuned.bundle.path),
        "report": str(place / "report.html"),
        "contract": manifest.contract,
        "layers": [asdict(layer) for layer in manifest.layers],
    }
    show(json_text(content))


def plan_text(planned: SearchPlan) -> str:
    confirming = "the rest" if planned.confirming is None else f"{planned.confirming} inputs"
    return (
        f"{count(planned.models)} models in all: {planned.choices} choices of single layers, timed "
        f"alone in {planned.forms} sizes and precisions, and up to {planned.graphs} whole graphs\n"
        f"{planned.searching} inputs for the search, {confirming} to confirm\n"
        f"at most about {planned.seconds:.0f} s; nothing was written (--dry-run)"
    )


def typed_recipe(text: str | Path) -> Path:
    """Parses the path of a recipe; raises `UsageError` if the file does not exist."""
    path = typed_path(text)
    if is_missing(text):
        raise no_such_recipe(path, "No such file or directory")
    return path


def recipe_options(
    *,
    recipe: Annotated[
        Path | None, option_for(RecipeOptions, "recipe", metavar="RECIPE.YAML", parser=typed_recipe)
    ] = None,
) -> RecipeOptions:
    return RecipeOptions(recipe=recipe)
