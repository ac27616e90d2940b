"""A GPU's rates: bytes from its memory, and products in FP32 and FP16, timed on the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...common import timing

GIB = 1 << 30
SQUARES = {"fp32": 4096, "fp16": 8192}
"""The sizes of the square matrices in timed products, which take milliseconds on a large GPU."""


def device_ms(call: Callable[[], object], device: str = "cuda") -> float:
    """Makes a call and returns the time on the device in ms, between two CUDA events.

    On a CPU, as in tests, it is measured by the wall clock.
    """
    if device == "cpu":
        started = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - started) / timing.NS_PER_MS
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


class Probe(timing.TimedCall):
    """A call that measures the machine, or a `device` with its own clock; it needs no inputs."""

    inputs = 1

    def __init__(self, call: Callable[[], object], device: str | None = None) -> None:
        self._call, self._device = call, device

    def __call__(self, _: int) -> object:
        return self._call() if self._device is None else device_ms(self._call, self._device)

    def device_ms(self, _: int) -> float | None:
        return None if self._device is None else device_ms(self._call, self._device)


class GpuProbes:
    """Calls that measure a GPU, timed in turn with the cases and so under the same disturbances.

    One call sums `stream_bytes`, one copies them, and two multiply matrices of `squares` rows.
    """

    def __init__(
        self, device: str = "cuda", *, stream_bytes: int = GIB, squares: Mapping[str, int] = SQUARES
    ) -> None:
        stream = torch.ones(stream_bytes // 4, device=device)
        copy = torch.empty_like(stream)
        self._bytes, self._squares = stream.nbytes, squares
        single = torch.randn(squares["fp32"], squares["fp32"], device=device)
        half = torch.randn(squares["fp16"], squares["fp16"], device=device).half()
        calls: dict[str, Callable[[], object]] = {
            "probe: GPU sum": stream.sum,
            "probe: GPU copy": lambda: copy.copy_(stream),
            "probe: GPU fp32": lambda: single @ single,
            "probe: GPU fp16": lambda: half @ half,
        }
        self.calls: dict[str, timing.IndexedCall] = {
            name: Probe(call, device) for name, call in calls.items()
        }

    def rates(self, ms: Mapping[str, float]) -> dict[str, Any]:
        """Returns fields of `roofline.Rates` from times on the device in ms, by names of calls."""
        moved = max(self._bytes / ms["probe: GPU sum"], 2 * self._bytes / ms["probe: GPU copy"])
        return {
            "stream_gb_s": moved / 1e6,
            "matmul_gflop_s": 2 * self._squares["fp32"] ** 3 / 1e6 / ms["probe: GPU fp32"],
            "fp16_gflop_s": 2 * self._squares["fp16"] ** 3 / 1e6 / ms["probe: GPU fp16"],
        }
