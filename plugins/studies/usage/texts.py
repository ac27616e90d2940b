"""The use of experts in models without an accuracy by class: of texts, or of several inputs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....bench.data import LabelledData, labelled
from ....bench.measure.sequences import benchmark_of
from ....common.console import Silent
from ....errors import UsageError
from ....exporter.model import Model
from ..request import SpecialiseRequest
from ..specialise import Specialisation
from .count import usage_of


def only_counts(model: Model, data: str | Path | LabelledData | Mapping[str, Any]) -> bool:
    """Whether only the use of a model's experts can be measured."""
    if len(model.inputs) > 1 or model.host.of_tokens:
        return True
    return not model.input.dtype.startswith("float") and not labelled(data, model, 1).labelled


def usage_only(
    model: Model,
    data: str | Path | LabelledData | Mapping[str, Any],
    request: SpecialiseRequest,
) -> Specialisation:
    """Returns how the experts of such a model are used; by class if its data have labels.

    Raises `UsageError` for options that need an accuracy, `FeedError` for data that do not fit.
    """
    asked = {
        "--layer": request.layer,
        "--group-by": request.group_by,
        "--rewrite-class": request.rewrite_class,
    }
    for option, value in asked.items():
        if value is not None:
            raise UsageError(
                f"{option}: no expert can be removed from this {model.family} model, which does "
                "not classify single inputs",
                hint=f"leave {option} out: the use of experts is counted for every layer",
            )
    benchmark = benchmark_of(model)
    if benchmark is None or isinstance(data, LabelledData | Mapping):
        held = labelled(data, model, 1).head(sys.maxsize)
    else:
        held = benchmark.data(data, model, None)
    if benchmark is not None:  # its labels are the next tokens, not classes
        held = replace(held, labels=None)
    progress = request.progress or Silent()
    name, layer = list(model.layers.items())[-1]
    return Specialisation(
        model=model.source.path,
        family=model.family,
        layer=name,
        kind=layer.spec.kind,
        levels=layer.spec.levels,
        usage=usage_of(model, held, k=request.k, progress=progress),
    )
