"""Predicts how long a layer takes in each lowering, so that `auto` can choose and say why.

A layer's time is its weight traffic, plus its arithmetic, plus what does not shrink with k (passes
over the tokens), plus a price per node. The constants are of one machine; what matters is the order
of the lowerings, which a test compares with the measurements in `perf/results`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..precision.types import Precision
from ..targets import Target
from .base import AnyLowering, AnyWork, Work
from .grouped import MANY_EXPERTS


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one kind of machine.

    `bytes_per_us` when weights or tokens are streamed, `stacked_bytes_per_us` when the weights are
    all experts' in one constant, which is not pre-packed, `copy_bytes_per_us` when a Gather reads,
    writes and reads weights again (counted once per weight byte), `macs_per_us` in matmuls with
    constant, pre-packed weights and `batched_macs_per_us` in batched ones, `node_us` for an
    operator with little to do, `branch_us` for an `If`. `integer_nodes` is how many nodes more an
    expert takes in integers.
    """

    bytes_per_us: float
    stacked_bytes_per_us: float
    copy_bytes_per_us: float
    macs_per_us: float
    batched_macs_per_us: float
    node_us: float
    branch_us: float
    integer_nodes: int = 0


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


CPU = Machine(
    bytes_per_us=34e3,
    stacked_bytes_per_us=21e3,
    copy_bytes_per_us=10e3,
    macs_per_us=105e3,
    batched_macs_per_us=72e3,
    node_us=1.2,
    branch_us=9.5,
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

GPU_RATES: Mapping[Precision, Machine] = MappingProxyType(
    {
        "fp32": GPU,
        "fp16": _scaled(GPU, 2),
        "bf16": _scaled(GPU, 2),
        # The stack of weights is dequantised before a Gather, as far as anyone knows.
        "int8": replace(_scaled(GPU, 4), copy_bytes_per_us=GPU.copy_bytes_per_us / 4),
    }
)
"""By their data sheets: twice as many numbers of half the size."""


MUMOE_NODES = 50
"""About as many nodes as one level of a muMoE layer takes."""


def machine_for(target: Target, precision: Precision = "fp32") -> Machine:
    """The rates that `auto` assumes for a target; `onnx` is taken to run on a CPU.

    Those of the experts' weights: a byte is counted as four, and weights of fewer bytes stream so
    much faster.
    """
    if target in ("onnx", "ort-cpu"):
        return CPU_INT8 if precision == "int8" else CPU
    return GPU_RATES[precision]


def predict_us(lowering: AnyLowering, work: AnyWork, machine: Machine) -> float:
    """Returns the predicted time of one layer on one batch, in microseconds."""
    if lowering.kind == "mumoe":
        return _MUMOE[lowering.name](work, machine)
    return _EXPERTS[lowering.name](work, machine) + _rest_us(work, machine)


def _all_coefficients_us(work: AnyWork, machine: Machine) -> float:
    """A muMoE layer whose factors, or whole tensor, are read once for all tokens."""
    everything = work.spec.experts
    macs: int = sum(work.spec.macs(work.tokens, everything).values())
    traffic: float = work.spec.bytes_read(everything) / machine.bytes_per_us
    return max(traffic, work.batch * macs / machine.macs_per_us) + _gate_us(work, machine)


def _gathered_us(work: AnyWork, machine: Machine) -> float:
    """A muMoE layer of which each token copies the experts that it keeps, and no others."""
    if work.k >= work.spec.experts:
        return _all_coefficients_us(work, machine)  # nothing is to gather: it is the same graph
    macs: int = sum(work.spec.macs(work.tokens, work.k).values())
    return (
        _token_copies(work) / machine.copy_bytes_per_us
        + work.batch * macs / machine.batched_macs_per_us
        + _gate_us(work, machine)
    )


def _token_copies(work: AnyWork) -> float:
    """The bytes of the experts that every token of a batch keeps."""
    return float(work.batch * work.tokens * work.spec.bytes_read(work.k))


def _gate_us(work: AnyWork, machine: Machine) -> float:
    """The nodes of a muMoE layer: few but for the gate's steps."""
    return float(MUMOE_NODES * len(work.spec.levels) * machine.node_us)


_MUMOE = {
    "factorised": _all_coefficients_us,
    "unfactorised": _all_coefficients_us,
    "gathered": _gathered_us,
}


def _rest_us(work: Work, machine: Machine) -> float:
    """Router, dispatch and combine: the same for every lowering but for what `dense` adds."""
    spec, macs = work.spec, work.spec.macs(work.tokens, work.k)
    passes = 4.0 * work.batch * work.tokens * (3 * spec.dim + spec.out)  # norm, L, X̃ and y
    computed = work.batch * (macs["router"] + macs["dispatch"] + macs["combine"])
    return (
        passes / machine.bytes_per_us
        + computed / machine.batched_macs_per_us
        + ROUTER_NODES * machine.node_us
    )


ROUTER_NODES = 15


def _expert_bytes(work: Work, experts: float) -> float:
    return 4.0 * experts * work.spec.parameters_per_expert


def _input_copies(work: Work) -> float:
    """The bytes of the experts that every input of a batch keeps."""
    return _expert_bytes(work, work.selections)


_COPIES: Mapping[str, Callable[[AnyWork], float]] = MappingProxyType(
    {"gather": _input_copies, "gathered": _token_copies}
)
"""What a lowering copies before it multiplies; the others read weights where they are."""


def _expert_macs(work: Work, rows: float) -> float:
    return rows * work.spec.slots * work.spec.parameters_per_expert


def _grouped_us(work: Work, machine: Machine) -> float:
    n = work.spec.experts
    sorting = 12 if work.k < n else 3
    nodes = (_chain(work) + machine.integer_nodes) * n + sorting
    if n >= MANY_EXPERTS and work.spec.expert != "linear":
        # What lies between the matmuls is there once for all experts.
        nodes -= n if machine.integer_nodes == 0 else 2 * n
    return (
        _expert_bytes(work, work.expected_active) / machine.bytes_per_us
        + _expert_macs(work, work.selections) / machine.macs_per_us
        + nodes * machine.node_us
    )


def _dense_us(work: Work, machine: Machine) -> float:
    n = work.spec.experts
    rows = work.batch * work.spec.slots
    # A single row per expert is computed while its weights stream by; further rows cost.
    computed = _expert_macs(work, work.batch * n) * (1.0 - 1.0 / rows)
    return (
        _expert_bytes(work, n) / machine.stacked_bytes_per_us
        + (computed + _unselected_macs(work)) / machine.batched_macs_per_us
        + 8 * machine.node_us
    )


def _gather_us(work: Work, machine: Machine) -> float:
    if work.k == work.spec.experts:
        return _dense_us(work, machine)  # nothing is to gather: it is the same graph
    return (
        _input_copies(work) / machine.copy_bytes_per_us
        + _expert_macs(work, work.selections) / machine.batched_macs_per_us
        + 12 * machine.node_us
    )


def _conditional_us(work: Work, machine: Machine) -> float:
    n, active = work.spec.experts, work.expected_active
    branches = n * machine.branch_us if work.k < n else 0.0
    return (
        _expert_bytes(work, active) / machine.bytes_per_us
        + _expert_macs(work, work.batch * active) / machine.macs_per_us
        + _unselected_macs(work) / machine.batched_macs_per_us
        + branches
        + (_chain(work) + 3) * n * machine.node_us
    )


def _fused_us(work: Work, machine: Machine) -> float:
    return (
        _expert_bytes(work, work.expected_active) / machine.bytes_per_us
        + _expert_macs(work, work.selections) / machine.batched_macs_per_us
        + 10 * machine.node_us
    )


def _unselected_macs(work: Work) -> float:
    """Dispatch and combine of the experts that nobody needs, where all are carried along."""
    unselected = work.batch * work.tokens * (work.spec.experts - work.k) * work.spec.slots
    return float(unselected * (work.spec.dim + work.spec.out))


def _chain(work: Work) -> int:
    """Nodes per expert: two matmuls and an activation, or one matmul."""
    return 1 if work.spec.expert == "linear" else 3


_EXPERTS = {
    "dense": _dense_us,
    "gather": _gather_us,
    "grouped": _grouped_us,
    "conditional": _conditional_us,
    "fused": _fused_us,
}


def copied_bytes(lowering: AnyLowering, work: AnyWork) -> float:
    """Returns the bytes of weights that a lowering copies for one batch, counted as FP32."""
    copies = _COPIES.get(lowering.name)
    return 0.0 if copies is None or work.k >= work.spec.experts else copies(work)
