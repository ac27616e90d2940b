"""Runs a search: prepares it, searches, confirms on the other half, and exports."""

from __future__ import annotations

import hashlib
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np

from ...bench.data import Labelled
from ...common.console import Progress, Silent
from ...common.files import sha256
from ...common.latency import Latency
from ...common.threads import Threads
from ...common.timing import Protocol
from ...common.writing import check_folder, exclusive_place, make_folder, output_errors
from ...data.user_code import names_code
from ...errors import MoexportError, ParityError
from ...exporter.bundle.bundle import Bundle
from ...exporter.bundle.destination import check_destination
from ...exporter.bundle.substitutes import SUBSTITUTES_FILE, substitutes_bytes
from ...exporter.export import write_bundle
from ...exporter.inputs import SAMPLES, feed_inputs
from ...exporter.job import export_job
from ...exporter.model import Model, fingerprint
from ...exporter.options import ExportOptions
from ..service.findings import ServiceFindings
from .accuracy.confirm import (
    Confirmed,
    SearchResult,
    check_substitutes,
    confirm_front,
    contract_record,
)
from .accuracy.quality import Metric
from .budget import EACH_SIDE, TRAINING_S, TRIALS, VERIFIED_INPUTS, Clock
from .layers import BATCH, TRIED_INPUTS
from .prepare import MAX_CALIBRATED, SearchJob, prepared
from .recipe import (
    RECIPE_FILE,
    free_path,
    reading_options,
    recipe_in,
    recipe_options,
    settings_of,
    with_recipe,
)
from .request import TuneRequest
from .routed import routed_layers
from .search import search
from .shards import Evaluate, evaluate_here
from .space import RANGED, Trial, recipe_of
from .substitutes.distill import longest_s

INPUTS_FILE = "inputs.npz"
"""The file with a few inputs next to a stored recipe, if loading the model needs inputs."""

FINISH_S, REPORT_S = 1.5, 3.0
"""Estimated seconds to finish a bundle, apart from its graph and check, and to write a report."""

FORM_S, GRAPH_S = 0.6, 0.5
"""Estimated seconds to time a form of a layer, and to make a whole graph."""


@dataclass(frozen=True)
class Tuned:
    """The outcome of a search: the bundle, its point and all trials."""

    bundle: Bundle
    chosen: Confirmed
    front: tuple[Trial, ...]
    sequence: tuple[Confirmed, ...]
    base: Trial
    metric: Metric
    model: Model
    request: TuneRequest
    latencies: dict[str, Latency]
    protocol: Protocol
    all_trials: tuple[Trial, ...]
    searching: int
    seconds: float
    threads: Threads
    services: ServiceFindings | None = None

    @property
    def trials(self) -> int:
        """The number of whole graphs that were made."""
        return len(self.all_trials)

    @property
    def experts(self) -> dict[str, int]:
        """The number of experts of each layer of the model as trained."""
        return {name: layer.spec.experts for name, layer in self.model.layers.items()}


def search_and_export(
    model: Model,
    data: Labelled,
    destination: Path,
    request: TuneRequest,
    *,
    clock: Clock | None = None,
    evaluate: Evaluate = evaluate_here,
) -> Tuned:
    """Writes the best bundle that meets a request to `destination`.

    An interrupted search continues in the folder of the report. `clock` started with the call,
    before the model was loaded; `evaluate` runs graphs on the data. Raises `UsageError` and
    `FeedError` for invalid arguments, before the search, and `ContractError` if no point meets the
    bounds, or none is confirmed.
    """
    progress, started = request.progress or Silent(), time.monotonic()
    work = None if request.report is None else Path(request.report)
    clock = clock or Clock(request.seconds)
    check_destination(destination, force=request.force)
    check_folder(destination.absolute().parent)
    clock.reserve = clock.writing_s = FINISH_S + (0.0 if work is None else REPORT_S)
    preparation = prepared(model, data, request, work, progress, clock)
    with exclusive_place(destination), preparation as (job, threads):
        if not job.journal.pieces("threads"):
            job.journal.add("threads", of=model.source.path, **asdict(threads))
        result = search(job, progress, evaluate)
        checked = confirm_front(job, result, progress)
        bundle_path = destination.absolute()
        recipe_folder = free_path(bundle_path, "recipe") if work is None else work / "recipe"
        chosen, bundle = export_best(
            job, checked.within_bounds, result, destination, recipe_folder, progress
        )
    return Tuned(
        bundle=bundle,
        chosen=chosen,
        front=result.front,
        sequence=tuple(checked.confirmed),
        services=checked.services,
        base=result.base,
        metric=job.metric,
        model=model,
        request=job.request,
        latencies=result.latencies,
        protocol=result.protocol,
        all_trials=result.trials,
        searching=len(job.holdout.search),
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
) -> tuple[Confirmed, Bundle]:
    """Exports the best point that can be exported; returns the point and its bundle.

    `recipe_folder` contains the recipe until the bundle is complete. If the export refuses a point
    because its graph's outputs are too far from PyTorch's, the next point is tried.
    """
    # If k is a constant of the graph, the model with the chosen k is traced.
    traced = None if routed_layers(job.model) else job.traced
    for chosen in ranked:
        check_substitutes(job, chosen.trial, result)
        options = _point_options(job, chosen, result)
        options = replace(options, destination=destination, force=job.request.force)
        try:
            with _recipe_in_folder(job.model, options, recipe_folder):
                return chosen, write_bundle(export_job(job.model, options), progress, traced)
        except ParityError as error:
            if chosen is ranked[-1]:
                raise
            progress.step(f"skipped: {error.message}")
    raise AssertionError("`confirm_front` returns at least one point")


def _point_options(job: SearchJob, chosen: Confirmed, result: SearchResult) -> ExportOptions:
    """Returns the options that export a point by its recipe."""
    trial = chosen.trial
    specs = {name: layer.spec for name, layer in job.model.layers.items()}
    recipe = recipe_of(
        job.base.options,
        trial.point,
        trial.lowerings,
        {
            name: f"tuned: {choice.text(specs[name].experts)}, {trial.lowerings[name]}"
            for name, choice in trial.point.layers
        },
        model=fingerprint(job.model),
        data=job.holdout.data.fingerprint,
        contract=contract_record(job, chosen),
        moexport=metadata.version("moexport"),
        **settings_of(job.model),
    )
    options = replace(job.base.options, verify=True, verify_samples=VERIFIED_INPUTS)
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
    return replace(export_options, data=job.holdout.search.head(MAX_CALIBRATED).feed)


@contextmanager
def _recipe_in_folder(model: Model, options: ExportOptions, folder: Path) -> Iterator[None]:
    """Writes the recipe to a folder, which is removed when the bundle is complete.

    A search takes minutes to hours, so its confirmed result must not be lost if the export fails.
    """
    recipe, source, constants = recipe_in(options), model.source, substitutes_bytes(options.edits)
    assert recipe is not None, "the options contain a recipe"
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    with output_errors(folder):
        if constants:
            (folder / SUBSTITUTES_FILE).write_bytes(constants)
        if isinstance(options.calibration, Path):
            shutil.copyfile(options.calibration, folder / options.calibration.name)
        recipe.write(folder / RECIPE_FILE)
        data_option = []
        if names_code(source.path):  # loading a network from user code needs inputs
            inputs = feed_inputs(model, options.data, SAMPLES) if options.data is not None else {}
            np.savez(folder / INPUTS_FILE, **inputs)  # type: ignore[arg-type]
            data_option = ["--data", str(folder / INPUTS_FILE)]
    assert options.destination is not None, "a search has a destination"
    target = options.destination
    free = free_path(target) if target.exists() else target
    words = ["moexport", "export", source.path, "--recipe", str(folder / RECIPE_FILE)]
    command = shlex.join([*words, "-o", str(free), *data_option, *reading_options(source)])
    note = f"the result of the search is confirmed; this command exports it: `{command}`"
    try:
        yield
    except MoexportError as error:
        error.hint = f"{error.hint}; {note}" if error.hint else note
        raise
    except Exception as error:
        error.add_note(note)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """The size of a search: the number of possible models, and what will be measured.

    `choices` is the number of choices for single layers, `forms` that of layer forms timed alone,
    and `graphs` the largest number of whole graphs; `seconds` is the estimated total time.
    """

    models: int
    choices: int
    forms: int
    graphs: int
    searching: int
    confirming: int | None
    seconds: float


def plan_search(model: Model, data: Labelled, request: TuneRequest) -> SearchPlan:
    """Returns the size of a search; runs only the untouched model, on one half of the data."""
    started, progress = time.monotonic(), request.progress or Silent()
    with prepared(model, data, request, None, progress, Clock(None)) as (job, _):
        preparing_s, count, one_s = time.monotonic() - started, len(job.holdout.search), job.one_s
    listed = {
        name: (*known, *job.smaller_choices(name, lambda size: tuple(range(size))))
        for name, known in job.choices.items()
    }
    spaces = [replace(space, choices=listed) for space in job.spaces.values()]
    choices = sum(map(len, listed.values()))
    parts = sum(len(names) for space in spaces for names in space.integers.values())
    paths = sum(len(space.floats) + len(space.integers) for space in spaces)
    forms = sum(space.forms for space in spaces)
    graphs = 1 + parts + paths * (TRIALS // 2 + EACH_SIDE)
    fewer = any(choice.is_reduced for known in listed.values() for choice in known)
    trained_s = min(TRAINING_S, longest_s(BATCH * one_s))
    seconds = (
        preparing_s
        + forms * FORM_S
        + choices * one_s * min(count, TRIED_INPUTS)
        + graphs * (GRAPH_S + one_s * count + (trained_s if fewer else 0.0))
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
