"""A family, a lowering, a runtime and its target from another package."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from moexport.exporter.bundle.manifest import GraphFacts
from moexport.exporter.bundle.runtimes import RuntimeRecord
from moexport.exporter.families import FAMILIES
from moexport.exporter.families.base import renamed
from moexport.exporter.session import Session, SessionOptions, described
from moexport.graphs.builder import Builder
from moexport.graphs.layers.stored import SoftMoELayer
from moexport.graphs.lowerings.base import FurtherLowering, Lowering, SoftMoEPlan
from moexport.graphs.lowerings.experts import expert_rows, one_expert
from moexport.graphs.routing import combine_outputs, masked_slots, route
from moexport.graphs.targets import ON_CPU, Machine, TargetRecord
from onnx.reference import ReferenceEvaluator

API = 1
"""The version of moexport's records that this module was written for."""

FAMILY = renamed(  # the checkpoints of a known network, under other key names
    FAMILIES["soft-moe-pytorch"],
    name="tiny-mixture",
    summary="one Soft MoE layer whose experts are called mlp0, mlp1, ...",
    keys={r"^slots$": "slot_embeds", r"^mlp(\d+)\.(\d)": r"experts.experts.\1.\2"},
)


def build(b: Builder, layer: SoftMoELayer, x: ir.Value) -> ir.Value:
    """Adds the experts one after another, each with separate products."""
    n, p, d, o = layer.spec.experts, layer.spec.slots, layer.spec.dim, layer.spec.out
    slots, _ = masked_slots(b, layer, route(b, layer, x))
    rows = expert_rows(b, layer, slots.rows)  # [b, n·p, d]
    outputs = []
    for e in range(n):
        first, end, axis = b.ints(e * p), b.ints(e * p + p), b.ints(1)
        own = b.op("Slice", rows, first, end, axis, name=f"dispatch/expert_{e}")
        own = b.op("Reshape", own, b.ints(-1, d), name=f"experts/{e}/rows")  # [b·p, d]
        y = one_expert(b, layer, e, own)
        outputs.append(b.op("Reshape", y, b.ints(-1, p, o), name=f"combine/expert_{e}"))
    return combine_outputs(
        b, layer, slots, b.op("Concat", *outputs, axis=1, name="combine/outputs")
    )


def predict_us(plan: SoftMoEPlan, machine: Machine) -> float:
    """Returns a rough time, for all experts on all inputs."""
    macs = 2 * plan.batch * plan.spec.experts * plan.spec.slots * plan.spec.dim * plan.spec.hidden
    return macs / machine.macs_per_us


LOWERING = FurtherLowering(
    "soft-moe", Lowering("in-turn", "one expert after another", build=build, predict_us=predict_us)
)


class ReferenceSession(Session):
    """A graph in ONNX's reference implementation, which is readable but slow."""

    def __init__(self, path: Path | str, options: SessionOptions | None = None) -> None:
        self.path, self.options = Path(path), options or SessionOptions()
        graph = onnx.load(path)
        names = [*(value.name for value in graph.graph.output), *(self.options.observe or ())]
        self.describe(described(graph), names, GraphFacts.of(graph, self.path.name))
        self._evaluator = ReferenceEvaluator(graph)

    @property
    def provider(self) -> str:
        """The provider that runs the graph."""
        return "onnx.reference"

    def call(self, wanted: Sequence[str], feeds: Mapping[str, Any]) -> list[np.ndarray]:
        """Returns the values of outputs for checked inputs by name."""
        return list(self._evaluator.run(list(wanted), dict(feeds)))


RUNTIME = RuntimeRecord("onnx-reference", "ONNX's reference", ReferenceSession)
TARGET = TargetRecord("reference", ON_CPU, "standard", runtime="onnx-reference")
