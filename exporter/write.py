"""Writes what was planned: weights, graphs and the manifest, and compares a graph with PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ..common.console import Progress
from ..common.environment import environment
from ..graphs.builder import Builder
from ..graphs.layers.stored import LayerOf
from ..graphs.lower import Lowered, LoweringRequest, lower, selected_values
from ..graphs.names import K_INPUT, SELECTED, STEER_INPUT
from ..graphs.precision.types import FLOAT_TYPES, ComputeTypes
from ..graphs.targets import for_cpus, runtime_of
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
from .bundle.parity_record import Parity, Reference, not_compared
from .bundle.runtimes import RUNTIMES
from .bundle.verify import checking_session
from .bundle.weights import StoredLayer, WeightsWriter, write_backbone, write_layer
from .job import ExportJob
from .parity import Comparison
from .plan import GraphPlan, LayerPlan, Plan
from .quantization.precision import precision_record
from .trace import HELD, Held


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
    requests = {
        fact.name: LoweringRequest(
            lowering=fact.choice.lowering,
            layer=LayerOf(
                spec=fact.work.spec,
                tensors=stored[fact.name],
                k=fact.k,
                renormalize=options.renormalize,
                compute=plan.precision.layers[fact.name],
                target=options.target,
                batch=fact.work.batch,
            ),
        )
        for fact in graph.layers
    }
    lowered = lower(traced, requests, fp16_weights=options.precision.fp16_weights(options.target))
    if options.expose_routing:
        lowered = _exposed(lowered, graph)
    model, precision = lowered.model, options.precision
    model.producer_name, model.producer_version = "moexport", metadata.version("moexport")
    facts: dict[str, Any] = {
        "family": job.model.family,
        "precision": precision.name,
        "floats": precision.float_name(options.target),
        "layers": {
            fact.name: {
                "n": fact.work.spec.experts,
                "k": fact.k if fact.k is not None else K_INPUT,
                "lowering": fact.choice.lowering.name,
            }
            for fact in graph.layers
        },
        "renormalize": options.renormalize,
    }
    if job.model.edits:
        facts["edits"] = job.model.edits.texts()
    defaults = {port.name: port.default for port in job.model.inputs if port.default is not None}
    if defaults:
        facts["defaults"] = defaults
    limits = {
        str(axis_within(axis, job.fixed)): n
        for port in job.model.inputs
        for axis, n in port.limits.items()
        if " + " in axis
    }
    if limits:
        facts["limits"] = limits
    sizes = _held_sizes(plan)
    if sizes:
        facts["sizes"] = sizes
    if job.groups_of is not None:
        facts["groups_of"] = job.groups_of
    model.metadata_props[METADATA] = json.dumps(facts)
    # The same for people: a viewer shows it beside the graph.
    about = f"{job.model.family} for {options.target} in {precision.name}"
    model.doc_string = f"{about}, exported by moexport {model.producer_version}"
    layers = {n: f"k = {fact['k']} of {fact['n']} experts" for n, fact in facts["layers"].items()}
    model.graph.doc_string = "\n".join(f"{name}: {what}" for name, what in layers.items())
    model.metadata_props.update({f"moexport.{name}": what for name, what in layers.items()})
    return lowered


def _held_sizes(plan: Plan) -> dict[str, tuple[int, int | None]]:
    """The sizes of axes beyond which the network computes something else than the graph."""
    held: Held | None = plan.traced.meta.get(HELD)
    if held is None:
        return {}
    most = {axis: n for port in plan.job.model.inputs for axis, n in port.limits.items()}
    between = {axis: held.between(axis) for axis in plan.job.ranges}
    return {
        axis: (low, high)
        for axis, (low, high) in between.items()
        if low > 1 or high not in (None, most.get(axis))  # a limit of the model is its own
    }


def _exposed(lowered: Lowered, plan: GraphPlan) -> Lowered:
    """Makes what every layer chooses a further output of its graph, and tells the outputs' names.

    Soft MoE gives the experts of an input [b, k], token-routed layers those of its tokens
    [b, m, k], and muMoE the coefficients of each level [b, m, n].
    """
    graph, values = lowered.model.graph, dict(lowered.values)
    made = {value.name: value for node in graph for value in node.outputs}
    made |= {value.name: value for value in graph.inputs}
    first = graph.inputs[0].shape
    for layer in plan.layers:
        spec, values_of = layer.work.spec, values[layer.name]
        shape, k = made[values_of.input].shape, K_INPUT if layer.k is None else layer.k
        assert shape is not None and first is not None
        choices: dict[str, str] = {}
        for level, (choice, name) in enumerate(values_of.choices.items()):
            value, dtype = made[name], ir.DataType.INT64
            if spec.chooses_sets:
                sizes = [shape[0], k]
            elif spec.rewritable:
                dtype, sizes = ir.DataType.FLOAT, [*shape[:2], spec.levels[level]]
            else:
                value = _by_input(graph, layer.name, value)
                sizes = [first[0], "tokens", k]
            value.type, value.shape = ir.TensorType(dtype), ir.Shape(sizes)
            graph.outputs.append(value)
            choices[choice] = str(value.name)
        values[layer.name] = replace(values_of, choices=choices)
    return replace(lowered, values=values)


def _by_input(graph: ir.Graph, layer: str, chosen: ir.Value) -> ir.Value:
    """Adds what was chosen for each token, [b·m, k], as [b, m, k]: a batch is the first axis."""
    # Its constants have names of their own: the layer's graph has some of the same value.
    b = Builder(layer)
    tokens = b.weight(ir.tensor(np.array([-1])), f"{layer}/{SELECTED}/tokens")
    rows = b.op("Shape", graph.inputs[0], start=0, end=1, name=f"{SELECTED}/batch")
    last = b.op("Shape", chosen, start=-1, name=f"{SELECTED}/k")
    shape = b.op("Concat", rows, tokens, last, axis=0, name=f"{SELECTED}/shape")
    result = b.op("Reshape", chosen, shape, name=SELECTED)
    for initializer in b.initializers:
        graph.register_initializer(initializer)
    graph.extend(b.nodes)
    return result


def graph_record(graph: GraphPlan, lowered: Lowered, parity: Parity | None = None) -> GraphRecord:
    """Returns what a manifest says of a graph."""
    return GraphRecord(
        file=graph.file,
        lowerings={layer.name: layer.choice.lowering.name for layer in graph.layers},
        selected=selected_values(lowered.values),
        parity=None if parity is None else parity.record(),
        batches=list(graph.batches or ()),
    )


def opened_comparison(
    job: ExportJob,
    directory: Path,
    graph: GraphRecord,
    expected: Reference,
    batches: Sequence[int] | None = None,
) -> Comparison:
    """Opens a graph that was written to a folder, to be compared with references like this one.

    It is compared in `batches` of these sizes, by default in all those that a job names.
    """
    target = job.options.target
    session = checking_session(
        directory,
        graph,
        observe=expected.observed(graph.selected),
        runtime=runtime_of(target),
        threads=torch.get_num_threads(),
        rounded=not for_cpus(target),
    )
    return Comparison(
        session,
        graph.selected,
        batch=job.checked_batch,
        tolerance=job.options.tolerance,
        k=expected.main_k if job.options.k == "input" else None,
        probed=job.probed_batches() if batches is None else batches,
        together=job.model.batch_of,
    )


def manifest_of(
    plan: Plan,
    lowered: Mapping[str, Lowered],
    parities: Mapping[str, Parity],
    directory: Path,
    *,
    unreached: Mapping[str, list[int]] | None = None,
) -> Manifest:
    """Returns what there is to say of the graphs and weights in a folder; hashes every file.

    `unreached` are each layer's experts that no input of the comparison chose.
    """
    job, options, main = plan.job, plan.job.options, plan.graphs[0]
    model = job.model
    parity = parities.get(main.file)
    k_port = [TensorSpec(K_INPUT, "int64", (1,))] if options.k == "input" else []
    return Manifest(
        moexport=metadata.version("moexport"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        source=SourceRecord(
            path=model.source.path,
            sha256=model.source.sha256(),
            family=model.family,
            config=dict(model.config),
        ),
        layers=[
            _layer_record(layer, plan.precision.layers[layer.name], lowered[main.file])
            for layer in main.layers
        ],
        graphs=[
            graph_record(graph, lowered[graph.file], parities.get(graph.file))
            for graph in plan.graphs
        ],
        k=",".join(map(str, k)) if isinstance(k := options.k, tuple) else str(k),
        target=options.target,
        precision=options.precision.name,
        numbers=precision_record(plan.precision, options),
        renormalize=options.renormalize,
        opset=lowered[main.file].model.opset_imports[""],
        batch=str(options.batch),
        tokens=str(options.tokens),
        inputs=[*(_port(spec, job) for spec in model.inputs), *k_port],
        outputs=[
            *(_port(spec, job) for spec in model.outputs),
            *map(_added_port, lowered[main.file].model.graph.outputs[len(model.outputs) :]),
        ],
        parity=None if parity is None else parity.record(),
        files={path.name: FileRecord.of(path) for path in sorted(directory.iterdir())},
        environment=environment(),
        notes=_notes(plan, parities, unreached or {}),
        edits=model.edits.records(),
        tuning=plan.tuning,
    )


def _notes(
    plan: Plan, parities: Mapping[str, Parity], unreached: Mapping[str, list[int]]
) -> list[str]:
    """What a user should know of the model, the plan, and what was compared."""
    options, model = plan.job.options, plan.job.model
    notes = [*model.notes, *plan.notes]
    if not options.verify:
        notes.append("exported with --no-verify: nothing was compared with PyTorch")
    elif options.data is None:
        notes.append("parity was checked on random inputs: give real ones with --data")
    notes += [
        f"{file}: most was not compared: of {parity.choices:,} choices {parity.tied:,} are ties, "
        "between scores closer than rounding may change; give real inputs with --data"
        for file, parity in parities.items()
        if parity.mostly_ties
    ]
    notes += [
        f"{file}: {RUNTIMES[runtime_of(options.target)].title} computed its matrix products in "
        f"{parity.computed_in} here"
        for file, parity in parities.items()
        if parity.computed_in is not None
    ]
    if unreached:
        experts = {name: layer.spec.experts for name, layer in model.layers.items()}
        notes.append(f"{not_compared(unreached, experts)}; give more inputs with --data")
    return notes


def _layer_record(layer: LayerPlan, compute: ComputeTypes, lowered: Lowered) -> LayerRecord:
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
        precision=compute.precision,
        precision_reason=compute.reason,
    )


def _port(spec: TensorSpec, job: ExportJob) -> TensorSpec:
    """A data input or output of the graphs that an export writes."""
    dtype = spec.dtype
    if dtype == "float32" and spec.name != STEER_INPUT:
        dtype = str(FLOAT_TYPES[job.options.precision.io].numpy())
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


def _added_port(value: ir.Value) -> TensorSpec:
    """An output that the network does not have: what a layer chose."""
    assert value.dtype is not None and value.shape is not None
    sizes = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return TensorSpec(str(value.name), str(value.dtype.numpy()), sizes)
