"""A first adapter for a layer, as a Python call."""

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

    It is found by trials and compared with the layer; `missing` is the unrecognised part.
    """
    check_pytorch("trying a layer")
    from .search import first_adapter

    return first_adapter(source, request)
