"""Prepares a search: splits the data, finds the ranges, and sets up the search space.

Refuses what can be refused without a search.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from ...bench.data import Labelled
from ...bench.journal import FILE, Journal
from ...bench.prepare import threads_for
from ...calibration.table import CALIBRATION_FILE, CalibrationTable
from ...common.console import Progress
from ...common.environment import environment
from ...common.files import STEP_BYTES
from ...common.threads import Threads, with_threads
from ...common.timing import SAMPLE_S, WAIT_S
from ...common.writing import exclusive_folder, make_folder, scratch_folder
from ...data.batches import Array
from ...errors import UsageError
from ...exporter.job import ExportJob, calibration_job, export_job
from ...exporter.model import Model, fingerprint
from ...exporter.options import ExportOptions
from ...exporter.plan import with_trace
from ...exporter.quantization.calibrate import find_ranges
from ...exporter.requests import CalibrateRequest
from ...graphs.layers.mumoe import MuMoESpec
from ...graphs.layers.soft_moe import SoftMoESpec
from ...graphs.targets import Precision, Target
from .accuracy.holdout import Holdout, untouched_outputs
from .accuracy.quality import Metric, check_enough_inputs, metric_for
from .budget import (
    LOWERINGS,
    OPEN,
    RANGES_SHARE,
    RUN,
    TRACE,
    VERIFIED_INPUTS,
    Clock,
    FinishTimes,
    protocol_for,
    spin_for,
)
from .recipe import LayerRecipe
from .request import TuneRequest
from .routed import routed_layers
from .space import RANGED, Point, Space, Trial, ks_of, precisions_on, space_of
from .substitutes.substitutes import FOLDER

MAX_CALIBRATED, MIN_CALIBRATED = 256, 32
"""The largest and smallest number of the search's inputs for ranges; if time is too short for the
smallest, there are no ranges."""

OBSERVING_COST = 4.0
"""The estimated factor by which observing ranges slows the model."""

UNIFORM_DIVISORS = (1, 2, 4, 8, 16)
"""The first models to be tried divide the k of every layer by one of these."""


@dataclass(frozen=True)
class SearchJob:
    """A prepared search: the data, the untouched model's outputs, the ranges and the space.

    `one_s` is the untouched model's time for one input, in seconds.
    """

    model: Model
    request: TuneRequest
    holdout: Holdout
    outputs: Array
    metric: Metric
    base: ExportJob
    traced: ir.Model
    spaces: Mapping[Target, Space]
    journal: Journal
    folder: Path
    clock: Clock
    one_s: float

    @property
    def choices(self) -> Mapping[str, tuple[LayerRecipe, ...]]:
        """The choices of each layer, in FP32, which are the same for every target."""
        return self.spaces[self.request.targets[0]].choices

    @property
    def start(self) -> Point:
        """The model as trained, on the first target."""
        layers = tuple((name, listed[0]) for name, listed in self.choices.items())
        return Point(layers, self.request.targets[0])

    def smaller_choices(
        self, name: str, kept: Callable[[int], tuple[int, ...]]
    ) -> list[LayerRecipe]:
        """Returns a layer's choices with fewer experts.

        For Soft MoE, these are subsets, of which all or half are computed; for muMoE, one expert
        replaces all. `kept` returns the experts of a subset of a given size.
        """
        spec = self.model.layers[name].spec
        # In a model with token-routed layers, the inputs of single layers are not recorded.
        if self.request.all_experts or routed_layers(self.model):
            return []
        if not isinstance(spec, SoftMoESpec | MuMoESpec) or spec.external_routing:
            return []  # the layer's inputs are computed from tokens that it does not receive
        if isinstance(spec, MuMoESpec):
            return [LayerRecipe(1, merged=True)]
        choices = []
        for size in ks_of(spec.experts)[1:]:
            experts = kept(size)
            choices += [
                LayerRecipe(k, experts=experts) for k in dict.fromkeys((size, size // 2)) if k
            ]
        return choices

    def uniform(self, precision: Precision, target: Target) -> list[Point]:
        """Returns the model in one precision: as trained, then with smaller k."""
        names = self.spaces[target].integers.get(precision, (*self.choices,))
        points = []
        for divisor in UNIFORM_DIVISORS:
            layers = []
            for name, listed in self.choices.items():
                k = max(1, listed[0].k // divisor)
                choice = next((option for option in listed if option.k <= k), listed[-1])
                layers.append(
                    (name, replace(choice, precision=precision) if name in names else choice)
                )
            points.append(Point(tuple(layers), target))
        return [*dict.fromkeys(points)]

    def within(self, trial: Trial) -> bool:
        """Returns whether a trial meets the bounds on time and size."""
        slow = self.request.latency_ms is not None and trial.ms > self.request.latency_ms
        large = self.request.most_bytes is not None and trial.bytes > self.request.most_bytes
        return not (slow or large)

    @property
    def table_file(self) -> Path:
        return self.folder / CALIBRATION_FILE

    def finish_times(self, base: Trial) -> FinishTimes:
        """Estimates how long the end of the search takes; `base` is the model as trained."""
        longest, one_s, base_s = self.clock.longest, self.one_s, base.ms / 1e3
        searching = len(self.holdout.search)
        confirming = self.holdout.confirming_count or searching
        # A resumed search may not have run a graph; the untouched model takes about as long.
        run_s = longest.get(RUN, one_s * searching) / searching
        open_s, lowerings_s = longest.get(OPEN, 0.0), longest.get(LOWERINGS, 0.0)
        careful = protocol_for(base.ms, careful=True)
        calls = careful.warmup + careful.rounds * (1 + careful.inputs)
        timed_s = max(careful.rounds * (careful.round_s + base_s), calls * base_s)
        untouched_s = timed_s + careful.rounds * WAIT_S
        timed_s += careful.rounds * (WAIT_S if spin_for(base.ms) is None else SAMPLE_S)
        once_s = untouched_s + confirming * one_s + open_s + VERIFIED_INPUTS * (2 * one_s + run_s)
        if routed_layers(self.model):
            # one trace with k = 1 to find where k is in the graph, and one with the chosen k
            once_s += 2 * longest[TRACE]
        return FinishTimes(
            timing_s=open_s + timed_s + lowerings_s,
            confirming_s=open_s + confirming * run_s,
            once_s=once_s - lowerings_s,  # the model as trained is already known
        )


def prepare(
    model: Model,
    data: Labelled,
    request: TuneRequest,
    folder: Path,
    progress: Progress,
    clock: Clock,
) -> SearchJob:
    """Prepares a search; raises the errors that can be found without a search."""
    if data.output:
        raise UsageError(
            f"--data: the labels are of the output '{model.outputs[data.output].name}', but tune "
            f"keeps the accuracy of the first output, '{model.output.name}'",
            hint=f"save the labels of {model.output.name} as the array label",
        )
    if sum(tensor.nbytes for tensor in model.module.state_dict().values()) < STEP_BYTES:
        # For a small graph, releasing the pages of mapped weights takes longer than the rest.
        model = replace(model, source=replace(model.source, mapped=()))
    base = base_job(model, request)
    progress.step("reading the search's half of the data")
    holdout = Holdout.of(data)
    began = time.monotonic()
    outputs = untouched_outputs(model, holdout.search, progress, clock, base)
    holdout = holdout.with_first(len(outputs))
    one_s = (time.monotonic() - began) / len(outputs)
    metric = metric_for(request.metric, outputs, holdout.search.inputs, holdout.search.labels)
    check_enough_inputs(metric, request.kept, holdout, outputs)
    identity = {
        "pieces": 3,  # the version of the journal's pieces
        "environment": environment(),
        "model": fingerprint(model),
        "data": data.fingerprint,
        "request": request.searched,
    }
    make_folder(folder)
    journal = Journal(folder / FILE, identity)
    if journal.summary:
        progress.step(journal.summary)
    if not journal.resumed:
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
    progress.step("tracing")
    with clock.step(TRACE):
        base, traced = with_trace(base, progress)
    to_try = {target: precisions_on(target, request) for target in request.targets}
    ranged = any(name in RANGED for names in to_try.values() for name in names)
    if ranged and all(spec.default is None for spec in model.inputs):
        path = folder / CALIBRATION_FILE
        samples = _samples(clock, one_s)
        if samples and not (journal.resumed and path.is_file()):
            calibrate = CalibrateRequest(samples=samples)
            job = calibration_job(model, holdout.search.feed, calibrate, fixed=base.fixed)
            find_ranges(job, traced=traced, progress=progress).write(path)
        if samples or (journal.resumed and path.is_file()):
            base = replace(base, table=CalibrationTable.read(path))
        else:
            to_try = {
                target: [name for name in names if name not in RANGED]
                for target, names in to_try.items()
            }
    return SearchJob(
        model=model,
        request=request,
        holdout=holdout,
        outputs=outputs,
        metric=metric,
        base=base,
        traced=traced,
        spaces={target: space_of(base, traced, target, names) for target, names in to_try.items()},
        journal=journal,
        folder=folder,
        clock=clock,
        one_s=one_s,
    )


def base_job(model: Model, request: TuneRequest) -> ExportJob:
    """Returns the export job of the model as trained; raises errors for any of the targets."""
    options = ExportOptions(batch=request.batch, tokens=request.tokens, verify=False)
    first, *others = request.targets
    for target in others:  # raises errors before the search
        export_job(model, replace(options, target=target))
    return export_job(model, replace(options, target=first))


def _samples(clock: Clock, one_s: float) -> int:
    """Returns how many inputs for ranges the time allows; 0 if there is too little time."""
    if not math.isfinite(clock.left):
        return MAX_CALIBRATED
    seconds = RANGES_SHARE * (clock.seconds - clock.reserve) - (clock.seconds - clock.left)
    fitting = seconds / (OBSERVING_COST * one_s)
    return 0 if fitting < MIN_CALIBRATED else min(MAX_CALIBRATED, math.floor(fitting))


@contextmanager
def prepared(
    model: Model,
    data: Labelled,
    request: TuneRequest,
    work: Path | None,
    progress: Progress,
    clock: Clock,
) -> Iterator[tuple[SearchJob, Threads]]:
    """Yields a prepared search and its threads; uses the folder `work`, or a temporary one."""
    request = replace(request, batch=base_job(model, request).options.batches)
    sizes = (request.batches.opt,)
    threads = threads_for([model], data, sizes, count=request.threads, work=work, progress=progress)
    opened_folder = scratch_folder("tune") if work is None else nullcontext(work)
    with with_threads(threads.count), exclusive_folder(work), opened_folder as folder:
        yield prepare(model, data, request, folder, progress, clock), threads
