"""The door for formats of checkpoints that are no file of PyTorch, safetensors or numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ...common.files import Watched
from ...common.registry import Registry


class ForeignArrays(Protocol):
    """Files of another training code, which together hold its arrays.

    `note` is a sentence on what they are.
    """

    @property
    def files(self) -> tuple[Path, ...]: ...
    @property
    def note(self) -> str: ...

    def zeros(self) -> dict[str, Tensor]:
        """Tensors of the right shapes, which take no memory."""
        ...

    def read(self, watched: Watched | None) -> tuple[dict[str, Tensor], Path | None]:
        """The arrays as float32, and the temporary file they are mapped from, if any."""
        ...


@dataclass(frozen=True, slots=True)
class Reader:
    """One format of checkpoints.

    `formats` is what messages call it. `finds` returns the checkpoint that a path means, a file or
    a folder, or None where it is none of this format; `reads` opens what was found. `beside` are
    the names of the files that belong to a file, for one that is downloaded.
    """

    name: str
    formats: str
    finds: Callable[[Path], Path | None]
    reads: Callable[[Path], ForeignArrays]
    beside: Callable[[Path], Sequence[str]]


READERS = Registry("moexport.readers", Reader)
"""All are plugins'."""


def formats() -> list[str]:
    """Returns what messages call the formats of all readers."""
    return [reader.formats for reader in READERS]


def found_by_readers(source: Path) -> list[tuple[Reader, Path]]:
    """Returns what readers find at a path, with the reader of each."""
    found = ((reader, reader.finds(source)) for reader in READERS)
    return [(reader, place) for reader, place in found if place is not None]
