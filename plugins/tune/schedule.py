"""Orders the steps from the model as trained to the smallest: smallest loss per gain first.

For each choice of each layer, its cost (time or bytes) and how far it moves the outputs are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...graphs.targets import Precision
from .recipe import LayerRecipe
from .space import BACKBONE, Point

MAX_PREDICTED = 512
"""The largest number of points on a predicted front."""


@dataclass(frozen=True, slots=True)
class Option:
    """A choice for one part of a model, with its cost and how far it moves the outputs."""

    choice: LayerRecipe | Precision
    cost: float
    shift: float


PartOptions = Mapping[str, Sequence[Option]]
"""The options of each part; the first is the part as trained."""


def steps(start: Point, options: PartOptions) -> Iterator[Point]:
    """Yields the points along the steps, in ascending order of loss per gain."""
    all_steps = [
        (slope, part, index, option)
        for part, listed in options.items()
        for index, (slope, option) in enumerate(_hull(listed))
    ]
    point = start
    for _, part, _, option in sorted(all_steps, key=lambda step: step[:3]):
        point = with_option(point, part, option)
        yield point


@dataclass(frozen=True, slots=True)
class Predicted:
    """A point with the sum of its parts' costs and the sum of their shifts."""

    point: Point
    cost: float
    shift: float


def predicted_front(start: Point, options: PartOptions) -> list[Predicted]:
    """Returns the points that no other beats in both sums, most costly first.

    Parts are added one by one, and dominated points are removed at each step; if more than
    `MAX_PREDICTED` remain, they are thinned out. The points along the steps are corners of this
    front.
    """
    costs, shifts = np.zeros(1), np.zeros(1)
    chosen = np.zeros((1, 0), dtype=int)
    for listed in options.values():
        cost = np.add.outer(costs, [option.cost for option in listed]).ravel()
        shift = np.add.outer(shifts, [option.shift for option in listed]).ravel()
        order = np.lexsort((shift, cost))
        lowest = np.minimum.accumulate(shift[order])
        best = order[np.flatnonzero(shift[order] < np.concatenate(([np.inf], lowest[:-1])))]
        best = best[np.linspace(0, len(best) - 1, min(len(best), MAX_PREDICTED)).astype(int)]
        before, added = np.divmod(best, len(listed))
        costs, shifts = cost[best], shift[best]
        chosen = np.column_stack((chosen[before], added))
    front = []
    for cost, shift, row in zip(costs[::-1], shifts[::-1], chosen[::-1], strict=True):
        point = start
        for (part, listed), index in zip(options.items(), row, strict=True):
            point = with_option(point, part, listed[index])
        front.append(Predicted(point=point, cost=float(cost), shift=float(shift)))
    return front


def cost_of(point: Point, options: PartOptions) -> float:
    return sum(
        next(option.cost for option in listed if option.choice == _choice(point, part))
        for part, listed in options.items()
    )


def _choice(point: Point, part: str) -> LayerRecipe | Precision:
    return point.around if part == BACKBONE else point.choices[part]


def with_option(point: Point, part: str, option: Option) -> Point:
    """Returns the point with another option for one part."""
    if isinstance(option.choice, LayerRecipe):
        return point.with_layer(part, option.choice)
    return point.with_around(option.choice)


def _hull(options: Sequence[Option]) -> Iterator[tuple[float, Option]]:
    """Yields the steps of one part, starting at its first option, each with its loss per gain.

    They form the lower convex hull of shift over cost: each step is cheaper and loses more.
    """
    last = options[0]
    while True:
        cheaper = [option for option in options if option.cost < last.cost]
        if not cheaper:
            return
        slopes = [
            ((option.shift - last.shift) / (last.cost - option.cost), option) for option in cheaper
        ]
        slope, last = min(slopes, key=lambda step: (step[0], step[1].cost))
        yield slope, last


def neighbours(point: Point, options: PartOptions) -> list[Point]:
    """Returns the points that differ in one part and cost less, smallest shift first."""
    points = []
    for part, listed in options.items():
        current = next((o for o in listed if o.choice == _choice(point, part)), None)
        if current is None:
            continue
        points += [
            (option.shift - current.shift, with_option(point, part, option))
            for option in listed
            if option.cost < current.cost
        ]
    return [neighbour for _, neighbour in sorted(points, key=lambda pair: pair[0])]
