"""PyTorch in a benchmark: unmodified, compiled, or with Algorithm 2; on a CPU or GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...common.libraries import keep_compiled_code_private
from ...data.batches import Array
from ...errors import FeedError
from ...exporter.inputs import Inputs, completed
from ...exporter.model import CORE_HOST, Host, Model, TensorSpec
from ...exporter.reference import all_outputs
from ...graphs.layers.base import Algorithm, moe_layers, recorded_choices, sharing_weights
from ...graphs.layers.margins import routed_margins
from ...graphs.layers.soft_moe import soft_moe_layers
from ..measure.gpu_rates import device_ms
from .base import Runner, first_of, in_batches

CUDA = "cuda"  # the provider of rows on an NVIDIA GPU; also PyTorch's name of the device


class Expected(NamedTuple):
    """The reference of a case: outputs, the experts of each layer, and margins.

    `margins` are those of layers whose tokens choose (`reference.routed_margins`).
    """

    outputs: Array
    chosen: dict[str, Array]
    margins: dict[str, Array]


class PyTorch(Runner):
    """A PyTorch module with numpy inputs and outputs, without gradients.

    `ports` describe the inputs of a module with several inputs, whose defaults are filled in.
    `host` is the model's.
    """

    def __init__(
        self, module: nn.Module, ports: Sequence[TensorSpec] = (), host: Host = CORE_HOST
    ) -> None:
        self.module, self.ports, self.host = module, ports, host

    @torch.inference_mode()
    def infer(self, x: Inputs, output: int = 0) -> Array:
        result: Array = all_outputs(self.module(*self.tensors(x)))[output].cpu().numpy()
        return result

    @torch.inference_mode()
    def outputs(self, x: Inputs) -> list[Array]:
        return [y.numpy() for y in all_outputs(self.module(*self.tensors(x)))]

    def tensors(self, x: Inputs) -> list[Tensor]:
        arrays = completed(x, self.ports).values() if self.ports else [first_of(x)]
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def bound(self, x: Inputs) -> Callable[[], object]:
        """Returns the module's own call for inputs [b, …], tensor to tensor."""
        tensors = self.tensors(x)
        repeated = self.host.repeated(self.module, tensors)
        return torch.inference_mode()(repeated or (lambda: self.module(*tensors)))

    @torch.inference_mode()
    def with_routing(self, x: Inputs, output: int = 0) -> Expected:
        """Returns the outputs of `infer`, and the experts [b, k] of each layer with k < n."""
        with recorded_choices(self.module) as choices, routed_margins(self.module) as margins:
            y = self.infer(x, output)
        chosen: dict[str, Array] = {}
        for name, layer in moe_layers(self.module).items():
            spec = layer.spec
            if name in choices and (spec.chooses_sets or spec.flat):
                experts = choices[name].chosen.numpy()
                if experts.shape[1] < spec.experts or spec.drops:
                    chosen[name] = experts
        # If experts choose tokens, the margin is that of the token's least certain expert.
        least = {n: m.reshape(len(m), -1).amin(dim=1).numpy() for n, m in margins.items()}
        return Expected(y, chosen, least)


class PyTorchInHalf(PyTorch):
    """A module in FP16, with FP32 numpy inputs and outputs."""

    def tensors(self, x: Inputs) -> list[Tensor]:
        return [t.half() if t.is_floating_point() else t for t in super().tensors(x)]

    def infer(self, x: Inputs, output: int = 0) -> Array:
        y: Array = super().infer(x, output)
        return y.astype(np.float32) if y.dtype == np.float16 else y


class PyTorchOnGpu(PyTorch):
    """A module on the GPU with numpy inputs and outputs, on its own stream.

    Memory comes from PyTorch's allocator, which reuses the memory of earlier calls.
    """

    def __init__(
        self, module: nn.Module, ports: Sequence[TensorSpec] = (), host: Host = CORE_HOST
    ) -> None:
        super().__init__(module, ports, host)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def tensors(self, x: Inputs) -> list[Tensor]:
        return [tensor.to(CUDA) for tensor in super().tensors(x)]

    @torch.inference_mode()
    def infer(self, x: Inputs, output: int = 0) -> Array:
        with torch.cuda.stream(self._stream):
            return super().infer(x, output)

    def bound(self, x: Inputs) -> Callable[[], object]:
        """Returns a call of `infer` for inputs [b, …]; a cache is on the GPU and stays there.

        The logits of a language model are copied to the host.
        """
        with torch.cuda.stream(self._stream), torch.inference_mode():
            repeated = self.host.repeated(self.module, self.tensors(x))
        if repeated is None:
            return partial(self.infer, x)

        @torch.inference_mode()
        def call() -> object:
            with torch.cuda.stream(self._stream):
                return repeated().cpu()

        return call

    @torch.inference_mode()
    def device_ms(self, x: Inputs) -> float:
        with torch.cuda.stream(self._stream):
            inputs = self.tensors(x)
            return device_ms(lambda: self.module(*inputs))


class PyTorchOnGpuInHalf(PyTorchInHalf, PyTorchOnGpu):
    """A module in FP16 on the GPU."""


def runner_on(provider: str, precision: str = "fp32") -> type[PyTorch]:
    """Returns the runner's class for a provider, in FP32 or FP16."""
    if precision == "fp16":
        return PyTorchOnGpuInHalf if provider == CUDA else PyTorchInHalf
    return PyTorchOnGpu if provider == CUDA else PyTorch


def in_precision(module: nn.Module, precision: str) -> nn.Module:
    """Returns a network, or its copy in FP16."""
    return copy.deepcopy(module).half() if precision == "fp16" else module


class CompiledPyTorch(Runner):
    """A module under `torch.compile`, for fixed batch sizes: each is compiled at its first call.

    Other sizes run in padded batches of the largest size: compiling again takes up to a minute, and
    the kernels would differ from the timed ones.
    """

    def __init__(
        self, module: nn.Module, sizes: Sequence[int], runner: type[PyTorch] = PyTorch
    ) -> None:
        keep_compiled_code_private()
        # On a GPU, kernels are replayed as CUDA graphs, as in other engines.
        mode = "reduce-overhead" if issubclass(runner, PyTorchOnGpu) else None
        compiled = torch.compile(module, dynamic=False, mode=mode)
        # compiling a module returns a module, although the annotation differs
        assert isinstance(compiled, nn.Module)
        self._runner = runner(compiled)
        self._sizes = frozenset(sizes)

    def infer(self, x: Inputs, output: int = 0) -> Array:
        limit, accepts = max(self._sizes), self._sizes.__contains__
        infer = partial(self._runner.infer, output=output)
        return in_batches(infer, first_of(x), limit=limit, accepts=accepts)

    def bound(self, x: Inputs) -> Callable[[], object]:
        """Returns the module's own call if it was compiled for these inputs [b, …]."""
        return self._runner.bound(x) if len(first_of(x)) in self._sizes else super().bound(x)

    def device_ms(self, x: Inputs) -> float | None:
        return self._runner.device_ms(x)


def on_device(model: Model, device: str) -> Model:
    """Returns a copy of a model with its weights on another device; the model stays unchanged.

    Weights that its module and its original share are also shared in the copies.
    """
    modules = [model.module] if model.original is None else [model.module, model.original]
    # The memo maps each tensor to its copy on the device, so the deep copy copies no weights.
    memo: dict[int, Any] = {}
    for module in modules:
        for parameter in module.parameters():
            memo.setdefault(
                id(parameter), nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
            )
        for buffer in module.buffers():
            memo.setdefault(id(buffer), buffer.to(device))
    copies = [copy.deepcopy(module, memo) for module in modules]
    original = copies[1] if len(copies) > 1 else None
    return replace(model, module=copies[0], original=original, as_trained=None)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Within the context, PyTorch computes FP32 products in FP32 on a GPU, as other engines do.

    By default it rounds the factors of convolutions to TF32: 10 bits of mantissa.
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
    """Returns the model as its user runs it: the factory's own module, if there is one."""
    return PyTorch(model.untouched, model.inputs, model.host)


def with_algorithm_1(
    model: Model, k: int | Mapping[str, int], algorithm: Algorithm, *, renormalize: bool = False
) -> PyTorch:
    """Returns the model with k experts in every layer, or with one k per layer, by name.

    It shares the model's weights.
    """
    module = sharing_weights(model.module)
    for name, layer in moe_layers(module).items():
        layer.keep = min(k if isinstance(k, int) else k[name], layer.spec.experts)
        layer.algorithm = algorithm
        layer.renormalize = renormalize
    return PyTorch(module, model.inputs)


def has_stacked_form(model: Model) -> bool:
    """Returns whether the unmodified model could compute its experts in one product but does not.

    A loop over many modules is slow, which makes it a poor baseline.
    """
    trained = model.module if model.as_trained is None else model.as_trained
    layers = soft_moe_layers(trained)
    loops = any(isinstance(layer.w1, nn.ParameterList) for layer in layers.values())
    return bool(layers) and (loops or model.untouched is not trained)


def outputs_of(base: PyTorch, x: Inputs, name: str, output: int = 0) -> Array:
    """Returns a candidate's PyTorch outputs; FeedError if the model cannot run the inputs."""
    try:
        return base.infer(x, output)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise FeedError(
            f"the PyTorch model {name} cannot run inputs of shape {first_of(x).shape}: {error}",
            hint="the data must fit the model",
        ) from error
