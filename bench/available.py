"""Which engines a benchmark can measure on this machine, and why not the others."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import UsageError
from ..exporter.engines.device import first_gpu
from ..exporter.engines.flavours import FLAVOURS
from .results import (
    ONNXRUNTIME,
    PYTORCH_ALGORITHM_2,
    PYTORCH_COMPILE,
    PYTORCH_EAGER,
    TENSORRT,
    TENSORRT_RTX,
    Absent,
)

COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine as `--engine` names it: the rows' `engine` and `provider`, and what it needs.

    `missing` returns why it cannot run here, None where it can.
    """

    name: str
    engine: str
    provider: str
    missing: Callable[[], str | None]


def _nothing() -> str | None:
    return None


def _compiler() -> str | None:
    """`torch.compile` writes C++ for a CPU and compiles it."""
    if sys.platform == "win32" or any(shutil.which(name) for name in COMPILERS):
        return None
    return f"no C++ compiler ({', '.join(COMPILERS)}): install one, for example g++"


def _provider(name: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        import onnxruntime

        if name not in onnxruntime.get_available_providers():
            return f"this ONNX Runtime was built without {name}: pip install onnxruntime-gpu"
        return _gpu()

    return missing


def _gpu() -> str | None:
    return None if first_gpu() else "no NVIDIA GPU on this machine"


def _flavour(name: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        if not FLAVOURS[name].installed():
            return f"not installed: {FLAVOURS[name].install}"
        return _gpu()

    return missing


KINDS = {
    kind.name: kind
    for kind in (
        EngineKind(PYTORCH_EAGER, PYTORCH_EAGER, "cpu", _nothing),
        EngineKind(PYTORCH_COMPILE, PYTORCH_COMPILE, "cpu", _compiler),
        EngineKind(PYTORCH_ALGORITHM_2, PYTORCH_ALGORITHM_2, "cpu", _nothing),
        EngineKind(ONNXRUNTIME, ONNXRUNTIME, "cpu", _nothing),
        EngineKind(f"{ONNXRUNTIME}-cuda", ONNXRUNTIME, "cuda", _provider("CUDAExecutionProvider")),
        EngineKind(
            f"{ONNXRUNTIME}-tensorrt",
            ONNXRUNTIME,
            "tensorrt",
            _provider("TensorrtExecutionProvider"),
        ),
        EngineKind(TENSORRT, TENSORRT, "tensorrt", _flavour(TENSORRT)),
        EngineKind(TENSORRT_RTX, TENSORRT_RTX, "tensorrt-rtx", _flavour(TENSORRT_RTX)),
    )
}
"""Every engine, by its name; the untouched model (`pytorch-eager`) is always measured."""

ALL = "all"


@dataclass(frozen=True, slots=True)
class Selection:
    """The engines to measure, and those that were asked for or known and are not there."""

    present: tuple[EngineKind, ...]
    absent: tuple[Absent, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The engines to measure, as `--engine` names them."""
        return tuple(kind.name for kind in self.present)

    def providers(self) -> tuple[str, ...]:
        """The providers of ONNX Runtime among them."""
        return tuple(kind.provider for kind in self.present if kind.engine == ONNXRUNTIME)


def parse_engines(text: str) -> tuple[str, ...]:
    """Returns engine names from a list; `all` stands for every one.

    Raises UsageError for a name that is not one.
    """
    names: list[str] = []
    for part in (each.strip() for each in text.split(",")):
        if not part:
            continue
        if part == ALL:
            names += KINDS
        elif part in KINDS:
            names.append(part)
        else:
            raise UsageError(
                f"--engine {part}: there is no such engine",
                hint=f"choose from: {', '.join(KINDS)}, or all",
            )
    if not names:
        raise UsageError("--engine is empty", hint=f"choose from: {', '.join(KINDS)}, or all")
    return tuple(dict.fromkeys(names))


def select(names: Iterable[str]) -> Selection:
    """Returns which of the named engines can run here, and why each other known one is left out."""
    asked = set(names) | {PYTORCH_EAGER}
    present, absent = [], []
    for kind in KINDS.values():
        reason = kind.missing()
        if reason is None and kind.name not in asked:
            reason = f"not asked for: --engine {kind.name}"
        if reason is None:
            present.append(kind)
        else:
            absent.append(Absent(kind.name, reason))
    return Selection(tuple(present), tuple(absent))
