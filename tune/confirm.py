"""The other half of the data: read once, to say which of the points hold what was asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..bench.runners.base import first_of
from ..bench.runners.pytorch import untouched
from ..common.console import Progress
from ..errors import CheckError, FeedError
from .graphs import Graphs, Look
from .halves import Halves
from .quality import Quality, Tally

MOST = 8
"""Points that are confirmed at the most: each is a graph that is open."""


class ContractError(CheckError):
    """What was asked does not hold, or cannot be shown to."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A point and what it keeps on the half that the search did not see."""

    look: Look
    quality: Quality


def sequence_of(
    front: Sequence[Look], base: Look, keep: float | None, most: int = MOST
) -> list[Look]:
    """Returns the points to confirm, in the order in which they are tested: the safest first.

    The model as trained begins; then those of the front that keep enough on the search's half, the
    fastest of them where there are many.
    """
    others = [look for look in front if look.point != base.point]
    if keep is not None:
        others = [look for look in others if look.quality.kept >= keep]
    others.sort(key=lambda look: (-look.quality.low, -look.ms))
    return [base, *others[max(0, len(others) + 1 - most) :]]


def confirmed(
    graphs: Graphs, sequence: Sequence[Look], halves: Halves, progress: Progress
) -> list[Confirmed]:
    """Returns what each point keeps on the confirming half, which is read once, for all of them."""
    base, metric = untouched(graphs.base.model), graphs.metric
    progress.step("confirming", total=halves.confirming_count, unit="inputs")
    tallies = [Tally() for _ in sequence]
    with graphs.opened([(each.point, each.lowerings) for each in sequence]) as sessions:
        for x, labels in graphs.whole(halves.confirming()):
            outputs = base.infer(x)
            for index, session in enumerate(sessions):
                tallies[index] += metric.tally(session(x), outputs, x, labels)
            progress.advance(len(first_of(x)))
    if not tallies[0].inputs:
        raise FeedError("--data: one half holds no inputs", hint="give some hundreds of inputs")
    return [
        Confirmed(look, metric.quality(tally))
        for look, tally in zip(sequence, tallies, strict=True)
    ]


def holding(found: Sequence[Confirmed], keep: float | None) -> list[Confirmed]:
    """Returns the points that hold: those before the first, in their sequence, that does not.

    Each is a test with 95% confidence; since the order was fixed before and the first failure ends
    it, together they have it, too.
    """
    held: list[Confirmed] = []
    for each in found:
        if keep is not None and each.quality.low < keep:
            break
        held.append(each)
    return held


def shortfall(found: Confirmed, keep: float) -> ContractError:
    """Returns the error that says what is short, and how many inputs would decide."""
    quality = found.quality
    said = (
        f"--keep {keep:.4g}: not confirmed: {quality.kept:.2%} is kept on {quality.inputs} inputs "
        f"that the search did not see, between {quality.low:.2%} and {quality.high:.2%} with 95% "
        "confidence"
    )
    return ContractError(said, hint=would_decide(quality, keep))


def would_decide(quality: Quality, keep: float) -> str:
    """Returns in words how many inputs would show that a share is kept, if any."""
    if quality.kept <= keep:
        return f"more inputs would not show it: ask for less, --keep {quality.low:.3g} holds here"
    needed = quality.inputs * ((quality.kept - quality.low) / (quality.kept - keep)) ** 2
    return (
        f"about {2 * math.ceil(needed)} inputs in --data, half of them to confirm, would decide; "
        f"--keep {quality.low:.3g} holds here"
    )
