"""What stands for CUDA where there is no GPU: it counts what is taken and what is given back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar

Status = Enum("Status", "cudaSuccess cudaErrorUnknown cudaErrorCompatNotSupportedOnDevice")

TAKES = {
    "cudaMalloc": "memory",
    "cudaStreamCreateWithFlags": "stream",
    "cudaStreamEndCapture": "graph",
    "cudaGraphInstantiate": "recording",
    "cudaEventCreate": "event",
}
GIVES = {
    "cudaFree": "memory",
    "cudaStreamDestroy": "stream",
    "cudaGraphDestroy": "graph",
    "cudaGraphExecDestroy": "recording",
    "cudaEventDestroy": "event",
}
OTHERS = (
    *("cudaStreamBeginCapture", "cudaStreamSynchronize", "cudaGraphLaunch", "cudaMemcpyAsync"),
    *("cudaEventRecord", "cudaEventSynchronize", "cudaGetDevice"),
)
ELAPSED_MS = 1.5
"""What it says is between two events."""


@dataclass
class Cuda:
    """Its runtime as `cuda.bindings.runtime` has it; the calls in `fails` fail with `error`.

    `held` is what was taken and not given back, by its number.
    """

    driver: int = 13000
    fails: set[str] = field(default_factory=set)
    error: str = "cudaErrorUnknown"
    held: dict[int, str] = field(default_factory=dict)
    count: int = 0
    # CUDA's own names.
    cudaError_t: ClassVar = Status  # noqa: N815
    cudaStreamNonBlocking: ClassVar = 1  # noqa: N815
    cudaStreamCaptureMode: ClassVar = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)  # noqa: N815
    cudaMemcpyKind: ClassVar = SimpleNamespace(cudaMemcpyDefault=4)  # noqa: N815

    def __getattr__(self, name: str) -> Any:
        if name == "cudaEventElapsedTime":
            return lambda *_: (Status.cudaSuccess, ELAPSED_MS)
        if name not in {*TAKES, *GIVES, *OTHERS, "cudaDriverGetVersion"}:
            raise AttributeError(name)
        return lambda *arguments: self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        if name in self.fails:
            return Status[self.error], 0
        if name in TAKES:
            self.count += 1
            self.held[self.count] = TAKES[name]
            return Status.cudaSuccess, self.count
        if name in GIVES:
            assert self.held.pop(arguments[0]) == GIVES[name]
        return Status.cudaSuccess, self.driver if name == "cudaDriverGetVersion" else 0
