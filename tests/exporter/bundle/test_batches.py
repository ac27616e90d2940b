"""`auto` writes several graphs where one is slow at some batch sizes; each call takes its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
from moexport.errors import BundleError, FeedError
from moexport.exporter.bundle.batches import SessionByBatch
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.manifest import MANIFEST_FILE, GraphRecord
from moexport.exporter.session import Session, SessionOptions
from moexport.tests.command import run
from moexport.tests.recorded import many_experts

K, TOKENS, LARGEST = 8, 4, 256
BATCHES = ("--batch", f"1:1:{LARGEST}", "--tokens", f"1:{TOKENS}:16")


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_experts(tmp_path_factory.mktemp("layer"))


@pytest.fixture(scope="module")
def exported(layer: Path) -> Path:
    """A bundle of a layer whose fastest lowering is another for one input than for many."""
    out = layer.parent / "out"
    outcome = run("export", layer, "-o", out, "--k", str(K), *BATCHES)
    assert outcome.code == 0, outcome.err
    return out


@pytest.fixture(scope="module")
def opened(exported: Path) -> Bundle:
    return Bundle.open(exported)


def tokens(batch: int) -> np.ndarray:
    return np.random.default_rng(batch).standard_normal((batch, TOKENS, 32)).astype(np.float32)


def used(session: Session) -> set[str]:
    """The files that a session has opened."""
    assert isinstance(session, SessionByBatch)
    return set(session._sessions)


@pytest.mark.slow
def test_each_graph_says_which_batches_it_is_for_and_together_they_are_for_all(
    opened: Bundle,
) -> None:
    main, other = opened.manifest.graphs
    assert main.file == "model.onnx"
    lowering = next(iter(other.lowerings.values()))
    assert other.file == f"model-{lowering}.onnx"
    assert lowering not in main.lowerings.values()
    assert main.batches[0] == 1
    assert other.batches == [main.batches[1] + 1, LARGEST]
    names = {"model.onnx", other.file, "weights.bin"}
    assert names <= set(opened.manifest.files)
    assert len([name for name in opened.manifest.files if name.endswith(".bin")]) == 1
    assert all(graph.parity is not None and graph.parity["passed"] for graph in (main, other))


def test_a_call_takes_the_graph_for_its_batch_which_is_opened_when_it_comes(opened: Bundle) -> None:
    main, other = opened.manifest.graphs
    boundary = main.batches[1]
    session = opened.session()
    assert used(session) == set()
    for batch, file in ((1, main.file), (boundary, main.file), (boundary + 1, other.file)):
        x = tokens(batch)
        found = session(x)
        assert np.array_equal(found, opened.session(file)(x))
        assert np.array_equal(session.run(x)["output"], found)
        assert np.array_equal(session.bound(x)()[0], found)
        # Both compute the same function.
        for graph in (main, other):
            again = opened.session(graph.file)(x)
            assert np.abs(again - found).max() <= 1e-5 * np.abs(found).max()
        assert used(session) == {main.file} if batch <= boundary else {main.file, other.file}
    assert session.provider == "CPUExecutionProvider"
    assert (session.output_names, session.takes_k) == (["output"], False)


def test_a_batch_outside_the_range_takes_the_nearest(opened: Bundle) -> None:
    main, other = opened.manifest.graphs
    session = opened.session()
    assert session(tokens(LARGEST + 1)).shape == (LARGEST + 1, TOKENS, 32)
    assert used(session) == {other.file}
    with pytest.raises(FeedError, match="is empty"):
        session(tokens(1)[:0])
    assert used(session) == {main.file, other.file}
    assert opened.manifest.graph_for(10**9).file == other.file


def test_what_looks_into_a_graph_gets_one(opened: Bundle) -> None:
    value = next(iter(opened.graph().selected.values()))
    observing = opened.session(options=SessionOptions(observe={value: 7}))
    assert not isinstance(observing, SessionByBatch)
    assert observing.run(tokens(2), outputs=[value])[value].shape == (2, K)
    named = next(iter(opened.manifest.graphs[1].lowerings.values()))
    assert opened.session(named).path.name == opened.manifest.graphs[1].file


def test_run_and_verify_take_both(exported: Path, opened: Bundle, tmp_path: Path) -> None:
    boundary = opened.manifest.graphs[0].batches[1]
    x = tokens(boundary + 3)
    np.savez(tmp_path / "x.npz", input=x)
    for size in (boundary, boundary + 3):
        written = tmp_path / f"{size}.npz"
        outcome = run(
            "run", exported, "-i", tmp_path / "x.npz", "-o", written, "--batch-size", str(size)
        )
        assert outcome.code == 0, outcome.err
        assert np.abs(np.load(written)["output"] - opened.session()(x)).max() <= 1e-5
    outcome = run("verify", exported)
    assert outcome.code == 0, outcome.out
    for graph in opened.manifest.graphs:
        assert f"parity of {graph.file}" in outcome.out


def test_it_is_said_everywhere(layer: Path, exported: Path, opened: Bundle) -> None:
    said = f"no single graph is fast at every batch size in --batch 1:1:{LARGEST}: model.onnx ("
    assert any(note.startswith(said) for note in opened.manifest.notes)
    assert said in run("inspect", exported).out
    readme = (exported / "README.md").read_text(encoding="utf-8")
    for graph in opened.manifest.graphs:
        first, last = graph.batches
        assert f"for batch sizes {first} to {last}, but it accepts any" in readme
    planned = run("export", layer, "-o", "nowhere", "--k", str(K), *BATCHES, "--dry-run", "--json")
    plan: dict[str, Any] = json.loads(planned.out)
    assert plan["batches"] == {graph.file: graph.batches for graph in opened.manifest.graphs}
    assert said in planned.err or any(note.startswith(said) for note in plan["notes"])


@pytest.mark.parametrize(
    "options",
    [
        ("--lowering", "grouped"),
        ("--lowering", "auto,grouped"),
        ("--batch", "1"),
        ("--batch", "256"),
        ("--target", "tensorrt"),
    ],
)
def test_one_graph_is_written_where_one_is_asked_for_or_enough(
    layer: Path, options: tuple[str, ...]
) -> None:
    asked = [*BATCHES, "--dry-run", "--json", *options]
    plan = json.loads(run("export", layer, "-o", "nowhere", "--k", str(K), *asked).out)
    assert len(plan["graphs"]) == len(options[1].split(","))
    assert "batches" not in plan


def test_an_older_bundle_without_the_key_runs_its_main_graph(
    exported: Path, tmp_path: Path
) -> None:
    manifest = json.loads((exported / MANIFEST_FILE).read_text(encoding="utf-8"))
    for graph in manifest["graphs"]:
        del graph["batches"]
    for file in exported.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    older = Bundle.open(tmp_path)
    session = older.session()
    assert not isinstance(session, SessionByBatch)
    assert session.path.name == "model.onnx"
    assert session(tokens(LARGEST)).shape == (LARGEST, TOKENS, 32)


@pytest.mark.parametrize("span", [[4], [0, 3], [5, 4], [1, 2, 3]])
def test_a_manifest_with_batches_that_cannot_be_is_refused(
    exported: Path, tmp_path: Path, span: list[int]
) -> None:
    manifest = json.loads((exported / MANIFEST_FILE).read_text(encoding="utf-8"))
    manifest["graphs"][0]["batches"] = span
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(BundleError, match=r"cannot be for batches of"):
        Bundle.open(tmp_path)


def test_a_damaged_graph_is_said_before_anything_runs(exported: Path, tmp_path: Path) -> None:
    for file in exported.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    opened = Bundle.open(tmp_path)
    second = opened.manifest.graphs[1].file
    (tmp_path / second).write_bytes((exported / second).read_bytes() + b" ")
    session = opened.session()
    session(tokens(1))
    with pytest.raises(BundleError, match="the content has changed"):
        session(tokens(LARGEST))
    (tmp_path / "model.onnx").unlink()
    with pytest.raises(BundleError, match="the file is missing"):
        opened.session()


def test_in_python_too(layer: Path, tmp_path: Path) -> None:
    model = moexport.load(layer)
    bundle = moexport.export(model, tmp_path / "out", k=K, batch="1:200:256", tokens="1:4:16")
    main, other = bundle.manifest.graphs
    # OPT is among the batches of the main graph.
    assert main.batches[0] <= 200 <= main.batches[1] == LARGEST
    assert other.batches == [1, main.batches[0] - 1]


def test_k_may_be_an_input_of_each(layer: Path, tmp_path: Path) -> None:
    model = moexport.load(layer)
    out, batch = tmp_path / "out", f"1:1:{LARGEST}"
    bundle = moexport.export(model, out, k="input", batch=batch, tokens="1:4:16", verify=False)
    session = bundle.session()
    assert session.takes_k
    for graph in bundle.manifest.graphs:
        x = tokens(graph.batches[0])
        for k in (3, 64):
            assert np.array_equal(session(x, k), bundle.session(graph.file)(x, k))
    assert used(session) == {graph.file for graph in bundle.manifest.graphs}


def test_the_nearest_graph_is_that_with_the_smallest_distance(opened: Bundle) -> None:
    first = replace(opened.manifest.graphs[0], file="a", batches=[4, 8])
    second = GraphRecord("b", {}, {}, None, [20, 30])
    record = replace(opened.manifest, graphs=[second, first])
    for batch, file in ((1, "a"), (8, "a"), (13, "a"), (15, "b"), (25, "b"), (99, "b")):
        assert record.graph_for(batch).file == file
