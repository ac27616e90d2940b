"""Other people's libraries: what they do by themselves, and moexport turns off; PyTorch or none.

They report to their makers, they listen to every host, and they keep compiled code where others may
write. `docs/security.md` lists the settings by library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import MissingExtraError, install

NO_REPORTS = {
    "ORT_DISABLE_TELEMETRY": "1",  # ONNX Runtime: every session, with its graph's name
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub and transformers
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray, which also asks a cloud's metadata host where it runs
}
"""Variables of the environment that stop reports; each counts before its library is loaded."""

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Where PyTorch keeps what `torch.compile` made: libraries that it loads again."""


def turn_off_reports() -> None:
    """Sets `NO_REPORTS` for this process and those that it starts; what a user has set stays."""
    for name, value in NO_REPORTS.items():
        os.environ.setdefault(name, value)


@contextmanager
def without_telemetry(package: str) -> Iterator[None]:
    """Within the block a library that is imported does not find its package for telemetry.

    OpenVINO has no setting: it posts to its makers when it is imported and when it reads a model,
    and takes a stub of its own where the package is missing.
    """
    if package in sys.modules:  # the program that calls has loaded it, and decides
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # Python's own mark for "not there"
    try:
        yield
    finally:
        del sys.modules[package]


def keep_compiled_code_private() -> None:
    """Makes PyTorch keep what it compiles in this user's own folder, unless the user names one.

    Its default is a name in the system's temporary folder that anybody can make first, and what
    lies there is loaded. Where the own folder is open to others, code is kept until the end of the
    process alone.
    """
    named = os.environ.get(COMPILED)
    # PyTorch writes its default there, too, as soon as it has looked for it.
    if named is not None and not Path(named).name.startswith("torchinductor_"):
        return
    from .writing import scratch_until_exit

    os.environ[COMPILED] = str(_private_folder("torch") or scratch_until_exit("torch"))


def _private_folder(name: str) -> Path | None:
    """A folder in the user's cache that nobody else may write to; None where there is none."""
    from .files import cache_folder, why_not_private

    cache = cache_folder()
    if cache is None:
        return None
    folder = cache / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # a home that is read-only
        return None
    return folder if why_not_private(folder) is None else None


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
    import importlib.util

    for module, name in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"{what} needs {name}, which is not installed", hint=INSTALL)
