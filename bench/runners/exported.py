"""The graphs that a benchmark exports for a model: by k, precision, lowering and batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ...calibration.table import CalibrationTable
from ...common.console import Progress, Silent
from ...common.writing import scratch_folder
from ...data.batches import Feed, rebatched
from ...data.user_code import names_code
from ...errors import CalibrationError, LoweringError, MoexportError, ParityError, UsageError
from ...exporter.bundle.manifest import MANIFEST_FILE
from ...exporter.bundle.parity import GPU_RTOL, TOLERANCES, Tolerance, gpu_bounds, stored_bounds
from ...exporter.export import ranges_for
from ...exporter.inputs import random_arrays
from ...exporter.job import ExportJob, export_job, layers_to_plan
from ...exporter.model import Model
from ...exporter.options import AUTO, ExportOptions
from ...exporter.plan import GraphPlan, Plan, plan_graph, plan_traced
from ...exporter.reference import run_untouched
from ...exporter.tensorrt.backends import BACKENDS
from ...exporter.tensorrt.cache import default_cache
from ...exporter.tensorrt.options import CURRENT, EngineOptions
from ...exporter.trace import trace
from ...exporter.write import manifest_of, write_graphs
from ...graphs.k import KOption
from ...graphs.lower import selected_values
from ...graphs.lowerings import lowering_of
from ...graphs.sizes import PARITY_BATCHES, AxisRange
from ...graphs.targets import Precision
from ..engines import KINDS, GraphEngine
from ..measure.roofline import integer_linears
from ..plan import Candidate, GraphSource, constant_k, has_token_routed_layer
from ..request import RANGED, BenchRequest
from .base import GraphFile, Refused
from .other_exporters import with_other_exporters


def graph_engines(request: BenchRequest) -> tuple[GraphEngine, ...]:
    """Returns the requested engines that run exported graphs, each with its target."""
    named = [kind for kind in map(KINDS.get, request.engines) if isinstance(kind, GraphEngine)]
    return tuple(
        replace(kind, target=request.target or "onnx") if kind.target == "ort-cpu" else kind
        for kind in named
        if kind.target is not None
    )


@contextmanager
def exported(
    model: Model,
    request: BenchRequest,
    *,
    inputs: Feed | None = None,
    table: CalibrationTable | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Iterator[Candidate]:
    """Yields a model with a graph per k and lowering, exported to a temporary folder.

    The INT8 ranges come from the `table`, or from `inputs` [samples, …]; engines are compiled for
    the shape of the inputs or, without inputs, the sizes of the export. New ranges are written to
    the folder of the results.

    The graphs for one engine and precision share one weights file. `auto` is the cost model's
    choice at each of the batch sizes, and is timed at that size.
    """
    progress = progress or Silent()
    graphs: list[GraphSource] = []
    runtimes, lowerings = graph_engines(request), request.lowerings
    jobs = _jobs(model, request.ks)
    # For a router's k, or a share of each level of a hierarchy, the model is a different one.
    changed = [job for job in jobs if has_token_routed_layer(model) or job.model is not model]
    jobs_by_k = {largest_k(constant_k(job)): job for job in changed}
    ks = [largest_k(constant_k(job)) for job in jobs]
    only = required_batch(model, request)
    exporter = _Exporter(model, request, inputs, table, only)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("bench"))
        for runtime, precision in product(runtimes, request.precisions):
            progress.step(f"exporting {model.source.path} for {runtime.name} in {precision}")
            try:
                for index, group in enumerate(_by_model(jobs)):
                    subfolder = folder / f"{runtime.name}-{precision}-{index}"
                    subfolder.mkdir()
                    graphs += exporter.sources(group, runtime, precision, subfolder)
            except (LoweringError, UsageError, CalibrationError) as error:
                given = table is not None and isinstance(error, CalibrationError)
                if given or (precision == "fp32" and runtime.backend is None):
                    raise
                # A precision that a model or target lacks becomes a row with the reason.
                combinations = product(ks, lowerings)
                graphs += _refused(dict.fromkeys(combinations, error), runtime, precision)
        errors = [graph.loader.reason for graph in graphs if isinstance(graph.loader, Refused)]
        if graphs and len(errors) == len(graphs):
            raise errors[0]
        exporter.traces.clear()
        candidate = Candidate(
            name=name or model_name(model.source.path),
            model=model,
            ks=tuple(sorted(set(ks), reverse=True)),
            graphs=with_distinct_lowerings(graphs),
            renormalize=request.renormalize,
            engines=request.engines,
            jobs_by_k=jobs_by_k,
            only_batch=only,
        )
        yield stack.enter_context(with_other_exporters(candidate, request.threads))


def required_batch(model: Model, request: BenchRequest) -> int | None:
    """Returns the only batch size of a model; None if any works.

    It is the number of inputs that the model computes together, or the requested size if outputs
    depend on the rest of the batch: the graphs then have that size.
    """
    if model.batch_of > 1:
        return model.batch_of
    if len(request.batches) > 1 or len(model.inputs) > 1:
        return None
    (size,) = request.batches
    return size if depends_on_batch(model, size) else None


def depends_on_batch(model: Model, batch: int) -> bool:
    """Returns whether a network's outputs for random inputs depend on the rest of the batch.

    This is assumed if the network cannot run one input alone.
    """
    arrays = random_arrays(model, max(batch, PARITY_BATCHES[1]))
    together = run_untouched(model, arrays)[0]
    try:
        alone = [run_untouched(model, part)[0] for part in rebatched([arrays], 1)]
    except (RuntimeError, ValueError, IndexError, UsageError):
        return True
    difference = np.abs(np.concatenate(alone) - together).max(initial=0.0)
    return not difference <= GPU_RTOL * np.abs(together).max(initial=0.0)


def _jobs(model: Model, ks: Sequence[KOption]) -> list[ExportJob]:
    """Returns the job of each k, without duplicates.

    Raises `UsageError` if the rows of two jobs could not be distinguished.
    """
    jobs: list[ExportJob] = []
    for k in ks:
        job = export_job(model, ExportOptions(k=k))
        if any(_same_layers(job, other) for other in jobs):
            continue
        largest = largest_k(constant_k(job))
        same = next((o.options.k for o in jobs if largest_k(constant_k(o)) == largest), None)
        if same is not None:
            raise UsageError(
                f"--k {same} and --k {k}: both keep {largest} experts in the layer or level that "
                "keeps the most, but that number identifies the rows",
                hint="measure them in two runs",
            )
        jobs.append(job)
    return jobs


def _same_layers(job: ExportJob, other: ExportJob) -> bool:
    """Returns whether two jobs keep the same number of experts in each layer and level."""
    specs, others = ([layer.spec for layer in each.model.layers.values()] for each in (job, other))
    return job.k == other.k and (specs == others or has_token_routed_layer(job.model))


def _by_model(jobs: Sequence[ExportJob]) -> list[list[ExportJob]]:
    """Groups jobs by model, which is traced once; each k of a router has its own model."""
    groups: dict[int, list[ExportJob]] = {}
    for job in jobs:
        groups.setdefault(id(job.model), []).append(job)
    return list(groups.values())


def _refused(
    reasons: Mapping[tuple[int, str], MoexportError], runtime: GraphEngine, precision: Precision
) -> list[GraphSource]:
    """Returns, for every k and lowering in `reasons`, a graph that fails to open."""
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


@dataclass(frozen=True, slots=True)
class _GraphChoice:
    """A graph to measure, the arguments of the command that exports it, and its batches."""

    graph: GraphPlan
    deploy: tuple[str, ...]
    batches: set[int]


@dataclass(frozen=True, slots=True)
class _Exporter:
    """Exports the graphs of a model, which is traced once; the parameters are as in `exported`.

    If outputs depend on the rest of the batch, graphs have the batch size `only`.
    """

    model: Model
    request: BenchRequest
    inputs: Feed | None
    table: CalibrationTable | None
    only: int | None
    traces: dict[object, ir.Model] = field(default_factory=dict)

    def sources(
        self, jobs: Sequence[ExportJob], runtime: GraphEngine, precision: Precision, folder: Path
    ) -> list[GraphSource]:
        """Exports graphs for a runtime, equal graphs once; failures are recorded one by one."""
        model, request = self.model, self.request
        # Calibration covers every expert or, with a router, the experts that it chooses.
        planned_k = jobs[0].options.kept if has_token_routed_layer(model) else "n"
        options = _options(request, runtime, precision, planned_k)
        if self.only is not None and model.batch_of == 1:
            options = replace(options, batch=_exactly(self.only))
        planned = self._plan_export(options, jobs[0].model)
        chosen, reasons = self._choose_graphs(planned, jobs, options)
        refused = _refused(reasons, runtime, precision)
        if not chosen:
            return refused
        planned = replace(planned, graphs=tuple(each.graph for each in chosen.values()))
        lowered = write_graphs(planned, folder)
        engine = None
        if runtime.backend is not None:  # engines are built into a bundle
            manifest = manifest_of(planned, lowered, {}, folder)
            (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
            engine = engine_options(model, request, runtime.backend, self.inputs)
        linears = {linear.node: linear.reason for linear in planned.precision.linears}
        return refused + [
            graph_source(
                runtime,
                request.threads,
                model,
                folder / each.graph.file,
                k,
                names,
                selected=selected_values(lowered[each.graph.file].values),
                integer_linears=integer_linears(folder / each.graph.file, linears),
                engine=engine,
                precision=precision,
                k_by_layer={layer.name: layer.typical_k for layer in each.graph.layers},
                batches=frozenset(each.batches) if len(request.batches) > 1 else None,
                deploy=each.deploy,
                table=planned.table,
            )
            for (k, names), each in chosen.items()
        ]

    def _plan_export(self, options: ExportOptions, computed: Model) -> Plan:
        """Returns the plan of an export of all experts, with its ranges.

        `computed` is the jobs' model, whose layers are planned unless tokens are routed.
        """
        routed = has_token_routed_layer(self.model)
        ranged = options.precision in RANGED and not routed
        data = self.inputs if ranged and self.table is None else None
        table = self.table if ranged else None
        job = export_job(self.model, options, data=data, calibration=table)
        if not routed:
            layers = layers_to_plan(computed, job.k, job.options)
            job = replace(job, model=computed, layers=layers)
        key = id(computed), job.options.least_opset, frozenset(job.fixed.items())
        if key not in self.traces:
            self.traces[key] = trace(job.model, opset=job.options.least_opset, fixed=job.fixed)
        return plan_traced(job, self.traces[key], ranges_for(job, self.traces[key]))

    def _choose_graphs(
        self, planned: Plan, jobs: Sequence[ExportJob], options: ExportOptions
    ) -> tuple[
        dict[tuple[int, tuple[str, ...]], _GraphChoice], dict[tuple[int, str], MoexportError]
    ]:
        """Returns the graphs by k and lowerings, and why others cannot be exported."""
        request = self.request
        chosen: dict[tuple[int, tuple[str, ...]], _GraphChoice] = {}
        reasons: dict[tuple[int, str], MoexportError] = {}
        for requested, lowering, batch in product(jobs, request.lowerings, request.batches):
            k = constant_k(requested)
            sized = replace(options, batch=_exactly(batch))
            layers = layers_to_plan(planned.job.model, k, sized)
            job = replace(planned.job, options=sized, layers=layers)
            job = job.computed_in(planned.precision.layers)
            try:
                graph = plan_graph(job, planned.traced, lowering, f"model-{len(chosen)}.onnx")
            except LoweringError as error:
                reasons[largest_k(k), lowering] = error
                continue
            deploy: tuple[str, ...] = ()
            if planned.table is None or request.folder is not None:
                deploy = _export_arguments(requested, options, graph, self.only)
            if planned.table is not None and request.folder is not None:
                deploy += ("--calibration", str(request.folder / table_file(planned.table)))
            choice = chosen.setdefault(
                (largest_k(k), graph.lowerings), _GraphChoice(graph, deploy, set())
            )
            # The choice of `auto` for one batch size is timed at that size.
            choice.batches.update([batch] if lowering == AUTO else request.batches)
        return chosen, reasons


def table_file(table: CalibrationTable) -> str:
    """Returns the name of the file of ranges next to the results."""
    return f"calibration-{hashlib.sha256(table.to_json().encode()).hexdigest()[:12]}.json"


def _export_arguments(
    job: ExportJob, options: ExportOptions, graph: GraphPlan, only: int | None
) -> tuple[str, ...]:
    """Returns the arguments that export a graph again, except model, ranges and batch size.

    A graph whose layers have several lowerings is the choice of `auto` for its batch size.
    """
    (*names,) = {*graph.lowerings}
    arguments = ["export", "--k", _k_argument(job), "--target", options.target]
    arguments += ["--lowering", names[0] if len(names) == 1 else AUTO]
    arguments += ["--precision", options.precision] if options.precision != "fp32" else []
    arguments += ["--quantize", options.quantize] if options.quantize != "experts" else []
    arguments += ["--renormalize"] if options.renormalize else []
    arguments += ["--batch", str(only)] if only is not None else []
    return tuple(arguments)


def _k_argument(job: ExportJob) -> str:
    """Returns k as an argument of export: one number if all layers share it, or as requested."""
    ks, k = {*constant_k(job).values()}, job.options.kept
    if k == "n" or isinstance(k, tuple) or len(ks) > 1:
        return ",".join(map(str, k)) if isinstance(k, tuple) else str(k)
    return str(ks.pop())


def _options(
    request: BenchRequest, runtime: GraphEngine, precision: Precision, k: KOption
) -> ExportOptions:
    assert runtime.target is not None
    return ExportOptions(
        k=k,
        target=runtime.target,
        renormalize=request.renormalize,
        precision=precision,
        quantize=(request.quantize or "experts") if precision == "int8" else "experts",
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
    """Returns a graph's `file` for a runtime; `given_k` is set if k is an input of the graph.

    `parity` is a bundle's record, whose bounds may be wider than the default. `missed` says how
    the graph now fails that comparison; such a graph is not measured.
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
        loader = Refused(ParityError(f"{file} no longer computes what PyTorch does: {missed}"))
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
    """Returns the bounds of a graph's error: those of `verify`, for its device and its export.

    An inexact lowering may add as much error as a GPU.
    """
    numbers = next((name for name in TOLERANCES if name == precision), None)
    if numbers is None:
        return None
    default = TOLERANCES[numbers]
    names, target = lowering.split("+"), runtime.target or "onnx"
    specs = [layer.spec for layer in model.layers.values()]
    records = ((spec, lowering_of(spec.kind, name)) for spec in specs for name in names)
    inexact = any(record and record.inexact(spec, numbers, target) for spec, record in records)
    on_cpu = runtime.provider == "cpu"
    bounds = default
    if inexact or not on_cpu:
        bounds = gpu_bounds(default, precision, tf32=not on_cpu)
    if parity is None:
        return bounds
    recorded_bounds = stored_bounds(parity, precision)
    return replace(bounds, atol=recorded_bounds.atol, rtol=max(bounds.rtol, recorded_bounds.rtol))


def engine_options(
    model: Model, request: BenchRequest, backend: str, inputs: Feed | None = None
) -> EngineOptions:
    """Returns options for engines with a profile for each batch size, for inputs of this shape."""
    sizes: dict[str, AxisRange] = {}
    if isinstance(inputs, np.ndarray) and inputs.ndim == len(model.input.shape):
        named = zip(model.input.shape[1:], inputs.shape[1:], strict=True)
        sizes = {axis: _exactly(size) for axis, size in named if isinstance(axis, str)}
    return EngineOptions(
        profiles=tuple({"batch": _exactly(batch)} | sizes for batch in sorted({*request.batches})),
        compute_capabilities=(CURRENT,) if BACKENDS[backend].cards else (),
        cache=default_cache(),
    )


def _exactly(size: int) -> AxisRange:
    return AxisRange(size, size, size)


def with_distinct_lowerings(sources: Sequence[GraphSource]) -> tuple[GraphSource, ...]:
    """Adds the batch size to a graph's lowering if another graph would have the same row."""
    named: list[GraphSource] = []
    for source in sources:
        lowering = source.lowering
        if source.batches and any(other.row_key == source.row_key for other in named):
            lowering = f"{lowering} (batch {min(source.batches)})"
        named.append(replace(source, lowering=lowering))
    return tuple(named)


def largest_k(ks: Mapping[str, int]) -> int:
    return max(ks.values())


def model_name(source: str) -> str:
    """Returns a model's name in results: its file without the suffix, or the name of its code."""
    return source if names_code(source) else Path(source).stem
