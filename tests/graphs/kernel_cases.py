"""Every form in which graphs hold an op of ONNX Runtime's own, with its value in float64.

`python -m moexport.tests.graphs.kernel_cases OP` runs those of one op, and names each before it:
a kernel that ends the process is the last one named.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import onnx
from moexport.common.onnx_runtime import ort
from moexport.graphs.fusion.kernels import CACHE_WIDTHS, SKIP_RANKS
from moexport.graphs.names import MICROSOFT
from moexport.graphs.precision.types import KERNEL_BLOCKS
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

Arrays = Mapping[str, np.ndarray]
OPSET = 23
EXACT, ROUNDED = 1e-5, 0.03
"""How far a kernel may be from the value, of its largest number: in floats, and in integers."""


@dataclass(frozen=True)
class Case:
    """One node: its inputs by name, `constants` of which are weights, and its first output."""

    inputs: Arrays
    right: Callable[[Arrays], Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    optional: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("y",)
    tolerance: float = EXACT


RANDOM = np.random.default_rng(0)


def floats(*shape: int) -> Any:
    return RANDOM.standard_normal(shape).astype(np.float32)


def steps(*shape: int) -> Any:
    return (0.01 + 0.01 * RANDOM.random(shape)).astype(np.float32)


def octets(*shape: int) -> Any:
    return RANDOM.integers(0, 256, shape).astype(np.uint8)


def sigmoid(z: np.ndarray) -> Any:
    return 1 / (1 + np.exp(-z))


def silu(z: np.ndarray) -> Any:
    return z * sigmoid(z)


def gelu_tanh(z: np.ndarray) -> Any:
    return z / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (z + 0.044715 * z**3)))


def wide(given: Arrays, name: str) -> Any:
    """An input in float64; zero where it is absent."""
    return given[name].astype(np.float64) if name in given else np.zeros(())


def by_head(flat: np.ndarray, heads: int) -> Any:
    """[b, m, heads·w] as [b, heads, m, w]."""
    return flat.reshape(*flat.shape[:2], heads, flat.shape[2] // heads).transpose(0, 2, 1, 3)


def attended(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Any, scale: float, sinks: Any = None
) -> Any:
    """Attention of q [b, H, m, w] to k and v [b, G, t, w], as [b, m, H·w]."""
    shared = q.shape[1] // k.shape[1]
    k, v = (np.repeat(value, shared, axis=1) for value in (k, v))
    powers = np.exp(q @ k.transpose(0, 1, 3, 2) * scale + mask)
    total = powers.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks)[:, None, None]
    y = (powers / total @ v).transpose(0, 2, 1, 3)
    return y.reshape(*y.shape[:2], -1)


SCALE = 0.3
HEADS = ((1, 1), (3, 3), (4, 2), (6, 1))
WIDTHS = (1, 2, 3, 5, 7, 8, 14, 16, 24)


def attention() -> Iterator[Case]:
    """Queries, keys and values of one product; always with a bias, which the kernel reads."""
    for (heads, _), width, (b, m, d) in itertools.product(
        HEADS, WIDTHS, ((1, 1, 1), (2, 5, 7), (3, 17, 33))
    ):

        def right(given: Arrays, heads: int = heads) -> Any:
            product = wide(given, "input") @ wide(given, "weights") + wide(given, "bias")
            q, k, v = (by_head(part, heads) for part in np.split(product, 3, axis=-1))
            return attended(q, k, v, 0.0, SCALE)

        size = 3 * heads * width
        weights = {"weights": floats(d, size) / 4, "bias": floats(size)}
        yield Case(
            {"input": floats(b, m, d), **weights},
            right,
            {"num_heads": heads, "scale": SCALE},
            frozenset(weights),
        )


def multi_head_attention() -> Iterator[Case]:
    for (heads, _), width, (b, m, t) in itertools.product(
        HEADS, WIDTHS, ((1, 1, 1), (2, 5, 5), (3, 17, 4), (2, 1, 9))
    ):

        def right(given: Arrays, heads: int = heads) -> Any:
            biases = np.split(given["bias"].astype(np.float64), 3) if "bias" in given else [0.0] * 3
            q, k, v = (
                by_head(wide(given, name) + bias, heads)
                for name, bias in zip(("query", "key", "value"), biases, strict=True)
            )
            return attended(q, k, v, 0.0, SCALE)

        size = heads * width
        yield Case(
            {
                "query": floats(b, m, size),
                "key": floats(b, t, size),
                "value": floats(b, t, size),
                "bias": floats(3 * size),
            },
            right,
            {"num_heads": heads, "scale": SCALE},
            frozenset({"bias"}),
            optional=("bias",),
        )


def group_query_attention() -> Iterator[Case]:
    sizes = ((1, 1, 0), (1, 3, 0), (2, 4, 0), (1, 1, 5), (1, 3, 2), (3, 1, 7))
    for (heads, groups), width, (b, m, past), rows in itertools.product(
        HEADS, WIDTHS, sizes, (False, True)
    ):
        if width % CACHE_WIDTHS:
            continue
        total = past + m

        def right(given: Arrays, heads: int = heads, groups: int = groups) -> Any:
            q, k, v = (
                by_head(wide(given, name), count)
                for name, count in (("query", heads), ("key", groups), ("value", groups))
            )
            k, v = (
                np.concatenate([wide(given, f"past_{name}"), new], axis=2)
                for name, new in (("key", k), ("value", v))
            )
            sinks = given.get("head_sink")
            return attended(q, k, v, wide(given, "attention_bias"), SCALE, sinks)

        yield Case(
            {
                "query": floats(b, m, heads * width),
                "key": floats(b, m, groups * width),
                "value": floats(b, m, groups * width),
                "past_key": floats(b, groups, past, width),
                "past_value": floats(b, groups, past, width),
                "seqlens_k": np.full(b, total - 1, np.int32),
                "total_sequence_length": np.array(total, np.int32),
                "attention_bias": causal(b if rows else 1, m, total),
                "head_sink": floats(heads),
            },
            right,
            {"num_heads": heads, "kv_num_heads": groups, "scale": SCALE},
            optional=("head_sink",),
            outputs=("y", "keys", "values"),
        )


def causal(rows: int, tokens: int, total: int) -> Any:
    """A mask [rows, 1, m, t] that lets tokens see those before them, with scores besides."""
    below = np.tril(np.ones((tokens, total), bool), total - tokens)
    return np.where(below, floats(rows, 1, tokens, total), np.float32(-1e30))


def standard_attention() -> Iterator[Case]:
    shapes = ((1, 1, 0), (2, 3, 0), (2, 3, 2), (1, 1, 6))
    for (heads, groups), width, (b, m, past), extra, flat in itertools.product(
        HEADS, (1, 3, 8, 14), shapes, (0, 1), (False, True)
    ):

        def right(given: Arrays, heads: int = heads, groups: int = groups) -> Any:
            q, k, v = (
                by_head(wide(given, name), count) if given[name].ndim == 3 else wide(given, name)
                for name, count in (("Q", heads), ("K", groups), ("V", groups))
            )
            if "past_key" in given:
                k = np.concatenate([wide(given, "past_key"), k], axis=2)
                v = np.concatenate([wide(given, "past_value"), v], axis=2)
            y = attended(q, k, v, wide(given, "attn_mask"), SCALE)
            return y if given["Q"].ndim == 3 else by_head(y, heads)

        new = {
            name: floats(b, m, count * w) if flat else floats(b, count, m, w)
            for name, count, w in (
                ("Q", heads, width),
                ("K", groups, width),
                ("V", groups, width + extra),
            )
        }
        cache = {
            "past_key": floats(b, groups, past, width),
            "past_value": floats(b, groups, past, width + extra),
        }
        counts = {"q_num_heads": heads, "kv_num_heads": groups} if flat else {}
        for mask in (None, (m, past + m), (1, 1, m, past + m), (b, heads, m, past + m)):
            masks = {} if mask is None else {"attn_mask": floats(*mask)}
            yield Case(
                {**new, **masks, **(cache if past else {})},
                right,
                {"scale": SCALE, **counts},
                outputs=("y", "keys", "values") if past else ("y",),
            )


def skip_norm() -> Iterator[Case]:
    for shape in ((5,), (3, 1), (3, 7), (2, 3, 5), (1, 1, 64), (2, 2, 3, 5)):
        if len(shape) in SKIP_RANKS:
            yield Case(
                {"input": floats(*shape), "skip": floats(*shape), "gamma": floats(shape[-1])},
                lambda given: root_mean_square(wide(given, "input") + wide(given, "skip"), given),
                {"epsilon": 1e-5},
                frozenset({"gamma"}),
                outputs=("y", "", "", "sum"),
            )


def root_mean_square(x: np.ndarray, given: Arrays) -> Any:
    gain = wide(given, "gamma" if "gamma" in given else "scale")
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain


def centred(given: Arrays) -> Any:
    """A layer's norm of the sum of input, skip and bias."""
    x = wide(given, "input") + wide(given, "skip") + wide(given, "bias")
    x = x - x.mean(-1, keepdims=True)
    unit = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return unit * wide(given, "gamma") + wide(given, "beta")


def skip_layer_norm() -> Iterator[Case]:
    for shape in ((3, 7), (2, 3, 5), (1, 1, 64)):
        rows = {name: floats(shape[-1]) for name in ("gamma", "beta", "bias")}
        yield Case(
            {"input": floats(*shape), "skip": floats(*shape), **rows},
            centred,
            {"epsilon": 1e-5},
            frozenset(rows),
            ("beta", "bias"),
            outputs=("y", "", "", "sum"),
        )


def gelu_of_sum(given: Arrays, form: Callable[[np.ndarray], Any], names: tuple[str, str]) -> Any:
    return form(wide(given, names[0]) + wide(given, names[1]))


def gelu_erf(z: np.ndarray) -> Any:
    return z / 2 * (1 + np.vectorize(math.erf)(z / 2**0.5))


def biased_gelu(form: Callable[[np.ndarray], Any], names: tuple[str, str]) -> Iterator[Case]:
    for shape in ((1,), (3, 7), (2, 3, 33)):
        yield Case(
            {names[0]: floats(*shape), names[1]: floats(shape[-1])},
            partial(gelu_of_sum, form=form, names=names),
            constants=frozenset({names[1]}),
        )


def norm() -> Iterator[Case]:
    for shape in ((5,), (3, 1), (3, 7), (0, 7), (2, 3, 5), (2, 2, 3, 33)):
        yield Case(
            {"X": floats(*shape), "scale": floats(shape[-1])},
            lambda given: root_mean_square(wide(given, "X"), given),
            {"axis": -1, "epsilon": 1e-5},
            frozenset({"scale"}),
        )


def rotary() -> Iterator[Case]:
    for (heads, _), width, flat in itertools.product(HEADS, (2, 4, 6, 14, 16), (False, True)):

        def right(given: Arrays, heads: int = heads) -> Any:
            x = wide(given, "X")
            x = by_head(x, heads) if x.ndim == 3 else x
            first, second = np.split(x, 2, axis=-1)
            cos, sin = (wide(given, f"{name}_cache")[:, None] for name in ("cos", "sin"))
            y = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
            return y.transpose(0, 2, 1, 3).reshape(given["X"].shape) if given["X"].ndim == 3 else y

        shape = (2, 3, heads * width) if flat else (2, heads, 3, width)
        tables = {f"{name}_cache": floats(2, 3, width // 2) for name in ("cos", "sin")}
        yield Case({"X": floats(*shape), **tables}, right, {"num_heads": heads} if flat else {})


def quick(given: Arrays, alpha: float) -> Any:
    return wide(given, "X") * sigmoid(alpha * wide(given, "X"))


def quick_gelu() -> Iterator[Case]:
    for shape, alpha in itertools.product(((0, 3), (1,), (3, 7), (2, 3, 33)), (1.0, 1.702)):
        yield Case({"X": floats(*shape)}, partial(quick, alpha=alpha), {"alpha": alpha})


ROWS = ((0,), (1,), (5,), (40,), (2, 3))


def unpacked(packed: np.ndarray, bits: int) -> Any:
    """The integers [..., in] of bytes [..., bytes], the lower half of a byte first."""
    if bits == 8:
        return packed.astype(np.float64) - 128
    halves = np.stack([packed & 15, packed >> 4], axis=-1)
    return halves.reshape(*packed.shape[:-1], -1).astype(np.float64) - 8


def blocks_of_bits() -> Iterator[Case]:
    for rows, bits, blocks, out in itertools.product(ROWS, (4, 8), (1, 3), (1, 3, 16)):
        for block in KERNEL_BLOCKS[bits]:  # type: ignore[index]
            k = blocks * block

            def right(given: Arrays, bits: int = bits) -> Any:
                weight = unpacked(given["B"], bits) * wide(given, "scales")[..., None]
                y = wide(given, "A") @ weight.reshape(len(weight), -1).T
                return y + wide(given, "bias")

            weights = {
                "B": octets(out, blocks, block * bits // 8),
                "scales": steps(out, blocks),
                "bias": floats(out),
            }
            sizes = {"K": k, "N": out, "bits": bits, "block_size": block, "accuracy_level": 4}
            a = RANDOM.integers(-127, 128, (*rows, k)).astype(np.float32)
            a[..., ::32] = 127  # what a block of a row is rounded to, these numbers are
            yield Case({"A": a, **weights}, right, sizes, frozenset(weights), ("bias",))


def integers_to_float() -> Iterator[Case]:
    for rows, k, out, signed, stacked in itertools.product(
        ROWS, (1, 3, 33), (1, 3, 16), (False, True), (False, True)
    ):
        if stacked and len(rows) > 1:
            continue

        def right(given: Arrays) -> Any:
            sums = (wide(given, "A") - wide(given, "a_zero_point")) @ (
                wide(given, "B") - wide(given, "b_zero_point")
            )
            return sums * wide(given, "b_scale") + wide(given, "bias")

        kind, many = np.dtype(np.int8 if signed else np.uint8), (3,) if stacked else ()
        weights = {
            "B": octets(*many, k, out).astype(kind),
            "b_scale": steps(*many, 1, out) if stacked else steps(out),
            "a_zero_point": np.array(3, np.uint8),
            "b_zero_point": np.array(5, kind),
            "a_scale": np.array(1, np.float32),
            **({} if stacked else {"bias": floats(out)}),
        }
        yield Case(
            {"A": octets(*many, *rows, k), **weights},
            right,
            {},
            frozenset(weights),
            ("b_zero_point", *(() if stacked else ("bias",))),
        )


def integer_products() -> Iterator[Case]:
    for rows, k, out in itertools.product(ROWS, (1, 3, 33), (1, 3, 16)):
        weights = {
            "B": octets(k, out).astype(np.int8),
            "a_zero_point": np.array(3, np.uint8),
            "b_zero_point": np.array(5, np.int8),
        }
        yield Case(
            {"A": octets(*rows, k), **weights},
            lambda given: (
                (wide(given, "A") - wide(given, "a_zero_point"))
                @ (wide(given, "B") - wide(given, "b_zero_point"))
            ),
            {},
            frozenset(weights),
            ("b_zero_point",),
        )


ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": silu,
    "gelu": gelu_tanh,
    "relu": lambda z: np.maximum(z, 0),
    "identity": lambda z: z,
}
ALPHA, BETA, LIMIT = 1.702, 1.0, 7.0
SWIGLU = {"swiglu_fusion": 1, "activation_alpha": ALPHA, "activation_beta": BETA}


def between(z: np.ndarray, name: str) -> Any:
    """What is between an expert's matrices; the outputs of gate and up come in turn."""
    if name != "swiglu":
        return ACTIVATIONS[name](z)
    gate, up = np.minimum(z[:, ::2], LIMIT), np.clip(z[:, 1::2], -LIMIT, LIMIT)
    return gate * sigmoid(ALPHA * gate) * (up + BETA)


def experts(given: Arrays, maps: Mapping[str, np.ndarray], name: str, k: int) -> Any:
    """The weighted sum of the k experts of each row [r, d]; `maps` are [n, out, in]."""
    x, logits = wide(given, "input"), given["router_probs"]
    biases = [wide(given, f"fc{i}_experts_bias") for i in (1, 2)]
    outputs = []
    for e in range(logits.shape[1]):
        first, second = (bias if bias.ndim == 0 else bias[e] for bias in biases)
        hidden = between(x @ maps["1"][e].T + first, name)
        outputs.append(hidden @ maps["2"][e].T + second)
    chosen = np.argsort(-logits, axis=1)[:, :k]
    weights = np.ones(chosen.shape)
    if "router_weights" in given:
        weights = np.take_along_axis(wide(given, "router_weights"), chosen, axis=1)
    each = np.stack(outputs, axis=1) if outputs else np.zeros(x.shape)
    return (np.take_along_axis(each, chosen[..., None], axis=1) * weights[..., None]).sum(1)


def one_expert_each(rows: int, n: int) -> Any:
    """Logits that send each row to one expert."""
    return np.where(np.arange(n) == np.arange(rows)[:, None] % n, 0, -16).astype(np.float32)


def mixture() -> Iterator[Case]:
    for rows, n, d, h, name in itertools.product(
        (0, 5), (1, 3), (1, 5, 8), (1, 7), (*ACTIVATIONS, "swiglu")
    ):

        def right(given: Arrays, name: str = name) -> Any:
            maps = {i: wide(given, f"fc{i}_experts_weights") for i in "12"}
            return experts(given, maps, name, 1)

        inner = 2 * h if name == "swiglu" else h
        weights = {
            "fc1_experts_weights": floats(n, inner, d),
            "fc1_experts_bias": floats(n, inner),
            "fc2_experts_weights": floats(n, d, h),
            "fc2_experts_bias": floats(n, d),
        }
        options: dict[str, Any] = {"k": 1, "activation_type": name, "normalize_routing_weights": 1}
        if name == "swiglu":
            options |= {**SWIGLU, "swiglu_limit": LIMIT}
        yield Case(
            {"input": floats(rows, d), "router_probs": one_expert_each(rows, n), **weights},
            right,
            options,
            frozenset(weights),
            ("fc1_experts_bias", "fc2_experts_bias"),
        )


def integer_mixture() -> Iterator[Case]:
    sizes = ((7, 5, None), (1, 1, None), (32, 96, 32), (64, 128, 64), (256, 256, 256))
    for (d, h, block), rows, n, bits, name, weighted in itertools.product(
        sizes, (0, 1, 40), (1, 3), (4, 8), ("silu", "relu", "swiglu"), (False, True)
    ):
        if bits == 4 and block not in KERNEL_BLOCKS[4]:
            continue
        k = min(2, n) if weighted else 1

        def right(given: Arrays, name: str = name, bits: int = bits, k: int = k) -> Any:
            maps = {}
            for i in "12":
                weight, scale = (
                    unpacked(given[f"fc{i}_experts_weights"], bits),
                    wide(given, f"fc{i}_scales"),
                )
                shared = weight.shape[2] // (1 if scale.ndim == 2 else scale.shape[2])
                scale = scale[..., None] if scale.ndim == 2 else np.repeat(scale, shared, axis=2)
                maps[i] = weight * scale
            return experts(given, maps, name, k)

        inner = 2 * h if name == "swiglu" else h
        weights = {}
        for i, out, into in (("1", inner, d), ("2", d, h)):
            weights[f"fc{i}_experts_weights"] = octets(n, out, into * bits // 8)
            blocks = () if block is None else (into // block,)
            weights[f"fc{i}_scales"] = steps(n, out, *blocks) / np.float32(into**0.5)
            weights[f"fc{i}_experts_bias"] = floats(n, out)
        options: dict[str, Any] = {
            "k": k,
            "activation_type": name,
            "normalize_routing_weights": int(not weighted),
            "expert_weight_bits": bits,
            "accuracy_level": 4,
            **({} if block is None else {"block_size": block}),
            **({**SWIGLU, "swiglu_limit": LIMIT} if name == "swiglu" else {}),
        }
        logits = RANDOM.random((rows, n)).astype(np.float32)
        routing = {"router_probs": logits if weighted else one_expert_each(rows, n)}
        if weighted:
            routing["router_weights"] = logits
        yield Case(
            {"input": floats(rows, d), **routing, **weights},
            right,
            options,
            frozenset(weights),
            ("fc1_experts_bias", "fc2_experts_bias"),
            tolerance=ROUNDED,
        )


CASES: Mapping[tuple[str, str], Callable[[], Iterator[Case]]] = {
    (MICROSOFT, "Attention"): attention,
    (MICROSOFT, "BiasGelu"): partial(biased_gelu, gelu_erf, ("A", "B")),
    (MICROSOFT, "FastGelu"): partial(biased_gelu, gelu_tanh, ("X", "bias")),
    (MICROSOFT, "GroupQueryAttention"): group_query_attention,
    (MICROSOFT, "MatMulIntegerToFloat"): integers_to_float,
    (MICROSOFT, "MatMulNBits"): blocks_of_bits,
    (MICROSOFT, "MoE"): mixture,
    (MICROSOFT, "MultiHeadAttention"): multi_head_attention,
    (MICROSOFT, "QMoE"): integer_mixture,
    (MICROSOFT, "QuickGelu"): quick_gelu,
    (MICROSOFT, "SkipLayerNormalization"): skip_layer_norm,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): skip_norm,
    ("", "Attention"): standard_attention,
    ("", "MatMulInteger"): integer_products,
    ("", "RMSNormalization"): norm,
    ("", "RotaryEmbedding"): rotary,
}
"""By domain and op."""


@cache
def schema_inputs(domain: str, op: str) -> list[str]:
    """The names of an op's inputs, in their order."""
    if not domain:
        return [each.name for each in onnx.defs.get_schema(op, OPSET).inputs]
    schemas = get_all_operator_schema()
    (found,) = (each for each in schemas if (each.domain, each.name) == (domain, op))
    return [each.name for each in found.inputs]


def forms(case: Case) -> Iterator[dict[str, np.ndarray]]:
    """A case's inputs with each of the optional ones, and without."""
    for given in itertools.product((True, False), repeat=len(case.optional)):
        absent = {name for name, here in zip(case.optional, given, strict=True) if not here}
        yield {name: array for name, array in case.inputs.items() if name not in absent}


def run(domain: str, op: str, case: Case, given: Arrays) -> Any:
    """The first output of a node."""
    order = schema_inputs(domain, op)
    places = [name if name in given else "" for name in order]
    while not places[-1]:
        places.pop()
    fixed = {name: given[name] for name in given if name in case.constants}
    fed = {name: array for name, array in given.items() if name not in fixed}
    node = onnx.helper.make_node(op, places, case.outputs, domain=domain, **case.attributes)
    types = onnx.helper.np_dtype_to_tensor_dtype
    graph = onnx.helper.make_graph(
        [node],
        "case",
        [
            onnx.helper.make_tensor_value_info(name, types(array.dtype), array.shape)
            for name, array in fed.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in case.outputs if name],
        [onnx.numpy_helper.from_array(array, name) for name, array in fixed.items()],
    )
    imports = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(MICROSOFT, 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    y: np.ndarray = session.run([case.outputs[0]], dict(fed))[0]
    return y


def main() -> None:
    domain, _, op = sys.argv[1].rpartition("/")
    count = 0
    for case in CASES[domain, op]():
        for given in forms(case):
            shapes = {name: array.shape for name, array in given.items()}
            print(op, case.attributes, shapes, flush=True)
            right, y = case.right(given), run(domain, op, case, given)
            assert y.shape == right.shape, (y.shape, right.shape)
            away = np.abs(y - right).max(initial=0)
            assert away <= case.tolerance * np.abs(right).max(initial=0), away
            count += 1
    print(f"{count} forms")


if __name__ == "__main__":
    main()
