"""Terms that the lowerings' predictions share.

A layer's time is its weight traffic, plus its arithmetic, plus the passes over tokens that do not
shrink with k, plus a cost per node; each lowering's own module adds them up. The constants belong
to one machine; only the order of the lowerings matters, which a test compares with the measurements
in `perf/results`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from ..layers.base import Kind
from ..layers.expert import NORM_PASSES, PASSES, ExpertMapsSpec
from ..targets import TARGETS, Machine, MachineKind, Precision, Target
from .base import AnyPlan, SoftMoEPlan

SIZES: Mapping[Precision, float] = MappingProxyType({"int8": 1 / 4, "int4": 4.5 / 32})
"""The size of weights on a CPU relative to FP32; a block of INT4 has a scale."""

STANDARD_NODES, STANDARD_PASSES = 6, 3
"""The cost of standard ops in addition to ONNX Runtime's kernel for integer products: after each
of an expert's two products, three nodes that cast, scale and add the bias."""


def rates_of(machine: MachineKind) -> Mapping[Precision, Machine]:
    """Returns the rates of a kind of machine: its own, or those of its GPU."""
    if machine.rates is not None:
        return machine.rates
    from ..cards import FITTED, GPUS  # for targets with a GPU

    assert machine.card is not None, "a machine needs rates or a card"
    return FITTED[machine.card] if machine.measured else GPUS[machine.card]


def machine_for(target: Target, precision: Precision = "fp32") -> Machine:
    """Returns the rates that `auto` assumes for a target."""
    record = TARGETS[target]
    machine = rates_of(record.machine)[precision]
    if precision != "int8" or record.integers != "standard":
        return machine
    return replace(
        machine,
        integer_nodes=machine.integer_nodes + STANDARD_NODES,
        integer_passes=machine.integer_passes + STANDARD_PASSES,
    )


def prediction_basis(target: Target, kind: Kind, lowerings: Iterable[str]) -> str:
    """Returns the basis of the predictions for a target, as part of a reason."""
    machine = TARGETS[target].machine
    if machine.card is None:
        return ""
    if not machine.measured:
        return f"; for an {machine.card}, estimated from its data sheet, not measured"
    rest = unmeasured(target, kind, lowerings)
    words = f"; for an {machine.card}, with rates fitted to runs on it"
    return f"{words}; {' and '.join(rest)} predicted, not measured" if rest else words


def unmeasured(target: Target, kind: Kind, lowerings: Iterable[str]) -> list[str]:
    """Returns the lowerings of a kind that were not run on a machine where others were."""
    machine = TARGETS[target].machine
    ran = machine.measured.get(kind, frozenset())
    return [name for name in lowerings if machine.measured and name not in ran]


ROUTER_NODES = 15

LOGIT_PASSES = 2
"""The router's passes over each number of L to compute C, and of a column of L to compute D."""


def around_experts_us(plan: SoftMoEPlan, machine: Machine) -> float:
    """Returns the time of router, dispatch and combine, which all Soft MoE lowerings share."""
    spec, macs = plan.spec, plan.spec.macs(plan.tokens, plan.typical_k)
    passed_bytes = 4.0 * plan.batch * plan.tokens * (3 * spec.dim + spec.out)  # norm, L, X̃ and y
    computed = plan.batch * (macs["router"] + macs["dispatch"] + macs["combine"])
    columns = plan.batch * plan.tokens * (spec.experts + plan.typical_k) * spec.slots  # for C and D
    return (
        passed_bytes / (machine.bytes_per_us * machine.cached)
        + computed / machine.batched_macs_per_us
        + LOGIT_PASSES * columns * machine.number_us
        + ROUTER_NODES * machine.node_us
    )


def unselected_us(plan: SoftMoEPlan, machine: Machine) -> float:
    """Returns the time to dispatch and combine unused experts, if a lowering includes them."""
    columns = plan.batch * plan.tokens * (plan.spec.experts - plan.typical_k) * plan.spec.slots
    macs = float(columns * (plan.spec.dim + plan.spec.out))
    return macs / machine.batched_macs_per_us + LOGIT_PASSES * columns * machine.number_us


def expert_bytes(plan: AnyPlan, experts: float) -> float:
    """Returns the bytes of the weights of a number of experts, counted as FP32."""
    return 4.0 * experts * float(plan.spec.parameters_per_expert)


def stream_us(
    plan: AnyPlan, weights_bytes: float, total_bytes: float, bytes_per_us: float, machine: Machine
) -> float:
    """Returns the time to stream `weights_bytes` if caches contain part of the `total_bytes`.

    Both are counted as FP32.
    """
    size = total_bytes * SIZES.get(plan.precision, 1.0)
    in_cache = min(1.0, machine.cache_bytes / size)
    return weights_bytes / bytes_per_us * (in_cache / machine.cached + 1.0 - in_cache)


def products_of(plan: AnyPlan, experts: float) -> float:
    """Returns the number of products for a number of experts."""
    return experts * (2 if plan.spec.hidden else 1)


def stacked_us(plan: AnyPlan, experts: float, rows: int, machine: Machine) -> float:
    """Returns the time to read experts from one constant, for products with `rows` rows each."""
    size = expert_bytes(plan, experts)
    layer = max(size, expert_bytes(plan, plan.spec.experts))
    read = stream_us(plan, size, layer, machine.stacked_bytes_per_us, machine)
    return read + packing_us(plan, experts, rows, machine)


PACKED_ROWS = 2
"""Matrices are not packed for products with fewer rows."""


def packing_us(plan: AnyPlan, experts: float, rows: int, machine: Machine) -> float:
    """Returns the time to pack the weights of experts during the run, unless there are few rows."""
    if rows < PACKED_ROWS:
        return 0.0
    size = expert_bytes(plan, experts)
    layer = max(size, expert_bytes(plan, plan.spec.experts))
    return stream_us(plan, size, layer, machine.pack_bytes_per_us, machine)


def expert_macs(plan: AnyPlan, rows: float) -> float:
    return rows * float(plan.spec.slots * plan.spec.parameters_per_expert)


def separate_products_us(plan: AnyPlan, active: float, pairs: float, machine: Machine) -> float:
    """Returns the time of products of the rows of `pairs` with the matrices of `active` experts."""
    products = products_of(plan, active)
    macs, layer = expert_macs(plan, pairs), expert_bytes(plan, plan.spec.experts)
    return (
        stream_us(plan, expert_bytes(plan, active), layer, machine.bytes_per_us, machine)
        + (macs + min(macs, products * machine.single_thread_macs)) / machine.macs_per_us
        + products * machine.product_us
    )


def waiting_us(nodes: float, machine: Machine) -> float:
    """Returns the time of nodes for which the host waits, because no CUDA graph replays them."""
    return nodes * (machine.node_us + machine.launch_us)


def expert_nodes(plan: SoftMoEPlan) -> int:
    """Returns the number of nodes per expert: two matmuls and an activation, or one matmul."""
    return 3 if plan.spec.hidden else 1


def passes_between(spec: ExpertMapsSpec) -> int:
    """Returns how many numbers an expert's activations and normalisations process per row."""
    hidden = 0 if spec.hidden_norm is None else NORM_PASSES * spec.inner
    out = 0 if spec.out_norm is None else NORM_PASSES * spec.out
    out += PASSES[spec.out_activation] * spec.out
    return PASSES[spec.activation] * spec.hidden + hidden + out


def between_us(plan: SoftMoEPlan, pairs: float, machine: Machine) -> float:
    """Returns the time of operators between and after the products of (input, expert) pairs."""
    spec = plan.spec
    passes = passes_between(spec) + spec.out
    # Rows are rounded before each product; standard ops also pass over both results.
    if machine.integer_passes:
        passes += spec.hidden + (machine.integer_passes - 1) * (spec.hidden + spec.out)
    return pairs * spec.slots * passes * machine.number_us


def separate_experts_us(plan: SoftMoEPlan, active: float, pairs: float, machine: Machine) -> float:
    """Returns the time of `active` experts, one by one, on `pairs` in total, without node costs."""
    return separate_products_us(plan, active, pairs, machine) + between_us(plan, pairs, machine)
