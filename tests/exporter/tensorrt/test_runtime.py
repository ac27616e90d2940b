"""What running an engine needs, as far as a machine without a GPU goes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from moexport.bench.engines import requirements
from moexport.errors import EngineError
from moexport.exporter.bundle.parity import GPU_RTOL, TOLERANCES, gpu_bounds
from moexport.exporter.session import TENSORRT
from moexport.exporter.tensorrt import cache, cuda
from moexport.exporter.tensorrt.backends import Gpu, first_gpu
from moexport.exporter.tensorrt.options import EngineOptions
from moexport.exporter.tensorrt.ort_provider import provider_options
from moexport.exporter.tensorrt.session import BF16, EngineSession, _to_array, _to_tensor, _widen
from moexport.graphs.sizes import AxisRange
from moexport.tests.exporter.tensorrt.cuda_stand_in import Cuda
from moexport.tests.exporter.tensorrt.engines import build, export, needs_rtx
from moexport.tests.recorded import read_case

LAYER = "soft_moe_fkodom"

needs_gpu_to_be_absent = pytest.mark.skipif(
    first_gpu() is not None, reason="says what is so without a GPU"
)

ALONE = """
import sys
for name in ("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "polygraphy", "typer"):
    sys.modules[name] = None
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from moexport.errors import EngineError
from moexport.exporter.tensorrt.session import EngineSession
try:
    EngineSession(Path(sys.argv[1]), trust=True)
except EngineError as error:
    print(error.message)
"""
"""Opens an engine where nothing but numpy, TensorRT and cuda-bindings can be imported."""


@needs_gpu_to_be_absent
def test_an_engine_is_opened_with_numpy_tensorrt_and_cuda_alone(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    pytest.importorskip("cuda.bindings")
    plan = tmp_path / "engine-tensorrt-rtx.plan"
    plan.write_bytes(b"a plan")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, plan], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("there is no NVIDIA GPU here"), done.stderr


COMMAND = """
import sys
for name in ("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "polygraphy"):
    sys.modules[name] = None
import moexport
from moexport.__main__ import main
from moexport.errors import EngineError
try:
    moexport.Bundle.open("out").engine("tensorrt-rtx")
except EngineError as error:
    print(error.message)
sys.argv[1:] = ["run", "out", "-i", "x.npz", "-o", "y.npz", "--engine", "tensorrt-rtx"]
main()
"""
"""Loads a bundle's engine, in Python and as a command, without what makes and checks graphs."""


@needs_rtx
@needs_gpu_to_be_absent
def test_a_command_loads_an_engine_with_numpy_tensorrt_and_cuda_alone(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    case = read_case(LAYER)
    (record,) = build(export(LAYER, tmp_path), "--profile", "batch=1:2:8")
    np.savez(tmp_path / "x.npz", input=case.x)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert record["flavour"] == "tensorrt-rtx"
    assert done.stdout.startswith("there is no NVIDIA GPU here"), done.stderr
    assert done.returncode == 1
    assert "error: there is no NVIDIA GPU here" in done.stderr
    assert not (tmp_path / "y.npz").exists()


def test_numpy_arrays_go_in_as_they_are_or_as_wide_as_the_engine_takes_them() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    same = _to_array(x, "float32")
    assert same is not None and same.array is x and same.address == x.ctypes.data
    narrowed = _to_array(x.T, "float16")
    assert narrowed is not None
    assert narrowed.array.dtype == np.float16 and narrowed.array.flags.c_contiguous
    assert np.array_equal(narrowed.array, x.T)
    assert _to_array(x, "int64") is None
    assert _to_array(x.astype(np.complex64), "float32") is None
    assert _to_array(np.array(["1"]), "float32") is None
    whole = _to_array(np.array([[1, 2]], np.int32), "int64")
    assert whole is not None and whole.nbytes == 16


def test_bf16_is_rounded_to_the_nearest_and_widened_without_loss() -> None:
    torch = pytest.importorskip("torch")
    x = np.concatenate(
        [np.random.default_rng(0).standard_normal(2000), [0.0, -0.0, np.inf, -np.inf, 3e38, 1e-40]]
    ).astype(np.float32)
    found = _to_array(x, BF16)
    assert found is not None and found.nbytes == 2 * x.size
    expected = torch.from_numpy(x).to(torch.bfloat16).float().numpy()
    assert np.array_equal(_widen(found.array, BF16), expected)
    lost = _to_array(np.array([np.nan], np.float32), BF16)
    assert lost is not None and np.isnan(_widen(lost.array, BF16)).all()


@pytest.mark.parametrize("of", ["numpy", "torch"])
def test_an_output_is_copied_to_memory_of_the_inputs_kind(of: str) -> None:
    torch = pytest.importorskip("torch")
    copied: list[tuple[int, ...]] = []
    session = object.__new__(EngineSession)
    session._shapes, session._buffers = {"y": (2, 3)}, {"y": 64}
    session._loaded = SimpleNamespace(dtype=lambda _: "float32")  # type: ignore[assignment]
    session._stream = SimpleNamespace(  # type: ignore[assignment]
        copy=lambda *addresses: copied.append(addresses)
    )
    like: Any = np.zeros(1, np.float32) if of == "numpy" else torch.zeros(1)
    output = session._receive("y", like)
    assert type(output) is type(like) and tuple(output.shape) == (2, 3)
    address = output.ctypes.data if of == "numpy" else output.data_ptr()
    assert copied == [(address, 64, 24)]


def test_options_of_an_engine_are_plain_data_whatever_mapping_has_its_ranges() -> None:
    ranges = MappingProxyType({"batch": AxisRange(1, 2, 3)})
    plain = {"profiles": [{"batch": {"min": 1, "opt": 2, "max": 3}}]}
    assert EngineOptions(profiles=(ranges,)).as_json() == plain


def test_tensors_keep_to_the_same_rules() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(6.0).reshape(2, 3)
    found = _to_tensor(x, "float16")
    assert found is not None and found.array.dtype == torch.float16 and not found.on_gpu
    assert _to_tensor(x, "int64") is None
    assert _to_tensor([1.0], "float32") is None
    assert _to_tensor(x.to(torch.complex64), "float32") is None


@pytest.mark.parametrize(
    ("driver", "wanted"), [(580, 13), (595, 13), (579, 12), (535, 12), (470, 12), (None, 13)]
)
def test_the_binding_is_chosen_by_the_driver(driver: int | None, wanted: int) -> None:
    assert cuda.bindings_for(driver) == f"cuda-bindings>={wanted},<{wanted + 1}"


def test_doctor_says_which_binding_an_older_driver_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 535.104.05\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    problem = cuda.driver_problem()
    assert problem is not None
    assert "cuda-bindings 13 needs driver 580 or newer, but this one is 535" in problem
    assert "pip install 'cuda-bindings>=12,<13' and tensorrt-cu12 or tensorrt-rtx-cu12" in problem
    card = Gpu("NVIDIA GeForce RTX 4090", "8.9", "535.104.05")
    by_name = {each.name: each.ability(card) for each in requirements()}
    assert by_name["run TensorRT-RTX engines"].detail in (problem, "TensorRT-RTX is not installed")
    assert not by_name["run TensorRT-RTX engines"].available
    tool.write_text("#!/bin/sh\necho 580.65.06\n")
    assert cuda.driver_problem() is None


@pytest.mark.parametrize(("served", "fits"), [(13000, True), (13020, True), (12020, False)])
def test_the_drivers_library_is_believed_before_its_number(
    served: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's cuda-compat brings the library of a newer driver, which the number does not tell."""
    pytest.importorskip("cuda.bindings")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 535.104.05\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(cuda, "runtime", lambda: Cuda(driver=served))
    monkeypatch.setattr(metadata, "version", lambda _: "13.0.3")
    problem = cuda.driver_problem()
    assert (problem is None) == fits
    if problem is not None:
        assert "this one is 535 and supports CUDA 12.2: update the driver" in problem
        assert "cuda-compat-13-0" in problem
        assert "'cuda-bindings>=12,<13'" in problem


def test_a_compatibility_package_for_another_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = Cuda(error="cudaErrorCompatNotSupportedOnDevice", fails={"cudaMalloc"})
    monkeypatch.setattr(cuda, "runtime", lambda: stand_in)
    with pytest.raises(EngineError, match=r"cuda-compat\) does not support this card") as caught:
        cuda.call("cudaMalloc", 8)
    assert "update the driver: CUDA 13 needs driver 580" in str(caught.value.hint)


def test_bounds_on_a_gpu_are_stated_once() -> None:
    fp32, fp16 = TOLERANCES["fp32"], TOLERANCES["fp16"]
    assert gpu_bounds(fp32, "fp32").rtol == GPU_RTOL > fp32.rtol
    assert gpu_bounds(fp32, "fp32").routing == fp32.routing
    assert gpu_bounds(fp32, "fp32", tf32=True).rtol == fp16.rtol
    assert gpu_bounds(fp16, "fp16") is fp16


def test_compiled_kernels_are_kept_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path / "engines"))
    assert cache.read_kernels("one") == b""
    cache.store_kernels("one", b"compiled")
    assert cache.read_kernels("one") == b"compiled"
    assert cache.read_kernels("other") == b""
    monkeypatch.setattr(cache, "MAX_BYTES", 10)
    cache.store_kernels("other", b"compiled too")
    assert cache.read_kernels("one") == b""
    if sys.platform != "win32":
        (tmp_path / "engines").chmod(0o777)
        assert cache.read_kernels("other") == b""
    monkeypatch.setenv(cache.CACHE_ENV, "off")
    cache.store_kernels("one", b"compiled")
    assert cache.read_kernels("one") == b""


def test_onnx_runtimes_provider_gets_profiles_a_cache_and_no_tf32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path / "engines"))
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    bundle = export(LAYER, tmp_path, "--k", "input", "--batch", "1:2:8", "--tokens", "4:8:16")
    options = provider_options(bundle / "model.onnx")
    import os

    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
    width = options["trt_profile_min_shapes"].split(",")[0].rsplit("x", 1)[1]
    assert options["trt_profile_min_shapes"] == f"input:1x4x{width},k:1"
    assert options["trt_profile_opt_shapes"] == f"input:2x8x{width},k:1"
    assert options["trt_profile_max_shapes"] == f"input:8x16x{width},k:6"
    place = Path(options["trt_engine_cache_path"])
    assert place.is_dir() and place.parent == tmp_path / "engines"
    assert provider_options(bundle / "model.onnx") == options
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    provider_options(bundle / "model.onnx")
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "1"
    (tmp_path / "other").mkdir()
    baked = export(LAYER, tmp_path / "other", "--k", "2")
    other = provider_options(baked / "model.onnx")
    assert "trt_profile_min_shapes" not in other
    assert other["trt_engine_cache_path"] != str(place)
    shutil.copy(bundle / "model.onnx", tmp_path / "alone.onnx")
    assert provider_options(tmp_path / "alone.onnx") == {}


def test_onnx_runtime_knows_the_options() -> None:
    """The package's own provider takes them by name, on a machine without TensorRT too."""
    from moexport.common.onnx_runtime import ort

    if TENSORRT not in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has no TensorRT provider")
    folder = Path(ort.__file__).parent / "capi"
    library = next(folder.glob("*providers_tensorrt*"), None)
    assert library is not None
    content = library.read_bytes()
    for name in ("trt_profile_min_shapes", "trt_engine_cache_path", "trt_timing_cache_path"):
        assert name.encode() in content
