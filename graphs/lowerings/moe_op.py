"""ONNX Runtime's `com.microsoft.MoE`, and `QMoE` for integer weights, as one node on rows.

The op chooses k experts for a row by its logits, and weights their outputs by the softmax over
these k. It needs an expert's matrices as [out, in], with the columns of gate and value interleaved:
the CPU's kernel has no other layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from ..builder import Builder
from ..layers.expert import Activation, ExpertMapsSpec
from ..layers.stored import Layer
from ..names import MICROSOFT
from ..precision.products import INT8_ROWS
from ..precision.types import block_of
from ..targets import TARGETS, Machine, Precision, Target

OP_ACTIVATIONS: Mapping[Activation, str] = MappingProxyType(
    {"silu": "silu", "gelu": "gelu", "gelu-tanh": "gelu", "relu": "relu", "identity": "identity"}
)
"""The op's names for the activations; its GELU is the tanh form."""

EXCLUDED_ON_CPU = -16.0
"""The router logit of an expert that is never chosen. The weight of the chosen expert is divided by
itself, so it is exactly 1; an exp that underflows would take several times as long."""

EXCLUDED = -1e4
"""The same for other targets. Their kernels take the softmax over all experts, in which this logit
gives exactly zero, and renormalising leaves it zero."""

ROUTER_WEIGHTS = 14
"""The index of the input of `QMoE` for weights that differ from the logits. The CUDA provider
ignores that input."""


def excluded_logit(target: Target) -> float:
    """Returns the logit of an expert to which a row is not sent."""
    return EXCLUDED_ON_CPU if TARGETS[target].on_cpu else EXCLUDED


@dataclass(frozen=True, slots=True)
class OpExperts:
    """The experts of a layer in the op's terms.

    With a gate, the first matrix has the columns of gate and value one after the other, the gate's
    first if `gate_first`, and the activation is SiLU: gate·sigmoid(alpha·gate)·(value + offset),
    with the gate at most `limit` and the value within −limit … limit.
    """

    activation: Activation
    gated: bool = False
    gate_first: bool = True
    alpha: float = 1.0
    offset: float = 0.0
    limit: float | None = None

    @property
    def attributes(self) -> dict[str, int | float | str]:
        if not self.gated:
            return {"activation_type": OP_ACTIVATIONS[self.activation]}
        attributes: dict[str, int | float | str] = {
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "activation_alpha": self.alpha,
            "activation_beta": self.offset,
        }
        return attributes if self.limit is None else attributes | {"swiglu_limit": self.limit}


def moe_node(
    b: Builder,
    layer: Layer[Any],
    experts: OpExperts,
    rows: ir.Value,
    logits: ir.Value,
    k: int = 1,
    *,
    stored: Sequence[ir.Value | None] = (),
    weights: ir.Value | None = None,
) -> ir.Value:
    """Adds the op on rows [r, d] and logits [r, n]: [r, o].

    `stored` is the result of `op_weights`, if it was called before. The weights of a row's k
    experts are the softmax over their logits, or `weights` [r, n], which only the CPU's integer
    kernel supports.
    """
    weight_format = _weight_format(layer)
    options = {"k": k} | experts.attributes | {"normalize_routing_weights": int(weights is None)}
    inputs = [rows, logits, *(stored or op_weights(b, layer, experts))]
    if weight_format is not None:
        options["expert_weight_bits"], block = weight_format
        if TARGETS[layer.target].weight_only:
            options["weights_prepacked"] = 0  # the default is a layout of CUDA's kernel
        else:
            options["accuracy_level"] = INT8_ROWS
        if block is not None:
            options["block_size"] = block
    if weights is not None:
        inputs += [None] * (ROUTER_WEIGHTS - len(inputs)) + [weights]
    op = "MoE" if weight_format is None else "QMoE"
    return b.op(op, *inputs, domain=MICROSOFT, name="experts/outputs", **options)


def one_hot_logits(b: Builder, layer: Layer[Any], index: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Adds logits [r, n] that send each row to the expert that `index` [r] gives for it."""
    column = b.op("Reshape", index, b.ints(-1, 1), name="experts/expert_of_row")
    experts = b.constant(np.arange(layer.spec.experts, dtype=np.int64))
    is_own = b.op("Equal", column, experts, name="experts/one_hot")
    chosen, other = b.number(0.0, dtype), b.number(excluded_logit(layer.target), dtype)
    return b.op("Where", is_own, chosen, other, name="experts/logits")


def op_weights(b: Builder, layer: Layer[Any], experts: OpExperts) -> list[ir.Value | None]:
    """Adds the weights of all experts in the op's layout, in the order of its inputs."""
    weight_format = _weight_format(layer)
    inputs: list[ir.Value | None] = []
    for which in ("1", "2"):
        inputs.append(_matrices(b, layer, experts, f"w{which}"))
        if weight_format is not None:
            inputs.append(_scales(b, layer, experts, f"w{which}", weight_format[1]))
        bias = layer.optional(b, f"experts.b{which}")
        inputs.append(None if bias is None else _interleave(b, layer, experts, bias, f"b{which}"))
    return inputs


def _weight_format(layer: Layer[Any]) -> tuple[int, int | None] | None:
    """Returns the bits and the block size along a column of `QMoE`'s weights; None for `MoE`."""
    blocked = layer.compute.blocked
    if blocked is not None:
        return blocked.bits, blocked.block
    return None if layer.compute.quantized is None else (8, column_block_size(layer.spec))


def column_block_size(spec: ExpertMapsSpec) -> int | None:
    """Returns the block size for INT8; None, which is slow, if no size divides both matrices."""
    return block_of("kernel", (spec.dim, spec.hidden), bits=8)


def _matrices(b: Builder, layer: Layer[Any], experts: OpExperts, key: str) -> ir.Value:
    """Adds the matrices of all experts in the op's layout, [n, out, in]; folded at load time."""
    n, out = layer.spec.experts, layer.spec.inner if key == "w1" else layer.spec.out
    weight = layer.stacked(b, f"experts.{key}")
    if layer.compute.blocked is not None:  # [n, out, blocks, bytes]
        by_output = b.op("Reshape", weight, b.ints(n, out, -1), name=f"experts/{key}_by_output")
        return _interleave(b, layer, experts, by_output, key)
    quantized = layer.compute.quantized
    if quantized is not None and not quantized.weights.zero_point:
        # The op needs the weights plus 128, which flips the top bit of each byte.
        byte = ir.DataType.UINT8
        unsigned = b.op("Cast", weight, to=byte.value, name=f"experts/{key}_bytes")
        top_bit = b.constant(np.array(128, dtype=np.uint8))
        weight = b.op("BitwiseXor", unsigned, top_bit, name=f"experts/{key}_unsigned")
    by_output = b.op("Transpose", weight, perm=[0, 2, 1], name=f"experts/{key}_by_output")
    return _interleave(b, layer, experts, by_output, key)


def _scales(
    b: Builder, layer: Layer[Any], experts: OpExperts, key: str, block: int | None
) -> ir.Value:
    """Adds the scales of a matrix's columns, or of their blocks, [n, out, blocks]."""
    scale = layer.stacked(b, f"experts.{key}.scale")
    if layer.compute.blocked is None and block is not None:
        n, out = layer.spec.experts, layer.spec.inner if key == "w1" else layer.spec.out
        blocks = (layer.spec.dim if key == "w1" else layer.spec.hidden) // block
        column = b.op("Unsqueeze", scale, b.ints(2), name=f"experts/{key}_scale_columns")
        shape = b.ints(n, out, blocks)
        scale = b.op("Expand", column, shape, name=f"experts/{key}_scale_blocks")
    return _interleave(b, layer, experts, scale, f"{key}.scale")


def _interleave(
    b: Builder, layer: Layer[Any], experts: OpExperts, value: ir.Value, key: str
) -> ir.Value:
    """Interleaves gate and value in the first product's [n, 2h, …], if there is a gate."""
    n, h = layer.spec.experts, layer.spec.hidden
    if not experts.gated or key.startswith(("w2", "b2")):
        return value
    halves = b.op("Reshape", value, b.ints(n, 2, h, -1), name=f"experts/{key}_halves")
    if not experts.gate_first:
        halves = b.op("Gather", halves, b.ints(1, 0), axis=1, name=f"experts/{key}_gate_first")
    pairs = b.op("Transpose", halves, perm=[0, 2, 1, 3], name=f"experts/{key}_pairs")
    flat = value.shape is not None and len(value.shape) == 2  # a bias, or a scale per column
    shape = b.ints(n, 2 * h) if flat else b.ints(n, 2 * h, -1)
    return b.op("Reshape", pairs, shape, name=f"experts/{key}_interleaved")


def unsupported_parts(spec: ExpertMapsSpec) -> str | None:
    """Returns why the op cannot compute the parts after the experts' maps."""
    if spec.hidden_norm or spec.out_norm or spec.out_activation != "identity":
        return "com.microsoft.MoE has no normalisation in an expert, and no activation after it"
    return None


def unsupported_width(spec: ExpertMapsSpec) -> str | None:
    """Returns why the op cannot compute experts whose output width differs from the input's."""
    if spec.dim != spec.out:
        return f"com.microsoft.MoE keeps the width, but this layer maps {spec.dim} to {spec.out}"
    return None


MIN_WIDTH, VECTOR_BYTES, BLOCKS_ON_CUDA = 16, 16, (128, 64)
"""Requirements of CUDA's kernels for an expert's widths: the smallest width, the bytes of a vector,
which must divide a row, and for integers a block size that divides the columns."""

TANH_GELU_ON_GPU = (
    "in FP32, com.microsoft.MoE computes the tanh form of GELU, which differs from this layer's "
    "exact GELU by up to 5e-4; use another lowering, or --precision fp16, where rounding hides the "
    "difference"
)
"""In ONNX Runtime GPU 1.31.1, GELU is the tanh form where it is the epilogue of the product (in
FP32, and on cards older than Hopper: `EpilogueOpDefaultFtGelu`), and exact where it is a separate
kernel (`doActivationKernel`, after Hopper's own 16-bit products). This was read from the sources
and the library's symbols, not run. In 16 bits rounding hides the difference."""


def unsupported_on_gpu(spec: ExpertMapsSpec, precision: Precision, target: Target) -> str | None:
    """Returns why the op's kernel on a GPU cannot compute experts: their GELU, or their widths."""
    if TARGETS[target].on_cpu:
        return None
    if spec.activation == "gelu" and precision == "fp32":
        return TANH_GELU_ON_GPU
    widths = (spec.dim, spec.hidden)
    if precision in ("int8", "int4"):
        if not any(width % BLOCKS_ON_CUDA[-1] for width in widths):
            return None
        return (
            f"on a GPU com.microsoft.QMoE needs widths that are multiples of {BLOCKS_ON_CUDA[-1]}, "
            f"but an expert's are {spec.dim} and {spec.hidden}"
        )
    multiple = VECTOR_BYTES // (4 if precision == "fp32" else 2)
    if all(width >= MIN_WIDTH and width % multiple == 0 for width in widths):
        return None
    return (
        f"on a GPU com.microsoft.MoE needs widths of at least {MIN_WIDTH} that are multiples of "
        f"{multiple} in {precision.upper()}, but an expert's are {spec.dim} and {spec.hidden}"
    )


def inexact_gelu(spec: ExpertMapsSpec, precision: Precision, target: Target) -> str | None:
    """Returns how the op's GELU on a CPU differs from the exact one."""
    if TARGETS[target].on_cpu and spec.activation == "gelu":
        return "com.microsoft.MoE computes the tanh form of GELU, which differs by up to 5e-4"
    return None


FEW_ROWS = 256
"""Up to this number of rows, one kernel sorts them by expert; for more, three do."""


def kernels_after_first(rows: int) -> int:
    """Returns the number of kernels that the node launches on a GPU after the first.

    For FP16 on Hopper, ONNX Runtime's `moe_kernels.cu` (`runMoe`) launches one kernel each for the
    choice of experts, the rows of each expert, the copies of these rows, the addresses of the
    products, both products, the activation between them, and the sum for each row. This was counted
    in the source, not measured.
    """
    return 7 if rows <= FEW_ROWS else 9


TANH_PASSES = 8
"""The cost of the tanh in the op's GELU, or the sigmoid in its SiLU, in passes over the input."""

TILE = 128
"""The number of columns of the node's products that one of a GPU's processors computes."""


def grouped_read_us(spec: ExpertMapsSpec, active: float, machine: Machine) -> float:
    """Returns the time to read experts in a GPU's grouped products: `TILE` columns per processor.

    A product with few columns and many rows has too few tiles to occupy all processors.
    """
    products = ((spec.dim, spec.inner), (spec.hidden, spec.out))

    def read(rows: int, columns: int) -> float:
        in_parallel = 4.0 * active * rows * columns / machine.stacked_bytes_per_us
        tiles = max(1.0, active * -(-columns // TILE) / machine.processors)
        return max(in_parallel, tiles * 4.0 * rows * TILE / machine.processor_bytes_per_us)

    return sum(read(rows, columns) for rows, columns in products)
