"""Runs a benchmark on a Ray cluster as tasks; each timed task has a node to itself.

Accuracy, routing and parity are measured in shards of the data, one task per shard. The sums of the
batches are added in the order of the data, so the result is bit-identical to that of one machine.
Then each batch size of each model is timed on one node: all ks, precisions and engines take turns
with the untouched model, so that no ratio compares times of two machines. Ray places the tasks, and
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
"""The sums of each batch, by its number, for each candidate, by its name."""


@dataclass(frozen=True, slots=True)
class Cells:
    """A model with its bundles, and the options of the benchmark."""

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
    is complete, and a repeated run skips these tasks. Raises `UsageError` for a request that other
    machines cannot run, and `ClusterError` if the cluster cannot be reached, lacks a requested
    resource, or repeatedly loses the nodes of a task; kinds passed to `keep` by then are complete.
    """
    watcher = request.progress or Silent()
    out = request.folder
    request = replace(request, progress=None, out=None, before=None)
    cells = [Cells(group, request) for group in _by_model(models)]
    _check(cells)
    measured = {}
    with exclusive_folder(out), connected(address, watcher) as cluster:
        kinds = kinds_of(cluster.ray.nodes(), on)
        watcher.step(_described(kinds, cells))
        journal = Journal(None if out is None else out / FILE, _identity(cells))
        if journal.summary:
            watcher.step(journal.summary)
        for kind in kinds:
            results = _Sweep(cluster, kind, cells, journal).results()
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
    """Each model with the bundles that follow it."""
    groups: list[list[str]] = []
    for model in models:
        after_model = groups and not is_bundle(groups[-1][0])
        if is_bundle(model) and after_model:
            groups[-1].append(model)
        else:
            groups.append([model])
    return [tuple(group) for group in groups]


def _identity(cells: Sequence[Cells]) -> dict[str, Any]:
    """The inputs that the numbers depend on; tasks finished with other inputs are not used."""
    request = cells[0].request
    data = request.data if isinstance(request.data, str | Path) else None
    files = () if data is None else shards_of(data) or (data,)
    return {
        "run": "on Ray",
        "models": [(model, state_of(model)) for cell in cells for model in cell.models],
        "data": [(str(file), state_of(file)) for file in files],
        "settings": request.measured,
        "loading": [(str(v), state_of(v)) for v in paths_in(request)],
        "packages": versions(PACKAGES),
    }


def _check(cells: Sequence[Cells]) -> None:
    request = cells[0].request
    check_studies(request)
    for study in requested_studies(request):
        if not study.on_nodes:
            raise UsageError(
                f"--ray: the study '{study.name}' is measured on one machine",
                hint="omit --ray, or the options that request the study",
            )
    if request.data is not None and not isinstance(request.data, str | Path):
        raise UsageError("data in memory: nodes read data by a path, URL or package.module:name")
    listed = [model for cell in cells for model in cell.models]
    names = [model if names_code(model) else Path(model).stem for model in listed]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two models have the same name: {name}",
                hint="rename one of the files or folders: the name identifies the results",
            )


def _described(kinds: Sequence[NodeKind], cells: Sequence[Cells]) -> str:
    def counted(number: int, what: str) -> str:
        return f"{number} {what}{'' if number == 1 else 's'}"

    nodes = ", ".join(f"{counted(kind.nodes, 'node')} with {kind.name}" for kind in kinds)
    sizes = counted(len(cells[0].request.batches), "batch size")
    return f"{counted(len(cells), 'model')} at {sizes} on {nodes}"


@dataclass
class _Sweep:
    """The tasks of one kind of node; tasks that an earlier run finished are not repeated."""

    cluster: Cluster
    kind: NodeKind
    cells: Sequence[Cells]
    journal: Journal
    pieces: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    def results(self) -> Results | None:
        """Returns all results as one, or None if nothing could be timed."""
        for name in ("accuracy", "analyses", "timed"):
            for piece in self.journal.pieces(name, on=self.kind.name):
                self.pieces[name, piece["model"], piece["part"]] = piece
        known = self._evaluated()
        analyses = self._analyses()
        timing = [
            (cell, b) for cell in self.cells for b in cell.request.batches if cell.models in known
        ]
        timed = self._done(
            "timed",
            {
                (cell.models[0], batch): Task(
                    f"{cell.models[0]}, batch {batch}",
                    time_cells,
                    (cell, batch, known[cell.models]),
                )
                for cell, batch in timing
            },
        )
        keys = ((cell.models[0], batch) for cell, batch in timing)
        parts = [msgspec.convert(timed[key], tuple[str, Results]) for key in keys if key in timed]
        if not parts:
            return None
        return replace(merged(parts, self.cells[0].request.command), analyses=analyses)

    def _evaluated(self) -> dict[tuple[str, ...], dict[str, EvaluationState]]:
        """Returns the qualities of the candidates of each model whose shards are complete."""
        # The number of shards is that of the interrupted run, even if the number of nodes changed.
        # A new run has one shard per node, since each node loads and exports its model.
        finished = [str(part) for name, _, part in self.pieces if name == "accuracy"]
        nodes_per_model = math.ceil(self.kind.nodes / len(self.cells))
        shards = int(finished[0].partition("/")[2]) if finished else nodes_per_model
        names = [f"{index + 1}/{shards}" for index in range(shards)]
        sums = self._done(
            "accuracy",
            {
                (cell.models[0], name): Task(
                    f"{cell.models[0]}, accuracy, shard {name}",
                    evaluate_cells,
                    (cell, (index, shards)),
                )
                for cell in self.cells
                for index, name in enumerate(names)
            },
        )
        known = {}
        for cell in self.cells:
            keys = [(cell.models[0], name) for name in names]
            if all(key in sums for key in keys):
                parts = [msgspec.convert(sums[key], BatchStates, strict=False) for key in keys]
                known[cell.models] = _joined(parts)
        return known

    def _analyses(self) -> dict[str, Any]:
        """Returns the studies of experts and subgroups, in the order of the models."""
        request = self.cells[0].request
        if not requested_studies(request):
            return {}
        tasks = {
            (cell.models[0], None): Task(f"{cell.models[0]}, analyses", analyse_cells, (cell,))
            for cell in self.cells
        }
        analyses, joined = self._done("analyses", tasks), dict[str, Any]()
        for cell in self.cells:
            for name, listed in analyses.get((cell.models[0], None), {}).items():
                joined[name] = [*joined.get(name, ()), *listed]
        return joined

    def _done(
        self,
        name: str,
        tasks: Mapping[tuple[str, Any], Task],
    ) -> dict[tuple[str, Any], Any]:
        """Returns the results of all but lost tasks as plain data, by model and part."""
        done = {
            key: self.pieces[name, *key]["found"] for key in tasks if (name, *key) in self.pieces
        }
        left = [key for key in tasks if key not in done]
        for number, result in self.cluster.finished(self.kind, [tasks[key] for key in left]):
            model, part = left[number]
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


# --- runs on the nodes; returns plain data, which the journal can store --------------------------


def evaluate_cells(cells: Cells, share: tuple[int, int]) -> dict[str, Any]:
    """Returns the sums of each batch in a share, by its number, for every candidate."""
    sums: BatchStates = {}
    with prepared(_opened(cells), _plain(cells.request)) as plan:
        request = plan.request
        for candidate in plan.candidates:
            opening = loaders(candidate, request.batches)
            on_gpu = any(case.provider == CUDA for case in opening)
            runners: dict[Case, Runner] = {}
            failures: dict[str, str] = {}
            with ExitStack() as stack:
                # as in `bench` on one machine
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


def analyse_cells(cells: Cells) -> dict[str, Any]:
    """Returns the studies of the experts of a model and its bundles, and of subgroups."""
    return study_findings(_opened(cells), cells.request)


def time_cells(
    cells: Cells, batch: int, known: Mapping[str, EvaluationState]
) -> tuple[str, dict[str, Any]]:
    """Returns the node and the results of one batch size; `known` has the qualities."""
    import ray

    node = f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:8]}"
    return node, asdict(sweep(_opened(cells), _plain(cells.request), only=batch, known=known))


def _plain(request: BenchRequest) -> BenchRequest:
    """Removes the options of plugins, because studies are separate tasks."""
    return replace(request, further=())


def _opened(cells: Cells) -> list[Model | Bundle]:
    return open_sources(cells.models, cells.request)
