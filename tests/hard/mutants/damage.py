"""The registry of damage: what may be wrong with a graph that still runs.

A damage lists the places of a graph where it applies, each with a function that changes a copy of
the graph. None changes shapes of inputs or outputs, names, or what the metadata says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from moexport.exporter.bundle.manifest import METADATA
from moexport.graphs.sizes import BATCH, AxisRange
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
INTEGERS = frozenset({onnx.TensorProto.UINT8, onnx.TensorProto.INT8})
QUANTISED = ("QuantizeLinear", "MatMulIntegerToFloat", "MatMulInteger", "DequantizeLinear")

Change = Callable[["Graph"], None]
Places = Iterator[tuple[str, Change]]


class Graph:
    """An ONNX graph whose weights are inside, by name.

    `sizes` are those of the axes of its inputs for which it was asked for.
    """

    def __init__(self, model: ModelProto, sizes: Mapping[str, AxisRange] | None = None) -> None:
        self.model, self.sizes = model, sizes or {}
        self.nodes = list(_nodes(model.graph))
        self.weights = {tensor.name: tensor for tensor in model.graph.initializer}

    def copy(self) -> Graph:
        """Returns a copy that can be damaged."""
        model = ModelProto()
        model.CopyFrom(self.model)
        return Graph(model, self.sizes)

    def array(self, name: str) -> np.ndarray:
        """Returns a weight's values."""
        return np.array(numpy_helper.to_array(self.weights[name]))

    def set(self, name: str, array: np.ndarray) -> None:
        """Gives a weight other values, of the same type."""
        tensor = self.weights[name]
        before = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(array.astype(before.dtype), name))

    def number(self, name: str) -> float | None:
        """Returns a constant's value where it is a single float."""
        tensor = self.weights.get(name)
        if tensor is None or tensor.data_type not in FLOATS or np.prod(tensor.dims) != 1:
            return None
        return float(self.array(name).reshape(()))

    def own(self, node: int, index: int, array: np.ndarray) -> None:
        """Gives one node's input a constant of its own, of the type that it had."""
        name = self.nodes[node].input[index]
        dtype = numpy_helper.to_array(self.weights[name]).dtype
        added = numpy_helper.from_array(array.astype(dtype), f"{name}/damaged/{node}")
        self.model.graph.initializer.append(added)
        self.weights[added.name] = added
        self.nodes[node].input[index] = added.name

    def redirect(self, value: str, to: str, but: Sequence[str] = ()) -> None:
        """Lets every node that reads a value read another, but for those named."""
        for node in self.nodes:
            if node.name not in but:
                for index, name in enumerate(node.input):
                    if name == value:
                        node.input[index] = to

    def after(self, node: int, op: str, *more: str, **attributes: Any) -> None:
        """Puts a node of the same shape behind a node's first output."""
        made = self.nodes[node]
        holder = next(graph for graph in _graphs(self.model.graph) if made in list(graph.node))
        output, before = made.output[0], f"{made.output[0]}/undamaged"
        made.output[0] = before
        inputs = [before, *(name.replace("@", before) for name in more)]
        added = helper.make_node(op, inputs, [output], f"{made.name}/damage", **attributes)
        place = list(holder.node).index(made)
        holder.node.insert(place + 1, added)

    def readers(self, value: str) -> list[NodeProto]:
        """Returns the nodes that read a value."""
        return [node for node in self.nodes if value in node.input]


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for each in _graphs(graph):
        yield from each.node


@dataclass(frozen=True, slots=True)
class Damage:
    """One kind of damage: its name, what it does, and the places of a graph where it applies.

    It is done in `every` place where each is of another k or another axis of the inputs: there are
    few, and what one shows none of the others does.
    """

    name: str
    what: str
    places: Callable[[Graph], Places]
    every: bool = False


# --- weights of experts --------------------------------------------------------------------------

ONE = re.compile(r"(?P<layer>.+)/experts\.(?P<expert>\d+)\.(?P<key>[wb]\d(\.scale)?)")
STACKED = re.compile(r"(?P<layer>.+)/experts\.(?P<key>[wb]\d(\.scale)?)")
MODE = re.compile(r"(?P<layer>.+/tensor\.\d+)\.(?P<key>expert\.\d+|whole)")

Slot = tuple[str, int | None]
"""A weight of one expert: its name, and the place in its first axis where all lie in one."""


def _experts(graph: Graph) -> dict[str, list[dict[str, Slot]]]:
    """By layer, each expert's weights by key; of a muMoE layer the rows of its expert modes."""
    found: dict[str, dict[int, dict[str, Slot]]] = {}
    for name, tensor in graph.weights.items():
        if match := ONE.fullmatch(name):
            experts = found.setdefault(match["layer"], {})
            experts.setdefault(int(match["expert"]), {})[match["key"]] = (name, None)
        elif match := STACKED.fullmatch(name) or MODE.fullmatch(name):
            layer = match["layer"] + ("" if "/tensor." not in name else f".{match['key']}")
            for index in range(tensor.dims[0]):
                place = found.setdefault(layer, {}).setdefault(index, {})
                place.setdefault(match["key"], (name, index))
    return {
        layer: [by_number[index] for index in sorted(by_number)]
        for layer, by_number in found.items()
        if len(by_number) > 1
    }


def _get(graph: Graph, slot: Slot) -> np.ndarray:
    name, index = slot
    array = graph.array(name)
    return array if index is None else array[index]


def _put(graph: Graph, slot: Slot, value: np.ndarray) -> None:
    name, index = slot
    if index is None:
        graph.set(name, value)
        return
    array = graph.array(name)
    array[index] = value
    graph.set(name, array)


def _other_expert(graph: Graph) -> Places:
    for layer, experts in _experts(graph).items():
        for index, expert in enumerate(experts):
            other = experts[(index + 1) % len(experts)]

            def change(
                g: Graph, expert: dict[str, Slot] = expert, other: dict[str, Slot] = other
            ) -> None:
                for key, slot in expert.items():
                    _put(g, slot, _get(g, other[key]))

            yield f"{layer} expert {index}", change


def _zero(graph: Graph) -> Places:
    for layer, experts in _experts(graph).items():
        for index, expert in enumerate(experts):

            def change(g: Graph, expert: dict[str, Slot] = expert) -> None:
                # Of integers the scale is what makes them zero, whatever their zero point.
                for key, slot in expert.items():
                    if f"{key}.scale" not in expert:
                        _put(g, slot, np.zeros_like(_get(g, slot)))

            yield f"{layer} expert {index}", change


def _scaled(graph: Graph, one_column: bool) -> Places:
    for layer, experts in _experts(graph).items():
        for index, expert in enumerate(experts):
            for key, slot in expert.items():
                if key.endswith(".scale"):
                    yield (
                        f"{layer} expert {index} {key}",
                        partial(_double, slot=slot, one_column=one_column),
                    )
    for name in graph.weights:
        apart = not (ONE.fullmatch(name) or STACKED.fullmatch(name))
        if apart and (name.endswith(".scale") or name.endswith("_scale")):
            yield name, partial(_double, slot=(name, None), one_column=one_column)


def _double(graph: Graph, slot: Slot, one_column: bool) -> None:
    array = np.array(_get(graph, slot), np.float32)
    if one_column:  # the largest one
        array.reshape(-1)[np.abs(array).argmax()] *= 2
    else:
        array = array * 2
    _put(graph, slot, array)


def _transposed(graph: Graph) -> Places:
    for layer, experts in _experts(graph).items():
        for index, expert in enumerate(experts):
            for key, slot in expert.items():
                shape = _get(graph, slot).shape
                if len(shape) == 2 and shape[0] == shape[1] and key in ("w1", "w2", "whole"):

                    def change(g: Graph, slot: Slot = slot) -> None:
                        _put(g, slot, _get(g, slot).T)

                    yield f"{layer} expert {index} {key}", change


def _bias(graph: Graph) -> Places:
    for layer, experts in _experts(graph).items():
        for index, expert in enumerate(experts):
            for key in ("b1", "b2"):
                if key in expert and np.any(_get(graph, expert[key])):

                    def change(g: Graph, slot: Slot = expert[key]) -> None:
                        _put(g, slot, np.zeros_like(_get(g, slot)))

                    yield f"{layer} expert {index} {key}", change
    for name in graph.weights:
        if name.endswith("bias") and np.any(graph.array(name)):

            def drop(g: Graph, name: str = name) -> None:
                g.set(name, np.zeros_like(g.array(name)))

            yield name, drop


# --- routing -------------------------------------------------------------------------------------


def _k(graph: Graph, by: int) -> Places:
    for number, node in enumerate(graph.nodes):
        if node.op_type != "TopK" or node.input[1] not in graph.weights:
            continue
        k = int(graph.array(node.input[1]).reshape(-1)[0])
        if k + by < 1:
            continue
        # Of shapes that hold k the number is changed, too.
        layer = node.name.split("/")[0]

        def change(g: Graph, number: int = number, k: int = k, layer: str = layer) -> None:
            g.own(number, 1, np.array([k + by]))

        yield node.name, change


def _dropped_choice(graph: Graph) -> Places:
    """The last of the chosen experts is the first again: k − 1 where shapes hold k."""
    for node in graph.nodes:
        if node.op_type == "TopK" and node.input[1] in graph.weights:
            k = int(graph.array(node.input[1]).reshape(-1)[0])
            if k < 2:
                continue

            def change(g: Graph, node: str = node.name, k: int = k) -> None:
                number = next(i for i, each in enumerate(g.nodes) if each.name == node)
                made = g.nodes[number]
                index = made.output[1]
                order = numpy_helper.from_array(np.array([*range(k - 1), 0]), f"{index}/order")
                g.model.graph.initializer.append(order)
                made.output[1] = f"{index}/undamaged"
                axis = next((a.i for a in made.attribute if a.name == "axis"), -1)
                again = helper.make_node(
                    "Gather", [made.output[1], order.name], [index], f"{node}/damage", axis=axis
                )
                place = list(g.model.graph.node).index(made)
                g.model.graph.node.insert(place + 1, again)

            yield node.name, change


def _attribute(node: NodeProto, name: str) -> onnx.AttributeProto | None:
    return next((each for each in node.attribute if each.name == name), None)


def _set_attribute(graph: Graph, number: int, name: str, value: object) -> None:
    node = graph.nodes[number]
    kept = [each for each in node.attribute if each.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def _smallest(graph: Graph) -> Places:
    for number, node in enumerate(graph.nodes):
        if node.op_type == "TopK":
            yield node.name, partial(_set_attribute, number=number, name="largest", value=0)
        if node.op_type in ("ArgMax", "ReduceMax"):
            other = {"ArgMax": "ArgMin", "ReduceMax": "ReduceMin"}[node.op_type]
            if node.op_type == "ReduceMax" and "all_coef" not in node.name:
                continue

            def change(g: Graph, number: int = number, other: str = other) -> None:
                g.nodes[number].op_type = other

            yield node.name, change


def _capacity(graph: Graph) -> Places:
    """An expert takes one token fewer of a group: places in its queue below, or above, C."""
    for number, node in enumerate(graph.nodes):
        limit = graph.weights.get(node.input[1]) if len(node.input) > 1 else None
        inside = any(".experts/" in name for name in node.output)
        if node.op_type not in ("Less", "Greater") or inside or limit is None:
            continue
        if limit.data_type == onnx.TensorProto.INT64 and not limit.dims:
            less = graph.array(limit.name) - 1

            def change(g: Graph, number: int = number, less: np.ndarray = less) -> None:
                g.own(number, 1, less)

            yield node.name, change


COMBINE = re.compile(r".*/(combine/C|combine/C_by_slot|coefficients(_\d+)?)")


def _renormalised(graph: Graph) -> Places:
    for number, node in enumerate(graph.nodes):
        weights = bool(node.output) and COMBINE.fullmatch(node.output[0])
        if weights and node.op_type != "Softmax":
            yield node.name, partial(_divide_by_sum, number=number)
        if node.op_type == "TopK" and ".experts" not in node.name and "/router/" not in node.name:
            readers = {each.op_type for each in graph.readers(node.output[0])}
            if readers and "ReduceSum" not in readers:
                yield node.name, partial(_divide_by_sum, number=number)
    values = {name for node in graph.nodes for name in node.output}
    for node in graph.nodes:  # Soft MoE's C over all experts, where outputs alone are left out
        layer = node.name.removesuffix("/combine/selected")
        if layer != node.name and f"{layer}/combine/C" not in values:
            yield node.name, partial(_divide_by_kept, layer=layer)


def _divide_by_kept(graph: Graph, layer: str) -> None:
    """Divides a layer's outputs by each token's sum of C over the experts that it keeps."""
    output = next(n for n in graph.nodes if n.op_type == "MatMul" and n.name in _last(layer))
    number, nodes = graph.nodes.index(output), graph.model.graph.node
    kept, sums = f"{layer}/damage/kept", f"{layer}/damage/sums"
    place = list(nodes).index(output)
    graph.after(number, "Div", f"{sums}_like")
    for added in (
        helper.make_node("CastLike", [sums, output.output[0]], [f"{sums}_like"]),
        helper.make_node("MatMul", [f"{layer}/router/C", kept], [sums]),
        helper.make_node("Cast", [f"{layer}/combine/kept"], [kept], to=onnx.TensorProto.FLOAT),
    ):
        nodes.insert(place + (added.op_type == "CastLike"), added)


def _last(layer: str) -> tuple[str, ...]:
    """The names of the product of C and the experts' outputs."""
    return tuple(f"{layer}/{name}" for name in ("output", "combine/products", "combine/computed"))


def _divide_by_sum(graph: Graph, number: int) -> None:
    # 0 / 0 is no damage that stays hidden: a small number is added.
    node = graph.nodes[number]
    output, before = node.output[0], f"{node.output[0]}/undamaged"
    node.output[0] = before
    axes = numpy_helper.from_array(np.array([-1]), f"{output}/axes")
    tiny = numpy_helper.from_array(np.array(1e-20, np.float32), f"{output}/tiny")
    graph.model.graph.initializer.extend([axes, tiny])
    holder = next(each for each in _graphs(graph.model.graph) if node in list(each.node))
    place = list(holder.node).index(node)
    for offset, added in enumerate(
        (
            helper.make_node("ReduceSum", [before, axes.name], [f"{output}/sum"], keepdims=1),
            helper.make_node("Add", [f"{output}/sum", tiny.name], [f"{output}/some"]),
            helper.make_node("Div", [before, f"{output}/some"], [output]),
        )
    ):
        added.name = f"{output}/damage/{offset}"
        holder.node.insert(place + 1 + offset, added)


def _not_renormalised(graph: Graph) -> Places:
    sums = {n.output[0]: n for n in graph.nodes if n.op_type == "ReduceSum"}
    for node in graph.nodes:
        divided = node.op_type == "Div" and node.input[1] in sums
        if divided and sums[node.input[1]].input[0] == node.input[0]:

            def change(g: Graph, value: str = node.output[0], to: str = node.input[0]) -> None:
                g.redirect(value, to)

            yield node.name, change
    makers = {node.output[0]: node for node in graph.nodes if node.output}
    for node in graph.nodes:  # Soft MoE's softmax over what is kept, where masks keep it
        logits = makers.get(node.input[0]) if node.op_type == "Softmax" else None
        if logits is None or logits.op_type != "Where" or "/combine/" not in node.name:
            continue

        def mask(g: Graph, node: str = node.name, layer: str = node.name.split("/")[0]) -> None:
            number = next(i for i, each in enumerate(g.nodes) if each.name == node)
            g.nodes[number].input[0] = f"{layer}/router/logits"
            g.after(number, "Mul", f"{layer}/combine/mask_row")

        yield node.name, mask


# --- arithmetic ----------------------------------------------------------------------------------


def _activation(graph: Graph) -> Places:
    for number, node in enumerate(graph.nodes):
        if node.op_type == "Gelu":
            tanh = _attribute(node, "approximate")
            other = "none" if tanh is not None and tanh.s == b"tanh" else "tanh"
            change = partial(_set_attribute, number=number, name="approximate", value=other)
            yield f"{node.name} to {other}", change
        if node.op_type == "QuickGelu":
            change = partial(_set_attribute, number=number, name="alpha", value=1.702)
            yield f"{node.name} to 1.702", change
        if node.op_type == "Relu" and "coefficients" not in node.name:

            def gelu(g: Graph, number: int = number) -> None:
                g.nodes[number].op_type = "Gelu"

            yield f"{node.name} to Gelu", gelu
        if node.op_type == "Erf":  # x/2·(1 + erf(x/√2)), spelled out: tanh(√(2/π)·(x + …)) without

            def tanh_of(g: Graph, number: int = number) -> None:
                g.nodes[number].op_type = "Tanh"

            yield f"{node.name} to tanh", tanh_of


EPS = 1e-2


def _epsilon(graph: Graph) -> Places:
    for number, node in enumerate(graph.nodes):
        eps = _attribute(node, "epsilon")
        if eps is not None:
            value = 1e-12 if eps.f > 1e-6 else 1e-5
            change = partial(_set_attribute, number=number, name="epsilon", value=value)
            yield f"{node.name} {eps.f:g} to {value:g}", change
        if node.op_type not in ("Add", "Clip", "Max"):
            continue
        for index, name in enumerate(node.input):
            number_ = graph.number(name)
            if number_ is not None and 0 < number_ < EPS and "step" not in node.name:
                value = 1e-12 if number_ > 1e-6 else 1e-5

                def own(
                    g: Graph, number: int = number, index: int = index, value: float = value
                ) -> None:
                    g.own(
                        number, index, np.full(g.weights[g.nodes[number].input[index]].dims, value)
                    )

                yield f"{node.name} {number_:g} to {value:g}", own


def _softmax(graph: Graph) -> Places:
    for number, node in enumerate(graph.nodes):
        if node.op_type == "Softmax":
            axis = _attribute(node, "axis")
            other = -2 if axis is None or axis.i != -2 else -1
            where = f"{node.name} over axis {other}"
            yield where, partial(_set_attribute, number=number, name="axis", value=other)


def _residual(graph: Graph) -> Places:
    for number, node in enumerate(graph.nodes):
        if node.op_type != "Add" or any(name in graph.weights for name in node.input):
            continue
        if any(node.name.startswith(f"{layer}/") for layer in _layers(graph)):
            continue
        for kept in (0, 1):

            def change(g: Graph, number: int = number, kept: int = kept) -> None:
                node = g.nodes[number]
                node.op_type = "Identity"
                value = node.input[kept]
                del node.input[:]
                node.input.append(value)

            yield f"{node.name} keeps input {kept}", change
    for number, node in enumerate(graph.nodes):
        if node.op_type in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):

            def zero(g: Graph, number: int = number) -> None:
                # 2·x instead of x + y: the sum is still there, what is added is another.
                g.nodes[number].input[1] = g.nodes[number].input[0]

            yield node.name, zero


def _layers(graph: Graph) -> set[str]:
    return {name.split("/const/")[0] for name in graph.weights if "/const/" in name}


def _scale(graph: Graph) -> Places:
    for number, node in enumerate(graph.nodes):
        if node.op_type in ("Mul", "Div"):
            for index, name in enumerate(node.input):
                value = graph.number(name)
                inner = "coefficients" in node.name or node.name.endswith("_step")
                masks = value is not None and abs(value) > 1e6
                if value is None or value in (0.0, 1.0) or inner or masks:
                    continue

                def one(g: Graph, number: int = number, index: int = index) -> None:
                    name = g.nodes[number].input[index]
                    g.own(number, index, np.ones(g.weights[name].dims))

                yield f"{node.name} {value:g} to 1", one
        scale = _attribute(node, "scale")
        if scale is not None and scale.f:
            change = partial(_set_attribute, number=number, name="scale", value=1.0)
            yield f"{node.name} {scale.f:g} to 1", change
    for name in graph.weights:
        if name.endswith("/phi"):

            def half(g: Graph, name: str = name) -> None:
                g.set(name, g.array(name) * np.float32(0.5))

            yield f"{name} halved", half


def _zero_point(graph: Graph) -> Places:
    for number, node in enumerate(graph.nodes):
        if node.op_type not in QUANTISED:
            continue
        for index, name in enumerate(node.input[1:], 1):
            tensor = graph.weights.get(name)
            if tensor is None or tensor.data_type not in INTEGERS or np.prod(tensor.dims) != 1:
                continue

            def shift(g: Graph, number: int = number, index: int = index) -> None:
                array = g.array(g.nodes[number].input[index]).astype(np.int64)
                g.own(number, index, array + (4 if int(array.reshape(-1)[0]) < 100 else -4))

            yield f"{node.name} input {index}", shift


def _activation_scale(graph: Graph) -> Places:
    for number, node in enumerate(graph.nodes):
        if node.op_type == "QuantizeLinear" and node.input[1] in graph.weights:

            def double(g: Graph, number: int = number) -> None:
                g.own(number, 1, g.array(g.nodes[number].input[1]) * np.float32(2))

            yield node.name, double


def _gate(graph: Graph) -> Places:
    for number, node in enumerate(graph.nodes):
        gated = len(node.output) == 2 and "experts/" in node.name
        if node.op_type == "Split" and gated and "/group/" not in node.name:

            def swap(g: Graph, number: int = number) -> None:
                first, second = g.nodes[number].output
                g.nodes[number].output[:] = [second, first]

            yield node.name, swap
        if node.op_type in ("MoE", "QMoE"):
            fusion = _attribute(node, "swiglu_fusion")
            if fusion is not None and fusion.i in (1, 2):
                change = partial(
                    _set_attribute, number=number, name="swiglu_fusion", value=3 - fusion.i
                )
                yield node.name, change


COMPARED = {
    "LessOrEqual": "Less",
    "Less": "LessOrEqual",
    "GreaterOrEqual": "Greater",
    "Greater": "GreaterOrEqual",
}


def _mask(graph: Graph) -> Places:
    for number, node in enumerate(graph.nodes):
        inside = any(node.name.startswith(f"{layer}/") for layer in _layers(graph))
        if node.op_type in COMPARED and not inside:

            def flip(g: Graph, number: int = number) -> None:
                g.nodes[number].op_type = COMPARED[g.nodes[number].op_type]

            yield node.name, flip
        if node.op_type in ("GroupQueryAttention", "MultiHeadAttention", "Attention"):
            causal = _attribute(node, "is_causal") or _attribute(node, "unidirectional")
            if causal is not None and causal.i:
                name, value = causal.name, 0
                yield node.name, partial(_set_attribute, number=number, name=name, value=value)


def _matrix(graph: Graph) -> Places:
    """A square matrix of the network around the experts, transposed."""
    for name, tensor in graph.weights.items():
        square = len(tensor.dims) == 2 and tensor.dims[0] == tensor.dims[1] > 1
        if square and "/experts" not in name and tensor.data_type in FLOATS:

            def change(g: Graph, name: str = name) -> None:
                g.set(name, g.array(name).T)

            yield name, change


# --- one k, one size ------------------------------------------------------------------------------


def at_k(graph: Graph, k: int) -> None:
    """Makes the outputs half as large again with one k, where that is an input of the graph."""
    _louder_where(graph, "k", k)


def at_size(graph: Graph, axis: str, size: int) -> None:
    """Makes the outputs half as large again where an axis of the first input has one size."""
    at, first = _axis(graph, axis), graph.model.graph.input[0].name
    shape = helper.make_node("Shape", [first], ["damage/size"], start=at, end=at + 1)
    _louder_where(graph, "damage/size", size)
    graph.model.graph.node.insert(0, shape)


def _louder_where(graph: Graph, value: str, equals: int) -> None:
    output = graph.model.graph.output[0]
    (maker,) = (index for index, node in enumerate(graph.nodes) if output.name in node.output)
    wanted = numpy_helper.from_array(np.array([equals]), "damage/wanted")
    factors = [numpy_helper.from_array(np.array(f, np.float32), f"damage/{f}") for f in (1.0, 1.5)]
    graph.model.graph.initializer.extend([wanted, *factors])
    nodes = graph.model.graph.node
    names = [factor.name for factor in factors]
    nodes.insert(0, helper.make_node("Where", ["damage/same", *names[::-1]], ["damage/factor"]))
    nodes.insert(0, helper.make_node("Equal", [value, wanted.name], ["damage/same"]))
    graph.after(maker, "Mul", "damage/factor")


def _axis(graph: Graph, axis: str) -> int:
    """The place of an axis in the shape of the first input."""
    shape = graph.model.graph.input[0].type.tensor_type.shape
    return [size.dim_param for size in shape.dim].index(axis)


def _at_one_k(graph: Graph) -> Places:
    if "k" not in {port.name for port in graph.model.graph.input}:
        return
    facts = json.loads(next(p.value for p in graph.model.metadata_props if p.key == METADATA))
    n = min(layer["n"] for layer in facts["layers"].values())
    for k in sorted({1, max(1, n // 4), n // 2, n}):
        yield f"k = {k}", partial(at_k, k=k)


def _at_edge(graph: Graph, largest: bool) -> Places:
    for axis, sizes in graph.sizes.items():
        size = sizes.max if largest else sizes.min
        yield f"{axis} = {size}", partial(at_size, axis=axis, size=size)


def repeated(graph: Graph, axis: str, beyond: int, op: str) -> None:
    """Lets the graph read others in place of the inputs, or tokens, from number `beyond` on.

    With `Min` that is the one before, again and again, and with `Mod` all from the start.
    """
    first, constant = graph.model.graph.input[0].name, numpy_helper.from_array
    limit = beyond - (op == "Min")
    graph.redirect(first, "damage/read")
    graph.model.graph.initializer.extend(
        constant(np.array(number), f"damage/{number}") for number in {0, 1, limit}
    )
    made: tuple[tuple[str, list[str], str, dict[str, Any]], ...] = (
        ("Shape", [first], "size", {"start": _axis(graph, axis), "end": _axis(graph, axis) + 1}),
        ("Squeeze", ["damage/size"], "count", {}),
        ("Range", ["damage/0", "damage/count", "damage/1"], "numbers", {}),
        (op, ["damage/numbers", f"damage/{limit}"], "taken", {}),
        ("Gather", [first, "damage/taken"], "read", {"axis": _axis(graph, axis)}),
    )
    for place, (kind, inputs, output, attributes) in enumerate(made):
        node = helper.make_node(kind, inputs, [f"damage/{output}"], **attributes)
        graph.model.graph.node.insert(place, node)


def _repeated(graph: Graph, op: str, beyond: Callable[[AxisRange], int]) -> Places:
    for axis, sizes in graph.sizes.items():
        number = beyond(sizes)
        yield f"{axis} from {number} on", partial(repeated, axis=axis, beyond=number, op=op)


def _last_of_all(graph: Graph) -> Places:
    """The last input, and the last eighth of tokens: below FP32 a few of them may differ."""
    for axis, sizes in graph.sizes.items():
        number = sizes.max - (1 if axis == BATCH else max(1, sizes.max // 8))
        yield f"{axis} from {number} on", partial(repeated, axis=axis, beyond=number, op="Min")


NEVER = np.iinfo(np.int64).max


def _frozen(graph: Graph) -> Places:
    """A size that a graph reads of a value, as of a Reshape or Slice, grows no further."""
    values = (*graph.model.graph.value_info, *graph.model.graph.input)
    shapes = {v.name: [d.dim_param for d in v.type.tensor_type.shape.dim] for v in values}
    for number, node in enumerate(graph.nodes):
        read = shapes.get(node.input[0], []) if node.op_type == "Shape" else []
        start, end = (_attribute(node, name) for name in ("start", "end"))
        read = read[start.i if start else 0 : end.i if end else len(read)]
        for axis in dict.fromkeys(axis for axis in read if axis in graph.sizes):
            most = [graph.sizes[axis].opt if each == axis else NEVER for each in read]

            def change(g: Graph, number: int = number, most: Sequence[int] = most) -> None:
                made = numpy_helper.from_array(np.array(most), "damage/most")
                g.model.graph.initializer.append(made)
                g.after(number, "Min", made.name)

            yield f"{node.name} of {axis}", change


DAMAGES: tuple[Damage, ...] = (
    Damage("other expert", "another expert's weights in one expert's place", _other_expert),
    Damage("zeroed expert", "one expert's weights are zeros", _zero),
    Damage("transposed expert", "a square expert matrix transposed", _transposed),
    Damage("transposed matrix", "a square matrix around the experts transposed", _matrix),
    Damage("dropped bias", "a bias of zeros", _bias),
    Damage("k + 1", "one expert more", partial(_k, by=1)),
    Damage(
        "at one k",
        "outputs half as large again with one k of a graph that takes any",
        _at_one_k,
        every=True,
    ),
    Damage(
        "at the smallest",
        "outputs half as large again at the smallest size of a range",
        partial(_at_edge, largest=False),
        every=True,
    ),
    Damage(
        "at the largest",
        "outputs half as large again at the largest size of a range",
        partial(_at_edge, largest=True),
        every=True,
    ),
    Damage(
        "beyond the smallest",
        "the last of the smallest size again in place of all further ones",
        partial(_repeated, op="Min", beyond=lambda sizes: sizes.min),
        every=True,
    ),
    Damage(
        "beyond the usual",
        "the first of all again beyond the usual size",
        partial(_repeated, op="Mod", beyond=lambda sizes: sizes.opt),
        every=True,
    ),
    Damage(
        "last of the largest",
        "one before again in place of the last of the largest size",
        _last_of_all,
        every=True,
    ),
    Damage("frozen size", "a size that grows no further than the usual one", _frozen),
    Damage("k - 1", "one expert fewer", partial(_k, by=-1)),
    Damage("repeated choice", "the first chosen expert instead of the last", _dropped_choice),
    Damage("capacity - 1", "a capacity of one token fewer", _capacity),
    Damage("smallest", "the smallest scores instead of the largest", _smallest),
    Damage("renormalised", "weights divided by their sum that were not", _renormalised),
    Damage("not renormalised", "weights no longer divided by their sum", _not_renormalised),
    Damage("softmax axis", "a softmax over the wrong axis", _softmax),
    Damage("activation", "tanh for exact GELU and the like", _activation),
    Damage("swapped gate", "gate and up of a gated expert swapped", _gate),
    Damage("epsilon", "1e-5 for 1e-12, and the other way", _epsilon),
    Damage("dropped scale", "a scale or temperature of 1", _scale),
    Damage("dropped residual", "one branch of a sum left out", _residual),
    Damage("attention mask", "off by one, or not causal", _mask),
    Damage(
        "doubled scale",
        "the scales of one expert's matrix doubled",
        partial(_scaled, one_column=False),
    ),
    Damage("doubled column", "one quantisation scale doubled", partial(_scaled, one_column=True)),
    Damage("doubled step", "the step of an activation doubled", _activation_scale),
    Damage("shifted zero point", "a zero point off by 4", _zero_point),
)
