"""A graph that gets its layers' choices of experts as inputs, to compare the outputs after them.

Rounding may swap two experts with nearly equal scores. In a network with attention, all later
tokens then differ as well. With PyTorch's choices as inputs, every output can be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import GraphProto, TensorProto, helper

if TYPE_CHECKING:
    from pathlib import Path

    from ..inputs import Inputs


def given_choice(value: str) -> str:
    """Returns the name of the input that replaces a choice."""
    return f"{value}/given"


def own_choice(value: str) -> str:
    """Returns the name of the choice that the graph itself would make."""
    return f"{value}/own"


def scores_of(value: str) -> tuple[str, str]:
    """Returns the names of the scores of the graph's own choice, and of the given one, in FP32."""
    return f"{value}/own_scores", f"{value}/given_scores"


class GivenSession:
    """A session that gets choices as inputs and returns those that the graph would make."""

    def __init__(self, session: Any, values: Collection[str]) -> None:
        self._session, self._values, self._gaps = session, tuple(values), [0.0]
        self.input_name, self.output_names = session.input_name, session.output_names

    def inputs_for(self, choices: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the inputs for choices [s, k] or [s, m, k], by the values that they replace."""
        return {
            given_choice(value): sets.reshape(len(sets), -1, sets.shape[-1]).astype(np.int64)
            for value, sets in choices.items()
        }

    def run(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = self._session.run(x, k, outputs)
        for value in self._values:
            own, given = (np.sort(found[name].astype(np.float64)) for name in scores_of(value))
            scale = np.maximum(np.abs(own[..., :1]), np.finfo(np.float32).tiny)
            with np.errstate(invalid="ignore"):
                gaps = np.nan_to_num(np.abs(own - given) / scale, nan=np.inf)
            self._gaps.append(float(gaps.max(initial=0.0)))
            found[value] = found[own_choice(value)]
        return found

    def largest_gap(self) -> float:
        """Returns how far the scores of own and given choices were apart since the last call.

        The gap is relative to the k-th score. It is small if ties explain all differences: then
        both choices have nearly the same scores.
        """
        gap, self._gaps = max(self._gaps), [0.0]
        return gap


def options_for(options: Any, path: Path, values: Collection[str]) -> Any | None:
    """Returns the options of a session that gets choices as inputs; None if the graph cannot."""
    if not can_be_given(onnx.load(path, load_external_data=False).graph, values):
        return None
    observe = dict.fromkeys(map(own_choice, values), TensorProto.INT64)
    scores = (name for value in values for name in scores_of(value))
    observe |= dict.fromkeys(scores, TensorProto.FLOAT)
    return replace(options, observe=observe, given=tuple(values), prepack=False)


def can_be_given(graph: GraphProto, values: Iterable[str]) -> bool:
    """Whether each choice consists of the indices that a TopK returns."""
    return {*values} <= {node.output[1] for node in graph.node if node.op_type == "TopK"}


def with_given_choices(graph: GraphProto, values: Collection[str]) -> None:
    """Makes choices (`can_be_given`) inputs of a graph, int64 [s, m, k], where m may be 1.

    The scores that TopK returns become those of the given experts. Both are in the order in which
    TopK returns its own, because the rest of the graph may depend on it.
    """
    nodes = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type != "TopK" or node.output[1] not in values:
            continue
        (all_scores, k), (scores, value) = node.input, node.output
        given, own = given_choice(value), own_choice(value)
        own_scores, given_scores = scores_of(value)
        names = ("shape", "sets", "sets/scores", "order")
        shape, sets, found, order = (f"{value}/{name}" for name in names)
        node.output[:] = [f"{value}/top", own]
        settings = {each.name: each.i for each in node.attribute}
        gather = partial(helper.make_node, "GatherElements", axis=settings.get("axis", -1))
        cast = partial(helper.make_node, "Cast", to=TensorProto.FLOAT)
        graph.input.append(helper.make_tensor_value_info(given, TensorProto.INT64, [None] * 3))
        nodes += [
            helper.make_node("Shape", [own], [shape]),
            helper.make_node("Reshape", [given, shape], [sets]),
            gather([all_scores, sets], [found]),
            helper.make_node("TopK", [found, k], [scores, order], **settings),
            gather([sets, order], [value]),
            cast([node.output[0]], [own_scores]),
            cast([found], [given_scores]),
        ]
    del graph.node[:]
    graph.node.extend(nodes)
