"""`moexport demo`: the whole workflow on real data, from training to the report."""

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
from ...common.threads import with_threads
from ...common.writing import check_folder, whole_file, write_text
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
from . import digits

THREADS = 1
"""The number of threads for training: with more, sums are added in another order, and the same seed
gives another network."""

ROUND_S = 0.05
"""The length of a timing round of a case: short, but at least eight calls of the slowest."""

SERVICE = "service"
"""The study of service rates."""

SERVED_S = 0.5
"""The length of a LoadGen run: about a thousand requests for these networks."""

VERIFIED = 64
"""The number of inputs on which each bundle is compared with PyTorch; the benchmark uses all."""

MARKER = "demo-of-moexport.txt"

VERIFIED_HEADER = ("bundle", "k/n", "lowering", "max |difference|", "verified")


@dataclass(frozen=True, slots=True)
class Exported:
    """A bundle to export: its folder, its k as on the command line, and its precision."""

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

    The command line reads the inputs from files, which `Exported.data` names. The first network is
    also served if there is a `bound` of its latency.
    """

    report: str
    data: LabelledData
    networks: tuple[TrainedNetwork, ...]
    batches: tuple[int, ...] = (1,)
    ranges: Mapping[str, Any] | None = None
    engines: tuple[str, ...] = (PYTORCH_STACKED, PYTORCH_ALGORITHM_2, ONNXRUNTIME)
    bound: str | None = None


BundleSearch = Callable[[TrainedNetwork, Path], tuple[Bundle, str]]
"""Searches for a network's best bundle and writes it to the demo's folder; describes the result."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The files of a demo, and the text that the command prints."""

    directory: Path
    report: Path
    text: str


def run_job(
    directory: Path,
    progress: Progress,
    train: Callable[[Path, Progress], Sequence[Group]],
    *,
    force: bool,
    command: str,
    ks: Sequence[str] = (),
    about: Callable[[Sequence[Group]], Iterable[str]] = lambda groups: (),
    remarks: Sequence[str] = (),
    search: BundleSearch | None = None,
) -> Outcome:
    """Trains networks; exports, verifies and measures them, at each of `ks` if k is an input.

    In the text, the result of `about` precedes the measurements and `remarks` follow them. The
    bundle that `search` finds for the first network is measured with its other bundles. Raises
    `BundleError` if `directory` exists, unless it is an earlier demo and `force` is given.
    """
    started = time.monotonic()
    claim(directory, force=force)
    groups = train(directory, progress)
    checked, measured, reports, ends = [], [], [], []
    for group in groups:
        request = BenchRequest(
            k=ks,
            batch=group.batches,
            engine=group.engines,
            target="ort-cpu",
            round_s=ROUND_S,
            memory=False,  # Measuring it starts a process per row, and the demo should be short.
            data=str(group.networks[0].bundles[0].data),
        )
        report = directory / group.report
        loaded = [network.load() for network in group.networks]
        threads = threads_for(loaded, group.data, group.batches)
        request = replace(request, threads=threads.count)
        with ExitStack() as stack:
            candidates = []
            for network in group.networks:
                bundles = list(_exported(network, directory, progress))
                checked += [verified(bundle) for bundle in bundles]
                if search is not None and network is groups[0].networks[0]:
                    found, summary = search(network, directory)
                    bundles.append(found)
                    ends.append(summary)
                (own,) = side_by_side(bundles, request, network.load(), name=network.name)
                both = stack.enter_context(with_other_exporters(own, threads.count))
                candidates.append(in_phases(both, group.data, None))
            request = replace(
                request, out=report, command=f"{command} -o {directory}", progress=progress
            )
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
    took = f"took {time.monotonic() - started:.0f} s"
    text = (
        table(VERIFIED_HEADER, checked),
        *about(groups),
        *measured,
        *remarks,
        *ends,
        "\n".join((took, *(f"report: {report}" for report in reports))),
    )
    return Outcome(directory, reports[0], "\n\n".join(text))


def claim(directory: Path, *, force: bool) -> None:
    """Makes the demo's folder; overwrites only an earlier demo."""
    marker = directory / MARKER
    check_folder(directory)
    if directory.exists() and any(directory.iterdir()):
        if not marker.is_file():
            raise BundleError(
                f"{directory}: the folder exists but is not a demo", hint="choose another -o"
            )
        if not force:
            raise BundleError(
                f"{directory} already contains a demo",
                hint="--force overwrites it; -o names another folder",
            )
    write_text("Everything here was made by `moexport demo`.\n", marker)


def saved(data: LabelledData, path: Path) -> Path:
    """Writes inputs and labels for the command line; returns the file."""
    arrays = {data.input_name: data.inputs}
    if data.labels is not None and data.label_name is not None:
        arrays[data.label_name] = data.labels
    with whole_file(path) as partial:
        np.savez(partial, **arrays)  # type: ignore[arg-type]  # names as keywords
    return path


def _exported(network: TrainedNetwork, directory: Path, progress: Progress) -> Iterator[Bundle]:
    """Yields a network's bundles, each compared with PyTorch on its data; traces it only once."""
    model, traced = network.load(), None
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
        same = job.model is model  # with another k of a router, the network is another
        if same and traced is None:
            traced = trace(model, opset=options.least_opset, fixed=job.fixed)
        yield write_bundle(job, traced=traced if same else None)


def verified(bundle: Bundle) -> tuple[str, ...]:
    """Verifies a bundle; returns its row of the table, or raises MoexportError."""
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
    """Measures a network's rate within the group's latency bound, with all experts and the fewest.

    Returns nothing if the group has no bound or LoadGen is not installed.
    """
    if group.bound is None or SERVICE not in STUDIES:
        return {}
    if importlib.util.find_spec("mlperf_loadgen") is None:
        return {}
    ks = [graph.k for graph in candidate.graphs]
    few = tuple(graph for graph in candidate.graphs if graph.k in (min(ks), max(ks)))
    served = replace(candidate, graphs=few, engines=())
    asked = request.asking(
        ServiceOptions(scenario="server", latency_bound=group.bound, duration=SERVED_S)
    )
    study = STUDIES[SERVICE].begin([served], group.data, asked)
    assert study.follow is not None, "services are measured after the rows"
    study.follow(served, {}, Journal(None, {}))
    return {SERVICE: study.findings()}


KEPT = {"n": "n", "n2": "1/2", "n4": "1/4", "n8": "1/8"}
"""The exported k, by the ending of the bundle's name."""

NETWORKS: tuple[tuple[digits.Training, Mapping[Precision, Sequence[str]]], ...] = (
    (
        digits.Training(
            128, hidden=64, normalise=True, scale=16.0, epochs=12, batch=64, learning_rate=2e-3
        ),
        {"fp32": ("n", "n2", "n4", "n8"), "int8": ("n", "n4", "n8")},
    ),
    (digits.Training(16), {"fp32": ("n", "n2", "n4")}),
)
"""The networks to train, and the k to export in each precision. With 128 experts, weights dominate
the time, and an eighth of the experts is enough. The paper's own network with 16 experts is the
counterexample: it needs all of them, and they are so small that fewer save no time."""


TEST_FILE = "digits-test.npz"
HELD_OUT = 0.5
"""The share of digits held out: 899 images that no network is trained on. The report judges the
kept accuracy by the lower end of an interval. With 360 images this is at most 98.9%, so no smaller
k could be proven to keep 99%. Shifted copies of images do not help, because an interval assumes
independent images."""


def run_demo(
    directory: Path, progress: Progress, *, force: bool = False, search: BundleSearch | None = None
) -> Outcome:
    """Trains, exports, verifies and measures networks on handwritten digits, for several k each.

    The bundle that `search` finds for the first network is measured with its other bundles. Raises
    `BundleError` if `directory` exists, unless it is an earlier demo and `force` is given.
    """
    return run_job(
        directory, progress, _trained, force=force, command="moexport demo", search=search
    )


def _trained(directory: Path, progress: Progress) -> list[Group]:
    data = digits.load_digits(test_share=HELD_OUT)
    test = saved(data.test, directory / TEST_FILE)
    calibration = saved(data.train, directory / "digits-train.npz")
    networks = []
    for training, exports in NETWORKS:
        n = training.experts
        progress.step(f"training n = {n} on {len(data.train)} digits")
        checkpoint = directory / f"digits-n{n}.pt"
        with with_threads(THREADS):
            digits.save(digits.train(training, data.train), checkpoint)
        bundles = [
            Exported(
                f"digits-n{n}-k{label}" + ("" if precision == "fp32" else f"-{precision}"),
                KEPT[label],
                test if precision == "fp32" else calibration,
                precision,
            )
            for precision, labels in exports.items()
            for label in labels
        ]
        networks.append(
            TrainedNetwork(f"digits, n = {n}", checkpoint, tuple(bundles), target="ort-cpu")
        )
    return [
        Group(
            report="report",
            data=data.test,
            networks=tuple(networks),
            batches=(1, 32),
            ranges={"text": str(calibration), "held_out": 0, "feed": str(calibration)},
            bound="20ms",
        )
    ]
