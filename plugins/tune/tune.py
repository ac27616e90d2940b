"""The order of a search: prepared, searched, confirmed on the other half, and exported."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

from ...bench.data import Labelled
from ...common.console import Progress, Silent
from ...common.files import sha256
from ...common.threads import Threads, with_threads
from ...common.timing import Latency, Protocol
from ...common.writing import (
    check_folder,
    held_place,
    make_folder,
    output_errors,
    remove_folder,
)
from ...errors import MoexportError, ParityError
from ...exporter.bundle.bundle import Bundle
from ...exporter.bundle.destination import check_destination
from ...exporter.bundle.substitutes import SUBSTITUTES_FILE, substitutes_bytes
from ...exporter.export import export
from ...exporter.job import export_job
from ...exporter.model import Model, fingerprint
from ...exporter.options import ExportOptions
from ..service.findings import ServiceFindings
from .accuracy.confirm import (
    Confirmed,
    SearchResult,
    check_same,
    contract,
    contract_record,
    reasons,
)
from .accuracy.quality import Metric
from .budget import EACH_SIDE, TRAINING_S, TRIALS, VERIFIED, Clock
from .layers import BATCH, MOST
from .prepare import CALIBRATED, SearchJob, base_job, kept_in, prepare, threads_of
from .recipe import RECIPE_FILE, recipe_in, recipe_options, with_recipe
from .request import SearchOptions
from .routed import routed_layers
from .search import search
from .shards import Evaluate, evaluate_here
from .space import RANGED, Trial, recipe_of
from .substitutes.distill import longest_s

FINISH_S, REPORT_S = 1.5, 3.0
"""About what a bundle takes beside its graph and its check, and what a report takes."""


FORM_S, GRAPH_S = 0.6, 0.5
"""About what a form of a layer takes, and a whole graph beside running the model itself."""


@dataclass(frozen=True)
class Tuned:
    """What came of a search: the bundle, the point it is, and everything that was looked at."""

    bundle: Bundle
    chosen: Confirmed
    front: tuple[Trial, ...]
    sequence: tuple[Confirmed, ...]
    base: Trial
    metric: Metric
    model: Model
    request: SearchOptions
    latencies: dict[str, Latency]
    protocol: Protocol
    all_trials: tuple[Trial, ...]
    seen: int
    seconds: float
    threads: Threads
    services: ServiceFindings | None = None

    @property
    def trials(self) -> int:
        """How many whole graphs were made."""
        return len(self.all_trials)

    @property
    def experts(self) -> dict[str, int]:
        """The number of experts of each layer of the model as trained."""
        return {name: layer.spec.experts for name, layer in self.model.layers.items()}


def search_and_export(
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
    check_destination(destination, force=force)
    check_folder(destination.absolute().parent)
    request = replace(request, batch=base_job(model, request).options.batch)  # of whole groups
    threads = threads_of(model, data, request, work, progress)
    with with_threads(threads.count), held_place(destination), kept_in(work) as folder:
        clock.reserve = clock.writing_s = FINISH_S + (0.0 if work is None else REPORT_S)
        job = prepare(model, data, request, folder, progress, clock)
        if not job.journal.pieces("threads"):
            job.journal.add("threads", of=model.source.path, **asdict(threads))
        result = search(job, progress, evaluate)
        place = recipe_folder(destination, work)
        contracted = contract(job, result, progress)
        chosen, bundle = export_best(
            job, contracted.holding, result, destination, place, progress, force=force
        )
    return Tuned(
        bundle=bundle,
        chosen=chosen,
        front=result.front,
        sequence=tuple(contracted.confirmed),
        services=contracted.services,
        base=result.base,
        metric=job.metric,
        model=model,
        request=request,
        latencies=result.latencies,
        protocol=result.protocol,
        all_trials=result.trials,
        seen=len(job.holdout.search),
        seconds=time.monotonic() - started,
        threads=threads,
    )


def export_best(
    job: SearchJob,
    ranked: Sequence[Confirmed],
    result: SearchResult,
    destination: Path,
    recipe_folder: Path,
    progress: Progress,
    *,
    force: bool,
) -> tuple[Confirmed, Bundle]:
    """Writes the best of what holds; returns it with its bundle.

    A point that an export refuses, because its graph is too far from PyTorch, gives way to the
    next: ranges are those of the untouched model, and its outputs may be right all the same.
    """
    for chosen in ranked:
        try:
            bundle = export_point(
                job, chosen, result, destination, recipe_folder, progress, force=force
            )
        except ParityError as error:
            if chosen is ranked[-1]:
                raise
            progress.step(f"left out: {error.message}")
        else:
            return chosen, bundle
    raise AssertionError("a contract holds for something, or is refused")


def export_point(
    job: SearchJob,
    chosen: Confirmed,
    result: SearchResult,
    destination: Path,
    recipe_folder: Path,
    progress: Progress,
    *,
    force: bool,
) -> Bundle:
    """Exports the chosen point of a search as its recipe says; returns the bundle."""
    trial = chosen.trial
    check_same(job, trial, result)
    recipe = recipe_of(
        job.base.options,
        trial.point,
        trial.lowerings,
        reasons(job.model, trial),
        model=fingerprint(job.model),
        data=job.holdout.data.fingerprint,
        contract=contract_record(job, chosen),
        moexport=metadata.version("moexport"),
    )
    options = replace(
        job.base.options,
        verify=True,
        verify_samples=VERIFIED,
        destination=destination,
        force=force,
    )
    if trial.point.precision in RANGED and job.base.table is not None:
        recipe = replace(recipe, calibration=sha256(job.table_file))
        options = replace(options, calibration=job.table_file)
    trained = result.graphs.substitutes.trained_for(trial.point)
    export_options = recipe_options(recipe, options, trained)
    substitutes = substitutes_bytes(export_options.edits)
    if substitutes:
        digest = hashlib.sha256(substitutes).hexdigest()
        layers = {n: replace(r, constant=bool(r.experts)) for n, r in recipe.layers.items()}
        recipe = replace(recipe, substitutes=digest, layers=layers)
        export_options = with_recipe(export_options, recipe)
    inputs = job.holdout.search.head(CALIBRATED).feed
    # Where k is part of the graph, its trace is that of the k which was found.
    traced = None if routed_layers(job.model) else job.traced
    with _recipe_kept(export_options, recipe_folder):
        return export(export_job(job.model, export_options, data=inputs), progress, traced)


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
    recipe, constants = recipe_in(options), substitutes_bytes(options.edits)
    assert recipe is not None, "a search exports recipes"
    remove_folder(folder)
    make_folder(folder)
    with output_errors(folder):
        if constants:
            (folder / SUBSTITUTES_FILE).write_bytes(constants)
        if isinstance(options.calibration, Path):
            shutil.copyfile(options.calibration, folder / options.calibration.name)
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
    request = replace(request, batch=base_job(model, request).options.batch)  # of whole groups
    threads = threads_of(model, data, request, None, progress)
    with with_threads(threads.count), kept_in(None) as folder:
        started = time.monotonic()
        job = prepare(model, data, request, folder, progress, Clock(None))
        began, count, one = time.monotonic() - started, len(job.holdout.search), job.one_s
    listed = {
        name: (*known, *job.fewer(name, lambda size: tuple(range(size))))
        for name, known in job.choices.items()
    }
    spaces = [replace(space, choices=listed) for space in job.spaces.values()]
    choices = sum(map(len, listed.values()))
    parts = sum(len(names) for space in spaces for names in space.integers.values())
    paths = sum(len(space.floats) + len(space.integers) for space in spaces)
    forms = sum(space.forms for space in spaces)
    graphs = 1 + parts + paths * (TRIALS // 2 + EACH_SIDE)
    fewer = any(choice.fewer for known in listed.values() for choice in known)
    trained_s = min(TRAINING_S, longest_s(BATCH * one))
    seconds = (
        began
        + forms * FORM_S
        + choices * one * min(count, MOST)
        + graphs * (GRAPH_S + one * count + (trained_s if fewer else 0.0))
    )
    return SearchPlan(
        models=sum(space.size for space in spaces),
        choices=choices,
        forms=forms,
        graphs=graphs,
        searching=count,
        confirming=job.holdout.confirming_count,
        seconds=seconds,
    )
