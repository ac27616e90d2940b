"""Models times: those of each layer in each of its forms, and of the network around the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean

import msgspec
import numpy as np

from ...common.console import Progress
from ...common.timing import Protocol
from ...exporter.measured_lowerings import MeasurementOptions, measure_lowerings
from ...exporter.quantization.precision import apply_precision
from ...graphs.targets import Precision, Target
from .budget import SPIN_MS, TIMES_SHARE
from .prepare import SearchJob
from .recipe import LayerRecipe
from .space import Point, covering_models, job_without_lowerings
from .substitutes.substitutes import Substitutes

BRIEF = Protocol(rounds=5, warmup=2, round_s=0.01, inputs=4)
"""The protocol for a lowering of a layer, for its rank; whole graphs are timed for longer."""

MAX_PREDICTED_RATIO = 2.5
"""A lowering is not measured if its predicted time is more than this many times the fastest one."""

NEAR_FASTEST = 2.0
"""A lowering that is this factor slower than the fastest for a layer alone may still be the fastest
in a whole graph."""

MAX_VARIANTS = 6
"""The largest number of whole graphs to compare for a point's lowerings."""

MIN_STEP = 1e-4
"""The relative time added for a larger size if no difference was measured."""

FORMS = "forms"
"""The step of a search that times one form of each layer."""

LayerForm = tuple[int, int, Precision]


@dataclass(frozen=True, slots=True)
class FormTime:
    """A layer's time in one form, in ms, with its fastest `lowering`, and those of the others."""

    ms: float
    lowering: str
    others: dict[str, float] = field(default_factory=dict)


class LayerTimes:
    """The times of each layer's forms on a target, and of models made of them.

    `around_ms` is the time of the network around the layers in each precision, known once a whole
    graph in that precision has been timed. `substitutes` replace removed experts.
    """

    def __init__(self, target: Target, substitutes: Substitutes | None = None) -> None:
        self.target, self._substitutes = target, substitutes
        self.forms: dict[tuple[str, LayerForm], FormTime] = {}
        self.around_ms: dict[Precision, float] = {}
        self._ratios: dict[tuple[Precision, bool], dict[Point, float]] = {}

    def form_time(self, layer: str, choice: LayerRecipe) -> FormTime | None:
        """Returns a layer's time: measured, or interpolated between two sizes.

        The machine may change its speed between the measurements of two forms, so times are made
        monotonic in size. Returns None if no similar form was measured.
        """
        near = self._near(layer, choice)
        if not near:
            return None
        all_computed = self._computes_all(layer, choice.form)
        same = [t.ms for form, t in near if self._computes_all(layer, form) == all_computed]
        # If only some experts are computed, the layer as trained comes last: it is larger, but
        # often faster, because it computes all experts.
        times = [*isotonic(same), *(time.ms for _, time in near[len(same) :])]
        ms = float(np.interp(choice.k, [form[0] for form, _ in near], times))
        return replace(_nearest(near, choice.k), ms=ms * self._scale(layer, choice))

    def _near(self, layer: str, choice: LayerRecipe) -> list[tuple[LayerForm, FormTime]]:
        """Returns the forms of a layer that differ from a choice in size only, smallest first."""
        near = [
            (form, time)
            for (name, form), time in self.forms.items()
            if name == layer
            and form[2] == choice.precision
            and self._same_kind(name, form, choice.form)
        ]
        return sorted(near, key=lambda pair: pair[0])

    def _scale(self, layer: str, choice: LayerRecipe) -> float:
        """Returns the ratio of such layers' time in whole graphs to their time alone."""
        computes_all = self._computes_all(layer, choice.form)
        known = (self._ratios.get((choice.precision, kind)) for kind in (computes_all, True))
        ratios = next((ratio for ratio in known if ratio), None)
        return 1.0 if ratios is None else geometric_mean(ratios.values())

    def _same_kind(self, layer: str, form: LayerForm, wanted: LayerForm) -> bool:
        """Returns whether both forms compute all experts, k of all, or k of a subset.

        The layer as trained computes all experts, and is also the largest that computes k of all.
        """
        if self._computes_all(layer, wanted):
            return self._computes_all(layer, form)
        if not wanted[1]:
            return not form[1]
        return bool(form[1]) and not self._computes_all(layer, form)

    def _computes_all(self, layer: str, form: LayerForm) -> bool:
        """Returns whether all experts of the form are computed."""
        n = max(k for name, (k, subset, _) in self.forms if name == layer and not subset)
        return form[0] == (form[1] or n)

    def knows(self, point: Point) -> bool:
        return all(self.form_time(name, choice) is not None for name, choice in point.layers)

    def lowerings(self, point: Point) -> dict[str, str]:
        return {name: self._existing_time(name, choice).lowering for name, choice in point.layers}

    def corrected(self, point: Point, ms: float) -> None:
        """Corrects the layers' times by the time of a whole graph.

        This corrects all layers of the same precision that, like the graph's layers, compute all
        experts or only some; if the graph has layers of both kinds, nothing is corrected. With
        several graphs, the mean applies. Layers are assumed to take at least half of the first
        graph's time.
        """
        kinds = {(c.precision, self._computes_all(name, c.form)) for name, c in point.layers}
        if len(kinds) > 1:
            return
        (kind,) = kinds
        alone = sum(self._existing_time(n, c).ms / self._scale(n, c) for n, c in point.layers)
        around = self.around_ms.setdefault(point.around, max(0.0, min(ms - alone, ms / 2)))
        self._ratios.setdefault(kind, {})[point] = max(ms - around, ms / 10) / alone

    def lowering_variants(self, point: Point, lowerings: Mapping[str, str]) -> list[dict[str, str]]:
        """Returns combinations of lowerings: the given one, and others that may be as fast.

        Layers with the same form are changed together.
        """
        variants = [dict(lowerings)]
        for form in {choice.form: None for _, choice in point.layers}:
            names = [name for name, choice in point.layers if choice.form == form]
            times = [
                _nearest(self._near(name, point.choices[name]), point.choices[name].k)
                for name in names
            ]
            by_lowering = [{time.lowering: time.ms, **time.others} for time in times]
            for other in by_lowering[0]:
                near = all(
                    other in ms_of and ms_of[other] <= NEAR_FASTEST * min(ms_of.values())
                    for ms_of in by_lowering
                )
                variant = {**lowerings, **dict.fromkeys(names, other)}
                if near and variant not in variants:
                    variants.append(variant)
        return variants[:MAX_VARIANTS]

    def layers_ms(self, point: Point) -> float:
        return sum(self._existing_time(name, choice).ms for name, choice in point.layers)

    def _existing_time(self, layer: str, choice: LayerRecipe) -> FormTime:
        time = self.form_time(layer, choice)
        assert time is not None, "the time of every choice is known"
        return time

    def predicted_ms(self, point: Point) -> float:
        """Returns the predicted time of the layers and, if known, the network around them."""
        around = self.around_ms.get(point.around, self.around_ms.get("fp32", 0.0))
        return around + self.layers_ms(point)

    def measure(
        self,
        job: SearchJob,
        choices: Mapping[str, Sequence[LayerRecipe]],
        inputs: Mapping[str, np.ndarray],
        progress: Progress,
    ) -> None:
        """Measures every choice of every layer in one precision; skips known forms.

        The largest and the smallest come first. When the time is up, the rest is skipped, except
        for the choices of the model as trained.
        """
        for piece in job.journal.pieces("form", target=self.target):
            name, form = piece["layer"], (piece["k"], piece["n"], piece["precision"])
            self.forms[name, form] = msgspec.convert(piece["time"], FormTime)
        first, *smaller = covering_models(choices)
        for index, combination in enumerate((first, *smaller[-1:], *smaller[:-1])):
            if all((name, choice.form) in self.forms for name, choice in combination.items()):
                continue
            point = Point(tuple(combination.items()), self.target)
            if (index or point.precision != "fp32") and job.clock.over(TIMES_SHARE, FORMS):
                return
            with job.clock.step(FORMS):
                fitted = self._substitutes.fitted_to(point) if self._substitutes else None
                export, traced = job_without_lowerings(job.base, point, fitted), job.traced.clone()
                precisions = apply_precision(export, traced, export.table)
                measuring = MeasurementOptions(
                    BRIEF, inputs, alone=True, within=MAX_PREDICTED_RATIO, spin_ms=SPIN_MS
                )
                tuning = measure_lowerings(export, traced, precisions, progress, measuring)
            for name, choice in combination.items():
                k, n, precision = choice.form
                best, *slower = tuning.of(name).candidates
                others = {other.lowering: other.latency_ms.median for other in slower}
                time = FormTime(best.latency_ms.median, best.lowering, others)
                self.forms[name, choice.form] = time
                plain = msgspec.to_builtins(time)
                key = {"target": self.target, "layer": name, "k": k, "n": n, "precision": precision}
                job.journal.add("form", **key, time=plain)


def _nearest(near: Sequence[tuple[LayerForm, FormTime]], k: int) -> FormTime:
    """Returns the time of the form nearest in size; of two equally near forms, the larger."""
    return min(near, key=lambda pair: (abs(pair[0][0] - k), -pair[0][0]))[1]


def isotonic(values: Sequence[float]) -> list[float]:
    """Returns the closest strictly increasing numbers (isotonic regression).

    Decreasing neighbours are replaced by their mean.
    """
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] >= mean:
            other, size = pools.pop()
            mean, count = (mean * count + other * size) / (count + size), count + size
        pools.append((mean, count))
    means = [mean for mean, count in pools for _ in range(count)]
    return [mean * (1 + MIN_STEP * index) for index, mean in enumerate(means)]
