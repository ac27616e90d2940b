"""The ten recorded muMoE cases through the command line: export, run elsewhere, compare."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.session import Session
from moexport.graphs.sizes import TRACED_BATCH, TRACED_SIZES
from moexport.tests.command import Outcome, run
from moexport.tests.recorded import MUMOE, RecordedCase, read_case

Part = tuple[slice, ...]

RTOL = 1e-4  # of max|y|, as the recorded cases promise
FORBIDDEN = {"Einsum", "CumSum", "NonZero", "Loop", "If", "Unique", "Compress"}


def export(case: RecordedCase, folder: Path, *options: str) -> Outcome:
    config = folder / "config.json"
    config.write_text(json.dumps(case.config))
    np.savez(folder / "x.npz", input=case.x)
    arguments = ("export", case.weights, "--config", config, "--data", folder / "x.npz")
    return run(*arguments, "-o", folder / "out", *options)


def pieces(case: RecordedCase) -> list[tuple[np.ndarray, Part]]:
    """Inputs of sizes that were not traced, and the part of the recorded output that is theirs."""
    whole = case.x.astype(np.int64 if case.x.dtype.kind == "i" else np.float32)
    if whole.ndim == 2 and whole.dtype == np.float32:
        whole = whole[:, None]  # a vector is one token
    sizes = {1, len(whole)} - {TRACED_BATCH}
    found: list[tuple[np.ndarray, Part]] = [(whole[:s], (slice(s),)) for s in sorted(sizes)]
    if whole.dtype == np.int64:  # no token sees a later one, so a shorter text has the same logits
        for length in (1, 13):
            assert length != TRACED_SIZES["tokens"]
            found.append((whole[:1, :length], (slice(1), slice(length))))
    return found


def assert_recorded(case: RecordedCase, session: Session, k: int | None, given: int | None) -> None:
    for x, part in pieces(case):
        expected = case.y(k)[part]
        y = session(x, given)
        assert y.shape == expected.shape
        assert np.abs(y - expected).max() <= RTOL * np.abs(expected).max()


def ops(bundle: Path) -> list[str]:
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    return [node.op_type for node in graph.node]


@pytest.mark.parametrize("name", MUMOE)
def test_with_all_coefficients_the_model_is_what_it_was(name: str, tmp_path: Path) -> None:
    case = read_case(name)
    outcome = export(case, tmp_path)
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert bundle.manifest.source.family == case.family
    assert {layer.kind for layer in bundle.manifest.layers} == {"mumoe"}
    assert_recorded(case, bundle.session(), None, None)
    assert "TopK" not in ops(tmp_path / "out")
    assert not FORBIDDEN & set(ops(tmp_path / "out"))


@pytest.mark.parametrize("name", MUMOE)
def test_a_baked_k_keeps_the_largest_coefficients(name: str, tmp_path: Path) -> None:
    case = read_case(name)
    k = case.ks[-1]
    outcome = export(case, tmp_path, "--k", str(k))
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert [layer.k for layer in bundle.manifest.layers] == [k] * len(bundle.manifest.layers)
    assert bundle.manifest.parity is not None
    assert bundle.manifest.parity["passed"]
    assert bundle.manifest.parity["ties"] == 0
    assert_recorded(case, bundle.session(), k, None)


@pytest.mark.parametrize("name", MUMOE)
def test_k_as_an_input_serves_every_k_with_one_graph(name: str, tmp_path: Path) -> None:
    case = read_case(name)
    outcome = export(case, tmp_path, "--k", "input")
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    session = bundle.session()
    n = max(layer.experts for layer in bundle.manifest.layers)
    assert_recorded(case, session, None, n)
    for k in case.ks:
        assert_recorded(case, session, k, k)


def test_a_bundle_verifies_and_runs_on_vectors_as_on_single_tokens(tmp_path: Path) -> None:
    case = read_case("mumoe_cp")
    assert export(case, tmp_path, "--k", "8").code == 0
    verified = run("verify", tmp_path / "out")
    assert verified.code == 0, verified.err
    ran = run("run", tmp_path / "out", "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    assert ran.code == 0, ran.err
    with np.load(tmp_path / "y.npz") as arrays:
        y = arrays["output"]
    assert y.shape == case.y(8).shape
    assert np.abs(y - case.y(8)).max() <= RTOL * np.abs(case.y(8)).max()


def test_a_layer_can_be_exported_for_vectors(tmp_path: Path) -> None:
    case = read_case("mumoe_tr")
    outcome = export(case, tmp_path, "--set", "input_rank=2", "--k", "2")
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert bundle.manifest.inputs[0].shape == ("batch", 24)
    assert bundle.manifest.outputs[0].shape == ("batch", 1, 10)
    y = bundle.session()(case.x[:3])
    assert np.abs(y - case.y(2)[:3]).max() <= RTOL * np.abs(case.y(2)).max()


def test_a_text_longer_than_the_positions_is_refused(tmp_path: Path) -> None:
    case = read_case("mumoe_gpt2_cp")
    refused = export(case, tmp_path, "--tokens", "1:16:64")
    assert refused.code == 2
    assert "the model accepts at most 32" in refused.error
    assert export(case, tmp_path).code == 0
    np.savez(tmp_path / "long.npz", input_ids=np.zeros((1, 33), dtype=np.int64))
    ran = run("run", tmp_path / "out", "-i", tmp_path / "long.npz", "-o", tmp_path / "y.npz")
    assert ran.code == 1
    assert "33 tokens" in ran.error
    for wrong in (96, -1):
        ids = np.array([[3, wrong, 5]])
        np.savez(tmp_path / "ids.npz", input_ids=ids)
        ran = run("run", tmp_path / "out", "-i", tmp_path / "ids.npz", "-o", tmp_path / "y.npz")
        assert ran.code == 1
        expected = f"input 'input_ids' contains {wrong}, but the model accepts only 0 to 95"
        assert ran.error == expected
    assert not (tmp_path / "y.npz").exists()


def test_without_data_random_token_ids_are_compared(tmp_path: Path) -> None:
    case = read_case("mumoe_gpt2_tr")
    outcome = run(
        *("export", case.weights, "--set", "n_head=4", "-o", tmp_path / "out", "--k", "16")
    )
    assert outcome.code == 0, outcome.err
    assert Bundle.open(tmp_path / "out").manifest.inputs[0].name == "input_ids"


def test_renormalising_coefficients_is_refused(tmp_path: Path) -> None:
    outcome = export(read_case("mumoe_cp"), tmp_path, "--k", "2", "--renormalize")
    assert outcome.code == 2
    assert "is a mumoe layer" in outcome.error


def test_a_lowering_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    outcome = export(read_case("mumoe_cp"), tmp_path, "--lowering", "gather")
    assert outcome.code == 1
    assert "it is for soft-moe layers" in outcome.error
    assert "factorised" in outcome.hint
