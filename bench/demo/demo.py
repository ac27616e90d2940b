"""`moexport demo`: the whole job on real data, from training to the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...common.console import Progress
from ...common.text import table
from ...common.timing import Protocol
from ...common.writing import check_folder, write_text
from ...errors import BundleError, MoexportError
from ...exporter.bundle.bundle import Bundle
from ...exporter.checkpoints.load import load
from ...exporter.export import export
from ...exporter.job import export_job
from ...exporter.options import ExportOptions, PrecisionOptions, parse_k
from ...graphs.choices import Precision
from ...graphs.targets import Target
from ..plan import Candidate, Settings
from ..report.text import rows_table
from ..run import bench
from ..runners.candidates import Sweep, from_bundle
from . import digits

KEPT = {"n": "n", "n2": "1/2", "n4": "1/4", "n8": "1/8"}
"""Every k that is exported, by how its bundle is called."""

NETWORKS: tuple[tuple[digits.Training, Mapping[Precision, Sequence[str]]], ...] = (
    (
        digits.Training(
            128, hidden=64, normalise=True, scale=16.0, epochs=6, batch=64, learning_rate=4e-3
        ),
        {"fp32": ("n", "n2", "n4", "n8"), "int8": ("n", "n4", "n8")},
    ),
    (digits.Training(16), {"fp32": ("n", "n2", "n4")}),
)
"""What is trained, and the k that are exported in each precision.

Of 128 experts whose weights take the time, an eighth does. The paper's own network with 16 experts
is the counterexample: all of them are needed, and so small that fewer save nothing.
"""

THREADS = 1
"""Of every engine: these networks are too small to share out, and sharing makes times erratic."""

MARKER = "demo-of-moexport.txt"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo leaves behind, and the text that says so."""

    directory: Path
    report: Path
    text: str


def run_demo(directory: Path, progress: Progress, *, force: bool = False) -> Outcome:
    """Trains, exports, verifies and measures networks on handwritten digits, for several k each.

    Raises `BundleError` when `directory` exists, unless it is an earlier demo and `force` is given.
    """
    started = time.monotonic()
    claim(directory, force=force)
    data = digits.load_digits()
    test, calibration = directory / "digits-test.npz", directory / "digits-train.npz"
    for file, part in ((test, data.test), (calibration, data.train)):
        assert part.labels is not None
        np.savez(file, input=part.inputs, label=part.labels)
    checked: list[tuple[str, ...]] = []
    candidates: list[Candidate] = []
    for training, asked in NETWORKS:
        name = f"digits-n{training.experts}"
        progress.step(f"training n = {training.experts} on {len(data.train)} digits")
        checkpoint = directory / f"{name}.pt"
        digits.save(digits.train(training, data.train), checkpoint)
        bundles = [
            exported(
                checkpoint,
                directory / "-".join([name, f"k{label}", *([] if p == "fp32" else [p])]),
                KEPT[label],
                test if p == "fp32" else calibration,
                progress,
                target="ort-cpu",
                precision=p,
            )
            for p, labels in asked.items()
            for label in labels
        ]
        checked += [verified(bundle) for bundle in bundles]
        candidates.append(_side_by_side(bundles, f"digits, n = {training.experts}"))
    progress.step("measuring")
    results = bench(
        candidates,
        data.test,
        Settings(
            batches=(1, 32),
            protocol=Protocol(inputs=8, round_s=0.1),
            threads=THREADS,
            memory=False,  # It takes a process for every row, and the demo is to be short.
            calibration=str(calibration),
        ),
        out=directory / "report",
        command=f"moexport demo -o {directory}",
        progress=progress,
    )
    report = directory / "report" / "report.html"
    text = "\n\n".join(
        (
            table(VERIFIED_HEADER, checked),
            rows_table(results),
            f"took {time.monotonic() - started:.0f} s\nreport: {report}",
        )
    )
    return Outcome(directory, report, text)


VERIFIED_HEADER = ("bundle", "k/n", "lowering", "max |difference|", "verified")


def claim(directory: Path, *, force: bool) -> None:
    """Makes the demo's folder; only an earlier demo is ever written over."""
    marker = directory / MARKER
    check_folder(directory)
    if directory.exists() and any(directory.iterdir()):
        if not marker.is_file():
            raise BundleError(
                f"{directory}: the folder exists and is not a demo", hint="choose another -o"
            )
        if not force:
            raise BundleError(
                f"{directory}: a demo exists there", hint="--force writes over it, -o elsewhere"
            )
    write_text("Everything here was made by `moexport demo`.\n", marker)


def exported(
    checkpoint: Path,
    out: Path,
    kept: str,
    data: Path,
    progress: Progress,
    config: Mapping[str, Any] | None = None,
    *,
    target: Target = "onnx",
    precision: Precision = "fp32",
) -> Bundle:
    """Returns the bundle of a checkpoint with k = `kept`, compared with PyTorch on the data."""
    progress.step(f"exporting {out.name}")
    model = load(checkpoint, config=dict(config or {}))
    options = ExportOptions(
        k=parse_k(kept),
        target=target,
        precision=PrecisionOptions(precision),
    )
    return export(export_job(model, options, destination=out, data=str(data), force=True))


def verified(bundle: Bundle) -> tuple[str, ...]:
    """Returns a bundle's line under `VERIFIED_HEADER`; raises MoexportError where a check fails."""
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


def _side_by_side(bundles: list[Bundle], name: str) -> Candidate:
    """The bundles of one network, one k each, as one candidate with all ks."""
    asked = Sweep(ks=(), threads=THREADS)
    candidates = [from_bundle(bundle, asked) for bundle in bundles]
    return replace(
        candidates[0],
        name=name,
        ks=tuple(dict.fromkeys(k for candidate in candidates for k in candidate.ks)),
        graphs=tuple(graph for candidate in candidates for graph in candidate.graphs),
    )
