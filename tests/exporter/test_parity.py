"""The measures of a parity check, where outputs are zero or not finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from moexport.exporter.parity import TOLERANCES, Parity, Reference, compare, cosines

Y = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)


class Answering:
    """Gives the same outputs for any inputs (`exporter.session.Runner`)."""

    provider = "test"
    takes_k = False

    def __init__(self, y: np.ndarray) -> None:
        self.output_names = ["output"]
        self.y = y

    def __call__(self, x: np.ndarray, k: int | None = None) -> np.ndarray:
        return self.run(x, k)["output"]

    def run(
        self, x: np.ndarray, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        return {"output": self.y[: len(x)]}


def parity(y: np.ndarray) -> Parity:
    expected = Reference(np.zeros((2, 1), np.float32), Y, Y, {}, {}, {"layer": 2})
    return compare(Answering(y), expected, {}, batch=2, tolerance=TOLERANCES["fp32"])


@pytest.mark.parametrize(
    ("y", "cosine"),
    [
        (Y, 1.0),
        (2 * Y, 1.0),
        (0 * Y, 0.0),  # zeros are no match for what is not zero
        (Y[::-1], 0.0),
        (np.full_like(Y, np.nan), 0.0),
        (np.full_like(Y, np.inf), 0.0),
    ],
)
def test_a_cosine_is_a_number_whatever_a_graph_gives(y: np.ndarray, cosine: float) -> None:
    assert cosines(y, Y).min() == pytest.approx(cosine)
    found = parity(y)
    assert (found.cosine, found.untouched_cosine) == pytest.approx((cosine, cosine))
    assert found.passed == (y is Y)
