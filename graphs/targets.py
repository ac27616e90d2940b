"""Targets and precisions: what runs a graph, and what it computes in. Importing loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from ..common.registry import names_in

Target = Literal["onnx", "ort-cpu", "ort-cuda", "ort-web", "openvino", "tensorrt", "tensorrt-rtx"]
"""Who runs the graph. `onnx` means standard ONNX ops alone, so that any runtime can."""

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

Runtime = Literal["onnxruntime", "openvino"]
"""What runs the file of a graph. An engine is another file, which a TensorRT has compiled of it."""


def runtime_names() -> tuple[str, ...]:
    """Returns the names of all runtimes: those of targets, and what other packages bring."""
    return tuple(dict.fromkeys((*get_args(Runtime), *names_in("moexport.runtimes"))))


RUNTIME_TITLES: Mapping[Runtime, str] = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
"""What readers know them by."""

QuantFormat = Literal["kernel", "standard", "qdq", "qdq-unsigned"]
"""How a product of integers is written. `kernel`: ONNX Runtime's `MatMulIntegerToFloat`;
`standard`: `MatMulInteger`, whose result is cast and scaled; `qdq`: QuantizeLinear and
DequantizeLinear around a float MatMul, which TensorRT turns into an integer one; `qdq-unsigned`:
the same, where what meets the weights is an unsigned byte with a zero point, as in the first two,
which OpenVINO turns into an integer product."""

QDQ: tuple[QuantFormat, ...] = ("qdq", "qdq-unsigned")
"""Forms that are QuantizeLinear and DequantizeLinear around a product of floats."""

MachineKind = Literal["cpu", "openvino-cpu", "server-gpu", "rtx-gpu"]

ON_CPU: tuple[MachineKind, ...] = ("cpu", "openvino-cpu")

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """The facts of one target, which everything else reads.

    `machine` is what the cost model takes it to run on (`lowerings.cost.MACHINES`). Its graphs run
    in ONNX Runtime on `provider` or in OpenVINO on `device`, or are compiled by the TensorRT
    `backend` of that name. `integers` is how products of integers are written, and `rest` the usual
    float type around INT8 experts. A target that is not `standard_ops` alone takes ONNX Runtime's
    own (`com.microsoft`); `data_sizes` says whether it runs ops whose output's size depends on
    values (NonZero), `branches` whether it computes `If` right at every batch size, `broadcasts`
    whether a product may multiply the same rows by every matrix of a stack, `constant_integers`
    whether products of integers are those with constant weights alone, and `moe` the floats in
    which it has `com.microsoft.MoE`. `cpu_forms` says whether graphs take the forms that ONNX
    Runtime's CPU kernels are fast at, and `new_kernels` whether it has those kernels that a browser
    has not, or was not tried with: attention as one op, weights of eight bits in blocks, integer
    experts. It loads weights of up to `most_bytes` together. `refused` has by precision a reason
    and what to do instead, `notes` what a user should know.
    """

    name: Target
    machine: MachineKind
    integers: QuantFormat
    provider: str | None = None
    device: str | None = None
    backend: str | None = None
    rest: FloatName = "fp32"
    standard_ops: bool = True
    data_sizes: bool = True
    branches: bool = True
    broadcasts: bool = True
    constant_integers: bool = False
    moe: tuple[FloatName, ...] = ()
    cpu_forms: bool = False
    new_kernels: bool = False
    most_bytes: int | None = None
    refused: Mapping[Precision, tuple[str, str]] = field(default_factory=dict)
    notes: Mapping[Precision, str] = field(default_factory=dict)

    @property
    def runtime(self) -> Runtime:
        """What runs its graphs, and checks those of which engines are compiled."""
        return "onnxruntime" if self.device is None else "openvino"

    @property
    def compiled(self) -> bool:
        """Whether an engine is compiled of its graphs."""
        return self.backend is not None

    @property
    def on_cpu(self) -> bool:
        """Whether its graphs run on a CPU."""
        return self.machine in ON_CPU


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

_NO_FP8: Mapping[Precision, tuple[str, str]] = {
    "fp8": (
        "floats of eight bits are for TensorRT on Ada cards and newer",
        "use --target tensorrt or tensorrt-rtx, or --precision int8 here",
    )
}

_RECORDS = (
    TargetRecord(
        "onnx",
        "cpu",
        "standard",
        provider=CPU_PROVIDER,
        refused=_NO_FP8,
        notes={
            "fp16": _CPU_FP16,
            "bf16": "ONNX Runtime's CPU provider has no BF16 kernels: `run` emulates them",
            "int4": "the file is small; `run` unpacks the weights to FP32 when it loads them, and "
            "ort-cpu keeps them packed",
        },
    ),
    TargetRecord(
        "ort-cpu",
        "cpu",
        "kernel",
        provider=CPU_PROVIDER,
        standard_ops=False,
        moe=("fp32",),
        cpu_forms=True,
        new_kernels=True,
        refused={
            **_NO_FP8,
            "bf16": (
                "ONNX Runtime's CPU provider has no BF16 kernels",
                "int8 is what is fast there; bf16 is for tensorrt and tensorrt-rtx",
            ),
        },
        notes={"fp16": _CPU_FP16},
    ),
    TargetRecord(
        "ort-cuda",
        "server-gpu",
        "standard",
        provider=CUDA_PROVIDER,
        standard_ops=False,
        moe=("fp32", "fp16"),
        refused={
            **_NO_INT4,
            **_NO_FP8,
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
        "cpu",
        "kernel",
        provider=CPU_PROVIDER,
        standard_ops=False,
        moe=("fp32",),
        cpu_forms=True,
        most_bytes=2**31 - 1,
        refused={
            **_NO_FP8,
            "bf16": (
                "onnxruntime-web has no BF16 kernels",
                "use --precision int8 for a small file; bf16 is for tensorrt and tensorrt-rtx",
            ),
        },
        notes={"fp16": _CPU_FP16},
    ),
    # Where the batch is dynamic it overwrites what an `If` gave before.
    TargetRecord(
        "openvino",
        "openvino-cpu",
        "qdq-unsigned",
        device="CPU",
        branches=False,
        broadcasts=False,
        constant_integers=True,
        refused=_NO_FP8,
        notes={"fp16": "OpenVINO computes FP16 in FP32 on most CPUs: half the file, no faster"},
    ),
    # TensorRT-RTX compiles no NonZero; TensorRT does, but its size has to come back to the CPU.
    TargetRecord(
        "tensorrt",
        "server-gpu",
        "qdq",
        backend="tensorrt",
        rest="fp16",
        data_sizes=False,
    ),
    TargetRecord(
        "tensorrt-rtx",
        "rtx-gpu",
        "qdq",
        backend="tensorrt-rtx",
        rest="fp16",
        data_sizes=False,
    ),
)

TARGETS: Mapping[Target, TargetRecord] = MappingProxyType(
    {target.name: target for target in _RECORDS}
)


def runtime_of(target: str) -> Runtime:
    """Returns what runs the graphs of a target, as a manifest names it."""
    return next((record.runtime for record in _RECORDS if record.name == target), "onnxruntime")


def for_cpus(target: str) -> bool:
    """Returns whether a target's graphs, as a manifest names it, are for CPUs."""
    return any(record.name == target and record.on_cpu for record in _RECORDS)


ENGINES: frozenset[Target] = frozenset(target.name for target in _RECORDS if target.compiled)
"""Those that compile a graph to an engine."""
