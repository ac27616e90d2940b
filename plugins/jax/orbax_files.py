"""Reads the arrays of a JAX model from Orbax folders with `tensorstore`, without JAX and Orbax.

A state has a folder for each array (`params.Encoder.encoder_norm.bias/.zarray`), or a database with
the same tree (`manifest.ocdbt`).
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
    """The parameters in a state: open arrays of `tensorstore` by key, which are not yet read."""

    folder: Path
    files: tuple[Path, ...]
    arrays: dict[str, Any]
    note: str

    def zeros(self) -> dict[str, Tensor]:
        """Returns a tensor of each array's shape that occupies no memory."""
        return {
            key: torch.zeros(()).expand(tuple(array.shape)) for key, array in self.arrays.items()
        }

    def read(self, watched: Watched | None) -> tuple[dict[str, Tensor], Path | None]:
        """Returns the arrays as float32, and the temporary file they are mapped from, if any.

        Raises CheckpointError for an array that cannot be read.
        """
        tensors, base = uninitialised(
            {key: tuple(tensor.shape) for key, tensor in self.arrays.items()}
        )
        reading = Reading(() if base is None else (base,), watched)
        for key, array in self.arrays.items():
            try:
                values = array.read().result()
            except ValueError as error:
                raise _damaged(self.folder, key, error) from error
            tensors[key].numpy()[...] = values
            reading.advance(values.nbytes + tensors[key].nbytes)
        reading.end()
        return tensors, base


def state_in(folder: Path) -> Path | None:
    """Returns the folder of the state: `folder` itself, its `state`, or that of its only step.

    Returns None for other paths. Raises CheckpointError if there are several steps.
    """
    if not folder.is_dir():
        return None
    for base in (folder, folder / "state"):
        if (base / MANIFEST).is_file() or next(base.glob(f"*/{ZARRAY}"), None) is not None:
            return base
    steps = [step for step in sorted(folder.iterdir()) if step.name.isdigit() and step.is_dir()]
    candidates = [step for step in steps if (step / "state").is_dir()]
    if len(candidates) > 1:
        raise CheckpointError(
            f"{folder}: {len(candidates)} steps could be the weights "
            f"({', '.join(step.name for step in candidates[:6])})",
            hint=f"pass the folder of one step: {candidates[-1]}",
        )
    return state_in(candidates[0]) if candidates else None


def read_state(folder: Path) -> OrbaxState:
    """Opens the arrays of a state; raises CheckpointError if they are not parameters.

    Raises MissingExtraError without `tensorstore`.
    """
    what = f"{folder}: reading an Orbax folder needs tensorstore"
    tensorstore = library("tensorstore", what, install("orbax"))
    base = f"file://{folder.resolve()}/"
    database = (folder / MANIFEST).is_file()
    store = {"driver": "ocdbt", "base": base} if database else base
    try:
        names = [name.decode() for name in tensorstore.KvStore.open(store).result().list().result()]
    except ValueError as error:
        raise _damaged(folder, MANIFEST, error) from error
    keys = sorted(name.removesuffix(f"/{ZARRAY}") for name in names if name.endswith(f"/{ZARRAY}"))
    selected = [key for key in keys if key.startswith(PARAMS)] or keys
    if not selected:
        raise CheckpointError(f"{folder} contains no arrays", hint="pass the folder of one step")
    files = tuple(sorted(file for file in folder.rglob("*") if file.is_file()))
    size = sum(file.stat().st_size for file in files)
    complete = _stores_zeros(folder)
    arrays, declared = {}, 0
    for key in selected:
        kvstore: Any = (
            {**store, "path": f"{key}/"}
            if isinstance(store, dict)
            else {"driver": "file", "path": f"{folder.resolve()}/{key}/"}
        )
        try:
            array = tensorstore.open(
                # A missing chunk is all zeros, unless the writer also stores chunks of zeros.
                {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": not complete},
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
                f"{folder}: its arrays up to {key} of shape {list(array.shape)} declare {declared} "
                f"bytes, but its files have only {size}"
            )
        arrays[key.removeprefix(PARAMS)] = array
    numbers = sum(math.prod(array.shape) for array in arrays.values())
    types = ", ".join(sorted({array.dtype.name for array in arrays.values()}))
    step = next((path.name for path in (folder, folder.parent) if path.name.isdigit()), None)
    note = (
        "Orbax checkpoint: "
        + (f"step {step}, " if step else "")
        + f"{len(arrays)} of {len(keys)} arrays are the network's, with {numbers} numbers as "
        + f"{types}, in {'a database' if database else 'one folder each'}"
    )
    return OrbaxState(folder, files, arrays, note)


def _stores_zeros(folder: Path) -> bool:
    """Returns whether a state's metadata declares that chunks of zeros were also stored."""
    try:
        with (folder / METADATA).open("rb") as file:
            content = json.loads(file.read(64 << 20))
        return content.get("store_array_data_equal_to_fill_value") is True
    except (OSError, ValueError, RecursionError, AttributeError):
        return False


def _damaged(folder: Path, key: str, error: ValueError) -> CheckpointError:
    reason = str(error).partition(" [tensorstore_spec")[0].replace("\n", " ")[:200]
    return CheckpointError(
        f"{folder}: {key} cannot be read ({reason})", hint="copy the folder again, in full"
    )
