"""The least time that a machine needs for a model's work, to divide measured times by.

Each part of the work (`flops`) takes at least the longer of its multiply-adds and its bytes at the
machine's own rates (Williams, Waterman and Patterson, "Roofline", 2009), and the parts wait for
each other. What stays in a cache between two calls can be faster than the limit, which moves every
byte from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from ...calibration.feeds import Array
from ...common import timing
from ...common.onnx_runtime import ort
from ...errors import TraceError
from ..cases import Candidate, Case, GraphSource
from ..results import Work
from .flops import FP32_BYTES, NO_PRODUCTS, ModelWork, Part, products_of, work_of

STREAM_BYTES = 1 << 30
"""Larger than any cache."""

_SQUARE = 2048

SMALLEST_STREAM_BYTES = 1 << 20
"""Of less, the sum that measures the bandwidth is mostly the call."""

SQUARE = 1024
"""Rows of the matrices whose product is timed: 20 ms on a core, at the rate of larger ones."""

NUMBER_BYTES: Mapping[str, int] = {"fp16": 2, "bf16": 2}
"""Of a precision that has not four: INT8 is FP32 around its experts on a CPU."""

NO_GPU_RATES = "the rates of a GPU are not measured"


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine reaches with the threads of a benchmark.

    `stream_gb_s` is a plain sum in PyTorch. `matmul_gflop_s` is the product of two square matrices
    in PyTorch or ONNX Runtime, whichever is faster; `int8_gop_s` the same of unsigned by signed
    bytes in ONNX Runtime, None where nothing needs it. A multiply-add is two operations.
    """

    stream_gb_s: float
    matmul_gflop_s: float
    int8_gop_s: float | None = None


def least_ms(part: Part, rates: Rates) -> float:
    """Returns the milliseconds of one part, moving and computing at the same time."""
    rate = rates.int8_gop_s if part.integer else rates.matmul_gflop_s
    if rate is None:
        raise ValueError(f"{part.name}: the rate of integer products was not measured")
    return max(2e-6 * part.macs / rate, 1e-6 * part.bytes / rates.stream_gb_s)


def limit_ms(parts: Iterable[Part], rates: Rates) -> float:
    """Returns the least time of parts that run one after the other, in milliseconds."""
    return sum(least_ms(part, rates) for part in parts)


@dataclass(frozen=True, slots=True)
class Limit:
    """What a row asks of the machine and the least time for it; `reason` says why one is absent."""

    work: Work | None = None
    limit_ms: float | None = None
    reason: str | None = None


class Limits:
    """What the rows of a candidate ask of the machine.

    `benchmarks` of the machine are to be timed beside the rows. They stream as many bytes as the
    model's weights hold: what fits in a cache is read at its rate, by the model and by them.
    """

    def __init__(self, candidate: Candidate, x: Array, cases: Iterable[Case]) -> None:
        self._machine = Microbenchmarks(
            torch.get_num_threads(),
            stream_bytes=min(max(candidate.weights_bytes, SMALLEST_STREAM_BYTES), STREAM_BYTES),
            square=SQUARE,
            integer=any(c.precision == "int8" for c in cases),
        )
        axes = zip(candidate.model.input.shape, (1, *x.shape[1:]), strict=False)
        self._sizes = {name: size for name, size in axes if isinstance(name, str)}
        self._work: ModelWork | None = None
        self._reason = ""
        try:
            self._work = work_of(candidate.model, x)
        except TraceError as error:
            self._reason = error.message
        except Exception as error:  # noqa: BLE001  a stranger's network: the row says what failed
            self._reason = f"the backbone's work: {timing.in_one_line(error)}"

    @property
    def benchmarks(self) -> Mapping[str, timing.Call]:
        """Those of the machine, by their names."""
        return self._machine.calls

    def rates(self, measured: timing.Measured) -> Rates | str:
        """Returns the rates that the benchmarks found, or why there are none."""
        for name in self.benchmarks:
            if name in measured.failures:
                return f"{name}: {measured.failures[name]}"
        return self._machine.rates(measured.latencies)

    def of(self, case: Case, graph: GraphSource | None, batch: int, rates: Rates | str) -> Limit:
        """Returns the work of a row and the least time for it; `graph` is the row's, if it is one.

        A GPU's row has no limit. 16-bit numbers are counted with two bytes and multiplied at the
        rate of FP32: so ONNX Runtime does on a CPU.
        """
        if self._work is None:
            return Limit(reason=self._reason)
        try:
            parts = self._parts(self._work, case, graph, batch)
        except TraceError as error:
            return Limit(reason=error.message)
        work = Work(
            operations=2 * sum(part.macs for part in parts if not part.integer),
            int8_operations=2 * sum(part.macs for part in parts if part.integer),
            bytes=sum(part.bytes for part in parts),
        )
        if case.provider != "cpu":
            return Limit(work, reason=NO_GPU_RATES)
        if isinstance(rates, str):
            return Limit(work, reason=rates)
        return Limit(work, limit_ms(parts, rates))

    def _parts(
        self, work: ModelWork, case: Case, graph: GraphSource | None, batch: int
    ) -> tuple[Part, ...]:
        layers = work.model.layers
        ks = {name: min(case.k, layer.spec.experts) for name, layer in layers.items()}
        floating: frozenset[str] = frozenset()
        int8_backbone = NO_PRODUCTS
        if graph is not None:
            ks |= graph.k_by_layer
            floating = graph.floating
            int8_backbone = products_of(graph.integers, self._sizes)
        return work.parts(
            ks,
            batch,
            int8=layers.keys() - floating if case.precision == "int8" else (),
            int8_backbone=int8_backbone,
            number_bytes=NUMBER_BYTES.get(case.precision, FP32_BYTES),
        )


class Microbenchmark(timing.TimedCall):
    """One call that measures the machine, whatever inputs others take."""

    inputs = 1

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __call__(self, index: int) -> object:
        """Makes the call."""
        del index
        return self._call()


class Microbenchmarks:
    """Calls that measure the machine: put beside others, they see the same disturbances.

    Streams `stream_bytes` and multiplies matrices of `square` rows and columns; integers only where
    `integer` asks for them.
    """

    def __init__(
        self,
        threads: int,
        *,
        stream_bytes: int = STREAM_BYTES,
        square: int = _SQUARE,
        integer: bool = True,
    ) -> None:
        stream, matrix = torch.ones(stream_bytes // FP32_BYTES), torch.randn(square, square)
        self._stream_bytes, self._operations = FP32_BYTES * stream.numel(), 2 * square**3
        calls: dict[str, Callable[[], object]] = {
            "probe: stream": stream.sum,
            "probe: torch": lambda: matrix @ matrix,
            "probe: onnxruntime": _product(np.float32, square, threads),
        }
        if integer:
            calls["probe: int8"] = _product(np.int8, square, threads)
        self.calls: dict[str, timing.Call] = {
            name: Microbenchmark(call) for name, call in calls.items()
        }

    def rates(self, latencies: Mapping[str, timing.Latency]) -> Rates:
        """Returns the rates from the medians among measured latencies."""
        stream, by_torch, by_onnxruntime, *int8 = (latencies[name].median for name in self.calls)
        return Rates(
            stream_gb_s=self._stream_bytes / 1e6 / stream,
            matmul_gflop_s=self._operations / 1e6 / min(by_torch, by_onnxruntime),
            int8_gop_s=self._operations / 1e6 / int8[0] if int8 else None,
        )


def machine_rates(threads: int) -> Rates:
    """Measures this machine on its own; takes a few seconds and 1 GiB."""
    machine = Microbenchmarks(threads)
    protocol = timing.Protocol(round_s=0.3, warmup=2)
    return machine.rates(timing.measure(machine.calls, protocol).latencies)


def _product(
    dtype: type[np.float32] | type[np.int8], size: int, threads: int
) -> Callable[[], object]:
    """A square matrix times a constant one, in ONNX Runtime."""
    random = np.random.default_rng(0)
    integer = dtype is np.int8
    weight = random.integers(-63, 64, (size, size)).astype(dtype)
    x = random.integers(0, 127, (size, size)).astype(np.uint8 if integer else np.float32)
    element = onnx.TensorProto.UINT8 if integer else onnx.TensorProto.FLOAT
    result = onnx.TensorProto.INT32 if integer else onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger" if integer else "MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", element, [size, size])],
        [helper.make_tensor_value_info("y", result, [size, size])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return partial(session.run, None, {"x": x})
