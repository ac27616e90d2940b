"""The nine recorded cases load from their files alone and compute what was recorded."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from moexport.exporter.checkpoints.load import load
from moexport.exporter.checkpoints.state_dict import read_checkpoint
from moexport.graphs.layers.base import Algorithm, algorithm_1, recorded_choices
from moexport.graphs.layers.soft_moe import soft_moe_layers
from moexport.tests.recorded import RecordedCase, read_case

TOLERANCE = 1e-5  # of max|y|: ten times tighter than what exported graphs must hold


def test_the_family_is_detected_and_the_config_is_complete(soft_moe_case: RecordedCase) -> None:
    model = load(soft_moe_case.weights, config=soft_moe_case.config)
    assert model.family == soft_moe_case.family
    assert json.loads(json.dumps(model.config)) == model.config
    for key, value in soft_moe_case.config.items():
        assert model.config[key] == value


def test_a_settled_config_loads_the_same_model_again(soft_moe_case: RecordedCase) -> None:
    model = load(soft_moe_case.weights, config=soft_moe_case.config)
    again = load(soft_moe_case.weights, family=model.family, config=model.config)
    assert again.config == model.config


@pytest.mark.parametrize("algorithm", ["masked", "selected"])
def test_outputs_and_chosen_experts_are_those_recorded(
    soft_moe_case: RecordedCase, algorithm: Algorithm
) -> None:
    model = load(soft_moe_case.weights, config=soft_moe_case.config)
    x = torch.from_numpy(soft_moe_case.x)
    for k in (None, *soft_moe_case.ks):
        keep = {} if k is None else dict.fromkeys(model.layers, k)
        with (
            torch.no_grad(),
            recorded_choices(model.module) as choices,
            algorithm_1(model.module, keep, algorithm=algorithm),
        ):
            y = model.module(x).numpy()
        expected = soft_moe_case.y(k)
        assert np.abs(y - expected).max() <= TOLERANCE * np.abs(expected).max()
        for choice, chosen in zip(
            choices.values(), soft_moe_case.chosen(k) if k else [], strict=False
        ):
            assert np.array_equal(choice.chosen.numpy(), chosen)


def test_expert_weights_are_views_of_what_was_read(
    soft_moe_case: RecordedCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = read_checkpoint(soft_moe_case.weights)
    monkeypatch.setattr(
        "moexport.exporter.checkpoints.load.read_checkpoint", lambda *_, **__: checkpoint
    )
    model = load(soft_moe_case.weights, config=soft_moe_case.config)
    read = {t.untyped_storage().data_ptr() for t in checkpoint.tensors.values()}
    for layer in soft_moe_layers(model.module).values():
        for stored in (layer.w1, layer.w2):
            matrices = stored if isinstance(stored, torch.nn.ParameterList) else [stored]
            assert all(m is None or m.untyped_storage().data_ptr() in read for m in matrices)


def test_the_models_input_and_output_fit_what_it_takes_and_gives(
    soft_moe_case: RecordedCase,
) -> None:
    model = load(soft_moe_case.weights, config=soft_moe_case.config)
    for spec, array in ((model.input, soft_moe_case.x), (model.output, soft_moe_case.y())):
        sizes = {
            name: size
            for name, size in zip(spec.shape, array.shape, strict=True)
            if isinstance(name, str)
        }
        assert spec.concrete(sizes) == array.shape
    assert (model.input.name, model.output.name) == ("input", "output")


def test_a_loaded_model_is_frozen_and_in_eval_mode(soft_moe_case: RecordedCase) -> None:
    module = load(soft_moe_case.weights, config=soft_moe_case.config).module
    assert not any(m.training for m in module.modules())
    assert not any(p.requires_grad or p.is_meta for p in module.parameters())


def test_layers_are_named_by_their_place() -> None:
    vit = read_case("soft_moe_vit_slots")
    assert list(load(vit.weights, config=vit.config).layers) == ["blocks.1.mlp", "blocks.3.mlp"]
    layer = read_case("soft_moe_lucidrains")
    assert list(load(layer.weights).layers) == ["layer"]
