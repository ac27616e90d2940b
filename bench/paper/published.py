"""What the papers print, to stand beside: shares of 1, milliseconds, megabytes, multiply-adds.

Soft MoE: "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts" (TMLR 2025). muMoE:
"Multilinear Mixture of Experts: Scalable Expert Specialization through Factorization" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from ..analyses.report import Printed

RETENTION = {
    2: (0.781, 0.803, 0.885, 0.942, 0.966, 0.970, 0.973, 0.982),
    4: (0.477, 0.608, 0.762, 0.864, 0.884, 0.902, 0.932),
    8: (0.403, 0.519, 0.716, 0.762, 0.804, 0.859),
}
"""MNIST: what Algorithm 1 keeps of the accuracy, by n/k; n doubles from there to 256."""

MNIST = Printed(
    retention={
        fraction: {fraction * 2**index: share for index, share in enumerate(shares)}
        for fraction, shares in RETENTION.items()
    },
    best_subset={4: 0.9469, 8: 0.9990, 16: 1.0},
    random_subset={4: 0.4657, 8: 0.5195, 16: 0.5894},
)
"""MNIST: what is kept, and Table 1."""


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Table 3: the shape that was timed, and milliseconds by batch size and k."""

    layers: int = 6
    experts: int = 8
    dim: int = 768
    hidden: int = 30720
    tokens: int = 197
    warmup: int = 100
    timed: int = 100


TABLE_3 = LatencyTable()

TABLE_3_MS = MappingProxyType(
    {
        1: {8: 21.50, 6: 19.46, 4: 14.75, 2: 9.96},
        100: {8: 99.03, 6: 78.26, 4: 78.86, 2: 51.69},
    }
)
"""On an RTX 2080 Ti in FP32, by batch size and k."""

TABLE_6 = MappingProxyType(
    {
        "linear": (12.07, 0.01),
        "dense MoE": (390.17, 1.17),
        "sparse MoE": (765.19, 0.80),
        "TR": (15.87, 0.94),
        "CP": (14.02, 1.05),
    }
)
"""muMoE: peak MB and ms for one input, by layer."""

TABLE_8 = MappingProxyType({"CP": (155.1e9, 1.4e6), "TR": (622.8e9, 3.5e6)})
"""muMoE: FLOPs with the whole tensor and in factors. They are multiply-adds, each counted once."""
