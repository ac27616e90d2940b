"""The ViT backbone computes what timm's does, for every option of its constructor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moexport.errors import CheckpointError, FamilyError
from moexport.exporter.checkpoints.load import load
from moexport.exporter.model import Model
from moexport.graphs.layers.soft_moe import soft_moe_layers
from moexport.tests.exporter.families.reference import vit
from moexport.tests.exporter.families.states import VIT, State, vit_state

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: what the checkpoint was built with, what its user says beside num_heads
    "plain": ({}, {}),
    "no class token, mean": ({"class_token": False, "fc_norm": True}, {"global_pool": "avg"}),
    "mean with norm before it": ({}, {"global_pool": "avg"}),
    "class token with fc_norm": ({"fc_norm": True}, {"global_pool": "token"}),
    "all tokens": ({}, {"global_pool": ""}),
    "position without class": ({"no_embed_class": True}, {}),
    "norm before the blocks": ({"pre_norm": True}, {}),
    "normed queries and keys": ({"qk_norm": True}, {}),
    "no bias in qkv": ({"qkv_bias": False}, {}),
    "layer scale": ({"layer_scale": True}, {}),
    "image of another shape": ({"grid": (2, 4)}, {"img_size": [8, 16]}),
    "patches of another shape": ({"patch": (4, 2)}, {"img_size": [12, 6]}),
    "one channel": ({"channels": 1}, {}),
    "no head": ({"classes": 0}, {}),
    "moe in every block": ({"moe": (0, 1)}, {}),
    "moe in the first block": ({"moe": (0,)}, {}),
}


def saved(tmp_path: Path, state: State) -> Path:
    torch.save(state, tmp_path / "vit.pt")
    return tmp_path / "vit.pt"


def images(model: Model, batch: int = 3) -> torch.Tensor:
    shape = model.input.concrete({"batch": batch})
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_computes_what_the_float64_formula_does(tmp_path: Path, option: str) -> None:
    built, said = OPTIONS[option]
    state = vit_state(**built)
    model = load(saved(tmp_path, state), config={**VIT, **said})
    x = images(model)
    arrays = {key: t.double().numpy() for key, t in state.items()}
    expected = vit(
        x.double().numpy(),
        arrays,
        heads=3,
        pool=model.config["global_pool"],
        no_embed_class=built.get("no_embed_class", False),
    )
    y = model.module(x).numpy()
    assert y.shape == expected.shape == model.output.concrete({"batch": 3})
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()


def test_config_is_read_from_the_shapes(tmp_path: Path) -> None:
    state = vit_state(layer_scale=True, patch=(4, 2), moe=(0,))
    config = load(saved(tmp_path, state), config={**VIT, "img_size": [12, 6]}).config
    assert config == {
        "num_experts": 4,
        "slots_per_expert": 2,
        "moe_layer_index": [0],
        "img_size": [12, 6],
        "patch_size": [4, 2],
        "in_chans": 3,
        "num_classes": 5,
        "global_pool": "token",
        "embed_dim": 12,
        "depth": 2,
        "num_heads": 3,
        "mlp_ratio": 20 / 12,
        "moe_mlp_ratio": 16 / 12,
        "qkv_bias": True,
        "qk_norm": False,
        "init_values": 1e-5,
        "class_token": True,
        "no_embed_class": False,
        "pre_norm": False,
        "fc_norm": False,
        "act_layer": "gelu",
        "norm_eps": 1e-6,
    }


def test_num_heads_is_asked_for_with_the_option_that_says_it(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="num_heads") as caught:
        load(saved(tmp_path, vit_state()))
    assert 'config={"num_heads": 12' in str(caught.value.hint)


def test_num_heads_is_read_from_normed_queries(tmp_path: Path) -> None:
    said = {"rest": "default"}
    assert load(saved(tmp_path, vit_state(qk_norm=True)), config=said).config["num_heads"] == 3


def test_all_that_no_key_tells_is_asked_for_at_once(tmp_path: Path) -> None:
    with pytest.raises(FamilyError) as caught:
        load(saved(tmp_path, vit_state()))
    for key in ("num_heads", "img_size", "global_pool", "act_layer", "norm_eps"):
        assert f"{key} (" in caught.value.message
        assert f'"{key}": ' in str(caught.value.hint)
    assert 'config={"rest": "default"}' in str(caught.value.hint)


@pytest.mark.parametrize("built", [{"class_token": False}, {"fc_norm": True}])
def test_pooling_that_is_not_the_default_is_asked_for_by_itself(
    tmp_path: Path, built: dict[str, Any]
) -> None:
    path = saved(tmp_path, vit_state(**built))
    with pytest.raises(FamilyError, match="global_pool"):
        load(path, config=VIT)
    said = {**VIT, "global_pool": "avg"}
    assert load(path, config=said).config["global_pool"] == "avg"


def test_an_image_whose_patches_are_a_square_of_another_shape_is_taken(tmp_path: Path) -> None:
    path = saved(tmp_path, vit_state(grid=(2, 8)))
    model = load(path, config={**VIT, "img_size": [8, 32]})
    assert model.input.shape == ("batch", 3, 8, 32)
    with pytest.raises(FamilyError, match="img_size"):
        load(path, config={"num_heads": 3, "global_pool": "token"})


def test_an_image_that_is_no_square_of_patches_is_asked_for(tmp_path: Path) -> None:
    path = saved(tmp_path, vit_state(grid=(2, 3)))
    with pytest.raises(FamilyError, match="img_size"):
        load(path, config=VIT)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"num_heads": 5}, ["num_heads=5", "the width 12"]),
        ({"num_heads": 0}, ["num_heads=0"]),
        ({"num_heads": 3, "embed_dim": 16}, ["embed_dim=16", "embed_dim=12"]),
        ({"num_heads": 3, "num_experts": 8}, ["num_experts=8", "num_experts=4"]),
        ({"num_heads": 3, "moe_layer_index": 0}, ["moe_layer_index=0", "moe_layer_index=1"]),
        ({"num_heads": 3, "img_size": 24}, ["img_size=24,24", "10 positions"]),
        ({"num_heads": 3, "mlp_ratio": 4}, ["mlp_ratio=4"]),
        ({"num_heads": 3, "init_values": 1e-4}, ["init_values"]),
        ({"num_heads": 3, "global_pool": "max"}, ["global_pool='max'"]),
        ({"num_heads": 3, "qk_norm": True}, ["qk_norm=True", "qk_norm=False"]),
    ],
)
def test_config_that_the_shapes_contradict_is_refused(
    tmp_path: Path, said: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(FamilyError) as caught:
        load(saved(tmp_path, vit_state()), config={**VIT, **said})
    assert all(word in caught.value.message for word in words)


@pytest.mark.parametrize(
    "said",
    [
        {"img_size": [12, 12], "patch_size": (4, 4), "moe_layer_index": [1]},
        {"mlp_ratio": 1.7, "moe_mlp_ratio": 1.4, "fc_norm": None, "init_values": None},
        {"drop_rate": 0.1, "drop_path_rate": 0.2, "weight_init": ""},
    ],
)
def test_config_that_says_the_same_in_another_way_is_taken(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    model = load(saved(tmp_path, vit_state()), config={**VIT, **said})
    plain = load(saved(tmp_path, vit_state()), config=VIT)
    assert {key: model.config[key] for key in plain.config} == plain.config


def test_an_unknown_key_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="num_head") as caught:
        load(saved(tmp_path, vit_state()), config={"num_head": 3})
    assert "num_heads" in str(caught.value.hint)


def test_missing_and_unexpected_keys_are_listed_together(tmp_path: Path) -> None:
    state = vit_state()
    del state["blocks.1.mlp.experts.2.fc1.bias"], state["norm.weight"]
    state["surplus.weight"] = torch.ones(1)
    with pytest.raises(CheckpointError) as caught:
        load(saved(tmp_path, state), config=VIT)
    for word in ("2 missing keys", "experts.2.fc1.bias", "norm.weight", "1 unexpected", "surplus"):
        assert word in caught.value.message


def test_a_block_without_its_phi_is_named(tmp_path: Path) -> None:
    state = vit_state(moe=(0, 1))
    del state["blocks.1.mlp.phi"]
    with pytest.raises(CheckpointError, match=r"1 missing key: blocks\.1\.mlp\.phi"):
        load(saved(tmp_path, state), config=VIT)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("blocks.1.mlp.experts.3.fc2.weight", (12, 7)),
        ("blocks.0.attn.proj.weight", (12, 13)),
        ("blocks.1.mlp.scale", (2,)),
        ("pos_embed", (1, 10, 7)),
    ],
)
def test_a_shape_that_disagrees_is_named_with_both_shapes(
    tmp_path: Path, key: str, shape: tuple[int, ...]
) -> None:
    state = vit_state()
    expected = list(state[key].shape)
    state[key] = torch.ones(shape)
    with pytest.raises(CheckpointError) as caught:
        load(saved(tmp_path, state), config=VIT)
    assert f"{key} has shape {list(shape)}, expected {expected}" in caught.value.message


def test_weights_without_data_are_refused(tmp_path: Path) -> None:
    state = vit_state()
    state["head.weight"] = state["head.weight"].to("meta")
    with pytest.raises(CheckpointError, match=r"head\.weight has no data"):
        load(saved(tmp_path, state), config=VIT)


def test_left_overs_of_stacked_experts_are_skipped_even_without_data(tmp_path: Path) -> None:
    state = vit_state()
    state["blocks.1.mlp.base_expert.fc1.weight"] = torch.empty(16, 12, device="meta")
    notes = load(saved(tmp_path, state), config=VIT).notes
    assert "skipped 1 leftover keys base_expert.*" in notes


def test_layers_without_scale_are_not_normalised(tmp_path: Path) -> None:
    state = vit_state()
    del state["blocks.1.mlp.scale"]
    model = load(saved(tmp_path, state), config=VIT)
    assert soft_moe_layers(model.module)["blocks.1.mlp"].spec.norm == "none"
