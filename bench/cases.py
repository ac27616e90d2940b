"""The words of a benchmark: a candidate has cases; those of a timing group are timed in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..common import timing
from .results import ONNXRUNTIME, PYTORCH_ALGORITHM_2
from .runners.base import Loader, Runner

if TYPE_CHECKING:
    from ..exporter.model import Model
    from .measure.flops import IntegerLinear


@dataclass(frozen=True, slots=True)
class GraphSource:
    """An exported graph that is not opened yet.

    `scope` says what a call's time holds, as in `results.Row`. `k_by_layer` is k where it is not
    the same in all layers. Of an INT8 graph the layers in `floating` compute in floats all the
    same, and `integers` are the linear layers of the backbone that do not.
    """

    k: int
    lowering: str
    loader: Loader
    provider: str = "cpu"
    precision: str = "fp32"
    engine: str = ONNXRUNTIME
    scope: str = "end-to-end"
    k_by_layer: Mapping[str, int] = field(default_factory=dict)
    floating: frozenset[str] = frozenset()
    integers: tuple[IntegerLinear, ...] = ()

    def open(self) -> Runner:
        """Opens the graph."""
        return self.loader()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to measure, with the graphs that were made from it.

    `ks` are those of its Algorithm 2 rows in PyTorch; each graph has its own k. `engines` are the
    PyTorch engines to measure, by their names in `available.KINDS`, beside the untouched model,
    which always takes part.
    """

    name: str
    model: Model
    ks: tuple[int, ...] = ()
    graphs: tuple[GraphSource, ...] = ()
    renormalize: bool = False
    engines: tuple[str, ...] = (PYTORCH_ALGORITHM_2,)

    @property
    def experts(self) -> int:
        """The largest n of its MoE layers: a k of n keeps every expert of every layer."""
        return max(layer.spec.experts for layer in self.model.layers.values())

    @property
    def weights_bytes(self) -> int:
        """The bytes of the model's parameters."""
        return sum(p.nbytes for p in self.model.module.parameters())

    def case(self, graph: GraphSource) -> Case:
        """Returns the case that one of the graphs is."""
        return Case(
            *(self.name, graph.engine, graph.k, self.experts),
            *(graph.provider, graph.precision, graph.lowering, graph.scope),
        )


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured, as plain data: one engine with one k of one model; a row per batch size."""

    model: str
    engine: str
    k: int
    experts: int
    provider: str = "cpu"
    precision: str = "fp32"
    lowering: str | None = None
    scope: str = "end-to-end"

    @property
    def label(self) -> str:
        """A short unique name: `digits: onnxruntime grouped fp32 k=4/16`."""
        return f"{self.model}: {self.runs_in} k={self.k}/{self.experts}"

    @property
    def runs_in(self) -> str:
        """The engine, with lowering and precision of a graph: `onnxruntime grouped fp32`."""
        words = [self.engine]
        if self.lowering is not None:
            words += [self.lowering, self.precision]
        if self.provider not in ("cpu", self.engine):
            words.append(self.provider)
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class TimingGroup:
    """Cases that are timed together, in turn, at one batch size."""

    cases: tuple[Case, ...]
    batch: int
    protocol: timing.Protocol

    @property
    def model(self) -> str:
        """The model that is measured."""
        return self.cases[0].model

    def seconds(self, call_ms: float) -> float:
        """How long it takes with calls of so many milliseconds: more than `round_s` if need be."""
        round_s = max(self.protocol.round_s, self.protocol.inputs * call_ms / 1e3)
        return len(self.cases) * self.protocol.rounds * round_s
