"""A planned layer, and a lowering: its requirements, its costs, and the builder of its nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import onnx_ir as ir

from ..builder import Builder
from ..kinds import KindRecord as KindRecord  # noqa: PLC0414  plugins import it from here
from ..layers.base import Kind
from ..layers.soft_moe import SoftMoESpec
from ..layers.stored import Layer, LayerTensors, S
from ..precision.types import FP32, ComputeTypes
from ..targets import TARGETS, Machine, Precision, Target, TargetRecord


def no_batched_kernel(precision: Precision, target: Target) -> str | None:
    """Returns why no kernel multiplies all matrices in one product (`no_kernel`), or None."""
    record = TARGETS[target]
    if record.compiled or not (precision == "int4" or (precision == "int8" and record.weight_only)):
        return None
    return f"no kernel multiplies several {precision.upper()} matrices at once"


@dataclass(frozen=True)  # no slots: calling an alias such as SoftMoEPlan sets an attribute
class LayerPlan(Generic[S]):
    """One MoE layer of an export: its sizes and, once chosen, its lowering.

    `k` is None if it is a graph input. `batch` and `tokens` are the planned sizes; with
    `tokens_fixed` every input has that number of tokens. `precision` is the narrowest type that the
    layer computes in, or the requested one until that is decided. `reason` is a sentence on why the
    lowering was chosen; `predicted_us` is the predicted time of one batch. `name` is the layer's
    path in its model.
    """

    spec: S
    k: int | None
    batch: int
    tokens: int
    precision: Precision = "fp32"
    tokens_fixed: bool = False
    chosen: LoweringOf[S] | None = None
    reason: str = ""
    predicted_us: float = 0.0
    name: str = ""
    precision_reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain data: the fields of a manifest's `LayerRecord`."""
        spec = self.spec
        return {
            "name": self.name,
            "kind": spec.kind,
            "experts": spec.experts,
            "slots": spec.slots,
            "dim": spec.dim,
            "hidden": spec.hidden,
            "k": self.k,
            "lowering": self.lowering.name,
            "reason": self.reason,
            "levels": [] if spec.kind == "soft-moe" else list(spec.levels),
            "precision": self.precision,
            "precision_reason": self.precision_reason,
            "k_levels": list(getattr(spec, "kept", ())) if self.k is not None else [],
        }

    def to_layer(
        self,
        tensors: LayerTensors,
        target: Target,
        compute: ComputeTypes = FP32,
        *,
        renormalize: bool = False,
        scores: bool = False,
    ) -> Layer[S]:
        """Returns the layer for its builder, with its weights and numeric types."""
        return Layer(
            spec=self.spec,
            tensors=tensors,
            k=self.k,
            build=self.lowering.build,
            renormalize=renormalize,
            compute=compute,
            target=target,
            batch=self.batch,
            scores=scores,
        )

    @property
    def lowering(self) -> LoweringOf[S]:
        assert self.chosen is not None, "no lowering has been chosen yet"
        return self.chosen

    @property
    def typical_k(self) -> int:
        """The k for predictions: a quarter of the experts, if k is an input."""
        return max(1, self.spec.experts // 4) if self.k is None else self.k

    @property
    def choosers(self) -> int:
        """The number of independent choices of experts: one per input, or one per token."""
        return self.batch * (self.tokens if self.spec.routes_tokens else 1)

    @property
    def selections(self) -> int:
        """The number of computed pairs of chooser and expert: b·k, or t·k."""
        return self.choosers * self.typical_k

    @property
    def expected_active(self) -> float:
        """The number of experts that an input or token selects, for uniform, independent choices.

        Real routers are less uniform, so this is an upper bound; fewer active experts cost less.
        """
        n = self.spec.experts
        return n * (1.0 - (1.0 - self.typical_k / n) ** self.choosers)

    @property
    def copied_bytes(self) -> float:
        """The bytes of weights, counted as FP32, that the chosen lowering copies for one batch."""
        return self.lowering.copied_bytes(self)

    def inexact(self, target: Target) -> str | None:
        """Returns how the lowering differs from the layer's definition; None if it is exact."""
        return self.lowering.inexact(self.spec, self.precision, target)


SoftMoEPlan = LayerPlan[SoftMoESpec]
AnyPlan = LayerPlan[Any]


@dataclass(frozen=True)  # no slots: calling an alias such as Lowering sets an attribute
class LoweringOf(Generic[S]):
    """One way to compute a layer of one kind.

    `build` adds the layer for tokens x [b, m, d] and returns y [b, m, o]. `predict_us` returns the
    time of one batch on a machine in microseconds. The other fields are optional. `copied_bytes`
    returns the bytes of weights, counted as FP32, that are copied for a batch and then multiplied.
    `needs` returns whether a target has the required capabilities, without using its name. `unable`
    returns why the lowering cannot serve a layer of its kind at all, `no_kernel` why it cannot in a
    precision on a target, and `unfit` why it cannot for a layer of these sizes. `inexact` returns
    how its result differs from the layer's definition by more than rounding: `auto` only chooses
    exact lowerings. With `observable`, its taps contain each selected row exactly once, as a
    calibration needs. With `branches`, it computes an `If` per expert.
    """

    name: str
    summary: str
    build: Callable[[Builder, Layer[S], ir.Value], ir.Value]
    predict_us: Callable[[LayerPlan[S], Machine], float]
    copied_bytes: Callable[[LayerPlan[S]], float] = lambda _: 0.0
    needs: Callable[[TargetRecord], bool] = lambda _: True
    unable: Callable[[S], str | None] = lambda _: None
    no_kernel: Callable[[Precision, Target], str | None] = lambda *_: None
    inexact: Callable[[S, Precision, Target], str | None] = lambda *_: None
    unfit: Callable[[S, Precision, Target], str | None] = lambda *_: None
    observable: bool = False
    branches: bool = False

    @property
    def targets(self) -> frozenset[Target]:
        return frozenset(record.name for record in TARGETS if self.needs(record))

    def problem(self, spec: S, precision: Precision, target: Target) -> str | None:
        """Returns why the lowering cannot serve a layer in a precision on a target, or None."""
        if not self.needs(TARGETS[target]):
            return f"the target {target} does not support it"
        return (
            self.unable(spec)
            or self.no_kernel(precision, target)
            or self.unfit(spec, precision, target)
        )


Lowering = LoweringOf[SoftMoESpec]
AnyLowering = LoweringOf[Any]


@dataclass(frozen=True, slots=True)
class FurtherLowering:
    """A plugin's lowering for an existing kind of layer."""

    kind: Kind
    lowering: AnyLowering

    @property
    def name(self) -> str:
        return self.lowering.name
