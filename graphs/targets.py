"""Targets, their machines, and precisions: what runs a graph, and what it computes in.

Importing loads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from ..common.registry import Registry, names_in

Target = str
"""Who runs the graph, by the name of its record in `TARGETS`."""

Precision = Literal["fp32", "fp16", "bf16", "int8", "int4", "fp8"]
"""What a graph computes in. INT8 is for matrix products; the rest is a float then, too. INT4 is
what weights are stored in, a scale for every 32 of them; what they multiply is a float. FP8 is
TensorRT's E4M3, scaled as INT8 is."""

FloatName = Literal["fp32", "fp16", "bf16"]
"""The float types among them."""

Scope = Literal["experts", "all"]
"""What INT8 is for: the experts, or all linear layers."""

Method = Literal["minmax", "percentile", "entropy", "mse"]
"""How a calibration chooses ranges from what was observed."""

Runtime = str
"""What runs the file of a graph, by the name of its record (`exporter/bundle/runtimes.py`). An
engine is another file, which a TensorRT has compiled of it."""


def runtime_names() -> tuple[str, ...]:
    """Returns the names of all runtimes: the core's own, and what plugins bring."""
    return ("onnxruntime", *names_in("moexport.runtimes"))


QuantFormat = Literal["kernel", "standard", "qdq", "qdq-unsigned"]
"""How a product of integers is written. `kernel`: ONNX Runtime's `MatMulIntegerToFloat`;
`standard`: `MatMulInteger`, whose result is cast and scaled; `qdq`: QuantizeLinear and
DequantizeLinear around a float MatMul, which TensorRT turns into an integer one; `qdq-unsigned`:
the same, where what meets the weights is unsigned with a zero point, as in the first two."""

QDQ: tuple[QuantFormat, ...] = ("qdq", "qdq-unsigned")
"""Forms that are QuantizeLinear and DequantizeLinear around a product of floats."""

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one kind of machine.

    Weights: `bytes_per_us` where each expert's are a constant of their own, packed when the graph
    was loaded, or tokens are read; `stacked_bytes_per_us` where all experts' are one constant, and
    `pack_bytes_per_us` besides where that is packed in the run (`packing_us`);
    `copy_bytes_per_us` for what a Gather writes. `cached` times faster is what the caches hold,
    which are the last `cache_bytes`. With `reads_once` an expert that several inputs choose is read
    from memory once, and after that from the caches.

    Arithmetic: `macs_per_us` in products with the experts' weights, half as many for the first
    `lone_macs` of a product, since so small a one has one thread; `batched_macs_per_us` in the
    products with tokens; `number_us` for a number that an operator between products passes over.

    Operators: `node_us` for one with nothing to do, `product_us` more for a product with rows,
    `branch_us` for an `If`, `sort_us` for each (row, expert) that is compared to sort rows by
    expert. In integers an expert takes `integer_nodes` more, and `integer_passes` more passes over
    the results of its products. Of `com.microsoft.MoE` alone are `routing_us` for each expert that
    a row could go to, and `scalar_us` for a number that its loops take one by one.
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
    lone_macs: int = 0
    integer_nodes: int = 0
    integer_passes: int = 0


@dataclass(frozen=True, slots=True)
class MachineKind:
    """What the cost model takes a target to run on: its rates, by what computes the experts.

    A byte of their weights is counted as four, and weights of fewer bytes stream so much faster.
    `card` is the GPU whose data sheet they are from, where they were not measured.
    """

    name: str
    rates: Mapping[Precision, Machine]
    on_cpu: bool = True
    card: str | None = None


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
    lone_macs=1 << 16,
)
"""What `python -m perf fit` found on two cores with AVX-512; they choose as well on two with AVX2.
`sort_us` was measured apart; `lone_macs` is a constant of the runtime."""


STREAMED = 0.85
"""The share of a GPU's bandwidth by its data sheet that large reads and writes reach."""


def _card(
    gigabytes_per_s: float,
    fp32_tflops: float,
    fp16_tflops: float,
    int8_tops: float,
    *,
    cache_mib: int,
    cached: float,
) -> Mapping[Precision, Machine]:
    """A GPU by its data sheet, dense products; what a Gather wrote is read again at once.

    Its L2 holds `cache_mib`, and is `cached` times as fast as its memory. Nodes are those of a
    CUDA graph; an `If` waits for the host, which decides.
    """
    streamed = gigabytes_per_s * STREAMED * 1e3

    def machine(width: float, tflops: float, copied_width: float) -> Machine:
        counted = streamed * 4 / width  # of bytes that are counted as FP32
        return Machine(
            bytes_per_us=counted,
            stacked_bytes_per_us=counted,
            copy_bytes_per_us=streamed * 4 / copied_width / 2,
            macs_per_us=tflops * 0.5e6,
            batched_macs_per_us=tflops * 0.5e6,
            node_us=1.5,
            branch_us=15.0,
            cached=cached,
            cache_bytes=cache_mib << 20,
            reads_once=True,
        )

    half = machine(2, fp16_tflops, 2)
    return MappingProxyType(
        {
            "fp32": machine(4, fp32_tflops, 4),
            "fp16": half,
            "bf16": half,
            # A constant stack is dequantised to FP16 before a Gather: all of it is written, too.
            "int8": machine(1, int8_tops, 8),
            # Unpacked to FP16 as they are read.
            "int4": machine(4.5 / 8, fp16_tflops, 2),
            "fp8": machine(1, int8_tops, 8),
        }
    )


GPUS: Mapping[str, Mapping[Precision, Machine]] = MappingProxyType(
    {
        "A100": _card(2039, 19.5, 312, 624, cache_mib=40, cached=2.5),
        "H100": _card(3350, 67, 989, 1979, cache_mib=50, cached=2.0),
        "H200": _card(4800, 67, 989, 1979, cache_mib=50, cached=1.5),
        "Jetson AGX Orin": _card(205, 5.3, 42.5, 85, cache_mib=4, cached=2.0),
        "L4": _card(300, 30.3, 121, 242, cache_mib=48, cached=5.0),
        "L40S": _card(864, 91.6, 362, 733, cache_mib=96, cached=5.0),
        "RTX 4090": _card(1008, 82.6, 165, 661, cache_mib=72, cached=5.0),
    }
)
"""Cards by NVIDIA's data sheets, and guesses of what a node, a branch and the L2 cost: nothing of
it was measured."""

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
    lone_macs=1 << 16,
    integer_nodes=1,
    integer_passes=1,
)
"""Fitted likewise, on machines with VNNI and without, to both forms of integer products. Stacked
weights are packed for any number of rows: what they take has that in it."""

CPU_INT4 = replace(
    CPU,
    bytes_per_us=90e3,
    stacked_bytes_per_us=90e3,
    macs_per_us=150e3,
    pack_bytes_per_us=math.inf,
    cached=1.1,
)
"""From single products of `MatMulNBits`, not fitted: unpacking keeps it from being as fast as the
bytes that it reads, and many rows take about as long as with FP32 weights."""

ON_CPU = MachineKind(
    "cpu",
    {  # 16-bit floats are computed in FP32 there.
        "fp32": CPU,
        "fp16": CPU,
        "bf16": CPU,
        "int8": CPU_INT8,
        "int4": CPU_INT4,
        "fp8": CPU,
    },
)
SERVER_GPU = MachineKind("server-gpu", GPUS["H100"], on_cpu=False, card="H100")
RTX_GPU = MachineKind("rtx-gpu", GPUS["RTX 4090"], on_cpu=False, card="RTX 4090")
"""The cards that `auto` assumes for targets on GPUs."""


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """The facts of one target, which everything else reads.

    `machine` is what the cost model takes it to run on. `runtime` runs its graphs, and checks those
    of which engines are compiled: ONNX Runtime on `provider`, or that of a plugin; the TensorRT
    `backend` of that name compiles them. `integers` is how products of integers are written, and
    `rest` the usual float type around INT8 experts. A target that is not `standard_ops` alone takes
    ONNX Runtime's own (`com.microsoft`); `data_sizes` says whether it runs ops whose output's size
    depends on values (NonZero), `branches` whether it computes `If` right at every batch size,
    `broadcasts` whether a product may multiply the same rows by every matrix of a stack,
    `constant_integers` whether products of integers are those with constant weights alone,
    `bf16_attention` whether it needs a softmax in BF16 to compute attention in BF16 as one kernel,
    and `moe` the floats in which it has `com.microsoft.MoE`. `cpu_forms` says whether graphs take
    the forms that ONNX Runtime's CPU kernels are fast at, and `new_kernels` whether it has those
    kernels that a browser has not, or was not tried with: attention as one op, weights of eight
    bits in blocks, integer experts. It loads weights of up to `most_bytes` together. `refused` has
    by precision a reason and what to do instead, `notes` what a user should know.
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
    broadcasts: bool = True
    constant_integers: bool = False
    bf16_attention: bool = False
    moe: tuple[FloatName, ...] = ()
    cpu_forms: bool = False
    new_kernels: bool = False
    most_bytes: int | None = None
    refused: Mapping[Precision, tuple[str, str]] = field(default_factory=dict)
    notes: Mapping[Precision, str] = field(default_factory=dict)

    @property
    def compiled(self) -> bool:
        """Whether an engine is compiled of its graphs."""
        return self.backend is not None

    @property
    def on_cpu(self) -> bool:
        """Whether its graphs run on a CPU."""
        return self.machine.on_cpu


_CPU_FP16 = (
    "weights are stored in FP16 and everything is computed in FP32: half the file, no faster, and "
    "the same on every CPU; for a GPU use --target ort-cuda"
)

_NO_INT4: Mapping[Precision, tuple[str, str]] = {
    "int4": (
        "weights of four bits are written for ONNX Runtime's CPU provider",
        "use --target ort-cpu or onnx, or --precision fp16 here",
    )
}

NO_FP8: Mapping[Precision, tuple[str, str]] = {
    "fp8": (
        "floats of eight bits are for TensorRT on Ada cards and newer",
        "use --target tensorrt or tensorrt-rtx, or --precision int8 here",
    )
}

_RECORDS = (
    TargetRecord(
        "onnx",
        ON_CPU,
        "standard",
        provider=CPU_PROVIDER,
        refused=NO_FP8,
        notes={
            "fp16": _CPU_FP16,
            "bf16": "ONNX Runtime's CPU provider has no BF16 kernels: `run` emulates them",
            "int4": "the file is small; `run` unpacks the weights to FP32 when it loads them, and "
            "ort-cpu keeps them packed",
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
        refused={
            **NO_FP8,
            "bf16": (
                "ONNX Runtime's CPU provider has no BF16 kernels",
                "int8 is what is fast there; bf16 is for tensorrt and tensorrt-rtx",
            ),
        },
        notes={"fp16": _CPU_FP16},
    ),
    TargetRecord(
        "ort-cuda",
        SERVER_GPU,
        "standard",
        provider=CUDA_PROVIDER,
        standard_ops=False,
        moe=("fp32", "fp16"),
        refused={
            **_NO_INT4,
            **NO_FP8,
            "int8": (
                "ONNX Runtime's CUDA provider computes quantised graphs in floats, slower than "
                "without",
                "use --precision fp16, or --target tensorrt",
            ),
        },
    ),
    # onnxruntime-web in a browser: its WASM is ONNX Runtime's CPU provider with 32-bit addresses.
    TargetRecord(
        "ort-web",
        ON_CPU,
        "kernel",
        provider=CPU_PROVIDER,
        standard_ops=False,
        moe=("fp32",),
        cpu_forms=True,
        most_bytes=2**31 - 1,
        refused={
            **NO_FP8,
            "bf16": (
                "onnxruntime-web has no BF16 kernels",
                "use --precision int8 for a small file; bf16 is for tensorrt and tensorrt-rtx",
            ),
        },
        notes={"fp16": _CPU_FP16},
    ),
    # TensorRT-RTX compiles no NonZero; TensorRT does, but its size has to come back to the CPU.
    TargetRecord(
        "tensorrt",
        SERVER_GPU,
        "qdq",
        backend="tensorrt",
        rest="fp16",
        data_sizes=False,
    ),
    TargetRecord(
        "tensorrt-rtx",
        RTX_GPU,
        "qdq",
        backend="tensorrt-rtx",
        rest="fp16",
        data_sizes=False,
    ),
)

TARGETS = Registry("moexport.targets", TargetRecord, _RECORDS)
"""`onnx` means standard ONNX ops alone, so that any runtime can."""


def compiled_names() -> tuple[str, ...]:
    """Returns the names of the core's targets of whose graphs engines are compiled."""
    return tuple(record.name for record in TARGETS.own if record.compiled)


def runtime_of(target: Target) -> Runtime:
    """Returns what runs the graphs of a target."""
    return TARGETS[target].runtime


def for_cpus(target: Target) -> bool:
    """Returns whether a target's graphs are for CPUs."""
    return TARGETS[target].on_cpu
