"""The minimum time that a machine needs for a model's work, as a reference for measured times.

A model is a chain of parts, the backbone and its MoE layers. A layer's work follows from its spec;
PyTorch counts the backbone's work on one input. Each part takes at least the time of its
multiply-adds or that of its bytes, whichever is longer at the machine's rates (Williams, Waterman
and Patterson, "Roofline", 2009), and the parts run one after the other. Data that stay in a cache
between calls can be faster than the limit, which is then reported as not valid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ...common import timing
from ...common.latency import Latency
from ...common.text import size
from ...common.writing import scratch_folder
from ...errors import TraceError, one_line
from ...exporter.inputs import Inputs, completed
from ...exporter.model import Model
from ...exporter.session import SessionOptions, graph_call
from ...exporter.trace import layers_as_nodes
from ...graphs.lowerings.base import AnyPlan, LayerPlan
from ..engines import GraphEngine, engine_of
from ..plan import Candidate, Case, GraphSource, IntegerLinear
from ..results import Workload
from .gpu_rates import GpuProbes, Probe

FP32_BYTES = 4

NUMBER_BYTES: Mapping[str, int] = {"fp16": 2, "bf16": 2}
"""Bytes per number, if not four: on a CPU, INT8 models are FP32 around their experts."""

COUNTED_NAMESPACES = ("aten", "prims", "onnx_symbolic")
"""PyTorch's own operators, and the node that replaces a MoE layer."""

UNCOUNTED = re.compile(r"rnn|fft|cdist|linalg|attention|transformer|quantiz|sparse|mv$|dot$")
"""PyTorch operators that multiply but are not supported by its counter."""

STREAM_BYTES = 1 << 30  # larger than any cache
SMALLEST_STREAM_BYTES = 1 << 20  # below this, the sum that measures bandwidth is mostly overhead

SHARES = (4, 16)
"""Parts of a stream that are timed separately: a quarter and a sixteenth."""

SQUARE = 1024
"""The size of the square matrices in timed products: 20 ms on a core, as fast as larger ones."""

INT4_UNCOUNTED = "the minimum time is not computed for INT4 weights"
FEWER_EXPERTS = "the work is only known for the bundle's layers, which have fewer experts"

NO_GPU_RATES = "the rates of a GPU are measured with PyTorch, but this PyTorch has no CUDA"
NO_GPU_INTEGERS = "the rate of a GPU's products in this precision is not measured"


Arithmetic = Literal["fp32", "bf16", "fp16", "int8"]
"""The type in which products are computed."""


@dataclass(frozen=True, slots=True)
class RooflineStep:
    """One step of a model on one batch: its multiply-adds, and the bytes it must move once."""

    name: str
    macs: float
    bytes: float
    arithmetic: Arithmetic = "fp32"


@dataclass(frozen=True, slots=True)
class Products:
    """Products with constant matrices: multiply-adds for one input, and numbers of weights."""

    macs: float = 0.0
    numbers: float = 0.0


NO_PRODUCTS = Products()


@dataclass(frozen=True)
class ModelWork:
    """The work for one input: the backbone's multiply-adds and weights, and each layer's tokens."""

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
        arithmetic: Arithmetic = "fp32",
    ) -> tuple[RooflineStep, ...]:
        """Returns the work of a batch with k = `ks[layer]` experts, the backbone first.

        In the layers in `int8`, the experts' weights are bytes and their products are of integers,
        like the `int8_backbone` products of the backbone. All other numbers take `number_bytes`,
        and all other products except routing are computed in `arithmetic`.
        """
        numbers = self.backbone_numbers - int8_backbone.numbers
        parts = (
            RooflineStep(
                "host",
                batch * (self.backbone_macs - int8_backbone.macs),
                number_bytes * numbers,
                arithmetic,
            ),
            RooflineStep("host/int8", batch * int8_backbone.macs, int8_backbone.numbers, "int8"),
        )
        backbone = (part for part in parts if part.macs)
        layers = (
            part
            for name, layer in self.model.layers.items()
            for part in layer_parts(
                LayerPlan(layer.spec, ks[name], batch, self.tokens[name]),
                int8_experts=name in int8,
                number_bytes=number_bytes,
                arithmetic=arithmetic,
            )
        )
        return (*backbone, *layers)


def work_of(model: Model, x: Inputs) -> ModelWork:
    """Returns the work of a model for one input: the first of the batch x [b, …].

    PyTorch counts the multiply-adds of matrix products, convolutions and attention. Raises
    `TraceError` naming other operators of the backbone that multiply.
    """
    tokens: dict[str, int] = {}

    def record_tokens(name: str, node: nn.Module, inputs: tuple[Any, ...]) -> None:
        as_tokens: Callable[[Tensor], Tensor] = node.tokens  # type: ignore[assignment]
        shape = as_tokens(inputs[0]).shape
        # m tokens of [b, m, d], or one of [b, d]; b·m for one input if tokens are routed.
        tokens[name] = prod(shape[:-1] if routes[name] else shape[1:-1])

    arrays = [x] if isinstance(x, np.ndarray) else completed(x, model.inputs).values()
    # Collected first, because nodes replace the layers below.
    routes = {name: layer.spec.routes_tokens for name, layer in model.layers.items()}
    with layers_as_nodes(model.module) as backbone, torch.inference_mode(), _plain_attention():
        hooks = [
            backbone.get_submodule(name).register_forward_pre_hook(partial(record_tokens, name))
            for name in routes
        ]
        reads = _ParameterReads(backbone)
        try:
            # The later mode is called first and decomposes operators for the earlier one.
            with reads, FlopCounterMode(display=False) as counter:
                backbone(*(torch.from_numpy(np.ascontiguousarray(array[:1])) for array in arrays))
        finally:
            for hook in hooks:
                hook.remove()
    if reads.uncounted:
        raise TraceError(
            f"PyTorch does not count the operations of {', '.join(sorted(reads.uncounted))}"
        )
    return ModelWork(model, counter.get_total_flops() / 2, reads.numbers, tokens)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Disables fused attention: the counter counts attention only as two matmuls."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _ParameterReads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch's is not annotated
    """Records how much of each parameter is read, and uncounted operators that multiply.

    Of an embedding table, only the selected rows are read.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._read: dict[int, int] = {}
        self.uncounted: set[str] = set()

    @property
    def numbers(self) -> int:
        """The number of parameter values that were read, each counted once."""
        return sum(self._read.values())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        counted = func._overloadpacket in flop_registry
        if func.namespace not in COUNTED_NAMESPACES or (not counted and UNCOUNTED.search(name)):
            self.uncounted.add(f"{func.namespace}::{name}")
        if func.is_view:
            return result
        for argument in (*args, *(kwargs or {}).values()):
            for tensor in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(tensor, Tensor):
                    self._record(tensor, result if name == "embedding" else tensor)
        return result

    def _record(self, tensor: Tensor, read: Tensor) -> None:
        if tensor.untyped_storage().data_ptr() in self._storages:
            address = tensor.data_ptr()
            self._read[address] = max(self._read.get(address, 0), min(tensor.numel(), read.numel()))


def layer_parts(
    plan: AnyPlan,
    *,
    int8_experts: bool = False,
    number_bytes: int = FP32_BYTES,
    arithmetic: Arithmetic = "fp32",
) -> Iterator[RooflineStep]:
    """Yields a layer's two steps on one batch: routing, which reads the tokens, and the experts.

    The tokens [b, m, d] are read once and the outputs [b, m, o] are written once. Unused experts
    are not read: with b·k ≥ n all experts are assumed to be used, and with routed tokens as many as
    uniform choices would use. A layer without sets of experts is one step, or two with INT8: a
    quantised and an unquantised one. Routing is computed in FP32.
    """
    spec, macs = plan.spec, plan.spec.macs(plan.tokens, plan.typical_k)
    active = min(spec.experts, plan.selections) if spec.chooses_sets else plan.typical_k
    if spec.routes_tokens:
        active = round(plan.expected_active)
    share = number_bytes / FP32_BYTES
    moved = number_bytes * plan.batch * plan.tokens * (spec.dim + spec.out)
    experts_macs = plan.batch * sum(macs.get(part, 0) for part in spec.quantized_parts)
    rest_macs = plan.batch * sum(macs.values()) - experts_macs
    weights = share * spec.bytes_read(active)
    if not (spec.chooses_sets or int8_experts):
        yield RooflineStep(spec.name, rest_macs + experts_macs, moved + weights, arithmetic)
        return
    quantized = spec.quantized_bytes(active)
    unquantized = weights - share * quantized
    yield RooflineStep(f"{spec.name}/routing", rest_macs, moved + unquantized)
    experts_bytes = quantized / FP32_BYTES if int8_experts else share * quantized
    experts_type: Arithmetic = "int8" if int8_experts else arithmetic
    yield RooflineStep(f"{spec.name}/experts", experts_macs, experts_bytes, experts_type)


def integer_linears(graph: Path, linears: Mapping[str, str | None]) -> tuple[IntegerLinear, ...]:
    """Returns the linear layers of a backbone that a graph file computes in integers.

    `linears` has the reason why each is not quantised, or None. Products with 4-bit weights are
    products of floats.
    """
    wanted = [node for node, reason in linears.items() if reason is None]
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
    # The nodes of a linear layer have its name as prefix (`graphs.builder`).
    rounded = {
        node.name.rpartition("/")[0]: node.input[0]
        for node in content.node
        if node.op_type == "QuantizeLinear"
    }
    found = []
    for name in (name for name in wanted if name in rounded):
        shape, (inputs, outputs) = shapes.get(rounded[name]), weights[f"{name}/weight"]
        rows = None if shape is None else shape[:-1]
        found.append(IntegerLinear(name, rows, (inputs, outputs)))
    return tuple(found)


def products_of(linears: Iterable[IntegerLinear], sizes: Mapping[str, int]) -> Products:
    """Returns the work of linear layers for an input of these `sizes`; TraceError without one."""
    macs = numbers = 0
    for linear in linears:
        rows = [
            sizes.get(size) if isinstance(size, str) else size for size in linear.rows or [None]
        ]
        if None in rows:
            raise TraceError(f"the graph does not show how many rows {linear.node} multiplies")
        macs += prod(size for size in rows if size is not None) * prod(linear.weights)
        numbers += prod(linear.weights)
    return Products(macs, numbers)


@dataclass(frozen=True, slots=True)
class Rates:
    """A machine's rates with the threads of a benchmark.

    `stream_gb_s` is that of a plain sum in PyTorch. `matmul_gflop_s` is that of two square matrices
    in PyTorch or ONNX Runtime, whichever is faster; `int8_gop_s` is the same for unsigned by signed
    bytes in ONNX Runtime, and `bf16_gflop_s` for BF16 in PyTorch, None if not needed. A
    multiply-add is two operations. With `gpu` the rates are the GPU's, with `fp16_gflop_s`.
    `cached_gb_s` has the rates of sums over fewer bytes, by the number of bytes.
    """

    stream_gb_s: float
    matmul_gflop_s: float
    int8_gop_s: float | None = None
    bf16_gflop_s: float | None = None
    cached_gb_s: Mapping[str, float] = field(default_factory=dict)
    fp16_gflop_s: float | None = None
    gpu: bool = False

    def for_bytes(self, moved: float) -> Rates:
        """Returns the rates for moving this many bytes, which may stay in a cache between calls."""
        known = {int(streamed): rate for streamed, rate in self.cached_gb_s.items()}
        least = min((streamed for streamed in known if streamed >= moved), default=None)
        if least is None:
            return self
        return replace(self, stream_gb_s=max(self.stream_gb_s, known[least]))


def least_ms(part: RooflineStep, rates: Rates) -> float:
    """Returns the time of one part in ms, moving and computing at the same time."""
    known: dict[Arithmetic, float | None] = {
        "fp32": rates.matmul_gflop_s,
        "bf16": rates.bf16_gflop_s,
        "fp16": rates.fp16_gflop_s,
        "int8": rates.int8_gop_s,
    }
    rate = known[part.arithmetic]
    if rate is None:
        raise ValueError(f"{part.name}: the rate of {part.arithmetic} products was not measured")
    return max(2e-6 * part.macs / rate, 1e-6 * part.bytes / rates.stream_gb_s)


def limit_ms(parts: Iterable[RooflineStep], rates: Rates) -> float:
    """Returns the minimum time of consecutive parts in ms."""
    return sum(least_ms(part, rates) for part in parts)


@dataclass(frozen=True, slots=True)
class Limit:
    """The work of a row and the minimum time for it; `reason` explains a missing value."""

    work: Workload | None = None
    limit_ms: float | None = None
    reason: str | None = None


def arithmetic_of(case: Case) -> Arithmetic:
    """Returns the type in which a case computes products of floats.

    On a CPU, most runtimes multiply 16-bit numbers in FP32; on a GPU both types have the same rate.
    """
    if case.provider != "cpu":
        return "fp16" if case.precision in ("fp16", "bf16") else "fp32"
    kind = engine_of(case.engine, case.provider)
    short = kind.product_types if isinstance(kind, GraphEngine) else ()
    return "bf16" if case.precision == "bf16" and "bf16" in short else "fp32"


class Limits:
    """The work of a candidate's rows.

    `benchmarks` of the machine are timed together with the rows. They stream the bytes of the
    model's weights, a quarter and a sixteenth of them: data that fit in a cache are read at its
    rate, and a smaller k reads less.
    """

    def __init__(self, candidate: Candidate, x: Inputs, cases: Collection[Case]) -> None:
        self._machine = Microbenchmarks(
            torch.get_num_threads(),
            stream_bytes=min(max(candidate.weights_bytes, SMALLEST_STREAM_BYTES), STREAM_BYTES),
            square=SQUARE,
            integer=any(c.precision == "int8" for c in cases),
            bf16=any(arithmetic_of(c) == "bf16" for c in cases),
        )
        on_gpu = any(c.provider != "cpu" for c in cases) and torch.cuda.is_available()
        self._gpu = GpuProbes() if on_gpu else None
        self.benchmarks = self._machine.calls | ({} if self._gpu is None else self._gpu.calls)
        inputs = {candidate.model.input.name: x} if isinstance(x, np.ndarray) else x
        self._sizes = {
            axis: size
            for spec in candidate.model.inputs
            if spec.name in inputs
            for axis, size in zip(spec.shape, (1, *inputs[spec.name].shape[1:]), strict=False)
            if isinstance(axis, str)
        }
        self._work: ModelWork | str  # a string says why it is unknown
        try:
            self._work = work_of(candidate.model, x)
        except TraceError as error:
            self._work = error.message
        except Exception as error:  # noqa: BLE001  the user's code: the row has the reason
            self._work = f"the backbone's work cannot be counted: {one_line(error)}"

    def rates(self, measured: timing.Measured) -> Rates | str:
        """Returns the rates from the benchmarks, or why there are none."""
        for name in self.benchmarks:
            if name in measured.failures:
                return f"{name}: {measured.failures[name]}"
        return self._machine.rates(measured.latencies)

    def gpu_rates(self, measured: timing.Measured) -> Rates | str:
        """Returns the rates of the GPU, measured in the same rounds, or why there are none."""
        if self._gpu is None:
            return NO_GPU_RATES
        for name in self._gpu.calls:
            if name in measured.failures:
                return f"{name}: {measured.failures[name]}"
        ms = {name: measured.device[name].median for name in self._gpu.calls}
        return Rates(**self._gpu.rates(ms), gpu=True)

    def of(self, case: Case, graph: GraphSource | None, batch: int, rates: Rates | str) -> Limit:
        """Returns a row's work and the minimum time for it; `graph` is the row's graph, if any.

        `rates` are those of the row's device. 16-bit numbers count as two bytes; `arithmetic_of`
        determines the rate of their products.
        """
        if isinstance(self._work, str):
            return Limit(reason=self._work)
        if case.precision == "int4":
            return Limit(reason=INT4_UNCOUNTED)
        layers = self._work.model.layers
        if case.k > max(layer.spec.experts for layer in layers.values()):
            return Limit(reason=FEWER_EXPERTS)
        ks = {name: min(case.k, layer.spec.experts) for name, layer in layers.items()}
        floats = frozenset() if graph is None else graph.float_layers
        try:
            parts = self._work.parts(
                ks if graph is None else ks | dict(graph.k_by_layer),
                batch,
                int8=layers.keys() - floats if case.precision == "int8" else (),
                int8_backbone=products_of(graph.integer_linears if graph else (), self._sizes),
                number_bytes=NUMBER_BYTES.get(case.precision, FP32_BYTES),
                arithmetic=arithmetic_of(case),
            )
        except TraceError as error:
            return Limit(reason=error.message)
        work = Workload(
            operations=2 * sum(part.macs for part in parts if part.arithmetic != "int8"),
            int8_operations=2 * sum(part.macs for part in parts if part.arithmetic == "int8"),
            bytes=sum(part.bytes for part in parts),
        )
        if case.provider != "cpu" and case.precision not in ("fp32", "fp16", "bf16"):
            rates = NO_GPU_INTEGERS
        if isinstance(rates, str):
            return Limit(work, reason=rates)
        return Limit(work, limit_ms(parts, rates.for_bytes(work.bytes)))


def why_below_limit(limit: Limit, median_ms: float, rates: Rates | str) -> str | None:
    """Returns why a row took less than the limit; None if it did not."""
    if limit.work is None or limit.limit_ms is None or median_ms >= limit.limit_ms:
        return None
    assert isinstance(rates, Rates), "a limit has rates"
    moved, rate = limit.work.bytes, rates.for_bytes(limit.work.bytes).stream_gb_s
    if 1e-6 * moved / rate > limit.limit_ms / 2:
        return (
            f"limit does not apply: the {size(moved)} of weights and tokens stay in a cache "
            f"between calls and are read faster than the measured {rate:.0f} GB/s"
        )
    return (
        f"limit does not apply: its products are faster than the timed product of two {SQUARE} × "
        f"{SQUARE} matrices, which may have been disturbed"
    )


class Microbenchmarks:
    """Calls that measure the machine, timed in turn with the cases, under the same disturbances.

    They stream `stream_bytes` and multiply matrices of `square` rows and columns, also in integers
    with `integer` and in BF16 with `bf16`.
    """

    def __init__(
        self,
        threads: int,
        *,
        stream_bytes: int = STREAM_BYTES,
        square: int = 2048,
        integer: bool = True,
        bf16: bool = False,
    ) -> None:
        stream, matrix = torch.ones(stream_bytes // FP32_BYTES), torch.randn(square, square)
        self._stream_bytes, self._operations = FP32_BYTES * stream.numel(), 2 * square**3
        parts = {f"probe: stream/{part}": stream[: stream.numel() // part] for part in SHARES}
        self._parts = {
            name: FP32_BYTES * part.numel()
            for name, part in parts.items()
            if FP32_BYTES * part.numel() >= SMALLEST_STREAM_BYTES
        }
        calls: dict[str, Callable[[], object]] = {name: parts[name].sum for name in self._parts}
        calls |= {
            "probe: stream": stream.sum,
            "probe: torch": lambda: matrix @ matrix,
            "probe: onnxruntime": _product(np.float32, square, threads),
        }
        if integer:
            calls["probe: int8"] = _product(np.int8, square, threads)
        if bf16:
            half = matrix.bfloat16()
            calls["probe: bf16"] = lambda: half @ half
        self.calls: dict[str, timing.IndexedCall] = {
            name: Probe(call) for name, call in calls.items()
        }

    def rates(self, latencies: Mapping[str, Latency]) -> Rates:
        """Returns the rates from the medians among measured latencies."""
        ms = {name: latencies[name].median for name in self.calls}
        int8, bf16 = ms.get("probe: int8"), ms.get("probe: bf16")
        return Rates(
            stream_gb_s=self._stream_bytes / 1e6 / ms["probe: stream"],
            matmul_gflop_s=self._operations
            / 1e6
            / min(ms["probe: torch"], ms["probe: onnxruntime"]),
            int8_gop_s=None if int8 is None else self._operations / 1e6 / int8,
            bf16_gflop_s=None if bf16 is None else self._operations / 1e6 / bf16,
            cached_gb_s={str(n): n / 1e6 / ms[name] for name, n in self._parts.items()},
        )


def _product(
    dtype: type[np.float32] | type[np.int8], size: int, threads: int
) -> Callable[[], object]:
    """Returns a call that multiplies a square matrix by a constant one in ONNX Runtime."""
    random = np.random.default_rng(0)
    integer = dtype is np.int8
    weight = random.integers(-63, 64, (size, size)).astype(dtype)
    x = random.integers(0, 127, (size, size)).astype(np.uint8 if integer else np.float32)
    input_type, output_type, op = (
        ("uint8", "int32", "MatMulInteger") if integer else ("float", "float", "MatMul")
    )
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> product ({input_type}[{size}, {size}] x) '
        f"=> ({output_type}[{size}, {size}] y) {{ y = {op}(x, w) }}"
    )
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    with scratch_folder("rates") as folder:
        onnx.save(model, folder / "product.onnx")
        run = graph_call(folder / "product.onnx", SessionOptions(threads=threads))
    return partial(run, {"x": x})
