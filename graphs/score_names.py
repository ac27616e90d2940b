"""Names of the score outputs of layers; imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Container

COMBINE, DISPATCH, COLUMN_SUMS = "C", "D", "column_sums"
"""Scores of a Soft MoE layer: C and D, float32 [b, m, n, p], and the sums of C's columns by expert,
[b, n], from which Algorithm 1 chooses."""

GATES = "gates"
"""Scores of a token-routed layer: the weights of the chosen experts, float32 [b, m, k], in
order."""

_SCORE = re.compile(rf"{COMBINE}|{DISPATCH}|{COLUMN_SUMS}|{GATES}|all_coefficients(_\d+)?")
"""The last alternative is for muMoE layers, [b, m, n]: a level's coefficients before the choice of
the k largest."""


def is_score(output: str, layers: Container[str]) -> bool:
    """Returns whether an output of a graph is a score of one of the layers."""
    layer, _, what = output.rpartition("/")
    return layer in layers and _SCORE.fullmatch(what) is not None
