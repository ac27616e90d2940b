"""Compares an export's graphs with PyTorch, and finds where a graph first differs.

`compare_graphs` is the check of an export: it makes a `Reference` for each batch of inputs
(`torch_reference`), checks that PyTorch's results are consistent (`check_network`), runs every
graph (`bundle.parity`), and raises a `ParityError` with the place of the first difference and
advice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook

from ..common.console import Progress
from ..common.environment import available_bytes, grown_memory
from ..common.files import release
from ..data.batches import Fields, rebatched
from ..errors import (
    EngineError,
    LoweringError,
    MoexportError,
    ParityError,
    UsageError,
    is_out_of_memory,
    one_line,
)
from ..graphs.layers.base import Kind, MoELayer, algorithm_1, choice_key, recorded_choices
from ..graphs.layers.margins import routed_margins
from ..graphs.lower import LayerValues, Lowered
from ..graphs.lowerings import lowerings_of
from ..graphs.lowerings.base import AnyLowering
from ..graphs.lowerings.cost import machine_for
from ..graphs.sizes import AxisRange
from .bundle.manifest import GraphRecord
from .bundle.parity import (
    FEW_NUMBERS,
    MAX_STORED,
    MAX_TIED,
    PARITY_FILE,
    TOLERANCES,
    Comparison,
    Parity,
    Reference,
    Rounded,
    Tolerance,
    by_expert,
    compare,
    describe,
    not_compared,
    sized_file,
)
from .bundle.verify import LARGE_WEIGHTS_BYTES, checking_session, is_large
from .inputs import SAMPLES, Inputs, completed, parity_batches, with_tokens
from .job import ExportJob
from .model import Model
from .options import ExportOptions
from .plan import GraphPlan, Plan, copied_bytes, plan_graph
from .trace import valid_sizes
from .write import graph_record

ROUNDED_FILE = "rounded.onnx"  # the graph that others are compared with; removed afterwards
MAX_STORED_BYTES = 8 << 20  # the largest reference to store for another number of tokens
LOUD_RATIO = 10.0  # an input with this many times the smallest max|y| dominates the ranges
EXACT_BYTES = 512 << 20  # the largest weights that are copied to float64

# Limits on predicted needs, for inputs whose sizes differ from the first inputs'.
MAX_BYTES = 512 << 20  # for the largest tensor
MAX_COPIED_BYTES = 256 << 20  # for copies of weights in a graph, most of an export's memory
MEMORY_SHARE = 0.25  # of the free memory, for PyTorch: a graph also needs some
MAX_SECONDS = 60.0  # for PyTorch
HEADS = 16  # of attention, to predict the memory for scores between tokens


class TokensError(ParityError):
    """A graph is valid for a smaller range of tokens than it should be.

    It misses its bounds with this number of `tokens`; as far as is known, it is valid from the
    first to the last number in `valid`.
    """

    def __init__(
        self, message: str, *, hint: str, tokens: int, valid: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.tokens, self.valid = tokens, valid


def compared_inputs(job: ExportJob) -> Iterator[Fields]:
    """Returns the inputs on which a job's graphs are compared."""
    options = job.options
    return parity_batches(
        job.model,
        job.fixed,
        options.data,
        options.samples_to_verify,
        ranges=job.axis_ranges,
        tiny=options.precision == "fp32",  # FP16 has no such numbers
    )


def rounded_graph(planned: Plan) -> tuple[GraphPlan, ...]:
    """Returns the graph of another lowering with the same number types, as a yardstick for others.

    Empty in FP32, for which PyTorch in float64 shows the effect of rounding, or if a lowering is
    inexact.
    """
    options, layers = planned.job.options, planned.graphs[0].layers
    used = {name for graph in planned.graphs for name in graph.lowerings}
    if options.precision == "fp32" or not options.verify or _inexact(planned):
        return ()
    kinds = dict.fromkeys(layer.spec.kind for layer in layers)
    candidates = [(kind, record) for kind in kinds for record in lowerings_of(kind).values()]
    large = planned.weights_bytes * (len(planned.graphs) + 1) >= LARGE_WEIGHTS_BYTES

    def rank(candidate: tuple[Kind, AnyLowering]) -> tuple[bool, float]:
        """Ranks unused lowerings first; for large weights, the fastest of them."""
        kind, record = candidate
        plans = (layer for layer in layers if layer.spec.kind == kind)
        times = (record.predict_us(p, machine_for(options.target, p.precision)) for p in plans)
        return record.name in used, sum(times) if large else 0

    for _, record in sorted(candidates, key=rank):
        if any(record.inexact(layer.spec, layer.precision, options.target) for layer in layers):
            continue
        with suppress(LoweringError):
            return (plan_graph(planned.job, planned.traced, record.name, ROUNDED_FILE),)
    return (replace(planned.graphs[0], file=ROUNDED_FILE),)


def _inexact(planned: Plan) -> bool:
    """Whether the lowering of a graph differs from PyTorch by more than rounding."""
    layers = [layer for graph in planned.graphs for layer in graph.layers]
    target = planned.job.options.target
    return any(layer.inexact(target) for layer in layers)


def compare_graphs(
    planned: Plan,
    rounded_graphs: Sequence[GraphPlan],
    lowered: Mapping[str, Lowered],
    directory: Path,
    progress: Progress,
) -> tuple[dict[str, Parity], tuple[str, ...]]:
    """Returns each graph's parity, or raises a `ParityError` with the place of a difference.

    Also returns sentences on what was not compared. Writes `parity.npz` to `directory`: the first
    inputs and PyTorch's results for them, and later inputs that choose other experts.
    """
    job = planned.job
    by_rounding = job.options.bounded_by_rounding and not _inexact(planned)
    comparisons: dict[str, Comparison] = {}
    rounded: Comparison | None = None
    stored: Reference | None = None
    compared: list[Reference] = []
    reached: dict[str, frozenset[int]] = {}
    batches: tuple[int, ...] = ()
    all_zero = {spec.name: None for spec in job.model.outputs}
    experts = {name: spec.experts for name, spec in job.model.specs.items()}
    budget = Budget(job, partial(copied_bytes, (*planned.graphs, *rounded_graphs)))

    def open_planned(graph: GraphPlan, expected: Reference) -> Comparison:
        record = graph_record(graph, lowered[graph.file])
        return open_comparison(job, directory, record, expected, batches)

    for x in compared_inputs(job):
        expected = budget.measure(x)
        if not comparisons:
            batches = budget.batches(_changes(planned, "batch"))
            check_network(job, expected, batches)
            comparisons = {graph.file: open_planned(graph, expected) for graph in planned.graphs}
            rounded = next((open_planned(graph, expected) for graph in rounded_graphs), None)
        measured = by_rounding and stored is None
        expected = _compare_batch(job, comparisons, expected, rounded, directory, measured=measured)
        if stored is None:
            stored = expected
        elif job.least_batch == 1:
            stored = stored.with_unreached(expected, MAX_STORED)
        if job.options.tolerance.routing < 1 or expected.y[0].size < FEW_NUMBERS:
            compared.append(expected)
        for name, y in {job.model.outputs[0].name: expected.y, **expected.outputs}.items():
            if y.any():
                all_zero.pop(name, None)
        for choice, sets in expected.compared(experts).items():
            reached[choice] = reached.get(choice, frozenset()) | sets
        progress.advance(len(x[job.model.input.name]))
    assert stored is not None, "parity has inputs"
    _compare_tokens(planned, stored, comparisons, budget, directory)
    parities = {file: comparison.parity() for file, comparison in comparisons.items()}
    for file, parity in parities.items():
        if not parity.passed:
            raise _mismatch(job, directory / file, lowered[file], parity, comparisons[file].worst)
    same_shapes = [other for other in compared if other.shapes() == compared[0].shapes()]
    if same_shapes and not all(graph.parity_on(stored).passed for graph in comparisons.values()):
        # In some inputs, outliers or other choices may have a larger share: `verify` needs all.
        stored = reduce(Reference.joined, same_shapes)
    if by_rounding and stored.rounded is None:  # more inputs were added
        stored = with_exact(job, stored)
    stored.save(directory / PARITY_FILE)
    zeros = (
        f"'{name}' is zero for all inputs of the check, so it could not be compared: give "
        "other inputs with --data"
        for name in all_zero
    )
    missing = not_compared(reached, experts)
    coverage = (f"{missing}; give more inputs with --data",) if missing else ()
    return parities, (*coverage, *budget.notes(), *_dropped(stored, job.model), *zeros)


def open_comparison(
    job: ExportJob,
    directory: Path,
    graph: GraphRecord,
    expected: Reference,
    batches: Sequence[int] | None = None,
) -> Comparison:
    """Opens a graph in a folder for comparison with references like `expected`.

    `batches` are the batch sizes to compare, by default all those of the job.
    """
    options, path = job.options, directory / graph.file
    observe, threads = expected.observed(graph.selected), torch.get_num_threads()
    return Comparison(
        checking_session(path, options.target, observe=observe, threads=threads),
        graph.selected,
        batch=job.checked_batch,
        tolerance=options.tolerance,
        k=expected.main_k if options.kept == "input" else None,
        probed=job.probed_batches() if batches is None else batches,
        group_size=job.model.batch_of,
    )


def _changes(planned: Plan, axis: str) -> tuple[int, ...]:
    """Returns the sizes of an axis at which the network may compute something other than its trace.

    These are the sizes on both sides of each change.
    """
    valid = valid_sizes(planned.traced)
    span = planned.job.axis_ranges.get(axis)
    if span is None or axis not in valid.traced:
        return ()
    traced = valid.traced[axis]
    found = valid.changes(axis, span.min, span.max)
    return tuple({*found, *(n - 1 if n > traced else n + 1 for n in found)})


def _compare_tokens(
    planned: Plan,
    first: Reference,
    comparisons: Mapping[str, Comparison],
    budget: Budget,
    directory: Path,
) -> None:
    """Compares graphs at numbers of tokens other than that of the inputs, the nearest first.

    Raises `TokensError` for the first number at which a graph misses its bounds or fails.
    """
    job, model = planned.job, planned.job.model
    span = job.axis_ranges.get("tokens")
    if span is None or not all(comparison.parity().passed for comparison in comparisons.values()):
        return
    given = first.x.shape[model.input.shape.index("tokens")]
    rows = job.least_batch
    random = job.options.data is None and model.example is None

    def problem(tokens: int) -> str | None:
        """Returns why graphs are not valid for this number of tokens; None if they are."""
        inputs = first.feeds(model.input.name)
        x = with_tokens(model, inputs, rows, tokens, random=random)
        try:
            expected = budget.measure(x, every_k=False)
        except (RuntimeError, ValueError, IndexError) as error:
            return f"PyTorch fails: {str(error).strip().splitlines()[0][:200]}"
        for file, comparison in comparisons.items():
            try:
                within = comparison.add_sized(expected, tokens)
            except MoexportError as error:
                return f"{file} does not run: {error.message}"
            finally:
                _release_weights(directory)
            if not within:
                return f"{file} differs from PyTorch: {describe(comparison.parity())}"
        if expected.nbytes <= MAX_STORED_BYTES:
            expected.save(directory / sized_file(tokens))
        return None

    changes = _changes(planned, "tokens")
    sizes, needed = span.probe_sizes(more=changes), {span.min, span.opt, *changes}
    for step in (1, -1):
        valid = given
        for tokens in sorted((n for n in sizes if (n - given) * step > 0), reverse=step < 0):
            if not budget.affords(rows, tokens, needed=tokens in needed):
                continue
            why = problem(tokens)
            if why is not None:
                raise _first_invalid(valid, tokens, why, problem, span, step)
            valid = tokens


def _first_invalid(
    valid: int,
    invalid: int,
    why: str,
    problem: Callable[[int], str | None],
    span: AxisRange,
    step: int,
) -> TokensError:
    """Returns the error for the first invalid number of tokens between `valid` and `invalid`."""
    while abs(invalid - valid) > 1:
        between = (invalid + valid) // 2
        reason = problem(between)
        valid, invalid = (between, invalid) if reason is None else (valid, between)
        why = reason or why
    low, high = (span.min, valid) if step > 0 else (valid, span.max)
    return TokensError(
        f"with {invalid} tokens, {why}",
        hint=f"--tokens {low}:{max(low, min(span.opt, high))}:{high} exports the model for the "
        "valid numbers",
        tokens=invalid,
        valid=(low, high),
    )


def _compare_batch(
    job: ExportJob,
    comparisons: Mapping[str, Comparison],
    expected: Reference,
    rounded: Comparison | None,
    directory: Path,
    *,
    measured: bool,
) -> Reference:
    """Compares each graph with a reference, which is returned with the effect of rounding.

    The effect is measured with the `rounded` graph or, if there is none and `measured` is set, with
    PyTorch in float64.
    """
    file = next(iter(comparisons))
    try:
        if rounded is not None:
            expected = rounded.with_rounded(expected)
            _release_weights(directory)
        elif measured:
            expected = with_exact(job, expected)
        for file, comparison in comparisons.items():  # noqa: B007  for the error
            comparison.add(expected)
            _release_weights(directory)
    except EngineError as error:
        spec = job.model.input
        axis = spec.shape.index("tokens") if "tokens" in job.axis_ranges else 0
        raise TokensError(
            f"{file} does not run at sizes other than the traced ones: {error.message}",
            hint="a size of the network became a constant of the graph: --tokens N and "
            "--batch N export it for that size alone",
            tokens=expected.x.shape[axis] if axis else 0,
        ) from error
    return expected


def _release_weights(directory: Path) -> None:
    """Releases the pages of large weights that a graph has read, before the next one runs."""
    if is_large(directory):
        release(directory.glob("*.bin"))


def _mismatch(
    job: ExportJob, path: Path, lowered: Lowered, parity: Parity, worst: Reference
) -> ParityError:
    """Returns the error for a graph that misses its bounds; `worst` are its worst inputs.

    Raises `ParityError` if the model itself is unsuitable for a comparison.
    """
    if not parity.given_choices and parity.tied > MAX_TIED * (parity.choices or 0):
        return ParityError(
            f"{path.name}: routing is tied in {parity.tied} of the {parity.choices} "
            f"{parity.what_chooses}, so almost nothing can be compared",
            hint="give real inputs with --data; an untrained router ties everywhere",
        )
    check_network(job, worst, job.probed_batches())
    where = parity.first_difference or first_different_layer(job, path, lowered.values, worst)
    bounds = job.options.tolerance
    absolute = f"atol {bounds.atol:g} + " if bounds.atol else ""
    cosine = f", a cosine of {bounds.least_cosine:g}" if bounds.least_cosine > 0 else ""
    return ParityError(
        f"{path.name} differs from PyTorch, starting in {where}: {describe(parity)}",
        hint=f"the limits are {absolute}rtol {bounds.rtol:g} · max|y| of each input{cosine} and "
        f"the same experts in at least {bounds.routing:.0%} of the choices: "
        f"{parity_advice(parity, job.options)}; --no-verify exports without the check",
    )


def _dropped(stored: Reference, model: Model) -> tuple[str, ...]:
    """Returns a sentence on the check's tokens that no expert processed because of a capacity."""
    left_out = {
        name: (chosen >= layer.spec.experts).reshape(*chosen.shape[:2], -1)
        for name, layer in model.layers.items()
        if layer.spec.drops and (chosen := stored.selected.get(name)) is not None
    }
    if not left_out:
        return ()

    skipped = ", ".join(f"{mask.all(axis=-1).mean():.1%} in {n}" for n, mask in left_out.items())
    sentence = f"some tokens of the check's inputs are processed by no expert: {skipped}"
    specs = [model.specs[name] for name in left_out]
    if any(spec.trained_k < spec.experts for spec in specs):  # tokens choose
        dropped = ", ".join(f"{mask.mean():.1%} in {name}" for name, mask in left_out.items())
        sentence = f"some choices for the check's inputs were dropped: {dropped}; {sentence}"
    return (sentence,)


def parity_advice(parity: Parity, options: ExportOptions) -> str:
    """Returns advice for a graph that misses the bounds of its parity check."""
    real = ""
    if options.data is None and options.ranged:
        real = "random inputs may be outside the ranges: give real ones with --data; otherwise "
    quiet, loud = parity.loudness or (0.0, 0.0)
    if options.ranged and options.data is not None and loud > LOUD_RATIO * quiet:
        real = (
            f"max|y| is {quiet:.2g} for the quietest input and {loud:.2g} for the loudest, but one "
            "range of eight bits must fit them all: bring the inputs to one scale, or use "
            "--precision fp16 or fp32; otherwise "
        )
    if parity.routing_agreement >= options.tolerance.routing:
        return f"{real}raise --rtol if you can accept the difference, or choose another --lowering"
    match options.precision:
        case "fp32":
            return "choose another --lowering"
        case "int8" | "fp8":
            return (
                f"{real}--rtol does not apply to the choice of experts: try another --method or "
                "--precision, or --min-retention, which keeps sensitive layers in floating point"
            )
        case _:
            return "--rtol does not apply to the choice of experts: use --precision fp32"


@dataclass(slots=True)
class Budget:
    """Chooses the sizes to compare: those that need no more memory and time than a check may use.

    The needs of larger sizes are predicted from earlier inputs, whose reference `measure` computes.
    `copied_bytes` returns the bytes of weights that a graph copies for a batch of tokens.
    """

    job: ExportJob
    copied_bytes: Callable[[int, int], float]
    _last: tuple[int, int, float] = (1, 1, 0.0)
    """The last number of inputs, their number of tokens, and the seconds that they took."""
    _row_bytes: int = 0
    _memory_growth: int = 0
    _skipped: dict[str, list[int]] = field(default_factory=dict)

    def measure(self, x: Inputs, *, every_k: bool = True) -> Reference:
        """Returns PyTorch's results for inputs (`torch_reference`) and records what they cost."""
        began = time.thread_time()  # other processes do not count
        with grown_memory() as memory:
            expected = torch_reference(self.job, x, every_k=every_k)
        self._memory_growth = memory.nbytes
        seconds = time.thread_time() - began
        spec = self.job.model.input
        axis = spec.shape.index("tokens") if "tokens" in spec.shape else None
        self._last = len(expected.x), 1 if axis is None else expected.x.shape[axis], seconds
        self._row_bytes = sum(
            array[:1].nbytes for array in (expected.x, expected.y, *expected.outputs.values())
        )
        return expected

    def batches(self, changes: Sequence[int]) -> tuple[int, ...]:
        """Returns the batch sizes to compare."""
        rows, tokens, _ = self._last
        return tuple(
            size
            for size in self.job.probed_batches(changes)
            if size <= rows or self.affords(size, tokens, axis="batch")
        )

    def affords(
        self, rows: int, tokens: int, axis: str = "tokens", *, needed: bool = False
    ) -> bool:
        """Whether this number of inputs of this length is compared; if not, a note is added.

        Sizes that are `needed` may take any time.
        """
        last_rows, last_tokens, seconds = self._last
        longer = tokens / last_tokens
        specs = self.job.model.specs.values()
        widest = max(spec.experts * max(spec.hidden, spec.dim) for spec in specs)
        floats = rows * max(tokens * widest, self._row_bytes // 4 * longer, HEADS * tokens**2)
        quick = needed or seconds * rows / last_rows * longer <= MAX_SECONDS
        grows = self._memory_growth * rows / last_rows * longer <= MEMORY_SHARE * available_bytes()
        copied = self.copied_bytes(rows, tokens) <= MAX_COPIED_BYTES
        fits = 4 * floats <= MAX_BYTES and copied and grows and quick
        if not fits:
            self._skipped.setdefault(axis, []).append(rows if axis == "batch" else tokens)
        return fits

    def notes(self) -> tuple[str, ...]:
        """Returns sentences on the sizes that were not compared."""
        return tuple(
            f"{'batches' if axis == 'batch' else 'inputs'} of {', '.join(map(str, sorted(sizes)))}"
            f"{'' if axis == 'batch' else ' tokens'} were not compared: that would take more than "
            f"{MAX_BYTES >> 20} MiB for one tensor, {MAX_COPIED_BYTES >> 20} MiB for copies of "
            f"weights, {MEMORY_SHARE:.0%} of the free memory or {MAX_SECONDS:.0f} s"
            for axis, sizes in self._skipped.items()
        )


def torch_reference(job: ExportJob, x: Inputs, *, every_k: bool = True) -> Reference:
    """Returns PyTorch's results for inputs of a job.

    If k is chosen per run, they are for a quarter of the experts and, with `every_k`, also for each
    number in `other_k`.
    """
    renormalize, batch = job.options.renormalize, job.largest_batch
    compute = partial(reference, job.model, x, renormalize=renormalize, batch=batch)
    with releasing_pages(job.model):
        others = other_k(job) if every_k else ()
        at_other_k = {k: compute(kept_experts(job, k)) for k in others}
        return replace(compute(kept_experts(job)), at_other_k=at_other_k)


def kept_experts(job: ExportJob, shared: int | None = None) -> dict[str, int]:
    """Returns each layer's k in a comparison.

    If k is an input, every layer keeps `shared` experts, by default a quarter of the fewest.
    """
    # One k serves all layers at run time, so the layer with the fewest experts bounds it.
    shared = shared or max(1, job.fewest_experts // 4)
    return {name: shared if k is None else k for name, k in job.k.items()}


def other_k(job: ExportJob) -> list[int]:
    """Returns each k to compare besides `kept_experts`, if k is an input of the graph.

    These are 1; a quarter, half and all of each layer's experts, at each of its levels; and the
    number that its router chose in training.
    """
    if None not in job.k.values():
        return []
    counts = {1}
    for spec in job.model.specs.values():
        counts |= {spec.trained_k, *(n // divisor for n in spec.levels for divisor in (1, 2, 4))}
    counts -= {0, *kept_experts(job).values()}
    return sorted(k for k in counts if k <= job.fewest_experts)


def run_untouched(model: Model, x: Fields) -> list[np.ndarray]:
    return Network(model, model.untouched).outputs(x)


def reference(
    model: Model, x: Inputs, kept: Mapping[str, int], *, renormalize: bool, batch: int
) -> Reference:
    """Returns PyTorch's results for inputs x, in batches of `batch`.

    If every layer has its trained k, these are the results of the untouched network.
    """
    ours = Network(model, model.module, kept, renormalize=renormalize)
    arrays = completed(x, model.inputs)
    untouched = Network(model, model.untouched)
    as_trained = model.as_trained is None and not renormalize and kept == model.trained_k
    dense: list[np.ndarray] = []
    parts: list[PassResult] = []
    for part in rebatched([arrays], batch):
        values = untouched.outputs(part)
        dense.append(values[0])
        computed = ours.compute(part)
        parts.append(replace(computed, outputs=values) if as_trained else computed)
    first, *others = (
        np.concatenate(y) for y in zip(*(part.outputs for part in parts), strict=True)
    )
    choices = _by_input(parts)
    return Reference(
        x=arrays.pop(model.input.name),
        y=first,
        dense=np.concatenate(dense),
        selected={name: chosen for name, (chosen, _) in choices.items()},
        margin={name: margin for name, (_, margin) in choices.items()},
        kept=dict(kept),
        inputs=arrays,
        outputs={spec.name: y for spec, y in zip(model.outputs[1:], others, strict=True)},
    )


def with_exact(job: ExportJob, expected: Reference) -> Reference:
    """Returns a reference with PyTorch's results in float64, for each k of the reference.

    Unchanged if weights are larger than `EXACT_BYTES`, or if the network cannot run in float64.
    """
    others = {k: with_exact(job, other) for k, other in expected.at_other_k.items()}
    model = job.model
    unrounded = replace(expected, rounded=None, at_other_k=others)
    if weights_bytes(model) > EXACT_BYTES:
        return unrounded
    # Few inputs at once, but no fewer than the smallest batch.
    few = max(SAMPLES // job.least_batch, 1) * job.least_batch
    batch = job.whole_batch or min(few, job.largest_batch)
    renormalize = job.options.renormalize
    network = Network(model, model.module, expected.kept, renormalize=renormalize, exact=True)
    with releasing_pages(model):
        try:
            feeds = expected.feeds(model.input.name)
            parts = [network.compute(part) for part in rebatched([feeds], batch)]
        except Exception:  # noqa: BLE001  a network may need float32: the result is then unknown
            return unrounded
    y = np.concatenate([part.outputs[0] for part in parts])
    choices = _by_input(parts)
    complete = choices.keys() >= expected.selected.keys()
    if not complete or y.dtype != np.float64 or not np.isfinite(y).all():
        return unrounded
    return replace(unrounded, rounded=Rounded(y, {n: choices[n][0] for n in expected.selected}))


def weights_bytes(model: Model) -> int:
    return sum(part.nbytes for part in (*model.module.parameters(), *model.module.buffers()))


@dataclass(frozen=True, slots=True)
class PassResult:
    """The outputs of one pass, and each choice with its margin."""

    outputs: list[np.ndarray]
    choices: dict[str, tuple[np.ndarray, np.ndarray]]


def _by_input(parts: Sequence[PassResult]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the choices and margins of each input, over all parts.

    Tokens that a layer processes one after another are grouped by the input to which they belong.
    If inputs have different numbers of choices, the choices are left out and only values compared.
    """
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name in parts[0].choices:
        pairs = []
        for part in parts:
            rows, (chosen, margin) = len(part.outputs[0]), part.choices[name]
            if len(chosen) != rows and len(chosen) % rows == 0:
                chosen = chosen.reshape(rows, -1, *chosen.shape[1:])
                margin = margin.reshape(rows, -1, *margin.shape[1:])
            pairs.append((chosen, margin))
        fits = all(len(p[0]) == len(part.outputs[0]) for p, part in zip(pairs, parts, strict=True))
        if fits and len({chosen.shape[1:] for chosen, _ in pairs}) == 1:
            sets, margins = zip(*pairs, strict=True)
            found[name] = np.concatenate(sets), np.concatenate(margins)
    return found


class Network:
    """A network in PyTorch that can be run like a graph (`exporter.session.GraphSession`).

    `network` computes the outputs; the choices are those of the model's own module, with `kept`
    experts. If `exact`, it computes in float64, without changing its weights.
    """

    def __init__(
        self,
        model: Model,
        network: nn.Module,
        kept: Mapping[str, int] | None = None,
        *,
        renormalize: bool = False,
        exact: bool = False,
    ) -> None:
        self._model, self._network, self._exact = model, network, exact
        self._kept, self._renormalize = dict(kept or {}), renormalize
        self.input_name = model.input.name
        self.output_names = [spec.name for spec in model.outputs]
        specs = model.specs
        self.keys = {
            key: key
            for name, k in self._kept.items()
            if k < specs[name].experts or specs[name].drops
            for key in (choice_key(name, choice) for choice in specs[name].choices())
        }

    def run(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        arrays = dict(x) if isinstance(x, Mapping) else {self.input_name: x}
        computed = self.compute({spec.name: arrays[spec.name] for spec in self._model.inputs})
        is_own = self._network is self._model.module
        values = computed.outputs if is_own else self.outputs(arrays)
        choices = {name: chosen for name, (chosen, _) in computed.choices.items()}
        return {**dict(zip(self.output_names, values, strict=True)), **choices}

    @torch.no_grad()
    def outputs(self, arrays: Fields) -> list[np.ndarray]:
        """Returns the unchanged network's results."""
        return self._values(self._network, arrays)

    @torch.no_grad()
    def compute(self, arrays: Fields) -> PassResult:
        """Returns the results and choices of the model's own module with the kept experts."""
        module = self._model.module
        with (
            algorithm_1(module, self._kept, renormalize=self._renormalize),
            recorded_choices(module) as records,
            routed_margins(module) as margins,
        ):
            values = self._values(module, arrays)
        choices: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name in (key for key in self.keys if key in records):
            chosen = records[name].chosen.numpy()
            margin = margins.get(name, records[name].margin).numpy()
            chosen = by_expert(chosen) if margin.shape == chosen.shape else chosen
            choices[name] = chosen, margin
        return PassResult(values, choices)

    def _values(self, module: nn.Module, arrays: Fields) -> list[np.ndarray]:
        # Copies: a network may change its inputs in place.
        tensors = [torch.from_numpy(np.array(arrays[spec.name])) for spec in self._model.inputs]
        with _user_errors(self._model, len(tensors[0])):
            if self._exact:
                own = (*module.named_parameters(), *module.named_buffers())
                weights = {name: _in_float64(tensor) for name, tensor in own}
                output = functional_call(module, weights, tuple(map(_in_float64, tensors)))
            else:
                output = module(*tensors)
        return [value.numpy() for value in all_outputs(output)[: len(self._model.outputs)]]


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def _user_errors(model: Model, count: int) -> Iterator[None]:
    """Reports errors of a user's own network, which may refuse a batch of `count` inputs."""
    try:
        yield
    except Exception as error:  # the user's code may fail in any way
        if not model.host.own_code or isinstance(error, MoexportError) or is_out_of_memory(error):
            raise
        raise UsageError(
            f"{model.source.path}: its forward failed on a batch of {count}: {one_line(error)}",
            hint="if it accepts only some batch sizes, --batch N exports it for batches of N",
        ) from error


@contextmanager
def releasing_pages(model: Model) -> Iterator[None]:
    """Releases the pages of mapped weights after each module that runs within the context."""
    reading = model.source.reading()

    def advance(module: nn.Module, *_: object) -> None:
        lists = (part for part in module.children() if isinstance(part, nn.ParameterList))
        own = (weight for part in (module, *lists) for weight in part.parameters(recurse=False))
        reading.advance(sum(weight.nbytes for weight in own))

    # For all modules, because a factory's network may have its experts anywhere.
    hook = register_module_forward_hook(advance)
    try:
        yield
    finally:
        hook.remove()
        reading.end()


def check_network(job: ExportJob, expected: Reference, batches: Sequence[int]) -> None:
    """Raises `ParityError` if the model itself is unsuitable for a comparison.

    On the inputs of the reference, our layers with their trained k must return the same as the
    untouched network. If the batch is not constant in the graph, PyTorch's result for an input must
    not depend on the others in its batch, except those that are computed together. `batches` are
    the batch sizes at which the network is run.
    """
    model, options, bounds = job.model, job.options, pytorch_bounds(job.options)
    with releasing_pages(model):
        ours = model.module if model.as_trained is None else model.as_trained
        trained = replace(model, module=ours, as_trained=None)
        x = _enough_inputs(expected.feeds(model.input.name), job.checked_batch)
        batch = job.largest_batch
        trained_reference = reference(trained, x, trained.trained_k, renormalize=False, batch=batch)
        if model.untouched is not ours:
            _check_stand_ins(trained, trained_reference, batch, bounds)
        if job.fixed_batch is not None:
            return
        network = Network(trained, trained.untouched, trained.trained_k)
        _check_batches(network, trained_reference, bounds, batches)
        kept, renormalize = expected.kept, options.renormalize
        if ours is not model.module or kept != trained_reference.kept or renormalize:
            edited_reference = reference(model, x, kept, renormalize=renormalize, batch=batch)
            network = Network(model, model.module, kept, renormalize=renormalize)
            _check_batches(network, edited_reference, bounds, batches)


def pytorch_bounds(options: ExportOptions) -> Tolerance:
    """Returns the bounds for PyTorch's results: those of FP32, or a user's wider ones."""
    fp32, requested = TOLERANCES["fp32"], options.tolerance
    if options.precision != "fp32":
        return fp32
    return replace(fp32, atol=requested.atol, rtol=max(fp32.rtol, requested.rtol))


def _enough_inputs(arrays: Fields, count: int) -> Fields:
    """Returns at least `count` inputs: if there are fewer, rotated copies of them are added.

    A batch that repeats one input does not show whether results depend on the other inputs.
    """
    samples, *_ = (len(array) for array in arrays.values())
    if samples >= count:
        return arrays
    repeated: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        rows = array[np.arange(count) % samples]
        if name == next(iter(arrays)) and array.ndim > 1:
            axis = next((axis for axis in range(1, array.ndim) if array.shape[axis] > 1), 1)
            rows = np.stack([np.roll(row, i // samples, axis - 1) for i, row in enumerate(rows)])
        repeated[name] = rows
    return repeated


def _check_stand_ins(model: Model, expected: Reference, batch: int, bounds: Tolerance) -> None:
    """Raises `ParityError` if our layers' results differ from those of the user's own."""
    ours = Network(model, model.module, expected.kept)
    parity = compare(ours, expected, ours.keys, batch=batch, tolerance=bounds)
    if parity.passed:
        return
    name = ", ".join(model.layers)
    raise ParityError(
        f"{model.source.path}: the network's outputs change when its layers ({name}) are replaced: "
        f"{describe(parity)}",
        hint="the adapter matched on the example but not on these inputs: does it describe "
        "everything the layer does? With --data the layers are compared on your inputs when the "
        "model is loaded",
    )


def _check_batches(
    network: Network, expected: Reference, bounds: Tolerance, sizes: Sequence[int]
) -> None:
    """Raises `ParityError` if an input's output depends on the others in its batch."""
    count = len(expected.x)
    for size in sizes:
        rows = expected.rows(np.arange(size) % count)
        parity = compare(network, rows, network.keys, batch=size, tolerance=bounds)
        if parity.passed or parity.tied == parity.choices:
            continue
        where = f", starting in layer {parity.first_difference}" if parity.first_difference else ""
        raise ParityError(
            f"in PyTorch the output for an input depends on the others in its batch{where}: "
            f"batches of {size} and of {count} differ ({describe(parity)})",
            hint="--batch N exports the model for batches of N only; for any size, its router must "
            "choose for each input alone, without a capacity or statistics over the batch",
        )


@torch.no_grad()
def first_different_layer(
    job: ExportJob, path: Path, values: Mapping[str, LayerValues], expected: Reference
) -> str:
    """Returns where a graph first differs, in words: a layer, or the network around it.

    The inputs and outputs of every MoE layer are compared in order, on the first inputs.
    """
    model, rtol = job.model, job.options.tolerance.rtol
    x = expected.feeds(model.input.name, job.fixed_batch)
    names = {name for layer in values.values() for name in (layer.input, layer.output)}
    observe = dict.fromkeys(sorted(names), onnx.TensorProto.FLOAT)
    session = checking_session(path, job.options.target, observe=observe, rounded=True)
    actual = session.run(x, expected.main_k if session.takes_k else None)
    torch_values: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], output: Any, name: str) -> None:
        assert isinstance(module, MoELayer)
        torch_values[name] = (module.tokens(args[0]).numpy(), output.numpy())

    renormalize = job.options.renormalize
    with (
        ExitStack() as hooks,
        algorithm_1(model.module, {**expected.kept}, renormalize=renormalize),
    ):
        for name, layer in model.layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(record, name=name)))
        model.module(*(torch.from_numpy(np.ascontiguousarray(array)) for array in x.values()))

    def differs(actual: np.ndarray, correct: np.ndarray) -> bool:
        """Whether the error of any row exceeds the bound, which is relative to its maximum."""
        largest, error = (
            np.abs(array).reshape(len(correct), -1).max(axis=1, initial=0.0)
            for array in (correct, actual - correct)
        )
        return not (error <= rtol * largest).all()

    before = "the network before it"
    for name, value in values.items():
        torch_input, torch_output = torch_values[name]
        if differs(actual[value.input], torch_input):
            return f"{before}, at the input of layer {name}"
        if differs(actual[value.output], torch_output):
            return f"layer {name}"
        before = f"the network after layer {name}"
    return f"{before.replace('before it', 'before the layers')}, at the output"


def all_outputs(output: Any) -> tuple[torch.Tensor, ...]:
    """Returns a backbone's output tensors; other items of a tuple are left out."""
    values = output if isinstance(output, tuple) else (output,)
    return tuple(value for value in values if isinstance(value, torch.Tensor))
