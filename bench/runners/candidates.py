"""Makes what a benchmark measures from what a user names: models, exported for it, and bundles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...calibration.feeds import Array
from ...common.console import Progress, Silent
from ...common.locations import url_of
from ...common.user_code import names_code
from ...common.writing import scratch_folder
from ...errors import CalibrationError, LoweringError, MoexportError, ParityError, UsageError
from ...exporter.bundle.bundle import Bundle
from ...exporter.bundle.manifest import MANIFEST_FILE
from ...exporter.bundle.substitutes import read_substitutes
from ...exporter.bundle.verify import missed_parity, selected_values
from ...exporter.edits import Edits
from ...exporter.export import found_ranges
from ...exporter.inputs import AxisRange
from ...exporter.job import ExportJob, export_job
from ...exporter.model import Model
from ...exporter.options import AUTO, ExportOptions, KOption, PrecisionOptions
from ...exporter.parity import TOLERANCES, Tolerance, on_gpu, recorded
from ...exporter.plan import GraphPlan, plan, plan_graph
from ...exporter.tensorrt.backends import BACKENDS
from ...exporter.tensorrt.cache import default_cache
from ...exporter.tensorrt.options import CURRENT, EngineOptions
from ...exporter.trace import trace
from ...exporter.write import manifest_of, write_graphs
from ...graphs.layers.experts import Experts, ExpertsSpec
from ...graphs.lowerings import lowerings_of
from ...graphs.targets import Precision
from ..engines import KINDS, GraphEngine
from ..measure.roofline import integer_linears
from ..plan import Candidate, GraphSource, whole_k
from ..request import BenchRequest
from .base import GraphFile, Refused
from .models import loaded_as
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
    inputs: Array | None = None,
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
    routed = {_largest(whole_k(job)): job for job in jobs} if token_routed(model) else {}
    ks = [_largest(whole_k(job)) for job in jobs]
    traces: dict[object, ir.Model] = {}
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
            name=name or _named(model.source.path),
            model=model,
            ks=tuple(sorted(set(ks), reverse=True)),
            graphs=_told_apart(graphs),
            renormalize=request.renormalize,
            engines=request.engines,
            routed=routed,
            only_batch=model.batch_of if model.batch_of > 1 else None,
        )
        yield stack.enter_context(with_other_exporters(candidate, request.threads))


def token_routed(model: Model) -> bool:
    """Whether a model has experts whose router is part of the network around them."""
    return any(isinstance(layer, Experts) for layer in model.layers.values())


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
    inputs: Array | None,
    *,
    jobs: Sequence[ExportJob],
    runtime: GraphEngine,
    precision: Precision,
    folder: Path,
    traces: dict[object, ir.Model],
) -> list[GraphSource]:
    """Exports graphs for a runtime, equal ones once; each that cannot be is refused by itself."""
    routed = token_routed(model)
    data = inputs if precision in ("int8", "fp8") and not routed else None
    # What is calibrated is every expert; a router chooses those of its own k.
    options = _options(request, runtime, precision, jobs[0].options.k if routed else "n")
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
            reasons[_largest(k), lowering] = error
        else:
            choice = _largest(k), graph.lowerings
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
        _source(
            runtime,
            request.threads,
            model,
            folder / graph.file,
            k,
            names,
            selected=selected_values(lowered[graph.file].values),
            integers=integer_linears(folder / graph.file, _integers(linears)),
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


def _source(
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
            if spec.chooses_sets or (spec.kind == ExpertsSpec.kind and name in selected)
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
    inexact = any(
        record.name in used and record.inexact(layer.spec, numbers, target)
        for layer in model.layers.values()
        for record in lowerings_of(layer.spec.kind).values()
    )
    on_cpu = runtime.provider == "cpu"
    bounds = usual
    if inexact or not on_cpu:
        bounds = on_gpu(usual, precision, tf32=not on_cpu)
    if parity is None:
        return bounds
    recorded_bounds = recorded(parity)
    return replace(bounds, atol=recorded_bounds.atol, rtol=max(bounds.rtol, recorded_bounds.rtol))


def engine_options(
    model: Model, request: BenchRequest, backend: str, inputs: Array | None = None
) -> EngineOptions:
    """Returns how engines are compiled: a profile for each batch size, of exactly these inputs."""
    sizes: dict[str, AxisRange] = {}
    if inputs is not None and inputs.ndim == len(model.input.shape):
        named = zip(model.input.shape[1:], inputs.shape[1:], strict=True)
        sizes = {axis: _exactly(size) for axis, size in named if isinstance(axis, str)}
    return EngineOptions(
        profiles=tuple({"batch": _exactly(batch)} | sizes for batch in sorted({*request.batches})),
        compute_capabilities=(CURRENT,) if BACKENDS[backend].cards else (),
        cache=default_cache(),
    )


def _integers(linears: Mapping[str, str | None]) -> list[str]:
    """Those linear layers of a backbone that nothing kept in floats."""
    return [node for node, reason in linears.items() if reason is None]


def _exactly(size: int) -> AxisRange:
    return AxisRange(size, size, size)


def _told_apart(sources: Sequence[GraphSource]) -> tuple[GraphSource, ...]:
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


def _largest(ks: Mapping[str, int]) -> int:
    return max(ks.values())


def from_bundle(bundle: Bundle, request: BenchRequest, *, model: Model | None = None) -> Candidate:
    """Returns a bundle beside the PyTorch model it was made from.

    The k of a request are measured where the bundle's k is a graph input; a baked k stays. Without
    `model` the checkpoint that the manifest names is loaded; `UsageError` when it is gone or
    another. `BundleError` for a graph or weights that are not as they were written.
    """
    record, only = bundle.manifest, only_batch(bundle)
    if only is not None:
        request = replace(request, batch=(only,))
    edits = Edits.from_records(record.edits, str(bundle.path / MANIFEST_FILE))
    edits = edits.with_substitutes(read_substitutes(bundle.path))
    takes_k = record.k == "input"
    baked = {layer.name: layer.k for layer in record.layers if layer.k is not None}
    loaded = model or _source_of(bundle)
    routed = any(layer.kind == "experts" for layer in record.layers)
    routed &= loaded.layers.keys() == baked.keys()
    # Of experts that a router chooses another k is another model.
    k: KOption = tuple(baked[name] for name in loaded.layers) if routed else "n"
    job = export_job(loaded, ExportOptions(edits=edits, k=k))
    model = job.model
    wanted = request.ks if takes_k else ()
    ks = [_largest(whole_k(export_job(model, ExportOptions(k=k)))) for k in wanted]
    ks = ks or [_largest(baked)]
    linears = _integers(record.numbers.get("linears", {}))
    floating = frozenset(layer.name for layer in record.layers if layer.precision != "int8")
    graphs = []
    for graph in record.graphs:
        for_all = not graph.batches
        sizes = frozenset(b for b in request.batches if for_all or record.graph_for(b) is graph)
        file = bundle.graph_file(graph.file)
        integers = integer_linears(file, linears)
        # In INT8 the rows of a benchmark alone tell large differences only: this tells small ones.
        missed = missed_parity(bundle.path, record, graph)
        graphs += [
            _source(
                runtime,
                request.threads,
                model,
                file,
                k,
                graph.lowerings.values(),
                selected=graph.selected,
                given_k=k if takes_k else None,
                precision=record.precision,
                k_by_layer=baked,
                floating=floating,
                integers=integers,
                batches=sizes if len(request.batches) > 1 and runtime.backend is None else None,
                parity=graph.parity,
                missed=missed,
            )
            for k, runtime in product(ks, graph_engines(request))
            # Of graphs for some sizes of the batch each is timed at its own; an engine is the main.
            if (for_all or graph is record.graphs[0] if runtime.backend else sizes)
        ]
    return Candidate(
        name=bundle.path.name,
        model=model,
        ks=tuple(ks),
        graphs=_told_apart(graphs),
        renormalize=record.renormalize,
        engines=request.engines,
        routed={_largest(baked): job} if routed else {},
        only_batch=only,
    )


def only_batch(bundle: Bundle) -> int | None:
    """Returns the one batch size that a bundle is measured with; None where any will do.

    It is a constant of its graphs, or of the inputs that they compute together.
    """
    port = bundle.manifest.inputs[0]
    size = port.shape[0]
    return size if isinstance(size, int) else port.groups_of


def batch_sizes(listed: Sequence[Model | Bundle], request: BenchRequest) -> tuple[int, ...]:
    """Returns the batch sizes to measure: those of a request, else those that are all a bundle has.

    Raises `UsageError` for a bundle of one size that the request does not name, and for sizes of
    the request where all bundles have others.
    """
    held = [(item, only_batch(item)) for item in listed if isinstance(item, Bundle)]
    sizes = sorted({size for _, size in held if size is not None})
    for model in (item for item in listed if isinstance(item, Model) and item.batch_of > 1):
        sizes = sorted({*sizes, model.batch_of})
        if request.batch is not None and {*request.batches} != {model.batch_of}:
            raise UsageError(
                f"--batch {','.join(map(str, request.batches))}: {model.source.path} routes the "
                f"tokens of {model.batch_of} inputs together, and is measured with so many",
                hint=f"use --batch {model.batch_of}, or a group_size of one input",
            )
    if request.batch is None:
        return tuple(sizes) or request.batches
    fixed = len(held) > 0 and all(size is not None for _, size in held) and not _exports(listed)
    for bundle, size in held:
        if size is None or (size in request.batches and not fixed):
            continue
        if not {size} <= {*request.batches} <= {*sizes}:
            typed = ",".join(map(str, request.batches))
            raise UsageError(
                f"--batch {typed}: {bundle.path} was exported with --batch {size} and runs batches "
                "of that size alone",
                hint=f"use --batch {','.join(map(str, sizes))}, or export it with a range: "
                f"--batch 1:{size}:32",
            )
    return request.batches


def _exports(listed: Sequence[Model | Bundle]) -> bool:
    """Whether there is a model to export: one that no bundle follows."""
    pairs = zip(listed, (*listed[1:], None), strict=True)
    return any(isinstance(item, Model) and not isinstance(then, Bundle) for item, then in pairs)


def check_exported(listed: Sequence[Model | Bundle], request: BenchRequest) -> None:
    """Raises `UsageError` for what says how a model is exported where only bundles are."""
    if _exports(listed):
        return
    idle = {
        "--lowering": request.lowerings != (AUTO,),
        "--precision": request.precisions != ("fp32",),
        "--target": request.target != "onnx",
    }
    for option, changed in idle.items():
        if changed:
            raise UsageError(
                f"{option}: the bundles that were named are measured as they are",
                hint=f"leave {option} out, or name a model without its bundle",
            )


def with_sources(listed: Sequence[Model | Bundle]) -> list[Model | Bundle]:
    """Returns models and bundles, before the bundles of no model the one that they came from."""
    listing: list[Model | Bundle] = []
    came_from: str | None = None
    after_model = False
    for item in listed:
        if isinstance(item, Model):
            after_model = True
        elif not after_model and came_from != item.manifest.source.sha256:
            listing.append(_source_of(item))
            came_from = item.manifest.source.sha256
        listing.append(item)
    return listing


@contextmanager
def candidates_of(
    listed: Sequence[Model | Bundle],
    request: BenchRequest,
    progress: Progress,
    inputs: Array | None = None,
) -> Iterator[list[Candidate]]:
    """Yields a candidate per model; the bundles that follow a model are measured beside it."""
    candidates: list[Candidate] = []
    places: list[Path] = []
    model: Model | None = None
    with ExitStack() as stack:
        for item, then in zip(listed, (*listed[1:], None), strict=True):
            if isinstance(item, Bundle):
                beside = from_bundle(item, request, model=model)
                candidates.append(
                    stack.enter_context(with_other_exporters(beside, request.threads))
                )
                places.append(item.path)
                continue
            model = item
            if not isinstance(then, Bundle):
                candidates.append(
                    stack.enter_context(exported(model, request, inputs=inputs, progress=progress))
                )
                places.append(Path(model.source.path))
        yield with_distinct_names(candidates, places)


def _named(source: str) -> str:
    """What a model is called in results: its file without the ending, or the code that makes it."""
    return source if names_code(source) else Path(source).stem


def with_distinct_names(candidates: Sequence[Candidate], places: Sequence[Path]) -> list[Candidate]:
    """Returns candidates of one name with the folders before it that tell them apart.

    `places` are where they come from: `a/vit.pt` and `b/vit.pt` become `a/vit` and `b/vit`. One
    place named twice keeps its name, which a benchmark's plan refuses.
    """
    names = [candidate.name for candidate in candidates]
    folders = [place.absolute().parts[-2::-1] for place in places]  # from the last one upwards
    for above in zip_longest(*folders):  # at each depth the folder of every place
        repeated = {name for name in names if names.count(name) > 1}
        names = [
            f"{folder}/{name}" if name in repeated and folder is not None else name
            for name, folder in zip(names, above, strict=True)
        ]
    if len(set(names)) < len(names):
        return list(candidates)
    return [replace(one, name=name) for one, name in zip(candidates, names, strict=True)]


def _source_of(bundle: Bundle) -> Model:
    source = bundle.manifest.source
    path = url_of(source.path) or Path(source.path)
    if names_code(source.path):
        raise UsageError(
            f"{bundle.path}: made from {source.path}, which every benchmark needs beside it",
            hint=f"name it before the bundle: moexport bench {source.path} {bundle.path}",
        )
    if isinstance(path, Path) and not path.exists():
        raise UsageError(
            f"{bundle.path}: its checkpoint {path} is not here, and the untouched PyTorch model is "
            "part of every benchmark",
            hint=f"name the checkpoint before the bundle: moexport bench CHECKPOINT {bundle.path}",
        )
    model = loaded_as(source.path, family=source.family, config=source.config)
    if model.source.sha256() != source.sha256:
        raise UsageError(
            f"{path}: is not the checkpoint that {bundle.path} was made from (SHA-256 differs)",
            hint="export again, or name the right checkpoint before the bundle",
        )
    return model
