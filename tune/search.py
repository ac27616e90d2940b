"""The search: uniform models, a schedule of steps from the one as trained, and its neighbours.

Models with one k and one precision come first. What a choice costs in time and in quality is known
layer by layer; the schedule takes the steps that lose least for what they gain first. Halving
finds how far along it one may go, each trial a whole graph, and single choices beside the best
point are then tried, the likeliest first.
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
from ..exporter.bundle.recipe import LayerRecipe
from ..graphs.targets import Precision
from .budget import (
    EFFECT,
    EFFECTS_SHARE,
    LAST_SHARE,
    RANGES_SHARE,
    RUN,
    TIMES_SHARE,
    TRIAL,
    TRIALS_SHARE,
    Clock,
)
from .confirm import ContractError, SearchResult, shortlist, would_decide
from .graphs import Graphs, Trial
from .layers import Replay, in_turn
from .prepare import SearchJob, sizes_measured
from .request import SearchOptions
from .routed import Traces
from .schedule import (
    AROUND,
    Option,
    PartOptions,
    Predicted,
    cost_of,
    neighbours,
    predicted_front,
    steps,
)
from .shards import Evaluate, evaluate_here
from .space import Point, weight_bytes
from .substitutes.substitutes import Substitutes
from .times import LayerTimes

EACH_SIDE = 4
"""Points of a path that are looked at before where it must end, and after."""

WORTH_KEEPING = 0.9
"""Who keeps less deploys nothing: what is riskier still is not looked at."""

TINY = 1e-9

FINEST = 8
"""Sizes of a layer are told apart by so many parts of it, at the most."""

TRIALS = 24
"""Whole graphs beside the path, at the most, for each width of integers."""

FURTHER = 2
"""How often what takes the places of experts is trained further, in what promises most."""

NEIGHBOURS = 4
"""Choices beside the best point that may fail in turn before the search ends."""


@dataclass(frozen=True)
class Search:
    """Tries the points that may answer a request, until the time is `over`."""

    graphs: Graphs
    request: SearchOptions
    over: Callable[[], bool]
    progress: Progress
    refused: list[str] = field(default_factory=list)

    @property
    def trials(self) -> list[Trial]:
        """Every point that was looked at."""
        return [*self.graphs.trials.values()]

    def seeds(self, ladder: Iterable[Point]) -> list[Trial]:
        """Looks at models that are all alike, from the largest on while they may keep enough."""
        found: list[Trial] = []
        for point in ladder:
            trial = self.trial(point)
            if trial is None:
                break
            found.append(trial)
            if (self.request.keep or 0.0) > trial.quality.high:
                break
        return found

    def along(self, start: Point, options: PartOptions) -> None:
        """Looks along the schedule of some options, and beside where it must end."""
        path = [start, *steps(start, options)]
        enough = self._enough if self.request.keep is not None else self._too_large
        first, last = 0, len(path)
        # Of the points before `first` all are on the side of the start, from `last` on none is.
        while first < last and not self.over():
            middle = (first + last) // 2
            trial = self.trial(path[middle])
            if trial is not None and enough(trial):
                first = middle + 1
            else:
                last = middle
        ends = path[max(0, first - 1) : first + 2]
        for point in ends:
            self.trial(point)
        self._beside(options)
        front = predicted_front(start, options)
        end = cost_of(path[max(1, first) - 1], options)
        self._spread([each for each in front if each.cost >= end][::-1])
        self._spread([each for each in front if each.cost <= end])

    def _beside(self, options: PartOptions) -> None:
        """Tries single other choices at the best point, until several in turn are no better."""
        failed = looked = 0
        tried: set[str] = set()
        while failed < NEIGHBOURS and looked < TRIALS and not self.over():
            best = self.best()
            if best is None:
                return
            point = next((p for p in neighbours(best.point, options) if p.key not in tried), None)
            if point is None:
                return
            tried.add(point.key)
            known = point.key in self.graphs.trials
            trial = self.trial(point)
            looked += not known
            failed = 0 if trial is not None and self.best() is trial else failed + 1

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
            trial = self.trial(points[at].point)
            if trial is not None and trial.quality.high < WORTH_KEEPING:
                return

    def train_further(self, over: Callable[[], bool], seconds: Callable[[], float]) -> None:
        """Trains further what takes the places of experts: in the best point, and in faster ones.

        The fastest that may still keep enough comes first. Where that no longer helps, the next.
        """
        done: list[Trial] = []
        for _ in range(FURTHER):
            best = self.best()
            promising = [
                trial
                for trial in self.trials
                if trial.point.fewer
                and not self._too_large(trial)
                and trial.quality.high >= (self.request.keep or 0.0)
                and (best is None or trial is best or trial.ms < best.ms)
                and not any(self.graphs.substitutes.shared(trial.point, o.point) for o in done)
            ]
            if not promising or over():
                return
            trial = min(promising, key=lambda each: each.ms)
            self.progress.step(f"training further: {trial.ms:.3g} ms")
            if not self.graphs.trained_further(trial, seconds()):
                done.append(trial)

    def best(self) -> Trial | None:
        """Returns the best point so far: the fastest that meets all bounds, by the search's half.

        Without a share to keep, the one that keeps most.
        """
        meets = [
            trial for trial in self.trials if self._enough(trial) and not self._too_large(trial)
        ]
        if self.request.keep is None:
            return min(meets, key=lambda trial: (-trial.quality.kept, trial.ms), default=None)
        return min(meets, key=lambda trial: trial.ms, default=None)

    def trial(self, point: Point) -> Trial | None:
        """Looks at a point; None where its graph cannot be made or run."""
        if self.over() and point.key not in self.graphs.trials:
            return None
        known = point.key in self.graphs.trials
        try:
            trial = self.graphs.trial(point)
        except MoexportError as error:
            self.refused.append(error.message)
            return None
        if known:
            return trial
        best = self.best()
        told = f"{len(self.trials)} graphs"
        if best is not None:
            told += f", best so far {best.ms:.3g} ms, {best.quality.kept:.2%} kept"
        self.progress.step(f"searching: {told}")
        return trial

    def _enough(self, trial: Trial) -> bool:
        keep = self.request.keep
        return keep is None or trial.quality.low >= keep

    def _too_large(self, trial: Trial) -> bool:
        slow = self.request.latency_ms is not None and trial.ms > self.request.latency_ms
        return slow or (self.request.bytes is not None and trial.bytes > self.request.bytes)


def search(job: SearchJob, progress: Progress, evaluate: Evaluate = evaluate_here) -> SearchResult:
    """Measures layers, tries points along the schedules, and measures the front."""
    clock = job.clock
    over = partial(clock.over, RANGES_SHARE)
    replay = Replay(job.model, job.holdout.search, job.outputs, job.metric, over)
    training_s = partial(clock.training_s, RUN)
    substitutes = Substitutes(job.model, replay.seen, job.folder, training_s)
    times, start = LayerTimes(substitutes), job.start
    as_trained = {name: (choice,) for name, choice in start.layers}
    _measure(job, times, as_trained, replay.tokens(), progress)
    graphs = Graphs(
        base=job.base,
        traces=Traces(job.base, job.traced),
        times=times,
        data=job.holdout.search,
        outputs=job.outputs,
        metric=job.metric,
        journal=job.journal,
        progress=progress,
        threads=torch.get_num_threads(),
        clock=clock,
        substitutes=substitutes,
        evaluate=evaluate,
    )
    base = graphs.lowered(graphs.trial(start))
    times.corrected(start, base.ms)
    _check_base(base, job.request.keep)
    clock.reserve += job.end(base).reserve_s(clock.left - clock.reserve)
    late = clock.over(TIMES_SHARE)
    choices: dict[str, tuple[LayerRecipe, ...]] = {
        name: (
            *listed,
            *(() if late else job.fewer(name, partial(substitutes.kept, name))),
        )
        for name, listed in job.space.choices.items()
    }
    _times(job, times, choices, replay.tokens(), progress)
    shifts = _shifts(job, replay, substitutes, choices, progress)
    strategy = Search(
        graphs=graphs,
        request=job.request,
        over=partial(_trials_over, graphs, clock),
        progress=progress,
    )
    with graphs.beside(base):
        _seed(job, strategy, times)
        moved: dict[tuple[str, Precision], float] = {}
        # Without integers first: what computes fewer experts gains most where time is short.
        passes: list[tuple[Precision, Precision | None]]
        passes = [(floats, None) for floats in job.space.floats]
        passes += [("fp32", integer) for integer in job.space.integers]
        for floats, integer in passes:
            if integer is not None:
                moved |= _moved_by(job, integer, strategy, times, base)
            for by_size in _costs(job.request):
                options = _options(
                    job, floats, integer, choices, times, shifts, moved, by_size=by_size
                )
                strategy.along(start.in_floats(floats), options)
        _refine(job, strategy, substitutes, choices, times)
        if not job.journal.found("confirmed"):
            strategy.train_further(
                partial(clock.over, step=TRIAL), partial(clock.training_s, RUN, LAST_SHARE)
            )
        return shortlist(job, graphs, base, choices)


def _seed(job: SearchJob, search: Search, times: LayerTimes) -> None:
    """Looks at what `bench` would be asked for: one k and one precision for all layers.

    Smaller k of integers are looked at where integers are faster than floats at the largest,
    and those alone that pay in floats. What these graphs take corrects the times of layers.
    """

    def seeds(points: Iterable[Point]) -> list[Trial]:
        trials = search.seeds(filter(times.knows, points))
        for trial in trials:
            if trial.point.around == "fp32":
                times.corrected(trial.point, trial.ms)
        return trials

    first, pays = None, set()
    for floats in job.space.floats:
        trials = seeds(each.in_floats(floats) for each in job.uniform("fp32"))
        first = trials[0] if trials else first
        pays |= {tuple(each.point.k.items()) for each in trials if each.ms < trials[0].ms}
    for integer, parts in job.space.integers.items():
        for around in (False, True)[: 1 + (AROUND in parts)]:
            ladder = [
                each.with_around(integer) if around else each for each in job.uniform(integer)
            ]
            trials = seeds(ladder[:1])
            if first is None or (trials and trials[0].ms < first.ms):
                seeds(each for each in ladder[1:] if tuple(each.k.items()) in pays)


def _refine(
    job: SearchJob,
    search: Search,
    substitutes: Substitutes,
    choices: Mapping[str, Sequence[LayerRecipe]],
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
            point = best.point.with_layer(name, LayerRecipe(k, now.precision, experts=experts))
            trial = search.trial(point) if times.knows(point) else None
            if trial is not None and search.best() is trial:
                best, size = trial, k
            else:
                least = k


def _times(
    job: SearchJob,
    times: LayerTimes,
    choices: Mapping[str, Sequence[LayerRecipe]],
    tokens: Mapping[str, Array],
    progress: Progress,
) -> None:
    """Times the layers in every precision, as far as the time goes."""
    precisions = (*job.space.floats, *job.space.integers)
    # The largest and the smallest in every precision come first.
    for ends, precision in itertools.product((True, False), precisions):
        within = job.space.integers.get(precision, (*choices,))
        asked: dict[str, list[LayerRecipe]] = {}
        for name, listed in choices.items():
            own = precision if name in within else "fp32"
            timed = [replace(each, precision=own) for each in sizes_measured(listed)]
            asked[name] = [timed[0], timed[-1]] if ends else timed
        _measure(job, times, asked, tokens, progress)


def _measure(
    job: SearchJob,
    times: LayerTimes,
    asked: Mapping[str, Sequence[LayerRecipe]],
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
    choices: Mapping[str, Sequence[LayerRecipe]],
    progress: Progress,
) -> dict[tuple[str, LayerRecipe], float]:
    """How far each choice of each layer alone moves the outputs."""
    # As it was trained, a layer moves nothing.
    found = dict.fromkeys(job.start.layers, 0.0)
    for each in job.journal.found("effect"):
        choice = msgspec.convert(each["choice"], LayerRecipe)
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
    base: Trial,
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
        trial = search.graphs.trial(point)
        found[part, precision] = max(0.0, trial.quality.shift - base.quality.shift)
        if part == AROUND:
            times.around_ms[precision] = trial.ms - times.layers_ms(job.start)
        progress.advance(1)
    return found


def _options(
    job: SearchJob,
    floats: Precision,
    integer: Precision | None,
    choices: Mapping[str, Sequence[LayerRecipe]],
    times: LayerTimes,
    shifts: Mapping[tuple[str, LayerRecipe], float],
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
                cost = weight_bytes(job.model.layers[name], own) if by_size else time.ms
                shift += alone
                options[name].append(Option(choice=own, cost=cost, shift=shift))
    around = times.around_ms["fp32"]
    options[AROUND] = [Option(choice=floats, cost=1.0 if by_size else around, shift=0.0)]
    if integer and (AROUND, integer) in moved:
        cost = 0.0 if by_size else times.around_ms[integer]
        moving = moved[AROUND, integer]
        options[AROUND].append(Option(choice=integer, cost=cost, shift=moving))
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


def _trials_over(graphs: Graphs, clock: Clock) -> bool:
    """Whether the time for trials is over; what can be trained has its own.

    After the confirmation there is none: to train further would change what was confirmed.
    """
    if graphs.journal.found("confirmed"):
        return True
    trains = any(trial.point.fewer for trial in graphs.trials.values())
    return clock.over(TRIALS_SHARE if trains else 1.0, TRIAL)


def _check_base(base: Trial, keep: float | None) -> None:
    """Raises where the model as trained cannot be shown to keep what is to be kept."""
    if keep is None or base.quality.low >= keep:
        return
    quality = base.quality
    raise ContractError(
        f"--keep {keep:.4g}: the model as trained, in FP32, keeps between {quality.low:.2%} and "
        f"{quality.high:.2%} on the {quality.inputs} inputs of the search's half",
        hint=would_decide(quality, keep),
    )
