"""What an export will do: every layer's precision and lowering, before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

import onnx_ir as ir

from ..calibration.table import CalibrationTable
from ..common.console import Progress
from ..errors import UsageError
from ..graphs.fusion.fuse import FUSED_OPSET, fuse, join_products
from ..graphs.lowerings.choice import LoweringChoice, Span, batch_spans, check, choose
from ..graphs.lowerings.cost import AnyWork
from ..graphs.targets import TARGETS
from .bundle.manifest import MAIN_GRAPH, Tuning
from .bundle.weights import INLINE_BYTES, WEIGHTS_FILE, layer_bytes
from .job import ExportJob
from .options import AUTO, TUNE
from .quantization.precision import PrecisionPlan, Retention, apply_precision

DENSE = "dense"
"""The lowering that copies no weights, beside one that copies more the larger k is."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer's part of a graph. `k` is None where k is a graph input."""

    name: str
    k: int | None
    choice: LoweringChoice
    work: AnyWork


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """One graph of the bundle: its file and its layers, in execution order.

    `batches` are the first and the last size of the batch that it is for, where others are for the
    rest.
    """

    file: str
    layers: tuple[LayerPlan, ...]
    batches: Span | None = None

    @property
    def predicted_us(self) -> float:
        """The MoE layers' predicted time on one batch; the backbone is not counted."""
        return sum(layer.choice.predicted_us for layer in self.layers)

    @property
    def lowerings(self) -> tuple[str, ...]:
        """The lowering of each layer, in execution order."""
        return tuple(layer.choice.lowering.name for layer in self.layers)

    @property
    def title(self) -> str:
        """Its lowerings, each once: `gather+grouped`."""
        return "+".join(sorted(set(self.lowerings)))


@dataclass(frozen=True)
class Plan:
    """All that is known of an export before anything is written.

    `traced` is the traced graph, its backbone in the precision of the plan; `table` the ranges that
    were taken. `tuning` is what was measured for `--lowering tune`.
    """

    job: ExportJob
    traced: ir.Model
    table: CalibrationTable | None
    precision: PrecisionPlan
    graphs: tuple[GraphPlan, ...]
    tuning: Tuning | None = None

    @property
    def weights_bytes(self) -> int:
        """The bytes of the weights that the graphs share."""
        backbone = sum(
            tensor.nbytes
            for value in self.traced.graph.initializers.values()
            if (tensor := value.const_value) is not None and tensor.nbytes >= INLINE_BYTES
        )
        return backbone + sum(
            layer_bytes(layer, self.precision.layers[name])
            for name, layer in self.job.model.layers.items()
        )

    @property
    def files(self) -> dict[str, int | None]:
        """Names of the files to write, with their bytes where those are known beforehand."""
        return {WEIGHTS_FILE: self.weights_bytes} | {graph.file: None for graph in self.graphs}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of k and the precision, and of graphs for some batches alone."""
        options, retention = self.job.options, self.precision.retention
        notes = _share_notes(self.job)
        notes += options.precision.notes(options.target) if retention is None else retention.notes()
        by_k = TARGETS[options.target].compiled and options.lowerings == (AUTO,)
        if by_k and len(self.graphs) > 1:  # as `plan_auto` gives them
            main, dense = self.graphs
            notes += (
                f"k is an input: {main.file} ({main.title}) copies the weights of k experts, and "
                f"{dense.file} none, which is for a k near n: `--graph {DENSE}` runs it",
            )
        spans = [
            f"{graph.file} ({graph.title}) for batches of {_span_text(graph.batches)}"
            for graph in self.graphs
            if graph.batches is not None
        ]
        if not spans:
            return notes
        return (
            *notes,
            f"no single graph is fast at every size of --batch {options.batch}: "
            f"{', '.join(spans)}; a session of the bundle, `run` and `bench` take the one for a "
            "call's batch",
        )


def _share_notes(job: ExportJob) -> tuple[str, ...]:
    """What a share of k came to, where layers were trained with fewer experts than they have."""
    share = job.options.k
    if not isinstance(share, Fraction):
        return ()
    specs = {name: layer.spec for name, layer in job.model.layers.items()}
    counts = {
        (spec.trained_k, job.k[name], spec.experts)
        for name, spec in specs.items()
        if spec.trained_k < spec.experts
    }
    return tuple(
        f"--k {float(share):g}: {float(share):g} × the trained {trained} → {k} of {n} experts"
        for trained, k, n in sorted(counts)
    )


def plan(
    job: ExportJob,
    traced: ir.Model,
    table: CalibrationTable | None = None,
    *,
    floats: Collection[str] = (),
    retention: Retention | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Returns the plan for a job whose model was traced; `traced` stays as it is.

    `table` holds the ranges that INT8 needs, and 16-bit floats make use of; `floats` and
    `retention` are as in `apply_precision`. Raises `LoweringError` for a lowering that cannot
    serve, `UsageError` for weights larger than the target loads, and what `tune` raises where the
    lowerings are to be measured.
    """
    known, traced = traced.meta, traced.clone()
    traced.meta.update(known)  # for what sizes it holds
    if fuses(job):
        fuse(traced)
    precision = apply_precision(job, traced, table, floats=floats, retention=retention)
    if fuses(job):
        join_products(traced.graph)
    tuning = None
    if TUNE in job.options.lowerings:
        from .measured_lowerings import measure_lowerings  # for `tune` alone

        tuning = measure_lowerings(job, traced, precision, progress)
    if job.options.lowerings == (AUTO,) and not job.options.layer_lowerings:
        graphs = plan_auto(job, traced)
    else:
        graphs = tuple(
            plan_graph(job, traced, name, f"model-{name}.onnx" if index else MAIN_GRAPH, tuning)
            for index, name in enumerate(job.options.lowerings)
        )
    return _loadable(
        Plan(job=job, traced=traced, table=table, precision=precision, graphs=graphs, tuning=tuning)
    )


def fuses(job: ExportJob) -> bool:
    """Whether a job's graphs have the backbone's attention and norms as one op each.

    For models in FP32 around their experts: ONNX Runtime's CPU kernels are of that type. Not where
    an older opset was asked for.
    """
    options = job.options
    if options.exact_opset and options.opset < FUSED_OPSET:
        return False
    target = options.target
    return options.precision.float_name(target) == "fp32" and TARGETS[target].new_kernels


def _loadable(plan: Plan) -> Plan:
    """The plan, or `UsageError` for weights that its target cannot load."""
    target = plan.job.options.target
    most = TARGETS[target].most_bytes
    if most is not None and plan.weights_bytes > most:
        raise UsageError(
            f"--target {target}: the weights are {plan.weights_bytes / 1e9:.2f} GB, and it loads "
            f"{most / 1e9:.2f} GB",
            hint="use a smaller --precision (fp16, int8, int4), or serve the model from a machine",
        )
    return plan


def plan_auto(job: ExportJob, traced: ir.Model) -> tuple[GraphPlan, ...]:
    """Returns the graphs of `--lowering auto`: one, or several for parts of the range of batches.

    The main one, first, is that for OPT.
    """
    batch, works = job.options.batch, job.works(traced)
    spans: list[Span] = []
    if not TARGETS[job.options.target].compiled and not batch.fixed:
        spans = batch_spans([*works.values()], job.options.target, batch.min, batch.max)
    if len(spans) < 2:
        graph = plan_graph(job, traced, AUTO, MAIN_GRAPH)
        if TARGETS[job.options.target].compiled and copies_by_k(graph):
            return graph, _for_large_k(plan_graph(job, traced, DENSE, f"model-{DENSE}.onnx"))
        return (graph,)
    spans.sort(key=lambda span: not span[0] <= batch.opt <= span[1])
    graphs: list[GraphPlan] = []
    for span in spans:
        first, last = span
        sized = replace(batch, min=first, opt=min(max(batch.opt, first), last), max=last)
        part = replace(job, options=replace(job.options, batch=sized))
        graph = plan_graph(part, traced, AUTO, MAIN_GRAPH)
        taken = {graph.file for graph in graphs}
        names = (MAIN_GRAPH, f"model-{graph.title}.onnx", f"model-batch-{first}.onnx")
        file = next(name for name in names[1 if graphs else 0 :] if name not in taken)
        graphs.append(replace(graph, file=file, batches=span))
    return tuple(graphs)


def copied_bytes(graphs: Iterable[GraphPlan], batch: int, tokens: int) -> float:
    """Returns the bytes of weights, as FP32, that a layer copies for a batch, the most of any.

    Of tokens a layer has its own number where its network has no such axis.
    """
    return max(
        (
            layer.choice.lowering.copied_bytes(
                replace(
                    layer.work,
                    batch=batch,
                    precision="fp32",
                    tokens=layer.work.tokens if layer.work.tokens_fixed else tokens,
                )
            )
            for graph in graphs
            if graph.batches is None or graph.batches[0] <= batch <= graph.batches[1]
            for layer in graph.layers
        ),
        default=0.0,
    )


def copies_by_k(graph: GraphPlan) -> bool:
    """Whether a graph that takes k copies the weights of the chosen experts: of all at k = n."""
    return all(layer.k is None and layer.work.spec.chooses_sets for layer in graph.layers) and any(
        layer.choice.lowering.copied_bytes(layer.work) for layer in graph.layers
    )


def _for_large_k(graph: GraphPlan) -> GraphPlan:
    reason = "copies no weights, so it is for a k near n"
    layers = [replace(layer, choice=replace(layer.choice, reason=reason)) for layer in graph.layers]
    return replace(graph, layers=tuple(layers))


def _span_text(span: Span) -> str:
    first, last = span
    return str(first) if first == last else f"{first} to {last}"


def plan_graph(
    job: ExportJob, traced: ir.Model, name: str, file: str, tuning: Tuning | None = None
) -> GraphPlan:
    """Returns the plan of one graph: every layer with one lowering, or what is chosen for it."""
    batch = job.options.batch
    # An engine is compiled for OPT, and its profile says so.
    batches = () if TARGETS[job.options.target].compiled else (batch.min, batch.opt, batch.max)

    def chosen(work: AnyWork) -> LoweringChoice:
        if work.spec.name in job.options.layer_lowerings:
            lowering, why = job.options.layer_lowerings[work.spec.name]
            choice = check(lowering, work, job.options.target)
            return replace(choice, reason=why or choice.reason)
        if name == AUTO:
            return choose(work, job.options.target, batches, decodes=job.decodes)
        if name == TUNE:
            from .measured_lowerings import tuned_choice  # for `tune` alone

            assert tuning is not None, "`tune` measures before anything is planned"
            return tuned_choice(tuning.of(work.spec.name), work, job.options.target)
        return check(name, work, job.options.target)

    works = job.works(traced).items()
    return GraphPlan(
        file, tuple(LayerPlan(layer, job.k[layer], chosen(work), work) for layer, work in works)
    )
