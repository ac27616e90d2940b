"""The search as Python calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from ...common.libraries import check_pytorch
from ...common.option import takes
from ...exporter.requests import AnyPath
from .request import TuneRequest

if TYPE_CHECKING:
    import numpy as np

    from ...bench.data import Labelled
    from ...exporter.model import Model
    from .tune import SearchPlan, Tuned

    AnyModel = Model | Callable[[], Model]


def tune_as(
    model: AnyModel,
    data: AnyPath | Labelled | np.ndarray,
    destination: AnyPath,
    request: TuneRequest,
) -> Tuned:
    """Finds the fastest bundle that keeps an accuracy, confirms it on unseen data and writes it.

    Searched together: k of each layer, a fixed subset of its experts, the precision of each layer
    and of the network around, and the lowerings, by the time that they take on this machine. One
    half of the labelled `data` serves the search, the other is read once, to confirm. A call that
    was interrupted goes on where it stopped, if `report` is the same.

    Raises:
        UsageError: before the search, if an argument is invalid.
        FeedError: before the search, where the data do not fit, or are too few to confirm.
        ContractError: nothing meets the bounds, or what was found is not confirmed.
        ClusterError: the cluster cannot be reached, lacks the resource, or loses its nodes.
    """
    started = monotonic()  # to import PyTorch takes its part of the time
    check_pytorch("tune")
    from ...bench.executors import executor_of
    from ...common.writing import check_folder
    from ...exporter.bundle.destination import check_destination
    from ...exporter.bundle.runtimes import check_runs
    from .budget import Clock
    from .findings import write_findings
    from .shards import evaluate_here
    from .tune import search_and_export

    options, force, progress = request.search(), request.force, request.progress
    clock = Clock(options.seconds, started=started)
    check_destination(Path(destination), force=force)
    executor = executor_of(request)
    if executor is None:  # nodes of a cluster look for their own
        for target in options.targets:
            check_runs(target)
    place = None if request.report is None else Path(request.report)
    if place is not None:
        check_folder(place, "--report")
    loaded, labelled = _tune_data(model, data, request)
    with (
        nullcontext(evaluate_here) if executor is None else executor.evaluating(request)
    ) as evaluate:
        tuned = search_and_export(
            loaded,
            labelled,
            Path(destination),
            options,
            work=place,
            force=force,
            progress=progress,
            clock=clock,
            evaluate=evaluate,
        )
    if place is not None:
        write_findings(tuned, place, request.command)
    return tuned


def tune_plan_as(
    model: AnyModel, data: AnyPath | Labelled | np.ndarray, request: TuneRequest
) -> SearchPlan:
    """Returns how large the search of `tune` is with the same arguments; writes nothing."""
    check_pytorch("tune")
    from .tune import plan_search

    options = request.search()
    return plan_search(*_tune_data(model, data, request), options, request.progress)


def _tune_data(
    model: AnyModel, data: AnyPath | Labelled | np.ndarray, request: TuneRequest
) -> tuple[Model, Labelled]:
    """The model of a search, and its data."""
    from ...bench.data import LabelledData, Streamed, labelled
    from ...bench.measure.sequences import benchmark_of
    from ...exporter.inputs import DEFAULT_TOKENS, parse_range
    from ...exporter.model import Model

    loaded = model if isinstance(model, Model) else model()
    sequences = benchmark_of(loaded)
    if sequences is not None and not isinstance(data, LabelledData | Streamed):
        tokens = parse_range(str(request.tokens), "--tokens")
        prompt = None if tokens == DEFAULT_TOKENS else tokens.opt
        return loaded, sequences.data(data, loaded, prompt)
    return loaded, labelled(data, loaded, 1, request.pixels)


tune = takes(TuneRequest)(tune_as)
tune_plan = takes(TuneRequest)(tune_plan_as)
