"""What the predictions of the lowerings are made of: machines, a layer's work, and shared terms.

A layer's time is its weight traffic, plus its arithmetic, plus what does not shrink with k (passes
over the tokens), plus a price per node; each lowering's own module adds up its own. The constants
are of one machine; what matters is the order of the lowerings, which a test compares with the
measurements in `perf/results`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic

from ..choices import Precision
from ..layers.soft_moe import SoftMoESpec
from ..layers.stored import S
from ..targets import TARGETS, MachineKind, Target


@dataclass(frozen=True)  # no slots: calling an alias such as Work sets an attribute
class WorkOf(Generic[S]):
    """The size of one layer's job: what a cost is a function of."""

    spec: S
    k: int
    batch: int
    tokens: int
    precision: Precision = "fp32"

    @property
    def selections(self) -> int:
        """How many (input, expert) pairs are computed: b·k."""
        return self.batch * self.k

    @property
    def expected_active(self) -> float:
        """Experts that at least one input selects, if inputs chose evenly and independently.

        Real routers are less even, so this is the upper end; fewer active experts cost less.
        """
        n = self.spec.experts
        return n * (1.0 - (1.0 - self.k / n) ** self.batch)


Work = WorkOf[SoftMoESpec]
AnyWork = WorkOf[Any]


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one kind of machine.

    `bytes_per_us` when weights or tokens are streamed, `stacked_bytes_per_us` when the weights are
    all experts' in one constant, which is not pre-packed, `copy_bytes_per_us` when a Gather reads,
    writes and reads weights again (counted once per weight byte), `macs_per_us` in matmuls with
    constant, pre-packed weights and `batched_macs_per_us` in batched ones, `node_us` for an
    operator with little to do, `branch_us` for an `If`. `integer_nodes` is how many nodes more an
    expert takes in integers. Of `com.microsoft.MoE` alone are `routing_us` for each expert that a
    row could go to, and `scalar_us` for a number that its loops take one by one. Weights of a layer
    that the caches hold (`CACHE_BYTES`) come so many times faster (`cached`).
    """

    bytes_per_us: float
    stacked_bytes_per_us: float
    copy_bytes_per_us: float
    macs_per_us: float
    batched_macs_per_us: float
    node_us: float
    branch_us: float
    integer_nodes: int = 0
    routing_us: float = 0.0
    scalar_us: float = 0.0
    cached: float = 1.0


def _scaled(machine: Machine, factor: float) -> Machine:
    """A machine that streams and multiplies numbers so many times faster."""
    return replace(
        machine,
        bytes_per_us=factor * machine.bytes_per_us,
        stacked_bytes_per_us=factor * machine.stacked_bytes_per_us,
        copy_bytes_per_us=factor * machine.copy_bytes_per_us,
        macs_per_us=factor * machine.macs_per_us,
        batched_macs_per_us=factor * machine.batched_macs_per_us,
    )


CACHE_BYTES = 16 << 20
"""Experts of fewer bytes, counted as FP32, stay in the caches from one run to the next."""

CPU = Machine(
    bytes_per_us=33e3,
    stacked_bytes_per_us=23e3,
    copy_bytes_per_us=12e3,
    macs_per_us=80e3,
    batched_macs_per_us=53e3,
    node_us=0.53,
    branch_us=1.4,
    routing_us=0.0067,
    scalar_us=0.0014,
    cached=1.75,
)
"""What `python -m perf fit` found on two cores with AVX-512; they choose as well on two with
AVX2."""

GPU = Machine(
    bytes_per_us=1.5e6,
    stacked_bytes_per_us=1.5e6,
    copy_bytes_per_us=0.5e6,
    macs_per_us=10e6,
    batched_macs_per_us=10e6,
    node_us=4.0,
    branch_us=30.0,
)
"""An estimate from data sheets of mid-range cards: not measured."""

CPU_INT8 = Machine(
    bytes_per_us=136e3,
    stacked_bytes_per_us=56e3,
    copy_bytes_per_us=33e3,
    macs_per_us=130e3,
    batched_macs_per_us=105e3,
    node_us=2.5,
    branch_us=2.5,
    integer_nodes=2,
)
"""Between what fits two cores with VNNI (163e3 multiply-adds) and two without (101e3), so that
`auto` chooses well on both; stacked weights are packed for every product."""

MACHINES: Mapping[MachineKind, Mapping[Precision, Machine]] = MappingProxyType(
    {
        # 16-bit floats are computed in FP32 there.
        "cpu": {"fp32": CPU, "fp16": CPU, "bf16": CPU, "int8": CPU_INT8},
        # By their data sheets: twice as many numbers of half the size. The stack of weights is
        # dequantised before a Gather, as far as anyone knows.
        "gpu": {
            "fp32": GPU,
            "fp16": _scaled(GPU, 2),
            "bf16": _scaled(GPU, 2),
            "int8": replace(_scaled(GPU, 4), copy_bytes_per_us=GPU.copy_bytes_per_us / 4),
        },
    }
)
"""The rates by what computes the experts: a byte of their weights is counted as four, and weights
of fewer bytes stream so much faster."""


def machine_for(target: Target, precision: Precision = "fp32") -> Machine:
    """Returns the rates that `auto` assumes for a target."""
    return MACHINES[TARGETS[target].machine][precision]


ROUTER_NODES = 15


def around_experts_us(work: Work, machine: Machine) -> float:
    """Router, dispatch and combine of a Soft MoE layer: the same for every lowering."""
    spec, macs = work.spec, work.spec.macs(work.tokens, work.k)
    passes = 4.0 * work.batch * work.tokens * (3 * spec.dim + spec.out)  # norm, L, X̃ and y
    computed = work.batch * (macs["router"] + macs["dispatch"] + macs["combine"])
    return (
        passes / machine.bytes_per_us
        + computed / machine.batched_macs_per_us
        + ROUTER_NODES * machine.node_us
    )


def expert_bytes(work: Work, experts: float) -> float:
    """The bytes of so many experts' weights, counted as FP32."""
    return 4.0 * experts * work.spec.parameters_per_expert


def stream_us(work: Work, weights_bytes: float, bytes_per_us: float, machine: Machine) -> float:
    """How long so many bytes of a layer's weights take, faster where the caches hold the layer."""
    fits = expert_bytes(work, work.spec.experts) <= CACHE_BYTES
    return weights_bytes / (bytes_per_us * (machine.cached if fits else 1.0))


def expert_macs(work: Work, rows: float) -> float:
    """The multiply-adds of so many (input, expert) pairs."""
    return rows * work.spec.slots * work.spec.parameters_per_expert


def expert_nodes(work: Work) -> int:
    """Nodes per expert: two matmuls and an activation, or one matmul."""
    return 1 if work.spec.expert == "linear" else 3


def unselected_macs(work: Work) -> float:
    """Dispatch and combine of the experts that nobody needs, where all are carried along."""
    unselected = work.batch * work.tokens * (work.spec.experts - work.k) * work.spec.slots
    return float(unselected * (work.spec.dim + work.spec.out))
