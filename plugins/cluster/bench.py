"""Runs a benchmark on a Ray cluster as tasks; each timed task has a node to itself.

Accuracy, routing and parity are measured in shards of the data, one task per shard. The sums of the
batches are added in the order of the data, so the result is bit-identical to that of one machine.
Then each batch size of each model is timed on one node: all ks, precisions and engines take turns
with the untouched model, so that no ratio compares times of two machines. Ray places the tasks and
runs those of a lost node again.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import msgspec

from ...bench.evaluate import EvaluationState, evaluate_share
from ...bench.journal import FILE, Journal
from ...bench.plan import Case
from ...bench.prepare import open_sources, prepared
from ...bench.request import BenchRequest
from ...bench.results import Results
from ...bench.run import study_findings, sweep
from ...bench.runners.base import Runner
from ...bench.runners.models import loaders
from ...bench.runners.pytorch import CUDA, without_tf32
from ...bench.studies import check_studies, requested_studies
from ...common.console import Silent
from ...common.environment import PACKAGES, versions
from ...common.locations import state_of
from ...common.threads import with_threads
from ...common.writing import exclusive_folder
from ...data.shards import shards_of
from ...data.user_code import names_code
from ...errors import UsageError, one_line
from ...exporter.bundle.bundle import Bundle
from ...exporter.bundle.manifest import is_bundle
from ...exporter.model import Model
from .paths import paths_in
from .ray import Cluster, NodeKind, Task, connected, kinds_of

BatchStates = dict[str, dict[int, EvaluationState]]
"""For each candidate, by name: the sums of each batch, by number."""


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """A model and its bundles, with the options of the benchmark."""

    models: tuple[str, ...]
    request: BenchRequest


def sweep_on_ray(
    models: Sequence[str],
    request: BenchRequest,
    *,
    address: str,
    on: Sequence[str],
    keep: Callable[[str, Results], None] = lambda kind, results: None,
) -> dict[str, Results]:
    """Returns the results of each kind of node; calls `keep` when a kind is complete.

    If the request has a folder `out`, the results of finished tasks stay there until the whole run
    is complete; a repeated run skips these tasks. Raises `UsageError` for a request that other
    machines cannot run, and `ClusterError` if the cluster cannot be reached, lacks a requested
    resource, or repeatedly loses the nodes of a task; `keep` was called for complete kinds.
    """
    watcher = request.progress or Silent()
    out = request.folder
    request = replace(request, progress=None, out=None, before=None)
    groups = [ModelGroup(names, request) for names in _by_model(models)]
    _check(groups)
    measured = {}
    with exclusive_folder(out), connected(address, watcher) as cluster:
        kinds = kinds_of(cluster.ray.nodes(), on)
        watcher.step(_described(kinds, groups))
        journal = Journal(None if out is None else out / FILE, _identity(groups))
        if journal.summary:
            watcher.step(journal.summary)
        for kind in kinds:
            results = _Sweep(cluster, kind, groups, journal).results()
            if results is not None:
                measured[kind.name] = results
                keep(kind.name, results)
    cluster.check_lost("measured")
    journal.remove()
    return measured


def merged(parts: Sequence[tuple[str, Results]], command: str) -> Results:
    """Returns the results of several nodes as one.

    Each row names its node, and the protocol describes the nodes' machines. Rows are in the order
    of a run on one machine: by model, phase and batch size.
    """
    (_, first), *_ = parts
    models = tuple(dict.fromkeys(model for _, part in parts for model in part.models))
    rows = [replace(row, node=node) for node, part in parts for row in part.rows]
    names, phases = [m.name for m in models], list(dict.fromkeys(row.phase for row in rows))
    rows.sort(key=lambda row: (names.index(row.model), phases.index(row.phase)))
    protocol = dict(first.protocol)
    for _, part in parts[1:]:
        for name, value in part.protocol.items():
            if isinstance(value, list):
                protocol[name] = [*protocol.get(name, ()), *value]
            elif name == "samples":
                protocol[name] = max(protocol[name], value)
    protocol["batches"] = sorted({row.batch for row in rows})
    machines = {node: part.environment for node, part in parts}
    protocol["nodes"] = [{"node": node, "environment": e} for node, e in machines.items()]
    return replace(first, models=models, rows=tuple(rows), protocol=protocol, command=command)


# --- runs on this machine ------------------------------------------------------------------------


def _by_model(models: Sequence[str]) -> list[tuple[str, ...]]:
    """Groups each model with the bundles that follow it."""
    groups: list[list[str]] = []
    for model in models:
        after_model = groups and not is_bundle(groups[-1][0])
        if is_bundle(model) and after_model:
            groups[-1].append(model)
        else:
            groups.append([model])
    return [tuple(group) for group in groups]


def _identity(groups: Sequence[ModelGroup]) -> dict[str, Any]:
    """Returns what the results depend on; a journal with another identity is not used."""
    request = groups[0].request
    data = request.data if isinstance(request.data, str | Path) else None
    files = () if data is None else shards_of(data) or (data,)
    return {
        "run": "on Ray",
        "models": [(model, state_of(model)) for group in groups for model in group.models],
        "data": [(str(file), state_of(file)) for file in files],
        "settings": request.measured,
        "loading": [(str(v), state_of(v)) for v in paths_in(request)],
        "packages": versions(PACKAGES),
    }


def _check(groups: Sequence[ModelGroup]) -> None:
    request = groups[0].request
    check_studies(request)
    for study in requested_studies(request):
        if not study.on_nodes:
            raise UsageError(
                f"--ray: the study '{study.name}' is measured on one machine",
                hint="omit --ray, or the options that request the study",
            )
    if request.data is not None and not isinstance(request.data, str | Path):
        raise UsageError("data in memory: nodes read data from a path, URL or package.module:name")
    listed = [model for group in groups for model in group.models]
    names = [model if names_code(model) else Path(model).stem for model in listed]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two models have the same name: {name}",
                hint="rename one of the files or folders: the name identifies the results",
            )


def _described(kinds: Sequence[NodeKind], groups: Sequence[ModelGroup]) -> str:
    def counted(number: int, what: str) -> str:
        return f"{number} {what}{'' if number == 1 else 's'}"

    nodes = ", ".join(f"{counted(kind.nodes, 'node')} with {kind.name}" for kind in kinds)
    sizes = counted(len(groups[0].request.batches), "batch size")
    return f"{counted(len(groups), 'model')} at {sizes} on {nodes}"


@dataclass
class _Sweep:
    """Runs the tasks for one kind of node, except those that an earlier run finished."""

    cluster: Cluster
    kind: NodeKind
    groups: Sequence[ModelGroup]
    journal: Journal
    pieces: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    def results(self) -> Results | None:
        """Returns the merged results, or None if nothing could be timed."""
        for name in ("accuracy", "analyses", "timed"):
            for piece in self.journal.pieces(name, on=self.kind.name):
                self.pieces[name, piece["model"], piece["part"]] = piece
        evaluations = self._evaluated()
        analyses = self._analyses()
        evaluated = [group for group in self.groups if group.models in evaluations]
        timing = [(group, batch) for group in evaluated for batch in group.request.batches]
        timed = self._done(
            "timed",
            {
                (group.models[0], batch): Task(
                    f"{group.models[0]}, batch {batch}",
                    time_group,
                    (group, batch, evaluations[group.models]),
                )
                for group, batch in timing
            },
        )
        keys = ((group.models[0], batch) for group, batch in timing)
        parts = [msgspec.convert(timed[key], tuple[str, Results]) for key in keys if key in timed]
        if not parts:
            return None
        return replace(merged(parts, self.groups[0].request.command), analyses=analyses)

    def _evaluated(self) -> dict[tuple[str, ...], dict[str, EvaluationState]]:
        """Returns the sums of the candidates of each model whose shards are all complete."""
        # The number of shards is that of the interrupted run, even if the number of nodes changed.
        # A new run has one shard per node, since each shard loads and exports its model.
        finished = [str(part) for name, _, part in self.pieces if name == "accuracy"]
        nodes_per_model = math.ceil(self.kind.nodes / len(self.groups))
        shards = int(finished[0].partition("/")[2]) if finished else nodes_per_model
        names = [f"{index + 1}/{shards}" for index in range(shards)]
        sums = self._done(
            "accuracy",
            {
                (group.models[0], name): Task(
                    f"{group.models[0]}, accuracy, shard {name}",
                    evaluate_group,
                    (group, (index, shards)),
                )
                for group in self.groups
                for index, name in enumerate(names)
            },
        )
        evaluations = {}
        for group in self.groups:
            keys = [(group.models[0], name) for name in names]
            if all(key in sums for key in keys):
                parts = [msgspec.convert(sums[key], BatchStates, strict=False) for key in keys]
                evaluations[group.models] = _joined(parts)
        return evaluations

    def _analyses(self) -> dict[str, Any]:
        """Returns the results of the requested studies, in the order of the models."""
        request = self.groups[0].request
        if not requested_studies(request):
            return {}
        tasks = {
            (group.models[0], None): Task(f"{group.models[0]}, analyses", analyse_group, (group,))
            for group in self.groups
        }
        analyses, joined = self._done("analyses", tasks), dict[str, Any]()
        for group in self.groups:
            for name, listed in analyses.get((group.models[0], None), {}).items():
                joined[name] = [*joined.get(name, ()), *listed]
        return joined

    def _done(self, name: str, tasks: Mapping[tuple[str, Any], Task]) -> dict[tuple[str, Any], Any]:
        """Runs unfinished tasks; returns the results of all but lost tasks, by model and part."""
        done = {
            key: self.pieces[name, *key]["found"] for key in tasks if (name, *key) in self.pieces
        }
        remaining = [key for key in tasks if key not in done]
        for number, result in self.cluster.completed(self.kind, [tasks[key] for key in remaining]):
            model, part = remaining[number]
            done[model, part] = result
            self.journal.add(name, on=self.kind.name, model=model, part=part, found=result)
        return done


def _joined(shards: Sequence[BatchStates]) -> dict[str, EvaluationState]:
    """Adds the sums of each candidate over all batches, in the order of the data."""
    batches: BatchStates = {}
    for shard in shards:
        for name, states in shard.items():
            batches.setdefault(name, {}).update(states)
    return {
        name: reduce(add, (states[number] for number in sorted(states)), EvaluationState())
        for name, states in batches.items()
    }


# --- runs on the nodes and returns plain data, which the journal can store ------------------------


def evaluate_group(group: ModelGroup, share: tuple[int, int]) -> dict[str, Any]:
    """Returns, for every candidate, the sums of each batch in a share, by batch number."""
    sums: BatchStates = {}
    with prepared(_opened(group), _plain(group.request)) as plan:
        request = plan.request
        for candidate in plan.candidates:
            opening = loaders(candidate, request.batches)
            on_gpu = any(case.provider == CUDA for case in opening)
            runners: dict[Case, Runner] = {}
            failures: dict[str, str] = {}
            with ExitStack() as stack:
                # as `bench` does on one machine
                stack.enter_context(with_threads(request.threads))
                stack.enter_context(without_tf32() if on_gpu else nullcontext())
                for case, loader in opening.items():
                    try:
                        runners[case] = stack.enter_context(loader())
                    except Exception as error:  # noqa: BLE001  the row reports it
                        failures[case.label] = one_line(error)
                states = evaluate_share(
                    runners,
                    candidate,
                    plan.data,
                    request.evaluation_batch,
                    limit=request.samples,
                    share=share,
                )
            sums[candidate.name] = {
                number: replace(state, failures=failures | state.failures)
                for number, state in states.items()
            }
    return {
        name: {number: asdict(state) for number, state in states.items()}
        for name, states in sums.items()
    }


def analyse_group(group: ModelGroup) -> dict[str, Any]:
    """Returns the results of the requested studies of a model and its bundles."""
    return study_findings(_opened(group), group.request)


def time_group(
    group: ModelGroup, batch: int, earlier: Mapping[str, EvaluationState]
) -> tuple[str, dict[str, Any]]:
    """Returns the node and the results of one batch size; `earlier` has the evaluations."""
    import ray

    node = f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:8]}"
    results = sweep(_opened(group), _plain(group.request), only=batch, earlier_evaluations=earlier)
    return node, asdict(results)


def _plain(request: BenchRequest) -> BenchRequest:
    """Removes the options of plugins, because studies are separate tasks."""
    return replace(request, further=())


def _opened(group: ModelGroup) -> list[Model | Bundle]:
    return open_sources(group.models, group.request)
