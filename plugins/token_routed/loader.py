"""Registers the loader of `transformers` folders with the core."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...exporter.checkpoints.loaders import ModelLoader
from ...exporter.model import Model
from ...exporter.requests import LoadRequest
from .load import SETTINGS, architecture_of, load_transformers

API = 1


def _architecture(source: str | Path) -> str | None:
    return None if isinstance(source, str) else architecture_of(source)


def _load(source: str | Path, config: Mapping[str, Any], request: LoadRequest) -> Model:
    return load_transformers(Path(source), config, values=request.values)


TRANSFORMERS = ModelLoader("transformers", _architecture, _load, settings=SETTINGS)
