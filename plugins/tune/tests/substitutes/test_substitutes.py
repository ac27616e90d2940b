"""The substitutes of a whole model are trained once and found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport.exporter.model import Model
from moexport.plugins.tune.recipe import LayerRecipe
from moexport.plugins.tune.space import Point
from moexport.plugins.tune.substitutes.substitutes import Recording, Substitutes
from moexport.tests.recorded import DATA


@pytest.fixture(scope="module")
def model() -> Model:
    """The paper's MNIST network with random weights, recorded from its published code."""
    return moexport.load(DATA / "soft_moe_mnist" / "weights.pt")


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).random((96, 1, 28, 28), dtype=np.float32))


def recording(model: Model, images: torch.Tensor) -> Recording:
    """The inputs of the model's layer, in batches, and the model's outputs."""
    ((name, layer),) = model.layers.items()
    tokens: list[torch.Tensor] = []
    hook = layer.register_forward_hook(lambda _, args, __: tokens.append(args[0].clone()))
    parts = torch.split(images, 32)
    with torch.inference_mode():
        outputs = [model.module(part).numpy() for part in parts]
    hook.remove()
    samples = [(part.numpy(), y) for part, y in zip(parts, outputs, strict=True)]
    return Recording({name: tokens}, samples, scores=True)


def other_outputs(model: Model, images: torch.Tensor) -> Recording:
    """The same with outputs of another model, to which a training brings it nearer than the fit."""
    what = recording(model, images)
    return replace(what, samples=[(x, 4 * y) for x, y in what.samples])


def test_what_was_trained_is_the_same_when_a_search_goes_on(
    model: Model, images: torch.Tensor, tmp_path: Path
) -> None:
    (name,) = model.layers
    first = Substitutes(model, recording(model, images), tmp_path, lambda: 2.0)
    choice = LayerRecipe(2, experts=first.kept(name, 2))
    point, other = (
        Point(((name, choice),), "ort-cpu"),
        Point(((name, LayerRecipe(1, experts=first.kept(name, 1))),), "ort-cpu"),
    )
    assert first.digest(point) == ""
    trained, different = first.trained_for(point)[name], first.trained_for(other)[name]
    assert trained.shape != different.shape
    # Another without time to train, and with fewer inputs, finds the arrays of the first.
    again = Substitutes(model, recording(model, images[:32]), tmp_path, lambda: 0.0)
    assert np.array_equal(again.trained_for(point)[name], trained)
    assert again.digest(point) == first.digest(point) != first.digest(other)
    assert first.trained_for(Point(((name, LayerRecipe(2)),), "ort-cpu")) == {}


def test_each_training_starts_where_the_first_one_did(
    model: Model, images: torch.Tensor, tmp_path: Path
) -> None:
    (name,) = model.layers
    substitutes = Substitutes(model, recording(model, images), tmp_path, lambda: 2.0)
    choice = LayerRecipe(2, experts=substitutes.kept(name, 2))
    fitted = substitutes.fitted(name, choice)[name].copy()
    substitutes.trained_for(Point(((name, choice),), "ort-cpu"))
    assert np.array_equal(substitutes.fitted(name, choice)[name], fitted)


def test_a_training_goes_on_from_what_was_trained_for_another_model(
    model: Model, images: torch.Tensor, tmp_path: Path
) -> None:
    (name,) = model.layers
    left = 20.0
    substitutes = Substitutes(model, other_outputs(model, images), tmp_path, lambda: left)
    experts = substitutes.kept(name, 4)
    four, three = LayerRecipe(4, experts=experts), LayerRecipe(3, experts=experts)
    trained = substitutes.trained_for(Point(((name, four),), "ort-cpu"))[name].copy()
    left = 0.0  # for the next
    found = substitutes.trained_for(Point(((name, three),), "ort-cpu"))[name]
    assert np.array_equal(found, trained)
    assert not np.array_equal(found, substitutes.fitted(name, three)[name])


def test_a_training_that_goes_on_is_kept_where_it_helps(
    model: Model, images: torch.Tensor, tmp_path: Path
) -> None:
    (name,) = model.layers
    substitutes = Substitutes(model, other_outputs(model, images), tmp_path, lambda: 0.0)
    choice = LayerRecipe(2, experts=substitutes.kept(name, 2))
    point, in_int8 = (
        Point(((name, replace(choice, precision=p)),), "ort-cpu") for p in ("fp32", "int8")
    )
    fitted, before = substitutes.trained_for(point)[name].copy(), substitutes.digest(point)
    assert not substitutes.train_further(point, 0.0)
    assert substitutes.digest(point) == before
    assert substitutes.train_further(point, 20.0)
    assert substitutes.digest(in_int8) == substitutes.digest(point) != before
    assert not np.array_equal(substitutes.trained_for(in_int8)[name], fitted)
    assert substitutes.shared(point, in_int8)
    assert not substitutes.shared(
        point, Point(((name, LayerRecipe(1, experts=choice.experts)),), "ort-cpu")
    )


def test_a_damaged_file_is_trained_again(
    model: Model, images: torch.Tensor, tmp_path: Path
) -> None:
    (name,) = model.layers
    what = recording(model, images)
    first = Substitutes(model, what, tmp_path, lambda: 0.0)
    point = Point(((name, LayerRecipe(2, experts=first.kept(name, 2))),), "ort-cpu")
    trained = first.trained_for(point)[name]
    (path,) = (tmp_path / "substitutes").iterdir()
    path.write_bytes(path.read_bytes()[:20])
    again = Substitutes(model, what, tmp_path, lambda: 0.0).trained_for(point)[name]
    assert np.array_equal(again, trained)
