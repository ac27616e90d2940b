"""What a benchmark measures, as plain frozen data: models, their cases, on how much, how long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common import timing
from ..errors import UsageError
from ..exporter.bundle.manifest import Dimension
from ..exporter.bundle.parity_record import Tolerance
from ..exporter.job import ExportJob
from ..exporter.model import Model
from ..graphs.layers.base import MoESpec, moe_layers
from .engines import (
    KINDS,
    ONNXRUNTIME,
    PYTORCH_ALGORITHM_2,
    PYTORCH_EAGER,
    PYTORCH_EAGER_CUDA,
    EngineKind,
    ModelEngine,
    Serves,
)
from .request import BenchRequest
from .results import Absent, PhaseName
from .runners.base import Loader


@dataclass(frozen=True, slots=True)
class IntegerLinear:
    """An integer product y = x·W of the backbone: x [*rows, in], W [in, out].

    The first of `rows` is the batch; None where the graph does not tell them.
    """

    node: str
    rows: tuple[Dimension, ...] | None
    weights: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Phase:
    """A call of a language model: so many new `tokens` of each input, after `past` in its cache."""

    name: PhaseName
    tokens: int
    past: int = 0


@dataclass(frozen=True, slots=True)
class GraphSource:
    """An exported graph that is not opened yet.

    `scope` says what a call's time holds, as in `results.Row`. `k_by_layer` is k where it is not
    the same in all layers. Of an INT8 graph the layers in `floating` compute in floats all the
    same, and `integers` are the linear layers of the backbone that do not. `batches` are the sizes
    that it is timed at: those that it was made for where there are graphs for others, None for all.
    Another exporter's graph has no `lowering`: an empty one. `bounds` say how far the outputs of a
    graph of moexport's may be off; of others nothing is promised.
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
    batches: frozenset[int] | None = None
    bounds: Tolerance | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to measure, with the graphs that were made from it.

    `ks` are those of its Algorithm 2 rows in PyTorch; each graph has its own k. `engines` are the
    PyTorch engines to measure, by their names in `engines.KINDS`, beside the untouched model,
    which always takes part. `routed` has, for each k of a router that is part of the model, the job
    of its export, whose model chooses so many. A language model is timed in `phases`. Graphs of one
    batch size run that alone: all is measured in batches of `only_batch` then.
    """

    name: str
    model: Model
    ks: tuple[int, ...] = ()
    graphs: tuple[GraphSource, ...] = ()
    renormalize: bool = False
    engines: tuple[str, ...] = (PYTORCH_ALGORITHM_2,)
    routed: Mapping[int, ExportJob] = field(default_factory=dict)
    phases: tuple[Phase, ...] = ()
    only_batch: int | None = None

    @property
    def trained_k(self) -> int:
        """The k of the untouched model: all experts, unless a router was trained to choose some."""
        return max(spec.trained_k for spec in self._as_trained)

    @property
    def experts(self) -> int:
        """The largest n of its MoE layers: a k of n keeps every expert of every layer."""
        return max(layer.spec.experts for layer in self.model.layers.values())

    @property
    def _as_trained(self) -> list[MoESpec]:
        """The layers of the untouched model, which have more experts where some were dropped."""
        layers = moe_layers(self.model.original) if self.model.original is not None else {}
        return [layer.spec for layer in (layers or self.model.layers).values()]

    @property
    def weights_bytes(self) -> int:
        """The bytes of the model's parameters."""
        return sum(p.nbytes for p in self.model.module.parameters())

    @property
    def cases(self) -> dict[Case, GraphSource | None]:
        """What is measured, each case with its graph: the untouched PyTorch model first.

        Algorithm 2 is a loop over a layer's experts: it has no row for k = n, where it is the model
        itself, nor for layers that choose no sets. Raises UsageError for two graphs that no row
        could tell apart.
        """
        cases: dict[Case, GraphSource | None] = {}
        for kind in KINDS.values():
            if isinstance(kind, ModelEngine) and kind.name in (PYTORCH_EAGER, *self.engines):
                for case in self._run_by(kind):
                    cases[case] = None
        for graph in self.graphs:
            case = Case(
                model=self.name,
                engine=graph.engine,
                k=graph.k,
                experts=self.experts,
                provider=graph.provider,
                precision=graph.precision,
                lowering=graph.lowering or None,
                scope=graph.scope,
            )
            if case in cases:
                raise UsageError(
                    f"two graphs are the same case: {case.label}",
                    hint="give each graph once, or give the two models different names",
                )
            cases[case] = graph
        return cases

    def k_by_layer(self, k: int) -> dict[str, int]:
        """Each layer's k, of which this is the largest; empty where it is that of all layers."""
        if k in self.routed:
            return whole_k(self.routed[k])
        return next((dict(graph.k_by_layer) for graph in self.graphs if graph.k == k), {})

    def _run_by(self, kind: ModelEngine) -> list[Case]:
        """What an engine of PyTorch runs of the model."""
        n, ks = self.experts, self.ks
        if kind.algorithm_2:
            loops = any(layer.spec.chooses_sets for layer in self.model.layers.values())
            ks = tuple(k for k in ks if loops and k < n)
        elif kind.experts_form is not None:
            form = self.model.host.experts_form(self.model)
            own = form == kind.experts_form
            ks = tuple(k for k in self.routed if form and not (own and k == self.trained_k))
        else:
            n, ks = max(spec.experts for spec in self._as_trained), (self.trained_k,)
        return [Case(self.name, kind.engine, k=k, experts=n, provider=kind.provider) for k in ks]


NOT_SERVED: dict[Serves, str] = {
    "one-input": "it runs models with one input, and these have several",
    "transformers": "it runs models of transformers",
}


@dataclass(frozen=True, slots=True)
class Selection:
    """The engines to measure, and those that were asked for or known and are not there."""

    present: tuple[EngineKind, ...]
    absent: tuple[Absent, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The engines to measure, as `--engine` names them."""
        return tuple(kind.name for kind in self.present)


def select(
    names: Iterable[str], models: Sequence[Serves] = ("one-input", "transformers")
) -> Selection:
    """Returns which of the named engines can run here, and why each other known one is left out.

    `models` are what the models are that will be measured; an engine for others that was not named
    is not mentioned. The untouched model takes part wherever another engine runs: always on the
    CPU, on the GPU with the first engine there.
    """
    wanted = set(names) | {PYTORCH_EAGER}
    if any(KINDS[name].provider != "cpu" and KINDS[name].missing() is None for name in wanted):
        wanted.add(PYTORCH_EAGER_CUDA)
    everything = wanted >= KINDS.keys()
    present, absent = [], []
    for kind in KINDS.values():
        if kind.serves != "all" and kind.serves not in models:
            if kind.name in wanted and not everything:
                absent.append(Absent(kind.name, NOT_SERVED[kind.serves]))
            continue
        reason = kind.missing()
        if reason is None and kind.name not in wanted:
            reason = f"not asked for: --engine {kind.name}"
        if reason is None:
            present.append(kind)
        else:
            absent.append(Absent(kind.name, reason))
    return Selection(tuple(present), tuple(absent))


def whole_k(job: ExportJob) -> dict[str, int]:
    """Returns each layer's k of a job that has one."""
    return {layer: k for layer, k in job.k.items() if k is not None}


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
    """Cases of one model that are timed together, in turn, at one batch size."""

    cases: tuple[Case, ...]
    batch: int
    protocol: timing.Protocol
    phase: Phase | None = None

    @property
    def model(self) -> str:
        """The model that is measured."""
        return self.cases[0].model

    @property
    def title(self) -> str:
        """What is timed: `olmoe, batch 1, decode`."""
        phase = "" if self.phase is None else f", {self.phase.name}"
        return f"{self.model}, batch {self.batch}{phase}"

    @property
    def keys(self) -> dict[str, Any]:
        """What tells it from the other groups of a benchmark."""
        phase = {} if self.phase is None else {"phase": self.phase.name}
        return {"model": self.model, "batch": self.batch, **phase}

    def seconds(self, call_ms: float) -> float:
        """How long it takes with calls of so many milliseconds: more than `round_s` if need be."""
        round_s = max(self.protocol.round_s, self.protocol.inputs * call_ms / 1e3)
        return len(self.cases) * self.protocol.rounds * (round_s + timing.WAIT_S)


def plan(candidates: Sequence[Candidate], request: BenchRequest) -> tuple[TimingGroup, ...]:
    """Returns the groups of a benchmark: one per model and batch size.

    Raises UsageError for a k that a model does not have, for no models, or two of one name.
    """
    if not candidates:
        raise UsageError("no model to measure")
    names = [candidate.name for candidate in candidates]
    if len(set(names)) < len(names):
        raise UsageError(
            f"two models have the same name: {', '.join(names)}",
            hint="rename one of the files or folders: results are told apart by it",
        )
    for candidate in candidates:
        for k in (*candidate.ks, *(graph.k for graph in candidate.graphs)):
            if not 1 <= k <= candidate.experts:
                raise UsageError(
                    f"k = {k}, and {candidate.name} has {candidate.experts} experts",
                    hint=f"use 1 ≤ k ≤ {candidate.experts}",
                )
    return tuple(
        TimingGroup(
            cases=tuple(
                case
                for case, graph in candidate.cases.items()
                if graph is None or graph.batches is None or batch in graph.batches
            ),
            batch=batch,
            protocol=request.protocol,
            phase=phase,
        )
        for candidate in candidates
        for phase in candidate.phases or (None,)
        for batch in request.batches
        if candidate.only_batch in (None, batch)
    )


def describe(groups: Sequence[TimingGroup], takes: str = "") -> str:
    """Returns the plan in words, with the time that it `takes`."""
    rows = sum(len(group.cases) for group in groups)
    least = math.ceil(sum(group.seconds(0.0) for group in groups))
    lines = [f"{rows} rows; {takes or f'the timing takes at least {least} s'}"]
    for group in groups:
        first = group.cases[0]
        kinds: dict[str, list[str]] = {}
        for c in group.cases:
            kinds.setdefault(c.runs_in, []).append(str(c.k))
        listed = "; ".join(f"{name} k={','.join(ks)}" for name, ks in kinds.items())
        sizes = group.title.removeprefix(first.model)
        lines.append(f"  {first.model}, n={first.experts}{sizes}: {listed}")
    return "\n".join(lines)
