"""Networks of a user's own as models: the record by which the core finds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...exporter.checkpoints.files import local_checkpoint
from ...exporter.checkpoints.loaders import ModelLoader
from ...exporter.model import Model
from ...exporter.requests import LoadRequest
from .network import FAMILY, load_factory

API = 1


def _finds(source: str | Path) -> str | None:
    return FAMILY if isinstance(source, str) else None


def _loads(source: str | Path, config: Mapping[str, Any], request: LoadRequest) -> Model:
    if request.family is not None:
        raise UsageError(
            f"--family {request.family}: a factory's layers are found by their structure",
            hint="leave --family out",
        )
    adapter = request.adapter
    adapters = [adapter] if isinstance(adapter, str) or callable(adapter) else adapter
    weights = None if request.weights is None else local_checkpoint(request.weights)
    return load_factory(str(source), config, weights, request.example, adapters)


FACTORY = ModelLoader("factory", _finds, _loads)
