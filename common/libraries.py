"""Turns off unwanted behaviour of libraries, and handles differences between their versions.

Some libraries send telemetry, listen on every interface, or keep compiled code where others may
write. `docs/security.md` lists the settings by library.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import MissingExtraError, install

NO_REPORTS = {
    "ORT_DISABLE_TELEMETRY": "1",  # ONNX Runtime reports each session with its graph's name
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub and transformers
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray, which also queries the cloud's metadata host
}
"""Environment variables that stop telemetry; each must be set before its library is loaded."""

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""The variable that names the folder for the libraries that `torch.compile` builds."""


def turn_off_reports() -> None:
    """Sets `NO_REPORTS` for this process and its children, but keeps values set by the user."""
    for name, value in NO_REPORTS.items():
        os.environ.setdefault(name, value)


@contextmanager
def without_telemetry(package: str) -> Iterator[None]:
    """Within the block, an imported library does not find its telemetry package.

    OpenVINO has no setting: it reports on import and whenever it reads a model, unless the package
    is missing.
    """
    if package in sys.modules:  # the calling program has chosen to load it
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # Python's mark for a missing module
    try:
        yield
    finally:
        del sys.modules[package]


def keep_compiled_code_private() -> None:
    """Makes PyTorch keep compiled code in this user's own folder, unless the user names one.

    By default the folder has a predictable name in the system's temporary folder, so anybody can
    create it first, and PyTorch loads the files in it. If the user's folder is open to others,
    compiled code lasts only until the process ends.
    """
    named = os.environ.get(COMPILED)
    # PyTorch sets the variable itself once it has used its default folder.
    if named is not None and not Path(named).name.startswith("torchinductor_"):
        return
    from .writing import scratch_until_exit

    os.environ[COMPILED] = str(_private_folder("torch") or scratch_until_exit("torch"))


def _private_folder(name: str) -> Path | None:
    """Returns a folder in the user's cache that nobody else may write to; None if there is none."""
    from .files import cache_folder, why_not_private

    cache = cache_folder()
    if cache is None:
        return None
    folder = cache / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # a read-only home
        return None
    return folder if why_not_private(folder) is None else None


PACKAGES = {
    "torch": "PyTorch",
    "onnx_ir": "onnx-ir",
    "onnxscript": "onnxscript",
    "safetensors": "safetensors",
    "yaml": "PyYAML",
    "vl_convert": "vl-convert",
    "PIL": "Pillow",
}
"""Dependencies that requirements-run.txt leaves out: modules and their package names."""

INSTALL = (
    f"on the machine that exports, {install('cpu')}, or '.[gpu]'; run, verify, inspect, report and "
    "build work on bundles without it"
)


def check_pytorch(what: str) -> None:
    """Raises `MissingExtraError`, naming `what`, in an environment that can only run bundles."""
    import importlib.util

    for module, name in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"{what} needs {name}, which is not installed", hint=INSTALL)


def library(package: str, what: str, hint: str) -> Any:
    """Imports a package of an extra; the error for a missing package begins with `what`."""
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError as error:
        raise MissingExtraError(f"{what}, which is not installed ({error})", hint=hint) from error


TESTED: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = MappingProxyType(
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
"""The oldest and newest version of each package with which `make compat` was run."""


def untested_versions() -> list[str]:
    """Returns a line for each installed package whose version is outside the tested range."""
    lines = []
    for name, (oldest, newest) in TESTED.items():
        version = release(name)
        if version is not None and not oldest <= version <= newest:
            word, tested = "newer" if version > newest else "older", map(_text, (oldest, newest))
            text = " to ".join(tested)
            lines.append(f"{name} {_text(version)} is {word} than those tested: {text}")
    return lines


def release(distribution: str) -> tuple[int, int] | None:
    """Returns the first two numbers of an installed version; None if it is not installed."""
    from importlib import metadata

    try:
        match = re.match(r"(\d+)\.(\d+)", metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None
    return None if match is None else (int(match[1]), int(match[2]))


def older(distribution: str, first: tuple[int, int]) -> bool:
    """Whether an installed package is older than the first version with a feature."""
    version = release(distribution)
    return version is not None and version < first


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


TRACES = (2, 13)
"""The first PyTorch that traces everything that moexport exports."""


def min_size(traced: int) -> int | None:
    """Returns the smallest size that may be declared for an axis traced at `traced`.

    PyTorch 2.9 rejects a matrix product that was traced with more than one row if one row is
    allowed, although the graph works for one row as well. Remove this together with `TRACES`.
    """
    return 2 if traced > 1 and older("torch", TRACES) else None


def older_tracer() -> str | None:
    """Returns a hint for a failed trace if PyTorch is older than `TRACES`; otherwise None.

    PyTorch 2.9 cannot trace a network with inputs declared as `*past`: mumoe-gpt2 with a cache.
    """
    from importlib import metadata

    if not older("torch", TRACES):
        return None
    return (
        f"PyTorch {metadata.version('torch')} cannot trace everything that {_text(TRACES)} can: "
        f"pip install 'torch>={_text(TRACES)}', or export without a cache (--set use_cache=false)"
    )


ROUTED_WEIGHTS = (1, 31)
"""The first ONNX Runtime whose `QMoE` accepts the experts' weights and `accuracy_level`."""


def graph_of(exported: Any) -> Any:
    """Returns the graph that the exporter of transformers has made.

    Version 5.20 returns PyTorch's own program, whose graph is its `model`; 5.23 wraps it.
    Remove this once 5.23 is the oldest.
    """
    return exported.program if hasattr(exported, "program") else exported.model


CACHES = ("past_key_values", "cache")
"""Names of the cache that models from transformers return: `cache` from 5.24 on. Remove the first
once 5.24 is the oldest."""
