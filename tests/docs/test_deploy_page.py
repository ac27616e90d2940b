"""The page on running an exported model: its blocks run, and what it says of ports is so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import moexport
import numpy as np
import onnxruntime
import pytest
from moexport.bench.engines import KINDS
from moexport.docs.sources import ROOT
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.families import FAMILIES
from moexport.exporter.model import TensorSpec
from moexport.tests.docs.documents import SITE, Block, blocks
from moexport.tests.docs.test_engine_pages import outcomes
from moexport.tests.recorded import DATA, MUMOE, SOFT_MOE, read_case

PAGE = ROOT / "docs" / "deploy.md"
RUN = (PAGE, SITE["openvino.md"], SITE["triton.md"])
"""Pages that are followed one after the other: the later ones use bundles of the first."""
ROW = re.compile(r"\| `([\w-]+)` \| `(\w+)` (\w+) \(([^)]*)\) \| `(\w+)` (\w+) \(([^)]*)\) \|")
TRITON = {"float32": "TYPE_FP32", "int64": "TYPE_INT64"}


def typed() -> list[Block]:
    return [block for page in RUN for block in blocks(page)]


@pytest.mark.slow
def test_the_page_runs_and_its_triton_configuration_is_that_of_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = DATA / "soft_moe_vit"  # a ViT of width 48, which 12 heads divide
    shutil.copy(case / "weights.pt", tmp_path / "vit.pt")
    x = np.load(case / "io.npz")["x"]
    np.savez(tmp_path / "test.npz", input=x)
    monkeypatch.chdir(tmp_path)
    configuration = openvino = ""
    for block in typed():
        if "openvino" in block.text and KINDS["openvino"].missing() is not None:
            continue
        if block.language == "bash":
            done = outcomes(block)
            assert [outcome.code for outcome in done] == [0] * len(done), f"{block}: {done}"
        elif block.language == "python" and "openvino" in block.text:
            openvino = block.text
        elif block.language == "python":
            code = f"{block.text}\nnp.save('scores.npy', scores)\n"
            subprocess.run([sys.executable, "-c", code], check=True)
        elif block.language == "protobuf":
            configuration = block.text
    any_k = Bundle.open("vit-any").session()(x, 4)
    np.testing.assert_allclose(np.load("scores.npy"), any_k, rtol=1e-5, atol=1e-6)
    bundle = Bundle.open("vit-k4")
    served = onnxruntime.InferenceSession("models/vit/1/model.onnx/model.onnx")
    np.testing.assert_allclose(served.run(None, {"input": x})[0], any_k, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "models" / "vit" / "config.pbtxt").read_text().startswith(configuration)
    if openvino:
        code = f"{openvino}\nnp.save('openvino.npy', scores)\n"
        subprocess.run([sys.executable, "-c", code], check=True)
        np.testing.assert_allclose(np.load("openvino.npy"), any_k, rtol=1e-4, atol=1e-5)
    ports = {"input": bundle.manifest.inputs, "output": bundle.manifest.outputs}
    for kind, records in ports.items():
        for port in records:
            dims = ", ".join(map(str, port.shape[1:]))
            told = (f'name: "{port.name}"', f"data_type: {TRITON[port.dtype]}", f"dims: [ {dims} ]")
            lines = "".join(f"  {line}\n" for line in told)
            assert f"{kind} {{\n{lines}}}" in configuration


HEADERS = "onnxruntime_cxx_api.h"
FOLDERS = ("/usr/include/onnxruntime", "/usr/local/include/onnxruntime")


def test_the_program_in_cpp_gives_pythons_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = [Path(each) for each in (os.environ.get("ONNXRUNTIME_INCLUDE"), *FOLDERS) if each]
    headers = next((folder for folder in named if (folder / HEADERS).is_file()), None)
    compiler = shutil.which("c++")
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"), None)
    if headers is None:
        pytest.skip(f"no {HEADERS}, which no Python package has: set ONNXRUNTIME_INCLUDE")
    if compiler is None or library is None:
        pytest.skip("no C++ compiler, or no shared library in the package of ONNX Runtime")
    case = read_case("soft_moe_vit")
    model = moexport.load(case.weights, config=case.config)
    bundle = moexport.export(model, tmp_path / "vit-any", k="input", target="ort-cpu", data=case.x)
    (program,) = (block.text for block in blocks(PAGE) if block.language == "cpp")
    (tmp_path / "main.cpp").write_text(program, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("libonnxruntime.so.1").symlink_to(library)  # its own name
    subprocess.run(
        [
            *(compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-isystem", headers),
            *("main.cpp", library, f"-Wl,-rpath,{tmp_path}", "-o", "main"),
        ],
        check=True,
    )
    done = subprocess.run(["./main"], check=True, capture_output=True, text=True)
    expected = bundle.session()(np.zeros((1, 3, 32, 32), np.float32), 4)
    found = np.array(done.stdout.split(), np.float32)
    np.testing.assert_allclose(found, expected[0], rtol=1e-4, atol=1e-5)


def listed_ports() -> dict[str, tuple[TensorSpec, TensorSpec]]:
    """The table's inputs and outputs by family: axes in italics by name, the others as 0."""

    def spec(name: str, dtype: str, axes: str) -> TensorSpec:
        named = (axis.strip() for axis in axes.split(","))
        return TensorSpec(name, dtype, tuple(a[1:-1] if a[0] == "*" else 0 for a in named))

    text = PAGE.read_text(encoding="utf-8")
    return {row[0]: (spec(*row[1:4]), spec(*row[4:7])) for row in ROW.findall(text)}


def test_the_table_of_inputs_and_outputs_lists_every_family() -> None:
    assert listed_ports().keys() == {*FAMILIES.names}


@pytest.mark.parametrize("name", [*SOFT_MOE, *MUMOE])
def test_the_table_of_inputs_and_outputs_is_right(name: str) -> None:
    case = read_case(name)
    model = moexport.load(case.weights, config=case.config)
    for told, spec in zip(listed_ports()[case.family], (model.input, model.output), strict=True):
        axes = tuple(axis if isinstance(axis, str) else 0 for axis in spec.shape)
        assert (told.name, told.dtype, told.shape) == (spec.name, spec.dtype, axes)
