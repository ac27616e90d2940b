"""Searches: uniform models, a schedule of steps from the model as trained, then single changes.

Models with one k and one precision come first. The cost and the shift of each choice are known for
each layer; the schedule takes the steps with the smallest loss per gain first. Bisection finds how
far along the schedule the bounds are met, with a whole graph as each trial. Single changes of the
best point are then tried, most promising first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np

from ...common.console import Progress
from ...errors import MoexportError
from ...graphs.targets import Precision, Target
from .accuracy.confirm import ContractError, SearchResult, inputs_hint, shortlist
from .budget import (
    EACH_SIDE,
    EFFECT,
    EFFECTS_SHARE,
    LAST_SHARE,
    RANGES_SHARE,
    RUN,
    TIMES_SHARE,
    TRIAL,
    TRIALS,
    TRIALS_SHARE,
)
from .graphs import Graphs
from .layers import Replay, interleaved
from .prepare import SearchJob
from .recipe import LayerRecipe
from .schedule import Option, PartOptions, Predicted, cost_of, neighbours, predicted_front, steps
from .shards import Evaluate, evaluate_here
from .space import BACKBONE, Point, Space, Trial, sizes_to_measure, weight_bytes
from .substitutes.substitutes import Substitutes
from .times import LayerTimes

WORTH_KEEPING = 0.9
"""A model that keeps less than this share is useless, and riskier models are not tried."""

TINY = 1e-9

SIZE_STEPS = 8
"""The smallest step between two sizes of a layer is the size divided by this."""

MAX_TRAININGS = 2
"""How many times the substitutes of the most promising points are trained further."""

NEIGHBOURS = 4
"""Neighbours of the best point are tried until this many in a row are no better."""


@dataclass(frozen=True)
class Search:
    """Tries points of a target that may meet a request, until a `share` of the time has passed.

    `choices` are those of each layer, and `shifts` how far each choice alone moves the outputs;
    `moved` is how far each part alone moves them if it computes in integers.
    """

    job: SearchJob
    target: Target
    share: float
    graphs: Graphs
    choices: Mapping[str, Sequence[LayerRecipe]]
    shifts: Mapping[tuple[str, LayerRecipe], float]
    progress: Progress
    moved: dict[tuple[str, Precision], float] = field(default_factory=dict)

    @property
    def trials(self) -> list[Trial]:
        return [*self.graphs.trials.values()]

    @property
    def times(self) -> LayerTimes:
        """The measured times of the layers."""
        return self.graphs.times[self.target]

    @property
    def space(self) -> Space:
        return self.job.spaces[self.target]

    @property
    def start(self) -> Point:
        """The model as trained, on the target."""
        return replace(self.job.start, target=self.target)

    @property
    def keep(self) -> float | None:
        """The share of the quality to keep, if there is one."""
        return self.job.request.kept

    @property
    def confirmed(self) -> bool:
        """Whether an earlier run has confirmed a result, which must not change."""
        return bool(self.job.journal.pieces("confirmed"))

    def over(self) -> bool:
        """Returns whether the time for trials is over, except that for training."""
        trains = any(trial.point.is_reduced for trial in self.trials)
        share = TRIALS_SHARE if trains else 1.0
        return self.confirmed or self.job.clock.over(self.share * share, TRIAL)

    def run(self) -> None:
        """Tries uniform models, then a schedule for each float type and each width of integers."""
        self._try_uniform()
        # Floats come first: if time is short, computing fewer experts gains most.
        space, start = self.space, self.start
        if self.trial(start) is None:
            return
        passes: list[tuple[Precision, Precision | None]]
        passes = [(floats, None) for floats in space.floats]
        passes += [("fp32", integer) for integer in space.integers]
        for floats, integer in passes:
            if integer is not None:
                self._try_integers(integer)
            for by_size in self._costs():
                options = self._options(floats, integer, by_size=by_size)
                if all(options.values()):  # not if there was no time to try some part
                    self._try_schedule(start.in_precision(floats), options)
        self._refine()

    def _costs(self) -> tuple[bool, ...]:
        """Returns whether the cost of each path is the size (True) or the time."""
        request = self.job.request
        if request.most_bytes is None:
            return (False,)
        only_size = request.kept is None and request.latency_ms is None
        return (True,) if only_size else (False, True)

    def _try_uniform(self) -> None:
        """Tries the models that `bench` compares: one k and one precision for all layers.

        In integers, a smaller k is tried only if it is faster than the largest k in floats, and
        integers are faster than floats at the largest k. The graphs also correct the measured times
        of layers.
        """
        first, faster, job, space = None, set(), self.job, self.space
        for floats in space.floats:
            uniform = job.uniform("fp32", self.target)
            trials = self._try_descending(point.in_precision(floats) for point in uniform)
            first = trials[0] if trials else first
            faster |= {tuple(trial.point.k.items()) for trial in trials if trial.ms < trials[0].ms}
        for integer, parts in space.integers.items():
            uniform = job.uniform(integer, self.target)
            with_backbone = [point.with_around(integer) for point in uniform if BACKBONE in parts]
            for largest, *smaller in filter(None, (uniform, with_backbone)):
                trials = self._try_descending([largest])
                if first is None or (trials and trials[0].ms < first.ms):
                    self._try_descending(p for p in smaller if tuple(p.k.items()) in faster)

    def _try_descending(self, points: Iterable[Point]) -> list[Trial]:
        """Tries uniform models, largest first, as long as they may keep enough."""
        trials: list[Trial] = []
        for point in filter(self.times.knows, points):
            trial = self.trial(point)
            if trial is None:
                break
            trials.append(trial)
            if (self.keep or 0.0) > trial.quality.high:
                break
        for trial in trials:
            if trial.point.around == "fp32":
                self.times.corrected(trial.point, trial.ms)
        return trials

    def _try_schedule(self, start: Point, options: PartOptions) -> None:
        """Bisects the schedule of some options, then tries points near its end."""
        path = [start, *steps(start, options)]
        first, last = 0, len(path)
        # Points before `first` can shrink further; points from `last` on cannot.
        while first < last and not self.over():
            middle = (first + last) // 2
            trial = self.trial(path[middle])
            if trial is not None and self._can_shrink(trial):
                first = middle + 1
            else:
                last = middle
        ends = path[max(0, first - 1) : first + 2]
        for point in ends:
            self.trial(point)
        self._try_neighbours(options)
        front = predicted_front(start, options)
        end = cost_of(path[max(1, first) - 1], options)
        self._try_spread([predicted for predicted in front if predicted.cost >= end][::-1])
        self._try_spread([predicted for predicted in front if predicted.cost <= end])

    def _try_neighbours(self, options: PartOptions) -> None:
        """Tries single changes of the best point until several in a row are no better."""
        failed = measured = 0
        tried: set[str] = set()
        while failed < NEIGHBOURS and measured < TRIALS and not self.over():
            best = self.best()
            if best is None or best.point.target != self.target:
                return
            point = next((p for p in neighbours(best.point, options) if p.key not in tried), None)
            if point is None:
                return
            tried.add(point.key)
            known = point.key in self.graphs.trials
            trial = self.trial(point)
            measured += not known
            failed = 0 if trial is not None and self.best() is trial else failed + 1

    def _try_spread(self, points: Sequence[Predicted]) -> None:
        """Tries some of the points in order, spread evenly over the logarithm of cost.

        Safer points are the fallback if the fastest are not confirmed; riskier points show what a
        lower --keep would give.
        """
        if len(points) < 2:
            return
        factors = np.log([max(point.cost / points[0].cost, TINY) for point in points])
        for step in range(1, EACH_SIDE + 1):
            nearest = int(np.argmin(np.abs(factors - step / EACH_SIDE * factors[-1])))
            trial = self.trial(points[nearest].point)
            if trial is not None and trial.quality.high < WORTH_KEEPING:
                return

    def train_further(self) -> None:
        """Trains the substitutes of the best point and of faster points further.

        The fastest point that may still keep enough comes first, and the next one when training no
        longer helps.
        """
        if self.confirmed:
            return
        exhausted: list[Trial] = []
        clock, shared = self.job.clock, self.graphs.substitutes.shared
        for _ in range(MAX_TRAININGS):
            best = self.best()
            promising = [
                trial
                for trial in self.trials
                if trial.point.is_reduced
                and self.job.within(trial)
                and trial.quality.high >= (self.keep or 0.0)
                and (best is None or trial is best or trial.ms < best.ms)
                and not any(shared(trial.point, other.point) for other in exhausted)
            ]
            if not promising or clock.over(step=TRIAL):
                return
            trial = min(promising, key=lambda trial: trial.ms)
            self.progress.step(f"training further: {trial.ms:.3g} ms")
            if not self.graphs.train_further(trial, clock.training_s(RUN, LAST_SHARE)):
                exhausted.append(trial)

    def _refine(self) -> None:
        """Bisects between the size of each of the best point's layers and the next smaller size."""
        for name, choices in self.choices.items():
            best = self.best()
            if best is None or best.point.target != self.target:
                return
            current = best.point.choices[name]
            size = current.n or current.k
            subsets = current.k == size and any(choice.experts for choice in choices)
            same_kind = (choice for choice in choices if bool(choice.experts) == subsets)
            lower = max((choice.k for choice in same_kind if choice.k < size), default=size)
            while size - lower > max(1, size // SIZE_STEPS) and not self.over():
                k = (size + lower) // 2
                experts = self.graphs.substitutes.kept(name, k) if subsets else ()
                smaller = LayerRecipe(k, current.precision, experts=experts)
                point = best.point.with_layer(name, smaller)
                trial = self.trial(point) if self.times.knows(point) else None
                if trial is not None and self.best() is trial:
                    best, size = trial, k
                else:
                    lower = k

    def _try_integers(self, integer: Precision) -> None:
        """Measures how far each part alone moves the outputs in an integer precision."""
        parts, start = self.space.integers[integer], self.start
        base = self.graphs.trial(start)
        self.progress.step(f"trying each part in {integer}", total=len(parts), unit="parts")
        for part in parts:
            if self.over():
                break
            if part == BACKBONE:
                point = start.with_around(integer)
            else:
                layer = replace(start.choices[part], precision=integer)
                point = start.with_layer(part, layer)
            if not self.times.knows(point):
                continue  # there was no time to measure its layers
            trial = self.graphs.trial(point)
            self.moved[part, integer] = max(0.0, trial.quality.shift - base.quality.shift)
            if part == BACKBONE:
                self.times.around_ms[integer] = trial.ms - self.times.layers_ms(start)
            self.progress.advance(1)

    def _options(
        self, floats: Precision, integer: Precision | None, *, by_size: bool
    ) -> dict[str, list[Option]]:
        """Returns the options of each part in one float type and, if given, one width of integers.

        Their cost is in bytes if `by_size`, otherwise in time.
        """
        parts = () if integer is None else self.space.integers[integer]
        precisions: tuple[Precision, ...] = (floats,) if integer is None else (floats, integer)
        options: dict[str, list[Option]] = {}
        for name, choices in self.choices.items():
            options[name] = []
            for choice in choices:
                for precision in precisions if name in parts else precisions[:1]:
                    typed = replace(choice, precision=precision)
                    time = self.times.form_time(name, typed)
                    shift = self.shifts.get((name, choice))
                    added = 0.0 if precision == floats else self.moved.get((name, precision))
                    if time is None or shift is None or added is None:
                        continue  # there was no time to try it
                    layer = self.job.model.layers[name]
                    cost = weight_bytes(layer, typed) if by_size else time.ms
                    options[name].append(Option(choice=typed, cost=cost, shift=shift + added))
        around_ms = self.times.around_ms
        cost = 1.0 if by_size else around_ms["fp32"]
        options[BACKBONE] = [Option(choice=floats, cost=cost, shift=0.0)]
        if integer and (BACKBONE, integer) in self.moved:
            cost = 0.0 if by_size else around_ms[integer]
            shift = self.moved[BACKBONE, integer]
            options[BACKBONE].append(Option(choice=integer, cost=cost, shift=shift))
        return options

    def best(self) -> Trial | None:
        """Returns the fastest point so far that meets all bounds on the search's half.

        Without a share to keep, returns the point that keeps most.
        """
        within = [trial for trial in self.trials if self.job.within(trial)]
        if self.keep is None:
            return min(within, key=lambda trial: (-trial.quality.kept, trial.ms), default=None)
        enough = [trial for trial in within if trial.quality.low >= self.keep]
        return min(enough, key=lambda trial: trial.ms, default=None)

    def trial(self, point: Point) -> Trial | None:
        """Tries a point; returns None if its graph cannot be made or run, or if time is over."""
        known = point.key in self.graphs.trials
        if self.over() and not known:
            return None
        try:
            trial = self.graphs.trial(point)
        except MoexportError:
            return None
        if not known:
            best, status = self.best(), f"searching: {len(self.trials)} graphs"
            if best is not None:
                status += f", best so far {best.ms:.3g} ms, {best.quality.kept:.2%} kept"
            self.progress.step(status)
        return trial

    def _can_shrink(self, trial: Trial) -> bool:
        """Returns whether a trial keeps enough or, without a share to keep, is still too large."""
        if self.keep is None:
            return not self.job.within(trial)
        return trial.quality.low >= self.keep


def search(job: SearchJob, progress: Progress, evaluate: Evaluate = evaluate_here) -> SearchResult:
    """Measures layers, tries points, and times the points to confirm for longer."""
    clock = job.clock
    over = partial(clock.over, RANGES_SHARE)
    # A layer that mixes the inputs of a batch is recorded in batches of a size that it accepts.
    batch = job.base.least_batch if job.base.least_batch > 1 else None
    replay = Replay(job.model, job.holdout.search, job.outputs, job.metric, over, batch=batch)
    training_s = partial(clock.training_s, RUN)
    substitutes = Substitutes(job.model, replay.recording, job.folder, training_s)
    times = {target: LayerTimes(target, substitutes) for target in job.spaces}
    tokens = replay.tokens()
    as_trained = {name: (choice,) for name, choice in job.start.layers}
    for layer_times in times.values():
        layer_times.measure(job, as_trained, tokens, progress)
    graphs = Graphs(job, times, substitutes, progress, evaluate)
    base = graphs.with_best_lowerings(graphs.trial(job.start))
    times[job.start.target].corrected(job.start, base.ms)
    _check_base(base, job.request.kept)
    clock.reserve += job.finish_times(base).reserve_s(clock.left - clock.reserve)
    choices = dict(job.choices)
    if not clock.over(TIMES_SHARE):
        kept = {name: partial(substitutes.kept, name) for name in choices}
        choices = {n: (*known, *job.smaller_choices(n, kept[n])) for n, known in choices.items()}
    for target, layer_times in times.items():
        for in_precision in _in_precisions(job.spaces[target], choices):
            layer_times.measure(job, in_precision, tokens, progress)
    shifts = _shifts(job, replay, substitutes, choices, progress)
    with graphs.timed_with(base):
        for index, target in enumerate(times, start=1):
            share = index / len(times)
            on_target = Search(job, target, share, graphs, choices, shifts, progress)
            on_target.run()
        on_target.train_further()
        return shortlist(job, graphs, base, choices)


def _in_precisions(
    space: Space, choices: Mapping[str, Sequence[LayerRecipe]]
) -> Iterator[dict[str, list[LayerRecipe]]]:
    """Yields the choices to time in each precision, first each layer's largest and smallest."""
    precisions = (*space.floats, *space.integers)
    for ends, precision in itertools.product((True, False), precisions):
        within = space.integers.get(precision, (*choices,))
        timed: dict[str, list[LayerRecipe]] = {}
        for name, listed in choices.items():
            supported = precision if name in within else "fp32"
            sizes = [replace(choice, precision=supported) for choice in sizes_to_measure(listed)]
            timed[name] = [sizes[0], sizes[-1]] if ends else sizes
        yield timed


def _shifts(
    job: SearchJob,
    replay: Replay,
    substitutes: Substitutes,
    choices: Mapping[str, Sequence[LayerRecipe]],
    progress: Progress,
) -> dict[tuple[str, LayerRecipe], float]:
    """Returns how far each choice of each layer alone moves the outputs."""
    # A layer as trained does not move the outputs.
    shifts = dict.fromkeys(job.start.layers, 0.0)
    for piece in job.journal.pieces("effect"):
        choice = msgspec.convert(piece["choice"], LayerRecipe)
        shifts[piece["layer"], choice] = piece["shift"]
    missing = {
        name: [choice for choice in listed if (name, choice) not in shifts]
        for name, listed in choices.items()
    }
    total = sum(map(len, missing.values()))
    progress.step("trying each layer alone", total=total, unit="choices")
    for name, choice in interleaved(missing):
        if job.clock.over(EFFECTS_SHARE, EFFECT):
            break
        with job.clock.step(EFFECT):
            fitted = substitutes.fitted(name, choice)
            shifts[name, choice] = shift = replay.shift(name, choice, fitted)
        plain = msgspec.to_builtins(choice)
        job.journal.add("effect", layer=name, choice=plain, shift=shift)
        progress.advance(1)
    return shifts


def _check_base(base: Trial, keep: float | None) -> None:
    """Raises `ContractError` if even the model as trained is not shown to keep `keep`."""
    if keep is None or base.quality.low >= keep:
        return
    quality = base.quality
    raise ContractError(
        f"--keep {keep:.4g}: even the model as trained, in FP32, keeps only {quality.low:.2%} to "
        f"{quality.high:.2%} on the {quality.inputs} inputs of the search",
        hint=inputs_hint(quality, keep),
    )
