"""PyTorch on an NVIDIA GPU: a model's copy there, run from arrays and timed by CUDA events."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...exporter.model import Model
from ..bench_data import Array

CUDA = "cuda"
"""The provider of rows on an NVIDIA GPU, as PyTorch calls the device."""


class PyTorchOnGpu:
    """A module that lies on the GPU behind numpy: arrays in, arrays out, on a stream of its own.

    Memory comes from PyTorch's allocator, which keeps what earlier calls have used for later ones.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def __call__(self, x: Array) -> Array:
        """Maps inputs [b, ...] to outputs [b, ...]; waits until they are here."""
        with torch.cuda.stream(self._stream):
            output: Tensor = self.module(torch.from_numpy(x).to(CUDA))
            result: Array = output.cpu().numpy()
        return result

    @torch.inference_mode()
    def device_ms(self, x: Array) -> float:
        """Returns the GPU's time for inputs [b, ...]: between two events, copies left out."""
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
