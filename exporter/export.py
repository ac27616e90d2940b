"""The main job, top to bottom: ranges, trace, plan, write, check against PyTorch, engines.

`exporter.job.export_job` has refused by then what could be refused; the bundle takes its place only
when all of it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from itertools import chain
from pathlib import Path

import onnx_ir as ir

from ..calibration.shards import Fields
from ..calibration.table import CALIBRATION_FILE, CalibrationTable
from ..common.console import Progress, Silent
from ..common.threads import Threads, fastest_threads, with_threads
from ..errors import EngineError, LoweringError, ParityError
from ..graphs.lower import Lowered
from ..graphs.lowerings import lowerings_of
from .bundle.bundle import Bundle
from .bundle.destination import atomic_directory, check_destination
from .bundle.footprint import with_peak_memory
from .bundle.manifest import MANIFEST_FILE
from .bundle.parity_record import MOST_KEPT, PARITY_FILE, Reference, unreached
from .bundle.readme import with_readme
from .bundle.recipe import RECIPE_FILE
from .bundle.substitutes import SUBSTITUTES_FILE, substitutes_bytes
from .inputs import parity_batches
from .job import ExportJob
from .model import Model
from .options import ExportOptions
from .parity import MOST_TIES, Comparison, Parity, Tolerance, describe
from .plan import GraphPlan, Plan, plan, plan_graph
from .quantization.accuracy_search import floats_for_retention
from .quantization.calibrate import calibrate
from .reference import check_network, exact, first_different_layer, run_untouched, torch_reference
from .tensorrt.engines import build_for_export
from .text.layouts import with_layout
from .token_routed.generation import write_generation
from .trace import trace
from .write import graph_record, manifest_of, opened_comparison, write_graphs


def export(
    job: ExportJob, progress: Progress | None = None, traced: ir.Model | None = None
) -> Bundle:
    """Does a job: writes a verified bundle to its destination and returns it.

    `traced` is its model's trace, where that was made before.

    Raises what `export_plan` raises, `ParityError` when a graph is further from PyTorch than the
    options allow, `EngineError` when an engine that was asked for cannot be compiled, and leaves
    nothing behind on any failure.
    """
    with job.model.source.changes_told():
        return _exported(job, progress or Silent(), traced)


def _exported(job: ExportJob, progress: Progress, traced: ir.Model | None) -> Bundle:
    options = job.options
    inputs: Iterable[Fields] | None = None
    threads = None if options.threads is None else Threads(options.threads)
    if options.verify:
        batches = parity_batches(
            job.model,
            job.fixed,
            options.data,
            options.samples_to_verify,
            tiny=options.precision.name == "fp32",  # FP16 has no such numbers
        )
        first = next(batches)
        inputs = chain([first], batches)
        traced = _traced(job, progress, traced)  # tells of a network that cannot be run
        if threads is None:
            if job.model.source.watched is not None:  # running what was cut ends the process
                job.model.source.watched.check_states()
            threads = fastest_threads(partial(run_untouched, job.model, first))
            if threads.call_ms:
                progress.step(threads.sentence)
    with with_threads(None if threads is None else threads.count):
        return _written(job, progress, traced, inputs)


def _written(
    job: ExportJob, progress: Progress, traced: ir.Model | None, inputs: Iterable[Fields] | None
) -> Bundle:
    """The bundle of a job, compared with PyTorch on inputs unless there are none."""
    options = job.options
    place, force = options.destination, options.force
    assert place is not None, "an export has a destination"
    planned = export_plan(job, progress, traced)
    weights_bytes = planned.weights_bytes
    copies = 1 if options.layout is None else 2
    check_destination(place, force=force, needed_bytes=copies * weights_bytes)
    with atomic_directory(place, force=force) as directory:
        progress.step("writing weights and graphs", total=weights_bytes)
        beside = _beside(planned)
        lowered = write_graphs(
            replace(planned, graphs=(*planned.graphs, *beside)), directory, progress
        )
        if planned.table is not None:
            planned.table.write(directory / CALIBRATION_FILE)
        if options.recipe is not None:
            options.recipe.write(directory / RECIPE_FILE)
        constants = substitutes_bytes(options.edits)
        if constants:
            (directory / SUBSTITUTES_FILE).write_bytes(constants)
        main = planned.graphs[0].file
        generation = write_generation(job, main, lowered[main].model, directory)
        parities: dict[str, Parity] = {}
        missing: dict[str, list[int]] = {}
        notes: tuple[str, ...] = ()
        if inputs is not None:
            progress.step("checking against PyTorch", unit="inputs")
            parities, missing, notes = _parities(
                planned, beside, lowered, directory, inputs, progress
            )
        for graph in beside:
            (directory / graph.file).unlink()
        progress.step("hashing")
        manifest = manifest_of(planned, lowered, parities, directory, unreached=missing)
        manifest = replace(manifest, notes=[*manifest.notes, *notes, *generation])
        manifest = with_peak_memory(directory, manifest)
        manifest = build_for_export(directory, manifest, options.engine, progress)
        if options.layout is not None:
            manifest = with_layout(directory, manifest, options.layout)
        manifest = with_readme(directory, manifest)
        (directory / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return Bundle(place, manifest)


def export_plan(
    job: ExportJob, progress: Progress | None = None, traced: ir.Model | None = None
) -> Plan:
    """Returns the plan of a job, for which its model is traced; writes nothing.

    Raises `FeedError` for inputs that do not fit, `TraceError` for a network that cannot be traced,
    and what `calibrate`, `floats_for_retention` and `plan` raise.
    """
    progress = progress or Silent()
    traced = _traced(job, progress, traced)
    table = found_ranges(job, traced, progress)
    retention = floats_for_retention(job, traced, table, progress)
    return plan(job, traced, table, retention=retention, progress=progress)


def _traced(job: ExportJob, progress: Progress, traced: ir.Model | None) -> ir.Model:
    if traced is not None:
        return traced
    progress.step("tracing")
    return trace(job.model, opset=job.options.opset, fixed=job.fixed)


def found_ranges(
    job: ExportJob, traced: ir.Model, progress: Progress | None = None
) -> CalibrationTable | None:
    """Returns the ranges of a job: those given, those found now, or None where it needs none.

    `traced` is its model's trace, which is observed unless it has sizes that are fixed.
    """
    if job.calibration is None:
        return job.table
    return calibrate(job.calibration, progress=progress, traced=None if job.fixed else traced)


ROUNDED_FILE = "rounded.onnx"
"""The graph that an export compares its own with, and does not keep."""


def _beside(planned: Plan) -> tuple[GraphPlan, ...]:
    """The graph of another lowering in the same numbers that others are compared with.

    None in FP32, where PyTorch in float64 tells what rounding does, and none where a lowering is
    inexact.
    """
    options, layers = planned.job.options, planned.graphs[0].layers
    used = {name for graph in planned.graphs for name in graph.lowerings}
    if options.precision.name == "fp32" or not options.verify or _inexact(planned):
        return ()
    kinds = dict.fromkeys(layer.work.spec.kind for layer in layers)
    names = [record for kind in kinds for record in lowerings_of(kind).values()]
    for record in sorted(names, key=lambda record: record.name in used):
        if any(
            record.inexact(layer.work.spec, layer.work.precision, options.target)
            for layer in layers
        ):
            continue
        with suppress(LoweringError):
            return (plan_graph(planned.job, planned.traced, record.name, ROUNDED_FILE),)
    return (replace(planned.graphs[0], file=ROUNDED_FILE),)


def _inexact(planned: Plan) -> bool:
    """Whether a graph differs from PyTorch by more than rounding, as its lowering says."""
    layers = [layer for graph in planned.graphs for layer in graph.layers]
    target = planned.job.options.target
    return any(
        layer.choice.lowering.inexact(layer.work.spec, layer.work.precision, target)
        for layer in layers
    )


def _parities(
    planned: Plan,
    beside: Sequence[GraphPlan],
    lowered: Mapping[str, Lowered],
    directory: Path,
    inputs: Iterable[Fields],
    progress: Progress,
) -> tuple[dict[str, Parity], dict[str, list[int]], tuple[str, ...]]:
    """Each graph's parity, or a `ParityError` that says where the first difference starts.

    The second are each layer's experts that no input chose, the third further sentences. The first
    of the inputs are kept in the bundle with what PyTorch computed of them, and such later ones as
    choose further experts.
    """
    job = planned.job
    held = job.options.held_to_rounding and not _inexact(planned)
    comparisons: dict[str, Comparison] = {}
    rounded: Comparison | None = None
    kept: Reference | None = None
    compared: list[Reference] = []
    reached: dict[str, frozenset[int]] = {}

    def opened(graph: GraphPlan, expected: Reference) -> Comparison:
        record = graph_record(graph, lowered[graph.file])
        return opened_comparison(job, directory, record, expected)

    for x in inputs:
        expected = torch_reference(job, x)
        if not comparisons:
            check_network(job, expected)
            comparisons = {graph.file: opened(graph, expected) for graph in planned.graphs}
            rounded = next((opened(graph, expected) for graph in beside), None)
        file = planned.graphs[0].file
        try:
            measured = held and kept is None
            expected = replace(expected, rounded=exact(job, expected) if measured else None)
            if rounded is not None:
                expected = replace(expected, rounded=rounded.rounded(expected))
            for file, comparison in comparisons.items():  # noqa: B007  for the error
                comparison.add(expected)
        except EngineError as error:
            raise ParityError(
                f"{file} does not run at sizes that were not traced: {error.message}",
                hint="a size of the network became a constant of the graph: --tokens N and "
                "--batch N export it for that size alone",
            ) from error
        if kept is None:
            kept = expected
        elif job.whole_batch is None:
            kept = kept.with_unreached(expected, MOST_KEPT)
        if job.options.tolerance.routing < 1:
            compared.append(expected)
        for choice, sets in expected.reached().items():
            reached[choice] = reached.get(choice, frozenset()) | sets
        progress.advance(len(x[job.model.input.name]))
    assert kept is not None, "parity has inputs"
    parities = {file: comparison.parity() for file, comparison in comparisons.items()}
    for file, parity in parities.items():
        if not parity.passed:
            worst = comparisons[file].worst
            raise _differs(job, directory / file, lowered[file], parity, worst)
    if compared and not all(one.alone(kept).passed for one in comparisons.values()):
        # Of few inputs more may choose otherwise, by chance, than of all: `verify` needs them.
        kept = reduce(Reference.joined, compared)
    # Without a record it has more inputs than the first batch, or there is none.
    again = held and kept.rounded is None
    (replace(kept, rounded=exact(job, kept)) if again else kept).save(directory / PARITY_FILE)
    experts = {name: layer.spec.experts for name, layer in job.model.layers.items()}
    return parities, unreached(reached, experts), _dropped(kept, job.model)


def _differs(
    job: ExportJob, path: Path, lowered: Lowered, parity: Parity, worst: Reference | None
) -> ParityError:
    """The error for a graph that misses its bounds, on the `worst` inputs furthest.

    Raises `ParityError` where the model itself is not what a graph can be compared with.
    """
    if parity.tied > MOST_TIES * (parity.choices or 0):
        what = "choices of tokens" if parity.chosen_by == "tokens" else "inputs"
        return ParityError(
            f"{path.name}: routing is tied in {parity.tied} of the {parity.choices} {what}, "
            "so almost nothing can be compared",
            hint="give real inputs with --data; an untrained router ties everywhere",
        )
    assert worst is not None, "something was compared"
    check_network(job, worst)
    where = parity.first_difference or first_different_layer(job, path, lowered.values, worst)
    bounds = job.options.tolerance
    return ParityError(
        f"{path.name} differs from PyTorch, starting in {where}: {describe(parity)}",
        hint=f"the limits are {_allowed(bounds)} and the same experts in at least "
        f"{bounds.routing:.0%}: {way_out(parity, job.options)}; --no-verify exports without "
        "the check",
    )


def _dropped(kept: Reference, model: Model) -> tuple[str, ...]:
    """A sentence on what experts with a capacity left out of the inputs of the check."""
    left_out = {
        name: (chosen >= layer.spec.experts).reshape(*chosen.shape[:2], -1)
        for name, layer in model.layers.items()
        if layer.spec.drops and (chosen := kept.selected.get(name)) is not None
    }
    if not left_out:
        return ()

    def listed(shares: Mapping[str, float]) -> str:
        return ", ".join(f"{share:.1%} in {name}" for name, share in shares.items())

    alone = listed({name: float(mask.all(axis=-1).mean()) for name, mask in left_out.items()})
    said = f"of the tokens of the check's inputs no expert computes {alone}"
    specs = [model.layers[name].spec for name in left_out]
    if any(spec.trained_k < spec.experts for spec in specs):  # tokens choose
        dropped = listed({name: float(mask.mean()) for name, mask in left_out.items()})
        said = f"of the choices of the check's inputs were dropped: {dropped}; {said}"
    return (said,)


def _allowed(tolerance: Tolerance) -> str:
    absolute = f"atol {tolerance.atol:g} + " if tolerance.atol else ""
    return f"{absolute}rtol {tolerance.rtol:g} · max|y|"


def way_out(parity: Parity, options: ExportOptions) -> str:
    """Returns what may help where a graph has missed the bounds of its parity check."""
    real = ""
    if options.data is None and options.precision.name in ("int8", "fp8"):
        real = "random inputs may lie outside the ranges: give real ones with --data; or else "
    if parity.routing_agreement >= options.tolerance.routing:
        return f"{real}raise --rtol if that is good enough, or choose another --lowering"
    match options.precision.name:
        case "fp32":
            return "choose another --lowering"
        case "int8" | "fp8":
            return (
                f"{real}no --rtol allows for other experts: try another --method or --precision, "
                "or --min-retention, which keeps the layers that INT8 harms most in floats"
            )
        case _:
            return "no --rtol allows for other experts: take --precision fp32"
