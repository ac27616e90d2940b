"""Calibrates a model: runs its observing graph over a feed and chooses every tensor's range."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import islice
from pathlib import Path

import onnx_ir as ir

from ...calibration.methods import DEFAULT_PERCENTILE, choose
from ...calibration.observers import Observations, ObservingGraph, observe, observing_graph
from ...calibration.table import CalibrationTable, Origin, check_table_path
from ...common.console import Progress, Silent
from ...common.writing import made_folder, output_errors, scratch_folder
from ...data.batches import Feed, Fields, limited, rebatched, row_count, rows_between
from ...data.feeds import FeedHash, count
from ...errors import CalibrationError
from ...graphs.lowerings import lowerings_of
from ...graphs.lowerings.base import LayerPlan
from ...graphs.sizes import BATCH, TRACED_BATCH
from ...graphs.targets import Method
from ..bundle.weights import WeightsWriter, write_backbone, write_layer
from ..inputs import feed_batches
from ..model import Model, fingerprint
from ..requests import CalibrateRequest
from ..session import SessionOptions, graph_call
from ..trace import trace, valid_sizes

STANDARD = "onnx"
"""The target of observing graphs: standard ops, which ONNX Runtime has."""

GRAPH_FILE = "observing.onnx"


@dataclass(frozen=True)
class CalibrationJob:
    """A checked calibration (`exporter.job` creates it); `k` is the number of kept experts.

    `fixed` are the sizes of axes that are constants of the graph. A batch of fixed size runs as a
    whole, because a layer's result may depend on all of it.
    """

    model: Model
    data: Feed
    k: Mapping[str, int]
    options: CalibrateRequest
    fixed: Mapping[str, int] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """The number of inputs to run at once: whole groups of those that are computed together."""
        group = self.model.batch_of
        return self.fixed.get(BATCH) or -(-self.options.batch // group) * group

    def inputs(self, digest: FeedHash) -> Iterator[Fields]:
        """Yields the inputs of the feed, up to the limit, and adds them to a hash."""
        for batch in limited(feed_batches(self.model, self.data), self.options.samples):
            digest.update(*batch.values())
            yield batch

    def full_origin(self) -> Origin:
        """Returns the origin of a table of this job; reads all inputs."""
        digest = FeedHash()
        for _ in self.inputs(digest):
            pass
        return self.origin(digest)

    def origin(self, digest: FeedHash) -> Origin:
        options = self.options
        return Origin(
            model=fingerprint(self.model),
            feed=digest.hexdigest(),
            samples=digest.samples,
            k=self.k,
            method=options.method,
            percentile=options.share if options.method == "percentile" else None,
            renormalize=options.renormalize,
        )


@dataclass(frozen=True)
class Observed:
    """Observations of a model's tensors, from which a method chooses ranges."""

    observations: Observations
    origin: Origin

    def table(self, method: Method, percentile: float = DEFAULT_PERCENTILE) -> CalibrationTable:
        share = percentile if method == "percentile" else None
        return CalibrationTable(
            origin=replace(self.origin, method=method, percentile=share),
            ranges={
                key: choose(histogram, method, percentile)
                for key, histogram in sorted(self.observations.histograms.items())
            },
            peaks=dict(sorted(self.observations.peaks.items())),
            moexport=metadata.version("moexport"),
        )


def find_ranges(
    job: CalibrationJob,
    *,
    workspace: Path | None = None,
    progress: Progress | None = None,
    traced: ir.Model | None = None,
) -> CalibrationTable:
    """Returns the ranges of a model's tensors over the inputs of a feed.

    `traced` is the model's trace for the job's sizes, if there is one. Raises `CalibrationError`
    naming a tensor whose values give no range, and what `observe_model` raises.
    """
    with job.model.source.reporting_changes():
        observed = observe_model(job, workspace=workspace, progress=progress, traced=traced)
        return observed.table(job.options.method, job.options.share)


def observe_model(
    job: CalibrationJob,
    share: tuple[int, int] | None = None,
    *,
    workspace: Path | None = None,
    progress: Progress | None = None,
    traced: ir.Model | None = None,
) -> Observed:
    """Returns observations of the model's tensors over the inputs of a feed, for any method.

    With a `share` (i, s) only every s-th batch is observed, starting with the i-th; the sum over
    all shares equals the whole, and the origin is that of all inputs, which are read in any case.
    While it runs, the model's FP32 weights are in a temporary folder in `workspace`. Raises
    `FeedError` for inputs that do not fit and, without a `share`, `CalibrationError` naming a
    tensor without a range.
    """
    progress = progress or Silent()
    total = count(job.data, job.model.input.name)
    if total is not None and job.options.samples is not None:
        total = min(total, job.options.samples)
    if traced is None:
        progress.step("tracing")
        traced = trace(job.model, fixed=job.fixed, sizes={BATCH: job.batch})
    feed_hash = FeedHash()
    with scratch_folder("calibration", workspace) as folder:
        path = folder / GRAPH_FILE
        progress.step("writing the observing graph")
        with output_errors(folder.parent):  # the system's error for a full disk names no file
            graph = _write(job, traced.clone(), path)
        progress.step("observing", total=total, unit="inputs")
        group = job.fixed.get(BATCH, job.model.batch_of)
        smallest, _ = valid_sizes(traced).between(BATCH)
        # Inputs that are computed together are observed together.
        complete = (
            rows_between(batch, 0, row_count(batch) // group * group)
            for batch in rebatched(job.inputs(feed_hash), job.batch)
            if row_count(batch) >= max(group, smallest if smallest > TRACED_BATCH else 1)
        )
        # Pre-packing would copy every weight, and so double the memory.
        run = graph_call(path, SessionOptions(prepack=False))
        first, step = share or (0, 1)
        observations = observe(run, graph, islice(_indexed(complete, progress), first, None, step))
        if total is None:  # the number was unknown before
            progress.step(f"the feed has {feed_hash.samples} inputs")
    if share is None:
        observations.check()
    return Observed(observations=observations, origin=job.origin(feed_hash))


def _write(job: CalibrationJob, traced: ir.Model, path: Path) -> ObservingGraph:
    with WeightsWriter(path.parent, reading=job.model.source.reading()) as writer:
        write_backbone(writer, traced)
        layers = {}
        for name, layer in job.model.layers.items():
            lowering = next(
                lowering
                for lowering in lowerings_of(layer.spec.kind).values()
                if lowering.observable and lowering.unable(layer.spec) is None
            )
            plan = LayerPlan(layer.spec, job.k[name], job.batch, 1, chosen=lowering)
            layers[name] = plan.to_layer(
                write_layer(writer, name, layer),
                target=STANDARD,
                renormalize=job.options.renormalize,
            )
    graph = observing_graph(traced, layers)
    ir.save(graph.model, path)
    return graph


def _indexed(batches: Iterator[Fields], progress: Progress) -> Iterator[tuple[int, Fields]]:
    done = 0
    for batch in batches:
        yield done, batch
        done += row_count(batch)
        progress.advance(row_count(batch))


CALIBRATE_AGAIN = "calibrate again: `moexport calibrate MODEL --data FEED -o {path}`"


def ensure_table(
    path: Path,
    origin: Callable[[], Origin],
    make: Callable[[], CalibrationTable],
    *,
    force: bool,
    progress: Progress | None,
) -> CalibrationTable:
    """Returns the table at `path`, which `make` creates unless it exists.

    An existing table is used if its origin is the same: model, feed, k and method. Otherwise raises
    `CalibrationError` naming the difference, unless `force` replaces the table; other files are
    never replaced.
    """
    progress = progress or Silent()
    check_table_path(path)
    if path.exists() and not force:
        table = CalibrationTable.read(path)
        progress.step("comparing with the existing table")
        reason = _difference(table.origin, origin())
        if reason is not None:
            raise CalibrationError(
                f"{path} is a calibration table for {reason}",
                hint="--force replaces it, -o writes elsewhere",
            )
        progress.step(f"{path} is up to date: same model, feed, k and method")
        return table
    with made_folder(path.absolute().parent):
        table = make()
        table.write(path)
    return table


def _difference(existing: Origin, requested: Origin) -> str | None:
    if existing.model != requested.model:
        return "another model, or this one with other weights, configuration or edits"
    if (existing.feed, existing.samples) != (requested.feed, requested.samples):
        return f"another feed ({existing.samples} inputs)"
    if dict(existing.k) != dict(requested.k):
        return f"k = {_k_text(existing.k)}, not {_k_text(requested.k)}"
    if (existing.method, existing.percentile) != (requested.method, requested.percentile):
        return f"the method {_method_text(existing)}, not {_method_text(requested)}"
    if existing.renormalize != requested.renormalize:
        return f"the model {renormalize_text(existing)}"
    return None


def _k_text(k: Mapping[str, int]) -> str:
    values = list(k.values())
    return str(values[0]) if len(set(values)) == 1 else ",".join(map(str, values))


def _method_text(origin: Origin) -> str:
    return origin.method if origin.percentile is None else f"{origin.method} {origin.percentile:g}"


def renormalize_text(origin: Origin) -> str:
    """Returns the option that a table was calibrated with or without, for a message."""
    return "with --renormalize" if origin.renormalize else "without --renormalize"
