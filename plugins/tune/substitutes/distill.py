"""Trains the substitutes so that the whole model's outputs match the original's.

Least squares bring a layer's own outputs near (`constants.py`), but most directions of those
outputs matter little to the model's answer. No labels are used: the target is the untouched model's
output (Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, 2015).
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

STEPS = 1200
"""The largest number of batches to train on."""

FEWEST = 25
"""If there is time for fewer steps than this, nothing is trained."""

STEP = 4.0
"""The estimated time of a training step, in runs of a batch."""

RATE = 0.1
"""The size of the first steps, relative to the parameters' mean magnitude."""

SMALLER = 4.0
"""The step size is divided by this if the training diverges."""

EVALUATIONS, EVALUATIONS_SHARE = 4, 0.15
"""The number of evaluations on the held-out batches, and their share of the time."""

HELD_OUT = 5
"""One of this many batches is held out; the held-out batches decide which evaluation is best."""

MOST_HELD = 32
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
    scores (`scores`), or the squared distance. The returned arrays did best on the held-out
    batches: the initial ones if training did not help.
    """
    began = time.monotonic()
    held = samples[::HELD_OUT]
    fitted = [sample for index, sample in enumerate(samples) if index % HELD_OUT]
    best = _copied(parameters)
    first = partial(_mean_loss, model, held[:1], scores=scores)
    batch_s = min(timeit.repeat(first, number=1, repeat=2))
    affordable = int(EVALUATIONS_SHARE * seconds / ((1 + EVALUATIONS) * batch_s))
    held = held[: max(1, min(MOST_HELD, affordable))]
    lowest = _mean_loss(model, held, scores=scores)
    if other is not None:
        _set(parameters, other)
        value = _mean_loss(model, held, scores=scores)
        lowest, best = min((lowest, best), (value, _copied(parameters)), key=lambda pair: pair[0])
        _set(parameters, best)
    if seconds < FEWEST * STEP * batch_s or not fitted:
        return best
    sizes = [max(np.abs(array).mean(), 1e-6) for array in best.values()]
    optimiser, rate = _optimiser(parameters), RATE
    order: list[int] = []
    generator = np.random.default_rng(0)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    step = evaluations = 0
    while evaluations < EVALUATIONS:
        # The step size falls with the elapsed time, since the time of a step is known only
        # afterwards.
        done = min(1.0, max(step / STEPS, (time.monotonic() - began) / seconds))
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
            if not step:  # a network that does not support gradients
                return best
            value = math.nan  # some operations fail on the diverged parameters
        if not math.isfinite(value):  # the step was too large
            _set(parameters, best)
            optimiser, rate = _optimiser(parameters), rate / SMALLER
        elif evaluating and value < lowest:
            lowest, best = value, _copied(parameters)
        elif not evaluating:
            optimiser.step()
        step += not evaluating
    return best


def longest_s(batch_s: float) -> float:
    """Returns about how long a training takes at most, given the seconds of a batch."""
    return STEPS * STEP * batch_s


def _optimiser(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [parameter]} for parameter in parameters.values()])


def _copied(parameters: Mapping[str, nn.Parameter]) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy().copy() for name, parameter in parameters.items()}


@torch.no_grad()
def _set(parameters: Mapping[str, nn.Parameter], arrays: Mapping[str, np.ndarray]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(torch.from_numpy(arrays[name]))


@torch.no_grad()
def _mean_loss(model: PyTorch, samples: Samples, *, scores: bool) -> float:
    return float(np.mean([float(_loss(model, *sample, scores=scores)) for sample in samples]))


def _loss(model: PyTorch, x: Inputs, base: Array, *, scores: bool) -> Tensor:
    y, wanted = all_outputs(model.module(*model.tensors(x)))[0], torch.from_numpy(base)
    if not scores:
        return F.mse_loss(y, wanted)
    own, theirs = (outputs.flatten(0, -2).log_softmax(dim=-1) for outputs in (y, wanted))
    return F.kl_div(own, theirs, reduction="batchmean", log_target=True)
