"""Rates of GPUs for the cost model: from data sheets, or fitted to measured times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from .targets import Machine, Precision

REACHED_BANDWIDTH = 0.85
"""The share of a GPU's data-sheet bandwidth that large reads and writes reach."""


def _gpu(
    gigabytes_per_s: float,
    fp32_tflops: float,
    fp16_tflops: float,
    int8_tops: float,
    *,
    cache_mib: int,
    cached: float,
) -> Mapping[Precision, Machine]:
    """Returns a GPU's rates, from its data sheet's numbers without sparsity.

    The L2 cache has `cache_mib` MiB and is `cached` times as fast as the memory. Node times are
    those in a CUDA graph; an `If` waits for the host.
    """
    streamed = gigabytes_per_s * REACHED_BANDWIDTH * 1e3

    def machine(width: float, tflops: float, copied_width: float) -> Machine:
        fp32_bytes_per_us = streamed * 4 / width  # bytes of weights are counted as FP32
        return Machine(
            bytes_per_us=fp32_bytes_per_us,
            stacked_bytes_per_us=fp32_bytes_per_us,
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
            # A constant stack is dequantised to FP16 before a Gather, and written in full.
            "int8": machine(1, int8_tops, 8),
            # Weights are unpacked to FP16 as they are read.
            "int4": machine(4.5 / 8, fp16_tflops, 2),
            "fp8": machine(1, int8_tops, 8),
        }
    )


GPUS: Mapping[str, Mapping[Precision, Machine]] = MappingProxyType(
    {
        "A100": _gpu(2039, 19.5, 312, 624, cache_mib=40, cached=2.5),
        "H100": _gpu(3350, 67, 989, 1979, cache_mib=50, cached=2.0),
        "H200": _gpu(4800, 67, 989, 1979, cache_mib=50, cached=1.5),
        "Jetson AGX Orin": _gpu(205, 5.3, 42.5, 85, cache_mib=4, cached=2.0),
        "L4": _gpu(300, 30.3, 121, 242, cache_mib=48, cached=5.0),
        "L40S": _gpu(864, 91.6, 362, 733, cache_mib=96, cached=5.0),
        "RTX 4090": _gpu(1008, 82.6, 165, 661, cache_mib=72, cached=5.0),
    }
)
"""Rates from NVIDIA's data sheets, with estimated costs of nodes, branches and the L2 cache.
Nothing was measured."""


_H100 = GPUS["H100"]

FITTED: Mapping[str, Mapping[Precision, Machine]] = MappingProxyType(
    {
        "H100": MappingProxyType(
            {
                name: replace(
                    rates,
                    copy_bytes_per_us=0.893e6 if name == "fp32" else 1.2e6,
                    node_us=2.77,
                    launch_us=3.89,
                    branch_us=13.4,
                    cached=1.0,
                    processors=132,
                    processor_bytes_per_us=110e3 * rates.bytes_per_us / _H100["fp32"].bytes_per_us,
                )
                for name, rates in _H100.items()
            }
        )
    }
)
"""Rates from data sheets, with those of copies and nodes fitted by `python -m perf cuda`.

They were fitted to `ort-cuda` graphs. The time of a node is its time in a CUDA graph, without the
launch. Integer weights are copied as FP16. The other layers of a network evict weights from the L2
cache. The rate of a single processor is that of its path to the L2 cache, from the data sheet."""
