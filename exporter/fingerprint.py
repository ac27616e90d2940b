"""A hash of a model: the same for the same weights and configuration, whatever file they are in."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from ..common.files import Reading
from .model import Model


def fingerprint(model: Model) -> str:
    """Returns the SHA-256 of a model's family, configuration, edits and every weight."""
    digest, reading = hashlib.sha256(), Reading(model.source.mapped)
    known = {"family": model.family, "config": model.config, "edits": model.edits.texts()}
    digest.update(json.dumps(known, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # Row by row: a transposed view of a checkpoint would be copied whole otherwise.
        for part in tensor if tensor.ndim > 2 else (tensor,):
            digest.update(np.ascontiguousarray(part.numpy()).data)
            reading.advance(part.nbytes)
    reading.end()
    return digest.hexdigest()
