"""Loads networks of user code as models, and registers this with the core."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.user_code import names_code
from ...errors import UsageError
from ...exporter.checkpoints.loaders import ModelLoader
from ...exporter.checkpoints.weight_files import local_checkpoint
from ...exporter.model import Model
from ...exporter.requests import LoadRequest
from .network import FAMILY, load_factory, load_module
from .request import NetworkOptions

if TYPE_CHECKING:
    from torch import nn

API = 1


def _load(source: str | Path | nn.Module, config: Mapping[str, Any], request: LoadRequest) -> Model:
    if request.family is not None:
        raise UsageError(
            f"--family {request.family}: a factory's layers are found by their structure",
            hint="leave --family out",
        )
    options = request.asked(NetworkOptions)
    adapter = options.adapter
    adapters = [adapter] if isinstance(adapter, str) or callable(adapter) else adapter
    weights = None if options.weights is None else local_checkpoint(options.weights)
    if not isinstance(source, str | Path):
        return load_module(source, config, weights, request.example, adapters)
    return load_factory(str(source), config, weights, request.example, adapters)


def _check_options(source: str, request: LoadRequest) -> None:
    options = request.asked(NetworkOptions)
    if names_code(source):
        return
    if options.weights is not None:
        raise UsageError(
            f"--weights needs a package.module:factory, but {source} is already a checkpoint",
            hint="leave --weights out",
        )
    if options.adapter:
        raise UsageError(
            f"--adapter describes the layers of a network, but {source} contains only weights",
            hint=f"pass the network: package.module:factory --weights {source}",
        )


FACTORY = ModelLoader(
    "factory",
    lambda source: FAMILY if isinstance(source, str) else None,
    _load,
    refuses=_check_options,
    finds_module=lambda _: FAMILY,  # its layers are found when it is loaded
)
