"""What a benchmark is given: models and bundles, their data, and the number of threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from ..common.console import Progress, Silent
from ..common.threads import Threads, fastest_threads
from ..errors import UsageError
from ..exporter.bundle.bundle import Bundle
from ..exporter.bundle.manifest import is_bundle
from ..exporter.checkpoints.load import load_as
from ..exporter.model import Model
from ..graphs.names import K_INPUT
from .data import Labelled, LabelledData, Streamed, labelled
from .engines import Serves
from .journal import unfinished
from .measure.sequences import benchmark_of
from .plan import Candidate, select
from .request import ALL, BenchRequest
from .results import Absent
from .runners.candidates import batch_sizes, candidates_of, check_exported, with_sources
from .runners.pytorch import outputs_of, untouched

CALIBRATION_INPUTS = 256
"""INT8 takes its ranges from this many of the benchmark's inputs; their labels play no part."""


def opened(
    sources: Sequence[Model | Bundle | str | Path],
    request: BenchRequest,
) -> list[Model | Bundle]:
    """Returns the models and bundles that are named."""
    data, pixels = request.data, request.pixels
    # A folder of images by class can be read once the model has said its size, not before.
    place = Path(data) if isinstance(data, str | Path) else None
    images = pixels is not None or (
        place is not None and place.is_dir() and not any(place.glob("*.npy"))
    )
    example = None if images else place

    def one(source: Model | Bundle | str | Path) -> Model | Bundle:
        if isinstance(source, Model | Bundle):
            return source
        if is_bundle(source):
            return Bundle.open(source)
        if request.progress is not None:
            request.progress.step(f"loading {source}")
        return load_as(source, replace(request, example=example))

    return [one(source) for source in sources]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Candidates and their data, the benchmark of them, the engines that are not measured."""

    candidates: list[Candidate]
    data: Labelled
    request: BenchRequest
    absent: tuple[Absent, ...]
    threads: Threads


@contextmanager
def prepared(listed: Sequence[Model | Bundle], wanted: BenchRequest) -> Iterator[Prepared]:
    """Yields what a benchmark measures, exported, and how; raises what `sweep` raises."""
    watcher = wanted.progress or Silent()
    selection = select(wanted.engines, [_served(item) for item in listed])
    request = replace(wanted, engine=selection.names, batch=batch_sizes(listed, wanted))
    check_exported(listed, request)
    listed = with_sources(listed)
    first = next(item for item in listed if isinstance(item, Model))
    data = data_of(first, request, fixed_sizes(first, listed))
    head = data.head(CALIBRATION_INPUTS if {"int8", "fp8"} & {*request.precisions} else 1)
    absent = [engine for engine in selection.absent if engine.engine in wanted.engines]
    if absent and wanted.engine == ALL:
        names = ", ".join(engine.engine for engine in absent)
        watcher.step(f"not measured, the report says why: {names}")
    else:
        for engine in absent:
            watcher.step(f"not measured: {engine.engine}: {engine.reason}")
    sizes = request.batches
    threads = threads_for(
        [first], data, sizes, count=wanted.threads, work=wanted.folder, progress=watcher
    )
    # The same threads for every engine.
    request = replace(request, threads=threads.count)
    with candidates_of(listed, request, watcher, head.feed) as candidates:
        phased = [in_phases(candidate, data, wanted.tokens) for candidate in candidates]
        yield Prepared(
            candidates=phased,
            data=data,
            request=request,
            absent=selection.absent,
            threads=threads,
        )


def threads_for(
    models: Sequence[Model],
    data: Labelled,
    batches: Sequence[int],
    *,
    count: int | None = None,
    work: Path | None = None,
    progress: Progress | None = None,
) -> Threads:
    """Returns how many threads every engine gets.

    As many as are asked for, else what an unfinished run in the folder `work` had, else those with
    which the untouched models are fastest. Raises FeedError where one cannot run the data.
    """
    if count is not None:
        return Threads(count)
    begun = unfinished(work, "threads", of=models[0].source.path)
    if begun is not None:
        return msgspec.convert(begun, Threads, strict=False)
    head = data.head(max(batches))
    if not len(head):
        return Threads(torch.get_num_threads())
    calls = []
    for model in models:
        base = untouched(model)
        for x in (head.batch(0, size) for size in batches):
            outputs_of(base, x, model.source.path)
            calls.append(base.bound(x))
    fastest = fastest_threads(*calls)
    if fastest.call_ms and progress is not None:
        progress.step(fastest.sentence)
    return fastest


def _served(item: Model | Bundle) -> Serves:
    """Which engines of `engines.KINDS` a model is for, beside those for all."""
    ports = item.inputs if isinstance(item, Model) else item.manifest.inputs
    further = [port for port in ports if port.name != K_INPUT][1:]
    if not further:
        return "one-input"
    # A network of the user's own has no input that may be left out.
    return "transformers" if any(port.default is not None for port in further) else "all"


def fixed_sizes(model: Model, listed: Sequence[Model | Bundle]) -> dict[str, int]:
    """Returns the sizes of a model's axes that its bundles have as constants, but for the batch."""
    shapes = {
        port.name: port.shape
        for item in listed
        if isinstance(item, Bundle)
        for port in item.manifest.inputs
    }
    return {
        axis: size
        for spec in model.inputs
        for axis, size in zip(spec.shape[1:], shapes.get(spec.name, ())[1:], strict=False)
        if isinstance(axis, str) and isinstance(size, int)
    }


def data_of(model: Model, request: BenchRequest, sizes: Mapping[str, int]) -> Labelled:
    """Returns the inputs that a model is measured on: its own kind for a model of sequences.

    Random ones take `sizes` where an axis of the model is dynamic.
    """
    benchmark = benchmark_of(model)
    if benchmark is not None and not isinstance(request.data, LabelledData | Streamed):
        return benchmark.data(request.data, model, request.tokens)
    if request.tokens is not None and benchmark is None:
        raise UsageError(
            f"--tokens {request.tokens}: {model.source.path} is no language model of transformers",
            hint="leave --tokens out: other models take inputs as the data have them",
        )
    return labelled(request.data, model, max(request.batches), request.pixels, sizes)


def in_phases(candidate: Candidate, data: Labelled, tokens: int | None) -> Candidate:
    """Returns a candidate with the calls that are timed, where it is a model of sequences."""
    benchmark = benchmark_of(candidate.model)
    if benchmark is None:
        return candidate
    length = data.head(1).inputs.shape[1]
    return replace(candidate, phases=benchmark.phases(candidate.model, tokens, length))
