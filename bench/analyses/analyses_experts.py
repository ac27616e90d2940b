"""The analyses of a classifier's experts: retention, random choices, best subsets, shares."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...common.progress import Progress, Silent
from ...errors import UsageError
from ...exporter.model import Model
from ..bench_data import Labelled, LabelledData
from ..runners.pytorch import Subject, untouched
from .experts import Classifier, Passes, Sums, check, classifier, drawn
from .findings import EXPERTS, PASSES, SUMS, BestSubsets, ExpertStudy, Kept, RandomChoice, Shares

NAMES = ("retention", "random", "subsets", "shares")
SUBSETS_BY_SUMS, SUBSETS_BY_PASSES = 50_000, 200


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which analyses, and how far they go.

    `max_subsets` bounds C(n, k) for `subsets`; None stands for 50,000 where the scores are sums
    over experts and for 200 where every subset is a pass over the data.
    """

    names: tuple[str, ...] = NAMES
    seeds: int = 10
    max_subsets: int | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in NAMES]
        if unknown:
            raise UsageError(
                f"--analysis {unknown[0]}: no such analysis",
                hint=f"known are {', '.join(NAMES)}, and all",
            )
        if self.seeds < 2:
            raise UsageError(
                f"{self.seeds} seeds: a standard deviation takes two or more",
                hint="the paper takes 10",
            )


def parse_analyses(text: str) -> tuple[str, ...]:
    """Returns the analyses that `--analysis` names: a list, or `all`. Raises UsageError."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UsageError("--analysis: no analysis named", hint=f"known are {', '.join(NAMES)}")
    return NAMES if names == ("all",) else Wanted(names).names


def study(
    name: str,
    of: Model,
    data: LabelledData,
    ks: Sequence[int],
    wanted: Wanted,
    *,
    batch: int = 64,
    renormalize: bool = False,
    progress: Progress | None = None,
) -> ExpertStudy:
    """Returns what the wanted analyses find about a model on labelled data, for the ks below n.

    Raises what `classifier` raises for a model or data that cannot be analysed.
    """
    watcher = progress or Silent()
    model = classifier(name, of, data, batch, renormalize=renormalize, progress=watcher)
    assert data.labels is not None  # which `classifier` has checked
    labels = torch.from_numpy(data.labels)
    top1 = _untouched_accuracy(of, data, labels, batch)
    n = max(model.experts.values())
    fewer = sorted({k for k in ks if k < n}, reverse=True)

    def say(what: str) -> None:
        watcher.step(f"{name}: {what}")

    by_sums = isinstance(model, Sums)
    limit = wanted.max_subsets or (SUBSETS_BY_SUMS if by_sums else SUBSETS_BY_PASSES)
    retention: tuple[Kept, ...] = ()
    chosen: tuple[RandomChoice, ...] = ()
    subsets: tuple[BestSubsets, ...] = ()
    shares: tuple[Shares, ...] = ()
    if "retention" in wanted.names:
        # Sums give every k for next to nothing.
        every = range(1, n + 1) if by_sums else sorted({*fewer, n})
        say(f"Algorithm 1 for {len(every)} values of k")
        retention = tuple(_kept(model, labels, k, top1) for k in every)
    if "random" in wanted.names:
        for k in fewer:
            say(f"k = {k} at random, {wanted.seeds} seeds")
            chosen = (*chosen, random_choice(model, labels, k, wanted.seeds))
    if "subsets" in wanted.names:
        for k in fewer:
            say(f"{comb(n, k):,} subsets of {k}")
            subsets = (*subsets, best_subsets(model, labels, k, limit))
    if "shares" in wanted.names:
        say("what the top experts hold")
        shares = tuple(shares_of(name, s) for name, s in _column_sums(model).items())
    return ExpertStudy(
        model=name,
        experts=n,
        layers=len(model.experts),
        samples=len(data),
        top1=top1,
        method=SUMS if by_sums else PASSES,
        retention=retention,
        random=chosen,
        subsets=subsets,
        shares=shares,
    )


def studied(
    subjects: Sequence[Subject],
    data: Labelled,
    wanted: Wanted,
    samples: int | None,
    progress: Progress,
) -> dict[str, Any]:
    """Returns the studies of several models as the analyses of `results.json`.

    They are for each one's ks below n. The first `samples` inputs are held in memory, all of
    them for None.
    """
    held = data.head(sys.maxsize if samples is None else samples)
    for subject in subjects:
        check(subject.name, subject.model, held)
    studies = [
        study(
            subject.name,
            subject.model,
            held,
            subject.ks,
            wanted,
            renormalize=subject.renormalize,
            progress=progress,
        )
        for subject in subjects
    ]
    return {EXPERTS: [one.as_json() for one in studies]}


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Returns the share of inputs whose largest score [b, c] is that of their label [b]."""
    return float((scores.argmax(dim=-1) == labels).double().mean())


def random_choice(model: Classifier, labels: Tensor, k: int, seeds: int) -> RandomChoice:
    """Returns Algorithm 1 beside k experts drawn per input and layer, seeds 0, 1, … (Table 2)."""
    accuracies = []
    for seed in range(seeds):
        choice = {
            # Layers draw apart: each has its own stretch of seeds.
            name: drawn(len(labels), n, min(k, n), seed + seeds * index)
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
    """Returns what all subsets of k experts do on every input (Table 1, Figure 5).

    Only counts them where they are more than `limit`, or where layers differ in n.
    """
    sizes = set(model.experts.values())
    n = max(sizes)
    count = comb(n, k)
    chosen = accuracy(model.algorithm_1(k), labels)
    if count > limit or len(sizes) > 1:
        return BestSubsets(k, count, chosen)
    sets = torch.tensor(list(combinations(range(n), k)))
    least = torch.full(labels.shape, torch.inf)
    best = torch.zeros_like(labels)
    ever_right = torch.zeros_like(labels, dtype=torch.bool)
    rights = []  # per subset, the inputs it classifies right
    done = 0
    for scores in model.subsets(sets):  # [s, b, c]
        of_label = scores.gather(2, labels.view(1, -1, 1).expand(len(scores), -1, 1)).squeeze(2)
        loss, index = (scores.logsumexp(dim=2) - of_label).min(dim=0)
        better = loss < least
        least, best = torch.where(better, loss, least), torch.where(better, index + done, best)
        right = scores.argmax(dim=2) == labels
        ever_right |= right.any(dim=0)
        rights.append(right.sum(dim=1))
        done += len(scores)
    shares = torch.cat(rights).double() / len(labels)
    return BestSubsets(
        k=k,
        subsets=count,
        algorithm_1=chosen,
        best=float(ever_right.double().mean()),
        fixed=float(shares.max()),
        average=float(shares.mean()),
        distinct=len(set(best.tolist())),
    )


def shares_of(layer: str, column_sums: Tensor) -> Shares:
    """Returns how much of ΣC the largest column sums s [b, n] hold (Figure 6)."""
    ranked = column_sums.double().sort(dim=1, descending=True).values.cumsum(dim=1)
    held = (ranked / ranked[:, -1:]).numpy()
    low, high = np.percentile(held, [10, 90], axis=0)
    return Shares(
        layer, tuple(held.mean(axis=0).tolist()), tuple(low.tolist()), tuple(high.tolist())
    )


def _kept(model: Classifier, labels: Tensor, k: int, top1: float) -> Kept:
    found = accuracy(model.algorithm_1(k), labels)
    return Kept(k, found, found / top1 if top1 > 0 else None)


def _untouched_accuracy(of: Model, data: LabelledData, labels: Tensor, batch: int) -> float:
    base = untouched(of)
    scores = [torch.from_numpy(base(data.inputs[rows])) for rows in data.batches(batch)]
    return accuracy(torch.cat(scores), labels)


def _column_sums(model: Sums | Passes) -> dict[str, Tensor]:
    return {model.layer: model.column_sums} if isinstance(model, Sums) else model.column_sums()
