"""The page and the Node program of examples/web: Python's values and experts, clear refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
from moexport.bench.results import Accuracy, ModelInfo, Results, Row, write
from moexport.common.latency import summarise
from moexport.docs.sources import ROOT
from moexport.exporter import plan
from moexport.graphs.targets import TARGETS, Precision
from moexport.tests.bench.report import browser
from moexport.tests.command import run
from moexport.tests.recorded import RecordedCase, read_case

WEB = ROOT / "examples" / "web"
CASE = read_case("soft_moe_mnist")
ATOL = 1e-5

pytestmark = pytest.mark.skipif(
    not (WEB / "node_modules" / "onnxruntime-web").is_dir(),
    reason="onnxruntime's npm packages are not installed: make web",
)
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
needs_browser = pytest.mark.skipif(
    browser.missing() is not None, reason=f"Chromium: {browser.missing()}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's folder as its reader has it: with a bundle, a report, and bundles it refuses."""
    folder = tmp_path_factory.mktemp("web")
    for file in WEB.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    (folder / "node_modules").symlink_to(WEB / "node_modules")
    model = moexport.load(CASE.weights, config=CASE.config)
    moexport.export(
        *(model, folder / "bundle"),
        k="input",
        target="ort-web",
        expose_routing=True,
        data=CASE.x,
        # Each lowering, and the integer kernels, by the same trace.
        lowering="grouped,dense,gather,conditional,fused",
    )
    # Only its manifest is read.
    shutil.copytree(folder / "bundle", folder / "engine")
    manifest = folder / "engine" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"ort-web"', '"tensorrt"'), "utf-8")
    rows = [
        Row("pytorch-eager", 16, 16, 1, accuracy=Accuracy(0.99, 1.0, 360)),
        Row("onnxruntime", 4, 16, 1, accuracy=Accuracy(0.957, 0.967, 360)),
    ]
    timed = tuple(replace(row, latency_ms=summarise([[1.0], [1.1]])) for row in rows)
    (folder / "report").mkdir()
    write(Results((ModelInfo("digits"),), timed), folder / "report" / "results.json")
    return folder


@pytest.fixture(scope="module")
def bundle(place: Path) -> moexport.Bundle:
    return moexport.Bundle.open(place / "bundle")


def in_node(
    place: Path, folder: Path, x: np.ndarray, *more: str
) -> subprocess.CompletedProcess[str]:
    x.astype("<f4").tofile(place / "x.f32")
    shape = ",".join(map(str, x.shape))
    return subprocess.run(
        ["node", place / "node.js", folder, place / "x.f32", shape, *more],
        capture_output=True,
        text=True,
        check=False,
    )


def assert_same(
    found: dict[str, Any], bundle: moexport.Bundle, x: np.ndarray, k: int, share: float = 0.0
) -> None:
    """Fails where experts differ, or outputs by more than a share of max|y| and `ATOL`."""
    expected = bundle.session("grouped").run(x, k)
    y = expected["output"][0].ravel()
    atol = ATOL + share * float(np.abs(y).max())
    np.testing.assert_allclose(found["output"], y, atol=atol)
    assert found["experts"] == {"layer": sorted(expected["layer/selected"][0].tolist())}


@needs_node
@pytest.mark.parametrize("runtime", ["onnxruntime-node", "onnxruntime-web"])
def test_node_computes_what_python_does(runtime: str, place: Path, bundle: moexport.Bundle) -> None:
    x = CASE.x[:1]
    done = in_node(place, bundle.path, x, "4", runtime)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert_same(json.loads(done.stdout), bundle, x, 4)


@pytest.mark.slow
@needs_node
def test_every_lowering_runs_in_wasm(place: Path, bundle: moexport.Bundle) -> None:
    program = """
    import * as ort from "onnxruntime-web";
    import { readFile } from "node:fs/promises";
    import { open } from "./bundle.js";
    ort.env.wasm.numThreads = 1;
    const [folder, graphs] = process.argv.slice(2);
    const values = new Float32Array((await readFile("x.f32")).buffer.slice(0));
    const found = {};
    for (const file of graphs.split(",")) {
      const read = async (name) => {
        const bytes = await readFile(`${folder}/${name}`);
        if (name !== "manifest.json") return new Uint8Array(bytes);
        const manifest = JSON.parse(bytes);
        manifest.graphs = manifest.graphs.filter((graph) => graph.file === file);
        return new TextEncoder().encode(JSON.stringify(manifest));
      };
      const bundle = await open(ort, read, { executionProviders: ["wasm"] });
      found[file] = await bundle.run(values, [1, 1, 28, 28], 2);
    }
    console.log(JSON.stringify(found));
    """
    x = CASE.x[:1]
    x.astype("<f4").tofile(place / "x.f32")
    (place / "all.mjs").write_text(program, "utf-8")
    graphs = [graph.file for graph in bundle.manifest.graphs]
    done = subprocess.run(
        ["node", "all.mjs", bundle.path, ",".join(graphs)],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 5
    for each in found.values():
        assert_same(each, bundle, x, 2)


@pytest.mark.slow
@needs_node
@pytest.mark.parametrize(
    ("precision", "case", "k"),
    [
        ("int8", CASE, 4),
        ("int4", read_case("soft_moe_lucidrains"), 2),  # of whole blocks
        ("fp16", CASE, 4),
    ],
)
def test_smaller_weights_run_in_wasm(
    precision: Precision, case: RecordedCase, k: int, place: Path, tmp_path: Path
) -> None:
    model = moexport.load(case.weights, config=case.config)
    small = moexport.export(
        *(model, tmp_path / precision),
        k="input",
        target="ort-web",
        precision=precision,
        lowering="grouped",
        expose_routing=True,
        data=case.x,
    )
    done = in_node(place, small.path, case.x[:1], str(k), "onnxruntime-web")
    assert done.returncode == 0, done.stderr
    # Each runtime's kernel of INT4 weights rounds rows to 8 bits in its own way, in both products.
    assert_same(json.loads(done.stdout), small, case.x[:1], k, 2e-2 if precision == "int4" else 0.0)


@needs_node
@pytest.mark.parametrize(
    ("folder", "k", "said"),
    [
        ("bundle", "0", "k = 0: use a whole number from 1 to 16."),
        ("bundle", "17", "k = 17: use a whole number from 1 to 16."),
        (
            "engine",
            "4",
            "This bundle was made for tensorrt. Export it again with --target ort-web.",
        ),
    ],
)
def test_node_refuses_in_a_sentence(folder: str, k: str, said: str, place: Path) -> None:
    done = in_node(place, place / folder, CASE.x[:1], k)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"error: {said}\n")


def test_weights_that_a_browser_cannot_load_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = replace(TARGETS["ort-web"], most_bytes=10**6)
    monkeypatch.setattr(plan, "TARGETS", {"ort-web": record})
    weights = CASE.weights
    outcome = run("export", weights, "-o", tmp_path / "out", "--target", "ort-web")
    assert outcome.code == 2
    assert (
        "--target ort-web: the weights take 0.00 GB, but this target loads at most" in outcome.error
    )
    assert not (tmp_path / "out").exists()


@contextmanager
def served(place: Path) -> Iterator[str]:
    """Yields the address of a folder, served by the page's own server."""
    sys.path.insert(0, str(WEB))
    try:
        from serve import server  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    running = server(0, place)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}/"
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    with served(place) as found:
        yield found


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


DRAW = """
const canvas = document.getElementById("canvas"), box = canvas.getBoundingClientRect();
const at = (type, x, y) => canvas.dispatchEvent(new PointerEvent(type, { bubbles: true,
  pointerId: 1, buttons: 1, clientX: box.left + x, clientY: box.top + y }));
canvas.setPointerCapture = () => {};
at("pointerdown", 140, 40);
for (let y = 40; y < 240; y += 20) at("pointermove", 140 + (y % 40), y);
at("pointerup", 140, 240);
"""
MOVE = """
window.last = null;
const slider = document.getElementById("k");
slider.value = arguments[0];
slider.dispatchEvent(new Event("input"));
"""
TEXT = "return document.getElementById(arguments[0]).textContent"


@pytest.mark.slow
@needs_browser
def test_a_drawn_digit_has_pythons_class_and_experts_at_every_k(
    window: browser.Browser, address: str, bundle: moexport.Bundle
) -> None:
    window.visit(address)
    assert window.wait("return document.documentElement.dataset.ready"), window.run(TEXT, "problem")
    window.run(DRAW)
    for k in (4, 16, 1):
        window.run(MOVE, k)
        assert window.wait("return window.last && document.querySelector('.chosen')")
        found = window.run("return window.last")
        x = np.array(found["values"], np.float32).reshape(1, 1, 28, 28)
        assert x.max() > 0.5
        assert_same(found, bundle, x, k)
        assert found["ms"] > 0
        assert window.run(TEXT, "answer") == str(int(np.argmax(found["output"])))
        assert window.run(TEXT, "count") == f"{k} of 16"
        chosen = "return [...document.querySelectorAll('.chosen')].map(e => Number(e.textContent))"
        assert window.run(chosen) == found["experts"]["layer"]
        known = "95.7% of 360 test images" if k == 4 else "not in the report"
        assert window.run(TEXT, "accuracy") == known
    assert window.run(TEXT, "problem") == ""
    assert window.run("return crossOriginIsolated")
    assert window.console() == []


WEBGPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan")
"""WebGPU computed by the CPU, where Chromium comes with what that takes."""


@pytest.mark.slow
@needs_browser
def test_webgpu_computes_what_python_does(
    address: str, bundle: moexport.Bundle, tmp_path: Path
) -> None:
    with browser.browser(tmp_path, WEBGPU) as window:
        window.visit(f"{address}?provider=webgpu")
        window.run(
            "window.gpu = null; (navigator.gpu?.requestAdapter() ?? Promise.resolve(null))"
            ".then(found => window.gpu = found ? 'there' : 'none')"
        )
        if window.wait("return window.gpu") != "there":
            pytest.skip("this Chromium has no WebGPU adapter")
        assert window.wait("return document.documentElement.dataset.ready")
        window.run(DRAW)
        window.run(MOVE, 4)
        assert window.wait("return window.last")
        found = window.run("return window.last")
        x = np.array(found["values"], np.float32).reshape(1, 1, 28, 28)
        assert_same(found, bundle, x, 4)
        assert window.run(TEXT, "problem") == ""


@pytest.mark.slow
@needs_browser
def test_the_page_says_what_it_cannot_do(
    window: browser.Browser, address: str, place: Path
) -> None:
    def told(query: str) -> Any:
        window.visit(f"{address}{query}")
        return window.wait("return document.getElementById('problem').textContent")

    assert told("?bundle=engine") == (
        "This bundle was made for tensorrt. Export it again with --target ort-web."
    )
    assert told("?bundle=gone") == (
        "gone/manifest.json was not found (404): put a bundle into gone/."
    )
    window.console()  # the browser itself tells of the missing file
    with window.before_pages("WebAssembly.validate = () => false;"):
        assert "has no WASM SIMD" in told("")
    assert window.console() == []
