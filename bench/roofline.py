"""The least time that a machine needs for a model's work, to divide measured times by.

A model's work is a chain of parts, the host and its MoE layers, each with multiply-adds to do and
bytes to move. A part takes at least the longer of the two at the machine's own rates (Williams,
Waterman and Patterson, "Roofline", 2009), and the parts wait for each other. What stays in a cache
between two calls can be faster than the limit, which moves every byte from memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import helper, numpy_helper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..exporter import timing
from ..exporter.model import Model
from ..exporter.trace import layers_as_nodes
from ..graphs.lowerings.base import AnyWork, WorkOf

FP32_BYTES = 4
_STREAM = 1 << 28  # floats: 1 GiB, larger than any cache
_SQUARE = 2048


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine reaches with the threads of a benchmark.

    `stream_gb_s` is a plain sum over 1 GiB in PyTorch. `matmul_gflop_s` is the product of two
    2048 × 2048 matrices in PyTorch or ONNX Runtime, whichever is faster; `int8_gop_s` the same of
    unsigned by signed bytes in ONNX Runtime. A multiply-add is two operations.
    """

    stream_gb_s: float
    matmul_gflop_s: float
    int8_gop_s: float

    def as_json(self) -> dict[str, float]:
        """The rates by the names they have in `results.json`."""
        return {
            "stream_gb_s": self.stream_gb_s,
            "matmul_gflop_s": self.matmul_gflop_s,
            "int8_gop_s": self.int8_gop_s,
        }


@dataclass(frozen=True, slots=True)
class Part:
    """One step of a model on one batch: its multiply-adds, and the bytes it must move once."""

    name: str
    macs: float
    bytes: float
    integer: bool = False

    def least_ms(self, rates: Rates) -> float:
        """Milliseconds at the machine's rates, moving and computing at the same time."""
        rate = rates.int8_gop_s if self.integer else rates.matmul_gflop_s
        return max(2e-6 * self.macs / rate, 1e-6 * self.bytes / rates.stream_gb_s)


def limit_ms(parts: tuple[Part, ...], rates: Rates) -> float:
    """Returns the least time of parts that run one after the other, in milliseconds."""
    return sum(part.least_ms(rates) for part in parts)


@dataclass(frozen=True)
class ModelWork:
    """What one input of a model asks for: the host's multiply-adds, and each layer's tokens."""

    model: Model
    host_macs: float
    host_bytes: float
    tokens: Mapping[str, int]

    def parts(
        self, kept: Mapping[str, int], batch: int, *, int8_experts: bool = False
    ) -> tuple[Part, ...]:
        """Returns the work of a batch with k = `kept[layer]` experts, the host first.

        With `int8_experts` the experts' weights are bytes and their products integer products.
        """
        host = (
            () if not self.host_macs else (Part("host", batch * self.host_macs, self.host_bytes),)
        )
        layers = (
            part
            for name, layer in self.model.layers.items()
            for part in layer_parts(
                WorkOf(layer.spec, kept[name], batch, self.tokens[name]), int8_experts=int8_experts
            )
        )
        return (*host, *layers)


def layer_parts(work: AnyWork, *, int8_experts: bool = False) -> Iterator[Part]:
    """Yields a layer's two kinds of work on one batch: passes over the tokens, and the experts.

    The tokens [b, m, d] are read and the outputs [b, m, o] written once. Experts that nobody chose
    are not read; with b·k ≥ n all are taken to be in use.
    """
    spec, macs = work.spec, dict(work.spec.macs(work.tokens, work.kept))
    moved = FP32_BYTES * work.batch * work.tokens * (spec.dim + spec.out)
    if spec.kind == "mumoe":
        yield Part(spec.name, work.batch * sum(macs.values()), moved + spec.bytes_read(work.kept))
        return
    experts = work.batch * macs.pop("experts")
    active = min(spec.experts, work.selections)
    weights = spec.bytes_read(active) / (FP32_BYTES if int8_experts else 1)
    yield Part(f"{spec.name}/routing", work.batch * sum(macs.values()), moved)
    yield Part(f"{spec.name}/experts", experts, weights, integer=int8_experts)


def work_of(model: Model, x: np.ndarray) -> ModelWork:
    """Returns what inputs like x [b, …] ask of a model, per input.

    The host's multiply-adds are counted by PyTorch while it runs one input, its MoE layers left
    out. Its bytes are its weights in FP32.
    """
    tokens: dict[str, int] = {}
    names = list(model.layers)
    with layers_as_nodes(model.module) as host, torch.inference_mode():
        hooks = [
            host.get_submodule(name).register_forward_pre_hook(
                lambda _, inputs, name=name: tokens.update({name: _tokens(inputs[0])})
            )
            for name in names
        ]
        # The counter knows attention as two matmuls, not as the kernel that fuses them on a CPU.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            host(torch.from_numpy(np.ascontiguousarray(x[:1])))
        for hook in hooks:
            hook.remove()
        weights = sum(parameter.numel() for parameter in host.parameters())
    return ModelWork(model, counter.get_total_flops() / 2, FP32_BYTES * weights, tokens)


def _tokens(x: torch.Tensor) -> int:
    """The token count m of a layer's input: [b, m, d], or [b, d] with one token."""
    return x.shape[1] if x.ndim == 3 else 1


class Probes:
    """Contestants that measure the machine: put beside others, they see the same disturbances."""

    def __init__(self, threads: int) -> None:
        stream, square = torch.ones(_STREAM), torch.randn(_SQUARE, _SQUARE)
        floats, integers = _matmul(np.float32, threads), _matmul(np.int8, threads)
        self.contestants: dict[str, timing.Contestant] = {
            "probe: stream": lambda _: stream.sum(),
            "probe: torch": lambda _: square @ square,
            "probe: onnxruntime": lambda _: floats(),
            "probe: int8": lambda _: integers(),
        }

    def rates(self, latencies: Mapping[str, timing.Latency]) -> Rates:
        """Returns the rates from the probes' medians among measured latencies."""
        stream, by_torch, by_onnxruntime, int8 = (
            latencies[name].median for name in self.contestants
        )
        operations = 2 * _SQUARE**3 / 1e6
        return Rates(
            stream_gb_s=FP32_BYTES * _STREAM / 1e6 / stream,
            matmul_gflop_s=operations / min(by_torch, by_onnxruntime),
            int8_gop_s=operations / int8,
        )


def machine_rates(threads: int) -> Rates:
    """Measures this machine on its own; takes a few seconds and 1 GiB."""
    probes = Probes(threads)
    protocol = timing.Protocol(round_s=0.3, warmup=2)
    return probes.rates(timing.measure(probes.contestants, protocol).latencies)


class _Product:
    """A square matrix times a constant one, in ONNX Runtime."""

    def __init__(self, session: ort.InferenceSession, x: np.ndarray) -> None:
        self._session = session
        self._feeds = {"x": x}

    def __call__(self) -> None:
        self._session.run(None, self._feeds)


def _matmul(dtype: type[np.float32] | type[np.int8], threads: int) -> _Product:
    random = np.random.default_rng(0)
    integer = dtype is np.int8
    weight = random.integers(-63, 64, (_SQUARE, _SQUARE)).astype(dtype)
    x = random.integers(0, 127, (_SQUARE, _SQUARE)).astype(np.uint8 if integer else np.float32)
    element = onnx.TensorProto.UINT8 if integer else onnx.TensorProto.FLOAT
    result = onnx.TensorProto.INT32 if integer else onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger" if integer else "MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", element, [_SQUARE, _SQUARE])],
        [helper.make_tensor_value_info("y", result, [_SQUARE, _SQUARE])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return _Product(session, x)
