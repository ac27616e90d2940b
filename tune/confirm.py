"""The other half of the data: read once, to say which of the points hold what was asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import msgspec
import numpy as np

from ..bench.metrics import Z
from ..bench.runners.base import first_of
from ..bench.runners.pytorch import untouched
from ..common.console import Progress
from ..common.timing import Latency, Protocol
from ..errors import CheckError, FeedError, MoexportError
from .budget import protocol_for
from .graphs import Graphs, Look, times_as_long
from .halves import Halves
from .prepare import SearchJob
from .quality import Quality
from .shards import Batch
from .space import Choice
from .substitutes.substitutes import FOLDER

MOST = 8
"""Points that are confirmed at the most: each is a graph that is open."""


class ContractError(CheckError):
    """What was asked does not hold, or cannot be shown to."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A point and what it keeps on the half that the search did not see.

    `bold`: it stands in the second of the two `Sequences`.
    """

    look: Look
    quality: Quality
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Sequences:
    """The points to confirm, in two orders that the search's half alone decides.

    `safe` begins with the model as trained and goes on from the safest to the riskiest. `bold`
    begins with the point that promises most, and goes on to faster ones.
    """

    safe: tuple[Look, ...]
    bold: tuple[Look, ...] = ()

    @property
    def looks(self) -> tuple[Look, ...]:
        """All points, the model as trained first."""
        return self.safe + self.bold


def worth_confirming(looks: Sequence[Look]) -> list[Look]:
    """Returns the points that faster ones do not beat in all of three things, the fastest first.

    These are what is kept, the lower end of its interval, and how little the outputs moved. Ties
    stay: of points that keep as much on the search's half those that compute more are the surer.
    """
    found: list[Look] = []
    best = [-math.inf] * 3
    for look in sorted(looks, key=lambda each: (each.ms, -each.quality.kept)):
        safety = (*_without_luck(look.quality), -look.quality.shift)
        if any(own >= other for own, other in zip(safety, best, strict=True)):
            found.append(look)
        best = [max(pair) for pair in zip(safety, best, strict=True)]
    return found


def sequences_of(
    front: Sequence[Look],
    base: Look,
    keep: float | None,
    most: int = MOST,
    *,
    base_meets: bool = True,
) -> Sequences:
    """Returns the points to confirm, those that keep enough on the search's half.

    `base_meets`: the model as trained meets the bounds of time and size itself, so that only what
    is faster is worth confirming. What promises most is the gain in speed, of which a factor counts
    as another, times the probability that the other half shows what the search's did. Some slower
    points are taken, evenly over the factors of time: if that one fails, they are what is left.
    """
    others = [look for look in front if look.point != base.point]
    if keep is None:
        return Sequences((base, *sorted(others, key=lambda each: -each.quality.kept)[: most - 1]))
    others = [look for look in others if look.quality.kept >= keep]
    if base_meets:
        others = [look for look in others if look.ms < base.ms]
    if not others:
        return Sequences((base,))
    slowest = max(each.ms for each in (base, *others))

    def promise(look: Look) -> float:
        return math.log(slowest / look.ms) * _likely(look.quality, keep)

    others.sort(key=promise, reverse=True)
    first = others[0]
    bold = [look for look in others if look.ms <= first.ms][: max(1, (most - 1) // 2)]
    slower = [look for look in others if look.ms > first.ms]
    safe = _apart(slower, first.ms, slowest, most - 1 - len(bold))
    return Sequences(
        (base, *sorted(safe, key=lambda look: (-_likely(look.quality, keep), -look.ms))),
        tuple(sorted(bold, key=lambda look: -look.ms)),
    )


def _apart(looks: Sequence[Look], fast: float, slow: float, count: int) -> list[Look]:
    """Returns so many points whose times are evenly between two, by their factors."""
    left = list(looks)
    found = []
    for ms in np.geomspace(fast, slow, count + 2)[1:-1]:
        if left:
            nearest = min(left, key=lambda look: abs(math.log(look.ms / ms)))
            left.remove(nearest)
            found.append(nearest)
    return found


def _likely(quality: Quality, keep: float) -> float:
    """The probability that as many other inputs show that a share is kept, as these do."""
    kept, low = _without_luck(quality)
    return NormalDist().cdf(Z * (low - keep) / (math.sqrt(2) * max(1e-9, kept - low)))


def _without_luck(quality: Quality) -> tuple[float, float]:
    """What is kept, and the lower end of its interval, where no more than all can be kept.

    A few more right answers than the untouched model has come of many candidates, and of training
    on the inputs that are asked.
    """
    luck = max(0.0, quality.kept - 1)
    return quality.kept - luck, quality.low - luck


def confirmed(
    graphs: Graphs, sequences: Sequences, halves: Halves, progress: Progress
) -> list[Confirmed]:
    """Returns what each point keeps on the confirming half, which is read once, for all of them."""
    base, metric = untouched(graphs.base.model), graphs.metric
    listed = sequences.looks
    progress.step("confirming", total=halves.confirming_count, unit="inputs")

    def batches() -> Iterator[Batch]:
        for x, labels in graphs.whole(halves.confirming()):
            yield Batch(x, labels, base.infer(x), metric)
            progress.advance(len(first_of(x)))

    points = [(each.point, each.lowerings) for each in listed]
    with graphs.opened(points, spin_ms=0) as sessions:
        tallies = graphs.evaluate(batches())(sessions)
    if not tallies[0].inputs:
        raise FeedError("--data: one half holds no inputs", hint="give some hundreds of inputs")
    return [
        Confirmed(look, metric.quality(tally), bold=index >= len(sequences.safe))
        for index, (look, tally) in enumerate(zip(listed, tallies, strict=True))
    ]


def holding(found: Sequence[Confirmed], keep: float | None) -> list[Confirmed]:
    """Returns the points that hold: in each sequence those before the first that does not.

    The lower end of a 95% interval errs in 2.5% of cases. In a sequence whose order was fixed
    before, and which the first failure ends, none is passed wrongly in more; two of them err in 5%
    at the most (Bonferroni). This is fixed sequence testing with two starts, Angelopoulos et al.,
    Learn then Test, 2021.
    """
    held: list[Confirmed] = []
    for bold in (False, True):
        for each in found:
            if each.bold != bold:
                continue
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


def front_of(looks: Sequence[Look]) -> list[Look]:
    """Returns the points that no other beats in both time and what is kept, the slowest first."""
    front: list[Look] = []
    for look in sorted(looks, key=lambda each: (each.ms, -each.quality.kept)):
        if not front or look.quality.kept > front[-1].quality.kept:
            front.append(look)
    return front[::-1]


def with_ms(look: Look, ms: float) -> Look:
    """Returns a look with the time that a longer measurement found."""
    return replace(look, ms=ms)


@dataclass(frozen=True)
class SearchResult:
    """What a search found: every look, the front, what was timed again, and where it began.

    `protocol` is how the `latencies` were measured.
    """

    looks: tuple[Look, ...]
    front: tuple[Look, ...]
    timed: tuple[Look, ...]
    base: Look
    graphs: Graphs
    latencies: dict[str, Latency]
    protocol: Protocol
    choices: dict[str, tuple[Choice, ...]]


def shortlist(
    job: SearchJob,
    graphs: Graphs,
    base: Look,
    choices: dict[str, tuple[Choice, ...]],
) -> SearchResult:
    """Returns what a search found; the points to confirm are timed again, for longer."""
    found = [*graphs.looks.values()]
    room = _points(job, base, timed=False)
    within = [look for look in found if job.within(look)] or found
    sequences = _sequences(job, worth_confirming(within), base, room)
    again = [base, *(graphs.lowered(look) for look in sequences.looks[1:])]
    careful = protocol_for(base.ms, careful=True)
    latencies = graphs.timed(again, careful)
    first = latencies[base.point.key]
    timed = {
        look.point.key: with_ms(
            look, first.median * times_as_long(latencies[look.point.key], first)
        )
        for look in again
    }
    faster = timed[base.point.key].ms / base.ms  # all others are told beside the base
    looks = [timed.get(look.point.key, with_ms(look, faster * look.ms)) for look in found]
    within = [look for look in looks if job.within(look)] or looks
    front = front_of(within)
    return SearchResult(
        looks=tuple(looks),
        front=tuple(front),
        timed=tuple(timed.values()),
        base=timed[base.point.key],
        graphs=graphs,
        latencies=latencies,
        protocol=careful,
        choices=choices,
    )


def contract(
    job: SearchJob, found: SearchResult, progress: Progress
) -> tuple[list[Confirmed], list[Confirmed]]:
    """Confirms the front on the other half; returns all that was, and what holds.

    What holds is in the order in which it answers the request.
    """
    keep = job.request.keep
    most = _points(job, found.base, timed=True)
    sequences = _sequences(job, found.timed, found.base, most)
    done = job.journal.found("confirmed")
    if done:
        checked = [msgspec.convert(each, Confirmed) for each in done[-1]["points"]]
        for each in checked:
            check_same(job, each.look, found)
    else:
        checked = confirmed(found.graphs, sequences, job.halves, progress)
        job.journal.add("confirmed", points=[msgspec.to_builtins(each) for each in checked])
    held = holding(checked, keep)
    if keep is not None and not held:
        raise shortfall(checked[0], keep)
    within = [each for each in held if job.within(each.look)]
    if not within:
        raise _nearest(job, held)
    if keep is None:
        return checked, sorted(within, key=lambda each: -each.look.quality.kept)
    return checked, sorted(within, key=lambda each: (each.look.ms, each.look.bytes))


def _points(job: SearchJob, base: Look, *, timed: bool) -> int:
    """How many points there is time to confirm, the model as trained among them."""
    clock = job.clock
    if not math.isfinite(clock.left):
        return MOST
    fitting = job.end(base).points_within(clock.left - clock.writing_s, timed=timed)
    return min(MOST, max(2, math.floor(fitting)))


def _sequences(job: SearchJob, looks: Sequence[Look], base: Look, most: int) -> Sequences:
    """The points to confirm, in order, of which the model as trained may meet the bounds."""
    keep, meets = job.request.keep, job.within(base)
    return sequences_of(looks, base, keep, most, base_meets=meets)


def check_same(job: SearchJob, look: Look, found: SearchResult) -> None:
    """Raises where the substitutes of a point that was looked at are not what they were."""
    if found.graphs.substitutes.digest(look.point) != look.substitutes:
        raise ContractError(
            f"{job.folder / FOLDER}: what takes the places of experts is gone or changed "
            "since it was confirmed",
            hint=f"remove {job.folder} and search again",
        )


def _nearest(job: SearchJob, held: Sequence[Confirmed]) -> MoexportError:
    """The error that says what comes nearest to bounds that nothing meets."""
    request = job.request

    def beyond(each: Confirmed) -> float:
        slow = each.look.ms / (request.latency_ms or math.inf)
        return max(slow, each.look.bytes / (request.bytes or math.inf))

    nearest = min(held, key=beyond).look
    bounds = []
    if request.latency_ms is not None:
        bounds.append(f"--max-latency {request.latency_ms:g}ms")
    if request.bytes is not None:
        bounds.append(f"--max-bytes {request.bytes}")
    keep = "" if request.keep is None else f"--keep {request.keep:g} with "
    return ContractError(
        f"{keep}{' and '.join(bounds)}: nothing that was found meets it; the nearest takes "
        f"{nearest.ms:.3g} ms and {nearest.bytes} bytes and keeps {nearest.quality.kept:.2%}",
        hint="ask for less, or let the search take longer",
    )
