"""What moexport and Polygraphy's loaders call of TensorRT is there in the versions it supports.

TensorRT for servers cannot be loaded without its libraries and a GPU, so its names are compared
with recorded lists (`tests/data/tensorrt_api.json` says where they come from), and with
TensorRT-RTX where that is installed, which has the interface of TensorRT 11.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from moexport.errors import EngineError, MissingExtraError
from moexport.exporter.tensorrt import backends, bindings, cuda
from moexport.exporter.tensorrt import plan_file as loading
from moexport.exporter.tensorrt import session as context
from moexport.exporter.tensorrt import worker as compiling
from moexport.exporter.tensorrt.backends import TENSORRT, TENSORRT_RTX, first_gpu
from moexport.exporter.tensorrt.options import EngineOptions
from moexport.tests.exporter.tensorrt.engines import needs_rtx
from moexport.tests.recorded import DATA

VERSIONS: Mapping[str, Any] = json.loads((DATA / "tensorrt_api.json").read_text())

MODULE = "tensorrt"

HOLDERS = {
    "trt": MODULE,
    "_trt": MODULE,
    "config": "IBuilderConfig",
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "layer": "ILayer",
    "inp": "ITensor",
    "trt_profile": "IOptimizationProfile",
    "timing_cache": "ITimingCache",
    "engine": "ICudaEngine",
    "_engine": "ICudaEngine",
    "_context": "IExecutionContext",
    "settings": "IRuntimeConfig",
    "runtime_cache": "IRuntimeCache",
    "runtime": "Runtime",
    "refitter": "Refitter",
    "inspector": "EngineInspector",
}
"""Variables of our code and Polygraphy's, and the class of TensorRT that each holds."""

RTX_ALONE = {
    (MODULE, "ComputeCapability"),
    (MODULE, "CudaGraphStrategy"),
    (MODULE, "DynamicShapesKernelSpecializationStrategy"),
    (MODULE, "EngineInvalidityDiagnostics"),
    (MODULE, "EngineValidity"),
    ("CudaGraphStrategy", "WHOLE_GRAPH_CAPTURE"),
    ("EngineValidity", "INVALID"),
    ("IBuilderConfig", "num_compute_capabilities"),
    ("IBuilderConfig", "get_compute_capability"),
    ("IBuilderConfig", "set_compute_capability"),
    ("IExecutionContext", "is_stream_capturable"),
    ("IRuntimeConfig", "create_runtime_cache"),
    ("IRuntimeConfig", "cuda_graph_strategy"),
    ("IRuntimeConfig", "dynamic_shapes_kernel_specialization_strategy"),
    ("IRuntimeConfig", "set_runtime_cache"),
    ("IRuntimeCache", "deserialize"),
    ("IRuntimeCache", "serialize"),
    ("Runtime", "get_engine_validity"),
}
"""What only TensorRT-RTX has; our code asks for it where the backend is that one, or has it."""

NEVER_REACHED = {
    ("Builder", "build_engine"): "tried where build_serialized_network is missing",
    ("IBuilderConfig", "algorithm_selector"): "algorithm_selector is not given",
    ("IBuilderConfig", "clear_quantization_flag"): "quantization_flags are not given",
    ("IBuilderConfig", "get_calibration_profile"): "there is no calibrator",
    ("IBuilderConfig", "int8_calibrator"): "a missing one is caught",
    ("IBuilderConfig", "get_quantization_flag"): "a missing one is caught",
    ("IBuilderConfig", "set_calibration_profile"): "int8 is not given",
    ("IBuilderConfig", "set_quantization_flag"): "quantization_flags are not given",
    ("ILayer", "precision"): "a missing one is caught",
    ("ILayer", "precision_is_set"): "a missing one is caught",
    ("NetworkDefinitionCreationFlag", "EXPLICIT_BATCH"): "below TensorRT 10",
    ("OnnxParser", "set_builder_config"): "no configuration is given to the parser",
    (MODULE, "QuantizationFlag"): "quantization_flags are not given; a missing one is caught",
}
"""What Polygraphy has for other versions and other arguments than ours."""


NO_NAMES = ("USE_TENSORRT_RTX", "__init__", "__members__")
"""Polygraphy's own, and what every class of the bindings has."""


def touched(sources: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yields class and attribute of what the code of modules or functions takes of TensorRT."""
    for source in sources:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(source)))):
            if not isinstance(node, ast.Attribute):
                continue
            holder = HOLDERS.get(_last_name(node.value) or "")
            if holder is not None and node.attr not in NO_NAMES:
                yield holder, node.attr
            elif isinstance(node.value, ast.Attribute) and node.attr not in NO_NAMES:
                module = HOLDERS.get(_last_name(node.value.value) or "")
                if module == MODULE:
                    yield node.value.attr, node.attr


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def polygraphys() -> list[Any]:
    """The code of Polygraphy's loaders and configuration that a build runs through."""
    config = pytest.importorskip("polygraphy.backend.trt.config")
    loader = pytest.importorskip("polygraphy.backend.trt.loader")
    profile = pytest.importorskip("polygraphy.backend.trt.profile")
    util = pytest.importorskip("polygraphy.backend.trt.util")
    return [
        config.CreateConfig,
        config.PostprocessConfig,
        config._CreateConfigCommon,
        loader.BaseNetworkFromOnnx,
        loader.CreateNetwork,
        loader.EngineBytesFromNetwork,
        loader.NetworkFromOnnxPath,
        profile.Profile,
        util.check_onnx_parser_errors,
        util.get_trt_logger,
        util.str_from_config,
        util.str_from_tensor,
        util.try_setup_polygraphy_calibrator,
    ]


OURS = sorted(set(touched([compiling, loading, context])))


def test_our_calls_are_found() -> None:
    """Names that are certainly called, so that an empty list is no success."""
    assert ("IExecutionContext", "execute_async_v3") in OURS
    assert ("TensorLocation", "HOST") in OURS
    assert ("MemoryPoolType", "WORKSPACE") in OURS
    assert set(OURS) >= RTX_ALONE


@pytest.mark.parametrize("version", VERSIONS)
def test_the_versions_have_what_we_call(version: str) -> None:
    missing = set(missing_in(version, OURS))
    assert missing == RTX_ALONE


@pytest.mark.parametrize("version", VERSIONS)
def test_the_versions_have_what_polygraphy_calls_for_us(version: str) -> None:
    called = set(touched(polygraphys()))
    assert ("IBuilderConfig", "set_timing_cache") in called
    assert set(missing_in(version, called)) <= NEVER_REACHED.keys()
    assert NEVER_REACHED.keys() <= called


def missing_in(version: str, names: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yields what a recorded version does not have."""
    known = VERSIONS[version]["names"]
    for owner, attribute in names:
        if attribute not in known.get(owner, ()):
            yield owner, attribute


@pytest.mark.parametrize("version", VERSIONS)
def test_every_builder_flag_and_level_exists(version: str) -> None:
    wanted = [("BuilderFlag", name) for name in compiling.FLAGS]
    wanted += [("LayerType", name) for name in compiling.UNCAPTURABLE]
    wanted += [("HardwareCompatibilityLevel", name) for name in compiling.HARDWARE.values()]
    wanted += [("LayerType", name) for name in (*compiling.COMPUTING, *compiling.MOVING)]
    wanted += [("DataType", name) for name in (*compiling.PRECISIONS, *context.TYPES)]
    # Its networks have no attention as a layer of its own, and so none to look at.
    older = {("LayerType", "ATTENTION_INPUT")} if version == "10.12" else set()
    assert set(missing_in(version, wanted)) == older


def test_the_lists_say_where_they_come_from() -> None:
    assert all(body["source"].startswith("tensorrt-cu12-bindings ") for body in VERSIONS.values())
    first, last = TENSORRT.versions
    for version in VERSIONS:
        assert first <= tuple(map(int, version.split("."))) < last


def test_the_configuration_never_asks_for_a_precision() -> None:
    arguments = {
        node.slice.value
        for node in ast.walk(ast.parse(inspect.getsource(compiling.config_arguments)))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    }
    assert {"load_timing_cache", "profiling_verbosity"} <= arguments
    assert not arguments & {"fp16", "bf16", "int8", "fp8", "calibrator", "precision_constraints"}


@needs_rtx
def test_the_installed_tensorrt_has_what_we_call() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    missing = [
        (owner, attribute)
        for owner, attribute in OURS
        if not hasattr(trt if owner == MODULE else getattr(trt, owner), attribute)
    ]
    assert missing == []


@needs_rtx
def test_polygraphy_takes_the_arguments_that_are_given(tmp_path: Path) -> None:
    backend = pytest.importorskip("polygraphy.backend.trt")
    trt = pytest.importorskip("tensorrt_rtx")
    every = EngineOptions(
        timing_cache=tmp_path / "t",
        workspace=1,
        optimization_level=1,
        version_compatible=True,
        hardware_compatible="ampere-plus",
        strip_plan=True,
        weight_streaming="auto",
        tf32=True,
    )
    options = {name: getattr(every, name) for name in every.changed()}
    taken = {
        name
        for each in backend.CreateConfig.__mro__[:2]
        for name in inspect.signature(each.__init__).parameters
    }
    given = compiling.config_arguments(trt, options)
    by_flag = set(compiling.FLAGS.values())
    assert len(given) == len(options.keys() - by_flag) + 1  # the inspector's verbosity
    assert given.keys() <= taken


CUDA_CALLS = sorted(
    {
        str(node.args[0].value)
        for module in (cuda, context, backends, bindings, loading)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
        and _last_name(node.func) == "call"
        and isinstance(node.args[0], ast.Constant)
    }
)
"""What our code calls of CUDA's binding."""


def test_our_cuda_calls_are_found() -> None:
    found = {"cudaGetDeviceCount", "cudaGetDevice", "cudaGetDeviceProperties", "cudaMalloc"}
    assert found < set(CUDA_CALLS)
    assert len(CUDA_CALLS) > 20


@pytest.mark.parametrize("name", CUDA_CALLS)
def test_the_cuda_binding_has_every_call(name: str) -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    assert callable(getattr(runtime, name))


def test_the_cuda_binding_has_what_placed_weights_take() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    assert int(runtime.cudaHostAllocMapped) == 2
    for name in ("cudaFree", "cudaFreeHost", "cudaHostGetDevicePointer", "cudaMemcpy"):
        assert callable(getattr(runtime, name))


@pytest.mark.skipif(first_gpu() is not None, reason="calls CUDA as it is without a GPU")
def test_without_a_gpu_the_binding_takes_our_arguments_and_says_so() -> None:
    """The binding converts its arguments before CUDA answers, so a wrong kind would be found."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    copy = (runtime.cudaMemcpyKind.cudaMemcpyDefault, 0)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("cudaGetDeviceProperties", (0,)),
        ("cudaMalloc", (16,)),
        ("cudaMemGetInfo", ()),
        ("cudaMemcpyAsync", (1 << 20, 1 << 21, 4, *copy)),
        ("cudaStreamCreateWithFlags", (runtime.cudaStreamNonBlocking,)),
        ("cudaEventCreate", ()),
    ]
    for name, arguments in calls:
        with pytest.raises(EngineError, match="there is no NVIDIA GPU here"):
            cuda.call(name, *arguments)


@pytest.mark.parametrize(
    ("backend", "version", "works"),
    [
        (TENSORRT, "10.11.0.33", False),
        (TENSORRT, "10.12.0.36", True),
        (TENSORRT, "11.4.0.106", True),
        (TENSORRT, "12.0", False),
        (TENSORRT_RTX, "1.7.1.116", True),
        (TENSORRT_RTX, "1.6.1.120", False),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_another_version_is_refused_with_the_versions_that_work(
    backend: Any, version: str, works: bool
) -> None:
    if works:
        backend.check_version(version)
        return
    with pytest.raises(MissingExtraError, match=rf"{version} is installed, but moexport works"):
        backend.check_version(version)
