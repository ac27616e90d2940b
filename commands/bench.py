"""`bench`, `specialise`, `report` and `demo`; `cli.py` adds them to the program."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from .. import api
from ..common.console import Console, show
from ..common.pytorch import check_pytorch
from ..common.text import listed
from ..errors import UsageError
from .options import (
    AsJson,
    CallOptions,
    ModelFlags,
    Verbosity,
    json_text,
    output_option,
    refuse_idle,
    typed_command,
    typed_source,
)

if TYPE_CHECKING:
    from ..bench.results import Results


Paper = Literal["mnist", "mnist-normalised", "latency", "latency-whole", "l2norm", "mumoe"]
"""Experiments of the papers: the names of `bench.paper`."""


Trained = Literal["soft-moe", "mumoe", "experts"]
"""Kinds of MoE layers that the demo trains."""


MEASURED = CallOptions(
    api.bench,
    "k lowering precision engine target batch data rounds samples threads memory pixels tokens "
    "analysis max_subsets group_by",
    headings={
        "k": "What is measured",
        "data": "Data",
        "rounds": "How it is measured",
        "analysis": "Experts",
    },
    more={
        "data": {"metavar": "DATA"},
        "rounds": {"min": 5},
        "samples": {"min": 1},
        "threads": {"min": 1},
        "tokens": {"min": 1},
        "max_subsets": {"min": 1},
        "group_by": {"metavar": "ARRAY"},
    },
)
"""What is measured, and over which settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags:
    """What the results are compared with, and where they are measured."""

    HEADINGS: ClassVar = {"compare": "Comparison", "ray": "Cluster"}

    compare: Annotated[
        Path | None,
        typer.Option(metavar="OLD.JSON", help="Compare with these results [default: those in -o]."),
    ] = None
    fail_if_slower: Annotated[
        str | None,
        typer.Option(metavar="5%", help="Exit with 3 if a row is slower than before by more."),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Measure on the nodes of a Ray cluster: its address, auto (that of this machine) "
            "or local.",
        ),
    ] = None
    on: Annotated[
        str | None,
        typer.Option(
            metavar="RESOURCE",
            help="A list of resources, a report for each: accelerator_type:L4 [default: CPU].",
        ),
    ] = None


def bench(
    *,
    output: Annotated[Path, output_option("DIR", "The folder for results and report.")],
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|BUNDLE…",
            parser=typed_source,
            help="A model, bundles, or a model and its bundles.",
        ),
    ] = None,
    reading: ModelFlags,
    given: Annotated[dict[str, Any], MEASURED],
    flags: BenchFlags,
    paper: Annotated[
        Paper | None, typer.Option(help="Run an experiment of the papers instead of a model.")
    ] = None,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Measure accuracy and latency for every k; write a report.

    After an interruption, repeat the command: it continues where it stopped.
    """
    console = verbosity.console()
    if paper is not None:
        if models:
            raise UsageError(
                f"--paper {paper} makes its own models, and {models[0]} was named too",
                hint="leave the model or --paper out",
            )
        why = f"--paper {paper} says itself what is measured"
        refuse_idle(reading, (MEASURED, given), flags, why=why, but=("threads",))
        with console:
            results, text = api.paper(
                *(paper, output),
                threads=given.get("threads"),
                command=typed_command(),
                progress=console,
            )
        _print_results(results, text, output, as_json=as_json)
        return
    if not models:
        raise UsageError(
            "bench: no model to measure", hint="moexport bench vit.pt -o report, or --paper mnist"
        )
    from ..exporter.bundle.manifest import is_bundle

    if all(map(is_bundle, models)):
        refuse_idle(reading, why="a bundle says itself what it was made from")
    from ..bench.report.compare import check_regression, earlier, parse_share
    from ..bench.report.text import rows_table

    share = None if flags.fail_if_slower is None else parse_share(flags.fail_if_slower)
    given |= reading.given()
    if flags.ray is not None:
        _bench_on_ray(models, flags, given, share, output, console, as_json=as_json)
        return
    if flags.on is not None:
        raise UsageError(f"--on {flags.on}: there is no cluster", hint="name one with --ray")
    before = earlier(output, flags.compare, wanted=share is not None)
    results = api.bench(
        models,
        **given,
        out=output,
        before=before,
        command=typed_command(),
        progress=console,
    )
    console.finish()
    _print_results(results, rows_table(results), output, as_json=as_json)
    if before is not None:
        for line in check_regression(before, results, share):
            console.note(line)
    elif share is not None:
        console.note(f"--fail-if-slower: {output} holds no earlier results to compare with")


def _bench_on_ray(
    models: list[str],
    flags: BenchFlags,
    given: dict[str, Any],
    share: float | None,
    output: Path,
    console: Console,
    *,
    as_json: bool,
) -> None:
    from ..bench.report.kinds import compare_kinds, earlier_kinds, folder_of, kinds_text
    from ..bench.results import as_json as plain

    assert flags.ray is not None  # it was given
    on = [*dict.fromkeys(listed(flags.on or "CPU"))]
    if not on:
        raise UsageError(f"--on {flags.on}: names no resource", hint="`ray status` lists them")
    before = earlier_kinds(output, flags.compare, on, wanted=share is not None)
    found = api.bench_on_ray(
        models,
        ray=flags.ray,
        on=on,
        out=output,
        before=before,
        command=typed_command(),
        progress=console,
        **given,
    )
    console.finish()
    if as_json:
        show(json_text({kind: plain(results) for kind, results in found.items()}))
    else:
        folders = {kind: output / folder_of(kind) if len(on) > 1 else output for kind in found}
        show(kinds_text(found))
        show("\n" + "\n".join(f"report: {each / 'report.html'}" for each in folders.values()))
    if before:
        lines, failure = compare_kinds(before, found, share)
        for line in lines:
            console.note(line)
        if failure is not None:
            raise failure
    elif share is not None:
        console.note(f"--fail-if-slower: {output} holds no earlier results to compare with")


def _print_results(results: Results, text: str, output: Path, *, as_json: bool) -> None:
    from ..bench.results import to_json

    page = output / "report.html"
    where = f"report: {page}" if results.rows else f"results: {output / 'results.json'}"
    show(to_json(results) if as_json else f"{text}\n\n{where}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessFlags:
    """Which subgroups are compared, and the rewriting that is to help one."""

    HEADINGS: ClassVar = {"group_by": "Subgroups"}

    group_by: Annotated[
        str | None,
        typer.Option(
            metavar="ARRAY",
            help="Compare subgroups: an array of the data [default: none; mean coefficients by "
            "class].",
        ),
    ] = None
    rewrite_class: Annotated[
        int | None,
        typer.Option(metavar="CLASS", help="Write a rewrite.json for this class's output."),
    ] = None
    rewrite_group: Annotated[
        str | None, typer.Option(metavar="GROUP", help="The subgroup that the rewrite helps.")
    ] = None
    strength: Annotated[
        float | None,
        typer.Option(metavar="λ", help="The size of the rewrite [default: the best max-min]."),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Accuracy that the rewrite may cost [default: 0.01]."),
    ] = None

    def wanted(self) -> dict[str, Any]:
        """Returns them as `moexport.specialise` takes them."""
        if self.rewrite_class is None or self.rewrite_group is None:
            why = "a rewriting needs --rewrite-class and --rewrite-group"
            refuse_idle(self, why=why, but=("group_by",))
        if self.strength is not None and self.budget is not None:
            raise UsageError(
                "--budget with --strength: nothing is searched for", hint="leave one of them out"
            )
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in given.items() if value is not None}


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
    reading: ModelFlags,
    layer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The layer whose experts to remove [default: the last]."),
    ] = None,
    flags: FairnessFlags,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Show which classes each expert serves.

    Removes each expert in turn and measures the accuracy of every class. Compares subgroups, and
    several models.
    """
    check_pytorch("specialise")
    from ..bench.report.specialisation import (
        several_json,
        several_text,
        text,
        to_json,
        write,
        write_several,
    )
    from ..common.writing import check_folder

    if output is not None:
        check_folder(output)
    asked = flags.wanted()
    found = []
    with verbosity.console() as console:
        for model in models:
            loaded = reading.loader(model, console, data)()
            found.append(api.specialise(loaded, data, layer=layer, **asked, progress=console))
    (first, *others) = found
    if output is not None:
        written = write_several(found, output) if others else write(first, output)
    if as_json:
        show(several_json(found) if others else to_json(first), end="")
        return
    show(several_text(found) if others else text(first))
    if output is not None:
        show(f"\nwritten: {', '.join(map(str, written))}")


def report(
    *,
    results: Annotated[Path, typer.Argument(metavar="RESULTS.JSON", help="What bench wrote.")],
    output: Annotated[
        Path, output_option("REPORT.HTML", "The page; Markdown, CSV and figures go next to it.")
    ],
    compare: Annotated[
        Path | None,
        typer.Option(metavar="OLD.JSON", help="List changes that are larger than the spread."),
    ] = None,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Rebuild the report of a results file, or compare two."""
    from ..bench.report.page import can_draw

    console = verbosity.console()
    paths, comparison = api.report(results, output, compare=compare)
    result = {"files": [str(path) for path in paths]}
    if not any(path.suffix == ".png" for path in paths) and not can_draw():
        console.note("no figures beside the page: Matplotlib is not installed")
    if comparison is not None:
        changes = [change.label for change in comparison.notable]
        result |= {"changed": [comparison.sentence, *changes, *comparison.notes]}
        if not as_json:
            show("\n  ".join(result["changed"]))
    if as_json:
        show(json_text(result))
    console.note(f"wrote {', '.join(str(path) for path in paths)}")


def demo(
    *,
    output: Annotated[Path, output_option("DIR", "The folder for all files.")] = Path("demo"),
    family: Annotated[Trained, typer.Option(help="The kind of networks to train.")] = "soft-moe",
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier demo.")] = False,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Train small networks, export, verify and measure them."""
    with verbosity.console() as console:
        outcome = api.demo(output, family=family, force=force, progress=console)
    made = {"output": str(outcome.directory), "report": str(outcome.report)}
    show(json_text(made) if as_json else outcome.text)
