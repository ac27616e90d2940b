"""Training what takes the places of experts until the whole model answers as the untouched one.

Least squares bring a layer's own outputs near (`constants.py`), but most directions of those matter
little to what the model says. No labels are used: the target is what the untouched model gives
(Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, 2015).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....bench.runners.pytorch import PyTorch
from ....data.feeds import Array
from ....exporter.inputs import Inputs
from ....exporter.reference import first_output

STEPS = 1200
"""Batches that are trained on, at the most."""

FEWEST = 25
"""With time for fewer steps than this, nothing is trained."""

STEP = 4.0
"""About how many times as long as running a batch a step of the training takes."""

RATE = 0.1
"""How far a number moves in the first steps, as a share of the numbers' mean size."""

SMALLER = 4.0
"""By how much smaller the steps get where a training has led to no numbers any more."""

EVALUATIONS, EVALUATIONS_SHARE = 4, 0.15
"""How often the batches that are held out are asked on the way, and what of the time that takes."""

HELD_OUT = 5
"""One of so many batches is held out: they say which of the looks is best."""

MOST_HELD = 32
"""Batches that are held out, at the most."""

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
    """Returns the arrays of some parameters of a model, which are trained in place.

    They begin as they came, or as the `other` arrays, whichever do better on what is held out.

    It takes so many `seconds`, or less. The loss is the Kullback-Leibler divergence of class scores
    where outputs are such (`scores`), else their squared distance. What is returned did best on
    batches that were held out: the parameters as they began where training has not helped.
    """
    began = time.monotonic()
    held = samples[::HELD_OUT]
    fitted = [sample for index, sample in enumerate(samples) if index % HELD_OUT]
    best = _copied(parameters)
    batch_s = min(_seconds(model, held[0], scores=scores) for _ in range(2))
    affordable = int(EVALUATIONS_SHARE * seconds / ((1 + EVALUATIONS) * batch_s))
    held = held[: max(1, min(MOST_HELD, affordable))]
    least = _mean_loss(model, held, scores=scores)
    if other is not None:
        _set(parameters, other)
        value = _mean_loss(model, held, scores=scores)
        least, best = min((least, best), (value, _copied(parameters)), key=lambda pair: pair[0])
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
        # The steps get smaller as the time goes: what they take is known only afterwards.
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
            if not step:  # a network that was written without gradients in mind
                return best
            value = math.nan  # some operations take none
        if not math.isfinite(value):  # the steps were too large
            _set(parameters, best)
            optimiser, rate = _optimiser(parameters), rate / SMALLER
        elif evaluating and value < least:
            least, best = value, _copied(parameters)
        elif not evaluating:
            optimiser.step()
        step += not evaluating
    return best


def longest_s(batch_s: float) -> float:
    """Returns about how long a training takes at most, with so long for a batch."""
    return STEPS * STEP * batch_s


def _optimiser(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [parameter]} for parameter in parameters.values()])


def _seconds(model: PyTorch, sample: tuple[Inputs, Array], *, scores: bool) -> float:
    began = time.monotonic()
    _mean_loss(model, [sample], scores=scores)
    return time.monotonic() - began


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
    y, wanted = first_output(model.module(*model.tensors(x))), torch.from_numpy(base)
    if not scores:
        return F.mse_loss(y, wanted)
    own, theirs = (outputs.flatten(0, -2).log_softmax(dim=-1) for outputs in (y, wanted))
    return F.kl_div(own, theirs, reduction="batchmean", log_target=True)
