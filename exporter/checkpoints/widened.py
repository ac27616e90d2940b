"""Weights as float32 where a checkpoint has another type, without a copy of it in memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from torch import Tensor

from ...common.files import Reading

IN_MEMORY_BYTES = 64 << 20
"""Weights that take no more as float32 are converted in memory."""

ALIGNMENT = 16
"""Tensors in the file begin at multiples of so many numbers: a line of the processor's cache."""


def widened(
    tensors: Mapping[str, Tensor], files: Iterable[Path]
) -> tuple[dict[str, Tensor], Path | None]:
    """Returns tensors as float32, and the temporary file that they are mapped from, if any.

    That file has no name any more: it goes with the last of the tensors, or with the process. Where
    there is no room for it, or the system has no such files, they are converted in memory. `files`
    are what the given tensors are mapped from, whose pages are dropped as they are read.
    """
    starts, size = {}, 0
    # The small ones together: systems map 2 MB around whatever is touched, and who looks at the
    # biases of experts would have all of the weights between them in memory again.
    for key, tensor in sorted(tensors.items(), key=lambda item: item[1].numel()):
        starts[key] = size
        size += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
    mapped = _temporary(size) if 4 * size > IN_MEMORY_BYTES else None
    if mapped is None:
        return {key: tensor.float() for key, tensor in tensors.items()}, None
    numbers, place = mapped
    reading, found = Reading((*files, place)), {}
    for key, tensor in tensors.items():
        start = starts[key]
        found[key] = numbers[start : start + tensor.numel()].view(tensor.shape)
        found[key].copy_(tensor)
        reading.advance(tensor.nbytes + found[key].nbytes)
    reading.end()
    return found, place


def _temporary(size: int) -> tuple[Tensor, Path] | None:
    """So many numbers in a file that has no name any more, and the one it had; None without one."""
    if not hasattr(os, "posix_fallocate"):
        return None
    try:
        with NamedTemporaryFile(prefix="moexport-float32-") as file:
            os.posix_fallocate(file.fileno(), 0, 4 * size)  # so that no write finds the disk full
            numbers = np.memmap(file, dtype=np.float32, mode="r+", shape=(size,))
    except OSError:
        return None
    return torch.from_numpy(numbers), Path(file.name)
