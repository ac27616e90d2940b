"""How fairly the models of a benchmark treat subgroups: as trained, and as they are edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ...bench.data import LabelledData
from ...bench.metrics import one_per_sample
from ...bench.plan import Candidate
from ...bench.runners.base import Runner
from ...bench.runners.pytorch import untouched, with_algorithm_1
from ...common.console import Progress
from ...data.feeds import Array
from ...errors import FeedError
from .fairness import ModelFairness, check_groups, fairness

BATCH = 64


def compared(
    candidates: Sequence[Candidate],
    data: LabelledData,
    groups: Array,
    group_by: str,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Returns the fairness of several models as `results.json` has it.

    An edited model keeps its first k. Its classes have the targets that they have as trained, the
    subgroups with the lowest accuracy, so that one and the same is looked at. Raises FeedError for
    data without labels, models that do not classify and fewer than two subgroups.
    """
    check_groups(groups, f"array '{group_by}'")
    if data.labels is None:
        raise FeedError(
            "--group-by: the accuracy of subgroups needs labels, and the data have none",
            hint="give --data an .npz with the arrays input and label",
        )
    models = []
    for candidate in candidates:
        progress.step(f"{candidate.name}: subgroups by {group_by}")
        edits, k = candidate.model.edits, (candidate.ks or (candidate.experts,))[0]
        said, classes = _predicted(untouched(candidate.model), data, candidate.name)
        before = fairness(said, data.labels, groups, classes)
        after = None
        if edits:
            runner = with_algorithm_1(
                candidate.model, k, "masked", renormalize=candidate.renormalize
            )
            said, _ = _predicted(runner, data, candidate.name)
            targets = [one.target for one in before.classes]
            after = fairness(said, data.labels, groups, classes, targets=targets)
        outputs = sorted({one.rewrite.output for one in edits.rewrites} & {*range(classes)})
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


def _predicted(runner: Runner, data: LabelledData, name: str) -> tuple[Array, int]:
    """The class of each input, and how many classes there are."""
    parts = [one_per_sample(runner.infer(data.inputs[rows])) for rows in data.batches(BATCH)]
    scores = np.concatenate(parts)
    if scores.ndim != 2:
        raise FeedError(
            f"--group-by: {name} gives outputs of shape {scores.shape}, not a score for each class",
            hint="leave it out for models that do not classify",
        )
    data.check_classes(scores.shape[1])
    return scores.argmax(axis=1), scores.shape[1]
