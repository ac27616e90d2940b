"""`export`, and what it prints of a plan and a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import api
from ..common.console import Console, show
from ..common.text import size, table
from ..exporter.requests import (
    ExportRequest,
    LoadRequest,
)
from ..exporter.tensorrt.options import EngineOptions
from .build import wished
from .inspect import backbone_departures, precisions_text, tuning_text
from .options import (
    AsJson,
    ModelArgument,
    Verbosity,
    json_text,
    loader,
    output_option,
    typed_name,
)

if TYPE_CHECKING:
    from ..exporter.bundle.manifest import LayerRecord, Manifest
    from ..exporter.bundle.runtimes import RuntimeRecord
    from ..exporter.model import Model
    from ..exporter.plan import Plan


def export(
    *,
    model: ModelArgument,
    output: Annotated[Path, output_option("BUNDLE", "The folder to write.")],
    reading: LoadRequest,
    request: ExportRequest,
    building: EngineOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and write nothing.")
    ] = False,
    as_json: AsJson = False,
    verbosity: Verbosity,
) -> None:
    """Export a checkpoint to a verified bundle of ONNX graphs."""
    console = verbosity.console()
    read = loader(reading, model, console, typed_name(request.data))
    shown: list[str] = []  # before the work begins, so not again after it

    def load() -> Model:
        loaded = read()
        shown.extend(loaded.notes)
        for note in loaded.notes:
            console.note(note)
        return loaded

    request = replace(request, engine=wished(request.engine, building), progress=console)
    if dry_run:
        planned = api.plan(load, output, request)
        for note in (*_edited(planned.job.model.edits.texts()), *planned.notes):
            console.note(note)
        show(json_text(plan_json(planned)) if as_json else plan_text(planned))
        return
    from ..exporter.bundle.runtimes import RUNTIMES

    runtimes = [*RUNTIMES]  # a plugin that clashes with another stops nothing that is written
    bundle = api.export(load, output, request)
    console.finish()
    if as_json:
        show(bundle.manifest.to_json(), end="")
        return
    _say_exported(output, bundle.manifest, console, shown, runtimes)


def _say_exported(
    output: Path,
    manifest: Manifest,
    console: Console,
    shown: Sequence[str],
    runtimes: Sequence[RuntimeRecord],
) -> None:
    """Says what was written and how well it does, but for what was `shown` before."""
    from ..exporter.bundle.parity_record import Parity, describe
    from ..exporter.bundle.weights import WEIGHTS_FILE
    from ..exporter.edits import Edits

    for text in _edited(Edits.from_records(manifest.edits, "manifest.json").texts()):
        console.note(text)
    alike: dict[str, list[LayerRecord]] = {}
    for layer in manifest.layers:
        k = "a graph input" if layer.k is None else f"{layer.k} of {layer.experts}"
        alike.setdefault(f"k = {k}, {layer.lowering}", []).append(layer)
    for chosen, layers in alike.items():
        first, *more = (layer.name for layer in layers)
        console.note(f"{first}{f' and {len(more)} like it' if more else ''}: {chosen}")
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
    large = 0 if weights is None else weights.bytes
    others = (each.advice(manifest.target, manifest.precision, large) for each in runtimes)
    faster = next(filter(None, others), None)
    if faster is not None:
        console.note(faster)
    total = sum(record.bytes for record in manifest.files.values())
    show(f"{output}: {', '.join(manifest.files)} ({size(total)})")


def _edited(texts: Sequence[str]) -> list[str]:
    return [f"edited: {text}" for text in texts]


def plan_text(plan: Plan) -> str:
    """What `export --dry-run` says."""
    layers = plan.precision.layers
    folder = plan.job.options.destination or Path()
    blocks = []
    if plan.job.options.precision.name != "fp32":
        blocks.append(precisions_text((n, r.precision, r.reason) for n, r in layers.items()) + "\n")
    for graph in plan.graphs:
        rows = [
            (
                layer.name,
                "input" if layer.k is None else f"{layer.k}/{layer.work.spec.experts}",
                layer.choice.lowering.name,
                layer.choice.reason,
            )
            for layer in graph.layers
        ]
        blocks.append(
            f"{folder / graph.file}\n{table(('MoE layer', 'k/n', 'lowering', 'reason'), rows)}\n"
            f"MoE layers together: about {graph.predicted_us / 1e3:.3g} ms a batch of "
            f"{graph.layers[0].work.batch} (predicted)\n"
        )
    if plan.tuning is not None:
        blocks.append("\n".join(tuning_text(plan.tuning)))
    blocks.append(f"weights: {size(plan.weights_bytes)}; nothing was written (--dry-run)")
    return "\n".join(blocks)


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data, with notes and with what `--lowering tune` measured, if any."""
    layers = plan.precision.layers
    more: dict[str, Any] = {} if plan.tuning is None else {"tuning": asdict(plan.tuning)}
    more |= {"notes": plan.notes} if plan.notes else {}
    batches = {g.file: list(g.batches) for g in plan.graphs if g.batches is not None}
    more |= {"batches": batches} if batches else {}
    return {
        "output": str(plan.job.options.destination),
        "files": plan.files,
        "graphs": {
            g.file: [
                {
                    "name": layer.name,
                    "k": layer.k,
                    "experts": layer.work.spec.experts,
                    "lowering": layer.choice.lowering.name,
                    "reason": layer.choice.reason,
                    "precision": layers[layer.name].precision,
                    "precision_reason": layers[layer.name].reason,
                    "predicted_us": round(layer.choice.predicted_us, 1),
                }
                for layer in g.layers
            ]
            for g in plan.graphs
        },
    } | more
