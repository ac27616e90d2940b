"""Computes the class scores of a Soft MoE classifier for any choice of experts.

There are two ways, with equal results. `Passes` runs the model for every choice. If the model has
one MoE layer and the network after that layer is affine, the scores are a sum of the experts'
contributions: `ContributionSums` computes these in n + 1 passes, and then only adds for a choice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...bench.data import Labelled, LabelledData
from ...bench.plan import Candidate
from ...bench.runners.pytorch import untouched
from ...common.console import Progress, Silent
from ...errors import FeedError, UsageError
from ...exporter.model import Model
from ...graphs.layers.base import recorded_choices, sharing_weights
from ...graphs.layers.soft_moe import soft_moe_layers
from .findings import (
    EXPERTS,
    PASSES,
    SUMS,
    BestSubsets,
    ExpertStudy,
    KeptAccuracy,
    RandomChoice,
    Shares,
    analyses_of,
)
from .judge import class_labels
from .request import SUBSETS_BY_PASSES, SUBSETS_BY_SUMS, Analyses

ChosenExperts = Mapping[str, Tensor]
"""The experts chosen for every input, ascending: int64 [samples, k] by layer name."""

BATCH = 64

SUMS_BYTES = 1 << 30
"""The largest size, in bytes, of the contributions of all experts to all scores."""

PROBED, TRIALS = 32, 4

TOLERANCE = 1e-4
"""The tolerance, relative to the largest score; a different order of sums changes about 1e-6."""

BLOCK = 1 << 23
"""The number of class scores to keep in memory at once while subsets are tried."""


class Passes:
    """A classifier that runs the whole model for every choice of experts."""

    def __init__(
        self, model: Model, data: LabelledData, batch: int = BATCH, *, renormalize: bool = False
    ) -> None:
        self.module = sharing_weights(model.module)
        self.layers = soft_moe_layers(self.module)
        self.data = data
        self.batch = batch
        for layer in self.layers.values():
            layer.algorithm = "selected"
            layer.renormalize = renormalize

    @property
    def experts(self) -> Mapping[str, int]:
        """The number of experts of each Soft MoE layer."""
        return {name: layer.spec.experts for name, layer in self.layers.items()}

    def algorithm_1(self, k: int) -> Tensor:
        """Returns the scores with the k experts that have the largest column sums of C."""
        for layer in self.layers.values():
            layer.keep = min(k, layer.spec.experts)
            layer.chooser = None
        return self._scores()

    def chosen(self, choice: ChosenExperts) -> Tensor:
        """Returns the scores with the given experts of each layer."""
        self._rows = slice(0)
        for name, layer in self.layers.items():
            layer.keep = choice[name].shape[1]
            # The layer is called once a batch, and each batch has its own rows of the choice.
            layer.chooser = lambda scores, k, experts=choice[name]: experts[self._rows]
        return self._scores()

    def subsets(self, sets: Tensor) -> Iterator[Tensor]:
        """Yields the scores [1, samples, classes] for each set of experts."""
        for experts in sets:
            everywhere = experts.expand(len(self.data), -1)
            yield self.chosen(dict.fromkeys(self.layers, everywhere)).unsqueeze(0)

    def column_sums(self) -> dict[str, Tensor]:
        """Returns the column sums s [samples, n] of each layer, with all experts kept."""
        for layer in self.layers.values():
            layer.keep, layer.chooser = None, None
        parts: dict[str, list[Tensor]] = {name: [] for name in self.layers}
        with recorded_choices(self.module) as choices:
            for _ in self._batches():
                for name, sums in parts.items():
                    scores = choices[name].scores
                    assert scores is not None  # a Soft MoE layer ranks the experts of an input
                    sums.append(scores)
        return {name: torch.cat(batches) for name, batches in parts.items()}

    def _scores(self) -> Tensor:
        return torch.cat(list(self._batches()))

    @torch.inference_mode()
    def _batches(self) -> Iterator[Tensor]:
        for rows in self.data.batches(self.batch):
            self._rows = rows
            yield self.module(torch.from_numpy(self.data.inputs[rows]))


@dataclass(frozen=True, slots=True)
class ContributionSums:
    """A classifier whose scores are `base` [b, c] plus the `parts` [b, n, c] of its experts.

    `sums` are the column sums s [b, n] of its only layer.
    """

    layer: str
    base: Tensor
    parts: Tensor
    sums: Tensor

    @property
    def experts(self) -> Mapping[str, int]:
        return {self.layer: self.parts.shape[1]}

    def algorithm_1(self, k: int) -> Tensor:
        return self.chosen({self.layer: self.sums.topk(k, dim=1).indices})

    def chosen(self, choice: ChosenExperts) -> Tensor:
        mask = torch.zeros_like(self.sums).scatter_(1, choice[self.layer], 1.0)
        return self.base + torch.einsum("bn,bnc->bc", mask, self.parts)

    def subsets(self, sets: Tensor) -> Iterator[Tensor]:
        """Yields the scores [part of the sets, samples, classes] for sets [sets, k], in order."""
        samples, n, classes = self.parts.shape
        by_expert = self.parts.transpose(0, 1).reshape(n, samples * classes)
        for part in torch.split(sets, max(1, BLOCK // (samples * classes))):
            mask = torch.zeros(len(part), n).scatter_(1, part, 1.0)
            yield (mask @ by_expert).view(-1, samples, classes) + self.base

    def column_sums(self) -> dict[str, Tensor]:
        return {self.layer: self.sums}


Classifier = ContributionSums | Passes
"""Computes class scores [samples, classes] of one model on fixed data."""


def classifier(
    name: str,
    model: Model,
    data: LabelledData,
    *,
    renormalize: bool = False,
    progress: Progress | None = None,
) -> Classifier:
    """Returns a classifier on the data, by sums if the model's scores are sums.

    They are if, on a few inputs, the sums over random sets equal the model's scores.
    """
    passes = Passes(model, data, renormalize=renormalize)
    if len(passes.experts) > 1 or renormalize:
        return passes
    first = Passes(model, LabelledData(data.inputs[:PROBED], None, data.input_name))
    probe = contributions(first)
    size = 4 * len(data) * probe.parts.shape[1] * probe.parts.shape[2]
    if size > SUMS_BYTES or not adds_up(probe, first):
        return passes
    (progress or Silent()).step(f"{name}: computing each expert's share of the class scores")
    return contributions(passes)


def checked_labels(name: str, model: Model, data: LabelledData) -> Tensor:
    """Returns classes [b] or attributes [b, c]; raises `UsageError` or `FeedError` for others."""
    if not soft_moe_layers(model.module):
        raise UsageError(
            f"{name} has no Soft MoE layer, so it does not choose k experts per input",
            hint="leave --analysis out: it analyses the choices of Soft MoE layers",
        )
    if data.labels is None:
        raise FeedError(
            f"the analyses of {name} need labels, but the data have none",
            hint="give --data an .npz with the arrays input and label",
        )
    output = untouched(model).infer(data.inputs[:1])
    if output.ndim != 2:
        raise FeedError(
            f"the analyses need class scores of shape (batch, classes), but {name} returns "
            f"an output of shape {output.shape}",
            hint="leave --analysis out for models that do not classify",
        )
    scores = np.zeros((len(data), output.shape[1]), output.dtype)
    _, labels = class_labels(data, scores, "--analysis: the data")
    return torch.from_numpy(labels if labels.ndim == 1 else labels.astype(np.int64))


def contributions(passes: Passes) -> ContributionSums:
    """Returns the scores without experts and each expert's contribution, in n + 1 passes."""
    ((layer, n),) = passes.experts.items()
    samples = len(passes.data)
    base = passes.chosen({layer: torch.zeros(samples, 0, dtype=torch.int64)})
    parts = torch.empty(samples, n, base.shape[1])
    for e in range(n):
        parts[:, e] = passes.chosen({layer: torch.full((samples, 1), e)}) - base
    return ContributionSums(layer, base, parts, passes.column_sums()[layer])


def adds_up(sums: ContributionSums, passes: Passes) -> bool:
    """Returns whether sums over random halves of the experts equal the model's scores."""
    n = sums.experts[sums.layer]
    for seed in range(TRIALS):
        choice = {sums.layer: random_experts(len(sums.base), n, max(1, n // 2), seed)}
        scores = passes.chosen(choice)
        difference = (sums.chosen(choice) - scores).abs().max()
        if difference > TOLERANCE * scores.abs().max():
            return False
    return True


def random_experts(samples: int, n: int, k: int, seed: int) -> Tensor:
    """Returns k random experts of n for each sample, int64 [samples, k]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(samples, n, generator=generator).topk(k, dim=1).indices.sort(dim=1).values


def study(
    name: str,
    model: Model,
    data: LabelledData,
    ks: Sequence[int],
    wanted: Analyses,
    *,
    renormalize: bool = False,
    progress: Progress | None = None,
) -> ExpertStudy:
    """Returns the wanted analyses of a model on labelled data, for the ks below n.

    Raises `UsageError` for a model without Soft MoE layers, `FeedError` for data without labels or
    a model without class scores.
    """
    watcher = progress or Silent()
    labels = checked_labels(name, model, data)
    scorer = classifier(name, model, data, renormalize=renormalize, progress=watcher)
    base = untouched(model)
    parts = [torch.from_numpy(base.infer(data.inputs[rows])) for rows in data.batches(BATCH)]
    top1 = accuracy(torch.cat(parts), labels)
    n = max(scorer.experts.values())
    fewer = sorted({k for k in ks if k < n}, reverse=True)

    def say(what: str) -> None:
        watcher.step(f"{name}: {what}")

    def retention() -> Iterator[KeptAccuracy]:
        # With sums, each k costs next to nothing.
        tried = range(1, n + 1) if by_sums else sorted({*fewer, n})
        say(f"Algorithm 1 for {len(tried)} values of k")
        for k in tried:
            kept = accuracy(scorer.algorithm_1(k), labels)
            yield KeptAccuracy(k, kept, kept / top1 if top1 > 0 else None)

    def random() -> Iterator[RandomChoice]:
        for k in fewer:
            say(f"k = {k} at random, {wanted.seeds} seeds")
            yield random_choice(scorer, labels, k, wanted.seeds)

    def subsets() -> Iterator[BestSubsets]:
        limit = wanted.max_subsets or (SUBSETS_BY_SUMS if by_sums else SUBSETS_BY_PASSES)
        for k in fewer:
            say(f"{comb(n, k):,} subsets of {k}")
            yield best_subsets(scorer, labels, k, limit)

    def shares() -> Iterator[Shares]:
        say("the top experts' share of ΣC")
        for layer, sums in scorer.column_sums().items():
            yield shares_of(layer, sums)

    by_sums = isinstance(scorer, ContributionSums)
    names = wanted.names
    return ExpertStudy(
        model=name,
        experts=n,
        layers=len(scorer.experts),
        samples=len(data),
        top1=top1,
        method=SUMS if by_sums else PASSES,
        retention=tuple(retention()) if "retention" in names else (),
        random=tuple(random()) if "random" in names else (),
        subsets=tuple(subsets()) if "subsets" in names else (),
        shares=tuple(shares()) if "shares" in names else (),
    )


def study_all(
    candidates: Sequence[Candidate],
    data: Labelled,
    wanted: Analyses,
    samples: int | None,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Returns the studies of several models for `results.json`, for each model's ks below n.

    Keeps the first `samples` inputs in memory, or all if None.
    """
    first = data.head(sys.maxsize if samples is None else samples)
    for candidate in candidates:
        checked_labels(candidate.name, candidate.model, first)
    studies = [
        study(
            candidate.name,
            candidate.model,
            first,
            candidate.ks,
            wanted,
            renormalize=candidate.renormalize,
            progress=progress,
        )
        for candidate in candidates
    ]
    return analyses_of(studies)[EXPERTS]


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Returns the share of inputs whose largest score [b, c] is that of their label [b].

    For attributes [b, c], this is the share of scores with the correct sign.
    """
    return float(_correct(scores, labels).mean())


def _correct(scores: Tensor, labels: Tensor) -> Tensor:
    """Returns 1 for each correct class and 0 for others, [..., b], for scores [..., b, c].

    For attributes, returns each input's share of correct ones.
    """
    if labels.ndim == 2:
        return ((scores > 0) == (labels == 1)).double().mean(dim=-1)
    return (scores.argmax(dim=-1) == labels).double()


def random_choice(model: Classifier, labels: Tensor, k: int, seeds: int) -> RandomChoice:
    """Compares Algorithm 1 with k random experts per input and layer, by seed (Table 10a)."""
    accuracies = []
    for seed in range(seeds):
        choice = {
            # Each layer has its own range of seeds, so that layers draw independently.
            name: random_experts(len(labels), n, min(k, n), seed + seeds * index)
            for index, (name, n) in enumerate(model.experts.items())
        }
        accuracies.append(accuracy(model.chosen(choice), labels))
    chosen = accuracy(model.algorithm_1(k), labels)
    mean, std = float(np.mean(accuracies)), float(np.std(accuracies, ddof=1))
    return RandomChoice(
        k=k,
        algorithm_1=chosen,
        mean=mean,
        std=std,
        sigmas=(chosen - mean) / std if std > 0 else None,
        accuracies=tuple(accuracies),
    )


def best_subsets(model: Classifier, labels: Tensor, k: int, limit: int) -> BestSubsets:
    """Returns the results of all subsets of k experts on every input (Table 1).

    Only counts the subsets if there are more than `limit` of them, or if layers differ in n.
    """
    sizes = set(model.experts.values())
    n = max(sizes)
    count = comb(n, k)
    chosen = accuracy(model.algorithm_1(k), labels)
    if count > limit or len(sizes) > 1:
        return BestSubsets(k, count, chosen)
    sets = torch.tensor(list(combinations(range(n), k)))
    least = torch.full(labels.shape[:1], torch.inf)
    best = torch.zeros(len(labels), dtype=torch.int64)
    most_correct = torch.zeros(len(labels), dtype=torch.float64)
    totals = []  # for each subset, the number of correctly classified inputs
    done = 0
    for scores in model.subsets(sets):  # [s, b, c]
        loss, index = _losses(scores, labels).min(dim=0)
        better = loss < least
        least, best = torch.where(better, loss, least), torch.where(better, index + done, best)
        correct = _correct(scores, labels)
        most_correct = torch.maximum(most_correct, correct.max(dim=0).values)
        totals.append(correct.sum(dim=1))
        done += len(scores)
    shares = torch.cat(totals) / len(labels)
    return BestSubsets(
        k=k,
        subsets=count,
        algorithm_1=chosen,
        best=float(most_correct.mean()),
        fixed=float(shares.max()),
        average=float(shares.mean()),
        distinct=len(set(best.tolist())),
    )


def _losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Returns losses [s, b] in the order of the cross-entropy, for scores [s, b, c], labels [b].

    A loss is log((1 - p) / p) of the label's probability p: the cross-entropy -log p itself rounds
    to 0 if the label leads by far, so many sets of experts would seem equally good. For attributes
    [b, c], a loss is the mean of their cross-entropies.
    """
    if labels.ndim == 2:
        margins = torch.where(labels == 1, scores, -scores)
        return -torch.nn.functional.logsigmoid(margins).mean(dim=2)
    index = labels.view(1, -1, 1).expand(len(scores), -1, 1)
    others = scores.scatter(2, index, -torch.inf).logsumexp(dim=2)
    return others - scores.gather(2, index).squeeze(2)


def shares_of(layer: str, column_sums: Tensor) -> Shares:
    """Returns the share of ΣC that the j largest column sums s [b, n] make up, for every j."""
    ranked = column_sums.double().sort(dim=1, descending=True).values.cumsum(dim=1)
    shares = (ranked / ranked[:, -1:]).numpy()
    low, high = np.percentile(shares, [10, 90], axis=0)
    return Shares(
        layer, tuple(shares.mean(axis=0).tolist()), tuple(low.tolist()), tuple(high.tolist())
    )
