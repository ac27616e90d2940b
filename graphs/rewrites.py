"""A re-written output of a muMoE layer, as numbers; importing it loads nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One output of a muMoE layer re-written: y_o += λ · Π_e(ā_eᵀ·a_e) (Eq. 5).

    `coefficients` are the ā_e [n_e], one vector per level: the mean coefficients of a subgroup of
    inputs. `strength` is λ.
    """

    output: int
    coefficients: tuple[tuple[float, ...], ...]
    strength: float
