"""The steps of an export: trace, ranges, plan, write, parity, engines, plugin steps.

Invalid requests are refused first, in `exporter.job.export_job`; the bundle appears at its
destination only when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from ..common.console import Progress, Silent
from ..common.option import takes
from ..common.threads import fastest_threads, with_threads
from ..errors import ParityError, TraceError, UsageError
from ..graphs.sizes import DEFAULT_TOKENS
from ..graphs.targets import TARGETS
from .bundle.bundle import Bundle
from .bundle.destination import atomic_directory, check_destination
from .bundle.footprint import with_peak_memory
from .bundle.manifest import MANIFEST_FILE
from .bundle.parity import Parity
from .job import ExportJob, export_job, steps_of
from .model import Model
from .options import ExportOptions
from .plan import Plan, limited_to_tokens, plan_traced, with_trace
from .reference import TokensError, compare_graphs, compared_inputs, rounded_graph, run_untouched
from .refusals import with_plugins
from .requests import AnyPath, LoadRequest
from .write import manifest_of, write_graphs

if TYPE_CHECKING:
    from ..calibration.table import CalibrationTable
    from ..data.batches import Fields
    from .checkpoints.load import AnyModel
    from .checks.answers import Answers


@takes(ExportOptions)
def export(model: AnyModel, destination: AnyPath, options: ExportOptions) -> Bundle:
    """Writes a verified bundle of a model (ONNX graphs, weights, a manifest) and returns it.

    `model` is a loaded model, an argument of `load`, or a function that loads it; it is loaded
    after the checks that need no model. `destination` is the folder to write. Invalid options are
    refused before the work begins, and no partial output is left.

    Raises:
        UsageError: an argument is invalid.
        BundleError: the destination cannot be written.
        FeedError: the inputs do not fit the model.
        CalibrationError: the ranges belong to another model, or cover too few experts.
        LoweringError: no lowering supports a layer.
        TraceError: the network cannot be traced.
        ParityError: a graph differs too much from PyTorch.
        EngineError: the requested engine cannot be compiled.
    """
    requested = with_plugins(replace(options, destination=Path(destination)))
    return write_bundle(export_job(partial(_load, model, options), requested), options.progress)


@takes(ExportOptions)
def plan(model: AnyModel, destination: AnyPath, options: ExportOptions) -> Plan:
    """Returns the plan of an `export` with the same arguments; traces, but writes nothing.

    A bundle at `destination` is ignored; unsuitable data are reported.
    """
    requested = with_plugins(replace(options, destination=Path(destination), force=True))
    job = export_job(partial(_load, model, options), requested)
    if job.options.data is not None and job.options.verify:
        compared_inputs(job)  # reads the first batch
        _answers(job)
    return plan_job(job, options.progress)


def _load(model: AnyModel, options: ExportOptions) -> Model:
    """Imports the readers and families, and loads the model."""
    from .checkpoints.load import model_of

    return model_of(model, LoadRequest(progress=options.progress), options.data)


def write_bundle(
    job: ExportJob, progress: Progress | None = None, traced: ir.Model | None = None
) -> Bundle:
    """Runs a job: writes a verified bundle to its destination and returns it.

    `traced` is the trace of the job's model, if there is one. A graph that is valid for too few
    token counts is written again, traced with more tokens or limited to the valid counts. Raises
    the errors of `export`, and leaves nothing behind on failure.
    """
    progress, options = progress or Silent(), job.options
    with job.model.source.reporting_changes():
        if options.verify and isinstance(options.data, Iterator):
            from .checks.accuracy import fields_of

            # Stored for the comparisons, because a generator yields its inputs only once.
            count = max(options.samples_to_verify, job.least_batch)
            data = tuple(fields_of(job.model, options.data, count))
            job = replace(job, options=replace(options, data=data))
        if options.verify:
            first = next(compared_inputs(job))
            job, traced = with_trace(job, progress, traced)  # before timing: its errors are clearer
        threads = options.threads
        if threads is None and options.verify:
            threads = _fastest_threads(job, first, progress)
        with with_threads(threads):
            answers = None if options.data is None else _answers(job)
            try:
                return _write(job, progress, traced, answers)
            except TokensError as error:
                caught = error
            if caught.tokens > job.traced_sizes.get("tokens", caught.tokens):
                # If tokens are computed in blocks, a trace with several blocks may fit all counts.
                with suppress(TraceError, ParityError, UsageError):
                    retraced_job, retraced = with_trace(job, progress, tokens=caught.tokens)
                    return _write(retraced_job, progress, retraced, answers)
            if options.token_counts != DEFAULT_TOKENS or caught.valid is None:
                raise caught
            limited_job = limited_to_tokens(job, *caught.valid, caught.message)
            return _write(limited_job, progress, traced, answers)


def _fastest_threads(job: ExportJob, first: Fields, progress: Progress) -> int:
    """Returns the number of threads with which the untouched model is fastest."""
    if job.model.source.watched is not None:  # reading a truncated file ends the process
        job.model.source.watched.check_states()
    threads = fastest_threads(partial(run_untouched, job.model, first))
    if threads.call_ms:
        progress.step(threads.sentence)
    return threads.count


def _answers(job: ExportJob) -> Answers | None:
    """Returns the untouched model's results on the job's data (`checks.scores.job_answers`)."""
    from .checks.scores import job_answers  # loaded if there are data

    return job_answers(job)


def _write(
    job: ExportJob, progress: Progress, traced: ir.Model | None, answers: Answers | None
) -> Bundle:
    """Plans, writes and checks the bundle of a job: one attempt of `write_bundle`.

    `answers` are those of the untouched model on the job's data.
    """
    planned = plan_job(job, progress, traced)
    job, options, weights_bytes = planned.job, planned.job.options, planned.weights_bytes
    destination, force = options.destination, options.force
    assert destination is not None, "an export has a destination"
    steps = steps_of(job.model, options)
    copies = 1 + sum(step.copies for step in steps)
    check_destination(destination, force=force, needed_bytes=copies * weights_bytes)
    with atomic_directory(destination, force=force) as directory:
        progress.step("writing weights and graphs", total=weights_bytes)
        rounded = rounded_graph(planned)  # for comparison only
        written = replace(planned, graphs=(*planned.graphs, *rounded))
        lowered = write_graphs(written, directory, progress)
        _write_ranges_and_substitutes(planned, directory)
        parities: dict[str, Parity] = {}
        notes: tuple[str, ...] = ()
        if options.verify:
            progress.step("checking against PyTorch", unit="inputs")
            parities, notes = compare_graphs(planned, rounded, lowered, directory, progress)
        for graph in rounded:
            (directory / graph.file).unlink()
        progress.step("hashing")
        manifest = manifest_of(planned, lowered, parities, directory)
        manifest = replace(manifest, notes=[*manifest.notes, *notes])
        if options.data is not None:
            from .checks.scores import with_scores

            manifest = with_scores(job, manifest, directory, answers, progress)
        manifest = with_peak_memory(directory, manifest)
        if TARGETS[options.target].compiled and options.engine is not False:
            from .tensorrt.engines import build_for_export

            manifest = build_for_export(directory, manifest, options.engine, progress)
        for step in steps:
            manifest = step.finish(job, directory, manifest)
        from .bundle.readme import with_readme  # loaded if a bundle is written

        manifest = with_readme(directory, manifest, steps)
        (directory / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return Bundle(destination, manifest)


def _write_ranges_and_substitutes(planned: Plan, directory: Path) -> None:
    """Writes the ranges of the export, and the arrays that replace experts, if there are any."""
    edits = planned.job.options.edits
    if planned.table is not None:
        from ..calibration.table import CALIBRATION_FILE

        planned.table.write(directory / CALIBRATION_FILE)
    if edits.substitutes:
        from .bundle.substitutes import SUBSTITUTES_FILE, substitutes_bytes

        (directory / SUBSTITUTES_FILE).write_bytes(substitutes_bytes(edits))


def plan_job(
    job: ExportJob, progress: Progress | None = None, traced: ir.Model | None = None
) -> Plan:
    """Traces the model of a job and returns the job's plan; writes nothing."""
    progress = progress or Silent()
    job, traced = with_trace(job, progress, traced)
    table = ranges_for(job, traced, progress)
    retention = None
    if job.options.min_retention is not None:
        from .quantization.accuracy_search import floats_for_retention  # for `--min-retention`

        retention = floats_for_retention(job, traced, table, progress)
    return plan_traced(job, traced, table, retention=retention, progress=progress)


def ranges_for(
    job: ExportJob, traced: ir.Model, progress: Progress | None = None
) -> CalibrationTable | None:
    """Returns the ranges of a job: given ones, ones found now, or None if it needs none.

    `traced` is the trace of the job's model; ranges are observed in it.
    """
    if job.calibration is None:
        return job.table
    from .quantization.calibrate import find_ranges  # loaded if ranges are found

    return find_ranges(job.calibration, progress=progress, traced=traced)
