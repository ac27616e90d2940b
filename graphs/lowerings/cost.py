"""What the predictions of the lowerings are made of: machines, a layer's work, and shared terms.

A layer's time is its weight traffic, plus its arithmetic, plus what does not shrink with k (passes
over the tokens), plus a price per node; each lowering's own module adds up its own. The constants
are of one machine; what matters is the order of the lowerings, which a test compares with the
measurements in `perf/results`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic

from ..layers.expert import NORM_PASSES, PASSES, Maps
from ..layers.soft_moe import SoftMoESpec
from ..layers.stored import S
from ..targets import TARGETS, MachineKind, Precision, Target


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


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one kind of machine.

    Weights: `bytes_per_us` where each expert's are a constant of their own, packed when the graph
    was loaded, or tokens are read; `stacked_bytes_per_us` where all experts' are one constant, and
    `pack_bytes_per_us` besides where that is packed in the run (`packing_us`);
    `copy_bytes_per_us` for what a Gather writes. `cached` times faster is what the caches hold,
    which are the last `cache_bytes`. With `reads_once` an expert that several inputs choose is read
    from memory once, and after that from the caches.

    Arithmetic: `macs_per_us` in products with the experts' weights, half as many for the first
    `lone_macs` of a product, since so small a one has one thread; `batched_macs_per_us` in the
    products with tokens; `number_us` for a number that an operator between products passes over.

    Operators: `node_us` for one with nothing to do, `product_us` more for a product with rows,
    `branch_us` for an `If`, `sort_us` for each (row, expert) that is compared to sort rows by
    expert. In integers an expert takes `integer_nodes` more, and `integer_passes` more passes over
    the results of its products. Of `com.microsoft.MoE` alone are `routing_us` for each expert that
    a row could go to, and `scalar_us` for a number that its loops take one by one.
    """

    bytes_per_us: float
    stacked_bytes_per_us: float
    copy_bytes_per_us: float
    macs_per_us: float
    batched_macs_per_us: float
    node_us: float
    branch_us: float
    pack_bytes_per_us: float = math.inf
    cached: float = 1.0
    cache_bytes: int = 16 << 20
    reads_once: bool = False
    number_us: float = 0.0
    product_us: float = 0.0
    sort_us: float = 0.0
    routing_us: float = 0.0
    scalar_us: float = 0.0
    lone_macs: int = 0
    integer_nodes: int = 0
    integer_passes: int = 0


SIZES: Mapping[Precision, float] = MappingProxyType({"int8": 1 / 4, "int4": 4.5 / 32})
"""What weights take of their FP32 bytes on a CPU; a block of INT4 has a scale."""

CPU = Machine(
    bytes_per_us=33e3,
    stacked_bytes_per_us=29e3,
    copy_bytes_per_us=15e3,
    macs_per_us=171e3,
    batched_macs_per_us=62e3,
    node_us=0.60,
    branch_us=0.24,
    pack_bytes_per_us=50e3,
    cached=4.8,
    number_us=0.00016,
    product_us=0.10,
    sort_us=0.003,
    routing_us=0.0043,
    scalar_us=0.00078,
    lone_macs=1 << 16,
)
"""What `python -m perf fit` found on two cores with AVX-512; they choose as well on two with AVX2.
`sort_us` was measured apart; `lone_macs` is a constant of the runtime."""


STREAMED = 0.85
"""The share of a GPU's bandwidth by its data sheet that large reads and writes reach."""


def _card(
    gigabytes_per_s: float,
    fp32_tflops: float,
    fp16_tflops: float,
    int8_tops: float,
    *,
    cache_mib: int,
    cached: float,
) -> Mapping[Precision, Machine]:
    """A GPU by its data sheet, dense products; what a Gather wrote is read again at once.

    Its L2 holds `cache_mib`, and is `cached` times as fast as its memory. Nodes are those of a
    CUDA graph; an `If` waits for the host, which decides.
    """
    streamed = gigabytes_per_s * STREAMED * 1e3

    def machine(width: float, tflops: float, copied_width: float) -> Machine:
        counted = streamed * 4 / width  # of bytes that are counted as FP32
        return Machine(
            bytes_per_us=counted,
            stacked_bytes_per_us=counted,
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
            # A constant stack is dequantised to FP16 before a Gather: all of it is written, too.
            "int8": machine(1, int8_tops, 8),
            # Unpacked to FP16 as they are read.
            "int4": machine(4.5 / 8, fp16_tflops, 2),
            "fp8": machine(1, int8_tops, 8),
        }
    )


GPUS: Mapping[str, Mapping[Precision, Machine]] = MappingProxyType(
    {
        "A100": _card(2039, 19.5, 312, 624, cache_mib=40, cached=2.5),
        "H100": _card(3350, 67, 989, 1979, cache_mib=50, cached=2.0),
        "H200": _card(4800, 67, 989, 1979, cache_mib=50, cached=1.5),
        "Jetson AGX Orin": _card(205, 5.3, 42.5, 85, cache_mib=4, cached=2.0),
        "L4": _card(300, 30.3, 121, 242, cache_mib=48, cached=5.0),
        "L40S": _card(864, 91.6, 362, 733, cache_mib=96, cached=5.0),
        "RTX 4090": _card(1008, 82.6, 165, 661, cache_mib=72, cached=5.0),
    }
)
"""Cards by NVIDIA's data sheets, and guesses of what a node, a branch and the L2 cost: nothing of
it was measured."""

SERVER_GPU, RTX_GPU = "H100", "RTX 4090"
"""The cards that `auto` assumes for targets on GPUs."""

SERVER = GPUS[SERVER_GPU]["fp32"]

CPU_INT8 = Machine(
    bytes_per_us=77e3,
    stacked_bytes_per_us=52e3,
    copy_bytes_per_us=35e3,
    macs_per_us=265e3,
    batched_macs_per_us=96e3,
    node_us=0.55,
    branch_us=0.38,
    cached=4.3,
    number_us=0.000084,
    product_us=0.32,
    sort_us=0.003,
    routing_us=CPU.routing_us,
    lone_macs=1 << 16,
    integer_nodes=1,
    integer_passes=1,
)
"""Fitted likewise, on machines with VNNI and without, to both forms of integer products. Stacked
weights are packed for any number of rows: what they take has that in it."""

CPU_INT4 = replace(
    CPU,
    bytes_per_us=90e3,
    stacked_bytes_per_us=90e3,
    macs_per_us=150e3,
    pack_bytes_per_us=math.inf,
    cached=1.1,
)
"""From single products of `MatMulNBits`, not fitted: unpacking keeps it from being as fast as the
bytes that it reads, and many rows take about as long as with FP32 weights."""

CPU_BF16 = replace(
    CPU,
    bytes_per_us=2 * CPU.bytes_per_us,
    stacked_bytes_per_us=2 * CPU.stacked_bytes_per_us,
    copy_bytes_per_us=2 * CPU.copy_bytes_per_us,
    pack_bytes_per_us=2 * CPU.pack_bytes_per_us,
    macs_per_us=2 * CPU.macs_per_us,
    batched_macs_per_us=2 * CPU.batched_macs_per_us,
)
"""OpenVINO's on CPUs with instructions for BF16: weights of half the bytes, and twice the products
in a cycle. That is arithmetic, not a measurement; nor was another constant of it fitted."""

MACHINES: Mapping[MachineKind, Mapping[Precision, Machine]] = MappingProxyType(
    {
        # 16-bit floats are computed in FP32 there.
        "cpu": {
            "fp32": CPU,
            "fp16": CPU,
            "bf16": CPU,
            "int8": CPU_INT8,
            "int4": CPU_INT4,
            "fp8": CPU,
        },
        "openvino-cpu": {
            "fp32": CPU,
            "fp16": CPU,
            "bf16": CPU_BF16,
            "int8": CPU_INT8,
            "int4": CPU_INT4,
            "fp8": CPU,
        },
        "server-gpu": GPUS[SERVER_GPU],
        "rtx-gpu": GPUS[RTX_GPU],
    }
)
"""The rates by what computes the experts: a byte of their weights is counted as four, and weights
of fewer bytes stream so much faster."""

STANDARD_NODES, STANDARD_PASSES = 6, 3
"""What standard ops take beside ONNX Runtime's kernel of integer products: three more nodes after
each of an expert's two, which cast, scale and add the bias."""


def machine_for(target: Target, precision: Precision = "fp32") -> Machine:
    """Returns the rates that `auto` assumes for a target."""
    record = TARGETS[target]
    machine = MACHINES[record.machine][precision]
    if precision != "int8" or record.integers != "standard":
        return machine
    return replace(
        machine,
        integer_nodes=machine.integer_nodes + STANDARD_NODES,
        integer_passes=machine.integer_passes + STANDARD_PASSES,
    )


def assumed(target: Target) -> str:
    """Returns what a prediction for a target rests on beside measurements, for its reason."""
    cards = {"server-gpu": SERVER_GPU, "rtx-gpu": RTX_GPU}
    card = cards.get(TARGETS[target].machine)
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
