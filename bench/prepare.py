"""Prepares a benchmark: models and bundles, their data, and the number of threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import nn

from ..common.console import Progress, Silent
from ..common.threads import Threads, fastest_threads
from ..data.feeds import head_of
from ..errors import EngineError, UsageError
from ..exporter.bundle.bundle import Bundle
from ..exporter.bundle.manifest import is_bundle
from ..exporter.checkpoints.load import load
from ..exporter.checks.answers import check_own_outputs
from ..exporter.model import Model
from ..graphs.names import K_INPUT
from .data import Labelled, LabelledData, Streamed, ids_of, labelled
from .engines import Serves
from .journal import unfinished
from .measure.sequences import benchmark_of
from .plan import Candidate, select_engines
from .ranges import Ranges, ranges_of
from .request import ALL, BenchRequest
from .results import Absent
from .runners.candidates import batch_sizes, candidates_of, check_exported, with_sources
from .runners.pytorch import outputs_of, untouched


def open_sources(
    sources: Sequence[Model | Bundle | nn.Module | str | Path], request: BenchRequest
) -> list[Model | Bundle]:
    """Opens the named models and bundles."""
    data, pixels = request.data, request.pixels
    # A folder of images can only be read once the model's input size is known.
    path = Path(data) if isinstance(data, str | Path) else None
    images = pixels is not None or (
        path is not None and path.is_dir() and not any(path.glob("*.npy"))
    )
    example = None if images else path

    def open_one(source: Model | Bundle | nn.Module | str | Path) -> Model | Bundle:
        if isinstance(source, Model | Bundle):
            return source
        if isinstance(source, nn.Module):
            first = head_of(data) if isinstance(data, Mapping | np.ndarray) else example
            return load(source, replace(request, example=first))
        if is_bundle(source):
            return Bundle.open(source)
        return load(source, replace(request, example=example))

    return [open_one(source) for source in sources]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Candidates and their data, with the request, and the engines that are not measured."""

    candidates: list[Candidate]
    data: Labelled
    request: BenchRequest
    absent: tuple[Absent, ...]
    threads: Threads
    ranges: Ranges


@contextmanager
def prepared(sources: Sequence[Model | Bundle], wanted: BenchRequest) -> Iterator[Prepared]:
    """Yields a benchmark's exported candidates and settings; raises the errors of `sweep`."""
    progress = wanted.progress or Silent()
    selection = select_engines(wanted.engines, [_narrowest_class(item) for item in sources])
    request = replace(wanted, engine=selection.names, batch=batch_sizes(sources, wanted))
    check_exported(sources, request)
    request.check_ranges()
    models = with_sources(sources)
    first, bundles = models[0][0], [bundle for _, group in models for bundle in group]
    data = data_of(first, request, fixed_sizes(first, bundles))
    reads_arrays = request.pixels is None and benchmark_of(first) is None
    if len(models) == 1 and reads_arrays and isinstance(request.data, str | Path | Mapping):
        check_own_outputs(first, request.data)
    exports = not all(group for _, group in models)
    ranges = ranges_of(request, first, data, exports=exports, bundles=bundles)
    data = ranges.measured
    if ranges.text:
        progress.step(f"INT8 ranges: {ranges.text}")
    absent = [engine for engine in selection.absent if engine.engine in wanted.engines]
    if len(absent) == len(set(wanted.engines)):
        reasons = "; ".join(f"{engine.engine}: {engine.reason}" for engine in absent)
        raise EngineError(
            f"none of the engines can run here: {reasons}",
            hint="moexport doctor lists the engines that can",
        )
    if absent and wanted.engine == ALL:
        names = ", ".join(engine.engine for engine in absent)
        progress.step(f"not measured (the report gives the reasons): {names}")
    else:
        for engine in absent:
            progress.step(f"not measured: {engine.engine}: {engine.reason}")
    threads = threads_for(
        [first], data, request.batches, count=wanted.threads, work=wanted.folder, progress=progress
    )
    # All engines use the same number of threads.
    request = replace(request, threads=threads.count)
    with candidates_of(models, request, progress, ranges) as candidates:
        phased = [in_phases(candidate, data, wanted.tokens) for candidate in candidates]
        yield Prepared(
            candidates=phased,
            data=data,
            request=request,
            absent=selection.absent,
            threads=threads,
            ranges=ranges,
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
    """Returns the number of threads for every engine.

    It is the requested number, the number of an unfinished run in the folder `work`, or the number
    with which the unmodified models are fastest. Raises FeedError if a model rejects the data.
    """
    if count is not None:
        return Threads(count)
    recorded = unfinished(work, "threads", of=models[0].source.path)
    if recorded is not None:
        return msgspec.convert(recorded, Threads, strict=False)
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


def _narrowest_class(item: Model | Bundle) -> Serves:
    """Returns the narrowest class of models (`engines.Serves`) that includes an item."""
    specs = item.inputs if isinstance(item, Model) else item.manifest.inputs
    others = [spec for spec in specs if spec.name != K_INPUT][1:]
    if not others:
        return "one-input"
    # The inputs of a user's own network are all required.
    return "transformers" if any(spec.default is not None for spec in others) else "all"


def fixed_sizes(model: Model, bundles: Sequence[Bundle]) -> dict[str, int]:
    """Returns the sizes of a model's axes that are constants in its bundles, without the batch."""
    shapes = {spec.name: spec.shape for bundle in bundles for spec in bundle.manifest.inputs}
    return {
        axis: size
        for spec in model.inputs
        for axis, size in zip(spec.shape[1:], shapes.get(spec.name, ())[1:], strict=False)
        if isinstance(axis, str) and isinstance(size, int)
    }


def data_of(model: Model, request: BenchRequest, sizes: Mapping[str, int]) -> Labelled:
    """Returns the inputs for measuring a model; those of sequence models come from their plugin.

    Random inputs have `sizes` along the model's dynamic axes.
    """
    benchmark = benchmark_of(model)
    if benchmark is not None and not isinstance(request.data, LabelledData | Streamed):
        return benchmark.data(ids_of(request.data, model), model, request.tokens)
    if request.tokens is not None and benchmark is None:
        raise UsageError(
            f"--tokens {request.tokens}: {model.source.path} is not a transformers language model",
            hint="leave --tokens out: other models take inputs in the shape of the data",
        )
    return labelled(request.data, model, max(request.batches), request.pixels, sizes)


def in_phases(candidate: Candidate, data: Labelled, tokens: int | None) -> Candidate:
    """Returns the candidate, with the phases in which it is timed if it is a sequence model."""
    benchmark = benchmark_of(candidate.model)
    if benchmark is None:
        return candidate
    length = data.head(1).inputs.shape[1]
    return replace(candidate, phases=benchmark.phases(candidate.model, tokens, length))
