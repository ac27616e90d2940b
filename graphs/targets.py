"""Targets, machines and precisions; imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from ..common.registry import Registry, names_in

Target = str
"""The name of a record in `TARGETS`: the runtime and machine that a graph is for."""

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4", "fp8"]
"""The type in which a graph computes. INT8 applies to matrix products; the rest stays a float. INT4
applies to stored weights, in blocks of 32 that share a scale; the other operands are floats. FP8 is
TensorRT's E4M3, scaled like INT8."""

FloatName = Literal["fp32", "fp16", "bf16"]

Scope = Literal["experts", "all"]
"""The part that INT8 applies to: the experts, or all linear layers."""

Method = Literal["minmax", "percentile", "entropy", "mse"]
"""The method by which a calibration derives ranges from observations."""

Runtime = str
"""The name of a runtime that opens a graph (`exporter/bundle/runtimes.py`). An engine is a separate
file, compiled from the graph by TensorRT."""


def runtime_names() -> tuple[str, ...]:
    """Returns the names of all runtimes, including those of plugins."""
    return ("onnxruntime", *names_in("moexport.runtimes"))


QuantFormat = Literal["kernel", "standard", "qdq", "qdq-unsigned"]
"""The form of integer products. `kernel`: ONNX Runtime's `MatMulIntegerToFloat`; `standard`:
`MatMulInteger` with a cast and a scale; `qdq`: QuantizeLinear and DequantizeLinear around a float
MatMul, which TensorRT fuses to an integer product; `qdq-unsigned`: the same, with unsigned
activations and a zero point, as in the first two."""

QDQ: tuple[QuantFormat, ...] = ("qdq", "qdq-unsigned")
"""The forms with QuantizeLinear and DequantizeLinear around a float product."""

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one kind of machine.

    Weights: `bytes_per_us` for tokens, and for weights that are one constant per expert, packed at
    load time; `stacked_bytes_per_us` for weights that are one constant for all experts, plus
    `pack_bytes_per_us` if that is packed at run time (`packing_us`); `copy_bytes_per_us` for the
    output of a Gather. Data in caches of `cache_bytes` is read `cached` times as fast. With
    `reads_once`, an expert that several inputs choose is read from memory once, and then from the
    caches.

    Arithmetic: `macs_per_us` in products with the experts' weights, half of that for the first
    `single_thread_macs` of a product, as small products use one thread; `batched_macs_per_us` in
    products with tokens; `number_us` for each number that an operator between products processes.

    Operators: `node_us` for an empty one, `product_us` in addition for a product with rows,
    `branch_us` for an `If`, `sort_us` for each pair of row and expert that sorting rows by expert
    compares. With integers an expert takes `integer_nodes` more nodes and `integer_passes` more
    passes over the results of its products. `com.microsoft.MoE` also takes `routing_us` for each
    row and candidate expert, and `scalar_us` for each number that its scalar loops process.

    GPUs only: `launch_us` is the additional time of a node outside a CUDA graph. A grouped product
    distributes its columns over `processors`, each of which reads `processor_bytes_per_us`.
    """

    bytes_per_us: float
    stacked_bytes_per_us: float
    copy_bytes_per_us: float
    macs_per_us: float
    batched_macs_per_us: float
    node_us: float
    branch_us: float
    pack_bytes_per_us: float = math.inf
    cached: float = 1.0
    cache_bytes: int = 16 << 20
    reads_once: bool = False
    number_us: float = 0.0
    product_us: float = 0.0
    sort_us: float = 0.0
    routing_us: float = 0.0
    scalar_us: float = 0.0
    launch_us: float = 0.0
    processor_bytes_per_us: float = math.inf
    processors: int = 1
    single_thread_macs: int = 0
    integer_nodes: int = 0
    integer_passes: int = 0


@dataclass(frozen=True, slots=True)
class MachineKind:
    """The machine that the cost model assumes for a target: its rates by the experts' precision.

    A byte of weights counts as four bytes of FP32, and narrower weights stream faster in
    proportion. `card` is the GPU, with rates from its data sheet, or fitted to measured runs of the
    lowerings in `measured`, by kind of layer. Other lowerings are only predicted.
    """

    name: str
    rates: Mapping[Precision, Machine] | None = None
    on_cpu: bool = True
    card: str | None = None
    measured: Mapping[str, frozenset[str]] = field(default_factory=dict)


CPU = Machine(
    bytes_per_us=33e3,
    stacked_bytes_per_us=29e3,
    copy_bytes_per_us=15e3,
    macs_per_us=171e3,
    batched_macs_per_us=62e3,
    node_us=0.60,
    branch_us=0.24,
    pack_bytes_per_us=50e3,
    cached=4.8,
    number_us=0.00016,
    product_us=0.10,
    sort_us=0.003,
    routing_us=0.0043,
    scalar_us=0.00078,
    single_thread_macs=1 << 16,
)
"""Fitted by `python -m perf fit` on two cores with AVX-512; the choices are equally good on two
cores with AVX2. `sort_us` was measured separately; `single_thread_macs` is from the runtime."""


CPU_INT8 = Machine(
    bytes_per_us=77e3,
    stacked_bytes_per_us=52e3,
    copy_bytes_per_us=35e3,
    macs_per_us=265e3,
    batched_macs_per_us=96e3,
    node_us=0.55,
    branch_us=0.38,
    cached=4.3,
    number_us=0.000084,
    product_us=0.32,
    sort_us=0.003,
    routing_us=CPU.routing_us,
    single_thread_macs=1 << 16,
    integer_nodes=1,
    integer_passes=1,
)
"""Fitted in the same way, on machines with and without VNNI, to both forms of integer products.
Stacked weights are packed for any number of rows; the rate includes that."""

CPU_INT4 = replace(
    CPU,
    bytes_per_us=90e3,
    stacked_bytes_per_us=90e3,
    macs_per_us=150e3,
    pack_bytes_per_us=math.inf,
    cached=1.1,
)
"""Measured on single `MatMulNBits` products, not fitted: unpacking makes them slower than the bytes
read suggest, and with many rows they take about as long as with FP32 weights."""

CPU_RATES: Mapping[Precision, Machine] = MappingProxyType(
    {  # 16-bit floats are computed in FP32 on a CPU
        "fp32": CPU,
        "fp16": CPU,
        "bf16": CPU,
        "int8": CPU_INT8,
        "int4": CPU_INT4,
        "fp8": CPU,
    }
)
ON_CPU = MachineKind("cpu", CPU_RATES)
CUDA_GPU = MachineKind(
    "cuda-gpu",
    on_cpu=False,
    card="H100",
    measured={"soft-moe": frozenset({"dense", "gather", "grouped", "conditional"})},
)
SERVER_GPU = MachineKind("server-gpu", on_cpu=False, card="H100")
RTX_GPU = MachineKind("rtx-gpu", on_cpu=False, card="RTX 4090")
"""The GPUs that `auto` assumes for GPU targets."""


FUSED_OPSET = 23
"""The first opset with `Attention`, `RotaryEmbedding` and `RMSNormalization`."""


@dataclass(frozen=True, slots=True)
class FusedOps:
    """The fused ops of a runtime, for the parts around the layers.

    For the types in `floats` it has attention, rotary embeddings and RMS norms. With `in_place`,
    attention appends to a cache in place, which needs an `If`; with `joined`, the product of
    queries, keys and values is part of the attention op; with `residuals`, a norm includes the
    preceding residual and bias, and GELU a bias. With `wide_sums` its 16-bit kernels of these ops,
    of softmax and of norms sum in FP32. With `any_opset`, ops outside ONNX's own domain
    may be added to graphs with an opset below `FUSED_OPSET`.
    """

    floats: tuple[FloatName, ...] = ()
    in_place: bool = False
    joined: bool = False
    residuals: bool = False
    wide_sums: bool = False
    any_opset: bool = False


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """The facts about a target that all other code reads; CONTRIBUTING.md describes the fields.

    Without `auto_branches` each `If` waits for the host, as on a GPU. `new_kernels` are those for
    8-bit blocks and integer experts, which browsers lack or which were not tested there.
    """

    name: Target
    machine: MachineKind
    integers: QuantFormat
    runtime: Runtime = "onnxruntime"
    provider: str | None = None
    backend: str | None = None
    rest: FloatName = "fp32"
    standard_ops: bool = True
    data_sizes: bool = True
    branches: bool = True
    auto_branches: bool = True
    broadcasts: bool = True
    constant_integers: bool = False
    bf16_attention: bool = False
    moe: tuple[FloatName, ...] = ()
    weight_only: bool = False
    cpu_forms: bool = False
    new_kernels: bool = False
    fused: FusedOps = FusedOps()
    most_bytes: int | None = None
    summary: str = ""
    refused: Mapping[Precision, tuple[str, str]] = field(default_factory=dict)
    notes: Mapping[Precision, str] = field(default_factory=dict)

    @property
    def compiled(self) -> bool:
        """Whether an engine is compiled from its graphs."""
        return self.backend is not None

    @property
    def launches(self) -> bool:
        """Whether each node costs a kernel launch."""
        return not self.on_cpu and not self.compiled

    @property
    def on_cpu(self) -> bool:
        return self.machine.on_cpu


_CPU_FP16 = (
    "weights are stored in FP16, but everything is computed in FP32: the file is half as large, "
    "the speed and the results on any CPU stay the same; for a GPU use --target ort-cuda"
)

_CUDA_INTEGERS = (
    "only the weights are integers, in blocks; products are computed in FP16, so no ranges are "
    "needed; on a GPU, INT8 in com.microsoft.QMoE (fused) is up to 2% of max|y| off"
)

NO_FP8: Mapping[Precision, tuple[str, str]] = {
    "fp8": (
        "FP8 requires TensorRT on an Ada GPU or a newer one",
        "use --target tensorrt or tensorrt-rtx, or --precision int8 with this target",
    )
}

_RECORDS = (
    TargetRecord(
        "onnx",
        ON_CPU,
        "standard",
        provider=CPU_PROVIDER,
        summary="any ONNX runtime (the default)",
        refused=NO_FP8,
        notes={
            "fp16": _CPU_FP16,
            "bf16": "ONNX Runtime's CPU provider has no BF16 kernels: `run` emulates them",
            "int4": "the file is small; `run` unpacks the weights to FP32 when it loads them, "
            "but --target ort-cpu keeps them packed",
        },
    ),
    TargetRecord(
        "ort-cpu",
        ON_CPU,
        "kernel",
        provider=CPU_PROVIDER,
        standard_ops=False,
        moe=("fp32",),
        cpu_forms=True,
        new_kernels=True,
        fused=FusedOps(("fp32",), in_place=True, joined=True),
        summary="ONNX Runtime on a CPU",
        refused={
            **NO_FP8,
            "bf16": (
                "ONNX Runtime's CPU provider has no BF16 kernels",
                "use --precision int8, which is fast; bf16 is for tensorrt and tensorrt-rtx",
            ),
        },
        notes={"fp16": _CPU_FP16},
    ),
    TargetRecord(
        "ort-cuda",
        CUDA_GPU,
        "kernel",
        provider=CUDA_PROVIDER,
        rest="fp16",
        standard_ops=False,
        auto_branches=False,
        moe=("fp32", "fp16", "bf16"),
        fused=FusedOps(("fp32", "fp16", "bf16"), residuals=True, wide_sums=True, any_opset=True),
        weight_only=True,
        summary="ONNX Runtime with CUDA",
        refused=NO_FP8,
        notes={"int8": _CUDA_INTEGERS, "int4": _CUDA_INTEGERS},
    ),
    # onnxruntime-web in a browser: ONNX Runtime's CPU provider as WASM, with 32-bit addresses.
    TargetRecord(
        "ort-web",
        ON_CPU,
        "kernel",
        provider=CPU_PROVIDER,
        standard_ops=False,
        moe=("fp32",),
        cpu_forms=True,
        most_bytes=2**31 - 1,
        summary="onnxruntime-web, in browsers and Node",
        refused={
            **NO_FP8,
            "bf16": (
                "onnxruntime-web has no BF16 kernels",
                "use --precision int8 for a small file; bf16 is for tensorrt and tensorrt-rtx",
            ),
        },
        notes={"fp16": _CPU_FP16},
    ),
    # TensorRT-RTX does not compile NonZero; TensorRT does, but copies the size to the CPU.
    TargetRecord(
        "tensorrt",
        SERVER_GPU,
        "qdq",
        backend="tensorrt",
        rest="fp16",
        data_sizes=False,
        summary="TensorRT, on data-centre GPUs and Jetsons",
    ),
    TargetRecord(
        "tensorrt-rtx",
        RTX_GPU,
        "qdq",
        backend="tensorrt-rtx",
        rest="fp16",
        data_sizes=False,
        summary="TensorRT-RTX, on RTX cards",
    ),
)

TARGETS = Registry("moexport.targets", TargetRecord, _RECORDS)
"""`onnx` uses standard ONNX ops only, so that any runtime can run it."""


def compiled_names() -> tuple[str, ...]:
    """Returns the names of the core's targets that compile engines."""
    return tuple(record.name for record in TARGETS.own if record.compiled)


def runtime_of(target: Target) -> Runtime:
    return TARGETS[target].runtime


def for_cpus(target: Target) -> bool:
    return TARGETS[target].on_cpu
