"""What a lowering is: a record of what it serves and costs, and the builder of its nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import onnx_ir as ir

from ..builder import Builder
from ..layers.base import Kind
from ..layers.soft_moe import SoftMoESpec
from ..layers.stored import LayerOf, S
from ..targets import TARGETS, Machine, Precision, Target, TargetRecord
from .cost import WorkOf


def every_target(target: TargetRecord) -> bool:
    """The `needs` of a lowering of ops that every runtime takes."""
    del target
    return True


def serves_all(spec: object) -> str | None:
    """The `unable` of a lowering without limits."""
    del spec
    return None


def exact(spec: object, precision: Precision, target: Target) -> str | None:
    """The `inexact` of a lowering that computes what the layer is defined as."""
    del spec, precision, target
    return None


def has_all_precisions(precision: Precision, target: Target) -> str | None:
    """The `no_kernel` of a lowering whose ops every runtime has in every precision."""
    del precision, target
    return None


def no_int4(precision: Precision, target: Target) -> str | None:
    """The `no_kernel` of a lowering of all matrices at once, which engines alone have in INT4."""
    if TARGETS[target].compiled:
        return None
    return "INT4 weights are multiplied one matrix at a time" if precision == "int4" else None


def copies_nothing(work: object) -> float:
    """The `copied_bytes` of a lowering that reads weights where they are."""
    del work
    return 0.0


@dataclass(frozen=True)  # no slots: calling an alias such as Lowering sets an attribute
class LoweringOf(Generic[S]):
    """One way to compute a layer of one kind.

    `build` adds the layer for tokens x [b, m, d] and returns y [b, m, o]. `predict_us` returns how
    long one batch takes on a machine, in microseconds, and `copied_bytes` the weights that are
    copied for it before they are multiplied, counted as FP32. `needs` returns whether a target can
    do what the nodes need, which it says of itself: nothing asks for its name. `unable` returns why
    the lowering cannot serve a layer of its kind at all, or None; `no_kernel` why it cannot in a
    precision on a target. `inexact` returns how its result then differs from the layer's
    definition, or None where it is exact up to rounding; `auto` takes exact lowerings only.
    `observable` are those whose taps see the rows of the selection alone, each once: what a
    calibration runs.
    """

    name: str
    summary: str
    build: Callable[[Builder, LayerOf[S], ir.Value], ir.Value]
    predict_us: Callable[[WorkOf[S], Machine], float]
    copied_bytes: Callable[[WorkOf[S]], float] = copies_nothing
    needs: Callable[[TargetRecord], bool] = every_target
    unable: Callable[[S], str | None] = serves_all
    no_kernel: Callable[[Precision, Target], str | None] = has_all_precisions
    inexact: Callable[[S, Precision, Target], str | None] = exact
    observable: bool = False

    @property
    def targets(self) -> frozenset[Target]:
        """The targets that can do what it needs."""
        return frozenset(record.name for record in TARGETS if self.needs(record))


Lowering = LoweringOf[SoftMoESpec]
AnyLowering = LoweringOf[Any]


@dataclass(frozen=True, slots=True)
class KindRecord:
    """One kind of layer: what its spec calls it, and the ways to compute it, in a list's order."""

    name: Kind
    lowerings: tuple[AnyLowering, ...]


@dataclass(frozen=True, slots=True)
class FurtherLowering:
    """One more way to compute layers of a kind that is there already."""

    kind: Kind
    lowering: AnyLowering

    @property
    def name(self) -> str:
        """The name of the lowering."""
        return self.lowering.name
