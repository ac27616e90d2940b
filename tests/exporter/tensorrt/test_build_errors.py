"""What TensorRT says when a build fails is told in the user's words."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from moexport.exporter.bundle.manifest import Manifest
from moexport.exporter.tensorrt.backends import TENSORRT, TENSORRT_RTX, Backend
from moexport.exporter.tensorrt.build import build_ended, build_failed
from moexport.exporter.tensorrt.engines import plan_engines
from moexport.exporter.tensorrt.options import EngineOptions
from moexport.exporter.tensorrt.profiles import Profile
from moexport.exporter.tensorrt.records import EnginePlan
from moexport.exporter.tensorrt.worker import BuildProgress
from moexport.tests.exporter.tensorrt.engines import needs_rtx

GENERIC = "[!] Invalid Engine. Please ensure the engine was built correctly"


def about(backend: Backend = TENSORRT, *, on_gpu: bool = True, **options: Any) -> EnginePlan:
    profile = Profile("input", (1, 3, 32, 32), (8, 3, 32, 32), (64, 3, 32, 32))
    return EnginePlan(
        graph="model.onnx",
        file="engine.plan",
        backend=backend,
        profiles=(profile,),
        options=EngineOptions(**options),
        weights_bytes=12_345_678,
        on_gpu=on_gpu,
    )


# What TensorRT-RTX 1.7.1 said under `ulimit -v` and `ulimit -d` and with a tiny workspace; of
# TensorRT, lines that its users reported (NVIDIA/TensorRT issues 2643 and 477, wyoming-whisper-trt
# pull request 1049).
BAD_ALLOC = (
    "[E] IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([myelin_graph.h:1295: "
    "attachExceptionMsgToGraph] Unexpected exception std::bad_alloc In compileGraph at "
    "/_src/optimizer/myelin/codeGenerator.cpp:2012)"
)
NO_THREAD = (
    "[E] IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([myelin_graph.h:1295: "
    "attachExceptionMsgToGraph] Unexpected exception Resource temporarily unavailable In "
    "RAIIMyelinGraph at /_src/runtime/myelin/raiiMyelinGraph.h:37)"
)
NO_WORKSPACE = (
    "[E] IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([tactic.cpp:1676: "
    "enumerate_tactics] Tactic Selection: no tactics to implement the operation within workspace "
    "limit. Consider increase the allowed workspace size if applicable.)"
)
ON_GPU = (
    "2: [virtualMemoryBuffer.cpp::resizePhysical::145] Error Code 2: OutOfMemory (no further "
    "information)"
)
NO_KERNEL = (
    "10: Error Code 10: Internal Error (Could not find any implementation for node conv0 due to "
    "insufficient workspace. See verbose log for requested sizes.)"
)


@pytest.mark.parametrize(
    ("lines", "meaning", "hint"),
    [
        ([BAD_ALLOC], "the machine's memory ran out", "--precision fp16, which halves them"),
        (["[E] Unexpected exception std::bad_alloc"], "the machine's memory", "several times"),
        (["MemoryError"], "the machine's memory ran out", "the machine more memory"),
        ([NO_THREAD], "a thread could not be started: memory ran out", "--precision fp16"),
        ([ON_GPU], "the GPU's memory ran out", "lower --workspace (now all of the GPU)"),
        ([ON_GPU, NO_KERNEL], "the GPU's memory ran out", "MAX (now 64×3×32×32)"),
        (["Cuda Runtime (out of memory)"], "the GPU's memory", "--optimization-level (now 3)"),
        ([NO_WORKSPACE], "the workspace is too small", "lower the profile's MAX"),
        ([NO_KERNEL], "the workspace is too small", "--lowering conditional"),
        (
            ["OSError: [Errno 28] No space left on device: '/b/engine.plan'"],
            "the disk has no space for the engine",
            "free some space",
        ),
        (["Unable to load library: libnvinfer_lean.so.1"], "lean runtime", "--version-compatible"),
        (
            ["In x: (cudaError 35: CUDA driver version is insufficient for CUDA runtime version)"],
            "there is no NVIDIA GPU, or its driver is too old",
            "moexport doctor",
        ),
        (
            ["OptionNotAppliedError: tf32: requested True, got False"],
            "an option was not applied",
            "leave this",
        ),
        (["No importer registered for op: NonZero"], "its ONNX importer refused", "--target"),
        (["something new"], "cannot compile the graph: something new", "another --lowering"),
    ],
)
def test_a_failure_is_explained(lines: list[str], meaning: str, hint: str) -> None:
    error = build_failed([*lines, GENERIC], about())
    assert meaning in error.message
    assert hint in (error.hint or "")
    assert "Invalid Engine" not in error.message


def test_the_values_in_force_are_told() -> None:
    tight = about(workspace=4_000_000_000, optimization_level=5)
    assert "--workspace (now 4.0 GB)" in (build_failed([ON_GPU], tight).hint or "")
    assert "--optimization-level (now 5)" in (build_failed([ON_GPU], tight).hint or "")
    assert build_failed([NO_WORKSPACE], tight).hint == "raise --workspace (4.0 GB), or leave it out"


def test_without_a_gpu_it_is_the_machine_that_has_no_memory() -> None:
    error = build_failed([ON_GPU], about(TENSORRT_RTX, on_gpu=False))
    assert "the machine's memory ran out" in error.message
    assert "about three times the weights" in (error.hint or "")
    assert "needs no GPU" in (error.hint or "")


def test_a_build_that_ends_by_itself_is_explained_by_what_it_printed() -> None:
    aborted = ["terminate called after throwing an instance of 'std::bad_alloc'", "  what():  x"]
    assert "the machine's memory ran out" in build_ended(-6, aborted, about()).message
    unknown = build_ended(-11, ["", "Fatal Python error: Segmentation fault", ""], about())
    assert unknown.message.endswith("ended with status -11: Fatal Python error: Segmentation fault")
    assert build_ended(-11, [], about()).message.endswith("ended with status -11")


@needs_rtx
def test_the_size_of_the_weights_is_told(exported: Path) -> None:
    assert "the weights (12.3 MB)" in (build_failed([BAD_ALLOC], about()).hint or "")
    plan, *_ = plan_engines(Manifest.read(exported), "tensorrt-rtx", EngineOptions())
    assert plan.weights_bytes == (exported / "weights.bin").stat().st_size


def test_without_words_the_failure_is_told_all_the_same() -> None:
    assert "cannot compile" in build_failed([], about(TENSORRT_RTX)).message
    assert GENERIC in build_failed([GENERIC], about(TENSORRT_RTX)).message


def test_progress_counts_nested_phases_and_never_goes_back() -> None:
    progress = BuildProgress()
    progress.start("all", None, 2)
    assert progress.step("all", 0) == 500
    progress.start("inner", "all", 4)
    assert progress.step("inner", 1) == 750
    assert progress.step("inner", 0) == 750
    progress.finish("inner")
    assert progress.step("all", 1) == 1000
    assert progress.step("unknown", 3) == 1000


@needs_rtx
def test_every_reason_the_runtime_gives_is_known() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    from moexport.exporter.tensorrt.plan_file import REASONS, reason_of

    names = set(trt.EngineInvalidityDiagnostics.__members__)
    assert names == {reason.flag for reason in REASONS}
    malformed = int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE)
    assert reason_of(trt, malformed) == REASONS[0]
    assert reason_of(trt, 0) is None
    runtime = trt.Runtime(trt.Logger(trt.Logger.INTERNAL_ERROR))
    validity, diagnostics = runtime.get_engine_validity(b"x" * 1000)
    assert validity == trt.EngineValidity.INVALID
    assert reason_of(trt, diagnostics) == REASONS[0]


@needs_rtx
def test_the_runtimes_logger_outlives_every_engine() -> None:
    """TensorRT goes on to use the first logger of a process, whatever later engines bring."""
    trt = pytest.importorskip("tensorrt_rtx")
    from moexport.exporter.tensorrt.plan_file import collecting_logger

    first = weakref.ref(collecting_logger(trt))
    gc.collect()
    assert first() is collecting_logger(trt)
    collecting_logger(trt).lines.clear()
    assert trt.Runtime(collecting_logger(trt)).deserialize_cuda_engine(b"x" * 1000) is None
    assert collecting_logger(trt).lines


def test_a_built_engine_that_cannot_be_loaded_says_why() -> None:
    ours = "RuntimeError: the engine that was just built cannot be loaded"
    words = "[E] Error Code 2: OutOfMemory (Requested size was 90000000000 bytes.)"
    assert "the GPU's memory ran out" in build_failed([words, ours], about()).message
    unknown = build_failed([ours], about())
    assert "cannot be loaded" in unknown.message
    assert "leave this option out" not in str(unknown.hint)
