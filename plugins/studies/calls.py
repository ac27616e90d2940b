"""The Python function of `specialise`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...common.libraries import check_pytorch
from ...common.option import takes
from ...exporter.requests import AnyPath, LoadRequest
from .request import SpecialiseRequest

if TYPE_CHECKING:
    from ...bench.data import LabelledData
    from ...exporter.checkpoints.load import AnyModel
    from .specialise import Specialisation


@takes(SpecialiseRequest)
def specialise(
    model: AnyModel, data: AnyPath | LabelledData | Mapping[str, Any], request: SpecialiseRequest
) -> Specialisation:
    """Removes each expert of a layer in turn; returns how the accuracy of every class changes.

    Also counts how often every layer chooses each expert, by class; for a model of texts or with
    several inputs, that is all.

    `data` contains labelled inputs: an .npz or a dict with `input` and `label`. With subgroups, the
    call also measures how fair each class is to them, and finds a rewrite if one is requested. With
    `examples`, the result also has the inputs with the largest weights for each expert; without
    labels, it has only these.

    Raises:
        UsageError: if there is no such layer, class or subgroup, or no wrong answer to correct.
        FeedError: if the data has no labels, or only one subgroup.
    """
    check_pytorch("specialise")
    from ...bench.data import LabelledData
    from ...exporter.checkpoints.load import model_of
    from ...exporter.checks.answers import check_own_outputs
    from .specialise import Specialisation, only_counts, usage_only
    from .specialise import specialise as effects_of_experts

    feed = None if isinstance(data, LabelledData) else data
    loaded = model_of(model, LoadRequest(progress=request.progress), feed)
    if feed is not None and not only_counts(loaded, data):
        check_own_outputs(loaded, feed)
    examples = None
    if request.examples is not None:
        from .examples.search import examples_of

        examples = examples_of(
            loaded, data, layer=request.layer, count=request.examples, progress=request.progress
        )
    if only_counts(loaded, data):
        if examples is not None:  # `layer` names the layer of the examples
            request = replace(request, layer=None)
        return replace(usage_only(loaded, data, request), examples=examples)
    needs_labels = request.group_by is not None or request.rewrite_class is not None
    if examples is not None and not examples.labelled and not needs_labels:
        return Specialisation(
            model=examples.model,
            family=loaded.family,
            layer=examples.layer,
            kind=examples.kind,
            levels=examples.levels,
            examples=examples,
        )
    found = effects_of_experts(loaded, data, request)
    return found if examples is None else replace(found, examples=examples)
