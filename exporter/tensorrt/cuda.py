"""The few CUDA calls that a runner needs, each an error in the user's words when it fails.

NVIDIA's own binding (`cuda.bindings`) is behind them: no compiler and no PyTorch with CUDA needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import EngineError, MissingExtraError

NO_DRIVER = ("cudaErrorInsufficientDriver", "cudaErrorNoDevice", "cudaErrorStubLibrary")
NO_MEMORY = "cudaErrorMemoryAllocation"


def runtime() -> Any:
    """Returns CUDA's runtime as Python sees it; `MissingExtraError` without the binding."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise MissingExtraError(
            "cuda-bindings is not installed", hint="pip install 'cuda-bindings>=13'"
        ) from error


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
            hint="run it on the machine with the GPU; `moexport doctor` says what is here",
        )
    if error.name == NO_MEMORY:
        raise EngineError(
            f"the GPU's memory ran out ({name})",
            hint="run smaller batches, build with a smaller MAX in --profile, or free the GPU",
        )
    raise EngineError(f"CUDA: {name} failed: {error.name}")


class DeviceBuffer:
    """Memory on the GPU that grows when more is asked for; `address` is where it lies."""

    def __init__(self) -> None:
        self.address = 0
        self.size = 0

    def reserve(self, size: int) -> int:
        """Makes room for so many bytes and returns the address."""
        if size > self.size:
            self.free()
            self.address, self.size = int(call("cudaMalloc", size)), size
        return self.address

    def free(self) -> None:
        """Gives the memory back."""
        if self.address:
            call("cudaFree", self.address)
            self.address = self.size = 0


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
    """Work that was recorded once and is sent as one."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._ready = call("cudaGraphInstantiate", graph, 0)

    def launch(self, stream: Stream) -> None:
        """Sends the work."""
        call("cudaGraphLaunch", self._ready, stream.handle)

    def close(self) -> None:
        """Forgets the work."""
        call("cudaGraphExecDestroy", self._ready)
        call("cudaGraphDestroy", self._graph)


@contextmanager
def capturing(stream: Stream) -> Iterator[list[Captured]]:
    """Records what the block sends to a stream; the list holds it when the block has ended."""
    mode = runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    found: list[Captured] = []
    call("cudaStreamBeginCapture", stream.handle, mode)
    try:
        yield found
    except BaseException:
        runtime().cudaStreamEndCapture(stream.handle)  # the block's own error is what is told
        raise
    found.append(Captured(call("cudaStreamEndCapture", stream.handle)))


class Stopwatch:
    """Milliseconds of GPU time between two points of a stream."""

    def __init__(self) -> None:
        self._begin, self._end = call("cudaEventCreate"), call("cudaEventCreate")

    def begin(self, stream: Stream) -> None:
        """The first point."""
        call("cudaEventRecord", self._begin, stream.handle)

    def end(self, stream: Stream) -> float:
        """The second point; waits for it and returns the time between them."""
        call("cudaEventRecord", self._end, stream.handle)
        call("cudaEventSynchronize", self._end)
        return float(call("cudaEventElapsedTime", self._begin, self._end))

    def close(self) -> None:
        """Forgets both points."""
        call("cudaEventDestroy", self._begin)
        call("cudaEventDestroy", self._end)
