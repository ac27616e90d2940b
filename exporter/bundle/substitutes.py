"""`substitutes.safetensors`: arrays that replace experts, in a recipe's folder or a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from ...errors import BundleError
from ...graphs.edits import Edits

SUBSTITUTES_FILE = "substitutes.safetensors"


def substitutes_bytes(edits: Edits) -> bytes:
    """Returns the bytes of a file of the arrays that replace experts; empty if there are none."""
    return save(edits.substitutes) if edits.substitutes else b""


def read_substitutes(folder: Path) -> Mapping[str, np.ndarray]:
    """Reads a folder's arrays that replace experts; empty if it has no such file.

    Raises `BundleError` for a damaged file.
    """
    path = folder / SUBSTITUTES_FILE
    if not path.is_file():
        return {}
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
        raise BundleError(
            f"{path}: cannot be read ({error})", hint="copy it from the bundle again"
        ) from error
