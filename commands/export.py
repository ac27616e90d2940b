"""The command `export`, and the text of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..common.console import Console, show
from ..common.libraries import check_pytorch
from ..common.text import by_level, first_and_count, size, table
from ..exporter.options import ExportOptions
from ..exporter.refusals import check_without_model, with_plugins
from ..exporter.requests import SIZES
from ..graphs.targets import TARGETS
from .build import Engines, engines_requested
from .inspect import backbone_departures, precisions_text, tuning_text
from .options import (
    ModelArgument,
    json_text,
    options_of,
    output_option,
    parse_feed,
    parse_switch,
    parse_table,
)
from .printing import Printing
from .reading import ReadingOptions, loader

if TYPE_CHECKING:
    from ..exporter.bundle.manifest import Manifest
    from ..exporter.bundle.runtimes import RuntimeRecord
    from ..exporter.model import Model
    from ..exporter.plan import Plan
    from ..graphs.lowerings.base import AnyPlan


if TYPE_CHECKING:
    AnyTarget = str
else:
    AnyTarget = Literal[*TARGETS.names]  # includes targets of plugins


OPTIONS = options_of(
    ExportOptions,
    {
        "Graph": (
            *("k", "target", "lowering", "batch", "tokens", "renormalize", "expose_routing"),
        ),
        "Precision": ("precision", "quantize", "method", "calibration", "min_retention"),
        "Inputs and parity check": (
            *("data", "atol", "rtol", "verify_samples", "verify", "threads"),
        ),
        "Numbers": ("rest", "weight_bits", "io_precision", "opset"),
        "Engines": ("engine",),
    },
    target={"kind": AnyTarget},
    batch={"metavar": SIZES},
    tokens={"metavar": SIZES},
    expose_routing={"metavar": "[=scores]", "kind": Any, "parser": parse_switch},
    calibration={"metavar": "TABLE.JSON", "parser": parse_table},
    min_retention={"metavar": "SHARE"},
    data={"metavar": "FEED", "kind": str, "parser": parse_feed},
    threads={"min": 1},
)


def export(
    *,
    model: ModelArgument,
    output: Annotated[Path, output_option("BUNDLE", "The folder to write.")],
    reading: ReadingOptions,
    request: Annotated[ExportOptions, OPTIONS],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, but write nothing.")
    ] = False,
    printing: Printing,
    engines: Engines,
) -> None:
    """Export a checkpoint to a verified bundle of ONNX graphs."""
    from ..exporter.bundle.steps import read_as

    console = printing.console()
    shown: list[str] = []  # notes printed before the export, not to be repeated after it

    def load() -> Model:
        loaded = read()
        shown.extend(loaded.notes)
        for note in loaded.notes:
            console.note(note)
        return loaded

    engine = engines_requested(request.engine, engines)
    request = replace(request, engine=engine, progress=console)
    check_pytorch("export")
    check_without_model(with_plugins(request))
    if not dry_run:
        from ..exporter.bundle.destination import check_destination

        check_destination(output, force=request.force)
    read = loader(read_as(reading, request, model), model, console, request.data)
    from ..exporter.export import export as write
    from ..exporter.export import plan

    if dry_run:
        planned = plan(load, output, request)
        for note in (*_edit_notes(planned.job.model.edits.texts()), *planned.notes):
            console.note(note)
        show(json_text(plan_json(planned)) if printing.as_json else plan_text(planned))
        return
    from ..exporter.bundle.runtimes import RUNTIMES

    runtimes = [*RUNTIMES]  # raises for clashing plugins before anything is written
    bundle = write(load, output, request)
    console.finish()
    if printing.as_json:
        show(bundle.manifest.to_json(), end="")
        return
    _print_exported(output, bundle.manifest, console, shown, runtimes)


def _print_exported(
    output: Path,
    manifest: Manifest,
    console: Console,
    shown: Sequence[str],
    runtimes: Sequence[RuntimeRecord],
) -> None:
    """Prints a summary of the bundle, without the notes that were already `shown`."""
    from ..exporter.bundle.parity import Parity, describe
    from ..exporter.bundle.weights import WEIGHTS_FILE
    from ..graphs.edits import Edits

    for text in _edit_notes(Edits.from_records(manifest.edits, "manifest.json").texts()):
        console.note(text)
    by_choice: dict[str, list[str]] = {}
    for layer in manifest.layers:
        k = "a graph input" if layer.k is None else f"{layer.kept} of {layer.of_experts}"
        by_choice.setdefault(f"k = {k}, {layer.lowering}", []).append(layer.name)
    for chosen, names in by_choice.items():
        console.note(f"{first_and_count(names)}: {chosen}")
    for layer in manifest.layers if console.verbose else ():
        console.note(f"{layer.name}: {layer.lowering}: {layer.reason}")
    for layer in manifest.layers:
        if layer.precision != manifest.precision:
            console.note(f"{layer.name}: in {layer.precision}: {layer.precision_reason}")
    for text in backbone_departures(manifest):
        console.note(text)
    if manifest.parity is not None:
        console.note(describe(Parity.of(manifest.parity)))
    for note in manifest.notes[len(shown) :]:
        console.note(note)
    weights = manifest.files.get(WEIGHTS_FILE)
    nbytes = 0 if weights is None else weights.bytes
    advice = (runtime.advice(manifest.target, manifest.precision, nbytes) for runtime in runtimes)
    first_advice = next(filter(None, advice), None)
    if first_advice is not None:
        console.note(first_advice)
    total = sum(record.bytes for record in manifest.files.values())
    show(f"{output}: {', '.join(manifest.files)} ({size(total)})")


def _edit_notes(texts: Sequence[str]) -> list[str]:
    return [f"edited: {text}" for text in texts]


def plan_text(plan: Plan) -> str:
    """Returns the output of `export --dry-run`."""
    layers = plan.graphs[0].layers
    folder = plan.job.options.destination or Path()
    blocks = []
    if plan.job.options.precision != "fp32":
        blocks.append(
            precisions_text((p.name, p.precision, p.precision_reason) for p in layers) + "\n"
        )
    for graph in plan.graphs:
        rows = [
            (layer.name, _k_text(layer), layer.lowering.name, layer.reason)
            for layer in graph.layers
        ]
        blocks.append(
            f"{folder / graph.file}\n{table(('MoE layer', 'k/n', 'lowering', 'reason'), rows)}\n"
            f"all MoE layers: about {graph.predicted_us / 1e3:.3g} ms for a batch of "
            f"{graph.layers[0].batch} (predicted)\n"
        )
    if plan.tuning is not None:
        blocks.append("\n".join(tuning_text(plan.tuning)))
    blocks.append(f"weights: {size(plan.weights_bytes)}; nothing was written (--dry-run)")
    return "\n".join(blocks)


def _k_text(layer: AnyPlan) -> str:
    """Returns a layer's k and n, with a number for each level of a hierarchy: `8·2/16·4`."""
    levels = layer.spec.levels
    if layer.k is None:
        return "input"
    if len(levels) < 2:
        return f"{layer.k}/{layer.spec.experts}"
    return f"{by_level(layer.spec.k_by_level(layer.k))}/{by_level(levels)}"


def plan_json(plan: Plan) -> dict[str, Any]:
    """Returns the plan as plain data, with notes and any measurements of `--lowering tune`."""
    optional: dict[str, Any] = {} if plan.tuning is None else {"tuning": asdict(plan.tuning)}
    optional |= {"notes": plan.notes} if plan.notes else {}
    batches = {g.file: list(g.batches) for g in plan.graphs if g.batches is not None}
    optional |= {"batches": batches} if batches else {}
    return {
        "output": str(plan.job.options.destination),
        "files": plan.files,
        "graphs": {
            graph.file: [
                {**layer.to_json(), "predicted_us": round(layer.predicted_us, 1)}
                for layer in graph.layers
            ]
            for graph in plan.graphs
        },
    } | optional
