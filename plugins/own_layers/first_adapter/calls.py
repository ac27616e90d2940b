"""Finds a first adapter for a layer, from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....common.libraries import check_pytorch
from ....common.option import takes
from .request import AdaptRequest

if TYPE_CHECKING:
    from .cache import FirstAdapter


@takes(AdaptRequest)
def adapt(source: str, request: AdaptRequest) -> FirstAdapter:
    """Returns a first adapter for the layer that `package.module:Class` makes, as Python code.

    The adapter is found by trial and compared with the layer; `missing` lists unrecognised parts.
    """
    check_pytorch("trying a layer")
    from .search import first_adapter

    return first_adapter(source, request)
