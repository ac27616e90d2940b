"""What TensorRT says when a build fails is told in the user's words."""

from __future__ import annotations

import pytest
from moexport.exporter.engines.build import LOWER, explained
from moexport.exporter.engines.flavours import TENSORRT, TENSORRT_RTX
from moexport.exporter.engines.options import EngineOptions
from moexport.exporter.engines.worker import Fraction, peak_memory_bytes
from moexport.tests.targets.engines import needs_rtx

GENERIC = "[!] Invalid Engine. Please ensure the engine was built correctly"


@pytest.mark.parametrize(
    ("line", "meaning", "hint"),
    [
        ("IBuilder::buildSerializedNetwork: Error Code 2: OutOfMemory", "memory ran out", LOWER),
        ("std::bad_alloc", "memory ran out", LOWER),
        ("no tactics to implement the operation within workspace limit", "too small", "raise"),
        ("Unable to load library: libnvinfer_lean.so.1", "lean runtime", "--version-compatible"),
        (
            "In x: (cudaError 35: CUDA driver version is insufficient for CUDA runtime version)",
            "there is no NVIDIA GPU, or its driver is too old",
            "moexport doctor",
        ),
        ("DishonouredError: tf32: asked True, got False", "did not take over", "leave that option"),
        ("No importer registered for op: NonZero", "its ONNX importer refused", "--target"),
        ("something new", "cannot compile the graph: something new", "another --lowering"),
    ],
)
def test_a_failure_is_explained(line: str, meaning: str, hint: str) -> None:
    error = explained([line, GENERIC], TENSORRT, EngineOptions())
    assert meaning in error.message
    assert hint in (error.hint or "")
    assert "Invalid Engine" not in error.message


def test_without_words_the_failure_is_told_all_the_same() -> None:
    assert "cannot compile" in explained([], TENSORRT_RTX, EngineOptions()).message
    assert GENERIC in explained([GENERIC], TENSORRT_RTX, EngineOptions()).message


def test_progress_counts_nested_phases_and_never_goes_back() -> None:
    fraction = Fraction()
    fraction.start("all", None, 2)
    assert fraction.step("all", 0) == 500
    fraction.start("inner", "all", 4)
    assert fraction.step("inner", 1) == 750
    assert fraction.step("inner", 0) == 750
    fraction.finish("inner")
    assert fraction.step("all", 1) == 1000
    assert fraction.step("unknown", 3) == 1000


def test_the_peak_is_of_this_process() -> None:
    assert 10 << 20 < peak_memory_bytes() < 64 << 30


@needs_rtx
def test_every_reason_the_runtime_gives_is_known() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    from moexport.exporter.engines.loading import REASONS, reason_of

    names = set(trt.EngineInvalidityDiagnostics.__members__)
    assert names == {reason.flag for reason in REASONS}
    malformed = int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE)
    assert reason_of(trt, malformed) == REASONS[0]
    assert reason_of(trt, 0) is None
    runtime = trt.Runtime(trt.Logger(trt.Logger.INTERNAL_ERROR))
    validity, diagnostics = runtime.get_engine_validity(b"x" * 1000)
    assert validity == trt.EngineValidity.INVALID
    assert reason_of(trt, diagnostics) == REASONS[0]
