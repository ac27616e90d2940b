"""The few CUDA calls needed to run engines, with errors that users can act on.

They use NVIDIA's own binding (`cuda.bindings`), and need neither a compiler nor PyTorch with CUDA.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from importlib import metadata
from typing import Any

from ...common.environment import nvidia_smi
from ...errors import EngineError, MissingExtraError

DRIVERS = {13: 580, 12: 525}
"""The oldest driver with which each major version of cuda-bindings works.

NVIDIA's pages: cuda-bindings 13, Installation ("Driver: Linux (580.65.06 or later)"); cuda.core
0.1.0, Installation, for CUDA 12 (525.60.13). The calls below have the same names and arguments in
12.9.4 and 13.5.0.
"""

NEEDED = (
    f"CUDA 13 needs driver {DRIVERS[13]} or newer; with an older driver, pip install "
    "'cuda-bindings>=12,<13' and tensorrt-cu12 or tensorrt-rtx-cu12, in a separate environment"
)
"""Which pip packages work with which NVIDIA driver."""

NO_DRIVER = ("cudaErrorInsufficientDriver", "cudaErrorNoDevice", "cudaErrorStubLibrary")
NO_COMPAT = "cudaErrorCompatNotSupportedOnDevice"
MISMATCH = (
    *("cudaErrorSystemDriverMismatch", "cudaErrorUnsupportedPtxVersion"),
    *("cudaErrorSystemNotReady", "cudaErrorInitializationError"),
)
"""Errors if the driver does not fit CUDA's libraries, or if its services are not running."""
NO_MEMORY = "cudaErrorMemoryAllocation"


def runtime() -> Any:
    """Returns the Python binding of CUDA's runtime; `MissingExtraError` if it is missing."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise MissingExtraError(
            "cuda-bindings is not installed", hint=f"pip install '{bindings_for(_driver())}'"
        ) from error


def bindings_for(driver: int | None) -> str:
    """Returns the package for a driver's major version, or the newest for an unknown version."""
    major = next((m for m, oldest in DRIVERS.items() if driver is None or driver >= oldest), 12)
    return f"cuda-bindings>={major},<{major + 1}"


def driver_problem() -> str | None:
    """Returns why the installed binding cannot work with this driver, with a remedy, or None.

    This depends on the loaded driver library or, without one, on the driver: NVIDIA's package
    `cuda-compat` provides the library of a newer driver (CUDA Compatibility, "Forward
    Compatibility": data-centre GPUs, some RTX cards for servers, and Jetsons).
    """
    driver, installed = _driver(), int(metadata.version("cuda-bindings").partition(".")[0])
    needed, supported = DRIVERS.get(installed, 0), _supported_cuda()
    if supported is not None:
        if supported[0] >= installed:
            return None
    elif driver is None or driver >= needed:
        return None
    number = " older" if driver is None else f" {driver}"
    supports = "" if supported is None else f" and supports CUDA {supported[0]}.{supported[1]}"
    return (
        f"cuda-bindings {installed} needs driver {needed} or newer, but this one is{number}"
        f"{supports}: update the driver, or install cuda-compat-{installed}-0 (data-centre cards), "
        f"or, in a separate environment, pip install '{bindings_for(driver or 0)}' "
        "and tensorrt-cu12 or tensorrt-rtx-cu12"
    )


def _supported_cuda() -> tuple[int, int] | None:
    """Returns the newest CUDA that the loaded driver library supports; None without one."""
    error, supported = runtime().cudaDriverGetVersion()
    if error != runtime().cudaError_t.cudaSuccess or not supported:
        return None
    return supported // 1000, supported % 1000 // 10


def _driver() -> int | None:
    """Returns the driver's major version; None if it is unknown, as on a Jetson."""
    rows = nvidia_smi("driver_version")
    major = rows[0][0].partition(".")[0] if rows else ""
    return int(major) if major.isdigit() else None


def check_device() -> None:
    """Raises `EngineError` if there is no NVIDIA GPU with a driver."""
    call("cudaGetDeviceCount")


def call(name: str, *arguments: Any) -> Any:
    """Calls CUDA and returns the result; on failure raises `EngineError` with a remedy."""
    cuda = runtime()
    error, *values = getattr(cuda, name)(*arguments)
    if error == cuda.cudaError_t.cudaSuccess:
        return values[0] if len(values) == 1 else tuple(values)
    if error.name in NO_DRIVER:
        raise EngineError(
            "there is no NVIDIA GPU here, or its driver is older than this CUDA",
            hint=driver_problem()
            or "run this on the machine with the GPU; `moexport doctor` shows what is installed",
        )
    if error.name == NO_MEMORY:
        raise EngineError(
            f"the GPU's memory ran out ({name})",
            hint="run smaller batches, build with a smaller MAX in --profile, or free the GPU",
        )
    if error.name == NO_COMPAT:
        raise EngineError(
            "CUDA's compatibility package (cuda-compat) does not support this card",
            hint=f"remove it from LD_LIBRARY_PATH and update the driver: {NEEDED}",
        )
    raise EngineError(
        f"CUDA: {name} failed: {error.name}",
        hint=driver_problem() or f"`nvidia-smi` shows whether the driver works; {NEEDED}"
        if error.name in MISMATCH
        else "`moexport doctor` shows what is installed; another program may be using the GPU",
    )


class Stream:
    """A CUDA stream that does not wait for the default one."""

    def __init__(self) -> None:
        self.handle = int(call("cudaStreamCreateWithFlags", runtime().cudaStreamNonBlocking))

    def synchronize(self) -> None:
        call("cudaStreamSynchronize", self.handle)

    def copy(self, destination: int, source: int, size: int) -> None:
        """Copies between host memory and the GPU, or within it: CUDA recognises each address."""
        kind = runtime().cudaMemcpyKind.cudaMemcpyDefault
        call("cudaMemcpyAsync", destination, source, size, kind, self.handle)

    def close(self) -> None:
        if self.handle:
            call("cudaStreamDestroy", self.handle)
            self.handle = 0


class Captured:
    """A recorded CUDA graph, which is launched as a whole; freed with the last reference."""

    def __init__(self, graph: Any) -> None:
        with ExitStack() as stack:
            stack.callback(call, "cudaGraphDestroy", graph)
            self._executable = call("cudaGraphInstantiate", graph, 0)
            stack.callback(call, "cudaGraphExecDestroy", self._executable)
            self.close = closing_once(self, stack.pop_all().close)

    def launch(self, stream: Stream) -> None:
        call("cudaGraphLaunch", self._executable, stream.handle)


def closing_once(holder: object, close: Callable[[], None]) -> Callable[[], object]:
    """Returns a function that closes once: when called, or with the last reference to `holder`.

    When the process ends, the driver itself frees everything.
    """
    end = weakref.finalize(holder, close)
    end.atexit = False
    return end


def capture(stream: Stream, send: Callable[[], None]) -> Captured:
    """Records the work that `send` queues on a stream."""
    mode = runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    call("cudaStreamBeginCapture", stream.handle, mode)
    try:
        send()
    except BaseException:
        # The exception from `send` is raised again; a recording that it broke has no graph.
        error, graph = runtime().cudaStreamEndCapture(stream.handle)
        if error == runtime().cudaError_t.cudaSuccess:
            call("cudaGraphDestroy", graph)
        raise
    return Captured(call("cudaStreamEndCapture", stream.handle))


def elapsed_ms(stream: Stream, send: Callable[[], object]) -> float:
    """Returns the GPU time in ms of the work that `send` queues on a stream."""
    start, end = call("cudaEventCreate"), call("cudaEventCreate")
    try:
        call("cudaEventRecord", start, stream.handle)
        send()
        call("cudaEventRecord", end, stream.handle)
        call("cudaEventSynchronize", end)
        return float(call("cudaEventElapsedTime", start, end))
    finally:
        call("cudaEventDestroy", start)
        call("cudaEventDestroy", end)
