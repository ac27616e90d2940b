"""Confirms points: reads the other half of the data once, to decide which points pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np

from ....bench.metrics import Z, inputs_needed, wilson
from ....bench.runners.base import first_of
from ....bench.runners.pytorch import untouched
from ....common.console import Progress
from ....common.latency import Latency
from ....common.timing import Protocol
from ....errors import CheckError, FeedError
from ...service.findings import ServiceFindings
from ..budget import protocol_for
from ..graphs import Graphs, median_ratio
from ..prepare import SearchJob
from ..recipe import LayerRecipe
from ..shards import Batch
from ..space import Trial
from ..substitutes.substitutes import FOLDER
from .holdout import Holdout
from .quality import Quality

MAX_SERVED = 4
"""The number of points whose request rate is measured: the fastest that pass."""

MAX_CONFIRMED = 8
"""The largest number of points to confirm. Each of them keeps a graph open."""


class ContractError(CheckError):
    """No point meets the bounds, or the data cannot show that one does."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A point with the quality that it keeps on the confirming half.

    `promising` is whether the point is in the second of the two `ConfirmationOrders`.
    """

    trial: Trial
    quality: Quality
    promising: bool = False


@dataclass(frozen=True, slots=True)
class ConfirmationOrders:
    """The points to confirm, in two orders that depend on the search's half only.

    `conservative` starts with the model as trained, then goes from the safest point to the
    riskiest. `promising` starts with the point with the largest expected gain, then goes to faster
    points.
    """

    conservative: tuple[Trial, ...]
    promising: tuple[Trial, ...] = ()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All points, the model as trained first."""
        return self.conservative + self.promising


def worth_confirming(trials: Sequence[Trial]) -> list[Trial]:
    """Returns the points that no faster point dominates, fastest first.

    A faster point dominates if it is better in all three: the kept quality, the lower end of its
    interval, and how little the outputs moved. Ties are not dominated: if two points keep the same
    share of the quality on the search's half, the one that computes more is safer.
    """
    worth: list[Trial] = []
    best = [-math.inf] * 3
    for trial in sorted(trials, key=lambda trial: (trial.ms, -trial.quality.kept)):
        safety = (*_without_luck(trial.quality), -trial.quality.shift)
        if any(value >= faster for value, faster in zip(safety, best, strict=True)):
            worth.append(trial)
        best = [max(pair) for pair in zip(safety, best, strict=True)]
    return worth


def orders_of(
    front: Sequence[Trial],
    base: Trial,
    keep: float | None,
    limit: int = MAX_CONFIRMED,
    *,
    base_meets: bool = True,
) -> ConfirmationOrders:
    """Returns the points to confirm, which keep enough on the search's half.

    If the model as trained meets the bounds on time and size (`base_meets`), only faster points are
    worth confirming. The expected gain of a point is the logarithm of its speedup, multiplied by
    the probability that the confirming half confirms it. Some slower points, spread evenly over the
    logarithm of time, are the fallback if the most promising one fails.
    """
    others = [trial for trial in front if trial.point != base.point]
    if keep is None:
        best = sorted(others, key=lambda trial: -trial.quality.kept)[: limit - 1]
        return ConfirmationOrders(conservative=(base, *best))
    others = [trial for trial in others if trial.quality.kept >= keep]
    if base_meets:
        others = [trial for trial in others if trial.ms < base.ms]
    if not others:
        return ConfirmationOrders(conservative=(base,))
    slowest = max(other.ms for other in (base, *others))

    def promise(trial: Trial) -> float:
        return math.log(slowest / trial.ms) * _chance_of_confirming(trial.quality, keep)

    others.sort(key=promise, reverse=True)
    first = others[0]
    promising = [trial for trial in others if trial.ms <= first.ms][: max(1, (limit - 1) // 2)]
    slower = [trial for trial in others if trial.ms > first.ms]
    conservative = _evenly_spaced(slower, first.ms, slowest, limit - 1 - len(promising))
    conservative.sort(key=lambda trial: (-_chance_of_confirming(trial.quality, keep), -trial.ms))
    return ConfirmationOrders(
        conservative=(base, *conservative),
        promising=tuple(sorted(promising, key=lambda trial: -trial.ms)),
    )


def _evenly_spaced(trials: Sequence[Trial], fast: float, slow: float, count: int) -> list[Trial]:
    """Returns `count` points whose times are spread evenly over the logarithm between two times."""
    left = list(trials)
    spread = []
    for ms in np.geomspace(fast, slow, count + 2)[1:-1]:
        if left:
            nearest = min(left, key=lambda trial: abs(math.log(trial.ms / ms)))
            left.remove(nearest)
            spread.append(nearest)
    return spread


def _chance_of_confirming(quality: Quality, keep: float) -> float:
    """Returns the probability that the same number of other inputs would confirm `keep`."""
    kept, low = _without_luck(quality)
    return NormalDist().cdf(Z * (low - keep) / (math.sqrt(2) * max(1e-9, kept - low)))


def _without_luck(quality: Quality) -> tuple[float, float]:
    """Returns the kept share and its interval's lower end, both lowered if the share is above 1.

    If a point has a few more correct answers than the untouched model, that is luck: there were
    many candidates, and the substitutes were trained on these inputs.
    """
    luck = max(0.0, quality.kept - 1)
    return quality.kept - luck, quality.low - luck


def confirm(
    graphs: Graphs, orders: ConfirmationOrders, holdout: Holdout, progress: Progress
) -> list[Confirmed]:
    """Returns what each point keeps on the confirming half, which is read once for all of them."""
    base, metric = untouched(graphs.base.model), graphs.metric
    trials = orders.trials
    progress.step("confirming", total=holdout.confirming_count, unit="inputs")

    def batches() -> Iterator[Batch]:
        for x, labels in graphs.graph_batches(holdout.confirming()):
            yield Batch(inputs=x, labels=labels, outputs=base.infer(x), metric=metric)
            progress.advance(len(first_of(x)))

    points = [(trial.point, trial.lowerings) for trial in trials]
    with graphs.opened(points, spin_ms=0) as sessions:
        tallies = graphs.evaluate(batches())(sessions)
    if not tallies[0].inputs:
        raise FeedError("--data: one half has no inputs", hint="give a few hundred inputs")
    return [
        Confirmed(
            trial=trial, quality=metric.quality(tally), promising=index >= len(orders.conservative)
        )
        for index, (trial, tally) in enumerate(zip(trials, tallies, strict=True))
    ]


def passing(points: Sequence[Confirmed], keep: float | None) -> list[Confirmed]:
    """Returns the points that pass: in each sequence, those before the first failure.

    The lower end of a 95% interval is wrong in 2.5% of cases. In a sequence with a fixed order that
    ends at the first failure, the chance that any point passes wrongly is no larger; for two
    sequences, it is at most 5% (Bonferroni). This is fixed sequence testing with two starts, as in
    Angelopoulos et al., Learn then Test, 2021.
    """
    passed: list[Confirmed] = []
    for promising in (False, True):
        for point in points:
            if point.promising != promising:
                continue
            if keep is not None and point.quality.low < keep:
                break
            passed.append(point)
    return passed


def shortfall(point: Confirmed, keep: float) -> ContractError:
    """Returns the error of a point that is not confirmed, with the number of inputs needed."""
    quality = point.quality
    message = (
        f"--keep {keep:.4g} is not confirmed: {quality.kept:.2%} is kept on {quality.inputs} "
        f"held-out inputs (95% interval {quality.low:.2%} to {quality.high:.2%})"
    )
    return ContractError(message, hint=inputs_hint(quality, keep))


def inputs_hint(quality: Quality, keep: float) -> str:
    """Describes how many inputs would show that a share is kept."""
    if quality.kept <= keep:
        return f"more inputs would not help: lower --keep to {quality.low:.3g}"
    needed = inputs_needed(quality.inputs, quality.kept, quality.low, keep)
    return (
        f"about {2 * math.ceil(needed)} inputs in --data would suffice, half of them to confirm; "
        f"these inputs confirm --keep {quality.low:.3g}"
    )


def front_of(trials: Sequence[Trial]) -> list[Trial]:
    """Returns the points that no other beats in both time and kept quality, slowest first."""
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: (trial.ms, -trial.quality.kept)):
        if not front or trial.quality.kept > front[-1].quality.kept:
            front.append(trial)
    return front[::-1]


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search: every trial, the front, and the points that were timed for longer.

    `base` is the model as trained; `protocol` is how the `latencies` were measured.
    """

    trials: tuple[Trial, ...]
    front: tuple[Trial, ...]
    timed: tuple[Trial, ...]
    base: Trial
    graphs: Graphs
    latencies: dict[str, Latency]
    protocol: Protocol
    choices: dict[str, tuple[LayerRecipe, ...]]


def shortlist(
    job: SearchJob, graphs: Graphs, base: Trial, choices: dict[str, tuple[LayerRecipe, ...]]
) -> SearchResult:
    """Times the points to confirm for longer; returns the outcome of the search."""
    candidates = [*graphs.trials.values()]
    within = [trial for trial in candidates if job.within(trial)] or candidates
    orders = _orders(job, worth_confirming(within), base, timed=False)
    to_time = [base, *(graphs.with_best_lowerings(trial) for trial in orders.trials[1:])]
    careful = protocol_for(base.ms, careful=True)
    latencies = graphs.timed(to_time, careful)
    first = latencies[base.point.key]
    timed = {}
    for trial in to_time:
        key = trial.point.key
        timed[key] = replace(trial, ms=first.median * median_ratio(latencies[key], first))
    ratio = timed[base.point.key].ms / base.ms  # other times are relative to the base
    trials = [
        timed.get(trial.point.key, replace(trial, ms=ratio * trial.ms)) for trial in candidates
    ]
    within = [trial for trial in trials if job.within(trial)] or trials
    return SearchResult(
        trials=tuple(trials),
        front=tuple(front_of(within)),
        timed=tuple(timed.values()),
        base=timed[base.point.key],
        graphs=graphs,
        latencies=latencies,
        protocol=careful,
        choices=choices,
    )


@dataclass(frozen=True, slots=True)
class ContractResult:
    """All points that were tested, and those that meet the bounds, best first.

    With `--scenario`, `services` has the request rates of the fastest points.
    """

    confirmed: list[Confirmed]
    within_bounds: list[Confirmed]
    services: ServiceFindings | None = None


def confirm_front(job: SearchJob, result: SearchResult, progress: Progress) -> ContractResult:
    """Confirms the front on the other half; raises `ContractError` if no point meets the bounds."""
    keep = job.request.kept
    orders = _orders(job, result.timed, result.base, timed=True)
    pieces = job.journal.pieces("confirmed")
    if pieces:
        checked = [msgspec.convert(point, Confirmed) for point in pieces[-1]["points"]]
        for point in checked:
            check_substitutes(job, point.trial, result)
    else:
        checked = confirm(result.graphs, orders, job.holdout, progress)
        job.journal.add("confirmed", points=[msgspec.to_builtins(point) for point in checked])
    passed = passing(checked, keep)
    if keep is not None and not passed:
        raise shortfall(checked[0], keep)
    within = [point for point in passed if job.within(point.trial)]
    if not within:
        raise _bounds_error(job, passed)
    if keep is None:
        return ContractResult(checked, sorted(within, key=lambda point: -point.trial.quality.kept))
    within.sort(key=lambda point: (point.trial.ms, point.trial.bytes))
    if job.request.scenario is None:
        return ContractResult(checked, within)
    rates, services = result.graphs.serve(
        [point.trial for point in within[:MAX_SERVED]], job.folder, job.request
    )
    serving = [point for point in within if rates.get(point.trial.point.key)]
    if not serving:
        reasons = dict.fromkeys(row.reason for row in services.services if row.reason)
        raise ContractError(
            f"--scenario {job.request.scenario} --max-latency {job.request.latency_ms:g}ms: "
            f"{'; '.join(reasons)}",
            hint="raise --max-latency",
        )
    serving.sort(key=lambda point: -rates[point.trial.point.key])
    return ContractResult(checked, serving, services)


def _orders(
    job: SearchJob, trials: Sequence[Trial], base: Trial, *, timed: bool
) -> ConfirmationOrders:
    """Returns the points to confirm, as many as time allows.

    If they are not `timed`, time for their longer timings is reserved.
    """
    clock, limit = job.clock, MAX_CONFIRMED
    if math.isfinite(clock.left):
        fitting = job.finish_times(base).points_within(clock.left - clock.writing_s, timed=timed)
        limit = min(MAX_CONFIRMED, max(2, math.floor(fitting)))
    return orders_of(trials, base, job.request.kept, limit, base_meets=job.within(base))


def check_substitutes(job: SearchJob, trial: Trial, result: SearchResult) -> None:
    """Raises `ContractError` if the substitutes of a trial changed after its measurement."""
    if result.graphs.substitutes.digest(trial.point) != trial.substitutes:
        raise ContractError(
            f"{job.folder / FOLDER}: the substitutes for the removed experts were changed or "
            "deleted after they were measured",
            hint=f"remove {job.folder} and search again",
        )


def _bounds_error(job: SearchJob, passed: Sequence[Confirmed]) -> ContractError:
    """Returns the error if no point meets the bounds, with the nearest one."""
    request = job.request

    def excess(point: Confirmed) -> float:
        slow = point.trial.ms / (request.latency_ms or math.inf)
        return max(slow, point.trial.bytes / (request.most_bytes or math.inf))

    nearest = min(passed, key=excess).trial
    bounds = []
    if request.latency_ms is not None:
        bounds.append(f"--max-latency {request.latency_ms:g}ms")
    if request.most_bytes is not None:
        bounds.append(f"--max-bytes {request.most_bytes}")
    keep = "" if request.kept is None else f"--keep {request.kept:g} with "
    return ContractError(
        f"{keep}{' and '.join(bounds)}: no point meets these bounds; the nearest takes "
        f"{nearest.ms:.3g} ms and {nearest.bytes} bytes and keeps {nearest.quality.kept:.2%}",
        hint="relax the bounds, or allow more --time",
    )


def contract_record(job: SearchJob, chosen: Confirmed) -> dict[str, Any]:
    """Returns the bounds and the confirmed result, for the recipe and the manifest."""
    request, quality, accuracy = job.request, chosen.quality, dict[str, Any]()
    if job.metric.name == "accuracy" and not job.metric.each_output:
        interval = wilson(quality.score * quality.inputs, quality.inputs)
        accuracy = {
            "accuracy": quality.score,
            "accuracy_interval": [interval.low, interval.high],
            "untouched_accuracy": quality.untouched,
        }
    return {
        "metric": job.metric.title or job.metric.name,
        "asked": {
            "keep": request.kept,
            "latency_ms": request.latency_ms,
            "scenario": request.scenario,
            "bytes": request.most_bytes,
        },
        "kept": quality.kept,
        "interval": [quality.low, quality.high],
        "inputs": quality.inputs,
        **accuracy,
        "batch": request.batches.opt,
        "latency_ms": chosen.trial.ms,
        "bytes": chosen.trial.bytes,
    }
