"""The main job, top to bottom: ranges, trace, plan, write, check against PyTorch, engines.

`exporter.job.export_job` has refused by then what could be refused; the bundle takes its place only
when all of it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

import onnx_ir as ir

from ..calibration.table import CALIBRATION_FILE, CalibrationTable
from ..common.console import Progress, Silent
from ..common.files import release
from ..common.threads import Threads, fastest_threads, with_threads
from ..data.feeds import limited, named_batches
from ..data.shards import Fields
from ..errors import (
    EngineError,
    LoweringError,
    MoexportError,
    ParityError,
    TraceError,
    UsageError,
)
from ..graphs.layers.base import Kind
from ..graphs.lower import Lowered
from ..graphs.lowerings import lowerings_of
from ..graphs.lowerings.base import AnyLowering
from ..graphs.lowerings.cost import machine_for
from .bundle.bundle import Bundle
from .bundle.destination import atomic_directory, check_destination
from .bundle.footprint import with_peak_memory
from .bundle.manifest import MANIFEST_FILE
from .bundle.parity_record import (
    MOST_KEPT,
    PARITY_FILE,
    Parity,
    Reference,
    Tolerance,
    describe,
    sized_file,
    unreached,
)
from .bundle.readme import with_readme
from .bundle.runtimes import with_engines
from .bundle.substitutes import SUBSTITUTES_FILE, substitutes_bytes
from .bundle.verify import LARGE_WEIGHTS_BYTES, is_large
from .inputs import DEFAULT_TOKENS, AxisRange, of_tokens, parity_batches
from .job import ExportJob
from .model import Model
from .options import ExportOptions
from .parity import FEW_NUMBERS, MOST_TIES, Comparison
from .plan import GraphPlan, Plan, copied_bytes, plan, plan_graph
from .quantization.calibrate import calibrate
from .reference import (
    Budget,
    check_network,
    first_different_layer,
    run_untouched,
    with_exact,
)
from .trace import HELD, Held, trace
from .write import graph_record, manifest_of, opened_comparison, write_graphs


class TokensError(ParityError):
    """A graph is right for fewer numbers of tokens than it should be.

    It misses its bounds with so many `tokens`, and holds from the first to the last of `held`, as
    far as that is known.
    """

    def __init__(
        self, message: str, *, hint: str, tokens: int, held: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.tokens, self.held = tokens, held


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
    threads = None if options.threads is None else Threads(options.threads)
    if options.verify:
        if isinstance(options.data, Iterator):
            job = replace(job, options=replace(options, data=_compared_inputs(job, options.data)))
        first = next(_inputs(job))
        job, traced = prepared(job, progress, traced)  # tells of a network that cannot be run
        if threads is None:
            if job.model.source.watched is not None:  # running what was cut ends the process
                job.model.source.watched.check_states()
            threads = fastest_threads(partial(run_untouched, job.model, first))
            if threads.call_ms:
                progress.step(threads.sentence)
    with with_threads(None if threads is None else threads.count):
        try:
            return _written(job, progress, traced)
        except TokensError as missed:
            assert traced is not None, "what is compared was traced"
            return _of_other_tokens(job, progress, traced, missed)


def _of_other_tokens(
    job: ExportJob, progress: Progress, traced: ir.Model, missed: TokensError
) -> Bundle:
    """The bundle of a graph that holds up to some number of tokens when it is traced with few.

    What works in blocks is traced with several of them, which may hold for all numbers. Where that
    holds for fewer, the range is cut, unless it was asked for: `missed` is raised then.
    """
    if missed.tokens > job.traced_sizes.get("tokens", missed.tokens):
        sizes = {**job.traced_sizes, "tokens": missed.tokens}
        with suppress(TraceError, ParityError, UsageError):
            progress.step(f"tracing with {missed.tokens} tokens")
            more = trace(job.model, opset=job.options.opset, fixed=job.fixed, sizes=sizes)
            job_of_more, more = prepared(job, progress, more)
            return _written(job_of_more, progress, more)
    if job.options.tokens != DEFAULT_TOKENS or missed.held is None:
        raise missed
    low, high = missed.held
    return _written(_of_tokens(job, low, high, missed.message), progress, traced)


def _compared_inputs(job: ExportJob, data: Iterator[object]) -> tuple[object, ...]:
    """What the comparisons take of a generator, which gives its inputs once."""
    names = [spec.name for spec in job.model.inputs]
    count = max(job.options.samples_to_verify, job.least_batch)
    return tuple(limited(named_batches(data, names), count))


def _inputs(job: ExportJob) -> Iterator[Fields]:
    """The inputs that a job's graphs are compared on."""
    options = job.options
    return parity_batches(
        job.model,
        job.fixed,
        options.data,
        options.samples_to_verify,
        ranges=job.ranges,
        tiny=options.precision.name == "fp32",  # FP16 has no such numbers
    )


def _written(job: ExportJob, progress: Progress, traced: ir.Model | None) -> Bundle:
    """The bundle of a job, compared with PyTorch unless that is not asked for."""
    options = job.options
    place, force = options.destination, options.force
    assert place is not None, "an export has a destination"
    planned = export_plan(job, progress, traced)
    job = planned.job
    weights_bytes = planned.weights_bytes
    copies = 1 + sum(step.copies for step in job.steps)
    check_destination(place, force=force, needed_bytes=copies * weights_bytes)
    with atomic_directory(place, force=force) as directory:
        progress.step("writing weights and graphs", total=weights_bytes)
        beside = _beside(planned)
        lowered = write_graphs(
            replace(planned, graphs=(*planned.graphs, *beside)), directory, progress
        )
        if planned.table is not None:
            planned.table.write(directory / CALIBRATION_FILE)
        constants = substitutes_bytes(options.edits)
        if constants:
            (directory / SUBSTITUTES_FILE).write_bytes(constants)
        parities: dict[str, Parity] = {}
        missing: dict[str, list[int]] = {}
        notes: tuple[str, ...] = ()
        if options.verify:
            progress.step("checking against PyTorch", unit="inputs")
            parities, missing, notes = _parities(planned, beside, lowered, directory, progress)
        for graph in beside:
            (directory / graph.file).unlink()
        progress.step("hashing")
        manifest = manifest_of(planned, lowered, parities, directory, unreached=missing)
        manifest = replace(manifest, notes=[*manifest.notes, *notes])
        manifest = with_peak_memory(directory, manifest)
        manifest = with_engines(directory, manifest, options.engine, progress)
        for step in job.steps:
            manifest = step.finish(job, directory, manifest)
        manifest = with_readme(directory, manifest, job.steps)
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
    job, traced = prepared(job, progress, traced)
    table = found_ranges(job, traced, progress)
    retention = None
    if job.options.precision.min_retention is not None:
        from .quantization.accuracy_search import floats_for_retention  # for `--min-retention`

        retention = floats_for_retention(job, traced, table, progress)
    return plan(job, traced, table, retention=retention, progress=progress)


def prepared(
    job: ExportJob, progress: Progress, traced: ir.Model | None = None
) -> tuple[ExportJob, ir.Model]:
    """Returns a job, for sizes that its trace holds for, and the trace, made now without one.

    Raises `UsageError` where sizes were asked for at which the network computes something else.
    """
    if traced is None:
        progress.step("tracing")
        sizes = job.traced_sizes
        traced = trace(job.model, opset=job.options.opset, fixed=job.fixed, sizes=sizes)
    held: Held | None = traced.meta.get(HELD)
    if held is None:
        return job, traced
    for axis, wanted in job.ranges.items():
        low, high = held.between(axis)
        high = wanted.max if high is None else high
        if low <= wanted.min and wanted.max <= high:
            continue
        size = high + 1 if wanted.max > high else low - 1
        within = AxisRange(
            max(low, wanted.min), max(low, min(wanted.opt, high)), min(high, wanted.max)
        )
        changes = f"the network computes something else at a {axis} of {size}"
        if axis == "tokens":
            changes = f"the network computes something else with {size} tokens"
            if job.options.tokens == DEFAULT_TOKENS:
                job = _of_tokens(job, within.min, within.max, changes)
                continue
        raise UsageError(
            f"--{axis} {wanted}: {changes}, and a graph holds for one of both",
            hint=f"--{axis} {within} exports the graph that holds for {within.min} to {within.max}"
            + (
                f", --{axis} {size}:{size}:{wanted.max} that of the larger ones"
                if size > high
                else ""
            ),
        )
    return job, traced


def _of_tokens(job: ExportJob, least: int, most: int, why: str) -> ExportJob:
    """The job for fewer numbers of tokens than it has by default."""
    before = job.ranges["tokens"]
    usual = max(least, min(before.opt, most))
    tokens = AxisRange(max(least, before.min), usual, min(most, before.max))
    inputs = tuple(
        replace(spec, limits={**spec.limits, "tokens": tokens.max})
        if "tokens" in spec.shape and tokens.max < before.max
        else spec
        for spec in job.model.inputs
    )
    note = f"exported for {tokens.min} to {tokens.max} tokens: {why}"
    model = replace(job.model, inputs=inputs, notes=(*job.model.notes, note))
    return replace(job, model=model, options=replace(job.options, tokens=tokens))


def found_ranges(
    job: ExportJob, traced: ir.Model, progress: Progress | None = None
) -> CalibrationTable | None:
    """Returns the ranges of a job: those given, those found now, or None where it needs none.

    `traced` is its model's trace, which is observed.
    """
    if job.calibration is None:
        return job.table
    return calibrate(job.calibration, progress=progress, traced=traced)


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
    ways = [(kind, record) for kind in kinds for record in lowerings_of(kind).values()]
    large = planned.weights_bytes * (len(planned.graphs) + 1) >= LARGE_WEIGHTS_BYTES

    def rank(way: tuple[Kind, AnyLowering]) -> tuple[bool, float]:
        """Others come first, of large weights those that read few of them."""
        kind, record = way
        works = [layer.work for layer in layers if layer.work.spec.kind == kind]
        times = (record.predict_us(w, machine_for(options.target, w.precision)) for w in works)
        return record.name in used, sum(times) if large else 0

    for _, record in sorted(ways, key=rank):
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
    silent: dict[str, bool] = {}
    experts = {name: layer.spec.experts for name, layer in job.model.layers.items()}
    budget = Budget(job, partial(copied_bytes, (*planned.graphs, *beside)))

    def opened(graph: GraphPlan, expected: Reference) -> Comparison:
        record = graph_record(graph, lowered[graph.file])
        return opened_comparison(job, directory, record, expected, budget.batches)

    for x in _inputs(job):
        expected = budget.timed(x)
        if not comparisons:
            budget.choose_batches(_changes(planned, "batch"))
            check_network(job, expected, budget.batches)
            comparisons = {graph.file: opened(graph, expected) for graph in planned.graphs}
            rounded = next((opened(graph, expected) for graph in beside), None)
        measured = held and kept is None
        expected = _compared(job, comparisons, expected, rounded, directory, measured=measured)
        if kept is None:
            kept = expected
        elif job.least_batch == 1:
            kept = kept.with_unreached(expected, MOST_KEPT)
        if job.options.tolerance.routing < 1 or expected.y[0].size < FEW_NUMBERS:
            compared.append(expected)
        for name, y in {job.model.outputs[0].name: expected.y, **expected.outputs}.items():
            silent[name] = silent.get(name, True) and not y.any()
        for choice, sets in expected.compared(experts).items():
            reached[choice] = reached.get(choice, frozenset()) | sets
        progress.advance(len(x[job.model.input.name]))
    assert kept is not None, "parity has inputs"
    _compare_tokens(planned, kept, comparisons, budget, directory)
    parities = {file: comparison.parity() for file, comparison in comparisons.items()}
    for file, parity in parities.items():
        if not parity.passed:
            raise _differs(job, directory / file, lowered[file], parity, comparisons[file].worst)
    alike = [one for one in compared if one.shapes() == compared[0].shapes()]
    if alike and not all(one.alone(kept).passed for one in comparisons.values()):
        # Of few inputs more may be outliers, or choose otherwise, than of all: `verify` needs them.
        kept = reduce(Reference.joined, alike)
    # Without a record it has more inputs than the first batch, or there is none.
    again = held and kept.rounded is None
    (with_exact(job, kept) if again else kept).save(directory / PARITY_FILE)
    notes = (*budget.notes(), *_dropped(kept, job.model), *_zeros(silent))
    return parities, unreached(reached, experts), notes


KEPT_BYTES = 8 << 20
"""Records of more tokens than the first inputs have are kept up to this size each."""


def _changes(planned: Plan, axis: str) -> tuple[int, ...]:
    """The sizes of an axis at which the network may compute something else than it was traced with.

    Of each change these are the sizes on both sides.
    """
    held: Held | None = planned.traced.meta.get(HELD)
    asked = planned.job.ranges.get(axis)
    if held is None or asked is None or axis not in held.traced:
        return ()
    traced = held.traced[axis]
    found = held.changes(axis, asked.min, asked.max)
    return tuple({*found, *(n - 1 if n > traced else n + 1 for n in found)})


def _compare_tokens(
    planned: Plan,
    first: Reference,
    comparisons: Mapping[str, Comparison],
    budget: Budget,
    directory: Path,
) -> None:
    """Compares graphs at other numbers of tokens than the inputs have, from theirs on.

    Raises `TokensError` for the first number at which one misses its bounds or does not run.
    """
    job, model = planned.job, planned.job.model
    asked = job.ranges.get("tokens")
    if asked is None or not all(comparison.parity().passed for comparison in comparisons.values()):
        return
    usual = first.x.shape[model.input.shape.index("tokens")]
    rows = job.least_batch
    random = job.options.data is None and model.example is None

    def wrong(tokens: int) -> str | None:
        """Why no graph is right for so many tokens."""
        inputs = first.feeds(model.input.name)
        x = of_tokens(model, inputs, rows, tokens, random=random)
        try:
            expected = budget.timed(x, every_k=False)
        except (RuntimeError, ValueError, IndexError) as error:
            return f"PyTorch cannot compute them: {str(error).strip().splitlines()[0][:200]}"
        for file, comparison in comparisons.items():
            try:
                right = comparison.add_sized(expected, tokens)
            except MoexportError as error:
                return f"{file} does not run: {error.message}"
            finally:
                _give_back(directory)
            if not right:
                return f"{file} differs from PyTorch: {describe(comparison.parity())}"
        if expected.nbytes <= KEPT_BYTES:
            expected.save(directory / sized_file(tokens))
        return None

    changes = _changes(planned, "tokens")
    sizes, needed = asked.probed(more=changes), {asked.min, asked.opt, *changes}
    for step in (1, -1):
        right = usual
        for tokens in sorted((n for n in sizes if (n - usual) * step > 0), reverse=step < 0):
            if not budget.affords(rows, tokens, needed=tokens in needed):
                continue
            why = wrong(tokens)
            if why is not None:
                raise _first_missed(right, tokens, why, wrong, asked, step)
            right = tokens


def _first_missed(
    right: int,
    missed: int,
    why: str,
    wrong: Callable[[int], str | None],
    asked: AxisRange,
    step: int,
) -> TokensError:
    """The error for the number of tokens at which a graph ceases to be right, between two."""
    while abs(missed - right) > 1:
        between = (missed + right) // 2
        reason = wrong(between)
        right, missed = (between, missed) if reason is None else (right, between)
        why = reason or why
    held = (asked.min, right) if step > 0 else (right, asked.max)
    return TokensError(
        f"with {missed} tokens {why}",
        hint=f"--tokens {held[0]}:{max(held[0], min(asked.opt, held[1]))}:{held[1]} exports it for "
        "the numbers that it holds for",
        tokens=missed,
        held=held,
    )


def _compared(
    job: ExportJob,
    comparisons: Mapping[str, Comparison],
    expected: Reference,
    rounded: Comparison | None,
    directory: Path,
    *,
    measured: bool,
) -> Reference:
    """Compares each graph with a reference, which is returned with what rounding makes of it.

    That is what the `rounded` graph gives, or without one, where it is `measured`, PyTorch's
    float64.
    """
    file = next(iter(comparisons))
    try:
        if rounded is not None:
            expected = rounded.with_rounded(expected)
            _give_back(directory)
        elif measured:
            expected = with_exact(job, expected)
        for file, comparison in comparisons.items():  # noqa: B007  for the error
            comparison.add(expected)
            _give_back(directory)
    except EngineError as error:
        port = job.model.input
        at = port.shape.index("tokens") if "tokens" in job.ranges else 0
        raise TokensError(
            f"{file} does not run at sizes that were not traced: {error.message}",
            hint="a size of the network became a constant of the graph: --tokens N and "
            "--batch N export it for that size alone",
            tokens=expected.x.shape[at] if at else 0,
        ) from error
    return expected


def _give_back(directory: Path) -> None:
    """Drops the pages of large weights that a graph has read, before others are read."""
    if is_large(directory):
        release(directory.glob("*.bin"))


def _differs(
    job: ExportJob, path: Path, lowered: Lowered, parity: Parity, worst: Reference
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
    check_network(job, worst, job.probed_batches())
    where = parity.first_difference or first_different_layer(job, path, lowered.values, worst)
    bounds = job.options.tolerance
    return ParityError(
        f"{path.name} differs from PyTorch, starting in {where}: {describe(parity)}",
        hint=f"the limits are {_allowed(bounds)} and the same experts in at least "
        f"{bounds.routing:.0%}: {way_out(parity, job.options)}; --no-verify exports without "
        "the check",
    )


def _zeros(silent: Mapping[str, bool]) -> tuple[str, ...]:
    """A sentence on each output that is zero for all inputs of the check."""
    return tuple(
        f"'{name}' is zero for all inputs of the check, which says nothing of the graph: give "
        "other inputs with --data"
        for name, zero in silent.items()
        if zero
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
    cosine = f", a cosine of {tolerance.least_cosine:g}" if tolerance.least_cosine > 0 else ""
    return f"{absolute}rtol {tolerance.rtol:g} · max|y| of each input{cosine}"


LOUD = 10.0
"""Over so many times the loudness of the quietest input, loud ones decide the ranges."""


def way_out(parity: Parity, options: ExportOptions) -> str:
    """Returns what may help where a graph has missed the bounds of its parity check."""
    real = ""
    if options.data is None and options.precision.name in ("int8", "fp8"):
        real = "random inputs may lie outside the ranges: give real ones with --data; or else "
    quiet, loud = parity.loudness or (0.0, 0.0)
    if options.precision.ranged and options.data is not None and loud > LOUD * quiet:
        real = (
            f"max|y| is {quiet:.2g} for the quietest input and {loud:.2g} for the loudest, and one "
            "range of eight bits has to hold them all: bring the inputs to one scale, or use "
            "--precision fp16 or fp32; or else "
        )
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
