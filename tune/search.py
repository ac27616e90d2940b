"""The search: uniform models, a schedule of steps from the one as trained, and its neighbours.

Models with one k and one precision come first. What a choice costs in time and in quality is known
layer by layer; the schedule takes the steps that lose least for what they gain first. Halving
finds how far along it one may go, each look a whole graph, and single choices beside the best point
are then tried, the likeliest first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
import torch

from ..calibration.feeds import Array
from ..common.console import Progress
from ..errors import MoexportError
from ..graphs.targets import Precision
from .budget import (
    EFFECT,
    EFFECTS_SHARE,
    LAST_SHARE,
    LOOK,
    LOOKS_SHARE,
    RANGES_SHARE,
    RUN,
    TIMES_SHARE,
    Clock,
)
from .confirm import ContractError, SearchResult, shortlist, would_decide
from .graphs import Graphs, Look
from .layers import Replay, in_turn
from .prepare import SearchJob, sizes_measured
from .request import SearchOptions
from .routed import Traces
from .schedule import (
    AROUND,
    Option,
    Options,
    Predicted,
    cost_of,
    neighbours,
    predicted_front,
    steps,
)
from .shards import Evaluate, evaluate_here
from .space import Choice, Point
from .substitutes.substitutes import Substitutes
from .times import LayerTimes

EACH_SIDE = 4
"""Points of a path that are looked at before where it must end, and after."""

WORTH_KEEPING = 0.9
"""Who keeps less deploys nothing: what is riskier still is not looked at."""

TINY = 1e-9

FINEST = 8
"""Sizes of a layer are told apart by so many parts of it, at the most."""

LOOKS = 24
"""Whole graphs beside the path, at the most, for each width of integers."""

FURTHER = 2
"""How often what takes the places of experts is trained further, in what promises most."""

NEIGHBOURS = 4
"""Choices beside the best point that may fail in turn before the search ends."""


@dataclass(frozen=True)
class Search:
    """Looks for the points that answer a request, until the time is `over`."""

    graphs: Graphs
    request: SearchOptions
    over: Callable[[], bool]
    progress: Progress
    refused: list[str] = field(default_factory=list)

    @property
    def looks(self) -> list[Look]:
        """Every point that was looked at."""
        return [*self.graphs.looks.values()]

    def seeds(self, ladder: Iterable[Point]) -> list[Look]:
        """Looks at models that are all alike, from the largest on while they may keep enough."""
        found: list[Look] = []
        for point in ladder:
            look = self.look(point)
            if look is None:
                break
            found.append(look)
            if (self.request.keep or 0.0) > look.quality.high:
                break
        return found

    def along(self, start: Point, options: Options) -> None:
        """Looks along the path of some options, and beside where it must end."""
        path = [start, *steps(start, options)]
        enough = self._enough if self.request.keep is not None else self._too_large
        first, last = 0, len(path)
        # Of the points before `first` all are on the side of the start, from `last` on none is.
        while first < last and not self.over():
            middle = (first + last) // 2
            look = self.look(path[middle])
            if look is not None and enough(look):
                first = middle + 1
            else:
                last = middle
        ends = path[max(0, first - 1) : first + 2]
        for point in ends:
            self.look(point)
        self._beside(options)
        front = predicted_front(start, options)
        end = cost_of(path[max(1, first) - 1], options)
        self._spread([each for each in front if each.cost >= end][::-1])
        self._spread([each for each in front if each.cost <= end])

    def _beside(self, options: Options) -> None:
        """Tries single other choices at the best point, until several in turn are no better."""
        failed = looked = 0
        tried: set[str] = set()
        while failed < NEIGHBOURS and looked < LOOKS and not self.over():
            best = self.best()
            if best is None:
                return
            point = next((p for p in neighbours(best.point, options) if p.key not in tried), None)
            if point is None:
                return
            tried.add(point.key)
            known = point.key in self.graphs.looks
            look = self.look(point)
            looked += not known
            failed = 0 if look is not None and self.best() is look else failed + 1

    def _spread(self, points: Sequence[Predicted]) -> None:
        """Looks at some of the points, from the first on, evenly over the factors of cost.

        Where the fastest are not confirmed, safer ones are what is left; riskier ones tell what
        another share to keep would give.
        """
        if len(points) < 2:
            return
        factors = np.log([max(point.cost / points[0].cost, TINY) for point in points])
        for step in range(1, EACH_SIDE + 1):
            at = int(np.argmin(np.abs(factors - step / EACH_SIDE * factors[-1])))
            look = self.look(points[at].point)
            if look is not None and look.quality.high < WORTH_KEEPING:
                return

    def train_further(self, over: Callable[[], bool], seconds: Callable[[], float]) -> None:
        """Trains further what takes the places of experts: in the best point, and in faster ones.

        The fastest that may still keep enough comes first. Where that no longer helps, the next.
        """
        done: list[Look] = []
        for _ in range(FURTHER):
            best = self.best()
            promising = [
                look
                for look in self.looks
                if look.point.fewer
                and not self._too_large(look)
                and look.quality.high >= (self.request.keep or 0.0)
                and (best is None or look is best or look.ms < best.ms)
                and not any(self.graphs.substitutes.shared(look.point, o.point) for o in done)
            ]
            if not promising or over():
                return
            look = min(promising, key=lambda each: each.ms)
            self.progress.step(f"training further: {look.ms:.3g} ms")
            if not self.graphs.trained_further(look, seconds()):
                done.append(look)

    def best(self) -> Look | None:
        """Returns the best point so far: the fastest that meets all bounds, by the search's half.

        Without a share to keep, the one that keeps most.
        """
        meets = [look for look in self.looks if self._enough(look) and not self._too_large(look)]
        if self.request.keep is None:
            return min(meets, key=lambda look: (-look.quality.kept, look.ms), default=None)
        return min(meets, key=lambda look: look.ms, default=None)

    def look(self, point: Point) -> Look | None:
        """Looks at a point; None where its graph cannot be made or run."""
        if self.over() and point.key not in self.graphs.looks:
            return None
        known = point.key in self.graphs.looks
        try:
            look = self.graphs.look(point)
        except MoexportError as error:
            self.refused.append(error.message)
            return None
        if known:
            return look
        best = self.best()
        told = f"{len(self.looks)} graphs"
        if best is not None:
            told += f", best so far {best.ms:.3g} ms, {best.quality.kept:.2%} kept"
        self.progress.step(f"searching: {told}")
        return look

    def _enough(self, look: Look) -> bool:
        keep = self.request.keep
        return keep is None or look.quality.low >= keep

    def _too_large(self, look: Look) -> bool:
        slow = self.request.latency_ms is not None and look.ms > self.request.latency_ms
        return slow or (self.request.bytes is not None and look.bytes > self.request.bytes)


def search(job: SearchJob, progress: Progress, evaluate: Evaluate = evaluate_here) -> SearchResult:
    """Measures layers, looks along the paths, and measures the front."""
    clock = job.clock
    over = partial(clock.over, RANGES_SHARE)
    replay = Replay(job.model, job.halves.search, job.outputs, job.metric, over)
    training_s = partial(clock.training_s, RUN)
    substitutes = Substitutes(job.model, replay.seen, job.folder, training_s)
    times, start = LayerTimes(substitutes), job.start
    as_trained = {name: (choice,) for name, choice in start.layers}
    _measure(job, times, as_trained, replay.tokens(), progress)
    graphs = Graphs(
        base=job.base,
        traces=Traces(job.base, job.traced),
        times=times,
        data=job.halves.search,
        outputs=job.outputs,
        metric=job.metric,
        journal=job.journal,
        progress=progress,
        threads=job.request.threads or torch.get_num_threads(),
        clock=clock,
        substitutes=substitutes,
        evaluate=evaluate,
    )
    base = graphs.lowered(graphs.look(start))
    times.corrected(start, base.ms)
    _check_base(base, job.request.keep)
    clock.reserve += job.end(base).reserve_s(clock.left - clock.reserve)
    late = clock.over(TIMES_SHARE)
    choices: dict[str, tuple[Choice, ...]] = {
        name: (
            *listed,
            *(() if late else job.fewer(name, partial(substitutes.kept, name))),
        )
        for name, listed in job.space.choices.items()
    }
    _times(job, times, choices, replay.tokens(), progress)
    shifts = _shifts(job, replay, substitutes, choices, progress)
    looking = Search(graphs, job.request, partial(_looks_over, graphs, clock), progress)
    with graphs.beside(base):
        _seed(job, looking, times)
        moved: dict[tuple[str, Precision], float] = {}
        # Without integers first: what computes fewer experts gains most where time is short.
        passes: list[tuple[Precision, Precision | None]]
        passes = [(floats, None) for floats in job.space.floats]
        passes += [("fp32", integer) for integer in job.space.integers]
        for floats, integer in passes:
            if integer is not None:
                moved |= _moved_by(job, integer, looking, times, base)
            for by_size in _costs(job.request):
                options = _options(
                    job, floats, integer, choices, times, shifts, moved, by_size=by_size
                )
                looking.along(start.in_floats(floats), options)
        _refine(job, looking, substitutes, choices, times)
        if not job.journal.found("confirmed"):
            looking.train_further(
                partial(clock.over, step=LOOK), partial(clock.training_s, RUN, LAST_SHARE)
            )
        return shortlist(job, graphs, base, choices)


def _seed(job: SearchJob, search: Search, times: LayerTimes) -> None:
    """Looks at what `bench` would be asked for: one k and one precision for all layers.

    Smaller k of integers are looked at where integers are faster than floats at the largest,
    and those alone that pay in floats. What these graphs take corrects the times of layers.
    """

    def seeds(points: Iterable[Point]) -> list[Look]:
        looks = search.seeds(filter(times.knows, points))
        for look in looks:
            if look.point.around == "fp32":
                times.corrected(look.point, look.ms)
        return looks

    first, pays = None, set()
    for floats in job.space.floats:
        looks = seeds(each.in_floats(floats) for each in job.uniform("fp32"))
        first = looks[0] if looks else first
        pays |= {tuple(each.point.k.items()) for each in looks if each.ms < looks[0].ms}
    for integer, parts in job.space.integers.items():
        for around in (False, True)[: 1 + (AROUND in parts)]:
            ladder = [
                each.with_around(integer) if around else each for each in job.uniform(integer)
            ]
            looks = seeds(ladder[:1])
            if first is None or (looks and looks[0].ms < first.ms):
                seeds(each for each in ladder[1:] if tuple(each.k.items()) in pays)


def _refine(
    job: SearchJob,
    search: Search,
    substitutes: Substitutes,
    choices: Mapping[str, Sequence[Choice]],
    times: LayerTimes,
) -> None:
    """Looks between the sizes of the best point's layers and the next smaller, by halving."""
    for name, listed in choices.items():
        best = search.best()
        if best is None:
            return
        now = best.point.choices[name]
        size = now.n or now.k
        subsets = now.k == size and any(each.experts for each in listed)
        smaller = [each.k for each in listed if bool(each.experts) == subsets and each.k < size]
        least = max(smaller, default=size)
        while size - least > max(1, size // FINEST) and not search.over():
            k = (size + least) // 2
            experts = substitutes.kept(name, k) if subsets else ()
            point = best.point.with_layer(name, Choice(k, experts, now.precision))
            look = search.look(point) if times.knows(point) else None
            if look is not None and search.best() is look:
                best, size = look, k
            else:
                least = k


def _times(
    job: SearchJob,
    times: LayerTimes,
    choices: Mapping[str, Sequence[Choice]],
    tokens: Mapping[str, Array],
    progress: Progress,
) -> None:
    """Times the layers in every precision, as far as the time goes."""
    precisions = (*job.space.floats, *job.space.integers)
    # The largest and the smallest in every precision come first.
    for ends, precision in itertools.product((True, False), precisions):
        within = job.space.integers.get(precision, (*choices,))
        asked: dict[str, list[Choice]] = {}
        for name, listed in choices.items():
            own = precision if name in within else "fp32"
            timed = [replace(each, precision=own) for each in sizes_measured(listed)]
            asked[name] = [timed[0], timed[-1]] if ends else timed
        _measure(job, times, asked, tokens, progress)


def _measure(
    job: SearchJob,
    times: LayerTimes,
    asked: Mapping[str, Sequence[Choice]],
    tokens: Mapping[str, Array],
    progress: Progress,
) -> None:
    times.measure(
        base=job.base,
        traced=job.traced,
        choices=asked,
        inputs=tokens,
        journal=job.journal,
        progress=progress,
        clock=job.clock,
        share=TIMES_SHARE,
    )


def _shifts(
    job: SearchJob,
    replay: Replay,
    substitutes: Substitutes,
    choices: Mapping[str, Sequence[Choice]],
    progress: Progress,
) -> dict[tuple[str, Choice], float]:
    """How far each choice of each layer alone moves the outputs."""
    # As it was trained, a layer moves nothing.
    found = dict.fromkeys(job.start.layers, 0.0)
    for each in job.journal.found("effect"):
        choice = msgspec.convert(each["choice"], Choice)
        found[each["layer"], choice] = each["shift"]
    missing = {
        name: [each for each in listed if (name, each) not in found]
        for name, listed in choices.items()
    }
    total = sum(map(len, missing.values()))
    progress.step("trying each layer alone", total=total, unit="choices")
    for name, choice in in_turn(missing):
        if job.clock.over(EFFECTS_SHARE, EFFECT):
            break
        with job.clock.step(EFFECT):
            others = substitutes.fitted(name, choice)
            found[name, choice] = shift = replay.quality(name, choice, others).shift
        told = msgspec.to_builtins(choice)
        job.journal.add("effect", layer=name, choice=told, shift=shift)
        progress.advance(1)
    return found


def _moved_by(
    job: SearchJob,
    precision: Precision,
    search: Search,
    times: LayerTimes,
    base: Look,
) -> dict[tuple[str, Precision], float]:
    """How far each part alone moves the outputs when it computes in some integers."""
    found: dict[tuple[str, Precision], float] = {}
    parts = job.space.integers[precision]
    progress = search.progress
    progress.step(f"trying each part in {precision}", total=len(parts), unit="parts")
    for part in parts:
        if search.over():
            break
        point = _in_precision(job.start, part, precision)
        if not times.knows(point):
            continue  # there was no time to look at it
        look = search.graphs.look(point)
        found[part, precision] = max(0.0, look.quality.shift - base.quality.shift)
        if part == AROUND:
            times.around_ms[precision] = look.ms - times.layers_ms(job.start)
        progress.advance(1)
    return found


def _options(
    job: SearchJob,
    floats: Precision,
    integer: Precision | None,
    choices: Mapping[str, Sequence[Choice]],
    times: LayerTimes,
    shifts: Mapping[tuple[str, Choice], float],
    moved: Mapping[tuple[str, Precision], float],
    *,
    by_size: bool,
) -> dict[str, list[Option]]:
    """The options of each part in some floats, with one width of integers or with none.

    They cost time, or bytes.
    """
    parts = () if integer is None else job.space.integers[integer]
    both: tuple[Precision, ...] = (floats,) if integer is None else (floats, integer)
    options: dict[str, list[Option]] = {}
    for name, tried in choices.items():
        options[name] = []
        for choice in tried:
            for precision in both if name in parts else both[:1]:
                own = replace(choice, precision=precision)
                time, shift = times.known(name, own), shifts.get((name, choice))
                alone = 0.0 if precision == floats else moved.get((name, precision))
                if time is None or shift is None or alone is None:
                    continue  # there was no time to look at it
                cost = job.bytes_of(name, own) if by_size else time.ms
                shift += alone
                options[name].append(Option(own, cost, shift))
    around = times.around_ms["fp32"]
    options[AROUND] = [Option(floats, 1.0 if by_size else around, 0.0)]
    if integer and (AROUND, integer) in moved:
        cost = 0.0 if by_size else times.around_ms[integer]
        options[AROUND].append(Option(integer, cost, moved[AROUND, integer]))
    return options


def _costs(request: SearchOptions) -> tuple[bool, ...]:
    """What paths there are: by time, by size (True), or both where both count."""
    if request.bytes is None:
        return (False,)
    alone = request.keep is None and request.latency_ms is None
    return (True,) if alone else (False, True)


def _in_precision(point: Point, part: str, precision: Precision) -> Point:
    """A point with one part in integers."""
    if part == AROUND:
        return point.with_around(precision)
    return point.with_layer(part, replace(point.choices[part], precision=precision))


def _looks_over(graphs: Graphs, clock: Clock) -> bool:
    """Whether the time for looks is over; what can be trained has its own.

    After the confirmation there is none: to train further would change what was confirmed.
    """
    if graphs.journal.found("confirmed"):
        return True
    trains = any(look.point.fewer for look in graphs.looks.values())
    return clock.over(LOOKS_SHARE if trains else 1.0, LOOK)


def _check_base(base: Look, keep: float | None) -> None:
    """Raises where the model as trained cannot be shown to keep what is to be kept."""
    if keep is None or base.quality.low >= keep:
        return
    quality = base.quality
    raise ContractError(
        f"--keep {keep:.4g}: the model as trained, in FP32, keeps between {quality.low:.2%} and "
        f"{quality.high:.2%} on the {quality.inputs} inputs of the search's half",
        hint=would_decide(quality, keep),
    )
