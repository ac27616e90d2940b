"""A measured model of time: each layer in each of its forms, and the network around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean

import msgspec
import numpy as np

from ...common.console import Progress
from ...common.timing import Protocol
from ...exporter.bundle.manifest import TunedLayers
from ...exporter.measured_lowerings import Measuring, Tokens, measure_lowerings
from ...exporter.quantization.precision import apply_precision
from ...graphs.targets import Precision, Target
from .budget import SPIN_MS, TIMES_SHARE
from .prepare import SearchJob
from .recipe import LayerRecipe
from .space import Point, covering_models, unlowered
from .substitutes.substitutes import Substitutes

BRIEF = Protocol(rounds=5, warmup=2, round_s=0.01, inputs=4)
"""Of one lowering of one layer: its order among others is what counts; whole graphs are timed
longer."""

LIKELY = 2.5
"""A lowering that is predicted to take so many times as long as the fastest is not measured."""

NEAR = 2.0
"""A lowering that takes so many times as long as the fastest of a layer alone may be the fastest in
a whole graph."""

MOST_WAYS = 6
"""So many whole graphs are compared for their lowerings, at the most."""

LITTLE = 1e-4
"""By what share more a larger size takes where no difference was measured."""

FORMS = "forms"
"""The step of a search in which all layers are timed in one form each."""

LayerForm = tuple[int, int, Precision]


@dataclass(frozen=True, slots=True)
class FormTime:
    """What a layer takes in one form, in milliseconds: its fastest lowering, and the others."""

    ms: float
    lowering: str
    others: dict[str, float] = field(default_factory=dict)


class LayerTimes:
    """The time of each layer's forms on a target, and of a model that is made of them.

    `around_ms` is what the network around the layers takes, by its precision: known once a whole
    graph with it was timed. `substitutes` take the places of experts.
    """

    def __init__(self, target: Target, substitutes: Substitutes | None = None) -> None:
        self.target, self._substitutes = target, substitutes
        self.forms: dict[tuple[str, LayerForm], FormTime] = {}
        self.around_ms: dict[Precision, float] = {}
        self._ratios: dict[tuple[Precision, bool], dict[Point, float]] = {}

    def of(self, layer: str, choice: LayerRecipe) -> FormTime | None:
        """Returns what a layer takes; None where no lowering serves that form."""
        return self.forms.get((layer, choice.form))

    def known(self, layer: str, choice: LayerRecipe) -> FormTime | None:
        """Returns what a layer takes: measured, or for a size between two by interpolation.

        Forms are measured one after the other, while the machine may change its speed: times that
        fall from one size to the next larger are drawn together. None where nothing like it was
        measured.
        """
        near = self._near(layer, choice)
        if not near:
            return None
        whole = self._whole(layer, choice.form)
        alike = [time.ms for form, time in near if self._whole(layer, form) == whole]
        # Beyond those of which some are computed, all may be: larger, and often faster.
        times = [*rising(alike), *(time.ms for _, time in near[len(alike) :])]
        ms = float(np.interp(choice.k, [form[0] for form, _ in near], times))
        return replace(_nearest(near, choice.k), ms=ms * self._scale(layer, choice))

    def _near(self, layer: str, choice: LayerRecipe) -> list[tuple[LayerForm, FormTime]]:
        """The forms of a layer that differ from a choice in size alone, the smallest first."""
        near = [
            (form, time)
            for (name, form), time in self.forms.items()
            if name == layer
            and form[2] == choice.precision
            and self._alike(name, form, choice.form)
        ]
        return sorted(near, key=lambda pair: pair[0])

    def _scale(self, layer: str, choice: LayerRecipe) -> float:
        """How many times as long such layers take in a whole graph as alone (`corrected`)."""
        whole = self._whole(layer, choice.form)
        seen = (self._ratios.get((choice.precision, computed)) for computed in (whole, True))
        ratios = next((ratio for ratio in seen if ratio), None)
        return 1.0 if ratios is None else geometric_mean(ratios.values())

    def _alike(self, layer: str, form: LayerForm, wanted: LayerForm) -> bool:
        """Whether a form of a layer differs in size alone: all computed, or k of all, or of some.

        The layer as it was trained is one of those in which all are computed, and the largest of
        those in which k of all are.
        """
        if self._whole(layer, wanted):
            return self._whole(layer, form)
        if not wanted[1]:
            return not form[1]
        return bool(form[1]) and not self._whole(layer, form)

    def _whole(self, layer: str, form: LayerForm) -> bool:
        """Whether all experts that there are are computed."""
        n = max(k for name, (k, subset, _) in self.forms if name == layer and not subset)
        return form[0] == (form[1] or n)

    def knows(self, point: Point) -> bool:
        """Whether the time of every layer of a point is known."""
        return all(self.known(name, choice) is not None for name, choice in point.layers)

    def lowerings(self, point: Point) -> dict[str, str]:
        """Returns the fastest lowering of each layer of a point."""
        return {name: self._sure(name, choice).lowering for name, choice in point.layers}

    def corrected(self, point: Point, ms: float) -> None:
        """Takes what a whole graph took, in place of the sum over its layers.

        It counts for all layers of its precision which compute all experts, or some, if its own are
        alike in that; of several graphs the mean. At least half of the time of the first is taken
        to be that of the layers.
        """
        kinds = {(layer.precision, self._whole(name, layer.form)) for name, layer in point.layers}
        if len(kinds) > 1:
            return
        (kind,) = kinds
        alone = sum(self._sure(n, c).ms / self._scale(n, c) for n, c in point.layers)
        around = self.around_ms.setdefault(point.around, max(0.0, min(ms - alone, ms / 2)))
        self._ratios.setdefault(kind, {})[point] = max(ms - around, ms / 10) / alone

    def ways(self, point: Point, lowerings: Mapping[str, str]) -> list[dict[str, str]]:
        """Returns the lowerings of a point: those given, and each other one that may be as fast.

        Layers of one form are changed together.
        """
        ways = [dict(lowerings)]
        for form in {choice.form: None for _, choice in point.layers}:
            names = [name for name, choice in point.layers if choice.form == form]
            times = [
                _nearest(self._near(name, point.choices[name]), point.choices[name].k)
                for name in names
            ]
            alike = [{time.lowering: time.ms, **time.others} for time in times]
            for other in alike[0]:
                near = all(
                    other in ms_of and ms_of[other] <= NEAR * min(ms_of.values()) for ms_of in alike
                )
                way = {**lowerings, **dict.fromkeys(names, other)}
                if near and way not in ways:
                    ways.append(way)
        return ways[:MOST_WAYS]

    def layers_ms(self, point: Point) -> float:
        """Returns what the layers of a point take together."""
        return sum(self._sure(name, choice).ms for name, choice in point.layers)

    def _sure(self, layer: str, choice: LayerRecipe) -> FormTime:
        time = self.known(layer, choice)
        assert time is not None, "points are made of choices whose time is known"
        return time

    def predicted_ms(self, point: Point) -> float:
        """Returns what a point takes: the layers, and the network around them as far as known."""
        around = self.around_ms.get(point.around, self.around_ms.get("fp32", 0.0))
        return around + self.layers_ms(point)

    def measure(
        self,
        job: SearchJob,
        choices: Mapping[str, Sequence[LayerRecipe]],
        inputs: Tokens,
        progress: Progress,
    ) -> None:
        """Measures every choice of every layer, all of one precision; what is known is left out.

        The largest and the smallest come first; when the time for it has ended the rest is left
        out. Those of the model as trained are measured anyhow.
        """
        for piece in job.journal.pieces("form", target=self.target):
            name, form = piece["layer"], (piece["k"], piece["n"], piece["precision"])
            self.forms[name, form] = msgspec.convert(piece["time"], FormTime)
        first, *others = covering_models(choices)
        for index, combination in enumerate((first, *others[-1:], *others[:-1])):
            if all(self.of(name, choice) is not None for name, choice in combination.items()):
                continue
            point = Point(tuple(combination.items()), self.target)
            if (index or point.precision != "fp32") and job.clock.over(TIMES_SHARE, FORMS):
                return
            with job.clock.step(FORMS):
                fitted = self._substitutes.fitted_to(point) if self._substitutes else None
                export, traced = unlowered(job.base, point, fitted), job.traced.clone()
                numbers = apply_precision(export, traced, export.table)
                measuring = Measuring(BRIEF, inputs, alone=True, within=LIKELY, spin_ms=SPIN_MS)
                tuning = measure_lowerings(export, traced, numbers, progress, measuring)
            for name, choice in combination.items():
                k, n, precision = choice.form
                self.forms[name, choice.form] = time = _time(tuning.of(name))
                plain = msgspec.to_builtins(time)
                of = {"target": self.target, "layer": name, "k": k, "n": n, "precision": precision}
                job.journal.add("form", **of, time=plain)


def _nearest(near: Sequence[tuple[LayerForm, FormTime]], k: int) -> FormTime:
    """The form whose size is nearest, of two the larger."""
    return min(near, key=lambda pair: (abs(pair[0][0] - k), -pair[0][0]))[1]


def rising(values: Sequence[float]) -> list[float]:
    """Returns the numbers nearest to some that rise from each to the next, if only by a little.

    Isotonic regression: neighbours that fall become their mean.
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] >= mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    return [mean * (1 + LITTLE * index) for index, mean in enumerate(means)]


def _time(measured: TunedLayers) -> FormTime:
    best, *others = measured.candidates
    return FormTime(
        ms=best.latency_ms.median,
        lowering=best.lowering,
        others={other.lowering: other.latency_ms.median for other in others},
    )
