"""PyTorch as it takes part in a benchmark: untouched, compiled, with Algorithm 2; CPU or GPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...calibration.feeds import Array
from ...common.user_code import names_code
from ...errors import FeedError
from ...exporter.checkpoints.load import load
from ...exporter.model import Model
from ...graphs.layers.base import Algorithm, moe_layers, recorded_choices, sharing_weights
from ..plan import Candidate, Case
from ..results import PYTORCH_ALGORITHM_2, PYTORCH_COMPILE
from .base import Loader, Runner, in_batches

CUDA = "cuda"  # the provider of rows on an NVIDIA GPU, as PyTorch calls the device


class PyTorch(Runner):
    """A PyTorch module behind numpy: arrays in, arrays out, without gradients."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @torch.inference_mode()
    def infer(self, x: Array) -> Array:
        """Maps inputs [b, …] to outputs [b, …]."""
        result: Array = self.module(torch.from_numpy(x)).numpy()
        return result

    def bound(self, x: Array) -> Callable[[], object]:
        """Returns the module's own call for inputs [b, …], tensor to tensor."""
        inputs = torch.from_numpy(x)

        @torch.inference_mode()
        def call() -> object:
            return self.module(inputs)

        return call

    @torch.inference_mode()
    def with_routing(self, x: Array) -> tuple[Array, dict[str, Array]]:
        """Returns the outputs, and the experts [b, k] that each layer with k < n chose."""
        with recorded_choices(self.module) as choices:
            output = self.infer(x)
        specs = {name: layer.spec for name, layer in moe_layers(self.module).items()}
        sizes = {name: spec.experts for name, spec in specs.items() if spec.chooses_sets}
        chosen = {name: choices[name].chosen.numpy() for name in sizes}
        return output, {name: s for name, s in chosen.items() if s.shape[1] < sizes[name]}


class PyTorchOnGpu(Runner):
    """A module that lies on the GPU behind numpy: arrays in, arrays out, on a stream of its own.

    Memory comes from PyTorch's allocator, which keeps what earlier calls have used for later ones.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def infer(self, x: Array) -> Array:
        """Maps inputs [b, …] to outputs [b, …]; waits until they are here."""
        with torch.cuda.stream(self._stream):
            result: Array = self.module(torch.from_numpy(x).to(CUDA)).cpu().numpy()
        return result

    @torch.inference_mode()
    def device_ms(self, x: Array) -> float:
        """Returns the GPU's time for inputs [b, …]: between two events, copies left out."""
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        with torch.cuda.stream(self._stream):
            inputs = torch.from_numpy(x).to(CUDA)
            begin.record()
            self.module(inputs)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


class CompiledPyTorch(Runner):
    """A module under `torch.compile`, for fixed batch sizes: each is compiled at its first call.

    Other sizes run in batches of the largest, filled up at the end: a further compilation takes up
    to a minute, and its kernels would not be those that are timed.
    """

    def __init__(
        self,
        module: nn.Module,
        sizes: Sequence[int],
        runner: Callable[[nn.Module], Runner] = PyTorch,
    ) -> None:
        compiled = torch.compile(module, dynamic=False)
        assert isinstance(compiled, nn.Module)  # a module's compilation is one; its type says less
        self._runner = runner(compiled)
        self._sizes = frozenset(sizes)

    def infer(self, x: Array) -> Array:
        """Maps inputs [b, …] to outputs [b, …]."""
        most, takes = max(self._sizes), self._sizes.__contains__
        return in_batches(self._runner.infer, x, most=most, takes=takes)

    def bound(self, x: Array) -> Callable[[], object]:
        """Returns the module's own call where it was compiled for inputs [b, …] as they are."""
        return self._runner.bound(x) if len(x) in self._sizes else super().bound(x)

    def device_ms(self, x: Array) -> float | None:
        """Returns the GPU's time for inputs [b, …]; None on a CPU."""
        return self._runner.device_ms(x)


def on_device(model: Model, device: str) -> Model:
    """Returns a copy of a model whose weights lie on another device; the model stays as it is.

    What its module and its original share, their copies share too.
    """
    modules = [model.module] if model.original is None else [model.module, model.original]
    # In the memo of a deep copy each tensor stands for its copy there, so that none is made here.
    memo: dict[int, Any] = {}
    for module in modules:
        for parameter in module.parameters():
            memo.setdefault(
                id(parameter), nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
            )
        for buffer in module.buffers():
            memo.setdefault(id(buffer), buffer.to(device))
    copies = [copy.deepcopy(module, memo) for module in modules]
    return replace(model, module=copies[0], original=copies[1] if len(copies) > 1 else None)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Within the context PyTorch computes FP32 products in FP32 on a GPU, as other engines do.

    By default it rounds the factors of convolutions to TF32 there: 10 bits of mantissa.
    """
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def untouched(model: Model) -> PyTorch:
    """Returns the model as its user runs it: the factory's own module where there is one."""
    return PyTorch(model.original if model.original is not None else model.module)


def with_algorithm_1(
    model: Model, k: int, algorithm: Algorithm, *, renormalize: bool = False
) -> PyTorch:
    """Returns the model keeping k experts in every layer; its weights are the model's own."""
    module = sharing_weights(model.module)
    for layer in moe_layers(module).values():
        layer.keep = min(k, layer.spec.experts)
        layer.algorithm = algorithm
        layer.renormalize = renormalize
    return PyTorch(module)


def outputs_of(base: PyTorch, x: Array, name: str) -> Array:
    """Returns what a candidate's PyTorch model gives; FeedError where it cannot run the inputs."""
    try:
        return base.infer(x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise FeedError(
            f"the PyTorch model {name} cannot run inputs of shape {x.shape}: {error}",
            hint="the data must fit the model that is measured",
        ) from error


@dataclass(frozen=True)
class TorchLoader(Loader):
    """Opens a model as a case runs it; `place` returns the model where that is.

    Another process loads it from where `model` came from, when it opens it and not before.
    """

    case: Case
    batches: tuple[int, ...]
    renormalize: bool
    place: Callable[[], Model]
    model: Model | None = None

    def __call__(self) -> Runner:
        """Returns the model as its engine runs it, on the CPU or a GPU."""
        engine, model = self.case.engine, self.place()
        runner: Callable[[nn.Module], Runner]
        runner = PyTorchOnGpu if self.case.provider == CUDA else PyTorch
        if engine == PYTORCH_ALGORITHM_2:
            k, renormalize = self.case.k, self.renormalize
            return runner(with_algorithm_1(model, k, "selected", renormalize=renormalize).module)
        module = untouched(model).module
        if engine == PYTORCH_COMPILE:
            return CompiledPyTorch(module, self.batches, runner)
        return runner(module)

    def __reduce__(self) -> tuple[type[TorchLoader], tuple[object, ...]]:
        if self.model is None or not self.model.source.elsewhere:
            raise TypeError("a model without a source cannot be opened by another process")
        source, by_code = self.model.source, names_code(self.model.source.path)
        again = functools.partial(
            _loaded_again,
            source.path,
            self.case.provider,
            weights=source.weights,
            family=None if by_code else self.model.family,
            config=self.model.config,
            example=self.model.example if by_code else None,
            adapter=source.adapters,
        )
        return TorchLoader, (self.case, self.batches, self.renormalize, again)


def _loaded_again(source: str, provider: str, **options: Any) -> Model:
    model = load(source, **options)
    return on_device(model, CUDA) if provider == CUDA else model


def loaders(candidate: Candidate, batches: Sequence[int] = (1,)) -> dict[Case, Loader]:
    """Returns what is measured for a candidate, each case with what opens it."""
    model, renormalize = candidate.model, candidate.renormalize
    places: dict[str, Callable[[], Model]] = {
        "cpu": lambda: model,
        # One copy on the GPU, made when it is first needed, for all who run it there.
        CUDA: functools.cache(lambda: on_device(model, CUDA)),
    }
    return {
        case: graph.loader
        if graph is not None
        else TorchLoader(case, tuple(batches), renormalize, places[case.provider], model)
        for case, graph in candidate.cases.items()
    }
