"""Each input and each output is judged in its own scale, in whatever order the inputs come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from moexport.exporter.bundle.parity import TOLERANCES, Comparison, Parity, Reference, describe
from moexport.exporter.inputs import Inputs
from moexport.graphs.targets import Precision
from moexport.tests.command import run

WIDE = 16


class Looking:
    """Gives each input, which is its own number, a row of outputs; alone some other ones."""

    provider = "test"
    input_name = "input"
    takes_k = False

    def __init__(self, outputs: dict[str, np.ndarray], alone: dict[int, np.ndarray]) -> None:
        self.output_names = [*outputs]
        self.outputs, self.alone = outputs, alone

    def __call__(self, x: Inputs, k: int | None = None) -> np.ndarray:
        return self.run(x, k)[self.output_names[0]]

    def run(
        self, x: Inputs, k: int | None = None, outputs: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        assert isinstance(x, np.ndarray)
        rows = x[:, 0].astype(int)
        found = {name: y[rows] for name, y in self.outputs.items()}
        if len(rows) == 1 and int(rows[0]) in self.alone:
            found[self.output_names[0]] = self.alone[int(rows[0])][None]
        return found


def judged(
    y: np.ndarray,
    wanted: np.ndarray,
    precision: Precision = "int8",
    *,
    order: np.ndarray | None = None,
    second: tuple[np.ndarray, np.ndarray] | None = None,
    alone: dict[int, np.ndarray] | None = None,
) -> Parity:
    """The parity of outputs y [s, o], eight inputs at a time and the first of them alone."""
    order = np.arange(len(y)) if order is None else order
    x = order.astype(np.float32)[:, None]
    outputs = {"y": y} if second is None else {"y": y, "z": second[0]}
    session = Looking(outputs, alone or {})
    comparison = Comparison(session, {}, batch=3, tolerance=TOLERANCES[precision], probed=(1, 2))
    for start in range(0, len(x), 8):
        rows = order[start : start + 8]
        further = {} if second is None else {"z": second[1][rows]}
        comparison.add(
            Reference(
                x[start : start + 8], wanted[rows], wanted[rows], {}, {}, {"l": 2}, outputs=further
            )
        )
    return comparison.parity()


def normal(count: int, width: int = WIDE, seed: int = 0) -> np.ndarray:
    y: np.ndarray = np.random.default_rng(seed).standard_normal((count, width))
    return y.astype(np.float32)


def off_by(wanted: np.ndarray, share: np.ndarray | float) -> np.ndarray:
    """The same with one number off by a share of each input's largest."""
    y = wanted.copy()
    y[:, 3] += np.float32(share) * np.abs(wanted).max(axis=1)
    return y


@pytest.mark.parametrize("share", [0.02, 0.2, 0.8, 0.98])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_quiet_inputs_are_not_judged_by_loud_ones(precision: Precision, share: float) -> None:
    """All are wrong by half of a loud input's rounding, which quiet ones are lost in."""
    wanted = normal(200)
    loud = np.arange(200) < 200 * share
    wanted[loud] *= 1000
    bounds = TOLERANCES[precision]
    noise = bounds.rtol / 2 * np.abs(wanted).max()
    y = wanted + np.where(loud, 0.0, noise)[:, None].astype(np.float32)
    assert np.abs(y - wanted).max() < bounds.rtol * np.abs(wanted).max()
    found = judged(y, wanted, precision)
    assert not found.passed
    assert found.max_rel > 10 * bounds.rtol
    assert found.loudness == pytest.approx(
        (np.abs(wanted).max(axis=1).min(), np.abs(wanted).max(axis=1).max())
    )
    right = judged(off_by(wanted, bounds.rtol / 2), wanted, precision)
    assert right.passed
    assert right.max_rel == pytest.approx(bounds.rtol / 2, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_verdict_does_not_depend_on_the_order_of_the_inputs(precision: Precision) -> None:
    """One of 40 inputs is an outlier, which INT8 has and FP32 has not, first or last."""
    wanted = normal(40)
    share = np.full(40, TOLERANCES[precision].rtol / 3)
    share[17] = TOLERANCES[precision].rtol * 2
    y = off_by(wanted, share)
    orders = [np.arange(40), np.arange(40)[::-1], np.roll(np.arange(40), -17)]
    found = [judged(y, wanted, precision, order=order) for order in orders]
    assert [one.passed for one in found] == [precision == "int8"] * 3
    assert len({round(one.max_rel, 5) for one in found}) == 1


@pytest.mark.parametrize(
    ("count", "times", "passed"), [(2, 2.9, True), (3, 2.9, False), (1, 3.1, False)]
)
def test_in_int8_one_input_in_twenty_may_be_three_times_as_far_off(
    count: int, times: float, passed: bool
) -> None:
    wanted = normal(40)
    rtol = TOLERANCES["int8"].rtol
    share = np.where(np.arange(40) < count, times * rtol, rtol / 4)
    found = judged(off_by(wanted, share), wanted)
    assert found.passed == passed
    assert found.max_rel == pytest.approx(times * rtol, rel=0.01)
    assert found.usual_rel == pytest.approx(times * rtol if count > 2 else rtol / 4, rel=0.01)


def test_an_outlier_that_comes_first_may_be_as_far_off_alone_and_no_further() -> None:
    wanted = normal(40)
    rtol = TOLERANCES["int8"].rtol
    y = off_by(wanted, np.where(np.arange(40) == 0, 1.5 * rtol, 0.0))
    assert judged(y, wanted, alone={0: y[0]}).passed
    wrong = judged(y, wanted, alone={0: wanted[0] + 2 * (y[0] - wanted[0])})
    assert (wrong.passed, wrong.batch) == (False, 1)


def test_a_low_cosine_is_a_failure() -> None:
    """Many numbers off by a little each: none is beyond the bound."""
    wanted = np.zeros((8, 400), np.float32)
    wanted[:, 0] = 1
    y = wanted.copy()
    y[:, 1:] = 0.09
    found = judged(y, wanted)
    assert found.max_rel < TOLERANCES["int8"].rtol
    assert 0.3 < found.cosine < 0.8
    assert not found.passed
    assert "cosine 0.4" in describe(found) or "cosine 0.5" in describe(found)


def test_a_low_cosine_of_outputs_that_were_given_wider_bounds_is_none() -> None:
    wide = TOLERANCES["int8"].with_user_bounds(None, 0.5)
    assert (wide.rtol, wide.least_cosine) == (0.5, -1.0)
    tighter = TOLERANCES["int8"].with_user_bounds(None, 0.05)
    assert (tighter.rtol, tighter.least_cosine) == (0.05, 0.8)


def test_each_output_is_judged_by_its_own_numbers() -> None:
    wanted, small = 1e4 * normal(8), normal(8, seed=1)
    y = off_by(wanted, 0.01)
    assert judged(y, wanted, second=(off_by(small, 0.05), small)).passed
    found = judged(y, wanted, second=(small[::-1].copy(), small))
    assert not found.passed
    assert found.max_abs < 10  # of the second output


@pytest.mark.parametrize("width", [1, 2])
def test_outputs_of_few_numbers_are_judged_by_the_scale_of_most_inputs(width: int) -> None:
    """A single number may be near zero by chance: no INT8 would be as near, over its own size."""
    wanted = normal(100, width)
    y = wanted + np.float32(0.03)
    assert np.abs((y - wanted) / wanted).max() > 1
    assert judged(y, wanted).passed
    loud = np.where(np.arange(100) % 5, 1, 1000)[:, None]
    assert not judged((loud * wanted + 30).astype(np.float32), loud * wanted).passed


def test_outputs_of_zeros_have_the_scale_of_quiet_inputs() -> None:
    wanted = normal(20)
    wanted[4] = 0
    assert judged(wanted + np.float32(1e-6), wanted, "fp32").passed
    assert not judged(wanted + np.float32(1e-2), wanted, "fp32").passed


@pytest.mark.slow
def test_int8_of_inputs_of_which_some_are_loud_is_refused_with_the_cause(tmp_path: Path) -> None:
    """One range holds all inputs: an ordinary one is rounded to a few steps."""
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    weights = {
        "phi": torch.randn(24, 6, 2),
        "experts.weight": torch.randn(6, 24, 24) / 24**0.5,
        "experts.bias": 0.1 * torch.randn(6, 24),
    }
    torch.save(weights, tmp_path / "layer.pt")
    x = random.standard_normal((60, 10, 24)).astype(np.float32)
    x[::5] *= 100
    family = ("--family", "soft-moe-fkodom", "--set", "version=0.2", "--threads", "1")
    arguments = ("export", tmp_path / "layer.pt", *family, "-o", tmp_path / "out")
    int8 = ("--precision", "int8", "--target", "ort-cpu")

    def exported(x: np.ndarray, *options: str) -> int:
        np.savez(tmp_path / "x.npz", input=x)
        outcome = run(*arguments, "--data", tmp_path / "x.npz", "--force", *options)
        if outcome.code:
            assert not (tmp_path / "out").exists()
            assert "for the quietest input and" in outcome.hint
            assert "bring the inputs to one scale, or use --precision fp16 or fp32" in outcome.hint
        else:
            assert run("verify", tmp_path / "out").code == 0
        return outcome.code

    assert [exported(part, *int8) for part in (x, x[::-1])] == [3, 3]
    x[::5] /= 100
    assert exported(x, *int8) == 0
