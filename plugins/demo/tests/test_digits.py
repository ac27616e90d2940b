"""The digits network computes the published forward, trains in seconds, is saved as published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from moexport.bench.data import LabelledData
from moexport.bench.metrics import score_interval
from moexport.bench.report.summary import KEPT
from moexport.plugins.demo.digits import Digits, SoftMoEMnist, Training, load_digits, save, train
from moexport.plugins.demo.soft_moe import HELD_OUT, join_halves
from moexport.plugins.tune.accuracy.holdout import Holdout
from moexport.tests.recorded import DATA


def load_published(network: SoftMoEMnist, state: dict[str, torch.Tensor]) -> None:
    """Loads weights from a state dict with the keys of the released code."""
    numbers = range(network.experts)
    own = {
        "phi": state["phi"],
        "decoder.weight": state["decoder.1.weight"],
        "w1": torch.stack([state[f"experts.{e}.1.weight"].T for e in numbers]),
        "w2": torch.stack([state[f"experts.{e}.3.weight"].T for e in numbers]),
    }
    if network.normalization_scale_param is not None:
        own["normalization_scale_param"] = state["normalization_scale_param"]
    network.load_state_dict(own)


def accuracy(network: SoftMoEMnist, data: LabelledData) -> float:
    """Returns the share of labelled images that a network classifies correctly, 0..1."""
    with torch.inference_mode():
        scores = network(torch.from_numpy(data.inputs))
    return float((scores.argmax(dim=1).numpy() == data.labels).mean())


def test_the_split_is_fixed_stratified_and_disjoint(digits: Digits) -> None:
    again = load_digits()
    assert np.array_equal(digits.test.inputs, again.test.inputs)
    assert digits.train.inputs.shape == (1437, 1, 28, 28)
    assert digits.test.inputs.shape == (360, 1, 28, 28)
    assert digits.test.inputs.dtype == np.float32
    assert (digits.train.inputs.min(), digits.train.inputs.max()) == (0.0, 1.0)
    assert digits.test.labels is not None
    assert np.bincount(digits.test.labels).min() >= 34
    seen = {image.tobytes() for image in digits.train.inputs}
    assert not any(image.tobytes() in seen for image in digits.test.inputs)


def test_thirty_epochs_with_four_experts_reach_93_percent(
    digits: Digits, trained: SoftMoEMnist
) -> None:
    assert accuracy(trained, digits.test) >= 0.93


def test_training_is_deterministic_and_keeps_the_random_state(digits: Digits) -> None:
    before = torch.random.get_rng_state()
    one = train(Training(experts=4, epochs=1), digits.train)
    two = train(Training(experts=4, epochs=1), digits.train)
    assert torch.equal(one.phi, two.phi)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.path
@pytest.mark.parametrize("normalise", [False, True])
def test_the_saved_file_is_the_published_layout_and_loads_back(
    digits: Digits, tmp_path: Path, normalise: bool
) -> None:
    network = train(Training(experts=16, normalise=normalise, epochs=1), digits.train)
    save(network, tmp_path / "digits.pt")
    state = torch.load(tmp_path / "digits.pt", weights_only=True)
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    expected = {"phi": (196, 16), "decoder.1.weight": (10, 784)}
    for e in range(16):
        expected |= {f"experts.{e}.1.weight": (49, 196), f"experts.{e}.3.weight": (196, 49)}
    if normalise:
        expected["normalization_scale_param"] = (1,)  # type: ignore[assignment]
    assert shapes == expected
    other = SoftMoEMnist(16, normalise=normalise)
    load_published(other, state)
    x = torch.from_numpy(digits.test.inputs[:8])
    assert torch.equal(other(x), network(x))


@pytest.mark.parametrize("case", ["soft_moe_mnist", "soft_moe_mnist_normalized"])
def test_the_forward_is_that_of_the_published_code(case: str) -> None:
    folder = DATA / case
    network = SoftMoEMnist(16, normalise=case.endswith("normalized"))
    load_published(network, torch.load(folder / "weights.pt", weights_only=True))
    recorded = np.load(folder / "io.npz")
    with torch.inference_mode():
        y = network(torch.from_numpy(recorded["x"])).numpy()
    assert np.abs(y - recorded["y"]).max() <= 1e-5 * np.abs(recorded["y"]).max()


@pytest.mark.parametrize("normalise", [False, True])
def test_many_experts_are_computed_in_another_order_with_the_same_result(
    digits: Digits, normalise: bool
) -> None:
    network = SoftMoEMnist(64, normalise=normalise)
    x = torch.from_numpy(digits.test.inputs[:16])
    with torch.inference_mode():
        y = network(x)
        network.experts = 1  # below the number from which the order changes
        assert torch.allclose(network(x), y, atol=1e-6)


def test_the_demo_holds_out_enough_to_prove_what_its_report_requires() -> None:
    before, held = load_digits(), load_digits(test_share=HELD_OUT)
    # If all images that PyTorch classifies correctly, 94%, are still correct.
    ends = [score_interval(round(0.94 * len(data.test)), 0, 0).low for data in (before, held)]
    assert ends[0] < KEPT < ends[1]


def test_the_search_of_the_demo_sees_no_image_that_proves_its_result() -> None:
    held = load_digits(test_share=HELD_OUT)
    halved = Holdout.of(join_halves(held))
    trained = {image.tobytes() for image in held.train.inputs}
    proving = [image.tobytes() for images, _ in halved.confirming() for image in np.asarray(images)]
    assert {image.tobytes() for image in halved.search.inputs} <= trained
    assert len(proving) == len(held.train)
    assert {*proving} <= {image.tobytes() for image in held.test.inputs}
    assert not trained & {*proving}
