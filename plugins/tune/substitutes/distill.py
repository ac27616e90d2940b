"""Trains the substitutes so that the whole model's outputs match the original's.

Least squares bring a layer's outputs close to the original ones (`constants.py`), but most of their
directions hardly affect the model's answer. Training needs no labels: its target is the untouched
model's output (Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, 2015).
"""

from __future__ import annotations

import math
import time
import timeit
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....bench.runners.pytorch import PyTorch
from ....data.batches import Array
from ....exporter.inputs import Inputs
from ....exporter.reference import all_outputs

MAX_STEPS = 1200
"""The largest number of batches to train on."""

MIN_STEPS = 25
"""If the time allows fewer steps, nothing is trained."""

STEP_RUNS = 4.0
"""The estimated time of a training step, as a multiple of the time to run a batch."""

RATE = 0.1
"""The size of the first steps, relative to the parameters' mean magnitude."""

RATE_DIVISOR = 4.0
"""If the training diverges, the step size is divided by this."""

EVALUATIONS, EVALUATIONS_SHARE = 4, 0.15
"""The number of evaluations on the held-out batches, and their share of the time."""

HELD_OUT = 5
"""One in this many batches is held out; the held-out batches decide which arrays are best."""

MAX_HELD_OUT = 32
"""The largest number of held-out batches."""

Samples = Sequence[tuple[Inputs, Array]]
"""Batches of inputs with the untouched model's outputs [b, …]."""


def distil(
    model: PyTorch,
    parameters: Mapping[str, nn.Parameter],
    samples: Samples,
    *,
    scores: bool,
    seconds: float,
    other: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Trains some parameters of a model in place, for at most `seconds`; returns their arrays.

    The training starts from the parameters or from the `other` arrays, whichever have the smaller
    loss on held-out batches. The loss is the Kullback-Leibler divergence if outputs are class
    scores (`scores`), otherwise the squared distance. The returned arrays are those with the
    smallest loss on the held-out batches; these are the initial ones if training did not help.
    """
    began = time.monotonic()
    held = samples[::HELD_OUT]
    fitted = [sample for index, sample in enumerate(samples) if index % HELD_OUT]
    best = _copied(parameters)
    first = partial(_mean_loss, model, held[:1], scores=scores)
    batch_s = min(timeit.repeat(first, number=1, repeat=2))
    affordable = int(EVALUATIONS_SHARE * seconds / ((1 + EVALUATIONS) * batch_s))
    held = held[: max(1, min(MAX_HELD_OUT, affordable))]
    lowest = _mean_loss(model, held, scores=scores)
    if other is not None:
        _assign(parameters, other)
        value = _mean_loss(model, held, scores=scores)
        lowest, best = min((lowest, best), (value, _copied(parameters)), key=lambda pair: pair[0])
        _assign(parameters, best)
    if seconds < MIN_STEPS * STEP_RUNS * batch_s or not fitted:
        return best
    sizes = [max(np.abs(array).mean(), 1e-6) for array in best.values()]
    optimiser, rate = _optimiser(parameters), RATE
    order: list[int] = []
    generator = np.random.default_rng(0)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    step = evaluations = 0
    while evaluations < EVALUATIONS:
        # The step size falls with the elapsed time, since the time of a step is not known before.
        done = min(1.0, max(step / MAX_STEPS, (time.monotonic() - began) / seconds))
        evaluating = done * EVALUATIONS >= evaluations + 1
        for group, size in zip(optimiser.param_groups, sizes, strict=True):
            group["lr"] = rate * size * (1 - done)
        try:
            if evaluating:
                evaluations = int(done * EVALUATIONS)
                value = _mean_loss(model, held, scores=scores)
            else:
                order = order or [*generator.permutation(len(fitted))]
                x, base = fitted[order.pop()]
                optimiser.zero_grad()
                loss = _loss(model, x, base, scores=scores)
                loss.backward()  # type: ignore[no-untyped-call]
                value = float(loss.detach())
        except RuntimeError:
            if not step:  # the network does not support gradients
                return best
            value = math.nan  # some operations fail if the parameters have diverged
        if not math.isfinite(value):  # the step was too large
            _assign(parameters, best)
            optimiser, rate = _optimiser(parameters), rate / RATE_DIVISOR
        elif evaluating and value < lowest:
            lowest, best = value, _copied(parameters)
        elif not evaluating:
            optimiser.step()
        step += not evaluating
    return best


def longest_s(batch_s: float) -> float:
    """Returns about how many seconds a training takes at most, for the time of a batch."""
    return MAX_STEPS * STEP_RUNS * batch_s


def _optimiser(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [parameter]} for parameter in parameters.values()])


def _copied(parameters: Mapping[str, nn.Parameter]) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy().copy() for name, parameter in parameters.items()}


@torch.no_grad()
def _assign(parameters: Mapping[str, nn.Parameter], arrays: Mapping[str, np.ndarray]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(torch.from_numpy(arrays[name]))


@torch.no_grad()
def _mean_loss(model: PyTorch, samples: Samples, *, scores: bool) -> float:
    return float(np.mean([float(_loss(model, *sample, scores=scores)) for sample in samples]))


def _loss(model: PyTorch, x: Inputs, base: Array, *, scores: bool) -> Tensor:
    y, target = all_outputs(model.module(*model.tensors(x)))[0], torch.from_numpy(base)
    if not scores:
        return F.mse_loss(y, target)
    log_q, log_p = (outputs.flatten(0, -2).log_softmax(dim=-1) for outputs in (y, target))
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
