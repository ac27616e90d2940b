"""The measures of a parity check, and what is said of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moexport.exporter.bundle.parity import (
    TOLERANCES,
    Comparison,
    Parity,
    Reference,
    Rounded,
    compare,
    cosines,
    describe,
)
from moexport.exporter.inputs import Inputs
from moexport.graphs.targets import Precision
from moexport.tests.command import run
from moexport.tests.recorded import read_case

Y = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)


class Answering:
    """Gives the same outputs for any inputs (`exporter.session.GraphSession`)."""

    provider = "test"
    input_name = "input"
    takes_k = False

    def __init__(self, y: np.ndarray) -> None:
        self.output_names = ["output"]
        self.y = y

    def __call__(self, x: Inputs, k: int | None = None) -> np.ndarray:
        return self.run(x, k)["output"]

    def run(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        return {"output": self.y[: len(x)]}


class Choosing(Answering):
    """Gives other outputs, by other experts, for the last input of a batch of 32."""

    def __init__(self, y: np.ndarray) -> None:
        super().__init__(y)
        self.output_names = ["output", "chosen"]

    def run(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        assert isinstance(x, np.ndarray)
        y, chosen = self.y[x[:, 0].astype(int)], np.tile([0, 1], (len(x), 1))
        if len(x) == 32:
            y[-1], chosen[-1] = -y[-1], [0, 2]
        return {"output": y, "chosen": chosen}


@pytest.mark.parametrize(("margin", "passed"), [(0.5, False), (3e-3, True), (1e-4, True)])
def test_an_input_may_choose_otherwise_in_a_larger_batch_where_scores_are_close(
    margin: float, passed: bool
) -> None:
    """What is a tie, or nearly one, may differ by chance, and is not compared then."""
    y = np.random.default_rng(0).standard_normal((24, 16)).astype(np.float32)
    x, sets = np.arange(24, dtype=np.float32)[:, None], np.tile([0, 1], (24, 1))
    margins = {"layer": np.full(24, margin, np.float32)}
    expected = Reference(x, y, y, {"layer": sets}, margins, {"layer": 2})
    bounds = TOLERANCES["fp16"]
    comparison = Comparison(
        Choosing(y), {"layer": "chosen"}, batch=3, tolerance=bounds, probed=(32,)
    )
    comparison.add(expected)
    assert comparison.parity().passed == passed


class Further(Answering):
    """Is a thousandth off, and more for the last input of a batch of 32."""

    def __init__(self, y: np.ndarray, share: float) -> None:
        super().__init__(y)
        self.share = share

    def run(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        assert isinstance(x, np.ndarray)
        y = self.y[x[:, 0].astype(int)] * np.float32(1.001)
        if len(x) == 32:
            y[-1] *= 1 + self.share
        return {"output": y}


@pytest.mark.parametrize(("share", "passed"), [(0.1, True), (0.2, False)])
def test_an_input_is_no_outlier_with_other_tokens_alone(share: float, passed: bool) -> None:
    """An outlier of INT8 may be 30% off where others are as well."""
    y = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
    x, bounds = np.arange(32, dtype=np.float32)[:, None], TOLERANCES["int8"]
    expected = Reference(x, y, y, {}, {}, {"layer": 2})
    comparison = Comparison(Further(y, share), {}, batch=3, tolerance=bounds)
    comparison.add(expected.rows(np.arange(24)))
    assert comparison.add_sized(expected, tokens=40) == passed
    assert comparison.parity().tokens == (None if passed else 40)


class ChoosingForTokens(Answering):
    """Chooses other experts, and gives something else, for the last of 40 tokens."""

    def __init__(self, y: np.ndarray, last: int) -> None:
        super().__init__(y)
        self.output_names, self.last = ["output", "chosen"], last

    def run(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        assert isinstance(x, np.ndarray)
        y, chosen = self.y[: len(x), : x.shape[1]].copy(), np.tile([0, 1], (*x.shape, 1))
        if x.shape[1] == 40:
            y[:, 40 - self.last :] *= -1
            chosen[:, 40 - self.last :, 1] = 2
        return {"output": y, "chosen": chosen}


@pytest.mark.parametrize(
    ("last", "margin", "passed"),
    [(2, 2e-3, True), (5, 2e-3, False), (1, 0.02, False), (1, 0.01, True), (5, 1e-4, True)],
)
def test_few_tokens_choose_otherwise_at_another_number_of_them(
    last: int, margin: float, passed: bool
) -> None:
    """Of many inputs with 20 tokens all are right, which says nothing of those with 40."""
    y = np.random.default_rng(0).standard_normal((24, 40, 8)).astype(np.float32)

    def expected(rows: int, tokens: int) -> Reference:
        x, sets = np.zeros((rows, tokens), np.float32), np.tile([0, 1], (rows, tokens, 1))
        margins = {"layer": np.full((rows, tokens), margin, np.float32)}
        wanted = y[:rows, :tokens]
        return Reference(x, wanted, wanted, {"layer": sets}, margins, {"layer": 2})

    graph, bounds = ChoosingForTokens(y, last), TOLERANCES["fp16"]
    comparison = Comparison(graph, {"layer": "chosen"}, batch=3, tolerance=bounds)
    comparison.add(expected(24, 20))
    assert comparison.add_sized(expected(1, 40), tokens=40) == passed


def parity(y: np.ndarray) -> Parity:
    expected = Reference(np.zeros((2, 1), np.float32), Y, Y, {}, {}, {"layer": 2})
    return compare(Answering(y), expected, {}, batch=2, tolerance=TOLERANCES["fp32"])


@pytest.mark.parametrize(
    ("y", "cosine"),
    [
        (Y, 1.0),
        (2 * Y, 1.0),
        (0 * Y, 0.0),  # zeros are no match for what is not zero
        (Y[::-1], 0.0),
        (np.full_like(Y, np.nan), 0.0),
        (np.full_like(Y, np.inf), 0.0),
    ],
)
def test_a_cosine_is_a_number_whatever_a_graph_gives(y: np.ndarray, cosine: float) -> None:
    assert cosines(y, Y).min() == pytest.approx(cosine)
    found = parity(y)
    assert (found.cosine, found.untouched_cosine) == pytest.approx((cosine, cosine))
    assert found.passed == (y is Y)


def test_bounds_are_held_to_others_but_where_they_are_narrower() -> None:
    """Whoever changes a manifest may write anything, no numbers among it."""
    usual = TOLERANCES["int8"]
    wide = replace(usual, atol=1.0, rtol=math.nan, routing=0.1, least_cosine=math.nan)
    assert wide.narrower(usual) == usual
    narrow = replace(usual, rtol=1e-3, routing=1.0, least_cosine=0.9)
    assert narrow.narrower(usual) == narrow


def test_small_outputs_are_judged_in_their_own_scale() -> None:
    small = np.float32(1e-8) * Y
    expected = Reference(np.zeros((2, 1), np.float32), small, small, {}, {}, {"layer": 2})

    def passed(y: np.ndarray) -> bool:
        return compare(Answering(y), expected, {}, batch=2, tolerance=TOLERANCES["fp32"]).passed

    assert passed(small)
    assert not passed(small * np.float32(1 + 2e-4))


@pytest.mark.parametrize(
    ("precision", "floats", "bits", "passed"),
    [
        ("int4", np.float16, 1, True),  # sums in another order, rounded to the other neighbour
        ("int4", np.float16, 4, False),
        ("int4", np.float32, 1, False),  # as large a difference between FP32 numbers is none
        ("int8", np.float16, 1, False),
    ],
)
def test_where_weights_alone_are_rounded_the_last_bit_of_fp16_is_allowed(
    precision: Precision, floats: type[np.floating[Any]], bits: int, passed: bool
) -> None:
    """What PyTorch gives is as near as a quarter of that bit: no multiple of it is one."""
    exact = np.linspace(0.5, 0.9, 64, dtype=np.float32).reshape(2, 32)
    lowered = (exact if floats is np.float32 else exact.astype(floats)).astype(np.float32)
    near = lowered + np.float32(2.0**-13)
    y = lowered.copy()
    y[1, 3] += bits * np.float32(2.0**-11)
    expected = Reference(
        np.zeros((2, 1), np.float32), near, near, {}, {}, {"layer": 2}, rounded=Rounded(lowered, {})
    )
    comparison = Comparison(Answering(y), {}, batch=2, tolerance=TOLERANCES[precision])
    comparison.add(expected)
    assert comparison.parity().passed == passed


def test_differences_are_told_of_all_inputs_and_of_those_with_the_same_experts() -> None:
    """One of two inputs goes to another expert, and its outputs are off by 2."""
    expected = Reference(
        np.zeros((2, 1), np.float32),
        Y,
        Y,
        {"layer": np.array([[0], [1]])},
        {"layer": np.ones(2)},
        {"layer": 1},
    )

    class Choosing(Answering):
        def run(
            self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
        ) -> dict[str, np.ndarray]:
            return {"output": self.y, "set": np.array([[0], [0]])}

    off = Y + np.array([[0.0, 0.0], [2.0, 0.0]], np.float32)
    found = compare(
        Choosing(off), expected, {"layer": "set"}, batch=2, tolerance=TOLERANCES["int8"]
    )
    assert (found.max_abs, found.all_max_abs, found.all_max_rel) == (0.0, 2.0, 0.5)
    assert (found.chosen_by, found.agreeing, found.choices) == ("inputs", 1, 2)
    assert not found.passed
    text = describe(found)
    assert "where the experts are the same; max |difference| 2 (0.5 of max|y|)" in text
    assert "over all 2 inputs; same experts in 1 of 2 inputs" in text


def fed(tmp_path: Path, count: int, *options: str) -> dict[str, Any]:
    case = read_case("soft_moe_lucidrains")
    x = np.random.default_rng(2).standard_normal((count, 5, 32)).astype(np.float32)
    np.savez(tmp_path / "x.npz", input=x)
    arguments = ("export", case.weights, "-o", tmp_path / "out", "--data", tmp_path / "x.npz")
    outcome = run(*arguments, "--k", "2", *options)
    assert outcome.code == 0, outcome.err
    content: dict[str, Any] = json.loads((tmp_path / "out" / "manifest.json").read_text())
    parity: dict[str, Any] = content["parity"]
    said = f"over all {parity['samples']} inputs; same experts in {parity['samples']} of"
    assert said in outcome.err
    with np.load(tmp_path / "out" / "parity.npz") as reference:
        assert np.array_equal(reference["x"], x[: len(reference["x"])])
        parity["kept"] = len(reference["x"])
    assert run("verify", tmp_path / "out").code == 0
    return parity


@pytest.mark.parametrize(
    ("options", "compared", "kept"),
    [
        ((), 21, 8),
        (("--verify-samples", "10"), 10, 8),
        (("--verify-samples", "3"), 3, 3),
        (("--batch", "4"), 20, 8),  # a graph of a fixed batch takes whole ones alone
        (("--batch", "12"), 12, 12),
    ],
)
def test_all_inputs_that_were_given_are_compared_and_the_first_are_kept(
    options: tuple[str, ...], compared: int, kept: int, tmp_path: Path
) -> None:
    parity = fed(tmp_path, 21, *options)
    assert (parity["samples"], parity["choices"], parity["kept"]) == (compared, compared, kept)
    assert parity["max_abs"] == parity["all_max_abs"]
    assert (parity["differing"], parity["atol"]) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", __file__, "--verify-samples", "0"), "--verify-samples 0: must be at least 1"),
        (
            ("--data", __file__, "--verify-samples", "9", "--no-verify"),
            "with --no-verify: nothing will be compared",
        ),
        (("--verify-samples", "9"), "it counts inputs of a feed, but there is none"),
    ],
)
def test_a_number_of_inputs_that_means_nothing_is_refused(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    weights = read_case("soft_moe_lucidrains").weights
    outcome = run("export", weights, "-o", tmp_path / "out", *options)
    assert outcome.code == 2
    assert message in outcome.error


def test_choices_of_tokens_are_told_from_inputs(tmp_path: Path) -> None:
    """Of a muMoE in INT8 each token chooses: its choices are no inputs."""
    case = read_case("mumoe_mixer_cp")
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    np.savez(tmp_path / "x.npz", input=case.x)
    arguments = ("export", case.weights, "--config", tmp_path / "config.json")
    int8 = ("--precision", "int8", "--method", "minmax", "--target", "ort-cpu", "--k", "4")
    outcome = run(*arguments, "-o", tmp_path / "out", "--data", tmp_path / "x.npz", *int8)
    assert outcome.code == 0, outcome.err
    parity = json.loads((tmp_path / "out" / "manifest.json").read_text())["parity"]
    assert (parity["chosen_by"], parity["samples"]) == ("tokens", len(case.x))
    agreeing, choices = parity["agreeing"], parity["choices"]
    assert choices > agreeing > 10 * len(case.x)
    assert parity["routing_agreement"] == agreeing / choices
    assert parity["all_max_abs"] >= parity["max_abs"]
    assert f"same experts in {agreeing:,} of the {choices:,} choices of tokens" in outcome.err
    assert f"over all {len(case.x)} inputs" in outcome.err


def tied(count: int) -> Parity:
    """Eight inputs of which so many choose another expert of two that are as good."""
    y = np.ones((8, 2), np.float32)
    margin = np.where(np.arange(8) < count, 0.0, 1.0)
    expected = Reference(
        np.zeros((8, 1), np.float32),
        y,
        y,
        {"layer": np.zeros((8, 1), np.int64)},
        {"layer": margin},
        {"layer": 1},
    )

    class Choosing(Answering):
        def run(
            self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
        ) -> dict[str, np.ndarray]:
            return {"output": self.y, "chosen": (margin == 0).astype(np.int64)[:, None]}

    values = {"layer": "chosen"}
    session = Choosing(np.where(margin[:, None] == 0, 2 * y, y))
    return compare(session, expected, values, batch=8, tolerance=TOLERANCES["fp32"])


@pytest.mark.parametrize(("count", "passed"), [(0, True), (4, True), (5, True), (7, False)])
def test_a_parity_of_mostly_ties_says_so_and_fails_above_a_share(count: int, passed: bool) -> None:
    """What ties is not compared: here the outputs of all such inputs are wrong."""
    parity = tied(count)
    assert parity.passed == passed
    assert (parity.ties, parity.tied, parity.choices) == (count, count, 8)
    assert ("MOST RESULTS WERE NOT COMPARED" in describe(parity)) == (count > 4)
