"""A search from top to bottom: data, ranges, measured layers, graphs, the front, the contract."""

from __future__ import annotations

import hashlib
import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from ..bench.data import Labelled, LabelledData
from ..bench.journal import FILE, Journal
from ..bench.run import with_threads
from ..bench.runners.base import first_of
from ..bench.runners.pytorch import outputs_of, untouched
from ..calibration.feeds import Array
from ..calibration.table import CALIBRATION_FILE, CalibrationTable
from ..common.console import Progress, Silent
from ..common.environment import environment
from ..common.files import STEP_BYTES, sha256
from ..common.timing import LOOK_S, WAIT_S, Latency, Protocol
from ..common.writing import check_folder, make_folder, output_errors, remove_folder, scratch_folder
from ..errors import FeedError, MoexportError, ParityError, UsageError
from ..exporter.bundle.bundle import Bundle
from ..exporter.bundle.destination import check_destination
from ..exporter.bundle.recipe import RECIPE_FILE
from ..exporter.bundle.substitutes import SUBSTITUTES_FILE, substitutes_bytes
from ..exporter.bundle.weights import layer_bytes
from ..exporter.export import export
from ..exporter.job import ExportJob, calibration_job, export_job
from ..exporter.model import Model, check_one_input, fingerprint
from ..exporter.options import ExportOptions, recipe_options
from ..exporter.quantization.calibrate import calibrate
from ..exporter.quantization.precision import apply_precision
from ..exporter.requests import CalibrateRequest
from ..exporter.trace import trace
from ..graphs.layers.mumoe import MuMoESpec
from ..graphs.layers.soft_moe import SoftMoESpec
from ..graphs.precision.types import FP32
from ..graphs.targets import Precision
from . import layers
from .clock import TRAINING_S, Clock
from .confirm import (
    MOST,
    Confirmed,
    ContractError,
    Sequences,
    confirmed,
    holding,
    sequences_of,
    shortfall,
    worth_confirming,
)
from .graphs import (
    LOOK,
    OPEN,
    RUN,
    UNTOUCHED,
    WAYS,
    Graphs,
    Look,
    batch_size,
    protocol_for,
    spin_for,
    times_as_long,
)
from .halves import Halves, in_batches, rows_of
from .layers import Replay, in_turn
from .quality import Metric, Quality, Tally, metric_for
from .request import SearchOptions
from .routed import Traces, asked_for, routed_layers
from .search import AROUND, EACH_SIDE, LOOKS, Option, Search, front_of, with_ms
from .shards import Evaluate, evaluate_here
from .space import FEW, INTEGERS, RANGED, Choice, Point, ks_of, recipe_of, unlowered
from .substitutes.distill import STEP, STEPS
from .substitutes.substitutes import FOLDER, Substitutes
from .times import LayerTimes, served

CALIBRATED, CALIBRATED_FEW = 256, 32
"""Inputs of the search's half that INT8 takes its ranges from; the second where time is short."""

OBSERVED = 4.0
"""About how much longer an input takes while ranges are observed, beside the model itself."""

OUTPUT_BYTES = 1 << 30
"""What the untouched model's outputs may take: those of language models are large."""

LEAST = 512
"""Inputs that a search sees, whatever its time, if there are as many."""

MANY, MANY_S = 4096, 20.0
"""Inputs beyond which a search sees more only while the untouched model has taken so long."""

UNTOUCHED_SHARE, RANGES_SHARE, TIMES_SHARE, EFFECTS_SHARE, LOOKS_SHARE = 0.1, 0.3, 0.5, 0.6, 0.85
"""Of a search's time, when what comes before has ended: the untouched model's outputs, the ranges,
the times of single layers, what they do when they are changed, and whole graphs. The rest is for
the training of what promises most. What it takes to confirm the answer and to write it is not
among them."""

LAST_SHARE = 0.5
"""What a last training takes of the time that is left."""

FEWEST, END_SHARE = 4, 0.35
"""Points for whose confirmation time is kept, the model as trained among them, and the share of a
search's time that it may take; two points have theirs in any case."""

UNIFORM = (1, 2, 4, 8, 16)
"""The shares of its experts that every layer computes in the models that are looked at first."""

FINEST = 8
"""Sizes of a layer are told apart by so many parts of it, at the most."""

FINISH_S, REPORT_S = 1.5, 3.0
"""About what a bundle takes beside its graph and its check, and what a report takes."""

TRACE, EFFECT = "trace", "effect"
"""Steps: tracing a model, and one choice of one layer."""

VERIFIED = 64
"""Inputs of the search's half that the bundle is compared with PyTorch on, layer by layer."""


@dataclass(frozen=True)
class Tuned:
    """What came of a search: the bundle, the point it is, and everything that was looked at."""

    bundle: Bundle
    chosen: Confirmed
    front: tuple[Look, ...]
    sequence: tuple[Confirmed, ...]
    base: Look
    metric: Metric
    model: Model
    request: SearchOptions
    latencies: dict[str, Latency]
    protocol: Protocol
    all_looks: tuple[Look, ...]
    seen: int
    seconds: float

    @property
    def looks(self) -> int:
        """How many whole graphs were made."""
        return len(self.all_looks)

    @property
    def untouched(self) -> Latency | None:
        """The latency of the untouched PyTorch model."""
        return self.latencies.get(UNTOUCHED)

    @property
    def experts(self) -> dict[str, int]:
        """The number of experts of each layer of the model as trained."""
        return {name: layer.spec.experts for name, layer in self.model.layers.items()}


@dataclass(frozen=True)
class Space:
    """What a model's layers may become: the choices of each, in FP32, and the integers that serve.

    `integers` names the layers that compute in a precision, and the network around them where it
    has layers that can. `floats` are those in which all of a model may compute.
    """

    choices: dict[str, tuple[Choice, ...]]
    integers: dict[Precision, tuple[str, ...]]
    floats: tuple[Precision, ...] = ("fp32",)

    @property
    def size(self) -> int:
        """How many different models there are."""
        total = 0
        for parts in ((), *self.integers.values()):
            layers = math.prod(
                len(listed) * (2 if name in parts else 1) for name, listed in self.choices.items()
            )
            total += layers * (2 if AROUND in parts else 1)
        return total + (len(self.floats) - 1) * math.prod(map(len, self.choices.values()))

    @property
    def forms(self) -> int:
        """How many forms of layers are to be measured."""
        return sum(
            len(_timed(listed))
            * (len(self.floats) + sum(name in p for p in self.integers.values()))
            for name, listed in self.choices.items()
        )


def check_tunable(model: Model) -> None:
    """Raises `UsageError` for a model of several inputs that cannot be left out."""
    if any(spec.default is None for spec in model.inputs[1:]):
        check_one_input(model, "tune")


def tune(
    model: Model,
    data: Labelled,
    destination: Path,
    request: SearchOptions,
    *,
    work: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    clock: Clock | None = None,
    evaluate: Evaluate = evaluate_here,
) -> Tuned:
    """Returns the best bundle that meets a request, written to `destination`.

    `work` is a folder in which a search that is ended goes on; `clock` began with the call, and
    with the loading of the model. `evaluate` runs graphs over the data. Raises
    `UsageError` and `FeedError` for what cannot be meant, before the search; `ContractError` where
    nothing meets the bounds, or where they are not confirmed.
    """
    progress, started = progress or Silent(), time.monotonic()
    clock = clock or Clock(request.seconds)
    check_tunable(model)
    check_destination(destination, force=force)
    check_folder(destination.absolute().parent)
    with with_threads(request.threads), _kept_in(work) as folder:
        clock.reserve = clock.writing_s = FINISH_S + (0.0 if work is None else REPORT_S)
        job = Job.begin(model, data, request, folder, progress, clock)
        found = job.search(progress, evaluate)
        place = recipe_folder(destination, work)
        sequence, chosen, bundle = job.answered(found, destination, place, progress, force=force)
    return Tuned(
        bundle,
        chosen,
        tuple(found.front),
        tuple(sequence),
        found.base,
        job.metric,
        model,
        request,
        found.latencies,
        found.protocol,
        found.looks,
        len(job.halves.search),
        time.monotonic() - started,
    )


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """How large a search is: the models that there are, and what will be looked at of them.

    `choices` are those of single layers, `forms` those that are timed alone and `graphs` the whole
    graphs, at the most; `seconds` is about how long all of it takes then.
    """

    models: int
    choices: int
    forms: int
    graphs: int
    searching: int
    confirming: int | None
    seconds: float


def plan_search(
    model: Model, data: Labelled, request: SearchOptions, progress: Progress | None = None
) -> SearchPlan:
    """Returns how large a search is; runs the untouched model on one half, and searches nothing."""
    progress = progress or Silent()
    check_tunable(model)
    with with_threads(request.threads), _kept_in(None) as folder:
        started = time.monotonic()
        job = Job.begin(model, data, request, folder, progress, Clock(None))
        began, count, one = time.monotonic() - started, len(job.halves.search), job.one_s
    listed = {
        name: (*known, *job.fewer(name, lambda size: tuple(range(size))))
        for name, known in job.space.choices.items()
    }
    space = replace(job.space, choices=listed)
    choices = sum(map(len, listed.values()))
    parts = sum(map(len, job.space.integers.values()))
    paths = len(job.space.floats) + len(job.space.integers)
    graphs = 1 + parts + paths * (LOOKS // 2 + EACH_SIDE)
    fewer = any(choice.fewer for known in listed.values() for choice in known)
    trained_s = min(TRAINING_S, STEPS * STEP * layers.BATCH * one)
    seconds = (
        began
        + space.forms * FORM_S
        + choices * one * min(count, layers.MOST)
        + graphs * (GRAPH_S + one * count + (trained_s if fewer else 0.0))
    )
    return SearchPlan(
        *(space.size, choices, space.forms, graphs),
        *(count, job.halves.confirming_count, seconds),
    )


FORM_S, GRAPH_S = 0.6, 0.5
"""About what a form of a layer takes, and a whole graph beside running the model itself."""


@contextmanager
def _kept_in(work: Path | None) -> Iterator[Path]:
    if work is not None:
        yield work
        return
    with scratch_folder("tune") as folder:
        yield folder


@dataclass(frozen=True)
class Found:
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


@dataclass(frozen=True, slots=True)
class End:
    """About how long the end of a search takes, in seconds: for each point, and once.

    Each is written, opened and timed, then opened again to run over the confirming half.
    """

    timing_s: float
    confirming_s: float
    once_s: float

    def reserve_s(self, left_s: float) -> float:
        """What to keep of the time that is left: for the `FEWEST` points, or for fewer."""
        points = (END_SHARE * left_s - self.once_s) / (self.timing_s + self.confirming_s)
        count = min(FEWEST, max(2, math.floor(min(FEWEST, points))))
        return count * (self.timing_s + self.confirming_s) + self.once_s


@dataclass(frozen=True)
class Job:
    """A search that can begin: the halves, the untouched model's outputs, ranges and the space.

    `one_s` is what the untouched model takes for an input.
    """

    model: Model
    request: SearchOptions
    halves: Halves
    outputs: Array
    metric: Metric
    base: ExportJob
    traced: ir.Model
    space: Space
    journal: Journal
    folder: Path
    clock: Clock
    one_s: float

    @staticmethod
    def begin(
        model: Model,
        data: Labelled,
        request: SearchOptions,
        folder: Path,
        progress: Progress,
        clock: Clock,
    ) -> Job:
        """Prepares a search; refuses what can be refused without it."""
        if sum(tensor.nbytes for tensor in model.module.state_dict().values()) < STEP_BYTES:
            # To give the pages of mapped weights back takes longer than all else of a small graph.
            model = replace(model, source=replace(model.source, mapped=()))
        options = ExportOptions(
            target=request.target, batch=request.batch, tokens=request.tokens, verify=False
        )
        base = export_job(model, options)
        progress.step("reading the search's half of the data")
        halves = Halves.of(data)
        began = time.monotonic()
        outputs = _outputs(model, halves.search, progress, clock)
        halves = halves.fewer(len(outputs))
        one_s = (time.monotonic() - began) / len(outputs)
        metric = metric_for(request.metric, outputs, halves.search.inputs, halves.search.labels)
        _check_enough(metric, request, halves, outputs)
        what = {
            "environment": environment(),
            "model": fingerprint(model),
            "data": data.fingerprint,
            "request": asdict(replace(request, seconds=None)),
        }
        make_folder(folder)
        journal = Journal(folder / FILE, what)
        if journal.told:
            progress.step(journal.told)
        if not journal.resumed:
            remove_folder(folder / FOLDER)
        progress.step("tracing")
        with clock.step(TRACE):
            traced = trace(base.model, opset=options.opset, fixed=base.fixed)
        wanted = request.tried
        if {*wanted} & {*RANGED} and len(model.inputs) == 1:
            own = None if base.fixed else traced
            samples = _samples(clock, one_s, tracing=own is None)
            if samples or (folder / CALIBRATION_FILE).is_file():
                ranges = _ranges(model, halves.search, folder, journal, samples, own, progress)
                base = replace(base, table=ranges)
            else:
                wanted = tuple(name for name in wanted if name not in RANGED)
        space = _space(base, traced, wanted)
        return Job(
            *(model, request, halves, outputs, metric, base, traced, space, journal, folder, clock),
            one_s,
        )

    def search(self, progress: Progress, evaluate: Evaluate = evaluate_here) -> Found:
        """Measures layers, looks along the paths, and measures the front."""
        clock = self.clock
        over = partial(clock.over, RANGES_SHARE)
        replay = Replay(self.model, self.halves.search, self.outputs, self.metric, over)
        training_s = partial(clock.training_s, RUN)
        substitutes = Substitutes(self.model, replay.seen, self.folder, training_s)
        times, start = LayerTimes(substitutes), self.start
        as_trained = {name: (choice,) for name, choice in start.layers}
        self._measure(times, as_trained, replay.tokens(), progress)
        graphs = Graphs(
            *(self.base, Traces(self.base, self.traced), times, self.halves.search, self.outputs),
            *(self.metric, self.journal, progress, self.request.threads or _threads(), clock),
            *(substitutes, evaluate),
        )
        base = graphs.lowered(graphs.look(start))
        times.corrected(start, base.ms)
        self._check_base(base)
        clock.reserve += self._end(base).reserve_s(clock.left - clock.reserve)
        late = clock.over(TIMES_SHARE)
        choices: dict[str, tuple[Choice, ...]] = {
            name: (
                *listed,
                *(() if late else self.fewer(name, partial(substitutes.kept, name))),
            )
            for name, listed in self.space.choices.items()
        }
        self._times(times, choices, replay.tokens(), progress)
        shifts = self._shifts(replay, substitutes, choices, progress)
        search = Search(graphs, self.request, partial(_looks_over, graphs, clock), progress)
        with graphs.beside(base):
            self._seed(search, times)
            moved: dict[tuple[str, Precision], float] = {}
            # Without integers first: what computes fewer experts gains most where time is short.
            for floats, integer in (*((f, None) for f in self.space.floats), *self._widths()):
                if integer is not None:
                    moved |= self._moved_by(integer, search, times, base)
                for by_size in self._costs():
                    found = self._options(
                        *(floats, integer, choices, times, shifts, moved), by_size=by_size
                    )
                    search.along(start.in_floats(floats), found)
            self._refine(search, substitutes, choices, times)
            if not self.journal.found("confirmed"):
                search.train_further(
                    partial(clock.over, step=LOOK), partial(clock.training_s, RUN, LAST_SHARE)
                )
            return self._front(search, graphs, base, choices)

    def _seed(self, search: Search, times: LayerTimes) -> None:
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
        for floats in self.space.floats:
            looks = seeds(each.in_floats(floats) for each in self._uniform("fp32"))
            first = looks[0] if looks else first
            pays |= {tuple(each.point.k.items()) for each in looks if each.ms < looks[0].ms}
        for integer, parts in self.space.integers.items():
            for around in (False, True)[: 1 + (AROUND in parts)]:
                ladder = [
                    each.with_around(integer) if around else each for each in self._uniform(integer)
                ]
                looks = seeds(ladder[:1])
                if first is None or (looks and looks[0].ms < first.ms):
                    seeds(each for each in ladder[1:] if tuple(each.k.items()) in pays)

    def _refine(
        self,
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

    def fewer(self, name: str, kept: Callable[[int], tuple[int, ...]]) -> list[Choice]:
        """Fixed subsets of a Soft MoE layer's experts: halves, quarters; all computed, or half.

        Of a muMoE layer one in place of all. `kept` returns the experts of a subset of some size.
        """
        spec = self.model.layers[name].spec
        # Beside layers that a router chooses for, the inputs of single ones are not recorded.
        if not self.request.subsets or routed_layers(self.model):
            return []
        if isinstance(spec, MuMoESpec):
            return [Choice(1, merged=True)]
        if not isinstance(spec, SoftMoESpec):
            return []
        found = []
        for size in ks_of(spec.experts)[1:]:
            experts = kept(size)
            found += [Choice(k, experts) for k in dict.fromkeys((size, size // 2)) if k]
        return found

    def _uniform(self, precision: Precision) -> list[Point]:
        """The model as trained with every layer that serves it in a precision, then smaller k."""
        within = self.space.integers.get(precision, (*self.space.choices,))
        found = []
        for share in UNIFORM:
            layers = []
            for name, listed in self.space.choices.items():
                k = max(1, listed[0].k // share)
                choice = next((each for each in listed if each.k <= k), listed[-1])
                layers.append(
                    (name, replace(choice, precision=precision) if name in within else choice)
                )
            found.append(Point(tuple(layers)))
        return [*dict.fromkeys(found)]

    def _widths(self) -> list[tuple[Precision, Precision]]:
        """Each width of integers, with the floats around it."""
        return [("fp32", integer) for integer in self.space.integers]

    def _end(self, base: Look) -> End:
        """About how long the end takes."""
        longest, one = self.clock.longest, base.ms / 1e3
        searching = len(self.halves.search)
        count = self.halves.confirming_count or searching
        # A resumed search did not run it again: the untouched model is hardly faster.
        run_s = longest.get(RUN, self.one_s * searching) / searching
        open_s = longest.get(OPEN, 0.0)
        careful = protocol_for(base.ms, careful=True)
        calls = careful.warmup + careful.rounds * (1 + careful.inputs)
        timed_s = max(careful.rounds * (careful.round_s + one), calls * one)
        untouched_s = timed_s + careful.rounds * WAIT_S
        timed_s += careful.rounds * (WAIT_S if spin_for(base.ms) is None else LOOK_S)
        once_s = untouched_s + count * self.one_s + open_s + VERIFIED * (2 * self.one_s + run_s)
        if routed_layers(self.model):
            once_s += 2 * longest[TRACE]  # to find where k is, and of the k that was found
        ways_s = longest.get(WAYS, 0.0)
        timed_s += ways_s
        once_s -= ways_s  # those of the model as trained are known
        return End(open_s + timed_s, open_s + count * run_s, once_s)

    def _room(self, base: Look, *, timed: bool = False) -> int:
        """How many points there is time to confirm, the model as trained among them.

        They are timed before, unless they were `timed`.
        """
        if not math.isfinite(self.clock.left):
            return MOST
        end = self._end(base)
        left = self.clock.left - self.clock.writing_s - end.once_s
        each_s = end.confirming_s + (0.0 if timed else end.timing_s)
        return min(MOST, max(2, math.floor(left / each_s)))

    @property
    def start(self) -> Point:
        """The model as it was trained."""
        return Point(tuple((name, listed[0]) for name, listed in self.space.choices.items()))

    def _times(
        self,
        times: LayerTimes,
        choices: Mapping[str, Sequence[Choice]],
        tokens: Mapping[str, Array],
        progress: Progress,
    ) -> None:
        """Times the layers in every precision, as far as the time goes."""
        precisions = (*self.space.floats, *self.space.integers)
        # The largest and the smallest in every precision come first.
        for ends, precision in itertools.product((True, False), precisions):
            within = self.space.integers.get(precision, (*choices,))
            asked: dict[str, list[Choice]] = {}
            for name, listed in choices.items():
                own = precision if name in within else "fp32"
                timed = [replace(each, precision=own) for each in _timed(listed)]
                asked[name] = [timed[0], timed[-1]] if ends else timed
            self._measure(times, asked, tokens, progress)

    def _measure(
        self,
        times: LayerTimes,
        asked: Mapping[str, Sequence[Choice]],
        tokens: Mapping[str, Array],
        progress: Progress,
    ) -> None:
        times.measure(
            *(self.base, self.traced, asked, tokens, self.journal, progress),
            *(self.clock, TIMES_SHARE),
        )

    def _shifts(
        self,
        replay: Replay,
        substitutes: Substitutes,
        choices: Mapping[str, Sequence[Choice]],
        progress: Progress,
    ) -> dict[tuple[str, Choice], float]:
        """How far each choice of each layer alone moves the outputs."""
        # As it was trained, a layer moves nothing.
        found = dict.fromkeys(self.start.layers, 0.0)
        for each in self.journal.found("effect"):
            choice = msgspec.convert(each["choice"], Choice)
            found[each["layer"], choice] = each["shift"]
        missing = {
            name: [each for each in listed if (name, each) not in found]
            for name, listed in choices.items()
        }
        total = sum(map(len, missing.values()))
        progress.step("trying each layer alone", total=total, unit="choices")
        for name, choice in in_turn(missing):
            if self.clock.over(EFFECTS_SHARE, EFFECT):
                break
            with self.clock.step(EFFECT):
                others = substitutes.fitted(name, choice)
                found[name, choice] = shift = replay.quality(name, choice, others).shift
            told = msgspec.to_builtins(choice)
            self.journal.add("effect", layer=name, choice=told, shift=shift)
            progress.advance(1)
        return found

    def _moved_by(
        self,
        precision: Precision,
        search: Search,
        times: LayerTimes,
        base: Look,
    ) -> dict[tuple[str, Precision], float]:
        """How far each part alone moves the outputs when it computes in some integers."""
        found: dict[tuple[str, Precision], float] = {}
        parts = self.space.integers[precision]
        progress = search.progress
        progress.step(f"trying each part in {precision}", total=len(parts), unit="parts")
        for part in parts:
            if search.over():
                break
            point = _in_precision(self.start, part, precision)
            if not times.knows(point):
                continue  # there was no time to look at it
            look = search.graphs.look(point)
            found[part, precision] = max(0.0, look.quality.shift - base.quality.shift)
            if part == AROUND:
                times.around_ms[precision] = look.ms - times.layers_ms(self.start)
            progress.advance(1)
        return found

    def _options(
        self,
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
        parts = () if integer is None else self.space.integers[integer]
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
                    cost = self._bytes(name, own) if by_size else time.ms
                    shift += alone
                    options[name].append(Option(own, cost, shift))
        around = times.around_ms["fp32"]
        options[AROUND] = [Option(floats, 1.0 if by_size else around, 0.0)]
        if integer and (AROUND, integer) in moved:
            cost = 0.0 if by_size else times.around_ms[integer]
            options[AROUND].append(Option(integer, cost, moved[AROUND, integer]))
        return options

    def _costs(self) -> tuple[bool, ...]:
        """What paths there are: by time, by size (True), or both where both count."""
        if self.request.bytes is None:
            return (False,)
        alone = self.request.keep is None and self.request.latency_ms is None
        return (True,) if alone else (False, True)

    def _bytes(self, name: str, choice: Choice) -> float:
        """About what a layer's weights take."""
        layer = self.model.layers[name]
        share = len(choice.experts) / layer.spec.experts if choice.experts else 1.0
        if choice.merged and isinstance(layer.spec, MuMoESpec):
            matrices = sum((each.dim + 1) * each.out for each in layer.spec.tensors)
            share = matrices / layer.spec.parameters
        width = {"fp16": 1 / 2, "int8": 1 / 4, "int4": 4.5 / 32}.get(choice.precision, 1.0)
        return layer_bytes(layer, FP32) * share * width

    def _check_base(self, base: Look) -> None:
        """Raises where the model as trained already misses what is to be kept."""
        keep = self.request.keep
        if keep is not None and base.quality.low < keep:
            raise shortfall_of_base(base.quality, keep)

    def _front(
        self,
        search: Search,
        graphs: Graphs,
        base: Look,
        choices: dict[str, tuple[Choice, ...]],
    ) -> Found:
        room = self._room(base)
        within = [look for look in search.looks if self._within(look)] or search.looks
        sequences = self._sequences(worth_confirming(within), base, room)
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
        looks = [
            timed.get(look.point.key, with_ms(look, faster * look.ms)) for look in search.looks
        ]
        within = [look for look in looks if self._within(look)] or looks
        front = front_of(within)
        return Found(
            *(tuple(looks), tuple(front), tuple(timed.values()), timed[base.point.key]),
            graphs,
            latencies,
            careful,
            choices,
        )

    def answered(
        self,
        found: Found,
        destination: Path,
        recipe_folder: Path,
        progress: Progress,
        *,
        force: bool,
    ) -> tuple[list[Confirmed], Confirmed, Bundle]:
        """Confirms the front on the other half and writes the best of what holds.

        A point that an export refuses, because its graph is too far from PyTorch, gives way to the
        next: ranges are those of the untouched model, and its outputs may be right all the same.
        """
        checked, ranked = self.contract(found, progress)
        for chosen in ranked:
            try:
                bundle = self.written(
                    chosen, found, destination, recipe_folder, progress, force=force
                )
            except ParityError as error:
                if chosen is ranked[-1]:
                    raise
                progress.step(f"left out: {error.message}")
            else:
                return checked, chosen, bundle
        raise AssertionError("a contract holds for something, or is refused")

    def contract(self, found: Found, progress: Progress) -> tuple[list[Confirmed], list[Confirmed]]:
        """Confirms the front on the other half; returns all that was, and what holds.

        What holds is in the order in which it answers the request.
        """
        keep = self.request.keep
        most = self._room(found.base, timed=True)
        sequences = self._sequences(found.timed, found.base, most)
        done = self.journal.found("confirmed")
        if done:
            checked = [msgspec.convert(each, Confirmed) for each in done[-1]["points"]]
            for each in checked:
                self._check_same(each.look, found)
        else:
            checked = confirmed(found.graphs, sequences, self.halves, progress)
            self.journal.add("confirmed", points=[msgspec.to_builtins(each) for each in checked])
        held = holding(checked, keep)
        if keep is not None and not held:
            raise shortfall(checked[0], keep)
        within = [each for each in held if self._within(each.look)]
        if not within:
            raise self._nearest(held)
        if keep is None:
            return checked, sorted(within, key=lambda each: -each.look.quality.kept)
        return checked, sorted(within, key=lambda each: (each.look.ms, each.look.bytes))

    def _sequences(self, looks: Sequence[Look], base: Look, most: int) -> Sequences:
        """The points to confirm, in order, of which the model as trained may meet the bounds."""
        keep, meets = self.request.keep, self._within(base)
        return sequences_of(looks, base, keep, most, base_meets=meets)

    def _check_same(self, look: Look, found: Found) -> None:
        """Raises where the substitutes of a point that was looked at are not what they were."""
        if found.graphs.substitutes.digest(look.point) != look.substitutes:
            raise ContractError(
                f"{self.folder / FOLDER}: what takes the places of experts is gone or changed "
                "since it was confirmed",
                hint=f"remove {self.folder} and search again",
            )

    def _within(self, look: Look) -> bool:
        request = self.request
        slow = request.latency_ms is not None and look.ms > request.latency_ms
        return not slow and not (request.bytes is not None and look.bytes > request.bytes)

    def _nearest(self, held: Sequence[Confirmed]) -> MoexportError:
        """The error that says what comes nearest to bounds that nothing meets."""
        request = self.request

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

    def written(
        self,
        chosen: Confirmed,
        found: Found,
        destination: Path,
        recipe_folder: Path,
        progress: Progress,
        *,
        force: bool,
    ) -> Bundle:
        """Exports the chosen point of a search as its recipe says; returns the bundle."""
        look = chosen.look
        self._check_same(look, found)
        recipe = recipe_of(
            self.base.options,
            look.point,
            look.lowerings,
            self._why(look),
            model=fingerprint(self.model),
            data=self.halves.data.fingerprint,
            contract=self._contract(chosen),
            moexport=metadata.version("moexport"),
        )
        options = replace(
            self.base.options,
            verify=True,
            verify_samples=VERIFIED,
            destination=destination,
            force=force,
        )
        if look.point.precision in RANGED and self.base.table is not None:
            path = self.folder / CALIBRATION_FILE
            recipe = replace(recipe, calibration=sha256(path))
            options = replace(options, calibration=path)
        trained = found.graphs.substitutes.trained_for(look.point)
        asked = recipe_options(recipe, options, trained)
        substitutes = substitutes_bytes(asked.edits)
        if substitutes:
            digest = hashlib.sha256(substitutes).hexdigest()
            layers = {n: replace(r, constant=bool(r.experts)) for n, r in recipe.layers.items()}
            recipe = replace(recipe, substitutes=digest, layers=layers)
            asked = replace(asked, recipe=recipe)
        inputs = self.halves.search.inputs[:CALIBRATED]
        # Where k is part of the graph, its trace is that of the k which was found.
        traced = None if routed_layers(self.model) else self.traced
        with _recipe_kept(asked, recipe_folder):
            return export(export_job(self.model, asked, data=inputs), progress, traced)

    def _contract(self, chosen: Confirmed) -> dict[str, Any]:
        """What was asked and what was confirmed, for recipe and manifest."""
        request, quality = self.request, chosen.quality
        return {
            "metric": self.metric.title or self.metric.name,
            "asked": {
                "keep": request.keep,
                "latency_ms": request.latency_ms,
                "bytes": request.bytes,
            },
            "kept": quality.kept,
            "interval": [quality.low, quality.high],
            "inputs": quality.inputs,
            "batch": request.batch.opt,
            "latency_ms": chosen.look.ms,
            "bytes": chosen.look.bytes,
        }

    def _why(self, look: Look) -> dict[str, str]:
        """What each layer got, in words."""
        specs = {name: layer.spec for name, layer in self.model.layers.items()}
        return {
            name: f"tuned: {choice.text(specs[name].experts)}, {look.lowerings[name]}"
            for name, choice in look.point.layers
        }


def recipe_folder(destination: Path, work: Path | None) -> Path:
    """Returns the folder that holds a bundle's recipe until the bundle itself is whole.

    It is in the folder of the search, if that stays, else a new one beside the bundle.
    """
    if work is not None:
        return work / "recipe"
    place = destination.absolute()
    names = (f"{place.name}-recipe{ending}" for ending in ("", *map("-{}".format, range(2, 1000))))
    return next(folder for name in names if not (folder := place.with_name(name)).exists())


@contextmanager
def _recipe_kept(options: ExportOptions, folder: Path) -> Iterator[None]:
    """Writes the recipe of an export to a folder, which is removed when the bundle is whole.

    A search takes minutes to hours: whatever an export fails of, what was confirmed is not lost.
    """
    recipe, constants = options.recipe, substitutes_bytes(options.edits)
    assert recipe is not None, "a search exports recipes"
    remove_folder(folder)
    make_folder(folder)
    with output_errors(folder):
        if constants:
            (folder / SUBSTITUTES_FILE).write_bytes(constants)
        if isinstance(options.calibration, Path):
            shutil.copyfile(options.calibration, folder / CALIBRATION_FILE)
        recipe.write(folder / RECIPE_FILE)
    again = (
        f"the result of the search is confirmed, and `moexport export MODEL --recipe "
        f"{folder / RECIPE_FILE} -o BUNDLE` exports it"
    )
    try:
        yield
    except MoexportError as error:
        error.hint = f"{error.hint}; {again}" if error.hint else again
        raise
    except Exception as error:
        error.add_note(again)
        raise
    remove_folder(folder)


def _looks_over(graphs: Graphs, clock: Clock) -> bool:
    """Whether the time for looks is over; what can be trained has its own.

    After the confirmation there is none: to train further would change what was confirmed.
    """
    if graphs.journal.found("confirmed"):
        return True
    trains = any(look.point.fewer for look in graphs.looks.values())
    return clock.over(LOOKS_SHARE if trains else 1.0, LOOK)


def shortfall_of_base(quality: Quality, keep: float) -> MoexportError:
    """Returns the error for data on which even the model as trained cannot be shown to keep it."""
    from .confirm import would_decide

    return ContractError(
        f"--keep {keep:.4g}: the model as trained, in FP32, keeps between {quality.low:.2%} and "
        f"{quality.high:.2%} on the {quality.inputs} inputs of the search's half",
        hint=would_decide(quality, keep),
    )


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _outputs(model: Model, data: LabelledData, progress: Progress, clock: Clock) -> Array:
    """What the untouched model gives for the search's half, or as much of it as there is time for.

    Of outputs that are large the first alone are taken, too.
    """
    base, parts = untouched(model), []
    progress.step("running the untouched model", total=len(data), unit="inputs")
    parts.append(outputs_of(base, rows_of(data.batch(0, 1), slice(0, 1)), model.source.path))
    size, began = batch_size(parts[0]), time.monotonic()
    held = 0
    for rows, x, _ in in_batches(data, size):
        if rows.start:
            short = clock.over(UNTOUCHED_SHARE) and rows.start >= LEAST
            slow = rows.start >= MANY and time.monotonic() - began > MANY_S
            if short or slow or held > OUTPUT_BYTES:
                break
        parts.append(outputs_of(base, x, model.source.path))
        held += parts[-1].nbytes
        progress.advance(len(first_of(x)))
    found: Array = np.concatenate(parts[1:])
    return found


def _samples(clock: Clock, one_s: float, *, tracing: bool) -> int:
    """How many inputs there is time to take ranges from; 0 where there is none, or hardly any.

    `tracing`: the model is traced for it, too.
    """
    if not math.isfinite(clock.left):
        return CALIBRATED
    until = RANGES_SHARE * (clock.seconds - clock.reserve) - (clock.seconds - clock.left)
    until -= clock.longest[TRACE] if tracing else 0.0
    fitting = until / (OBSERVED * one_s)
    return 0 if fitting < CALIBRATED_FEW else min(CALIBRATED, math.floor(fitting))


def _check_enough(metric: Metric, request: SearchOptions, halves: Halves, outputs: Array) -> None:
    """Raises `FeedError` where no outcome could show what is to be kept."""
    if request.keep is None:
        return
    search = halves.search
    scores = sum(
        (
            metric.tally(outputs[rows], outputs[rows], x, labels)
            for rows, x, labels in in_batches(search, batch_size(outputs))
        ),
        start=Tally(),
    )
    metric.quality(scores)
    needed = metric.needed(request.keep, scores.base / scores.inputs)
    count = halves.confirming_count
    if needed is not None and count is not None and count < needed:
        raise FeedError(
            f"--data: {count} of its inputs confirm, and to show that {request.keep:.4g} is kept "
            f"takes at least {needed}, if all agree",
            hint=f"give at least {2 * needed} inputs, half of them to confirm, or ask for less",
        )


def _ranges(
    model: Model,
    data: LabelledData,
    folder: Path,
    journal: Journal,
    samples: int,
    traced: ir.Model | None,
    progress: Progress,
) -> CalibrationTable:
    """The ranges of a model's tensors over the search's half; kept in the folder."""
    path = folder / CALIBRATION_FILE
    if not (journal.resumed and path.is_file()):
        job = calibration_job(model, data.inputs, CalibrateRequest(samples=samples))
        calibrate(job, traced=traced, progress=progress).write(path)
    return CalibrationTable.read(path)


def _space(base: ExportJob, traced: ir.Model, wanted: Sequence[Precision]) -> Space:
    """What the model's layers may become on its target."""
    routed = routed_layers(base.model)
    choices = {
        name: tuple(
            Choice(k)
            for k in ks_of(layer.spec.trained_k)
            if not routed or (name in routed and _may_choose(base.model, name, k))
        )
        for name, layer in base.model.layers.items()
    }
    choices = {
        name: listed or (Choice(base.model.layers[name].spec.trained_k),)
        for name, listed in choices.items()
    }
    first = {name: listed[0].k for name, listed in choices.items()}
    integers: dict[Precision, tuple[str, ...]] = {}
    for precision in wanted:
        if precision not in INTEGERS:
            continue
        try:
            layers = served(base, traced, choices, precision, first)
        except MoexportError:  # this model's layers do not take it
            continue
        around = [AROUND] if layers and _has_integers_around(base, traced, precision) else []
        if layers:
            integers[precision] = (*layers, *around)
    floats: tuple[Precision, ...] = tuple(name for name in wanted if name not in INTEGERS)
    return Space(choices, integers, floats)


def _may_choose(model: Model, layer: str, k: int) -> bool:
    """Whether the routers of a model can choose k experts in one layer."""
    trained = {name: each.spec.trained_k for name, each in model.layers.items()}
    try:
        asked_for(model, {**trained, layer: k})
    except UsageError:
        return False
    return True


def _has_integers_around(base: ExportJob, traced: ir.Model, precision: Precision) -> bool:
    layers = tuple((name, Choice(k or 1)) for name, k in base.k.items())
    point = Point(layers).with_around(precision)
    try:
        plan = apply_precision(unlowered(base, point), traced.clone(), base.table)
    except MoexportError:
        return False
    return any(linear.reason is None for linear in plan.linears)


def _in_precision(point: Point, part: str, precision: Precision) -> Point:
    """A point with one part in integers."""
    if part == AROUND:
        return point.with_around(precision)
    return point.with_layer(part, replace(point.choices[part], precision=precision))


def _timed(listed: Sequence[Choice]) -> list[Choice]:
    """The choices whose time is measured: between two sizes it is taken from those around."""
    n = listed[0].k
    if n <= FEW:
        return [*listed]
    sizes = [*ks_of(n)]
    # Not beyond the largest subset either: it would seem as fast as the next one that was measured.
    measured = {*sizes[::2], sizes[1], sizes[-1]}
    return [each for each in listed if (each.n or each.k) in measured]
