"""ONNX Runtime's TensorRT provider starts beside the TensorRT that it needs, or says so."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from moexport.common.onnx_runtime import ort
from moexport.errors import MissingExtraError
from moexport.exporter.bundle.manifest import Manifest
from moexport.exporter.tensorrt import ort_provider
from moexport.exporter.tensorrt.ort_provider import (
    PROVIDER_LIBRARY,
    linked_libraries,
    load_libraries,
    provider_options,
    type_options,
)
from moexport.tests.exporter.tensorrt.engines import export
from moexport.tests.recorded import read_case

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the names are those of Linux")

# What `strings` finds in the provider of onnxruntime-gpu 1.31.1.
LINKED = b"\0libcudart.so.13\0libnvonnxparser.so.10\0libnvinfer_plugin.so.10\0libnvinfer.so.10\0"


def runtime(folder: Path) -> Path:
    """A folder with a provider that names these libraries."""
    (folder / PROVIDER_LIBRARY).write_bytes(b"\x7fELF" + LINKED)
    return folder


def test_the_libraries_are_those_that_the_provider_was_linked_with(tmp_path: Path) -> None:
    names = linked_libraries(runtime(tmp_path) / PROVIDER_LIBRARY)
    # In the order in which they need one another.
    assert names == ("libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10")
    assert linked_libraries(tmp_path / "nothing") == ()


def test_beside_another_tensorrt_the_one_that_is_needed_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        MissingExtraError, match=r"needs libnvinfer\.so\.10, which cannot"
    ) as caught:
        load_libraries(runtime(tmp_path))
    assert caught.value.hint is not None
    assert "in a separate environment" in caught.value.hint
    assert "'tensorrt>=10,<11'" in caught.value.hint


def test_libraries_of_pips_tensorrt_are_found_where_no_loader_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any library of the system stands for TensorRT's, which cannot be had without its index."""
    some = Path(importlib.util.find_spec("_ctypes").origin)  # type: ignore[union-attr, arg-type]
    folder = tmp_path / "tensorrt_libs"
    folder.mkdir()
    for name in linked_libraries(runtime(tmp_path) / PROVIDER_LIBRARY):
        shutil.copyfile(some, folder / name)
    monkeypatch.setattr(ort_provider, "_pip_folders", lambda: [str(folder)])
    load_libraries(tmp_path)
    loaded = Path("/proc/self/maps").read_text()
    assert str(folder / "libnvinfer.so.10") in loaded
    assert ctypes.CDLL(str(folder / "libnvinfer.so.10"))


@pytest.mark.parametrize(
    ("precision", "enabled"),
    [
        ("fp32", set()),
        ("fp16", {"trt_fp16_enable"}),
        ("bf16", {"trt_bf16_enable"}),
        ("int8", {"trt_fp16_enable", "trt_int8_enable"}),  # FP16 is the float around it
    ],
)
def test_a_weakly_typed_network_may_compute_in_the_types_of_its_graph(
    precision: str, enabled: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "x.npz", input=read_case("soft_moe_fkodom").x)
    data = ("--data", str(tmp_path / "x.npz")) if precision == "int8" else ()
    asked = ("--k", "2", "--precision", precision, *data)
    graph = export("soft_moe_fkodom", tmp_path, *asked) / "model.onnx"
    manifest = Manifest.read(graph.parent)
    assert {*type_options(graph, manifest)} == enabled
    assert provider_options(graph).items() >= type_options(graph, manifest).items()
    monkeypatch.setattr(ort, "__version__", "1.26.0")  # strongly typed, unless a type is enabled
    assert type_options(graph, manifest) == {}
