"""Labelled data from where a user names them: a file, a folder of images, or code."""

from __future__ import annotations

from pathlib import Path

from ..exporter.model import TensorSpec
from .data import Labelled, load_labelled


def open_labelled(where: str, spec: TensorSpec) -> Labelled:
    """Returns the labelled data that `where` names, for a model that takes `spec`."""
    return load_labelled(Path(where), input_name=spec.name)
