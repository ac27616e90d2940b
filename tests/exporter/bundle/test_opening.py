"""What a bundle opens is what was written, or an error: checked once per file and change."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from moexport.common import files
from moexport.errors import BundleError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.manifest import external_files
from moexport.tests.command import Outcome, run
from moexport.tests.exporter.bundle.test_bundle import (
    change_graph,
    change_manifest,
    change_reference,
    failed_checks,
)

X = np.random.default_rng(0).standard_normal((5, 3, 32, 32)).astype(np.float32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no memory of other tests' files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_HASHES", {})
    return tmp_path / "cache" / "moexport"


def flip(path: Path, at: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def run_bundle(bundle: Path, folder: Path, *options: str) -> Outcome:
    np.savez(folder / "x.npz", input=X)
    return run("run", bundle, "-i", folder / "x.npz", "-o", folder / "y.npz", *options)


@pytest.mark.parametrize("name", ["weights.bin", "model.onnx"])
def test_one_flipped_bit_stops_a_run(name: str, bundle: Path, tmp_path: Path) -> None:
    flip(bundle / name)
    outcome = run_bundle(bundle, tmp_path)
    assert (outcome.code, outcome.out) == (1, "")
    assert f"{name}: the content has changed since the bundle was written" in outcome.error
    assert "--no-check" in outcome.hint
    assert not (tmp_path / "y.npz").exists()
    with pytest.raises(BundleError, match="the content has changed"):
        Bundle.open(bundle).session()


def test_a_graph_that_is_not_opened_is_not_read(bundle: Path) -> None:
    flip(bundle / "model-grouped.onnx")
    assert Bundle.open(bundle).session()(X).shape == (5, 10)
    with pytest.raises(BundleError, match=r"model-grouped\.onnx: the content has changed"):
        Bundle.open(bundle).session("grouped")


def test_a_run_without_a_check_takes_files_as_they_are(bundle: Path, tmp_path: Path) -> None:
    flip(bundle / "weights.bin")
    outcome = run_bundle(bundle, tmp_path, "--no-check")
    assert outcome.code == 0, outcome.err
    assert Bundle.open(bundle, check=False).session()(X).shape == (5, 10)


def test_weights_that_no_hash_is_known_of_are_not_opened(bundle: Path) -> None:
    change_manifest(bundle, lambda m: m["files"].pop("weights.bin"))
    with pytest.raises(BundleError, match=r"weights\.bin: the manifest does not list it"):
        Bundle.open(bundle).session()
    assert set(failed_checks(bundle).values()) == {
        "it keeps weights in weights.bin, for which manifest.json lists no hash"
    }


def settle(bundle: Path) -> None:
    """Lets the files look as if nobody had changed them for a while."""
    for path in bundle.iterdir():
        os.utime(path, (1, 1))


def test_a_file_is_hashed_once(
    bundle: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = files.sha256

    def spy(path: Path) -> str:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(files, "sha256", spy)
    monkeypatch.setattr(files, "SETTLED_NS", -(10**12))
    settle(bundle)
    for _ in range(2):
        Bundle.open(bundle).session()
        assert sorted(read) == ["model.onnx", "weights.bin"]
    files._HASHES.clear()  # another process
    Bundle.open(bundle).session()
    assert sorted(read) == ["model.onnx", "weights.bin"]
    assert (own_cache / "hashes.json").stat().st_mode & 0o022 == 0
    flip(bundle / "weights.bin")
    settle(bundle)  # size and time of change say nothing
    with pytest.raises(BundleError, match="the content has changed"):
        Bundle.open(bundle).session()


def test_a_file_that_was_just_written_is_hashed_again(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bundle / "new").write_bytes(b"1")
    assert files.known_sha256(bundle / "new") == files.sha256(bundle / "new")
    assert files._HASHES == {}


@pytest.mark.skipif(sys.platform == "win32", reason="reads permissions as Unix has them")
def test_hashes_that_others_may_have_written_are_not_believed(
    bundle: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SETTLED_NS", -(10**12))
    Bundle.open(bundle).session()
    assert files._remembered()
    own_cache.chmod(0o777)
    assert files._remembered() == {}
    own_cache.chmod(0o700)
    (own_cache / "hashes.json").write_text("[" * 100_000)
    assert files._remembered() == {}


@pytest.mark.parametrize(
    "name", ["../model.onnx", "/etc/passwd", "a/b", "..", "", "c:model.onnx", "a\\b"]
)
def test_names_in_a_manifest_are_plain(name: str, bundle: Path) -> None:
    def graph(manifest: dict[str, list[dict[str, object]]]) -> None:
        manifest["graphs"][0]["file"] = name

    change_manifest(bundle, graph)
    with pytest.raises(BundleError, match="is not the name of a file in the bundle's folder"):
        Bundle.open(bundle)


@pytest.mark.slow
def test_every_field_of_another_type_is_an_error_and_no_defect(bundle: Path) -> None:
    import json

    original = json.loads((bundle / "manifest.json").read_text())
    wrong: list[object] = [None, True, -1, 1.5, "text", [], {}, [1], {"a": 1}, "9" * 5000, 10**30]

    def places(content: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
        found = [path] if path else []
        items: list[tuple[object, object]] = []
        if isinstance(content, dict):
            items = list(content.items())
        elif isinstance(content, list):
            items = list(enumerate(content))
        for key, value in items:
            found += places(value, (*path, key))
        return found

    tried = 0
    for place in places(original):
        for value in wrong:
            content = json.loads(json.dumps(original))
            at = content
            for key in place[:-1]:
                at = at[key]
            at[place[-1]] = value
            (bundle / "manifest.json").write_text(json.dumps(content))
            tried += 1
            try:
                Bundle.open(bundle).graph()
            except BundleError:
                continue
    assert tried > 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["layers"][0].update(experts=9), "manifest.json lists 9 experts, k 4"),
        (lambda m: m["layers"][0].update(k=5), "lists 8 experts, k 5"),
        (lambda m: m["graphs"][0]["lowerings"].update({"blocks.2.mlp": "dense"}), "lowering dense"),
        (lambda m: m["layers"][0].update(name="other"), "the graph does not name it"),
        (lambda m: m["inputs"][0].update(name="x"), "its inputs are input, but manifest.json"),
        (lambda m: m["outputs"][0].update(name="z"), "but manifest.json lists z"),
        (lambda m: m["files"].pop("model.onnx"), "manifest.json lists no hash for it"),
    ],
)
def test_a_manifest_that_contradicts_its_graph_is_found(
    change: object, message: str, bundle: Path
) -> None:
    change_manifest(bundle, change)  # type: ignore[arg-type]
    assert message in failed_checks(bundle)["ONNX check of model.onnx"]


def test_a_graph_that_says_nothing_of_itself_is_found(bundle: Path) -> None:
    def forget(model: onnx.ModelProto) -> None:
        del model.metadata_props[:]

    change_graph(bundle, "model.onnx", forget)
    assert failed_checks(bundle)["ONNX check of model.onnx"] == "it has no moexport metadata"


def test_bounds_that_somebody_wrote_into_a_manifest_are_not_believed(bundle: Path) -> None:
    def shift(arrays: dict[str, np.ndarray]) -> None:
        arrays["y"] = arrays["y"] + 1e-2 * np.abs(arrays["y"]).max()

    change_reference(bundle, shift)
    change_manifest(bundle, lambda m: m["parity"].update(atol=1e9, rtol=1e9, routing=0.0))
    for detail in failed_checks(bundle).values():
        assert "`verify --atol 1e+09 --rtol 1e+09` compares with those" in detail
    assert run("verify", bundle, "--rtol", "0.1").code == 0


def test_the_wider_bound_of_graphs_that_round_is_that_of_no_others(bundle: Path) -> None:
    def shift(arrays: dict[str, np.ndarray]) -> None:
        arrays["y"] = arrays["y"] + 5e-4 * np.abs(arrays["y"]).max(axis=1, keepdims=True)

    change_reference(bundle, shift)
    change_manifest(bundle, lambda m: m["parity"].update(rtol=1e-3, roundings=1e9))
    assert set(failed_checks(bundle)) == {"parity of model.onnx", "parity of model-grouped.onnx"}


def test_a_lost_reference_is_told_from_one_that_never_was(bundle: Path) -> None:
    change_manifest(bundle, lambda m: m["files"].pop("parity.npz"))
    assert failed_checks(bundle) == {
        "parity": "manifest.json records a comparison but does not list parity.npz: it is "
        "incomplete"
    }


def test_where_nothing_was_compared_no_difference_is_told(bundle: Path) -> None:
    def other(arrays: dict[str, np.ndarray]) -> None:
        sets = arrays["selected/blocks.2.mlp"]
        arrays["selected/blocks.2.mlp"] = np.sort((sets + 1) % 8, axis=1)
        arrays["margin/blocks.2.mlp"] = np.ones_like(arrays["margin/blocks.2.mlp"])

    change_reference(bundle, other)
    failed = failed_checks(bundle)
    assert set(failed) == {"parity of model.onnx", "parity of model-grouped.onnx"}
    for detail in failed.values():
        assert "no output was compared, because no input selects the same experts" in detail
        assert "max |difference|" not in detail


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(x=a["x"][:0]), "it has no inputs"),
        (lambda a: a.update(y=np.array(["a"] * 8)), "'y' is str32, not numbers"),
        (lambda a: a.update(y=a["y"][:3]), "'y' has the shape (3, 10)"),
        (lambda a: a.pop("margin/blocks.2.mlp"), "its choices are not complete"),
        (lambda a: a.update({"kept/blocks.2.mlp": np.ones(3)}), "not a readable parity record"),
        (lambda a: a.pop("dense"), "dense"),
        (lambda a: a.update({"k=1/" * 1200 + "y": a["y"]}), "results with another k within k=1/"),
    ],
)
def test_a_reference_that_is_none_is_an_error(change: object, message: str, bundle: Path) -> None:
    change_reference(bundle, change)  # type: ignore[arg-type]
    outcome = run("verify", bundle)
    assert outcome.code == 1  # a file that cannot be read, not a check that fails
    assert message in outcome.error
    assert "defect" not in outcome.err


def _kept_outside(name: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, dims=[2], data_type=onnx.TensorProto.FLOAT)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="other.bin")
    return tensor


def _in_a_constant(model: onnx.ModelProto) -> None:
    node = onnx.helper.make_node("Constant", [], ["unused"], value=_kept_outside(""))
    model.graph.node.insert(0, node)


def _in_a_subgraph(model: onnx.ModelProto) -> None:
    true = onnx.helper.make_tensor("true", onnx.TensorProto.BOOL, [], [True])
    out = onnx.helper.make_tensor_value_info("branch", onnx.TensorProto.FLOAT, [2])
    branch = onnx.helper.make_graph([], "branch", [], [out], [_kept_outside("branch")])
    node = onnx.helper.make_node("If", ["true"], ["unused"], then_branch=branch, else_branch=branch)
    model.graph.initializer.append(true)
    model.graph.node.insert(0, node)


def _in_a_function(model: onnx.ModelProto) -> None:
    node = onnx.helper.make_node("Constant", [], ["y"], value=_kept_outside(""))
    opset = onnx.helper.make_opsetid("", 20)
    model.functions.append(onnx.helper.make_function("own", "F", [], ["y"], [node], [opset]))


def _in_a_sparse_tensor(model: onnx.ModelProto) -> None:
    indices = onnx.helper.make_tensor("", onnx.TensorProto.INT64, [2], [0, 1])
    sparse = onnx.helper.make_sparse_tensor(_kept_outside("sparse"), indices, [4])
    model.graph.sparse_initializer.append(sparse)


@pytest.mark.parametrize(
    "add", [_in_a_constant, _in_a_subgraph, _in_a_function, _in_a_sparse_tensor]
)
def test_weights_outside_a_graph_have_a_hash_wherever_they_are(
    add: Callable[[onnx.ModelProto], None], bundle: Path, tmp_path: Path
) -> None:
    (bundle / "other.bin").write_bytes(np.ones(2, np.float32).tobytes())
    change_graph(bundle, "model.onnx", add)
    assert external_files(onnx.load(bundle / "model.onnx", load_external_data=False)) == {
        "weights.bin",
        "other.bin",
    }
    outcome = run_bundle(bundle, tmp_path)
    assert outcome.code == 1
    assert "other.bin: the manifest does not list it" in outcome.error
    assert failed_checks(bundle)


def test_a_bundle_that_names_a_url_as_its_source_makes_bench_open_none(
    bundle: Path, tmp_path: Path
) -> None:
    url = "http://127.0.0.1:9/secret/model.pt"
    change_manifest(bundle, lambda m: m["source"].__setitem__("path", url))
    outcome = run("bench", bundle, "-o", tmp_path / "report")
    assert outcome.code == 2
    assert "is not downloaded" in outcome.error
    assert f"moexport bench {url}" in outcome.hint
