"""Graphs that take k are compared at several k: what a bundle keeps of them, and what is said."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from moexport.errors import BundleError
from moexport.exporter.bundle import parity
from moexport.exporter.bundle.parity import Reference, Rounded
from moexport.tests.command import run
from moexport.tests.exporter.bundle.test_bundle import change_reference, failed_checks, manifest
from moexport.tests.recorded import many_experts, read_case


def reference(k: int, n: int = 4) -> Reference:
    """Three inputs of which each chooses the first k of n experts."""
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    some = k < n
    return Reference(
        x=x,
        y=x * k,
        dense=x * n,
        selected={"moe": np.tile(np.arange(k), (3, 1))} if some else {},
        margin={"moe": np.full(3, k, np.float32)} if some else {},
        kept={"moe": k},
        rounded=Rounded(x * (k + 1e-6), {}),
    )


def of_several() -> Reference:
    return replace(reference(1), at_other_k={k: reference(k) for k in (2, 4)})


def assert_same(found: Reference, wanted: Reference) -> None:
    for name in ("x", "y", "dense"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name))
    assert found.kept == wanted.kept
    assert found.selected.keys() == wanted.selected.keys()
    assert found.rounded is not None and wanted.rounded is not None
    assert np.array_equal(found.rounded.y, wanted.rounded.y)
    assert found.at_other_k.keys() == wanted.at_other_k.keys()
    for k, other in found.at_other_k.items():
        assert_same(other, wanted.at_other_k[k])


def test_a_record_of_several_k_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = of_several()
    record.save(tmp_path / "parity.npz")
    assert_same(Reference.load(tmp_path / "parity.npz"), record)
    with np.load(tmp_path / "parity.npz") as arrays:
        once = {name for name in arrays.files if name.endswith(("x", "dense"))}
        assert once == {"x", "dense"}
        assert "k=2/y" in arrays and "k=4/y" not in arrays  # with all experts it is `dense`
    rows = record.rows(np.array([2, 0]))
    assert rows.at_other_k[2].y.tolist() == (record.x[[2, 0]] * 2).tolist()
    assert record.joined(rows).at_other_k[4].y.shape == (5, 2)


def test_of_large_outputs_a_record_keeps_fewer_with_other_k(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "MAX_BYTES_PER_K", 100)
    of_several().save(tmp_path / "parity.npz")
    record = Reference.load(tmp_path / "parity.npz")
    assert len(record.x) == 3
    assert [len(other.x) for other in record.at_other_k.values()] == [2, 3]
    assert record.rows(np.array([2])).y.shape == (1, 2)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("k=2/y", np.zeros((3, 5), np.float32), "with k = 2, outputs"),
        ("k=2/selected/moe", np.zeros((3, 2), np.uint8), "neither indices nor weights"),
        ("k=2/kept/other", np.array(2), "the results with k = 2 are not complete"),
        ("k=3/kept/moe", np.array(3), None),
    ],
)
def test_a_record_that_is_none_at_another_k_is_told(
    name: str, array: np.ndarray, message: str | None, tmp_path: Path
) -> None:
    of_several().save(tmp_path / "parity.npz")
    with np.load(tmp_path / "parity.npz") as stored:
        arrays = dict(stored.items())
    np.savez(tmp_path / "parity.npz", allow_pickle=False, **{**arrays, name: array})
    if message is None:  # what is left out is as with all experts
        record = Reference.load(tmp_path / "parity.npz")
        assert np.array_equal(record.at_other_k[3].y, record.dense)
        return
    with pytest.raises(BundleError, match=message):
        Reference.load(tmp_path / "parity.npz")


def test_experts_are_compared_where_a_layer_keeps_all() -> None:
    assert reference(1).compared({"moe": 4}) == {"moe": frozenset({0})}
    assert of_several().compared({"moe": 4}) == {"moe": frozenset(range(4))}
    most = replace(reference(1), at_other_k={2: reference(2)})
    assert most.compared({"moe": 4}) == {"moe": frozenset({0, 1})}


@pytest.fixture(scope="module")
def any_k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a layer of 16 experts that takes k, compared on two inputs."""
    folder = tmp_path_factory.mktemp("any_k")
    x = np.random.default_rng(0).standard_normal((2, 5, 32)).astype(np.float32)
    np.savez(folder / "x.npz", input=x)
    arguments = ("export", many_experts(folder, 16), "-o", folder / "out", "--k", "input")
    outcome = run(*arguments, "--data", folder / "x.npz", "--lowering", "gather", "--threads", "1")
    assert outcome.code == 0, outcome.err
    assert "the worst of 1, 4, 8, 16: max |difference|" in outcome.err
    assert "were not compared" not in outcome.err
    return folder / "out"


@pytest.mark.slow
def test_an_export_with_any_k_compares_four_and_with_all_each_expert(any_k: Path) -> None:
    assert manifest(any_k)["parity"]["ks"] == [1, 4, 8, 16]
    chosen = Reference.load(any_k / "parity.npz").reached()
    assert len(chosen["layer"]) < 16
    verified = run("verify", any_k)
    assert verified.code == 0
    assert "the worst of 1, 4, 8, 16" in verified.out
    assert "were not compared" not in verified.out


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 4, 8, 16])
def test_verify_refuses_what_is_wrong_with_one_k(k: int, any_k: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(any_k, tmp_path / "bundle"))

    def damage(arrays: dict[str, np.ndarray]) -> None:
        name = {4: "y", 16: "dense"}.get(k, f"k={k}/y")
        arrays[name] = arrays[name] * np.float32(1.001)

    change_reference(bundle, damage)
    (detail,) = failed_checks(bundle).values()
    assert detail.startswith(f"with k = {k}, the worst of 1, 4, 8, 16")


@pytest.mark.slow
def test_a_bundle_that_was_compared_at_one_k_verifies_as_before(
    any_k: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(any_k, tmp_path / "bundle"))

    def forget(arrays: dict[str, np.ndarray]) -> None:
        for name in [name for name in arrays if name.startswith("k=")]:
            del arrays[name]

    change_reference(bundle, forget)
    verified = run("verify", bundle)
    assert verified.code == 0
    assert "the worst of" not in verified.out
    assert "experts that no input chose were not compared" in verified.out


@pytest.mark.slow
def test_a_quarter_half_and_all_of_each_level_are_compared(tmp_path: Path) -> None:
    case = read_case("mumoe_cp_2level")
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    arguments = ("export", case.weights, "--config", tmp_path / "config.json", "--k", "input")
    outcome = run(*arguments, "-o", tmp_path / "out", "--threads", "1")
    assert outcome.code == 0, outcome.err
    assert manifest(tmp_path / "out")["layers"][0]["levels"] == [16, 4]
    assert manifest(tmp_path / "out")["parity"]["ks"] == [1, 2, 4, 8, 16]
