"""Weights as float32: many of them lie in a temporary file, mapped as a checkpoint's own are."""

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
"""Weights that take no more as float32 are converted in memory."""

ALIGNMENT = 16
"""Tensors in the file begin at multiples of so many numbers: a line of the processor's cache."""


def unset(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], Path | None]:
    """Returns float32 tensors of these shapes, to be filled, and the file they are mapped from.

    That file is a temporary one and has no name any more: it goes with the last of the tensors, or
    with the process. It is None where they are small, where there is no room for it, or the system
    has no such files: they are in memory then.
    """
    sizes = {key: int(np.prod(shape, dtype=np.int64)) for key, shape in shapes.items()}
    starts, size = {}, 0
    # The small ones together: systems map 2 MB around whatever is touched, and who looks at the
    # biases of experts would have all of the weights between them in memory again.
    for key in sorted(sizes, key=lambda key: sizes[key]):
        starts[key] = size
        size += -(-sizes[key] // ALIGNMENT) * ALIGNMENT
    mapped = _temporary(size) if 4 * size > IN_MEMORY_BYTES else None
    if mapped is None:
        return {key: torch.empty(shape) for key, shape in shapes.items()}, None
    numbers, place = mapped
    return {
        key: numbers[starts[key] : starts[key] + sizes[key]].view(shape)
        for key, shape in shapes.items()
    }, place


def upcast(
    tensors: Mapping[str, Tensor], files: Iterable[Path], watched: Watched | None = None
) -> tuple[dict[str, Tensor], Path | None]:
    """Returns tensors as float32, and the temporary file that they are mapped from, if any.

    `files` are what the given tensors are mapped from, whose pages are dropped as they are read,
    and `watched` which of them must not be cut short meanwhile.
    """
    floats, place = unset({key: tuple(tensor.shape) for key, tensor in tensors.items()})
    if place is None:
        return {key: tensor.float() for key, tensor in tensors.items()}, None
    reading = Reading((*files, place), watched)
    for key, tensor in tensors.items():
        floats[key].copy_(tensor)
        reading.advance(tensor.nbytes + floats[key].nbytes)
    reading.end()
    return floats, place


def _temporary(size: int) -> tuple[Tensor, Path] | None:
    """So many numbers in a file that has no name any more, and the one it had; None without one."""
    if not hasattr(os, "posix_fallocate"):
        return None
    try:
        with scratch_file("float32") as path, path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, 4 * size)  # so that no write finds the disk full
            numbers = np.memmap(file, dtype=np.float32, mode="r+", shape=(size,))
    except OSError:
        return None
    return torch.from_numpy(numbers), path
