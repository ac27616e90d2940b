"""Arrays with their axes in another order are told, and networks of odd sizes."""

from __future__ import annotations

from pathlib import Path

import moexport
import numpy as np
import pytest
import torch
from moexport.exporter.checks.shapes import odd_sizes, shape_hint
from moexport.graphs.sizes import fits
from moexport.tests.command import run
from moexport.tests.recorded import VIT_CONFIG, VIT_SETS, read_case


def test_images_with_channels_last_are_turned_by_the_hint_s_own_line(tmp_path: Path) -> None:
    case = read_case("soft_moe_vit")
    last = case.x.transpose(0, 2, 3, 1)
    np.savez(tmp_path / "test.npz", input=last)
    options = (*VIT_SETS, "--data", tmp_path / "test.npz", "-o", tmp_path / "out")
    outcome = run("export", case.weights, *options)
    assert outcome.code == 1
    assert "reshape" not in outcome.err
    line = next(text for text in outcome.err.splitlines() if text.startswith("hint:"))
    scope = {"x": last}
    exec(line[line.index("x = ") :], scope)
    assert np.array_equal(scope["x"], case.x)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((5, 224, 224, 3), ("batch", 3, 224, 224)),
        ((5, 192, 224, 3), ("batch", 3, 192, 224)),
        ((192, 224, 3, 5), ("batch", 3, 192, 224)),
        ((5, 3, 192, 224), ("batch", 192, 224, 3)),
        ((5, 64, 10), ("batch", "tokens", 64)),
        ((3, 192, 224), ("batch", 3, 192, 224)),
        ((5, 28, 28), ("batch", 1, 28, 28)),
        ((28, 28), ("batch", 1, 28, 28)),
        ((5, 784), ("batch", 1, 28, 28)),
    ],
)
def test_the_line_of_a_hint_gives_the_shape(
    sizes: tuple[int, ...], shape: tuple[int | str, ...]
) -> None:
    hint = shape_hint(sizes, shape)
    scope = {"x": np.empty(sizes)}
    exec(hint[hint.index("x = ") :], scope)
    assert fits(scope["x"].shape, shape)


def test_pixels_in_a_flat_row_are_not_taken_for_channels() -> None:
    hint = shape_hint((5, 3 * 32 * 24), ("batch", 3, 32, 24))
    pixels = hint[hint.rindex("x = ") : hint.index(" if it is pixel after pixel")]
    images = np.random.default_rng(0).standard_normal((5, 3, 32, 24))
    scope = {"x": images.transpose(0, 2, 3, 1).reshape(5, -1)}
    exec(pixels, scope)
    assert np.array_equal(scope["x"], images)


def test_images_of_another_size_are_not_turned_only() -> None:
    hint = shape_hint((5, 256, 256, 3), ("batch", 3, 224, 224))
    assert "transpose(0, 3, 1, 2)" in hint
    assert "resize the images to 224 x 224" in hint


def test_a_patch_that_was_taken_for_channels_is_told(tmp_path: Path) -> None:
    """A linear layer over the 8 x 8 x 3 numbers of a patch, saved as a convolution of one pixel."""
    case = read_case("soft_moe_vit")
    state = torch.load(case.weights)
    name = "patch_embed.proj.weight"
    state[name] = state[name].reshape(len(state[name]), -1, 1, 1)
    torch.save(state, tmp_path / "linear.pt")
    outcome = run("inspect", tmp_path / "linear.pt", *VIT_SETS, "--set", "img_size=4")
    assert outcome.code == 0, outcome.err
    assert "looks odd: the network expects images of 192 channels" in outcome.out
    assert "a patch of 8 x 8 pixels with 3 channels" in outcome.out
    assert not [
        note
        for note in moexport.load(case.weights, config=VIT_CONFIG).notes
        if note.startswith("looks odd")
    ]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (("batch", 588, 16, 16), "588 channels, the size of a patch of 14 x 14 pixels"),
        (("batch", 16, 16, 588), "588 channels, the size of a patch of 14 x 14 pixels"),
        (("batch", 3, 1, 196), "1 x 196 pixels"),
        (("batch", 3, 2, 2), "2 x 2 pixels"),
    ],
)
def test_sizes_that_no_image_has_are_told(shape: tuple[int | str, ...], said: str) -> None:
    (sentence,) = odd_sizes(shape)
    assert said in sentence


@pytest.mark.parametrize(
    "shape",
    [
        ("batch", 3, 224, 224),
        ("batch", 224, 192, 3),
        ("batch", 1, 28, 28),
        ("batch", "tokens", 64),
        ("batch", 64, "height", "width"),
    ],
)
def test_usual_sizes_are_not_told_of(shape: tuple[int | str, ...]) -> None:
    assert not [*odd_sizes(shape)]
