"""What differs between the versions that moexport runs with, and from which one on it can go."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

RUN: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = MappingProxyType(
    {
        "torch": ((2, 9), (2, 15)),
        "transformers": ((5, 20), (5, 24)),
        "onnx": ((1, 20), (1, 23)),
        "onnxruntime": ((1, 24), (1, 32)),
        "openvino": ((2026, 0), (2026, 4)),
        "onnxscript": ((0, 7), (0, 7)),
        "numpy": ((2, 0), (2, 5)),
    }
)
"""The oldest and the newest version of each package that `make compat` was run with."""


def outside_of_what_was_run() -> list[str]:
    """Returns a line about each installed package that is older or newer than what was run."""
    lines = []
    for name, (oldest, newest) in RUN.items():
        version = release(name)
        if version is not None and not oldest <= version <= newest:
            word, end = ("newer", newest) if version > newest else ("older", oldest)
            lines.append(f"{name} {_text(version)} is {word} than what was run: {_text(end)}")
    return lines


def release(distribution: str) -> tuple[int, int] | None:
    """Returns the first two numbers of an installed version; None where it is not installed."""
    from importlib import metadata

    try:
        match = re.match(r"(\d+)\.(\d+)", metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None
    return None if match is None else (int(match[1]), int(match[2]))


def older(distribution: str, first: tuple[int, int]) -> bool:
    """Whether an installed package is older than the first version that can do something."""
    version = release(distribution)
    return version is not None and version < first


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
    from importlib import metadata

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
