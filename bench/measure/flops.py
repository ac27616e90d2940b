"""What a model asks of a machine: multiply-adds to do and bytes to move, part by part.

A model is a chain of parts, the backbone and its MoE layers. A layer's work follows from its spec;
the backbone's is counted by PyTorch, on one input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ...errors import TraceError
from ...exporter.model import Dimension, Model
from ...exporter.trace import layers_as_nodes
from ...graphs.lowerings.cost import AnyWork, WorkOf

FP32_BYTES = 4

INTEGER_MODES = ("input mode", "core", "output mode")
"""The parts of a muMoE layer's multiply-adds that INT8 makes integer products."""

COUNTED_NAMESPACES = ("aten", "prims", "onnx_symbolic")
"""PyTorch's own operators, and the node that stands in for a MoE layer."""

UNCOUNTED = re.compile(r"rnn|fft|cdist|linalg|attention|transformer|quantiz|sparse|mv$|dot$")
"""Operators of PyTorch that multiply and whose multiply-adds its counter does not know."""


@dataclass(frozen=True, slots=True)
class Part:
    """One step of a model on one batch: its multiply-adds, and the bytes it must move once."""

    name: str
    macs: float
    bytes: float
    integer: bool = False


@dataclass(frozen=True, slots=True)
class Products:
    """Products with constant matrices: multiply-adds for one input, and numbers of weights."""

    macs: float = 0.0
    numbers: float = 0.0


NO_PRODUCTS = Products()


@dataclass(frozen=True)
class ModelWork:
    """What one input of a model asks for: the backbone's multiply-adds, and each layer's tokens.

    `backbone_numbers` are those of its weights that are read.
    """

    model: Model
    backbone_macs: float
    backbone_numbers: float
    tokens: Mapping[str, int]

    def parts(
        self,
        ks: Mapping[str, int],
        batch: int,
        *,
        int8: Collection[str] = (),
        int8_backbone: Products = NO_PRODUCTS,
        number_bytes: int = FP32_BYTES,
    ) -> tuple[Part, ...]:
        """Returns the work of a batch with k = `ks[layer]` experts, the backbone first.

        Of the layers in `int8` the experts' weights are bytes and their products integer products,
        and so are the `int8_backbone` products of the backbone. All other numbers take
        `number_bytes`.
        """
        numbers = self.backbone_numbers - int8_backbone.numbers
        parts = (
            Part("host", batch * (self.backbone_macs - int8_backbone.macs), number_bytes * numbers),
            Part("host/int8", batch * int8_backbone.macs, int8_backbone.numbers, integer=True),
        )
        backbone = (part for part in parts if part.macs)
        layers = (
            part
            for name, layer in self.model.layers.items()
            for part in layer_parts(
                WorkOf(layer.spec, ks[name], batch, self.tokens[name]),
                int8_experts=name in int8,
                number_bytes=number_bytes,
            )
        )
        return (*backbone, *layers)


def work_of(model: Model, x: np.ndarray) -> ModelWork:
    """Returns what one of the inputs x [b, …] asks of a model.

    PyTorch counts the multiply-adds of matrix products, convolutions and attention. Raises
    `TraceError` that names the operators where the backbone calls others that multiply.
    """
    tokens: dict[str, int] = {}
    names = list(model.layers)  # not to be found while nodes stand in their places
    with layers_as_nodes(model.module) as backbone, torch.inference_mode(), _plain_attention():
        hooks = [
            backbone.get_submodule(name).register_forward_pre_hook(_noting(tokens, name))
            for name in names
        ]
        reads = _Reads(backbone)
        try:
            # The later mode is asked first: it takes apart what the earlier one then sees.
            with reads, FlopCounterMode(display=False) as counter:
                backbone(torch.from_numpy(np.ascontiguousarray(x[:1])))
        finally:
            for hook in hooks:
                hook.remove()
    if reads.uncounted:
        raise TraceError(
            f"PyTorch does not count the operations of {', '.join(sorted(reads.uncounted))}"
        )
    return ModelWork(model, counter.get_total_flops() / 2, reads.numbers, tokens)


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


def layer_parts(
    work: AnyWork, *, int8_experts: bool = False, number_bytes: int = FP32_BYTES
) -> Iterator[Part]:
    """Yields a layer's two kinds of work on one batch: passes over the tokens, and the experts.

    The tokens [b, m, d] are read and the outputs [b, m, o] written once. Experts that nobody chose
    are not read; with b·k ≥ n all are taken to be in use. A muMoE layer is one step, of which INT8
    makes two: its large factors, and the gate with the rest.
    """
    spec, macs = work.spec, dict(work.spec.macs(work.tokens, work.k))
    share = number_bytes / FP32_BYTES
    moved = number_bytes * work.batch * work.tokens * (spec.dim + spec.out)
    if spec.kind == "mumoe":
        weights = share * spec.bytes_read(work.k)
        if int8_experts:
            # Each number of a factor takes part in one multiply-add of every token.
            integers = sum(macs.pop(mode, 0) for mode in INTEGER_MODES)
            numbers = integers / work.tokens
            yield Part(f"{spec.name}/factors", work.batch * integers, numbers, integer=True)
            weights -= share * FP32_BYTES * numbers
        yield Part(spec.name, work.batch * sum(macs.values()), moved + weights)
        return
    experts = work.batch * macs.pop("experts")
    active = min(spec.experts, work.selections)
    weights = spec.bytes_read(active) * (1 / FP32_BYTES if int8_experts else share)
    yield Part(f"{spec.name}/routing", work.batch * sum(macs.values()), moved)
    yield Part(f"{spec.name}/experts", experts, weights, integer=int8_experts)


QUANTIZE = "QuantizeLinear"


@dataclass(frozen=True, slots=True)
class IntegerLinear:
    """An integer product y = x·W of the backbone: x [*rows, in], W [in, out].

    The first of `rows` is the batch; None where the graph does not tell them.
    """

    node: str
    rows: tuple[Dimension, ...] | None
    weights: tuple[int, int]

    def macs(self, sizes: Mapping[str, int]) -> int | None:
        """Multiply-adds for the named axes' `sizes`, or None where these do not tell."""
        if self.rows is None:
            return None
        try:
            rows = prod(sizes[size] if isinstance(size, str) else size for size in self.rows)
        except KeyError:
            return None
        return rows * prod(self.weights)


def integer_linears(graph: Path, nodes: Iterable[str]) -> tuple[IntegerLinear, ...]:
    """Returns those of the backbone's `nodes` that the graph file computes in integers."""
    wanted = list(nodes)
    if not wanted:
        return ()
    content = onnx.load(graph, load_external_data=False).graph
    shapes = {
        value.name: tuple(
            dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim
        )
        for value in (*content.input, *content.value_info)
        if value.type.tensor_type.HasField("shape")
    }
    weights = {tensor.name: tuple(tensor.dims) for tensor in content.initializer}
    # What a linear layer becomes is named below it (`graphs.builder`).
    rounded = {
        node.name.rpartition("/")[0]: node.input[0]
        for node in content.node
        if node.op_type == QUANTIZE
    }
    found = []
    for name in wanted:
        shape = shapes.get(rounded[name])
        inputs, outputs = weights[f"{name}/weight"]
        rows = None if shape is None else shape[:-1]
        found.append(IntegerLinear(name, rows, (inputs, outputs)))
    return tuple(found)


def products_of(linears: Iterable[IntegerLinear], sizes: Mapping[str, int]) -> Products:
    """Returns what the linear layers of a backbone ask for, for one input of the named `sizes`.

    Raises `TraceError` where the graph does not tell how many rows one multiplies.
    """
    macs = numbers = 0
    for linear in linears:
        found = linear.macs(sizes)
        if found is None:
            raise TraceError(f"the graph does not tell how many rows {linear.node} multiplies")
        macs += found
        numbers += prod(linear.weights)
    return Products(macs, numbers)
