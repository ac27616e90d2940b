"""The main job: trace, plan, write, check, and only then put the bundle in its place."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx_ir as ir
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ..calibration.feeds import Feed
from ..calibration.table import CALIBRATION_FILE, CalibrationTable
from ..common.console import Progress, Silent
from ..common.environment import environment
from ..common.files import Reading, hash_files, sha256
from ..errors import ParityError
from ..graphs.lower import Lowered, LoweringRequest, lower
from ..graphs.names import K_INPUT
from ..graphs.precision.types import FLOAT_TYPES
from .bundle.bundle import Bundle
from .bundle.destination import atomic_directory, check_destination
from .bundle.manifest import (
    MANIFEST_FILE,
    METADATA,
    FileRecord,
    GraphRecord,
    LayerRecord,
    Manifest,
    PortRecord,
    SourceRecord,
)
from .bundle.verify import graph_parity, selected_values
from .bundle.weights import StoredLayer, WeightsWriter, write_backbone, write_layer
from .inputs import fixed_axes, parity_inputs
from .measured_lowerings import tune
from .model import Model, TensorSpec, edited
from .options import TUNE, ExportOptions
from .parity import PARITY_FILE, Parity, Reference, describe
from .plan import GraphPlan, LayerPlan, Plan, check_request, plan
from .precision import LayerPrecision, PrecisionPlan, apply_precision, precision_record
from .reference import first_different_layer, reference
from .tensorrt.engines import build_for_export, check_for_export
from .tensorrt.options import EngineOptions
from .trace import trace


@dataclass(frozen=True)
class Prepared:
    """A traced model and the plan for it: all that is known before anything is written."""

    model: Model
    traced: ir.Model
    plan: Plan
    options: ExportOptions
    numbers: PrecisionPlan
    table: CalibrationTable | None = None


def trace_for(model: Model, options: ExportOptions) -> ir.Model:
    """Returns the traced graph of a model with the sizes that the options fix."""
    return trace(model, opset=options.opset, fixed=fixed_axes(model.input, options))


def prepare(
    model: Model,
    options: ExportOptions,
    table: CalibrationTable | None = None,
    progress: Progress | None = None,
    *,
    traced: ir.Model | None = None,
) -> Prepared:
    """Traces a model, with the edits asked for, and plans its export; writes nothing.

    `table` holds the ranges that INT8 needs, and 16-bit floats make use of. `traced` is what
    `trace_for` gave for this model, where that is known already. Where the options ask for it, the
    lowerings are measured, which raises what `tune.tune` raises.
    """
    model = edited(model, options.edits)
    traced = trace_for(model, options) if traced is None else traced.clone()
    numbers = apply_precision(model, traced, options, table)
    tuned = None
    if TUNE in options.lowerings:
        tuned = tune(model, traced, options, numbers, progress)
    planned = plan(model, traced, options, numbers, tuned)
    return Prepared(model, traced, planned, options, numbers, table)


def export(
    model: Model,
    destination: Path,
    options: ExportOptions | None = None,
    *,
    data: Feed | None = None,
    table: CalibrationTable | None = None,
    engine: EngineOptions | bool | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Writes a verified bundle and returns it.

    `data` gives real inputs for the parity check; random ones are taken without. `table` holds the
    ranges of the model's tensors, which INT8 needs (`tables.table_for_export`). A target that has
    engines gets one where this machine can compile it; `engine` asks for it, says how, or (False)
    leaves it out. Raises `EngineError` when one that was asked for cannot be compiled,
    `ParityError` when a graph is further from PyTorch than the options allow, and leaves nothing
    behind on any failure.
    """
    options = options or ExportOptions()
    progress = progress or Silent()
    check_destination(destination, force=force)
    check_for_export(options.target, engine)
    check_request(model, options)
    expected_inputs = parity_inputs(model, options, data) if options.verify else None
    progress.step("tracing")
    prepared = prepare(model, options, table, progress)
    check_destination(destination, force=force, needed_bytes=prepared.plan.weights_bytes)
    with atomic_directory(destination, force=force) as directory:
        progress.step("writing weights and graphs", total=prepared.plan.weights_bytes)
        lowered = write_graphs(prepared, directory, progress)
        if table is not None:
            table.write(directory / CALIBRATION_FILE)
        parities: dict[str, Parity] = {}
        if expected_inputs is not None:
            progress.step("checking against PyTorch")
            expected = expect(prepared, expected_inputs)
            expected.save(directory / PARITY_FILE)
            for graph in prepared.plan.graphs:
                record = graph_record(graph, lowered[graph.file], None)
                parities[graph.file] = _checked(prepared, directory, record, expected, lowered)
        progress.step("hashing")
        manifest = manifest_of(prepared, lowered, parities, directory, real_inputs=data is not None)
        manifest = build_for_export(directory, manifest, engine, progress)
        (directory / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return Bundle(destination, manifest)


def write_graphs(
    prepared: Prepared, directory: Path, progress: Progress | None = None
) -> dict[str, Lowered]:
    """Writes the weights file and every graph of the plan; returns the graphs by file."""
    traced = prepared.traced.clone()
    model = prepared.model
    with WeightsWriter(directory, progress, model.source.mapped) as writer:
        write_backbone(writer, traced)
        stored = {
            name: write_layer(writer, name, layer, prepared.numbers.layers[name].compute)
            for name, layer in model.layers.items()
        }
    lowered = {}
    for graph in prepared.plan.graphs:
        lowered[graph.file] = _lower(traced, graph, stored, prepared)
        ir.save(lowered[graph.file].model, directory / graph.file)
    return lowered


def _lower(
    traced: ir.Model, graph: GraphPlan, stored: Mapping[str, StoredLayer], prepared: Prepared
) -> Lowered:
    choices = {
        layer.name: LoweringRequest(
            spec=layer.work.spec,
            tensors=stored[layer.name],
            lowering=layer.choice.lowering,
            k=layer.k,
            renormalize=prepared.options.renormalize,
            compute=prepared.numbers.layers[layer.name].compute,
            target=prepared.options.target,
        )
        for layer in graph.layers
    }
    lowered = lower(traced, choices)
    model = lowered.model
    model.producer_name, model.producer_version = "moexport", metadata.version("moexport")
    model.metadata_props[METADATA] = json.dumps(
        {
            "family": prepared.model.family,
            "precision": prepared.options.numbers.precision,
            "floats": prepared.options.numbers.float_name(prepared.options.target),
            "layers": {
                layer.name: {
                    "n": layer.work.spec.experts,
                    "k": layer.k if layer.k is not None else K_INPUT,
                    "lowering": layer.choice.lowering.name,
                }
                for layer in graph.layers
            },
            "renormalize": prepared.options.renormalize,
        }
        | ({"edits": prepared.model.edits.texts()} if prepared.model.edits else {})
    )
    return lowered


def expect(prepared: Prepared, x: np.ndarray) -> Reference:
    """Returns the PyTorch reference, with a quarter of the experts where k is chosen per run."""
    layers = prepared.plan.graphs[0].layers
    # One k serves all layers at run time, so the layer with the fewest experts bounds it.
    shared = min(max(1, layer.work.spec.experts // 4) for layer in layers)
    kept = {layer.name: shared if layer.k is None else layer.k for layer in layers}
    batch = prepared.options.batch
    with _pages_given_back(prepared.model.source.mapped):
        return reference(
            prepared.model,
            x,
            kept,
            renormalize=prepared.options.renormalize,
            batch=batch.opt if batch.fixed else len(x),
        )


@contextmanager
def _pages_given_back(files: Iterable[Path]) -> Iterator[None]:
    """Within the context, running any network gives back the pages of mapped `files` on the way."""
    reading = Reading(files)

    def count(module: nn.Module, *_: object) -> None:
        lists = (part for part in module.children() if isinstance(part, nn.ParameterList))
        own = (weight for part in (module, *lists) for weight in part.parameters(recurse=False))
        reading.advance(sum(weight.nbytes for weight in own))

    # Of all modules, as a factory's own network keeps its experts where it likes.
    handle = register_module_forward_hook(count)
    try:
        yield
    finally:
        handle.remove()
        reading.end()


def _checked(
    prepared: Prepared,
    directory: Path,
    record: GraphRecord,
    expected: Reference,
    lowered: Mapping[str, Lowered],
) -> Parity:
    """A graph's parity, or a `ParityError` that says where the difference starts."""
    options, tolerance = prepared.options, prepared.options.tolerance
    fixed = options.batch.opt if options.batch.fixed else None
    parity = graph_parity(
        directory,
        record,
        expected,
        fixed_batch=fixed,
        k_input=options.k == "input",
        tolerance=tolerance,
    )
    if parity.passed:
        return parity
    if parity.samples == parity.ties:
        raise ParityError(
            f"{record.file}: routing is a tie in every one of the {parity.samples} inputs, so "
            "nothing can be compared",
            hint="give real inputs with --data; an untrained router ties everywhere",
        )
    where = parity.first_difference or first_different_layer(
        prepared.model,
        directory / record.file,
        lowered[record.file].values,
        expected,
        renormalize=options.renormalize,
        rtol=tolerance.rtol,
        batch=fixed or len(expected.x),
    )
    raise ParityError(
        f"{record.file} differs from PyTorch, starting in {where}: {describe(parity)}",
        hint=f"allowed was atol {tolerance.atol:g} + rtol {tolerance.rtol:g} · max|y| and the same "
        f"experts in {tolerance.routing:.0%}: {way_out(parity, options)}; --no-verify "
        "writes it unchecked",
    )


def way_out(parity: Parity, options: ExportOptions) -> str:
    """Returns what may help where a graph has missed the bounds of its parity check."""
    if parity.routing_agreement >= options.tolerance.routing:
        return "raise --rtol if that is good enough, or choose another --lowering"
    match options.numbers.precision:
        case "fp32":
            return "choose another --lowering"
        case "int8":
            return (
                "no --rtol allows for other experts: try another --method or --precision, or "
                "--min-retention, which keeps the layers that INT8 harms most in floats"
            )
        case _:
            return "no --rtol allows for other experts: take --precision fp32"


def graph_record(graph: GraphPlan, lowered: Lowered, parity: Parity | None) -> GraphRecord:
    """Returns what a manifest says of a graph."""
    return GraphRecord(
        file=graph.file,
        lowerings={layer.name: layer.choice.lowering.name for layer in graph.layers},
        selected=selected_values(lowered.values),
        parity=None if parity is None else parity.as_json(),
    )


def manifest_of(
    prepared: Prepared,
    lowered: Mapping[str, Lowered],
    parities: Mapping[str, Parity],
    directory: Path,
    *,
    real_inputs: bool,
) -> Manifest:
    """Returns what there is to say of the graphs and weights in a folder; hashes every file."""
    model, options, main = prepared.model, prepared.options, prepared.plan.graphs[0]
    notes = [*model.notes, *options.numbers.notes(options.target)]
    if not options.verify:
        notes.append("exported with --no-verify: nothing was compared with PyTorch")
    elif not real_inputs:
        notes.append("parity was checked on random inputs: give real ones with --data")
    parity = parities.get(main.file)
    return Manifest(
        moexport=metadata.version("moexport"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        source=SourceRecord(
            model.source.path, hash_files(model.source.files), model.family, dict(model.config)
        ),
        layers=[
            _layer_record(layer, prepared.numbers.layers[layer.name], lowered[main.file])
            for layer in main.layers
        ],
        graphs=[
            graph_record(graph, lowered[graph.file], parities.get(graph.file))
            for graph in prepared.plan.graphs
        ],
        k=_k_text(options),
        target=options.target,
        precision=options.numbers.precision,
        numbers=precision_record(prepared.numbers, options),
        renormalize=options.renormalize,
        opset=options.opset,
        batch=str(options.batch),
        tokens=str(options.tokens),
        inputs=_inputs(model.input, options),
        outputs=[port_of(model.output, options)],
        parity=None if parity is None else parity.as_json(),
        files={
            path.name: FileRecord(sha256(path), path.stat().st_size)
            for path in sorted(directory.iterdir())
        },
        environment=environment(),
        notes=notes,
        edits=model.edits.records(),
        tuning={} if prepared.plan.tuning is None else prepared.plan.tuning.as_json(),
    )


def _layer_record(layer: LayerPlan, numbers: LayerPrecision, lowered: Lowered) -> LayerRecord:
    spec = layer.work.spec
    return LayerRecord(
        name=layer.name,
        kind=spec.kind,
        experts=spec.experts,
        levels=[] if spec.kind == "soft-moe" else list(spec.levels),
        slots=spec.slots,
        dim=spec.dim,
        hidden=spec.hidden,
        k=layer.k,
        lowering=layer.choice.lowering.name,
        reason=layer.choice.reason,
        selected=lowered.values[layer.name].selected,
        precision=numbers.precision,
        precision_reason=numbers.reason,
    )


def _inputs(spec: TensorSpec, options: ExportOptions) -> list[PortRecord]:
    ports = [port_of(spec, options)]
    if options.k == "input":
        ports.append(PortRecord(K_INPUT, "int64", [1]))
    return ports


def port_of(spec: TensorSpec, options: ExportOptions) -> PortRecord:
    """Returns a data input or output of the graphs that an export writes."""
    fixed = fixed_axes(spec, options)
    shape = [fixed.get(size, size) if isinstance(size, str) else size for size in spec.shape]
    implied = None if spec.implied in fixed else spec.implied
    dtype = spec.dtype
    if dtype == "float32":
        dtype = str(FLOAT_TYPES[options.numbers.io].numpy())
    return PortRecord(spec.name, dtype, shape, dict(spec.limits), implied, spec.below)


def _k_text(options: ExportOptions) -> str:
    k = options.k
    return ",".join(str(each) for each in k) if isinstance(k, tuple) else str(k)
