"""Training brings the model nearer to the untouched one, or leaves the constants unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import moexport
import numpy as np
import pytest
import torch
from moexport.bench.runners.pytorch import PyTorch
from moexport.graphs.layers.base import replaced_layers
from moexport.graphs.layers.soft_moe import SoftMoE
from moexport.plugins.demo import digits
from moexport.plugins.tune.substitutes import distill
from moexport.plugins.tune.substitutes.distill import (
    EVALUATIONS,
    EVALUATIONS_SHARE,
    HELD_OUT,
    Samples,
    distil,
)
from torch import nn

pytestmark = pytest.mark.slow

AMPLE_S = 3600.0
"""More than any training takes here, so that all steps run even on a busy machine."""


@pytest.fixture(autouse=True)
def as_long_as_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests train more briefly (`conftest.py`)."""
    monkeypatch.setattr(distill, "MAX_STEPS", 1200)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> tuple[moexport.Model, Samples, Samples]:
    """A trained network, and its outputs for inputs to fit on and for others."""
    data = digits.load_digits(test_share=0.5)
    path: Path = tmp_path_factory.mktemp("distill") / "digits.pt"
    asked = digits.Training(16, hidden=16, normalise=True, scale=16.0, epochs=6, batch=64)
    digits.save(digits.train(asked, data.train), path)
    model = moexport.load(path)
    runner = PyTorch(model.module)
    batches = [data.test.inputs[start : start + 32] for start in range(0, 896, 32)]
    samples = [(x, runner.infer(x)) for x in batches]
    return model, samples[:20], samples[20:]


@contextmanager
def changed(
    model: moexport.Model,
) -> Iterator[tuple[nn.Module, dict[str, nn.Parameter], np.ndarray]]:
    """Yields the network with two experts, the random constants of the others, and a copy."""
    ((_, layer),) = model.layers.items()
    assert isinstance(layer, SoftMoE)
    shape = (layer.spec.experts - 2, layer.spec.slots, layer.spec.out)
    start = 0.01 * np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    smaller = layer.with_experts((0, 1), start.copy())
    assert smaller is not None and smaller.constants is not None
    with replaced_layers(model.module, lambda _, __: smaller) as module:
        yield module, {"layer": smaller.constants}, start


def apart(module: nn.Module, samples: Samples) -> float:
    """The mean divergence of class scores from those in the samples, in float64."""
    found = []
    for x, base in samples:
        with torch.inference_mode():
            y = module(torch.from_numpy(x)).double().log_softmax(dim=-1)
        p = torch.from_numpy(base).double().log_softmax(dim=-1)
        found.append(float((p.exp() * (p - y)).sum(dim=-1).mean()))
    return float(np.mean(found))


@pytest.mark.parametrize("scores", [True, False])
def test_training_brings_outputs_nearer_on_inputs_it_has_not_seen(
    network: tuple[moexport.Model, Samples, Samples], scores: bool
) -> None:
    model, samples, others = network
    with changed(model) as (module, constants, start):
        before = apart(module, others)
        runner = PyTorch(module)
        found = distil(runner, constants, samples, scores=scores, seconds=AMPLE_S)
        constants["layer"].requires_grad_(False).copy_(torch.from_numpy(found["layer"]))
        assert apart(module, others) < (0.2 if scores else 0.5) * before
    assert not np.array_equal(found["layer"], start)


def test_without_time_the_constants_stay_as_they_came(
    network: tuple[moexport.Model, Samples, Samples],
) -> None:
    model, samples, _ = network
    with changed(model) as (module, constants, start):
        # The second has none to fit on.
        for part, seconds in ((samples, 0.0), (samples[:1], AMPLE_S)):
            found = distil(PyTorch(module), constants, part, scores=True, seconds=seconds)
            assert np.array_equal(found["layer"], start)


@pytest.mark.parametrize("backward_s", [0.03, 0.3])
def test_training_ends_in_its_time_whatever_a_step_takes(
    network: tuple[moexport.Model, Samples, Samples],
    backward_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, samples, _ = network
    at, steps, forward_s, seconds = 0.0, 0, 0.01, 10.0
    own = distill._loss

    def taking(*given: Any, scores: bool) -> torch.Tensor:
        nonlocal at, steps
        training = torch.is_grad_enabled()
        at += forward_s + training * backward_s
        steps += training
        return own(*given, scores=scores)

    monkeypatch.setattr(distill, "_loss", taking)
    monkeypatch.setattr(distill, "time", SimpleNamespace(monotonic=lambda: at))
    with changed(model) as (module, constants, _):
        distil(PyTorch(module), constants, samples, scores=True, seconds=seconds)
    evaluation_s = EVALUATIONS_SHARE * seconds / EVALUATIONS
    assert 0.9 * seconds <= at <= seconds + evaluation_s + backward_s + 3 * forward_s
    assert steps >= 0.8 * seconds / (forward_s + backward_s)


def test_training_begins_with_what_does_better_on_inputs_that_are_held_out(
    network: tuple[moexport.Model, Samples, Samples],
) -> None:
    model, samples, _ = network
    with changed(model) as (module, constants, start):
        runner = PyTorch(module)
        trained = distil(runner, constants, samples, scores=True, seconds=AMPLE_S)
        worse = {name: 10 * array for name, array in trained.items()}
        for other, expected in ((trained, trained["layer"]), (worse, start)):
            with torch.no_grad():
                constants["layer"].copy_(torch.from_numpy(start))
            found = distil(runner, constants, samples, scores=True, seconds=0.0, other=other)
            assert np.array_equal(found["layer"], expected)
            assert np.array_equal(constants["layer"].detach().numpy(), expected)


class Fragile(nn.Module):
    """A network that fails on NaN outputs, like sparse gates."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.network(x)
        if not found.isfinite().all():
            raise RuntimeError("index -1 is out of bounds")
        return found


@pytest.mark.parametrize("kind", [Fragile, nn.Sequential])
def test_a_training_that_diverges_goes_on_in_smaller_steps(
    network: tuple[moexport.Model, Samples, Samples],
    kind: Callable[[nn.Module], nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, samples, others = network
    monkeypatch.setattr(distill, "RATE", 1e41)
    monkeypatch.setattr(distill, "RATE_DIVISOR", 1e42)
    with changed(model) as (module, constants, start):
        before = apart(module, others)
        found = distil(PyTorch(kind(module)), constants, samples, scores=True, seconds=AMPLE_S)
        constants["layer"].requires_grad_(False).copy_(torch.from_numpy(found["layer"]))
        assert apart(module, others) < 0.5 * before
    assert not np.array_equal(found["layer"], start)


class WithoutGradients(nn.Module):
    """A network whose forward forbids gradients."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.network(x)
        return found


def test_a_network_without_gradients_keeps_the_constants_as_they_came(
    network: tuple[moexport.Model, Samples, Samples],
) -> None:
    model, samples, _ = network
    with changed(model) as (module, constants, start):
        runner = PyTorch(WithoutGradients(module))
        found = distil(runner, constants, samples, scores=True, seconds=AMPLE_S)
    assert np.array_equal(found["layer"], start)


def test_training_that_does_not_help_inputs_that_are_held_out_is_left(
    network: tuple[moexport.Model, Samples, Samples],
) -> None:
    model, samples, _ = network
    with changed(model) as (module, constants, start):
        runner = PyTorch(module)
        # The held-out inputs agree with the initial constants, the others with different ones.
        mixed = [
            (x, runner.infer(x) if index % HELD_OUT == 0 else np.roll(base, 1, axis=1))
            for index, (x, base) in enumerate(samples)
        ]
        found = distil(runner, constants, mixed, scores=True, seconds=AMPLE_S)
    assert np.array_equal(found["layer"], start)
