"""The few CUDA calls that a runner needs, each an error in the user's words when it fails.

NVIDIA's own binding (`cuda.bindings`) is behind them: no compiler and no PyTorch with CUDA needed.
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
"""The oldest driver that each major version of cuda-bindings works with.

NVIDIA's pages: cuda-bindings 13, Installation ("Driver: Linux (580.65.06 or later)"); cuda.core
0.1.0, Installation, for CUDA 12 (525.60.13). The calls below have the same names and arguments in
12.9.4 and 13.5.0.
"""

NEEDED = (
    f"CUDA 13 needs a driver of {DRIVERS[13]} or newer; with an older one, pip install "
    "'cuda-bindings>=12,<13' and tensorrt-cu12 or tensorrt-rtx-cu12, in an environment of their own"
)
"""What an NVIDIA driver has to do with what pip installs."""

NO_DRIVER = ("cudaErrorInsufficientDriver", "cudaErrorNoDevice", "cudaErrorStubLibrary")
NO_COMPAT = "cudaErrorCompatNotSupportedOnDevice"
MISMATCH = (
    *("cudaErrorSystemDriverMismatch", "cudaErrorUnsupportedPtxVersion"),
    *("cudaErrorSystemNotReady", "cudaErrorInitializationError"),
)
"""A driver that does not fit CUDA's libraries, or whose services have not started."""
NO_MEMORY = "cudaErrorMemoryAllocation"


def runtime() -> Any:
    """Returns CUDA's runtime as Python sees it; `MissingExtraError` without the binding."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise MissingExtraError(
            "cuda-bindings is not installed", hint=f"pip install '{bindings_for(_driver())}'"
        ) from error


def bindings_for(driver: int | None) -> str:
    """Returns what to install for a driver's major version, the newest where it is not known."""
    major = next((m for m, oldest in DRIVERS.items() if driver is None or driver >= oldest), 12)
    return f"cuda-bindings>={major},<{major + 1}"


def driver_problem() -> str | None:
    """Returns why the installed binding cannot work with this driver, and what can; else None.

    The driver's library that was loaded tells, and its number where none was: NVIDIA's package
    `cuda-compat` brings the library of a newer driver (CUDA Compatibility, "Forward Compatibility":
    data-centre GPUs, some RTX cards for servers and Jetsons).
    """
    driver, installed = _driver(), int(metadata.version("cuda-bindings").partition(".")[0])
    needed, served = DRIVERS.get(installed, 0), _served()
    if served is not None:
        if served[0] >= installed:
            return None
    elif driver is None or driver >= needed:
        return None
    number = "" if driver is None else f" {driver}"
    serves = "" if served is None else f", which serves CUDA {served[0]}.{served[1]}"
    return (
        f"cuda-bindings {installed} needs a driver of {needed} or newer, and this one is{number}"
        f"{serves}: update the driver, or put cuda-compat-{installed}-0 before it (data-centre "
        f"cards), or, in an environment of their own, pip install '{bindings_for(driver or 0)}' "
        "and tensorrt-cu12 or tensorrt-rtx-cu12"
    )


def _served() -> tuple[int, int] | None:
    """The newest CUDA that the driver's loaded library serves; None where none was loaded."""
    error, served = runtime().cudaDriverGetVersion()
    if error != runtime().cudaError_t.cudaSuccess or not served:
        return None
    return served // 1000, served % 1000 // 10


def _driver() -> int | None:
    """The driver's major version; a Jetson's tool does not tell it."""
    rows = nvidia_smi("driver_version")
    major = rows[0][0].partition(".")[0] if rows else ""
    return int(major) if major.isdigit() else None


def check_device() -> None:
    """Raises `EngineError` where there is no NVIDIA GPU with a driver."""
    call("cudaGetDeviceCount")


def call(name: str, *arguments: Any) -> Any:
    """Calls CUDA and returns what it gives; `EngineError` says what went wrong."""
    cuda = runtime()
    error, *values = getattr(cuda, name)(*arguments)
    if error == cuda.cudaError_t.cudaSuccess:
        return values[0] if len(values) == 1 else tuple(values)
    if error.name in NO_DRIVER:
        raise EngineError(
            "there is no NVIDIA GPU here, or its driver is older than this CUDA",
            hint=driver_problem()
            or "run it on the machine with the GPU; `moexport doctor` shows what is installed",
        )
    if error.name == NO_MEMORY:
        raise EngineError(
            f"the GPU's memory ran out ({name})",
            hint="run smaller batches, build with a smaller MAX in --profile, or free the GPU",
        )
    if error.name == NO_COMPAT:
        raise EngineError(
            "CUDA's compatibility package (cuda-compat) does not serve this card",
            hint=f"take it out of LD_LIBRARY_PATH and update the driver: {NEEDED}",
        )
    raise EngineError(
        f"CUDA: {name} failed: {error.name}",
        hint=driver_problem() or f"`nvidia-smi` shows whether the driver works; {NEEDED}"
        if error.name in MISMATCH
        else "`moexport doctor` shows what is installed; another program may hold the GPU",
    )


class DeviceBuffer:
    """So many bytes on the GPU; `address` is where they lie."""

    def __init__(self, size: int) -> None:
        self.address = int(call("cudaMalloc", size))

    def free(self) -> None:
        """Gives the memory back."""
        if self.address:
            call("cudaFree", self.address)
            self.address = 0


class Stream:
    """A stream of its own, which does not wait for the default one."""

    def __init__(self) -> None:
        self.handle = int(call("cudaStreamCreateWithFlags", runtime().cudaStreamNonBlocking))

    def synchronize(self) -> None:
        """Waits until all that was sent is done."""
        call("cudaStreamSynchronize", self.handle)

    def copy(self, destination: int, source: int, size: int) -> None:
        """Copies between host memory and the GPU, or within it: CUDA knows each address."""
        kind = runtime().cudaMemcpyKind.cudaMemcpyDefault
        call("cudaMemcpyAsync", destination, source, size, kind, self.handle)

    def close(self) -> None:
        """Ends the stream."""
        if self.handle:
            call("cudaStreamDestroy", self.handle)
            self.handle = 0


class Captured:
    """Work that was recorded once and is sent as one; forgotten when nothing holds it any more."""

    def __init__(self, graph: Any) -> None:
        with ExitStack() as made:
            made.callback(call, "cudaGraphDestroy", graph)
            self._ready = call("cudaGraphInstantiate", graph, 0)
            made.callback(call, "cudaGraphExecDestroy", self._ready)
            self.close = given_back(self, made.pop_all().close)

    def launch(self, stream: Stream) -> None:
        """Queues the recorded work on a stream, as one."""
        call("cudaGraphLaunch", self._ready, stream.handle)


def given_back(holder: object, close: Callable[[], None]) -> Callable[[], object]:
    """Returns a call that closes once: when it is made, or when nothing has the holder any more.

    At the end of a process the driver takes everything back by itself.
    """
    end = weakref.finalize(holder, close)
    end.atexit = False
    return end


def captured(stream: Stream, send: Callable[[], None]) -> Captured:
    """Returns what `send` sends to a stream, recorded."""
    mode = runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    call("cudaStreamBeginCapture", stream.handle, mode)
    try:
        send()
    except BaseException:
        # What `send` raised is what is told; of a recording that it broke there is no graph.
        error, graph = runtime().cudaStreamEndCapture(stream.handle)
        if error == runtime().cudaError_t.cudaSuccess:
            call("cudaGraphDestroy", graph)
        raise
    return Captured(call("cudaStreamEndCapture", stream.handle))


class Stopwatch:
    """Milliseconds of GPU time between two points of a stream."""

    def __init__(self) -> None:
        self._begin, self._end = call("cudaEventCreate"), call("cudaEventCreate")

    def begin(self, stream: Stream) -> None:
        """Records the first point, after what was sent so far."""
        call("cudaEventRecord", self._begin, stream.handle)

    def end(self, stream: Stream) -> float:
        """Records the second point, waits for it and returns the milliseconds between them."""
        call("cudaEventRecord", self._end, stream.handle)
        call("cudaEventSynchronize", self._end)
        return float(call("cudaEventElapsedTime", self._begin, self._end))

    def close(self) -> None:
        """Destroys both events."""
        call("cudaEventDestroy", self._begin)
        call("cudaEventDestroy", self._end)
