"""The Python functions for a search."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ...common.libraries import check_pytorch
from ...common.option import takes
from ...exporter.requests import AnyPath, LoadRequest
from .request import TuneRequest

if TYPE_CHECKING:
    import numpy as np

    from ...bench.data import Labelled
    from ...exporter.checkpoints.load import AnyModel
    from ...exporter.model import Model
    from .tune import SearchPlan, Tuned

    AnyData = AnyPath | Labelled | np.ndarray | Mapping[str, Any]


@takes(TuneRequest)
def tune(model: AnyModel, data: AnyData, destination: AnyPath, request: TuneRequest) -> Tuned:
    """Finds the fastest bundle that keeps an accuracy, confirms it on unseen data and writes it.

    The search varies k of each layer, a fixed subset of its experts, the precision of each layer
    and of the rest of the network, and the lowerings, and measures times on this machine. One half
    of the labelled `data` is for the search; the other is read once, to confirm. After an
    interruption, a call with the same `report` folder continues the search.

    Raises:
        UsageError: before the search, if an argument is invalid.
        FeedError: before the search, if the data do not fit the model or are too few to confirm.
        ContractError: if no point meets the bounds, or the best one is not confirmed.
        ClusterError: if the cluster cannot be reached, lacks a resource or loses nodes.
    """
    started = monotonic()  # the import of PyTorch counts against the time limit
    check_pytorch("tune")
    from ...common.writing import check_folder
    from ...exporter.bundle.destination import check_destination
    from ...exporter.bundle.runtimes import check_runs
    from ...exporter.executors import executor_of
    from .budget import Clock

    request.check()
    clock = Clock(request.seconds, started=started)
    check_destination(Path(destination), force=request.force)
    executor = executor_of(request)
    if executor is None:  # the nodes of a cluster check this themselves
        for target in request.targets:
            check_runs(target)
    if request.report is not None:
        check_folder(Path(request.report), "--report")
    from .findings import write_findings  # imports PyTorch, so only after the checks
    from .shards import evaluate_here
    from .tune import search_and_export

    loaded, labelled = _tune_data(model, data, request)
    with (
        nullcontext(evaluate_here) if executor is None else executor.evaluator(request)
    ) as evaluate:
        tuned = search_and_export(
            loaded, labelled, Path(destination), request, clock=clock, evaluate=evaluate
        )
    if request.report is not None:
        write_findings(tuned, Path(request.report))
    return tuned


@takes(TuneRequest)
def tune_plan(model: AnyModel, data: AnyData, request: TuneRequest) -> SearchPlan:
    """Returns the size of the search that `tune` would run with these arguments."""
    check_pytorch("tune")
    request.check()
    from .tune import plan_search

    return plan_search(*_tune_data(model, data, request), request)


def _tune_data(model: AnyModel, data: AnyData, request: TuneRequest) -> tuple[Model, Labelled]:
    from ...bench.data import LabelledData, Streamed, ids_of, labelled
    from ...bench.measure.sequences import benchmark_of
    from ...exporter.checkpoints.load import model_of
    from ...exporter.checks.answers import answer_sentences, answers_of
    from ...graphs.sizes import DEFAULT_TOKENS

    feed = None if isinstance(data, LabelledData | Streamed) else data
    loaded = model_of(model, LoadRequest(progress=request.progress), feed)
    sequences = benchmark_of(loaded)
    if sequences is not None and not isinstance(data, LabelledData | Streamed):
        tokens = request.token_counts
        prompt = None if tokens == DEFAULT_TOKENS else tokens.opt
        return loaded, sequences.data(ids_of(data, loaded), loaded, prompt)
    if isinstance(data, str | Path) and request.pixels is None:
        answers = answers_of(loaded, data)
        if answers is not None and request.progress is not None:
            for text in answer_sentences(answers, loaded):
                request.progress.step(text)
    return loaded, labelled(data, loaded, 1, request.pixels)
