"""Adds the nodes of one layer to a graph, under descriptive names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

Attribute = int | float | str | Sequence[int] | ir.Graph


class Builder:
    """Collects the nodes and constants of one layer, named after the layer.

    Node and value names are `LAYER/name` (`blocks.6.mlp/router/logits`), so profilers and viewers
    group them, and layers do not collide. Equal constants within the layer share one initializer.
    """

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self.taps: dict[str, list[ir.Value]] = {}
        self.scores: dict[ir.Value, tuple[int | None, ...]] = {}
        self._taken: set[str] = set()
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        name: str,
        domain: str = "",
        **attributes: Attribute,
    ) -> ir.Value:
        """Adds a node with one output, named `LAYER/name`, and returns the output."""
        return self.ops(op_type, *inputs, names=(name,), domain=domain, **attributes)[0]

    def ops(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        names: Sequence[str],
        domain: str = "",
        **attributes: Attribute,
    ) -> list[ir.Value]:
        """Adds a node with one output per name; the node has the first name."""
        outputs = [ir.Value(name=self._name(name)) for name in names]
        node = ir.node(
            op_type,
            inputs,
            attributes=attributes,
            domain=domain,
            outputs=outputs,
            name=outputs[0].name,
        )
        self.nodes.append(node)
        return outputs

    def tap(self, tensor: str, value: ir.Value) -> None:
        """Records a value, all or part of one of the layer's tensors, for a calibration to observe.

        Parts of one tensor are concatenated along the first axis. Without an observer the graph is
        unchanged.
        """
        self.taps.setdefault(tensor, []).append(value)

    def add_score(self, score: ir.Value, *sizes: int | None) -> None:
        """Adds a score, float32 [b, *sizes], to the graph's outputs; None is the token axis."""
        score.type = ir.TensorType(ir.DataType.FLOAT)
        self.scores[score] = sizes

    def cast(
        self, value: ir.Value, source: ir.DataType, target: ir.DataType, name: str
    ) -> ir.Value:
        """Returns a value of type `source` as `target`; the same value if the types are equal."""
        if source == target:
            return value
        return self.op("Cast", value, to=target.value, name=name)

    def rounded(self, value: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
        """Returns a value of type `dtype`, rounded to BF16 but still of type `dtype`."""
        bf16 = self.op("Cast", value, to=ir.DataType.BFLOAT16.value, name=f"{name}_bf16")
        return self.op("Cast", bf16, to=dtype.value, name=f"{name}_rounded")

    def branch(self, nodes: Builder, output: ir.Value | Sequence[ir.Value], name: str) -> ir.Graph:
        """Returns a graph without inputs for an `If`, from the nodes of another builder.

        The constants of `nodes` become initializers of the main graph: ONNX Runtime pre-packs
        weights that a branch reads from there, and the branch contains no data.
        """
        self.initializers.extend(nodes.initializers)
        outputs = [output] if isinstance(output, ir.Value) else output
        return ir.Graph([], outputs, nodes=nodes.nodes, name=self._name(name))

    def ints(self, *values: int) -> ir.Value:
        return self.constant(np.array(values, dtype=np.int64))

    def integer(self, value: int) -> ir.Value:
        return self.constant(np.array(value, dtype=np.int64))

    def number(self, value: float, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        return self.constant(np.array(value, dtype=dtype.numpy()))

    def constant(self, array: np.ndarray) -> ir.Value:
        """Returns a small constant; equal ones are shared."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._name(f"const/{_describe(array)}")
            self._constants[key] = self.weight(ir.tensor(array, name=name), name)
        return self._constants[key]

    def weight(self, tensor: ir.TensorProtocol, name: str) -> ir.Value:
        """Returns an initializer with the content of `tensor` and this full name."""
        value = ir.Value(
            name=name,
            shape=ir.Shape(tensor.shape.numpy()),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.initializers.append(value)
        return value

    def insert_before(self, graph: ir.Graph, node: ir.Node) -> None:
        """Inserts the nodes before `node`, and their constants among the graph's initializers."""
        for initializer in self.initializers:
            assert initializer.name is not None
            if initializer.name not in graph.initializers:
                graph.register_initializer(initializer)
        graph.insert_before(node, self.nodes)

    def nested(self, name: str) -> Builder:
        """Returns a builder for the nodes of a branch, named under `LAYER/name`."""
        return Builder(f"{self.layer}/{name}")

    def _name(self, name: str) -> str:
        full = f"{self.layer}/{name}"
        count = 2
        while full in self._taken:
            full = f"{self.layer}/{name}.{count}"
            count += 1
        self._taken.add(full)
        return full


def _describe(array: np.ndarray) -> str:
    """Returns a readable name for a constant: its values, if there are few."""
    if array.size <= 4:
        return "x".join(f"{value:g}" for value in array.flatten().tolist()) or "empty"
    return f"{array.dtype.name}_{'x'.join(str(size) for size in array.shape)}"
