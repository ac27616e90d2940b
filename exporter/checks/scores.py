"""An export's findings on its data: accuracies on labels, and how often experts are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from ...common.console import Progress
from ...data.batches import Fields, rebatched
from ..bundle.manifest import GraphRecord, Manifest
from ..bundle.parity import PARITY_FILE, Reference
from ..bundle.verify import checking_session
from ..job import ExportJob
from ..reference import Network, compared_inputs, kept_experts, pytorch_bounds, releasing_pages
from .accuracy import Score, evaluate, output_names, unread_arrays
from .answers import Answers, answers_of, what_pytorch_is
from .choices import CHOICES, Choices, choices_of, chosen_k

BATCH = 16


def job_answers(job: ExportJob) -> Answers | None:
    """Returns the untouched model's results on a job's data; None if nothing is compared.

    Raises what `answers_of` raises.
    """
    options = job.options
    if options.data is None or not options.verify:
        return None
    return answers_of(
        job.model,
        options.data,
        count=options.samples_to_verify,
        batch=job.whole_batch,
        fixed=job.fixed,
        bounds=pytorch_bounds(options),
        own_bounds=options.precision == "fp32" and (options.atol, options.rtol) != (None, None),
    )


def with_scores(
    job: ExportJob, manifest: Manifest, directory: Path, answers: Answers | None, progress: Progress
) -> Manifest:
    """Returns a manifest with the accuracies of a folder's graphs, and notes on them.

    The manifest also records how often the main graph chooses each expert for the compared inputs.
    """
    unread = unread_arrays(job.model, job.options.data)
    manifest = replace(manifest, notes=[*manifest.notes, *unread])
    if answers is not None:
        manifest = _with_accuracies(job, manifest, directory, answers, progress)
    if not job.options.verify or not manifest.graphs[0].selected:
        return manifest  # if all experts are kept, nothing is chosen
    progress.step("counting how often each expert is chosen", unit="inputs")
    found = _choices(job, manifest, directory, progress)
    if not found.counts:
        return manifest
    return replace(manifest, answers={**manifest.answers, CHOICES: found.record()})


def _choices(job: ExportJob, manifest: Manifest, directory: Path, progress: Progress) -> Choices:
    """Returns the main graph's choices for the inputs of the comparison, counted as in `verify`."""
    graph = manifest.graphs[0]
    expected = Reference.load(directory / PARITY_FILE)
    observe = expected.observed(graph.selected)
    session = checking_session(directory / graph.file, job.options.target, observe=observe)

    def batches() -> Iterator[Fields]:
        for x in compared_inputs(job):
            yield from rebatched([x], job.checked_batch)
            progress.advance(len(x[job.model.input.name]))

    return choices_of(session, manifest, graph, batches(), chosen_k(manifest, expected))


def _with_accuracies(
    job: ExportJob, manifest: Manifest, directory: Path, answers: Answers, progress: Progress
) -> Manifest:
    """Returns the manifest with accuracies on labels and notes on PyTorch and the user's model."""
    record, notes = answers.record(), [*answers.notes]
    if answers.accuracy is not None:
        progress.step("measuring the accuracy")
        graphs = {graph.file: _graph_score(job, graph, directory) for graph in manifest.graphs}
        kept = _kept_score(job)
        known = {file: score for file, score in graphs.items() if score is not None}
        record["graphs"] = {file: asdict(score) for file, score in known.items()}
        if kept is not None:
            record["pytorch_at_k"] = asdict(kept)
        notes.append(_accuracy_note(job, answers, kept, known))
    notes += what_pytorch_is(answers, job.model)
    return replace(manifest, answers=record, notes=[*manifest.notes, *notes])


def _accuracy_note(
    job: ExportJob, answers: Answers, kept: Score | None, graphs: Mapping[str, Score]
) -> str:
    assert answers.accuracy is not None, "there are labels"
    parts = [f"PyTorch {answers.accuracy.text}"]
    if answers.own_accuracy is not None:
        parts.insert(0, f"your own outputs {answers.own_accuracy.text}")
    if kept is not None:
        parts.append(f"PyTorch as exported {kept.text}")
    k = _shared_k(job)
    at_k = "" if k is None else f" with k = {k}"
    parts += [f"{file}{at_k} {score.text}" for file, score in graphs.items()]
    options = job.options
    ranged = job.needs_ranges and options.data is not None and options.calibration is None
    same = "; the ranges come from the same inputs: use a --calibration from other ones" * ranged
    return f"accuracy on labelled inputs: {', '.join(parts)}{same}"


def _shared_k(job: ExportJob) -> int | None:
    """Returns the largest k that every layer supports, for graphs with k as an input."""
    return job.fewest_experts if None in job.k.values() else None


def _graph_score(job: ExportJob, graph: GraphRecord, directory: Path) -> Score | None:
    session = checking_session(directory / graph.file, job.options.target)
    k = _shared_k(job)
    return _score(job, lambda x: session.run(x, k))


def _kept_score(job: ExportJob) -> Score | None:
    """Returns PyTorch's accuracy with the export's experts and edits; None if it is as trained."""
    kept = kept_experts(job, _shared_k(job))
    trained = job.model.trained_k
    if kept == trained and not job.options.renormalize and job.model.as_trained is None:
        return None

    def run(x: Fields) -> Mapping[str, np.ndarray]:
        network = Network(job.model, job.model.module, kept, renormalize=job.options.renormalize)
        with releasing_pages(job.model):
            return dict(zip(output_names(job.model), network.compute(x).outputs, strict=True))

    return _score(job, run)


def _score(job: ExportJob, run: Callable[[Fields], Mapping[str, np.ndarray]]) -> Score | None:
    """Returns the accuracy of `run` on a job's labelled inputs, in batches that graphs accept."""
    data = job.options.data
    assert data is not None, "there are labels"
    group = job.whole_batch or 1
    size = group * max(1, min(BATCH, job.largest_batch) // group)
    found = evaluate(run, job.model, data, size, job.fixed, job.options.samples_to_verify)
    return None if found is None else found.accuracy
