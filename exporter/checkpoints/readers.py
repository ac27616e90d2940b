"""The registry of readers, for checkpoints that are not files of PyTorch, safetensors or numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ...common.files import Watched
from ...common.registry import Registry


class ForeignArrays(Protocol):
    """Files of another training framework, which together contain its arrays.

    `note` is a sentence that describes them.
    """

    @property
    def files(self) -> tuple[Path, ...]: ...
    @property
    def note(self) -> str: ...

    def zeros(self) -> dict[str, Tensor]:
        """Returns tensors of the correct shapes, without memory."""
        ...

    def read(self, watched: Watched | None) -> tuple[dict[str, Tensor], Path | None]:
        """Returns the arrays as float32, and the temporary file they are mapped from, if any."""
        ...


@dataclass(frozen=True, slots=True)
class Reader:
    """One format of checkpoints.

    `formats` is its name in messages. `finds` returns the checkpoint at a path, a file or folder,
    or None if it has another format; `reads` opens the result. `companions` returns the names of
    the other files that belong to a file, for downloads.
    """

    name: str
    formats: str
    finds: Callable[[Path], Path | None]
    reads: Callable[[Path], ForeignArrays]
    companions: Callable[[Path], Sequence[str]]


READERS = Registry("moexport.readers", Reader)
"""All readers come from plugins."""


def formats() -> list[str]:
    return [reader.formats for reader in READERS]


def found_by_readers(source: Path) -> list[tuple[Reader, Path]]:
    found = ((reader, reader.finds(source)) for reader in READERS)
    return [(reader, path) for reader, path in found if path is not None]
