"""What the predictions of the lowerings are made of: a layer's work, and shared terms.

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

from ..layers.expert import NORM_PASSES, PASSES, Maps
from ..layers.soft_moe import SoftMoESpec
from ..layers.stored import S
from ..targets import TARGETS, Machine, Precision, Target


@dataclass(frozen=True)  # no slots: calling an alias such as Work sets an attribute
class WorkOf(Generic[S]):
    """The size of one layer's job: what a cost is a function of.

    `tokens_fixed`: every input has so many tokens, and never another number.
    """

    spec: S
    k: int
    batch: int
    tokens: int
    precision: Precision = "fp32"
    tokens_fixed: bool = False

    @property
    def choosers(self) -> int:
        """How many choices of experts there are: one for each input, or one for each token."""
        return self.batch * (self.tokens if self.spec.routes_tokens else 1)

    @property
    def selections(self) -> int:
        """How many pairs of what chooses and an expert are computed: b·k, or t·k."""
        return self.choosers * self.k

    @property
    def expected_active(self) -> float:
        """Experts that at least one input (or token) selects, if they chose evenly and alone.

        Real routers are less even, so this is the upper end; fewer active experts cost less.
        """
        n = self.spec.experts
        return n * (1.0 - (1.0 - self.k / n) ** self.choosers)


Work = WorkOf[SoftMoESpec]
AnyWork = WorkOf[Any]


SIZES: Mapping[Precision, float] = MappingProxyType({"int8": 1 / 4, "int4": 4.5 / 32})
"""What weights take of their FP32 bytes on a CPU; a block of INT4 has a scale."""

STANDARD_NODES, STANDARD_PASSES = 6, 3
"""What standard ops take beside ONNX Runtime's kernel of integer products: three more nodes after
each of an expert's two, which cast, scale and add the bias."""


def machine_for(target: Target, precision: Precision = "fp32") -> Machine:
    """Returns the rates that `auto` assumes for a target."""
    record = TARGETS[target]
    machine = record.machine.rates[precision]
    if precision != "int8" or record.integers != "standard":
        return machine
    return replace(
        machine,
        integer_nodes=machine.integer_nodes + STANDARD_NODES,
        integer_passes=machine.integer_passes + STANDARD_PASSES,
    )


def assumed(target: Target) -> str:
    """Returns what a prediction for a target rests on beside measurements, for its reason."""
    card = TARGETS[target].machine.card
    return "" if card is None else f"; for an {card} by its data sheet, not measured"


ROUTER_NODES = 15

LOGIT_PASSES = 2
"""How often the router goes over a number of L to make C, and over one of a column to make D."""


def around_experts_us(work: Work, machine: Machine) -> float:
    """Router, dispatch and combine of a Soft MoE layer: the same for every lowering."""
    spec, macs = work.spec, work.spec.macs(work.tokens, work.k)
    passes = 4.0 * work.batch * work.tokens * (3 * spec.dim + spec.out)  # norm, L, X̃ and y
    computed = work.batch * (macs["router"] + macs["dispatch"] + macs["combine"])
    columns = work.batch * work.tokens * (spec.experts + work.k) * spec.slots  # of C, and of D
    return (
        passes / (machine.bytes_per_us * machine.cached)
        + computed / machine.batched_macs_per_us
        + LOGIT_PASSES * columns * machine.number_us
        + ROUTER_NODES * machine.node_us
    )


def unselected_us(work: Work, machine: Machine) -> float:
    """Dispatch and combine of the experts that nobody needs, where all are carried along."""
    columns = work.batch * work.tokens * (work.spec.experts - work.k) * work.spec.slots
    macs = float(columns * (work.spec.dim + work.spec.out))
    return macs / machine.batched_macs_per_us + LOGIT_PASSES * columns * machine.number_us


def expert_bytes(work: AnyWork, experts: float) -> float:
    """The bytes of so many experts' weights, counted as FP32."""
    return 4.0 * experts * float(work.spec.parameters_per_expert)


def stream_us(
    work: AnyWork, weights_bytes: float, among: float, bytes_per_us: float, machine: Machine
) -> float:
    """How long so many bytes of weights take, where the caches hold a part of those `among` them.

    Both are counted as FP32.
    """
    size = among * SIZES.get(work.precision, 1.0)
    held = min(1.0, machine.cache_bytes / size)
    return weights_bytes / bytes_per_us * (held / machine.cached + 1.0 - held)


def products_of(work: AnyWork, experts: float) -> float:
    """How many products so many experts take."""
    return experts * (1 if work.spec.expert == "linear" else 2)


def stacked_us(work: AnyWork, experts: float, rows: int, machine: Machine) -> float:
    """Reads so many experts' weights out of one constant, for products of so many rows each."""
    size = expert_bytes(work, experts)
    layer = max(size, expert_bytes(work, work.spec.experts))
    read = stream_us(work, size, layer, machine.stacked_bytes_per_us, machine)
    return read + packing_us(work, experts, rows, machine)


PACKED_ROWS = 2
"""A single row is multiplied by a matrix as that lies in memory."""


def packing_us(work: AnyWork, experts: float, rows: int, machine: Machine) -> float:
    """Packs so many experts' weights during the run, which few rows do without."""
    if rows < PACKED_ROWS:
        return 0.0
    size = expert_bytes(work, experts)
    layer = max(size, expert_bytes(work, work.spec.experts))
    return stream_us(work, size, layer, machine.pack_bytes_per_us, machine)


def expert_macs(work: AnyWork, rows: float) -> float:
    """The multiply-adds of so many (input, expert) pairs."""
    return rows * float(work.spec.slots * work.spec.parameters_per_expert)


def lone_products_us(
    work: AnyWork, active: float, products: float, pairs: float, machine: Machine
) -> float:
    """So many products with the matrices of `active` experts, on the rows of so many pairs."""
    macs, layer = expert_macs(work, pairs), expert_bytes(work, work.spec.experts)
    return (
        stream_us(work, expert_bytes(work, active), layer, machine.bytes_per_us, machine)
        + (macs + min(macs, products * machine.lone_macs)) / machine.macs_per_us
        + products * machine.product_us
    )


def expert_nodes(work: Work) -> int:
    """Nodes per expert: two matmuls and an activation, or one matmul."""
    return 1 if work.spec.expert == "linear" else 3


def passes_around(spec: Maps) -> int:
    """Numbers that the activations and normalisations of an expert pass over, for one row."""
    hidden = 0 if spec.hidden_norm is None else NORM_PASSES * spec.inner
    out = 0 if spec.out_norm is None else NORM_PASSES * spec.out
    out += PASSES[spec.out_activation] * spec.out
    return PASSES[spec.activation] * spec.hidden + hidden + out


def between_us(work: Work, pairs: float, machine: Machine) -> float:
    """What lies between the products of so many (input, expert) pairs, and after them."""
    spec = work.spec
    hidden = 0 if spec.expert == "linear" else spec.hidden
    passes = passes_around(spec) + spec.out
    # Rows are rounded before each product; standard ops pass over what comes of both, too.
    if machine.integer_passes:
        passes += hidden + (machine.integer_passes - 1) * (hidden + spec.out)
    return pairs * spec.slots * passes * machine.number_us


def apart_us(work: Work, active: float, pairs: float, machine: Machine) -> float:
    """So many experts one by one, on so many (input, expert) pairs together; without the nodes."""
    products = products_of(work, active)
    return lone_products_us(work, active, products, pairs, machine) + between_us(
        work, pairs, machine
    )
