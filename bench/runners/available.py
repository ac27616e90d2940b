"""Which engines a benchmark can measure on this machine, and why not the others."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from ...common.text import listed, near_miss
from ...errors import UsageError
from ...exporter.doctor import Ability, diagnose
from ...exporter.tensorrt.backends import BACKENDS, first_gpu
from ...graphs.targets import Target
from ..results import (
    ONNXRUNTIME,
    OPENVINO,
    PYTORCH_ALGORITHM_2,
    PYTORCH_COMPILE,
    PYTORCH_EAGER,
    PYTORCH_EAGER_CUDA,
    PYTORCH_EXPERTS_EAGER,
    PYTORCH_GROUPED_MM,
    TENSORRT,
    TRANSFORMERS_ONNX,
    Absent,
)
from ..results import TENSORRT_RTX as RTX

COMPILERS = ("c++", "g++", "clang++")
ORT_TENSORRT = "run on ONNX Runtime's TensorRT"

Missing = Callable[[], str | None]
"""Returns why something cannot run here, None where it can."""

Serves = Literal["all", "one-input", "transformers"]
"""Which models an engine runs: all, those with one input, or those of `transformers`."""

NOT_SERVED: dict[Serves, str] = {
    "one-input": "it runs models with one input, and these have several",
    "transformers": "it runs models of transformers",
}


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine as `--engine` names it: the rows' `engine` and `provider`, and what it needs.

    `target` is what graphs for it are exported for, None where it runs PyTorch's own modules or
    another exporter's graph.
    """

    name: str
    engine: str
    provider: str
    missing: Missing
    target: Target | None = None
    serves: Serves = "all"

    @property
    def in_pytorch(self) -> bool:
        """Whether it runs PyTorch's own modules."""
        return self.target is None and self.engine != TRANSFORMERS_ONNX

    @property
    def compiles(self) -> bool:
        """Whether it runs engines that are compiled from graphs: one of the TensorRTs."""
        return self.engine in BACKENDS


def _nothing() -> str | None:
    return None


def _compiler() -> str | None:
    """`torch.compile` writes C++ for a CPU and compiles it."""
    if sys.platform == "win32" or any(shutil.which(name) for name in COMPILERS):
        return None
    return f"no C++ compiler ({', '.join(COMPILERS)}): install one, for example g++"


def _torch_cuda() -> str | None:
    import torch

    if first_gpu() is None:
        return "there is no NVIDIA GPU, or no driver for it"
    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA: install a build with it (pytorch.org says how)"
    if not torch.cuda.is_available():
        return f"the driver does not serve PyTorch, which is built for CUDA {torch.version.cuda}"
    return None


def _triton() -> str | None:
    """`torch.compile` writes Triton for a GPU."""
    reason = _torch_cuda()
    if reason is None and importlib.util.find_spec("triton") is None:
        return "torch.compile needs Triton on a GPU: pip install triton"
    return reason


@functools.cache
def _abilities() -> dict[str, Ability]:
    return {ability.name: ability for ability in diagnose().abilities}


def _able(*names: str) -> Missing:
    """What `moexport doctor` says against the first of these abilities that is not there."""

    def missing() -> str | None:
        found = map(_abilities().__getitem__, names)
        return next((each.detail for each in found if not each.available), None)

    return missing


def _backend(name: str) -> Missing:
    title = BACKENDS[name].title
    return _able(f"build {title} engines", f"run {title} engines")


ONE: Serves = "one-input"
HF: Serves = "transformers"

KINDS = {
    kind.name: kind
    for kind in (
        EngineKind(PYTORCH_EAGER, PYTORCH_EAGER, "cpu", _nothing),
        EngineKind(PYTORCH_COMPILE, PYTORCH_COMPILE, "cpu", _compiler, serves=ONE),
        EngineKind(PYTORCH_ALGORITHM_2, PYTORCH_ALGORITHM_2, "cpu", _nothing, serves=ONE),
        EngineKind(PYTORCH_GROUPED_MM, PYTORCH_GROUPED_MM, "cpu", _nothing, serves=HF),
        EngineKind(PYTORCH_EXPERTS_EAGER, PYTORCH_EXPERTS_EAGER, "cpu", _nothing, serves=HF),
        EngineKind(PYTORCH_EAGER_CUDA, PYTORCH_EAGER, "cuda", _torch_cuda),
        EngineKind(f"{PYTORCH_COMPILE}-cuda", PYTORCH_COMPILE, "cuda", _triton, serves=ONE),
        EngineKind(
            f"{PYTORCH_ALGORITHM_2}-cuda", PYTORCH_ALGORITHM_2, "cuda", _torch_cuda, serves=ONE
        ),
        EngineKind(ONNXRUNTIME, ONNXRUNTIME, "cpu", _able("run on CPU"), "ort-cpu"),
        EngineKind(f"{ONNXRUNTIME}-cuda", ONNXRUNTIME, "cuda", _able("run on CUDA"), "ort-cuda"),
        EngineKind(
            f"{ONNXRUNTIME}-tensorrt", ONNXRUNTIME, "tensorrt", _able(ORT_TENSORRT), "onnx", ONE
        ),
        EngineKind(OPENVINO, OPENVINO, "cpu", _able("run in OpenVINO"), "onnx", ONE),
        EngineKind(TENSORRT, TENSORRT, TENSORRT, _backend(TENSORRT), "tensorrt", ONE),
        EngineKind(RTX, RTX, RTX, _backend(RTX), "tensorrt-rtx", ONE),
        EngineKind(TRANSFORMERS_ONNX, TRANSFORMERS_ONNX, "cpu", _able("run on CPU"), serves=HF),
    )
}
"""Every engine, by its name.

The untouched model (`pytorch-eager`) is always measured, and on the GPU (`pytorch-eager-cuda`)
beside whatever runs there.
"""

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


def parse_engines(text: str) -> tuple[str, ...]:
    """Returns engine names from a list, `all` for every one; UsageError for what is no name."""
    parts = listed(text)
    for part in (each for each in parts if each not in (*KINDS, ALL)):
        hint = near_miss(part, (*KINDS, ALL))
        raise UsageError(f"--engine {part}: there is no such engine", hint=hint)
    if not parts:
        raise UsageError("--engine is empty", hint=near_miss("", (*KINDS, ALL)))
    named = (KINDS if part == ALL else (part,) for part in parts)
    return tuple(dict.fromkeys(chain.from_iterable(named)))


def select(names: Iterable[str], models: Sequence[Serves] = (ONE, HF)) -> Selection:
    """Returns which of the named engines can run here, and why each other known one is left out.

    `models` are what the models are that will be measured; an engine for others that was not named
    is not mentioned. The untouched model takes part wherever another engine runs: always on the
    CPU, on the GPU with the first engine there.
    """
    asked = set(names) | {PYTORCH_EAGER}
    if any(KINDS[name].provider != "cpu" and KINDS[name].missing() is None for name in asked):
        asked.add(PYTORCH_EAGER_CUDA)
    everything = asked >= KINDS.keys()
    present, absent = [], []
    for kind in KINDS.values():
        if kind.serves != "all" and kind.serves not in models:
            if kind.name in asked and not everything:
                absent.append(Absent(kind.name, NOT_SERVED[kind.serves]))
            continue
        reason = kind.missing()
        if reason is None and kind.name not in asked:
            reason = f"not asked for: --engine {kind.name}"
        if reason is None:
            present.append(kind)
        else:
            absent.append(Absent(kind.name, reason))
    return Selection(tuple(present), tuple(absent))
