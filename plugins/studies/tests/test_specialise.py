"""`specialise` reports the effect of removing each expert, as single removals show it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from matplotlib.image import imread
from moexport.bench.data import LabelledData
from moexport.plugins.demo.digits import SoftMoEMnist, load_digits, save
from moexport.plugins.studies.specialise import ExpertEffect, Specialisation, polysemanticity
from moexport.tests.bench.heads import trained_head
from moexport.tests.command import run, run_program
from moexport.tests.graphs.mumoe_layers import mumoe_layers
from moexport.tests.recorded import DATA, ENTMAX

CONFIG = {"input_rank": 2, "act": "entmax15"}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return trained_head(tmp_path_factory.mktemp("head"))


def said(checkpoint: Path) -> dict[str, str]:
    """The settings of a checkpoint that its shapes do not determine."""
    state = torch.load(checkpoint, weights_only=True)
    return {"act": "entmax15"} if "projs.0" in state else {}


def right_by_class(checkpoint: Path, data: Path) -> list[float]:
    """The accuracy of each class, computed the plain way."""
    with np.load(data) as arrays:
        x, labels = arrays["input"], arrays["label"]
    model = moexport.load(checkpoint, config=said(checkpoint))
    with torch.no_grad():
        y = model.module(torch.from_numpy(x if x.ndim > 2 else x[:, None])).numpy()
    predicted = y.reshape(len(x), -1).argmax(axis=1)
    return [float((predicted[labels == c] == c).mean()) for c in range(10)]


def differences(each: ExpertEffect, found: Specialisation) -> list[float]:
    pairs = zip(each.accuracy, found.accuracy, strict=True)
    return [now - was for now, was in pairs if now is not None and was is not None]


def without(checkpoint: Path, places: dict[str, int], folder: Path) -> Path:
    """The checkpoint with zeros in the first axis of some tensors."""
    state = torch.load(checkpoint, weights_only=True)
    for key, place in places.items():
        state[key][place] = 0
    torch.save(state, folder / "without.pt")
    return folder / "without.pt"


def test_a_mumoe_s_experts_are_removed_one_by_one(head: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, data = head
    found = moexport.specialise(moexport.load(checkpoint, config=said(checkpoint)), data)
    assert found.accuracy == pytest.approx(right_by_class(checkpoint, data))
    assert [(e.level, e.expert) for e in found.experts] == [(1, e) for e in range(12)]
    for each in found.experts:
        other = without(checkpoint, {"MuMoE.factors.0": each.expert}, tmp_path)
        assert each.accuracy == pytest.approx(right_by_class(other, data))
        assert each.change == pytest.approx(differences(each, found))
        assert each.polysemanticity == polysemanticity(found.accuracy, each.change)
    assert any(e.polysemanticity is not None for e in found.experts)
    assert any(e.inputs < sum(found.samples) for e in found.experts)  # zeros are skipped


def test_a_soft_moe_s_experts_are_removed_one_by_one(trained: SoftMoEMnist, tmp_path: Path) -> None:
    checkpoint, data = tmp_path / "digits.pt", tmp_path / "test.npz"
    save(trained, checkpoint)
    test = load_digits().test
    assert test.labels is not None
    np.savez(data, input=test.inputs[:120], label=test.labels[:120])
    found = moexport.specialise(moexport.load(checkpoint, config=said(checkpoint)), data)
    assert found.kind == "soft-moe"
    assert [group.coefficients for group in found.groups] == [()] * 10
    for each in found.experts:
        assert each.inputs == 120
        state = torch.load(checkpoint, weights_only=True)
        state[f"experts.{each.expert}.3.weight"].zero_()
        torch.save(state, tmp_path / "without.pt")
        assert each.accuracy == pytest.approx(right_by_class(tmp_path / "without.pt", data))


def test_every_level_of_a_hierarchy_is_looked_at(tmp_path: Path) -> None:
    checkpoint, data = trained_head(tmp_path, (6, 3))
    found = moexport.specialise(moexport.load(checkpoint, config=CONFIG), data)
    assert found.levels == (6, 3)
    assert [(e.level, e.expert) for e in found.experts[5:]] == [(1, 5), (2, 0), (2, 1), (2, 2)]
    other = without(checkpoint, {"MuMoE.factors.1": 2}, tmp_path)
    assert found.experts[-1].accuracy == pytest.approx(right_by_class(other, data))
    assert [len(mean) for mean in found.groups[0].coefficients] == [6, 3]
    assert "2.1" in run("specialise", checkpoint, *ENTMAX, "--data", data).out


def test_groups_have_the_mean_coefficients_of_their_inputs(head: tuple[Path, Path]) -> None:
    checkpoint, data = head
    model = moexport.load(checkpoint, config=said(checkpoint))
    with np.load(data) as arrays:
        x, odd = arrays["input"][:, None], arrays["odd"]
    (layer,) = mumoe_layers(model.module).values()
    (a,) = layer.coefficients(torch.from_numpy(x))
    found = moexport.specialise(model, data, group_by="odd")
    assert [(group.group, group.samples) for group in found.groups] == [
        (False, int((~odd).sum())),
        (True, int(odd.sum())),
    ]
    for group in found.groups:
        wanted = a[torch.from_numpy(odd == group.group)].double().mean(dim=(0, 1))
        assert group.coefficients[0] == pytest.approx(wanted.tolist(), rel=1e-5, abs=1e-9)
    given = LabelledData(x[:, 0], np.where(odd, 1, 0).astype(np.int64))
    same = moexport.specialise(model, given, group_by=odd.tolist())
    assert same.groups == found.groups


def test_the_load_counts_coefficients_of_each_token(head: tuple[Path, Path]) -> None:
    checkpoint, data = head
    model = moexport.load(checkpoint, config=said(checkpoint))
    with np.load(data) as arrays:
        x = arrays["input"][:, None]
    (layer,) = mumoe_layers(model.module).values()
    a = layer.coefficients(torch.from_numpy(x))[0][:, 0].numpy()
    (load,) = moexport.specialise(model, data).load
    assert (load.level, load.tokens) == (1, 360)
    assert load.shares == pytest.approx((a >= 0.5).mean(axis=0))
    assert sum(load.largest) == 360
    assert sum(load.largest[5:]) == (a.max(axis=1) >= 0.5).sum()
    assert load.heavy == (a >= 0.5).any(axis=0).sum() > 2


def test_several_models_are_compared_by_their_numbers_of_experts(tmp_path: Path) -> None:
    for name, experts in (("b", 12), ("a", 4)):
        (tmp_path / name).mkdir()
        checkpoint, data = trained_head(tmp_path / name, (experts,))
        checkpoint.rename(tmp_path / f"{name}.pt")
    both = (tmp_path / "b.pt", tmp_path / "a.pt")
    outcome = run("specialise", *both, *ENTMAX, "--data", data, "-o", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    first, second = outcome.out.splitlines()[1:3]
    assert (first.split()[:2], second.split()[:2]) == (["a", "4"], ["b", "12"])
    assert "experts whose removal changes a class" in outcome.out
    written = json.loads((tmp_path / "out" / "polysemanticity.json").read_text())
    alone = json.loads((tmp_path / "out" / "b" / "specialise.json").read_text())
    assert written["models"][0] == alone
    assert len(imread(tmp_path / "out" / "polysemanticity.png")) > 500
    assert (tmp_path / "out" / "a" / "load.png").is_file()
    again = run("specialise", both[0], both[0], *ENTMAX, "--data", data, "-o", tmp_path / "twice")
    assert "two models have this name" in again.error
    assert not (tmp_path / "twice").exists()


def test_polysemanticity_is_the_distance_to_one_class_lost() -> None:
    assert polysemanticity((0.5, 0.9), (-0.5, 0.0)) == 0
    assert polysemanticity((1.0, 0.8, 1.0), (-0.5, 0.2, 0.0)) == pytest.approx(
        math.hypot(0.5, 0.25)
    )
    assert polysemanticity((1.0, None, 0.0), (-1.0, None, 0.5)) == 0  # nothing to lose there
    assert polysemanticity((1.0, 0.8), (0.0, 0.0)) is None
    assert polysemanticity((1.0, 1.0), (-1.0, 1e-9)) == pytest.approx(1e-9)  # not 1 + 1e-18 − 1


@pytest.mark.path
def test_the_command_writes_json_and_a_figure(head: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, data = head
    outcome = run("specialise", checkpoint, *ENTMAX, "--data", data, "-o", tmp_path / "experts")
    assert outcome.code == 0, outcome.err
    assert "layer       layer: 12 experts, all kept" in outcome.out
    assert {path.name for path in (tmp_path / "experts").iterdir()} == {
        "specialise.json",
        "specialise.png",
        "load.png",
        "usage.png",
    }
    written = json.loads((tmp_path / "experts" / "specialise.json").read_text())
    assert (written["schema"], written["kind"], written["levels"]) == (1, "mumoe", [12])
    assert [group["group"] for group in written["groups"]] == list(range(10))
    assert len(imread(tmp_path / "experts" / "specialise.png")) > 500
    program = run_program("specialise", checkpoint, *ENTMAX, "--data", data, "--json")
    assert json.loads(program.out) == written


def test_a_layer_whose_experts_change_nothing_is_drawn_too(tmp_path: Path) -> None:
    state = torch.load(DATA / "mumoe_cp" / "weights.pt", weights_only=True)
    state["MuMoE.factors.2"].zero_()  # every input is class 0, whatever is removed
    torch.save(state, tmp_path / "dead.pt")
    np.savez(tmp_path / "x.npz", input=np.ones((3, 24), np.float32), label=[0, 0, 1])
    outcome = run(
        "specialise", tmp_path / "dead.pt", *ENTMAX, "--data", tmp_path / "x.npz", "-o", tmp_path
    )
    assert outcome.code == 0, outcome.err
    assert "experts     0 of 32 change" in outcome.out
    assert json.loads((tmp_path / "specialise.json").read_text())["mean_polysemanticity"] is None


@pytest.mark.parametrize(
    ("change", "options", "message", "hint"),
    [
        ({"label": None}, (), "needs labels, but 'input' has none", "label=…"),
        ({"label": np.full(360, 10)}, (), "labels outside 0..9", "10 classes"),
        ({}, ("--layer", "head"), "--layer head: the model has no such", "its MoE layers: layer"),
        ({}, ("--group-by", "sex"), "no array 'sex' to group", "it contains input, label, odd"),
        ({"odd": np.ones((360, 2))}, ("--group-by", "odd"), "subgroups are an integer", "True"),
        ({"input": np.zeros((360, 7), np.float32)}, (), "not float32 (360, 1, 7)", ""),
    ],
)
def test_data_and_options_that_cannot_be_meant(
    change: dict[str, np.ndarray | None],
    options: tuple[str, ...],
    message: str,
    hint: str,
    head: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    checkpoint, data = head
    with np.load(data) as arrays:
        held = {k: v for k, v in {**arrays, **change}.items() if v is not None}
    np.savez(tmp_path / "test.npz", **held)
    outcome = run(
        *("specialise", checkpoint, *ENTMAX),
        *("--data", tmp_path / "test.npz", "-o", tmp_path / "out"),
        *options,
    )
    assert outcome.code == (2 if "--layer" in options else 1)
    assert message in outcome.error
    assert hint in outcome.err
    assert not (tmp_path / "out").exists()


def test_a_language_model_does_not_classify(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"n_head": 2}))
    np.savez(tmp_path / "x.npz", input_ids=np.zeros((2, 5), np.int64), label=[0, 1])
    meta = json.loads((DATA / "mumoe_gpt2_cp" / "meta.json").read_text())
    config.write_text(json.dumps(meta["config"]))
    outcome = run(
        *("specialise", DATA / "mumoe_gpt2_cp" / "weights.pt", "--config", config),
        *("--data", tmp_path / "x.npz"),
    )
    assert outcome.code == 1
    assert "needs outputs of shape (batch, classes)" in outcome.error
