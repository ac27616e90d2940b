"""Plans an export: its trace and every layer's precision and lowering. Writes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import onnx_ir as ir

from ..common.console import Progress
from ..errors import UsageError
from ..graphs.lowerings.base import AnyPlan
from ..graphs.lowerings.choice import Span, batch_spans, check, choose
from ..graphs.sizes import DEFAULT_TOKENS, AxisRange
from ..graphs.targets import FUSED_OPSET, TARGETS, FusedOps
from .bundle.manifest import MAIN_GRAPH, Tuning
from .bundle.weights import INLINE_BYTES, WEIGHTS_FILE, layer_bytes
from .job import ExportJob, decodes
from .options import AUTO, TUNE
from .quantization.precision import PrecisionPlan, Retention, apply_precision
from .trace import trace, valid_sizes

if TYPE_CHECKING:
    from ..calibration.table import CalibrationTable

DENSE = "dense"
"""The lowering that copies no weights. If k is an engine's input, a second graph may use it."""


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """One graph of the bundle: its file and its layers, in execution order.

    `batches` are its smallest and largest batch sizes, if other graphs cover the other sizes.
    """

    file: str
    layers: tuple[AnyPlan, ...]
    batches: Span | None = None

    @property
    def predicted_us(self) -> float:
        """The MoE layers' predicted time on one batch; the backbone is not counted."""
        return sum(layer.predicted_us for layer in self.layers)

    @property
    def lowerings(self) -> tuple[str, ...]:
        """The lowering of each layer, in execution order."""
        return tuple(layer.lowering.name for layer in self.layers)

    @property
    def title(self) -> str:
        """Its distinct lowerings, joined: `gather+grouped`."""
        return "+".join(sorted(set(self.lowerings)))


@dataclass(frozen=True)
class Plan:
    """Everything known about an export before anything is written.

    `traced` is the traced graph, with its backbone in the precision of the plan; `table` has the
    ranges in use. `tuning` has the measurements of `--lowering tune`.
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
        """Names of the files to write, with their sizes in bytes if these are known."""
        return {WEIGHTS_FILE: self.weights_bytes} | {graph.file: None for graph in self.graphs}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on k, the precision, and graphs for certain batch sizes only."""
        options, retention = self.job.options, self.precision.retention
        notes = _share_notes(self.job)
        notes += options.notes if retention is None else retention.notes()
        may_have_dense_graph = TARGETS[options.target].compiled and options.lowerings == (AUTO,)
        if may_have_dense_graph and len(self.graphs) > 1:  # see `plan_auto`
            main, dense = self.graphs
            notes += (
                f"k is an input: {main.file} ({main.title}) copies the weights of k experts; "
                f"{dense.file} copies none and suits a k near n: `--graph {DENSE}` runs it",
            )
        spans = [
            f"{graph.file} ({graph.title}) for batches of "
            + " to ".join(str(size) for size in dict.fromkeys(graph.batches))
            for graph in self.graphs
            if graph.batches is not None
        ]
        if not spans:
            return notes
        return (
            *notes,
            f"no single graph is fast at every batch size in --batch {options.batches}: "
            f"{', '.join(spans)}; the bundle's session, `run` and `bench` choose the graph for "
            "each batch",
        )


def _share_notes(job: ExportJob) -> tuple[str, ...]:
    """Returns notes on the k that a share results in, for layers trained with k smaller than n."""
    share = job.options.kept
    if not isinstance(share, Fraction):
        return ()
    counts = {
        (spec.trained_k, job.k[name], spec.experts)
        for name, spec in job.model.specs.items()
        if spec.trained_k < spec.experts
    }
    return tuple(
        f"--k {float(share):g}: {float(share):g} × the trained {trained} → {k} of {n} experts"
        for trained, k, n in sorted(counts)
    )


def with_trace(
    job: ExportJob, progress: Progress, traced: ir.Model | None = None, *, tokens: int | None = None
) -> tuple[ExportJob, ir.Model]:
    """Returns a job, limited to the sizes for which its trace is valid, and that trace.

    A missing trace is made with this number of `tokens`, by default a few. Raises `UsageError`
    for requested sizes at which the network takes a different code path.
    """
    if traced is None:
        progress.step("tracing" if tokens is None else f"tracing with {tokens} tokens")
        sizes = job.traced_sizes | ({} if tokens is None else {"tokens": tokens})
        traced = trace(job.model, opset=job.options.least_opset, fixed=job.fixed, sizes=sizes)
    valid = valid_sizes(traced)
    for axis, requested in job.axis_ranges.items():
        low, high = valid.between(axis)
        high = requested.max if high is None else high
        if low <= requested.min and requested.max <= high:
            continue
        size = high + 1 if requested.max > high else low - 1
        common = AxisRange(
            max(low, requested.min), max(low, min(requested.opt, high)), min(high, requested.max)
        )
        changes = f"the network takes a different code path at {axis} size {size}"
        if axis == "tokens":
            changes = f"the network takes a different code path with {size} tokens"
            if job.options.token_counts == DEFAULT_TOKENS:
                job = limited_to_tokens(job, common.min, common.max, changes)
                continue
        raise UsageError(
            f"--{axis} {requested}: {changes}, but a graph can contain only one",
            hint=f"--{axis} {common} exports the graph for {common.min} to {common.max}"
            + (
                f", --{axis} {size}:{size}:{requested.max} the one for larger sizes"
                if size > high
                else ""
            ),
        )
    return job, traced


def limited_to_tokens(job: ExportJob, smallest: int, largest: int, why: str) -> ExportJob:
    """Returns the job with a smaller range of tokens than its default; `why` is noted."""
    before = job.axis_ranges["tokens"]
    optimum = max(smallest, min(before.opt, largest))
    tokens = AxisRange(max(smallest, before.min), optimum, min(largest, before.max))
    inputs = tuple(
        replace(spec, limits={**spec.limits, "tokens": tokens.max})
        if "tokens" in spec.shape and tokens.max < before.max
        else spec
        for spec in job.model.inputs
    )
    note = f"exported for {tokens.min} to {tokens.max} tokens: {why}"
    model = replace(job.model, inputs=inputs, notes=(*job.model.notes, note))
    return replace(job, model=model, options=replace(job.options, tokens=tokens))


def plan_traced(
    job: ExportJob,
    traced: ir.Model,
    table: CalibrationTable | None = None,
    *,
    floats: Collection[str] = (),
    retention: Retention | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Returns the plan for a job whose model was traced; `traced` is not changed.

    `table` has the ranges that INT8 needs and 16-bit floats use; `floats` and `retention` are as in
    `apply_precision`. Raises `UsageError` for weights larger than the target can load.
    """
    meta, traced = traced.meta, traced.clone()
    traced.meta.update(meta)  # the sizes for which it is valid
    fused = fused_ops(job)
    if fused.floats:
        from ..graphs.fusion.fuse import fuse  # for these targets only

        fuse(traced, fused, newest=_allows_newest_ops(job))
    precision = apply_precision(job, traced, table, floats=floats, retention=retention)
    job = job.computed_in(precision.layers)
    if fused.joined:
        from ..graphs.fusion.fuse import join_products

        join_products(traced.graph)
    tuning = None
    if TUNE in job.options.lowerings:
        from .measured_lowerings import measure_lowerings  # for `tune` only

        tuning = measure_lowerings(job, traced, precision, progress)
    if job.options.lowerings == (AUTO,) and not job.options.layer_lowerings:
        graphs = plan_auto(job, traced)
    else:
        graphs = tuple(
            plan_graph(job, traced, name, f"model-{name}.onnx" if index else MAIN_GRAPH, tuning)
            for index, name in enumerate(job.options.lowerings)
        )
    plan = Plan(
        job=job, traced=traced, table=table, precision=precision, graphs=graphs, tuning=tuning
    )
    limit = TARGETS[job.options.target].most_bytes
    if limit is not None and plan.weights_bytes > limit:
        raise UsageError(
            f"--target {job.options.target}: the weights take {plan.weights_bytes / 1e9:.2f} GB, "
            f"but this target loads at most {limit / 1e9:.2f} GB",
            hint="use a smaller --precision (fp16, int8, int4), or run the model on a server",
        )
    return plan


def fused_ops(job: ExportJob) -> FusedOps:
    """Returns the fused ops that a job's graphs use for parts of the network outside MoE layers.

    Empty if the target has no such ops for the float type (ONNX Runtime's CPU kernels are FP32
    only, whatever the experts' type), or if they need a newer opset than requested.
    """
    options = job.options
    fused = TARGETS[options.target].fused
    fits = options.float_name in fused.floats
    return fused if fits and (fused.any_opset or _allows_newest_ops(job)) else FusedOps()


def _allows_newest_ops(job: ExportJob) -> bool:
    """Whether the requested opset allows the newest ops that fusion writes."""
    return job.options.opset is None or job.options.least_opset >= FUSED_OPSET


def plan_auto(job: ExportJob, traced: ir.Model) -> tuple[GraphPlan, ...]:
    """Returns the graphs of `--lowering auto`: one, or one for each span of batch sizes.

    The first, which is the main one, is for OPT.
    """
    batch = job.options.batches
    spans: list[Span] = []
    if not TARGETS[job.options.target].compiled and not batch.fixed:
        spans = batch_spans(job.traced_layers(traced), job.options.target, batch.min, batch.max)
    if len(spans) < 2:
        graph = plan_graph(job, traced, AUTO, MAIN_GRAPH)
        k_is_input = all(layer.k is None and layer.spec.chooses_sets for layer in graph.layers)
        copies = any(layer.copied_bytes for layer in graph.layers)  # at k = n, of all experts
        if TARGETS[job.options.target].compiled and k_is_input and copies:
            dense = plan_graph(job, traced, DENSE, f"model-{DENSE}.onnx")
            reason = "copies no weights, so it is for a k near n"
            layers = tuple(replace(layer, reason=reason) for layer in dense.layers)
            return graph, replace(dense, layers=layers)
        return (graph,)
    spans.sort(key=lambda span: not span[0] <= batch.opt <= span[1])
    graphs: list[GraphPlan] = []
    for span in spans:
        first, last = span
        sized = replace(batch, min=first, opt=min(max(batch.opt, first), last), max=last)
        narrowed = replace(job, options=replace(job.options, batch=sized))
        graph = plan_graph(narrowed, traced, AUTO, MAIN_GRAPH)
        taken = {graph.file for graph in graphs}
        names = (MAIN_GRAPH, f"model-{graph.title}.onnx", f"model-batch-{first}.onnx")
        file = next(name for name in names[1 if graphs else 0 :] if name not in taken)
        graphs.append(replace(graph, file=file, batches=span))
    return tuple(graphs)


def copied_bytes(graphs: Iterable[GraphPlan], batch: int, tokens: int) -> float:
    """Returns the most bytes of weights, counted as FP32, that any layer copies for a batch.

    A layer has its own number of tokens if the network has no token axis.
    """
    return max(
        (
            replace(
                layer,
                batch=batch,
                precision="fp32",
                tokens=layer.tokens if layer.tokens_fixed else tokens,
            ).copied_bytes
            for graph in graphs
            if graph.batches is None or graph.batches[0] <= batch <= graph.batches[1]
            for layer in graph.layers
        ),
        default=0.0,
    )


def plan_graph(
    job: ExportJob, traced: ir.Model, name: str, file: str, tuning: Tuning | None = None
) -> GraphPlan:
    """Returns the plan of one graph: each layer with the named lowering, or the chosen one."""
    batch, generates = job.options.batches, decodes(job.model, job.options)
    # An engine is compiled for the OPT of its profile.
    batches = () if TARGETS[job.options.target].compiled else (batch.min, batch.opt, batch.max)

    def plan_layer(layer: AnyPlan) -> AnyPlan:
        if layer.name in job.options.layer_lowerings:
            lowering, why = job.options.layer_lowerings[layer.name]
            checked = check(lowering, layer, job.options.target)
            return replace(checked, reason=why or checked.reason)
        if name == AUTO:
            return choose(layer, job.options.target, batches, decodes=generates)
        if name == TUNE:
            from .measured_lowerings import with_fastest  # for `tune` only

            assert tuning is not None, "`tune` measures before anything is planned"
            return with_fastest(tuning.of(layer.name), layer, job.options.target)
        return check(name, layer, job.options.target)

    return GraphPlan(file, tuple(map(plan_layer, job.traced_layers(traced))))
