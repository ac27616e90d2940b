"""A first adapter for a layer, as a Python call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....common.libraries import check_pytorch
from ....common.option import takes
from .request import AdaptRequest

if TYPE_CHECKING:
    from .search import FirstAdapter


def adapt_as(source: str, request: AdaptRequest) -> FirstAdapter:
    """Returns a first adapter for the layer that `package.module:Class` makes, as Python code.

    It is found by trying and compared with the layer; what was not recognised is `missing`.
    """
    check_pytorch("trying a layer")
    from ....exporter.checkpoints.load import read_config
    from .search import first_adapter, sizes_of

    sizes = sizes_of(request.batch, request.tokens)
    return first_adapter(source, read_config(None, request.sets), sizes, request.progress)


adapt = takes(AdaptRequest)(adapt_as)
