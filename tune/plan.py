"""How large a search is, and about how long it takes; nothing is searched."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from ..bench.data import Labelled
from ..common.console import Progress, Silent
from ..common.threads import with_threads
from ..exporter.model import Model
from .budget import EACH_SIDE, TRAINING_S, TRIALS, Clock
from .layers import BATCH, MOST
from .prepare import base_job, kept_in, prepare, threads_of
from .request import SearchOptions
from .substitutes.distill import longest_s

FORM_S, GRAPH_S = 0.6, 0.5
"""About what a form of a layer takes, and a whole graph beside running the model itself."""


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """How large a search is: the models that there are, and what will be looked at of them.

    `choices` are those of single layers, `forms` those that are timed alone and `graphs` the whole
    graphs, at the most; `seconds` is about how long all of it takes then.
    """

    models: int
    choices: int
    forms: int
    graphs: int
    searching: int
    confirming: int | None
    seconds: float


def plan_search(
    model: Model, data: Labelled, request: SearchOptions, progress: Progress | None = None
) -> SearchPlan:
    """Returns how large a search is; runs the untouched model on one half, and searches nothing."""
    progress = progress or Silent()
    request = replace(request, batch=base_job(model, request).options.batch)  # of whole groups
    threads = threads_of(model, data, request, None, progress)
    with with_threads(threads.count), kept_in(None) as folder:
        started = time.monotonic()
        job = prepare(model, data, request, folder, progress, Clock(None))
        began, count, one = time.monotonic() - started, len(job.holdout.search), job.one_s
    listed = {
        name: (*known, *job.fewer(name, lambda size: tuple(range(size))))
        for name, known in job.choices.items()
    }
    spaces = [replace(space, choices=listed) for space in job.spaces.values()]
    choices = sum(map(len, listed.values()))
    parts = sum(len(names) for space in spaces for names in space.integers.values())
    paths = sum(len(space.floats) + len(space.integers) for space in spaces)
    forms = sum(space.forms for space in spaces)
    graphs = 1 + parts + paths * (TRIALS // 2 + EACH_SIDE)
    fewer = any(choice.fewer for known in listed.values() for choice in known)
    trained_s = min(TRAINING_S, longest_s(BATCH * one))
    seconds = (
        began
        + forms * FORM_S
        + choices * one * min(count, MOST)
        + graphs * (GRAPH_S + one * count + (trained_s if fewer else 0.0))
    )
    return SearchPlan(
        models=sum(space.size for space in spaces),
        choices=choices,
        forms=forms,
        graphs=graphs,
        searching=count,
        confirming=job.holdout.confirming_count,
        seconds=seconds,
    )
