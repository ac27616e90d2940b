"""Terms of the predictions that lowerings of token-routed experts share."""

from __future__ import annotations

from ....graphs.lowerings.cost import (
    WorkOf,
    expert_macs,
    lone_products_us,
    passes_around,
    stacked_us,
)
from ....graphs.targets import Machine
from ..layers.experts import ExpertsSpec

ExpertsWork = WorkOf[ExpertsSpec]


def between_us(work: ExpertsWork, pairs: float, machine: Machine) -> float:
    """What lies between the products of so many (token, expert) pairs, and after them."""
    spec = work.spec
    passes = passes_around(spec) + spec.out
    if spec.gate != "none":
        passes += 2 * spec.hidden  # taken apart, multiplied
    if machine.integer_passes:  # rounded before each product, brought back after it
        passes += 3 * spec.hidden + machine.integer_passes * (spec.inner + spec.out)
    return pairs * passes * machine.number_us


def one_by_one_us(work: ExpertsWork, active: float, pairs: float, machine: Machine) -> float:
    """So many experts one by one, on so many (token, expert) pairs together; without the nodes."""
    products = active * (1 if work.spec.linear else 2)
    return lone_products_us(work, active, products, pairs, machine) + between_us(
        work, pairs, machine
    )


def all_experts_us(work: ExpertsWork, rows: int, machine: Machine) -> float:
    """All experts at once, on so many rows each."""
    n = work.spec.experts
    return (
        stacked_us(work, n, rows, machine)
        + expert_macs(work, n * rows) / machine.macs_per_us
        + between_us(work, n * rows, machine)
    )


def combine_us(work: ExpertsWork, outputs: float, machine: Machine) -> float:
    """The weighted sum of so many outputs [o]."""
    return outputs * work.spec.out / machine.batched_macs_per_us
