"""Manifests, and what commands print as JSON, without what is of one machine or run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moexport.plugins.token_routed.tests.test_vmoe_vit import config_file
from moexport.plugins.token_routed.tests.test_vmoe_vit import read_case as read_jax_case
from moexport.tests.command import run
from moexport.tests.golden.golden import RECORDED, check, compared, masked, without
from moexport.tests.recorded import DATA, VIT_SETS, read_case

VIT = DATA / "soft_moe_vit" / "weights.pt"
LAYER = DATA / "soft_moe_lucidrains" / "weights.pt"
LAYER_SETS = [f"--set={key}={value}" for key, value in read_case(LAYER.parent.name).config.items()]
TABLE = ("--calibration", RECORDED / "tables" / "soft_moe_lucidrains.json")
TWO_LEVELS = DATA / "mumoe_cp_2level" / "weights.pt"


@dataclass(frozen=True)
class Written:
    """A bundle that an export writes."""

    name: str
    model: Path
    options: tuple[str | Path, ...] = ()


WRITTEN = (
    Written("two lowerings", VIT, (*VIT_SETS, "--k", "4,2", "--lowering", "gather,grouped")),
    Written("k input", TWO_LEVELS, ("--set", "act=entmax15", "--k", "input")),
    Written(
        "edits",
        TWO_LEVELS,
        ("--set", "act=entmax15", "--k", "2", "--ablate", "layer:1.0", "--expose-routing"),
    ),
    Written("steer", TWO_LEVELS, ("--set", "act=entmax15", "--steer", "layer:1.0")),
    Written("routing", VIT, (*VIT_SETS, "--k", "2", "--expose-routing", "--target", "ort-cpu")),
    Written("fp16", LAYER, ("--k", "2", "--precision", "fp16", "--batch", "2:4:9")),
    Written(
        "int8", LAYER, (*LAYER_SETS, "--k", "2", "--precision", "int8", "--data", "x.npz", *TABLE)
    ),
    Written("one batch", LAYER, ("--k", "0.5", "--batch", "4", "--tokens", "5")),
    Written("capacity", read_jax_case("jax_vmoe_every2_k1_indices").index, ("--config", "c.json")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    np.savez(folder / "x.npz", input=read_case("soft_moe_lucidrains").x)
    config_file(read_jax_case("jax_vmoe_every2_k1_indices"), folder).rename(folder / "c.json")
    return folder


def printed(folder: Path, *words: str | Path) -> dict[str, Any]:
    """What a command prints as JSON, and its exit code."""
    outcome = run(*words, "--json")
    return {"code": outcome.code, "json": masked(json.loads(outcome.out), (folder,))}


@pytest.mark.parametrize("written", WRITTEN, ids=lambda written: written.name)
def test_a_bundle_is_as_recorded(
    written: Written, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    words = (written.model, *written.options, "-o", tmp_path / "out")
    found: dict[str, Any] = {"dry run": printed(tmp_path, "export", *words, "--dry-run")}
    outcome = run("export", *words)
    assert outcome.code == 0, outcome.err
    text = (tmp_path / "out" / "manifest.json").read_text(encoding="utf-8")
    found["manifest"] = masked(json.loads(text), (tmp_path,))
    shown = printed(tmp_path, "inspect", tmp_path / "out")["json"]
    assert {**shown, "sha256": None} == {**found["manifest"], "sha256": None}
    verified = printed(tmp_path, "verify", tmp_path / "out")["json"]
    found["verify"] = masked({each["name"]: each["passed"] for each in verified["checks"]})
    check(f"bundles/{written.name.replace(' ', '_')}", found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vit", ("inspect", VIT, *VIT_SETS)),
        ("layer", ("inspect", LAYER)),
        ("mumoe", ("inspect", TWO_LEVELS, "--set", "act=entmax15")),
    ],
)
def test_what_inspect_prints_of_a_model_is_as_recorded(
    name: str, words: tuple[str | Path, ...], tmp_path: Path
) -> None:
    check(f"inspect/{name}", printed(tmp_path, *words))


def test_the_keys_that_doctor_prints_are_as_recorded() -> None:
    outcome = run("doctor", "--json")
    content = json.loads(outcome.out)
    content["environment"]["packages"] = {}  # those that are installed
    check("doctor", {key: sorted(_names(value)) for key, value in content.items()})


def _names(value: Any) -> set[str]:
    """The keys of a JSON value's objects."""
    if isinstance(value, Mapping):
        return {*value, *(key for inner in value.values() for key in _names(inner))}
    if isinstance(value, list):
        return {key for inner in value for key in _names(inner)}
    return set()


def test_a_manifest_with_another_field_is_told_from_the_recorded_one() -> None:
    text = (RECORDED / "bundles" / "two_lowerings.json").read_text(encoding="utf-8")
    recorded, damaged = json.loads(text), json.loads(text)
    damaged["manifest"]["layers"][0]["k"] += 1
    assert compared(recorded, recorded) == []
    assert compared(recorded, damaged) == ["/manifest/layers/0/k: 4 was 5 now"]


def test_a_text_without_the_folders_of_a_run(tmp_path: Path) -> None:
    assert without(f"{tmp_path}/out differs", (tmp_path,)) == "…/out differs"
