"""The plan of a benchmark as frozen data: models, cases, batch sizes and durations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..calibration.table import CalibrationTable
from ..common import timing
from ..errors import UsageError
from ..exporter.bundle.manifest import Dimension
from ..exporter.bundle.parity import Tolerance
from ..exporter.job import ExportJob
from ..exporter.model import Model
from ..graphs.layers.base import MoESpec, moe_layers
from ..graphs.layers.mumoe import MuMoESpec
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
from .results import Absent, BundleInfo, PhaseName
from .runners.base import Loader
from .runners.pytorch import has_stacked_form


@dataclass(frozen=True, slots=True)
class IntegerLinear:
    """An integer product y = x·W of the backbone: x [*rows, in], W [in, out].

    The first of `rows` is the batch; `rows` is None if the graph does not determine them.
    """

    node: str
    rows: tuple[Dimension, ...] | None
    weights: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Phase:
    """A call of a language model: `tokens` new tokens of each input, after `past` cached ones."""

    name: PhaseName
    tokens: int
    past: int = 0


@dataclass(frozen=True, slots=True)
class GraphSource:
    """An exported graph that has not been opened yet.

    `scope` is what a call's time includes (`results.Row`). `k_by_layer` is set if k differs between
    layers. In an INT8 graph, the layers in `float_layers` still compute in floats, and
    `integer_linears` are the backbone's linear layers in integers. `batches` are the batch sizes at
    which the graph is timed; None means all of them. Another exporter's graph has an empty
    `lowering`. `bounds` limit the error of moexport's graphs; others have none. `bundle`, `apart`
    and `deploy` are fields of its rows (`results.Row`), and `table` has the graph's INT8 ranges.
    """

    k: int
    lowering: str
    loader: Loader
    provider: str = "cpu"
    precision: str = "fp32"
    engine: str = ONNXRUNTIME
    scope: str = "end-to-end"
    k_by_layer: Mapping[str, int] = field(default_factory=dict)
    float_layers: frozenset[str] = frozenset()
    integer_linears: tuple[IntegerLinear, ...] = ()
    batches: frozenset[int] | None = None
    bounds: Tolerance | None = None
    bundle: str | None = None
    apart: bool = False
    deploy: tuple[str, ...] = ()
    table: CalibrationTable | None = None

    @property
    def row_key(self) -> tuple[object, ...]:
        """The key of its rows, without its bundle."""
        return (self.k, self.engine, self.provider, self.precision, self.lowering, self.scope)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to measure, with the graphs that were made from it.

    `ks` are the k of its Algorithm 2 rows in PyTorch; each graph has its own k. `engines` are the
    PyTorch engines to measure, by name (`engines.KINDS`); the unmodified model is always measured.
    `jobs_by_k` has an export job for each k that changes the model: its router then chooses k
    experts, or each level of a hierarchy keeps a share. A language model is timed in `phases`. If
    the graphs run at only one batch size, `only_batch`, everything is measured at that size.

    A candidate may be one `bundle`, or several `bundles` of one model, which are measured together
    but each as it would be alone; `graphs` then has the graphs of all bundles.
    """

    name: str
    model: Model
    ks: tuple[int, ...] = ()
    graphs: tuple[GraphSource, ...] = ()
    renormalize: bool = False
    engines: tuple[str, ...] = (PYTORCH_ALGORITHM_2,)
    jobs_by_k: Mapping[int, ExportJob] = field(default_factory=dict)
    phases: tuple[Phase, ...] = ()
    only_batch: int | None = None
    bundle: BundleInfo | None = None
    bundles: tuple[Candidate, ...] = ()

    def for_case(self, case: Case) -> Candidate:
        """Returns the candidate with a case's model and k: a distinct bundle, or this candidate."""
        return next((each for each in self.distinct_bundles if each.name == case.bundle), self)

    @property
    def distinct_bundles(self) -> tuple[Candidate, ...]:
        """Bundles of edited models, with different k in layers, or with another normalisation."""
        return tuple(each for each in self.bundles if each._differs_from(self))

    @property
    def parts(self) -> tuple[Candidate, ...]:
        """The bundles one by one, or the candidate itself if it has none."""
        return self.bundles or (self,)

    def _differs_from(self, joint: Candidate) -> bool:
        ks = self.k_by_layer(max(self.ks, default=self.experts))
        layers = self.model.layers
        # A layer with fewer experts than k keeps all of them.
        chosen = {k for name, k in ks.items() if k < layers[name].spec.experts}
        uneven = bool(chosen) and chosen != {max(ks.values())}
        return bool(self.model.edits) or uneven or self.renormalize != joint.renormalize

    def by_levels(self, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the experts of each level of a hierarchy, and how many of them k keeps.

        Both are empty without a hierarchy or if layers differ.
        """
        model = self.jobs_by_k[k].model if k in self.jobs_by_k else self.model
        ks = self.k_by_layer(k)
        found = {
            (spec.levels, spec.k_by_level(ks.get(name, k)))
            if isinstance(spec := layer.spec, MuMoESpec) and len(spec.levels) > 1
            else ((), ())
            for name, layer in model.layers.items()
        }
        return found.pop() if len(found) == 1 else ((), ())

    @property
    def trained_k(self) -> int:
        """The k of the unmodified model: all experts, unless its router was trained to choose."""
        return max(spec.trained_k for spec in self._as_trained)

    @property
    def experts(self) -> int:
        """The largest n of its MoE layers: with k = n every layer keeps every expert."""
        return max(layer.spec.experts for layer in self.model.layers.values())

    @property
    def _as_trained(self) -> list[MoESpec]:
        """The specs of the unmodified model's layers, including experts that were dropped later."""
        layers = moe_layers(self.model.original) if self.model.original is not None else {}
        return [layer.spec for layer in (layers or self.model.layers).values()]

    @property
    def weights_bytes(self) -> int:
        return sum(p.nbytes for p in self.model.module.parameters())

    @property
    def cases(self) -> dict[Case, GraphSource | None]:
        """The cases to measure, with their graphs: the unmodified PyTorch model first.

        Algorithm 2 is a loop over a layer's experts. It has no row for k = n, which is the model
        itself, nor for layers that do not choose sets of experts. Raises UsageError for two graphs
        with identical rows.
        """
        distinct = {bundle.name: bundle for bundle in self.distinct_bundles}
        cases: dict[Case, GraphSource | None] = {}
        for kind in KINDS.values():
            if isinstance(kind, ModelEngine) and kind.name in (PYTORCH_EAGER, *self.engines):
                cases |= dict.fromkeys(self._cases_of(kind))
                for name, bundle in distinct.items() if not kind.untouched else ():
                    for case in bundle._cases_of(kind):
                        cases[replace(case, model=self.name, bundle=name, apart=True)] = None
        for graph in self.graphs:
            case = Case(
                model=self.name,
                engine=graph.engine,
                k=graph.k,
                experts=distinct.get(graph.bundle or "", self).experts,
                provider=graph.provider,
                precision=graph.precision,
                lowering=graph.lowering or None,
                scope=graph.scope,
                bundle=graph.bundle,
                apart=graph.apart,
            )
            if case in cases:
                raise UsageError(
                    f"two graphs would have the same rows: {case.label}",
                    hint="give each graph once, or give the two models different names",
                )
            cases[case] = graph
        return cases

    def k_by_layer(self, k: int) -> dict[str, int]:
        """Returns each layer's k if the largest is `k`; empty if it is the same in all layers."""
        if k in self.jobs_by_k:
            return constant_k(self.jobs_by_k[k])
        distinct = {bundle.name for bundle in self.distinct_bundles}
        graphs = (graph for graph in self.graphs if graph.bundle not in distinct)
        return next((dict(graph.k_by_layer) for graph in graphs if graph.k == k), {})

    def _cases_of(self, kind: ModelEngine) -> list[Case]:
        n, ks = self.experts, self.ks
        if kind.algorithm_2:
            loops = any(layer.spec.chooses_sets for layer in self.model.layers.values())
            ks = tuple(k for k in ks if loops and k < n)
        elif kind.experts_form is not None:
            form = self.model.host.experts_form(self.model)
            left_out = self.trained_k if form == kind.experts_form else None
            ks = tuple(k for k in self.jobs_by_k if form and k != left_out)
        elif kind.stacked:
            all_soft = all(layer.spec.kind == "soft-moe" for layer in self.model.layers.values())
            informative = kind.provider != "cpu" or has_stacked_form(self.model)
            n = max(spec.experts for spec in self._as_trained)
            ks = (self.trained_k,) if all_soft and informative else ()
        else:
            n, ks = max(spec.experts for spec in self._as_trained), (self.trained_k,)
        case = Case(self.name, kind.engine, k=n, experts=n, provider=kind.provider)
        only_fp32 = kind.provider == "cpu" or not (kind.untouched or kind.stacked)
        # On a GPU, PyTorch also computes in FP16 if graphs there do.
        on_gpu = {graph.precision for graph in self.graphs if graph.provider != "cpu"}
        precisions = ("fp32",) if only_fp32 else ("fp32", *({"fp16"} & on_gpu))
        return [replace(case, k=k, precision=precision) for k in ks for precision in precisions]


NOT_SERVED: dict[Serves, str] = {
    "one-input": "it only runs models with one input, but these models have several",
    "transformers": "it only runs models from Hugging Face Transformers",
}


@dataclass(frozen=True, slots=True)
class EngineSelection:
    """The engines to measure, and the requested or known ones that are unavailable."""

    present: tuple[EngineKind, ...]
    absent: tuple[Absent, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The engines to measure, by their names in `--engine`."""
        return tuple(kind.name for kind in self.present)


def select_engines(
    names: Iterable[str], models: Sequence[Serves] = ("one-input", "transformers")
) -> EngineSelection:
    """Returns which of the named engines can run here, and why other known ones are left out.

    `models` describe the models to measure; engines for other models are only mentioned if they
    were named. The unmodified model is always measured on the CPU, and on the GPU if any other
    engine runs there.
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
            reason = f"not requested: --engine {kind.name}"
        if reason is None:
            present.append(kind)
        else:
            absent.append(Absent(kind.name, reason))
    return EngineSelection(tuple(present), tuple(absent))


def has_token_routed_layer(model: Model) -> bool:
    """Returns whether a model has token-routed experts, whose router is a separate module."""
    return any(layer.spec.flat for layer in model.layers.values())


def constant_k(job: ExportJob) -> dict[str, int]:
    """Returns a job's k by layer, for the layers that have one."""
    return {layer: k for layer, k in job.k.items() if k is not None}


@dataclass(frozen=True, slots=True)
class Case:
    """One engine with one k of one model, as plain data; it has a row per batch size.

    `bundle` and `apart` are those of its rows.
    """

    model: str
    engine: str
    k: int
    experts: int
    provider: str = "cpu"
    precision: str = "fp32"
    lowering: str | None = None
    scope: str = "end-to-end"
    bundle: str | None = None
    apart: bool = False

    @property
    def label(self) -> str:
        """A short unique name: `digits: onnxruntime grouped fp32 k=4/16`."""
        return f"{self.model}: {self.runs_in} k={self.k}/{self.experts}"

    @property
    def runs_in(self) -> str:
        """The engine, with the lowering and precision of a graph: `onnxruntime grouped fp32`.

        It includes the bundle if there are several.
        """
        words = [self.engine]
        if self.lowering is not None:
            words += [self.lowering, self.precision]
        elif self.precision != "fp32":
            words.append(self.precision)
        if self.provider not in ("cpu", self.engine):
            words.append(self.provider)
        if self.bundle not in (None, self.model):
            words.append(f"({self.bundle})")
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
        return self.cases[0].model

    @property
    def title(self) -> str:
        """The model, batch and phase: `olmoe, batch 1, decode`."""
        phase = "" if self.phase is None else f", {self.phase.name}"
        return f"{self.model}, batch {self.batch}{phase}"

    @property
    def keys(self) -> dict[str, Any]:
        """The fields that identify the group in a benchmark."""
        phase = {} if self.phase is None else {"phase": self.phase.name}
        return {"model": self.model, "batch": self.batch, **phase}

    def seconds(self, call_ms: float) -> float:
        """Returns the expected duration; a round of slow calls is longer than `round_s`."""
        round_s = max(self.protocol.round_s, self.protocol.inputs * call_ms / 1e3)
        return len(self.cases) * self.protocol.rounds * (round_s + timing.WAIT_S)


def plan(candidates: Sequence[Candidate], request: BenchRequest) -> tuple[TimingGroup, ...]:
    """Returns the groups of a benchmark: one per model and batch size.

    Raises UsageError for a k that a model does not have, equal names, or no models.
    """
    if not candidates:
        raise UsageError("no model to measure")
    names = [candidate.name for candidate in candidates]
    if len(set(names)) < len(names):
        raise UsageError(
            f"two models have the same name: {', '.join(names)}",
            hint="rename one of the files or folders: the name identifies the results",
        )
    for candidate in candidates:
        for k in (*candidate.ks, *(graph.k for graph in candidate.graphs)):
            if not 1 <= k <= candidate.experts:
                raise UsageError(
                    f"k = {k}, but {candidate.name} has {candidate.experts} experts",
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


def describe(groups: Sequence[TimingGroup], duration: str = "") -> str:
    """Returns the plan as text, with the `duration` or, if that is empty, the minimum time."""
    rows = sum(len(group.cases) for group in groups)
    minimum_s = math.ceil(sum(group.seconds(0.0) for group in groups))
    duration = duration or f"the timing takes at least {minimum_s} s"
    lines = [f"{rows} row{'' if rows == 1 else 's'}; {duration}"]
    for group in groups:
        first = group.cases[0]
        kinds: dict[str, list[str]] = {}
        for c in group.cases:
            kinds.setdefault(c.runs_in, []).append(str(c.k))
        listed = "; ".join(f"{name} k={','.join(ks)}" for name, ks in kinds.items())
        sizes = group.title.removeprefix(first.model)
        lines.append(f"  {first.model}, n={first.experts}{sizes}: {listed}")
    return "\n".join(lines)
