"""PyTorch and what is installed with it: a machine that only runs bundles does without them.

What differs between the versions that moexport runs with is here, with the version from which it
can go.
"""

from __future__ import annotations

import importlib.util
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from types import MappingProxyType
from typing import Any

from ..errors import MissingExtraError, install

PACKAGES = {
    "torch": "PyTorch",
    "onnx_ir": "onnx-ir",
    "onnxscript": "onnxscript",
    "safetensors": "safetensors",
    "yaml": "PyYAML",
    "matplotlib": "Matplotlib",
    "PIL": "Pillow",
}
"""What requirements-run.txt leaves out of moexport's dependencies: modules and their names."""

INSTALL = (
    f"on the machine that exports, {install('cpu')}, or '.[gpu]'; run, verify, inspect, report and "
    "build work on bundles without it"
)


def check_pytorch(what: str) -> None:
    """Raises `MissingExtraError` for `what` in an environment that is for running bundles alone."""
    for module, name in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"{what} needs {name}, which is not installed", hint=INSTALL)


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Sets PyTorch's thread count within the context."""
    import torch

    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


PROBE_S, LONG_S = 0.04, 1.0
"""How long calls with one number of threads are looked at, twice; of longer calls one is enough."""

FEWER = 0.95
"""More threads must take less than this share of the time, or fewer are as good."""

FAR = 4.0
"""Where so many threads take so much longer than fewer, no more are tried."""


@dataclass(frozen=True, slots=True)
class Threads:
    """The number of threads that everything is timed with.

    `call_ms` has the milliseconds of a call of the untouched model with each number that was tried:
    none where the number was given, or where there is only one.
    """

    count: int
    call_ms: Mapping[int, float] = field(default_factory=dict)

    @property
    def told(self) -> str:
        """The number and why: `1 thread; PyTorch: 0.75 ms a call with 1, 151 ms with 2`."""
        told = f"{self.count} thread{'' if self.count == 1 else 's'}"
        if not self.call_ms:
            return told
        listed = ", ".join(
            f"{ms:.3g} ms{'' if place else ' a call'} with {count}"
            for place, (count, ms) in enumerate(self.call_ms.items())
        )
        return f"{told}, with which the untouched model is fastest ({listed})"


def fastest_threads(*calls: Callable[[], object]) -> Threads:
    """Returns with how many of PyTorch's threads calls are fastest: 1, 2, 4 … all of them.

    Of several calls, as of several batch sizes, it is the geometric mean that counts.
    """
    from statistics import median

    import torch

    most = torch.get_num_threads()
    if most == 1:
        return Threads(1)
    taken: dict[int, list[list[float]]] = {}

    def look(count: int) -> float:
        torch.set_num_threads(count)
        times = taken.setdefault(count, [[] for _ in calls])
        for call, ms in zip(calls, times, strict=True):
            _look(call, ms)
        return math.exp(sum(math.log(max(1e-6, median(ms))) for ms in times) / len(times))

    with with_threads(None):
        call_ms: dict[int, float] = {}
        for count in [
            *(1 << power for power in range(most.bit_length()) if 1 << power < most),
            most,
        ]:
            call_ms[count] = look(count)
            if call_ms[count] > FAR * min(call_ms.values()):
                break
        # Once more, the other way: a moment in which something else ran decides nothing.
        for count in reversed(call_ms):
            call_ms[count] = look(count)
    fastest = min(call_ms.values())
    return Threads(next(n for n, ms in call_ms.items() if FEWER * ms <= fastest), call_ms)


def _look(call: Callable[[], object], times_ms: list[float]) -> None:
    """Adds the milliseconds of some calls, of which the first is left out unless it is long."""
    end = math.inf
    while time.perf_counter() < end and max(times_ms, default=0.0) < 1e3 * LONG_S:
        began = time.perf_counter()
        call()
        now = time.perf_counter()
        if end < math.inf or now - began > LONG_S:
            times_ms.append(1e3 * (now - began))
        else:
            end = now + PROBE_S


RUN: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = MappingProxyType(
    {
        "torch": ((2, 9), (2, 15)),
        "transformers": ((5, 20), (5, 24)),
        "onnx": ((1, 20), (1, 23)),
        "onnxruntime": ((1, 24), (1, 32)),
        "onnxscript": ((0, 7), (0, 7)),
        "numpy": ((2, 0), (2, 4)),
    }
)
"""The oldest and the newest version of each package that `make compat` was run with."""


def outside_of_what_was_run() -> list[str]:
    """Returns a line about each installed package that is older or newer than what was run."""
    lines = []
    for name, (oldest, newest) in RUN.items():
        found = release(name)
        if found is not None and not oldest <= found <= newest:
            word, end = ("newer", newest) if found > newest else ("older", oldest)
            lines.append(f"{name} {_text(found)} is {word} than what was run: {_text(end)}")
    return lines


def release(distribution: str) -> tuple[int, int] | None:
    """Returns the first two numbers of an installed version; None where it is not installed."""
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None
    return None if found is None else (int(found[1]), int(found[2]))


def older(distribution: str, first: tuple[int, int]) -> bool:
    """Whether an installed package is older than the first version that can do something."""
    found = release(distribution)
    return found is not None and found < first


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


TRACES = (2, 13)
"""The first PyTorch that is known to trace all that moexport exports."""


def least_size(traced: int) -> int | None:
    """Returns the smallest size that an axis traced at `traced` may be declared with.

    PyTorch 2.9 takes it for a fault of the network that a product of matrices was traced with more
    than one row; what it traces then is right for one row as well. Can go with `TRACES`.
    """
    return 2 if traced > 1 and older("torch", TRACES) else None


def older_tracer() -> str | None:
    """Returns what to do where an older PyTorch fails to trace; None with one from `TRACES` on.

    PyTorch 2.9 traces no network that takes its inputs as `*past`: mumoe-gpt2 with a cache.
    """
    if not older("torch", TRACES):
        return None
    return (
        f"PyTorch {metadata.version('torch')} traces less than {_text(TRACES)} does: pip install "
        f"'torch>={_text(TRACES)}', or export without a cache (--set use_cache=false)"
    )


ROUTED_WEIGHTS = (1, 31)
"""The first ONNX Runtime whose `QMoE` takes the weights of the experts and `accuracy_level`."""


def graph_of(exported: Any) -> Any:
    """Returns the graph that the exporter of transformers gave.

    Version 5.20 returns PyTorch's own program, whose graph is its `model`; 5.23 wraps it. Can go
    with 5.23 as the oldest.
    """
    return exported.program if hasattr(exported, "program") else exported.model


CACHES = ("past_key_values", "cache")
"""What models of transformers call the cache that they return: `cache` from 5.24 on. The first can
go with that as the oldest."""
