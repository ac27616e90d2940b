"""Builds that run at once share a bundle, a cache and a timing cache without harm."""

from __future__ import annotations

import hashlib
import multiprocessing
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from moexport.errors import EngineError
from moexport.exporter.bundle.manifest import Manifest
from moexport.exporter.tensorrt.records import engines_of
from moexport.tests.exporter.tensorrt.at_once import KEY, add_engine, keep_and_take
from moexport.tests.exporter.tensorrt.engines import compiled as engine_of
from moexport.tests.exporter.tensorrt.engines import leftovers, needs_rtx
from moexport.tests.graphs.lowerings.test_mumoe import spec_of
from moexport.tests.graphs.mumoe_layers import graph, random_layer, saved


def together(work: Callable[[Path, int], None], folder: Path) -> None:
    """Runs a function in two processes at once; both must end well."""
    start = multiprocessing.get_context("spawn").Process
    processes = [start(target=work, args=(folder, number)) for number in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * len(processes)


@pytest.mark.slow
def test_engines_that_are_added_at_once_are_all_listed(exported: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(exported, tmp_path / "bundle"))
    before = Manifest.read(bundle)
    together(add_engine, bundle)
    manifest = Manifest.read(bundle)
    assert {each.file for each in engines_of(manifest)} == {
        "engine-tensorrt-rtx-1.plan",
        "engine-tensorrt-rtx-2.plan",
    }
    assert manifest.files.keys() > before.files.keys()
    for name, known in manifest.files.items():
        assert hashlib.sha256((bundle / name).read_bytes()).hexdigest() == known.sha256
    assert leftovers(bundle) == []


def test_a_cache_that_two_builds_fill_at_once_stays_whole(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    together(keep_and_take, folder)
    assert {path.name for path in folder.iterdir()} == {f"{KEY}.plan", f"{KEY}.json"}


def compiled(folder: Path, name: str, timings: Path | None) -> bytes:
    """The engine of a small graph, compiled in a process of its own."""
    return engine_of(folder / "layer.onnx", folder / f"{name}.plan", timing_cache=timings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small graph."""
    return saved(graph(random_layer(spec_of("cp", (8,)))), tmp_path).parent


@needs_rtx
@pytest.mark.skipif(sys.platform == "win32", reason="holds the lock as Unix does")
def test_two_builds_take_turns_at_one_timing_cache(folder: Path) -> None:
    """TensorRT-RTX times nothing, and reads and writes the file as TensorRT does."""
    import fcntl

    timings = folder / "kernels.cache"
    with ThreadPoolExecutor(2) as pool, (folder / "kernels.cache.lock").open("wb") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        builds = [pool.submit(compiled, folder, name, timings) for name in ("1", "2")]
        time.sleep(2.0)  # several times what a build takes
        assert not any(build.done() for build in builds)
        fcntl.lockf(held, fcntl.LOCK_UN)
        first, second = (build.result(60) for build in builds)
    assert first == second == compiled(folder, "alone", None)
    whole = timings.read_bytes()
    assert len(whole) > 0
    assert compiled(folder, "after", timings) == first  # it is taken: a damaged one is an error
    assert timings.read_bytes() == whole
    assert {path.suffix for path in folder.iterdir()} == {".onnx", ".plan", ".cache", ".lock"}


@needs_rtx
def test_a_timing_cache_that_is_damaged_is_an_error_and_stays_as_it_is(folder: Path) -> None:
    timings = folder / "kernels.cache"
    compiled(folder, "first", timings)
    damaged = timings.read_bytes()[:-10]
    timings.write_bytes(damaged)
    with pytest.raises(EngineError, match=r"the timing cache cannot be used.*is damaged") as found:
        compiled(folder, "second", timings)
    assert "name a new file with --timing-cache" in (found.value.hint or "")
    assert timings.read_bytes() == damaged
    assert not (folder / "second.plan").exists()
