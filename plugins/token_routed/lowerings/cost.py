"""Terms of the cost predictions that lowerings of token-routed experts share."""

from __future__ import annotations

from ....graphs.lowerings.base import LayerPlan
from ....graphs.lowerings.cost import expert_macs, passes_between, separate_products_us, stacked_us
from ....graphs.targets import Machine
from ..layers.experts import ExpertsSpec

ExpertsPlan = LayerPlan[ExpertsSpec]


def between_us(plan: ExpertsPlan, pairs: float, machine: Machine) -> float:
    """Returns the time between and after the products of `pairs` (token, expert) pairs."""
    spec = plan.spec
    passes = passes_between(spec) + spec.out
    if spec.gate != "none":
        passes += 2 * spec.hidden  # split and multiplied
    if machine.integer_passes:  # quantised before each product, dequantised after it
        passes += 3 * spec.hidden + machine.integer_passes * (spec.inner + spec.out)
    return pairs * passes * machine.number_us


def one_by_one_us(plan: ExpertsPlan, active: float, pairs: float, machine: Machine) -> float:
    """Returns the time of `active` experts, one by one, on `pairs` in total, without node costs."""
    return separate_products_us(plan, active, pairs, machine) + between_us(plan, pairs, machine)


def all_experts_us(plan: ExpertsPlan, rows: int, machine: Machine) -> float:
    """Returns the time of all experts at once, for `rows` rows each."""
    n = plan.spec.experts
    return (
        stacked_us(plan, n, rows, machine)
        + expert_macs(plan, n * rows) / machine.macs_per_us
        + between_us(plan, n * rows, machine)
    )


def combine_us(plan: ExpertsPlan, outputs: float, machine: Machine) -> float:
    """Returns the time of the weighted sum of `outputs` outputs [o]."""
    return outputs * plan.spec.out / machine.batched_macs_per_us
