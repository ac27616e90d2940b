"""`specialise` counts which experts are chosen, by class and layer, and how evenly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.exporter.checkpoints.load import load
from moexport.plugins.demo.digits import SoftMoEMnist, load_digits, save
from moexport.plugins.studies.specialise import Specialisation
from moexport.plugins.studies.usage.count import LayerUsage, Members
from moexport.plugins.token_routed.tests.test_vmoe_vit import read_case
from moexport.tests.bench.heads import trained_head
from moexport.tests.command import run
from moexport.tests.graphs.mumoe_layers import mumoe_layers
from moexport.tests.recorded import DATA, ENTMAX


@pytest.fixture(scope="module")
def saved(trained: SoftMoEMnist, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("digits")
    save(trained, folder / "digits.pt")
    test = load_digits().test
    assert test.labels is not None
    np.savez(folder / "test.npz", input=test.inputs[:120], label=test.labels[:120])
    return folder / "digits.pt", folder / "test.npz"


def combined(saved: tuple[Path, Path]) -> tuple[np.ndarray, np.ndarray]:
    """C of each input summed over the tokens and the slots, over m, [s, n], and the labels."""
    checkpoint, data = saved
    seen: list[Any] = []
    model = moexport.load(checkpoint)
    layer: Any = next(iter(model.layers.values()))
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with np.load(data) as arrays:
        x, labels = arrays["input"], arrays["label"]
    with torch.no_grad():
        model.module(torch.from_numpy(x))
        phi, normed = layer.phi.double(), layer.double().normalise(seen[0].double())
    logits = np.einsum("smd,dnp->smnp", normed.numpy(), phi.numpy())
    powers = np.exp(logits - logits.max(axis=(2, 3), keepdims=True))
    c = powers / powers.sum(axis=(2, 3), keepdims=True)
    return c.sum(axis=(1, 3)) / c.shape[1], labels


def usage(found: Specialisation) -> tuple[LayerUsage, ...]:
    assert found.usage is not None
    return found.usage.layers


def test_algorithm_1_is_counted_by_class(saved: tuple[Path, Path]) -> None:
    share, labels = combined(saved)
    (layer,) = usage(moexport.specialise(moexport.load(saved[0]), saved[1], k=2))
    chosen = np.zeros_like(share)
    np.put_along_axis(chosen, np.argsort(-share, axis=1)[:, :2], 1.0, axis=1)
    assert (layer.k, layer.chosen_by, layer.of) == (2, "inputs", 120)
    assert layer.chosen == pytest.approx(chosen.mean(axis=0).tolist())
    assert layer.gates == pytest.approx(share.mean(axis=0).tolist(), rel=1e-5)
    assert [group.group for group in layer.groups] == list(range(10))
    for group in layer.groups:
        rows = labels == group.group
        assert group.of == rows.sum()
        assert group.chosen == pytest.approx(chosen[rows].mean(axis=0).tolist())
        assert group.gates == pytest.approx(share[rows].mean(axis=0).tolist(), rel=1e-5)


def test_where_all_experts_are_kept_the_mean_gates_tell(saved: tuple[Path, Path]) -> None:
    share, _ = combined(saved)
    (layer,) = usage(moexport.specialise(moexport.load(saved[0]), saved[1]))
    assert layer.chosen is None and layer.unused == () and layer.k == layer.experts
    assert layer.gates == pytest.approx(share.mean(axis=0).tolist(), rel=1e-5)
    outcome = run("specialise", saved[0], "--data", saved[1])
    assert "all experts are kept in layer: nothing is chosen, so" in outcome.out
    assert "experts of layer, mean gate" in outcome.out


def test_the_command_writes_counts_and_names_experts_that_no_input_chose(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    share, _ = combined(saved)
    unused = sorted(set(range(share.shape[1])) - set(share.argmax(axis=1)))
    assert unused, "the network uses all of its experts"
    outcome = run(*("specialise", saved[0], "--data", saved[1], "--k", "1", "-o", tmp_path / "out"))
    assert outcome.code == 0, outcome.err
    named = ", ".join(map(str, unused))
    assert f"{named} of layer " in outcome.out
    assert "chosen for none of the 120 inputs" in outcome.out
    assert "nan" not in outcome.out.lower()
    found = json.loads((tmp_path / "out" / "specialise.json").read_text())["usage"]
    assert [layer["k"] for layer in found] == [1]
    assert sum(found[0]["chosen"]) == pytest.approx(1)
    assert (tmp_path / "out" / "usage.png").stat().st_size > 10_000


def test_coefficients_of_a_hierarchy_are_counted_by_level(tmp_path: Path) -> None:
    checkpoint, data = trained_head(tmp_path, (6, 3))
    model = load(checkpoint, sets=["act=entmax15"])
    with np.load(data) as arrays:
        x, odd = arrays["input"][:, None], arrays["odd"]
    (layer,) = mumoe_layers(model.module).values()
    levels = usage(moexport.specialise(model, data, group_by="odd"))
    assert [level.level for level in levels] == [1, 2]
    for level, a in zip(levels, layer.coefficients(torch.from_numpy(x)), strict=True):
        wanted = a[:, 0].double().numpy()
        assert level.gates == pytest.approx(wanted.mean(axis=0).tolist(), rel=1e-5, abs=1e-9)
        assert level.chosen == pytest.approx((wanted != 0).mean(axis=0).tolist())
        assert [group.group for group in level.groups] == [False, True]
        inside = wanted[odd]
        assert level.groups[1].gates == pytest.approx(inside.mean(axis=0).tolist(), rel=1e-5)
    kept = usage(moexport.specialise(model, data, k=2))
    assert [sum(level.chosen or ()) for level in kept] <= [2.0, 2.0]
    outcome = run("specialise", checkpoint, *ENTMAX, "--data", data, "--k", "2")
    assert "layer level 2  2 of 3" in outcome.out


@pytest.mark.parametrize("name", ["jax_vmoe_last2_k2", "jax_vmoe_every2_k1_indices"])
def test_a_v_moe_s_routers_and_capacities_are_counted_as_recorded(name: str) -> None:
    case = read_case(name)
    batch = max(case.batches)
    model = load(case.index, config=case.config)
    if batch < model.batch_of or f"routing_b{batch}" not in "".join(case.io):
        batch = model.batch_of
    labels = np.arange(batch) % 2
    found = usage(moexport.specialise(model, {"input": case.x(batch), "label": labels}))
    for layer in found:
        block = int(layer.layer.split(".")[1])
        gates, chosen, kept = (
            case.routing(batch, block, what).astype(np.float64)
            for what in ("gates", "chosen", "kept")
        )
        taken = np.eye(layer.experts)[chosen.astype(int)]  # [b, m, k, n]
        f, p = taken.sum(axis=2).mean(axis=(0, 1)), gates.mean(axis=(0, 1))
        of = taken.sum(axis=(0, 1, 2))
        lost = (taken * (1 - kept)[..., None]).sum(axis=(0, 1, 2))
        assert layer.of == gates.shape[0] * gates.shape[1]
        assert layer.chosen == pytest.approx(f.tolist())
        assert layer.probabilities == pytest.approx(p.tolist(), rel=1e-3, abs=1e-6)
        assert layer.balance_loss == pytest.approx(layer.experts * float(f @ p), rel=1e-3)
        assert layer.dropped == pytest.approx(float(1 - kept.mean()))
        assert layer.uncomputed == pytest.approx(float((kept.sum(axis=2) == 0).mean()))
        assert layer.overflow is not None
        for expert, share in enumerate(layer.overflow):
            wanted = lost[expert] / of[expert] if of[expert] else None
            assert share == (None if wanted is None else pytest.approx(wanted))
        first = layer.groups[0]
        rows = labels == 0
        assert first.chosen == pytest.approx(taken[rows].sum(axis=2).mean(axis=(0, 1)).tolist())


def test_a_text_model_of_one_input_needs_no_labels(tmp_path: Path) -> None:
    folder = DATA / "mumoe_gpt2_cp"
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((folder / "meta.json").read_text())["config"])
    )
    ids = np.random.default_rng(0).integers(0, 5, (6, 7))
    np.savez(tmp_path / "x.npz", input_ids=ids)
    outcome = run(
        *("specialise", folder / "weights.pt", "--config", tmp_path / "config.json", "--json"),
        *("--data", tmp_path / "x.npz"),
    )
    assert outcome.code == 0, outcome.err
    layers = json.loads(outcome.out)["usage"]
    assert [layer["of"] for layer in layers] == [42] * len(layers)
    assert all(sum(layer["gates"]) == pytest.approx(1, rel=1e-5) for layer in layers)


@pytest.mark.parametrize(
    ("k", "says"),
    [
        ("input", "--k input: experts are counted at one k"),
        ("9", "layer layer has 4 experts"),
        ("2,2", "2 values for 1 MoE layers"),
        ("half", "--k half: not a number of experts"),
    ],
)
def test_a_k_that_cannot_be_is_refused(k: str, says: str, saved: tuple[Path, Path]) -> None:
    outcome = run("specialise", saved[0], "--data", saved[1], "--k", k)
    assert outcome.code == 2
    assert says in outcome.error


def test_groups_are_classes_of_inputs_or_tokens_attributes_or_subgroups() -> None:
    classes = Members.of(np.array([2, 0, 2]), None, None)
    assert (classes.name, classes.values) == ("class", (0, 2))
    assert classes.members.tolist() == [[False, True], [True, False], [False, True]]
    tokens = Members.of(np.array([[1, -1], [0, 1]]), None, 2)
    assert (tokens.name, tokens.values, tokens.members.shape) == ("class", (0, 1), (2, 2, 2))
    assert not tokens.members[0, 1].any()  # −1: none
    attributes = Members.of(np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), None, None)
    assert (attributes.name, attributes.values) == ("attribute", (0, 1, 2))
    assert attributes.members.sum(axis=0).tolist() == [1, 0, 2]
    subgroups = Members.of(np.array([2, 0, 2]), np.array(["b", "a", "b"]), None)
    assert (subgroups.name, subgroups.values) == ("subgroup", ("a", "b"))
    for labels in (None, np.array([[0.5, 0.1], [1.5, 0.0]])):
        assert Members.of(labels, None, None).values == ()


def test_attributes_without_positives_have_no_row(tmp_path: Path) -> None:
    checkpoint, data = trained_head(tmp_path)
    with np.load(data) as arrays:
        x, digit = arrays["input"], arrays["label"]
    labels = np.zeros((len(x), 10), np.int64)
    labels[:, 0], labels[:, 4] = digit % 2, digit > 4
    np.savez(tmp_path / "many.npz", input=x, label=labels)
    outcome = run("specialise", checkpoint, *ENTMAX, "--data", tmp_path / "many.npz", "--json")
    assert outcome.code == 0, outcome.err
    (layer,) = json.loads(outcome.out)["usage"]
    assert [(group["group"], group["of"]) for group in layer["groups"]] == [
        (0, int(labels[:, 0].sum())),
        (4, int(labels[:, 4].sum())),
    ]
