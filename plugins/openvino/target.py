"""The target `openvino`: what its graphs support, and how fast CPUs run them."""

from __future__ import annotations

from dataclasses import replace

from ...graphs.targets import CPU, CPU_RATES, NO_FP8, MachineKind, TargetRecord

API = 1

CPU_BF16 = replace(
    CPU,
    bytes_per_us=2 * CPU.bytes_per_us,
    stacked_bytes_per_us=2 * CPU.stacked_bytes_per_us,
    copy_bytes_per_us=2 * CPU.copy_bytes_per_us,
    pack_bytes_per_us=2 * CPU.pack_bytes_per_us,
    macs_per_us=2 * CPU.macs_per_us,
    batched_macs_per_us=2 * CPU.batched_macs_per_us,
)
"""CPUs with BF16 instructions: half the bytes of weights, and twice the products per cycle.
This is an estimate, not a measurement; the other constants were not fitted to OpenVINO either."""

TARGET = TargetRecord(
    "openvino",
    MachineKind("openvino-cpu", {**CPU_RATES, "bf16": CPU_BF16}),
    "qdq-unsigned",
    runtime="openvino",
    branches=False,  # if the batch is dynamic, OpenVINO overwrites earlier outputs of an `If`
    broadcasts=False,
    constant_integers=True,
    bf16_attention=True,
    refused=NO_FP8,
    notes={"fp16": "OpenVINO computes FP16 in FP32 on most CPUs: half the size, the same speed"},
)
