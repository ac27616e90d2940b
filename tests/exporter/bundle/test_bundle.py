"""What a bundle holds, and what `verify` finds in one that was damaged or altered."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import onnx
import pytest
from moexport.errors import BundleError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.manifest import digest
from moexport.tests.command import run
from moexport.tests.recorded import DATA

LAYERS = ["blocks.2.mlp", "blocks.3.mlp"]


def manifest(bundle: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())
    return content


def change_manifest(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = manifest(bundle)
    change(content)
    (bundle / "manifest.json").write_text(json.dumps(content | {"sha256": digest(content)}))


def rehash(bundle: Path, name: str) -> None:
    """Records a file as it is now, as someone would who wants the change to pass."""
    content = (bundle / name).read_bytes()
    record = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    change_manifest(bundle, lambda m: m["files"].__setitem__(name, record))


def change_graph(bundle: Path, name: str, change: Callable[[onnx.ModelProto], object]) -> None:
    model = onnx.load(bundle / name, load_external_data=False)
    change(model)
    (bundle / name).write_bytes(model.SerializeToString())
    rehash(bundle, name)


def change_reference(bundle: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    with np.load(bundle / "parity.npz") as stored:
        arrays = dict(stored.items())
    change(arrays)
    np.savez(bundle / "parity.npz", allow_pickle=False, **arrays)
    rehash(bundle, "parity.npz")


def failed_checks(bundle: Path) -> dict[str, str]:
    """The checks that fail, with their details; the command must fail, too."""
    outcome = run("verify", bundle, "--json")
    content = json.loads(outcome.out)
    failed = {c["name"]: c["detail"] for c in content["checks"] if not c["passed"]}
    assert content["passed"] is False
    assert outcome.code == 3
    assert f"{len(failed)} of {len(content['checks'])} checks failed" in outcome.error
    assert outcome.hint
    return failed


def test_the_manifest_says_all_that_the_interface_promises(exported: Path) -> None:
    content = manifest(exported)
    assert content["schema"] == 1
    assert content["moexport"] == "0.1.0"
    assert content["created"].endswith("+00:00")
    weights = (DATA / "soft_moe_vit" / "weights.pt").read_bytes()
    source = content["source"]
    assert source["sha256"] == hashlib.sha256(weights).hexdigest()
    assert (source["family"], source["config"]["num_heads"]) == ("soft-moe-vit", 4)
    for layer, name, k in zip(content["layers"], LAYERS, (4, 2), strict=True):
        sizes = {key: layer[key] for key in ("name", "kind", "experts", "slots", "k", "dim")}
        assert sizes == {
            "name": name,
            "kind": "soft-moe",
            "experts": 8,
            "slots": 1,
            "k": k,
            "dim": 48,
        }
        assert layer["hidden"] == 192
        assert (layer["lowering"], layer["reason"]) == ("gather", "requested")
    assert (content["k"], content["target"], content["precision"]) == ("4,2", "onnx", "fp32")
    assert content["opset"] == 20
    assert content["inputs"] == [
        {"name": "input", "dtype": "float32", "shape": ["batch", 3, 32, 32]}
    ]
    assert content["outputs"] == [{"name": "output", "dtype": "float32", "shape": ["batch", 10]}]
    parity = content["parity"]
    assert parity["passed"] is True
    assert parity["samples"] == 8
    assert parity["routing_agreement"] == 1.0
    assert 0 < parity["max_abs"] <= parity["atol"] + parity["rtol"]
    assert parity["max_rel"] > 0
    assert parity["cosine"] > 0.999999
    assert content["engines"] == []
    assert content["environment"]["cpu"]["cores"] >= 1
    assert "torch" in content["environment"]["packages"]
    assert "gpu" in content["environment"]
    assert any("random inputs" in note for note in content["notes"])


def test_the_manifest_lists_every_file_with_its_hash(exported: Path) -> None:
    files = {path.name: path.read_bytes() for path in exported.iterdir()}
    assert sorted(files) == [
        "README.md",
        "manifest.json",
        "model-grouped.onnx",
        "model.onnx",
        "parity.npz",
        "weights.bin",
    ]
    del files["manifest.json"]
    assert manifest(exported)["files"] == {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        for name, content in files.items()
    }


@pytest.mark.parametrize(
    ("file", "lowering"), [("model.onnx", "gather"), ("model-grouped.onnx", "grouped")]
)
def test_a_graph_that_lost_its_manifest_still_says_what_it_is(
    exported: Path, file: str, lowering: str
) -> None:
    model = onnx.load(exported / file, load_external_data=False)
    (entry,) = (entry for entry in model.metadata_props if entry.key == "moexport")
    assert entry.key == "moexport"
    assert json.loads(entry.value) == {
        "family": "soft-moe-vit",
        "layers": {
            name: {"n": 8, "k": k, "lowering": lowering}
            for name, k in zip(LAYERS, (4, 2), strict=True)
        },
        "precision": "fp32",
        "floats": "fp32",
        "renormalize": False,
    }
    assert (model.producer_name, model.producer_version) == ("moexport", "0.1.0")


def test_nothing_in_a_graph_tells_of_the_machine_that_wrote_it(exported: Path) -> None:
    here = str(Path(moexport.__file__).parent).encode()
    for path in exported.glob("*.onnx"):
        content = path.read_bytes()
        assert here not in content
        assert b"site-packages" not in content
        assert b"pkg.torch" not in content


def test_the_graphs_of_a_bundle_share_its_weights(exported: Path) -> None:
    assert len(list(exported.glob("*.bin"))) == 1
    for path in exported.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        entries = [{e.key: e.value for e in t.external_data} for t in model.graph.initializer]
        assert {entry["location"] for entry in entries if entry} == {"weights.bin"}
        inline = sum(len(t.raw_data) for t in model.graph.initializer)
        assert inline < 16384


def test_a_bundle_moves_with_its_folder(bundle: Path, tmp_path: Path) -> None:
    moved = bundle.rename(tmp_path / "else where")
    outcome = run("verify", moved)
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    assert outcome.out.count("ok ") == 10


def test_files_that_are_not_of_the_bundle_are_told(bundle: Path) -> None:
    (bundle / "model-dense.onnx").write_bytes(b"mine")
    outcome = run("verify", bundle)
    assert outcome.code == 0
    assert (
        outcome.err
        == "note: not checked, because they are not part of the bundle: model-dense.onnx\n"
    )


def test_quiet_and_json_say_the_same_of_a_whole_bundle(exported: Path) -> None:
    quiet = run("verify", exported, "-q")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    content = json.loads(run("verify", exported, "--json").out)
    assert content["passed"] is True
    assert len(content["checks"]) == 10


@pytest.mark.parametrize("name", ["weights.bin", "model.onnx", "model-grouped.onnx", "parity.npz"])
def test_a_flipped_bit_is_found(bundle: Path, name: str) -> None:
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    assert failed_checks(bundle) == {f"hash of {name}": "the content has changed"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"k": 4', '"k": 5'),
        ('"precision": "fp32"', '"precision": "fp33"'),
        ("+00:00", "+01:00"),
        ('"sha256"', '"sha257"'),
        ("random inputs", "random\\u0020Inputs"),
    ],
)
def test_a_changed_character_of_the_manifest_is_found(bundle: Path, old: str, new: str) -> None:
    text = (bundle / "manifest.json").read_text()
    at = text.rindex(old)
    (bundle / "manifest.json").write_text(text[:at] + new + text[at + len(old) :])
    assert failed_checks(bundle) == {"hash of manifest.json": "the content has changed"}


def test_the_layout_of_the_manifest_is_free(bundle: Path) -> None:
    (bundle / "manifest.json").write_text(json.dumps(manifest(bundle)))
    assert run("verify", bundle).code == 0


@pytest.mark.parametrize("name", ["weights.bin", "model.onnx"])
def test_a_truncated_file_is_found(bundle: Path, name: str) -> None:
    content = (bundle / name).read_bytes()
    (bundle / name).write_bytes(content[:-7])
    sizes = f"{len(content) - 7} bytes, not {len(content)}"
    assert failed_checks(bundle) == {f"hash of {name}": sizes}


@pytest.mark.parametrize("name", ["weights.bin", "model-grouped.onnx", "parity.npz"])
def test_a_missing_file_is_found(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    assert failed_checks(bundle) == {f"hash of {name}": "the file is missing"}


def test_a_missing_graph_or_weights_file_stops_a_run_with_its_name(
    bundle: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "x.npz", input=np.zeros((1, 3, 32, 32), np.float32))
    for name in ("weights.bin", "model.onnx"):
        (bundle / name).unlink()
        outcome = run("run", bundle, "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
        assert (outcome.code, outcome.out) == (1, "")
        assert name in outcome.error
        assert outcome.hint
        assert not (tmp_path / "y.npz").exists()


def test_values_that_differ_from_the_reference_are_found_in_every_graph(bundle: Path) -> None:
    def shift(arrays: dict[str, np.ndarray]) -> None:
        arrays["y"] = arrays["y"] + 1e-3 * np.abs(arrays["y"]).max(axis=1, keepdims=True)

    change_reference(bundle, shift)
    failed = failed_checks(bundle)
    assert set(failed) == {"parity of model.onnx", "parity of model-grouped.onnx"}
    assert all("0.001 of max|y|" in detail for detail in failed.values())
    assert all("same experts in 8 of 8 inputs" in detail for detail in failed.values())


def test_one_value_in_one_sample_is_enough(bundle: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays["y"][5, 7] += 1e-3 * np.abs(arrays["y"]).max()

    change_reference(bundle, change)
    assert len(failed_checks(bundle)) == 2


def test_another_chosen_set_in_one_sample_is_found_and_the_layer_named(bundle: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        sets = arrays["selected/blocks.3.mlp"]
        (other, *_) = sorted(set(range(8)) - set(sets[3].tolist()))
        sets[3] = sorted([other, sets[3, 1]])

    change_reference(bundle, change)
    for detail in failed_checks(bundle).values():
        assert "same experts in 7 of 8 inputs; first difference in layer blocks.3.mlp" in detail


@pytest.mark.parametrize("layer", LAYERS)
def test_a_graph_that_chooses_other_experts_is_found_and_the_layer_named(
    bundle: Path, layer: str
) -> None:
    def smallest(model: onnx.ModelProto) -> None:
        (top,) = [n for n in model.graph.node if n.op_type == "TopK" and layer in n.name]
        (largest,) = [a for a in top.attribute if a.name == "largest"]
        largest.i = 0

    change_graph(bundle, "model-grouped.onnx", smallest)
    ((name, detail),) = failed_checks(bundle).items()
    assert name == "parity of model-grouped.onnx"
    assert f"first difference in layer {layer}" in detail


def test_an_invalid_graph_is_found(bundle: Path) -> None:
    def break_node(model: onnx.ModelProto) -> None:
        model.graph.node[3].input[0] = "nowhere"

    change_graph(bundle, "model.onnx", break_node)
    name, detail = next(iter(failed_checks(bundle).items()))
    assert name == "ONNX check of model.onnx"
    assert "nowhere" in detail


def test_a_graph_that_is_no_onnx_is_found(bundle: Path) -> None:
    (bundle / "model.onnx").write_bytes(b"not a protobuf message at all" * 9)
    rehash(bundle, "model.onnx")
    assert "ONNX check of model.onnx" in failed_checks(bundle)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"nothing of the kind"])
def test_a_reference_that_cannot_be_read_is_an_error_that_names_it(
    bundle: Path, content: bytes
) -> None:
    (bundle / "parity.npz").write_bytes(content)
    rehash(bundle, "parity.npz")
    outcome = run("verify", bundle)
    assert outcome.code == 1
    assert "parity.npz: not a readable parity record" in outcome.error


def test_a_reference_of_another_model_is_an_error(bundle: Path) -> None:
    change_reference(bundle, lambda arrays: arrays.update(y=arrays["y"][:, :3]))
    outcome = run("verify", bundle)
    assert outcome.code == 1
    assert "parity" in outcome.error
    assert "defect" not in outcome.err


def test_weights_behind_a_link_are_refused_and_verify_says_how_to_copy_them(
    bundle: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store.bin"
    (bundle / "weights.bin").rename(store)
    (bundle / "weights.bin").symlink_to(store)
    with pytest.raises(BundleError, match="External data path escapes model directory"):
        Bundle.open(bundle).session()
    outcome = run("verify", bundle)
    assert outcome.code == 3
    assert "is a symbolic link. Copy the bundle with links followed: cp -rL" in outcome.error
    copied = tmp_path / "copied"
    shutil.copytree(bundle, copied)
    assert run("verify", copied, "-q").code == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "schema None, but this version reads schema 1"),
        ('{"schema": 2}', "schema 2, but this version reads schema 1"),
        ('{"schema": "1"}', "schema '1', but this version reads schema 1"),
        ('{"schema": 1}', "not a complete manifest"),
        ('{"schema": 1, "layers": 5, "source": {}, "graphs": []}', "not a complete manifest"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_manifest_that_cannot_be_read_is_an_error(
    bundle: Path, command: str, content: str, message: str
) -> None:
    (bundle / "manifest.json").write_text(content)
    outcome = run(command, bundle)
    assert (outcome.code, outcome.out) == (1, "")
    assert message in outcome.error
    assert "defect" not in outcome.err


@pytest.mark.parametrize("key", ["inputs", "outputs", "layers", "graphs"])
def test_a_manifest_without_entries_is_an_error(bundle: Path, key: str, tmp_path: Path) -> None:
    change_manifest(bundle, lambda m: m.__setitem__(key, []))
    np.savez(tmp_path / "x.npz", input=np.zeros((1, 3, 32, 32), np.float32))
    outcome = run("run", bundle, "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz", "--k", "1")
    assert outcome.code == 1
    assert "not a complete manifest" in outcome.error


def test_a_folder_that_is_no_bundle_is_an_error(tmp_path: Path) -> None:
    outcome = run("verify", tmp_path)
    assert (outcome.code, outcome.out) == (1, "")
    assert "not a bundle (there is no manifest.json)" in outcome.error


def test_an_unverified_bundle_says_so_and_does_not_pass(tmp_path: Path) -> None:
    weights = DATA / "soft_moe_lucidrains" / "weights.pt"
    out = tmp_path / "out"
    outcome = run("export", weights, "-o", out, "--no-verify")
    assert outcome.code == 0, outcome.err
    assert manifest(out)["parity"] is None
    assert any("--no-verify" in note for note in manifest(out)["notes"])
    assert not (out / "parity.npz").exists()
    assert failed_checks(out) == {
        "parity": "the bundle was exported with --no-verify: no reference"
    }


def test_inspect_shows_a_bundle(exported: Path) -> None:
    outcome = run("inspect", exported)
    assert outcome.code == 0, outcome.err
    for text in ("soft-moe-vit", "onnx, fp32, opset 20", *LAYERS, "gather", "weights.bin"):
        assert text in outcome.out
    assert json.loads(run("inspect", exported, "--json").out) == manifest(exported)


def test_python_gets_the_same_bundle(exported: Path) -> None:
    opened = Bundle.open(str(exported))
    x = np.random.default_rng(1).standard_normal((5, 3, 32, 32)).astype(np.float32)
    main, grouped = opened.session()(x), opened.session("grouped")(x)
    assert main.shape == (5, 10)
    assert np.abs(main - grouped).max() <= 1e-5 * np.abs(main).max()
