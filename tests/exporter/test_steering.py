"""A steered export is the model whose layer sees every token moved by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.errors import FeedError, UsageError
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.model import Model, fingerprint
from moexport.graphs.layers.mumoe import MuMoE
from moexport.plugins.tune.recipe import LayerRecipe, Recipe
from moexport.tests.command import run
from moexport.tests.commands.test_errors import assert_refused
from moexport.tests.graphs.mumoe_layers import mumoe_layers
from moexport.tests.recorded import DATA, ENTMAX, VIT_SETS, read_case

CP = DATA / "mumoe_cp" / "weights.pt"  # 32 experts, 24 wide
TWO_LEVELS = DATA / "mumoe_tr_2level" / "weights.pt"  # 16 and 4 experts, 24 wide
GPT2 = DATA / "mumoe_gpt2_cp"
VIT = DATA / "soft_moe_vit" / "weights.pt"


def loaded(checkpoint: Path, **config: Any) -> moexport.Model:
    return moexport.load(checkpoint, config={"act": "entmax15", **config})


def tokens(batch: int = 3, m: int = 5) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((batch, m, 24)).astype(np.float32)


def by_hand(layer: MuMoE, x: np.ndarray, moved: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        y: torch.Tensor = layer(torch.from_numpy(x) + moved)
    return y.numpy()


def close(y: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(y - expected).max() <= 1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("k", ["n", "4"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_tokens_are_moved_before_the_gate(k: str, precision: str, tmp_path: Path) -> None:
    outcome = run(
        *("export", CP, *ENTMAX, "-o", tmp_path / "out", "--k", k, "--precision", precision),
        *("--steer", "layer:3:2.5,layer:7:-1", "--steer", "layer:9"),
        *(("--target", "ort-cuda") if precision == "fp16" else ()),
    )
    assert outcome.code == 0, outcome.err
    assert "edited: steer layer:3:2.5" in outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert bundle.manifest.edits == [
        {"edit": "steer", "layer": "layer", "expert": e, "strength": s}
        for e, s in ((3, 2.5), (7, -1.0), (9, 1.0))
    ]
    assert run("verify", tmp_path / "out").code == 0
    assert "edited      steer layer:9:1\n" in run("inspect", tmp_path / "out").out
    if precision == "fp16":
        return
    model, x = loaded(CP), tokens()
    (layer,) = mumoe_layers(model.module).values()
    layer.keep = None if k == "n" else 4
    centres = layer.projections[0].detach()
    moved = 2.5 * centres[:, 3] - centres[:, 7] + centres[:, 9]
    y = bundle.session()(x)
    assert close(y, by_hand(layer, x, moved))
    assert not close(y, by_hand(layer, x, torch.zeros(24)))


def test_strengths_are_an_input_of_the_graph(tmp_path: Path) -> None:
    steer = ("--steer", "layer:2.1,layer:1.5", "--steer", "input")
    outcome = run("export", TWO_LEVELS, *ENTMAX, "-o", tmp_path / "out", "--k", "input", *steer)
    assert outcome.code == 0, outcome.err
    bundle = Bundle.open(tmp_path / "out")
    assert [port.name for port in bundle.manifest.inputs] == ["input", "steer", "k"]
    assert bundle.manifest.inputs[1].shape == ("batch", 2)
    assert [each["strength"] for each in bundle.manifest.edits] == ["input", "input"]
    (layer,) = mumoe_layers(loaded(TWO_LEVELS).module).values()
    centres = [layer.projections[1][:, 1].detach(), layer.projections[0][:, 5].detach()]
    x, session = tokens(), bundle.session()
    assert close(session(x, 16), by_hand(layer, x, torch.zeros(24)))  # left out: none
    moved = 2.0 * centres[0] - 0.5 * centres[1]
    same = session({"input": x, "steer": np.array([2.0, -0.5], np.float32)}, 16)
    assert close(same, by_hand(layer, x, moved))
    strengths = np.array([[0, 1], [3, 0], [-1, 2]], np.float32)
    each = session({"input": x, "steer": strengths}, 16)
    for row, (first, second) in enumerate(strengths):
        moved = first * centres[0] + second * centres[1]
        assert close(each[row], by_hand(layer, x[row : row + 1], moved)[0])
    with pytest.raises(FeedError, match="a strength that is not finite"):
        session({"input": x, "steer": np.array([np.nan, 0], np.float32)}, 16)
    assert run("verify", tmp_path / "out").code == 0
    np.savez(tmp_path / "x.npz", input=x, steer=np.array([2.0, -0.5], np.float32))
    done = run(
        "run", tmp_path / "out", "-i", tmp_path / "x.npz", "-o", tmp_path / "y.npz", "--k=16"
    )
    assert done.code == 0, done.err
    with np.load(tmp_path / "y.npz") as written:
        assert close(written["output"], same)


def test_a_language_model_is_steered_in_the_layer_that_is_named(tmp_path: Path) -> None:
    case = read_case("mumoe_gpt2_cp")
    name = "transformer.h.1.mlp.MuMoE_layer"
    model = moexport.load(case.weights, config=case.config)
    bundle = moexport.export(model, tmp_path / "out", steer=f"{name}:2:4")
    ids = case.x.astype(np.int64)
    layer = mumoe_layers(model.module)[name]
    centre = layer.projections[0][:, 2].detach()
    handle = layer.register_forward_pre_hook(lambda _, args: (args[0] + 4 * centre,))
    with torch.no_grad():
        expected: torch.Tensor = model.module(torch.from_numpy(ids))
    handle.remove()
    assert close(bundle.session()(ids), expected.numpy())
    assert (
        bundle.manifest.parity is not None and bundle.manifest.parity["untouched_cosine"] < 0.9999
    )


@pytest.mark.slow
def test_a_steered_bundle_is_measured_beside_the_untouched_model(tmp_path: Path) -> None:
    bundle = moexport.export(loaded(CP), tmp_path / "out", steer="layer:3:2")
    results = moexport.bench(bundle, data=tokens(8, 1), engine="onnxruntime", round_s=0.001)
    assert [row.error for row in results.rows] == [None, None]
    steered = results.rows[1].parity
    assert steered is not None and steered.cosine > 0.999999


@pytest.mark.parametrize(
    ("steer", "message", "hint", "weights"),
    [
        ("head:3", "--steer head:3: the model has no MoE layer head", "layers: layer", CP),
        ("layer:32", "--steer layer:32: layer layer has 32 experts", "use 0 to 31", CP),
        ("layer:3", "layer layer has 2 levels of experts", "name the level", TWO_LEVELS),
        ("layer:3.0", "has no level 3", "1 has 16, 2 has 4", TWO_LEVELS),
        ("layer", "--steer layer: not an expert", "LAYER:EXPERT:STRENGTH", CP),
        ("layer:3:nan", "a strength of nan is not a finite FP32 number", "cluster centre", CP),
        ("layer:3:1e39", "is not a finite FP32 number", "cluster centre", CP),
        ("layer:3:strong", "strong is not a number", "LAYER:EXPERT:STRENGTH", CP),
        ("layer:3,layer:3:2", "this expert is named twice", "the sum", CP),
        ("input", "no expert is named", "LAYER:EXPERT", CP),
        ("layer:3:2,input", "strengths are an input", "leave :2 out", CP),
        ("blocks.2.mlp:1", "a soft-moe layer, whose experts have no", "only muMoE", VIT),
    ],
)
def test_a_steering_that_cannot_be_meant(
    steer: str, message: str, hint: str, weights: Path, tmp_path: Path
) -> None:
    sets: tuple[str, ...] = VIT_SETS if weights == VIT else ENTMAX
    outcome = run("export", weights, *sets, "-o", tmp_path / "out", "--steer", steer)
    assert_refused(outcome, message, hint)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options", [("--target", "tensorrt-rtx"), ("--precision", "int8", "--data", __file__)]
)
def test_strengths_at_run_time_are_refused_where_one_input_is_all(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = run(
        *("export", CP, *ENTMAX, "-o", tmp_path / "out"), *("--steer", "layer:1,input", *options)
    )
    assert outcome.code in (1, 2)
    assert f"--steer input with {' '.join(options[:2])}" in outcome.error or (
        "tensorrt" in outcome.error
    )
    assert not list(tmp_path.iterdir())


def test_a_manifest_with_a_strength_that_is_none_is_refused(tmp_path: Path) -> None:
    moexport.export(loaded(CP), tmp_path / "out", steer="layer:3:2", verify=False)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    manifest["edits"][0]["strength"] = "much"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    outcome = run("inspect", tmp_path)
    assert outcome.code == 1 and "edit 0" in outcome.error


def test_a_recipe_may_be_steered_and_other_edits_beside_it_are_refused(tmp_path: Path) -> None:
    model, recipe = loaded(CP), tmp_path / "recipe.yaml"
    Recipe(
        model=fingerprint(model),
        data="",
        target="onnx",
        batch="1:1:4",
        tokens="1:5:9",
        opset=20,
        precision="fp32",
        quantize="experts",
        layers={name: LayerRecipe(k=4, lowering="factorised") for name in model.layers},
    ).write(recipe)
    bundle = moexport.export(model, tmp_path / "out", recipe=recipe, steer="layer:3:2.5")
    assert bundle.manifest.edits == [
        {"edit": "steer", "layer": "layer", "expert": 3, "strength": 2.5}
    ]
    assert bundle.manifest.layers[0].k == 4
    with pytest.raises(UsageError, match="ablate=… with recipe=…: the recipe already sets it"):
        moexport.export(model, tmp_path / "no", recipe=recipe, ablate="layer:3")
    with pytest.raises(UsageError, match="k=… with recipe=…: the recipe already sets it"):
        moexport.export(model, tmp_path / "no", recipe=recipe, k=2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rest", "fp16"),
        ("quantize", "all"),
        ("weight_bits", 8),
        ("min_retention", 0.9),
        ("ablate", "no expert"),
        ("rewrite", "missing.json"),
    ],
)
def test_what_a_recipe_sets_is_refused_before_it_is_parsed(option: str, value: object) -> None:
    """Nobody is told to add another option that the recipe excludes, too."""
    given: Any = {option: value}
    with pytest.raises(UsageError, match="with recipe=…: the recipe already sets it") as refused:
        moexport.export(not_loaded, "out", recipe="missing.yaml", **given)
    assert refused.value.hint == f"leave {option}=… out"


def not_loaded() -> Model:
    raise AssertionError("what needs no model is refused before it is loaded")
