"""Predicts how long a layer takes in each lowering, so that `auto` can choose and say why.

A layer's time is the larger of its weight traffic and its arithmetic for the experts, plus what
does not shrink with k (the router), plus a price per node. The constants are of one machine; what
matters is the order of the lowerings, which `benchmarks/` compares with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import LoweringError
from .lowerings.base import Lowering, Target, Work
from .lowerings.registry import LOWERINGS


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one kind of machine.

    `bytes_per_us` when weights are streamed, `copy_bytes_per_us` when a Gather reads, writes and
    reads them again (counted once per weight byte), `macs_per_us` in large matmuls and
    `batched_macs_per_us` in batched ones of few rows, `node_us` for an operator with little to do,
    `branch_us` for an `If`.
    """

    bytes_per_us: float
    copy_bytes_per_us: float
    macs_per_us: float
    batched_macs_per_us: float
    node_us: float
    branch_us: float


CPU = Machine(
    bytes_per_us=40e3,
    copy_bytes_per_us=12e3,
    macs_per_us=105e3,
    batched_macs_per_us=80e3,
    node_us=2.0,
    branch_us=40.0,
)
"""Two cores with AVX-512, fitted to docs/performance.md."""

GPU = Machine(
    bytes_per_us=1.5e6,
    copy_bytes_per_us=0.5e6,
    macs_per_us=10e6,
    batched_macs_per_us=10e6,
    node_us=4.0,
    branch_us=30.0,
)
"""An estimate from data sheets of mid-range cards: not measured."""


def machine_for(target: Target) -> Machine:
    """The rates that `auto` assumes for a target; `onnx` is taken to run on a CPU."""
    return CPU if target in ("onnx", "ort-cpu") else GPU


def predict_us(lowering: Lowering, work: Work, machine: Machine) -> float:
    """Returns the predicted time of one layer on one batch, in microseconds."""
    return _EXPERTS[lowering.name](work, machine) + _rest_us(work, machine)


def _rest_us(work: Work, machine: Machine) -> float:
    """Router, dispatch and combine: the same for every lowering but for what dense adds."""
    macs = work.spec.macs(work.tokens, work.kept)
    moved = macs["router"] + macs["dispatch"] + macs["combine"]
    return work.batch * moved / machine.batched_macs_per_us + 15 * machine.node_us


def _expert_bytes(work: Work) -> float:
    return 4.0 * work.spec.parameters_per_expert


def _expert_macs(work: Work, rows: float) -> float:
    return rows * work.spec.slots * work.spec.parameters_per_expert


def _grouped_us(work: Work, machine: Machine) -> float:
    traffic = work.expected_active * _expert_bytes(work) / machine.bytes_per_us
    macs = _expert_macs(work, work.selections) / machine.macs_per_us
    nodes = (_chain(work) * work.spec.experts + (12 if work.kept < work.spec.experts else 3)) * (
        machine.node_us
    )
    return max(traffic, macs) + nodes


def _dense_us(work: Work, machine: Machine) -> float:
    n = work.spec.experts
    traffic = n * _expert_bytes(work) / machine.bytes_per_us
    macs = _expert_macs(work, work.batch * n) / machine.batched_macs_per_us
    unselected = work.batch * work.tokens * (n - work.kept) * work.spec.slots
    wasted = unselected * (work.spec.dim + work.spec.out) / machine.batched_macs_per_us
    return max(traffic, macs) + wasted + 8 * machine.node_us


def _gather_us(work: Work, machine: Machine) -> float:
    if work.kept == work.spec.experts:
        return _dense_us(work, machine)
    copied = work.selections * _expert_bytes(work) / machine.copy_bytes_per_us
    macs = _expert_macs(work, work.selections) / machine.batched_macs_per_us
    return copied + macs + 12 * machine.node_us


def _conditional_us(work: Work, machine: Machine) -> float:
    n = work.spec.experts
    active = work.expected_active
    traffic = active * _expert_bytes(work) / machine.bytes_per_us
    macs = _expert_macs(work, work.batch * active) / machine.macs_per_us
    branches = n * machine.branch_us if work.kept < n else 0.0
    unselected = work.batch * work.tokens * (n - work.kept) * work.spec.slots
    wasted = unselected * (work.spec.dim + work.spec.out) / machine.batched_macs_per_us
    return max(traffic, macs) + branches + wasted + (_chain(work) + 3) * n * machine.node_us


def _fused_us(work: Work, machine: Machine) -> float:
    traffic = work.expected_active * _expert_bytes(work) / machine.bytes_per_us
    macs = _expert_macs(work, work.selections) / machine.batched_macs_per_us
    return traffic + macs + 10 * machine.node_us


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


@dataclass(frozen=True, slots=True)
class Choice:
    """The lowering chosen for a layer, and the reason in one sentence."""

    lowering: Lowering
    reason: str
    predicted_us: float


def choose(work: Work, target: Target) -> Choice:
    """Returns the fastest exact lowering for the work, by prediction.

    Raises `LoweringError` when no lowering serves the target.
    """
    machine = machine_for(target)
    candidates = [
        (predict_us(record, work, machine), record)
        for record in LOWERINGS.values()
        if target in record.targets
        and record.unable(work.spec) is None
        and record.inexact(work.spec) is None
    ]
    if not candidates:
        raise LoweringError(
            f"layer {work.spec.name}: no lowering serves the target {target}",
            hint="choose another --target",
        )
    candidates.sort(key=lambda candidate: candidate[0])
    best_us, best = candidates[0]
    others = ", ".join(f"{record.name} {us / 1e3:.3g} ms" for us, record in candidates[1:])
    reason = (
        f"predicted {best_us / 1e3:.3g} ms for k = {work.kept} of {work.spec.experts} at batch "
        f"{work.batch}" + (f" (others: {others})" if others else "")
    )
    return Choice(best, reason, best_us)


def check(lowering: Lowering, work: Work, target: Target) -> Choice:
    """Returns an asked-for lowering as a choice; `LoweringError` says why it cannot serve."""
    spec = work.spec
    problem = lowering.unable(spec)
    if target not in lowering.targets:
        problem = f"the target {target} does not run it"
    if problem is not None:
        able = [
            record.name
            for record in LOWERINGS.values()
            if target in record.targets and record.unable(spec) is None
        ]
        raise LoweringError(
            f"layer {spec.name}: the lowering '{lowering.name}' cannot serve it: {problem}",
            hint=f"for --target {target} choose auto or one of: {', '.join(able)}",
        )
    reason = "asked for"
    caveat = lowering.inexact(spec)
    if caveat is not None:
        reason += f"; {caveat}"
    return Choice(lowering, reason, predict_us(lowering, work, machine_for(target)))
