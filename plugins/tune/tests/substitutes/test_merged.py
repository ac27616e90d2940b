"""One expert in place of all of a muMoE layer: the mean of the experts, and a search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import moexport
import numpy as np
import onnx
import pytest
import torch
from moexport.bench.data import LabelledData
from moexport.errors import UsageError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.bundle.substitutes import SUBSTITUTES_FILE, read_substitutes
from moexport.exporter.families.mumoe_mixer import MixerSpec
from moexport.exporter.model import edited
from moexport.graphs.edits import Edits, MergedExperts
from moexport.graphs.layers.mumoe import Form, GateActivation, MuMoESpec
from moexport.plugins.demo import digits
from moexport.plugins.demo.mumoe import fit, save, trainable_mixer
from moexport.plugins.tune.recipe import read_recipe
from moexport.plugins.tune.substitutes.constants import RIDGE
from moexport.plugins.tune.substitutes.merged import merged_matrices
from moexport.plugins.tune.tune import Tuned
from moexport.tests.command import run
from moexport.tests.graphs.mumoe_layers import FORMS, random_layer, tensor
from moexport.tests.recorded import DATA, MUMOE, read_case

pytestmark = pytest.mark.slow


def layers_of(form: Form) -> list[MuMoESpec]:
    """A layer of one tensor, and a block of two whose experts have two levels."""
    block = (tensor(form, (3, 2), 6, 9, bias=False), tensor(form, (3, 2), 9, 5, bias=True))
    return [
        MuMoESpec("layer", (tensor(form, (4,), 6, 9, bias=True),), "ln", "entmax15"),
        MuMoESpec("layer", block, "ln", "softmax"),
    ]


SPECS = [spec for form in FORMS for spec in layers_of(form)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.form}-{len(spec.tensors)}")
def test_experts_that_always_mix_alike_are_merged_without_a_loss(spec: MuMoESpec) -> None:
    layer = random_layer(spec)
    for projection in layer.projections:
        projection.zero_()  # every token has the same coefficients
    tokens = torch.randn(3, 40, spec.dim, generator=torch.Generator().manual_seed(1))
    matrices = merged_matrices(layer, [tokens])
    assert [each.shape for each in matrices] == [(t.dim + 1, t.out) for t in spec.tensors]
    other = torch.randn(2, 5, spec.dim, generator=torch.Generator().manual_seed(2))
    wanted = layer(other)
    found = layer.merged([*map(torch.from_numpy, matrices)])(other)
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("activation", ["entmax15", "softmax"])
def test_a_matrix_is_the_least_squares_of_what_the_experts_give(activation: GateActivation) -> None:
    layer = random_layer(
        MuMoESpec("layer", (tensor("cp", (4,), 6, 9, bias=True),), "ln", activation)
    )
    tokens = torch.randn(4, 40, 6, generator=torch.Generator().manual_seed(1))
    (found,) = merged_matrices(layer, [tokens])
    with torch.inference_mode():
        (a,) = layer.coefficients(tokens)
        z, y = tokens.flatten(0, 1).double().numpy(), layer(tokens).flatten(0, 1).double().numpy()
    experts, inputs, outputs = (f.double().numpy() for f in layer.factors(0))
    mean = np.einsum(
        "n,nr,dr,or->do", a.double().mean(dim=(0, 1)).numpy(), experts, inputs, outputs
    )
    z = np.hstack([z, np.ones((len(z), 1))])
    root = np.sqrt(RIDGE * np.square(z).sum() / 7)
    # The ridge towards the mean of the experts, as further rows of which it is the solution.
    best, *_ = np.linalg.lstsq(np.vstack([z, root * np.eye(7)]), np.vstack([y, root * mean]))
    assert np.abs(found - best).max() <= 1e-5 * np.abs(best).max()
    left, least, all_of_it = (np.square(z @ each - y).sum() for each in (found, mean, 0 * mean))
    assert left < least < all_of_it


def with_random_matrices(model: moexport.Model) -> dict[str, np.ndarray]:
    random, found = np.random.default_rng(3), {}
    for name, layer in model.layers.items():
        assert isinstance(layer.spec, MuMoESpec)
        for index, each in enumerate(layer.spec.tensors):
            shape = (each.dim + 1, each.out)
            numbers = random.standard_normal(shape) / np.sqrt(each.dim)
            found[MergedExperts(name).key(index)] = numbers.astype(np.float32)
    return found


@pytest.mark.parametrize("name", MUMOE)
def test_a_family_with_merged_experts_is_exported_without_a_gate(name: str, tmp_path: Path) -> None:
    case = read_case(name)
    model = moexport.load(case.weights, config=case.config)
    edits = Edits(tuple(map(MergedExperts, model.layers)))
    changed = edited(model, edits.with_substitutes(with_random_matrices(model)))
    bundle = moexport.export(changed, tmp_path / "out", data=case.x)
    assert all(check.passed for check in bundle.verify())
    nodes = onnx.load(bundle.path / "model.onnx", load_external_data=False).graph.node
    own = [node for node in nodes if any(node.name.startswith(f"{each}/") for each in model.layers)]
    assert own
    gates = {"ReduceL2", "TopK", "Softmax", "Relu", "ReduceMax"}
    assert not {node.op_type for node in own} & gates
    # Unchanged, the network returns something different.
    reference = np.load(bundle.path / "parity.npz")
    assert np.abs(reference["y"] - reference["dense"]).max() > 1e-3


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_merged_experts_are_computed_in_other_precisions(
    precision: Literal["fp16", "int8"], tmp_path: Path
) -> None:
    case = read_case("mumoe_mixer_cp")
    model = moexport.load(case.weights, config=case.config)
    edits = Edits(tuple(map(MergedExperts, model.layers)))
    changed = edited(model, edits.with_substitutes(with_random_matrices(model)))
    bundle = moexport.export(changed, tmp_path / "out", data=case.x, precision=precision)
    assert {layer.precision for layer in bundle.manifest.layers} == {precision}
    assert all(check.passed for check in bundle.verify())


def test_only_the_experts_of_a_mumoe_layer_are_merged() -> None:
    model = moexport.load(DATA / "soft_moe_mnist" / "weights.pt")
    (name,) = model.layers
    with pytest.raises(UsageError, match="the experts of a soft-moe layer cannot be merged"):
        edited(model, Edits((MergedExperts(name),)))


@pytest.fixture(scope="module")
def data() -> digits.Digits:
    return digits.load_digits(test_share=0.5)


CONFIG = {"patch_size": 7, "act": "entmax15"}


@pytest.fixture(scope="module")
def checkpoint(data: digits.Digits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixer whose two layers have four experts each, trained on digits."""
    path: Path = tmp_path_factory.mktemp("merged") / "mixer.pt"
    torch.manual_seed(0)
    spec = MixerSpec(grid=(4, 4), patch=7, channels=1, dim=32, depth=1, classes=digits.CLASSES)
    images, labels = torch.from_numpy(data.train.inputs), torch.from_numpy(data.train.labels)
    rows = [r for _ in range(12) for r in torch.split(torch.randperm(len(images)), 64)]
    batches = ((images[r], labels[r]) for r in rows)
    save(fit(trainable_mixer(spec, 4, (16, 32), 12), batches, len(rows), 5e-3), path)
    return path


def searched(checkpoint: Path, data: LabelledData, folder: Path) -> Tuned:
    model = moexport.load(checkpoint, config=CONFIG)
    return moexport.tune(model, data, folder / "tuned", keep=0.9, precision="fp32,int8")


@pytest.fixture(scope="module")
def tuned(checkpoint: Path, data: digits.Digits, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    return searched(checkpoint, data.test, tmp_path_factory.mktemp("search"))


def test_a_search_merges_experts_where_that_keeps_enough(tuned: Tuned) -> None:
    recipe = read_recipe(tuned.bundle.path / "recipe.yaml")
    merged_ones = [name for name, layer in recipe.layers.items() if layer.merged]
    assert merged_ones
    assert tuned.chosen.quality.low >= 0.9
    assert tuned.chosen.trial.ms < tuned.base.ms
    manifest = tuned.bundle.manifest
    assert manifest.edits == [{"edit": "merge", "layer": name} for name in merged_ones]
    constants = read_substitutes(tuned.bundle.path)
    assert {name.rpartition(":")[0] for name in constants} == {*merged_ones}
    page = (tuned.bundle.path / "README.md").read_text()
    assert f"merge the experts of {merged_ones[0]}" in page
    why = {layer.name: layer.reason for layer in manifest.layers}
    assert all("all experts merged into one" in why[name] for name in merged_ones)


def test_its_recipe_is_exported_again_bit_for_bit(
    tuned: Tuned, checkpoint: Path, data: digits.Digits, tmp_path: Path
) -> None:
    config, inputs = tmp_path / "config.json", tmp_path / "x.npz"
    config.write_text(json.dumps(CONFIG))
    np.savez(inputs, input=data.test.inputs[:64])  # a busy machine may find INT8 faster
    recipe = tuned.bundle.path / "recipe.yaml"
    asked = ("export", checkpoint, "--config", config, "--recipe", recipe, "--data", inputs)
    outcome = run(*asked, "-o", tmp_path / "again")
    assert outcome.code == 0, outcome.err
    for name in ("model.onnx", "weights.bin", "recipe.yaml", SUBSTITUTES_FILE):
        again = (tmp_path / "again" / name).read_bytes()
        assert again == (tuned.bundle.path / name).read_bytes(), name
    assert all(check.passed for check in Bundle.open(tmp_path / "again").verify())


def test_numbers_that_do_not_fit_the_layer_are_refused(tuned: Tuned, checkpoint: Path) -> None:
    recipe = read_recipe(tuned.bundle.path / "recipe.yaml")
    constants = read_substitutes(tuned.bundle.path)
    model, name = moexport.load(checkpoint, config=CONFIG), next(iter(constants))
    layer = name.rpartition(":")[0]
    with_more = {**constants, f"{layer}:2": constants[name]}
    for wrong, said in (
        ({}, "are missing"),
        ({**constants, name: constants[name][:-1]}, "not float32"),
        ({**constants, name: np.full_like(constants[name], np.nan)}, "not all finite"),
        (with_more, "3 matrices, but it has 2 tensors"),
        ({**constants, "head": constants[name]}, "but the layer keeps all"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            edited(model, recipe.edits.with_substitutes(wrong))
        assert layer in str(caught.value) or "head" in str(caught.value)
    other = Edits((MergedExperts("nowhere"),))
    with pytest.raises(UsageError, match="no MoE layer nowhere"):
        edited(model, other)


def test_all_experts_stay_where_that_is_asked_for(
    checkpoint: Path, data: digits.Digits, tmp_path: Path
) -> None:
    model = moexport.load(checkpoint, config=CONFIG)
    asked = {"keep": 0.9, "precision": "fp32", "all_experts": True, "time": 30}
    found = moexport.tune(model, data.test, tmp_path / "tuned", **asked)
    assert not any(c.merged for trial in found.all_trials for _, c in trial.point.layers)
