"""The inputs and outputs of a cache: keys and values of earlier tokens, and of all tokens."""

from __future__ import annotations

from collections.abc import Mapping

from ...graphs.names import PAST, PRESENT
from ..inputs import PAST_AXIS
from ..model import TensorSpec


def cache_specs(
    shapes: Mapping[str, tuple[int, int]],
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Returns the inputs and outputs of a cache, from each part's heads and width.

    `shapes` has a part for each of the keys and values of a layer: `0.key`, `0.value`, `1.key` …
    """
    inputs, outputs = [], []
    for part, (heads, width) in shapes.items():
        past = ("batch", heads, PAST_AXIS, width)
        inputs.append(TensorSpec(f"{PAST}.{part}", "float32", past, default="empty"))
        both = ("batch", heads, f"{PAST_AXIS} + tokens", width)
        outputs.append(TensorSpec(f"{PRESENT}.{part}", "float32", both))
    return tuple(inputs), tuple(outputs)
