"""Calls functions on the nodes of a Ray cluster; each call has a node to itself.

Ray places the calls and repeats those of a lost node. Functions must be at the top level of a
module, which each node imports from its own moexport, and must accept plain data.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.console import Progress
from ...common.libraries import library
from ...errors import ClusterError, MoexportError, install, one_line

RETRIES = 2
"""The number of times that the task of a lost node is run again."""

GRACE_S = 60.0
"""How long tasks wait for a node of their kind if none is left."""

POLL_S = 1.0

ANSWER_S = 10.0
"""How long to wait for an answer from the cluster's address."""

LOCAL = "local"
"""The address for a new cluster on this machine, which only this user and this run can reach."""

LOOPBACK = "127.0.0.1"

LOCAL_SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on every system: listen on the loopback address
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "",  # replaced by a new token for each run
}
"""Settings that Ray reads on import, for a cluster that nobody else can reach."""

SHORT_FOLDER = "/tmp"

RANDOM_CHARACTERS = 8  # appended to a prefix by `tempfile`

LONGEST_SOCKET_FOLDER = 44
"""The longest folder path, in characters, for which Ray's socket paths stay within 107."""


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes with a resource; a task reserves `claim` on a node so that it runs there alone."""

    name: str
    nodes: int
    claim: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """A call to run on a node; progress and errors show `name`."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass
class Cluster:
    """A connection to a cluster; `lost` describes the tasks that it could not finish."""

    ray: Any
    watcher: Progress
    lost: list[str] = field(default_factory=list)

    def completed(self, kind: NodeKind, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        """Yields the number and the result of each task when it ends.

        Raises the errors of tasks. A task whose nodes are lost repeatedly is added to `lost`.
        """
        ray = self.ray
        # Each function is wrapped once: Ray sends every wrapper to the nodes as a new function.
        functions = {
            function: ray.remote(function).options(**kind.claim, max_retries=RETRIES)
            for function in {task.function for task in tasks}
        }
        started = {
            functions[task.function].remote(*task.arguments): number
            for number, task in enumerate(tasks)
        }
        pending, waiting_since = list(started), None
        try:
            while pending:
                # Collecting all tasks that ended since the last check is faster than one at a time.
                ended, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
                present = ended or any(
                    node["Alive"] and node["Resources"].get(kind.name, 0) > 0
                    for node in ray.nodes()
                )
                waiting_since = None if present else waiting_since or time.monotonic()
                if waiting_since is not None and time.monotonic() - waiting_since > GRACE_S:
                    names = (tasks[started[reference]].name for reference in pending)
                    self.lost += [f"{name}: no node with {kind.name} is left" for name in names]
                    return
                for position, reference in enumerate(ended):
                    number = started[reference]
                    try:
                        result = self._result(reference, tasks[number].name)
                    except ray.exceptions.RayError as error:
                        self.lost.append(f"{tasks[number].name}: {one_line(error)}")
                        continue
                    yield number, result
                    left = len(pending) + len(ended) - position - 1
                    self.watcher.step(f"{kind.name}: {tasks[number].name}: done, {left} left")
        finally:
            for reference in pending:
                ray.cancel(reference, force=True)

    def _result(self, reference: Any, name: str) -> Any:
        """Returns a task's result; raises its error, or Ray's error if its node is lost."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MoexportError):
                raise error.cause from error
            raise ClusterError(f"{name}: failed on its node ({one_line(error.cause)})") from error

    def check_lost(self, what: str) -> None:
        """Raises a `ClusterError` that names the lost tasks, if there are any."""
        if self.lost:
            raise ClusterError(
                f"not {what}: {'; '.join(self.lost)}",
                hint="check the nodes' logs: a lost node probably ran out of memory or was removed",
            )


def kinds_of(nodes: Sequence[Mapping[str, Any]], on: Sequence[str]) -> list[NodeKind]:
    """Returns the requested kinds of node, from the resources in `ray.nodes()`.

    Raises `ClusterError` for a resource that no node has, or whose amounts differ so much that two
    timed tasks could share a node.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    kinds = []
    for name in on:
        matching = [node for node in alive if node.get(name, 0) > 0]
        if not matching:
            resources = sorted({r for node in alive for r in node if not r.startswith("node:")})
            raise ClusterError(
                f"--on {name}: no node of the cluster has this resource",
                hint=f"its {len(alive)} nodes have {', '.join(resources) or 'none'}",
            )
        least, most = (pick(node[name] for node in matching) for pick in (min, max))
        if most >= 2 * least:
            raise ClusterError(
                f"--on {name}: nodes have between {least:g} and {most:g} of this resource, so two "
                "models could be timed on one node at once",
                hint="use a resource of one kind of node, such as accelerator_type:L4 or a custom "
                """resource (ray start --resources='{"big": 1}')""",
            )
        claim: dict[str, Any] = {
            "num_cpus": min(node.get("CPU", 0) for node in matching),
            "num_gpus": min(node.get("GPU", 0) for node in matching),
        }
        if name not in ("CPU", "GPU"):
            claim["resources"] = {name: least}
        kinds.append(NodeKind(name=name, nodes=len(matching), claim=claim))
    return kinds


@contextmanager
def connected(address: str, watcher: Progress) -> Iterator[Cluster]:
    """Yields a connection to a cluster: the existing one if Ray is already connected."""
    if address == LOCAL:
        for name, value in LOCAL_SETTINGS.items():
            os.environ.setdefault(name, value or secrets.token_hex(32))
    ray = library("ray", "--ray needs Ray", install("ray"))
    connects = not ray.is_initialized()
    with ExitStack() as until_the_end:
        try:
            if connects:
                _check_answers(address)
                context: Any = nullcontext({})
                if address == LOCAL:
                    context = _own_cluster(until_the_end.enter_context(_own_folder()))
                with context as options:
                    ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except ray.exceptions.AuthenticationError as error:
            raise ClusterError(
                f"--ray {address}: the cluster requires a token, but the given token is wrong",
                hint="put the cluster's token in RAY_AUTH_TOKEN or ~/.ray/auth_token, and set "
                "RAY_AUTH_MODE=token; `ray get-auth-token` shows it on the head node",
            ) from error
        except Exception as error:  # Ray and its network library raise various types
            raise ClusterError(
                f"--ray {address}: the cluster cannot be used ({one_line(error)})",
                hint="`ray status` shows the cluster; `ray start --head` starts one here; --ray "
                "auto uses this machine's cluster, --ray local starts one for this run; a cluster "
                "with a token needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
            ) from error
        try:
            if connects and address == LOCAL:
                _check_loopback(ray)
            yield Cluster(ray, watcher)
        finally:
            if connects:
                ray.shutdown()


def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a folder for the cluster of one run, because /tmp/ray may belong to another user.

    The folder is in /tmp if the path of the temporary folder is too long for a socket.
    """
    parent, prefix = tempfile.gettempdir(), "moexport-"
    too_long = len(f"{parent}/{prefix}") + RANDOM_CHARACTERS > LONGEST_SOCKET_FOLDER
    if too_long and os.access(SHORT_FOLDER, os.W_OK):
        parent = SHORT_FOLDER
    return tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)


@contextmanager
def _own_cluster(folder: str) -> Iterator[dict[str, Any]]:
    """Yields the options of `ray.init`, called in this context, for a cluster of one run.

    Ray queries the metadata hosts of three clouds unless a file in the home directory describes the
    cluster. The head process therefore gets a new home directory; workers keep the user's.
    """
    (Path(folder) / "ray_bootstrap_config.yaml").touch()
    options: dict[str, Any] = {"include_dashboard": False}
    if len(folder) <= LONGEST_SOCKET_FOLDER:
        options["_temp_dir"] = folder
    home = os.environ.get("HOME")
    if home is None:  # on Windows
        yield options
        return
    os.environ["HOME"] = folder
    try:
        yield options | {"runtime_env": {"env_vars": {"HOME": home}}}
    finally:
        os.environ["HOME"] = home


def _check_loopback(ray: Any) -> None:
    """Raises `ClusterError` if other machines could reach a cluster on this machine.

    Ray reads its settings on import, but the calling program may have imported it before.
    """
    address = ray.nodes()[0]["NodeManagerAddress"]
    if address != LOOPBACK:
        raise ClusterError(
            f"--ray {LOCAL}: Ray listens on {address}, because the program had already imported it",
            hint="set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before Ray is imported, or name a "
            "cluster that you started",
        )


def _check_answers(address: str) -> None:
    """Fails early if the address does not answer or Ray rejects the token.

    `ray.init` tries for 20 s or longer, and then reports only that it could not connect.
    """
    named = re.fullmatch(r"([^:/]+):(\d+)", address)
    if named:
        socket.create_connection((named[1], int(named[2])), ANSWER_S).close()
        from ray import _raylet

        client: Any = getattr(_raylet, "GcsClient", None)  # private in Ray, may be removed
        if client is not None:
            client(address=address)
