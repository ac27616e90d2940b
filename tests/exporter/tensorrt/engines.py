"""Exports and builds through the command line, and what came of it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from moexport.common.console import Silent
from moexport.common.files import sha256
from moexport.exporter.bundle.manifest import FileRecord, Manifest
from moexport.exporter.tensorrt.backends import TENSORRT_RTX, backend_named
from moexport.exporter.tensorrt.build import build_engine
from moexport.exporter.tensorrt.options import EngineOptions
from moexport.exporter.tensorrt.profiles import Profile
from moexport.exporter.tensorrt.records import EnginePlan, EngineRecord, add_to_bundle
from moexport.tests.command import Outcome, run
from moexport.tests.recorded import read_case

CARD = ("--compute-capability", "8.9")

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None
    or importlib.util.find_spec("polygraphy") is None,
    reason="TensorRT-RTX is not installed: it comes with the extra rtx",
)


def export(name: str, folder: Path, *options: str, target: str = "tensorrt-rtx") -> Path:
    """The bundle of a recorded case without engines, fast to make: nothing is compared."""
    case = read_case(name)
    config = folder / "config.json"
    config.write_text(json.dumps(case.config))
    outcome = run(
        *("export", case.weights, "--config", config, "-o", folder / "out", "--target", target),
        *("--no-engine", "--no-verify"),
        *options,
    )
    assert outcome.code == 0, outcome.err
    return folder / "out"


def build(bundle: Path, *options: str | Path) -> list[dict[str, Any]]:
    """The records of the engines that `moexport build` compiles into a bundle."""
    outcome = run("build", bundle, *CARD, "--json", *options)
    assert outcome.code == 0, outcome.err
    records: list[dict[str, Any]] = json.loads(outcome.out)
    manifest = json.loads((bundle / "manifest.json").read_text())
    for record in records:
        assert record in manifest["engines"]
        file = manifest["files"][record["file"]]
        assert (bundle / record["file"]).stat().st_size == file["bytes"] > 0
    assert leftovers(bundle) == []
    return records


def compiled(model: Path, output: Path, **options: Any) -> bytes:
    """The engine of a graph of one layer, compiled in a process of its own."""
    plan = EnginePlan(
        graph=model.name,
        file=output.name,
        backend=TENSORRT_RTX,
        profiles=(Profile("x", (1, 1, 10), (2, 4, 10), (4, 8, 10)),),
        cards=("8.9",),
        options=EngineOptions(**options),
    )
    build_engine(plan, model.parent, output, Silent())
    return output.read_bytes()


def refused(bundle: Path, *options: str | Path) -> Outcome:
    """The outcome of a build that ends with an error and leaves the bundle as it was."""
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    outcome = run("build", bundle, *options)
    assert outcome.code in (1, 2), outcome.out
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert "defect" not in outcome.err
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
    return outcome


def leftovers(folder: Path) -> list[str]:
    """Names of files and folders that only an unfinished build would leave."""
    return [path.name for path in folder.rglob("*") if path.name.startswith(".")]


def made(record: EngineRecord, files: Mapping[str, FileRecord]) -> EnginePlan:
    """An engine as a build leaves it, with its files."""
    return EnginePlan(
        graph=record.graph,
        file=record.file,
        backend=backend_named(record.flavour),
        profiles=tuple(record.ranges),
        record=record,
        files=files,
    )


def with_plan(bundle: Path, **more: Any) -> Path:
    """Lists an engine of TensorRT's in a bundle, as `build` does; its file holds no engine."""
    graph = Manifest.read(bundle).graphs[0]
    staged = bundle.parent / "staged"
    staged.mkdir()
    names = ("engine-tensorrt.plan", "engine-tensorrt.layers.json")
    for name in names:
        (staged / name).write_bytes(name.encode())
    facts: dict[str, Any] = {
        "file": names[0],
        "graph": graph.file,
        "flavour": "tensorrt",
        "version": "10.16.1",
        "compute_capabilities": ["8.9"],
        "device": None,
        "precision": {},
        "options": {},
        "settings": {"outputs": ["output", *graph.selected.values()]},
        "layers": names[1],
        "key": "",
        "seconds": 1.0,
        "peak_memory_bytes": 1,
    }
    record = EngineRecord(**facts | more)
    files = {n: FileRecord(sha256(staged / n), (staged / n).stat().st_size) for n in names}
    add_to_bundle(bundle, [made(record, files)], staged)
    return bundle
