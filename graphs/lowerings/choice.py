"""Chooses the lowering of a layer: the requested one, or the one with the best prediction.

One graph serves a range of batches, and a choice inside the graph does not pay off, because weights
in a branch are not packed before the run. `auto` therefore chooses the lowering that is never far
from the fastest; if none is close at all sizes, several graphs share the range.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ...errors import LoweringError
from ..layers.base import kind_text
from ..targets import TARGETS, Target
from . import check_name, kinds_with, lowering_of, lowerings_of
from .base import AnyLowering, AnyPlan
from .cost import machine_for, prediction_basis, unmeasured

MUCH_SLOWER = 1.5
"""The ratio to the fastest lowering, at one batch size, from which the reason suggests a remedy."""


DECODE_FIRST = ("int8", "int4")
"""Precisions that make a language model decode faster, because each token reads all weights."""


def exact_lowerings(plan: AnyPlan, target: Target) -> list[AnyLowering]:
    """Returns the lowerings that compute a layer exactly on a target, in its precision.

    Raises `LoweringError` if there are none.
    """
    spec = plan.spec
    lowerings = [
        record
        for record in lowerings_of(spec.kind).values()
        if record.problem(spec, plan.precision, target) is None
        and record.inexact(spec, plan.precision, target) is None
    ]
    if not lowerings:
        raise LoweringError(
            f"layer {spec.name}: no lowering supports the target {target}",
            hint="choose another --target",
        )
    return lowerings


def choose(
    plan: AnyPlan, target: Target, batches: Collection[int] = (), *, decodes: bool = False
) -> AnyPlan:
    """Returns a plan with the exact lowering that is never much slower than the fastest.

    The criterion is the worst ratio to the fastest lowering over `batches` and the plan's own
    batch; the time at the latter decides ties. A layer whose number of tokens varies is
    compared at one token and at a prompt instead (`MoESpec.typical_tokens`), or at the tokens of
    each batch if inputs have a fixed number. If a language model `decodes` with integers, it is
    compared at one token only, because a text takes many steps of one token. Raises `LoweringError`
    if no lowering supports the target.
    """
    by_token = bool(batches) and bool(plan.spec.typical_tokens)
    if by_token:
        typical = plan.spec.typical_tokens
        if plan.tokens_fixed:
            typical = tuple(plan.tokens * batch for batch in batches)
        sizes = sorted({plan.choosers, *typical})
        plans = [replace(plan, batch=1, tokens=size) for size in sizes]
    else:
        sizes = sorted({plan.batch, *batches})
        plans = [replace(plan, batch=size) for size in sizes]
    planned = sizes.index(plan.choosers if by_token else plan.batch)
    predictions = _Predictions.of(plans, target)
    decoding = decodes and by_token and not plan.tokens_fixed and plan.precision in DECODE_FIRST
    ranked = predictions.ranked([0] if decoding else range(len(sizes)), 0 if decoding else planned)
    best, others = ranked[0], ranked[1:]
    times, fastest = predictions.times, predictions.fastest
    reason = (
        f"predicted {_milliseconds(times[best])} for k = {plan.typical_k} of {plan.spec.experts} "
        f"at {_sizes(sizes, by_token=by_token)}"
    )
    ratio = predictions.worst(best, range(len(sizes)))
    if decoding and others:
        reason += ", fastest at one token"
    elif len(sizes) > 1 and others:
        reason += f", at most {ratio:.3g} times the fastest" if ratio > 1 else ", always fastest"
    if others:
        listed = (f"{other.name} {_milliseconds(times[other])}" for other in others)
        reason += f" (others: {', '.join(listed)})"
    for column, size in enumerate(sizes):
        slower = times[best][column] / fastest[column]
        if slower >= MUCH_SLOWER:
            better = next(other for other in others if times[other][column] == fastest[column])
            option = "" if by_token else f"--batch {size} selects it, "
            reason += (
                f"; at {_sizes([size], by_token=by_token)} {better.name} is {slower:.2g} times as "
                f"fast: {option}--lowering auto,{better.name} writes both"
            )
    reason += prediction_basis(target, plan.spec.kind, [record.name for record in ranked])
    return replace(plan, chosen=best, reason=reason, predicted_us=times[best][planned])


@dataclass(frozen=True)
class _Predictions:
    """The times of each lowering of a layer at some sizes, in microseconds, and the lowest ones."""

    times: dict[AnyLowering, list[float]]
    fastest: list[float]

    @staticmethod
    def of(plans: Sequence[AnyPlan], target: Target) -> _Predictions:
        machine = machine_for(target, plans[0].precision)
        times = {
            record: [record.predict_us(plan, machine) for plan in plans]
            for record in exact_lowerings(plans[0], target)
            if TARGETS[target].auto_branches or not record.branches
        }
        return _Predictions(times, [min(column) for column in zip(*times.values(), strict=True)])

    def worst(self, record: AnyLowering, columns: Collection[int]) -> float:
        """Returns a lowering's worst ratio to the fastest at some of the sizes."""
        return round(max(self.times[record][c] / self.fastest[c] for c in columns), 2)

    def ranked(self, columns: Collection[int], index: int) -> list[AnyLowering]:
        """Returns the lowerings by their worst ratio; the time at size `index` decides ties."""
        return sorted(
            self.times, key=lambda record: (self.worst(record, columns), self.times[record][index])
        )


Span = tuple[int, int]
"""The first and the last batch size that a graph serves."""

SPLIT_RATIO = 1.15
"""The ratio of one graph's time to the fastest, at some size, from which several are written."""

CALL_US = 10.0
"""The least overhead of a call outside its layers: smaller savings do not justify a graph."""

MAX_GRAPHS = 3
"""The largest number of graphs: each keeps its own packed weights in memory once it is used."""

STEP = 1.5
"""The factor between two sizes that are compared in a range MIN to MAX."""


def batch_spans(
    plans: Sequence[AnyPlan], target: Target, smallest: int, largest: int
) -> list[Span]:
    """Returns the ranges of batches that need separate graphs, for the layers of a model.

    One range suffices if a single graph takes less than `SPLIT_RATIO` times as long as the fastest
    at both ends; otherwise there are as few ranges as achieve this, with the boundaries that
    minimise the worst ratio. If the number of tokens varies, the batch size alone hardly determines
    the time, so there is one graph.
    """
    if any(plan.spec.typical_tokens for plan in plans):
        return [(smallest, largest)]
    sizes = _compared_sizes(smallest, largest, {plan.batch for plan in plans})
    layers = [
        _Predictions.of([replace(plan, batch=size) for size in sizes], target) for plan in plans
    ]
    columns = range(len(sizes))
    ends = sorted({0, len(sizes) - 1, *(sizes.index(plan.batch) for plan in plans)})
    partition = [columns]
    if _regret(layers, ends) >= SPLIT_RATIO:
        for count in range(2, min(MAX_GRAPHS, len(sizes)) + 1):
            partitions = [
                [columns[a:b] for a, b in itertools.pairwise((0, *cuts, len(sizes)))]
                for cuts in itertools.combinations(columns[1:], count - 1)
            ]
            partition = min(partitions, key=lambda parts: _regrets(layers, parts))
            if _regrets(layers, partition)[0] < SPLIT_RATIO:
                break
    # Between two compared sizes, the boundary is their geometric mean.
    last = [math.isqrt(sizes[part[-1]] * sizes[part[-1] + 1]) for part in partition[:-1]]
    return list(zip([smallest, *(size + 1 for size in last)], [*last, largest], strict=True))


def _compared_sizes(smallest: int, largest: int, between: Collection[int]) -> list[int]:
    sizes = {smallest, largest, *between}
    size = float(smallest)
    while size < largest:
        sizes.add(round(size))
        size *= STEP
    return sorted(sizes)


def _regrets(layers: Sequence[_Predictions], parts: Sequence[range]) -> tuple[float, float]:
    """Returns the worst ratio of several graphs to the fastest, and the sum of the ratios."""
    regrets = [_regret(layers, part) for part in parts]
    return max(regrets), sum(regrets)


def _regret(layers: Sequence[_Predictions], columns: Sequence[int]) -> float:
    """Returns the worst ratio of one graph, all layers together, to the fastest at some sizes.

    Its lowerings are those that `choose` selects for the first and the last size.
    """
    ends = (columns[0], columns[-1])
    chosen = [layer.times[layer.ranked(ends, columns[0])[0]] for layer in layers]
    return max(
        (CALL_US + sum(times[c] for times in chosen))
        / (CALL_US + sum(layer.fastest[c] for layer in layers))
        for c in columns
    )


def _sizes(sizes: Sequence[int], *, by_token: bool) -> str:
    """Returns `batch 1 and 16`, or `1 and 512 tokens`."""
    listed = " and ".join(map(str, sizes))
    if by_token:
        return f"{listed} token{'s' if sizes[-1] > 1 else ''}"
    return f"batch {listed}"


def _milliseconds(times_us: Sequence[float]) -> str:
    return f"{' and '.join(f'{us / 1e3:.3g}' for us in times_us)} ms"


def check(name: str, plan: AnyPlan, target: Target) -> AnyPlan:
    """Returns a plan with a requested lowering; if that is impossible, raises `LoweringError`."""
    check_name(name)
    spec = plan.spec
    lowering = lowering_of(spec.kind, name)
    if lowering is None:
        kinds = " and ".join(kinds_with(name))
        problem: str | None = f"it is for {kinds} layers, but this is {kind_text(spec.kind)}"
    else:
        problem = lowering.problem(spec, plan.precision, target)
    if lowering is None or problem is not None:
        serving = [
            record.name
            for record in lowerings_of(spec.kind).values()
            if record.problem(spec, plan.precision, target) is None
        ]
        raise LoweringError(
            f"layer {spec.name}: the lowering '{name}' cannot be used: {problem}",
            hint=f"for --target {target} choose auto or one of: {', '.join(serving)}",
        )
    caveat = lowering.inexact(spec, plan.precision, target)
    reason = "requested" if caveat is None else f"requested; {caveat}"
    if unmeasured(target, spec.kind, [name]):
        reason += f"; not measured on an {TARGETS[target].machine.card}"
    return replace(
        plan,
        chosen=lowering,
        reason=reason,
        predicted_us=lowering.predict_us(plan, machine_for(target, plan.precision)),
    )
