"""The search: uniform models, a path from the one as trained on, and what lies beside it.

Models with one k and one precision come first. What a choice costs in time and in quality is known
layer by layer; a path takes the steps that lose least for what they gain first. Halving
finds how far along it one may go, each look a whole graph, and single choices beside the best point
are then tried, the likeliest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..common.console import Progress
from ..errors import MoexportError
from ..graphs.targets import Precision
from .graphs import Graphs, Look
from .request import SearchOptions
from .space import Choice, Point

AROUND = ""
"""The part of a model that is no layer: the network around them."""

EACH_SIDE = 4
"""Points of a path that are looked at before where it must end, and after."""

WORTH_KEEPING = 0.9
"""Who keeps less deploys nothing: what is riskier still is not looked at."""

MOST_PREDICTED = 512
"""Points of a predicted front, at the most."""

TINY = 1e-9

LOOKS = 24
"""Whole graphs beside the path, at the most, for each width of integers."""

FURTHER = 2
"""How often what takes the places of experts is trained further, in what promises most."""

NEIGHBOURS = 4
"""Choices beside the best point that may fail in turn before the search ends."""


@dataclass(frozen=True, slots=True)
class Option:
    """A choice for one part of a model, with what it costs and how far it moves the outputs."""

    choice: Choice | Precision
    cost: float
    shift: float


Options = Mapping[str, Sequence[Option]]
"""The options of each part, the part as trained first."""


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
        path = [start, *_path(start, options)]
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
        end = _costs(path[max(1, first) - 1], options)
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
            point = next((p for p in _neighbours(best.point, options) if p.key not in tried), None)
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


def _path(start: Point, options: Options) -> Iterator[Point]:
    """Yields the points that the steps lead to, those that lose least for their gain first."""
    steps = [
        (slope, part, index, option)
        for part, listed in options.items()
        for index, (slope, option) in enumerate(_hull(listed))
    ]
    point = start
    for _, part, _, option in sorted(steps, key=lambda step: step[:3]):
        point = taken(point, part, option)
        yield point


@dataclass(frozen=True, slots=True)
class Predicted:
    """A point with the sums of what its parts cost and of how far they move the outputs."""

    point: Point
    cost: float
    shift: float


def predicted_front(start: Point, options: Options) -> list[Predicted]:
    """Returns the points that no other beats in both sums, those that cost most first.

    The parts are added one by one, and what is beaten so far is left out; of more than
    `MOST_PREDICTED` some are. The steps of a path are corners of it.
    """
    costs, shifts = np.zeros(1), np.zeros(1)
    chosen = np.zeros((1, 0), dtype=int)
    for listed in options.values():
        cost = np.add.outer(costs, [option.cost for option in listed]).ravel()
        shift = np.add.outer(shifts, [option.shift for option in listed]).ravel()
        order = np.lexsort((shift, cost))
        least = np.minimum.accumulate(shift[order])
        best = order[np.flatnonzero(shift[order] < np.concatenate(([np.inf], least[:-1])))]
        best = best[np.linspace(0, len(best) - 1, min(len(best), MOST_PREDICTED)).astype(int)]
        before, own = np.divmod(best, len(listed))
        costs, shifts = cost[best], shift[best]
        chosen = np.column_stack((chosen[before], own))
    found = []
    for cost, shift, row in zip(costs[::-1], shifts[::-1], chosen[::-1], strict=True):
        point = start
        for (part, listed), index in zip(options.items(), row, strict=True):
            point = taken(point, part, listed[index])
        found.append(Predicted(point, float(cost), float(shift)))
    return found


def _costs(point: Point, options: Options) -> float:
    """What the parts of a point cost together."""
    return sum(
        next(each.cost for each in listed if each.choice == _choice(point, part))
        for part, listed in options.items()
    )


def _choice(point: Point, part: str) -> Choice | Precision:
    return point.around if part == AROUND else point.choices[part]


def taken(point: Point, part: str, option: Option) -> Point:
    """Returns a point with an option for one of its parts."""
    if isinstance(option.choice, Choice):
        return point.with_layer(part, option.choice)
    return point.with_around(option.choice)


def _hull(options: Sequence[Option]) -> Iterator[tuple[float, Option]]:
    """Yields the steps of one part from its first option on, each with what it loses for its gain.

    They get cheaper and lose ever more: the lower convex hull of shift over cost.
    """
    at = options[0]
    while True:
        cheaper = [each for each in options if each.cost < at.cost]
        if not cheaper:
            return
        here = at
        slopes = [((each.shift - here.shift) / (here.cost - each.cost), each) for each in cheaper]
        slope, at = min(slopes, key=lambda each: (each[0], each[1].cost))
        yield slope, at


def _neighbours(point: Point, options: Options) -> list[Point]:
    """The points that differ in one part and cost less, those that move the outputs least first."""
    found = []
    for part, listed in options.items():
        own = next((each for each in listed if each.choice == _choice(point, part)), None)
        if own is None:
            continue
        found += [
            (each.shift - own.shift, taken(point, part, each))
            for each in listed
            if each.cost < own.cost
        ]
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


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
