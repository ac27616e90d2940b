"""The command `specialise`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ...commands.options import options_of, output_option, parse_data, parse_source
from ...commands.printing import Printing
from ...commands.reading import ReadingOptions, loader
from ...common.console import show
from ...common.libraries import check_pytorch
from ...common.writing import check_folder
from .calls import specialise as find
from .request import EditOptions, SpecialiseRequest, StudyOptions

OPTIONS = options_of(
    SpecialiseRequest,
    {
        "Options": ("layer", "k", "examples"),
        "Subgroups": ("group_by", "rewrite_class", "rewrite_group", "strength", "budget"),
    },
    layer={"metavar": "NAME"},
    k={"metavar": "K"},
    group_by={"metavar": "ARRAY"},
    examples={"metavar": "N"},
    rewrite_class={"metavar": "CLASS"},
    rewrite_group={"metavar": "GROUP"},
    strength={"metavar": "λ"},
    budget={"metavar": "SHARE"},
)


def specialise(
    *,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…", parser=parse_source, help="A checkpoint, or several to compare."
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="X.NPZ",
            parser=parse_data,
            help="An .npz with the arrays input and label, and image or text for --examples; for a "
            "language model, a text file.",
        ),
    ],
    output: Annotated[Path | None, output_option("DIR", "The folder for JSON and figures.")] = None,
    reading: ReadingOptions,
    request: Annotated[SpecialiseRequest, OPTIONS],
    printing: Printing,
) -> None:
    """Show which classes each expert serves, and how often it is chosen.

    Removes each expert in turn and measures the accuracy of every class. Also compares subgroups
    and models. For models of texts, it only counts the choices.
    """
    if output is not None:
        check_folder(output)
    console = printing.console()
    request = replace(request, progress=console)
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
    if printing.as_json:
        show(report.several_json(findings) if others else report.to_json(first), end="")
        return
    show(report.several_text(findings) if others else report.text(first))
    if output is not None:
        show(f"\nwritten: {', '.join(map(str, written))}")


study_options = options_of(StudyOptions, max_subsets={"min": 1}, group_by={"metavar": "ARRAY"})

edit_options = options_of(
    EditOptions,
    ablate={"metavar": "LAYER:EXPERT", "kind": list[str]},
    rewrite={"metavar": "FILE", "kind": Path},
    steer={"metavar": "LAYER:EXPERT[:STRENGTH]", "kind": list[str]},
)
