"""The list of engines that a benchmark can measure. Imports none of them.

Each record has the engine's loader, which imports its packages when called. The command line,
`moexport doctor`, the reports, the documents and the tests use the list.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from ..errors import MissingExtraError, PluginError
from ..graphs.targets import TARGETS, Precision, Target
from .doctor import (
    Ability,
    Diagnosis,
    Requirement,
    builds_engines,
    diagnose,
    has_provider,
    installed,
    replays_cuda_graphs,
    runs_engines,
)

if TYPE_CHECKING:
    from torch import nn

    from ..common.console import Progress
    from ..exporter.tensorrt.backends import Gpu
    from .runners.base import GraphFile, Loader, ModelRun, Runner

PYTORCH_EAGER = "pytorch-eager"
PYTORCH_EAGER_CUDA = f"{PYTORCH_EAGER}-cuda"
PYTORCH_COMPILE = "pytorch-compile"
PYTORCH_ALGORITHM_2 = "pytorch-algorithm-2"
PYTORCH_STACKED = "pytorch-stacked"
PYTORCH_GROUPED_MM = "pytorch-grouped-mm"
PYTORCH_EXPERTS_EAGER = "pytorch-experts-eager"
ONNXRUNTIME = "onnxruntime"
TRANSFORMERS_ONNX = "transformers-onnx"

COMPILERS = ("c++", "g++", "clang++")

Serves = Literal["all", "one-input", "transformers"]
"""The models that an engine runs: all, those with one input, or those of `transformers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """An engine, as `--engine` names it.

    `engine` and `provider` identify its rows, and `title` is its name in reports. It can be
    measured if every requirement in `requires` is met; each is a line of `moexport doctor`. The
    `extra` in pyproject.toml installs what it needs besides PyTorch and ONNX Runtime.
    """

    name: str
    title: str
    provider: str = "cpu"
    requires: tuple[Requirement, ...]
    extra: str | None = None
    serves: Serves = "all"

    @property
    def engine(self) -> str:
        """Its name without the provider."""
        return self.name.removesuffix(f"-{self.provider}")

    def missing(self) -> str | None:
        """Returns why the engine cannot run here; None if it can."""
        abilities = map(_ability, self.requires)
        return next((ability.detail for ability in abilities if not ability.available), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEngine(EngineKind):
    """An engine that runs PyTorch modules.

    It runs the unmodified model, unless `algorithm_2` selects the loop over experts or
    `experts_form` an implementation in `transformers`. A `stacked` engine computes all experts of
    Soft MoE together and runs no other models; on a CPU it skips those that already do so.
    """

    loader: Callable[[ModelRun], Runner]
    algorithm_2: bool = False
    stacked: bool = False
    experts_form: str | None = None

    @property
    def untouched(self) -> bool:
        """Whether it runs the model as it was trained."""
        return not self.algorithm_2 and self.experts_form is None and not self.stacked


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEngine(EngineKind):
    """An engine that runs graphs for `target`, or those of another exporter if it is None.

    On a CPU, it computes products of a type in `product_types` in that type, and others in FP32.
    """

    loader: Callable[[GraphFile], Loader]
    target: Target | None
    product_types: tuple[Precision, ...] = ()

    @property
    def backend(self) -> str | None:
        """The TensorRT that compiles the graphs, if any."""
        return None if self.target is None else TARGETS[self.target].backend


@functools.cache
def _ability(requirement: Requirement) -> Ability:
    from ..exporter.tensorrt.backends import first_gpu

    return requirement.ability(first_gpu())


# --- loaders -------------------------------------------------------------------------------------


def _in_pytorch(module: nn.Module, run: ModelRun) -> Runner:
    from .runners.pytorch import in_precision, runner_on

    runner = runner_on(run.provider, run.precision)
    return runner(in_precision(module, run.precision), run.model.inputs, run.model.host)


def _compiled(run: ModelRun) -> Runner:
    from .runners.pytorch import CompiledPyTorch, in_precision, runner_on

    module = in_precision(run.model.untouched, run.precision)
    return CompiledPyTorch(module, run.batches, runner_on(run.provider, run.precision))


def _stacked(form: Any, run: ModelRun) -> Runner:
    from .runners.expert_forms import in_stacked_form

    return _in_pytorch(in_stacked_form(run.model, form), run)


def _algorithm_2(run: ModelRun) -> Runner:
    from .runners.pytorch import runner_on, with_algorithm_1

    k = run.k_by_layer or run.k
    looped = with_algorithm_1(run.model, k, "selected", renormalize=run.renormalize)
    return runner_on(run.provider)(looped.module)


def _experts(form: str, run: ModelRun) -> Runner:
    return _in_pytorch(run.model.host.in_form(run.model, run.k_by_layer, form), run)


def _onnxruntime(provider: str, graph: GraphFile, *, parts: bool = True) -> Loader:
    from ..exporter.session import PROVIDERS, SessionOptions
    from .runners.graphs import SessionLoader

    options = SessionOptions(provider=PROVIDERS[provider], timed=provider == "cuda")
    return SessionLoader(graph, options, parts)


def _in_runtime(runtime: Any, graph: GraphFile) -> Loader:
    from ..exporter.session import SessionOptions
    from .runners.graphs import SessionLoader

    return SessionLoader(graph, SessionOptions(runtime=runtime))


def _tensorrt(backend: str, graph: GraphFile) -> Loader:
    from .runners.tensorrt import EngineLoader

    return EngineLoader(graph, backend)


# --- requirements --------------------------------------------------------------------------------


def _has_torch(gpu: Gpu | None) -> str:
    from ..common.environment import versions
    from ..common.libraries import check_pytorch

    check_pytorch("a benchmark")
    return f"PyTorch {versions(('torch',)).get('torch', '')}".rstrip()


def _has_cuda(gpu: Gpu | None) -> str:
    description = _has_torch(gpu)
    if gpu is None:
        raise MissingExtraError("there is no NVIDIA GPU, or no driver for it")
    import torch

    if torch.version.cuda is None:
        raise MissingExtraError(
            "this PyTorch was built without CUDA",
            hint="install a build with CUDA (see pytorch.org)",
        )
    if not torch.cuda.is_available():
        raise MissingExtraError(
            f"the driver does not support PyTorch, which is built for CUDA {torch.version.cuda}"
        )
    return f"{description}, on {gpu.name}"


def _has_compiler(gpu: Gpu | None) -> str:
    """Checks for a C++ compiler, which `torch.compile` needs for CPUs."""
    _has_torch(gpu)
    if sys.platform == "win32":
        return "torch.compile finds the compiler itself"
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        raise MissingExtraError(
            f"no C++ compiler ({', '.join(COMPILERS)})", hint="install one, for example g++"
        )
    return f"compiles with {compiler}"


def _has_triton(gpu: Gpu | None) -> str:
    """Checks for Triton, which `torch.compile` needs for GPUs."""
    description = _has_cuda(gpu)
    if importlib.util.find_spec("triton") is None:
        raise MissingExtraError("torch.compile needs Triton on a GPU", hint="pip install triton")
    return f"Triton, with {description}"


IN_TORCH = Requirement("run in PyTorch", _has_torch)
IN_TORCH_CUDA = Requirement("run in PyTorch on CUDA", _has_cuda)
IN_TRANSFORMERS = installed("run in transformers", "transformers", "transformers", "transformers")
ON_CPU = Requirement("run on CPU", partial(has_provider, "cpu"))


# --- the list ------------------------------------------------------------------------------------

_EAGER = ModelEngine(
    name=PYTORCH_EAGER,
    title="PyTorch",
    requires=(IN_TORCH,),
    loader=lambda run: _in_pytorch(run.model.untouched, run),
)

_COMPILED = ModelEngine(
    name=PYTORCH_COMPILE,
    title="PyTorch, compiled",
    requires=(Requirement("run in torch.compile", _has_compiler),),
    serves="one-input",
    loader=_compiled,
)

_STACKED = ModelEngine(
    name=PYTORCH_STACKED,
    title="PyTorch, stacked experts",
    requires=(IN_TORCH,),
    serves="one-input",
    loader=partial(_stacked, "stacked"),
    stacked=True,
)

_ALGORITHM_2 = ModelEngine(
    name=PYTORCH_ALGORITHM_2,
    title="PyTorch, Algorithm 1 in a loop",
    requires=(IN_TORCH,),
    serves="one-input",
    loader=_algorithm_2,
    algorithm_2=True,
)


def _on_cuda(engine: ModelEngine, **changes: Any) -> ModelEngine:
    """Returns the same engine on an NVIDIA GPU, with some fields changed."""
    on_gpu: dict[str, Any] = {
        "name": f"{engine.name}-cuda",
        "provider": "cuda",
        "requires": (IN_TORCH_CUDA,),
    }
    return replace(engine, **(on_gpu | changes))


_GROUPED_MM = ModelEngine(
    name=PYTORCH_GROUPED_MM,
    title="PyTorch, grouped_mm",
    requires=(IN_TORCH, IN_TRANSFORMERS),
    extra="transformers",
    serves="transformers",
    loader=partial(_experts, "grouped_mm"),
    experts_form="grouped_mm",
)


def _tensorrt_engine(backend: Target, title: str, extra: str) -> GraphEngine:
    return GraphEngine(
        name=backend,
        title=title,
        provider=backend,
        requires=(
            Requirement(f"build {title} engines", partial(builds_engines, backend)),
            Requirement(f"run {title} engines", partial(runs_engines, backend)),
        ),
        extra=extra,
        serves="one-input",
        loader=partial(_tensorrt, backend),
        target=backend,
    )


_LISTED_FIRST: tuple[EngineKind, ...] = (
    _EAGER,
    _COMPILED,
    _STACKED,
    _ALGORITHM_2,
    _GROUPED_MM,
    replace(
        _GROUPED_MM,
        name=PYTORCH_EXPERTS_EAGER,
        title="PyTorch, eager experts",
        loader=partial(_experts, "eager"),
        experts_form="eager",
    ),
    _on_cuda(_EAGER),
    _on_cuda(_COMPILED, requires=(Requirement("run in torch.compile on CUDA", _has_triton),)),
    _on_cuda(_ALGORITHM_2),
    _on_cuda(_STACKED),
    _on_cuda(
        _STACKED,
        name=f"{PYTORCH_GROUPED_MM}-cuda",
        title="PyTorch, grouped_mm",
        loader=partial(_stacked, "grouped_mm"),
    ),
    GraphEngine(
        name=ONNXRUNTIME,
        title="ONNX Runtime",
        requires=(ON_CPU,),
        loader=partial(_onnxruntime, "cpu"),
        target="ort-cpu",
    ),
    GraphEngine(
        name=f"{ONNXRUNTIME}-cuda",
        title="ONNX Runtime",
        provider="cuda",
        requires=(
            Requirement("run on CUDA", partial(has_provider, "cuda")),
            Requirement("replay CUDA graphs", replays_cuda_graphs),
        ),
        extra="gpu",
        loader=partial(_onnxruntime, "cuda"),
        target="ort-cuda",
    ),
    GraphEngine(
        name=f"{ONNXRUNTIME}-tensorrt",
        title="ONNX Runtime",
        provider="tensorrt",
        requires=(
            Requirement("run on ONNX Runtime's TensorRT", partial(has_provider, "tensorrt")),
        ),
        extra="gpu",
        serves="one-input",
        loader=partial(_onnxruntime, "tensorrt"),
        target="onnx",
    ),
)

_LISTED_LAST: tuple[EngineKind, ...] = (
    _tensorrt_engine("tensorrt", "TensorRT", "tensorrt"),
    _tensorrt_engine("tensorrt-rtx", "TensorRT-RTX", "rtx"),
    GraphEngine(
        name=TRANSFORMERS_ONNX,
        title="OnnxExporter of transformers",
        requires=(ON_CPU, IN_TRANSFORMERS),
        extra="transformers",
        serves="transformers",
        loader=partial(_onnxruntime, "cpu", parts=False),
        target=None,
    ),
)


class _EngineKinds(Mapping[str, EngineKind]):
    """The built-in engines, and the plugins' runtimes that targets name.

    The names come from the targets' records; a runtime's record is loaded when it is requested.
    """

    def __init__(self) -> None:
        self._built_in = {kind.name: kind for kind in (*_LISTED_FIRST, *_LISTED_LAST)}

    def __iter__(self) -> Iterator[str]:
        runtimes = (record.runtime for record in TARGETS)
        from_plugins = dict.fromkeys(name for name in runtimes if name not in self._built_in)
        yield from (kind.name for kind in _LISTED_FIRST)
        yield from from_plugins
        yield from (kind.name for kind in _LISTED_LAST)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> EngineKind:
        return self._built_in[name] if name in self._built_in else _runtime_engine(name)


@functools.cache
def _runtime_engine(name: str) -> GraphEngine:
    """Returns the engine for a plugin's runtime, from the first target that names it.

    Raises `KeyError` if none does. If the plugin cannot be loaded, `missing` returns the reason.
    """
    from ..exporter.bundle.runtimes import RUNTIMES

    target = next((each.name for each in TARGETS if each.runtime == name), None)
    if target is None:
        raise KeyError(name)
    title, extra, product_types = name, None, tuple[Precision, ...]()
    with suppress(PluginError):
        record = RUNTIMES[name]
        title, extra, product_types = record.title, record.extra, record.product_types
    return GraphEngine(
        name=name,
        title=title,
        requires=(Requirement(f"run in {title}", lambda _: RUNTIMES[name].state()),),
        extra=extra,
        loader=partial(_in_runtime, name),
        target=target,
        product_types=product_types,
    )


KINDS: Mapping[str, EngineKind] = _EngineKinds()
"""Every engine, by its name.

The unmodified model is always measured on the CPU (`pytorch-eager`), and also on the GPU
(`pytorch-eager-cuda`) if anything else runs there.
"""

TRITON = "triton"
"""A server that runs bundles: an engine that `--engine` cannot select."""


@functools.cache
def titles() -> Mapping[str, str]:
    """Returns the names of engines in reports, by the `engine` of their rows."""
    return MappingProxyType(
        {kind.engine: kind.title for kind in KINDS.values()} | {TRITON: "Triton"}
    )


@functools.cache
def engine_of(engine: str, provider: str | None) -> EngineKind | None:
    """Returns the engine of a row; None if it is unknown."""
    row = engine, provider or "cpu"
    return next((kind for kind in KINDS.values() if (kind.engine, kind.provider) == row), None)


def requirements() -> tuple[Requirement, ...]:
    """Returns the engines' requirements: lines of `moexport doctor`.

    If two plugins claim a target's name, only built-in engines count; other lines report that.
    """
    try:
        kinds = tuple(KINDS.values())
    except PluginError:
        kinds = (*_LISTED_FIRST, *_LISTED_LAST)
    return tuple(requirement for kind in kinds for requirement in kind.requires)


def doctor(*, progress: Progress | None = None) -> Diagnosis:
    """Returns what this machine can build and run, and why it cannot do more; builds nothing."""
    if progress is not None:
        progress.step("checking packages and hardware")
    return diagnose(requirements())
