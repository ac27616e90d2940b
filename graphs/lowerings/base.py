"""What a lowering is: a record that says what it can serve, and the builder of its nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import onnx_ir as ir

from ..builder import Builder
from ..layers.base import Kind
from ..layers.soft_moe import SoftMoESpec
from ..layers.stored import LayerOf, S
from ..precision.types import Precision
from ..targets import Target

STANDARD: frozenset[Target] = frozenset({"onnx", "ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx"})
"""Targets of a lowering that uses only ops that every runtime takes."""

ONNX_RUNTIME: frozenset[Target] = frozenset({"ort-cpu", "ort-cuda"})


@dataclass(frozen=True)  # no slots: calling an alias such as Layer sets an attribute
class WorkOf(Generic[S]):
    """The size of one layer's job: what a cost is a function of."""

    spec: S
    k: int
    batch: int
    tokens: int
    precision: Precision = "fp32"

    @property
    def selections(self) -> int:
        """How many (input, expert) pairs are computed: b·k."""
        return self.batch * self.k

    @property
    def expected_active(self) -> float:
        """Experts that at least one input selects, if inputs chose evenly and independently.

        Real routers are less even, so this is the upper end; fewer active experts cost less.
        """
        n = self.spec.experts
        return n * (1.0 - (1.0 - self.k / n) ** self.batch)


@dataclass(frozen=True)  # no slots: calling an alias such as Layer sets an attribute
class LoweringOf(Generic[S]):
    """One way to compute a layer of one kind.

    `build` adds the layer for tokens x [b, m, d] and returns y [b, m, o]. `unable` returns why the
    lowering cannot serve a layer of its `kind` at all, or None. `inexact` returns how its result
    differs from the layer's definition, or None where it is exact up to rounding; `auto` takes
    exact lowerings only.
    """

    name: str
    summary: str
    targets: frozenset[Target]
    build: Callable[[Builder, LayerOf[S], ir.Value], ir.Value]
    unable: Callable[[S], str | None]
    inexact: Callable[[S], str | None]
    kind: Kind = "soft-moe"


Lowering = LoweringOf[SoftMoESpec]
AnyLowering = LoweringOf[Any]
Work = WorkOf[SoftMoESpec]
AnyWork = WorkOf[Any]


def serves_all(spec: object) -> str | None:
    """The `unable` and `inexact` of a lowering without limits."""
    del spec
    return None
