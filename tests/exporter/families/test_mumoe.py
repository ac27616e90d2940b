"""muMoE checkpoints load from their shapes; what does not fit is refused with what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moexport.errors import CheckpointError, FamilyError
from moexport.exporter.checkpoints.load import load
from moexport.exporter.families import FAMILIES, fits
from moexport.graphs.layers.base import algorithm_1
from moexport.tests.command import run
from moexport.tests.graphs.mumoe_layers import mumoe_layers
from moexport.tests.recorded import DATA, MUMOE, RecordedCase, read_case

TOLERANCE = 1e-5  # of max|y|: ten times tighter than what exported graphs must hold
State = dict[str, torch.Tensor]


def state_of(name: str) -> State:
    state: State = torch.load(DATA / name / "weights.pt", weights_only=True)
    return state


def saved(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "w.pt")
    return folder / "w.pt"


def inputs(case: RecordedCase) -> torch.Tensor:
    x = torch.from_numpy(case.x)
    return x.float() if x.is_floating_point() else x


@pytest.mark.parametrize("name", MUMOE)
def test_outputs_and_coefficients_are_those_recorded(name: str) -> None:
    case = read_case(name)
    model = load(case.weights, config=case.config)
    assert model.family == case.family
    for k in (None, *case.ks):
        keep = {} if k is None else dict.fromkeys(model.layers, k)
        with torch.no_grad(), algorithm_1(model.module, keep):
            y = model.module(inputs(case)).numpy()
        assert y.shape == case.y(k).shape
        assert np.abs(y - case.y(k)).max() <= TOLERANCE * np.abs(case.y(k)).max()
    if "coefficients" in case.io:
        (layer,) = mumoe_layers(model.module).values()
        found = layer.coefficients(inputs(case))[0].numpy()
        assert np.abs(found - case.io["coefficients"]).max() <= TOLERANCE


@pytest.mark.parametrize("name", MUMOE)
def test_the_config_is_complete_and_loads_the_same_model_again(name: str) -> None:
    case = read_case(name)
    model = load(case.weights, config=case.config)
    assert [f.name for f in fits(state_of(name), FAMILIES)] == [case.family]
    assert json.loads(json.dumps(model.config)) == model.config
    assert {key: model.config[key] for key in case.config} == case.config
    assert load(case.weights, config=model.config).config == model.config


def without(state: State, *keys: str) -> State:
    return {key: tensor for key, tensor in state.items() if key not in keys}


TR = "MuMoE.factors.1"

BROKEN: list[tuple[str, State, str]] = [
    ("mumoe_tr", {TR: torch.ones(5, 25, 6)}, "do not chain"),
    ("mumoe_cp", {TR: torch.ones(25, 15)}, "do not share one rank"),
    ("mumoe_cp", {TR: torch.ones(27, 16)}, "accepts inputs of width 27, expected 24, or 25"),
    ("mumoe_tr", {"MuMoE.factors.2": torch.ones(6, 10, 3)}, "do not chain"),
    ("mumoe_cp", {"projs.1": torch.ones(24, 4)}, "2 levels of experts .* need 4"),
    ("mumoe_cp", {"projs.0": torch.ones(24, 31)}, r"for \[32\] experts by level, but .* \[31\]"),
    (
        "mumoe_cp",
        {f"MuMoE.factors.{i}": torch.ones(n, 0) for i, n in enumerate((32, 25, 10))},
        "a size or a rank of zero",
    ),
    ("mumoe_tr", {TR: torch.ones(25, 6)}, "neither CP .* nor TR"),
    (
        "mumoe_tr",
        {"bn.0.running_var": torch.linspace(-0.5, 1, 32)},
        "bn.0.running_var contains the negative variance -0.5",
    ),
]


@pytest.mark.parametrize(("name", "changes", "words"), BROKEN, ids=[b[2] for b in BROKEN])
def test_factors_that_do_not_fit_are_refused(
    name: str, changes: State, words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"w\.pt: .*{words}"):
        load(saved(tmp_path, {**state_of(name), **changes}))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("mumoe_cp_2level", "bn.1.running_var"),
        ("mumoe_mixer_cp", "mixer_blocks.1.1.fn.bn.0.running_mean"),
        ("mumoe_cp_block_ln", "input_ln.bias"),
    ],
)
def test_a_missing_buffer_is_named(name: str, key: str, tmp_path: Path) -> None:
    case = read_case(name)
    with pytest.raises(CheckpointError, match=f"missing key: {key}"):
        load(saved(tmp_path, without(state_of(name), key)), config=case.config)


@pytest.mark.parametrize(
    ("name", "prefix"), [("mumoe_mixer_cp", "mixer_blocks."), ("mumoe_gpt2_cp", "transformer.h.")]
)
def test_a_network_without_one_of_its_blocks_is_refused(
    name: str, prefix: str, tmp_path: Path
) -> None:
    moved = {k.replace(f"{prefix}1.", f"{prefix}2."): t for k, t in state_of(name).items()}
    with pytest.raises(CheckpointError, match=rf"{prefix}\* are \[0, 2\]"):
        load(saved(tmp_path, moved), config=read_case(name).config)


@pytest.mark.parametrize(
    ("name", "layer", "width"),
    [
        ("mumoe_mixer_cp", "mixer_blocks.1.0.fn.1", 16),
        ("mumoe_gpt2_cp", "transformer.h.1.mlp.MuMoE_layer", 48),
    ],
)
def test_a_layer_that_is_wider_than_its_network_is_refused(
    name: str, layer: str, width: int, tmp_path: Path
) -> None:
    state = state_of(name)
    last = max(key for key in state if key.startswith(f"{layer}.MuMoE2.factors."))
    state[last] = torch.cat((state[last], state[last][:1]))
    words = f"{layer}: the layer maps {width} to {width + 1}, but the network is {width} wide"
    with pytest.raises(CheckpointError, match=words):
        load(saved(tmp_path, state), config=read_case(name).config)


def test_what_shapes_cannot_tell_is_asked_for() -> None:
    with pytest.raises(FamilyError, match="n_head"):
        load(DATA / "mumoe_gpt2_cp" / "weights.pt")
    with pytest.raises(FamilyError, match="patch_size"):
        load(DATA / "mumoe_mixer_cp" / "weights.pt")
    with pytest.raises(FamilyError, match=r"act \(.*patch_size \("):
        load(DATA / "mumoe_mixer_cp" / "weights.pt")
    for given in ({"patch_size": 56}, {"image_size": 224}, {"channels": 3}):
        said = {**given, "act": "entmax15"}
        model = load(DATA / "mumoe_mixer_cp" / "weights.pt", config=said)
        assert model.input.shape == ("batch", 3, 224, 224)
    with pytest.raises(FamilyError, match="n_head=5 does not divide the width 48"):
        load(DATA / "mumoe_gpt2_cp" / "weights.pt", config={"n_head": 5})


def test_arguments_saved_in_the_file_are_taken(tmp_path: Path) -> None:
    content = {
        "model": {f"_orig_mod.{k}": t for k, t in state_of("mumoe_gpt2_tr").items()},
        "model_args": {"n_layer": 2, "n_head": 4, "n_embd": 48, "vocab_size": None, "bias": True},
        "iter_num": 7,
    }
    model = load(saved(tmp_path, content))
    assert model.config["n_head"] == 4
    assert any("n_head" in note and "model_args" in note for note in model.notes)


def test_an_output_layer_that_is_not_the_embedding_is_refused(tmp_path: Path) -> None:
    state = state_of("mumoe_gpt2_cp")
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(CheckpointError, match="differ, but in this code they are the same tensor"):
        load(saved(tmp_path, state), config={"n_head": 4})


def test_a_head_is_found_beside_its_backbone_and_exported_alone(tmp_path: Path) -> None:
    case = read_case("mumoe_cp")
    state = {f"1.{key}": tensor for key, tensor in state_of("mumoe_cp").items()}
    path = saved(tmp_path, {"0.patch_embed.proj.weight": torch.ones(8, 3, 2, 2), **state})
    model = load(path, config={"act": "entmax15"})
    assert model.family == "mumoe-clip"
    assert model.input.shape == ("batch", 24)
    y = model.module(torch.from_numpy(case.x)).numpy()
    assert np.abs(y - case.y()).max() <= TOLERANCE * np.abs(case.y()).max()
    assert any("without 1 tensors of the backbone" in note for note in model.notes)


FACTORY = '''
import torch
from torch import nn

class Layer(nn.Module):
    """Keeps what the published layer keeps; `softmax` gates otherwise."""

    def __init__(self, softmax=False):
        super().__init__()
        self.MuMoE = nn.Module()
        self.MuMoE.factors = nn.ParameterList([torch.randn(s, 6) for s in (8, 5, 3)])
        self.projs = nn.ParameterList([torch.randn(4, 8)])
        self.bn = nn.ModuleList([nn.BatchNorm1d(8, affine=False)])
        self.softmax = softmax

    def forward(self, x):
        x = x.unsqueeze(1)
        z = self.bn[0]((x @ self.projs[0]).transpose(1, 2)).transpose(1, 2)
        if self.softmax:
            a = z.softmax(-1)
        else:
            low, high = z.amax(-1, keepdim=True) / 2 - 1, z.amax(-1, keepdim=True) / 2
            for _ in range(40):
                middle = (low + high) / 2
                above = (z / 2 - middle).clamp_min(0).square().sum(-1, keepdim=True) >= 1
                low, high = torch.where(above, middle, low), torch.where(above, high, middle)
            a = (z / 2 - low).clamp_min(0).square()
        x = torch.cat((x, torch.ones_like(x[..., :1])), -1)
        f = self.MuMoE.factors
        return ((a @ f[0]) * (x @ f[1])) @ f[2].T

def net(softmax=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 4), Layer(softmax), nn.Flatten(1))
'''


@pytest.mark.plugins
def test_a_head_behind_a_users_backbone_is_replaced_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "headnet.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    outcome = run(
        *("export", "headnet:net", "--set", "input_shape=7", "-o", tmp_path / "out", "--k", "3")
    )
    assert outcome.code == 0, outcome.err
    assert "replaced as a mumoe layer" in outcome.err
    refused = run(
        *("export", "headnet:net", "--set", "input_shape=7", "-o", tmp_path / "other"),
        *("--set", "softmax=true"),
    )
    assert refused.code == 3
    assert "computes something different" in refused.error
