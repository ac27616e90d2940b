"""A benchmark on a Ray cluster of two nodes gives one machine's results, and survives a node."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
from moexport.bench.results import Results, Row, read, to_json
from moexport.bench.runners.pytorch import untouched
from moexport.common import timing
from moexport.common.console import Silent
from moexport.errors import CheckError, CheckpointError, ClusterError, MissingExtraError, UsageError
from moexport.exporter.session import Session, SessionOptions
from moexport.plugins.cluster import ray as cluster
from moexport.plugins.cluster.evaluate import evaluating_on_ray
from moexport.plugins.cluster.kinds import compare_kinds, earlier_kinds
from moexport.plugins.tune.accuracy.quality import Metric
from moexport.plugins.tune.report.record import tuning_in
from moexport.plugins.tune.shards import Batch, evaluate_here
from moexport.tests.command import run
from moexport.tests.recorded import DATA

WEIGHTS = str(DATA / "soft_moe_mnist" / "weights.pt")

ray: Any = pytest.importorskip("ray", reason="the extra `ray` is not installed")

from ray.cluster_utils import Cluster  # noqa: E402  where ray is installed alone

pytestmark = pytest.mark.slow

QUICK: dict[str, Any] = {"rounds": 5, "round_s": 0.01, "memory": False, "parts": False}
ASKED = QUICK | {"k": ["n", 1], "batch": [1, 2], "engine": "onnxruntime", "threads": 1}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two nodes of one CPU each; the second can be killed and another one added."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head: dict[str, Any] = {
        "num_cpus": 1,
        "include_dashboard": False,
        "object_store_memory": 80 << 20,
    }
    # A killed node is noticed in two seconds, not in half a minute.
    head["_system_config"] = {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 4,
    }
    started: Any = Cluster(initialize_head=True, head_node_args=head, connect=False)
    started.add_node(num_cpus=1, object_store_memory=80 << 20, resources={"second": 1})
    started.wait_for_nodes()
    yield started
    ray.shutdown()
    started.shutdown()


@pytest.fixture
def connected(nodes: Any) -> None:
    """A connection that calls share, as in a notebook, which reuses processes on the nodes."""
    if not ray.is_initialized():
        ray.init(address=nodes.address, log_to_driver=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "x.npz"
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((150, *SHAPE)).astype(
        np.float32
    )  # three batches of the evaluation
    label, side = rng.integers(0, 10, 150), rng.integers(0, 2, 150)
    np.savez(path, input=inputs, label=label, side=side)
    return str(path)


SHAPE = tuple(n for n in moexport.load(WEIGHTS).input.shape[1:] if isinstance(n, int))


def values(results: Results) -> list[tuple[object, ...]]:
    """Returns the values of rows except times."""
    return [(r.identity, r.accuracy, r.routing, r.parity, r.error) for r in results.rows]


ANALYSED = ASKED | {"analysis": "retention", "group_by": "side"}


@pytest.fixture(scope="module")
def local(data: str) -> Results:
    results: Results = moexport.bench(WEIGHTS, **ANALYSED, data=data)
    return results


def test_values_are_those_of_one_machine_although_a_node_is_killed_and_the_run_interrupted(
    nodes: Any, connected: None, data: str, local: Results, tmp_path: Path
) -> None:
    asked = ANALYSED | {"data": data}
    (doomed,) = nodes.worker_nodes
    killing = threading.Timer(1.0, partial(nodes.remove_node, doomed, allow_graceful=False))
    steps: list[str] = []

    class Killer:
        """Kills the second node in its first task, and the run when the last shard is done."""

        def step(self, text: str, total: int | None = None, unit: str | None = "") -> None:
            if "nodes with CPU" in text:  # a process takes seconds to begin a task
                killing.start()
            steps.append(text)
            if "accuracy, shard" in text and text.endswith("done, 0 left"):
                raise KeyboardInterrupt

        def advance(self, count: int = 1) -> None:
            pass

    class Follower(Killer):
        def step(self, text: str, total: int | None = None, unit: str | None = "") -> None:
            steps.append(text)

    out = tmp_path / "out"
    asked |= {"out": out, "ray": nodes.address}
    with pytest.raises(KeyboardInterrupt):
        moexport.bench_on_ray(WEIGHTS, **asked, progress=Killer())
    killing.join()
    assert doomed not in nodes.worker_nodes
    assert any("2 nodes with CPU" in step for step in steps)
    assert not (out / "results.json").exists()
    steps.clear()
    found = moexport.bench_on_ray(WEIGHTS, **asked, before=local, progress=Follower())
    assert "continuing an unfinished run: 2 measurements are done" in steps
    assert not any("accuracy" in step for step in steps)  # no shard was evaluated again
    results = found["CPU"]
    assert values(results) == values(local)
    assert results.analyses == local.analyses
    assert results.analyses.keys() == {"experts", "subgroups"}
    for batch in (1, 2):  # a ratio has times of one node alone
        assert len({row.node for row in results.rows if row.batch == batch}) == 1
    assert all(row.latency_ms is not None for row in results.rows)
    machines = {each["node"]: each["environment"] for each in results.protocol["nodes"]}
    assert {row.node for row in results.rows} == machines.keys()
    assert all(each["cpu"]["cores"] for each in machines.values())
    assert values(read(out / "results.json")) == values(results)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert f"{len(results.rows)} rows were timed on a different machine" in page
    assert not (out / "unfinished.jsonl").exists()
    nodes.add_node(num_cpus=1, object_store_memory=80 << 20, resources={"second": 1})
    nodes.wait_for_nodes()


def test_each_kind_of_node_has_its_report_and_one_table_has_the_best_k_of_each(
    nodes: Any, connected: None, data: str, local: Results, tmp_path: Path
) -> None:
    before = tmp_path / "before" / "second"  # the earlier run had one of the two kinds
    before.mkdir(parents=True)
    (before / "results.json").write_text(to_json(slower(local, 100.0)), encoding="utf-8")
    outcome = run(
        *("bench", WEIGHTS, "-o", tmp_path / "out", "--ray", nodes.address, "--on", "second,CPU"),
        *("--data", data, "--engine", "onnxruntime", "--k", "1", "--threads", "1"),
        *("--no-memory", "--samples", "64", "--compare", before.parent, "--fail-if-slower", "5%"),
    )
    assert outcome.code == 0, outcome.err
    assert "second: Of 2 rows in both files, 2 are faster and 0 slower" in outcome.err
    assert "CPU: not compared: the earlier run has no results of this kind" in outcome.err
    outcome_of_one = run(  # earlier results of one kind, for two
        *("bench", WEIGHTS, "-o", tmp_path / "again", "--ray", nodes.address, "--on", "second,CPU"),
        *("--compare", tmp_path / "out" / "CPU" / "results.json"),
    )
    assert outcome_of_one.code == 2
    assert "name the folder of an earlier run" in outcome_of_one.err
    table = (tmp_path / "out" / "kinds.md").read_text(encoding="utf-8")
    for kind in ("second", "CPU"):
        results = read(tmp_path / "out" / kind / "results.json")
        assert (tmp_path / "out" / kind / "report.html").is_file()
        assert len({row.node for row in results.rows}) == 1
        assert results.command.startswith("moexport bench ")
        assert f"| {kind} |" in table
    assert f"{tmp_path / 'out' / 'second' / 'report.html'}" in outcome.out


def slower(results: Results, times: float) -> Results:
    """Returns the same results with rows slower by a factor."""

    def longer(row: Row) -> Row:
        assert row.latency_ms is not None
        rounds = tuple(times * ms for ms in row.latency_ms.rounds)
        latency = replace(row.latency_ms, median=times * row.latency_ms.median, rounds=rounds)
        return replace(row, latency_ms=latency)

    return replace(results, rows=tuple(map(longer, results.rows)))


def test_each_kind_is_compared_with_itself_and_all_that_are_slower_are_named(
    local: Results, tmp_path: Path
) -> None:
    kinds = ["L4", "A100", "T4"]
    folder = tmp_path / "before"
    for kind, times in (("L4", 1.0), ("A100", 0.01), ("T4", 0.1)):
        (folder / kind).mkdir(parents=True)
        text = to_json(slower(local, times))
        (folder / kind / "results.json").write_text(text, encoding="utf-8")
    before = earlier_kinds(tmp_path / "out", folder, kinds, wanted=True)
    found = dict.fromkeys((*kinds, "H100"), local)
    lines, failure = compare_kinds(before, found, 0.05)
    assert isinstance(failure, CheckError)
    assert re.match(r"A100: \d+ of \d+ rows are slower by more than 5%.*; T4: ", failure.message)
    assert "L4: Of" in lines[0]
    assert lines[-1] == "H100: not compared: the earlier run has no results of this kind"
    assert compare_kinds(before, found, None)[1] is None
    assert earlier_kinds(folder / "T4", None, ["T4"], wanted=True) == {"T4": before["T4"]}
    assert earlier_kinds(folder, None, ["T4"], wanted=True) == {"T4": before["T4"]}
    assert not earlier_kinds(tmp_path, None, kinds, wanted=True)  # the first run of all
    with pytest.raises(UsageError, match="has no results of H100 or B200"):
        earlier_kinds(tmp_path / "out", folder, ["H100", "B200"], wanted=False)


def test_what_a_cluster_cannot_do_is_refused_at_once(
    nodes: Any, connected: None, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bench(**asked: Any) -> None:
        given = ASKED | {"data": data} | asked
        moexport.bench_on_ray(given.pop("model", WEIGHTS), ray=nodes.address, **given)

    with monkeypatch.context() as patch:
        patch.setattr(cluster.Cluster, "completed", None)  # no task is begun
        with pytest.raises(ClusterError, match='on="accelerator_type:L4": no node') as caught:
            bench(on="accelerator_type:L4")
        assert caught.value.hint is not None
        assert "its 2 nodes have CPU, memory, object_store_memory, second" in caught.value.hint
        with pytest.raises(UsageError, match='analysis="no-such"'):
            bench(analysis="no-such")
        with pytest.raises(UsageError, match="data in memory"):
            bench(data=np.zeros((1, 3), np.float32))
        with pytest.raises(UsageError, match="two models have the same name"):
            bench(model=[WEIGHTS, WEIGHTS])
    with pytest.raises(CheckpointError, match=r"gone\.pt: no such file"):  # a node's own words
        bench(model=str(tmp_path / "gone.pt"))


def test_ranges_are_those_of_one_machine_by_every_method(
    nodes: Any, connected: None, data: str, tmp_path: Path
) -> None:
    out = tmp_path / "ranges.json"
    asked = (WEIGHTS, "--data", data, "-o", out, "--method", "entropy", "--batch", "8", "--k", "2")
    cluster_of = ("--ray", nodes.address, "--on", "CPU")
    outcome = run("calibrate", *asked, *cluster_of, "--verbose")
    assert outcome.code == 0, outcome.err
    assert "ranges 2/2: done" in outcome.err
    local = moexport.calibrate(moexport.load(WEIGHTS), data, k=2, method="entropy", batch=8)
    assert out.read_text(encoding="utf-8") == local.to_json()
    assert "up to date" in run("calibrate", *asked, *cluster_of, "--verbose").err
    other = run("calibrate", *asked[:-1], "4", *cluster_of)
    assert other.code == 1
    assert "is a calibration table for k = 2, not 4" in other.err


def test_a_search_finds_and_confirms_what_one_machine_does(
    nodes: Any, connected: None, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every call takes a millisecond, so the result depends only on quality and size.
    ticks = itertools.count(step=1_000_000)
    monkeypatch.setitem(timing.measure.__kwdefaults__ or {}, "clock_ns", lambda: next(ticks))
    monkeypatch.setattr(timing, "_wait_until_idle", lambda: None)
    asked = ("tune", WEIGHTS, "--data", data, "--metric", "agreement", "--max-bytes", "700kB")
    settings = ("--precision", "fp32", "--batch", "8", "--threads", "1")
    cluster_of = ("--ray", nodes.address, "--on", "CPU", "--verbose")
    for out, more in (("here", ()), ("there", cluster_of)):
        outcome = run(*asked, *settings, "-o", tmp_path / out, *more)
        assert outcome.code == 0, outcome.err
    assert "quality, shard 2/2: done" in outcome.err
    for name in ("recipe.yaml", "model.onnx", "weights.bin"):
        here, there = (tmp_path / out / name for out in ("here", "there"))
        assert here.read_bytes() == there.read_bytes(), name
    found = [read(tmp_path / f"{out}-report" / "results.json") for out in ("here", "there")]
    records = [tuning_in(each.analyses) for each in found]
    assert records[0] is not None
    assert records[1] is not None
    assert records[0].points == records[1].points
    assert records[1].confirming == 72  # of 75, since the graph accepts only batches of 8
    assert any(point.confirmed and not point.chosen for point in records[1].points)
    assert "there is no cluster" in run(*asked, "-o", tmp_path / "x", "--on", "CPU").err
    on = ("--ray", nodes.address, "--on", "accelerator_type:L4")
    lacking = run(*asked, "-o", tmp_path / "x", *on)
    assert "no node of the cluster has this resource" in lacking.err


@pytest.mark.path
def test_shards_of_uneven_batches_add_up_to_the_sums_of_one_machine(
    nodes: Any, connected: None, data: str, tmp_path: Path
) -> None:
    bundle = moexport.export(
        moexport.load(WEIGHTS), tmp_path / "out", k=2, verify=False, engine=False
    )
    session = Session(bundle.path / "model.onnx", SessionOptions(threads=1))
    with np.load(data) as held:
        inputs, labels = held["input"], held["label"]
    outputs = untouched(moexport.load(WEIGHTS)).infer(inputs)
    rows = [slice(start, start + 7) for start in range(0, 150, 7)]
    batches = [Batch(inputs[r], labels[r], outputs[r], Metric("accuracy")) for r in rows]
    with evaluating_on_ray(nodes.address, "CPU", Silent()) as evaluate:
        found = evaluate(iter(batches))([session, session])
    assert found == evaluate_here(iter(batches))([session, session])
    assert found[0] == found[1]
    assert found[0].inputs == 150


def test_cells_whose_nodes_die_again_and_again_are_named(
    nodes: Any, connected: None, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "GRACE_S", 1.0)
    (doomed,) = nodes.worker_nodes
    killing = threading.Timer(0.5, partial(nodes.remove_node, doomed, allow_graceful=False))

    class Killer(Silent):
        """Kills the node once the run has found it."""

        def step(self, text: str, total: int | None = None, unit: str | None = None) -> None:
            if "node with second" in text:
                killing.start()

    # Rounds that take longer than the node lives.
    asked = ASKED | {"data": data, "on": "second", "round_s": 1.0}
    lost = r"not measured: .*weights\.pt, (accuracy, shard 1/1|batch 1): "
    with pytest.raises(ClusterError, match=lost):
        moexport.bench_on_ray(WEIGHTS, ray=nodes.address, **asked, progress=Killer())
    killing.join()


def test_without_a_cluster_or_without_ray_the_error_explains_it(
    monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    ray.shutdown()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    tried: list[object] = []  # by Ray itself, which takes half a minute
    monkeypatch.setattr(ray, "init", lambda *given, **_: tried.append(given))
    with pytest.raises(ClusterError, match=rf'ray="{address}": the cluster cannot be used'):
        moexport.bench_on_ray(WEIGHTS, ray=address, data=data, **ASKED)
    assert tried == []
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError) as caught:
        moexport.bench_on_ray(WEIGHTS, data=data, **ASKED)
    assert caught.value.hint == "pip install '.[ray]' in a clone of moexport"


def test_nodes_of_unequal_size_need_another_resource() -> None:
    def node(**resources: float) -> dict[str, Any]:
        return {"Alive": True, "Resources": resources}

    both = [node(CPU=8, big=1), node(CPU=64, big=1, GPU=1), {**node(CPU=1, big=1), "Alive": False}]
    with pytest.raises(ClusterError, match="between 8 and 64"):
        cluster.kinds_of(both, ["CPU"])
    (kind,) = cluster.kinds_of(both, ["big"])
    assert (kind.nodes, dict(kind.claim)) == (
        2,
        {"num_cpus": 8, "num_gpus": 0, "resources": {"big": 1}},
    )


CLUSTER_WITH_A_TOKEN = """
import sys
from ray.cluster_utils import Cluster
head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args=head, connect=False)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""

CLIENT = """
import sys
import ray
from moexport.plugins.cluster.ray import connected
from moexport.common.console import Silent
from moexport.errors import MoexportError

init = ray.init
def tries(*given, **named):
    print("Ray itself tries")  # for 20 s, where it may not connect
    return init(*given, **named)
ray.init = tries
try:
    with connected(sys.argv[1], Silent()) as cluster:
        print(len(cluster.ray.nodes()), "node")
except MoexportError as error:
    print(error.message, error.hint)
"""


def test_a_cluster_with_a_token_refuses_clients_without_it_at_once(tmp_path: Path) -> None:
    def environment(token: str | None) -> dict[str, str]:
        given = {} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        kept = {name: each for name, each in os.environ.items() if not name.startswith("RAY_AUTH")}
        return kept | given | {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}

    def said(address: str, token: str | None) -> str:
        command = [sys.executable, "-c", CLIENT, address]
        done = subprocess.run(
            command, env=environment(token), capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    command = [sys.executable, "-c", CLUSTER_WITH_A_TOKEN]
    with subprocess.Popen(
        command, env=environment("a" * 32), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        address = started.stdout.readline().strip()
        assert said(address, "a" * 32) == "Ray itself tries\n1 node\n"
        for token in (None, "b" * 32):
            told = said(address, token)
            assert told.startswith(f"--ray {address}: the cluster requires a token")
            assert "RAY_AUTH_MODE=token" in told
        started.communicate()
