"""Reads the arrays of a JAX model from Orbax folders; needs only `tensorstore`.

A state has a folder for each array (`params.Encoder.encoder_norm.bias/.zarray`), or the same tree
in a database (`manifest.ocdbt`). JAX and Orbax are not needed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.files import Reading, Watched, allowed_bytes
from ...common.libraries import library
from ...errors import CheckpointError, install
from ...exporter.checkpoints.floats import uninitialised

PARAMS = "params."
MANIFEST, ZARRAY, METADATA = "manifest.ocdbt", ".zarray", "_METADATA"
FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, slots=True)
class OrbaxState:
    """The parameters in one state: open arrays of `tensorstore` by key, not yet read."""

    folder: Path
    files: tuple[Path, ...]
    opened: dict[str, Any]
    note: str

    def zeros(self) -> dict[str, Tensor]:
        """Returns a tensor of each array's shape that occupies no memory."""
        return {
            key: torch.zeros(()).expand(tuple(array.shape)) for key, array in self.opened.items()
        }

    def read(self, watched: Watched | None) -> tuple[dict[str, Tensor], Path | None]:
        """Returns the arrays as float32, and the temporary file they are mapped from, if any.

        Raises CheckpointError for an array that cannot be read.
        """
        tensors, place = uninitialised(
            {key: tuple(tensor.shape) for key, tensor in self.opened.items()}
        )
        reading = Reading(() if place is None else (place,), watched)
        for key, array in self.opened.items():
            try:
                values = array.read().result()
            except ValueError as error:
                raise _damaged(self.folder, key, error) from error
            tensors[key].numpy()[...] = values
            reading.advance(values.nbytes + tensors[key].nbytes)
        reading.end()
        return tensors, place


def state_in(folder: Path) -> Path | None:
    """Returns the state in a folder: the folder itself, a step's `state`, or its only step's.

    Returns None for other paths. Raises CheckpointError if there are several steps.
    """
    if not folder.is_dir():
        return None
    for place in (folder, folder / "state"):
        if (place / MANIFEST).is_file() or next(place.glob(f"*/{ZARRAY}"), None) is not None:
            return place
    steps = [step for step in sorted(folder.iterdir()) if step.name.isdigit() and step.is_dir()]
    candidates = [step for step in steps if (step / "state").is_dir()]
    if len(candidates) > 1:
        raise CheckpointError(
            f"{folder}: {len(candidates)} steps could be the weights "
            f"({', '.join(step.name for step in candidates[:6])})",
            hint=f"give the folder of one: {candidates[-1]}",
        )
    return state_in(candidates[0]) if candidates else None


def read_state(folder: Path) -> OrbaxState:
    """Opens the arrays of a state; raises CheckpointError if they are not parameters.

    Raises MissingExtraError without `tensorstore`.
    """
    what = f"{folder}: reading a folder of Orbax needs tensorstore"
    tensorstore = library("tensorstore", what, install("orbax"))
    place = f"file://{folder.resolve()}/"
    database = (folder / MANIFEST).is_file()
    store = {"driver": "ocdbt", "base": place} if database else place
    try:
        names = [name.decode() for name in tensorstore.KvStore.open(store).result().list().result()]
    except ValueError as error:
        raise _damaged(folder, MANIFEST, error) from error
    keys = sorted(name.removesuffix(f"/{ZARRAY}") for name in names if name.endswith(f"/{ZARRAY}"))
    wanted = [key for key in keys if key.startswith(PARAMS)] or keys
    if not wanted:
        raise CheckpointError(f"{folder} contains no arrays", hint="give the folder of one step")
    files = tuple(sorted(file for file in folder.rglob("*") if file.is_file()))
    size = sum(file.stat().st_size for file in files)
    whole = _writes_zeros(folder)
    opened, declared = {}, 0
    for key in wanted:
        inside: Any = (
            {**store, "path": f"{key}/"}
            if isinstance(store, dict)
            else {"driver": "file", "path": f"{folder.resolve()}/{key}/"}
        )
        try:
            array = tensorstore.open(
                # A missing chunk is all zeros, unless the writer also stores zeros.
                {"driver": "zarr", "kvstore": inside, "fill_missing_data_reads": not whole},
                open=True,
                read=True,
            ).result()
        except ValueError as error:
            raise _damaged(folder, key, error) from error
        chunk = math.prod(size or 0 for size in array.chunk_layout.read_chunk.shape or ())
        numbers = math.prod(array.shape)
        if array.dtype.name not in FLOATS:
            raise CheckpointError(f"{folder}: {key} has dtype {array.dtype.name}, expected a float")
        declared += max(numbers, chunk) * array.dtype.numpy_dtype.itemsize
        if declared > allowed_bytes(size):
            raise CheckpointError(
                f"{folder}: its arrays up to {key} of shape {list(array.shape)} have {declared} "
                f"bytes, in files of {size}"
            )
        opened[key.removeprefix(PARAMS)] = array
    numbers = sum(math.prod(array.shape) for array in opened.values())
    types = ", ".join(sorted({array.dtype.name for array in opened.values()}))
    step = next((path.name for path in (folder, folder.parent) if path.name.isdigit()), None)
    note = (
        "Orbax checkpoint: "
        + (f"step {step}, " if step else "")
        + f"{len(opened)} of {len(keys)} arrays are the network's, with {numbers} numbers as "
        + f"{types}, in {'a database' if database else 'a folder each'}"
    )
    return OrbaxState(folder, files, opened, note)


def _writes_zeros(folder: Path) -> bool:
    """Whether a state's metadata declares that chunks of zeros were stored as well."""
    try:
        with (folder / METADATA).open("rb") as file:
            content = json.loads(file.read(64 << 20))
        return content.get("store_array_data_equal_to_fill_value") is True
    except (OSError, ValueError, RecursionError, AttributeError):
        return False


def _damaged(folder: Path, key: str, error: ValueError) -> CheckpointError:
    said = str(error).partition(" [tensorstore_spec")[0].replace("\n", " ")[:200]
    return CheckpointError(
        f"{folder}: {key} cannot be read ({said})", hint="copy the folder again: a part is missing"
    )
