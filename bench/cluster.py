"""A benchmark on a Ray cluster: its cells as tasks, each timed alone on a node of its kind.

Accuracy, routing and parity are taken in shards of the data, a task each, whose sums of every batch
are added in the order of the data: what comes out is what one machine finds, to the last bit. Then
every batch size of every model is timed on one node, with all its k, precisions and engines in turn
beside the untouched model, so that a ratio never has times of two machines in it. Ray places the
tasks, and runs those of a lost node again.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from ..common.console import Progress, Silent
from ..common.timing import in_one_line
from ..common.user_code import names_code
from ..errors import ClusterError, MissingExtraError, MoexportError, UsageError
from ..exporter.bundle.bundle import Bundle
from ..exporter.bundle.manifest import is_bundle
from ..exporter.model import Model
from .evaluate import EvaluationState, evaluate_share
from .plan import Case
from .results import Results
from .run import BenchRequest, opened, prepared, sweep
from .runners.base import Runner
from .runners.pytorch import loaders

RETRIES = 2
"""How often the task of a lost node is run again."""

GRACE_S = 60.0
"""How long a task waits for a node of its kind where there is none left."""

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes that have a resource; `claim` is what a task takes of a node, so that it is alone."""

    name: str
    nodes: int
    claim: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cells:
    """A model and the bundles beside it, with the benchmark that is asked of them."""

    models: tuple[str, ...]
    asked: BenchRequest
    loading: Mapping[str, Any]


def sweep_on_ray(
    models: Sequence[str],
    asked: BenchRequest,
    loading: Mapping[str, Any],
    *,
    address: str,
    on: Sequence[str],
    keep: Callable[[str, Results], None] = lambda kind, results: None,
) -> dict[str, Results]:
    """Returns the results of each kind of node; `keep` gets those of a kind when it is complete.

    Raises `UsageError` for what other machines cannot do, and `ClusterError` where the cluster
    cannot be reached, lacks a resource that is asked for, or loses a task's nodes again and again;
    what was measured by then went to `keep`.
    """
    watcher = asked.progress or Silent()
    asked = replace(asked, progress=None, out=None, before=None)
    cells = [Cells(each, asked, loading) for each in _by_model(models)]
    _check(cells)
    with _connected(address) as ray:
        kinds = kinds_of(ray.nodes(), on)
        watcher.step(_described(kinds, cells))
        found, lost = {}, []
        for kind in kinds:
            results, missing = _measured_on(ray, kind, cells, watcher)
            lost += missing
            if results is not None:
                found[kind.name] = results
                keep(kind.name, results)
    if lost:
        raise ClusterError(
            f"not measured: {'; '.join(lost)}",
            hint="look at the nodes' logs: a node that dies twice lacks memory, or is taken away",
        )
    return found


def kinds_of(nodes: Sequence[Mapping[str, Any]], on: Sequence[str]) -> list[NodeKind]:
    """Returns the kinds of node that are asked for, by the resources that `ray.nodes()` tells.

    Raises `ClusterError` for a resource that no node has, or that would not keep two timed cells
    apart.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    kinds = []
    for name in on:
        having = [each for each in alive if each.get(name, 0) > 0]
        if not having:
            held = sorted({r for each in alive for r in each if not r.startswith("node:")})
            raise ClusterError(
                f"--on {name}: no node of the cluster has this resource",
                hint=f"its {len(alive)} nodes have {', '.join(held) or 'none'}",
            )
        least, most = (pick(each[name] for each in having) for pick in (min, max))
        if most >= 2 * least:
            raise ClusterError(
                f"--on {name}: nodes have between {least:g} and {most:g} of it, so that two cells "
                "would be timed on one node at once",
                hint="name a resource that tells the nodes apart: --on accelerator_type:L4, or one "
                """of your own (ray start --resources='{"big": 1}')""",
            )
        claim: dict[str, Any] = {
            "num_cpus": min(each.get("CPU", 0) for each in having),
            "num_gpus": min(each.get("GPU", 0) for each in having),
        }
        if name not in ("CPU", "GPU"):
            claim["resources"] = {name: least}
        kinds.append(NodeKind(name, len(having), claim))
    return kinds


def merged(parts: Sequence[tuple[str, Results]], command: str) -> Results:
    """Returns the results of several nodes as one; rows tell their node, the protocol its machine.

    Rows are in the order of a run on one machine: by model, phase and batch size.
    """
    (_, first), *_ = parts
    models = tuple(dict.fromkeys(model for _, each in parts for model in each.models))
    rows = [replace(row, node=node) for node, each in parts for row in each.rows]
    names, phases = [m.name for m in models], list(dict.fromkeys(row.phase for row in rows))
    rows.sort(key=lambda row: (names.index(row.model), phases.index(row.phase)))
    protocol = dict(first.protocol)
    for _, each in parts[1:]:
        for name, value in each.protocol.items():
            if isinstance(value, list):
                protocol[name] = [*protocol.get(name, ()), *value]
            elif name == "samples":
                protocol[name] = max(protocol[name], value)
    protocol["batches"] = sorted({row.batch for row in rows})
    machines = {node: each.environment for node, each in parts}
    protocol["nodes"] = [{"node": node, "environment": e} for node, e in machines.items()]
    return replace(first, models=models, rows=tuple(rows), protocol=protocol, command=command)


# --- what is run here ----------------------------------------------------------------------------


def _by_model(models: Sequence[str]) -> list[tuple[str, ...]]:
    """Each model with the bundles that follow it."""
    found: list[list[str]] = []
    for each in models:
        after_model = found and not is_bundle(found[-1][0])
        if is_bundle(each) and after_model:
            found[-1].append(each)
        else:
            found.append([each])
    return [tuple(each) for each in found]


def _check(cells: Sequence[Cells]) -> None:
    asked = cells[0].asked
    for option, given in (("--analysis", asked.analysis), ("--group-by", asked.group_by)):
        if given:
            raise UsageError(
                f"{option} with --ray: analyses run on one machine", hint=f"leave {option} out"
            )
    if asked.data is not None and not isinstance(asked.data, str | Path):
        raise UsageError("data in memory: nodes read data by a path, URL or package.module:name")
    listed = [each for one in cells for each in one.models]
    names = [each if names_code(each) else Path(each).stem for each in listed]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two models have the same name: {name}",
                hint="rename one of the files or folders: results are told apart by it",
            )


def _described(kinds: Sequence[NodeKind], cells: Sequence[Cells]) -> str:
    sizes = len(cells[0].asked.batch)
    return (
        f"{len(cells)} models at {sizes} batch sizes on "
        f"{', '.join(f'{kind.nodes} nodes with {kind.name}' for kind in kinds)}"
    )


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            "--ray needs Ray, which is not installed", hint='pip install "moexport[ray]"'
        ) from error
    mine = not ray.is_initialized()
    try:
        if mine:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises errors of several kinds, also of its network library
        raise ClusterError(
            f"--ray {address}: no cluster that can be used ({in_one_line(error)})",
            hint="`ray status` tells of the cluster; `ray start --head` starts one here; "
            "--ray auto takes that of this machine, --ray local starts one for this run",
        ) from error
    try:
        yield ray
    finally:
        if mine:
            ray.shutdown()


def _measured_on(
    ray: Any, kind: NodeKind, cells: Sequence[Cells], watcher: Progress
) -> tuple[Results | None, list[str]]:
    """The results of a kind of node, and which cells were lost."""

    def task(function: Callable[..., Any]) -> Callable[..., Any]:
        run: Callable[..., Any] = (
            ray.remote(function).options(**kind.claim, max_retries=RETRIES).remote
        )
        return run

    shares = range(kind.nodes)
    evaluating = {
        task(evaluate_cells)(one, (index, kind.nodes)): (one, f"accuracy, shard {index + 1}")
        for one in cells
        for index in shares
    }
    found: dict[tuple[str, ...], list[dict[str, dict[int, EvaluationState]]]] = {}
    lost: list[str] = []
    for one, _, result in _finished(ray, kind, evaluating, watcher, lost):
        found.setdefault(one.models, []).append(result)
    known = {models: _joined(each) for models, each in found.items() if len(each) == kind.nodes}
    timing = {
        task(time_cells)(one, batch, known[one.models]): (one, f"batch {batch}")
        for one in cells
        for batch in one.asked.batch
        if one.models in known
    }
    parts = {(o.models, w): each for o, w, each in _finished(ray, kind, timing, watcher, lost)}
    ordered = [parts[o.models, w] for o, w in timing.values() if (o.models, w) in parts]
    return (merged(ordered, cells[0].asked.command) if ordered else None), lost


def _joined(
    shards: Sequence[Mapping[str, Mapping[int, EvaluationState]]],
) -> dict[str, EvaluationState]:
    """The sums of each candidate over all batches, added in the order of the data."""
    batches: dict[str, dict[int, EvaluationState]] = {}
    for shard in shards:
        for name, states in shard.items():
            batches.setdefault(name, {}).update(states)
    return {
        name: reduce(add, (states[number] for number in sorted(states)), EvaluationState())
        for name, states in batches.items()
    }


def _finished(
    ray: Any,
    kind: NodeKind,
    tasks: Mapping[Any, tuple[Cells, str]],
    watcher: Progress,
    lost: list[str],
) -> Iterator[tuple[Cells, str, Any]]:
    """Yields what each task found as it ends; tells of those that are lost."""
    pending, waiting_since = list(tasks), None
    while pending:
        ended, pending = ray.wait(pending, timeout=POLL_S)
        present = ended or any(
            node["Alive"] and node["Resources"].get(kind.name, 0) > 0 for node in ray.nodes()
        )
        waiting_since = None if present else waiting_since or time.monotonic()
        if waiting_since is not None and time.monotonic() - waiting_since > GRACE_S:
            for one in pending:
                ray.cancel(one, force=True)
                cells, what = tasks[one]
                lost.append(f"{cells.models[0]}, {what}: no node with {kind.name} is left")
            return
        for one in ended:
            cells, what = tasks[one]
            try:
                result = ray.get(one)
            except ray.exceptions.RayTaskError as error:
                for other in pending:
                    ray.cancel(other, force=True)
                if isinstance(error.cause, MoexportError):
                    raise error.cause from error
                raise ClusterError(
                    f"{cells.models[0]}, {what}: failed on its node ({in_one_line(error.cause)})"
                ) from error
            except ray.exceptions.RayError as error:
                lost.append(f"{cells.models[0]}, {what}: {in_one_line(error)}")
                continue
            watcher.step(f"{kind.name}: {cells.models[0]}, {what}: done, {len(pending)} left")
            yield cells, what, result


# --- what the nodes run --------------------------------------------------------------------------


def evaluate_cells(cells: Cells, share: tuple[int, int]) -> dict[str, dict[int, EvaluationState]]:
    """Returns the sums of a share of the batches, each by its number, for every candidate."""
    found = {}
    with prepared(_opened(cells), cells.asked) as (candidates, data, settings, _):
        for candidate in candidates:
            runners: dict[Case, Runner] = {}
            failures: dict[str, str] = {}
            with ExitStack() as stack:
                for case, loader in loaders(candidate, settings.batches).items():
                    try:
                        runners[case] = stack.enter_context(loader())
                    except Exception as error:  # noqa: BLE001  the row says what failed
                        failures[case.label] = in_one_line(error)
                states = evaluate_share(
                    *(runners, candidate, data, settings.evaluation_batch),
                    limit=settings.samples,
                    share=share,
                )
            found[candidate.name] = {
                number: replace(state, failures=failures | state.failures)
                for number, state in states.items()
            }
    return found


def time_cells(
    cells: Cells, batch: int, known: Mapping[str, EvaluationState]
) -> tuple[str, Results]:
    """Returns the node and the results of one batch size, whose qualities are known."""
    import ray

    node = f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:8]}"
    return node, sweep(_opened(cells), cells.asked, only=batch, known=known)


def _opened(cells: Cells) -> list[Model | Bundle]:
    return opened(cells.models, cells.asked.data, cells.asked.pixels, cells.loading)
