"""What the network around the MoE layers asks of a machine, counted while it runs one input."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ...errors import TraceError
from ...exporter.model import Model
from ...exporter.trace import layers_as_nodes

COUNTED_NAMESPACES = ("aten", "prims", "onnx_symbolic")
"""PyTorch's own operators, and the node that stands in for a MoE layer."""

UNCOUNTED = re.compile(r"rnn|fft|cdist|linalg|attention|transformer|quantiz|sparse|mv$|dot$")
"""Operators of PyTorch that multiply and whose multiply-adds its counter does not know."""


@dataclass(frozen=True, slots=True)
class HostWork:
    """What one input asks for: multiply-adds, numbers of weights read, and each layer's tokens."""

    macs: float
    numbers: float
    tokens: Mapping[str, int]


def host_work(model: Model, x: np.ndarray) -> HostWork:
    """Returns the work of one of the inputs x [b, …], the MoE layers left out.

    PyTorch counts the multiply-adds of matrix products, convolutions and attention. Raises
    `TraceError` that names the operators where the host calls others that multiply.
    """
    tokens: dict[str, int] = {}
    names = list(model.layers)  # not to be found while nodes stand in their places
    with layers_as_nodes(model.module) as host, torch.inference_mode(), _plain_attention():
        hooks = [
            host.get_submodule(name).register_forward_pre_hook(_noting(tokens, name))
            for name in names
        ]
        reads = _Reads(host)
        try:
            # The later mode is asked first: it takes apart what the earlier one then sees.
            with reads, FlopCounterMode(display=False) as counter:
                host(torch.from_numpy(np.ascontiguousarray(x[:1])))
        finally:
            for hook in hooks:
                hook.remove()
    if reads.uncounted:
        raise TraceError(
            f"PyTorch does not count the operations of {', '.join(sorted(reads.uncounted))}"
        )
    return HostWork(counter.get_total_flops() / 2, reads.numbers, tokens)


def _noting(tokens: dict[str, int], name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """A hook that notes a layer's token count m: of [b, m, d], or one of [b, d]."""

    def note(node: nn.Module, inputs: tuple[Any, ...]) -> None:
        as_tokens: Callable[[Tensor], Tensor] = node.tokens  # type: ignore[assignment]
        tokens[name] = prod(as_tokens(inputs[0]).shape[1:-1])

    return note


@contextmanager
def _plain_attention() -> Iterator[None]:
    """The counter knows attention as two matmuls, not as the kernels that fuse them on a CPU."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch's is not annotated
    """Notes how much of each parameter is read, and what multiplies without being counted.

    Of a table that is only looked up in, the rows are read that are asked for.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._read: dict[int, int] = {}
        self.uncounted: set[str] = set()

    @property
    def numbers(self) -> int:
        """Numbers of parameters that were read, each once."""
        return sum(self._read.values())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operator and notes what it reads."""
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        counted = func._overloadpacket in flop_registry
        if func.namespace not in COUNTED_NAMESPACES or (not counted and UNCOUNTED.search(name)):
            self.uncounted.add(f"{func.namespace}::{name}")
        if func.is_view:
            return result
        for each in (*args, *(kwargs or {}).values()):
            for tensor in each if isinstance(each, list | tuple) else (each,):
                if isinstance(tensor, Tensor):
                    self._note(tensor, result if name == "embedding" else tensor)
        return result

    def _note(self, tensor: Tensor, read: Tensor) -> None:
        if tensor.untyped_storage().data_ptr() in self._storages:
            place = tensor.data_ptr()
            self._read[place] = max(self._read.get(place, 0), min(tensor.numel(), read.numel()))
