"""What moexport calls of TensorRT is there in every version that it supports.

TensorRT for servers cannot be installed everywhere, so its names are compared with recorded lists,
and with TensorRT-RTX where that is installed, which has the same interface as TensorRT 11.
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from types import ModuleType

import pytest
from moexport.exporter.engines import compile as compiling
from moexport.exporter.engines import cuda, loading, session
from moexport.exporter.engines.options import EngineOptions
from moexport.tests.recorded import DATA
from moexport.tests.targets.engines import needs_rtx

VERSIONS = json.loads((DATA / "tensorrt_api.json").read_text())

OBJECTS = {
    "trt": None,
    "config": "IBuilderConfig",
    "network": "INetworkDefinition",
    "layer": "ILayer",
    "engine": "ICudaEngine",
    "_engine": "ICudaEngine",
    "_context": "IExecutionContext",
    "runtime": "Runtime",
    "refitter": "Refitter",
    "inspector": "EngineInspector",
}
"""Variables of our code, and the class of TensorRT that each holds (None: the module itself)."""

OURS = {"USE_TENSORRT_RTX", "EngineInvalidityDiagnostics"}


def used(module: ModuleType) -> dict[str, set[str]]:
    """The attributes that a module of ours takes of each of those variables."""
    found: dict[str, set[str]] = {}
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base = node.value
            name = base.id if isinstance(base, ast.Name) else getattr(base, "attr", None)
            if name == "_trt":
                name = "trt"
            if name in OBJECTS and node.attr not in OURS:
                found.setdefault(name, set()).add(node.attr)
    return found


NAMES = sorted(
    (name, attribute)
    for module in (compiling, loading, session)
    for name, attributes in used(module).items()
    for attribute in attributes
)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_builder_flag_exists(version: str) -> None:
    assert set(compiling.FLAGS) <= set(VERSIONS[version]["builder_flags"])


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_that_was_removed_is_used(version: str) -> None:
    removed = set(VERSIONS[version]["removed"])
    assert not removed & {attribute for _, attribute in NAMES}


def test_the_configuration_never_asks_for_a_precision() -> None:
    arguments = {
        node.slice.value
        for node in ast.walk(ast.parse(inspect.getsource(compiling.config_arguments)))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    }
    assert {"load_timing_cache", "version_compatible", "refittable"} <= arguments
    assert not arguments & {"fp16", "bf16", "int8", "fp8", "calibrator", "precision_constraints"}


@needs_rtx
@pytest.mark.parametrize(("name", "attribute"), NAMES, ids=[f"{n}.{a}" for n, a in NAMES])
def test_the_installed_tensorrt_has_what_is_called(name: str, attribute: str) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    owner = trt if OBJECTS[name] is None else getattr(trt, OBJECTS[name] or "")
    if (name, attribute) == ("network", "num_layers"):
        return
    assert hasattr(owner, attribute), f"{owner} has no {attribute}"


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
        refit=True,
        tf32=True,
    )
    options = {name: getattr(every, name) for name in every.asked()}
    taken = {
        name
        for each in backend.CreateConfig.__mro__[:2]
        for name in inspect.signature(each.__init__).parameters
    }
    given = compiling.config_arguments(trt, options)
    assert len(given) == len(options)
    assert given.keys() <= taken


@pytest.mark.parametrize("name", cuda.CALLS)
def test_the_cuda_binding_has_every_call(name: str) -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    assert callable(getattr(runtime, name))


def test_every_cuda_call_is_listed() -> None:
    tree = ast.parse(inspect.getsource(cuda))
    called = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "call"
        and isinstance(node.args[0], ast.Constant)
    }
    assert called <= set(cuda.CALLS)
