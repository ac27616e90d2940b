"""What all demos do with the networks they train: export, verify and measure them."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...bench.data import LabelledData
from ...bench.engines import ONNXRUNTIME, PYTORCH_ALGORITHM_2, PYTORCH_STACKED
from ...bench.journal import Journal
from ...bench.plan import Candidate
from ...bench.prepare import in_phases, threads_for
from ...bench.report.text import rows_table
from ...bench.request import BenchRequest
from ...bench.run import bench
from ...bench.runners.candidates import side_by_side
from ...bench.runners.other_exporters import with_other_exporters
from ...bench.studies import STUDIES
from ...common.console import Progress
from ...common.text import table
from ...common.writing import whole_file, write_text
from ...errors import BundleError, MoexportError
from ...exporter.bundle.bundle import Bundle
from ...exporter.checkpoints.load import load
from ...exporter.export import write_bundle
from ...exporter.job import export_job
from ...exporter.model import Model
from ...exporter.options import ExportOptions
from ...exporter.trace import trace
from ...graphs.targets import Precision, Target
from ..service.request import ServiceOptions

THREADS = 1
"""The number of threads for training: with more, sums are added in a different order, so the same
seed gives a different network."""

ROUND_S = 0.05
"""The seconds of a case's timing round: few, but enough for eight calls of the slowest case."""

SERVICE = "service"
"""The name of the study of service rates."""

SERVED_S = 0.5
"""The seconds of a LoadGen run, enough for about a thousand requests to these networks."""

VERIFIED = 64
"""The number of inputs on which each bundle is compared with PyTorch; the benchmark uses all."""

MARKER = "demo-of-moexport.txt"

VERIFIED_HEADER = ("bundle", "k/n", "lowering", "max |difference|", "verified")


@dataclass(frozen=True, slots=True)
class Exported:
    """A bundle to export: its folder, its k as on the command line, its data, and its precision."""

    folder: str
    k: str
    data: Path
    precision: Precision = "fp32"


@dataclass(frozen=True, slots=True)
class TrainedNetwork:
    """A trained network: its checkpoint, the settings to load it with, and its bundles."""

    name: str
    checkpoint: Path
    bundles: tuple[Exported, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    target: Target = "onnx"

    def load(self) -> Model:
        """Loads the network as `moexport export` does."""
        return load(self.checkpoint, config=dict(self.config))


@dataclass(frozen=True, slots=True)
class Group:
    """Networks that are measured on the same inputs, with a report in the folder `report`.

    The command line reads the inputs from the files that `Exported.data` names. The first network
    is also served if there is a `bound` on its latency.
    """

    report: str
    data: LabelledData
    networks: tuple[TrainedNetwork, ...]
    batches: tuple[int, ...] = (1,)
    ranges: Mapping[str, Any] | None = None
    engines: tuple[str, ...] = (PYTORCH_STACKED, PYTORCH_ALGORITHM_2, ONNXRUNTIME)
    bound: str | None = None


BundleSearch = Callable[[TrainedNetwork, Path, Progress], tuple[Bundle, str]]
"""Writes a network's best bundle to the demo's folder; returns it, and a summary of the search."""


@dataclass(frozen=True, slots=True)
class Demo:
    """A demo: a function that trains its networks, and the parts of its text.

    Networks are measured at each of `ks` if k is an input. In the text, the result of `about` comes
    before the measurements and `remarks` after them. The bundle that `search` finds for the first
    network is measured with its other bundles. `check` raises an error for a missing package.
    """

    command: str
    train: Callable[[Path, Progress], Sequence[Group]]
    ks: Sequence[str] = ()
    about: Callable[[Sequence[Group]], Iterable[str]] = lambda groups: ()
    remarks: Sequence[str] = ()
    search: BundleSearch | None = None
    check: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The files of a demo and the text that the command prints."""

    directory: Path
    report: Path
    text: str


def run_demo(demo: Demo, directory: Path, progress: Progress, *, force: bool) -> Outcome:
    """Trains a demo's networks, then exports, verifies and measures them.

    Raises `BundleError` if `directory` exists, unless it is an earlier demo and `force` is given.
    """
    started = time.monotonic()
    demo.check()
    create_folder(directory, force=force)
    groups = demo.train(directory, progress)
    checked, measured, reports, summaries = [], [], [], []
    for group in groups:
        report = directory / group.report
        models = [network.load() for network in group.networks]
        threads = threads_for(models, group.data, group.batches)
        request = BenchRequest(
            k=demo.ks,
            batch=group.batches,
            engine=group.engines,
            target="ort-cpu",
            round_s=ROUND_S,
            memory=False,  # Measuring it starts a process per row, and the demo should be short.
            data=str(group.networks[0].bundles[0].data),
            threads=threads.count,
            out=report,
            command=f"{demo.command} -o {directory}",
            progress=progress,
        )
        with ExitStack() as stack:
            candidates = []
            for network, model in zip(group.networks, models, strict=True):
                bundles = list(_exported(network, model, directory, progress))
                checked += [verify_row(bundle) for bundle in bundles]
                if demo.search is not None and network is groups[0].networks[0]:
                    found, summary = demo.search(network, directory, progress)
                    bundles.append(found)
                    summaries.append(summary)
                (candidate,) = side_by_side(bundles, request, model, name=network.name)
                with_exporters = stack.enter_context(with_other_exporters(candidate, threads.count))
                candidates.append(in_phases(with_exporters, group.data, None))
            progress.step(f"measuring for {report.name}")
            results = bench(
                candidates,
                group.data,
                request,
                analyses=_in_service(candidates[0], group, request),
                ranges=group.ranges,
                threads=threads,
            )
        measured.append(rows_table(results))
        reports.append(report / "report.html")
    elapsed = f"took {time.monotonic() - started:.0f} s"
    text = (
        table(VERIFIED_HEADER, checked),
        *demo.about(groups),
        *measured,
        *demo.remarks,
        *summaries,
        "\n".join((elapsed, *(f"report: {report}" for report in reports))),
    )
    return Outcome(directory, reports[0], "\n\n".join(text))


def create_folder(directory: Path, *, force: bool) -> None:
    """Creates the demo's folder; overwrites only an earlier demo."""
    marker = directory / MARKER
    if directory.exists() and any(directory.iterdir()):
        if not marker.is_file():
            raise BundleError(
                f"{directory}: the folder exists but is not a demo", hint="choose another -o"
            )
        if not force:
            raise BundleError(
                f"{directory} already contains a demo",
                hint="--force overwrites it; -o chooses a different folder",
            )
    write_text("Everything in this folder was created by `moexport demo`.\n", marker)


def save_data(data: LabelledData, path: Path) -> Path:
    """Writes inputs and labels for the command line; returns the file."""
    arrays = {data.input_name: data.inputs}
    if data.labels is not None and data.label_name is not None:
        arrays[data.label_name] = data.labels
    with whole_file(path) as partial:
        np.savez(partial, **arrays)  # type: ignore[arg-type]  # names as keywords
    return path


def _exported(
    network: TrainedNetwork, model: Model, directory: Path, progress: Progress
) -> Iterator[Bundle]:
    """Yields a network's bundles, each compared with PyTorch on its data; traces only once."""
    traced = None
    for planned in network.bundles:
        progress.step(f"exporting {planned.folder}")
        options = ExportOptions(
            k=planned.k,
            target=network.target,
            precision=planned.precision,
            data=str(planned.data),
            verify_samples=VERIFIED,
            destination=directory / planned.folder,
            force=True,
        )
        job = export_job(model, options)
        is_traced_model = job.model is model  # not if the router's k was changed
        if is_traced_model and traced is None:
            traced = trace(model, opset=options.least_opset, fixed=job.fixed)
        yield write_bundle(job, traced=traced if is_traced_model else None)


def verify_row(bundle: Bundle) -> tuple[str, ...]:
    """Verifies a bundle and returns its row of the table; raises MoexportError if a check fails."""
    checks = list(bundle.verify())
    failed = [check for check in checks if not check.passed]
    if failed:
        raise MoexportError(f"{bundle.path}: {failed[0].name} failed: {failed[0].detail}")
    layer = bundle.manifest.layers[0]
    parity = bundle.manifest.parity
    assert parity is not None
    return (
        bundle.path.name,
        f"{'input' if layer.k is None else layer.k}/{layer.experts}",
        layer.lowering,
        f"{parity['max_abs']:.1e}",
        f"{len(checks)} checks",
    )


def _in_service(candidate: Candidate, group: Group, request: BenchRequest) -> dict[str, Any]:
    """Measures a network's rate within the group's latency bound, with the most and fewest experts.

    Measures nothing if the group has no bound or LoadGen is not installed.
    """
    installed = importlib.util.find_spec("mlperf_loadgen") is not None
    if group.bound is None or SERVICE not in STUDIES or not installed:
        return {}
    ks = [graph.k for graph in candidate.graphs]
    limited = tuple(graph for graph in candidate.graphs if graph.k in (min(ks), max(ks)))
    served = replace(candidate, graphs=limited, engines=())
    request = request.asking(
        ServiceOptions(scenario="server", latency_bound=group.bound, duration=SERVED_S)
    )
    study = STUDIES[SERVICE].begin([served], group.data, request)
    assert study.follow is not None, "services are measured after the rows"
    study.follow(served, {}, Journal(None, {}))
    return {SERVICE: study.findings()}
