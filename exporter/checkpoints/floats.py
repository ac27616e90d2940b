"""Converts weights to float32; large ones go to a temporary file, which is memory-mapped."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...common.files import Reading, Watched
from ...common.writing import scratch_file

IN_MEMORY_BYTES = 64 << 20
"""Weights up to this size as float32 are converted in memory."""

ALIGNMENT = 16
"""Tensors in the file are aligned to this many numbers, a cache line."""


def uninitialised(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], Path | None]:
    """Returns uninitialised float32 tensors of these shapes, and the file they are mapped from.

    The file is an unlinked temporary one, which disappears with the last tensor or the process. If
    the tensors are small, the disk is full or the system has no such files, it is None and the
    tensors are in memory.
    """
    sizes = {key: int(np.prod(shape, dtype=np.int64)) for key, shape in shapes.items()}
    starts, size = {}, 0
    # Small tensors are adjacent: systems map 2 MB around each touched page, so reading the biases
    # of experts would otherwise map all weights between them again.
    for key in sorted(sizes, key=lambda key: sizes[key]):
        starts[key] = size
        size += -(-sizes[key] // ALIGNMENT) * ALIGNMENT
    mapped = _temporary(size) if 4 * size > IN_MEMORY_BYTES else None
    if mapped is None:
        return {key: torch.empty(shape) for key, shape in shapes.items()}, None
    numbers, file = mapped
    return {
        key: numbers[starts[key] : starts[key] + sizes[key]].view(shape)
        for key, shape in shapes.items()
    }, file


def upcast(
    tensors: Mapping[str, Tensor], files: Iterable[Path], watched: Watched | None = None
) -> tuple[dict[str, Tensor], Path | None]:
    """Returns tensors as float32, and the temporary file that they are mapped from, if any.

    `files` are the mapped sources, whose pages are released while they are read; a `watched` one
    must not be truncated meanwhile.
    """
    floats, file = uninitialised({key: tuple(tensor.shape) for key, tensor in tensors.items()})
    if file is None:
        return {key: tensor.float() for key, tensor in tensors.items()}, None
    reading = Reading((*files, file), watched)
    for key, tensor in tensors.items():
        floats[key].copy_(tensor)
        reading.advance(tensor.nbytes + floats[key].nbytes)
    reading.end()
    return floats, file


def _temporary(size: int) -> tuple[Tensor, Path] | None:
    """Returns `size` numbers in an unlinked temporary file and its former path; None on failure."""
    if not hasattr(os, "posix_fallocate"):
        return None
    try:
        with scratch_file("float32") as path, path.open("r+b") as file:
            # Reserves the space, so that no write finds the disk full.
            os.posix_fallocate(file.fileno(), 0, 4 * size)
            numbers = np.memmap(file, dtype=np.float32, mode="r+", shape=(size,))
    except OSError:
        return None
    return torch.from_numpy(numbers), path
