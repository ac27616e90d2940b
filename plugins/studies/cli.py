"""The command `specialise`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...commands.options import (
    AsJson,
    Quiet,
    Verbose,
    option_for,
    output_option,
    typed_data,
    typed_path,
    typed_source,
)
from ...commands.panels import further
from ...commands.reading import ConfigOption, FamilyOption, SetOption, loader
from ...common.console import Console, show
from ...common.libraries import check_pytorch
from ...common.writing import check_folder
from ...exporter.requests import LoadRequest
from .calls import specialise as find
from .request import EditOptions, SpecialiseRequest, StudyOptions


def specialise(
    context: typer.Context,
    *,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…", parser=typed_source, help="A checkpoint, or several to compare."
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="X.NPZ",
            parser=typed_data,
            help="An .npz with the arrays input and label, for --examples also image or text; a "
            "file of text for a language model.",
        ),
    ],
    output: Annotated[Path | None, output_option("DIR", "The folder for JSON and figure.")] = None,
    family: FamilyOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    layer: Annotated[str | None, option_for(SpecialiseRequest, "layer", metavar="NAME")] = None,
    k: Annotated[str | None, option_for(SpecialiseRequest, "k", metavar="K")] = None,
    group_by: Annotated[
        str | None, option_for(SpecialiseRequest, "group_by", "Subgroups", metavar="ARRAY")
    ] = None,
    examples: Annotated[int | None, option_for(SpecialiseRequest, "examples", metavar="N")] = None,
    rewrite_class: Annotated[
        int | None, option_for(SpecialiseRequest, "rewrite_class", "Subgroups", metavar="CLASS")
    ] = None,
    rewrite_group: Annotated[
        str | None, option_for(SpecialiseRequest, "rewrite_group", "Subgroups", metavar="GROUP")
    ] = None,
    strength: Annotated[
        float | None, option_for(SpecialiseRequest, "strength", "Subgroups", metavar="λ")
    ] = None,
    budget: Annotated[
        float | None, option_for(SpecialiseRequest, "budget", "Subgroups", metavar="SHARE")
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Show which classes each expert serves, and how often it is chosen.

    Removes each expert in turn and measures the accuracy of every class. Compares subgroups, and
    several models. For models of texts it only counts the choices.
    """
    if output is not None:
        check_folder(output)
    console = Console(verbose=verbose, quiet=quiet)
    request = SpecialiseRequest(
        layer=layer,
        k=k,
        group_by=group_by,
        examples=examples,
        rewrite_class=rewrite_class,
        rewrite_group=rewrite_group,
        strength=strength,
        budget=budget,
        progress=console,
    )
    reading = LoadRequest(
        family=family, config=config, sets=sets or (), further=further(context, LoadRequest)
    )
    check_pytorch("specialise")
    from . import specialisation_report as report

    findings = []
    with console:
        for model in models:
            loaded = loader(reading, model, console, data)()
            findings.append(find(loaded, data, request))
    (first, *others) = findings
    if output is not None:
        written = report.write_several(findings, output) if others else report.write(first, output)
    if as_json:
        show(report.several_json(findings) if others else report.to_json(first), end="")
        return
    show(report.several_text(findings) if others else report.text(first))
    if output is not None:
        show(f"\nwritten: {', '.join(map(str, written))}")


def study_options(
    *,
    analysis: Annotated[str, option_for(StudyOptions, "analysis")] = "",
    max_subsets: Annotated[int | None, option_for(StudyOptions, "max_subsets", min=1)] = None,
    group_by: Annotated[str | None, option_for(StudyOptions, "group_by", metavar="ARRAY")] = None,
) -> StudyOptions:
    return StudyOptions(analysis=analysis, max_subsets=max_subsets, group_by=group_by)


def edit_options(
    *,
    ablate: Annotated[
        list[str] | None, option_for(EditOptions, "ablate", metavar="LAYER:EXPERT")
    ] = None,
    rewrite: Annotated[
        Path | None, option_for(EditOptions, "rewrite", metavar="FILE", parser=typed_path)
    ] = None,
    steer: Annotated[
        list[str] | None, option_for(EditOptions, "steer", metavar="LAYER:EXPERT[:STRENGTH]")
    ] = None,
) -> EditOptions:
    return EditOptions(ablate=ablate or (), rewrite=rewrite, steer=steer or ())
