"""Profiles: what is typed, what the graph's axes allow, and which one serves a run."""

from __future__ import annotations

import pytest
from moexport.errors import FeedError, UsageError
from moexport.exporter.bundle.manifest import TensorSpec
from moexport.exporter.tensorrt.profiles import (
    Profile,
    cap_k,
    choose,
    max_copies,
    parse_profile,
    profile,
)
from moexport.graphs.sizes import AxisRange

IMAGES = TensorSpec("input", "float32", ("batch", 3, 32, 32))
TOKENS = TensorSpec("input_ids", "int64", ("batch", "tokens"), limits={"tokens": 64})
PIXELS = TensorSpec("input", "float32", ("batch", 8, "height", "width"))
DEFAULTS = {"batch": AxisRange(1, 2, 8), "tokens": AxisRange(1, 196, 1024)}


def test_the_ranges_of_the_export_are_the_default() -> None:
    found = profile(IMAGES, {}, DEFAULTS, 16)
    assert (found.min, found.opt, found.max) == ((1, 3, 32, 32), (2, 3, 32, 32), (8, 3, 32, 32))
    assert found.k == AxisRange(1, 4, 16)
    assert str(found) == "input 1:2:8×3×32×32, k 1:4:16"
    assert profile(IMAGES, {}, DEFAULTS, None).k is None


def test_a_token_axis_goes_as_far_as_the_model_does() -> None:
    assert profile(TOKENS, {}, DEFAULTS, None).max == (8, 64)


def test_pixels_are_a_square_of_tokens() -> None:
    found = profile(PIXELS, {}, DEFAULTS, None)
    assert (found.opt, found.max) == ((2, 8, 14, 14), (8, 8, 32, 32))


def test_axes_that_are_named_take_the_place_of_the_defaults() -> None:
    asked = parse_profile("batch=4, k=2:3:4")
    found = profile(IMAGES, asked, DEFAULTS, 16)
    assert found.min == found.max == (4, 3, 32, 32)
    assert found.k == AxisRange(2, 3, 4)
    assert Profile.from_json(found.as_json()) == found


@pytest.mark.parametrize("text", ["batch", "batch=", "rows=1", "batch=1,batch=2", "", "k=3:2:1"])
def test_a_profile_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(UsageError, match="--profile"):
        parse_profile(text)


@pytest.mark.parametrize(
    ("port", "text", "experts", "message"),
    [
        (IMAGES, "tokens=4", None, "tokens is not an axis of the graph's input 'input'"),
        (IMAGES, "k=2", None, "the graph's k is baked in"),
        (IMAGES, "k=1:2:17", 16, "k is at most 16, the fewest experts in a layer"),
        (IMAGES, "k=1:2:5000", 6000, "k is at most 3840 in TensorRT"),
        (TOKENS, "tokens=1:2:65", None, "tokens is at most 64 in this model"),
        (TensorSpec("input", "float32", (4, 3)), "batch=8", None, "batch is fixed at 4"),
    ],
)
def test_a_profile_that_the_graph_does_not_allow(
    port: TensorSpec, text: str, experts: int | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        profile(port, parse_profile(text), DEFAULTS, experts)
    assert caught.value.hint


SMALL = Profile("input", (1, 8), (1, 8), (4, 8), AxisRange(1, 2, 4))
LARGE = Profile("input", (2, 8), (16, 8), (32, 8), AxisRange(1, 4, 8))


def test_the_profile_that_is_fastest_for_a_run_is_chosen() -> None:
    assert choose([SMALL, LARGE], (1, 8), 2) == 0
    assert choose([SMALL, LARGE], (4, 8), 2) == 0
    assert choose([LARGE, SMALL], (2, 8), 2) == 1
    assert choose([SMALL, LARGE], (20, 8), 2) == 1


def test_what_no_profile_contains_is_refused_with_the_profiles() -> None:
    with pytest.raises(FeedError, match=r"\(33, 8\) are outside the engine's profile \(input 1:1"):
        choose([SMALL, LARGE], (33, 8), 2)
    with pytest.raises(FeedError):
        choose([SMALL], (1, 9), 2)
    with pytest.raises(UsageError, match=r"k = 9: outside the engine's profile"):
        choose([SMALL, LARGE], (4, 8), 9)


MATRIX = 768 * 7680
"""Elements of a matrix of one of eight large experts."""


@pytest.mark.parametrize(
    ("matrix", "memory", "copies"),
    [
        (MATRIX, None, 364),  # 8 experts for each of 64 inputs would be 512
        (768 * 384, None, 7281),  # 128 for each of 64 would be 8192
        (MATRIX, 80 << 30, 364),
        (MATRIX, 8 << 30, 182),
        (1, None, 2**31 - 1),
    ],
)
def test_copies_fill_a_tensor_or_half_of_the_gpus_memory(
    matrix: int, memory: int | None, copies: int
) -> None:
    """In FP16, of two matrices each."""
    assert max_copies(matrix, 2 * matrix * 2, memory) == copies
    assert copies * matrix < 2**31


def test_k_is_capped_for_the_largest_batch() -> None:
    wide = Profile("input", (1, 8), (8, 8), (64, 8), AxisRange(1, 6, 8))
    assert cap_k(wide, 364).k == AxisRange(1, 5, 5)
    assert cap_k(wide, 512) == wide
    with pytest.raises(UsageError, match="--batch 64: `gather` copies k experts") as caught:
        cap_k(wide, 63)
    assert "--lowering dense" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="k = 6: outside the engine's profile") as caught:
        choose([cap_k(wide, 364)], (64, 8), 6)
    assert "--graph dense" in (caught.value.hint or "")
    assert "batch=MIN:OPT:MAX" in (caught.value.hint or "")
