"""Which lowering a layer gets: the one asked for, or the fastest by prediction, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import LoweringError
from ..targets import Target
from . import lowerings_of
from .base import AnyLowering
from .cost import AnyWork, machine_for


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


def choose(work: AnyWork, target: Target) -> LoweringChoice:
    """Returns the fastest exact lowering for the work, by prediction.

    Raises `LoweringError` when no lowering serves the target.
    """
    machine = machine_for(target, work.precision)
    candidates = [(each.predict_us(work, machine), each) for each in able(work, target)]
    candidates.sort(key=lambda candidate: candidate[0])
    best_us, best = candidates[0]
    others = ", ".join(f"{record.name} {us / 1e3:.3g} ms" for us, record in candidates[1:])
    reason = (
        f"predicted {best_us / 1e3:.3g} ms for k = {work.k} of {work.spec.experts} at batch "
        f"{work.batch}" + (f" (others: {others})" if others else "")
    )
    return LoweringChoice(best, reason, best_us)


def check(lowering: AnyLowering, work: AnyWork, target: Target) -> LoweringChoice:
    """Returns an asked-for lowering as a choice; `LoweringError` says why it cannot serve."""
    spec = work.spec
    if lowering.kind != spec.kind:
        problem: str | None = f"it is for {lowering.kind} layers, and this is a {spec.kind} layer"
    elif target in lowering.targets:
        problem = lowering.unable(spec)
    else:
        problem = f"the target {target} does not run it"
    problem = problem or lowering.no_kernel(work.precision, target)
    if problem is not None:
        serving = [
            record.name
            for record in lowerings_of(spec.kind).values()
            if _serves(record, work, target)
        ]
        raise LoweringError(
            f"layer {spec.name}: the lowering '{lowering.name}' cannot serve it: {problem}",
            hint=f"for --target {target} choose auto or one of: {', '.join(serving)}",
        )
    reason = "asked for"
    caveat = lowering.inexact(spec)
    if caveat is not None:
        reason += f"; {caveat}"
    machine = machine_for(target, work.precision)
    return LoweringChoice(lowering, reason, lowering.predict_us(work, machine))
