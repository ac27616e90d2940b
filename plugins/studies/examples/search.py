"""Finds the inputs, and their tokens, with the largest weights for each expert.

An input's weight for an expert is the value by which the layer chooses. For Soft MoE it is the sum
of the expert's columns of C, and a token's weight is its share of the expert's slots (D averaged
over the slots). For muMoE it is the largest coefficient of a token, for token-routed experts the
largest gate. If inputs are token ids, each token is an example by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ....bench.data import BATCH, LabelledData, ids_of, labelled
from ....bench.measure.sequences import benchmark_of
from ....common.console import Progress, Silent
from ....data.batches import Array
from ....errors import FeedError, UsageError
from ....exporter.inputs import fitted_arrays
from ....exporter.model import Model
from ....graphs.layers.base import MoELayer, moe_layers
from ....graphs.layers.soft_moe import SoftMoE
from .shown import Contents, contents_of

MASK = "attention_mask"
"""The input that marks padding tokens."""

DISPATCH_SHARE = "share of the expert's slots (D)"
COMBINE_MEAN = "mean weight of the expert's slots (C)"

TOKENS = 3
"""The number of tokens that are listed for an example."""


@dataclass(frozen=True, slots=True)
class TopInput:
    """An input, by its number in the data, with its weight for an expert.

    `tokens` has the positions and the weights of the tokens with the largest weights. `token` is
    the id of the token that is the example; None if the example is the whole input.
    """

    input: int
    weight: float
    tokens: tuple[tuple[int, float], ...]
    label: int | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class ExpertExamples:
    """An expert, its level, counted from 1, and its examples, largest weight first."""

    level: int
    expert: int
    examples: tuple[TopInput, ...]


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples of all experts of a layer, from `inputs` inputs.

    `weight` and `share` describe the weights of inputs and of tokens; `dim` is the width of the
    layer's tokens. `shares` has an array [count, n, m] per level: the weights of all tokens of each
    example, unless the examples are tokens (`by_token`). `labelled` is whether the inputs have
    classes or attributes.
    """

    model: str
    layer: str
    kind: str
    levels: tuple[int, ...]
    dim: int
    inputs: int
    weight: str
    share: str
    by_token: bool
    labelled: bool
    experts: tuple[ExpertExamples, ...]
    shares: tuple[Array, ...] = field(default=(), repr=False, compare=False)
    shown: Contents = field(default=Contents(), repr=False, compare=False)

    def name(self, expert: ExpertExamples) -> str:
        """Returns an expert's name as in `--ablate`."""
        return f"{expert.level}.{expert.expert}" if len(self.levels) > 1 else str(expert.expert)


def inputs_for_examples(
    data: str | Path | LabelledData | Mapping[str, Any], model: Model
) -> LabelledData:
    """Returns the inputs to search for examples; raises the errors of reading them."""
    if isinstance(data, LabelledData):
        return data
    sequences = benchmark_of(model)
    if sequences is not None:
        return sequences.data(ids_of(data, model), model, None)
    return labelled(data, model, 1).head(sys.maxsize)


@torch.inference_mode()
def examples_of(
    model: Model,
    data: str | Path | LabelledData | Mapping[str, Any],
    *,
    layer: str | None = None,
    count: int = 9,
    progress: Progress | None = None,
) -> Examples:
    """Returns the `count` inputs with the largest weights for each expert of a layer.

    The default layer is the last. The data is read once. An expert to which no input gives a weight
    has no examples. Raises `UsageError` for an unknown layer or one whose tokens are not those of
    the inputs, and the errors of reading data.
    """
    name = layer_name(model, layer)
    dataset = inputs_for_examples(data, model)
    moe_layer = moe_layers(model.module)[name]
    by_token = np.issubdtype(np.dtype(model.input.dtype), np.integer)
    progress = progress or Silent()
    progress.step(f"examples of {name} in {model.source.path}", total=len(dataset))
    best = [_TopExamples(count) for _ in moe_layer.spec.levels]
    batch_of = model.batch_of
    if len(dataset) % batch_of:
        raise FeedError(
            f"--data: there are {len(dataset)} inputs, but the model computes {batch_of} together",
            hint=f"give a multiple of {batch_of} inputs",
        )
    done = 0
    for inputs, _ in dataset.stream(max(1, BATCH // batch_of) * batch_of):
        arrays = fitted_arrays(inputs, model)
        rows = len(arrays[model.input.name])
        with _weights(moe_layer, rows) as levels:
            model.module(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arrays.values()))
        if not levels:
            raise UsageError(
                f"--examples: these inputs do not reach layer {name}", hint="choose another --layer"
            )
        mask = arrays.get(MASK)
        for top, (scores, shares) in zip(best, levels, strict=True):
            weights = shares
            if mask is not None and mask.shape == shares.shape[:2]:
                weights = np.where(mask[..., None] != 0, shares, 0)  # without padding
            if by_token and weights.shape[:2] != arrays[model.input.name].shape:
                raise _not_input_tokens(name)
            top.add(weights if by_token else scores, weights, done, by_token=by_token)
        done += rows
        progress.advance(rows)
    share = _weight_of(moe_layer)
    if isinstance(moe_layer, SoftMoE):  # a layer that receives slots has no D
        share = COMBINE_MEAN if moe_layer.spec.external_routing else DISPATCH_SHARE
    return Examples(
        model=model.source.path,
        layer=name,
        kind=moe_layer.spec.kind,
        levels=moe_layer.spec.levels,
        dim=moe_layer.spec.dim,
        inputs=done,
        weight=share if by_token else _weight_of(moe_layer),
        share=share,
        by_token=by_token,
        labelled=dataset.labels is not None and benchmark_of(model) is None,
        experts=tuple(
            ExpertExamples(level, expert, tuple(top.examples(expert, dataset, by_token=by_token)))
            for level, top in enumerate(best, start=1)
            for expert in range(moe_layer.spec.levels[level - 1])
        ),
        shares=() if by_token else tuple(top.shares for top in best),
        shown=contents_of(dataset.inputs, model, data),
    )


def layer_name(model: Model, layer: str | None) -> str:
    """Returns the layer's name, by default the last; raises `UsageError` for an unknown one."""
    name = list(model.layers)[-1] if layer is None else layer
    if name not in model.layers:
        raise UsageError(
            f"--layer {name}: the model has no such MoE layer",
            hint=f"its MoE layers: {', '.join(model.layers)}",
        )
    return name


def _weight_of(layer: MoELayer) -> str:
    if isinstance(layer, SoftMoE):
        return "column sum of C"
    return "gate" if layer.spec.flat else "coefficient"


@contextmanager
def _weights(layer: MoELayer, batch: int) -> Iterator[list[tuple[Array, Array]]]:
    """Yields a list with the weights, by level, of the latest forward pass in the context."""
    levels: list[tuple[Array, Array]] = []

    def record(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        levels[:] = _weights_by_level(layer, given, batch)

    with layer.register_forward_pre_hook(record):
        yield levels


def _weights_by_level(
    layer: MoELayer, given: tuple[torch.Tensor, ...], batch: int
) -> list[tuple[Array, Array]]:
    """Returns the weights of inputs [b, n] and of their tokens [b, m, n], by level."""
    sums: Array | None = None
    if isinstance(layer, SoftMoE):
        routing = layer.route(given[0])
        tokens = [routing.dispatch.mean(dim=3).float().numpy()]
        sums = routing.scores.float().numpy()
    elif layer.spec.flat:
        tokens = [_dense_gates(layer, *given[1:3])]
    else:
        # The coefficients that mix the experts are the weights.
        tokens = [choice.chosen.float().numpy() for choice in layer.choices(*given).values()]
    by_input = []
    for shares in tokens:
        n = shares.shape[-1]
        if shares.size % (batch * n) or (sums is not None and len(sums) % batch):
            raise _not_input_tokens(layer.spec.name)
        per_input = shares.reshape(batch, -1, n)  # an input may be split into several windows
        scores = per_input.max(axis=1) if sums is None else sums.reshape(batch, -1, n).sum(axis=1)
        by_input.append((scores, per_input))
    return by_input


def _not_input_tokens(layer: str) -> UsageError:
    return UsageError(
        f"--examples: layer {layer} does not compute the tokens of the inputs",
        hint="choose another --layer",
    )


def _dense_gates(layer: MoELayer, index: torch.Tensor, weights: torch.Tensor) -> Array:
    """Returns the gates [t, n] of all experts: 0 if not chosen, or if the token was dropped."""
    n = layer.spec.experts
    chosen = index < n
    gates = torch.zeros(len(index), n)
    gates.scatter_add_(1, index.where(chosen, 0), weights.float().where(chosen, 0.0))
    return gates.numpy()


class _TopExamples:
    """The examples with the largest weights for a level's experts, updated batch by batch.

    `scores` [count, n] are the weights. `numbers` [count, n] are the numbers of the inputs or, if
    tokens are the examples, of the tokens, counted over all inputs. `shares` is [count, n, m].
    """

    def __init__(self, count: int) -> None:
        self.count, self.tokens = count, 1
        self.scores: Array = np.zeros(0)
        self.numbers: Array = np.zeros(0)
        self.shares: Array = np.zeros(0)

    def add(self, scores: Array, shares: Array, first: int, *, by_token: bool) -> None:
        """Adds inputs from number `first` on, by their weights [b, n] or, by token, [b, m, n]."""
        m, n = shares.shape[1:]
        added = shares.transpose(0, 2, 1)  # [b, n, m]
        if by_token:
            first *= m
            scores, added = scores.reshape(-1, n), np.zeros((0, n, 0))
        numbers = np.broadcast_to(np.arange(first, first + len(scores))[:, None], scores.shape)
        if not self.scores.size:
            self.tokens = m
            self.scores, self.numbers, self.shares = scores[:0], numbers[:0], added[:0]
        if m != self.tokens:
            raise FeedError(
                f"--examples: some inputs have {self.tokens} tokens, others {m}",
                hint="give inputs of the same length",
            )
        scores = np.concatenate((self.scores, scores))
        numbers = np.concatenate((self.numbers, numbers))
        # Among equal weights, the first are kept.
        order = np.argsort(-scores, axis=0, kind="stable")[: self.count]
        self.scores = np.take_along_axis(scores, order, axis=0)
        self.numbers = np.take_along_axis(numbers, order, axis=0)
        if not by_token:
            both = np.concatenate((self.shares, added))
            self.shares = np.take_along_axis(both, order[..., None], axis=0)

    def examples(self, expert: int, data: LabelledData, *, by_token: bool) -> Iterator[TopInput]:
        """Yields an expert's examples that have a weight above 0."""
        labels = data.labels
        for row, weight in enumerate(self.scores[:, expert].tolist()):
            if weight <= 0:
                return
            number = int(self.numbers[row, expert])
            if by_token:
                number, position = divmod(number, self.tokens)
                token = int(data.inputs[number].reshape(-1)[position])
                yield TopInput(number, weight, ((position, weight),), token=token)
                continue
            shares = self.shares[row, expert]
            top = np.argsort(-shares, kind="stable")[:TOKENS]
            tokens = tuple((int(at), float(shares[at])) for at in top if shares[at] > 0)
            label = int(labels[number]) if labels is not None and labels.ndim == 1 else None
            yield TopInput(number, weight, tokens, label)
