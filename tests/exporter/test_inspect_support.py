"""`inspect --data` counts the coefficients that are not zero; such a k changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from moexport.tests.command import run
from moexport.tests.recorded import ENTMAX, RecordedCase, read_case


def feed(case: RecordedCase, folder: Path) -> Path:
    np.savez(folder / "x.npz", input=case.x)
    return folder / "x.npz"


@pytest.mark.parametrize("name", ["mumoe_cp", "mumoe_cp_block_ln"])
def test_the_support_is_that_of_the_recorded_coefficients(name: str, tmp_path: Path) -> None:
    case = read_case(name)
    outcome = run("inspect", case.weights, *ENTMAX, "--data", feed(case, tmp_path), "--json")
    assert outcome.code == 0, outcome.err
    (found,) = json.loads(outcome.out)["support"]
    sizes = (case.io["coefficients"] > 0).sum(axis=-1)
    assert found["tokens"] == sizes.size
    assert found["mean"] == pytest.approx(sizes.mean())
    assert found["p99"] == pytest.approx(np.percentile(sizes, 99))
    assert found["max"] == sizes.max()


def test_a_k_of_the_largest_support_changes_nothing(tmp_path: Path) -> None:
    case = read_case("mumoe_tr")
    found = run("inspect", case.weights, *ENTMAX, "--data", feed(case, tmp_path), "--json")
    k = json.loads(found.out)["support"][0]["max"]
    assert k < 32
    assert run("export", case.weights, *ENTMAX, "-o", tmp_path / "out", "--k", str(k)).code == 0
    ran = run("run", tmp_path / "out", "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz")
    assert ran.code == 0, ran.err
    with np.load(tmp_path / "y.npz") as arrays:
        y = arrays["output"]
    assert np.abs(y - case.y()).max() <= 1e-5 * np.abs(case.y()).max()


def test_every_layer_and_level_is_listed(tmp_path: Path) -> None:
    case = read_case("mumoe_gpt2_cp")
    outcome = run(
        "inspect", case.weights, "--set", "n_head=4", "--data", feed(case, tmp_path), "--json"
    )
    support = json.loads(outcome.out)["support"]
    assert [row["layer"] for row in support] == [
        "transformer.h.0.mlp.MuMoE_layer",
        "transformer.h.1.mlp.MuMoE_layer",
    ]
    levels = read_case("mumoe_tr_2level")
    outcome = run("inspect", levels.weights, *ENTMAX, "--data", feed(levels, tmp_path), "--json")
    rows = json.loads(outcome.out)["support"]
    assert [(row["level"], row["experts"]) for row in rows] == [(1, 16), (2, 4)]
    shown = run("inspect", levels.weights, *ENTMAX, "--data", tmp_path / "x.npz")
    assert "Nonzero coefficients" in shown.out


def test_the_cost_of_a_mumoe_is_the_same_for_every_k() -> None:
    outcome = run("inspect", read_case("mumoe_cp").weights, *ENTMAX, "--json")
    costs = json.loads(outcome.out)["costs"]
    assert {cost["macs_share"] for cost in costs} == {1.0}
    assert {cost["bytes_share"] for cost in costs} == {1.0}


def test_a_soft_moe_has_no_such_coefficients(tmp_path: Path) -> None:
    case = read_case("soft_moe_mnist")
    outcome = run("inspect", case.weights, "--data", feed(case, tmp_path))
    assert outcome.code == 2
    assert "has no muMoE layers" in outcome.error
