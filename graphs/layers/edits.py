"""What can be changed in a trained layer when it is exported: experts removed, outputs re-written.

Both are linear in an expert's contribution, so they change weights, not routing: every score,
softmax, coefficient and choice stays as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One output of a muMoE layer re-written: y_o += λ · Π_e(ā_eᵀ·a_e) (Eq. 5).

    `coefficients` are the ā_e [n_e], one vector per level: the mean coefficients of a subgroup of
    inputs. `strength` is λ.
    """

    output: int
    coefficients: tuple[tuple[float, ...], ...]
    strength: float


@dataclass(frozen=True, slots=True)
class LayerEdits:
    """The edits of one layer; without any it computes what it was trained to.

    `ablated` are pairs of a level, from 0, and an expert of it that contributes nothing. With
    several levels every combination that the expert takes part in contributes nothing.
    """

    ablated: frozenset[tuple[int, int]] = frozenset()
    rewrites: tuple[Rewrite, ...] = field(default=())

    def ablated_in(self, level: int) -> tuple[int, ...]:
        """The experts of a level that contribute nothing, ascending."""
        return tuple(sorted(expert for at, expert in self.ablated if at == level))

    def present(self, level: int, experts: int, like: Tensor) -> Tensor:
        """Returns [n]: 0 for the ablated experts of a level and 1 for the others."""
        mask = torch.ones(experts, dtype=like.dtype, device=like.device)
        mask[list(self.ablated_in(level))] = 0
        return mask


NO_EDITS = LayerEdits()
