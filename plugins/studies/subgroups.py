"""Measures how fair the models of a benchmark are to subgroups: as trained and as edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ...bench.data import LabelledData
from ...bench.plan import Candidate
from ...bench.runners.base import Runner
from ...bench.runners.pytorch import untouched, with_algorithm_1
from ...common.console import Progress
from ...data.batches import Array, Labels
from ...errors import FeedError
from ...exporter.checks.accuracy import one_per_sample
from .fairness import ModelFairness, check_groups, fairness, predicted_by
from .judge import class_labels

BATCH = 64


def compare_subgroups(
    candidates: Sequence[Candidate],
    data: LabelledData,
    groups: Array,
    group_by: str,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Returns the fairness of several models for `results.json`.

    An edited model computes the first k. Each of its classes keeps the target of the model as
    trained: the subgroup with the lowest accuracy. Raises `FeedError` for data without labels,
    models that do not classify, and fewer than two subgroups.
    """
    check_groups(groups, f"array '{group_by}'")
    if data.labels is None:
        raise FeedError(
            "--group-by: the accuracy of subgroups needs labels, but the data have none",
            hint="give --data an .npz with the arrays input and label",
        )
    models = []
    for candidate in candidates:
        progress.step(f"{candidate.name}: subgroups by {group_by}")
        edits, k = candidate.model.edits, (candidate.ks or (candidate.experts,))[0]
        scores, labels = _scores(untouched(candidate.model), data, candidate.name)
        classes = scores.shape[1]
        before = fairness(predicted_by(scores, labels), labels, groups, classes)
        after = None
        if edits:
            runner = with_algorithm_1(
                candidate.model, k, "masked", renormalize=candidate.renormalize
            )
            scores, _ = _scores(runner, data, candidate.name)
            targets = [decided.target for decided in before.classes]
            predicted = predicted_by(scores, labels)
            after = fairness(predicted, labels, groups, classes, targets=targets)
        outputs = sorted({rewrite.output for rewrite in edits.rewrites} & {*range(classes)})
        models.append(
            ModelFairness(
                model=candidate.name,
                group_by=group_by,
                k=k,
                untouched=before,
                edited=after,
                rewritten=tuple(outputs),
            )
        )
    return [asdict(model) for model in models]


def _scores(runner: Runner, data: LabelledData, name: str) -> tuple[Array, Labels]:
    """Returns the scores [s, o] of each class or attribute, with the labels."""
    parts = [one_per_sample(runner.infer(data.inputs[rows])) for rows in data.batches(BATCH)]
    scores = np.concatenate(parts)
    if scores.ndim > 2:
        raise FeedError(
            f"--group-by: {name} returns outputs of shape {scores.shape}, not class scores",
            hint="leave --group-by out for models that do not classify",
        )
    return class_labels(data, scores, "--group-by: the data")
