"""Graphs that a benchmark exports for a model: one for each k, precision, lowering and batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ...common.console import Progress, Silent
from ...common.user_code import names_code
from ...common.writing import scratch_folder
from ...data.feeds import Feed
from ...errors import CalibrationError, LoweringError, MoexportError, ParityError, UsageError
from ...exporter.bundle.manifest import MANIFEST_FILE
from ...exporter.bundle.parity_record import TOLERANCES, Tolerance, on_gpu, recorded
from ...exporter.export import found_ranges
from ...exporter.inputs import AxisRange
from ...exporter.job import ExportJob, export_job
from ...exporter.model import Model
from ...exporter.options import AUTO, ExportOptions, KOption, PrecisionOptions
from ...exporter.plan import GraphPlan, plan, plan_graph
from ...exporter.reference import depends_on_batch
from ...exporter.tensorrt.backends import BACKENDS
from ...exporter.tensorrt.cache import default_cache
from ...exporter.tensorrt.options import CURRENT, EngineOptions
from ...exporter.trace import trace
from ...exporter.write import manifest_of, write_graphs
from ...graphs.lower import selected_values
from ...graphs.lowerings import lowering_of
from ...graphs.targets import Precision
from ..engines import KINDS, GraphEngine
from ..measure.roofline import integer_linears
from ..plan import Candidate, GraphSource, whole_k
from ..request import BenchRequest
from .base import GraphFile, Refused
from .other_exporters import with_other_exporters


def graph_engines(request: BenchRequest) -> tuple[GraphEngine, ...]:
    """Returns those of the engines that run exported graphs, each with its target."""
    named = [kind for kind in map(KINDS.get, request.engines) if isinstance(kind, GraphEngine)]
    return tuple(
        replace(kind, target=request.target) if kind.target == "ort-cpu" else kind
        for kind in named
        if kind.target is not None
    )


@contextmanager
def exported(
    model: Model,
    request: BenchRequest,
    *,
    inputs: Feed | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Iterator[Candidate]:
    """Yields a model with a graph per k and lowering, exported to a folder that goes after.

    INT8 takes its ranges from `inputs` [samples, …], whose shape is what engines are compiled for:
    without them for the export's own sizes.

    The graphs for one engine and precision share one weights file. `auto` stands for what the cost
    model chooses for each of the batch sizes, and is timed at that.
    """
    progress = progress or Silent()
    graphs: list[GraphSource] = []
    runtimes, lowerings = graph_engines(request), request.lowerings
    jobs = _jobs(model, request.ks)
    routed = {largest_k(whole_k(job)): job for job in jobs} if token_routed(model) else {}
    ks = [largest_k(whole_k(job)) for job in jobs]
    traces: dict[object, ir.Model] = {}
    only = one_batch(model, request)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("bench"))
        for runtime, precision in product(runtimes, request.precisions):
            progress.step(f"exporting {model.source.path} for {runtime.name} in {precision}")
            try:
                for index, together in enumerate(_by_model(jobs)):
                    place = folder / f"{runtime.name}-{precision}-{index}"
                    place.mkdir()
                    graphs += _sources(
                        model,
                        request,
                        inputs,
                        jobs=together,
                        runtime=runtime,
                        precision=precision,
                        folder=place,
                        traces=traces,
                        only=only,
                    )
            except (LoweringError, UsageError, CalibrationError) as error:
                if precision == "fp32" and runtime.backend is None:
                    raise
                # A precision that a model or target cannot take is a row that says so.
                every = product(ks, lowerings)
                graphs += _refused(dict.fromkeys(every, error), runtime, precision)
        said = [graph.loader.reason for graph in graphs if isinstance(graph.loader, Refused)]
        if graphs and len(said) == len(graphs):
            raise said[0]
        traces.clear()
        candidate = Candidate(
            name=name or model_name(model.source.path),
            model=model,
            ks=tuple(sorted(set(ks), reverse=True)),
            graphs=told_apart(graphs),
            renormalize=request.renormalize,
            engines=request.engines,
            routed=routed,
            only_batch=only,
        )
        yield stack.enter_context(with_other_exporters(candidate, request.threads))


def one_batch(model: Model, request: BenchRequest) -> int | None:
    """Returns the one batch size that a model is measured in; None where any will do.

    It is that of the inputs that it computes together, or the one that is asked for where outputs
    depend on the others of a batch: the graphs are for that size alone.
    """
    if model.batch_of > 1:
        return model.batch_of
    if len(request.batches) > 1 or len(model.inputs) > 1:
        return None
    (size,) = request.batches
    return size if depends_on_batch(model, size) else None


def token_routed(model: Model) -> bool:
    """Whether a model has experts whose router is part of the network around them."""
    return any(layer.spec.flat for layer in model.layers.values())


def _jobs(model: Model, ks: Sequence[KOption]) -> list[ExportJob]:
    """The job of each k, those that mean the same once."""
    jobs: list[ExportJob] = []
    for k in ks:
        job = export_job(model, ExportOptions(k=k))
        if job.k not in [other.k for other in jobs]:
            jobs.append(job)
    return jobs


def _by_model(jobs: Sequence[ExportJob]) -> list[list[ExportJob]]:
    """Jobs whose model is the same together: it is traced once. A router's k makes another."""
    groups: dict[int, list[ExportJob]] = {}
    for job in jobs:
        groups.setdefault(id(job.model), []).append(job)
    return list(groups.values())


def _refused(
    reasons: Mapping[tuple[int, str], MoexportError], runtime: GraphEngine, precision: Precision
) -> list[GraphSource]:
    """A graph for every k and lowering that cannot be exported."""
    return [
        GraphSource(
            k=k,
            lowering=lowering,
            loader=Refused(reason),
            provider=runtime.provider,
            precision=precision,
            engine=runtime.engine,
        )
        for (k, lowering), reason in reasons.items()
    ]


def _sources(
    model: Model,
    request: BenchRequest,
    inputs: Feed | None,
    *,
    jobs: Sequence[ExportJob],
    runtime: GraphEngine,
    precision: Precision,
    folder: Path,
    traces: dict[object, ir.Model],
    only: int | None,
) -> list[GraphSource]:
    """Exports graphs for a runtime, equal ones once; each that cannot be is refused by itself."""
    routed = token_routed(model)
    data = inputs if precision in ("int8", "fp8") and not routed else None
    # What is calibrated is every expert; a router chooses those of its own k.
    options = _options(request, runtime, precision, jobs[0].options.k if routed else "n")
    if only is not None and model.batch_of == 1:
        options = replace(options, batch=_exactly(only))
    exporting = export_job(model, options, data=data)
    key = id(jobs[0].model), exporting.options.opset, frozenset(exporting.fixed.items())
    if key not in traces:
        traces[key] = trace(exporting.model, opset=exporting.options.opset, fixed=exporting.fixed)
    planned = plan(exporting, traces[key], found_ranges(exporting, traces[key]))
    graphs: dict[tuple[int, tuple[str, ...]], GraphPlan] = {}
    batches: dict[tuple[int, tuple[str, ...]], set[int]] = {}
    reasons: dict[tuple[int, str], MoexportError] = {}
    ks = [whole_k(job) for job in jobs]
    for k, lowering, batch in product(ks, request.lowerings, request.batches):
        job = replace(planned.job, options=replace(options, batch=_exactly(batch)), k=k)
        try:
            graph = plan_graph(job, planned.traced, lowering, f"model-{len(graphs)}.onnx")
        except LoweringError as error:
            reasons[largest_k(k), lowering] = error
        else:
            choice = largest_k(k), graph.lowerings
            graphs.setdefault(choice, graph)
            # What `auto` chose for one batch is timed at that.
            batches.setdefault(choice, set()).update(
                [batch] if lowering == AUTO else request.batches
            )
    refused = _refused(reasons, runtime, precision)
    if not graphs:
        return refused
    planned = replace(planned, graphs=tuple(graphs.values()))
    lowered = write_graphs(planned, folder)
    engine = None
    if runtime.backend is not None:  # engines are built into a bundle
        manifest = manifest_of(planned, lowered, {}, folder)
        (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
        engine = engine_options(model, request, runtime.backend, inputs)
    linears = {linear.node: linear.reason for linear in planned.precision.linears}
    return refused + [
        graph_source(
            runtime,
            request.threads,
            model,
            folder / graph.file,
            k,
            names,
            selected=selected_values(lowered[graph.file].values),
            integers=integer_linears(folder / graph.file, rounded_linears(linears)),
            engine=engine,
            precision=precision,
            k_by_layer={layer.name: layer.work.k for layer in graph.layers},
            batches=frozenset(batches[k, names]) if len(request.batches) > 1 else None,
        )
        for (k, names), graph in graphs.items()
    ]


def _options(
    request: BenchRequest, runtime: GraphEngine, precision: Precision, k: KOption
) -> ExportOptions:
    """How graphs for a runtime are exported."""
    assert runtime.target is not None
    scope = request.quantize if precision == "int8" else "experts"
    return ExportOptions(
        k=k,
        target=runtime.target,
        renormalize=request.renormalize,
        precision=PrecisionOptions(precision, scope=scope),
        verify=False,
    )


def graph_source(
    runtime: GraphEngine,
    threads: int | None,
    model: Model,
    file: Path,
    k: int,
    lowerings: Iterable[str],
    *,
    selected: Mapping[str, str],
    precision: str,
    given_k: int | None = None,
    engine: EngineOptions | None = None,
    parity: Mapping[str, Any] | None = None,
    missed: str | None = None,
    **graph: Any,
) -> GraphSource:
    """A graph's `file` in a runtime; `given_k` where k is an input of the graph.

    `parity` is what a bundle was exported with, whose bounds may be wider than the usual ones, and
    `missed` how the graph misses that comparison now: such a graph is not measured.
    """
    specs = {name: layer.spec for name, layer in model.layers.items()}
    opened = GraphFile(
        path=file,
        selected=selected,
        experts={
            name: spec.experts
            for name, spec in specs.items()
            if spec.chooses_sets or (spec.flat and name in selected)
        },
        k=given_k,
        threads=threads,
        options=engine,
    )
    loader, lowering = runtime.loader(opened), "+".join(sorted(set(lowerings)))
    if missed is not None:
        loader = Refused(ParityError(f"{file}: it is not PyTorch's any more: {missed}"))
    return GraphSource(
        k=k,
        lowering=lowering,
        loader=loader,
        provider=runtime.provider,
        precision=precision,
        engine=runtime.engine,
        bounds=_bounds(runtime, lowering, model, precision, parity),
        **graph,
    )


def _bounds(
    runtime: GraphEngine,
    lowering: str,
    model: Model,
    precision: str,
    parity: Mapping[str, Any] | None,
) -> Tolerance | None:
    """How far a graph may be off: as far as `verify` lets it, on a GPU and as it was exported.

    What an inexact lowering adds is as much as a GPU may.
    """
    known = next(
        ((name, tolerance) for name, tolerance in TOLERANCES.items() if name == precision), None
    )
    if known is None:
        return None
    numbers, usual = known
    used, target = lowering.split("+"), runtime.target or "onnx"
    specs = [layer.spec for layer in model.layers.values()]
    ways = ((spec, lowering_of(spec.kind, name)) for spec in specs for name in used)
    inexact = any(record and record.inexact(spec, numbers, target) for spec, record in ways)
    on_cpu = runtime.provider == "cpu"
    bounds = usual
    if inexact or not on_cpu:
        bounds = on_gpu(usual, precision, tf32=not on_cpu)
    if parity is None:
        return bounds
    recorded_bounds = recorded(parity, precision)
    return replace(bounds, atol=recorded_bounds.atol, rtol=max(bounds.rtol, recorded_bounds.rtol))


def engine_options(
    model: Model, request: BenchRequest, backend: str, inputs: Feed | None = None
) -> EngineOptions:
    """Returns how engines are compiled: a profile for each batch size, of exactly these inputs."""
    sizes: dict[str, AxisRange] = {}
    if isinstance(inputs, np.ndarray) and inputs.ndim == len(model.input.shape):
        named = zip(model.input.shape[1:], inputs.shape[1:], strict=True)
        sizes = {axis: _exactly(size) for axis, size in named if isinstance(axis, str)}
    return EngineOptions(
        profiles=tuple({"batch": _exactly(batch)} | sizes for batch in sorted({*request.batches})),
        compute_capabilities=(CURRENT,) if BACKENDS[backend].cards else (),
        cache=default_cache(),
    )


def rounded_linears(linears: Mapping[str, str | None]) -> list[str]:
    """Those linear layers of a backbone that nothing kept in floats."""
    return [node for node, reason in linears.items() if reason is None]


def _exactly(size: int) -> AxisRange:
    return AxisRange(size, size, size)


def told_apart(sources: Sequence[GraphSource]) -> tuple[GraphSource, ...]:
    """Graphs of the same lowerings, in other layers, are told apart by the batch they are for."""
    named: list[GraphSource] = []
    seen: set[tuple[object, ...]] = set()
    for source in sources:
        own = source
        key = own.k, own.engine, own.provider, own.precision, own.scope
        if (*key, own.lowering) in seen and own.batches:
            own = replace(own, lowering=f"{own.lowering} (batch {min(own.batches)})")
        seen.add((*key, own.lowering))
        named.append(own)
    return tuple(named)


def largest_k(ks: Mapping[str, int]) -> int:
    return max(ks.values())


def model_name(source: str) -> str:
    """What a model is called in results: its file without the ending, or the code that makes it."""
    return source if names_code(source) else Path(source).stem
