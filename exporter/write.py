"""Writes the planned weights and graphs, and makes their manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..common.console import Progress
from ..common.environment import environment
from ..graphs.layers.base import MoELayer, moe_layers
from ..graphs.lower import Lowered, lower, selected_values
from ..graphs.lowerings.base import AnyPlan
from ..graphs.names import K_INPUT, STEER_INPUT, is_cached
from ..graphs.precision.types import FLOAT_TYPES
from ..graphs.targets import runtime_of
from .bundle.manifest import (
    METADATA,
    FileRecord,
    GraphRecord,
    LayerRecord,
    Manifest,
    SourceRecord,
    TensorSpec,
    axis_within,
)
from .bundle.parity import Parity
from .bundle.runtimes import RUNTIMES
from .bundle.weights import StoredLayer, WeightsWriter, write_backbone, write_layer
from .job import ExportJob
from .plan import GraphPlan, Plan
from .quantization.precision import precision_record
from .trace import valid_sizes


def write_graphs(
    plan: Plan, directory: Path, progress: Progress | None = None
) -> dict[str, Lowered]:
    """Writes the weights file and every graph of the plan; returns the graphs by file."""
    traced, model = plan.traced.clone(), plan.job.model
    with WeightsWriter(directory, progress, model.source.reading()) as writer:
        write_backbone(writer, traced)
        stored = {
            name: write_layer(writer, name, layer, plan.precision.layers[name])
            for name, layer in model.layers.items()
        }
    lowered = {}
    for graph in plan.graphs:
        lowered[graph.file] = _lower(traced, graph, stored, plan)
        ir.save(lowered[graph.file].model, directory / graph.file)
    return lowered


def _lower(
    traced: ir.Model, graph: GraphPlan, stored: Mapping[str, StoredLayer], plan: Plan
) -> Lowered:
    job, options = plan.job, plan.job.options
    layers = {
        layer.name: layer.to_layer(
            stored[layer.name],
            options.target,
            plan.precision.layers[layer.name],
            renormalize=options.renormalize,
            scores=options.shown_routing == "scores",
        )
        for layer in graph.layers
    }
    lowered = lower(
        traced,
        layers,
        fp16_weights=options.fp16_weights,
        coefficients=options.shown_routing is not None,
    )
    if options.shown_routing is not None:
        from ..graphs.exposed_routing import expose_routing

        lowered = expose_routing(lowered, graph.layers)
    model = lowered.model
    model.producer_name, model.producer_version = "moexport", metadata.version("moexport")
    facts: dict[str, Any] = {
        "family": job.model.family,
        "precision": options.precision,
        "floats": options.float_name,
        "layers": {
            planned.name: {
                "n": planned.spec.experts,
                "k": planned.k if planned.k is not None else K_INPUT,
                "lowering": planned.lowering.name,
            }
            for planned in graph.layers
        },
        "renormalize": options.renormalize,
    }
    optional = {
        "edits": job.model.edits.texts(),
        "defaults": {p.name: p.default for p in job.model.inputs if p.default is not None},
        "limits": {
            str(axis_within(axis, job.fixed)): n
            for axis, n in job.model.limits.items()
            if " + " in axis
        },
        "sizes": _valid_sizes(plan),
        "groups_of": job.groups_of,
    }
    facts |= {name: fact for name, fact in optional.items() if fact}
    model.metadata_props[METADATA] = json.dumps(facts)
    # The same facts for people: viewers show them next to the graph.
    about = f"{job.model.family} for {options.target} in {options.precision}"
    model.doc_string = f"{about}, exported by moexport {model.producer_version}"
    about_layers = {
        n: f"k = {fact['k']} of {fact['n']} experts" for n, fact in facts["layers"].items()
    }
    model.graph.doc_string = "\n".join(f"{name}: {what}" for name, what in about_layers.items())
    model.metadata_props.update({f"moexport.{name}": what for name, what in about_layers.items()})
    return lowered


def _valid_sizes(plan: Plan) -> dict[str, tuple[int, int | None]]:
    """Returns the ranges of sizes for which the graph computes the same as the network."""
    valid = valid_sizes(plan.traced)
    limits = plan.job.model.limits
    bounds = {axis: valid.between(axis) for axis in plan.job.axis_ranges}
    return {
        axis: (low, high)
        for axis, (low, high) in bounds.items()
        if low > 1 or high not in (None, limits.get(axis))  # not the model's own limit
    }


def graph_record(graph: GraphPlan, lowered: Lowered, parity: Parity | None = None) -> GraphRecord:
    """Returns a graph's entry in the manifest."""
    return GraphRecord(
        file=graph.file,
        lowerings={layer.name: layer.lowering.name for layer in graph.layers},
        selected=selected_values(lowered.values),
        parity=None if parity is None else parity.record(),
        batches=list(graph.batches or ()),
    )


def manifest_of(
    plan: Plan, lowered: Mapping[str, Lowered], parities: Mapping[str, Parity], directory: Path
) -> Manifest:
    """Returns the manifest of the graphs and weights in a folder; hashes every file."""
    job, options, main = plan.job, plan.job.options, plan.graphs[0]
    model = job.model
    trained = {} if model.as_trained is None else moe_layers(model.as_trained)
    parity = parities.get(main.file)
    k_input = [TensorSpec(K_INPUT, "int64", (1,))] if options.kept == "input" else []
    return Manifest(
        moexport=metadata.version("moexport"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        source=SourceRecord(
            path=model.source.path,
            sha256=model.source.sha256(),
            family=model.family,
            config=dict(model.config),
        ),
        layers=[_layer_record(layer, lowered[main.file], trained) for layer in main.layers],
        graphs=[
            graph_record(graph, lowered[graph.file], parities.get(graph.file))
            for graph in plan.graphs
        ],
        k=",".join(map(str, k)) if isinstance(k := options.kept, tuple) else str(k),
        target=options.target,
        precision=options.precision,
        numbers=precision_record(plan.precision, options),
        renormalize=options.renormalize,
        opset=lowered[main.file].model.opset_imports[""],
        batch=str(options.batches),
        tokens=str(options.token_counts),
        inputs=[*(_written_spec(spec, job) for spec in model.inputs), *k_input],
        outputs=[
            *(_written_spec(spec, job) for spec in model.outputs),
            *map(_added_spec, lowered[main.file].model.graph.outputs[len(model.outputs) :]),
        ],
        parity=None if parity is None else parity.record(),
        files={path.name: FileRecord.of(path) for path in sorted(directory.iterdir())},
        environment=environment(),
        notes=_notes(plan, parities),
        edits=model.edits.records(),
        tuning=plan.tuning,
    )


def _notes(plan: Plan, parities: Mapping[str, Parity]) -> list[str]:
    options, model = plan.job.options, plan.job.model
    notes = [*model.notes, *plan.notes]
    if not options.verify:
        notes.append("exported with --no-verify: nothing was compared with PyTorch")
    elif options.data is None:
        notes.append("parity was checked on random inputs: give real ones with --data")
    notes += [
        f"{file}: most results were not compared: {parity.tied:,} of {parity.choices:,} choices "
        "are ties between scores that differ by less than rounding; give real inputs with --data"
        for file, parity in parities.items()
        if parity.mostly_ties
    ]
    notes += [
        f"{file}: {RUNTIMES[runtime_of(options.target)].title} computed its matrix products in "
        f"{parity.computed_in} here"
        for file, parity in parities.items()
        if parity.computed_in is not None
    ]
    return notes


def _layer_record(layer: AnyPlan, lowered: Lowered, trained: Mapping[str, MoELayer]) -> LayerRecord:
    """Returns the record of a written layer; `trained` has the model's layers before its edits."""
    experts = trained[layer.name].spec.experts if layer.name in trained else layer.spec.experts
    return LayerRecord(
        **layer.to_json(),
        selected=lowered.values[layer.name].selected,
        trained=None if experts == layer.spec.experts else experts,
    )


def _written_spec(spec: TensorSpec, job: ExportJob) -> TensorSpec:
    """Returns the spec of a model's input or output in the graphs that an export writes."""
    dtype = spec.dtype
    if dtype == "float32" and spec.name != STEER_INPUT:
        narrow = job.options.narrow_cache and is_cached(spec.name)
        name = job.options.float_name if narrow else job.options.io_precision
        dtype = str(FLOAT_TYPES[name].numpy())
    implied = None if spec.implied in job.fixed else spec.implied
    limits = {str(axis_within(axis, job.fixed)): n for axis, n in spec.limits.items()}
    return replace(
        spec,
        dtype=dtype,
        shape=spec.within(job.fixed),
        implied=implied,
        limits=limits,
        groups_of=job.groups_of and spec.groups_of,
    )


def _added_spec(value: ir.Value) -> TensorSpec:
    """Returns the spec of an output that the network does not have: the choices of a layer."""
    assert value.dtype is not None and value.shape is not None
    sizes = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return TensorSpec(str(value.name), str(value.dtype.numpy()), sizes)
