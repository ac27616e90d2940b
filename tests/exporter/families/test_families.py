"""Families are told apart by their keys; what keys cannot tell is asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moexport.common.registry import Registry
from moexport.errors import CheckpointError, FamilyError
from moexport.exporter import families
from moexport.exporter.bundle.bundle import Bundle
from moexport.exporter.checkpoints.load import load
from moexport.exporter.checkpoints.settings import parse_value
from moexport.exporter.families import FAMILIES, detect, family_named, fits
from moexport.exporter.families.base import Family, renamed
from moexport.graphs.layers.base import algorithm_1
from moexport.graphs.layers.soft_moe import soft_moe_layers
from moexport.tests.command import run
from moexport.tests.exporter.families.reference import Array, gelu_tanh, soft_moe
from moexport.tests.exporter.families.states import (
    VIT,
    State,
    lucidrains_state,
    random_state,
    vit_layer_shapes,
    vit_state,
    vmoe_state,
)
from moexport.tests.recorded import MUMOE, SOFT_MOE, read_case


def saved(tmp_path: Path, state: Mapping[str, Any], name: str = "w.pt") -> Path:
    torch.save(state, tmp_path / name)
    return tmp_path / name


# --- detection ---------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [{}, {"loss.weight": torch.ones(10)}], ids=["alone", "beside"])
@pytest.mark.parametrize("prefix", ["student.", "ema.backbone."])
@pytest.mark.plugins
def test_weights_beneath_a_prefix_are_told_how_to_be_saved_alone(
    prefix: str, others: State, tmp_path: Path
) -> None:
    state = {**{f"{prefix}{key}": tensor for key, tensor in vit_state().items()}, **others}
    with pytest.raises(FamilyError) as caught:
        load(saved(tmp_path, {"state_dict": state}))
    assert f"the keys under '{prefix}' are those of a soft-moe-vit model" in caught.value.message
    assert ("next to 1 other" in caught.value.message) == bool(others)
    command = str(caught.value.hint).removeprefix("save only these: ")
    path = str(tmp_path / "model.pt")
    exec(command.replace("'model.pt'", repr(path)), {"torch": torch, "state_dict": state})
    assert load(Path(path), config={**VIT, "num_heads": 2}).family == "soft-moe-vit"


def test_exactly_one_family_is_detected_for_each_layout() -> None:
    states = {
        "soft-moe-vit": vit_state(),
        "soft-moe-pytorch": lucidrains_state(),
        "soft-moe-vmoe": {k.replace("/", "."): t for k, t in vmoe_state().items()},
    }
    for name, state in states.items():
        assert [f.name for f in fits(state, FAMILIES)] == [name]


OTHER_NAMES = renamed(
    FAMILIES["soft-moe-vit"],
    name="other-vit",
    summary="the same network under other names",
    keys={r"^of_a_test\.": "blocks.", r"\.moe\.(phi|scale|experts\.)": r".mlp.\1"},
)
"""Under names that no published code has, or its family would fit as well."""


def other_names(state: State) -> State:
    """The state dict of a ViT as the code of `OTHER_NAMES` would save it."""
    layers = {key.replace("blocks.", "of_a_test."): t for key, t in state.items()}
    return {re.sub(r"\.mlp\.(phi|scale|experts\.)", r".moe.\1", k): t for k, t in layers.items()}


def test_a_family_under_other_key_names_is_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = other_names(vit_state())
    assert not [key for key in state if key.startswith("blocks.") or ".mlp.phi" in key]
    registry = Registry("moexport.families", Family, (*FAMILIES.own, OTHER_NAMES))
    monkeypatch.setattr(families, "FAMILIES", registry)
    model = load(saved(tmp_path, state), config=VIT)
    published = load(saved(tmp_path, vit_state(), "published.pt"), config=VIT)
    assert (model.family, published.family) == ("other-vit", "soft-moe-vit")
    x = torch.randn(2, *model.input.shape[1:])  # type: ignore[arg-type]
    assert torch.equal(model.module(x), published.module(x))


def test_two_keys_of_one_name_are_no_family() -> None:
    state = {**vit_state(), **other_names(vit_state())}
    assert not OTHER_NAMES.detect(state)
    with pytest.raises(CheckpointError, match="other-vit model: several keys become one key of"):
        OTHER_NAMES.build(state, VIT)


def test_an_unknown_checkpoint_is_answered_with_what_was_seen_and_what_is_known() -> None:
    with pytest.raises(FamilyError, match=r"2 keys: conv1\.weight, fc\.bias") as caught:
        detect({"conv1.weight": torch.ones(1), "fc.bias": torch.ones(1)})
    for word in ("--family", "package.module:factory", *FAMILIES.names):
        assert word in str(caught.value.hint)


def test_known_layers_in_an_unknown_network_are_pointed_out() -> None:
    state = random_state(vit_layer_shapes("encoder.3.moe.", d=8, n=2, p=1, h=4))
    with pytest.raises(FamilyError, match=r"Soft MoE layers as in soft-moe-vit at encoder\.3\.moe"):
        detect({**state, "stem.weight": torch.ones(1)})


def test_an_ambiguous_checkpoint_names_its_candidates() -> None:
    with pytest.raises(FamilyError, match="soft-moe-vit, soft-moe-pytorch") as caught:
        detect({**vit_state(), **lucidrains_state("extra.")})
    assert "--family soft-moe-vit" in str(caught.value.hint)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(FamilyError, match="soft-moe-vitt") as caught:
        family_named("soft-moe-vitt")
    assert "'soft-moe-vit'" in str(caught.value.hint)


def test_the_wrong_family_is_answered_with_the_keys_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"w\.pt: .*soft-moe-pytorch"):
        load(saved(tmp_path, vit_state()), family="soft-moe-pytorch")


@pytest.mark.parametrize("family", FAMILIES.names)
def test_no_family_fails_on_a_checkpoint_of_another_kind_but_says_so(
    tmp_path: Path, family: str
) -> None:
    path = saved(tmp_path, {"phi": torch.ones(3), "Router.mu": torch.ones(2)})
    with pytest.raises((CheckpointError, FamilyError)):
        load(path, family=family)


# --- layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["moe.", "model.encoder.layers.3.moe."])
def test_a_layer_may_lie_under_a_prefix(tmp_path: Path, prefix: str) -> None:
    x = torch.randn(2, 5, 8)
    plain = load(saved(tmp_path, lucidrains_state()))
    below = load(saved(tmp_path, lucidrains_state(prefix), "below.pt"))
    assert torch.equal(plain.module(x), below.module(x))
    assert list(below.layers) == ["layer"]


def test_one_layer_of_several_is_picked_by_its_place(tmp_path: Path) -> None:
    state = {**lucidrains_state("a.moe."), **lucidrains_state("b.moe."), "stem": torch.ones(2)}
    path = saved(tmp_path, state)
    with pytest.raises(FamilyError, match=r"2 Soft MoE layers \(a\.moe, b\.moe\)") as caught:
        load(path)
    assert 'config={"layer": "a.moe"}' in str(caught.value.hint)
    model = load(path, config={"layer": "b.moe"})
    assert model.config["layer"] == "b.moe"
    assert "left out" in " ".join(model.notes)
    with pytest.raises(FamilyError, match=r"no layer at c\.moe"):
        load(path, config={"layer": "c.moe"})


@pytest.mark.parametrize(
    ("case", "key", "value", "words"),
    [
        ("soft_moe_conv", "dim", 64, ["dim=64", "dim=32"]),
        ("soft_moe_lucidrains", "num_slots", 3, ["num_slots=3", "num_slots=4"]),
        ("soft_moe_lucidrains", "seq_len", 64, ["seq_len=64", "num_slots=4"]),
        ("soft_moe_lucidrains_geglu_ln", "geglu", False, ["geglu=False", "geglu=True"]),
        ("soft_moe_mnist", "normalize", True, ["normalize=True", "normalize=False"]),
        ("soft_moe_fkodom", "bias", False, ["bias=False", "bias=True"]),
        ("soft_moe_conv", "experts", 8, ["unknown configuration key 'experts'"]),
    ],
)
def test_config_that_the_shapes_contradict_is_refused(
    case: str, key: str, value: Any, words: list[str]
) -> None:
    recorded = read_case(case)
    with pytest.raises(FamilyError) as caught:
        load(recorded.weights, config={**recorded.config, key: value})
    assert all(word in caught.value.message for word in words)


def test_an_expert_multiple_that_truncates_to_the_same_width_is_the_same() -> None:
    case = read_case("soft_moe_lucidrains_geglu_ln")
    config = {**case.config, "expert_mult": 4}
    assert load(case.weights, config=config).config["expert_mult"] == 4


@pytest.mark.parametrize(
    ("case", "dropped"),
    [
        ("soft_moe_conv", "experts.3.fc2.bias"),
        ("soft_moe_lucidrains", "experts.experts.0.0.weight"),
        ("soft_moe_lucidrains_geglu_ln", "slot_norm.beta"),
        ("soft_moe_fkodom", "experts.weight"),
        ("soft_moe_mnist", "decoder.1.weight"),
        ("soft_moe_mnist", "experts.15.3.weight"),
    ],
)
def test_a_key_that_is_missing_is_named(tmp_path: Path, case: str, dropped: str) -> None:
    recorded = read_case(case)
    state = torch.load(recorded.weights, weights_only=True)
    del state[dropped]
    with pytest.raises(CheckpointError, match=f"missing key.*{dropped}"):
        load(saved(tmp_path, state), family=recorded.family, config=recorded.config)


def test_fkodom_asks_for_its_version_and_refuses_the_first() -> None:
    case = read_case("soft_moe_fkodom")
    config = {key: value for key, value in case.config.items() if key != "version"}
    with pytest.raises(FamilyError, match="version") as caught:
        load(case.weights, config=config)
    assert 'config={"version": "0.2.0"}' in str(caught.value.hint)
    for version in ("0.1.0", 0.1):
        with pytest.raises(FamilyError, match="softmax over the batch"):
            load(case.weights, config={**config, "version": version})
    with pytest.raises(FamilyError, match="not a version"):
        load(case.weights, config={**config, "version": "new"})


# --- vmoe --------------------------------------------------------------------------------------


def vmoe_formula(state: State, x: Array, keep: int | None = None) -> Array:
    w = {key: t.double().numpy() for key, t in state.items()}

    def unit(v: Array, axis: int) -> Array:
        y: Array = v / np.sqrt((v**2).sum(axis=axis, keepdims=True) + 1e-6)
        return y

    def expert(i: int, slots: Array) -> Array:
        hidden = gelu_tanh(slots @ w["Mlp/Dense_0/kernel"][i] + w["Mlp/Dense_0/bias"][i])
        y: Array = hidden @ w["Mlp/Dense_1/kernel"][i] + w["Mlp/Dense_1/bias"][i]
        return y

    phi = unit(w["Router/mu"], 0) * w["Router/scale"]
    return soft_moe(unit(x, -1), x, phi, expert, keep)


@pytest.mark.parametrize("keep", [None, 2])
@pytest.mark.parametrize("prefix", ["", "params/Encoder/encoderblock_9/Moe/"])
def test_vmoe_computes_what_the_float64_formula_does(
    tmp_path: Path, keep: int | None, prefix: str
) -> None:
    state = vmoe_state()
    state["Router/scale"] = torch.tensor(5.0)
    arrays = {prefix + key: t.numpy() for key, t in state.items()}
    np.savez(tmp_path / "w.npz", allow_pickle=False, **arrays)
    model = load(tmp_path / "w.npz")
    assert model.family == "soft-moe-vmoe"
    x = np.random.default_rng(0).standard_normal((3, 7, 8)).astype(np.float32)
    # Small tokens, for which the eps under the root matters.
    x[1] *= 1e-3
    expected = vmoe_formula(state, x.astype(np.float64), keep)
    with algorithm_1(model.module, {"layer": keep} if keep else {}):
        y = model.module(torch.from_numpy(x)).numpy()
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_layer_of_a_whole_vmoe_model_is_picked_by_its_jax_path(tmp_path: Path) -> None:
    arrays = {f"Encoder/b9/Moe/{key}": t.numpy() for key, t in vmoe_state().items()}
    arrays["head/kernel"] = np.ones((8, 3), np.float32)
    np.savez(tmp_path / "w.npz", allow_pickle=False, **arrays)
    with pytest.raises(FamilyError, match="layer"):
        load(tmp_path / "w.npz")
    model = load(tmp_path / "w.npz", config={"layer": "Encoder/b9/Moe"})
    assert soft_moe_layers(model.module)["layer"].spec.slots_from == "raw"


# --- folders -----------------------------------------------------------------------------------


def test_a_config_beside_the_weights_is_used_and_may_be_overruled(tmp_path: Path) -> None:
    saved(tmp_path, vit_state())
    (tmp_path / "config.json").write_text(
        '{"architecture": "vit", "num_heads": 3, "model_args": {"global_pool": "avg"}}'
    )
    said = {"rest": "default"}
    model = load(tmp_path, config=said)
    assert (model.config["num_heads"], model.config["global_pool"]) == (3, "avg")
    assert any("config.json" in note for note in model.notes)
    assert load(tmp_path, config={**said, "num_heads": 6}).config["num_heads"] == 6


def test_prefixes_and_half_precision_load_to_the_same_model(tmp_path: Path) -> None:
    state = {key: t.half() for key, t in vit_state().items()}
    plain = load(saved(tmp_path, state), config=VIT)
    wrapped = {"state_dict": {f"model.module.{key}": t for key, t in state.items()}}
    other = load(saved(tmp_path, wrapped, "lightning.ckpt"), config=VIT)
    x = torch.randn(2, 3, 12, 12)
    assert torch.equal(plain.module(x), other.module(x))
    assert any("float16" in note for note in plain.notes)


@pytest.mark.parametrize("case", [*SOFT_MOE, *MUMOE])
def test_every_family_accepts_the_published_defaults_for_the_rest(case: str) -> None:
    recorded = read_case(case)
    asked = {key: value for key, value in recorded.config.items() if key != "rest"}
    config = load(recorded.weights, config=recorded.config, values=False).config
    assert (
        load(recorded.weights, config={**asked, "rest": "default"}, values=False).config == config
    )
    with pytest.raises(FamilyError, match="rest=other is not valid"):
        load(recorded.weights, config={**asked, "rest": "other"}, values=False)


ODD_VALUES = ["abc", "", "[]", "{}", "-1", "0", "1e400", "1,2,3", "1,[2]", "[null]"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *("soft_moe_vit", "soft_moe_mnist", "soft_moe_conv", "soft_moe_fkodom"),
        *("soft_moe_lucidrains", "mumoe_cp", "mumoe_mixer_tr", "mumoe_gpt2_cp"),
    ],
)
def test_no_configuration_is_a_defect(case: str) -> None:
    recorded = read_case(case)
    refused = set()
    for key in FAMILIES[recorded.family].options:
        for text in ODD_VALUES:
            given = {**recorded.config, key: parse_value(text)}
            try:
                load(recorded.weights, config=given, values=False)
            except FamilyError as error:
                assert error.message
                refused.add(key)
    assert refused


@pytest.mark.parametrize(
    ("case", "key", "text", "message"),
    [
        ("soft_moe_vit", "num_heads", "abc", "num_heads=abc is not a whole number above 0"),
        ("soft_moe_vit", "num_heads", "0", "num_heads=0 is not a whole number above 0"),
        ("soft_moe_vit", "num_heads", "5", "num_heads=5 does not divide the width 48"),
        ("soft_moe_vit", "img_size", "32,x", "img_size=x is not a whole number above 0"),
        ("soft_moe_vit", "img_size", "1,2,3", "neither one size nor a height and a width"),
        ("mumoe_mixer_tr", "patch_size", "0", "patch_size=0 is not a whole number above 0"),
        ("mumoe_mixer_tr", "image_size", "[]", "neither one size nor a height and a width"),
        ("mumoe_gpt2_cp", "n_head", "4.5", "n_head=4.5 is not a whole number above 0"),
    ],
)
def test_sizes_that_are_none_are_named(case: str, key: str, text: str, message: str) -> None:
    recorded = read_case(case)
    with pytest.raises(FamilyError, match=message) as caught:
        load(recorded.weights, config={**recorded.config, key: parse_value(text)}, values=False)
    assert caught.value.hint


def test_a_whole_number_may_be_written_with_a_point() -> None:
    case = read_case("soft_moe_vit")
    model = load(case.weights, config={**case.config, "num_heads": 4.0}, values=False)
    assert model.config["num_heads"] == 4
    assert isinstance(model.config["num_heads"], int)


@pytest.mark.parametrize("biased", [("1", "3", "decoder.1"), ("3",), ("decoder.1",)])
def test_an_mnist_network_keeps_the_biases_that_a_file_has(
    biased: tuple[str, ...], tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    n, d, h, tokens, classes = 4, 16, 6, 4, 10
    state = {"phi": random.standard_normal((d, n))}
    for e in range(n):
        state[f"experts.{e}.1.weight"] = random.standard_normal((h, d))
        state[f"experts.{e}.3.weight"] = random.standard_normal((d, h))
        state |= {
            f"experts.{e}.{j}.bias": random.standard_normal(s) for j, s in (("1", h), ("3", d))
        }
    state["decoder.1.weight"] = random.standard_normal((classes, tokens * d))
    state["decoder.1.bias"] = random.standard_normal(classes)
    for key in [key for key in state if key.endswith("bias")]:
        if not any(f"{name}.bias" in key for name in biased):
            del state[key]
    file = tmp_path / "mnist.pt"
    torch.save({key: torch.from_numpy(array).float() for key, array in state.items()}, file)
    images = random.standard_normal((3, 1, 8, 8)).astype(np.float32)
    x = images.reshape(3, 2, 4, 2, 4).swapaxes(2, 3).reshape(3, 4, 16).astype(np.float64)
    logits = x @ state["phi"]
    combine = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    dispatch = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    slots = np.einsum("bmn,bmd->bnd", dispatch, x)

    def linear(name: str, z: np.ndarray) -> np.ndarray:
        return np.asarray(z @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0))

    hidden = [np.maximum(linear(f"experts.{e}.1", slots[:, e]), 0) for e in range(n)]
    outputs = np.stack([linear(f"experts.{e}.3", each) for e, each in enumerate(hidden)], axis=1)
    y = np.einsum("bmn,bnd->bmd", combine, outputs).reshape(3, -1)
    y = linear("decoder.1", y)
    model = load(file)
    with torch.no_grad():
        found = model.module(torch.from_numpy(images)).double().numpy()
    assert model.family == "soft-moe-mnist"
    assert np.abs(found - y).max() < 1e-5 * np.abs(y).max()
    np.savez(tmp_path / "x.npz", input=images)
    outcome = run("export", file, "-o", tmp_path / "out", "--data", tmp_path / "x.npz")
    assert outcome.code == 0, outcome.err
    exported = Bundle.open(tmp_path / "out").session()(images)
    assert np.abs(exported - y).max() < 1e-5 * np.abs(y).max()


def test_a_family_that_fails_on_a_checkpoint_is_named() -> None:
    def fails(tensors: Mapping[str, torch.Tensor]) -> bool:
        return bool(tensors["none such"].ndim)

    theirs = replace(FAMILIES["soft-moe-vit"], name="theirs", detect=fails)
    with pytest.raises(FamilyError, match="family 'theirs' cannot check a checkpoint: KeyError"):
        fits({"a": torch.zeros(1)}, [theirs])
