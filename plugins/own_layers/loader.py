"""Networks of a user's own as models: the record by which the core finds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...common.user_code import names_code
from ...errors import UsageError
from ...exporter.checkpoints.files import local_checkpoint
from ...exporter.checkpoints.loaders import ModelLoader
from ...exporter.model import Model
from ...exporter.requests import LoadRequest
from .network import FAMILY, load_factory
from .request import NetworkOptions

API = 1


def _finds(source: str | Path) -> str | None:
    return FAMILY if isinstance(source, str) else None


def _loads(source: str | Path, config: Mapping[str, Any], request: LoadRequest) -> Model:
    if request.family is not None:
        raise UsageError(
            f"--family {request.family}: a factory's layers are found by their structure",
            hint="leave --family out",
        )
    options = request.asked(NetworkOptions)
    adapter = options.adapter
    adapters = [adapter] if isinstance(adapter, str) or callable(adapter) else adapter
    weights = None if options.weights is None else local_checkpoint(options.weights)
    return load_factory(str(source), config, weights, request.example, adapters)


def _refuses(source: str, request: LoadRequest) -> None:
    options = request.asked(NetworkOptions)
    if names_code(source):
        return
    if options.weights is not None:
        raise UsageError(
            f"--weights goes with package.module:factory, and {source} is a checkpoint already",
            hint="leave --weights out",
        )
    if options.adapter:
        raise UsageError(
            f"--adapter says what the layers of a network are, and {source} holds weights alone",
            hint=f"give the network: package.module:factory --weights {source}",
        )


FACTORY = ModelLoader("factory", _finds, _loads, refuses=_refuses)
