"""What each expert serves, as a Python call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.libraries import check_pytorch
from ...common.option import takes
from ...exporter.requests import AnyPath
from .request import SpecialiseRequest

if TYPE_CHECKING:
    from ...bench.data import LabelledData
    from ...exporter.model import Model
    from .specialise import Specialisation


def specialise_as(
    model: Model, data: AnyPath | LabelledData, request: SpecialiseRequest
) -> Specialisation:
    """Removes each expert of a layer in turn; returns how the accuracy of every class changes.

    `data` are labelled inputs, or an .npz that holds `input` and `label`. With subgroups, also how
    fairly each class is told in them, and the rewriting that is wanted.

    Raises:
        UsageError: there is no such layer, class or subgroup, or no wrong answer to rewrite.
        FeedError: the data have no labels, or name one subgroup.
    """
    check_pytorch("specialise")
    from .specialise import Favour
    from .specialise import specialise as run_it

    favour = None
    if request.rewrite_class is not None and request.rewrite_group is not None:
        favour = Favour(
            request.rewrite_class,
            request.rewrite_group,
            request.strength,
            0.01 if request.budget is None else request.budget,
        )
    return run_it(
        model,
        data,
        layer=request.layer,
        group_by=request.group_by,
        favour=favour,
        progress=request.progress,
    )


specialise = takes(SpecialiseRequest)(specialise_as)
