"""Which lowering a layer gets: the one asked for, or what prediction prefers, with the reason.

One graph serves a range of batches, and a choice inside the graph does not pay (weights that a
branch uses are not packed before the run): so `auto` takes what is never far from the fastest, and
where nothing is near it at all sizes, the range is divided among several graphs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ...errors import LoweringError
from ..layers.base import a_layer
from ..targets import TARGETS, Target
from . import check_name, kinds_with, lowering_of, lowerings_of
from .base import AnyLowering
from .cost import AnyWork, assumed, machine_for

MUCH_SLOWER = 1.5
"""Where the choice for a range of batches is so many times slower than another lowering at one of
them, it is said what to do."""


DECODE_FIRST = ("int8", "int4")
"""What a language model is made smaller in to decode faster: each token reads the weights."""


@dataclass(frozen=True, slots=True)
class LoweringChoice:
    """The lowering chosen for a layer, and the reason in one sentence."""

    lowering: AnyLowering
    reason: str
    predicted_us: float


def able(work: AnyWork, target: Target) -> list[AnyLowering]:
    """Returns the lowerings that compute a layer exactly on a target, in its precision.

    Raises `LoweringError` when none does.
    """
    lowerings = [
        record
        for record in lowerings_of(work.spec.kind).values()
        if _serves(record, work, target)
        and record.inexact(work.spec, work.precision, target) is None
    ]
    if not lowerings:
        raise LoweringError(
            f"layer {work.spec.name}: no lowering serves the target {target}",
            hint="choose another --target",
        )
    return lowerings


def _serves(lowering: AnyLowering, work: AnyWork, target: Target) -> bool:
    return (
        lowering.needs(TARGETS[target])
        and lowering.unable(work.spec) is None
        and lowering.no_kernel(work.precision, target) is None
    )


def choose(
    work: AnyWork, target: Target, batches: Collection[int] = (), *, decodes: bool = False
) -> LoweringChoice:
    """Returns the exact lowering that is never much slower than the fastest, by prediction.

    What counts is the worst ratio to the fastest lowering over all `batches` and the work's own,
    and where that is the same for two, the time at the work's own. A layer that takes tokens as
    they come is judged at one token and at a prompt instead (`MoESpec.typical_tokens`), or at the
    tokens of each batch where an input has a fixed number of them. Where a language model
    `decodes`, in integers, it is judged at one token alone: a text is so many steps of one token.
    Raises `LoweringError` when no lowering serves the target.
    """
    by_token = bool(batches) and bool(work.spec.typical_tokens)
    if by_token:
        typical = work.spec.typical_tokens
        if work.tokens_fixed:
            typical = tuple(work.tokens * batch for batch in batches)
        sizes = sorted({work.choosers, *typical})
        works = [replace(work, batch=1, tokens=size) for size in sizes]
    else:
        sizes = sorted({work.batch, *batches})
        works = [replace(work, batch=size) for size in sizes]
    own = sizes.index(work.choosers if by_token else work.batch)
    predictions = _Predictions.of(works, target)
    first = decodes and by_token and not work.tokens_fixed and work.precision in DECODE_FIRST
    ranked = predictions.ranked([0] if first else range(len(sizes)), 0 if first else own)
    best, others = ranked[0], ranked[1:]
    times, fastest = predictions.times, predictions.fastest
    reason = (
        f"predicted {_milliseconds(times[best])} for k = {work.k} of {work.spec.experts} at "
        f"{_sizes(sizes, by_token=by_token)}"
    )
    ratio = predictions.worst(best, range(len(sizes)))
    if first and others:
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
            alone = "" if by_token else f"--batch {size} takes it, "
            reason += (
                f"; at {_sizes([size], by_token=by_token)} {better.name} is {slower:.2g} times as "
                f"fast: {alone}--lowering auto,{better.name} writes both"
            )
    return LoweringChoice(best, reason + assumed(target), times[best][own])


@dataclass(frozen=True)
class _Predictions:
    """What each lowering of a layer takes at some sizes, in microseconds, and the least."""

    times: dict[AnyLowering, list[float]]
    fastest: list[float]

    @staticmethod
    def of(works: Sequence[AnyWork], target: Target) -> _Predictions:
        machine = machine_for(target, works[0].precision)
        times = {
            record: [record.predict_us(work, machine) for work in works]
            for record in able(works[0], target)
        }
        return _Predictions(times, [min(column) for column in zip(*times.values(), strict=True)])

    def worst(self, record: AnyLowering, columns: Collection[int]) -> float:
        """A lowering's worst ratio to the fastest at some of the sizes."""
        return round(max(self.times[record][c] / self.fastest[c] for c in columns), 2)

    def ranked(self, columns: Collection[int], own: int) -> list[AnyLowering]:
        """The lowerings by their worst ratio; those with the same by their time at one size."""
        return sorted(
            self.times, key=lambda name: (self.worst(name, columns), self.times[name][own])
        )


Span = tuple[int, int]
"""The first and the last of the batch sizes that a graph is for."""

DIVIDED = 1.15
"""Where a single graph is so many times slower than the fastest for a size, several are written."""

CALL_US = 10.0
"""What a call takes beside its layers, at least: for less than a part of it no graph is written."""

MOST_GRAPHS = 3
"""Each of them keeps packed weights of its own in memory once it is used."""

STEP = 1.5
"""Between MIN and MAX of a range, sizes that grow so fast are looked at."""


def batch_spans(
    works: Sequence[AnyWork], target: Target, smallest: int, largest: int
) -> list[Span]:
    """Returns the ranges of batches that want a graph each, for the layers of a model.

    It is one where a single graph takes less than `DIVIDED` times as long as the fastest at the
    ends, else as few as bring that about, so divided that the worst ratio is the smallest. Where
    layers take tokens as they come, the batch says little of their number: one graph.
    """
    if any(work.spec.typical_tokens for work in works):
        return [(smallest, largest)]
    sizes = _looked_at(smallest, largest, {work.batch for work in works})
    layers = [
        _Predictions.of([replace(work, batch=size) for size in sizes], target) for work in works
    ]
    columns = range(len(sizes))
    ends = sorted({0, len(sizes) - 1, *(sizes.index(work.batch) for work in works)})
    partition = [columns]
    if _regret(layers, ends) >= DIVIDED:
        for count in range(2, min(MOST_GRAPHS, len(sizes)) + 1):
            divided = [
                [columns[a:b] for a, b in itertools.pairwise((0, *cuts, len(sizes)))]
                for cuts in itertools.combinations(columns[1:], count - 1)
            ]
            partition = min(divided, key=lambda parts: _regrets(layers, parts))
            if _regrets(layers, partition)[0] < DIVIDED:
                break
    # Between two sizes that were looked at, the first span goes to their geometric mean.
    last = [math.isqrt(sizes[part[-1]] * sizes[part[-1] + 1]) for part in partition[:-1]]
    return list(zip([smallest, *(size + 1 for size in last)], [*last, largest], strict=True))


def _looked_at(smallest: int, largest: int, between: Collection[int]) -> list[int]:
    sizes = {smallest, largest, *between}
    size = float(smallest)
    while size < largest:
        sizes.add(round(size))
        size *= STEP
    return sorted(sizes)


def _regrets(layers: Sequence[_Predictions], parts: Sequence[range]) -> tuple[float, float]:
    """The worst ratio of several graphs to the fastest for each size, and the sum of theirs."""
    regrets = [_regret(layers, part) for part in parts]
    return max(regrets), sum(regrets)


def _regret(layers: Sequence[_Predictions], columns: Sequence[int]) -> float:
    """The worst ratio of one graph to the fastest, its layers together, at some of the sizes.

    Its lowerings are those that `choose` takes for the first and the last of them.
    """
    ends = (columns[0], columns[-1])
    chosen = [layer.times[layer.ranked(ends, columns[0])[0]] for layer in layers]
    return max(
        (CALL_US + sum(times[c] for times in chosen))
        / (CALL_US + sum(layer.fastest[c] for layer in layers))
        for c in columns
    )


def _sizes(sizes: Sequence[int], *, by_token: bool) -> str:
    """`batch 1 and 16`, `1 and 512 tokens`."""
    listed = " and ".join(map(str, sizes))
    if by_token:
        return f"{listed} token{'s' if sizes[-1] > 1 else ''}"
    return f"batch {listed}"


def _milliseconds(times_us: Sequence[float]) -> str:
    return f"{' and '.join(f'{us / 1e3:.3g}' for us in times_us)} ms"


def check(name: str, work: AnyWork, target: Target) -> LoweringChoice:
    """Returns an asked-for lowering as a choice; `LoweringError` says why it cannot serve."""
    check_name(name)
    spec = work.spec
    lowering = lowering_of(spec.kind, name)
    problem: str | None
    if lowering is None:
        kinds = " and ".join(kinds_with(name))
        problem = f"it is for {kinds} layers, and this is {a_layer(spec.kind)}"
    elif lowering.needs(TARGETS[target]):
        problem = lowering.unable(spec) or lowering.no_kernel(work.precision, target)
    else:
        problem = f"the target {target} does not run it"
    if lowering is None or problem is not None:
        serving = [
            record.name
            for record in lowerings_of(spec.kind).values()
            if _serves(record, work, target)
        ]
        raise LoweringError(
            f"layer {spec.name}: the lowering '{name}' cannot serve it: {problem}",
            hint=f"for --target {target} choose auto or one of: {', '.join(serving)}",
        )
    reason = "asked for"
    caveat = lowering.inexact(spec, work.precision, target)
    if caveat is not None:
        reason += f"; {caveat}"
    machine = machine_for(target, work.precision)
    return LoweringChoice(lowering, reason, lowering.predict_us(work, machine))
