"""Calibration of a model: runs its observing graph over a feed and chooses every tensor's range."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...calibration.feeds import Feed, count
from ...calibration.methods import DEFAULT_METHOD, DEFAULT_PERCENTILE, choose
from ...calibration.observe import Observations, observe
from ...calibration.observers import ObservingGraph, observing_graph
from ...calibration.stream import FeedHash, limited, rebatched
from ...calibration.table import METHODS, CalibrationTable, Method, Origin
from ...common.progress import Progress, Silent
from ...common.writing import told
from ...errors import UsageError
from ...graphs.layers.base import MoESpec
from ...graphs.lower import LayerChoice
from ...graphs.lowerings import lowerings_of
from ...graphs.lowerings.base import AnyLowering
from ..bundle.weights import WeightsWriter, write_host, write_layer
from ..fingerprint import fingerprint
from ..inputs import feed_batches
from ..model import Model
from ..options import Kept
from ..plan import resolve_k
from ..trace import trace

OBSERVED_LOWERINGS = {"soft-moe": ("grouped",), "mumoe": ("factorised", "unfactorised")}
"""By kind of layer, the lowerings that compute exactly the rows of the selection, and tap them."""

GRAPH_FILE = "observing.onnx"


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """The options of `calibrate`.

    `samples` is how many inputs of the feed are taken, None for all. `batch` is how many the
    observing graph runs at once, whatever the feed's own batches: it costs memory and saves time,
    and changes a range by no more than the rounding of the model's own arithmetic.
    """

    k: Kept = "n"
    method: Method = DEFAULT_METHOD
    percentile: float = DEFAULT_PERCENTILE
    samples: int | None = None
    batch: int = 16
    renormalize: bool = False

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be meant."""
        if self.k == "input":
            raise UsageError(
                "--k input: ranges are those of the experts that are kept, and this says none",
                hint="--k n observes all experts, and its table serves an export with --k input",
            )
        if self.method not in METHODS:
            raise UsageError(
                f"--method {self.method}: there is no such method",
                hint=f"choose one of: {', '.join(METHODS)}",
            )
        if not 50 < self.percentile <= 100:
            raise UsageError(
                f"--percentile {self.percentile:g}: a share above 50 and up to 100",
                hint="--percentile 99.99 leaves out the outermost 0.01 % of the values",
            )
        for name, value in (("--samples", self.samples), ("--batch", self.batch)):
            if value is not None and value < 1:
                raise UsageError(f"{name} {value}: at least 1", hint=f"leave {name} out")


@dataclass(frozen=True)
class Observed:
    """What a model's tensors were seen to hold, before a method chooses their ranges."""

    seen: Observations
    model: str
    feed: str
    samples: int
    k: dict[str, int]
    renormalize: bool

    def table(self, method: Method, percentile: float = DEFAULT_PERCENTILE) -> CalibrationTable:
        """The table that a method makes of it."""
        return CalibrationTable(
            origin=Origin(
                model=self.model,
                feed=self.feed,
                samples=self.samples,
                k=self.k,
                method=method,
                percentile=percentile if method == "percentile" else None,
                renormalize=self.renormalize,
            ),
            ranges={
                key: choose(histogram, method, percentile)
                for key, histogram in sorted(self.seen.histograms.items())
            },
            peaks=dict(sorted(self.seen.peaks.items())),
            moexport=metadata.version("moexport"),
        )


def calibrate(
    model: Model,
    data: Feed,
    options: CalibrationOptions | None = None,
    *,
    workspace: Path | None = None,
    progress: Progress | None = None,
) -> CalibrationTable:
    """Returns the ranges of a model's tensors over the inputs of a feed.

    The model's weights are written to a temporary folder in `workspace` while it runs, at FP32.
    Raises `FeedError` for inputs that do not fit and `CalibrationError` that names a tensor whose
    values give no range.
    """
    options = options or CalibrationOptions()
    seen = observe_model(model, data, options, workspace=workspace, progress=progress)
    return seen.table(options.method, options.percentile)


def observe_model(
    model: Model,
    data: Feed,
    options: CalibrationOptions,
    *,
    workspace: Path | None = None,
    progress: Progress | None = None,
) -> Observed:
    """Returns what the model's tensors hold over the inputs of a feed, for any method."""
    progress = progress or Silent()
    kept = kept_experts(model, options.k)
    total = count(data, model.input.name)
    if total is not None and options.samples is not None:
        total = min(total, options.samples)
    progress.step("tracing")
    portable = trace(model)
    feed_hash = FeedHash()
    with told(workspace or Path(tempfile.gettempdir())):
        made = tempfile.TemporaryDirectory(prefix=".moexport-calibration-", dir=workspace)
    with made as folder:
        path = Path(folder) / GRAPH_FILE
        progress.step("writing the observing graph")
        graph = _write(model, portable, kept, path, renormalize=options.renormalize)
        progress.step("observing", total=total, unit="inputs")
        inputs = _counted(limited(feed_batches(model, data), options.samples), feed_hash)
        seen = observe(path, graph, _reported(rebatched(inputs, options.batch), progress))
    return Observed(
        seen=seen,
        model=fingerprint(model),
        feed=feed_hash.hexdigest(),
        samples=feed_hash.samples,
        k=kept,
        renormalize=options.renormalize,
    )


def kept_experts(model: Model, k: Kept) -> dict[str, int]:
    """Returns each layer's k for a calibration: all experts where it is chosen at run time."""
    specs = {name: layer.spec for name, layer in model.layers.items()}
    return {
        name: specs[name].experts if kept is None else kept
        for name, kept in resolve_k(k, specs).items()
    }


def feed_fingerprint(model: Model, data: Feed, samples: int | None) -> tuple[str, int]:
    """Returns the hash of a feed's first `samples` inputs, all for None, and how many came."""
    feed_hash = FeedHash()
    for _ in _counted(limited(feed_batches(model, data), samples), feed_hash):
        pass
    return feed_hash.hexdigest(), feed_hash.samples


def _write(
    model: Model, portable: ir.Model, kept: dict[str, int], path: Path, *, renormalize: bool
) -> ObservingGraph:
    with WeightsWriter(path.parent, sources=model.source.mapped) as writer:
        write_host(writer, portable)
        choices = {
            name: LayerChoice(
                spec=layer.spec,
                tensors=write_layer(writer, name, layer),
                lowering=_observed_lowering(layer.spec),
                kept=kept[name],
                renormalize=renormalize,
            )
            for name, layer in model.layers.items()
        }
    graph = observing_graph(portable, choices)
    ir.save(graph.model, path)
    return graph


def _observed_lowering(spec: MoESpec) -> AnyLowering:
    """The lowering of an observing graph that serves a layer."""
    known = lowerings_of(spec.kind)
    serving = (known[name] for name in OBSERVED_LOWERINGS[spec.kind])
    return next(lowering for lowering in serving if lowering.unable(spec) is None)


def _counted(batches: Iterator[np.ndarray], feed_hash: FeedHash) -> Iterator[np.ndarray]:
    for batch in batches:
        feed_hash.update(batch)
        yield batch


def _reported(batches: Iterator[np.ndarray], progress: Progress) -> Iterator[np.ndarray]:
    for batch in batches:
        yield batch
        progress.advance(len(batch))
