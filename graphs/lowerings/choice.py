"""Which lowering a layer gets: the one asked for, or what prediction prefers, with the reason.

One graph serves a range of batches, and a choice inside the graph does not pay (weights that a
branch uses are not packed before the run): so `auto` takes what is never far from the fastest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ...errors import LoweringError
from ..targets import Target
from . import ALL_LOWERINGS, check_name, lowerings_of
from .base import AnyLowering
from .cost import AnyWork, machine_for

MUCH_SLOWER = 1.5
"""Where the choice for a range of batches is so many times slower than another lowering at one of
them, it is said what to do."""


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
    found = [
        record
        for record in lowerings_of(work.spec.kind).values()
        if _serves(record, work, target) and record.inexact(work.spec) is None
    ]
    if not found:
        raise LoweringError(
            f"layer {work.spec.name}: no lowering serves the target {target}",
            hint="choose another --target",
        )
    return found


def _serves(lowering: AnyLowering, work: AnyWork, target: Target) -> bool:
    return (
        target in lowering.targets
        and lowering.unable(work.spec) is None
        and lowering.no_kernel(work.precision, target) is None
    )


def choose(work: AnyWork, target: Target, batches: Collection[int] = ()) -> LoweringChoice:
    """Returns the exact lowering that is never much slower than the fastest, by prediction.

    What counts is the worst ratio to the fastest lowering over all `batches` and the work's own,
    and where that is the same for two, the time at the work's own. A layer that takes tokens as
    they come is judged at one token and at a prompt instead (`MoESpec.typical_tokens`). Raises
    `LoweringError` when no lowering serves the target.
    """
    machine = machine_for(target, work.precision)
    by_token = bool(batches) and bool(work.spec.typical_tokens)
    if by_token:
        sizes = sorted({work.choosers, *work.spec.typical_tokens})
        works = [replace(work, batch=1, tokens=size) for size in sizes]
    else:
        sizes = sorted({work.batch, *batches})
        works = [replace(work, batch=size) for size in sizes]
    times = {
        record: [record.predict_us(each, machine) for each in works]
        for record in able(work, target)
    }
    fastest = [min(column) for column in zip(*times.values(), strict=True)]
    own = sizes.index(work.choosers if by_token else work.batch)

    def order(record: AnyLowering) -> tuple[float, float]:
        ratios = (us / least for us, least in zip(times[record], fastest, strict=True))
        return round(max(ratios), 2), times[record][own]

    ranked = sorted(times, key=order)
    best, others = ranked[0], ranked[1:]
    reason = (
        f"predicted {_milliseconds(times[best])} for k = {work.k} of {work.spec.experts} at "
        f"{_sizes(sizes, by_token=by_token)}"
    )
    ratio = order(best)[0]
    if len(sizes) > 1 and others:
        reason += f", at most {ratio:.3g} times the fastest" if ratio > 1 else ", always fastest"
    if others:
        listed = (f"{each.name} {_milliseconds(times[each])}" for each in others)
        reason += f" (others: {', '.join(listed)})"
    for column, size in enumerate(sizes):
        slower = times[best][column] / fastest[column]
        if slower >= MUCH_SLOWER:
            better = next(each for each in others if times[each][column] == fastest[column])
            alone = "" if by_token else f"--batch {size} takes it, "
            reason += (
                f"; at {_sizes([size], by_token=by_token)} {better.name} is {slower:.2g} times as "
                f"fast: {alone}--lowering auto,{better.name} writes both"
            )
    return LoweringChoice(best, reason, times[best][own])


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
    lowering = lowerings_of(spec.kind).get(name)
    problem: str | None
    if lowering is None:
        kinds = [kind for kind, other in ALL_LOWERINGS if other == name]
        problem = f"it is for {' and '.join(kinds)} layers, and this is a {spec.kind} layer"
    elif target in lowering.targets:
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
    caveat = lowering.inexact(spec)
    if caveat is not None:
        reason += f"; {caveat}"
    machine = machine_for(target, work.precision)
    return LoweringChoice(lowering, reason, lowering.predict_us(work, machine))
